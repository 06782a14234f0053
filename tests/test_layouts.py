"""The same run in any layout: processes, accumulation, packing, checkpointing and resume change no gate and no weight."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from conftest import tiny_ouro
from packaging.version import Version
from tokenizers import pre_tokenizers

from loopdropout_trainer import LoopDropoutSFTTrainer, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.models import OuroForCausalLM
from loopdropout_trainer.training.distributed import CHECKPOINTING_FIELDS, check_packed_batch, check_processes


spec = importlib.util.spec_from_file_location("layouts", Path(__file__).parents[1] / "benchmarks" / "layouts.py")
layouts = sys.modules["layouts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layouts)

TOLERANCE = 2e-4  # of the largest weight; other gates give 1


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All runs in this process with batch 8."""
    folder = tmp_path_factory.mktemp("reference")
    runs = {}
    layouts.save_model(folder / "model")
    for name in layouts.RUNS:
        record = layouts.train(folder, name, per_device_train_batch_size=8)
        runs[name] = layouts.Run([record], layouts._adapter(folder / name))
    return runs


def check(runs, reference, layout):
    for name, run in runs.items():
        for record in run.records:
            assert (record["distributed_type"], record["world_size"]) == (layout.distributed_type, layout.processes)
            assert record["losses"] == pytest.approx(reference[name].records[0]["losses"], rel=1e-4)
        assert run.gates == reference[name].gates, name
        assert run.distance(reference[name]) < TOLERANCE, name
        assert {tensor.dtype for tensor in run.adapter.values()} == {torch.float32}
    if "resuming" in runs:
        assert {record["first_step"] for record in runs["resuming"].records} == {2}
        assert len(runs["resuming"].records[0]["losses"]) == 2 + 2  # the log goes on


def test_in_one_process_every_promise_holds(reference):
    plain = reference["plain"]
    assert len(plain.gates) == 32 and len(plain.records[0]["losses"]) == 4
    for name in ("checkpointing", "reentrant asked for", "saving", "resuming"):
        assert reference[name].distance(plain) == 0, name
    assert reference["packing"].distance(plain) > 100 * TOLERANCE, "packed rows are other batches"


def test_two_processes_and_accumulation_train_as_one_process_does(reference, tmp_path):
    all_runs = list(layouts.RUNS)
    if Version(torch.__version__) < Version("2.13"):
        # Older torch loads no optimizer state onto `cpu:0`, as transformers calls the CPU of a DDP process.
        all_runs.remove("resuming")
    for name, runs in (("one process, accumulation 2x4", ["plain", "packing"]), ("ddp, accumulation", all_runs)):
        layout = layouts.LAYOUTS[name]
        check(layouts.launch(layout, tmp_path / "run", runs), reference, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", "ddp, four processes", "fsdp2", "zero2", "zero3", "zero2_offload", "zero3_offload"]
)
def test_every_launch_file_trains_as_one_process_does(reference, tmp_path, name):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    layout = layouts.LAYOUTS[name]
    check(layouts.launch(layout, tmp_path / "run", timeout=600), reference, layout)


