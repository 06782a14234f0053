"""Several processes, accumulation, packing and sharding train the weights of one process, with the same gates."""

import layouts
import pytest
import torch
import transformers
from accelerate import Accelerator, ParallelismConfig
from conftest import ROOT, Recorder, randomise, tiny_ouro, trained_parameters
from packaging.version import Version
from processes import Program, ranks, wait_for

from loopdropout_trainer import LoopDropoutConfig, use_gates
from loopdropout_trainer.distributed import check_processes
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.models import OuroForCausalLM


TOLERANCE = 2e-4  # of the largest weight. Other gates give 1.


def alone(folder, names, **fields):
    """Runs in this process."""
    layouts.save_model(folder / "model")
    records = {name: layouts.train(folder, name, **fields) for name in names}
    return {name: layouts.Run([record], layouts._adapter(folder / name)) for name, record in records.items()}


def forked(layout, folder, runs=tuple(layouts.RUNS), **fields):
    """Runs in the processes of a layout without sharding, as forks with the environment of a launcher."""
    spec = layouts.write_spec(layout, folder, runs, **fields)
    words, output = (ROOT / "tests" / "layouts.py", "--work", spec), folder / "log.txt"
    programs = [Program(*words, output=output, env=env) for env in ranks(layout.processes)]
    for program in programs:
        program.wait()
    return layouts.read(layout, folder, runs)


