"""Scorers against the references' verdicts, and evaluations from prompt to results, interrupted ones too."""

import functools
import gzip
import itertools
import json
import random
import re
import shutil
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from lm_eval.tasks.hendrycks_math.utils import is_equiv
from transformers import set_seed

from helpers.errors import user_error
from helpers.files import GOLDEN, ROOT, SAMPLES, load_script, read_lines, write_lines, write_task
from helpers.processes import Program, python, wait_for
from helpers.tiny import steady, tiny_ouro
from loopdropout_trainer.diagnostics import answer_decomposition
from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks, loading, own_benchmark, scorers
from loopdropout_trainer.evaluation.loading import check_benchmarks, load_benchmarks, load_task
from loopdropout_trainer.evaluation.plan import Setting, print_evaluation_plan
from loopdropout_trainer.jobs.changed_benchmarks import load_problems
from loopdropout_trainer.jobs.measuring import evaluate as measure_tasks
from loopdropout_trainer.reports.printing import print_evaluation
from loopdropout_trainer.results.run_files import read_recipe, read_results, read_samples
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES, load_tokenizer


EVALUATE = ROOT / "recipes" / "evaluate.py"
OWN_GSM8K = {"files": str(SAMPLES / "gsm8k_test.jsonl"), "like": "gsm8k"}


def read_golden(name, kind=None):
    rows = map(json.loads, gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()).splitlines())
    return [row for row in rows if kind is None or row["kind"] == kind]


@pytest.fixture
def replay(monkeypatch, tokenizer, tmp_path):
    """`replay(task, problems, responses)`: results and samples of an evaluation with given responses."""

    def run(task, problems, responses, **options):
        answer = lambda self, requests: [responses[request.doc_id] for request in requests]
        monkeypatch.setattr(LoopedLM, "generate_until", answer)
        if isinstance(task, str):
            task = loading.task_of_rows("replayed", task, Dataset.from_list(problems))
        results = evaluate_tasks(LoopedLM(tiny_ouro(), tokenizer), [task], output_dir=tmp_path, **options)
        return results, read_lines(tmp_path / results[0]["samples"])

    return run


def test_gsm8k_matches_golden(replay):
    rows = read_golden("gsm8k_strict")
    problems = [{"question": "?", "answer": row["target"]} for row in rows]
    _, samples = replay("gsm8k", problems, [row["response"] for row in rows])
    assert [sample["answer"] or "[invalid]" for sample in samples] == [row["extracted"] for row in rows]
    assert [sample["correct"] for sample in samples] == [row["correct"] for row in rows]


def test_metamath_gsm8k_matches_golden():
    rows = read_golden("metamath_scorer", "gsm8k")
    assert len(rows) == 1561
    for row in rows:
        # The reference uses the package `Fraction`. On 9 rows it differs from the standard library.
        expected = {**row, **row.get("stdlib", {})}
        answer = scorers.extract_number(row["completion"] or "")
        assert answer == expected["extracted"], row["id"]
        score = scorers.score_metamath_gsm8k({"answer": f"#### {row['gold']}"}, [answer])
        assert score["acc"] == row["correct"] or "stdlib" in row, row["id"]


def test_metamath_math_matches_golden(monkeypatch):
    rows = read_golden("metamath_scorer", "math")
    assert len(rows) == 1490
    monkeypatch.setattr(scorers, "math_gold", lambda problem: problem["gold"])
    for row in rows:
        answer = scorers.extract_text(row["completion"] or "")
        assert (answer, answer is not None) == (row["extracted"], row["extractable"]), row["id"]
        assert scorers.score_metamath_math(row, [answer])["acc"] == row["correct"], row["id"]


def test_metamath_golds_match_golden():
    for row in read_golden("metamath_scorer", "equiv"):
        assert is_equiv(row["a"], row["b"]) == row["correct"], row["id"]
    for row in read_golden("metamath_scorer", "math_gold"):
        assert row["error"] or scorers.math_gold(row) == row["gold"], row["id"]
    for row in read_golden("metamath_scorer", "gsm8k_gold"):
        assert row["error"] or scorers.gsm8k_gold({"answer": row["response"]}) == row["gold"], row["id"]


def test_ifeval_matches_golden(replay, monkeypatch):
    import langdetect

    monkeypatch.setattr("langdetect.detect", functools.cache(langdetect.detect))  # slow, and the same for both levels
    rows = read_golden("ifeval")
    problems = [{name: row[name] for name in ("key", "prompt", "instruction_id_list", "kwargs")} for row in rows]
    for level in ("strict", "loose"):
        _, samples = replay(f"ifeval_{level}", problems, [row["response"] for row in rows], apply_chat_template=False)
        assert [sample["correct"] for sample in samples] == [row[f"prompt_{level}"] for row in rows]


def test_answer_decomposition_matches_golden():
    metrics = {"gain": "total", "gain_both_answered": "both", "gain_missing_in_either": "missing"}
    for case in json.loads(gzip.decompress((GOLDEN / "eval_stats.json.gz").read_bytes()))["synthetic"]:
        for seed, sides in enumerate(zip(case["b"], case["a"], strict=True)):
            pairs = [zip(map(int, side["correct"]), map(int, side["extractable"]), strict=True) for side in sides]
            samples = [[{"correct": correct, "answered": answered} for correct, answered in side] for side in pairs]
            gains = {row["metric"]: row["value"] for row in answer_decomposition(*samples)}
            expected = {metric: case["expected"][f"per_seed_{key}"][seed] for metric, key in metrics.items()}
            assert gains == pytest.approx(expected)


