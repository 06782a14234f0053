"""LoopedLM gives the numbers of lm-eval's `hf` at any depth, gates and readout, and works in lm-eval's command line."""

import inspect
import json
import math

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from helpers.errors import user_error
from helpers.files import read_lines, write_lines, write_task
from helpers.processes import python
from helpers.tiny import adapted, sharp_hrm, tiny_ouro, varied
from loopdropout_trainer import use_gates
from loopdropout_trainer.evaluation import LoopedLM
from loopdropout_trainer.evaluation.arguments import ADVICE_ON_UNUSED
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.looped import find_looped_model, use_depth


CONTEXTS = ["Q: 1+1?\nA:", "", "Trailing space ", "A longer context, of more words than the others"]
PAIRS = [(context, end) for context in CONTEXTS for end in (" 2", " 3", " five six seven")]
TEXTS = ["The cat sat", "on", "the mat, and it was a rather long sentence about it"]


def requests(kind, arguments):
    return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]


def answers(lm):
    """Answers to requests of all three kinds."""
    until = [(text, {"until": ["\n", "<eos>"], "max_gen_toks": budget}) for text in TEXTS for budget in (5, 9)]
    return (
        lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True),
        lm.generate_until(requests("generate_until", until), disable_tqdm=True),
    )


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("options", "gates"),
    [
        ({}, [1] * 4),
        ({"max_length": 24, "batch_size": "auto", "max_batch_size": 4}, [1] * 4),
        ({"num_loops": 6}, [1] * 6),
        ({"gates": "1-0-0-0"}, [1, 0, 0, 0]),
        ({"gates": "0.5-0-2-1", "readout": 3}, [0.5, 0, 2]),  # the readout after loop t is the output of t loops
        ({"num_loops": 6, "gates": "0-0-0-0-0-0", "readout": 2}, [0, 0]),
    ],
)
def test_answers_match_hf(make_tiny, tokenizer, options, gates):
    model = adapted(varied(make_tiny())).double()  # in float32, rounding decides near ties
    looped = find_looped_model(model)
    own_depth = looped.config.num_loops
    scores, rolling, texts = answers(LoopedLM(model, tokenizer, **{"batch_size": 4, **options}))
    assert looped.config.num_loops == own_depth and looped.gate_state.gates is None
    with use_depth(model, len(gates)), use_gates(model, gates):
        hf = HFLM(model, tokenizer=tokenizer, batch_size=1, max_length=options.get("max_length"))
        expected = answers(hf)
    assert len({*expected[0]}) > 10 and len({*texts}) > 1
    assert scores == [pytest.approx(pair, rel=1e-5, abs=2e-4) for pair in expected[0]]
    assert rolling == pytest.approx(expected[1], rel=1e-5, abs=2e-4)
    assert texts == expected[2]


def test_blocks_apply_to_a_model_made_before_them(tokenizer):
    """A depth and gates of its own win. Gates of a block must fit the depth, neither too few nor too many."""
    model = adapted(varied(tiny_ouro()))
    score = lambda lm: lm.loglikelihood(requests("loglikelihood", PAIRS[:2]), disable_tqdm=True)
    lm, fixed, third = (LoopedLM(model, tokenizer, **options) for options in ({}, {"num_loops": 6}, {"readout": 3}))
    at_six, at_four = score(fixed), score(lm)
    own_unit = LoopedLM(model, tokenizer, gates="1-1-1-1")
    expected = score(LoopedLM(model, tokenizer, num_loops=2))
    with use_depth(model, 2):
        assert repr(lm).endswith("num_loops 2, gates unit") and lm.columns["num_loops"] == 2
        assert score(lm) == expected != at_six
        assert score(fixed) == at_six
        with user_error("`readout` must be a loop from 1 to 2, got 3"):
            score(third)
        with user_error(r"`gates` must have one number for each loop \(K = 2\)"):
            LoopedLM(model, tokenizer, gates="1-0-0-0")
    find_looped_model(model).config.num_loops = 2
    assert score(lm) == expected
    find_looped_model(model).config.num_loops = 4
    gates = [0.5, 0, 2, 1]
    expected = score(LoopedLM(model, tokenizer, gates=gates, readout=3))
    with use_gates(model, gates):
        assert score(third) == expected
        assert score(own_unit) == at_four != score(lm) and own_unit.columns["gates"] == "unit"
        assert score(LoopedLM(model, tokenizer, num_loops=6, gates=[1] * 5 + [0])) != at_six
        for run in (score, lambda lm: lm.columns):
            with user_error(
                "one number for each of the 6 loops that run, got 4. .* give a `LoopedLM` its own `gates`"
            ):
                run(fixed)
        with use_depth(model, 2):
            for run in (lambda: score(lm), lambda: model(torch.ones(1, 2, dtype=torch.long))):
                with user_error(
                    "one number for each of the 2 loops that run, got 4. Begin a block of `use_depth` before"
                ):
                    run()
            with use_gates(model, [0.5, 0]):
                assert lm.columns["gates"] == "0.5-0"
                model(torch.ones(1, 2, dtype=torch.long))


