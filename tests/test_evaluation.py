"""Scorers against the references' verdicts, and evaluations from prompt to results, interrupted ones too."""

import functools
import gzip
import json
import random
import sqlite3
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import GOLDEN, ROOT, SAMPLES, load_script, tiny_ouro, varied, with_adapter
from datasets import Dataset
from lm_eval.tasks.hendrycks_math.utils import is_equiv
from processes import Program, python, wait_for

from loopdropout_trainer import load_model, merge_and_save
from loopdropout_trainer.diagnostics import answer_decomposition
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation import (
    LoopedLM,
    development_task,
    evaluate_tasks,
    load_benchmarks,
    load_task,
    loading,
    looped_lm,
    own_benchmark,
    scorers,
)
from loopdropout_trainer.evaluation.loading import task_of_rows
from loopdropout_trainer.results import read_results
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES


EVALUATE = ROOT / "recipes" / "evaluate.py"
GSM8K = str(SAMPLES / "gsm8k_test.jsonl")
OWN_GSM8K = {"own_gsm8k": {"files": GSM8K, "like": "gsm8k"}}


def read_golden(name, kind=None):
    rows = map(json.loads, gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()).splitlines())
    return [row for row in rows if kind is None or row["kind"] == kind]


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def adapted(model):
    """Add an adapter that changes the texts."""
    torch.manual_seed(1)
    return with_adapter(model, scale=0.2, r=4).eval()


def steady(**config):
    """A random model without near ties, which the batch size may decide in float32."""
    return varied(tiny_ouro(max_position_embeddings=8192, **config), std=0.1)


@pytest.fixture
def replay(monkeypatch, tokenizer, tmp_path):
    """`replay(task, problems, responses)`: results and samples of an evaluation with given responses."""

    def run(task, problems, responses, **options):
        answer = lambda self, requests, disable_tqdm=False: [responses[request.doc["number"]] for request in requests]
        monkeypatch.setattr(LoopedLM, "generate_until", answer)
        rows = [{**problem, "number": number} for number, problem in enumerate(problems)]
        if isinstance(task, str):
            task = task_of_rows("replayed", task, Dataset.from_list(rows))
        results = evaluate_tasks(LoopedLM(tiny_ouro(), tokenizer), [task], output_dir=tmp_path, **options)
        return results, read_lines(tmp_path / results[0]["samples"])

    return run


# Scorers


def test_gsm8k_matches_golden(replay):
    rows = read_golden("gsm8k_strict")
    problems = [{"question": "?", "answer": row["target"]} for row in rows]
    results, samples = replay("gsm8k", problems, [row["response"] for row in rows])
    assert [sample["answer"] or "[invalid]" for sample in samples] == [row["extracted"] for row in rows]
    assert [sample["correct"] for sample in samples] == [row["correct"] for row in rows]
    accuracy, missing = results
    assert (accuracy["n"], accuracy["value"]) == (897, pytest.approx(100 * sum(row["correct"] for row in rows) / 897))
    assert missing["value"] == pytest.approx(100 * sum(row["extracted"] == "[invalid]" for row in rows) / 897)


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


@pytest.mark.parametrize("level", ["strict", "loose"])
def test_ifeval_matches_golden(replay, level):
    rows = read_golden("ifeval")
    problems = [{name: row[name] for name in ("key", "prompt", "instruction_id_list", "kwargs")} for row in rows]
    options = {"apply_chat_template": False}
    _, samples = replay(f"ifeval_{level}", problems, [row["response"] for row in rows], **options)
    assert len(samples) == 270
    assert [sample["correct"] for sample in samples] == [row[f"prompt_{level}"] for row in rows]


