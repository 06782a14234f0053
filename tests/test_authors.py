"""`recipes/metamath_gsm/authors.yaml` does what the authors' public program does, whose outputs are in golden/authors/."""

import gzip
import json

import pytest
import torch
from conftest import GOLDEN, ROOT, SAMPLES, Recorder, load_script, tiny_ouro, trained_parameters
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file
from torch.utils.data import Sampler
from transformers import AutoModelForCausalLM

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.data import load_data
from loopdropout_trainer.data.boundary import tokenise
from loopdropout_trainer.diagnostics.rows import RowArguments, load_rows_to_score
from loopdropout_trainer.evaluation import Subject, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, load_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark, HubRows, score_completions
from loopdropout_trainer.gates.loop_dropout import LoopDropout
from loopdropout_trainer.runs.run import Run
from loopdropout_trainer.settings.recipe import load_recipe
from loopdropout_trainer.settings.tokenizer import read_tokenizer


AUTHORS = GOLDEN / "authors"
RECIPE = ROOT / "recipes" / "metamath_gsm" / "authors.yaml"
REVISIONS = {
    "ByteDance/Ouro-1.4B": "574fa66cb8bf5abdc979642d01cf2b79b16bfab1",
    "meta-math/MetaMathQA": "aa4f34d3d2d3231299b5b03d9b3e5a20da45aa18",
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
}


def theirs(name):
    return json.loads(gzip.decompress((AUTHORS / f"{name}.json.gz").read_bytes()))


def settings(*more):
    """The recipe's dataclasses as `sft.py` reads them: of the data, and of the training."""
    parsed, _ = Run.read([str(RECIPE), *map(str, more)])
    return parsed[3], parsed[4]


@pytest.fixture(params=["tokenizer_A", "tokenizer_B"])  # as Ouro's; with tokens that span prompt and target
def prepared(request, tmp_path):
    """`prepared(max_length)`: rows of theirs, what they make of them, and what the recipe makes of them."""
    data, tokenizer = theirs("data"), read_tokenizer(AUTHORS / request.param)
    expected = data[request.param[-1]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data["rows"]))

    def make(*more, max_length=None):
        fields = ["--train_files", tmp_path / "rows.jsonl", "--example_token_limit", expected["length_limit"]]
        arguments, _ = settings("--output_dir", tmp_path, *fields, *more)
        return load_data(arguments, tokenizer, max_length).train

    return data["rows"], expected, make, tokenizer


def test_rows_their_order_tokens_and_labels_are_theirs(prepared):
    rows, expected, make, tokenizer = prepared
    number = len(expected["selected"])
    examples = make("--num_train_examples", number)
    assert examples["answer"] == [rows[index]["response"] for index in expected["selected"]]
    found = tokenise(examples[:], tokenizer)
    by_row = dict(zip(expected["selected"], zip(*found.values(), strict=True), strict=True))
    assert len(expected["examples"]) == 60
    for example in expected["examples"]:
        assert by_row[example["id"]] == (example["ids"], example["labels"]), example["id"]
    first = make("--num_train_examples", 50)
    assert first["answer"] == [rows[index]["response"] for index in expected["first_50"]]
    too_long = expected["max_length_drops"]
    kept = make("--num_train_examples", number, max_length=expected["max_length_for_drops"])
    assert kept["answer"] == [rows[index]["response"] for index in expected["selected"] if index not in too_long]


@pytest.mark.parametrize("prepared", ["tokenizer_A"], indirect=True)
def test_the_limit_counts_what_is_trained_on_before_the_response(prepared):
    rows, expected, make, _ = prepared
    at_the_limit = {rows[index]["response"] for index in expected["rows_at_the_limit_only_by_the_newline"]}
    without = make("--target_prefix", "", "--num_train_examples", len(expected["selected"]) + len(at_the_limit))
    with_it = make("--num_train_examples", len(expected["selected"]))
    assert set(without["answer"]) - set(with_it["answer"]) == at_the_limit
    everything = make("--example_token_limit", "null", "--num_train_examples", 1)
    assert len(everything) == 1
    assert len(make("--example_token_limit", "null", "--num_train_examples", 104)) == 104


def test_the_trainers_tokens_and_labels_are_theirs(prepared, config):
    _, expected, make, tokenizer = prepared
    examples = make("--num_train_examples", len(expected["selected"]))
    _, args = settings("--output_dir", config().output_dir, "--bf16", "false", "--max_steps", 1)
    trainer = Recorder(tiny_ouro(vocab_size=640), args, train_dataset=examples, processing_class=tokenizer)
    rows = dict(zip(expected["selected"], trainer.train_dataset, strict=True))
    for example in expected["examples"]:
        batch = trainer.data_collator([rows[example["id"]]])
        assert batch["input_ids"][0].tolist() == example["ids"] and batch["labels"][0].tolist() == example["labels"]


