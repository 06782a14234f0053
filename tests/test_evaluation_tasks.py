"""The benchmarks of instruction tuning, end to end on stand-in rows: lm-eval's tasks, code, rows, averages, interruptions."""

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from test_evaluation import (  # noqa: F401 (`saved` is a fixture)
    ENVIRONMENT,
    RECIPES,
    SAMPLES,
    command,
    evaluate,
    kill_when,
    python,
    saved,
    steady,
    vectors,
)  # fmt: skip
from test_generation import PROMPTS, adapted

from loopdropout_trainer import use_gates
from loopdropout_trainer.evaluation import (
    GeneratedBenchmark,
    Subject,
    evaluate_subject,
    generate_greedy,
    load_benchmark,
    load_results,
    score_completions,
)
from loopdropout_trainer.evaluation.answer_log import SettingsChangedError
from loopdropout_trainer.evaluation.results import averages_of
from loopdropout_trainer.evaluation.subject import end_of_turn
from loopdropout_trainer.settings.recipe import load_recipe


pytest.importorskip("lm_eval")
os.environ.setdefault("NLTK_DATA", str(Path(__file__).parent / "nltk_data"))  # IFEval's sentences and words
ENVIRONMENT = {**ENVIRONMENT, "NLTK_DATA": os.environ["NLTK_DATA"]}
TULU2 = RECIPES / "evaluation" / "tulu2.yaml"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Stand-in rows of every benchmark of instruction tuning."""
    folder = tmp_path_factory.mktemp("rows")
    subjects = ("abstract_algebra", "anatomy", "world_religions")
    choices = [[str(i), str(2 * i), "7", "8"] for i in range(5)]
    questions = [{"question": f" What is {i} + {i}?", "choices": choices[i], "answer": i % 4} for i in range(5)]
    mmlu = [{"subject": subject, **question} for subject in subjects for question in questions]
    tasks = ("boolean_expressions", "navigate")
    bbh = [{"task": task, "idx": 0, "input": "not True is", "target": "False"} for task in tasks]
    targets = {"choices": ["Yes.", "It is.", "No."], "labels": [1, 1, 0]}
    truthfulqa = [{"question": f"Is {i} a number?", "mc1_targets": targets, "mc2_targets": targets} for i in range(4)]
    fields = ("key", "prompt", "instruction_id_list", "kwargs")
    instructions = [{key: row[key] for key in fields} for row in vectors("ifeval")[:3]]
    return {
        "mmlu": write_rows(folder / "mmlu.jsonl", mmlu),
        "bbh": write_rows(folder / "bbh.jsonl", bbh),
        "truthfulqa_mc2": write_rows(folder / "truthfulqa.jsonl", truthfulqa),
        "ifeval": write_rows(folder / "ifeval.jsonl", instructions),
        "humaneval_plus": str(GOLDEN / "humaneval_plus.jsonl.gz"),
        "mbpp_plus": str(GOLDEN / "mbpp_plus.jsonl.gz"),
    }


# Scores


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
    metrics = {name: {"score": float(score)} for name, score in zip(words[::2], words[1::2], strict=True)}
    got = averages_of({"all": {"metrics": metrics}}, load_recipe(TULU2)["averages"])
    assert [f"{average['score']:.2f}" for average in got.values()] == ["69.88", "60.98", "62.62"]
    assert averages_of({"all": {"metrics": {"mmlu": {"score": 1.0}}}}, load_recipe(TULU2)["averages"]) == {}


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
    assert got.correct is None and 0 < got.score < 100 and got.first.sum == pytest.approx(got.score * got.total / 100)


def test_a_missing_tokenizer_of_ifeval_is_refused_before_anything_is_generated(files, tmp_path):
    code = f"from loopdropout_trainer.evaluation import load_benchmark; load_benchmark('ifeval', {files['ifeval']!r})"
    environment = {**ENVIRONMENT, "NLTK_DATA": str(tmp_path), "HOME": str(tmp_path), "LOCAL_RANK": "1"}  # no download
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert "`ifeval` needs NLTK's data `punkt_tab`" in done.stderr.splitlines()[-1]
    assert "python -m nltk.downloader punkt_tab" in done.stderr


def test_correct_answers_are_counted_by_the_columns_of_the_rows():
    benchmark = load_benchmark("arithmetic_test", limit=20)
    steps = [row["num_steps"] for row in benchmark.rows]
    result = score_completions(benchmark, [*benchmark.references[:10], *[""] * 10])
    want = {str(n): {"correct": steps[:10].count(n), "total": steps.count(n)} for n in set(steps)}
    assert result.as_json()["groups"] == {"num_steps": want}


# Asking


def test_any_benchmark_is_asked_in_turns_with_a_system_turn_and_ends_with_the_turn(tokenizer):
    model = steady()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert end_of_turn(tokenizer) == "<|end|>"
    model.resize_token_embeddings(len(tokenizer))
    benchmark = GeneratedBenchmark("own", ["Question: 1 + 1?\nAnswer:"], ["#### 2"], "gsm8k_strict", 256)
    subject = Subject(model, tokenizer, apply_chat_template=True, system_instruction="Be brief.", max_new_tokens=12)
    (prediction,) = evaluate_subject(subject, benchmark, progress=False).predictions
    assert prediction.prompt == "[system]Be brief.<|end|>[user]Question: 1 + 1?\nAnswer:<|end|>[assistant]"
    (plain,) = generate_greedy(model, tokenizer, [prediction.prompt], 12, progress=False)
    assert prediction.completion == plain != ""
    with torch.no_grad():  # now the end of the turn beats the answer's first token
        first = model(torch.tensor([tokenizer(prediction.prompt)["input_ids"]])).logits[0, -1].argmax()
        model.lm_head.weight[len(tokenizer) - 1] = 2 * model.lm_head.weight[first]
        model.lm_head.weight[first] = 0
    steps = []
    model.lm_head.register_forward_hook(lambda *_: steps.append(1))
    assert evaluate_subject(subject, benchmark, progress=False).predictions[0].completion == "" and len(steps) <= 2
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.chat_template = None
        evaluate_subject(subject, benchmark, progress=False)


def test_gates_and_readouts_reach_every_kind_of_benchmark(files, tokenizer):
    model = adapted(steady())
    generated = load_benchmark("gsm8k", SAMPLES / "gsm8k_test.jsonl", limit=2)
    choices = load_benchmark("truthfulqa_mc2", files["truthfulqa_mc2"], limit=2)
    gated = Subject(model, tokenizer, gates="0-0-2-0", max_new_tokens=8)
    with use_gates(model, [0.0, 0.0, 2.0, 0.0]):
        want = generate_greedy(model, tokenizer, generated.prompts, 8, progress=False)
        same = evaluate_subject(Subject(model, tokenizer), choices, progress=False)
    assert [p.completion for p in evaluate_subject(gated, generated, progress=False).predictions] == want
    assert evaluate_subject(gated, choices, progress=False) == same
    assert same != evaluate_subject(Subject(model, tokenizer), choices, progress=False)
    early = evaluate_subject(Subject(model, tokenizer, readout=2), choices, progress=False)
    model.get_base_model().config.num_loops = 2
    assert early == evaluate_subject(Subject(model, tokenizer), choices, progress=False) != same


# Local files


def test_bad_local_rows_are_refused_with_their_place(files, tmp_path):
    for row, message in (
        ({"question": "?", "choices": ["a"], "answer": 0}, "rows.jsonl, row 1 .*'subject'"),
        ({"question": "?", "subject": "astrology"}, "mmlu_astrology"),
    ):
        with pytest.raises(ValueError, match=message):
            load_benchmark("mmlu", write_rows(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(ValueError, match="nothing.jsonl cannot be read"):
        load_benchmark("truthfulqa_mc2", tmp_path / "nothing.jsonl")


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


# Interruption


@pytest.mark.parametrize(("kind", "kept", "most_calls"), [("generation", 3, 22), ("choices", 22, 10)])
def test_continuing_an_evaluation_computes_only_what_is_missing(kind, kept, most_calls, files, tokenizer, tmp_path):
    model = steady()
    own = GeneratedBenchmark("own", PROMPTS, ["#### 1"] * len(PROMPTS), "gsm8k_strict", 10)
    benchmark = own if kind == "generation" else load_benchmark("mmlu", files["mmlu"])
    subject, calls, log = Subject(model, tokenizer, batch_size=1), [], tmp_path / "00000.jsonl"
    want = evaluate_subject(subject, benchmark, tmp_path, progress=False)
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == (want.total if kind == "generation" else 4 * want.total)
    log.write_text("".join(lines[:kept]) + lines[kept][:-4])  # the last line was being written
    model.model.register_forward_hook(lambda *_: calls.append(1))
    assert evaluate_subject(subject, benchmark, tmp_path, progress=False) == want
    assert 0 < len(calls) <= most_calls and sorted(log.read_text().splitlines(keepends=True)) == sorted(lines)
    calls.clear()
    assert evaluate_subject(subject, benchmark, tmp_path, progress=False) == want and not calls
    assert evaluate_subject(Subject(model, tokenizer), benchmark, progress=False) == want
    with pytest.raises(SettingsChangedError, match="`gates` was None and is"):
        evaluate_subject(Subject(adapted(model), tokenizer, gates="0-1-0-0"), benchmark, tmp_path, progress=False)
    model.config.num_loops = 2
    with pytest.raises(SettingsChangedError, match="`num_loops` was 4 and is 2"):
        evaluate_subject(Subject(model, tokenizer), benchmark, tmp_path, progress=False)
    model.lm_head.weight.ds_id = 7  # ZeRO-3 marks its parameters so
    with pytest.raises(ValueError, match="sharded over processes"):
        evaluate_subject(Subject(model, tokenizer), benchmark, progress=False)


def on_tulu2(saved, files, output_dir, *more, **fields):  # noqa: F811
    """The arguments of evaluate.py for the recipe's benchmarks on these files, with and without the adapter."""
    fields = {"benchmark_files": json.dumps(files), "output_dir": output_dir, "max_new_tokens": 5, **fields}
    fields |= {"model_name_or_path": saved / "base", "benchmark_batch_size": 4}
    return command(TULU2, "--adapter", "none", f"tuned={saved / 'adapter'}", *more, **fields)


