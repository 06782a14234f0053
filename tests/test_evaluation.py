"""The scorers against the references' verdicts, and evaluations that are interrupted."""

import gzip
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import GOLDEN, tiny_ouro
from peft import PeftModel
from test_generation import PROMPTS, adapted, varied

from loopdropout_trainer import LoopDropoutSFTTrainer, merge_and_save
from loopdropout_trainer.evaluation import (
    BENCHMARKS,
    Metric,
    Subject,
    evaluate_subject,
    generate_greedy,
    load_benchmark,
    load_metric,
    load_results,
    summarize_seeds,
)
from loopdropout_trainer.evaluation.answer_log import AnswerLog, SettingsChangedError
from loopdropout_trainer.evaluation.loading import load_model
from loopdropout_trainer.evaluation.metrics import gsm8k_strict, metamath_gsm8k, metamath_math
from loopdropout_trainer.evaluation.run import EvaluationArguments
from loopdropout_trainer.reports.averaging import difference
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import parse_recipe


SAMPLES = Path(__file__).parent / "samples"
RECIPES = Path(__file__).parent.parent / "recipes"


def read_json(name):
    with gzip.open(GOLDEN / name, "rt") as file:
        return json.load(file)


def vectors(name, kind=None):
    with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if kind is None or row["kind"] == kind]


# Scorers


SCORERS = {  # metric: its vectors, their number, the names of what is judged, and what it is judged by
    metamath_gsm8k: ("metamath_scorer", "gsm8k", 1561, "completion", "gold"),
    metamath_math: ("metamath_scorer", "math", 1490, "completion", "gold"),
    gsm8k_strict: ("gsm8k_strict", None, 897, "response", "target"),
}


@pytest.mark.parametrize("module", SCORERS)
def test_a_scorer_gives_the_reference_verdict_on_every_string(module):
    file, kind, number, judged, by = SCORERS[module]
    rows = vectors(file, kind)
    assert len(rows) == number
    for row in rows:
        verdict = module.score(row[judged], row[by])
        # With the standard library's Fraction in place of the package of that name, the reference differs on 9 rows.
        want = {**row, **row.get("stdlib", {})}
        extracted = "[invalid]" if verdict.extracted is None and module is gsm8k_strict else verdict.extracted
        assert extracted == want["extracted"], row["id"]
        assert verdict.correct == row["correct"] or "stdlib" in row, row["id"]
        assert (verdict.error is None) == (want.get("error") is None), row["id"]
        assert module is not metamath_math or verdict.error == row["error"], row["id"]
    pairs = [(row[judged], str(row[by])) for row in rows if module is not metamath_math or isinstance(row[by], str)]
    name = module.__name__.rpartition(".")[2]
    metric = load_metric(name).compute(predictions=[pair[0] for pair in pairs], references=[pair[1] for pair in pairs])
    verdicts = [module.score(*pair) for pair in pairs]
    assert metric["correct"] == [verdict.correct for verdict in verdicts]
    assert metric["accuracy"] == pytest.approx(sum(metric["correct"]) / len(pairs))
    assert metric["missing_rate"] == pytest.approx(sum(each.extracted is None for each in verdicts) / len(pairs))


def test_metamath_golds_and_equivalences_agree_with_the_reference():
    for row in vectors("metamath_scorer", "equiv"):
        assert metamath_math.utils.is_equiv(row["a"], row["b"]) == row["correct"], row["id"]
    for row in vectors("metamath_scorer", "math_gold"):
        if row["error"] is None:
            assert metamath_math.extract_gold(row["solution"]) == row["gold"], row["id"]
    for row in vectors("metamath_scorer", "gsm8k_gold"):
        if row["error"] is None:
            assert metamath_gsm8k.extract_gold(row["response"]) == row["gold"], row["id"]
        else:
            with pytest.raises(ValueError):
                metamath_gsm8k.extract_gold(row["response"])


# Benchmarks