@pytest.mark.parametrize("number", [10, 100, 313])
def test_the_rate_of_each_step_is_theirs(tmp_path, number):
    _, args = settings("--output_dir", tmp_path, "--bf16", "false", "--max_steps", number)
    trainer = tiny_trainer(args)
    trainer.create_optimizer_and_scheduler(number)
    rates = []
    for _ in range(number):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx(json.loads((AUTHORS / "lr.json").read_text())[str(number)]["lr"], rel=1e-12)


class Masks(LoopDropout):
    """Loop Dropout with the masks of a list, one of [K, N] for each micro-batch."""

    def sample(self, draw):
        return torch.tensor(type(self).masks.pop(0))


class Ordered(Recorder):
    """Trains on the examples in a given order, under given masks."""

    def in_order(self, order, masks):
        rule = type("Given", (Masks,), {"masks": list(masks)})
        self.rule, self.order = rule(p=0.5), order
        return self

    def _get_train_sampler(self, *args):
        trainer = self

        class Given(Sampler):
            begun = 0

            def __len__(self):
                return len(trainer.train_dataset)

            def __iter__(self):
                first = self.begun * len(self)
                Given.begun += 1
                return iter(trainer.order[first : first + len(self)])

        return Given()


def their_adapter(model, file):
    """Their adapter's tensors by the names of ours."""
    tensors = load_file(AUTHORS / file)
    names = {name.removesuffix(".default.weight").rpartition("model.layers")[2]: name for name in model}
    return {names[name.removeprefix("layers")]: tensor for name, tensor in tensors.items()}


def tiny_trainer(args, examples=None, cls=Recorder):
    """A trainer of their tiny model, on their examples, or on something."""
    model = AutoModelForCausalLM.from_pretrained(AUTHORS / "model", dtype="float32")
    examples = examples or [[[5, 6, 7], [-100, 6, 7]]] * 8
    rows = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in examples])
    adapter, tokenizer = default_peft_config(model, r=4, lora_alpha=8), read_tokenizer(AUTHORS / "tokenizer_A")
    return cls(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter)


def set_adapter(trainer, file):
    parameters = trained_parameters(trainer.model)
    for name, tensor in their_adapter(parameters, file).items():
        parameters[name].data.copy_(tensor)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("average", ["micro_batches", "tokens"])
def test_the_gradient_of_an_accumulated_step_is_theirs(tmp_path, average, layout):
    step = theirs("step")
    more = ["--bf16", "false", "--max_steps", 1, "--loss_average", average, "--dataloader_pin_memory", "false"]
    more += ["--remove_padding", layout == "packed", "--logging_steps", 1]
    _, args = settings("--output_dir", tmp_path, *more)
    trainer = tiny_trainer(args, step["examples"], Ordered).in_order(list(range(len(step["examples"]))), step["masks"])
    set_adapter(trainer, "init.safetensors")
    trainer.train()
    assert len(trainer.seen) == 4
    gradients = trainer.seen[-1].gradients  # of all four, accumulated
    file = {"micro_batches": "grads.safetensors", "tokens": "grads_token_mean.safetensors"}[average]
    expected = their_adapter(gradients, file)
    assert distance(gradients, expected) < 5e-6 * norm(expected)
    loss = {"micro_batches": step["mean_of_means"], "tokens": step["token_mean"]}[average]
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)
    assert abs(step["mean_of_means"] - step["token_mean"]) > 5e-4


def norm(tensors):
    return torch.cat([tensor.flatten().double() for tensor in tensors.values()]).norm().item()


def distance(some, others):
    assert some.keys() == others.keys()
    return norm({name: some[name] - others[name] for name in some})


def test_thirty_steps_end_where_theirs_do(tmp_path):
    step, run = theirs("step"), theirs("train30")
    order = [row for micro_batch in run["order"] for row in micro_batch]
    more = ["--bf16", "false", "--learning_rate", 1e-3, "--num_train_epochs", 10, "--logging_steps", 1]
    _, args = settings("--output_dir", tmp_path, *more, "--dataloader_pin_memory", "false", "--save_strategy", "no")
    trainer = tiny_trainer(args, step["examples"][:90], Ordered).in_order(order, run["masks"])
    set_adapter(trainer, "train30_init.safetensors")
    start = {name: p.detach().clone() for name, p in trained_parameters(trainer.model).items()}
    trainer.train()
    assert trainer.state.global_step == 30
    ended = {name: p.detach() for name, p in trained_parameters(trainer.model).items()}
    expected = their_adapter(ended, "train30_adapter/adapter_model.safetensors")
    assert distance(ended, expected) < 5e-6 * distance(expected, start)
    for ours, their in zip(trainer.state.log_history, run["log"], strict=False):
        assert ours["loss"] == pytest.approx(their["loss"], abs=1e-4)
        assert ours["learning_rate"] == pytest.approx(their["learning_rate"], rel=1e-12)


