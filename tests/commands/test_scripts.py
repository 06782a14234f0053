"""The training scripts: what they train, measure, save and print, how they resume, and how they explain mistakes."""

import contextlib
import io
import json
import logging
import platform
import re
import shutil
import signal
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer

from helpers.errors import user_error
from helpers.files import ROOT, TINY_OURO_PATH, load_script, read_lines, write_lines
from helpers.results import expected_results
from helpers.tiny import TINY, tiny_hrm, tiny_ouro
from loopdropout_trainer import default_peft_config, load_model
from loopdropout_trainer.data.files import check_files
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.evaluation import LoopedLM
from loopdropout_trainer.files import describe_version
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.jobs import base_results, job
from loopdropout_trainer.jobs.plan import describe_length, print_next_commands
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.jobs.starts import measure_sizes
from loopdropout_trainer.looped import attach_looped_model, find_looped_model
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.tables import accuracy_numbers
from loopdropout_trainer.results.run_files import (
    is_finished,
    measurement_folder,
    read_own_results,
    read_recipe,
    read_results,
    read_run,
    read_samples,
    write_results,
    write_run,
)
from loopdropout_trainer.saving.checkpoints import load_state
from loopdropout_trainer.saving.integrity import record
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, ScriptArguments
from loopdropout_trainer.settings.recipe import dump_recipe, load_recipe
from loopdropout_trainer.training.config import LoopDropoutConfig
from loopdropout_trainer.training.sft import LoopDropoutSFTTrainer
from loopdropout_trainer.training.stopping import NonFiniteGradientError, TrainingInterrupted


SCRIPTS = {name: load_script(f"recipes/{name}.py") for name in ("sft", "dpo", "grpo")}
TOKEN = "hf_averysecrettokenofsomeone"
SHORT = (
    "--max_steps 6 --num_train_examples 32 --num_eval_examples 8 --benchmark_limit 2 --save_steps 2 --logging_steps 1"
)
SMALL = "--num_train_examples 8 --per_device_train_batch_size 4"
TRAINING = (
    f"quickstart.yaml {SHORT} {SMALL} --lora_dropout 0.1 --diagnose_task arithmetic_easy_test --hub_token {TOKEN}"
)
WORDS = f"{TRAINING} --eval_num_loops 2 4"
ONE_TASK = (
    "--evaluate_base false --single_loop_accuracy false --eval_num_loops null --merge false --single_loop_batches 0 "
)
ONE_TASK += "--diagnose_task null --num_sample_completions 0"
FEW_MEASUREMENTS = f"{ONE_TASK} --benchmarks null"


def run(*words, script="sft"):
    """Run a script with words in this process and return the text that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        SCRIPTS[script].main(" ".join(map(str, words)).split())
    return out.getvalue()


def dry_run(*words):
    """Return the plan that a dry run prints before it ends with an error, and the text of the error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(UserError) as error:
        SCRIPTS["sft"].main(" ".join(map(str, [*words, "--dry_run true"])).split())
    return out.getvalue(), str(error.value)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder of a short quickstart, and the text that it printed."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    return folder, run(WORDS, "--output_dir", folder)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Only the short quickstart draws its figure, and no report does."""
    monkeypatch.setattr("loopdropout_trainer.jobs.shown_results.find_spec", lambda name: None)
    monkeypatch.setattr("loopdropout_trainer.reports.plots.save_figure", lambda plot, path: None)


@pytest.fixture
def copy(quickstart, tmp_path):
    """A copy of that folder."""
    return Path(shutil.copytree(quickstart[0], tmp_path / "copy"))


@pytest.fixture
def no_steps(monkeypatch):
    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", lambda *args: pytest.fail("a step is taken"))