def test_tasks_have_the_prompts_of_the_paper():
    task, direct = (own_benchmark("mine", **{**OWN_GSM8K, "like": like}) for like in ("metamath_gsm8k", "gsm8k"))
    math = own_benchmark("mine", str(SAMPLES / "math500_test.jsonl"), like="metamath_math500")
    question = task.eval_docs[1]["question"]
    assert direct.doc_to_text(direct.eval_docs[1]) == f"Question: {question}\nAnswer:"
    assert task.doc_to_text(task.eval_docs[1]) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{question}\n\n### Response: Let's think step by step."
    )
    assert math.doc_to_text(math.eval_docs[0]).startswith("Below is")
    assert [task.doc_to_target(problem) for problem in task.eval_docs][:3] == [18, 3, 70000]
    assert math.doc_to_target(math.eval_docs[0]) == "\\left( 3, \\frac{\\pi}{2} \\right)"
    options = [own.config.generation_kwargs for own in (task, math)]
    assert [(option["max_gen_toks"], len(option["until"])) for option in options] == [(512, 10), (2048, 10)]


def test_arithmetic_task_generates_its_problems():
    (task,) = load_task("arithmetic_easy_test").values()
    assert len(task.eval_docs) == 500 and {*task.eval_docs["num_steps"]} == {1, 2, 3}
    (more,) = load_task("arithmetic_easy_test", limit=1000).values()
    assert len(more.eval_docs) == 1000 and more.eval_docs[:500] == task.eval_docs[:]


def test_arithmetic_counts_last_numbers(replay):
    responses = ["so 12", "#### 12", "12 of 13", "nothing", "#### 3.", "1,200"]
    answers = ["#### 12", "#### 12", "a = 12\n#### 12", "#### 4", "#### 3", "#### 1,200"]
    problems = [{"question": "?", "answer": text} for text in answers]
    for problem, num_steps in zip(problems, [1, 3, 2, 1, 3, 10], strict=True):
        problem["num_steps"] = num_steps
    results, _ = replay("arithmetic_test", problems, responses)
    assert [row["group"] for row in results if row["metric"] == "accuracy_by_num_steps"] == ["1", "2", "3", "10"]
    values = {row["metric"]: row["value"] for row in results if "group" not in row}
    assert values == pytest.approx({"accuracy": 100 / 3, "last_number": 400 / 6, "missing": 400 / 6})


@pytest.mark.parametrize(("preparation", "answer"), [("gsm8k", "so 2\n#### 2"), ("metamath_gsm", "The answer is: 2")])
def test_development_task_scores_held_out_examples(replay, preparation, answer):
    task = loading.development_task(preparation, Dataset.from_list([{"question": "1 + 1?", "answer": answer}] * 3))
    (accuracy, *_), _ = replay(task, [], [answer, "#### 3", "The answer is: 3"])
    assert (accuracy["task"], accuracy["value"]) == ("development", pytest.approx(100 / 3))


def test_development_task_of_other_data_raises():
    rows = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])
    with user_error(
        r"held-out examples \(`num_eval_examples`\) of the preparation .*, got 1 example without a preparation"
    ):
        loading.development_task(None, rows)
    with user_error("got 0 examples of gsm8k"):
        loading.development_task("gsm8k", None)


def test_group_is_the_mean_over_problems(tokenizer, tmp_path, monkeypatch, log):
    def load_subject(*, name, **options):
        """Generate one to three problems of a subject of MMLU."""
        answers = random.Random(name).choices(range(4), k=1 + len(name) % 3)
        rows = [{"question": "?", "subject": name, "choices": [*"wxyz"], "answer": answer} for answer in answers]
        return dict.fromkeys(("test", "dev"), Dataset.from_list(rows))

    monkeypatch.setattr("datasets.load_dataset", load_subject)
    lm = LoopedLM(steady(), tokenizer, batch_size=64)
    assert repr(lm) == "LoopedLM of a model: num_loops 4, gates none"
    with user_error(r"`lm` must be a `LoopedLM`, got OuroForCausalLM. Give `LoopedLM\(model, tokenizer\)`"):
        evaluate_tasks(tiny_ouro(), ["arithmetic_easy_test"])
    with user_error("`tasks` must be a list, got 'mmlu_stem'"):
        evaluate_tasks(lm, "mmlu_stem")
    for limit in (0, -2, "2"):
        with user_error(f"`limit` must be an integer of at least 1, got {limit!r}"):
            evaluate_tasks(lm, ["mmlu_stem"], limit=limit)
        with user_error(f"`max_new_tokens` must be an integer of at least 1, got {limit!r}"):
            evaluate_tasks(lm, ["mmlu_stem"], max_new_tokens=limit)
    for batch_size in (0, -1, "x"):
        with user_error(f'`batch_size` must be an integer of at least 1, or "auto", got {batch_size!r}'):
            LoopedLM(lm.model, tokenizer, batch_size=batch_size)
    accuracy, *parts = evaluate_tasks(lm, ["mmlu_stem"], output_dir=tmp_path)
    samples = read_lines(tmp_path / "samples_mmlu_stem_K4_none.jsonl")
    assert accuracy["value"] == pytest.approx(100 * np.mean([sample["correct"] for sample in samples]))
    assert 0 < accuracy["value"] < 100 and accuracy["n"] == len(samples)
    assert all((sample["answer"] == sample["target"]) == sample["correct"] for sample in samples)
    counts = Counter(sample["subject"] for sample in samples)
    assert len(counts) == 19 and {*counts.values()} == {1, 2, 3}
    assert {row["group"]: row["n"] for row in parts if row["metric"] == "accuracy_by_subject"} == counts
    group = load_task("mmlu_stem")["mmlu_stem"]
    for task in group.get_all_tasks():
        task.process_results = lambda doc, results: {"acc": 3.0}  # such as a number of points
    assert evaluate_tasks(lm, [group], output_dir=tmp_path) == []
    assert "`acc` of mmlu_stem is not reported, because mmlu_stem has several tasks and the" in log.text
    assert {sample["correct"] for sample in read_lines(tmp_path / "samples_mmlu_stem_K4_none.jsonl")} == {3.0}