def test_log_likelihoods_mark_the_context(tokenizer):
    """HRM-Text reads the context as prompt, as in training. The same tokens get other scores with another context."""
    model = adapted(sharp_hrm()).eval().double()
    pairs = [*PAIRS, ("Q: 1+1?", "\nA: 2"), ("Q: 1+1?", "\nA: 3"), ("Q:", " 1+1?\nA: 2")]
    encoded = []
    for context, end in pairs:
        context = context or tokenizer.decode(HFLM(model, tokenizer=tokenizer).prefix_token_id)
        whole, start = tokenizer(context + end)["input_ids"], tokenizer(context)["input_ids"]
        encoded.append((("", ""), start, whole[len(start) :]))
    expected = []
    for _, start, end in encoded:
        ids = torch.tensor([start + end])
        batch = {"input_ids": ids, "labels": torch.tensor([[-100] * len(start) + end])}
        with torch.no_grad():
            loss = model(**find_looped_model(model).complete_batch(batch)).loss
        expected.append(-loss.item() * len(end))
    for options in (
        {"batch_size": 1},
        {"batch_size": 16},
        {"batch_size": "auto", "max_batch_size": 4, "max_length": 64},
    ):
        lm = LoopedLM(model, tokenizer, **options)
        scores = [score for score, _ in lm._loglikelihood_tokens(encoded, disable_tqdm=True)]
        assert scores == pytest.approx(expected, rel=1e-6, abs=1e-5)
    with torch.no_grad():
        causal = HFLM(model, tokenizer=tokenizer, batch_size=4)._loglikelihood_tokens(encoded, disable_tqdm=True)
    assert [score for score, _ in causal] != pytest.approx(expected, rel=1e-3)


def test_other_options_go_to_transformers(tokenizer):
    model = adapted(varied(tiny_ouro()))
    lm = LoopedLM(model, tokenizer, batch_size=4, gates="0-0-0-0")
    with model.disable_adapter():
        expected = generate_greedy(model, tokenizer, TEXTS, 6, progress=False)
    options = {"until": ["<eos>"], "max_gen_toks": 6, "num_beams": 1, "repetition_penalty": 1.0}
    asked = requests("generate_until", [(text, options) for text in TEXTS])
    assert lm.generate_until(asked, disable_tqdm=True) == expected
    sampled = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 2.0}
    texts = lm.generate_until(requests("generate_until", [(TEXTS[0], sampled)] * 4), disable_tqdm=True)
    assert len({*texts}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gates": "1-0"}, "`gates` must have one number for each loop .K = 4., .* got '1-0'"),
        ({"gates": "1-x-0-0"}, "`gates` must have one number .* got '1-x-0-0'"),
        ({"gates": "1-0-0-0"}, "`gates` must not be set for a model without"),
        ({"readout": 5}, "`readout` must be a loop from 1 to 4, got 5"),
        ({"num_loop": 8}, "`num_loop` is not an argument of LoopedLM. Did you mean 'num_loops'?"),
        ({"gate": "1-0-0-0"}, "`gate` is not an argument of LoopedLM. Did you mean 'gates'?"),
        ({"readuot": 1}, "`readuot` is not an argument of LoopedLM. Did you mean 'readout'?"),
        ({"batchsize": 2}, "`batchsize` is not an argument of LoopedLM. Did you mean 'batch_size'?"),
        (
            {"dtype": "bfloat16"},
            "`dtype` must not be set for a loaded model, .* got 'bfloat16'. Load the model with it",
        ),
        ({"device": "cpu"}, "`device` must not be set for a loaded model"),
        ({"depth": 8}, "`depth` is not an argument of LoopedLM. Did you mean 'num_loops'?"),
        ({"peft": "adapter"}, "`peft` has no effect on a `LoopedLM`, got 'adapter'. Use `adapter`."),
        ({"trust_remote_code": True}, "`trust_remote_code` has no effect .* without remote code."),
        ({"parallelize": True}, "`parallelize` has no effect .* Use several of them by `accelerate launch -m`."),
        ({"max_length": 16}, "`max_new_tokens` must be less than 16, got 16"),
    ],
)
def test_invalid_settings_raise(tokenizer, options, message):
    with user_error(message):
        lm = LoopedLM(tiny_ouro(), tokenizer, **options)
        lm.generate_until(requests("generate_until", [("a", {"max_gen_toks": 16})]))


