"""Bounds of numbers: every numeric field of every script, and of the training arguments in Python, with unusual values.

The scripts and their fields are not listed here. A script of the package has its dataclasses in `ARGUMENTS`, so that a new
script or a new field is tested, too.
"""

import contextlib
import dataclasses
import io
import logging
import math
import re
from typing import get_args, get_type_hints

import pytest

from helpers.errors import user_error
from helpers.files import load_script
from loopdropout_trainer.bounds import Bounds
from loopdropout_trainer.cli import scripts
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.jobs.job import Job
from loopdropout_trainer.settings.fields import metadata_of, single_types
from loopdropout_trainer.settings.library_fields import LIBRARY_FIELDS
from loopdropout_trainer.settings.recipe import build, parse, read_settings
from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig


COMMANDS = {name: load_script(f"recipes/{name}.py").ARGUMENTS for name in scripts()}
"""Dataclasses of each script."""

TRAININGS = ("sft", "dpo", "grpo")
REQUIRED = dict.fromkeys(TRAININGS, "--model_name_or_path tiny-ouro --preparation arithmetic --use_cpu true") | {
    "evaluate": "--benchmarks x --model_name_or_path x",
    "diagnose": "--model_name_or_path x --preparation arithmetic",
    "sweep": "--recipe quickstart.yaml --learning_rates 1e-4 3e-4",
}
"""Words that a script cannot do without, apart from fields without a default."""

TEXTS = ("0", "-1", "1e30", "1" + "0" * 400, ".nan", "", "many")


def numeric_fields(*classes):
    """Yield each field that takes a number or a list of numbers, with its type hint."""
    for cls in classes:
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            types = single_types(hints[field.name])
            items = [item for kind in types for item in get_args(kind)]
            if (
                field.init
                and {int, float} & {*types, *items}
                and dict not in [getattr(t, "__origin__", t) for t in types]
            ):
                yield field, hints[field.name]


def required_words(command):
    """Return words with which a script's settings can be read."""
    words = REQUIRED.get(command, "").split()
    for cls in COMMANDS[command]:
        for field in dataclasses.fields(cls):
            has_default = field.default is not field.default_factory
            if field.init and not has_default and f"--{field.name}" not in words:
                words += [f"--{field.name}", "x"]
    return words


def is_number(value, text):
    """Return whether a field's value is the number of a text."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    try:
        return value == text or value == float(text.lstrip("."))
    except (TypeError, ValueError, OverflowError):
        return False


def try_values(command, name, out):
    """Return the values of a field that end in something else than a sentence about it, or its own meaning."""
    classes, words = COMMANDS[command], required_words(command)
    wrong = []
    for text in TEXTS:
        options = ["--output_dir", out] if command in TRAININGS else []
        try:
            settings = read_settings(classes, [*words, *options, f"--{name}", text])
            instances = build(classes, settings)
            value = next(getattr(instance, name) for instance in instances if hasattr(instance, name))
            if not is_number(value, text):
                wrong.append((name, text, f"became {value!r}"))
            if command in TRAININGS:
                with contextlib.redirect_stdout(io.StringIO()):
                    script, model, adapter, data, training, *_ = instances
                    Job(settings, script=script, model=model, adapter=adapter, data=data, training=training)
        except UserError as error:
            if name not in str(error) or "\n" in str(error):
                wrong.append((name, text, str(error)))
        except Exception as error:
            wrong.append((name, text, repr(error)))
    return wrong


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_has_a_meaning_or_a_sentence(command, tmp_path):
    names = [field.name for field, _ in numeric_fields(*COMMANDS[command])]
    assert [wrong for name in names for wrong in try_values(command, name, str(tmp_path))] == []


UNBOUNDED = {
    "split_seed",
    "scale",
    "p",
    "arithmetic_steps",
    "f_alpha_divergence_coef",
    "loss_weights",
    "reward_weights",
}
"""Numbers of any sign and size, or with bounds of their own: `p` has them by rule, `arithmetic_steps` by the problems."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_script_has_bounds(command):
    """A new number of a script, or of a new release of the libraries, has no bounds until somebody declares them."""
    unbounded = {
        field.name
        for field, _ in numeric_fields(*COMMANDS[command])
        if metadata_of(field).get("bounds", Bounds()) == Bounds()
    }
    assert unbounded <= UNBOUNDED


