"""What people do with a trainer and its model in a notebook: the right result, or one sentence."""

import copy
import dataclasses
import inspect
import json
import re
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModelForCausalLM, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from helpers.errors import user_error
from helpers.tiny import tiny_ouro, trained_parameters, with_adapter
from helpers.tokenizer import make_tokenizer
from helpers.trainers import assert_same_weights
from loopdropout_trainer import (
    LoopDescription,
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
    LoopDropoutSFTTrainer,
    check_loops,
    default_peft_config,
    load_adapter,
    load_model,
    load_tokenizer,
    loop_dropout,
    merge_and_save,
    push_merged_to_hub,
    register_looped,
    register_rule,
    use_depth,
    use_gates,
)
from loopdropout_trainer.data import DataArguments, load_datasets
from loopdropout_trainer.diagnostics import depth_matrix, label_batches, score
from loopdropout_trainer.evaluation import evaluate_tasks
from loopdropout_trainer.gate_state import GatedBatch
from loopdropout_trainer.gates import RULES, ExactlyM, GateRule, make_rule
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import adapted_layers
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.results.training_results import as_trained
from loopdropout_trainer.saving.trainings import describe_training
from loopdropout_trainer.settings.arguments import AdapterArguments
from loopdropout_trainer.settings.recipe import load_recipe


LAYER_0 = ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]


def checkpoint_reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def test_reentrant_checkpoints_of_a_model_train_the_same(train, make_sft):
    plain = train(tiny_ouro(), gradient_checkpointing=False)
    assert_same_weights(train(checkpoint_reentrant(tiny_ouro()), gradient_checkpointing=False), plain)
    later = make_sft(tiny_ouro(), gradient_checkpointing=False)
    checkpoint_reentrant(later.model)
    later.train()
    assert_same_weights(later, plain)


ACTIONS = {"train": lambda trainer, folder: trainer.train(), "save": lambda trainer, folder: trainer.save_model()}
ACTIONS["merge"] = lambda trainer, folder: merge_and_save(trainer.model, folder)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("remove", ["merge_and_unload", "unload"])
def test_model_without_its_adapter_layers_raises(train, tmp_path, remove, action):
    trainer = train(max_steps=1)
    getattr(trainer.model, remove)()
    with user_error(
        r"The layers of the adapter 'default' must be .* `merge_and_unload` or `unload`.*`merge_and_save`"
    ):
        ACTIONS[action](trainer, tmp_path / "merged")


@pytest.mark.parametrize("action", ["train", "merge"])
def test_merged_adapter_neither_trains_nor_merges_again(train, tmp_path, action):
    trainer = train(max_steps=1)
    trainer.model.merge_adapter()
    with user_error(r"must not be merged into the weights, got \['default'\]. Call `unmerge_adapter`"):
        ACTIONS[action](trainer, tmp_path / "merged")
    trainer.model.unmerge_adapter()
    ACTIONS[action](trainer, tmp_path / "merged")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer": None}, "`tokenizer` is not an argument of LoopDropoutSFTTrainer. Did you mean 'processing_class'?"),
        ({"p": 0.5}, "`p` is not an argument .* Set `p` in a `LoopDropoutConfig`, which is the argument `args`"),
        ({"max_seq_length": 8}, "Set `max_length` in a `LoopDropoutConfig`"),
        ({"callbacks": TrainerCallback()}, "`callbacks` must be a list of callbacks, got <.*TrainerCallback"),
        ({"model": None}, "`model` must be a looped model, a PEFT model over one, or a name, got None"),
        ({"callbacks": [5]}, "`callbacks` must be a list of `TrainerCallback`s, got 5 in it"),
        ({"processing_class": "tiny-ouro"}, "`processing_class` must be a tokenizer, .* `load_tokenizer.'tiny-ouro'.`"),
        ({"optimizers": 5}, "`optimizers` must be a pair of an optimizer and its schedule"),
        ({"args": {"p": 0.5}}, r"`args` must be a LoopDropoutConfig or .*, got a dict. .* `LoopDropoutConfig\(\*\*fields"),
        ({"args": "c4"}, r"`args` must be a .*, got a str. If it is the output folder, write `LoopDropoutConfig\('c4'\)`"),
        ({"compute_metrics": 5}, "`compute_metrics` must be a function, got 5"),
        ({"peft_config": {"r": 4}}, "`peft_config` must be a LoraConfig, such as .*, got {'r': 4}"),
        ({"train_dataset": "rows.jsonl"}, "`train_dataset` must be .*, got 'rows.jsonl'. Load a file by"),
        (
            {"model": torch.compile(tiny_ouro(), backend="eager")},
            "`model` must not be compiled. .* `torch_compile=True` in `args`",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(config, dataset, tokenizer, given, message):
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    with user_error(message):
        LoopDropoutSFTTrainer(**{"model": tiny_ouro(), "args": config(), **data, **given})


def test_wrong_keywords_of_methods_name_the_right_ones(make_sft):
    """Editors and `help` show the arguments, and a subclass may add its own."""

    class Own(LoopDropoutSFTTrainer):
        def evaluate(self, *positional, mine=None, **keywords):
            return super().evaluate(*positional, **keywords)

    trainer = make_sft(cls=Own)
    wrong = {
        "train": {"resume": "resume_from_checkpoint", "checkpoint": "resume_from_checkpoint"},
        "evaluate": {"dataset": "eval_dataset"},
        "predict": {"dataset": "test_dataset", "eval_dataset": "test_dataset"},
        "save_model": {"output": "output_dir"},
        "create_model_card": {"model": "model_name"},
        "push_to_hub": {"commit": "commit_message"},
    }
    for method, names in wrong.items():
        for name, right in names.items():
            with user_error(f"^`{name}` is not an argument of Own.{method}. Did you mean '{right}'?"):
                getattr(trainer, method)(**{name: True})
    with user_error("^`max_steps` is not an argument of Own.train. Set `max_steps` in a `LoopDropoutConfig`"):
        trainer.train(max_steps=1)
    with user_error("^`repo_id` is not an argument of Own.push_to_hub. Set `hub_model_id` in a `LoopDropoutConfig`"):
        trainer.push_to_hub(repo_id="me/sums")
    assert [*inspect.signature(trainer.train).parameters][0] == "resume_from_checkpoint"
    assert "eval_loss" in trainer.evaluate(mine=1, metric_key_prefix="eval")


def test_arguments_at_the_place_of_others_raise(config, dataset):
    """The second argument of TRL's trainers is not always `args`."""
    with user_error("`ref_model` must not be a LoopDropoutDPOConfig. Pass it as `args=...`"):
        LoopDropoutDPOTrainer(tiny_ouro(), config(LoopDropoutDPOConfig), train_dataset=dataset)


def test_continued_training_says_so(train, make_sft, capsys):
    fields = {"save_strategy": "steps", "save_steps": 2}
    train(max_steps=2, **fields)
    assert "Continuing" not in capsys.readouterr().out
    make_sft(max_steps=4, **fields).train(resume_from_checkpoint=True)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "continues to train an adapter of" in first and second == "Continuing from checkpoint-2 of 4"
    again = make_sft(max_steps=4, **fields)
    folder = again.args.output_dir
    with user_error(f"but {folder} is the folder of a run. The newest complete checkpoint is {folder}/checkpoint-4"):
        again.train(resume_from_checkpoint=folder)
    with user_error("`resume_from_checkpoint` must be true or the folder of a checkpoint, got 4"):
        again.train(resume_from_checkpoint=4)


FIRST_LINES = [
    ({}, None, "SFT with Loop Dropout (p = 0.5, K = 4) trains a new adapter of tiny-ouro: rank 16 on 7 modules"),
    ({"rule": "lora"}, None, "SFT with LoRA without gates (K = 4) trains a new adapter of tiny-ouro: rank 16"),
    (
        {"depth_sampling": "uniform", "depth_sampling_args": {"low": 2, "high": 6}},
        LoraConfig(r=2, lora_alpha=4, rank_pattern={"q_proj": 4}),
        "(p = 0.5, K = 4, depths from 2 to 6 in training) trains a new adapter of tiny-ouro: rank 2 and 4 on 7 modules",
    ),
]


@pytest.mark.parametrize(("args", "lora", "line"), FIRST_LINES)
def test_first_line_says_what_trains(make_sft, capsys, args, lora, line):
    trainer = make_sft(load_model("tiny-ouro"), max_steps=1, peft_config=lora, **args)
    trainer.train()
    (text,) = [text for text in capsys.readouterr().out.splitlines() if "trained parameters" in text]
    assert line in text
    number = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    modules = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert text.endswith(f" ({modules}), {number:,} trained parameters.")


def test_first_line_warns_of_a_rank_above_the_layers_size(make_sft, capsys):
    make_sft(load_model("tiny-ouro"), max_steps=1, peft_config=LoraConfig(r=129, lora_alpha=4)).train()
    assert (
        "trained parameters. Rank 129 is above 128, the smallest dimension of these layers" in capsys.readouterr().out
    )


def test_training_of_a_command_has_no_first_line(make_sft, capsys):
    """Its plan has said what trains."""
    trainer = make_sft(max_steps=1)
    trainer.recipe = {}
    trainer.train()
    assert "trained parameters" not in capsys.readouterr().out


def test_cards_of_python_have_the_facts_of_a_run(train, make_sft, tmp_path):
    trainer = train(eval_strategy="steps", eval_steps=2)
    trainer.save_model()
    merge_and_save(trainer.model, tmp_path / "merged")
    cards = [Path(folder, "README.md").read_text() for folder in (trainer.args.output_dir, tmp_path / "merged")]
    loss = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log][-1]
    for card in cards:
        num_held_out = len(trainer.eval_dataset)
        assert f"| Held-out loss (nats per token) | {loss:.4f} ({num_held_out} examples) |" in card
        assert re.search(r"\| Training data \| 48 examples \(digest \w{16}\) \|", card)
        assert "## Recipe" in card and "learning_rate: 0.01" in card
    untrained = make_sft(p=0.25)  # in the folder of the other training
    for write in (untrained.create_model_card, untrained.save_model):
        write()
        text = Path(untrained.args.output_dir, "README.md").read_text()
        assert "| Drop probability p | 0.25 |" in text and "Held-out loss" not in text and "## Recipe" not in text
    train(eval_strategy="steps", eval_steps=2, seed=7)  # replaces the results there
    trainer.save_model(str(tmp_path / "again"))
    assert "Held-out loss" not in (tmp_path / "again" / "README.md").read_text()
    trainer.create_model_card()
    assert "Held-out loss" not in Path(trainer.args.output_dir, "README.md").read_text()