def answers_in(folder):
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers/*/*/*.jsonl"))


def test_the_nine_metrics_of_two_rows_killed_at_random_and_continued(saved, files, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("evalplus")
    script = [RECIPES / "evaluate.py", *on_tulu2(saved, files, tmp_path / "run")]
    python(*script, env=ENVIRONMENT)
    want = (tmp_path / "run" / "evaluation.json").read_text()
    num_answers = answers_in(tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "whole")

    kill_at = random.randrange(1, num_answers)
    kill_when(lambda: answers_in(tmp_path / "run") >= kill_at, *script, env=ENVIRONMENT)
    evaluate(script[1:])
    assert (tmp_path / "run" / "evaluation.json").read_text() == want, f"killed after {kill_at} answers"
    assert answers_in(tmp_path / "run") == num_answers

    report = json.loads(want)
    names = ["mmlu", "bbh", "truthfulqa_mc2", "humaneval_plus", "humaneval", "mbpp_plus", "mbpp"]
    names += ["ifeval_strict", "ifeval_loose"]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0][2:] for line in printed[2:11]] == names and printed[0] == "| Metric | base | tuned |"
    for column, row in enumerate(("base", "tuned"), start=1):
        entry = report["rows"][row]
        scores = {}
        for name, measured in entry["benchmarks"].items():  # each metric once more, from its predictions
            for metric, values in measured["metrics"].items():
                points = [p["values"][metric] if "values" in p else p["correct"] for p in measured["predictions"]]
                scores[metric] = 100 * sum(points) / len(points)
                assert values["score"] == pytest.approx(scores[metric]) and values["total"] == len(points), name
        assert sorted(scores) == sorted(names) and scores["mmlu"] > 0 and scores["truthfulqa_mc2"] > 0
        for line, metrics in zip(printed[-3:], load_recipe(TULU2)["averages"].values(), strict=True):
            mean = sum(scores[metric] for metric in metrics) / len(metrics)
            assert line.rstrip(" |").split(" | ")[column] == f"{mean:.2f}"
    assert report["rows"]["base"]["meta_info"]["adapter"] is None and report["rows"]["base"]["train_info"] == {}
    assert report["rows"]["tuned"]["train_info"]["r"] == 4
    turns = report["rows"]["tuned"]["benchmarks"]["ifeval"]["predictions"][0]["prompt"]
    assert turns.startswith("<|user|>\n") and turns.endswith("\n<|assistant|>\n")
    assert "<|user|>" not in report["rows"]["tuned"]["benchmarks"]["mmlu"]["predictions"][0]["prompt"]


