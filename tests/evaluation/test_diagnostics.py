"""Diagnostics against passes of the model, which `test_models.py` compares with the oracle, and recipes/diagnose.py."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from helpers.errors import user_error
from helpers.files import ROOT, SAMPLES, load_script
from helpers.processes import python
from helpers.tiny import TINY, tiny_hrm, tiny_ouro, with_adapter
from loopdropout_trainer import diagnostics, use_gates
from loopdropout_trainer.diagnostics import curvature, depth_matrix, label_batches, readouts, single_loop
from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks, own_benchmark
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.jobs import diagnosed_data
from loopdropout_trainer.looped import find_looped_model, use_depth
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.tables import split_reductions
from loopdropout_trainer.results.run_files import read_results, write_results
from loopdropout_trainer.results.sweep_folder import update_summary
from loopdropout_trainer.saving import loading
from loopdropout_trainer.saving.loading import save_adapter_metadata


LOOPS = ["loop 1", "loop 2", "loop 3", "loop 4"]


def values(rows, metric, **columns):
    """The values of a metric, of the rows with these columns."""
    columns["metric"] = metric
    return [row["value"] for row in rows if row.items() >= columns.items()]


IDS = [[(7 * row + 13 * place) % 200 + 40 for place in range(length)] for row, length in enumerate((12, 9, 15, 7, 11))]
MASKS = [[0] * (3 + row) + [1] * (len(ids) - 3 - row) for row, ids in enumerate(IDS)]
EXAMPLES = [{"input_ids": ids, "completion_mask": mask} for ids, mask in zip(IDS, MASKS, strict=True)]


def adapted(model, seed=1):
    torch.manual_seed(seed)
    return with_adapter(model, seed, scale=0.2, r=4).eval()


@torch.no_grad()
def forward(model):
    """Loss and accuracy of all examples by the model's own forward, one example at a time."""
    outputs = [model(input_ids=torch.tensor([ids]), use_cache=False) for ids in IDS]
    logits = torch.cat([output.logits[0, 2 + row : -1] for row, output in enumerate(outputs)]).double()
    targets = torch.tensor([token for row, ids in enumerate(IDS) for token in ids[3 + row :]])
    accuracy = (logits.argmax(-1) == targets).double().mean()
    return float(F.cross_entropy(logits, targets)), 100 * float(accuracy)


@pytest.mark.parametrize(
    "make", [*TINY.values(), lambda: tiny_hrm(H_cycles=4, prefix_lm=False)], ids=[*TINY, "hrm_text"]
)
def test_diagnostics_equal_forward_passes(make, tokenizer):
    model, batches = adapted(make()).train(), label_batches(EXAMPLES, tokenizer, 2)
    rows = single_loop(model, batches)
    assert model.training and {row["n"] for row in rows} == {sum(sum(row["completion_mask"]) for row in EXAMPLES)}
    model.eval()
    losses = []
    for gates in torch.cat([torch.zeros(1, 4), torch.eye(4), torch.ones(1, 4)]):
        with use_gates(model, gates):
            losses.append(forward(model)[0])
    assert [row["gates"] for row in rows if row["metric"] == "loss"] == ["none", *LOOPS, "unit"]
    assert values(rows, "loss") == pytest.approx(losses, abs=1e-5)
    reductions = [100 * (losses[0] - loss) / losses[0] for loss in losses[1:]]
    assert values(rows, "loss_reduction") == pytest.approx(reductions, abs=2e-3)
    rows = [*readouts(model, batches), *depth_matrix(model, batches, [1, 3, 6])]
    losses = values(rows, "readout_loss")
    assert max(losses) - min(losses) > 1e-3 and len(rows) == 2 * (4 + 3)
    expected = {}
    for depth in (1, 2, 3, 4, 6):
        with use_depth(model, depth):
            expected[depth] = forward(model)
    for row in rows:
        value = expected[row.get("loop", row["num_loops"])]["accuracy" in row["metric"]]
        assert row["value"] == pytest.approx(value, abs=1e-5)
    assert find_looped_model(model).num_loops == 4
    for batch in batches:
        batch["labels"].fill_(-100)
    for empty, reason in ((batches, "every label is -100"), ([], "there is no batch")):
        with user_error(f"`batches` must have a target token, but {reason}"):
            single_loop(model, empty)