def test_answer_decomposition_matches_golden():
    for case in json.loads(gzip.decompress((GOLDEN / "eval_stats.json.gz").read_bytes()))["synthetic"]:
        parts = {
            "gain": "per_seed_total",
            "gain_both_answered": "per_seed_both",
            "gain_missing_in_either": "per_seed_missing",
        }
        for seed, (ours, baseline) in enumerate(zip(case["b"], case["a"], strict=True)):
            samples = [
                [
                    {"correct": int(c), "answered": int(a)}
                    for c, a in zip(bits["correct"], bits["extractable"], strict=True)
                ]
                for bits in (ours, baseline)
            ]
            gains = {row["metric"]: row["value"] for row in answer_decomposition(*samples)}
            assert gains == pytest.approx({name: case["expected"][key][seed] for name, key in parts.items()})


# Tasks


def test_tasks_have_the_prompts_of_the_paper():
    task = own_benchmark("mine", GSM8K, like="metamath_gsm8k")
    assert task.doc_to_text(task.eval_docs[1]) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nA robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total "
        "does it take?\n\n### Response: Let's think step by step."
    )
    assert [task.doc_to_target(problem) for problem in task.eval_docs][:3] == [18, 3, 70000]
    math = own_benchmark("mine", str(SAMPLES / "math500_test.jsonl"), like="metamath_math500")
    assert math.doc_to_text(math.eval_docs[0]).startswith("Below is") and math.config.num_fewshot == 0
    assert math.doc_to_target(math.eval_docs[0]) == "\\left( 3, \\frac{\\pi}{2} \\right)"
    for options, limit in ((task.config.generation_kwargs, 512), (math.config.generation_kwargs, 2048)):
        assert options["max_gen_toks"] == limit and len(options["until"]) == 10
    direct = own_benchmark("mine", GSM8K, like="gsm8k")
    prompt = direct.doc_to_text(direct.eval_docs[1])
    assert prompt.startswith("Question: A robe takes") and prompt.endswith("it take?\nAnswer:")


def test_arithmetic_task_generates_its_problems():
    (task,) = load_task("arithmetic_easy_test").values()
    assert len(task.eval_docs) == 500 and {*task.eval_docs["num_steps"]} == {1, 2, 3}
    (more,) = load_task("arithmetic_easy_test", limit=1000).values()
    assert len(more.eval_docs) == 1000 and more.eval_docs[:500] == task.eval_docs[:]


def test_arithmetic_counts_last_numbers(replay):
    responses = ["so 12", "#### 12", "12 of 13", "nothing", "#### 3.", "1,200"]
    answers = ["#### 12", "#### 12", "a = 12\n#### 12", "#### 4", "#### 3", "#### 1,200"]
    results, samples = replay("arithmetic_test", [{"question": "?", "answer": text} for text in answers], responses)
    values = {row["metric"]: row["value"] for row in results}
    assert values == pytest.approx({"accuracy": 100 / 3, "last_number": 400 / 6, "missing": 400 / 6})
    assert [sample["correct"] for sample in samples] == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("preparation", "answer"), [("gsm8k", "1 + 1 = 2\n#### 2"), ("metamath_gsm", "The answer is: 2")]
)
def test_development_task_scores_held_out_examples(monkeypatch, tokenizer, preparation, answer):
    examples = Dataset.from_list([{"question": "1 + 1?", "answer": answer, "prompt": "", "completion": ""}] * 3)
    monkeypatch.setattr(LoopedLM, "generate_until", lambda self, requests: [answer, "#### 3", "The answer is: 3"])
    accuracy, *_ = evaluate_tasks(LoopedLM(tiny_ouro(), tokenizer), [development_task(preparation, examples)])
    assert (accuracy["task"], accuracy["metric"], accuracy["n"]) == ("development", "accuracy", 3)
    assert accuracy["value"] == pytest.approx(100 / 3)


def load_local_dataset(folder, path, name=None, load=datasets.load_dataset, **options):
    return load(str(folder), name)