def adapter(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def tables(text):
    return text[text.index("Training at") : text.index("Everything is in")]


def test_sft_says_what_loss_reductions_are_measured_on(quickstart):
    titles = re.findall(r"(?m)^Loss reduction on .*", tables(quickstart[1]))
    of_task = r"reference solutions of arithmetic_easy_test \([\d,]+ tokens\), adapter in one loop only, in %"
    of_held_out = r"held-out examples \([\d,]+ tokens\), adapter in one loop only, in %"
    assert len(titles) == 2 and all(map(re.search, (of_task, of_held_out), titles))


def test_sft_writes_the_expected_results(quickstart):
    names = ("method", "seed", "num_loops", "gates", "task", "metric", "loop")
    for folder in (quickstart[0], quickstart[0] / "lora"):
        rows = [row for row in read_results(folder) if row["folder"] == str(folder)]
        written, expected = [
            {tuple(map(row.get, names)) for row in own} for own in (rows, expected_results(read_recipe(folder)))
        ]
        assert {row[-2] for row in written ^ expected} == {"peak_memory_gb"}
        assert is_finished(folder) and {row["step"] for row in rows} == {6, None}
        assert read_run(folder)["loss_batches"] == 2


def test_sft_saves_recipe_card_and_merged_model(quickstart):
    files = {path.relative_to(quickstart[0]).as_posix(): path for path in quickstart[0].rglob("*")}
    written = "README.md recipe.yaml results.jsonl run.json adapter_config.json merged/config.json figure.png"
    assert (
        files.keys() >= {*written.split(), "samples_arithmetic_easy_test_K4_unit.jsonl"} and "lora/merged" not in files
    )
    card = files["merged/README.md"].read_text()
    assert "rule: loop_dropout" in card and "arithmetic_easy_test" in card


def test_sft_prints_plan_and_tables(quickstart):
    folder, text = quickstart
    lines = [f"trainings   Loop Dropout (p = 0.5) in {folder}\n            Input dropout in {folder}/lora\n"]
    lines += ["model       tiny-ouro, K = 4 loops\n", "device      the CPU, as `use_cpu` says\n", "completion: "]
    lines += ["6 steps, 4 examples per step", "examples    8, 8 held out, 6 optimizer steps, 3 epochs\n"]
    lines += ["afterwards  evaluate arithmetic_easy_test, at most 2 problems each\n", f"  loopdropout chat {folder} "]
    lines += ["Accuracy on arithmetic_easy_test with K loops at inference, in %\nmethod", f"Everything is in {folder}"]
    assert [line for line in (*lines, "loop 1  loop 2  loop 3  loop 4  all loops") if line not in text] == []
    for method in ("Loop Dropout", "Input dropout"):
        assert re.search(rf"{method}, 0:\d\d:\d\d left(, evaluations not counted)?: .*'loss'", text)


def test_plan_counts_parameters_and_estimates_memory_for_gpus_only(quickstart, tmp_path):
    """The number of parameters is the trainer's. A recipe that may run on a GPU has an estimate of its memory."""
    folder, text = quickstart
    (number,) = {row["value"] for row in read_results(folder) if row["metric"] == "trainable_parameters"}
    modules = "all linear projections of the looped layers"
    assert f"adapter     new, rank 16, alpha 32, on {modules}, {number:,.0f} parameters\n" in text
    assert "memory " not in text
    sizes = [
        path.stat().st_size for path in folder.glob("**/adapter_model.safetensors") if "checkpoint" not in str(path)
    ]
    assert len(sizes) == 2 and sum(sizes) == pytest.approx(8 * number, rel=0.02)
    assert f"disk        about {8 * number / 1e6:.1f} MB for adapters" in text
    plan = run(WORDS, "--lora_target_modules q_proj v_proj --lora_r 8 --dry_run true --output_dir", tmp_path)
    assert " is above " not in text + plan
    assert "adapter     new, rank 8, alpha 32, on q_proj, v_proj, 4,096 parameters\n" in plan
    for words, is_estimated in {"--bf16 true": True, "--bf16 false": False}.items():
        plan = run(WORDS, "--use_cpu false", words, "--dry_run true --output_dir", tmp_path)
        assert ("memory      at most about" in plan) is is_estimated
        assert torch.cuda.is_available() or "device      the CPU, no GPU found\n" in plan


def test_plan_counts_the_tokens_of_the_loaded_data(quickstart):
    folder, text = quickstart
    (number,) = re.findall(r"^tokens      about ([\d,]+) in each training, [\d,]+ in 2 trainings$", text, re.MULTILINE)
    rows = [row for row in read_results(folder) if row["metric"] == "num_tokens"]
    assert {row["value"] for row in rows} == {float(number.replace(",", ""))}
    way = "`loopdropout sft` with `--max_steps 20 --output_dir outputs/try` measures it (`step_seconds` in results.jsonl)"
    assert f"time        not computed, because `use_cpu` is set\n            {way}\n" in text


@pytest.mark.parametrize("model", ["tiny-ouro", "huginn", "loopus", "hrm_text"])
def test_plan_counts_parameters_of_chosen_modules(model, tmp_path):
    """The number is the trainer's, and the model's weights are not read."""
    folder, targets = model, ["q_proj", "down_proj"]
    make = {**TINY, "hrm_text": tiny_hrm}.get(model)
    if model != "tiny-ouro":
        folder, made = tmp_path / "base", make()
        made.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        made = attach_looped_model(made)
        targets = sorted({name.rpartition(".")[2] for name in made.recurrent_linears()})[:2]
    base = ModelArguments(model_name_or_path=str(folder))
    lora = AdapterArguments(lora_r=4, lora_target_modules=targets)
    whole = load_model("tiny-ouro") if model == "tiny-ouro" else make()
    attach_looped_model(whole)
    adapted = get_peft_model(whole, default_peft_config(whole, lora.peft_config))
    linears = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    smallest = min(min(linear.in_features, linear.out_features) for linear in linears)
    sizes = measure_sizes(base, lora)
    assert (sizes.num_parameters, sizes.smallest_projection) == (adapted.get_nb_trainable_parameters()[0], smallest)
    looped = find_looped_model(whole)
    assert sizes.num_loops == looped.num_loops
    assert sizes.one_depth_type == ("hrm_text" if model == "hrm_text" else None)
    if model == "tiny-ouro":
        high = f"Rank {smallest + 1} is above {smallest}, the smallest dimension of these layers, "
        for words in ("", "--lora_target_modules q_proj down_proj"):
            assert high in run(WORDS, f"--lora_r {smallest + 1} {words} --dry_run true --output_dir", tmp_path / "out")


def test_wrong_modules_end_a_dry_run_before_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "loopdropout_trainer.jobs.training_data.load_examples", lambda *args: pytest.fail("the data are prepared")
    )
    for modules, message in {
        "q_prj": "must be modules of the model, such as down_proj, .*, got q_prj. Did you mean 'q_proj'?",
        "q_proj v_prj": "must be modules of the model, such as down_proj, .*, got v_prj. Did you mean 'v_proj'?",
        "lm_head": "`lm_head` is not a linear projection of the recurrent block",
    }.items():
        with user_error(message):
            run(TRAINING, "--dry_run true --lora_target_modules", modules, "--output_dir", tmp_path)


def test_shrunken_number_of_held_out_examples_is_explained(tmp_path):
    plan = run(WORDS, "--max_length 40 --num_eval_examples 40 --dry_run true --output_dir", tmp_path)
    assert re.search(r" held out of the 40 asked for, because the others have more than 40 tokens, 6 optimizer", plan)


@pytest.mark.parametrize("is_offline", [True, False])
def test_plan_without_network_has_all_that_needs_none(tmp_path, monkeypatch, caplog, is_offline):
    """As the plan of a sweep, whether the user has said that there is no network or not."""
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    plan = run("gsm8k.yaml --use_cpu true --dry_run true --output_dir", tmp_path)
    assert "\nexamples    not checked, because the Hub cannot be reached\n" in plan and "Retrying" not in caplog.text
    assert "training    2 epochs (at most 1,744 steps), 8 examples per step, learning rate 0.0001, seed 101\n" in plan
    assert "\npaper       12 to 14 minutes on an H100, H200 or B200, as the paper says (section Compute)\n" in plan
    assert "data        gsm8k openai/gsm8k\n" in plan and "device " in plan and "afterwards " in plan
    with user_error("There is no folder tiny-oruo, and a model on the Hub has .* Did you mean 'tiny-ouro'?"):
        run("gsm8k.yaml --use_cpu true --dry_run true --model_name_or_path tiny-oruo --output_dir", tmp_path)
    if is_offline:  # else the client of the Hub tries for half a minute
        plan, error = dry_run("gsm8k.yaml --use_cpu true --preview 0 --output_dir", tmp_path)
        assert "The model ByteDance/Ouro-1.4B cannot be loaded" in error and "\ntraining    2 epochs" in plan


