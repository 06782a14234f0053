"""Single-loop activation and readouts, against the golden oracle; labels, against the trainer's own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import golden_adapted, tiny_ouro
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.data.templates import chat_template
from loopdropout_trainer.diagnostics import labelled_batches, readout_losses, single_loop_activation
from loopdropout_trainer.diagnostics.rows import label
from loopdropout_trainer.evaluation import load_benchmark


@pytest.fixture
def batches(ouro):
    """The oracle's examples, one in each batch: the mean over batches must weigh them by their tokens."""
    inputs = {name: ouro.tensors[f"oracle/left/{name}"] for name in ("input_ids", "attention_mask", "labels")}
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(inputs["input_ids"]))
    ]


def token_mean(ouro, losses):
    """Mean over all target tokens of per-example losses [..., B]."""
    tokens = ouro.tensors["oracle/example_tokens"].double()
    return ((losses.double() * tokens).sum(dim=-1) / tokens.sum()).tolist()


def test_single_loop_activation_is_the_oracles(ouro, batches):
    model = golden_adapted(ouro).train()
    measured = single_loop_activation(model, batches)
    want = ouro.tensors
    assert measured.frozen == pytest.approx(token_mean(ouro, want["oracle/zero_gate/example_loss"]), abs=2e-5)
    assert measured.all_on == pytest.approx(token_mean(ouro, want["oracle/unit_gate/example_loss"]), abs=2e-5)
    only = token_mean(ouro, want["oracle/single_loop/example_loss"])
    assert measured.only == pytest.approx(only, abs=2e-5)
    rho = [100 * (measured.frozen - loss) / measured.frozen for loss in only]
    assert measured.reductions == pytest.approx(rho, abs=2e-3)
    assert model.training


def test_readout_losses_are_the_oracles(ouro, batches):
    losses = readout_losses(golden_adapted(ouro), batches)
    assert losses == pytest.approx(token_mean(ouro, ouro.tensors["oracle/unit_gate/readout_loss"]), abs=2e-5)


def test_of_two_adapters_in_one_model_the_active_one_is_measured(ouro, batches):
    model = golden_adapted(ouro)
    model.add_adapter("other", LoraConfig(r=2, target_modules=ouro.meta["lora"]["modules"], task_type="CAUSAL_LM"))
    first = single_loop_activation(model, batches)
    model.set_adapter("other")  # which changes nothing yet
    other = single_loop_activation(model, batches)
    assert other.only == pytest.approx((other.frozen,) * len(other.only))
    model.set_adapter("default")
    assert single_loop_activation(model, batches) == first != other


def test_batches_without_targets_are_refused(ouro, batches):
    for batch in batches:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    for measure in (single_loop_activation, readout_losses):
        for given in (batches, []):
            with pytest.raises(ValueError, match="no target token"):
                measure(golden_adapted(ouro), given)


@pytest.fixture(scope="module")
def merging_tokenizer():
    """A token for each byte, and one for the end of "Answer:" with the space that begins its answer."""
    pieces = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), ":Ġ"]
    backend = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, [(":", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=chat_template("tulu2")
    )


TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
FORMATS = {
    "prompt and completion": [{"prompt": f"{i}+{i}? Answer:", "completion": f" {2 * i}"} for i in range(3)],
    "text": [{"text": f"{i} and {i}"} for i in range(3)],
    "messages": [{"messages": TURNS}, {"messages": TURNS + TURNS}],
    "prompt and completion as messages": [{"prompt": TURNS[:1], "completion": TURNS[1:]}] * 2,
}


@pytest.mark.parametrize("losses", [{}, {"assistant_only_loss": True}, {"completion_only_loss": False}])
@pytest.mark.parametrize("form", FORMATS)
def test_labels_are_the_trainers(form, losses, merging_tokenizer, config):
    rows = FORMATS[form]
    if losses and form == "text" or losses == {"assistant_only_loss": True} and form == "prompt and completion":
        pytest.skip("TRL refuses it, or it means nothing")
    trainer = LoopDropoutSFTTrainer(
        tiny_ouro(vocab_size=259),
        config(**losses),
        train_dataset=Dataset.from_list(rows),
        processing_class=merging_tokenizer,
    )
    for mine, row in zip(label(rows, merging_tokenizer, **losses), trainer.train_dataset, strict=True):
        batch = trainer.data_collator([row])
        assert mine["input_ids"] == batch["input_ids"][0].tolist()
        assert mine["labels"] == batch["labels"][0].tolist()
    if form == "prompt and completion":  # as one text, the prompt's end would have merged into the first target
        assert 258 in merging_tokenizer(rows[0]["prompt"] + rows[0]["completion"])["input_ids"]
        assert 258 not in mine["input_ids"]


def test_a_benchmark_becomes_labelled_batches(merging_tokenizer):
    benchmark = load_benchmark("arithmetic_test", limit=5)
    batches = labelled_batches(benchmark, merging_tokenizer, batch_size=2)
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    texts = [merging_tokenizer.decode(row[row != -100]) for batch in batches for row in batch["labels"]]
    assert texts == [f" {reference}<eos>" for reference in benchmark.references]
    model = tiny_ouro(vocab_size=259).eval()
    rows = [{"prompt": p, "completion": f" {r}"} for p, r in zip(benchmark.prompts, benchmark.references, strict=True)]
    one_by_one = labelled_batches(rows, merging_tokenizer, batch_size=1)
    assert readout_losses(model, batches) == pytest.approx(readout_losses(model, one_by_one), abs=1e-5)


SHARES = """
    import json, sys
    import torch
    from accelerate import PartialState
    from conftest import GOLDEN, golden_adapted
    from safetensors.torch import load_file
    from types import SimpleNamespace
    from loopdropout_trainer.diagnostics import readout_losses, single_loop_activation

    state = PartialState(cpu=True)
    meta = {**json.loads((GOLDEN / "ouro.json").read_text()), "name": "ouro"}
    ouro = SimpleNamespace(meta=meta, tensors=load_file(GOLDEN / "ouro.safetensors"))
    inputs = {name: ouro.tensors[f"oracle/left/{name}"] for name in ("input_ids", "attention_mask", "labels")}
    rows = range(state.process_index, len(inputs["labels"]), state.num_processes)  # the last process may have fewer
    batches = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in rows]
    model = golden_adapted(ouro)
    found = single_loop_activation(model, batches, over_processes=True)
    losses = [found.frozen, *found.only, found.all_on, *readout_losses(model, batches, over_processes=True)]
    print("FOUND", state.process_index, json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_means_are_over_the_tokens_of_all_processes(ouro, batches, processes, tmp_path):
    model = golden_adapted(ouro)
    alone = single_loop_activation(model, batches)
    want = [alone.frozen, *alone.only, alone.all_on, *readout_losses(model, batches)]
    (tmp_path / "shares.py").write_text(textwrap.dedent(SHARES))
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    text = subprocess.run(
        [*command, tmp_path / "shares.py"], check=True, capture_output=True, text=True, env=environment
    )
    lines = [line.split(" ", 2) for line in text.stdout.splitlines() if line.startswith("FOUND")]
    assert sorted(int(process) for _, process, _ in lines) == list(range(processes))
    for _, _, losses in lines:
        assert json.loads(losses) == pytest.approx(want, abs=1e-6)