def test_prompts_budgets_and_references_of_real_problems():
    alpaca = load_benchmark("metamath_gsm8k", SAMPLES / "gsm8k_test.jsonl", limit=3)
    assert alpaca.prompts[1] == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nA robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total "
        "does it take?\n\n### Response: Let's think step by step."
    )
    assert (alpaca.references, alpaca.max_new_tokens, len(alpaca.stop_strings)) == (["18", "3", "70000"], 512, 10)
    math = load_benchmark("metamath_math500", SAMPLES / "math500_test.jsonl")
    assert math.references[:2] == ["\\left( 3, \\frac{\\pi}{2} \\right)", "p - q"]
    assert (len(math.prompts), math.max_new_tokens, math.stop_strings) == (8, 2048, alpaca.stop_strings)
    direct = load_benchmark("gsm8k", SAMPLES / "gsm8k_test.jsonl", limit=2)
    assert direct.prompts[1].startswith("Question: A robe takes") and direct.prompts[1].endswith("it take?\nAnswer:")
    assert direct.references[1].endswith("#### 3") and direct.max_new_tokens == 256
    assert load_benchmark("arithmetic_hard", limit=2).references[0].count("\n") in (6, 7)
    assert load_benchmark("arithmetic_wording", limit=2).prompts[0].startswith("Question: At first ")
    assert int(re.search(r"\d+", load_benchmark("arithmetic_larger", limit=1).prompts[0])[0]) > 20


