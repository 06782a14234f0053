"""Looped models in lm-eval: its own numbers at unit gates, any depth, gates and readout, and its command line."""

import json
from configparser import ConfigParser

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_ouro
from processes import Program, python
from test_evaluation import saved  # noqa: F401 (a fixture)
from test_generation import adapted, varied

from loopdropout_trainer import use_gates
from loopdropout_trainer.evaluation import Subject, generate_greedy
from loopdropout_trainer.looped import find_looped_model


pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from loopdropout_trainer.evaluation.looped_lm import LoopedLM  # noqa: E402


CONTEXTS = ["Q: 1+1?\nA:", "", "Trailing space ", "A longer context, of more words than the others"]
PAIRS = [(context, end) for context in CONTEXTS for end in (" 2", " 3", " five six seven")]
PAIRS.append(PAIRS[0])  # asked twice
TEXTS = ["The cat sat", "on", "the mat, and it was a rather long sentence about it"]


def requests(kind, arguments):
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def numbers(lm):
    """The answers to requests of all three kinds."""
    until = [(text, {"until": ["\n", "<eos>"], "max_gen_toks": budget}) for text in TEXTS for budget in (5, 9)]
    return (
        lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True),
        lm.generate_until(requests("generate_until", until), disable_tqdm=True),
    )


def assert_same(got, want):
    """Log-likelihoods within rounding; greedy or not, and texts, exactly."""
    assert [log for log, _ in got[0]] == pytest.approx([log for log, _ in want[0]], rel=1e-5, abs=2e-4)
    assert [greedy for _, greedy in got[0]] == [greedy for _, greedy in want[0]]
    assert got[1] == pytest.approx(want[1], rel=1e-5, abs=2e-4)
    assert got[2] == want[2]


@pytest.mark.pairs
@pytest.mark.parametrize("max_length", [None, 24])
def test_every_kind_of_request_gets_the_answer_of_lm_evals_hf(make_tiny, tokenizer, max_length):
    model = adapted(varied(make_tiny()))
    want = numbers(HFLM(model, tokenizer=tokenizer, batch_size=1, max_length=max_length))
    assert len({log for log, _ in want[0]}) > 10 and len(set(want[2])) > 1
    for batch_size in (1, 16, "auto"):
        lm = LoopedLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, max_batch_size=4)
        assert_same(numbers(lm), want)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("num_loops", "gates", "readout"),
    [(6, None, None), (4, [1, 0, 0, 0], None), (4, [0.5, 0, 2, 1], 3), (6, [0] * 6, 2)],
)
def test_depth_gates_and_readout_are_those_of_hf_under_them(make_tiny, tokenizer, num_loops, gates, readout):
    model = adapted(varied(make_tiny())).double()  # in float32 rounding decides near ties
    config = find_looped_model(model).config
    config.num_loops = num_loops
    text = gates and "-".join(map(str, gates))
    got = numbers(LoopedLM(model, tokenizer=tokenizer, batch_size=4, gates=text, readout=readout))
    assert config.num_loops == num_loops and find_looped_model(model).loop_state.gates is None
    config.num_loops = readout or num_loops  # the readout after loop t is a run of t loops
    with use_gates(model, (gates or [1.0] * num_loops)[: config.num_loops]):
        assert_same(got, numbers(HFLM(model, tokenizer=tokenizer, batch_size=1)))


def test_sampling_and_other_options_go_to_transformers_and_run_as_asked(tokenizer):
    model = adapted(varied(tiny_ouro()))
    lm = LoopedLM(model, tokenizer=tokenizer, batch_size=4, gates="0-0-0-0")
    with model.disable_adapter():
        want = generate_greedy(model, tokenizer, TEXTS, 6, progress=False)
    options = {"until": ["<eos>"], "max_gen_toks": 6, "num_beams": 1, "repetition_penalty": 1.0}
    assert lm.generate_until(requests("generate_until", [(t, options) for t in TEXTS]), disable_tqdm=True) == want
    torch.manual_seed(0)
    sampled = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 2.0}
    texts = lm.generate_until(requests("generate_until", [(TEXTS[0], sampled)] * 4), disable_tqdm=True)
    assert len(set(texts)) > 1