def test_evaluations_add_to_a_folder_and_what_is_finished_is_not_run_again(saved, files, tmp_path):  # noqa: F811
    base = on_tulu2(saved, {"truthfulqa_mc2": files["truthfulqa_mc2"]}, tmp_path)
    first = [*base, "--benchmarks", "truthfulqa_mc2"]
    evaluate(first)
    content = (tmp_path / "evaluation.json").read_text()
    num_answers = answers_in(tmp_path)
    evaluate(first)
    assert (tmp_path / "evaluation.json").read_text() == content and answers_in(tmp_path) == num_answers

    deeper = [*first, "--num_loops", "2"]
    with pytest.raises(SettingsChangedError, match="row `base`.*`num_loops` was 4 and is 2.*NAME=PATH"):
        evaluate(deeper)
    other = [*base, "--benchmarks", "arithmetic_test", "--benchmark_limit", "3"]
    with pytest.raises(SettingsChangedError, match="row `base`.*`num_loops` was 4 and is 2"):
        evaluate([*other, "--num_loops", "2"])  # on another benchmark, too
    evaluate([*deeper, "--adapter", "shallow=none"])
    evaluate([*other, "--adapter", "none"])
    rows = {row: load_results(tmp_path / "evaluation.json", row) for row in ("base", "tuned", "shallow")}
    assert {row: list(results) for row, results in rows.items()} == {
        "base": ["truthfulqa_mc2", "arithmetic_test"],
        "tuned": ["truthfulqa_mc2"],
        "shallow": ["truthfulqa_mc2"],
    }
    assert rows["base"]["truthfulqa_mc2"] != rows["tuned"]["truthfulqa_mc2"] != rows["shallow"]["truthfulqa_mc2"]
    with pytest.raises(ValueError, match="`row` must be one of the rows"):
        load_results(tmp_path / "evaluation.json")


@pytest.mark.slow
def test_one_two_and_three_processes_give_the_same_results(saved, files, tmp_path):  # noqa: F811
    names = ("mmlu", "truthfulqa_mc2", "ifeval", "humaneval_plus")
    found = []
    for count in (1, 2, 3):
        arguments = on_tulu2(saved, {name: files[name] for name in names}, tmp_path / str(count), max_new_tokens=4)
        python(RECIPES / "evaluate.py", *arguments, "--benchmarks", *names, processes=count, env=ENVIRONMENT)
        assert (tmp_path / f"{count}/answers/tuned/mmlu/0000{count - 1}.jsonl").is_file()
        found.append({row: load_results(tmp_path / f"{count}/evaluation.json", row) for row in ("base", "tuned")})
    one, *others = found
    for other in others:
        for row in ("base", "tuned"):
            for name in names:
                pairs = list(zip(one[row][name].predictions, other[row][name].predictions, strict=True))
                assert all((a.id, a.completion, a.correct) == (b.id, b.completion, b.correct) for a, b in pairs)
                for metric, value in one[row][name].metrics.items():
                    assert other[row][name].metrics[metric].score == pytest.approx(value.score, abs=1e-4)