def test_plan_reads_a_downloaded_model_without_network(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    folder = tmp_path / "hub/models--user--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a" * 40)
    shutil.copytree(TINY_OURO_PATH, folder / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    words = ["--model_name_or_path user/tiny --dry_run true --output_dir", tmp_path / "run"]
    plan = run("--preparation arithmetic --num_train_examples 8 --use_cpu true", *words)
    assert re.search(r"\nexamples    8, \d+ held out", plan) and "Retrying" not in caplog.text


def test_sft_never_saves_tokens(quickstart):
    folder, text = quickstart
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(contents) > 40 and not any(TOKEN.encode() in content for content in [text.encode(), *contents])


def test_finished_run_is_made_longer(copy):
    words = [copy / "recipe.yaml", "--output_dir", copy, ONE_TASK, "--compare_with", "null", "--max_steps", 8]
    with user_error("`max_steps` changed from 6 to 8.*resume_from_checkpoint true"):
        run(*words)
    text = run(*words, "--resume_from_checkpoint", "true")
    assert f"continues   {copy / 'checkpoint-6'}" in text
    merged = copy / "merged"
    assert f"\n{merged} holds the merged model of step 6. `loopdropout merge {copy}` renews it.\n" in text
    assert find_source(merged).lines()["method"] == "Loop Dropout, seed 0, step 6"
    assert {row["step"] for row in read_results(copy) if row["folder"] == str(copy)} == {None, 8}
    assert is_finished(copy) and "max_steps: 8" in (copy / "recipe.yaml").read_text()


def test_recipes_keep_whole_numbers(quickstart, tmp_path):
    """Also of fields that take a share, such as `logging_steps`, and of trainings in Python."""
    text = (quickstart[0] / "recipe.yaml").read_text()
    assert text.startswith("command: sft\n")
    assert "logging_steps: 1\n" in text and "weight_decay: 0\n" in text and "warmup_steps: 0.05\n" in text
    assert "logging_steps: 1\n" in (quickstart[0] / "merged/README.md").read_text()
    dump_recipe({"num_train_epochs": 3.0, "p": 0.5, "rule_args": {"scale": 2.0}}, tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").read_text() == "num_train_epochs: 3\np: 0.5\nrule_args:\n  scale: 2.0\n"


def test_next_commands_fit_the_data(quickstart, capsys):
    """Without a benchmark in the recipe, no task of the package is known to fit the data."""
    folder, text = quickstart
    assert f"  loopdropout evaluate {folder}   # " in text and " renews it" not in text
    print_next_commands([Run(ScriptArguments(), LoopDropoutConfig(str(folder), bf16=False), {})])
    printed = capsys.readouterr().out
    assert (
        f"  loopdropout report {folder}   # " in printed
        and "`own_benchmarks`, docs/evaluation.md in the repository)" in printed
    )
    assert "evaluate " not in printed and "gsm8k" not in printed
    assert describe_length(LoopDropoutConfig(str(folder), max_steps=1, bf16=False)) == "1 step"


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_continuation_that_does_not_begin_changes_nothing(copy, monkeypatch):
    """The run is still the finished one, whatever ends the command before the first step is done."""
    words = [copy / "recipe.yaml", "--output_dir", copy, "--compare_with null --max_steps 8 --benchmark_limit 3"]
    words.append("--resume_from_checkpoint true")
    before = contents(copy)
    for error in (RuntimeError, KeyboardInterrupt, NonFiniteGradientError):
        monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", Mock(side_effect=error))
        with pytest.raises(error):
            run(*words)
        assert contents(copy) == before
    state = copy / "checkpoint-6" / "trainer_state.json"
    state.write_text(re.sub('"digest": "[0-9a-f]+"', '"digest": "1"', state.read_text()))
    record(state.parent)
    before = contents(copy)
    with user_error("The training data changed"):
        run(*words)
    assert contents(copy) == before


@pytest.mark.parametrize("length", ["--max_steps 4", "--max_steps -1 --num_train_epochs 2", "--max_steps 5"])
def test_run_is_not_continued_to_fewer_steps(copy, no_steps, length):
    before = contents(copy)
    is_epochs = "epochs" in length
    wanted = r"`num_train_epochs` must be at least 3" if is_epochs else r"`max_steps` must be at least 6"
    with user_error(f"{wanted}, because the checkpoint {re.escape(str(copy))}/checkpoint-6 is at step 6, got"):
        run(WORDS, "--output_dir", copy, "--resume_from_checkpoint true", length)
    plan, error = dry_run(WORDS, "--output_dir", copy, "--resume_from_checkpoint true", length)
    assert "examples    8," in plan and "is at step 6, got" in error and contents(copy) == before


def test_results_belong_to_the_best_checkpoint(tmp_path):
    """With a learning rate that spoils the adapter, the first evaluation is the best one.

    The evaluation before the first step, when the adapter adds nothing, has the loss of the base model. The order of the
    losses does not depend on rounding: they are 0.65, 1.5, 7.0 and 5.6, and with any of eight seeds the first evaluation is
    better than the others by a factor of 3 or more.
    """
    best = "--eval_strategy steps --eval_steps 2 --load_best_model_at_end true --single_loop_batches 2"
    words = [ONE_TASK, "--compare_with null --learning_rate 0.1", best, "--eval_on_start true --merge true"]
    text = run(TRAINING, *words, "--evaluate_base true --benchmark_limit 1", "--output_dir", tmp_path)
    at_start, *evaluated = [log for log in load_state(tmp_path).log_history if "eval_loss" in log]
    rows = [row for row in read_results(tmp_path) if row["gates"] == "unit"]
    losses = {row["metric"]: row["value"] for row in rows if row["task"] == "training"}
    assert {row["step"] for row in rows} == {2} and evaluated[-1]["step"] == 6
    assert losses["eval_loss"] == evaluated[0]["eval_loss"] < evaluated[-1]["eval_loss"]
    assert adapter(tmp_path) == adapter(tmp_path / "checkpoint-2")
    assert find_source(tmp_path).columns["step"] == 2
    (base,) = [row for row in read_results(tmp_path) if row["metric"] == "eval_loss" and row["gates"] == "none"]
    assert base["value"] == pytest.approx(at_start["eval_loss"], rel=1e-6) and base["method"] == "base model"
    assert base["seed"] is base["step"] is base["training"] is None
    kept = f"checkpoint-2 (held-out loss {evaluated[0]['eval_loss']:.4g}), trained 6 steps"
    assert f"Loop Dropout: Kept {kept}\n" in text
    assert losses["eval_loss"] > base["value"]  # also that of the kept checkpoint
    assert " is above the base model's, " in text and "Train with a lower `learning_rate` than 0.1.\n" in text
    assert re.search(rf"(?m)^base model +{base['value']:.5g}\b", tables(text).split("\n\n")[0])
    (ours,) = [row for row in rows if row["metric"] == "eval_loss"]
    assert ours["n"] == base["n"] == 8 and ours["problems"] == base["problems"]
    (reduction,) = [row for row in rows if row["metric"] == "loss_reduction" and row["task"] == "development"]
    assert reduction["problems"] == ours["problems"]  # on the same 8 examples
    for folder in (tmp_path, tmp_path / "merged"):
        card = (folder / "README.md").read_text()
        assert f"| Kept weights | {kept} |" in card
        assert f"| Held-out loss (nats per token) | {losses['eval_loss']:.4f} (8 examples) |" in card
        assert f"| Held-out loss (nats per token), base model | {base['value']:.4f} (8 examples) |" in card


def test_base_model_is_measured_once_in_a_sweep(tmp_path, monkeypatch):
    """Later runs take over its results on the same problems. A run that is killed afterwards has its recipe and status.

    So a report names it, and the same command starts it again.
    """
    words = [TRAINING, ONE_TASK, "--compare_with null --evaluate_base true"]
    first, second = (tmp_path / f"lora/lr_0.1/seed_{seed}" for seed in (1, 2))
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "sweep_recipe.yaml").touch()  # as a sweep starts it

    def measure_and_end(trainer, training, tasks):
        base_results.evaluate_base(trainer, training, tasks)
        assert base_results._find_results(second, training, tasks[0], 4) is not None
        training.script_args.benchmark_limit = 0  # other problems, which no run has measured
        assert base_results._find_results(second, training, tasks[0], 4) is None
        sys.exit("killed")

    def train(folder):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit, match="killed"):
            run_words = [*words, "--benchmark_limit 1 --output_dir", folder]
            SCRIPTS["sft"].main(" ".join(map(str, run_words)).split())
        return out.getvalue()

    monkeypatch.setattr(job, "evaluate_base", measure_and_end)
    train(first)
    assert load_recipe(first / "recipe.yaml")["evaluate_base"] is True and read_run(first)["status"] == "training"
    assert {*load_results(first)["method"]} == {"base model"}
    assert "evaluate the base model on the same problems" in run(*words, "--output_dir", first, "--dry_run true")
    with monkeypatch.context() as patched:
        patched.setattr(LoopedLM, "generate_until", lambda *given: pytest.fail("it is measured again"))
        text = train(second)
        assert f"at K = 4 are those of {first}, which measured the same problems." in " ".join(text.split())
        assert read_own_results(second) == [{**row, "folder": str(second)} for row in read_own_results(first)]
        for row in read_own_results(second):
            if "samples" in row:
                assert read_samples(row) == read_samples({**row, "folder": first})