def test_labels_name_the_gates_of_a_block(tokenizer):
    """Own gates win. Of a disabled adapter, the base model alone can be measured."""
    model, batches = adapted(tiny_ouro()), label_batches(EXAMPLES[:1], tokenizer, 2)
    find_looped_model(model).trained_with = {"method": "A"}
    own = LoopedLM(model, tokenizer, gates="loop 2")
    lm = LoopedLM(model, tokenizer)
    with use_gates(model, [0.5, 0, 0, 1]):
        rows = [*readouts(model, batches), *depth_matrix(model, batches, [1, 4])]
        assert [row["gates"] for row in rows] == ["0.5-0-0-1"] * 8 + ["0.5"] * 2 + ["0.5-0-0-1"] * 2
        assert [row["num_loops"] for row in depth_matrix(model, batches)[::2]] == [1, 2, 3, 4]
        assert [row["gates"] for row in single_loop(model, batches)[-2:]] == ["unit"] * 2
        assert lm.columns == {"num_loops": 4, "gates": "0.5-0-0-1"}
        assert own.columns == {"num_loops": 4, "gates": "loop 2", "loop": 2}
    with use_gates(model, [1, 0, 0, 0]):
        assert lm.columns == {"num_loops": 4, "gates": "loop 1", "loop": 1}
        assert repr(lm).endswith(": num_loops 4, gates loop 1")
    with use_gates(model, torch.ones(4, 2) / 2), user_error("one gate for each loop, which its results name"):
        evaluate_tasks(lm, ["arithmetic_easy_test"], limit=1)
    with model.disable_adapter():
        assert lm.columns["gates"] == "none"
        rows = readouts(model, batches)
        assert {row["gates"] for row in rows} == {"none"} and "method" not in rows[0]
        for measure in (single_loop, curvature):
            with user_error("The adapter must not be disabled, because .* `model.enable_adapter_layers"):
                measure(model, batches)
    for measure in (single_loop, curvature):
        with user_error("OuroForCausalLM has no adapter to gate. Wrap it with peft.get_peft_model"):
            measure(tiny_ouro(), batches)
    for measure in (single_loop, curvature, readouts, depth_matrix, LoopedLM):
        with user_error("`model` must be a looped model, .* Pass its `model`"):
            measure(SimpleNamespace(model=model), batches)  # as of a trainer
    assert lm.columns["gates"] == "unit" and readouts(model, batches)[0]["method"] == "A"


@torch.no_grad()
def test_curvature_equals_hessian_in_float64(make_tiny, tokenizer):
    model, batches = with_adapter(make_tiny(), 1, scale=0.05, r=4).eval(), label_batches(EXAMPLES, tokenizer, 2)
    rows = curvature(model, batches, p=0.25)
    model.double()

    def logits(row, ids, gates):  # [n, V] of the targets
        with use_gates(model, gates):
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 2 + row : -1]

    expected = torch.zeros(4, dtype=torch.float64)
    for row, ids in enumerate(IDS):
        shares = logits(row, ids, torch.ones(4)).softmax(-1)
        hessian = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        for loop, direction in enumerate(1e-4 * torch.eye(4, dtype=torch.float64)):
            v = (logits(row, ids, 1 + direction) - logits(row, ids, 1 - direction)) / 2e-4
            expected[loop] += torch.einsum("ni,nij,nj->", v, hessian, v)
    expected /= sum(len(ids) - 3 - row for row, ids in enumerate(IDS))
    assert expected.min() > 1e-4
    assert values(rows, "curvature") == pytest.approx(expected.tolist(), rel=5e-3)
    assert values(rows, "curvature_term") == pytest.approx([0.25 / 1.5 * float(expected.sum())], rel=5e-3)


@pytest.mark.parametrize("rule", ["independent", "learned"])
def test_depth_matrix_keeps_depth_of_loop_parameters(rule, tokenizer):
    model, batches = adapted(tiny_ouro()), label_batches(EXAMPLES, tokenizer)
    add_gates(model, rule=make_rule(rule))
    assert [row["num_loops"] for row in depth_matrix(model, batches, [1, 2, 8])] == [4, 4]
    with user_error("`depths` must be an integer from 1"):
        depth_matrix(model, batches, [0, 2])


@pytest.mark.parametrize(
    ("numbers", "interval", "p"),  # the interval of Agresti and Min (2005), and the p-value of statsmodels's `mcnemar`
    [
        ((60, 25, 10, 5), (3.34420208, 26.06756263), 0.01667384780),
        ((3, 5, 0, 16), (1.09807987, 37.36345859), 0.0625),
        ((0, 0, 0, 10), (-19.15711687, 19.15711687), 1),
    ],
)
def test_compare_answers_equals_mcnemar(numbers, interval, p):
    both, gained, lost, neither = numbers
    ours = [{"correct": 1}] * (both + gained) + [{"correct": 0}] * (lost + neither)
    other = [{"correct": int(is_right)} for is_right in np.repeat([1, 0, 1, 0], numbers)]
    found = diagnostics.compare_answers(ours, other)
    assert found == pytest.approx((100 * (gained - lost) / len(ours), *interval, p, len(ours)))
    assert str(found).endswith("not significant") == (p >= 0.05)
    with user_error(f"`baseline` must have {len(ours)} samples, got {len(ours) - 1}"):
        diagnostics.compare_answers(ours, other[1:])


