"""Several processes, accumulation, packing and sharding train the weights of one process, with the same gates."""

import pytest
import torch
import transformers
from accelerate import Accelerator, ParallelismConfig
from packaging.version import Version
from transformers import DataCollatorForSeq2Seq

from helpers.errors import user_error
from helpers.files import load_script
from helpers.layouts import LAYOUTS, RULES, RUNS, UNEVEN, Layout, alone, launched, start
from helpers.processes import wait_for
from helpers.tiny import randomise, tiny_ouro, trained_parameters
from helpers.trainers import Recorder, example_nll
from loopdropout_trainer import LoopDropoutConfig, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.training.distributed import check_processes


TOLERANCE = 2e-4  # of the largest weight. Other gates give 1.


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All runs in this process with batch 8."""
    return alone(tmp_path_factory.mktemp("reference"), RUNS, per_device_train_batch_size=8)


def check(runs, reference, layout, rel=1e-4, tolerance=TOLERANCE):
    for name, run in runs.items():
        (expected,) = reference[name].records
        for record in run.records:
            assert (record["distributed_type"], record["world_size"]) == (layout.distributed_type, layout.processes)
            for loss in ("losses", "train_loss", "eval_loss", "eval_mean_token_accuracy"):
                assert record[loss] == pytest.approx(expected[loss], rel=rel), (name, loss)
            for count in ("gate_mean", "num_tokens"):
                assert record[count] == pytest.approx(expected[count], rel=1e-6), (name, count)
        assert run.distance(reference[name]) < tolerance, name
        assert {tensor.dtype for tensor in run.adapter.values()} == {torch.float32}


def test_one_process_keeps_weights_in_every_run(reference):
    plain = reference["plain"]
    for name in ("checkpointing", "reentrant asked for", "saving", "resuming"):
        assert reference[name].distance(plain) == 0, name
    assert reference["packing"].distance(plain) > 100 * TOLERANCE, "packed rows are other batches"
    (resumed,) = reference["resuming"].records
    assert resumed["steps"] == 1, "it began again"
    assert resumed["train_loss"] == pytest.approx(sum(plain.records[0]["losses"]) / 3)


@pytest.mark.parametrize("name", ["ddp, accumulation", "zero2", "zero3"])
def test_two_processes_equal_one_process(reference, tmp_path, name):
    names = ["saving", "resuming"]
    if name == "ddp, accumulation":
        names += ["plain", "packing"]
        if Version(transformers.__version__) < Version("5.24"):
            names.remove("resuming")  # the CPU was named `cpu:0`, and torch does not load optimizer states onto it
    runs = launched(LAYOUTS[name], tmp_path / "run", names)
    check(runs, reference, LAYOUTS[name])
    unpickles = "DeepSpeed unpickles the files of " in (tmp_path / "run" / "log.txt").read_text()
    assert unpickles == name.startswith("zero"), "said before a resume"
    share = 0.5 if name == "zero3" else 1.0  # ZeRO-3 shards the frozen weights, too
    assert runs["saving"].records[1]["share_of_weights"] == pytest.approx(share, abs=0.02)


def test_ddp_needs_no_search_for_unused_parameters(tmp_path):
    """Each factor has a gradient, also in a step whose gates are all zero. Else DDP would raise an error."""
    layout, rare = LAYOUTS["ddp, accumulation"], {"p": 0.9}
    runs = launched(layout, tmp_path / "run", ["plain"], ddp_find_unused_parameters=False, **rare)
    assert runs["plain"].records[0]["gate_mean"][0] == 0
    check(runs, alone(tmp_path, ["plain"], per_device_train_batch_size=8, **rare), layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_launch_file_equals_one_process(reference, tmp_path, name):
    check(launched(LAYOUTS[name], tmp_path / "run", fresh=True), reference, LAYOUTS[name])


@pytest.mark.parametrize(
    "processes, batch, accumulation",
    [(2, 2, 1), *(pytest.param(*split, marks=pytest.mark.slow) for split in [(2, 2, 2), (3, 2, 1), (3, 1, 2)])],
)
def test_uneven_last_batch_equals_one_process(tmp_path, processes, batch, accumulation):
    """No example is trained twice if the last process has a shorter batch, or none."""
    rows = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": processes * accumulation}
    layout = Layout("ddp", processes, batch, accumulation)
    runs = launched(layout, tmp_path / "run", list(UNEVEN))
    check(runs, alone(tmp_path, UNEVEN, **rows), layout, rel=1e-5, tolerance=3e-6)


@pytest.mark.parametrize("name", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_split_batches_equal_one_process(reference, tmp_path, name):
    layout, names = Layout(name, 2, 8, 1, LAYOUTS[name].distributed_type), ["plain", "packing"]
    check(launched(layout, tmp_path / "run", names, accelerator_config={"split_batches": True}), reference, layout)


@pytest.mark.parametrize("fields", [{}, {"padding_free": True, "max_length": None}], ids=str)
def test_evaluation_is_the_mean_over_tokens(make_sft, fields):
    """So are the accuracy and the entropy, of this evaluation's batches alone, and under their own names."""

    def make(**fields):
        trainer = make_sft(**fields)
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight *= 100  # so that the entropies of the tokens differ
        return trainer

    trainer = make(loss_type="nll")  # whose model returns logits in every TRL
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = trainer.model(**batch).logits
    targets = batch["labels"][:, 1:]
    scored = logits[:, :-1][targets != -100]  # [T, V]
    means = {
        "loss": (example_nll(logits, batch["labels"]).sum() / len(scored)).item(),
        "mean_token_accuracy": (scored.argmax(dim=-1) == targets[targets != -100]).float().mean().item(),
        "entropy": torch.distributions.Categorical(logits=scored).entropy().mean().item(),
    }
    trainer = make(per_device_eval_batch_size=3, **fields)
    whole = trainer.evaluate()
    assert whole["eval_loss"] == pytest.approx(means["loss"], rel=1e-6)
    assert {name: whole[f"eval_{name}"] for name in means} == pytest.approx(means, rel=1e-4)
    rows = trainer.eval_dataset
    parts = trainer.evaluate({"all": rows, "one": rows.select([0])}, metric_key_prefix="mine")
    predicted = trainer.predict(rows).metrics
    assert {name: parts[f"mine_all_{name}"] for name in means} == pytest.approx(means, rel=1e-4)
    assert {name: predicted[f"test_{name}"] for name in means} == pytest.approx(means, rel=1e-4)
    assert "mine_one_mean_token_accuracy" in parts and not any(name.startswith("eval_") for name in parts)
    assert trainer.evaluate()["eval_entropy"] == whole["eval_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, accumulation", "fsdp2", "zero2", "zero3"])
