"""Recipes: how files and command lines become settings; the shipped ones are the paper's; plans are what trainers do."""

import dataclasses
import itertools
import re
from pathlib import Path
from random import Random

import pytest
import torch
import yaml
from accelerate.data_loader import prepare_data_loader
from conftest import ROOT, tiny_ouro
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.data.load import LoadedData
from loopdropout_trainer.data.rows import DataReport
from loopdropout_trainer.evaluation import BENCHMARKS
from loopdropout_trainer.models import OuroConfig
from loopdropout_trainer.runs.plan import plan_run
from loopdropout_trainer.runs.sweep import Sweep, SweepArguments
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH, AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import RecipeError, load_recipe, parse_recipe, settings_yaml


RECIPES = ROOT / "recipes"
TYPES = (ModelArguments, AdapterArguments, DataArguments, LoopDropoutConfig, RunArguments)
PAPER = ("metamath_gsm", "gsm8k", "tulu2", "huginn", "loopus")
OTHERS = ("nanbeige", "recurrent_llama", "recurrent_tinyllama", "recurrent_olmo")
TRAINING = [*RECIPES.glob("*.yaml"), *(path for name in (*PAPER, *OTHERS) for path in (RECIPES / name).glob("*.yaml"))]


def name_of(path):
    return str(path.relative_to(RECIPES).with_suffix(""))


def parse(path, *argv):
    (model, adapter, data, config, run), settings = parse_recipe(TYPES, [str(path), *argv])
    return model, adapter, data, config, run, settings


@pytest.mark.parametrize("path", sorted(TRAINING), ids=name_of)
def test_recipe_parses_and_names_itself(path):
    model, adapter, data, config, run, settings = parse(path, "--use_cpu", "true")
    assert f"accelerate launch recipes/sft.py recipes/{name_of(path)}.yaml" in path.read_text().split("\n\n")[0]
    assert config.output_dir == f"outputs/{name_of(path)}"  # no two runs share a folder
    assert set(run.benchmarks or ()) <= {*BENCHMARKS, "development"}
    if name_of(path) == "quickstart":
        return
    family = name_of(path).split("/")[0]
    assert config.gradient_checkpointing == (family in ("tulu2", "huginn", "loopus", *OTHERS))

    # Table "Fine-tuning recipes" and Appendix "Hyperparameters"
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.9, 0.999, 0.0, 1.0)
    assert config.optim.value == "adamw_torch_fused"
    assert (config.lr_scheduler_type, config.lr_scheduler_kwargs) == ("cosine_with_min_lr", {"min_lr_rate": 0.1})
    assert (config.bf16, model.dtype, model.attn_implementation) == (True, "bfloat16", "sdpa")
    assert config.per_device_train_batch_size == 8
    seed = {"huginn": 301, "loopus": 501}.get(family, 101)
    assert (config.seed, config.data_seed, config.gate_seed) == (seed, None, None)
    assert config.eval_strategy == "no" and not config.load_best_model_at_end  # the final checkpoint
    assert (adapter.lora_alpha / adapter.lora_r, adapter.lora_target_modules) == (2, None)
    assert adapter.lora_r == 16 or family not in OTHERS  # `test_families.py` counts what that trains
    accumulation, epochs, length, warmup, rows = {
        "metamath_gsm": (4, 1, 1024, 0.03, 100_000),
        "gsm8k": (1, 2, 512, 0.05, 6_973),
        "tulu2": (16, 1, 2048, 0.03, 100_000),
    }[data.preparation]
    assert config.gradient_accumulation_steps == accumulation
    assert (config.num_train_epochs, config.max_length, config.warmup_steps) == (epochs, length, warmup)
    assert data.num_train_examples == rows
    assert config.assistant_only_loss == (data.preparation == "tulu2")
    assert config.max_steps == -1 and not config.packing


SWEEPS = sorted([*(RECIPES / "sweeps").glob("*.yaml"), *(RECIPES / "studies").glob("*.yaml")])