def test_what_a_model_does_not_have_is_refused_in_one_sentence(tokenizer):
    model = tiny_ouro().eval()
    cases = {"1-0": "`gates` .* 4 loops.*; got '1-0'", "1-x-0-0": "got '1-x-0-0'", "1-0-0-0": "has no adapter"}
    for gates, readout, message in [*((each, None, cases[each]) for each in cases), (None, 5, "`readout` .*; got 5")]:
        with pytest.raises(ValueError, match=message):
            LoopedLM(model, tokenizer=tokenizer, gates=gates, readout=readout)
    long = requests("generate_until", [("a", {"max_gen_toks": 16})])
    with pytest.raises(ValueError, match="`max_gen_toks` must be less than `max_length`, 16"):
        LoopedLM(model, tokenizer=tokenizer, max_length=16).generate_until(long)
    with pytest.raises(ValueError, match="`system_instruction` is a turn of a chat"):
        Subject(model, tokenizer, system_instruction="Be brief.")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folder with an lm-eval task of each kind on local rows."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"{i} + {i} =", "a": str(2 * i), "wrong": str(2 * i + 1)} for i in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
    kinds = {
        "choice": 'output_type: multiple_choice\ndoc_to_choice: "{{[a, wrong]}}"\ndoc_to_target: 0\n',
        "text": 'output_type: generate_until\ndoc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 6}\n',
        "rolling": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{q}}"\nmetric_list: [{metric: byte_perplexity}]\n',
    }
    for kind, yaml in kinds.items():
        text = "" if kind == "rolling" else "{{q}}"
        (folder / f"{kind}.yaml").write_text(f'task: own_{kind}\n{data}doc_to_text: "{text}"\n{yaml}')
    return folder


def run_lm_eval(tasks, model_args, folder, *flags, processes=1):
    """Run lm-eval's command line; return the table of its results, and the responses by task."""
    command = ["-m", "loopdropout_trainer.lm_eval", "--model", "looped", "--batch_size=2"]
    command += ["--model_args", model_args, "--tasks", "own_choice,own_text,own_rolling", "--include_path", str(tasks)]
    command += ["--log_samples", "--output_path", str(folder), *flags]
    printed = python(*command, processes=processes, cwd=tasks)
    assert "own_choice" in printed and "looped" in printed
    (file,) = folder.rglob("results_*.json")
    samples = {}
    for path in folder.rglob("samples_*.jsonl"):
        rows = sorted(map(json.loads, path.open()), key=lambda row: row["doc_id"])
        # Over several processes lm-eval asks some requests twice, to give all as many, and logs both answers.
        samples[path.name.split("_")[2]] = [[each[:1] for each in row["resps"]] for row in rows]
    return json.loads(file.read_text())["results"], samples


def test_lm_evals_own_command_line_with_its_flags(saved, tasks, tmp_path):  # noqa: F811
    arguments = f"pretrained={saved / 'base'},dtype=float32"
    gated = f"{arguments},adapter={saved / 'adapter'},num_loops=3,gates=0-0-0,readout=2"
    results, samples = run_lm_eval(tasks, gated, tmp_path, "--limit", "5", "--seed", "7")
    assert {kind: len(rows) for kind, rows in samples.items()} == {"choice": 5, "text": 5, "rolling": 5}
    perplexity = lambda results: results["own_rolling"]["byte_perplexity,none"]
    here = {"tasks": ["own_rolling"], "task_manager": TaskManager(include_path=str(tasks), include_defaults=False)}
    for num_loops in (2, 4):  # without gates
        want = simple_evaluate("looped", f"{arguments},num_loops={num_loops}", batch_size=2, limit=5, **here)[
            "results"
        ]
        is_same = perplexity(results) == pytest.approx(perplexity(want), rel=1e-5)
        assert is_same == (num_loops == 2)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(saved, tasks, tmp_path):  # noqa: F811
    arguments = f"pretrained={saved / 'base'},dtype=float32"
    _, one = run_lm_eval(tasks, arguments, tmp_path / "one")
    _, two = run_lm_eval(tasks, arguments, tmp_path / "two", processes=2)
    assert one["text"] == two["text"] and len(one["text"]) == 7
    for kind in ("choice", "rolling"):  # lm-eval writes log-likelihoods as text
        numbers = [[float(np.ravel(each[0])[0]) for row in found[kind] for each in row] for found in (one, two)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4, rel=1e-5)


def test_the_entry_point_names_the_backend():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.entry_points"]["lm_eval.models"].strip() == f"looped = {LoopedLM.__module__}:LoopedLM"


def test_without_lm_eval_a_sentence_names_the_extra():
    absent = "import sys; sys.modules['lm_eval'] = None; "
    for code in (
        "import runpy; runpy.run_module('loopdropout_trainer.lm_eval', run_name='__main__')",
        "from loopdropout_trainer.evaluation import load_benchmark; "
        "from loopdropout_trainer.errors import run_command; run_command(lambda: load_benchmark('mmlu'))",
    ):
        program = Program("-c", absent + code)
        assert program.wait() and "Traceback" not in program.stderr
        assert 'pip install "loopdropout-trainer[eval]"' in program.stderr