def test_named_data_is_in_the_card(make_sft, dataset):
    named = dataset.select(range(1, 9))  # rows of no other test, whose tokens would be kept without the name
    named.info.dataset_name = "capybara"
    trainer = make_sft(rows=named, max_steps=1)
    trainer.train()
    assert re.fullmatch(r"capybara, 8 examples \(digest \w+\)", trainer.looped.trained_with["training_data"])


def test_last_gates_print_the_loops_of_each_example(train):
    trainer = train(max_steps=1)
    assert "last_gates" in LoopDropoutSFTTrainer.__doc__
    first, *examples = repr(trainer.last_gates).splitlines()
    assert first == "GatedBatch of 4 examples in 4 loops, gates from 0 to 2. Loops in which they are on:"
    for number, (line, gates) in enumerate(zip(examples, trainer.last_gates.gates.T, strict=True), start=1):
        loops = (gates.nonzero() + 1).flatten().tolist()
        assert line == f"  example {number}: {', '.join(map(str, loops)) or 'none'}"
    modules = torch.zeros(2, 10, 3)
    modules[1, 0, 2] = 0.5
    *_, last = lines = repr(GatedBatch(modules)).splitlines()
    assert (lines[1], lines[2], last) == ("  example 1: 2", "  example 2: none", "  and 2 more, see `sampled`")
    assert "10 examples in 1 loop, gates 0." in repr(GatedBatch(torch.zeros(1, 10)))
    assert repr(GatedBatch()) == "GatedBatch with unit gates"
    first, second = repr(GatedBatch(torch.zeros(4, 1))).splitlines()
    assert "of all examples in 4 loops" in first and second == "  all examples: none"
    batch = next(iter(trainer.get_train_dataloader()))
    handle = loop_dropout(with_adapter().train())
    handle.model(torch.arange(5).view(1, 5))
    for of_one in (trainer.sample_gates({"input_ids": batch["input_ids"][:1]}), handle.last_gates):
        first, second = repr(of_one).splitlines()
        assert "of 1 example in 4 loops" in first and second.startswith("  example 1: ")