@pytest.mark.parametrize(
    "processes, batch, accumulation",
    [
        (2, 4, 1),
        pytest.param(2, 2, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, 4, marks=pytest.mark.slow),
        pytest.param(3, 2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_an_uneven_last_batch_is_that_of_one_process(tmp_path, processes, batch, accumulation):
    """No example is trained twice: neither when the last process has a shorter batch, nor when it has none."""
    rows, runs = processes * batch * accumulation, list(layouts.UNEVEN)
    layouts.save_model(tmp_path / "model")
    alone = {}
    for name in runs:
        record = layouts.train(tmp_path, name, per_device_train_batch_size=rows, optim="sgd", learning_rate=0.1)
        alone[name] = layouts.Run([record], layouts._adapter(tmp_path / name))
    layout = layouts.Layout("ddp", processes, batch, accumulation)
    for name, run in layouts.launch(layout, tmp_path / "run", runs, optim="sgd", learning_rate=0.1).items():
        assert run.records[0]["losses"] == pytest.approx(alone[name].records[0]["losses"], rel=1e-5), name
        for weight, tensor in alone[name].adapter.items():
            torch.testing.assert_close(run.adapter[weight], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_evaluation_loss_is_the_mean_over_tokens_on_any_layout(tmp_path, processes):
    """Seven rows: with two and three processes some are repeated, and must not be counted twice."""
    layouts.save_model(tmp_path / "model")
    model = OuroForCausalLM.from_pretrained(tmp_path / "model").eval()
    losses = []
    for row in layouts.examples().select(range(100, 107)):
        prompt, completion = ([2 + byte for byte in _bytes(row[part])] for part in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *completion, 0]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        losses.append(-scores[len(prompt) - 1 :])
    expected = torch.cat(losses).mean().item()
    layout = layouts.Layout("ddp" if processes > 1 else None, processes, 2)
    for rows in (1, 2, 3, 4) if processes == 1 else (2,):
        fields = {"per_device_eval_batch_size": rows}
        runs = layouts.launch(layout, tmp_path / f"run{rows}", list(layouts.EVALUATIONS), **fields)
        for name, run in runs.items():
            for record in run.records:
                assert record["eval_loss"] == pytest.approx(expected, abs=2e-6), (name, rows)


def _bytes(text):
    """The numbers of a text's bytes in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) for character in text]


@pytest.fixture(scope="module")
def rules_alone(tmp_path_factory):
    """A run of each kind of rule in one process."""
    return layouts.launch(layouts.LAYOUTS[layouts.REFERENCE], tmp_path_factory.mktemp("rules"), list(layouts.RULES))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, accumulation", "fsdp2", "zero2", "zero3"])
def test_every_kind_of_rule_trains_as_in_one_process(rules_alone, tmp_path, name):
    refused = {"zero2": {"lora_dropout"}, "zero3": {"lora_dropout", "weight_noise"}}.get(name, set())
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    runs = layouts.launch(
        layouts.LAYOUTS[name], tmp_path / "run", [rule for rule in layouts.RULES if rule not in refused], timeout=600
    )
    for rule, run in runs.items():
        alone = rules_alone[rule]
        for record in run.records:
            assert record["losses"] == pytest.approx(alone.records[0]["losses"], rel=1e-4), rule
        assert run.gates.keys() == alone.gates.keys()
        for example, gates in run.gates.items():  # adaptive p follow gradients, which are rounded
            assert torch.allclose(torch.tensor(gates), torch.tensor(alone.gates[example]), rtol=1e-4), rule
        assert run.distance(alone) < TOLERANCE, rule


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2"])
def test_all_processes_killed_resume_to_the_weights_of_an_uninterrupted_run(reference, tmp_path, name):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    layout, folder, fields = layouts.LAYOUTS[name], tmp_path / "run", {"save_steps": 1, "save_total_limit": 2}
    process = layouts.start(layout, folder, ["saving"], **fields)
    for _ in range(3000):
        if process.poll() is not None or (folder / "saving" / "run" / "checkpoint-2").exists():
            break
        time.sleep(0.1)
    time.sleep(0.05)
    layouts.kill(process)
    run = layouts.launch(layout, folder, ["saving"], timeout=600, resume_from_checkpoint="true", **fields)["saving"]
    assert {record["first_step"] for record in run.records} <= {1, 2, 3}
    assert run.distance(reference["saving"]) < TOLERANCE


@pytest.mark.slow
def test_over_a_bfloat16_base_every_layout_trains_and_saves_a_float32_adapter(tmp_path):
    pytest.importorskip("deepspeed")
    runs = {
        name: layouts.launch(layouts.LAYOUTS[name], tmp_path / name, ["plain"], dtype="bfloat16", bf16=True)["plain"]
        for name in ("ddp", "fsdp2", "zero2", "zero3")
    }
    exact = layouts.launch(layouts.LAYOUTS["ddp"], tmp_path / "float32", ["plain"])["plain"]
    for name, run in runs.items():
        assert {tensor.dtype for tensor in run.adapter.values()} == {torch.float32}, name
        rounded = [bool((tensor.bfloat16() == tensor).all()) for tensor in run.adapter.values()]
        assert not all(rounded), name
        assert run.distance(exact) < 0.2, name  # what bfloat16 alone does to Adam's first steps


# --- packing ----------------------------------------------------------------------------------------------------------


class Recorder(LoopDropoutSFTTrainer):
    """Keeps the first micro-batch, its gates, loss and gradients."""

    seen = None

    def training_step(self, model, inputs, *args, **kwargs):
        batch = {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
        drawn = []
        apply = self.loop_state.apply
        self.loop_state.apply = lambda plan: (drawn.append(plan), apply(plan))[1]
        loss = super().training_step(model, inputs, *args, **kwargs)
        del self.loop_state.apply
        if self.seen is None:
            gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}
            gates, segments = next((plan.gates, plan.segments) for plan in drawn if plan.gates is not None)
            self.seen = (batch, gates, segments, loss, gradients)
        return loss


def unpacked(batch, segments):
    """One padded row for each example of a packed row."""
    parts = [
        (batch["input_ids"][segments == i], batch["labels"][segments == i]) for i in range(int(segments.max()) + 1)
    ]
    pad = lambda tensors, value: torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    ids, labels = pad([part[0] for part in parts], 1), pad([part[1] for part in parts], -100)
    mask = pad([torch.ones_like(part[0]) for part in parts], 0)
    return ids, labels, mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "layout",
    [
        {"packing": True, "max_length": 40},
        {"packing": True, "max_length": 40, "gradient_checkpointing": False, "pad_to_multiple_of": 64},
        {"padding_free": True, "max_length": None},
    ],
    ids=["packing", "packing padded to a multiple", "padding-free"],
)
def test_packed_loss_and_gradients_are_those_of_unpacked_rows_under_the_same_gates(
    config, dataset, tokenizer, layout, attention
):
    torch.manual_seed(0)
    args = config(max_steps=1, per_device_train_batch_size=2, **layout)
    trainer = Recorder(
        tiny_ouro(attn_implementation=attention), args, train_dataset=dataset, processing_class=tokenizer
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.05
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    batch, gates, segments, loss, gradients = trainer.seen
    examples = len(gates.T)
    assert segments.max() == examples - 1 and examples >= (4 if args.packing else 2)
    ids_of_examples = batch["example_ids"].tolist()
    torch.testing.assert_close(
        gates,
        LoopDropout(0.5).sample(Draw(seed=args.seed, step=0, example_ids=ids_of_examples, num_loops=4)),
        rtol=0,
        atol=0,
    )
    assert len(set(map(tuple, gates.T.tolist()))) > 1

    ids, labels, mask = unpacked(batch, segments)
    model = trainer.model
    model.zero_grad()
    for name, parameter in model.named_parameters():
        if name in start:
            parameter.data = start[name]
    with use_gates(model, gates):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_packed_rows_that_attention_would_mix_are_refused():
    ids, positions = torch.ones(1, 6, dtype=torch.long), torch.tensor([[0, 1, 2, 0, 1, 2]])
    example_ids = torch.tensor([[0, 0], [0, 1]])
    check_packed_batch({"input_ids": ids, "position_ids": positions}, example_ids)
    check_packed_batch({"input_ids": ids, "position_ids": torch.arange(6)[None], "attention_mask": ids}, None)
    for inputs, given, message in (
        ({"position_ids": positions, "attention_mask": ids}, example_ids, "came with an `attention_mask`"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, example_ids, "without `position_ids`"),
        ({"position_ids": positions}, None, "which gates are theirs is not known"),
        ({"position_ids": positions, "attention_mask": ids}, None, "which gates are theirs is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            check_packed_batch({"input_ids": ids, **inputs}, given)


def test_processes_that_would_share_rows_are_refused(config, dataset, tokenizer):
    args = config()
    args.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match="`parallelism_config.tp_size` above 1"):
        LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)


def test_processes_that_would_train_alone_are_refused(monkeypatch):
    accelerator = Accelerator(cpu=True)
    check_processes(accelerator)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one of 2 launched processes, but it found 1"):
        check_processes(accelerator)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP was asked for, but accelerate runs NO"):
        check_processes(accelerator)


@pytest.mark.parametrize("name", [f"{name}_kwargs" for name in CHECKPOINTING_FIELDS])
@pytest.mark.parametrize(
    "given", [{"use_reentrant": True}, {"use_reentrant": False}, {"preserve_rng_state": False}, None]
)
def test_checkpointing_is_non_reentrant_whatever_was_asked_for_under_either_name(
    config, dataset, tokenizer, name, given
):
    args = config(**{name: given, "max_steps": 1, "gradient_checkpointing": True})
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)
    for field in (f"{name}_kwargs" for name in CHECKPOINTING_FIELDS):
        assert getattr(trainer.args, field) == {**(given or {}), "use_reentrant": False}
    trainer.train()
    layer = trainer.model.get_base_model().model.layers[0]
    assert layer.gradient_checkpointing


def test_every_launch_file_says_when_to_use_it_and_parses():
    files = sorted(layouts.LAUNCH_FILES.glob("*.yaml"))
    assert [file.stem for file in files] == sorted(
        ["one_gpu", "ddp", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2"]
    )
    for file in files:
        first, second = file.read_text().splitlines()[:2]
        assert first.startswith("# ") and f"{file.stem}.yaml" in file.read_text().split("compute_environment")[0]
        assert load_config_from_file(str(file)).num_machines == 1