def test_tasks_that_cannot_be_loaded_raise(monkeypatch, tmp_path, log):
    import lm_eval.tasks.ifeval.instructions_util  # noqa: F401 (its first import sets the path)

    monkeypatch.setattr("nltk.data.path", [])
    with user_error("python -m nltk.downloader punkt_tab"):
        own_benchmark("mine", write_lines(tmp_path / "rows.jsonl", CAPITALS), like="ifeval_strict")
    load_manager = loading._load_manager  # lm-eval's index takes 10 seconds
    monkeypatch.setattr(loading, "_load_manager", lambda folder, include_defaults: load_manager(folder, False))
    with user_error("`gsm9k` must be a task of lm-eval or one of .*metamath_math500. Did you mean 'gsm8k'"):
        load_task("gsm9k")
    with user_error("`gsm9k` must be a task of lm-eval or one of gsm_k, .*metamath_math500. Did you mean 'gsm_k'"):
        load_benchmarks(["gsm9k"], {"gsm_k": {}})
    assert "`gsm9k` is not a task of this package. Did you mean 'gsm8k'? Looking in lm-eval's index" in log.text
    with user_error("Did you mean 'arithmetic_easy_test'"):
        load_task("arithmetic_easy")
    with user_error("Write several names as a list: `.gsm8k, humaneval.` in a recipe, and `gsm8k humaneval` on a"):
        load_task("gsm8k,humaneval")
    path = tmp_path / "sweep.yaml"
    path.write_text("measure: {own_benchmarks: {my_eval: {like: gsm8k}}}\n")
    load_recipe(path)
    place = f"The recipe {path} has it in `own_benchmarks`, which other settings replace. Repeat these"
    for name, hint in (("my_eval", f"metamath_math500. {place}"), ("my_evall", rf"Did you mean 'my_eval'\? {place}")):
        with user_error(hint):
            load_task(name)


CAPITALS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]
OWN = {"prompt": "The capital of {country} is", "target": "{capital}", "scorer": "exact_match"}


def test_own_benchmark_scores_answers(replay, tokenizer, tmp_path):
    files = write_lines(tmp_path / "rows.jsonl", CAPITALS)
    task = own_benchmark("capitals", files, **OWN, max_new_tokens=8, stop=["."])
    assert task.config.generation_kwargs == {"until": ["."], "do_sample": False, "max_gen_toks": 8}
    lm = LoopedLM(steady(), tokenizer)
    with user_error(r"Put the task that `own_benchmark` has returned .* \[own_benchmark\('capitals', ...\)\]"):
        evaluate_tasks(lm, ["capitals"])
    with user_error(r"`tasks` must be a list, got the task 'capitals'. Give it as `\[task\]`"):
        evaluate_tasks(lm, task)
    with user_error("`tasks` must be a list of names or tasks, got None"):
        evaluate_tasks(lm, None)
    with user_error("`tasks` must have names of tasks, or tasks as of `own_benchmark`, got 5"):
        evaluate_tasks(lm, [5])
    (accuracy, *_), samples = replay(task, [], [" Paris ", "Cuzco"])
    assert (accuracy["task"], accuracy["metric"], accuracy["value"]) == ("capitals", "accuracy", 50)
    shown = [(sample["prompt"], sample["target"], sample["correct"]) for sample in samples]
    assert shown == [("The capital of France is", "Paris", 1), ("The capital of Peru is", "Lima", 0)]
    fields = {**OWN, "files": str(files)}
    problems = load_problems("capitals", fields, None)
    assert problems.are_those_of(accuracy) and not load_problems("capitals", fields, 1).are_those_of(accuracy)
    write_lines(tmp_path / "rows.jsonl", [CAPITALS[0], {**CAPITALS[1], "country": "the Peru"}])  # the same answers
    assert not load_problems("capitals", fields, None).are_those_of(accuracy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": None}, "`capitals` must have `files`, and either `prompt`, `target` and `scorer` or `like`"),
        ({"files": None}, "`capitals` must have `files`"),
        (
            {"prompt": "{land}"},
            "The task `capitals` cannot be loaded: `land` is missing, and the columns are country, capital",
        ),
        (
            {"prompt": "{contry}", "target": "{contry}: {capital}"},
            "`contry` is missing, and the columns are country, capital. `prompt` and `target` ask for `contry`. Did you mean "
            "'country'?",
        ),
        (
            {"target": "{captal}"},
            r"`capitals` .* `captal` is missing.*\. `target` asks for `captal`. Did you mean 'capital'",
        ),
        (
            {"scorer": "exact_mach"},
            "`scorer` must be one of .* Did you mean 'exact_match'.*import the code that registers it",
        ),
        ({"max_new_tokens": "8"}, "`max_new_tokens` of the benchmark `capitals` must be an integer, got '8'"),
        ({"max_new_tokens": 0}, "`max_new_tokens` of the benchmark `capitals` must be at least 1, got 0"),
        ({"stop": 4}, "`stop` of the benchmark `capitals` must be a text or a list of texts, got 4"),
        ({"files": ["rows.jsonl", 4]}, "`files` of the benchmark `capitals` must be a file or a list of files, got"),
        ({"promt": "x"}, "The benchmark `capitals` has no field `promt`. Did you mean 'prompt'"),
        (
            {**dict.fromkeys(OWN), "like": "metamath_gsm8k"},
            "`capitals` cannot be loaded: 'question' is undefined, and the columns are country, capital",
        ),
        ({"scorer": None, "like": "gsm_plus"}, "`like` must be a task without examples of another split"),
        ({"name": "mmlu"}, "must not have the name of a task .* got 'mmlu'. Choose another name."),
        ({"name": "development"}, "must not have the name of a task .* got 'development'"),
    ],
)
def test_own_benchmark_explains_mistakes(tmp_path, monkeypatch, fields, message):
    monkeypatch.setitem(loading._FOLDERS, "gsm", "gsm_plus")
    own = {"name": "capitals", "files": write_lines(tmp_path / "rows.jsonl", CAPITALS), **OWN, **fields}
    name = own.pop("name")
    with user_error(message):
        load_benchmarks([name], {name: own})


