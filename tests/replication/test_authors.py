"""`recipes/metamath_gsm/authors.yaml` reproduces the authors' public program, whose outputs are in golden/authors."""

import gzip
import itertools
import json
import re

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file
from torch.utils.data import Sampler
from transformers import AutoModelForCausalLM, TrainerCallback

from helpers.files import GOLDEN, ROOT, SAMPLES, load_script, write_lines
from helpers.tiny import trained_parameters
from helpers.trainers import Recorder
from loopdropout_trainer import LoopDropoutConfig, default_peft_config
from loopdropout_trainer.data import DataArguments, label_example, load_datasets
from loopdropout_trainer.evaluation import own_benchmark, scorers
from loopdropout_trainer.evaluation.loading import TASKS
from loopdropout_trainer.gates import LoopDropout
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import load_recipe, parse
from loopdropout_trainer.tokenizers import load_tokenizer


AUTHORS = GOLDEN / "authors"
RECIPE = ROOT / "recipes" / "metamath_gsm" / "authors.yaml"
REVISIONS = {
    "ByteDance/Ouro-1.4B": "574fa66cb8bf5abdc979642d01cf2b79b16bfab1",
    "meta-math/MetaMathQA": "aa4f34d3d2d3231299b5b03d9b3e5a20da45aa18",
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
}


def read_golden(name):
    return json.loads(gzip.decompress((AUTHORS / f"{name}.json.gz").read_bytes()))


def read_settings(*words):
    """The recipe's settings of the data and of the training."""
    sft = load_script("recipes/sft.py")
    unread = (sft.SFTArguments, sft.AdapterArguments, ModelArguments)
    return parse((DataArguments, LoopDropoutConfig), [str(RECIPE), *map(str, words)], unread_types=unread)


@pytest.fixture(params=["tokenizer_A", "tokenizer_B"])  # like Ouro's, and with tokens that span prompt and target
def prepared(request, tmp_path):
    """Training rows, the output of the authors' program, a function that prepares rows, and the tokenizer."""
    data, tokenizer = read_golden("data"), load_tokenizer(AUTHORS / request.param)
    expected = data[request.param[-1]]
    file = write_lines(tmp_path / "rows.jsonl", data["rows"])

    def prepare(*words, max_length=None):
        fields = ["--train_files", file, "--example_token_limit", expected["length_limit"]]
        args, _ = read_settings("--output_dir", tmp_path, *fields, *words)
        return load_datasets(args, tokenizer, max_length)["train"]

    return data["rows"], expected, prepare, tokenizer


def test_examples_tokens_and_labels_equal_authors(prepared):
    rows, expected, prepare, tokenizer = prepared
    number = len(expected["selected"])
    examples = prepare("--num_train_examples", number)
    assert examples["answer"] == [rows[index]["response"] for index in expected["selected"]]
    by_row = dict(zip(expected["selected"], examples, strict=True))
    assert len(expected["examples"]) == 60
    for example in expected["examples"]:
        labeled = label_example(by_row[example["id"]], tokenizer)
        assert (labeled["input_ids"], labeled["labels"]) == (example["ids"], example["labels"]), example["id"]
    first = prepare("--num_train_examples", 50)
    assert first["answer"] == [rows[index]["response"] for index in expected["first_50"]]
    too_long = expected["max_length_drops"]
    kept = prepare("--num_train_examples", number, max_length=expected["max_length_for_drops"])
    assert kept["answer"] == [rows[index]["response"] for index in expected["selected"] if index not in too_long]


@pytest.mark.parametrize("prepared", ["tokenizer_A"], indirect=True)
def test_token_limit_counts_the_target_prefix(prepared):
    rows, expected, prepare, _ = prepared
    at_the_limit = {rows[index]["response"] for index in expected["rows_at_the_limit_only_by_the_newline"]}
    without = prepare("--target_prefix", "", "--num_train_examples", len(expected["selected"]) + len(at_the_limit))
    with_prefix = prepare("--num_train_examples", len(expected["selected"]))
    assert set(without["answer"]) - set(with_prefix["answer"]) == at_the_limit


@pytest.mark.parametrize("number", [10, 313])
def test_learning_rates_equal_authors(tmp_path, number):
    _, args = read_settings("--output_dir", tmp_path, "--bf16", "false", "--max_steps", number)
    trainer = tiny_trainer(args)
    trainer.create_optimizer_and_scheduler(number)
    rates = [args.learning_rate * trainer.lr_scheduler.lr_lambdas[0](step) for step in range(number)]
    assert rates == pytest.approx(json.loads((AUTHORS / "lr.json").read_text())[str(number)]["lr"], rel=1e-12)


class GivenOrder(Sampler):
    """The rows of all epochs in a given order."""

    def __init__(self, order, num_rows):
        self.rows, self.num_rows = iter(order), num_rows

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        return itertools.islice(self.rows, self.num_rows)


def authors_adapter(names, file):
    """Return the tensors of the authors' adapter under our parameter names."""
    tensors = load_file(AUTHORS / file)
    names = {name.removesuffix(".default.weight").rpartition("model.layers")[2]: name for name in names}
    return {names[name.removeprefix("layers")]: tensor for name, tensor in tensors.items()}