def test_describe_profile_names_it_without_advice():
    profiles = {
        "rises with each loop, as for LoRA in the paper": (11.9, 19.1, 26.5, 32.4),
        "is near zero in all loops but the last": (0.0, 0.2, -1.2, 76.0),
        "falls with each loop": (40, 30, 20, 10),
        "is similar in the first and the last loop": (30.8, 35.2, 35.9, 32.0),
        "is larger in the last loop than in the first, but does not change in one direction": (8.6, 7.1, 9.5, 13.0),
        "is smaller in the last loop than in the first, but does not change in one direction": (13.0, 7.1, 9.5, 8.6),
        "was measured in the only loop": (7.0,),
    }
    for said, profile in profiles.items():
        sentence = diagnostics.describe_profile(profile, 1096)
        assert sentence.startswith(f"The loss reduction on 1,096 tokens {said}")
        assert "Use" not in sentence and "Compare" not in sentence
    with pytest.warns(DeprecationWarning, match="`recommend_method` is now `describe_profile`"):
        assert diagnostics.recommend_method((40, 30, 20, 10)) == "The loss reduction falls with each loop."


def test_reference_examples_of_a_task():
    task = own_benchmark("problems", str(SAMPLES / "gsm8k_test.jsonl"), like="gsm8k")
    first, _ = diagnostics.reference_examples(task, 2)
    assert first["prompt"].startswith("Question: Janet") and first["prompt"].endswith("?\nAnswer:")
    assert first["completion"].startswith(" ") and "<<" not in first["completion"]
    with user_error("text column `solution` or `answer`, or a text as the target"):
        diagnostics.reference_examples(None)


def test_own_task_is_diagnosed_by_its_target(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"ask": "2 + 3 =", "sum": " 5"}\n')
    task = own_benchmark("mine", str(tmp_path / "mine.jsonl"), prompt="{ask}", target="{sum}", scorer="exact_match")
    assert diagnostics.reference_examples(task) == [{"prompt": "2 + 3 =", "completion": " 5"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A base model, two adapters, and the recipe of their training."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_ouro().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    settings = "preparation: arithmetic\narithmetic_steps: [1, 1]\nnum_train_examples: 20\nnum_eval_examples: 6\n"
    recipe = f"model_name_or_path: {folder / 'base'}\n{settings}max_length: 512\ndtype: float32\nbf16: false\nuse_cpu: true\n"
    (folder / "recipe.yaml").write_text(f"{recipe}per_device_eval_batch_size: 2\nbenchmarks: [arithmetic_test]\n")
    for seed, name in enumerate(("lora", "ours")):
        model = adapted(tiny_ouro(), seed)
        model.save_pretrained(folder / name)
        save_adapter_metadata(model, folder / name, num_loops=4)
        row = f'{{"metric": "train_loss", "value": 1, "task": "training", "method": "{name}", "seed": {seed}, "step": 3}}'
        (folder / name / "results.jsonl").write_text(row)
        (folder / name / "recipe.yaml").write_text(recipe)
    return folder


def words(saved, output_dir, *more):
    adapters = (saved / "lora", saved / "ours")
    return [*map(str, (saved / "recipe.yaml", "--output_dir", output_dir, "--adapters", *adapters, *more))]


def diagnose(*given):
    load_script("recipes/diagnose.py").main(words(*given))
    return read_results(given[1])


def test_diagnose_writes_results_of_each_model(saved, tokenizer, tmp_path, capsys):
    rows = diagnose(saved, tmp_path)
    facts = {(row["method"], row.get("seed"), row.get("step"), Path(row.get("adapter", "base")).name) for row in rows}
    trained = [(0, 3, "lora"), (1, 3, "ours")]
    frozen = [("base model", *place) for place in trained]
    assert facts == {("base model", None, None, "base"), *frozen, *((place[2], *place) for place in trained)}
    assert {row["task"] for row in rows} == {"development"}
    metrics = "loss loss_reduction readout_loss readout_token_accuracy depth_loss depth_token_accuracy"
    assert {row["metric"] for row in rows} == {*metrics.split()}
    assert {row["num_loops"] for row in rows if row["metric"] == "depth_loss"} == {*range(1, 9)}
    printed = capsys.readouterr().out
    (rho,) = values(rows, "loss_reduction", method="ours", loop=4)
    assert f"{rho:.1f}" in printed
    assert printed.endswith(f"All results, also those without a table here, are in {tmp_path}/results.jsonl\n")
    sizes = {row["n"] for row in rows if row["metric"] == "loss_reduction"}
    assert f"Loss reduction on held-out examples ({min(sizes):,} tokens), adapter in one loop only" in printed
    assert len(sizes) == 1 and "rho_t" not in printed
    assert diagnose(saved, tmp_path) == rows  # the same results again replace the old ones


def test_base_model_has_the_data_type_of_its_adapter(saved, tmp_path):
    """Also without a recipe. Its loss is then that of the adapter at gates of 0. `none` names it, as in `evaluate`."""
    run = shutil.copytree(saved / "lora", tmp_path / "run")
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(saved / "base")}))
    words = [run, "none", "--output_dir", tmp_path / "out", "--diagnostics", "single_loop", "readouts"]
    load_script("recipes/diagnose.py").main([*map(str, words)])
    rows = read_results(tmp_path / "out")
    (frozen,) = values(rows, "loss", gates="none")
    (readout,) = values(rows, "readout_loss", method="base model", loop=4)
    assert readout == pytest.approx(frozen, rel=1e-6)
    find_sources = load_script("recipes/evaluate.py").find_sources
    for base in (None, str(saved / "base")):
        named = SimpleNamespace(adapters={"base": "none", "run": str(run)})
        sources = find_sources(named, SimpleNamespace(model_name_or_path=base, model_revision=None))
        assert [source.dtype for source in sources.values()] == ["float32", "float32"]


