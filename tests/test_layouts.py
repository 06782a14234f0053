"""The same run in any layout: processes, accumulation, packing, checkpointing and resume change no gate and no weight."""

import math

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from conftest import ROOT, Recorder, load_script, randomise, tiny_ouro, trained_parameters
from packaging.version import Version
from processes import Program, ranks, wait_for

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.models import OuroForCausalLM
from loopdropout_trainer.training.distributed import check_arguments, check_processes, check_rows


layouts = load_script("benchmarks/layouts.py")
TOLERANCE = 2e-4  # of the largest weight; other gates give 1


def alone(folder, names, **fields):
    """Runs in this process."""
    layouts.save_model(folder / "model")
    records = {name: layouts.train(folder, name, **fields) for name in names}
    return {name: layouts.Run([record], layouts._adapter(folder / name)) for name, record in records.items()}


def forked(layout, folder, runs=tuple(layouts.RUNS), **fields):
    """Runs in the processes of a layout without sharding, as forks that are told what a launcher tells."""
    spec = layouts.write_spec(layout, folder, runs, **fields)
    words, output = (ROOT / "benchmarks" / "layouts.py", "--work", spec), folder / "log.txt"
    programs = [Program(*words, output=output, env=env) for env in ranks(layout.processes)]
    for program in programs:
        program.wait()
    return layouts.read(layout, folder, runs)


def launched(name, folder, runs=tuple(layouts.RUNS), **fields):
    """Runs in the processes of a layout, by its launch file; skipped without DeepSpeed where it needs it."""
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
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
    one = layouts.LAYOUTS["one process, accumulation 2x4"]
    check(forked(one, tmp_path / "one", ["plain", "packing"]), reference, one)
    ddp = "ddp, accumulation"
    check(launched(ddp, tmp_path / "run", all_runs), reference, layouts.LAYOUTS[ddp])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", "ddp, four processes", "fsdp2", "zero2", "zero3", "zero2_offload", "zero3_offload"]
)
def test_every_launch_file_trains_as_one_process_does(reference, tmp_path, name):
    check(launched(name, tmp_path / "run"), reference, layouts.LAYOUTS[name])


SLOW_SPLITS = [(2, 2, 2), (2, 1, 4), (3, 2, 1), (3, 1, 2)]


@pytest.mark.parametrize(
    "processes, batch, accumulation",
    [(2, 4, 1), *(pytest.param(*split, marks=pytest.mark.slow) for split in SLOW_SPLITS)],
)
def test_an_uneven_last_batch_is_that_of_one_process(tmp_path, processes, batch, accumulation):
    """No example is trained twice: neither when the last process has a shorter batch, nor when it has none."""
    rows, fields = processes * batch * accumulation, {"optim": "sgd", "learning_rate": 0.1}
    expected = alone(tmp_path, layouts.UNEVEN, per_device_train_batch_size=rows, **fields)
    layout = layouts.Layout("ddp", processes, batch, accumulation)
    for name, run in forked(layout, tmp_path / "run", list(layouts.UNEVEN), **fields).items():
        assert run.records[0]["losses"] == pytest.approx(expected[name].records[0]["losses"], rel=1e-5), name
        for weight, tensor in expected[name].adapter.items():
            torch.testing.assert_close(run.adapter[weight], tensor, rtol=0, atol=1e-6, msg=name)


def test_a_mean_over_micro_batches_is_that_of_one_process(tmp_path):
    """Also where the last one is shorter, and where a process has none left."""
    names = [name for name, run in layouts.UNEVEN.items() if "packing" not in run]
    fields = {"optim": "sgd", "learning_rate": 0.1, "loss_average": "micro_batches"}
    expected = alone(tmp_path, names, per_device_train_batch_size=2, gradient_accumulation_steps=2, **fields)
    by_tokens = alone(tmp_path / "by tokens", names, per_device_train_batch_size=4, optim="sgd", learning_rate=0.1)
    for name, run in layouts.launch(layouts.Layout("ddp", 2, 2, 1), tmp_path / "run", names, **fields).items():
        assert run.records[0]["losses"] == pytest.approx(expected[name].records[0]["losses"], rel=1e-5), name
        for weight, tensor in expected[name].adapter.items():
            torch.testing.assert_close(run.adapter[weight], tensor, rtol=0, atol=1e-6, msg=name)
        assert run.distance(by_tokens[name]) > 10 * TOLERANCE, name


def test_what_changes_a_micro_batch_is_refused_with_a_mean_over_them(make_sft, monkeypatch):
    with pytest.raises(ValueError, match="`loss_average: micro_batches` .* `packing` changes which"):
        make_sft(loss_average="micro_batches", packing=True, max_length=64)
    args = LoopDropoutConfig("out", loss_average="micro_batches", accelerator_config={"split_batches": True})
    check_arguments(args)
    monkeypatch.setattr(LoopDropoutConfig, "world_size", 2)
    with pytest.raises(ValueError, match="`loss_average: micro_batches` .* `split_batches` changes which"):
        check_arguments(args)
    with pytest.raises(ValueError, match="`loss_average` must be one of tokens, micro_batches; got 'rows'"):
        LoopDropoutConfig("out", loss_average="rows")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_evaluation_loss_is_the_mean_over_tokens_on_any_layout(tmp_path, processes, tokenizer):
    """Seven rows: with two and three processes some are repeated, and must not be counted twice."""
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
    for rows in (1, 2, 3, 4) if processes == 1 else (2,):
        runs = forked(layout, tmp_path / f"run{rows}", list(layouts.EVALUATIONS), per_device_eval_batch_size=rows)
        for record in (record for run in runs.values() for record in run.records):
            assert record["eval_loss"] == pytest.approx(expected, abs=2e-6), rows