STOPS_EARLY = f"{FEW_MEASUREMENTS} --compare_with null --learning_rate 0.1 --eval_strategy steps --eval_steps 2"


def test_early_stop_is_an_end(tmp_path, log, monkeypatch, capsys):
    """The held-out loss gets worse after step 2. The training stops, is finished, and is continued with more patience only."""
    folder = tmp_path / "run"
    words = [TRAINING, STOPS_EARLY, "--output_dir", folder, "--early_stopping_patience"]
    text = run(*words, 1)
    kept = r"checkpoint-2 \(held-out loss [\d.]+\), trained 4 of 6 steps, stopped early"
    assert re.search(rf"(?m)^Loop Dropout: Kept {kept}$", text) and is_finished(folder)
    assert re.search(rf"\| Kept weights \| {kept} \|", (folder / "README.md").read_text())
    assert (
        "Loop Dropout: Training stopped early, at step 4 of 6, after 1 evaluation without a better held-out loss. The "
        "weights of step 2 are kept. "
        "To train it further, set `early_stopping_patience` to 2, for example, and continue with `--resume_from_checkpoint "
        "true`." in log.text
    )
    assert read_run(folder)["stopped_early_at"] == 4 and find_source(folder).columns["step"] == 2
    weights = adapter(folder)
    load_script("recipes/report.py").main([str(folder), "--output_dir", str(tmp_path / "report")])
    line = f"Stopped early: {folder} after 4 of 6 steps"
    assert line in capsys.readouterr().out and line in (tmp_path / "report" / "costs.md").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(LoopDropoutSFTTrainer, "training_step", lambda *args: pytest.fail("a step is taken"))
        for resumption in ("", "--resume_from_checkpoint true"):
            text = run(*words, 1, resumption)
            assert f"trained     {folder}\n" in text
            assert (
                f"Nothing is trained in {folder}, because the training there has ended before. To train it further, add "
                "`--early_stopping_patience 2 --resume_from_checkpoint true`. To train again, " in text
            )
        (folder / "run.json").unlink()  # as if it was killed before it saved the adapter
        (folder / "adapter_model.safetensors").unlink()
        with user_error(
            "that took its last step, 4, and ended before its adapter was saved. Finish it with `--resume"
        ):
            run(*words, 1)
        text = run(*words, 1, "--resume_from_checkpoint true")
    assert re.search(rf"Kept {kept}\n", text) and adapter(folder) == weights
    with user_error(
        "`early_stopping_patience` changed from 1 to 2. Add `--resume_from_checkpoint true` to continue it."
    ):
        run(*words, 2)
    text = run(*words, 2, "--resume_from_checkpoint true")
    assert "trained 6 steps\n" in text and read_run(folder)["stopped_early_at"] is None