def test_diagnose_prints_each_adapter_of_a_method(saved, tmp_path, capsys):
    adapters = [shutil.copytree(saved / name, tmp_path / name) for name in ("lora", "ours")]
    for path in adapters:
        text = (path / "results.jsonl").read_text()
        (path / "results.jsonl").write_text(text.replace(f'"{path.name}"', '"LoRA"'))
    words = [saved / "recipe.yaml", *adapters, "--output_dir", tmp_path / "out", "--diagnostics", "single_loop"]
    load_script("recipes/diagnose.py").main([*map(str, words)])
    printed, rows = capsys.readouterr().out, read_results(tmp_path / "out")
    for path in map(str, adapters):
        (rho,) = values(rows, "loss_reduction", adapter=path, gates="unit")
        assert f" {rho:.1f}\n" in printed and f"LoRA, {Path(path).name}: The loss reduction" in printed


@pytest.fixture
def sweep(saved, tmp_path):
    """A sweep with two seeds of two methods, a run that failed, and a run whose loss was not finite."""
    folder = tmp_path / "mine"
    recipe = (saved / "lora" / "recipe.yaml").read_text()
    for number, (name, method) in enumerate((("lora", "LoRA"), ("loop_dropout", "Loop Dropout"))):
        for seed in (1, 2):
            run = folder / name / "lr_0.001" / f"seed_{seed}"
            model = adapted(tiny_ouro(), 2 * number + seed)
            model.peft_config["default"].base_model_name_or_path = str(saved / "base")
            model.save_pretrained(run)
            facts = {"method": method, "seed": seed, "step": 3, "training_id": f"{name}{seed}"}
            save_adapter_metadata(model, run, num_loops=4, **facts)
            row = {
                "metric": "num_tokens",
                "task": "training",
                "num_loops": 4,
                "gates": "unit",
                "value": 1.0,
                "training": f"{name}{seed}",
            }
            write_results(run, [{**row, "method": method, "seed": seed, "step": 3}])
            settings = f"run_name: mine/{name}/lr_0.001/seed_{seed}\nlearning_rate: 0.001\nrule: {name}\n"
            for file in ("recipe.yaml", "sweep_recipe.yaml"):
                (run / file).write_text(recipe + settings)
            (run / "run.json").write_text('{"status": "finished"}')
    for rate, files in {"0.01": {}, "0.02": {"run.json": '{"status": "non-finite"}'}}.items():
        run = folder / "lora" / f"lr_{rate}" / "seed_1"
        run.mkdir(parents=True)
        for file, text in {"sweep_recipe.yaml": recipe, "recipe.yaml": recipe, **files}.items():
            (run / file).write_text(text)
    return folder


def test_diagnose_measures_each_adapter_of_a_sweep(sweep, tmp_path, capsys):
    """Into its own run, and `report` shows the mean and SD over seeds. The same command continues."""
    script, words = load_script("recipes/diagnose.py"), [str(sweep), "--diagnostics", "single_loop"]
    script.main([*words, "--dry_run", "true"])
    planned = capsys.readouterr().out
    assert planned.count("  adapter, ") == planned.count(" examples: single_loop 6 passes\n") == 4
    assert planned.count(" examples: nothing is measured\n") == 1  # the base model, once
    assert not [*sweep.rglob("diagnostics")] and "Loss reduction" not in planned
    script.main(words)
    printed = capsys.readouterr().out
    assert "lora/lr_0.01/seed_1 is skipped, because its training has not begun, or has failed." in printed
    assert printed.count(": base model") == printed.count(": adapter of ") == 1  # what all runs share
    assert "lora/lr_0.02/seed_1 is skipped, because its training stopped at a gradient" in printed
    assert "adapter in one loop only, in %, mean ± SD over 2 seeds\n" in printed
    report = load_script("recipes/report.py")
    report.main([str(sweep), "--output_dir", str(tmp_path / "report")])
    capsys.readouterr()
    saved_table = (tmp_path / "report/loss_reduction.md").read_text()
    for name, method in (("lora", "LoRA"), ("loop_dropout", "Loop Dropout")):
        found = []
        for seed in (1, 2):
            rows = read_results(sweep / name / f"lr_0.001/seed_{seed}/diagnostics")
            assert {row["seed"] for row in rows} == {seed}
            found.append(values(rows, "loss_reduction", gates="loop 4"))
        mean, sd = np.mean(found), np.std(found, ddof=1)
        line = next(line for line in printed.splitlines() if line.startswith(f"{method} "))
        assert f"{mean:.1f} ± {sd:.1f}" in line and str(sweep) not in line
        assert f"{mean:.1f} ± {sd:.1f}" in next(
            row for row in saved_table.splitlines() if row.startswith(f"| {method}")
        )
    shutil.rmtree(sweep / "lora/lr_0.001/seed_2/diagnostics")
    script.main(words)
    again = capsys.readouterr().out
    assert again.count("is skipped, because it was measured before") == 3
    assert again[again.index("Loss reduction") :] == printed[printed.index("Loss reduction") :]
    script.main([*words, "--num_examples", "2"])
    assert "measured before" not in capsys.readouterr().out


