"""The scorers against the references' verdicts; evaluations end to end, also of instruction tuning, and interrupted."""

import copy
import gzip
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import GOLDEN, ROOT, SAMPLES, contents, load_script, tiny_ouro
from peft import PeftModel
from processes import ENVIRONMENT, Program, python, wait_for
from test_generation import PROMPTS, adapted, varied

from loopdropout_trainer import LoopDropoutSFTTrainer, merge_and_save
from loopdropout_trainer.evaluation import (
    BENCHMARKS,
    GeneratedBenchmark,
    Subject,
    evaluate_subject,
    generate_greedy,
    load_benchmark,
    load_predictions,
    mean_sd,
    score_completions,
)
from loopdropout_trainer.evaluation.benchmark import AnswerLog, SettingsChangedError
from loopdropout_trainer.evaluation.benchmarks import metamath
from loopdropout_trainer.evaluation.benchmarks.gsm8k import gsm8k_strict
from loopdropout_trainer.evaluation.results import results_table
from loopdropout_trainer.evaluation.run import EvaluationArguments
from loopdropout_trainer.evaluation.subject import load_model, training_of
from loopdropout_trainer.record.identity import model_identity
from loopdropout_trainer.record.measurement import MEASUREMENTS_FILE, Measurement, read_measurements
from loopdropout_trainer.reports.averaging import difference
from loopdropout_trainer.saving.files import folder_lock
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import load_recipe, parse_recipe


pytest.importorskip("lm_eval")
from lm_eval.tasks.hendrycks_math.utils import is_equiv  # noqa: E402


RECIPES = ROOT / "recipes"
STATISTICS = json.loads(gzip.decompress((GOLDEN / "eval_stats.json.gz").read_bytes()))


def vectors(name, kind=None):
    rows = map(json.loads, gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()).splitlines())
    return [row for row in rows if kind is None or row["kind"] == kind]


SCORERS = {  # metric: its vectors, their number, the names of what is judged, and what it is judged by
    metamath.metamath_gsm8k: ("metamath_scorer", "gsm8k", 1561, "completion", "gold"),
    metamath.metamath_math: ("metamath_scorer", "math", 1490, "completion", "gold"),
    gsm8k_strict: ("gsm8k_strict", None, 897, "response", "target"),
}


@pytest.mark.parametrize("score", SCORERS)
def test_a_scorer_gives_the_reference_verdict_on_every_string(score):
    file, kind, number, judged, by = SCORERS[score]
    rows = vectors(file, kind)
    assert len(rows) == number
    for row in rows:
        verdict = score(row[judged], row[by])
        # With the standard library's Fraction in place of the package of that name, the reference differs on 9 rows.
        want = {**row, **row.get("stdlib", {})}
        extracted = "[invalid]" if verdict.extracted is None and score is gsm8k_strict else verdict.extracted
        assert extracted == want["extracted"], row["id"]
        assert verdict.correct == row["correct"] or "stdlib" in row, row["id"]
        assert (verdict.error is None) == (want.get("error") is None), row["id"]
        assert score is not metamath.metamath_math or verdict.error == row["error"], row["id"]


def test_metamath_golds_and_equivalences_agree_with_the_reference():
    for row in vectors("metamath_scorer", "equiv"):
        assert is_equiv(row["a"], row["b"]) == row["correct"], row["id"]
    for row in vectors("metamath_scorer", "math_gold"):
        if row["error"] is None:
            assert metamath.gold_latex(row["solution"]) == row["gold"], row["id"]
    for row in vectors("metamath_scorer", "gsm8k_gold"):
        with pytest.raises(ValueError) if row["error"] else nullcontext():
            assert metamath.gold_number(row["response"]) == row["gold"], row["id"]


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
    options = [part for key, value in {"dtype": "float32", **fields}.items() for part in (f"--{key}", value)]
    return [*map(str, (*arguments, *options))]


def on_samples(saved, output_dir, **fields):
    """The arguments of evaluate.py for two benchmarks on the sample problems."""
    files = json.dumps({"gsm8k": str(SAMPLES / "gsm8k_test.jsonl")})
    fields = {"model_name_or_path": saved / "base", "benchmark_files": files, "benchmark_limit": 8, **fields}
    return command("--benchmarks", "gsm8k", "arithmetic_test", output_dir=output_dir, **fields)


SCRIPT = load_script("recipes/evaluate.py")
evaluate = SCRIPT.main  # in this process