def test_group_is_the_mean_over_problems(tokenizer, tmp_path, monkeypatch):
    index = loading._find_manager("mmlu_stem").task_index
    subjects = [name.removeprefix("mmlu_") for name in index["mmlu_stem_tasks"].tags]
    configs, rng = [], random.Random(0)
    for subject in subjects:
        rows = [
            {"question": f"{number}?", "subject": subject, "choices": [*"wxyz"], "answer": rng.randrange(4)}
            for number in range(1 + len(subject) % 3)
        ]
        write_lines(tmp_path / f"{subject}.jsonl", rows)
        files = "".join(f"  - {{split: {split}, path: {subject}.jsonl}}\n" for split in ("test", "dev"))
        configs.append(f"- config_name: {subject}\n  data_files:\n{files}")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    lm = LoopedLM(steady(), tokenizer, batch_size=64)
    monkeypatch.setattr("datasets.load_dataset", functools.partial(load_local_dataset, tmp_path))
    accuracy, *parts = evaluate_tasks(lm, ["mmlu_stem"], output_dir=tmp_path)
    samples = read_lines(tmp_path / "samples_mmlu_stem.jsonl")
    assert accuracy["value"] == pytest.approx(100 * np.mean([sample["correct"] for sample in samples]))
    assert 0 < accuracy["value"] < 100
    assert accuracy["n"] == len(samples) == sum(1 + len(subject) % 3 for subject in subjects)
    counts = Counter(sample["subject"] for sample in samples)
    assert {row["group"]: row["n"] for row in parts if row["metric"] == "accuracy_by_subject"} == counts


@pytest.mark.parametrize(
    ("like", "row", "message"),
    [
        ("metamath_gsm8k", {"query": "?"}, "The task `mine` cannot be loaded: 'question' is undefined"),
        (
            "gsm_plus",
            {"question": "?", "solution": "#### 1"},
            "`like` must be a task without examples of another split",
        ),
    ],
)
def test_own_benchmark_needs_the_columns_of_its_task(like, row, message, tmp_path, monkeypatch):
    monkeypatch.setitem(loading._FOLDERS, "gsm", "gsm_plus")
    with pytest.raises(UserError, match=message):
        own_benchmark("mine", write_lines(tmp_path / "rows.jsonl", [row]), like=like)


def test_load_task_suggests_the_nearest(monkeypatch):
    load_manager = loading._load_manager  # lm-eval's index takes 10 seconds
    monkeypatch.setattr(loading, "_load_manager", lambda folder, include_defaults: load_manager(folder, False))
    with pytest.raises(UserError, match="`gsm9k` must be a task of lm-eval or one of .* Did you mean 'gsm8k'"):
        load_task("gsm9k")


def test_ifeval_needs_punkt(monkeypatch, tmp_path):
    import nltk

    problem = {"key": 1, "prompt": "?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(UserError, match="python -m nltk.downloader punkt_tab"):
        own_benchmark("mine", write_lines(tmp_path / "rows.jsonl", [problem]), like="ifeval_strict")


# Own benchmarks


CAPITALS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]
OWN = {"prompt": "The capital of {country} is", "target": "{capital}", "scorer": "exact_match"}


def test_own_benchmark_scores_answers(replay, tmp_path):
    files = write_lines(tmp_path / "rows.jsonl", [{**row, "number": i} for i, row in enumerate(CAPITALS)])
    task = own_benchmark("capitals", files, **OWN, max_new_tokens=8, stop=["."])
    assert task.config.generation_kwargs == {"until": ["."], "do_sample": False, "max_gen_toks": 8}
    (accuracy, *_), samples = replay(task, CAPITALS, [" Paris ", "Cuzco"])
    assert (accuracy["task"], accuracy["metric"], accuracy["value"]) == ("capitals", "accuracy", 50)
    assert [sample["prompt"] for sample in samples] == ["The capital of France is", "The capital of Peru is"]
    assert [(sample["target"], sample["correct"]) for sample in samples] == [("Paris", 1), ("Lima", 0)]