def test_diagnose_of_a_sweep_names_the_report_only_for_its_numbers(sweep, tmp_path, capsys):
    """A report leaves them out if the trainings have measured the same, which `diagnose` says before it measures."""
    words = [str(sweep), "--diagnostics", "single_loop", "--num_examples", "2"]
    script, report = load_script("recipes/diagnose.py"), load_script("recipes/report.py")
    script.main(words)
    printed = capsys.readouterr().out
    assert f"\nNext:\n  loopdropout report {sweep}   # these tables as files" in printed and "already" not in printed
    own = {"metric": "loss_reduction", "task": "development", "unit": "%", "num_loops": 4, "n": 9, "step": 3}
    for name, method in (("lora", "LoRA"), ("loop_dropout", "Loop Dropout")):
        for seed in (1, 2):
            run = sweep / name / f"lr_0.001/seed_{seed}"
            facts = {"method": method, "seed": seed, "training": f"{name}{seed}"}
            places = [{"gates": f"loop {loop}", "loop": loop, "value": 12.5} for loop in range(1, 5)]
            write_results(run, [{**own, **facts, **place} for place in [*places, {"gates": "unit", "value": 12.5}]])
            with (run / "recipe.yaml").open("a") as file:
                file.write("single_loop_batches: 1\n")
    script.main([*words, "--max_length", "900"])
    printed = capsys.readouterr().out
    before = f"4 trainings measured rho_t already, and `loopdropout report {sweep}` prints it.\n"
    assert printed.startswith(before) and "Next:" not in printed
    assert f"`loopdropout report {sweep}` shows the loss reductions that the trainings themselves measured" in printed
    report.main([str(sweep), "--output_dir", str(tmp_path / "report")])
    assert "12.5 ± 0.0" in (tmp_path / "report/loss_reduction.md").read_text()
    capsys.readouterr()
    script.main([*words[:2], "readouts"])
    assert "already" not in capsys.readouterr().out


def test_diagnose_of_a_sweep_prints_mean_losses(sweep, tmp_path, capsys):
    """By depth and by readout, as for single adapters, with a line for each method and the base model."""
    options = ["--diagnostics", "readouts", "depth_matrix", "--num_examples", "2", "--eval_num_loops", "2", "4"]
    load_script("recipes/diagnose.py").main([str(sweep), *options])
    printed = capsys.readouterr().out
    for title, metric, place in (("with K loops", "depth_loss", "num_loops"), ("read out", "readout_loss", "loop")):
        start = rf"Loss on held-out examples \([\d,]+ tokens\),? {title}.*, in nats per token, mean ± SD over 2 seeds\n.+\n"
        lines = re.search(start + r"((?:.+\n){3})", printed)[1].splitlines()
        means = {re.split(r" {2,}", line.strip())[0]: re.split(r" {2,}", line.strip())[1:] for line in lines}
        assert {*means} == {"base model", "LoRA", "Loop Dropout"}
        for name, method in (("lora", "LoRA"), ("loop_dropout", "Loop Dropout")):
            rows = [row for seed in (1, 2) for row in read_results(sweep / name / f"lr_0.001/seed_{seed}/diagnostics")]
            own = [row for row in rows if (row["metric"], row["method"]) == (metric, method)]
            places = sorted({row[place] for row in own})
            values = [[row["value"] for row in own if row[place] == at] for at in places]
            expected = [f"{np.mean(pair):.4f} ± {np.std(pair, ddof=1):.4f}" for pair in values]
            assert means[method] == expected
    assert "There is no table" not in printed and f"\nNext:\n  loopdropout report {sweep}" in printed
    load_script("recipes/report.py").main([str(sweep), "--output_dir", str(tmp_path / "report")])
    shown = capsys.readouterr().out
    for name, place, places in (("depth_loss", "K", [2, 4]), ("readout_loss", "loop", [1, 2, 3, 4])):
        numbers = pd.read_csv(tmp_path / f"report/{name}.csv").set_index("method")
        assert [*numbers.loc["LoRA", place]] == places and {*numbers.loc["LoRA", "num_seeds"]} == {2}
        assert numbers.loc["Loop Dropout", "sd"].notna().all()
        assert (tmp_path / f"report/{name}.tex").is_file()
    tables = [line for line in printed.splitlines() if line.startswith(("Loss on", "LoRA"))]
    assert len(tables) == 4 and {*tables} <= {*shown.splitlines()}