CONFIGS = (LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig)


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_number_is_checked_in_python(cls, tmp_path):
    wrong = []
    for field, hint in numeric_fields(cls):
        for value in (0, -1, 1e30, math.nan, "", "many", 0.5) if {int, float} & single_types(hint) else ():
            try:
                args = cls(str(tmp_path), use_cpu=True, **{field.name: value})
                if getattr(args, field.name) != value:
                    wrong.append((field.name, value, getattr(args, field.name)))
            except Exception as error:
                if not isinstance(error, ValueError) or field.name not in str(error):
                    wrong.append((field.name, value, repr(error)))
    assert wrong == []


@pytest.mark.parametrize("cls", CONFIGS)
def test_quoted_numbers_name_the_fix(cls, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for field, hint in numeric_fields(cls):
        if str in single_types(hint):
            continue
        recipe.write_text(f"{field.name}: '1'\n")
        with user_error(f"^`{field.name}` must be .*, got '1'. Write 1 without quotes.$"):
            parse([cls], [str(recipe)])
        if not {int, float} & single_types(hint):  # a list
            for value in ("1", ["1"]):
                with user_error(f"^`{field.name}` must be .*, got .*'1'.*. Write 1 without quotes.$"):
                    cls(str(tmp_path), use_cpu=True, **{field.name: value})
            if field.name != "p":
                with user_error(rf"^`{field.name}` must be a list of numbers, got 1. Write \[1\].$"):
                    cls(str(tmp_path), use_cpu=True, **{field.name: 1})
            continue
        with user_error(f"^`{field.name}` must be .*, got '1e-1'. Write 1e-1 without quotes.$"):
            cls(str(tmp_path), use_cpu=True, **{field.name: "1e-1"})
    for text, advice in (
        ("p: [0.5, '.5']", "Write .5 without quotes."),
        ("bf16: 'false'", "Write false without quotes."),
        ("learning_rate: 0,5", "Write the number with a point, 0.5."),
        ("p: 0,5", "Write the number with a point, 0.5."),
    ):
        recipe.write_text(f"{text}\n")
        with user_error(f" must be .*{re.escape(advice)}$"):
            parse([cls], [str(recipe)])


REJECTED = [
    ("--lora_alpha 0", "`lora_alpha` must be at least 1, got 0."),
    ("--lora_r 0", "`lora_r` must be at least 1 and at most 65,536, got 0."),
    ("--lora_dropout 1.5", "`lora_dropout` must be at least 0 and below 1, got 1.5."),
    ("--lora_dropout .nan", "`lora_dropout` must be at least 0 and below 1, got nan."),
    ("--num_train_epochs -1", "`num_train_epochs` must be above 0 and at most 1e+06, got -1."),
    ("--num_loops 100000000000", "`num_loops` must be at least 1 and at most 1,024, got 100000000000."),
    ("--eval_num_loops 4 0", "`eval_num_loops` must be at least 1 and at most 1,024, got 0."),
    ("--per_device_train_batch_size 0", "`per_device_train_batch_size` must be at least 1, got 0."),
    ("--gradient_accumulation_steps 0", "`gradient_accumulation_steps` must be at least 1, got 0."),
    ("--max_steps 0", "`max_steps` must be at least 1, or -1, got 0."),
    ("--save_steps 0", "`save_steps` must be above 0, got 0."),
    ("--logging_steps 0.0", "`logging_steps` must be above 0, got 0.0."),
    ("--seed -1", "`seed` must be at least 0 and below 4,294,967,296, got -1."),
    ("--split_seed 10000000000", "`split_seed` must be from -2,147,483,647 to 2,147,483,647, got 10000000000."),
    ("--num_train_examples 0", "`num_train_examples` must be at least 1, got 0."),
    ("--arithmetic_steps 1 2 3", "`arithmetic_steps` must be two numbers from 1 to 5, got [1, 2, 3]."),
    ("--output_dir=", "`output_dir` must not be empty."),
    ("--dtype float", "`dtype` must be one of bfloat16, float16, float32, got 'float'. Did you mean 'float32'?"),
    ("--lora_r=", "`lora_r` must have a value."),
]
if str in single_types(get_type_hints(LoopDropoutConfig)["pad_to_multiple_of"]):  # not in the oldest releases of TRL
    REJECTED.append(("--pad_to_multiple_of some", "`pad_to_multiple_of` must be at least 1, or auto, got 'some'."))
else:
    REJECTED.append(("--pad_to_multiple_of some", "`pad_to_multiple_of` must be an integer, got 'some'."))


@pytest.mark.parametrize(("words", "message"), REJECTED)
def test_number_out_of_bounds_is_explained(words, message):
    with user_error(f"{re.escape(message)}$"):
        parse(COMMANDS["sft"], [*required_words("sft"), *words.split()])


@pytest.mark.parametrize("command", ["chat", "evaluate", "diagnose"])
def test_depths_of_all_commands_have_the_same_bounds(command):
    for depth in ("0", "1025"):
        with user_error(f"`eval_num_loops` must be at least 1 and at most 1,024, got {depth}"):
            parse(COMMANDS[command], [*required_words(command), "--eval_num_loops", "4", depth])


def test_numbers_with_a_meaning_of_their_own_are_accepted(config):
    args = config(max_steps=-1, max_grad_norm=math.inf, learning_rate=0, gate_seed=2**40)
    assert (args.max_steps, args.max_grad_norm, args.learning_rate) == (-1, math.inf, 0)


def test_unusual_numbers_are_warned_of(config, log):
    logging.Logger.warning_once.cache_clear()  # of another test
    config(learning_rate=0.02, weight_decay=1, loraplus_lr_ratio=100, p=[0, 0, 0, 0.95])
    assert log.messages == []
    config(p=[0, 0, 0, 0.99])
    assert {*log.messages} == {"`p` is 0.99, far above the usual values, 0.25 to 0.75."}
    config(learning_rate=0)
    assert "`learning_rate` is 0, so the training changes no weight" in log.text
    log.clear()
    words = [*required_words("sft"), "--learning_rate=2", "--weight_decay=10", "--loraplus_lr_ratio=1000"]
    parse(COMMANDS["sft"], words)
    assert {*log.messages} == {
        "`learning_rate` is 2, far above the usual values, 1e-5 to 1e-3 for LoRA.",
        "`loraplus_lr_ratio` is 1000, far above the usual values, 4 to 16.",
        "`weight_decay` is 10, far above the usual values, 0 to 0.1.",
    }


def test_library_fields_have_bounds_of_the_right_type():
    assert all(isinstance(metadata["bounds"], Bounds) for metadata in LIBRARY_FIELDS.values())


COUNTS = [
    ("chat", "max_new_tokens"),
    ("diagnose", "num_examples"),
    ("diagnose", "max_length"),
    ("diagnose", "per_device_eval_batch_size"),
    ("evaluate", "max_new_tokens"),
    ("evaluate", "readout"),
    ("evaluate", "benchmark_limit"),
    ("evaluate", "benchmark_batch_size"),
    ("evaluate", "num_threads"),
]


@pytest.mark.parametrize(("command", "name"), COUNTS)
def test_counts_of_commands_must_be_positive(command, name):
    with user_error(f"`{name}` must be at least 1( and at most 1,024)?, got 0"):
        parse(COMMANDS[command], [*required_words(command), f"--{name}", "0"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 0", "`workers` must be at least 1 and at most 1,024, got 0."),
        ("--seeds 1 -1", "`seeds` must be at least 0 and below 4,294,967,296, got -1."),
        ("--learning_rates 0", "`learning_rates` must be above 0, got 0"),
    ],
)
def test_numbers_of_a_sweep_are_bounded(words, message):
    with user_error(re.escape(message)):
        parse(COMMANDS["sweep"], words.split())  # bounds come before missing fields