def test_training_starts_from_an_adapter(quickstart, tmp_path):
    words = ["--adapter_name_or_path", quickstart[0], "--learning_rate", 0, "--rule", "lora", "--compare_with", "null"]
    run(quickstart[0] / "recipe.yaml", "--output_dir", tmp_path, FEW_MEASUREMENTS, *words, "--max_steps", 1)
    assert adapter(tmp_path) == adapter(quickstart[0])
    assert "| Trained from the adapter | run |" in (tmp_path / "README.md").read_text()


def test_results_of_a_checkpoint_are_in_its_run(copy, tmp_path, monkeypatch):
    """A checkpoint is deleted when newer ones are saved, and pushed as it is. The card of its merged model has its scores."""
    checkpoint, limits = copy / "checkpoint-4", ["--benchmark_limit", "1", "--max_new_tokens", "2"]
    before = contents(checkpoint)
    load_script("recipes/evaluate.py").main([str(checkpoint), "--benchmarks", "arithmetic_easy_test", *limits])
    rows = read_results(copy / "evaluation")
    assert {row["step"] for row in rows} == {4} and {row["adapter"] for row in rows} == {str(checkpoint)}
    assert contents(checkpoint) == before and load_results(copy)["checkpoint"].isin([4]).sum() == len(rows)
    accuracy = accuracy_numbers(load_results(copy / "evaluation"))
    assert {*accuracy.index.get_level_values("method")} == {"Loop Dropout, checkpoint = 4"}
    # A former training had a checkpoint of the same step.
    own = read_lines(copy / "evaluation/results.jsonl")
    former = [{**row, "training": "former", "task": "former task"} for row in own]
    write_results(copy / "evaluation", former)
    load_script("recipes/merge.py").main([str(checkpoint)])
    card = (copy / "checkpoint-4-merged/README.md").read_text()
    assert "| arithmetic_easy_test | 4 |" in card and "former task" not in card
    assert contents(checkpoint) == before
    monkeypatch.chdir(copy / "checkpoint-2")
    assert measurement_folder(".", "evaluation") == str(copy / "evaluation")
    alone = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-4"))
    assert measurement_folder(alone, "evaluation") == str(alone)


def test_saved_recipe_repeats_the_run(quickstart, tmp_path):
    folder, _ = quickstart
    run(folder / "recipe.yaml", "--output_dir", tmp_path, "--compare_with", "unscaled", FEW_MEASUREMENTS)
    assert adapter(tmp_path) == adapter(folder) != adapter(tmp_path / "unscaled")


def test_finished_run_is_printed_and_measured_further(quickstart, copy, no_steps):
    stamp = (copy / "run.json").stat().st_mtime_ns
    text = run(WORDS, "--output_dir", copy)
    assert tables(text) == tables(quickstart[1])
    assert f"trained     {copy}, {copy}/lora\n" in text
    assert (copy / "run.json").stat().st_mtime_ns == stamp
    run(TRAINING, "--output_dir", copy, "--eval_num_loops", "1", "3", "--single_loop_batches", "1")
    depths = {row["num_loops"] for row in read_results(copy) if row["metric"] == "accuracy"}
    assert depths == {1, 2, 3, 4} and adapter(copy) == adapter(quickstart[0])


def test_training_into_a_merged_model_raises_before_it(tmp_path):
    """Its adapter could not be saved there."""
    tiny_ouro().save_pretrained(tmp_path)
    with user_error(
        re.escape(f"{tmp_path} holds a whole model, which an adapter must not be saved next to. Set another")
    ):
        run(WORDS, "--output_dir", tmp_path)


def test_folder_of_another_recipe_is_not_used(quickstart):
    """A dry run shows the plan all the same, and ends with the sentence that the training would end with."""
    folder, _ = quickstart
    before = contents(folder)
    for words, difference in {
        "--learning_rate 2e-3": "`learning_rate` changed from 0.001 to 0.002",
        "--p 0.3 --resume_from_checkpoint true": "`p` changed from [0.5] to [0.3]",
    }.items():
        with user_error(re.escape(f"{folder} holds another run: {difference}.")):
            run(WORDS, "--output_dir", folder, words)
        plan, error = dry_run(WORDS, "--output_dir", folder, words)
        assert (
            f"{folder} holds another run: {difference}. Set another `output_dir`, or remove the folder (its re"
            in error
        )
        assert "examples    8," in plan and not re.search(rf"trained +{folder}[,\n]", plan)
    _, error = dry_run(WORDS, "--output_dir", folder, "--eval_steps 3 --learning_rate 2e-3")
    assert "Add `--resume" not in error
    _, error = dry_run(WORDS, "--output_dir", folder, "--eval_steps 3")  # which a continued run may change
    assert "`eval_steps` changed from the default to 3" in error and "Add `--resume_from_checkpoint true`" in error
    resume = "--resume_from_checkpoint true"
    stop = "--early_stopping_patience 2 --eval_strategy steps --eval_steps 2"
    for resumption, message in {
        "": "`early_stopping_patience` changed from the default to 2",
        resume: "`early_stopping_patience` changed, and chooses the best checkpoint among the steps",
    }.items():
        _, error = dry_run(WORDS, "--output_dir", folder, stop, resumption)
        assert message in error and "Add `--resume" not in error
    plan = run(WORDS, "--output_dir", folder, stop, "--compare_with null --max_steps 8", resume, "--dry_run true")
    assert f"continues   {folder / 'checkpoint-6'}" in plan and contents(folder) == before


def interrupt(folder, last_step):
    """Remove the files that a run writes after a checkpoint; the next checkpoint is incomplete."""
    for name in ("run.json", "adapter_model.safetensors", "results.jsonl"):
        (folder / name).unlink()
    for step in (2, 4, 6):
        if step == last_step + 2:
            (folder / f"checkpoint-{step}" / "trainer_state.json").write_text('{"log_history": [')
        elif step > last_step:
            shutil.rmtree(folder / f"checkpoint-{step}")