def kill_when(is_time, *command):
    """Run a script, and kill it as soon as `is_time()`."""
    program = Program(*command)
    wait_for(is_time, program)
    program.end()


def test_an_evaluation_that_is_killed_is_continued_by_two_processes(saved, tokenizer, tmp_path):
    arguments = on_samples(saved, tmp_path, adapter=saved / "adapter")
    answers = tmp_path / "answers" / "adapter" / "gsm8k" / "00000.jsonl"
    script = [RECIPES / "evaluate.py", *arguments, "--benchmark_batch_size"]
    kill_when(lambda: answers.is_file() and answers.read_bytes().count(b"\n") >= 2, *script, 1)
    before = answers.read_text()
    assert 2 <= before.count("\n") < 8 and not (tmp_path / MEASUREMENTS_FILE).is_file()
    python(*script, 3, processes=2)
    assert answers.read_text().startswith(before[: before.rfind("\n") + 1])
    assert all((answers.parent / f"0000{rank}.jsonl").is_file() for rank in (0, 1))

    model = PeftModel.from_pretrained(steady(), saved / "adapter")
    rows, identities = measured(tmp_path)
    for name, file in (("gsm8k", SAMPLES / "gsm8k_test.jsonl"), ("arithmetic_test", None)):
        benchmark = load_benchmark(name, file, limit=8)
        want = evaluate_subject(Subject(model, tokenizer, 16), benchmark, progress=False)
        assert load_predictions(tmp_path / "answers/adapter" / name) == want.predictions
        lines = (answers.parents[1] / name / "predictions.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [each.as_json() for each in want.predictions]
        (row,) = rows[f"evaluation/adapter/{name}", "accuracy"]
        assert (row.metric, row.value, row.total, row.depth, row.gates) == (name, want.score, 8, 4, "all")
        assert sum(row.verdicts) == want.correct and sum(row.answered) == 8 - want.missing
        identity = identities[row.identity]
        assert identity["settings"]["max_new_tokens"] == benchmark.max_new_tokens
        assert identity["versions"]["torch"] == version("torch") and identities[row.run]["adapter"]["r"] == 4
    files = {"answers", "identities.json", "writers.json", MEASUREMENTS_FILE}
    assert {path.name for path in tmp_path.glob("[!.]*")} == files


def measured(folder):
    """The rows of a folder by writer and family, and the identities by key."""
    rows, identities, faults = read_measurements(folder)
    assert not faults
    found = {}
    for row in rows:
        found.setdefault((row.writer, row.family), []).append(row)
    return found, identities


def rewrite(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CHANGES = {  # what is named: the file of the base, and what changes in it
    "`rms_norm_eps` was 1e-06 and is 0.5": ("config.json", {"rms_norm_eps": 0.5}),
    "`rope_parameters.rope_theta` was 1000000.0 and is 5.0": (
        "config.json", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    ),
    "`eos_token` was '<eos>' and is '<pad>'": ("tokenizer_config.json", {"eos_token": "<pad>"}),
    "`split_special_tokens` was None and is True": ("tokenizer_config.json", {"split_special_tokens": True}),
    "`rope_parameters.attention_factor` was None and is 0.05": (
        "config.json", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "attention_factor": 0.05}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("sentence", CHANGES)
def test_another_base_of_the_same_weights_neither_continues_nor_finishes_an_evaluation(
    saved, tmp_path, sentence, killed
):
    base, out = shutil.copytree(saved / "base", tmp_path / "base"), tmp_path / "out"
    words = command("--benchmarks", "arithmetic_test", benchmark_limit=2, max_new_tokens=4, output_dir=out)
    words += ["--model_name_or_path", str(base), "--adapter", f"a={saved / 'adapter'}"]
    evaluate(words)
    if killed:  # after one of two answers
        answers = out / "answers/a/arithmetic_test/00000.jsonl"
        answers.write_text(answers.read_text().splitlines(keepends=True)[0])
        (out / MEASUREMENTS_FILE).unlink()
    file, change = CHANGES[sentence]
    rewrite(base / file, **change)
    before = contents(out)
    with pytest.raises(SettingsChangedError, match=re.escape(sentence)):
        evaluate(words)
    assert {path: text for path, text in contents(out).items() if "lock" not in path.name} == {
        path: text for path, text in before.items() if "lock" not in path.name
    }


def test_every_adapter_is_loaded_before_the_first_is_evaluated_and_one_evaluation_is_in_a_folder(saved, tmp_path):
    damaged = shutil.copytree(saved / "adapter", tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"damaged")
    words = [*on_samples(saved, tmp_path / "out"), "--adapter", f"a={saved / 'adapter'}", f"b={damaged}"]
    with pytest.raises(ValueError, match="damaged"):
        evaluate(words)
    assert not list((tmp_path / "out").rglob("*.jsonl"))
    with folder_lock(tmp_path / "out" / "answers"):
        python_fails = [sys.executable, str(RECIPES / "evaluate.py"), *on_samples(saved, tmp_path / "out")]
        done = subprocess.run(python_fails, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
    assert done.returncode == 2 and re.search("Another run .* is at work in .*answers", done.stderr.splitlines()[-1])


def test_a_merged_model_gives_what_its_adapter_gives_by_a_recipe_of_training(saved, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {saved / 'base'}\ndtype: float32\nbenchmarks: [arithmetic_test]\nbenchmark_limit: 4\n"
        f"output_dir: {tmp_path / 'run'}\nlearning_rate: 1e-4\nrule: loop_dropout\np: 0.5\nlora_r: 4\nmerge: true\n"
    )
    evaluate([str(recipe), "--adapter", str(saved / "adapter")])
    merged = ["--model_name_or_path", str(saved / "merged"), "--output_dir", str(tmp_path / "m")]
    evaluate([str(recipe), *merged])
    adapted, merged = (
        load_predictions(tmp_path / row / "arithmetic_test") for row in ("run/answers/adapter", "m/answers/base")
    )
    assert adapted == merged
    with pytest.raises(SettingsChangedError, match="row `adapter`.*the adapter's weights are others"):
        evaluate([str(recipe), "--adapter", "adapter=none"])
    with pytest.raises(ValueError, match="`gates` must be"):
        evaluate([str(recipe), "--gates", "1-0", "--adapter", str(saved / "adapter")])
    assert not (tmp_path / "run/answers/base").exists()  # nothing of it was begun


def test_an_adapter_gives_in_bfloat16_what_it_gave_at_the_end_of_training(tokenizer, config, dataset, tmp_path):
    varied(tiny_ouro()).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = ModelArguments(str(tmp_path / "base"), dtype="bfloat16")
    arguments = config(learning_rate=0.1, model_init_kwargs=base.init_kwargs)
    given = {"train_dataset": dataset, "processing_class": tokenizer}
    trainer = LoopDropoutSFTTrainer(base.model_name_or_path, arguments, **given)
    trainer.train()
    trainer.save_model()
    want = generate_greedy(trainer.model, tokenizer, PROMPTS, 24, progress=False)
    assert generate_greedy(*load_model(base, trainer.args.output_dir), PROMPTS, 24, progress=False) == want
    assert generate_greedy(*load_model(base), PROMPTS, 24, progress=False) != want

    folder = Path(trainer.args.output_dir)
    assert training_of(str(folder)).identity == trainer.run_identity
    rewrite(folder / "adapter_config.json", base_model_name_or_path="moved")
    assert training_of(str(folder)).identity == trainer.run_identity
    rewrite(folder / "adapter_config.json", lora_alpha=64)  # what is measured now, that training has not made
    assert training_of(str(folder)).identity["adapter"]["lora_alpha"] == 64


def test_depths_and_single_loops_are_rows_of_one_evaluation(saved, tokenizer, tmp_path):
    options = on_samples(saved, tmp_path, adapter=saved / "adapter", benchmark_limit=2, max_new_tokens=8)
    evaluate([*options, "--at_depths", "2", "3", "--gates", "single_loop"])
    evaluate([*options, "--gates", "1-1-1-1", "0-1-0-0"])
    rows = [row for row in read_measurements(tmp_path)[0] if row.metric == "gsm8k"]
    assert {row.writer.split("/")[1]: (row.depth, row.gates, row.loop) for row in rows} == {
        **{f"adapter_K2_loop{t}": (2, "-".join(str(int(t == loop)) for loop in (1, 2)), t) for t in (1, 2)},
        **{f"adapter_K3_loop{t}": (3, "-".join(str(int(t == loop)) for loop in (1, 2, 3)), t) for t in (1, 2, 3)},
        "adapter_gates_1-1-1-1": (4, "all", None),
        "adapter_gates_0-1-0-0": (4, "0-1-0-0", 2),
    }
    model = PeftModel.from_pretrained(steady(), saved / "adapter")
    model.get_base_model().config.num_loops = 3
    benchmark = load_benchmark("gsm8k", SAMPLES / "gsm8k_test.jsonl", limit=2)
    want = evaluate_subject(Subject(model, tokenizer, gates="0-1-0", max_new_tokens=8), benchmark, progress=False)
    assert load_predictions(tmp_path / "answers/adapter_K3_loop2/gsm8k") == want.predictions


def test_weights_that_are_not_finite_are_refused_and_nan_is_never_written(tokenizer, tmp_path):
    model = steady()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="base holds NaN or infinity in `lm_head.weight`"):
        load_model(ModelArguments(str(tmp_path / "base"), dtype="float32"))
    with pytest.raises(ValueError):
        AnswerLog(tmp_path).keep([("a", float("nan"))])
    assert not list(tmp_path.glob("*.jsonl"))


LOGGED = {"settings": {"a": 1}}


@pytest.mark.parametrize("line", ["{broken", "[]", '{"key": 1}', "\xff", '{"key": [1], "answer": 2}'])
def test_a_damaged_line_of_a_log_is_named_and_an_unfinished_one_removed(tmp_path, line):
    log, path = AnswerLog(tmp_path), tmp_path / "00000.jsonl"
    log.read(LOGGED)
    log.keep([(0, "x"), (1, "y")])
    complete = path.read_bytes()
    path.write_bytes(complete + line.encode("latin-1"))
    again = AnswerLog(tmp_path)
    again.read(LOGGED)
    assert again.answers == {0: "x", 1: "y"} and path.read_bytes() == complete
    path.write_bytes(complete + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="00000.jsonl, line 3, .*remove") as caught:
        AnswerLog(tmp_path).read(LOGGED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["another answer", "another key", "of another model", "of no model"])
def test_an_answer_that_was_edited_or_is_another_models_is_named(tmp_path, change):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder, logged in ((ours, LOGGED), (other, {"settings": {"a": 2}})):
        log = AnswerLog(folder)
        log.read(logged)
        log.keep([(0, "x")])
    line = json.loads((ours / "00000.jsonl").read_text())
    own = {"another answer": {**line, "answer": "#### 5"}, "another key": {**line, "key": 1}}
    foreign = (other / "00000.jsonl").read_text() if change == "of another model" else '{"key": 1, "answer": "x"}\n'
    (ours / "00001.jsonl").write_text(json.dumps(own[change]) + "\n" if change in own else foreign)
    with pytest.raises(ValueError, match="00001.jsonl, line 1, holds no answer of this evaluation as it was written"):
        AnswerLog(ours).read(LOGGED)


@pytest.mark.parametrize("path", [*sorted((RECIPES / "evaluation").glob("*.yaml")), RECIPES / "quickstart.yaml"])
def test_every_evaluation_recipe_and_a_training_recipe_are_understood(path):
    types = (ModelArguments, EvaluationArguments)
    (_, arguments), _ = parse_recipe(types, [str(path)], unread_types=SCRIPT.OF_TRAINING)
    assert set(arguments.benchmarks) <= set(BENCHMARKS)


TULU2 = RECIPES / "evaluation" / "tulu2.yaml"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Stand-in rows of every benchmark of instruction tuning."""
    folder, targets = tmp_path_factory.mktemp("rows"), {"choices": ["Yes.", "It is.", "No."], "labels": [1, 1, 0]}
    choices = lambda i: [str(i), str(2 * i), "7", "8"]
    question = lambda i: {"question": f" What is {i} + {i}?", "choices": choices(i), "answer": i % 4}
    subjects, tasks = ("abstract_algebra", "anatomy", "world_religions"), ("boolean_expressions", "navigate")
    fields = ("key", "prompt", "instruction_id_list", "kwargs")
    rows = {
        "mmlu": [{"subject": subject, **question(i)} for subject in subjects for i in range(5)],
        "bbh": [{"task": task, "idx": 0, "input": "not True is", "target": "False"} for task in tasks],
        "truthfulqa_mc2": [{"question": f"Is {i} a number?", **dict.fromkeys(("mc1_targets", "mc2_targets"), targets)}
                           for i in range(4)],
        "ifeval": [{key: row[key] for key in fields} for row in vectors("ifeval")[:3]],
    }  # fmt: skip
    programs = {name: str(GOLDEN / f"{name}.jsonl.gz") for name in ("humaneval_plus", "mbpp_plus")}
    return programs | {name: write_rows(folder / f"{name}.jsonl", each) for name, each in rows.items()}


def test_ifeval_gives_the_official_verdict_on_every_response():
    pytest.importorskip("langdetect")
    from loopdropout_trainer.evaluation.benchmarks.tulu2 import score_ifeval

    rows = vectors("ifeval")
    assert len(rows) == 270
    for row in rows:
        scores = score_ifeval(row, [row["response"]])
        for name in ("strict", "loose"):
            assert scores[f"inst_level_{name}_acc"] == row[name], row["key"]
            assert scores[f"prompt_level_{name}_acc"] == row[f"prompt_{name}"], row["key"]


def test_the_averages_of_the_recipe_are_those_of_the_papers_table():
    lora = "mmlu 68.64 bbh 71.20 truthfulqa_mc2 47.32 humaneval 71.54 humaneval_plus 67.68 mbpp 75.57 mbpp_plus 64.73"
    words = f"{lora} ifeval_strict 46.33 ifeval_loose 50.59".split()
    facts = {"writer": "evaluation/lora/x", "family": "accuracy", "identity": "key", "unit": "%"}
    pairs = zip(words[::2], words[1::2], strict=True)
    rows = [Measurement(metric=name, value=float(score), **facts) for name, score in pairs]
    averages = load_recipe(TULU2)["averages"]
    table = results_table(rows, ["lora"], averages).splitlines()
    assert [line.split(" | ")[1].rstrip(" |") for line in table[-3:]] == ["69.88", "60.98", "62.62"]
    assert results_table(rows[:1], ["lora"], averages).splitlines()[-3:] == [f"| {name} | - |" for name in averages]


def test_tasks_are_scored_as_lm_eval_does_with_its_own_model_class(files, tokenizer):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    model = adapted(steady())
    for name, key in (("mmlu", "acc,none"), ("truthfulqa_mc2", "acc,none")):
        benchmark = load_benchmark(name, files[name])
        got = evaluate_subject(Subject(model, tokenizer, 4), benchmark, progress=False)
        hf = HFLM(model, tokenizer=tokenizer, batch_size=1)
        want = evaluate(hf, benchmark.manager.load(benchmark.tasks), bootstrap_iters=0)
        rows = [want["results"][task.task_name] for task in benchmark.tasks]
        total = sum(row["sample_len"] for row in rows)
        assert got.score == pytest.approx(100 * sum(row[key] * row["sample_len"] for row in rows) / total, abs=1e-3)
        samples = [s for task in benchmark.tasks for s in want["samples"][task.task_name]]
        for prediction, sample in zip(got.predictions, samples, strict=True):
            assert prediction.prompt == sample["arguments"][0][0]
            assert prediction.log_likelihoods == pytest.approx([r[0][0] for r in sample["resps"]], rel=1e-5, abs=2e-4)
    assert (
        got.correct is None
        and 0 < got.score < 100
        and sum(got.metrics[got.name].verdicts) == pytest.approx(got.score * got.total / 100)
    )


def test_a_missing_tokenizer_of_ifeval_is_refused_before_anything_is_generated(files, tmp_path):
    code = f"from loopdropout_trainer.evaluation import load_benchmark; load_benchmark('ifeval', {files['ifeval']!r})"
    environment = {**ENVIRONMENT, "NLTK_DATA": str(tmp_path), "HOME": str(tmp_path), "LOCAL_RANK": "1"}  # no download
    program = Program("-c", code, env=environment)
    assert program.wait() and "`ifeval` needs NLTK's data `punkt_tab`" in program.stderr.splitlines()[-1]
    assert "python -m nltk.downloader punkt_tab" in program.stderr


def test_correct_answers_are_counted_by_the_columns_of_the_rows():
    benchmark = load_benchmark("arithmetic_test", limit=20)
    steps = [row["num_steps"] for row in benchmark.rows]
    result = score_completions(benchmark, [*benchmark.references[:10], *[""] * 10])
    rows = result.measurements(writer="evaluation/base/arithmetic_test", identity="key")
    groups = {row.group: (row.metric, row.value, row.total) for row in rows if row.family == "groups"}
    shares = {n: (100 * steps[:10].count(n) / steps.count(n), steps.count(n)) for n in set(steps)}
    assert groups == {str(n): ("by_num_steps", *share) for n, share in shares.items()}


def test_the_last_number_of_a_completion_counts_whatever_stands_before_it():
    completions = ["so 12", "#### 12", "12 of 13", "nothing", "#### 3.", "1,200"]
    references = ["#### 12", "#### 12", "a = 12\n#### 12", "#### 4", "#### 3", "#### 1,200"]
    benchmark = GeneratedBenchmark("own", [""] * 6, references, "gsm8k_strict", 9)
    facts = {"writer": "evaluation/base/own", "identity": "key"}
    *_, row = score_completions(benchmark, completions).measurements(**facts)
    assert (row.family, row.metric, row.unit) == ("last_number", "last_number", "%")
    assert row.verdicts == [1, 1, 0, 0, 1, 1] and row.value == pytest.approx(100 * 4 / 6) and row.total == 6
    others = score_completions(replace(benchmark, references=["12", *references[1:]]), completions)
    assert not [row for row in others.measurements(**facts) if row.family == "last_number"]


def test_any_benchmark_is_asked_in_turns_with_a_system_turn_and_no_stop_but_the_models_own(tokenizer):
    model = steady()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    model.resize_token_embeddings(len(tokenizer))
    benchmark = GeneratedBenchmark("own", ["Question: 1 + 1?\nAnswer:"], ["#### 2"], "gsm8k_strict", 256)
    subject = Subject(model, tokenizer, apply_chat_template=True, system_instruction="Be brief.", max_new_tokens=12)
    (prediction,) = evaluate_subject(subject, benchmark, progress=False).predictions
    assert prediction.prompt == "[system]Be brief.<|end|>[user]Question: 1 + 1?\nAnswer:<|end|>[assistant]"
    (plain,) = generate_greedy(model, tokenizer, [prediction.prompt], 12, progress=False)
    assert prediction.completion == plain != ""
    # A token that the model writes, and that the template ends turns with, is no end unless the model says so.
    (free,) = generate_greedy(model, tokenizer, ["Why?<|end|>"], 12, progress=False)
    ends_turns = next(character for character in free[1:] if character.isascii())
    subject.system_instruction = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + ends_turns + "{% endfor %}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", ends_turns]})
    (prediction,) = evaluate_subject(subject, replace(benchmark, prompts=["Why?<|end|>"]), progress=False).predictions
    (plain,) = generate_greedy(model, tokenizer, [f"Why?<|end|>{ends_turns}"], 12, progress=False)
    assert prediction.completion == plain
    end = tokenizer.convert_tokens_to_ids(ends_turns)
    model.generation_config.eos_token_id = [0, end]
    assert model_identity(model, tokenizer)["base"]["end_tokens"] == [0, end]  # other answers
    (prediction,) = evaluate_subject(subject, replace(benchmark, prompts=["Why?<|end|>"]), progress=False).predictions
    assert len(prediction.completion) < len(plain)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        evaluate_subject(subject, benchmark, progress=False)
    model.lm_head.weight.ds_id = 7  # ZeRO-3 marks its parameters so
    with pytest.raises(ValueError, match="sharded over processes"):
        evaluate_subject(subject, benchmark, progress=False)


# Local files


BAD_ROWS = [
    *[
        ("gsm8k", json.dumps({"question": "?", "answer": f"so {end}"}), "no answer that completions")
        for end in ("", "#### nan")
    ],
    ("metamath_gsm8k", '{"question": NaN, "answer": "#### 1"}', "field `question` is not text"),
    ("mmlu", '{"question": "\\ud800", "subject": "anatomy", "choices": [], "answer": 0}', "surrogates not allowed"),
    (
        "truthfulqa_mc2",
        '{"question": "?", "mc2_targets": {"choices": ["a", "b"], "labels": [1]}}',
        "Problem 1 .* scored",
    ),
    (
        "ifeval",
        '{"key": 1, "prompt": "?", "instruction_id_list": ["made:up"], "kwargs": [{}]}',
        "Problem 1 .* 'made:up'",
    ),
    (
        "mmlu",
        '{"question": "?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": -1}',
        "said to be -1",
    ),
    ("gsm8k", '{"quest', "row 1 is .* broken JSON"),
    ("metamath_gsm8k", '{"question": "1 + 1?", "answer": "two"}', "row 1 is .* no `#### `"),
    ("mmlu", '{"question": "?", "choices": ["a"], "answer": 0}', "rows.jsonl, row 1 .*'subject'"),
    ("mmlu", '{"question": "?", "subject": "astrology"}', "mmlu_astrology"),
    ("truthfulqa_mc2", None, "rows.jsonl cannot be read"),
    ("mbpp_plus", None, "rows.jsonl is not EvalPlus's data"),
    ("humaneval", '{"task_id": "HumanEval/0"}', "rows.jsonl is not EvalPlus's data"),
]


@pytest.mark.parametrize(("name", "rows", "message"), BAD_ROWS)
def test_bad_rows_are_refused_with_their_place(name, rows, message, tmp_path):
    file = tmp_path / "rows.jsonl"
    if rows is not None:
        file.write_text(rows)
    with pytest.raises(ValueError, match=message):
        load_benchmark(name, file, confirm_run_unsafe_code=True)


def test_any_task_of_lm_eval_runs_on_local_files_with_examples_of_another_split(tokenizer, tmp_path):
    rows = [{"question": f"{i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(12)]
    test = write_rows(tmp_path / "gsm8k.jsonl", rows[:2])
    with pytest.raises(ValueError, match="shows 5 examples of the split `train`: let `benchmark_files` name a folder"):
        load_benchmark("lm_eval:gsm8k", test)
    write_rows(tmp_path / "gsm8k.train.jsonl", rows[2:])
    benchmark = load_benchmark("lm_eval:gsm8k", tmp_path)
    subject = Subject(steady(), tokenizer, max_new_tokens=4)
    result = evaluate_subject(subject, benchmark, tmp_path / "log", progress=False)
    assert result.metrics.keys() == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert result.total == 2 and result.predictions[0].prompt.count("Question: ") == 6
    assert "0 + 0?" not in result.predictions[1].prompt.split("Question: 1 + 1?")[0]
    with pytest.raises(ValueError, match="lm-eval has no task `gsm9k`"):
        load_benchmark("lm_eval:gsm9k")


def on_tulu2(saved, files, output_dir, *more, **fields):
    """The arguments of evaluate.py for the recipe's benchmarks on these files, with and without the adapter."""
    fields = {"benchmark_files": json.dumps(files), "output_dir": output_dir, "max_new_tokens": 5, **fields}
    fields |= {"model_name_or_path": saved / "base", "benchmark_batch_size": 4}
    return command(TULU2, "--adapter", "none", f"tuned={saved / 'adapter'}", *more, **fields)


def answers_in(folder):
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers/*/*/0*.jsonl"))


def test_the_nine_metrics_of_two_rows_killed_at_random_and_continued(saved, files, tmp_path, capsys):
    pytest.importorskip("evalplus")
    script = [RECIPES / "evaluate.py", *on_tulu2(saved, files, tmp_path / "run")]
    python(*script)
    want = (tmp_path / "run" / MEASUREMENTS_FILE).read_text()
    num_answers = answers_in(tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "whole")

    kill_at = random.randrange(1, num_answers)
    kill_when(lambda: answers_in(tmp_path / "run") >= kill_at, *script)
    evaluate(script[1:])
    assert (tmp_path / "run" / MEASUREMENTS_FILE).read_text() == want, f"killed after {kill_at} answers"
    assert answers_in(tmp_path / "run") == num_answers

    rows, identities = measured(tmp_path / "run")
    names = ["mmlu", "bbh", "truthfulqa_mc2", "humaneval_plus", "humaneval", "mbpp_plus", "mbpp"]
    names += ["ifeval_strict", "ifeval_loose"]
    printed = [line[2:-2].split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[0] for line in printed[2:11]] == names and printed[0] == ["Metric", "base", "tuned"]
    for column, row in enumerate(("base", "tuned"), start=1):
        scores = {}
        for folder in (tmp_path / "run" / "answers" / row).iterdir():
            predictions = load_predictions(folder)
            for measurement in rows[f"evaluation/{row}/{folder.name}", "accuracy"]:  # once more, from its predictions
                metric = measurement.metric
                points = [each.values[metric] if each.values else each.correct for each in predictions]
                scores[metric] = 100 * sum(points) / len(points)
                assert measurement.value == pytest.approx(scores[metric]) and measurement.total == len(points)
        assert sorted(scores) == sorted(names) and scores["mmlu"] > 0 and scores["truthfulqa_mc2"] > 0
        for line, metrics in zip(printed[-3:], load_recipe(TULU2)["averages"].values(), strict=True):
            assert line[column] == f"{np.mean([scores[metric] for metric in metrics]):.2f}"
    of_rows = {row: rows[f"evaluation/{row}/mmlu", "accuracy"][0] for row in ("base", "tuned")}
    assert of_rows["base"].run is None and of_rows["base"].gates == "none"
    assert identities[of_rows["tuned"].run]["adapter"]["r"] == 4
    by_task = {row.group: row.total for row in rows["evaluation/tuned/mmlu", "groups"]}
    assert by_task == dict.fromkeys(("mmlu_abstract_algebra", "mmlu_anatomy", "mmlu_world_religions"), 5)
    prompt = lambda name: load_predictions(tmp_path / "run/answers/tuned" / name)[0].prompt
    assert prompt("ifeval").startswith("<|user|>\n") and prompt("ifeval").endswith("\n<|assistant|>\n")
    assert "<|user|>" not in prompt("mmlu")


def test_evaluations_add_to_a_folder_and_what_is_finished_is_not_run_again(saved, files, tmp_path):
    base = on_tulu2(saved, {"truthfulqa_mc2": files["truthfulqa_mc2"]}, tmp_path)
    first = [*base, "--benchmarks", "truthfulqa_mc2"]
    evaluate(first)
    state = lambda: ((tmp_path / MEASUREMENTS_FILE).read_text(), answers_in(tmp_path))
    before = state()
    evaluate(first)
    assert state() == before

    deeper, other = [*first, "--num_loops", "2"], [*base, "--benchmarks", "arithmetic_test", "--benchmark_limit", "3"]
    for words in (deeper, [*other, "--num_loops", "2"]):  # on another benchmark, too
        with pytest.raises(SettingsChangedError, match="row `base`.*`num_loops` was 4 and is 2.*NAME=PATH"):
            evaluate(words)
    evaluate([*deeper, "--adapter", "shallow=none"])
    evaluate([*other, "--adapter", "none"])
    truth = {
        row: load_predictions(tmp_path / "answers" / row / "truthfulqa_mc2") for row in ("base", "tuned", "shallow")
    }
    assert truth["base"] != truth["tuned"] != truth["shallow"]
    written = {row.writer.removeprefix("evaluation/") for row in read_measurements(tmp_path)[0]}
    assert written == {"base/arithmetic_test", *(f"{row}/truthfulqa_mc2" for row in truth)}
    with pytest.raises(ValueError, match="tuned/arithmetic_test/predictions.jsonl holds no predictions"):
        load_predictions(tmp_path / "answers/tuned/arithmetic_test")
    (tmp_path / "evaluation.json").write_text('{"format": 3}')
    with pytest.raises(ValueError, match="evaluation.json is of an earlier version"):
        evaluate(first)
    assert state()[0].count("truthfulqa_mc2")


@pytest.mark.slow
def test_one_two_and_three_processes_give_the_same_results(saved, files, tmp_path):
    names = ("mmlu", "truthfulqa_mc2", "ifeval", "humaneval_plus")
    for count in (1, 2, 3):
        arguments = on_tulu2(saved, {name: files[name] for name in names}, tmp_path / str(count), max_new_tokens=4)
        python(RECIPES / "evaluate.py", *arguments, "--benchmarks", *names, processes=count)
        assert (tmp_path / f"{count}/answers/tuned/mmlu/0000{count - 1}.jsonl").is_file()
    for row, name in itertools.product(("base", "tuned"), names):
        one, *others = (load_predictions(tmp_path / count / "answers" / row / name) for count in ("1", "2", "3"))
        answers = lambda predictions: [(each.id, each.completion, each.correct) for each in predictions]
        values = lambda predictions: [value for each in predictions for value in (each.values or {}).values()]
        for other in others:
            assert answers(other) == answers(one) and values(other) == pytest.approx(values(one), abs=1e-4)


def test_means_and_standard_deviations_are_those_of_the_paper():
    for row in STATISTICS["paper"]["mean_sd"]:
        rates = [100 * correct / row["n"] for correct in row["per_seed_correct"]]
        assert mean_sd(rates) == f"{row['mean_printed']} ± {row['sd_printed']}", row
    assert mean_sd([100 * 1148 / 1319]) == "87.04"


def rows_of(seeds):
    bits = lambda text: np.array([each == "1" for each in text])
    rows = [{"verdicts": 1.0 * bits(seed["correct"]), "answered": bits(seed["extractable"])} for seed in seeds]
    rows = [{**row, "value": 100 * row["verdicts"].mean(), "seed": n} for n, row in enumerate(rows)]
    return pd.DataFrame(rows).assign(benchmark="b", metric="b")


def test_decompositions_are_those_of_the_reference():
    parts = {"both_extractable": "per_seed_both", "missing_in_either": "per_seed_missing", None: "per_seed_total"}
    for case in STATISTICS["synthetic"]:
        a, b, want = rows_of(case["a"]), rows_of(case["b"]), case["expected"]
        for part, name in parts.items():
            assert difference(b, a, "b - a", part).mean(axis=1).tolist() == pytest.approx(want[name])
        missing = [500 - answered.sum() for answered in a["answered"]]
        assert np.mean(missing) / 5 == pytest.approx(want["missing_pct_a"])
