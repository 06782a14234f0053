"""Looped models in lm-eval: its own numbers at unit gates, any depth, gates and readout, and its command line."""

import json
import os
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest
import torch
from conftest import tiny_ouro
from test_generation import adapted, varied

from loopdropout_trainer import use_gates
from loopdropout_trainer.evaluation import Subject, generate_greedy
from loopdropout_trainer.looped import find_looped_model


pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from loopdropout_trainer.evaluation.looped_lm import LoopedLM  # noqa: E402


ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
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


@pytest.mark.parametrize("max_length", [None, 24])
def test_every_kind_of_request_gets_the_answer_of_lm_evals_hf(make_tiny, tokenizer, max_length):
    model = adapted(varied(make_tiny()))
    want = numbers(HFLM(model, tokenizer=tokenizer, batch_size=1, max_length=max_length))
    assert len({log for log, _ in want[0]}) > 10 and len(set(want[2])) > 1
    for batch_size in (1, 16):
        lm = LoopedLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
        assert_same(numbers(lm), want)


def full_logits(model, ids, readout=None):
    """The logits of all tokens, by the loops' own readouts."""
    readouts = find_looped_model(model).loop_readouts(input_ids=torch.tensor([ids]))
    return find_looped_model(model).get_output_embeddings()(readouts[-1 if readout is None else readout - 1])[0]


@torch.no_grad()
def direct_numbers(model, tokenizer, gates, readout):
    """Log-likelihoods and greedy texts, one token and one row at a time, with every logit computed."""
    likelihoods, texts = [], []
    with use_gates(model, gates):
        for context, end in PAIRS:
            if not context:
                continue
            spaces = len(context) - len(context.rstrip())
            head, end = (context[:-spaces], context[-spaces:] + end) if spaces else (context, end)
            before, ids = tokenizer(head)["input_ids"], tokenizer(end)["input_ids"]
            logits = full_logits(model, before + ids, readout)[len(before) - 1 : -1]
            scores = logits.log_softmax(-1)[range(len(ids)), ids]
            likelihoods.append((float(scores.sum()), logits.argmax(-1).tolist() == ids))
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            start = len(ids)
            for _ in range(6):
                ids.append(int(full_logits(model, ids, readout)[-1].argmax()))
            texts.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    return likelihoods, texts


@pytest.mark.parametrize(
    ("num_loops", "gates", "readout"),
    [(6, None, None), (4, "1-0-0-0", None), (4, "0.5-0-2-1", 3), (6, [0.0] * 6, 2)],
)
def test_depth_gates_and_readout_are_those_of_a_direct_computation(make_tiny, tokenizer, num_loops, gates, readout):
    model = adapted(varied(make_tiny())).double()  # in float32 rounding decides near ties
    find_looped_model(model).config.num_loops = num_loops
    matrix = [1.0] * num_loops
    if gates is not None:
        matrix = [float(gate) for gate in gates.split("-")] if isinstance(gates, str) else gates
    want = direct_numbers(model, tokenizer, matrix, readout)
    lm = LoopedLM(model, tokenizer=tokenizer, batch_size=4, gates=gates, readout=readout)
    pairs = [pair for pair in PAIRS if pair[0]]
    got = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [log for log, _ in got] == pytest.approx([log for log, _ in want[0]], rel=1e-5, abs=2e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want[0]]
    until = [(text, {"until": [], "max_gen_toks": 6}) for text in TEXTS]
    eos, tokenizer.eos_token = tokenizer.eos_token, None  # the direct computation stops at nothing
    ends, lm.looped.generation_config.eos_token_id = lm.looped.generation_config.eos_token_id, None
    try:
        assert lm.generate_until(requests("generate_until", until), disable_tqdm=True) == want[1]
    finally:
        tokenizer.eos_token, lm.looped.generation_config.eos_token_id = eos, ends
    assert find_looped_model(model).config.num_loops == num_loops and lm.looped.loop_state.gates is None