def test_own_benchmark_asks_in_a_chat(tokenizer, tmp_path):
    task = own_benchmark("capitals", write_lines(tmp_path / "rows.jsonl", CAPITALS), **OWN, chat=True)
    with pytest.raises(UserError, match="`chat_template` must be set, because the prompts of `capitals`"):
        evaluate_tasks(LoopedLM(steady(), tokenizer), [task])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": None}, "`capitals` must have `files`, and either `prompt`, `target` and `scorer` or `like`"),
        ({"files": None}, "`capitals` must have `files`"),
        ({"prompt": "{land}"}, "The task `capitals` cannot be loaded: `land` is missing"),
        ({"scorer": "exact_mach"}, "`scorer` must be one of .* Did you mean 'exact_match'"),
        ({"promt": "x"}, "The benchmark `capitals` has no field `promt`"),
    ],
)
def test_own_benchmark_explains_mistakes(tmp_path, fields, message):
    own = {"files": write_lines(tmp_path / "rows.jsonl", CAPITALS), **OWN, **fields}
    with pytest.raises(UserError, match=message):
        load_benchmarks(["capitals"], {"capitals": own})


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "development"])
def test_own_benchmark_has_its_own_name(tmp_path, name):
    own = {"files": write_lines(tmp_path / "rows.jsonl", CAPITALS), **OWN}
    with pytest.raises(UserError, match=f"must not have the name of a task .* got '{name}'"):
        load_benchmarks([name], {name: own})


TASK_FILE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {files}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{country}}}}:"
doc_to_target: "{{{{capital}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


def test_task_file_is_a_benchmark_after_import(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(TASK_FILE.format(name="mine", files=write_lines(tmp_path / "rows.jsonl", CAPITALS)))
    with pytest.raises(UserError, match=f"can run code.* Add `--import {path}` to the command line"):
        load_benchmarks([str(path)])
    monkeypatch.setattr(loading, "IMPORTED", [str(path)])
    (task,) = load_benchmarks([str(path)])
    assert task.task_name == "mine" and task.doc_to_text(task.eval_docs[0]) == "France:"
    path.write_text(path.read_text().replace("task: mine", "task: gsm8k"))
    with pytest.raises(UserError, match="must not have the name of a task .* got 'gsm8k'"):
        load_task(str(path))


# Evaluations


def test_chat_prompts_have_a_system_turn(tokenizer, tmp_path):
    model = steady()
    lm = LoopedLM(model, tokenizer)
    options = {"limit": 1, "max_new_tokens": 12, "output_dir": tmp_path, "apply_chat_template": True}
    with pytest.raises(UserError, match="`chat_template` must be set"):
        evaluate_tasks(lm, ["arithmetic_test"], **options)
    tokenizer.chat_template = CHAT_TEMPLATES["tulu2"].read_text()
    try:
        evaluate_tasks(lm, ["arithmetic_test"], system_instruction="Be brief.", **options)
    finally:
        tokenizer.chat_template = None
    (sample,) = read_lines(tmp_path / "samples_arithmetic_test.jsonl")
    assert sample["prompt"].startswith("<|system|>\nBe brief.\n<|user|>\nQuestion: ")
    assert sample["prompt"].endswith("\nAnswer:\n<|assistant|>\n")
    (completion,) = looped_lm.generate_greedy(model, tokenizer, [sample["prompt"]], 12, progress=False)
    assert sample["completion"] == completion != ""


def test_evaluation_keeps_random_states(tokenizer):
    lm = LoopedLM(steady(), tokenizer)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    evaluate_tasks(lm, ["arithmetic_test"], limit=1, max_new_tokens=2)
    states = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert states == (random.random(), np.random.rand(), torch.rand(1).item())


def settings(model, tokenizer):
    """A model at several depths, gates and readouts, with other end tokens, and without its adapter."""
    yield LoopedLM(model, tokenizer)
    for options in ({"num_loops": 2}, {"gates": "1-0-0-0"}, {"gates": "0-1-0-0"}, {"readout": 2}):
        yield LoopedLM(model, tokenizer, **options)
    with model.disable_adapter():
        yield LoopedLM(model, tokenizer)
    model.generation_config.eos_token_id = [0, 40]
    yield LoopedLM(model, tokenizer)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).add_(1.0)
    yield LoopedLM(model, tokenizer)


