"""What a number depends on, and the rows that numbers are kept in."""

import dataclasses
import json
import multiprocessing

import pytest
from conftest import byte_tokenizer, tiny_ouro, with_adapter
from datasets import Dataset

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutDPOConfig
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.record.identity import (
    ONE_RUN,
    ONE_SETTING,
    WITHOUT_EFFECT,
    differences,
    identity_key,
    make_identity,
    read_identity,
)
from loopdropout_trainer.record.measurement import (
    IDENTITIES_FILE,
    MEASUREMENTS_FILE,
    WRITERS_FILE,
    Measurement,
    RecordError,
    as_json,
    read_measurements,
    write_measurements,
)
from loopdropout_trainer.settings.arguments import RunArguments


# --- identities -------------------------------------------------------------------------------------------------------


def identity(model=None, tokenizer=None, rows=3, held_out=2, **settings):
    data, other = (
        Dataset.from_list([{"input_ids": [i, i + 1]} for i in range(number)]) for number in (rows, held_out)
    )
    args = LoopDropoutConfig("out", bf16=False, report_to="none", **settings)
    tokenizer = tokenizer or byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>")
    return make_identity(model or with_adapter(), tokenizer, data, args, held_out=other)


def changed(**fields):
    model = with_adapter()
    for name, value in fields.items():
        setattr(model.get_base_model().config, name, value)
    return model


def other_weights():
    model = with_adapter()
    model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.data += 1
    return model


def ends_later():
    model = with_adapter()
    model.get_base_model().generation_config.eos_token_id = [0, 5]
    return model


