"""What somebody meets in Python: names that complete, and errors whose traceback ends soon after their own code."""

import inspect
import re
import traceback
from types import SimpleNamespace

import pytest

import loopdropout_trainer
from helpers.tiny import tiny_ouro
from loopdropout_trainer import (
    GateRule,
    LoopDropoutConfig,
    LoopDropoutSFTTrainer,
    data,
    default_peft_config,
    evaluation,
    load_model,
    loop_dropout,
    looped,
    merge_and_save,
    use_depth,
    use_gates,
)
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation import LoopedLM, own_benchmark
from loopdropout_trainer.handle import LoopDropoutHandle
from loopdropout_trainer.tokenizers import load_tokenizer


OWN = {"prompt": "{land}", "target": "{capital}", "scorer": "exact_match"}


def test_completion_offers_public_names_only():
    assert {*dir(loopdropout_trainer)} == {*loopdropout_trainer.__all__, "__version__"}
    for package in (data, evaluation):
        assert dir(package) == sorted(package.__all__)
    assert use_depth is looped.use_depth


def test_help_begins_with_the_public_names():
    """`help(loopdropout_trainer)` is long, so its first page has each name with the first sentence of its docstring."""
    names = sorted(loopdropout_trainer.__all__, key=str.lower)
    items = re.findall(r"^- (\w+): ((?:.|\n  )+)$", loopdropout_trainer.__doc__, re.MULTILINE)
    assert [name for name, _ in items] == names
    for name, sentence in items:
        docstring = " ".join(inspect.getdoc(getattr(loopdropout_trainer, name)).split())
        sentence = " ".join(sentence.split())
        assert sentence.endswith(".") and f"{docstring} ".startswith(f"{sentence} "), name


@pytest.mark.parametrize("cls", [LoopDropoutSFTTrainer, LoopDropoutConfig, LoopDropoutHandle, GateRule, LoopedLM])
def test_names_of_a_class_are_explained(cls):
    """Completion offers them, and `help` prints their docstrings."""
    own = [part for part in cls.__mro__ if part.__module__.startswith("loopdropout_trainer.")]
    names = {name for part in own for name in vars(part) if not name.startswith("_")}
    steps = ("check_fields", "check_unchanged", "forget_drawn_gates", "keep_head", "restore_head")  # of `train` alone
    assert names and names.isdisjoint(steps)
    for name in names:
        value = inspect.getattr_static(cls, name)
        is_explained = not callable(value) and not isinstance(value, property | classmethod)  # in the class docstring
        assert is_explained or inspect.getdoc(value) or inspect.getdoc(getattr(cls, name)), name


def own_task(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"country": "Peru", "capital": "Lima"}\n')
    return own_benchmark("capitals", str(tmp_path / "rows.jsonl"), **OWN)


MISTAKES = {
    "owner left out": (lambda folder: load_model("Ouro-1.4B"), "Did you mean 'ByteDance/Ouro-1.4B'"),
    "other owner": (lambda folder: load_model("nobody/huginn-0125"), "Did you mean 'tomg-group-umd/huginn-0125'"),
    "tokenizer": (lambda folder: load_tokenizer("Ouro-2.6B"), "Did you mean 'ByteDance/Ouro-2.6B'"),
    "template": (lambda folder: load_tokenizer("tiny-ouro", chat_template="tulu"), "Did you mean 'tulu2'"),
    "column": (own_task, "`land` is missing, and the columns are country, capital"),
    "files": (
        lambda folder: own_benchmark("mine", str(folder / "no.jsonl"), **OWN),
        r"must be files, and .*no.jsonl does not exist\.$",
    ),
    "merge a base model": (
        lambda folder: merge_and_save(tiny_ouro(), folder),
        r"`model` must be a PEFT model with an adapter, such as `trainer.model` .* got a OuroForCausalLM",
    ),
    "gates of a name": (
        lambda folder: use_gates("out", [1]).__enter__(),
        "`model` must be a looped model, .* got 'out'",
    ),
    "gates of a trainer": (
        lambda folder: use_gates(SimpleNamespace(model=tiny_ouro()), [1]).__enter__(),
        "Pass its `model`.",
    ),
    "adapter of a trainer": (
        lambda folder: default_peft_config(SimpleNamespace(model=tiny_ouro()), target_modules=".*q_proj"),
        "Pass its `model`.",
    ),
    "gates of a base model": (lambda folder: loop_dropout(tiny_ouro(), p=0.5), "has no adapter to gate"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_have_short_tracebacks(tmp_path, mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as raised:
        make(tmp_path)
    assert len("".join(traceback.format_exception(raised.value)).splitlines()) < 30