def launched(name, folder, runs=tuple(layouts.RUNS), **fields):
    """Runs in the processes of a layout, by its launch file."""
    process = layouts.start(layouts.LAYOUTS[name], folder, runs, **fields)
    wait_for(lambda: process.poll() is not None)
    return layouts.read(layouts.LAYOUTS[name], folder, runs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """All runs in this process with batch 8."""
    return alone(tmp_path_factory.mktemp("reference"), layouts.RUNS, per_device_train_batch_size=8)


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


def test_one_process_keeps_weights_in_every_run(reference):
    plain = reference["plain"]
    assert len(plain.gates) == 32 and len(plain.records[0]["losses"]) == 4
    for name in ("checkpointing", "reentrant asked for", "saving", "resuming"):
        assert reference[name].distance(plain) == 0, name
    assert reference["packing"].distance(plain) > 100 * TOLERANCE, "packed rows are other batches"


def test_ddp_and_accumulation_equal_one_process(reference, tmp_path):
    names = ["plain", "packing", "saving", "resuming"]
    if Version(transformers.__version__) < Version("5.24"):
        names.remove(
            "resuming"
        )  # older releases name the CPU `cpu:0`, and torch does not load optimizer states onto it
    name = "ddp, accumulation"
    check(launched(name, tmp_path / "run", names), reference, layouts.LAYOUTS[name])


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_deepspeed_trains_and_resumes_as_one_process(tmp_path, name):
    names, fields = ["saving", "resuming"], {"max_steps": 3, "num_loops": 2}
    expected = alone(tmp_path, names, per_device_train_batch_size=8, **fields)
    runs = launched(name, tmp_path / "run", names, **fields)
    check(runs, expected, layouts.LAYOUTS[name])
    share = 0.5 if name == "zero3" else 1.0  # ZeRO-3 shards the frozen weights, too
    for record in (record for run in runs.values() for record in run.records):
        assert record["share_of_weights"] == pytest.approx(share, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", "ddp, four processes", "fsdp2", "zero2", "zero3", "zero2_offload", "zero3_offload"]
)
def test_every_launch_file_equals_one_process(reference, tmp_path, name):
    check(launched(name, tmp_path / "run"), reference, layouts.LAYOUTS[name])


@pytest.mark.parametrize("average", ["tokens", "micro_batches"])
@pytest.mark.parametrize(
    "processes, batch, accumulation",
    [(2, 2, 1), *(pytest.param(*split, marks=pytest.mark.slow) for split in [(2, 2, 2), (3, 2, 1), (3, 1, 2)])],
)
def test_uneven_last_batch_equals_one_process(tmp_path, processes, batch, accumulation, average):
    """No example is trained twice if the last process has a shorter batch, or none."""
    names = [name for name, run in layouts.UNEVEN.items() if average == "tokens" or "packing" not in run]
    fields = {"optim": "sgd", "learning_rate": 0.1, "loss_average": average}
    steps = processes * accumulation
    rows = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    expected = alone(tmp_path, names, **rows, **fields)
    layout = layouts.Layout("ddp", processes, batch, accumulation)
    for name, run in forked(layout, tmp_path / "run", names, **fields).items():
        assert run.records[0]["losses"] == pytest.approx(expected[name].records[0]["losses"], rel=1e-5), name
        for weight, tensor in expected[name].adapter.items():
            torch.testing.assert_close(run.adapter[weight], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_loss_is_the_mean_over_tokens(tmp_path, processes, tokenizer):
    """accelerate repeats some of the seven rows, which must not count twice."""
    layouts.save_model(tmp_path / "model")
    model = OuroForCausalLM.from_pretrained(tmp_path / "model").eval()
    losses = []
    for row in layouts.examples().select(range(100, 107)):
        prompt, completion = (tokenizer(row[part]).input_ids for part in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *completion, 0]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        losses.append(-scores[len(prompt) - 1 :])
    expected = torch.cat(losses).mean().item()
    layout = layouts.Layout("ddp" if processes > 1 else None, processes, 2)
    runs = forked(layout, tmp_path / "run", list(layouts.EVALUATIONS), per_device_eval_batch_size=2)
    for record in (record for run in runs.values() for record in run.records):
        assert record["eval_loss"] == pytest.approx(expected, abs=2e-6)


def test_train_loss_is_the_mean_over_processes(tmp_path):
    """The last step is not a logging step."""
    (expected,) = alone(tmp_path, ["plain"], per_device_train_batch_size=8, logging_steps=3)["plain"].records
    run = forked(layouts.Layout("ddp", 2, 4), tmp_path / "run", ["plain"], logging_steps=3)["plain"]
    for record in run.records:
        assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, accumulation", "fsdp2", "zero2", "zero3"])
def test_every_rule_trains_as_in_one_process(tmp_path, name):
    rules_alone = forked(layouts.LAYOUTS["one process, batch 8"], tmp_path / "alone", list(layouts.RULES))
    unsupported = {"zero2": {"lora_dropout"}, "zero3": {"lora_dropout", "weight_noise"}}.get(name, set())
    runs = launched(name, tmp_path / "run", [rule for rule in layouts.RULES if rule not in unsupported])
    for rule, run in runs.items():
        one = rules_alone[rule]
        for record in run.records:
            assert record["losses"] == pytest.approx(one.records[0]["losses"], rel=1e-4), rule
        assert run.gates.keys() == one.gates.keys()
        assert run.distance(one) < TOLERANCE, rule


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2"])
def test_killed_processes_resume_to_the_same_weights(reference, tmp_path, name):
    layout, folder, fields = layouts.LAYOUTS[name], tmp_path / "run", {"save_steps": 1, "save_total_limit": 2}
    process = layouts.start(layout, folder, ["saving"], **fields)
    checkpoint = folder / "saving" / "run" / "checkpoint-2"
    wait_for(lambda: process.poll() is not None or checkpoint.exists())
    layouts.kill(process)
    run = launched(name, folder, ["saving"], resume_from_checkpoint="true", **fields)["saving"]
    assert {record["first_step"] for record in run.records} <= {1, 2, 3}
    assert run.distance(reference["saving"]) < TOLERANCE


def unpacked(batch, segments):
    """One padded row for each example of a packed row: token ids, labels and mask."""
    pad = lambda tensors, value: torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    ids, labels = ([batch[name][segments == i] for i in segments.unique()] for name in ("input_ids", "labels"))
    return pad(ids, 1), pad(labels, -100), pad([torch.ones_like(row) for row in labels], 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "layout",
    [
        {"packing": True, "max_length": 40},
        {"packing": True, "max_length": 40, "gradient_checkpointing": False, "pad_to_multiple_of": 64},
        {"padding_free": True, "max_length": None},
    ],
    ids=["packing", "packing_padded", "padding_free"],
)
def test_packed_gradients_equal_unpacked_gradients(make_sft, layout, attention):
    fields = {"max_steps": 1, "per_device_train_batch_size": 2, **layout}
    trainer = make_sft(tiny_ouro(attn_implementation=attention), cls=Recorder, **fields)
    args, model = trainer.args, randomise(trainer.model, 0.05)
    trainer.train()
    (seen,) = trainer.seen
    batch, gates, segments = seen.batch, seen.gates, seen.gated.segments
    examples = len(gates.T)
    assert segments.max() == examples - 1 and examples >= (4 if args.packing else 2)
    ids = seen.gated.draw.example_ids
    assert ids == sorted(set(ids)) and len(ids) == examples and {row for row, _ in ids} == {0, 1}
    draw = Draw(seed=args.seed, step=0, example_ids=ids, num_loops=4)
    assert torch.equal(gates, LoopDropout(0.5).sample(draw)) and len(set(map(tuple, gates.T.tolist()))) > 1

    ids, labels, mask = unpacked(batch, segments)
    model.zero_grad()
    for name, parameter in trained_parameters(model).items():
        parameter.data = seen.weights[name]
    with use_gates(model, gates):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        expected.backward()
    torch.testing.assert_close(seen.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in trained_parameters(model).items():
        torch.testing.assert_close(seen.gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "processes, fsdp, message", [("2", "false", "has 2 processes"), ("1", "true", "FSDP must have several")]
)
def test_independent_processes_raise(monkeypatch, processes, fsdp, message):
    args = LoopDropoutConfig("out")  # before the accelerator, whose state it resets
    accelerator = Accelerator(cpu=True)
    check_processes(accelerator, args)
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
    with pytest.raises(ValueError, match=message):
        check_processes(accelerator, args)


def test_tensor_parallel_layout_raises():
    args = LoopDropoutConfig("out")
    args.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match="`parallelism_config` must not set `tp_size`"):
        check_processes(Accelerator(cpu=True), args)