CHANGES = {  # the sentence: how the run is changed
    "`rms_norm_eps` was 1e-06 and is 0.5": {"model": lambda: changed(rms_norm_eps=0.5)},
    "`rope_parameters.rope_theta` was": {"model": lambda: with_adapter(tiny_ouro(rope_theta=5.0))},
    "the base weights are others": {"model": other_weights},
    "`end_tokens` was [0] and is [0, 5]": {"model": ends_later},
    "`eos_token` was '<eos>' and is '<pad>'": {
        "tokenizer": lambda: byte_tokenizer(["<eos>", "<pad>"], eos_token="<pad>", pad_token="<pad>")
    },
    "the tokenizer is another": {
        "tokenizer": lambda: byte_tokenizer(["<eos>", "<pad>", "<more>"], eos_token="<eos>", pad_token="<pad>")
    },
    "`lora_alpha` was 32 and is 8": {"model": lambda: with_adapter(lora_alpha=8)},
    "`target_modules` was": {"model": lambda: with_adapter(target_modules=["q_proj"])},
    "`alpha_pattern` was {} and is": {"model": lambda: with_adapter(alpha_pattern={"q_proj": 3})},
    "`init_lora_weights` was True and is 'gaussian'": {"model": lambda: with_adapter(init_lora_weights="gaussian")},
    "the training data are others": {"rows": 4},
    "the held-out rows are others": {"held_out": 3},
    "`made_up` was None and is 3": {"model": lambda: changed(made_up=3)},  # which one file leaves out
    "`exclude_modules` was None and is": {"model": lambda: with_adapter(exclude_modules=["lm_head"])},
    "`split_special_tokens` was None and is True": {
        "tokenizer": lambda: byte_tokenizer(
            ["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>", split_special_tokens=True
        )
    },
    "`learning_rate` was 2e-05 and is 0.001": {"learning_rate": 1e-3},
    "`rule` was 'loop_dropout' and is 'lora'": {"rule": "lora"},
    "`num_loops` was 4 and is 3": {"model": lambda: with_adapter(tiny_ouro(total_ut_steps=3))},
    "the examples in a step was 8 and is 16": {"gradient_accumulation_steps": 2},
    "`seed` was 42 and is 7": {"seed": 7},
    "`max_steps` was None and is 5": {"max_steps": 5},
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_what_changes_a_result_is_named(sentence):
    change = {name: each() if callable(each) else each for name, each in CHANGES[sentence].items()}
    found = differences(identity(), identity(**change))
    assert sentence in [str(each)[: len(sentence)] for each in found]
    assert identity_key(identity()) != identity_key(identity(**change))


WITHOUT = [
    {"dataloader_pin_memory": False}, {"ddp_timeout": 5}, {"fused_lora": False}, {"logging_first_step": True},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, {"output_dir": "elsewhere"},
]  # fmt: skip


@pytest.mark.parametrize("change", WITHOUT, ids=lambda change: next(iter(change)))
def test_what_changes_no_result_does_not_count(change):
    args = LoopDropoutConfig(**{"output_dir": "out", "bf16": False, "report_to": "none", **change})
    data = Dataset.from_list([{"input_ids": [i, i + 1]} for i in range(3)])
    tokenizer = byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>")
    tokenizer("long", truncation=True, max_length=2, padding="max_length")  # which its backend remembers
    assert make_identity(with_adapter(), tokenizer, data, args, held_out=data.select(range(2))) == identity()


def test_what_checkpoints_there_are_counts_where_the_best_one_is_kept():
    fields = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True}
    assert not differences(identity(eval_steps=2), identity(eval_steps=4))
    found = differences(identity(eval_steps=2, **fields), identity(eval_steps=4, **fields))
    assert list(map(str, found)) == ["`eval_steps` was 2 and is 4"]


def test_a_field_that_only_one_names_says_nothing_if_other_libraries_have_read_the_file():
    one, other = identity(), identity(changed(made_up=3))
    assert not differences(one, {**other, "versions": {**other["versions"], "transformers": "1.0"}}, ONE_RUN)
    assert not differences(one, {"base": other["base"]})


def test_every_field_without_effect_is_one_and_stands_there_once():
    classes = (LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig, RunArguments)
    known = {field.name for each in classes for field in dataclasses.fields(each)}
    names = [name for names in WITHOUT_EFFECT.values() for name in names.split()]
    assert len(names) == len(set(names)) and set(names) <= known | {"logging_dir"}


def test_an_adapter_on_a_base_leaves_the_base_what_it_is():
    alone, adapted = make_identity(tiny_ouro()), make_identity(with_adapter())
    assert alone["base"] == adapted["base"] and "adapter" not in alone
    assert make_identity(tiny_ouro(), unsharded=False)["base"]["weights"] is None
    assert not differences(alone, make_identity(tiny_ouro(), unsharded=False))  # it is not known


def test_the_question_says_which_parts_must_agree():
    one, other = identity(seed=1, max_steps=5), identity(seed=2, max_steps=5)
    assert not differences(one, other, ONE_SETTING)
    assert {each.field for each in differences(one, other, ONE_RUN)} == {"seed", "data_seed", "gate_seed"}
    other = {**identity(seed=1, max_steps=9), "versions": {**one["versions"], "torch": "1.0"}}
    assert not differences(one, other, ONE_RUN)
    assert {each.field for each in differences(one, other, ONE_SETTING)} == {"max_steps", "torch"}
    with pytest.raises(ValueError, match="another version of this package.*`model`"):
        read_identity({"model": {}})


# --- measurements -----------------------------------------------------------------------------------------------------


OF = {"settings": {"learning_rate": 1e-3}}
KEY = identity_key(OF)


def row(**fields):
    given = {"writer": "training", "family": "accuracy", "metric": "b", "value": 50.0, "identity": KEY, "total": 4}
    return Measurement(**{**given, **fields})


def test_rows_come_back_as_they_were_written_and_replace_their_writers(tmp_path):
    rows = [
        row(verdicts=[1, 0, 0.5, 0.5], answered=[1, 1, 0, 1], unit="%", seed=3, gates="0-1"),
        row(writer="x", loop=2),
    ]
    write_measurements(tmp_path, rows, [OF])
    assert read_measurements(tmp_path) == (rows, {KEY: OF}, [])
    other = {"settings": {"learning_rate": 2e-3}}
    new = row(writer="x", identity=identity_key(other), value=25)
    write_measurements(tmp_path, [new], [other])
    assert read_measurements(tmp_path)[:2] == ([rows[0], new], {KEY: OF, identity_key(other): other})
    write_measurements(tmp_path, [], [], writer="x")
    assert read_measurements(tmp_path)[:2] == ([rows[0]], {KEY: OF})


def write_some(folder, name):
    for number in range(10):
        write_measurements(folder, [row(writer=f"{name} {number}")], [OF])


def test_two_processes_write_into_one_folder(tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=write_some, args=(tmp_path, name)) for name in "ab"
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {each.writer for each in read_measurements(tmp_path)[0]} == {f"{n} {i}" for n in "ab" for i in range(10)}


LINES = {  # what the sentence says: the line
    "no JSON mapping": "{",
    "it is no JSON": "[1]",
    "`zzz` is no field": {"zzz": 1},
    "`value` must be of type": {"value": "many"},
    "`value` must be a finite": {"value": float("nan")},
    "`value` must be a finite number": {"value": 10**400},
    "`value` must be of type `float | int`; got True": {"value": True},
    "`depth` must be of type `int | None`; got 'x'": {"depth": "x"},
    "`metric` must be of type `str`; got None": {"metric": None},
    "`depth` must be an integer of at least 0; got -7": {"depth": -7},
    "`method` must be valid Unicode": {"method": "\ud800"},
    "`verdicts` must be a number from 0 to 1 for each of 4": {"verdicts": [1, 0]},
    "`answered` must be": {"answered": [1, 0, 7, 1]},
    "`value` must be 75, as its `verdicts` say; got 50": {"verdicts": [1, 1, 1, 0]},
    "`identity` 'gone' is not in identities.json": {"identity": "gone"},
    "`run` 'gone'": {"run": "gone"},
}


@pytest.mark.parametrize("sentence", LINES)
def test_a_row_that_somebody_changed_is_left_out_with_a_sentence(tmp_path, sentence):
    write_measurements(tmp_path, [row()], [OF])
    path, change = tmp_path / MEASUREMENTS_FILE, LINES[sentence]
    good = json.loads(path.read_text())
    with path.open("a") as file:
        file.write((change if isinstance(change, str) else json.dumps({**good, **change})) + "\n")
    rows, _, (fault,) = read_measurements(tmp_path)
    assert rows == [row()] and fault.startswith(f"{path}, line 2: ") and sentence in fault and "\n" not in fault
    write_measurements(tmp_path, [row(writer="x")], [OF])  # what was measured is written all the same
    assert row(writer="x") in read_measurements(tmp_path)[0]


@pytest.mark.parametrize("where", ["beside", "before"])
def test_rows_that_no_writer_of_the_folder_wrote_are_left_out(tmp_path, where):
    write_measurements(tmp_path, [row()], [OF])
    path, foreign = tmp_path / MEASUREMENTS_FILE, row(writer="evaluation/good/b", value=99.0)
    if where == "before":  # an earlier version wrote it: it is known from the next measurement on
        (tmp_path / WRITERS_FILE).unlink()
        write_measurements(tmp_path, [row(writer="x")], [OF])
    rows = read_measurements(tmp_path)[0]
    path.write_text(path.read_text() + json.dumps(as_json(foreign)) + "\n")
    left, _, (fault,) = read_measurements(tmp_path)
    assert left == rows and row() in rows
    assert fault == f"{path}: rows of `evaluation/good/b` are not in writers.json."


@pytest.mark.parametrize("change", ["deleted", "another number", "twice"])
def test_rows_that_are_not_those_of_their_writer_are_left_out(tmp_path, change):
    rows = [row(), row(metric="c"), row(writer="x")]
    write_measurements(tmp_path, rows, [OF])
    path = tmp_path / MEASUREMENTS_FILE
    first, *others = path.read_text().splitlines(keepends=True)
    lines = {"deleted": [], "another number": [first.replace("50.0", "51.0")], "twice": [first, first]}[change]
    path.write_text("".join([*lines, *others]))
    left, _, (fault,) = read_measurements(tmp_path)
    assert left == rows[2:] and fault == f"{path}: rows of `training` were changed or deleted since they were written."
    write_measurements(tmp_path, rows[:2], [OF])
    assert read_measurements(tmp_path) == ([rows[2], *rows[:2]], {KEY: OF}, [])
    (tmp_path / WRITERS_FILE).unlink()  # as earlier versions leave it
    assert len(read_measurements(tmp_path)[0]) == 3
    (tmp_path / WRITERS_FILE).write_text("5")
    with pytest.raises(RecordError, match="writers.json cannot be read as JSON; remove it"):
        read_measurements(tmp_path)


IDENTITIES = {
    "cannot be read as JSON": "{",
    "holds no identity": json.dumps({KEY: 3}),
    "another version of this package": json.dumps({KEY: {"model": {}}}),
    f"has been changed: `{KEY}` is not the key": json.dumps({KEY: {"settings": {"learning_rate": 5}}}),
}


@pytest.mark.parametrize("sentence", IDENTITIES)
def test_identities_that_somebody_changed_are_refused(tmp_path, sentence):
    write_measurements(tmp_path, [row()], [OF])
    (tmp_path / IDENTITIES_FILE).write_text(IDENTITIES[sentence])
    with pytest.raises(RecordError, match=sentence) as error:
        read_measurements(tmp_path)
    assert str(tmp_path / IDENTITIES_FILE) in str(error.value)