def test_diagnosed_runs_of_a_sweep_have_the_names_and_the_order_of_its_report(sweep, tmp_path, capsys):
    for run in sweep.rglob("recipe.yaml"):
        run.write_text(run.read_text().replace("run_name: mine/loop_dropout", "run_name: mine/ours"))
    (sweep / "loop_dropout").rename(sweep / "ours")
    runs = [str(sweep / method / "lr_0.001/seed_1") for method in ("ours", "lora")]
    options = ["--diagnostics", "single_loop", "--num_examples", "2", "--output_dir", str(tmp_path / "out")]
    load_script("recipes/diagnose.py").main([*runs, *options])
    names = re.findall(r"^(LoRA|ours|Loop Dropout) +[\d.-]+", capsys.readouterr().out, re.MULTILINE)
    assert names == ["LoRA", "ours"]


def test_diagnose_of_a_sweep_without_a_choice_says_so(sweep, capsys):
    update_summary(sweep, choices={name: {"best": None, "remark": "Wait."} for name in ("lora", "loop_dropout")})
    load_script("recipes/diagnose.py").main([str(sweep), "--diagnostics", "single_loop", "--num_examples", "2"])
    printed = capsys.readouterr().out
    assert f"Left out: 2 runs of lora in {sweep}, because no learning rate is chosen. Wait." in printed
    assert "There is no table, because the sweep has not chosen the learning rate of any method yet." in printed


def test_diagnose_loads_the_base_model_and_the_data_of_a_sweep_once(sweep, monkeypatch):
    names, tokenizers = [], []

    def load_base(source, **options):
        names.append(source.name)
        return loading_base(source, **options)

    def load_data(data_args, tokenizer, *more):
        tokenizers.append(tokenizer)
        return loading_data(data_args, tokenizer, *more)

    loading_base, loading_data = loading.load_base, diagnosed_data.load_datasets
    monkeypatch.setattr(loading, "load_base", load_base)
    monkeypatch.setattr(diagnosed_data, "load_datasets", load_data)
    words = [str(sweep), "--diagnostics", "single_loop", "--dtype", "float32"]
    load_script("recipes/diagnose.py").main(words)
    assert len(names) == len(tokenizers) == 1


def test_key_of_a_diagnosed_model_has_all_that_its_results_depend_on():
    key_of_model = load_script("recipes/diagnose.py").key_of_model
    batch = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[3, 4]])}
    args = {"task": "a", "diagnostics": ["readouts"], "eval_num_loops": None}
    source = {"name": "a", "kind": "a", "base": "a", "revision": None, "training_id": None, "num_loops": 4}

    def key(args=args, source=source, dtype="float32", num_loops=4, batches=(batch,)):
        return key_of_model(SimpleNamespace(**args), SimpleNamespace(**source), dtype, num_loops, [*batches])

    keys = [key(), key(dtype="bfloat16"), key(num_loops=2), key(batches=[batch, batch])]
    keys += [key(args={**args, name: [9]}) for name in args] + [key(source={**source, name: 9}) for name in source]
    others = [{**batch, "labels": torch.tensor([[3, 5]])}, {**batch, "labels": torch.tensor([[3], [4]])}]
    others += [{"input_ids": batch["input_ids"], "mask": batch["labels"]}]
    keys += [key(batches=[other]) for other in others]
    assert len({*map(str, keys)}) == len(keys) == 16 and key() == key()


def test_diagnose_measures_the_base_model_of_a_sweep_once(sweep, monkeypatch, capsys):
    """Once for all runs with the same examples. Each run has its results, as if it was measured alone."""
    other = sweep / "lora/lr_0.001/seed_2"
    text = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(text.replace("num_eval_examples: 6", "num_eval_examples: 2"))
    script, kinds = load_script("recipes/diagnose.py"), []

    def measure(args, source, *more):
        kinds.append(source.kind)
        return own_measure(args, source, *more)

    own_measure = script.measure
    monkeypatch.setattr(script, "measure", measure)
    options = ["--diagnostics", "readouts", "--num_examples", "3"]
    script.main([str(sweep), *options])
    assert kinds.count("adapter") == 4 and kinds.count("base model") == 2
    assert capsys.readouterr().out.count(": base model, ") == 1  # its description
    last = sweep / "loop_dropout/lr_0.001/seed_2"
    for run in (last, other):
        rows = read_results(run / "diagnostics")
        shutil.rmtree(run / "diagnostics")
        script.main([str(run), *options])
        assert read_results(run / "diagnostics") == rows