def test_own_benchmark_has_its_name_once():
    with user_error("The benchmark `capitals` has no field `name`."):
        load_benchmarks(["capitals"], {"capitals": {"name": "rivers", "files": "rows.jsonl"}})


def test_own_benchmark_must_be_a_mapping():
    with user_error("`own_benchmarks` must map 'capitals' to a mapping of fields such as `files` and `like`, got"):
        load_benchmarks(["capitals"], {"capitals": ["rows.jsonl"]})


def test_task_file_is_a_benchmark_after_import(tmp_path, monkeypatch):
    rows = write_lines(tmp_path / "rows.jsonl", CAPITALS)
    fields = {"output_type": "generate_until", "doc_to_text": "{{country}}:", "doc_to_target": "{{capital}}"}
    path = write_task(tmp_path / "mine.yaml", rows, task="mine", **fields)
    with user_error("can run code.* Allow it first by `loopdropout_trainer.settings.recipe.import_files"):
        load_benchmarks([path])
    monkeypatch.setattr(loading, "IMPORTED", [path])
    (task,) = load_benchmarks([path])
    assert task.task_name == "mine" and task.doc_to_text(task.eval_docs[0]) == "France:"
    unsafe = write_task(tmp_path / "unsafe.yaml", rows, task="unsafe", unsafe_code=True, **fields)
    text = (tmp_path / "unsafe.yaml").read_text()
    monkeypatch.setattr(loading, "IMPORTED", [path, unsafe])
    for start in ("{", '{"process_results": !function not_here.score, '):  # whose code is not imported
        (tmp_path / "unsafe.yaml").write_text(text.replace("{", start, 1))
        with user_error(f"^`{unsafe}` runs programs that .*lm-eval runs the programs of this task itself"):
            check_benchmarks([path, unsafe], {}, None, None, False)  # as a plan, before the training
        check_benchmarks([path, unsafe], {}, None, None, True)
    with user_error("must not have the name of a task .* got 'gsm8k'"):
        load_task(write_task(tmp_path / "mine.yaml", rows, task="gsm8k", **fields))


@pytest.mark.parametrize(("is_own", "option"), [(True, None), (None, True)])
def test_chat_prompts_have_a_system_turn(tokenizer, tmp_path, monkeypatch, is_own, option):
    task = own_benchmark("capitals", write_lines(tmp_path / "rows.jsonl", CAPITALS[:1]), **OWN, chat=is_own)
    lm = LoopedLM(steady(), tokenizer, add_bos_token=True)
    options = {"system_instruction": "Be brief.", "apply_chat_template": option, "max_new_tokens": 1}
    with user_error("`chat_template` must be set, because the prompts of `capitals`"):
        evaluate_tasks(lm, [task], **options)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    evaluate_tasks(lm, [task], output_dir=tmp_path, **options)
    (sample,) = read_lines(tmp_path / "samples_capitals_K4_none.jsonl")
    assert lm.add_bos_token is True  # of other evaluations
    assert sample["prompt"] == "<|system|>\nBe brief.\n<|user|>\nThe capital of France is\n<|assistant|>\n"