@pytest.mark.parametrize("path", SWEEPS, ids=name_of)
def test_sweep_recipe_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (arguments,), _ = parse_recipe([SweepArguments], [str(path)])
    head = path.read_text().split("\n\n")[0]
    assert f"python recipes/sweep.py recipes/{name_of(path)}.yaml" in head and "# Costs: " in head
    # A sweep of its own has a folder of its own; one that adds seeds or rates to another says so and has the other's.
    shared = Path(arguments.output_dir).name
    assert shared == path.stem or f"in the folder of {shared}.yaml" in " ".join(head.split("\n# ")), path
    assert Path(arguments.output_dir).parent == Path("outputs") / path.parent.name
    sweep = Sweep(arguments)  # reads the recipe of every method
    trainings = len(set().union(*map(sweep.trainings, sweep.parts.values())))
    assert f"{trainings} trainings" in head
    preparation = load_recipe(arguments.recipe)["preparation"]
    if preparation == "arithmetic":
        return
    rates = {
        "metamath_gsm": [1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4],
        "gsm8k": [3e-5, 1e-4, 2e-4, 3e-4, 6e-4],
        "tulu2": [1e-4],
    }[preparation]
    for part in sweep.parts.values():
        assert part.learning_rates == rates or part.full_grid and set(part.learning_rates) <= set(rates)


def test_learning_rates_of_the_paper():
    recipes = {name_of(path): load_recipe(path) for path in TRAINING}
    expected = {
        2.5e-5: "rank_128_lora",
        1e-4: "rank_4 rank_4_lora rank_64_lora rank_128 ouro_2.6b",
        2e-4: "rank_64 ouro_2.6b_lora independent_rank_4 independent_rank_4_masked independent_rank_16 "
        "independent_rank_16_masked",
    }
    for rate, names in expected.items():
        assert {recipes[f"metamath_gsm/{name}"]["learning_rate"] for name in names.split()} == {rate}
    assert [recipes[name]["learning_rate"] for name in PAPER] == [5e-5, 1e-4, 1e-4, 1e-4, 1e-4]
    depths = load_recipe(RECIPES / "sweeps/gsm8k_depths.yaml")["methods"]
    assert [depths[f"depth_{loops}"]["num_loops"] for loops in (4, 6, 8)] == [4, 6, 8]
    families = {name: (recipes[name]["num_loops"], recipes[name]["p"]) for name in ("huginn", "loopus")}
    assert families == {"huginn": (32, 0.5), "loopus": (8, 0.3)}
    assert recipes["nanbeige"]["p"] ** 2 < 0.05  # of examples without an active loop


def rows_of(number, num_tokens):
    report = DataReport(lengths=[num_tokens] * number)
    return LoadedData(Dataset.from_dict({"text": ["x"] * number}), None, report, "rows")


FULL_SIZE = [("metamath_gsm", 100_000, 3125), ("gsm8k", 6973, 1744), ("tulu2", 98_415, 769)]


@pytest.mark.parametrize(("recipe", "examples", "steps"), FULL_SIZE)
def test_full_size_steps_and_parameters(recipe, examples, steps, monkeypatch):
    config = parse(RECIPES / f"{recipe}.yaml", "--use_cpu", "true")[3]
    data = rows_of(examples, 250)
    ouro = OuroConfig(num_hidden_layers=24)
    plan = plan_run(ouro, data, config, default_peft_config(ouro), "Ouro-1.4B")
    assert plan.steps == steps
    assert (plan.parameters, plan.trainable_parameters, plan.num_loops) == (1_434_652_673, 15_138_816, 4)
    for word in (f"{steps:,}", "15,138,816", "K = 4", "loop_dropout, p = 0.5"):
        assert word in str(plan)
    assert "parameters, K" in str(plan)
    in_4_bits = dataclasses.replace(config, model_init_kwargs={"quantization_config": {"load_in_4bit": True}})
    assert "parameters in 4 bits, K" in str(plan_run(ouro, data, in_4_bits, default_peft_config(ouro), "Ouro"))
    monkeypatch.setattr(LoopDropoutConfig, "world_size", 2)
    fields = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "num_train_epochs": 1}
    args = dataclasses.replace(config, **fields)
    assert [args.num_steps(number)[0] for number in (100_000, 33)] == [3125, 2]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_the_batches_that_accelerate_deals_to_each_process(drop_last, split, config, monkeypatch):
    for processes, rows, batch in itertools.product((1, 2, 3), (1, 5, 6, 7, 11, 12, 13, 24), (2, 3, 6)):
        if split and batch % processes:
            continue  # which accelerate refuses
        monkeypatch.setattr(LoopDropoutConfig, "world_size", processes)
        fields = {"dataloader_drop_last": drop_last, "accelerator_config": {"split_batches": split}}
        args = config(per_device_train_batch_size=batch, **fields)
        loader = DataLoader(range(rows), batch_size=batch, drop_last=drop_last)
        dealt = prepare_data_loader(loader, None, processes, 0, split, put_on_device=False)
        assert args.micro_batches(rows) == len(dealt), (processes, rows, batch)