def tiny_trainer(args, examples=None, order=(), masks=()):
    """Return a trainer of the authors' tiny model on examples in a given order, under given masks."""
    model = AutoModelForCausalLM.from_pretrained(AUTHORS / "model", dtype="float32")
    examples = examples or [[[5, 6, 7], [-100, 6, 7]]] * 8
    rows = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in examples])
    adapter, tokenizer = default_peft_config(model, r=4, lora_alpha=8), load_tokenizer(AUTHORS / "tokenizer_A")
    trainer = Recorder(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter)
    masks = iter(masks)

    class GivenMasks(LoopDropout):
        has_unit_mean = False  # so its masks are read by the training alone, in their order

        def sample(self, draw):
            return torch.tensor(next(masks))

    trainer.rule = GivenMasks(p=0.5)
    trainer._get_train_sampler = lambda *args: GivenOrder(order, len(rows))
    return trainer


def set_adapter(model, file):
    parameters = trained_parameters(model)
    for name, tensor in authors_adapter(parameters, file).items():
        parameters[name].data.copy_(tensor)


@pytest.mark.parametrize(
    ("average", "remove_padding"), [("micro_batches", True), ("micro_batches", False), ("tokens", True)]
)
def test_accumulated_gradient_equals_authors(tmp_path, average, remove_padding):
    step = read_golden("step")
    words = ["--bf16", "false", "--max_steps", 1, "--loss_average", average, "--dataloader_pin_memory", "false"]
    words += ["--remove_padding", remove_padding, "--logging_steps", 1]
    _, args = read_settings("--output_dir", tmp_path, *words)
    trainer = tiny_trainer(args, step["examples"], range(len(step["examples"])), step["masks"])
    set_adapter(trainer.model, "init.safetensors")
    trainer.train()
    assert len(trainer.seen) == 4
    gradients = trainer.seen[-1].gradients  # accumulated over the four micro-batches
    file = {"micro_batches": "grads.safetensors", "tokens": "grads_token_mean.safetensors"}[average]
    expected = authors_adapter(gradients, file)
    assert distance(gradients, expected) < 5e-6 * flat(expected).norm()
    loss = {"micro_batches": step["mean_of_means"], "tokens": step["token_mean"]}[average]
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert abs(step["mean_of_means"] - step["token_mean"]) > 5e-4


def flat(tensors):
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def distance(some, others):
    return (flat(some) - flat(others)).norm().item()


class StopAt(TrainerCallback):
    """Stops a run after some optimizer steps of its learning rate schedule."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.num_steps


@pytest.mark.parametrize("num_steps", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_training_equals_authors(tmp_path, num_steps):
    step, run = read_golden("step"), read_golden("train30")
    order = [row for micro_batch in run["order"] for row in micro_batch]
    words = ["--bf16", "false", "--learning_rate", 1e-3, "--num_train_epochs", 10, "--logging_steps", 1]
    words += ["--dataloader_pin_memory", "false", "--save_strategy", "no", "--gradient_checkpointing", "false"]
    _, args = read_settings("--output_dir", tmp_path, *words)
    trainer = tiny_trainer(args, step["examples"][:90], order, run["masks"])
    trainer.add_callback(StopAt(num_steps))
    set_adapter(trainer.model, "train30_init.safetensors")
    start = {name: p.detach().clone() for name, p in trained_parameters(trainer.model).items()}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert trainer.state.global_step == len(logs) == num_steps
    for ours, theirs in zip(logs, run["log"], strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
    if num_steps == 30:
        trained = {name: p.detach() for name, p in trained_parameters(trainer.model).items()}
        expected = authors_adapter(trained, "train30_adapter/adapter_model.safetensors")
        assert distance(trained, expected) < 5e-6 * distance(expected, start)


def test_scores_equal_authors():
    rows = read_golden("verdicts")
    assert len(rows) == 301
    for row in rows:
        completion, gold = row["completion"], row["answer"]
        if row["task"] == "gsm8k":
            results = [scorers.extract_number(completion)]
            score = scorers.score_metamath_gsm8k({"answer": f"#### {gold}"}, results)["acc"]
        else:
            answer = scorers.extract_text(completion)
            score = answer is not None and scorers.is_equiv(answer, gold)
        assert score == (row["verdict"] is True), row  # an exception in their program counts as false


def test_greedy_texts_equal_authors():
    expected = json.loads((AUTHORS / "gen.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(AUTHORS / "generation_model", dtype="float32")
    model = get_peft_model(model, default_peft_config(model, r=4, lora_alpha=8)).eval()
    set_adapter(model, "generation_adapter/adapter_model.safetensors")
    tokenizer = load_tokenizer(AUTHORS / "tokenizer_A")
    task = own_benchmark("problems", str(SAMPLES / "gsm8k_test.jsonl"), like="metamath_gsm8k")
    stop_strings = task.config.generation_kwargs["until"]
    assert generate_greedy(model, tokenizer, expected["prompts"], 48, 7, stop_strings) == expected["completions"]


def test_recipes_pin_the_revisions_of_authors():
    pinned = 0
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        if path.parent.name in ("accelerate", "sweeps", "studies", "tables"):
            continue
        recipe = load_recipe(path)
        for name, revision in (("model_name_or_path", "model_revision"), ("dataset_name", "dataset_revision")):
            assert recipe.get(revision) == REVISIONS.get(recipe.get(name)), path
            pinned += revision in recipe
        for task, revision in (recipe.get("benchmark_revisions") or {}).items():
            dataset = re.search(r"^dataset_path: (\S+)", (TASKS / f"{task}.yaml").read_text(), re.MULTILINE)
            assert revision == REVISIONS[dataset[1]], path
    assert pinned > 60