def test_arguments_of_lm_eval_have_an_effect_or_raise(tokenizer, tmp_path):
    """A new argument of lm-eval's `hf` fails here, until somebody decides whether a `LoopedLM` uses it."""
    of_lm_eval = inspect.signature(HFLM.__init__).parameters
    own = inspect.signature(LoopedLM.__init__).parameters
    used = {"backend", "truncation", "logits_cache", "max_length", "softmax_dtype", "mixed_precision_dtype"}
    used |= {"max_batch_size", "add_bos_token", "prefix_token_id"}
    used |= {"think_end_token", "enable_thinking", "chat_template_args"}
    assert {*of_lm_eval} - {*own} == used | {*ADVICE_ON_UNUSED}
    model, folder = tiny_ouro(), str(tmp_path / "missing")
    for name in ADVICE_ON_UNUSED:
        for where in ({"pretrained": model, "tokenizer": tokenizer}, {"pretrained": folder}):
            with user_error(f"`{name}` has no effect on a `LoopedLM`, got 'value'"):
                LoopedLM(**where, **{name: "value"})
    defaults = {name: of_lm_eval[name].default for name in ADVICE_ON_UNUSED}
    LoopedLM(model, tokenizer, **defaults)
    with user_error("`tokenizer` must not be set for the name of a model, .* got 'value'"):
        LoopedLM(folder, tokenizer="value")
    assert "peft" not in inspect.getdoc(LoopedLM.__init__)


KINDS = {
    "multiple_choice": {"doc_to_choice": ["0", "1"], "doc_to_target": 0},
    "generate_until": {"doc_to_target": "text", "generation_kwargs": {"max_gen_toks": 6}},
    "loglikelihood_rolling": {"doc_to_target": "text", "metric_list": [{"metric": "byte_perplexity"}]},
}
COMMAND = """
import functools, runpy, lm_eval.tasks
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # 10 seconds faster
runpy.run_module("loopdropout_trainer.lm_eval", run_name="__main__")
"""


def test_command_line_takes_depth_and_gates(saved, tmp_path):
    """Without an adapter, the readout after loop 2 is the output of a base model with two loops."""
    texts = [f"{i} + {i} =" for i in range(5)]
    write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in [*texts, "more"]])
    for kind, fields in KINDS.items():
        names = {"task": f"own_{kind}", "output_type": kind, "doc_to_text": "text"}
        write_task(tmp_path / f"{kind}.yaml", "rows.jsonl", **names, **fields)
    options = "--model looped --batch_size 2 --limit 5 --log_samples --include_path . --output_path out --tasks"
    tasks = ",".join(f"own_{kind}" for kind in KINDS)
    model = f"pretrained={saved / 'base'},adapter={saved / 'adapter'},num_loops=3,gates=0-0-0,readout=2,dtype=float32"
    printed = python("-c", COMMAND, *options.split(), tasks, "--model_args", model, cwd=tmp_path)
    assert "own_multiple_choice" in printed
    assert [len(read_lines(path)) for path in tmp_path.rglob("samples_*.jsonl")] == [5] * 3
    lm = LoopedLM(str(saved / "base"), dtype="float32", num_loops=2)
    logs = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True)
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["own_loglikelihood_rolling"]["byte_perplexity,none"]
    assert found == pytest.approx(math.exp(-sum(logs) / sum(map(len, texts))), rel=1e-5)