def test_diagnosed_seeds_of_a_sweep_are_measured_alike(sweep, capsys):
    """The run that chose the learning rate has losses of fewer examples, for which the final recipe does not ask."""
    run = sweep / "lora/lr_0.001/seed_1"
    settings = (run / "recipe.yaml").read_text()
    own = {"metric": "loss_reduction", "task": "development", "unit": "%", "num_loops": 4, "n": 9, "training": "lora1"}
    own |= {"method": "LoRA", "seed": 1, "step": 3}
    write_results(run, [{**own, "gates": f"loop {loop}", "loop": loop, "value": 1.0} for loop in range(1, 5)])
    assert 9 in {*load_results(sweep)["n"]}
    (run / "recipe.yaml").write_text(
        f"{settings}single_loop_batches: 0\n"
    )  # of the final runs: no seed has such losses
    results = load_results(sweep)
    command = f"`loopdropout diagnose {sweep}` measures all seeds alike."
    assert 9 not in {*results["n"]} and command in results.attrs["left_out"]
    (run / "recipe.yaml").write_text(settings)
    load_script("recipes/diagnose.py").main([str(sweep), "--diagnostics", "single_loop"])
    results = load_results(sweep)
    assert 9 not in {*results["n"]} and len({*results.query("metric == 'loss_reduction'")["n"]}) == 1
    assert "choice of a learning rate. The results of `diagnose` are shown instead." in results.attrs["left_out"]
    with (run / "recipe.yaml").open("a") as file:
        file.write("single_loop_batches: 1\n")  # then they are the training's own
    groups = split_reductions(load_results(sweep))
    assert [len(rows) for rows in groups.values()] == [16, 4]


def test_diagnose_of_a_sweep_explains_mistakes(sweep, tmp_path):
    script = load_script("recipes/diagnose.py")
    for more, message in {
        "x": "Measure one sweep at a time, without other names, got also x",
        "--output_dir x": "`output_dir` must be left out for a sweep",
        "--learning_rate 1": "`learning_rate` is a field of trainings",
    }.items():
        with user_error(message):
            script.main([str(sweep), *more.split()])
    for name in ("lora", "loop_dropout"):
        shutil.rmtree(sweep / name / "lr_0.001")
    with user_error("has no trained adapter yet"):
        script.main([str(sweep)])


def test_diagnose_leaves_the_results_of_trainings(saved, tmp_path, capsys):
    """A report has the trainings' own numbers, also if the same adapters were measured later on other examples."""
    runs = [shutil.copytree(saved / name, tmp_path / name) for name in ("lora", "ours")]
    own = {"metric": "loss_reduction", "task": "development", "unit": "%", "num_loops": 4, "n": 246}
    for seed, run in enumerate(runs):
        at = {"method": run.name, "seed": seed, "step": 3}
        places = [{"gates": f"loop {loop}", "loop": loop, "value": 10.0 * loop} for loop in range(1, 5)]
        write_results(run, [{**own, **at, **place} for place in places])
        write_results(run, [{**at, "metric": "num_tokens", "task": "training", "num_loops": 4, "value": 1.0}])
    before = [(run / "results.jsonl").read_text() for run in runs]
    script = load_script("recipes/diagnose.py")
    words = ["--num_examples", "2", "--diagnostics", "single_loop"]
    script.main([*map(str, runs), *words, "--model_name_or_path", str(saved / "base")])
    script.main([str(saved / "recipe.yaml"), *map(str, runs), *words, "--output_dir", str(runs[1])])
    assert [(run / "results.jsonl").read_text() for run in runs] == before
    assert f"are in {runs[0]}/diagnostics/results.jsonl" in capsys.readouterr().out
    results = load_results(tmp_path)
    shown = results.query("metric == 'loss_reduction' and gates != 'unit'")
    assert {*shown["n"]} == {246} and sorted(shown["value"]) == sorted(2 * [10.0, 20.0, 30.0, 40.0])
    folders = [str(run / "diagnostics") for run in runs]
    place = f"2 folders such as {folders[0]}"
    assert results.attrs["left_out"].startswith(f"Left out: 16 results in {place}, because the trainings ")
    assert (
        "perhaps on other examples, so that the tables compare all trainings on the same ones."
        in results.attrs["left_out"]
    )
    assert {*load_results(folders[0]).query("metric == 'loss_reduction'")["n"]} != {246}
    assert load_results(folders[0]).attrs["left_out"] == ""