def test_settings_never_share_a_cache(tokenizer, tmp_path):
    fingerprints = []
    for lm in settings(adapted(steady()), tokenizer):
        fingerprints.append(lm.fingerprint())
        evaluate_tasks(lm, ["arithmetic_test"], cache_dir=tmp_path, limit=1, max_new_tokens=1)
    assert len({*fingerprints}) == len([*tmp_path.glob("*.db")]) == 8
    assert lm.fingerprint() == fingerprints[-1]


def test_sharded_weights_are_rejected(tokenizer):
    model = steady()
    model.lm_head.weight.ds_id = 7  # ZeRO-3 marks its parameters
    with pytest.raises(UserError, match="they are sharded"):
        LoopedLM(model, tokenizer)


# recipes/evaluate.py


SCRIPT = load_script("recipes/evaluate.py")


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Folders of a model, its adapter, and the merged model."""
    folder = tmp_path_factory.mktemp("saved")
    model = adapted(steady())
    steady().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model.save_pretrained(folder / "adapter")
    merge_and_save(model, folder / "merged", tokenizer)
    return folder


def words(saved, output_dir, *more, **fields):
    """The command line of an evaluation of eight problems."""
    fields = {"model_name_or_path": saved / "base", "dtype": "float32", "benchmark_limit": 8, **fields}
    fields |= {"output_dir": output_dir, "use_cpu": "true", "own_benchmarks": json.dumps(OWN_GSM8K)}
    options = [str(part) for name, value in fields.items() for part in (f"--{name}", value)]
    return [*options, "--benchmarks", "own_gsm8k", "arithmetic_test", *map(str, more)]


def num_answers(folder):
    """Number of answers in the caches of an evaluation."""
    count = 0
    for path in folder.glob("cache/*.db"):
        try:
            count += (
                sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("select count(*) from unnamed").fetchone()[0]
            )
        except sqlite3.OperationalError:  # it has just been created
            continue
    return count


def test_killed_evaluation_generates_missing_answers(saved, tmp_path, monkeypatch):
    options = ("--adapter", saved / "adapter", "--max_new_tokens", 64)
    command = words(saved, tmp_path / "run", *options, benchmark_batch_size=1)
    program = Program(EVALUATE, *command)
    wait_for(lambda: num_answers(tmp_path / "run") >= 3, program)
    program.end()
    kept = num_answers(tmp_path / "run")
    assert 3 <= kept < 16 and not (tmp_path / "run" / "results.jsonl").exists()

    prompts, generate = [], looped_lm.generate_greedy
    count = lambda *given, **options: prompts.extend(given[2]) or generate(*given, **options)
    monkeypatch.setattr(looped_lm, "generate_greedy", count)
    SCRIPT.main(command)
    assert len(prompts) == 16 - kept
    SCRIPT.main(words(saved, tmp_path / "whole", *options))
    for task in ("own_gsm8k", "arithmetic_test"):
        paths = [tmp_path / name / "samples" / "adapter" / f"samples_{task}.jsonl" for name in ("run", "whole")]
        assert paths[0].read_text() == paths[1].read_text()
    assert [strip(row) for row in read_results(tmp_path / "run")] == [
        strip(row) for row in read_results(tmp_path / "whole")
    ]


def strip(row):
    return {name: value for name, value in row.items() if not name.startswith("recipe_") and name != "folder"}


def test_results_have_a_row_for_each_setting(saved, tmp_path, capsys):
    adapters = ("--adapter", "none", f"own={saved / 'adapter'}")
    command = words(saved, tmp_path, *adapters, "--at_depths", 2, 4, "--gates", benchmark_limit=2)
    averages = json.dumps({"Average": ["own_gsm8k", "arithmetic_test"]})
    SCRIPT.main([*command, "1-1", "--averages", averages, "--max_new_tokens", "4", "--at_depths", "2"])
    SCRIPT.main([*command, "single_loop", "--max_new_tokens", "4"])
    rows = [row for row in read_results(tmp_path) if (row["task"], row["metric"]) == ("own_gsm8k", "accuracy")]
    places = [(row.get("adapter"), row["method"], row["num_loops"], row["gates"], row.get("loop")) for row in rows]
    adapter = (str(saved / "adapter"), "own")
    alone = [(*adapter, depth, f"loop {t}", t) for depth in (2, 4) for t in range(1, depth + 1)]
    base = [(None, "base model", depth, "none", None) for depth in (2, 4)]
    assert Counter(places) == Counter([*base, (*adapter, 2, "unit", None), *alone])
    assert all(len(read_lines(tmp_path / row["samples"])) == row["n"] == 2 for row in rows)
    assert len({row["samples"] for row in rows}) == len(rows)
    printed = capsys.readouterr().out
    assert "own, K = 4, loop 3" in printed and "Average " in printed and "own_gsm8k, missing" in printed


def test_script_names_what_changed(saved, tmp_path):
    command = words(saved, tmp_path, benchmark_limit=1, max_new_tokens=2)
    SCRIPT.main(command)
    with pytest.raises(UserError, match=r"another model: `model_name_or_path` changed from '.*base' to '.*merged'"):
        SCRIPT.main([*command, "--model_name_or_path", str(saved / "merged")])
    with pytest.raises(UserError, match="`adapter` must give each adapter its own name"):
        SCRIPT.main([*command, "--adapter", "a/x", "b/x"])


def test_script_finds_tiny_ouro_offline(monkeypatch):
    monkeypatch.setitem(SCRIPT.main.__globals__, "find_adapter_config_file", lambda path: not Path(path).is_dir())
    assert SCRIPT.find_model("tiny-ouro", "tiny-ouro") == (None, {"method": "tiny-ouro", "model": "tiny-ouro"})


def test_folders_need_neither_recipe_nor_base(saved, tmp_path):
    options = ["--dtype", "float32", "--benchmarks", "arithmetic_test", "--benchmark_limit", "2", "--use_cpu", "true"]
    options += ["--max_new_tokens", "4"]
    model = load_model(saved / "base", adapter=saved / "adapter")
    model.peft_config["default"].base_model_name_or_path = str(saved / "base")
    model.save_pretrained(tmp_path / "run")
    SCRIPT.main([str(tmp_path / "run"), str(saved / "merged"), *options, "--output_dir", str(tmp_path / "results")])
    (tmp_path / "run" / "recipe.yaml").write_text(f"model_name_or_path: {saved / 'base'}\ndtype: float32\np: 0.5\n")
    SCRIPT.main([str(tmp_path / "run"), str(saved / "merged"), *options])
    for folder in ("results", "run"):
        rows = [row for row in read_results(tmp_path / folder) if row["metric"] == "accuracy"]
        columns = [(row["method"], row["gates"], row.get("adapter"), row.get("model")) for row in rows]
        path = str(saved / "merged")
        assert columns == [("run", "unit", str(tmp_path / "run"), None), ("merged", "none", None, path)]
        texts = [(tmp_path / folder / row["samples"]).read_text() for row in rows]
        assert texts[0] == texts[1]


@pytest.mark.slow
def test_processes_share_the_problems(saved, tmp_path):
    for count in (1, 2, 3):
        command = words(saved, tmp_path / str(count), "--adapter", saved / "adapter", benchmark_limit=5)
        python(EVALUATE, *command, processes=count)
    assert num_answers(tmp_path / "3") == num_answers(tmp_path / "1") == 10
    for task in ("own_gsm8k", "arithmetic_test"):
        one, *others = (tmp_path / str(n) / "samples" / "adapter" / f"samples_{task}.jsonl" for n in (1, 2, 3))
        assert all(other.read_text() == one.read_text() for other in others)