def test_sampled_gates_are_not_set_on_the_model(make_sft):
    trainer = make_sft(max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    rows = trainer.train_dataset  # with tokens
    for example in (rows[0], {"prompt": "a", "completion": "b"}, [rows[0]]):
        with user_error(
            r"A batch must have a tensor `input_ids` \[B, S\], .* `next.iter.trainer.get_train_dataloader"
        ):
            trainer.sample_gates(example)
    trainer.p = [0, 0.5, 0.5, 0.5]
    with use_depth(trainer.model, 6), user_error("`p` has 4 values, but the model runs 6 loops"):
        trainer.sample_gates(batch)
    sampled = trainer.sample_gates(batch)
    assert not trainer.gate_state.batch.is_set
    trainer.draw_gates(batch)
    assert torch.equal(trainer.gate_state.batch.gates, sampled.gates)
    model, inputs = trainer.model, {"input_ids": batch["input_ids"]}
    model.train()(**inputs)  # with gradient, so it may be a training
    with user_error(
        r"one column for each of the 1 examples .* `draw_gates` has set them .* `trainer.gate_state.reset\(\)`"
    ):
        model(input_ids=inputs["input_ids"][:1])
    is_inference = r"`draw_gates` has set gates .* by `trainer.gate_state.reset\(\)`, .* inside `use_gates`"
    for mode in (True, False):  # the model stays in training mode after a training
        model.train(mode)
        for rows in (inputs["input_ids"], inputs["input_ids"][:1]):
            with torch.no_grad(), user_error(is_inference):
                model(input_ids=rows)
            with torch.inference_mode(), user_error(is_inference):
                model(input_ids=rows)
            with user_error(is_inference):
                model.generate(rows, max_new_tokens=1)
    with torch.no_grad():
        with use_gates(model, [1, 0, 0, 0]):
            model(**inputs)
        trainer.gate_state.reset()
        model(**inputs)
    for text in (Path("docs/sft.md").read_text(), type(trainer).draw_gates.__doc__):
        assert "sample_gates" in text and "for inference" in text.lower() and "use_gates" in text


def test_loss_without_gradient_runs_under_drawn_gates(make_sft):
    trainer = make_sft(max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    assert trainer.gate_state.is_drawn and not loss.requires_grad
    assert not trainer.gate_state.computes_loss


@pytest.mark.parametrize("measure", ["evaluate", "predict"])
def test_measurements_run_at_unit_gates_after_drawn_gates(train, monkeypatch, measure):
    """In `evaluate` of the drawing trainer and of another one. The gates of `use_gates` stay, and are named."""
    trainer = train(max_steps=1)
    inputs, seen = next(iter(trainer.get_train_dataloader())), []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(trainer.gate_state.gates))
    run = getattr(trainer, measure)
    data = () if measure == "evaluate" else (trainer.eval_dataset,)
    trainer.draw_gates(dict(inputs))
    monkeypatch.setattr(trainer, "last_gates", None)  # as those of another trainer of the model
    outputs = [run(*data)]
    with use_gates(trainer.model, [1, 0, 0, 0]):
        outputs.append(run(*data))
    with trainer.model.disable_adapter():
        outputs.append(run(*data))
    gates_of_block = seen[len(seen) // 2]  # of the second run
    assert seen[0] is None and gates_of_block.flatten().tolist() == [1, 0, 0, 0]
    names = []
    for output in outputs:
        metrics = output if measure == "evaluate" else output.metrics
        names.append([value for name, value in metrics.items() if name.endswith("_gates")])
    assert names == [[], ["loop 1"], ["none"]]
    losses = [log["eval_loss"] for log in as_trained(trainer.state.log_history) if "eval_loss" in log]
    assert losses == ([outputs[0]["eval_loss"]] if measure == "evaluate" else [])
    with use_gates(trainer.model, torch.ones(4, 2) / 2), user_error("one gate for each loop, .*shape \\[4, 2\\]"):
        run(*data)


def test_untrained_adapter_that_replaces_a_trained_one_is_named(train, make_sft, tmp_path, log):
    trained = train(max_steps=1)
    make_sft().save_model()
    assert "replaces" not in log.text  # no adapter was saved yet
    trained.save_model()
    make_sft(trained.model).save_model()  # the trained weights
    make_sft().save_model(str(tmp_path / "new"))
    assert "replaces" not in log.text
    make_sft(p=0.25).save_model()
    folder = trained.args.output_dir
    assert (
        f"{folder} has an adapter from SFT with Loop Dropout (p = 0.5, K = 4, 1 step, learning rate 0.01, seed 42)"
        in log.text
    )
    assert "`save_model` replaces it by one that no `train()` has trained." in log.text


def test_merge_inside_of_a_block_is_named(make_sft, tmp_path, log):
    model = make_sft().model
    sentence = (
        "has the whole update of the adapter, although the merge runs inside of `use_gates` or `disable_adapter`"
    )
    for number, block in enumerate([use_gates(model, torch.zeros(4)), model.disable_adapter(), nullcontext()]):
        log.clear()
        with block:
            merge_and_save(model, tmp_path / str(number))
        assert (sentence in log.text) == (number < 2)


def test_merge_of_an_untrained_adapter_is_named(train, make_sft, tmp_path, log):
    """As after the cell that makes the trainer ran again. The merged model is the base model."""
    trained, folder = train(max_steps=1), tmp_path / "merged"
    with user_error("`output_dir` must not be the folder of a training, which .* such as .*/merged"):
        merge_and_save(trained.model, trained.args.output_dir)
    merge_and_save(trained.model, folder)
    trained_card = (folder / "README.md").read_text()
    assert "fine-tuned" in trained_card and "replaces" not in log.text and "is the base model" not in log.text
    untrained = make_sft()
    with user_error("`output_dir` must not be the folder of a training"):
        merge_and_save(untrained.model, trained.args.output_dir)
    merge_and_save(untrained.model, folder)
    assert f"The merged model in {folder} is the base model, because no training has changed the adapter" in log.text
    assert f"{folder} has a merged model from SFT with Loop Dropout (p = 0.5, K = 4, 1 step" in log.text
    assert "`merge_and_save` replaces it by one that no `train()` has trained." in log.text
    untrained.save_model(str(tmp_path / "adapter"))
    for place in ("merged", "adapter"):
        card = (tmp_path / place / "README.md").read_text()
        assert "| Training | none |" in card and "o training has changed" in card and "fine-tuned" not in card
        assert "Trained with" not in card
    log.clear()
    merge_and_save(
        load_adapter(untrained.model.unload(), tmp_path / "adapter"), tmp_path / "again"
    )  # as the command does
    assert "is the base model, because no training" in log.text and "replaces" not in log.text
    before = sorted(folder.rglob("*"))
    with user_error(
        "`output_dir` must not be the folder of a whole model, .* Make a trainer with another `output_dir`"
    ):
        make_sft(max_steps=1, output_dir=str(folder)).train()
    assert sorted(folder.rglob("*")) == before


def test_files_of_a_former_training_are_named(train, tmp_path, log):
    """The adapter after a second `train()`, and the merged model after `save_model()`."""
    trainer = train(max_steps=1)
    folder = trainer.args.output_dir
    trainer.save_model()
    merge_and_save(trainer.model, Path(folder, "merged"), scale=0.5)
    trainer.save_model()
    assert "holds the" not in log.text
    trainer.train()
    saving = (
        f"{folder} still holds the adapter that was saved before this training. `trainer.save_model()` replaces it."
    )
    assert saving in log.text
    merging = f"`merge_and_save(trainer.model, '{folder}/merged', scale=0.5)` renews it."
    assert merging not in log.text
    trainer.save_model()
    assert f"{folder}/merged holds the merged model of step 1 of another training. {merging}" in log.text


def test_gates_of_a_compiled_model_name_the_model(train):
    compiled = torch.compile(train(max_steps=1).model, backend="eager")
    for use in (lambda: use_gates(compiled, [1, 0, 0, 0]).__enter__(), lambda: loop_dropout(compiled)):
        with user_error(
            "`model` must not be compiled. Give the model that `torch.compile` has got, .*`torch_compile=True`"
        ):
            use()


@pytest.mark.parametrize(
    ("lora", "targets", "unsaved"),
    [
        ({"target_modules": ["v_proj", "q_proj"]}, ["q_proj", "v_proj"], None),
        ({"r": 4, "use_rslora": True, "lora_dropout": 0.25}, None, None),
        ({"target_modules": r".*\.0\.mlp\..*", "exclude_modules": ["up_proj"]}, LAYER_0, None),
        ({"target_modules": ["down_proj", "gate_proj"], "layers_to_transform": [0]}, LAYER_0, None),
        ({"rank_pattern": {"q_proj": 2}, "init_lora_weights": "gaussian"}, None, "`init_lora_weights`, `rank_pattern` of"),
    ],
    ids=str,
)  # fmt: skip
def test_recipe_of_python_makes_the_same_adapter(train, log, lora, targets, unsaved):
    trainer = train(tiny_ouro(), peft_config=LoraConfig(**lora), max_steps=1)
    recipe = load_recipe(Path(trainer.args.output_dir, "recipe.yaml"))
    assert recipe.get("lora_target_modules") == targets
    fields = {own.name for own in dataclasses.fields(AdapterArguments)}
    again = train(
        tiny_ouro(),
        peft_config=AdapterArguments(**{k: v for k, v in recipe.items() if k in fields}).peft_config,
        max_steps=1,
    )
    shapes = [{name: x.shape for name, x in get_peft_model_state_dict(t.model).items()} for t in (trainer, again)]
    scales = [{layer.scaling["default"] for layer in adapted_layers(t.model)} for t in (trainer, again)]
    is_same = shapes[0] == shapes[1] and scales[0] == scales[1]
    assert is_same is ("rank_pattern" not in lora)
    assert ("of the LoraConfig, because recipes have no such fields" in log.text) is (unsaved is not None)
    assert (unsaved or "") in log.text


def draw_first_batch(trainer):
    return trainer.sample_gates(next(iter(trainer.get_train_dataloader()))).gates


ONCE_MORE = {
    "batches and gates": draw_first_batch,
    "train": lambda trainer: trainer.train(),
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(trainer.eval_dataset),
}


@pytest.mark.parametrize("action", ONCE_MORE)
@pytest.mark.parametrize("is_trained", [False, True])
def test_config_of_another_trainer_changes_nothing(make_sft, config, action, is_trained):
    """Each new configuration resets the state that all accelerators of a process share."""
    trainer, alone = make_sft(), make_sft()
    for one in (trainer, alone) if is_trained else ():
        one.train()
    config(p=0.25, bf16=action == "batches and gates")
    got = ONCE_MORE[action](trainer)
    trainer.accelerator.wait_for_everyone()
    want = ONCE_MORE[action](alone)
    assert_same_weights(trainer, alone)
    if action == "evaluate":
        assert got["eval_loss"] == want["eval_loss"]
    if action == "batches and gates":
        assert torch.equal(got, want) and trainer.accelerator.mixed_precision == "no"


def test_trainer_takes_a_config_that_is_older_than_another(make_sft, config, dataset, tokenizer):
    """accelerate keeps one precision in a process, which each of our trainers sets again for itself."""
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    older = config(bf16=True, gradient_checkpointing=False, max_steps=1)
    alone = LoopDropoutSFTTrainer(tiny_ouro(), older, **data)
    alone.train()
    exact = make_sft(tiny_ouro(), max_steps=1)
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), older, **data)  # accelerate raises if its state is not reset
    exact.train()
    assert exact.accelerator.mixed_precision == "no"
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert_same_weights(trainer, alone)


@pytest.mark.parametrize("repository", [None, "user/adapter"])
def test_card_has_the_given_name(make_sft, repository):
    trainer = make_sft(hub_model_id=repository)
    card = Path(trainer.args.output_dir, "README.md")
    trainer.create_model_card()
    assert f"\n# {repository or 'run'}\n" in card.read_text()
    trainer.create_model_card(model_name="user/my-model")
    assert "\n# user/my-model\n" in card.read_text()
    assert repository is None or f'"{repository}"' in card.read_text()


def test_model_may_be_a_path(config, dataset, saved):
    trainer = LoopDropoutSFTTrainer(saved / "base", config(), train_dataset=dataset)
    assert trainer.looped.config.name_or_path == str(saved / "base")