BATCHES = [{"gradient_accumulation_steps": 3}, {"num_train_epochs": 1.4, "gradient_accumulation_steps": 2}]
BATCHES += [{"dataloader_drop_last": True, "per_device_train_batch_size": 10}, {"packing": True, "max_length": 32}]


@pytest.mark.parametrize("fields", [*BATCHES, {"per_device_train_batch_size": 50}, {"max_steps": 3}], ids=str)
def test_plan_is_what_the_trainer_does(fields, config, dataset, tokenizer):
    args = config(**{"max_steps": -1, "num_train_epochs": 2, **fields})
    model = tiny_ouro()
    lengths = [len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in dataset]
    report = DataReport(lengths=lengths)
    plan = plan_run(model.config, LoadedData(dataset, None, report, ""), args, default_peft_config(model), "tiny")
    trainer = LoopDropoutSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    assert plan.trainable_parameters == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    assert f" with {tokens:,} tokens," in str(plan)
    stop = TrainerCallback()
    stop.on_step_end = lambda args, state, control, **given: setattr(control, "should_training_stop", True)
    trainer.add_callback(stop)
    trainer.train()
    assert trainer.state.max_steps == plan.steps


def test_the_readme_lists_every_recipe_and_no_other():
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?:recipes/)?([\w./-]+\.yaml)`", text))
    paths = {*TRAINING, *(RECIPES / "sweeps").glob("*.yaml")}
    assert {str(path.relative_to(RECIPES)) for path in paths} <= listed
    assert all((RECIPES / name).is_file() for name in listed)


# Recipes as files: strict, with errors that name the field

BASE = "model_name_or_path: some/model\ndataset_name: d\noutput_dir: out\nuse_cpu: true\nreport_to: none\n"


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text, name=...)`: write a recipe and return its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    return write


def test_another_rule_keeps_what_it_has_as_well(recipe):
    path = recipe(BASE + "p: 0.3\n")
    p_of = lambda path, *words: parse(path, "--rule", *words)[3].p
    assert [p_of(path, rule) for rule in ("loop_dropout", "lora", "unscaled")] == [0.3, None, 0.3]
    path = recipe(BASE + "p: 0.0\nrule: independent\n")  # LoRA is not trained under another name
    assert [p_of(path, *words.split()) for words in ("dose_control", "independent", "dose_control --p 0")] == [
        0.5,
        0,
        0,
    ]
    path = recipe(BASE + "p: 0.3\nrule: parallel_noise\nrule_args: {c: 2.0}\n")
    assert not parse(path, "--rule", "loop_dropout")[3].rule_args
    assert parse(path, "--rule", "weight_noise")[3].rule_args == {"c": 2.0}
    assert parse(path, "--learning_rate", "1e-3")[3].rule_args == {"c": 2.0}


def test_the_command_line_overrides_the_recipe(recipe):
    text = "learning_rate: 1e-4\np: [0.1, 0.2]\nlora_r: 4\nsave_strategy: no\nlr_scheduler_kwargs: {a: 1e-3}\n"
    path = recipe(f"{BASE}{text}resume_from_checkpoint: true\n")
    words = "--learning_rate 2e-4 --rule unscaled --merge --compare_with lora loop_dropout"
    model, adapter, _, config, run, settings = parse(path, *words.split())
    assert (config.learning_rate, config.rule, config.p) == (2e-4, "unscaled", [0.1, 0.2])
    assert (config.save_strategy, config.lr_scheduler_kwargs) == ("no", {"a": 1e-3})
    assert (adapter.lora_r, run.merge, run.compare_with) == (4, True, ["lora", "loop_dropout"])
    assert (model.model_name_or_path, settings["learning_rate"]) == ("some/model", 2e-4)
    assert config.resume_from_checkpoint == "true"  # a field of several types takes each
    assert [parse(path, "--p", *p.split())[3].p for p in ("0.3", "0.3 0.4")] == [0.3, [0.3, 0.4]]
    tiny = ModelArguments("tiny-ouro")
    assert (tiny.model_name_or_path, tiny.base_name) == (str(TINY_OURO_PATH), "tiny_ouro")


def test_a_recipe_builds_on_another_and_states_what_differs(recipe):
    recipe(BASE + "seed: 1\nlora_r: 4\n", "base.yaml")
    recipe("extends: ../base.yaml\nseed: 2\n", "variants/second.yaml")
    path = recipe("extends: second.yaml\nlora_r: 8\n", "variants/third.yaml")
    assert load_recipe(path) == {**yaml.safe_load(BASE), "seed": 2, "lora_r": 8}