@pytest.mark.parametrize("last_step", [0, 2, 6])
def test_interrupted_run_resumes_bit_for_bit(quickstart, copy, last_step):
    interrupt(copy, last_step)
    text = run(TRAINING, "--output_dir", copy, "--resume_from_checkpoint", "true", FEW_MEASUREMENTS)
    assert adapter(copy) == adapter(quickstart[0])
    assert ("Continuing from checkpoint-2 of 6" in text) == (last_step == 2)
    values = lambda at: {row["metric"]: row["value"] for row in read_results(at) if row["folder"] == str(at)}
    resumed, whole = values(copy), values(quickstart[0])
    for metric in ("train_loss", "num_tokens"):
        assert resumed[metric] == pytest.approx(whole[metric], rel=1e-6)
    state = json.loads((quickstart[0] / "checkpoint-6" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert read_run(copy)["training_data"] == state["ResumptionCallback"]["attributes"]["data"]


def test_stopped_run_neither_continues_nor_begins_again_by_itself(quickstart, copy, no_steps, monkeypatch):
    interrupt(copy, 4)
    before = contents(copy)
    choice = "Continue it with `--resume_from_checkpoint true`, or begin again with `--resume_from_checkpoint false`."
    message = f"{copy} holds a training that was stopped at step 4 of 6. {choice}"
    with user_error(re.escape(message)):
        run(WORDS, "--output_dir", copy)
    plan, error = dry_run(WORDS, "--output_dir", copy)
    assert error == message and "examples    8," in plan and contents(copy) == before
    monkeypatch.undo()
    text = run(TRAINING, "--output_dir", copy, "--resume_from_checkpoint false --compare_with null", FEW_MEASUREMENTS)
    assert "continues" not in text and "Continuing" not in text and adapter(copy) == adapter(quickstart[0])
    assert "resume_from_checkpoint" not in read_recipe(copy)  # a repetition of it would begin again


def test_other_number_of_processes_is_not_continued(quickstart, copy, no_steps, monkeypatch):
    """The error comes before the data is prepared, but not in a dry run, which has one process."""
    interrupt(copy, 2)
    state = copy / "checkpoint-2" / "trainer_state.json"
    text = state.read_text()
    assert '"num_processes": 1' in text and '"examples_per_step": 4' in text
    state.write_text(text.replace('"num_processes": 1', '"num_processes": 2').replace('step": 4', 'step": 8'))
    record(state.parent)
    words = (WORDS, "--output_dir", copy, "--resume_from_checkpoint true")
    assert f"continues   {state.parent}\n" in run(*words, "--dry_run true")
    monkeypatch.setattr(
        "loopdropout_trainer.jobs.training_data.load_examples", lambda *args: pytest.fail("data is loaded")
    )
    with user_error("checkpoint-2 was .*: `num_processes` changed from 2 to 1. Continue it with 2 processes, or "):
        run(*words)


def test_run_without_bars_resumes_after_its_last_step(quickstart, copy, no_steps):
    interrupt(copy, 6)
    run(TRAINING, "--output_dir", copy, "--resume_from_checkpoint true --disable_tqdm true", FEW_MEASUREMENTS)
    assert adapter(copy) == adapter(quickstart[0])


def test_run_killed_in_its_evaluation_is_not_trained_again(quickstart, copy, no_steps):
    write_run(copy, status="trained")
    lines = (copy / "results.jsonl").read_text().splitlines(keepends=True)
    (copy / "results.jsonl").write_text("".join(line for line in lines if '"task": "training"' in line))
    assert tables(run(WORDS, "--output_dir", copy)) == tables(quickstart[1])
    assert (copy / "recipe.yaml").read_text().startswith("command: sft\n")  # without a training, too


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "trainer_state.json"])
def test_damaged_adapter_of_a_finished_run(quickstart, copy, no_steps, name, log):
    """The run continues from its newest checkpoint, which has all steps, or says how to do so."""
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-100] + bytes(100))
    with user_error(f"{re.escape(str(copy))} has a damaged {name}. Add `--resume_from_checkpoint true`"):
        run(WORDS, "--output_dir", copy)
    run(TRAINING, "--output_dir", copy, "--resume_from_checkpoint", "true", FEW_MEASUREMENTS)
    assert f"not used, because the folder has a damaged {name}" in log.text
    assert adapter(copy) == adapter(quickstart[0])


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_crafted_checkpoint_runs_no_code(copy, name):
    interrupt(copy, 4)
    torch.save(SimpleNamespace(), copy / "checkpoint-4" / name)  # unpickling calls its class
    record(copy / "checkpoint-4")  # a stranger writes fitting digests, too
    with pytest.raises(Exception, match="(?i)weights.only|unpickl"):
        run(WORDS, "--output_dir", copy, "--resume_from_checkpoint", "true")


def test_merge_without_all_weights_raises_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with user_error("`merge` must be false under ZeRO-3 and FSDP"):
        run(WORDS, "--output_dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_non_finite_loss_is_recorded(tmp_path):
    words = "quickstart.yaml --learning_rate 1e30 --max_grad_norm 1e30 --benchmarks null --eval_num_loops null"
    with user_error("not finite"):
        run(words, SHORT, "--single_loop_accuracy", "false", "--output_dir", tmp_path)
    assert read_run(tmp_path)["status"] == "non-finite"


def send_signal(*args):
    signal.raise_signal(signal.SIGTERM)
    return torch.zeros((), requires_grad=True)


def fail(*args):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("step", "words", "error", "status"),
    [
        (send_signal, "", TrainingInterrupted, "stopped"),
        (send_signal, "--save_only_model true", TrainingInterrupted, "training"),
        (fail, "", RuntimeError, "training"),
    ],
    ids=["stopped", "without a full checkpoint", "failed"],
)
def test_run_json_tells_a_stop_from_a_failure(quickstart, copy, monkeypatch, step, words, error, status):
    """A launcher has the same status after both, so a job that submits itself again reads `run.json`."""
    interrupt(copy, 2)
    write_run(copy, status="stopped")  # by an earlier signal
    seen = []

    def training_step(self, *args):
        seen.append(read_run(copy)["status"])
        return step()

    monkeypatch.setattr(LoopDropoutSFTTrainer, "training_step", training_step)
    with pytest.raises(error, match="with `--resume_from_checkpoint true`" if status == "stopped" else ""):
        run(TRAINING, "--output_dir", copy, "--resume_from_checkpoint true", FEW_MEASUREMENTS, words)
    assert seen[0] == "training" and read_run(copy)["status"] == status