def test_every_rule_trains_as_in_one_process(tmp_path, name):
    unsupported = {"zero2": {"lora_dropout"}, "zero3": {"lora_dropout", "weight_noise"}}.get(name, set())
    rules = [rule for rule in RULES if rule not in unsupported]
    expected = alone(tmp_path / "alone", rules, per_device_train_batch_size=8)
    check(launched(LAYOUTS[name], tmp_path / "run", rules), expected, LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2"])
def test_killed_processes_resume_to_the_same_weights(reference, tmp_path, name):
    layout, folder, fields = LAYOUTS[name], tmp_path / "run", {"save_steps": 1, "save_total_limit": 2}
    programs = start(layout, folder, ["saving"], **fields)
    wait_for((folder / "saving" / "run" / "checkpoint-2").exists, programs[0])
    for program in programs:
        program.end()
    run = launched(layout, folder, ["saving"], resume_from_checkpoint="true", **fields)["saving"]
    uninterrupted = reference["saving"]
    assert run.records[0]["steps"] < uninterrupted.records[0]["steps"], "it began again"
    assert run.distance(uninterrupted) < TOLERANCE


PADDED = {"packing": True, "max_length": 40, "gradient_checkpointing": False, "pad_to_multiple_of": 64}
PACKED = [{"packing": True, "max_length": 40}, PADDED, {"padding_free": True, "max_length": None}]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", PACKED, ids=["packing", "packing_padded", "padding_free"])
def test_packed_gradients_equal_unpacked_gradients(make_sft, tokenizer, layout, attention):
    fields = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 2, **layout}
    trainer = make_sft(tiny_ouro(attn_implementation=attention), cls=Recorder, **fields)
    model = randomise(trainer.model, 0.05)
    trainer.train()
    (seen,) = trainer.seen
    token_examples, ids = seen.gated.token_examples, seen.gated.draw.example_ids
    assert len(set(ids)) == token_examples.max() + 1 >= (4 if trainer.args.packing else 2)
    assert ids == sorted(ids) and {row for row, _ in ids} == {0, 1}
    draw = Draw(seed=trainer.args.seed, step=0, example_ids=ids, num_loops=4)
    assert torch.equal(seen.gates, LoopDropout(0.5).sample(draw))

    columns, examples = ("input_ids", "labels"), token_examples.unique()
    rows = [{name: seen.batch[name][token_examples == i].tolist() for name in columns} for i in examples]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows)
    model.zero_grad()
    with use_gates(model, seen.gates):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    torch.testing.assert_close(seen.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in trained_parameters(model).items():
        torch.testing.assert_close(seen.gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "environment, parallelism, message",
    [
        ({"WORLD_SIZE": "2"}, None, "has 2 processes"),
        ({"ACCELERATE_USE_FSDP": "true"}, None, "FSDP must have several"),
        ({}, ParallelismConfig(tp_size=2), "`parallelism_config` must not set `tp_size`"),
    ],
    ids=["independent", "fsdp", "tensor parallel"],
)
def test_unsupported_processes_raise(monkeypatch, environment, parallelism, message):
    args = LoopDropoutConfig("out")  # before the accelerator, whose state it resets
    accelerator = Accelerator(cpu=True)
    check_processes(accelerator, args)
    args.parallelism_config = parallelism
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with user_error(message):
        check_processes(accelerator, args)


def test_several_gpus_need_a_launcher(make_sft, config, tmp_path, monkeypatch):
    """transformers would copy the model to each GPU inside one process. No machine of the tests has several."""
    message = "A process must train on one GPU, but 2 are visible. Start the script with `accelerate launch`, "
    message += ".*`accelerate launch -m loopdropout_trainer sft RECIPE.yaml`"
    monkeypatch.setattr(LoopDropoutConfig, "n_gpu", 2)
    with user_error(message):
        make_sft()
    with user_error(message):
        load_script("recipes/sft.py").main(["quickstart.yaml", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert not list(tmp_path.iterdir())