def test_dpos_evaluation_loss_is_the_mean_over_pairs_on_any_layout(tmp_path):
    """Seven pairs; the measure is one batch of all of them, of which TRL takes the mean."""
    losses = []
    for processes, rows in ((1, 7), (2, 2), (3, 1)):
        layout = layouts.Layout("ddp" if processes > 1 else None, processes, 1)
        runs = forked(layout, tmp_path, [layouts.PREFERENCES], per_device_eval_batch_size=rows)
        losses += [record["eval_loss"] for record in runs[layouts.PREFERENCES].records]
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-6)
    assert abs(losses[0] - math.log(2)) > 1e-3  # of a policy that is not its reference


@pytest.fixture(scope="module")
def rules_alone(tmp_path_factory):
    """A run of each kind of rule in one process."""
    return forked(layouts.LAYOUTS[layouts.REFERENCE], tmp_path_factory.mktemp("rules"), list(layouts.RULES))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, accumulation", "fsdp2", "zero2", "zero3"])
def test_every_kind_of_rule_trains_as_in_one_process(rules_alone, tmp_path, name):
    refused = {"zero2": {"lora_dropout"}, "zero3": {"lora_dropout", "weight_noise"}}.get(name, set())
    runs = launched(name, tmp_path / "run", [rule for rule in layouts.RULES if rule not in refused])
    for rule, run in runs.items():
        one = rules_alone[rule]
        for record in run.records:
            assert record["losses"] == pytest.approx(one.records[0]["losses"], rel=1e-4), rule
        assert run.gates.keys() == one.gates.keys()
        for example, gates in run.gates.items():  # adaptive p follow gradients, which are rounded
            assert torch.allclose(torch.tensor(gates), torch.tensor(one.gates[example]), rtol=1e-4), rule
        assert run.distance(one) < TOLERANCE, rule


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp2"])
def test_all_processes_killed_resume_to_the_weights_of_an_uninterrupted_run(reference, tmp_path, name):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    layout, folder, fields = layouts.LAYOUTS[name], tmp_path / "run", {"save_steps": 1, "save_total_limit": 2}
    process = layouts.start(layout, folder, ["saving"], **fields)
    checkpoint = folder / "saving" / "run" / "checkpoint-2"
    wait_for(lambda: process.poll() is not None or checkpoint.exists())
    layouts.kill(process)
    run = launched(name, folder, ["saving"], resume_from_checkpoint="true", **fields)["saving"]
    assert {record["first_step"] for record in run.records} <= {1, 2, 3}
    assert run.distance(reference["saving"]) < TOLERANCE


@pytest.mark.slow
def test_over_a_bfloat16_base_every_layout_trains_and_saves_a_float32_adapter(tmp_path):
    train = lambda name, **fields: launched(name, tmp_path / name, ["plain"], **fields)["plain"]
    runs = {name: train(name, dtype="bfloat16", bf16=True) for name in ("ddp", "fsdp2", "zero2", "zero3")}
    exact = train("one process, accumulation 2x4")
    for name, run in runs.items():
        assert {tensor.dtype for tensor in run.adapter.values()} == {torch.float32}, name
        rounded = [bool((tensor.bfloat16() == tensor).all()) for tensor in run.adapter.values()]
        assert not all(rounded), name
        assert run.distance(exact) < 0.2, name  # what bfloat16 alone does to Adam's first steps


# --- packing ----------------------------------------------------------------------------------------------------------


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
    ids=["packing", "packing padded to a multiple", "padding-free"],
)
def test_packed_loss_and_gradients_are_those_of_unpacked_rows_under_the_same_gates(make_sft, layout, attention):
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


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_packed_rows_that_attention_would_mix_are_refused():
    ids, positions = torch.ones(1, 6, dtype=torch.long), torch.tensor([[0, 1, 2, 0, 1, 2]])
    check_rows({"input_ids": ids, "position_ids": torch.arange(6)[None], "attention_mask": ids})
    for mask in ({}, {"attention_mask": ids}):
        with pytest.raises(ValueError, match="which gates are theirs is not known"):
            check_rows({"input_ids": ids, "position_ids": positions, **mask})


def test_processes_that_would_share_rows_or_train_alone_are_refused(config, dataset, tokenizer, monkeypatch):
    args = config()
    args.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match="`parallelism_config` with `tp_size`"):
        LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=dataset, processing_class=tokenizer)
    accelerator = Accelerator(cpu=True)
    check_processes(accelerator)
    for processes, fsdp, fault in (("2", "false", "one of 2 launched"), ("1", "true", "FSDP was asked for")):
        monkeypatch.setenv("WORLD_SIZE", processes)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
        with pytest.raises(ValueError, match=fault):
            check_processes(accelerator)