def test_code_of_a_repository_never_runs(config, dataset, saved, tmp_path):
    """Programs for the published models ask for it by habit."""
    shutil.copytree(saved / "base", tmp_path / "base")
    settings = json.loads((tmp_path / "base/config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "base/config.json").write_text(json.dumps(settings))
    (tmp_path / "base/code.py").write_text("raise SystemError")
    args = config(model_init_kwargs={"trust_remote_code": True, "dtype": "float32"})
    trainer = LoopDropoutSFTTrainer(str(tmp_path / "base"), args, train_dataset=dataset)
    assert type(trainer.looped).__module__.startswith("loopdropout_trainer.")


def test_model_without_loops_is_named_with_its_class(config, dataset, tokenizer, tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    folder = str(tmp_path / "llama")
    llama.save_pretrained(folder)
    for model, text in ((llama, "got a LlamaForCausalLM."), (folder, f"got a LlamaForCausalLM from {folder}.")):
        with user_error(
            f"must be a looped model, .*{re.escape(text)} The supported families are Ouro, .*, Parcae and HRM-Text"
        ):
            LoopDropoutSFTTrainer(model, config(), train_dataset=dataset, processing_class=tokenizer)


def test_load_model_says_early_that_a_model_has_no_loops(tmp_path):
    """The folder has no weights, so only its configuration is read."""
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with user_error(f"must be a looped model, .*got a LlamaForCausalLM from {tmp_path}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["query"], "must be modules of the model, such as down_proj, gate_proj, .*got query."),
        (
            "q_proj",
            r"must match full names such as 'model.layers.0.self_attn.q_proj', got 'q_proj'. .* write `\['q_proj'\]`",
        ),
        ("(q", r"`target_modules` must be a list of names or a pattern, got '\(q' \(.*unterminated"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_target_modules_that_are_missing_are_named(config, dataset, targets, message, by_name):
    model = "tiny-ouro" if by_name else load_model("tiny-ouro")
    with user_error(message):
        LoopDropoutSFTTrainer(model, config(), train_dataset=dataset, peft_config=LoraConfig(target_modules=targets))


def test_adapter_of_a_bare_lora_config_loads_in_peft(config, dataset, saved):
    """Without a `task_type`, PEFT saves the module of the model's class, which it refuses to import."""
    lora = LoraConfig(r=4)
    trainer = LoopDropoutSFTTrainer(str(saved / "base"), config(), train_dataset=dataset, peft_config=lora)
    trainer.save_model()
    loaded = AutoPeftModelForCausalLM.from_pretrained(trainer.args.output_dir)
    assert type(loaded) is type(trainer.model) is PeftModelForCausalLM
    assert lora.task_type is None  # the user's own


def metadata_of(trainer):
    trainer.save_model()
    return json.loads(Path(trainer.args.output_dir, "loop_dropout.json").read_text())


BEFORE = (
    r"SFT with Loop Dropout \(p = 0.25, K = 4, 2 steps, learning rate 0.01, seed 42\) on 48 examples \(digest \w{16}\)"
)


@pytest.mark.parametrize("same_trainer", [True, False])
def test_second_training_names_the_first(train, make_sft, tmp_path, log, same_trainer):
    """A cell with another p runs again on the same model, whose adapter is not zero."""
    first = train(p=0.25, max_steps=2, output_dir=str(tmp_path / "first"))
    assert "trained before" not in log.text and "earlier_trainings" not in metadata_of(first)
    second = first
    if not same_trainer:
        second = make_sft(first.model, p=0.75, max_steps=1, output_dir=str(tmp_path / "second"))
    second.train()
    assert re.search(rf"starts from present weights of the model, which were trained before: {BEFORE}\. For", log.text)
    (earlier,) = metadata_of(second)["earlier_trainings"]
    assert re.fullmatch(BEFORE, earlier)
    folder = Path(second.args.output_dir)
    assert f"# The adapter was trained before: {earlier}.\n" in (folder / "recipe.yaml").read_text()
    merge_and_save(second.model, tmp_path / "merged")
    for card in (folder / "README.md", tmp_path / "merged" / "README.md"):
        assert f"| Trained before | {earlier} |" in card.read_text()
    depths = {"depth_sampling": "uniform", "depth_sampling_args": {"low": 1, "high": 2}}
    third = make_sft(second.model, max_steps=1, output_dir=str(tmp_path / "third"), **depths)
    third.train()
    assert len(metadata_of(third)["earlier_trainings"]) == 2
    assert "which were trained in 2 trainings before, the last of which was: SFT with" in log.text
    assert "(p = 0.5, K = 4, depths from 1 to 2 in training, 1 step" in describe_training(metadata_of(third))
    log.clear()
    new = train(max_steps=1)
    assert "trained before" not in log.text and "earlier_trainings" not in metadata_of(new)


def test_continued_training_keeps_what_it_started_from(train, make_sft, tmp_path):
    first = train(p=0.25, max_steps=2)
    fields = {"output_dir": str(tmp_path / "second"), "save_strategy": "steps", "save_steps": 1}
    make_sft(first.model, max_steps=1, **fields).train()
    resumed = make_sft(max_steps=2, **fields)  # in a new process
    resumed.train(resume_from_checkpoint=True)
    (earlier,) = metadata_of(resumed)["earlier_trainings"]
    assert re.fullmatch(BEFORE, earlier)


def test_training_from_a_saved_adapter_names_its_folder(make_sft, tmp_path, saved, log, capsys):
    model = load_adapter(load_model(saved / "base"), saved / "adapter", is_trainable=True)
    trainer = make_sft(model, max_steps=1, output_dir=str(tmp_path / "second"))
    trainer.train()
    assert "trained before" not in log.text
    assert f" trains the adapter '{saved / 'adapter'}' of " in capsys.readouterr().out
    facts = metadata_of(trainer)
    assert facts["initial_adapter"] == str(saved / "adapter") and "earlier_trainings" not in facts
    assert load_recipe(tmp_path / "second" / "recipe.yaml")["adapter_name_or_path"] == str(saved / "adapter")
    third = make_sft(trainer.model, max_steps=1, output_dir=str(tmp_path / "third"))
    third.train()
    assert " trains an adapter of " in capsys.readouterr().out
    facts = metadata_of(third)
    assert facts["initial_adapter"] == str(saved / "adapter")
    (earlier,) = facts["earlier_trainings"]
    assert earlier.endswith(", from the adapter 'adapter'") and earlier in log.text  # its folder stays off the card
    recipe = tmp_path / "third" / "recipe.yaml"
    assert "adapter_name_or_path" not in load_recipe(recipe) and earlier in recipe.read_text()
    for _ in range(2):
        log.clear()
        third.train()
    earlier = metadata_of(third)["earlier_trainings"]
    assert len(earlier) == 3 and "from the adapter" not in earlier[-1]
    assert f"trained in 3 trainings before, the last of which was: {earlier[-1]}. For a fresh" in log.text
    assert earlier[0] not in log.text


def test_training_over_a_merged_one_names_it(train, make_sft, tmp_path, log):
    first = train(p=0.25, max_steps=2)
    second = make_sft(first.model.merge_and_unload(), max_steps=1, output_dir=str(tmp_path / "second"))
    second.train()
    assert "after which the base model was changed, as by merging" in log.text
    assert "Save the changed base model, too" in log.text
    assert re.match(BEFORE, metadata_of(second)["earlier_trainings"][0])


def test_start_of_weights_from_elsewhere_is_not_known(make_sft, log):
    trainer = make_sft(with_adapter(), max_steps=1)
    trainer.train()
    assert metadata_of(trainer)["earlier_trainings"] == ["not known, but the update is not zero"]
    log.clear()
    untrained = make_sft(get_peft_model(tiny_ouro(), default_peft_config()), max_steps=1)
    untrained.train()
    assert "trained before" not in log.text and "earlier_trainings" not in metadata_of(untrained)
    other = default_peft_config(untrained.model.get_base_model(), init_lora_weights=False)
    untrained.model.add_adapter("other", other)  # whose update is not zero, as its configuration says
    untrained.model.set_adapter("other")
    untrained.train()
    assert "trained before" not in log.text and untrained.start == {}


def test_reference_of_grpo_is_computed_with_its_own_head(config, dataset, tokenizer):
    """It runs before the first loss. Another trainer of the model has put its head there."""
    prompts = Dataset.from_list([{"prompt": f"{n}+1="} for n in range(8)])
    reward = lambda completions, **columns: [float(len(text)) for text in completions]
    fields = {"temperature": 0.5, "num_generations": 2, "max_completion_length": 4, "beta": 0.5, "max_steps": 1}
    own, shared = (
        LoopDropoutGRPOTrainer(
            with_adapter(), reward, config(LoopDropoutGRPOConfig, **fields), prompts, processing_class=tokenizer
        )
        for _ in range(2)
    )
    LoopDropoutSFTTrainer(shared.model, config(), train_dataset=dataset, processing_class=tokenizer)
    for trainer in (own, shared):
        set_seed(0)  # for the completions, which the global generator draws
        trainer.train()
    assert_same_weights(own, shared)


@pytest.mark.parametrize("first", ["sft", "dpo", "grpo"])
def test_trainers_of_one_model_alternate(config, dataset, tokenizer, first):
    """Each trainer has the losses that it has on a model of its own, whichever of them was made last."""
    pairs = Dataset.from_list([{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(8)])
    rewarded = {"temperature": 0.5, "num_generations": 2, "max_completion_length": 4, "beta": 0.0}
    makers = {
        "sft": lambda model: LoopDropoutSFTTrainer(
            model, config(max_steps=1), train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer
        ),
        "dpo": lambda model: LoopDropoutDPOTrainer(
            model,
            args=config(LoopDropoutDPOConfig, max_steps=1),
            train_dataset=pairs,
            eval_dataset=pairs,
            processing_class=tokenizer,
        ),
        "grpo": lambda model: LoopDropoutGRPOTrainer(
            model,
            lambda completions, **columns: [float(len(text)) for text in completions],
            config(LoopDropoutGRPOConfig, max_steps=1, **rewarded),
            train_dataset=pairs.select_columns("prompt"),
            eval_dataset=pairs.select_columns("prompt"),
            processing_class=tokenizer,
        ),
    }
    own = makers[first](with_adapter())
    own.train()
    shared = makers[first](with_adapter())
    others = [make(shared.model) for name, make in makers.items() if name not in (first, "dpo")]
    if first != "dpo":
        others.append(makers["dpo"](shared.model))
    shared.train()
    assert_same_weights(own, shared)
    for other in [*others, shared]:
        other.train()
    with user_error("`model` must have no adapter named 'ref', .* `model.delete_adapter\\('ref'\\)`"):
        makers["dpo"](shared.model)


def test_weights_of_another_trainer_are_named_when_they_are_saved(make_sft, tmp_path, log):
    """They would be saved next to the results of the first trainer, without a word."""
    first = make_sft(output_dir=str(tmp_path / "first"), max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    second = make_sft(first.model, output_dir=str(tmp_path / "second"), max_steps=1, p=0.25)
    second.train()
    second.save_model()
    assert "another trainer" not in log.text
    first.save_model()
    assert "another trainer has trained its model since: SFT with Loop Dropout (p = 0.25, K = 4, 1 step" in log.text
    assert f"The adapter of this trainer is in {tmp_path / 'first' / 'checkpoint-1'}" in log.text


def test_trained_one_of_two_adapters_is_named(make_sft, log):
    model = with_adapter()
    model.add_adapter("second", default_peft_config(model.get_base_model(), r=2))
    model.set_adapter("second")
    make_sft(model, max_steps=1).train()
    assert "The adapter 'second' trains, and 'default' stays unchanged." in log.text
    assert "trained before" not in log.text  # the second one is new


def test_each_of_two_adapters_keeps_its_training(train, tmp_path, log):
    """Results, cards and merged models of the active adapter had the settings of the one that was trained last."""
    first = train(max_steps=1)
    model, looped, ids = first.model, first.looped, torch.arange(2, 20).view(2, 9)
    measure = lambda: [row.get("method") for row in depth_matrix(model, [{"input_ids": ids, "labels": ids}], [4])]
    says = "which is active, but the last training of this trainer has trained "
    model.add_adapter("second", default_peft_config(model.get_base_model(), r=2))
    model.set_adapter("second")
    assert set(measure()) == {None}
    second = train(model, max_steps=1, rule="lora", output_dir=str(tmp_path / "second"))
    assert set(measure()) == {"LoRA"} and "trained before" not in log.text
    model.set_adapter("default")
    assert set(measure()) == {"Loop Dropout"} and looped.run_folder == first.args.output_dir
    first.save_model(tmp_path / "saved")
    assert "not those of this trainer" not in log.text and first.evaluate()["eval_loss"]
    merge_and_save(model, tmp_path / "merged")
    for folder in ("saved", "merged"):
        assert json.loads((tmp_path / folder / "loop_dropout.json").read_text())["rule"] == "loop_dropout"
    model.base_model.set_adapter(["default", "second"])
    assert set(measure()) == {None}
    model.set_adapter("second")
    assert looped.trained_with["training_id"] == second.training_id
    log.clear()
    first.save_model(tmp_path / "both")
    assert f"gets the settings and the card of the adapter 'second', {says}'default'" in log.text
    assert f"'second' is saved in {tmp_path / 'both' / 'second'}, and {tmp_path / 'both'} itself holds" in log.text
    assert (
        "another trainer" not in log.text
        and "| Subfolder of the adapter | `second` |" in (tmp_path / "both" / "README.md").read_text()
    )
    log.clear()
    second.save_model()
    assert says not in log.text
    model.set_adapter("default")
    trained_before = describe_training(looped.trained_with)
    second.train()
    assert second.start["earlier_trainings"] == [trained_before] and looped.trained_with["p"] is None
    loaded = load_adapter(tiny_ouro(num_hidden_layers=1), tmp_path / "saved")
    assert find_looped_model(loaded).trained_with["rule"] == "loop_dropout"
    loaded.add_adapter("new", default_peft_config(loaded.get_base_model(), r=2))
    loaded.set_adapter("new")
    assert not find_looped_model(loaded).trained_with
    model.merge_and_unload()
    assert not looped.trained_with and looped.last_training  # nobody knows which one was merged


class StopAt(TrainerCallback):
    """Stop a training as Ctrl-C in a user's own code does, at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_stopped_training_counts_its_steps(make_sft, tmp_path, log):
    """Not the steps of its last checkpoint."""
    fields = {"save_strategy": "steps", "save_steps": 2}
    first = make_sft(callbacks=[StopAt(3)], **fields)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert metadata_of(first)["step"] == 3
    for card in (first.save_model, first.create_model_card):
        card()
        text = Path(first.args.output_dir, "README.md").read_text()
        assert "| Training | stopped at step 3 of 4 |" in text
        assert re.search(r"\| Training data \| 48 examples \(digest \w+\) \|", text)
    second = make_sft(first.model, max_steps=2, output_dir=str(tmp_path / "second"), **fields)
    second.train()
    assert "trained before: SFT with Loop Dropout (p = 0.5, K = 4, 3 steps, learning rate 0.01, seed 42)" in log.text
    facts = metadata_of(second)
    assert "stopped" not in facts and "stopped" not in Path(second.args.output_dir, "README.md").read_text()
    log.clear()
    resumed = make_sft(max_steps=3, output_dir=str(tmp_path / "second"), **fields)  # its model is new
    resumed.train(resume_from_checkpoint=True)
    assert "present weights" not in log.text and "load the base model again" not in log.text
    checkpoint = tmp_path / "second" / "checkpoint-2"
    assert f"The training of {checkpoint} started from weights that were trained before: SFT with" in log.text


def test_error_after_the_last_step_is_no_stop(make_sft):
    class StopAtEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make_sft(callbacks=[StopAtEnd()], max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "stopped" not in metadata_of(trainer)


def test_best_checkpoint_is_not_the_step_of_a_stopped_training(make_sft):
    fields = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 1e-5}
    trainer = make_sft(callbacks=[StopAt(3)], greater_is_better=True, **fields, save_strategy="steps", save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.best_global_step == 1
    assert metadata_of(trainer)["step"] == 3


def test_folder_with_several_adapters_is_the_trained_one(make_sft, tmp_path, log):
    """PEFT saves the adapter `default`, which was not trained, in the folder itself."""
    model = get_peft_model(load_model("tiny-ouro"), default_peft_config(r=2))
    model.add_adapter("b", default_peft_config(model.get_base_model(), r=4))
    model.set_adapter("b")
    trainer = make_sft(model, max_steps=1)
    trainer.train()
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    assert 'load_model(".")' in (folder / "README.md").read_text()
    want = get_peft_model_state_dict(model, adapter_name="b")
    for name in (folder, folder / "b"):
        got = get_peft_model_state_dict(load_model(name))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert "holds the trained adapters" not in log.text
    model.set_adapter("default")
    trainer.train()  # with a new optimizer, since the first one has the other weights
    trainer.save_model()
    assert any(x.any() for name, x in get_peft_model_state_dict(model).items() if "lora_B" in name)
    got = get_peft_model_state_dict(load_model(folder))
    torch.testing.assert_close(got, get_peft_model_state_dict(model), rtol=0, atol=0)
    assert "holds the trained adapters default, b. The adapter default is used." in log.text
    torch.testing.assert_close(get_peft_model_state_dict(load_model(folder / "b")), want, rtol=0, atol=0)


def test_last_trained_of_several_adapters_is_used(train, log):
    trainer = train(load_model("tiny-ouro"), max_steps=1)
    trainer.save_model()
    trainer.model.add_adapter("b", default_peft_config(trainer.model.get_base_model(), r=4))
    trainer.model.set_adapter("b")
    trainer.train()
    trainer.save_model()
    got = get_peft_model_state_dict(load_model(trainer.args.output_dir))
    want = get_peft_model_state_dict(trainer.model, adapter_name="b")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert any(x.any() for name, x in want.items() if "lora_B" in name)
    assert "The adapter b is used." in log.text


@pytest.mark.parametrize("trainer_class", [LoopDropoutSFTTrainer, LoopDropoutDPOTrainer, LoopDropoutGRPOTrainer])
def test_missing_datasets_are_named(config, tokenizer, trainer_class):
    args = config(trainer_class.config_class, **({"num_generations": 2} if "GRPO" in trainer_class.__name__ else {}))
    given = {"model": tiny_ouro(), "args": args, "processing_class": tokenizer}
    if "GRPO" in trainer_class.__name__:
        given["reward_funcs"] = lambda completions, **columns: [0.0 for _ in completions]
    with user_error("`train_dataset` must be a `Dataset` or an `IterableDataset`, got None. Make one of rows by"):
        trainer_class(**given)
    args.eval_strategy = "steps"
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}])
    with user_error("`eval_dataset` must be given if `eval_strategy` is steps, got None. Hold out examples"):
        trainer_class(**given, train_dataset=rows)


class WarnOnce(TrainerCallback):
    """A callback of a user with a warning of its own."""

    def on_step_end(self, args, state, control, **kwargs):
        warnings.warn("a rule of mine is old", FutureWarning, stacklevel=1)


def test_libraries_give_each_other_no_warnings(config, dataset, tokenizer, saved):
    """PEFT and TRL call transformers by old names, and a user can do nothing about it."""
    pairs = Dataset.from_list([{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(8)])
    rewarded = {"num_generations": 2, "max_completion_length": 4}
    callbacks = [WarnOnce()]
    data = {"processing_class": tokenizer, "callbacks": callbacks}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        load_model(saved / "adapter")
        get_peft_model(tiny_ouro(), default_peft_config())
        measured = {"compute_metrics": lambda predictions: {"one": 1.0}}
        sft = LoopDropoutSFTTrainer(tiny_ouro(), config(max_steps=1), train_dataset=dataset, **data, **measured)
        sft.train()
        assert sft.evaluate(dataset.select([0]))["eval_one"] == 1
        args = config(LoopDropoutDPOConfig, max_steps=1)
        LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=pairs, **data).train()
        args = config(LoopDropoutGRPOConfig, max_steps=1, **rewarded)
        prompts = pairs.select_columns("prompt")
        reward = lambda completions, **columns: [float(len(text)) for text in completions]
        grpo = LoopDropoutGRPOTrainer(tiny_ouro(), reward, args, train_dataset=prompts, **data)
        grpo.train()
        grpo.evaluate(prompts)  # which samples completions, as its training does
        grpo.predict(prompts)
        texts = [str(warning.message) for warning in shown]
        assert {str(warning.message) for warning in shown if warning.category is FutureWarning} == {
            "a rule of mine is old"
        }
        assert texts.count("a rule of mine is old") == 3
        model = tiny_ouro()
        model.gradient_checkpointing_enable()
        is_renamed = hasattr(model, "activation_checkpointing_enable")  # in newer releases of transformers
        own = [warning for warning in shown if "`gradient_checkpointing_enable` is deprecated" in str(warning.message)]
        assert len(own) == is_renamed


CHANGES = {
    "merged": lambda model: model.merge_adapter(),
    "switched off": lambda model: model.base_model.disable_adapter_layers(),
    "deleted": lambda model: model.delete_adapter("default"),
    "frozen": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapter_that_a_callback_changes_raises(make_sft, change):
    """A merged adapter would train nothing without an error, and the others end in an error of torch or PEFT."""

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            CHANGES[change](model)

    with user_error("The adapter 'default' must stay active, trainable and unmerged in the training"):
        make_sft(max_steps=2, callbacks=[Change()]).train()


def test_changed_learning_rate_applies_to_the_next_training(make_sft, log):
    trainer = make_sft(max_steps=1, logging_steps=1, lr_scheduler_type="constant")
    keeps = "The optimizer keeps its momentum and its number of steps, also after a change of the rule or p."
    trainer.train()
    assert keeps not in log.text
    trainer.rule = "lora"
    trainer.train()
    assert "new optimizer, because" not in log.text and keeps in log.text
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    log.clear()
    trainer.args.learning_rate = 0.5
    trainer.train()
    assert keeps not in log.text
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5, 0.5]
    assert "The training begins with a new optimizer, because `learning_rate` of `args` changed." in log.text
    for value, message in ((-1, "`learning_rate` must be at least 0"), ("1e-4", "`learning_rate` must be a number")):
        trainer.args.learning_rate = value
        with user_error(message):
            trainer.train()
    with user_error("`rule` must be a name, or a rule such as .*, got <function .* Write the function as the method"):
        trainer.rule = lambda draw: [1, 1, 1, 1]


def test_model_that_replaces_the_adapter_raises(train):
    trainer = train(max_steps=1)
    trainer.model = trainer.model.merge_and_unload()
    for call in (trainer.save_model, trainer.evaluate, lambda: merge_and_save(trainer.model, None)):
        with user_error("OuroForCausalLM has no adapter|`output_dir` must be a path, got None"):
            call()


def test_second_adapter_on_a_base_model_raises(saved):
    base = load_model(saved / "base")
    load_adapter(base, saved / "adapter")
    with user_error("`model` must not have an adapter already"):
        load_adapter(base, saved / "adapter")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4}, "`rank` is not a field of `LoraConfig`. Did you mean 'r'"),
        ({"r": "a"}, "`r` must be an integer, got 'a'"),
        ({"r": 0}, "`r` must be at least 1 and at most 65,536, got 0"),
        ({"r": 65537}, "`r` must be at least 1 and at most 65,536, got 65537"),
        ({"lora_alpha": 0.5}, "`lora_alpha` must be at least 1, got 0.5"),
        ({"lora_alpha": None}, "`lora_alpha` must be a number, got None"),
        ({"lora_dropout": 1}, "`lora_dropout` must be at least 0 and below 1, got 1"),
        ({"target_modules": 5}, "`target_modules` must be a list of names, .* got 5"),
        ({"target_modules": []}, "`target_modules` must be a list of names, .* got set"),
        ({"target_modules": ["all-linear", "q_proj"]}, "`all-linear` must be the only target module"),
        ({"peft_config": LoraConfig(r=4), "r": 8}, "Set `r` in the given `peft_config`"),
    ],
)
def test_wrong_fields_of_an_adapter_raise(fields, message):
    with user_error(message):
        default_peft_config(tiny_ouro(), **fields)


def test_all_linear_means_the_recurrent_block():
    model = tiny_ouro()
    want = default_peft_config(model).target_modules
    for targets in ("all-linear", ["all-linear"]):
        assert default_peft_config(model, target_modules=targets).target_modules == want


BASE = tiny_ouro()
MISTAKES = {
    "push a model": (
        lambda: push_merged_to_hub(BASE, "me/model"),
        "`folder` must be a folder with a merged model, got OuroForCausalLM. Call `merge_and_save.model, folder.` first",
    ),
    "data choice": (
        lambda: DataArguments(preparation="arithmetik"),
        "`preparation` must be one of arithmetic, .*, got 'arithmetik'. Did you mean 'arithmetic'?",
    ),
    "data field": (
        lambda: DataArguments(prepration="gsm8k"),
        "`prepration` is not a field of DataArguments. Did you mean 'preparation'?",
    ),
    "batches of other columns": (
        lambda: label_batches([{"question": "x"}], make_tokenizer()),
        "An example must have one of: `prompt` and `completion`; `messages`; `text`, got the columns question. Rename",
    ),
    "batches of a name": (
        lambda: label_batches([{"text": "x"}], "tiny-ouro"),
        r"`tokenizer` must be a tokenizer, got the name 'tiny-ouro'. Load it by `load_tokenizer\('tiny-ouro'\)`",
    ),
    "batches without a tokenizer": (
        lambda: label_batches([{"text": "x"}], None),
        "`tokenizer` must be a tokenizer, as from `load_tokenizer`, got None",
    ),
    "batches of a table": (
        lambda: label_batches(pd.DataFrame([{"text": "x"}]), make_tokenizer()),
        "`examples` must be a list of mappings or a `Dataset`, got a DataFrame. .* `datasets.Dataset.from_pandas`",
    ),
    "batches of no example": (
        lambda: label_batches([{"text": "x"}], make_tokenizer(), batch_size=0),
        "`batch_size` must be an integer of at least 1, got 0",
    ),
    "batches of texts": (
        lambda: label_batches(["labels"], make_tokenizer()),
        "An example must be a mapping .* got 'labels'",
    ),
    "batches of numbers": (
        lambda: label_batches([{"prompt": "a", "completion": 1}], make_tokenizer()),
        "`completion` of an example must be a text or a list of messages, got 1",
    ),
    "batches of a text and turns": (
        lambda: label_batches(
            [{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], make_tokenizer()
        ),
        "`prompt` of an example must be a list of messages as its `completion` is, got 'a'",
    ),
    "name of data": (
        lambda: load_datasets("arithmetic", make_tokenizer()),
        "`args` must be `DataArguments`, such as .*, got 'arithmetic'",
    ),
    "data of a name": (
        lambda: load_datasets(DataArguments(preparation="arithmetic"), "tiny-ouro"),
        "`tokenizer` must be a tokenizer, got the name 'tiny-ouro'",
    ),
    "score of examples": (
        lambda: score(with_adapter(), [{"text": "x"}], [1, 0, 0, 0]),
        r"`batches` must have `input_ids` and `labels`, got \{'text': 'x'\}. .* `label_batches\(examples, tokenizer\)`",
    ),
    "push to 5": (lambda: push_merged_to_hub("merged", 5), "`repo_id` must be a text, got 5"),
    "merge with a name": (
        lambda: merge_and_save(with_adapter(), "merged", "tiny-ouro"),
        "`processing_class` must be a tokenizer, got the name 'tiny-ouro'",
    ),
    "merge standalone": (
        lambda: merge_and_save(with_adapter(), "merged", standalone="yes"),
        "`standalone` must be true or false, got 'yes'",
    ),
    "merge scale": (lambda: merge_and_save(with_adapter(), "merged", scale="a"), "`scale` must be a number, got 'a'"),
    "merge card": (lambda: merge_and_save(with_adapter(), "merged", card=5), "`card` must be a mapping, .* got 5"),
    "merge card field": (
        lambda: merge_and_save(with_adapter(), "merged", card={"data_set": "GSM8K"}),
        "`card` must have fields of `CardFields`, such as `dataset`, got 'data_set'. Did you mean 'dataset'?",
    ),
    "load a model": (lambda: load_model(BASE), "`name_or_path` must be a path, got OuroFor"),
    "load tokenizer": (lambda: load_tokenizer(None), "`name_or_path` must be a path, got None"),
    "load dtype": (lambda: load_model("tiny-ouro", dtype="float99"), "`dtype` must be auto, .* got 'float99'"),
    "load integers": (lambda: load_model("tiny-ouro", dtype="int8"), "`dtype` must be .* or float64, got 'int8'"),
    "load 8 bits": (
        lambda: load_model("tiny-ouro", dtype=torch.float8_e4m3fn),
        "`dtype` must be .*, got torch.float8_e4",
    ),
    "load usual dtype": (lambda: load_model("tiny-ouro", dtype="fp32"), "got 'fp32'. Did you mean 'float32'"),
    "load device": (lambda: load_model("tiny-ouro", device="gpu"), "`device` must be a device .* got 'gpu'"),
    "load keyword": (lambda: load_model("tiny-ouro", foo=3), "`foo` is not an argument of `from_pretrained`"),
    "load mistyped keyword": (lambda: load_model("tiny-ouro", num_loop=3), "nor a field .* Did you mean 'num_loops'"),
    "load usual keyword": (lambda: load_model("tiny-ouro", loops=3), "nor a field .* Did you mean 'num_loops'"),
    "load trainable": (
        lambda: load_model("tiny-ouro", is_trainable=True),
        r"load it by `load_adapter\(load_model\(base\), folder, is_trainable=True\)`",
    ),
    "load 4 bit": (
        lambda: load_model("tiny-ouro", load_in_4bit=True),
        r"Give `quantization_config=BitsAndBytesConfig.load_in_4bit=True.` of transformers",
    ),
    "name of a model": (
        lambda: loop_dropout("tiny-ouro"),
        r"must be a looped model, .* Load it by `load_model.'tiny-ouro'.`",
    ),
    "depths": (
        lambda: depth_matrix(BASE, [], 3),
        r"`depths` must be a list of numbers of loops, such as \[2, 4\], got 3",
    ),
    "tasks of a name": (
        lambda: evaluate_tasks("tiny-ouro", ["gsm8k"]),
        r"got 'tiny-ouro'. Give `LoopedLM.'tiny-ouro'.`",
    ),
    "keyword of a handle": (lambda: loop_dropout(BASE, P=0.3), "`P` is not an .* `loop_dropout`. Did you mean 'p'?"),
    "usual keyword of a handle": (lambda: loop_dropout(BASE, dropout=0.3), "Did you mean 'p'?"),
    "keyword of a block": (lambda: use_gates(BASE, gate=0), "`gate` is not an .* `use_gates`. Did you mean 'gates'?"),
    "keyword of a function": (lambda: load_adapter(BASE, adaptor="a"), "`adaptor` is not .* Did you mean 'adapter'?"),
    "list of results": (
        lambda: load_results(["z1", "d2"]),
        r"must be a path, got \['z1', 'd2'\]. Give several folders as separate arguments, as in `load_results\(",
    ),
    "load adapter": (lambda: load_adapter(BASE, 5), "`adapter` must be a path, got 5"),
    "rule": (lambda: register_rule(5), "`register_rule` takes a subclass of `GateRule`, got 5"),
    "looped": (lambda: register_looped(BASE, BASE), "`model_class` must be a class of .* got OuroFor"),
    "description": (lambda: register_looped(LlamaForCausalLM, 5), "`description` must be a subclass of .* got 5"),
    "abstract description": (
        lambda: register_looped(LlamaForCausalLM, LoopDescription),
        "`description` must define `recurrent_layers` and `running_loop`, which LoopDescription does not.",
    ),
    "loops": (lambda: check_loops(BASE, input_ids=[1, 2]), r"`input_ids` must be a tensor of a batch, got \[1, 2\]"),
    "folder": (lambda: LoopDropoutConfig(BASE), "`output_dir` must be a path, got OuroFor"),
    "truth": (lambda: LoopDropoutConfig(remove_padding="false"), "`remove_padding` must be true or false, got 'fal"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_public_functions_raise(mistake):
    call, message = MISTAKES[mistake]
    with user_error(message):
        call()


def test_adapter_is_not_saved_next_to_a_merged_model(make_sft, tmp_path):
    """transformers would apply the update twice."""
    trainer = make_sft(max_steps=1, output_dir=str(tmp_path))
    merge_and_save(trainer.model, tmp_path, make_tokenizer())
    with user_error("`output_dir` must not be the folder of a whole model, .* Save the adapter into another folder"):
        trainer.save_model()
    trainer.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter_config.json").exists()


def test_training_inside_of_a_block_raises(make_sft):
    trainer = make_sft(max_steps=1)
    with user_error("`output_dir` must be a path, got 5"):
        trainer.save_model(5)
    with torch.no_grad(), user_error("must run outside of `torch.no_grad.."):
        trainer.train()
    with use_gates(trainer.model, [1, 0, 0, 0]), user_error("must run outside of `use_gates`, because it draws"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_init_kwargs": [1]}, r"`model_init_kwargs` must be a mapping, got \[1\]"),
        ({"model_init_kwargs": {"foo": 1}}, "`foo` is not an argument of `from_pretrained`, nor a field"),
        ({"model_init_kwargs": {"dtype": "fp32"}}, "`dtype` must be .* got 'fp32'. Did you mean 'float32'"),
        ({"report_to": "tensorbord"}, "`report_to`: tensorbord is not supported, only .*tensorboard"),
        ({"activation_offloading": True}, "`activation_offloading` must be false on a CPU, .* got True"),
    ],
)
def test_wrong_loading_fields_raise(config, dataset, fields, message):
    with user_error(message):
        LoopDropoutSFTTrainer("tiny-ouro", config(**fields), train_dataset=dataset)


def test_wrong_reward_and_reference_raise(config, dataset, tokenizer):
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    with user_error("`reward_funcs` must be functions, .* got 5"):
        LoopDropoutGRPOTrainer(tiny_ouro(), 5, config(LoopDropoutGRPOConfig, num_generations=2), **data)
    with user_error("`ref_model` must be a model or its name, got 5"):
        LoopDropoutDPOTrainer(tiny_ouro(), 5, config(LoopDropoutDPOConfig), **data)


def test_attributes_of_a_trainer_apply_or_raise(make_sft):
    """Before, they had no effect, or the saved settings did not name them."""
    trainer = make_sft(max_steps=1)
    trainer.p = 0.75
    trainer.train()
    assert trainer.p == 0.75 and {*trainer.last_gates.sampled.unique().tolist()} <= {0.0, 4.0}
    assert trainer.looped.trained_with["p"] == 0.75
    with user_error(r"`p` must be a number in \[0, 1\), got 2"):
        trainer.p = 2
    with user_error("`p` has 2 values, but the model runs 4 loops"):
        trainer.p = [0.1, 0.2]
    assert trainer.p == trainer.rule.p == 0.75
    trainer.p = None  # the rule's own value
    trainer._prepare_gates()
    assert trainer.p == trainer.saved_settings()["p"] == 0.5
    with user_error("`callback` must be a `TrainerCallback`, got 'x'"):
        trainer.add_callback("x")
    on_arguments = "by `trainer.args.NAME = ...`"
    for name, fix in {
        "learning_rate": on_arguments,
        "max_length": "Make a new trainer",
        "rule_args": "`trainer.rule =",
    }.items():
        with user_error(f"`{name}` must be set in the arguments of the .*{fix.replace('NAME', name)}"):
            setattr(trainer, name, 1)
    with user_error("`q` is not an attribute of the trainer. Set `p` = 1 - q"):
        trainer.q = 0.5
    trainer.note = "an attribute of the user"
    for name, meant in {
        "rul": "rule",
        "P": "p",
        "pp": "p",
        "dropout": "p",
        "prob": "p",
        "num_lops": "num_loops",
    }.items():
        with user_error(f"`{name}` is not an attribute of the trainer. Did you mean '{meant}'?"):
            setattr(trainer, name, 1)
    for name, meant in {"lr": "learning_rate", "leraning_rate": "learning_rate", "seeed": "seed"}.items():
        with user_error(f"`{name}` is not an .* the field '{meant}' of its arguments. .*`trainer.args.{meant} = ...`"):
            setattr(trainer, name, 1)
    trainer.args.p = 0.25
    assert trainer.rule.p == trainer.p == 0.25 and "LoopDropout(p=0.25)" in repr(trainer)
    trainer.args.p = 2
    assert trainer.rule.p == 0.25  # `train` raises the error
    trainer.args.p = 0.25
    trainer.rule = "loop_dropout"  # its present name
    assert trainer.p == trainer.rule.p == 0.25
    with user_error("`rule` must be one of .*, got 'exactly_n'. Did you mean 'exactly_m'"):
        trainer.rule = "exactly_n"
    with user_error("`rule` must be a name, or a rule such as .*, got 5"):
        trainer.rule = 5
    trainer.rule = "coto"
    assert (trainer.args.rule, trainer.rule) == ("coto", make_rule("coto"))
    trainer.rule = "loop_dropout"  # which had another `p` before
    assert trainer.p == trainer.rule.p == 0.25
    trainer.args.p = 0.75
    trainer.rule = "lora"
    trainer.args.p = 0.1
    with user_error("^`p` must not be set, because the rule 'lora' has no such field.$"):
        trainer.train()
    trainer.args.p = None
    with user_error("^`p` must not be set, because the rule 'lora' has no such field.$"):
        trainer.p = 0.1
    assert trainer.p is None
    trainer.rule = "loop_dropout"
    assert trainer.p == trainer.rule.p == 0.75
    trainer.rule = "coto"
    trainer.args.rule = "independent"
    with user_error("`rule` must keep its value 'coto' .* Set another rule by `trainer.rule = ...`"):
        trainer.train()
    trainer.rule = ExactlyM(m=1)
    trainer.num_loops = 3
    trainer.model.to(torch.bfloat16)
    trainer.train()
    assert {weight.dtype for weight in trained_parameters(trainer.model).values()} == {torch.float32}
    assert (trainer.last_gates.sampled > 0).sum(dim=0).tolist() == [1] * 4
    facts = trainer.looped.trained_with
    assert (facts["rule"], facts["p"], facts["rule_args"]) == ("exactly_m", None, {"m": 1})
    with user_error("`m` must be an integer from 1 to 3, got 7"):
        trainer.rule = ExactlyM(m=7)
    assert trainer.rule == ExactlyM(m=1)
    assert (facts["num_loops"], len(trainer.last_gates.sampled)) == (3, 3)
    with user_error("`rule` must train the adapter as 'exactly_m' does, .* Make a new trainer"):
        trainer.rule = make_rule("adaptive")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_length", 8),
        ("per_device_train_batch_size", 1),
        ("bf16", True),
        ("gradient_checkpointing", True),
        ("label_smoothing_factor", 0.1),
    ],
)
def test_field_that_is_read_once_raises_after_a_change(make_sft, name, value):
    """A training would ignore it, and its recipe would name it."""
    trainer = make_sft(max_steps=1)
    setattr(trainer.args, name, value)
    with user_error(f"`{name}` must keep its value .* after the trainer was made, got {value}. Make a new trainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value", "is_of_trainer", "message"),
    [
        ("p", 0.25, True, "`p` must keep its value 0.5 in the training, got 0.25. .* the rule 'schedule'"),
        ("p", 0.25, False, "`p` must keep its value 0.5 in the training, got 0.25. .* the rule 'schedule'"),
        ("rule", "lora", True, "`rule` must keep its value 'loop_dropout' in the training, got 'lora'. Set it before"),
        ("depth_sampling", "uniform", False, "`depth_sampling` must keep its value 'fixed' .* Make a new trainer"),
    ],
)
@pytest.mark.parametrize("event", ["on_step_begin", "on_train_end"])
def test_rule_that_a_callback_changes_raises(make_sft, name, value, is_of_trainer, message, event):
    """The records would name it for all steps. After the error, it can be set."""

    class Change(TrainerCallback):
        def change(self, args, state, control, **kwargs):
            setattr(trainer if is_of_trainer else args, name, value)

    setattr(Change, event, Change.change)
    trainer = make_sft(callbacks=[Change()], max_steps=1)
    with user_error(message):
        trainer.train()
    if is_of_trainer:
        setattr(trainer, name, value)
        assert getattr(trainer.args, name) == value


def test_rule_of_another_trainer_of_the_same_arguments_is_named(config, dataset, tokenizer):
    """Trainers share their arguments, as in TRL. So one of them would train with the p that was set on the other."""
    args = config(max_steps=1)
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    first, second = (LoopDropoutSFTTrainer(tiny_ouro(num_hidden_layers=1), args, **data) for _ in range(2))
    own = "give each trainer a LoopDropoutConfig of its own"
    first.p = 0.75
    assert (first.rule.p, second.rule.p) == (0.75, 0.5)
    with user_error(
        f"`p` must keep its value 0.5 in this trainer, got 0.75, .* another trainer .*`trainer.p = .*{own}"
    ):
        second.train()
    first.rule = ExactlyM(m=1)
    with user_error(f"`rule` must keep its value 'loop_dropout' .* got 'exactly_m', .*`trainer.rule = ...`, or {own}"):
        second.train()
    second.p = 0.75  # keeps its rule
    second.train()
    assert {*second.last_gates.sampled.unique().tolist()} <= {0.0, 4.0} and second.looped.trained_with["p"] == 0.75
    with user_error("`rule` must keep its value 'exactly_m' in this trainer"):
        first.train()
    second.rule = "loop_dropout"
    first.rule = "exactly_m"
    assert copy.deepcopy(args).p is None and first.rule == ExactlyM(m=1)
    args.rule, args.rule_args, args.p = "loop_dropout", None, 0.25  # by hand, for all trainers
    assert second.rule.p == 0.25
    args.max_length = 64
    with user_error(f"`max_length` must keep .* Make a new trainer. If it was set for another trainer .*, {own}"):
        second.train()
    args.max_length = second._made_with["max_length"]
    with user_error("`rule` must keep its value 'exactly_m' after the trainer was made"):
        first.train()


def test_missing_data_of_evaluate_and_predict_is_named(config, dataset, tokenizer):
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), config(), train_dataset=dataset, processing_class=tokenizer)
    with user_error(
        r"`eval_dataset` must be given, as in `trainer.evaluate\(dataset\)`, because this trainer was made"
    ):
        trainer.evaluate()
    with user_error("`test_dataset` must be given"):
        trainer.predict(None)


TOKEN = "hf_averysecrettoken"


def test_trainer_and_its_arguments_are_short_and_have_no_token(config, make_sft):
    """A notebook shows and saves them."""
    args = config(hub_token=TOKEN, model_init_kwargs={"token": TOKEN, "dtype": "float32"}, eval_strategy="steps")
    text = repr(args)
    assert text.startswith("LoopDropoutConfig(") and "hub_token='***'" in text and "\n" not in text
    assert "max_steps=4" in text and "eval_strategy='steps'" in text and "adam_beta1" not in text
    assert "model_init_kwargs={'dtype': 'float32'}" in text
    shown = str(args)
    assert "\n    max_steps=4,\n" in shown and "\n    p=0.5,\n" in shown and "\n    loss_average='tokens',\n" in shown
    assert "adam_beta1" not in shown and TOKEN not in text + shown and len(shown.splitlines()) < 40
    assert shown.endswith("`to_dict()` has all fields.") and args.to_dict()["adam_beta1"] == 0.9
    trainer = make_sft(load_model("tiny-ouro"), max_steps=1)
    args = trainer.args
    args.weight_decay = 0.5
    assert "weight_decay=0.5" in repr(args)
    assert repr(trainer) == "LoopDropoutSFTTrainer of tiny-ouro with LoopDropout(p=0.5), not trained yet"
    assert trainer.last_gates is None
    trainer.train()
    assert repr(trainer).endswith(", step 1 of 1")


def test_data_that_is_set_later_is_prepared_or_named(train, dataset):
    trainer = train(max_steps=1)
    first = trainer.evaluate()["eval_loss"]
    trainer.eval_dataset = dataset.select(range(4))
    assert trainer.evaluate()["eval_loss"] == first
    with user_error("`train_dataset` must have the columns input_ids, .* got prompt, completion. Make a new trainer"):
        trainer.train_dataset = dataset
    for rows in ([*dataset], IterableDataset.from_generator(lambda: iter(dataset))):
        with user_error("`train_dataset` must have the columns input_ids, .* got prompt, completion. Make a new"):
            trainer.train_dataset = rows
    with user_error("`train_dataset` must be a `Dataset` or an `IterableDataset`, got 'rows.jsonl'"):
        trainer.train_dataset = "rows.jsonl"
    prepared, trainer.train_dataset = trainer.train_dataset, None
    with user_error("`train_dataset` must be a `Dataset` or an `IterableDataset`, got None. Make one of rows by"):
        trainer.train()
    trainer.train_dataset = prepared.select(range(8))
    for metrics, message in (
        (0.5, "`compute_metrics` must return a dictionary of numbers by their names, .*, got 0.5"),
        ({"own": torch.ones(2)}, "`compute_metrics` must return numbers by their names, got tensor.* for 'own'"),
    ):
        trainer.compute_metrics = lambda predictions, metrics=metrics: metrics
        with user_error(message):
            trainer.evaluate()
    trainer.compute_metrics = lambda predictions: {"own": torch.ones(1), "words": ["a"]}
    assert trainer.evaluate()["eval_own"] == 1


def test_changed_field_of_an_own_rule_raises(train):
    """The saved settings would have the old one. So does a rule whose edited cell runs again."""
    with patch.dict(RULES):

        def make_class(shift):
            @dataclasses.dataclass
            class Halved(GateRule):
                name = "halved"
                has_unit_mean = False
                factor: float = 0.5

                def sample(self, draw):
                    assert super().draws_gates
                    return torch.full((draw.num_loops, 1), self.factor + shift)

            return register_rule(Halved)

        Halved = make_class(0)
        trainer = train(rule="halved", max_steps=1)
        assert make_class(0) is not Halved  # an unchanged cell runs again
        trainer.train()
        make_class(0.25)
        with user_error("'halved' was registered again after this trainer was made, which has other code"):
            trainer.train()
        register_rule(Halved)
        trainer.rule.factor = 0.25
        with user_error("`trainer.rule` must stay {'factor': 0.5}, got {'factor': 0.25}. Set a new rule by .*Halved"):
            trainer.train()
        edited = register_rule(dataclasses.make_dataclass("Edited", [], bases=(Halved,), namespace={"name": "halved"}))
        with user_error("'halved' was registered again .*`trainer.rule = Edited"):
            trainer.train()
        trainer.rule = edited()
        trainer.train()


def test_base_weights_that_train_are_named(make_sft, log):
    trainer = make_sft(max_steps=1)
    trainer.model.get_base_model().lm_head.requires_grad_(True)
    trainer.train()
    assert "1 weight outside of the adapter train, too, such as base_model.model.lm_head.weight, but" in log.text