def test_no_logits_of_the_prompt_are_computed_and_choices_share_a_row(tokenizer):
    model = tiny_ouro().eval()
    heads, rows = [], []
    model.lm_head.register_forward_hook(lambda module, args, output: heads.append(output.numel() // output.shape[-1]))
    model.model.register_forward_hook(
        lambda module, args, kwargs, out: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    lm = LoopedLM(model, tokenizer=tokenizer, batch_size=16)
    letters = [("Which one? " * 9 + "Answer:", letter) for letter in "ABCD"]
    lm.loglikelihood(requests("loglikelihood", letters), disable_tqdm=True)
    assert (rows, heads) == ([1], [1])
    lm.loglikelihood(requests("loglikelihood", [*letters, ("Which one?", " four")]), disable_tqdm=True)
    assert (rows, heads) == ([1, 2], [1, 6])


def test_the_batch_size_can_be_found(tokenizer):
    model = adapted(varied(tiny_ouro()))
    lm = LoopedLM(model, tokenizer=tokenizer, batch_size="auto", max_batch_size=4)
    assert_same(numbers(lm), numbers(LoopedLM(model, tokenizer=tokenizer, batch_size=4)))
    assert set(lm.batch_sizes.values()) == {4}


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
    for fields, message in (
        ({"gates": "1-0"}, "`gates` must be a number for each of the 4 loops, such as 1-1-1-1; got '1-0'"),
        ({"gates": "1-x-0-0"}, "got '1-x-0-0'"),
        ({"gates": "1-0-0-0"}, "the model has no adapter"),
        ({"readout": 5}, "`readout` must be one of the loops 1 to 4; got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            LoopedLM(model, tokenizer=tokenizer, **fields)
    with pytest.raises(ValueError, match="must be less than the model's length of 16 tokens"):
        LoopedLM(model, tokenizer=tokenizer, max_length=16).generate_until(
            requests("generate_until", [("a", {"max_gen_toks": 16})])
        )
    with pytest.raises(ValueError, match="`system_instruction` is a turn of a chat"):
        Subject(model, tokenizer, system_instruction="Be brief.")


# The command line


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Folders of a model and of an adapter, and of an lm-eval task of each kind on local rows."""
    folder = tmp_path_factory.mktemp("lm_eval")
    model = adapted(varied(tiny_ouro()))
    varied(tiny_ouro()).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model.save_pretrained(folder / "adapter")
    rows = [{"q": f"{i} + {i} =", "a": str(2 * i), "wrong": str(2 * i + 1)} for i in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
    )
    kinds = {
        "choice": 'output_type: multiple_choice\ndoc_to_choice: "{{[a, wrong]}}"\ndoc_to_target: 0\n',
        "text": 'output_type: generate_until\ndoc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 6}\n',
        "rolling": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{q}}"\nmetric_list: [{metric: byte_perplexity}]\n',
    }
    for kind, yaml in kinds.items():
        text = "" if kind == "rolling" else "{{q}}"
        (folder / "tasks" / f"{kind}.yaml").write_text(f'task: own_{kind}\n{common}doc_to_text: "{text}"\n{yaml}')
    return folder


def lm_eval_command(saved, model, model_args, *flags, launcher=()):
    module = ["-m", "loopdropout_trainer.lm_eval"] if model == "looped" else ["-m", "lm_eval"]
    tasks = ["--tasks", "own_choice,own_text,own_rolling", "--include_path", str(saved / "tasks")]
    command = [sys.executable, *launcher, *module, "--model", model, "--model_args", model_args, *tasks, *flags]
    cache = {"HF_DATASETS_CACHE": str(saved / "datasets"), "HF_HOME": str(saved)}
    return subprocess.run(
        command, env={**ENVIRONMENT, **cache}, capture_output=True, text=True, timeout=600, cwd=saved
    )


def lm_eval_results(folder):
    (file,) = folder.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    samples = {
        path.name.split("_")[2]: sorted((json.loads(line) for line in path.open()), key=lambda row: row["doc_id"])
        for path in folder.rglob("samples_*.jsonl")
    }
    # Over several processes lm-eval asks some requests twice, to give all as many, and logs both answers.
    return results, {kind: [[each[:1] for each in row["resps"]] for row in rows] for kind, rows in samples.items()}


def test_lm_evals_own_command_line_with_its_flags(saved, tmp_path):
    flags = ["--limit", "5", "--batch_size", "2", "--log_samples", "--seed", "7", "--output_path"]
    arguments = f"pretrained={saved / 'base'},dtype=float32"
    done = lm_eval_command(saved, "looped", arguments, *flags, str(tmp_path / "ours"))
    assert done.returncode == 0, done.stderr
    assert "own_choice" in done.stdout and "looped" in done.stdout
    results, samples = lm_eval_results(tmp_path / "ours")
    assert {kind: len(rows) for kind, rows in samples.items()} == {"choice": 5, "text": 5, "rolling": 5}

    gated = f"{arguments},adapter={saved / 'adapter'},num_loops=3,gates=0-0-0,readout=2"
    done = lm_eval_command(saved, "looped", gated, *flags, str(tmp_path / "gated"))
    assert done.returncode == 0, done.stderr
    shallow = lm_eval_command(saved, "looped", f"{arguments},num_loops=2", *flags, str(tmp_path / "shallow"))
    assert shallow.returncode == 0, shallow.stderr
    got, want = lm_eval_results(tmp_path / "gated")[0], lm_eval_results(tmp_path / "shallow")[0]
    key = "byte_perplexity,none"
    assert got["own_rolling"][key] == pytest.approx(want["own_rolling"][key], rel=1e-5)  # no gate, two loops
    assert got["own_rolling"][key] != pytest.approx(results["own_rolling"][key], rel=1e-5)


@pytest.mark.slow
def test_two_processes_and_lm_evals_hf_give_the_numbers_of_one_process(saved, tmp_path):
    flags = ["--batch_size", "2", "--log_samples", "--output_path"]
    arguments = f"pretrained={saved / 'base'},dtype=float32"
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, launcher in (("one", ()), ("two", two)):
        done = lm_eval_command(saved, "looped", arguments, *flags, str(tmp_path / name), launcher=launcher)
        assert done.returncode == 0, done.stderr
    one, two = lm_eval_results(tmp_path / "one"), lm_eval_results(tmp_path / "two")
    assert one[1]["text"] == two[1]["text"] and len(one[1]["text"]) == 7
    for kind in ("choice", "rolling"):
        first, second = (torch.tensor(json_numbers(results[1][kind])) for results in (one, two))
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-5)


def json_numbers(responses):
    """The log-likelihoods in logged responses, which lm-eval writes as text."""
    found = [json.loads(json.dumps(each)) for row in responses for each in row]
    return [float(each[0][0] if isinstance(each[0], list) else each[0]) for each in found]


def test_the_entry_point_names_the_backend_and_loads():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    module, _, attribute = target.partition(":")
    assert name == "looped" and getattr(import_module(module), attribute) is LoopedLM and issubclass(LoopedLM, LM)
    try:
        distribution("loopdropout-trainer")
    except PackageNotFoundError:
        return
    (point,) = [point for point in entry_points(group="lm_eval.models") if point.name == "looped"]
    assert point.load() is LoopedLM


def test_without_lm_eval_a_sentence_names_the_extra():
    absent = "import sys; sys.modules['lm_eval'] = None; "
    for code in (
        "from loopdropout_trainer.lm_eval import main; main()",
        "from loopdropout_trainer.evaluation import load_benchmark; load_benchmark('mmlu')",
    ):
        done = subprocess.run([sys.executable, "-c", absent + code], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 1 and 'pip install "loopdropout-trainer[eval]"' in done.stderr