def test_verdicts_are_theirs():
    metrics = {"gsm8k": "metamath_gsm8k", "math500": "metamath_math"}
    rows = theirs("verdicts")
    for row in rows:
        benchmark = GeneratedBenchmark("b", ["p"], [row["answer"]], metrics[row["task"]], 1)
        (judged,) = score_completions(benchmark, [row["completion"]]).predictions
        assert judged.correct == (row["verdict"] is True), row  # theirs ends with an exception on some: false
    assert len(rows) == 301


def test_greedy_texts_are_theirs():
    expected = json.loads((AUTHORS / "gen.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(AUTHORS / "generation_model", dtype="float32")
    adapted = get_peft_model(model, default_peft_config(model, r=4, lora_alpha=8))
    parameters = trained_parameters(adapted)
    for name, tensor in their_adapter(parameters, "generation_adapter/adapter_model.safetensors").items():
        parameters[name].data.copy_(tensor)
    tokenizer = read_tokenizer(AUTHORS / "tokenizer_A")
    tokenizer.pad_token = tokenizer.eos_token
    task, prompts = BENCHMARKS["metamath_gsm8k"], expected["prompts"]
    benchmark = GeneratedBenchmark("b", prompts, ["0"] * len(prompts), task.metric, 48, task.stop_strings)
    found = evaluate_subject(Subject(adapted.eval(), tokenizer, batch_size=7), benchmark, progress=False)
    assert [each.completion for each in found.predictions] == expected["completions"]


def test_recipes_of_their_model_and_data_are_pinned_to_their_revisions():
    pinned = 0
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        if path.parent.name in ("accelerate", "sweeps", "studies", "tables"):
            continue
        recipe = load_recipe(path)
        for name, revision in (("model_name_or_path", "model_revision"), ("dataset_name", "dataset_revision")):
            if recipe.get(name) in REVISIONS:
                assert recipe[revision] == REVISIONS[recipe[name]], path
                pinned += 1
            else:
                assert revision not in recipe, path
        for benchmark, revision in (recipe.get("benchmark_revisions") or {}).items():
            assert revision == REVISIONS[BENCHMARKS[benchmark].rows.path], path
    assert pinned > 60


def test_a_revision_goes_with_the_name_that_it_was_given_with(tmp_path):
    parsed, _ = Run.read([str(RECIPE), "--model_name_or_path", "other/model", "--output_dir", str(tmp_path)])
    assert parsed[1].model_revision == "main"
    parsed, _ = Run.read([str(RECIPE), "--dataset_name", "other/rows", "--output_dir", str(tmp_path)])
    assert parsed[3].dataset_revision is None
    parsed, _ = Run.read([str(RECIPE), "--model_name_or_path", "ByteDance/Ouro-1.4B", "--output_dir", str(tmp_path)])
    assert parsed[1].model_revision == REVISIONS["ByteDance/Ouro-1.4B"]


def test_a_benchmark_is_read_at_its_revision(monkeypatch, tokenizer):
    seen = []
    row = {"question": "1 + 1?", "answer": "#### 2"}
    monkeypatch.setattr(
        "loopdropout_trainer.evaluation.benchmarks.generated.load_dataset",
        lambda *given, **named: seen.append((given, named)) or [row],
    )
    evaluate = load_script("recipes/evaluate.py")
    with pytest.raises(ValueError, match="`benchmark_revisions` cannot name lm_eval:arc_easy"):
        task, revision = "lm_eval:arc_easy", '{"lm_eval:arc_easy": "x"}'
        evaluate.main(["--model_name_or_path", "tiny-ouro", "--benchmarks", task, "--benchmark_revisions", revision])
    assert seen == []
    asked = [(("openai/gsm8k", "main"), {"split": "test", "revision": "abc"})]
    load_benchmark("gsm8k", revision="abc")
    assert seen == asked and BENCHMARKS["gsm8k"].rows == HubRows("openai/gsm8k", "main")
    load_rows_to_score(RowArguments(rows="gsm8k", benchmark_revisions={"gsm8k": "abc"}), tokenizer)
    assert seen == asked * 2
    load_benchmark("gsm8k", SAMPLES / "gsm8k_test.jsonl", revision="abc")  # local files have none
    assert seen == asked * 2