def test_diagnose_runs_each_diagnostic_on_a_task(saved, tmp_path, capsys):
    own = json.dumps({"own_gsm8k": {"files": str(SAMPLES / "gsm8k_test.jsonl"), "like": "gsm8k"}})
    task = ("--task", "own_gsm8k", "--num_examples", 3, "--own_benchmarks", own, "--eval_num_loops", 2)
    rows = diagnose(saved, tmp_path, *task, "--diagnostics", "readouts", "depth_matrix", "curvature")
    assert {row["task"] for row in rows} == {"own_gsm8k"} and len(rows) == (3 * 2 + 2) * (4 + 1)
    own, printed = values(rows, "curvature", method="ours"), capsys.readouterr().out
    assert values(rows, "curvature_term", method="ours") == pytest.approx([sum(own) / 2])
    assert f"{own[0]:.4g}" in printed and re.search(r"curvature \(nats per token\)\nmethod +loop 1  ", printed)


def test_diagnose_prints_losses_by_depth_and_readout(saved, tmp_path, capsys):
    """Also next to the loss reductions, in a table with the base model and a column for each number of loops."""
    rows = diagnose(saved, tmp_path, "--eval_num_loops", 8, 2)
    printed = capsys.readouterr().out
    (number,) = {row["n"] for row in rows if row["metric"] == "depth_loss"}
    for title, metric, heads, column in (
        ("with K loops", "depth_loss", ["K=2", "K=8"], "num_loops"),
        ("read out after each loop", "readout_loss", [f"loop {loop}" for loop in range(1, 5)], "loop"),
    ):
        start = rf"Loss on held-out examples \({number:,} tokens\),? {title}, in nats per token\n"
        head, *lines = re.search(start + r"((?:.+\n){4})", printed)[1].splitlines()
        assert re.split(r" {2,}", head.strip()) == ["method", *heads]
        for line, method in zip(lines, ("base model", "lora", "ours"), strict=True):
            own = {
                row[column]: f"{row['value']:.4f}"
                for row in rows
                if (row["metric"], row["method"]) == (metric, method)
            }
            assert re.split(r" {2,}", line.strip()) == [method, *(own[place] for place in sorted(own))]


def test_diagnose_explains_mistakes(saved, tmp_path):
    for words, message in {
        "--learning_rate 1": "`learning_rate` is a field of trainings, which has no effect",
        "--diagnostics curvature --dtype bfloat16": "`dtype` must be float32 for `curvature`",
        "--num_train_examples 10": "`num_train_examples` changed from 20 to 10. Measure it with its own recipe, "
        rf"`loopdropout diagnose {saved}/lora/recipe.yaml {saved}/lora`. To score other",
        "--num_eval_examples 0": "`num_eval_examples`",
        "--limit 10": "`limit` is not a field of this script. Did you mean 'num_examples'?",
        "--task gsm8k --num_eval_examples 6": "`num_eval_examples` is a field of trainings, which has no effect",
    }.items():
        with user_error(message):
            diagnose(saved, tmp_path, *words.split())
    assert not list(tmp_path.iterdir())


def test_eval_files_are_for_trainings_without_held_out_examples(saved, tmp_path, capsys):
    """Others have held-out examples, next to which own examples are those of an own task."""
    script, run = load_script("recipes/diagnose.py"), tmp_path / "run"
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    for name, path in files.items():
        path.write_text("".join(f'{{"prompt": "{name} {n} =", "completion": " {n}"}}\n' for n in range(3)))
    shutil.copytree(saved / "lora", run)
    recipe = f"dtype: float32\nbf16: false\nuse_cpu: true\ntrain_files: [{files['train']}]\n"
    (run / "recipe.yaml").write_text(recipe)
    words = [str(run), "--dry_run", "true", "--model_name_or_path", str(saved / "base")]
    with user_error("`eval_files` or `task` must be set, because no example is held out"):
        script.main(words)
    script.main([*words, "--eval_files", str(files["held_out"])])
    assert "adapter, 3 examples: single_loop" in capsys.readouterr().out
    (run / "recipe.yaml").write_text(f"{recipe}num_eval_examples: 1\n")
    changed = ["--num_eval_examples", "null", "--eval_files", str(files["held_out"])]
    with user_error("changed from .* describe them in `own_benchmarks` and name them in `task`"):
        script.main([*words, *changed])
    with user_error("`task` must be set, or a recipe given with held-out examples"):
        script.main([str(saved / "base"), *words[1:]])


@pytest.mark.slow
def test_two_processes_find_the_results_of_one(saved, tmp_path):
    one = diagnose(saved, tmp_path / "one")
    python(ROOT / "recipes" / "diagnose.py", *words(saved, tmp_path / "two"), processes=2)
    two = read_results(tmp_path / "two")
    assert [row["value"] for row in two] == pytest.approx([row["value"] for row in one])


def test_results_in_python_have_the_method(train, tokenizer):
    """A table of rows without a method has NaN there."""
    model, batches = train(max_steps=1).model, label_batches(EXAMPLES, tokenizer, 2)
    base, *others = single_loop(model, batches)
    others += [*readouts(model, batches), *depth_matrix(model, batches, [1]), *curvature(model, batches)]
    assert base["method"] == "base model" and {row["method"] for row in others} == {"Loop Dropout"}