def test_bad_benchmarks_are_refused_with_file_and_line(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "two"}\n{"question": "no answer"}\n{"quest')
    for name, limit, message in (
        ("gsm8k", 2, "problems.jsonl, row 2 .*'answer'"),
        ("metamath_gsm8k", 1, "row 1 is .* no `#### `"),
        ("gsm9k", None, "must be among metamath_gsm8k"),
    ):
        with pytest.raises(ValueError, match=message):
            load_benchmark(name, file, limit)
    assert len(load_benchmark("gsm8k", file, limit=1).prompts) == 1
    file.write_text('{"quest')
    with pytest.raises(ValueError, match="row 1 is .* broken JSON"):
        load_benchmark("gsm8k", file)


# Evaluation


def steady():
    """A random model for long prompts, without near ties, which the batch size may decide in float32."""
    return varied(tiny_ouro(max_position_embeddings=8192), std=0.1)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Folders of a model, of an adapter of it, and of the two merged."""
    folder = tmp_path_factory.mktemp("saved")
    model = adapted(steady())
    steady().save_pretrained(folder / "base")
    model.save_pretrained(folder / "adapter")
    merge_and_save(model, folder / "merged", tokenizer)
    tokenizer.save_pretrained(folder / "base")
    return folder


def command(*arguments, **fields):
    """The arguments of evaluate.py, by default for two benchmarks on the sample problems."""
    fields = {"dtype": "float32", **fields}
    options = [str(part) for key, value in fields.items() for part in (f"--{key}", value)]
    return [*map(str, arguments), *options]


def on_samples(saved, output_dir, **fields):
    files = json.dumps({"gsm8k": str(SAMPLES / "gsm8k_test.jsonl")})
    fields = {"model_name_or_path": saved / "base", "benchmark_files": files, "benchmark_limit": 8, **fields}
    return command("--benchmarks", "gsm8k", "arithmetic_test", output_dir=output_dir, **fields)


def evaluate(arguments):
    """Run recipes/evaluate.py in this process."""
    runpy.run_path(str(RECIPES / "evaluate.py"))["main"](arguments)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT["PYTHONPATH"] = str(RECIPES.parent)


def python(*command, processes=1, **options):
    """Run a script or module, in several processes if there are several; return what it printed."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    )
    command, options = [sys.executable, *launcher, *map(str, command)], {"env": ENVIRONMENT, **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_when(is_time, *command, env=ENVIRONMENT):
    """Run a script, and kill it as soon as `is_time()`."""
    process = subprocess.Popen([sys.executable, *map(str, command)], env=env, stderr=subprocess.DEVNULL)
    while not is_time():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_an_evaluation_that_is_killed_is_continued_by_two_processes(saved, tokenizer, tmp_path):
    arguments = on_samples(saved, tmp_path, adapter=saved / "adapter")
    answers = tmp_path / "answers" / "adapter" / "gsm8k" / "00000.jsonl"
    script = [RECIPES / "evaluate.py", *arguments, "--benchmark_batch_size"]
    kill_when(lambda: answers.is_file() and answers.read_bytes().count(b"\n") >= 2, *script, 1)
    before = answers.read_text()
    assert 2 <= before.count("\n") < 8 and not (tmp_path / "evaluation.json").is_file()
    python(*script, 3, processes=2)
    assert answers.read_text().startswith(before[: before.rfind("\n") + 1])
    assert all((answers.parent / f"0000{rank}.jsonl").is_file() for rank in (0, 1))

    model = PeftModel.from_pretrained(steady(), saved / "adapter")
    results = load_results(tmp_path / "evaluation.json")
    for name, file in (("gsm8k", SAMPLES / "gsm8k_test.jsonl"), ("arithmetic_test", None)):
        benchmark = load_benchmark(name, file, limit=8)
        assert results[name] == evaluate_subject(Subject(model, tokenizer, 16), benchmark, progress=False)
    row = json.loads((tmp_path / "evaluation.json").read_text())["rows"]["adapter"]
    run_info = row["benchmarks"]["gsm8k"]["run_info"]
    assert run_info["num_processes"] == 2 and run_info["settings"]["benchmark_batch_size"] == 3
    assert run_info["versions"]["torch"] == version("torch")
    assert row["meta_info"]["num_loops"] == 4 and row["train_info"]["r"] == 4


def test_a_merged_model_gives_what_its_adapter_gives_by_a_recipe_of_training(saved, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {saved / 'base'}\ndtype: float32\nbenchmarks: [arithmetic_test]\nbenchmark_limit: 4\n"
        f"output_dir: {tmp_path / 'run'}\nlearning_rate: 1e-4\nrule: loop_dropout\np: 0.5\nlora_r: 4\nmerge: true\n"
    )
    evaluate([str(recipe), "--adapter", str(saved / "adapter")])
    merged = ["--model_name_or_path", str(saved / "merged"), "--output_dir", str(tmp_path / "m")]
    evaluate([str(recipe), *merged])
    assert load_results(tmp_path / "run/evaluation.json") == load_results(tmp_path / "m/evaluation.json")
    with pytest.raises(SettingsChangedError, match="row `adapter`.*`adapter` was '[0-9a-f]+' and is None"):
        evaluate([str(recipe), "--adapter", "adapter=none"])
    with pytest.raises(ValueError, match="`gates` .* each of the 4 loops"):
        evaluate([str(recipe), "--gates", "1-0", "--adapter", str(saved / "adapter")])
    assert not (tmp_path / "run/answers/base").exists()  # nothing of it was begun


def test_an_adapter_gives_in_bfloat16_what_it_gave_at_the_end_of_training(tokenizer, config, dataset, tmp_path):
    varied(tiny_ouro()).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = ModelArguments(str(tmp_path / "base"), dtype="bfloat16")
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    arguments = config(learning_rate=0.1, model_init_kwargs=base.init_kwargs)
    trainer = LoopDropoutSFTTrainer(base.model_name_or_path, arguments, **data)
    trainer.train()
    trainer.save_model()
    want = generate_greedy(trainer.model, tokenizer, PROMPTS, 24, progress=False)
    assert generate_greedy(*load_model(base, trainer.args.output_dir), PROMPTS, 24, progress=False) == want
    assert generate_greedy(*load_model(base), PROMPTS, 24, progress=False) != want


def test_depths_and_single_loops_are_rows_of_one_evaluation(saved, tokenizer, tmp_path):
    options = on_samples(saved, tmp_path, adapter=saved / "adapter", benchmark_limit=2, max_new_tokens=8)
    evaluate([*options, "--at_depths", "2", "3", "--gates", "single_loop"])
    evaluate([*options, "--gates", "1-1-1-1", "0-1-0-0"])
    rows = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    found = {name: (row["meta_info"]["num_loops"], row["meta_info"]["gates"]) for name, row in rows.items()}
    assert found == {
        **{f"adapter_K2_loop{t}": (2, [float(t == 1), float(t == 2)]) for t in (1, 2)},
        **{f"adapter_K3_loop{t}": (3, [float(t == each) for each in (1, 2, 3)]) for t in (1, 2, 3)},
        "adapter_gates_1-1-1-1": (4, None),
        "adapter_gates_0-1-0-0": (4, [0, 1, 0, 0]),
    }
    model = PeftModel.from_pretrained(steady(), saved / "adapter")
    model.get_base_model().config.num_loops = 3
    benchmark = load_benchmark("gsm8k", SAMPLES / "gsm8k_test.jsonl", limit=2)
    want = evaluate_subject(Subject(model, tokenizer, gates="0-1-0", max_new_tokens=8), benchmark, progress=False)
    assert load_results(tmp_path / "evaluation.json", "adapter_K3_loop2")["gsm8k"] == want


def test_weights_that_are_not_finite_are_refused_and_nan_is_never_written(saved, tokenizer, tmp_path):
    model = steady()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    arguments = on_samples(saved, tmp_path / "out", model_name_or_path=tmp_path / "base")
    with pytest.raises(ValueError, match="base holds NaN or infinity in `lm_head.weight`") as caught:
        evaluate(arguments)
    assert "\n" not in str(caught.value) and not (tmp_path / "out" / "evaluation.json").exists()
    with pytest.raises(ValueError, match="not a finite number"):
        Metric.of([1.0, float("nan")])
    with pytest.raises(ValueError):
        AnswerLog(tmp_path).keep([("a", float("nan"))])
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("line", ["{broken", "[]", '{"key": 1}', "\xff", '{"key": [1], "answer": 2}'])
def test_a_damaged_line_of_a_log_is_named_and_an_unfinished_one_removed(tmp_path, line):
    log, path = AnswerLog(tmp_path), tmp_path / "00000.jsonl"
    log.read({"a": 1})
    log.keep([(0, "x"), (1, "y")])
    complete = path.read_bytes()
    path.write_bytes(complete + line.encode("latin-1"))
    assert AnswerLog(tmp_path).read({"a": 1}) == {0: "x", 1: "y"} and path.read_bytes() == complete
    path.write_bytes(complete + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="00000.jsonl, line 3, .*remove") as caught:
        AnswerLog(tmp_path).read({"a": 1})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [*sorted((RECIPES / "evaluation").glob("*.yaml")), RECIPES / "quickstart.yaml"])
def test_every_evaluation_recipe_and_a_training_recipe_are_understood(path):
    unread = runpy.run_path(str(RECIPES / "evaluate.py"))["OF_TRAINING"]
    (_, arguments), _ = parse_recipe((ModelArguments, EvaluationArguments), [str(path)], unread_types=unread)
    assert set(arguments.benchmarks) <= set(BENCHMARKS)


# Statistics


def test_means_and_standard_deviations_are_those_of_the_paper():
    rows = read_json("eval_stats.json.gz")["paper"]["mean_sd"]
    assert len(rows) == 22
    for row in rows:
        summary = summarize_seeds(row["per_seed_correct"], row["n"])
        assert f"{summary.mean:.2f} {summary.sd:.2f}" == f"{row['mean_printed']} {row['sd_printed']}", row
    assert str(summarize_seeds([1148, 1139, 1137], 1319)) == "86.53 ± 0.44"
    assert str(summarize_seeds([1148], 1319)) == "87.04"
    for counts in ([11], []):
        with pytest.raises(ValueError, match="between 0 and the 10 problems"):
            summarize_seeds(counts, 10)


def rows_of(seeds):
    bits = lambda text: np.array([each == "1" for each in text])
    rows = [{"verdicts": 1.0 * bits(seed["correct"]), "answered": bits(seed["extractable"])} for seed in seeds]
    rows = [{**row, "value": 100 * row["verdicts"].mean(), "seed": n} for n, row in enumerate(rows)]
    return pd.DataFrame(rows).assign(benchmark="b", metric="b")


def test_decompositions_are_those_of_the_reference():
    parts = {"both_extractable": "per_seed_both", "missing_in_either": "per_seed_missing", None: "per_seed_total"}
    for case in read_json("eval_stats.json.gz")["synthetic"]:
        a, b, want = rows_of(case["a"]), rows_of(case["b"]), case["expected"]
        for part, name in parts.items():
            assert difference(b, a, "b - a", part).tolist() == pytest.approx(want[name])
        missing = [500 - answered.sum() for answered in a["answered"]]
        assert summarize_seeds(missing, 500).mean == pytest.approx(want["missing_pct_a"])