PREFERENCES = "--max_steps 2 --num_train_examples 32 --num_eval_examples 4 --per_device_train_batch_size 8"
REWARDS = " --num_generations 4 --max_completion_length 8 --eval_strategy no --eval_on_start false"


OTHERS = [("dpo", PREFERENCES, ["eval_loss"]), ("grpo", PREFERENCES + REWARDS, ["reward_first", "reward_last"])]


@pytest.mark.parametrize(("script", "words", "metrics"), OTHERS, ids=["dpo", "grpo"])
def test_dpo_and_grpo_train_both_rules(script, words, metrics, tmp_path):
    text = run(f"{script}/arithmetic.yaml", words, "--output_dir", tmp_path, script=script)
    if script == "grpo":
        assert "2 prompts with 4 completions each per step" in text
        assert "32, 4 held out, 2 optimizer steps, 0.125 epochs\n" in text
        states = [json.loads(file.read_text()) for file in tmp_path.rglob("trainer_state.json")]
        assert [state["epoch"] for state in states if state["global_step"] == 2].count(0.125) >= 2
    found = {(row["method"], row["metric"]) for row in read_results(tmp_path)}
    assert found >= {*product(("Loop Dropout", "LoRA"), ("train_loss", "train_seconds", *metrics))}
    assert "Training at K = 4" in text
    words = [str(tmp_path), "--benchmarks", "arithmetic_easy_test", "--benchmark_limit", "2", "--max_new_tokens", "2"]
    before = (tmp_path / "results.jsonl").read_text()
    load_script("recipes/evaluate.py").main(words)  # with the recipe of the run, whose fields it knows
    assert (tmp_path / "results.jsonl").read_text() == before
    assert any(row["metric"] == "accuracy" for row in read_results(tmp_path / "evaluation"))
    load_script("recipes/merge.py").main([str(tmp_path), "--output_dir", str(tmp_path / "merged")])
    card, run_facts = (tmp_path / "merged/README.md").read_text(), read_run(tmp_path)
    assert "| arithmetic_easy_test | 4 |" in card
    assert f"| Version of loopdropout-trainer | {describe_version()} |" in card
    assert run_facts["versions"]["loopdropout-trainer"] == describe_version()
    assert run_facts["device"].startswith(f"cpu ({platform.machine()}")


ONLY_TRAIN = f"{SHORT} {SMALL} {FEW_MEASUREMENTS} --max_steps 1 --compare_with null"