def test_samples_of_another_model_are_kept(tokenizer, tmp_path, log):
    """An equal model replaces its own file with the same or more problems. The third one is again that of the first model."""
    task = own_benchmark("capitals", write_lines(tmp_path / "rows.jsonl", CAPITALS), **OWN)
    other = tiny_ouro()
    with torch.no_grad():
        other.lm_head.weight.neg_()
    models, files, has_warned = {"steady": steady(), "other": other}, [], []
    for name, limit in (("steady", 1), ("other", 2), ("steady", 2), ("other", 2)):
        lm = LoopedLM(models[name], tokenizer)
        accuracy, *_ = evaluate_tasks(lm, [task], output_dir=tmp_path, limit=limit, max_new_tokens=4)
        files.append(accuracy["samples"])
        has_warned.append("samples_capitals_K4_none.jsonl has other answers" in log.text)
    first, second = "samples_capitals_K4_none.jsonl", "samples_capitals_K4_none_2.jsonl"
    assert files == [first, second, first, second] and has_warned == [False, True, True, True]
    texts = [[line["completion"] for line in read_lines(tmp_path / name)] for name in (first, second)]
    assert len(texts[0]) == len(texts[1]) == 2 and texts[0] != texts[1]
    smaller = LoopedLM(models["steady"], tokenizer)
    accuracy, *_ = evaluate_tasks(smaller, [task], output_dir=tmp_path, limit=1, max_new_tokens=4)
    assert accuracy["samples"] == first and len(read_lines(tmp_path / first)) == 2  # of the larger result
    assert read_samples({**accuracy, "folder": tmp_path}) == read_lines(tmp_path / first)[:1]
    (tmp_path / second).write_text("not of an evaluation")
    (accuracy, *_) = evaluate_tasks(lm, [task], output_dir=tmp_path, max_new_tokens=4)
    assert accuracy["samples"] == "samples_capitals_K4_none_3.jsonl"


@pytest.mark.parametrize("is_chat", [True, False])
def test_benchmarks_of_a_training_name_the_system_turn(make_sft, tokenizer, tmp_path, monkeypatch, log, is_chat):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    trainer = make_sft()
    trainer.saved_facts["system_turn"] = f"Add. {is_chat}"
    task = own_benchmark("capitals", write_lines(tmp_path / "rows.jsonl", CAPITALS[:1]), **OWN, chat=is_chat)
    options = SimpleNamespace(benchmark_batch_size=1, benchmark_limit=None, allow_unsafe_code=False)
    measure_tasks(trainer, SimpleNamespace(script_args=options, title="LoRA"), [task])
    hint = "The training data had the system turn 'Add. True'. The benchmarks of a training ask without it. `loopdropout eval"
    assert (hint in log.text) is is_chat


def test_evaluation_keeps_random_states(tokenizer):
    lm = LoopedLM(steady(), tokenizer)
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())
    set_seed(5)
    expected = draw()
    set_seed(5)
    evaluate_tasks(lm, ["arithmetic_test"], limit=1, max_new_tokens=2)
    assert draw() == expected


def test_models_that_do_not_fit_raise(tokenizer):
    model = steady()
    with user_error("`num_loops` must be an integer from 1"):
        LoopedLM(model, tokenizer, num_loops=0)
    model.lm_head.weight.ds_id = 7  # ZeRO-3 marks its parameters
    with user_error("they are sharded"):
        LoopedLM(model, tokenizer)


SCRIPT = load_script("recipes/evaluate.py")


def words(saved, output_dir, *more, **fields):
    """The command line of an evaluation of eight problems."""
    fields = {"model_name_or_path": saved / "base", "dtype": "float32", "benchmark_limit": 8, **fields}
    fields |= {"output_dir": output_dir, "use_cpu": "true", "own_benchmarks": json.dumps({"own_gsm8k": OWN_GSM8K})}
    options = [str(part) for name, value in fields.items() for part in (f"--{name}", value)]
    return [*options, "--benchmarks", "own_gsm8k", "arithmetic_test", *map(str, more)]