def test_fields_of_other_scripts_may_be_passed_over_but_mistakes_not(recipe):
    small = dataclasses.make_dataclass("Small", [("seed", int, 0)])
    assert parse_recipe((small,), [str(recipe(BASE + "seed: 3\n"))], unread_types=TYPES)[0] == [small(3)]
    with pytest.raises(RecipeError, match="`sede`; did you mean `seed`"):
        parse_recipe((small,), [str(recipe(BASE + "sede: 3\n"))], unread_types=TYPES)


def test_saved_settings_repeat_the_run_without_secrets_and_read_back_as_they_were(recipe):
    path = recipe(BASE + "hub_token: hf_secret\nmodel_init_kwargs: {token: hf_secret}\nlearning_rate: 1e-4\n")
    text = settings_yaml(parse(path, "--p", "0.3")[-1])
    assert "hf_secret" not in text
    again = parse(recipe(text))[3]
    assert (again.p, again.learning_rate) == (0.3, 1e-4)


LOOK_ALIKES = """
1e3 1e-4 +1E5 86e1234 1.5 1. .5 -0 007 0x1F 0o17 1_000 12:30 190:20:30.15 2026-11-23 2026-11-23T10:00:00Z null Null ~ true
False yes no on off y N .inf -.Inf .nan nan inf << = - ? : | > ! !!int * & # % @ ` , [ ] { } " ' --- ...
"""
SPACED = [
    "",
    " ",
    "\n",
    "a\n",
    "null\n",
    " 1",
    "1 ",
    "a: 1",
    "- a",
    "a # b",
    "2026-11-23 10:00:00",
    "é",
    "a\tb",
    "\U0001f600",
]
BREAKS = ["\x85", "a\u2028b", "1\u2029", "\ufeff", "a\rb"]
NUMBERS = [1e3, 1e-4, 1e16, 1e22, 5e-324, -0.0, 0.1, 1.0, float("inf"), float("nan"), 0, -5, 10**30, True, False, None]


def test_what_is_written_reads_back_as_it_was(recipe):
    for value in (*LOOK_ALIKES.split(), *SPACED, *BREAKS, *NUMBERS):
        settings = {"field": value, "items": [value], "fields": {str(value): value}}
        read = load_recipe(recipe(settings_yaml(settings)))
        assert repr(read) == repr(settings)  # the type and a zero's sign, too


def test_random_text_reads_back_as_it_was(recipe):
    draw, alphabet = Random(0), "0123456789eE+-._:xonyfT~<= \n'\"#é\x85\u2028,[]{}&*!|>%@`"
    texts = ["".join(draw.choices(alphabet, k=draw.randint(1, 6))) for _ in range(3000)]
    texts += [repr(draw.uniform(-1, 1) * 10.0 ** draw.randint(-320, 300)) for _ in range(500)]
    numbers = [float(text) for text in texts[-500:]]
    settings = {"texts": texts, "numbers": numbers, "same": numbers}  # one list twice: no alias is written
    assert load_recipe(recipe(settings_yaml(settings))) == settings


def test_help_lists_what_this_package_adds_and_help_all_everything(capsys, monkeypatch):
    listed = {}
    for option in ("--help", "--help_all"):
        monkeypatch.setattr("sys.argv", ["sft.py", option])
        with pytest.raises(SystemExit, match="0"):
            parse_recipe(TYPES, description="Trains.")
        listed[option] = capsys.readouterr().out
    assert "Rank r of the shared update. (default: 16)" in " ".join(listed["--help"].split())
    names = {cls: {field.name for field in dataclasses.fields(cls) if field.init} for cls in TYPES}
    ours = set().union(*(names[cls] for cls in TYPES if cls is not LoopDropoutConfig))
    shown = ours | {"rule", "p", "skip_frozen_loops", "loop_loss", "learning_rate", "output_dir"}
    assert all(f"  --{name} " in listed["--help"] for name in shown)
    assert "--torch_compile_mode" not in listed["--help"]
    assert all(f"  --{name} " in listed["--help_all"] for name in set().union(*names.values()))


def test_a_recipe_sets_the_number_of_threads(recipe):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        parse_recipe([ModelArguments], [str(recipe("model_name_or_path: tiny-ouro\nnum_threads: 1\n"))])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert load_recipe("recipes/quickstart.yaml")["num_threads"] == 1