@pytest.mark.parametrize(
    ("setting", "words", "p"), [("", "", 0.5), ("", "--p 0.3", 0.3), ("p: 0.3", "", 0.3), ("p: [0.3]", "", 0.3)]
)
@pytest.mark.parametrize("file", sorted((ROOT / "recipes/examples").glob("*.py")), ids=lambda file: file.stem)
def test_documented_own_rule_trains(file, setting, words, p, tmp_path, monkeypatch):
    """On the command line and in YAML, where p is a list."""
    page = (ROOT / "docs/extending.md").read_text()
    command = re.search(rf"(?m)^loopdropout sft (.*--import recipes/examples/{file.name}.*) --output_dir", page)[1]
    (tmp_path / "mine.yaml").write_text(f"extends: quickstart.yaml\n{setting}\n")
    command = command.replace("quickstart.yaml", str(tmp_path / "mine.yaml"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("loopdropout_trainer.settings.recipe.IMPORTED", [])
    with patch.dict(RULES):
        text = run(command, words, ONLY_TRAIN, "--output_dir", tmp_path / "run")
        with user_error(r"`p` must be one drop probability for all loops with this rule, got \[0\.1, "):
            run(command, "--p 0.1 0.2 0.3 0.4", ONLY_TRAIN, "--output_dir", tmp_path / "other")
    assert f"(p = {p})" in text and find_source(tmp_path / "run").facts()["p"] == p


def test_held_out_examples_without_evaluation_are_named(tmp_path, log):
    words = [f"quickstart.yaml {ONLY_TRAIN} --dry_run true --output_dir", tmp_path, "--single_loop_batches"]
    run(*words, 0)
    hint = "`eval_strategy` is not set, so the training is not evaluated on its 8 held-out examples. Set it to steps"
    assert hint in log.text
    log.clear()
    run(*words, 1)
    for use in ("--eval_strategy no", "--benchmarks development", "--num_eval_examples 0"):
        run(*words, 0, use)
    assert "is not evaluated" not in log.text


# Mistakes. Each is one line on standard error, with exit code 2.


MISTAKES = [
    ("sft", "--rule lora --p 0.1", "`rule: lora` has no field 'p'"),
    ("sft", "--rule independent", "`merge` and `eval_num_loops` must not be set for 'independent'"),
    ("sft", "--push_merged_to_hub true --push_to_hub true --hub_model_id a/b", "Set either `push_to_hub` or `push_me"),
    ("sft", "--push_merged_to_hub true", "`hub_model_id` must be set if `push_merged_to_hub` is set."),
    (
        "sft",
        "--benchmarks null --single_loop_accuracy false",
        "`benchmarks` must be set, because the recipe or the command line sets `eval_num_loops`. To evaluate nothing, also "
        "set `--eval_num_loops null` (in a sweep: `measure: {eval_num_loops: null}`).",
    ),
    ("sft", "--num_eval_examples 0", "`num_eval_examples` must be at least 1"),
    (
        "sft",
        "--num_eval_examples 0 --single_loop_batches 0 --eval_strategy steps",
        "if `eval_strategy` is steps, because there is no held-out",
    ),
    (
        "dpo",
        "--num_eval_examples 0",
        "must be set, if `eval_strategy` is epoch, because there is no held-out example.",
    ),
    (
        "sft",
        "--assistant_only_loss true",
        "`assistant_only_loss` must be false for examples without turns of an assistant",
    ),
    ("sft", "--chat_template_path tulu2", "`chat_template` must be set instead of `chat_template_path`, got 'tulu2'."),
    ("sft", "--lora_target_modules all-linear q_proj", "got all-linear. `all-linear` must be the only target module."),
    ("sft", "--preparation null --train_files [1].jsonl", "The file [1].jsonl does not exist."),
    ("sft", "--patience 3", "`patience` is not a field of this script. Did you mean 'early_stopping_patience'?"),
    ("sft", "--benchmarks development --single_loop_batches 0 --num_eval_examples 0", "must have held-out examples"),
    ("sft", "--lora_target_modules q_projj", "must be modules of the model, such as down_proj, "),
    ("sft", "--report_to wandbb", "`report_to`: wandbb is not supported, only "),
    ("sft", "--resume_from_checkpoint checkpoint-1", "`resume_from_checkpoint` must be true or the folder of a"),
    ("sft", "--pad_token <pads>", "`pad_token` must be a token of the tokenizer "),
    (
        "sft",
        "--dry_run true --adapter_name_or_path recipes/missing",
        "There is no folder recipes/missing, and no adapter",
    ),
    (
        "sft",
        "--dry_run true --adapter_name_or_path recipes",
        "The folder recipes holds neither a model nor an adapter",
    ),
    ("sft", "--compare_with dropout", "got 'dropout'. Did you mean 'loop_dropout'?"),
    ("sft", "--compare_with lara", "`compare_with` must be one of adaptive, "),
    ("sft", "--preview 0 1 2", "`preview` must have one value, got 0 1 2."),
    ("sft", "--preview 32", "`preview` must be from 0 to 31, got 32."),
    ("sft", f"--hub_tokn {TOKEN}", "`hub_tokn` is not a field of this script. Did you mean 'hub_token'?"),
    ("sft", "--optim adam", "`optim` must be one of adamw_torch, "),
    ("sft", "--depths 2", "`depths` is not a field of this script. Did you mean 'eval_num_loops'?"),
    ("sft", "--eval_num_loops 0 4", "`eval_num_loops` must be at least 1 and at most 1,024, got 0."),
    ("dpo", "--preview 0", "`preview` is not a field of this script. It is a field of `loopdropout sft`."),
    (
        "sft",
        "--beta 0.1",
        "`beta` is not a field of this script. It is a field of `loopdropout dpo` and `loopdropout grpo`.",
    ),
    ("dpo", "--preparation arithmetic", "The examples must have the columns `chosen` and `rejected`."),
    ("grpo", "--rewards gsm8k", "`rewards` must be one of gsm8k_strict, "),
]


SFT_COLUMNS = "one of: `prompt` and `completion`; `messages`; `conversations`; `text`"
COLUMNS = [
    ("sft", "conversation", f"{SFT_COLUMNS}, got the columns conversation. Did you mean 'conversations'? `column_map"),
    ("sft", "chosen rejected", f"{SFT_COLUMNS}, got the columns chosen, rejected. "
     "`LoopDropoutDPOTrainer` trains on pairs of chosen and rejected answers. `column_mapping` renames"),
    ("dpo", "prompt choosen", "one of: `prompt`, `chosen` and `rejected`; `chosen` and `rejected`, got the columns "
     "prompt, choosen. Did you mean 'chosen'?"),
    ("grpo", "messages", "`prompt` and `completion`, got the columns messages."),
]  # fmt: skip


@pytest.mark.parametrize(("script", "columns", "message"), COLUMNS)
def test_missing_columns_name_the_formats_of_the_script(script, columns, message, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [dict.fromkeys(columns.split(), "x")])
    words = f"--model_name_or_path tiny-ouro --train_files {path} --output_dir {tmp_path} --bf16 false --dry_run true"
    with user_error(f"The data of {re.escape(str(path))} must have {re.escape(message)}"):
        SCRIPTS[script].main(words.split())


def test_sft_reads_messages_next_to_preferences(tmp_path, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    row = {"prompt": "x", "chosen": "y", "rejected": "z", "messages": turns}
    path = write_lines(tmp_path / "rows.jsonl", [row])
    words = f"--model_name_or_path tiny-ouro --train_files {path} --output_dir {tmp_path} --bf16 false --dry_run true"
    SCRIPTS["sft"].main([*words.split(), "--chat_template", "tulu2", "--preview", "0"])
    assert "Hello" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["train_files", "eval_files"])
def test_missing_file_is_named_before_the_plan(tmp_path, monkeypatch, capsys, field):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "here.jsonl", [{"prompt": "1", "completion": "2"}])
    files = {"train_files": "here.jsonl", "eval_files": "*.jsonl", field: "there.jsonl"}
    words = [f"--{name}={file}" for name, file in files.items()]
    with user_error(r"^The file there.jsonl does not exist. Did you mean 'here.jsonl'\?$"):
        SCRIPTS["sft"].main(
            ["--model_name_or_path=tiny-ouro", "--output_dir=out", "--dry_run=true", "--bf16=false", *words]
        )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("file", "hint"), [
    ("data.jsonl", ""),  # has little more than its ending in common with chats.jsonl
    ("chats.json", " Did you mean 'chats.jsonl'?"),
    ("rows/chat.jsonl.gz", ""),
    ("parst/chats_2.jsonl", " Did you mean 'parts/chats_1.jsonl'?"),
])  # fmt: skip
def test_hint_at_missing_file_has_a_similar_path(tmp_path, monkeypatch, file, hint):
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    for name in ("chats.jsonl", "parts/chats_1.jsonl", "parts/notes.txt"):
        write_lines(Path(name), [{"prompt": "1", "completion": "2"}])
    with user_error(f"^{re.escape(f'The file {file} does not exist.{hint}')}$"):
        check_files([file])


@pytest.mark.parametrize(("script", "words", "message"), MISTAKES)
def test_mistake_is_explained_in_one_line(script, words, message, tmp_path, monkeypatch, capsys):
    recipe = "quickstart.yaml" if script == "sft" else f"{script}/arithmetic.yaml"
    command = f"recipes/{script}.py {recipe} {SHORT} --output_dir {tmp_path} {words}".split()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        run_script(SCRIPTS[script].main)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"loopdropout {script}: ")]
    assert message in line and TOKEN not in line