def num_answers(folder):
    """Number of answers in the caches of an evaluation."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("cache/answers_*.jsonl"))


def test_killed_evaluation_generates_missing_answers(saved, tmp_path):
    options = ("--adapter", saved / "adapter", "--max_new_tokens", 24)
    command = words(saved, tmp_path / "run", *options, benchmark_batch_size=1)
    program = Program(EVALUATE, *command)
    wait_for(lambda: num_answers(tmp_path / "run"), program)
    time.sleep(0.2)  # long enough to write all answers of a task, too short to generate them
    program.end()
    kept = num_answers(tmp_path / "run")
    assert 1 <= kept < 8 and not (tmp_path / "run" / "results.jsonl").exists()

    python(EVALUATE, *command)
    assert num_answers(tmp_path / "run") == 16  # as many as there are problems, so no kept one was generated again
    SCRIPT.main(words(saved, tmp_path / "whole", *options))
    names = ("results.jsonl", "samples/**/*.jsonl")
    paths = lambda folder: [path for name in names for path in folder.glob(name)]
    texts = lambda folder: {path.relative_to(folder): path.read_text() for path in paths(folder)}
    resumed, whole = texts(tmp_path / "run"), texts(tmp_path / "whole")
    assert resumed == whole and len(whole) == 3  # the samples of two tasks, and the results


def test_results_have_a_row_for_each_setting(saved, tmp_path, capsys):
    adapters = ("--adapter", "none", f"own={saved / 'adapter'}")
    averages = json.dumps({"Average": ["own_gsm8k", "arithmetic_test"]})
    fields = {"gates": "single_loop", "averages": averages, "benchmark_limit": 2, "max_new_tokens": 4}
    command = words(saved, tmp_path, *adapters, "--eval_num_loops", 2, 4, **fields)
    SCRIPT.main(command)
    rows = [row for row in read_results(tmp_path) if (row["task"], row["metric"]) == ("own_gsm8k", "accuracy")]
    places = [(row["method"], row["num_loops"], row["gates"], row.get("loop")) for row in rows]
    alone = [("own", depth, f"loop {t}", t) for depth in (2, 4) for t in range(1, depth + 1)]
    assert places == [("base model", 2, "none", None), ("base model", 4, "none", None), *alone]
    assert all(len(read_lines(tmp_path / row["samples"])) == row["n"] == 2 for row in rows)
    assert len({row["samples"] for row in rows}) == len(rows)
    printed = capsys.readouterr().out
    assert re.search(r"^1 of 2: .*: base model, ", printed) and re.search(r"\n2 of 2: .*: adapter of ", printed)
    assert re.search(r"\n *own_gsm8k +own, loop 3 +\d+\.\d\d\n", printed) and re.search(r"K = 2 +K = 4\n", printed)
    assert "Average " in printed and "own_gsm8k, missing" in printed
    with user_error(r"another model: `model_name_or_path` changed from '.*base' to '.*merged'"):
        SCRIPT.main([*command, "--model_name_or_path", str(saved / "merged")])
    for names, task in ((["development"], "TASK"), (["development", "gsm8k"], "gsm8k")):  # as in the recipe of a run
        with user_error(f"`benchmarks` must not have `development`, .* Add `--benchmarks {task}`"):
            SCRIPT.main([*command, "--benchmarks", *names])
    with user_error("`adapter` must give each adapter its own name"):
        SCRIPT.main(words(saved, tmp_path, "--adapter", "a/x", "b/x", **fields))


def test_gates_that_do_not_fit_a_listed_depth_name_the_list(saved, tmp_path):
    command = words(saved, tmp_path, "--adapter", saved / "adapter", "--eval_num_loops", 1, 2, 3)
    listed = r"K is one of `eval_num_loops` \(1, 2, 3\), of the recipe or the command. "
    for gates, fix in (
        (["single_loop", "1-0"], "Add `--eval_num_loops 2`, which all `gates` fit.$"),
        (["1-0", "1-0-0"], "Set depths that all `gates` fit.$"),
    ):
        with user_error(rf"`gates` must have one number for each loop \(K = 1\), .* got '1-0'. {listed}{fix}"):
            SCRIPT.main([*command, "--gates", *gates])


def test_dry_run_says_what_is_measured_and_what_exists(saved, tmp_path, capsys):
    """It writes nothing. A later one counts the results and the answers that exist."""
    fields = {"gates": "single_loop", "benchmark_limit": 2, "max_new_tokens": 4}
    command = words(
        saved, tmp_path / "out", "--adapter", "none", f"own={saved / 'adapter'}", "--eval_num_loops", 2, **fields
    )
    SCRIPT.main([*command, "--dry_run", "true"])
    out = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    lines = ["models      base, K = 2, gates: none\n            own, K = 2, gates: loop 1, loop 2\n"]
    length = "answers of at most 4 tokens"
    lines += [f"tasks       own_gsm8k, 2 problems, {length}\n            arithmetic_test, 2 problems, {length}\n"]
    lines += [
        "in all      12 problems, with 3 settings of model, depth and gates\n            at most 48 generated tokens\n",
        "time        not timed: `loopdropout evaluate` with `--benchmark_limit 64",
        f"folder      {tmp_path / 'out'}\n",
    ]
    lines += ["done        0 of 6 results on the same problems\n", "answers     none are kept in the folder\n"]
    assert [line for line in (*lines, "\nNext:\n  loopdropout evaluate ") if line not in out] == []
    assert "--dry_run" not in out
    SCRIPT.main(command)
    assert re.search(r"\n12 problems in 0:\d\d:\d\d, without loading", capsys.readouterr().out)
    SCRIPT.main([*command, "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "done        6 of 6 results on the same problems\nanswers     12 are kept in the folder, and used" in out
    changed = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(3)]
    files = str(write_lines(tmp_path / "changed.jsonl", changed))
    command += ["--own_benchmarks", json.dumps({"own_gsm8k": {**OWN_GSM8K, "files": files}})]
    SCRIPT.main([*command, "--dry_run", "true"])
    assert "done        3 of 6 results on the same problems\n" in capsys.readouterr().out


def test_plan_of_log_likelihoods_has_no_generated_answers(tmp_path, capsys):
    task = SimpleNamespace(task_name="choice", OUTPUT_TYPE="multiple_choice", eval_docs=["a", "b"])
    print_evaluation_plan([Setting("own", {}, 4, "unit")], [task], None, None, str(tmp_path), "evaluate")
    out = capsys.readouterr().out
    assert "choice, 2 problems, no generated answers\n" in out and " at most 0 generated tokens\n" in out


def test_dry_run_has_an_adapter_whose_depth_is_not_known(saved, tmp_path, capsys):
    """`single_loop` has a setting for each of its loops, whose number the plan leaves open."""
    shutil.copytree(saved / "adapter", tmp_path / "own", ignore=shutil.ignore_patterns("loop_dropout.json"))
    command = words(saved, tmp_path / "out", "--adapter", f"own={tmp_path / 'own'}", gates="single_loop")
    SCRIPT.main([*command, "--benchmark_limit", "2", "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "models      own, K = its own depth, gates: single_loop\n" in out and "generated tokens" not in out
    assert "in all      more than 4 problems, with 1 setting of model, depth and gates, because only the loaded" in out


def test_dry_run_counts_the_results_of_the_same_measurement(saved, tmp_path, capsys):
    """Also of an adapter whose folder has moved, but not those of another readout."""
    shutil.copytree(saved / "adapter", tmp_path / "own")
    write_metadata(tmp_path / "own", {"training_id": "a", "method": "LoRA", "seed": 1, "step": 3})
    fields = {"benchmark_limit": 1, "max_new_tokens": 4, "num_loops": 2}
    place = tmp_path / "out"
    SCRIPT.main(words(saved, place, "--adapter", f"own={tmp_path / 'own'}", **fields))
    (tmp_path / "own").rename(tmp_path / "moved")
    assert "1 of 1" not in capsys.readouterr().out  # of a single model
    moved = ("--adapter", f"own={tmp_path / 'moved'}", "--dry_run", "true")
    SCRIPT.main(words(saved, place, *moved, **fields))
    assert "done        2 of 2 results on the same problems\n" in capsys.readouterr().out
    SCRIPT.main(words(saved, place, *moved, "--readout", 1, **fields))
    assert "done        0 of 2 results on the same problems\n" in capsys.readouterr().out


def test_dry_run_without_the_model_has_all_that_needs_none(saved, tmp_path, capsys, monkeypatch):
    """The depths, the problems and the kept answers. A task whose data cannot be loaded has the reason."""
    fields = {"benchmark_limit": 2, "model_name_or_path": "nobody/no-model", "dry_run": "true"}
    command = words(saved, tmp_path / "out", "--adapter", "none", "--eval_num_loops", 2, 4, **fields)
    with user_error("The model nobody/no-model cannot be loaded"):
        SCRIPT.main(command)
    out = capsys.readouterr().out
    assert (
        "models      base, K = 2, 4\ntasks       own_gsm8k, 2 problems, answers of at most 256 tokens\n            "
        "arithmetic_test, 2 problems, answers of at most 80 tokens\n"
        "in all      8 problems, at all depths\n            at most 1,344 generated tokens\n" in out
    )
    assert "answers     none are kept in the folder\n" in out
    assert f"folder      {tmp_path / 'out'}\n" in out and not (tmp_path / "out").exists()
    place = command.index("arithmetic_test")
    with user_error("The model nobody/no-model cannot be loaded"):
        SCRIPT.main([*command[:place], "metamath_math500", *command[place + 1 :]])
    out = capsys.readouterr().out
    assert "metamath_math500: The task `metamath_math500` cannot be loaded: " in out and "in all" not in out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    with user_error("missing does not exist"):
        SCRIPT.main(
            [*command[:place], "metamath_math500", *command[place:], "--model_name_or_path", f"{saved}/missing"]
        )
    out = capsys.readouterr().out
    assert "metamath_math500: problems not counted, because the Hub cannot be reached\n" in out
    assert "arithmetic_test, 2 problems" in out


def test_dry_run_plans_the_depth_that_is_measured(saved, tmp_path, capsys):
    """`num_loops` of the command line instead of `eval_num_loops` of the recipe, also for gates that depend on the depth."""
    command = words(saved, tmp_path, "--adapter", "none", f"own={saved / 'adapter'}", gates="single_loop", num_loops=2)
    recipe = tmp_path / "depths.yaml"
    recipe.write_text("eval_num_loops: [1, 3]\n")
    for first_words in ([], [str(recipe)]):
        SCRIPT.main([*first_words, *command, "--dry_run", "true"])
        out = capsys.readouterr().out
        assert "models      base, K = 2, gates: none\n            own, K = 2, gates: loop 1, loop 2\n" in out
    SCRIPT.main([str(recipe), *command, "--eval_num_loops", "4", "--num_loops", "null", "--dry_run", "true"])
    assert "models      base, K = 4, gates: none\n" in capsys.readouterr().out


def test_runs_of_a_sweep_are_told_apart():
    """By METHOD/lr_X/seed_S, with a checkpoint in it. Other folders have their own names."""
    paths = [
        "s/lora/lr_0.01/seed_0",
        "s/own method/lr_0.01/seed_0",
        "s/lora/lr_0.01/seed_0/checkpoint-4",
        "s/out",
        "none",
    ]
    args = SCRIPT.EvaluationArguments(benchmarks=["gsm8k"], adapter=paths)
    names = [*(path.removeprefix("s/") for path in paths[:-1]), "base"]
    assert args.adapters == dict(zip(names, paths, strict=True))
    with user_error("`adapter` must give each adapter its own name"):
        SCRIPT.EvaluationArguments(benchmarks=["gsm8k"], adapter=["a/lora/lr_1/seed_0", "b/lora/lr_1/seed_0"])


def test_folders_need_neither_recipe_nor_base(saved, tmp_path):
    run, merged = shutil.copytree(saved / "adapter", tmp_path / "p=0.5"), saved / "merged"
    options = "--dtype float32 --benchmarks arithmetic_test --benchmark_limit 2 --use_cpu true --max_new_tokens 4"
    command = [str(run), str(merged), *options.split()]
    SCRIPT.main([*command, "--output_dir", str(tmp_path / "results")])
    (run / "recipe.yaml").write_text(f"model_name_or_path: {saved / 'base'}\ndtype: float32\np: 0.5\n")
    SCRIPT.main(command)
    # A later evaluation adds its tasks to the recipe of the results, and each result has its own limit.
    later = [
        "--benchmarks",
        "arithmetic_easy_test",
        "--benchmark_limit",
        "1",
        "--output_dir",
        str(tmp_path / "results"),
    ]
    SCRIPT.main([*command, *later])
    limits = {row["task"]: row["limit"] for row in read_results(tmp_path / "results")}
    assert limits == {"arithmetic_test": 2, "arithmetic_easy_test": 1}
    assert read_recipe(tmp_path / "results")["benchmarks"] == ["arithmetic_test", "arithmetic_easy_test"]
    for folder in (tmp_path / "results", run):
        rows = [row for row in read_results(folder) if row["metric"] == "accuracy" and row["limit"] == 2]
        columns = [(row["method"], row["gates"], row.get("adapter"), row.get("model")) for row in rows]
        assert columns == [("p=0.5", "unit", str(run), None), ("merged", "none", None, str(merged))]
        assert len({(folder / row["samples"]).read_text() for row in rows}) == 1


def test_adapters_are_evaluated_with_their_tokenizer(saved, tmp_path):
    run, own = shutil.copytree(saved / "adapter", tmp_path / "run"), load_tokenizer(saved / "base")
    own.chat_template = "{% for turn in messages %}Q: {{ turn.content }}!{% endfor %}"
    own.save_pretrained(run)
    lm = LoopedLM(str(saved / "base"), adapter=str(run))
    assert lm.tokenizer.chat_template == own.chat_template
    SCRIPT.main(words(saved, tmp_path, "--adapter", run, apply_chat_template="true", max_new_tokens=1))
    (path,) = tmp_path.glob("samples/run/samples_own_gsm8k_*")
    assert all(re.fullmatch("Q: .*!", line["prompt"], re.DOTALL) for line in read_lines(path))


@pytest.mark.slow
def test_processes_share_the_problems(saved, tmp_path):
    fields = {"benchmark_limit": 5, "max_new_tokens": 32}
    for count in (1, 2, 3):
        command = words(saved, tmp_path / str(count), "--adapter", saved / "adapter", **fields)
        python(EVALUATE, *command, processes=count)
    assert num_answers(tmp_path / "3") == num_answers(tmp_path / "1") == 10
    for task in ("own_gsm8k", "arithmetic_test"):
        texts = [path.read_text() for path in tmp_path.glob(f"*/samples/adapter/samples_{task}_K4_unit.jsonl")]
        assert len(texts) == 3 and len({*texts}) == 1


def print_values(capsys, names, depths, tasks=("arithmetic_easy_test",), averages=None):
    """Return the printed lines of results with the value 10 K."""
    row = {"gates": "unit", "metric": "accuracy"}
    rows = []
    for name, depth, task in itertools.product(names, depths, tasks):
        place = {"name": name, "num_loops": depth, "task": task, "value": 10.0 * depth}
        rows += [{**row, **place}, {**row, **place, "metric": "last_number"}]
    print_evaluation(rows, averages or {})
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]


def test_depths_of_an_evaluation_are_columns_of_one_table(capsys, monkeypatch):
    """Also if the name of a checkpoint is long: it is in the title. Several long names are below the table."""
    monkeypatch.setenv("COLUMNS", "80")
    long, values = "loop_dropout/lr_0.001/seed_0/checkpoint-53", [f"{10 * depth}.00" for depth in range(1, 9)]
    title, head, first, *rest = print_values(capsys, [long], range(1, 9))
    assert title == [f"Results with K loops, for model = {long}"] and len(rest) == 2
    assert head == ["task", *(f"K = {depth}" for depth in range(1, 9))] and first == ["arithmetic_easy_test", *values]
    title, head, *lines = print_values(capsys, [long, "base"], [2, 4], ["gsm8k", "math"], {"both": ["gsm8k", "math"]})
    assert (title, head) == (["Results with K loops"], ["task", "model", "K = 2", "K = 4"])
    assert lines[:2] == [["gsm8k", "1", "20.00", "40.00"], ["gsm8k", "2", "20.00", "40.00"]]
    assert lines[-4:-2] == [["both", "1", "20.00", "40.00"], ["both", "2", "20.00", "40.00"]]
    assert lines[-2:] == [[f"model 1: {long}"], ["model 2: base"]]
    print_evaluation(
        [
            {
                "name": "a",
                "gates": "unit",
                "metric": "accuracy",
                "num_loops": 4,
                "task": "b",
                "value": 1.0,
                "readout": 2,
            }
        ],
        {},
    )
    assert "\nResults at K = 4, read out after loop 2\n" in capsys.readouterr().out
    title, head, *lines = print_values(capsys, ["base", "quickstart"], [4])
    assert (title, head, lines[0]) == (
        ["Results at K = 4"], ["task", "base", "quickstart"], ["arithmetic_easy_test", "40.00", "40.00"],
    )  # fmt: skip
