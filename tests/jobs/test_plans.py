"""The plan of a training: mistakes in the data come without it, and it names checkpoints and printed completions."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.errors import user_error
from helpers.files import load_script, write_lines
from helpers.tiny import tiny_hrm, with_adapter
from loopdropout_trainer import (
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutGRPOConfig,
    load_model,
    load_tokenizer,
)
from loopdropout_trainer.costs.trainings import Sizes, Training, describe_costs
from loopdropout_trainer.files import lock_folder
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.jobs.starts import make_training, read_start
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments


SFT = load_script("recipes/sft.py")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """A function from rows and words to the lines of a dry run of `sft`, without its error."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)

    def dry_run(rows, *words, error=None):
        write_lines(tmp_path / "rows.jsonl", rows)
        (tmp_path / "own.jinja").write_text(
            "{% for turn in messages %}{{ turn.role }}: {{ turn.content }} {% endfor %}"
        )
        fixed = (
            "--model_name_or_path tiny-ouro --chat_template tulu2 --train_files rows.jsonl --bf16 false --dry_run true"
        )
        argv = [*fixed.split(), "--output_dir", "run", *" ".join(words).split()]
        if error is None:
            SFT.main(argv)
        else:
            with user_error(error):
                SFT.main(argv)
        return capsys.readouterr().out.splitlines()

    return dry_run


@pytest.fixture(scope="module")
def hrm_text(tmp_path_factory):
    """Folder of a model whose sizes config.json does not tell, and which trains at one depth."""
    folder = tmp_path_factory.mktemp("hrm_text")
    tiny_hrm().save_pretrained(folder)
    load_tokenizer("tiny-ouro").save_pretrained(folder)
    return folder


def chat(*roles, key="content"):
    return {"messages": [{"role": role, key: "Hi"} for role in roles]}


PLATEAU = "--lr_scheduler_type reduce_lr_on_plateau --eval_strategy epoch --num_eval_examples 2"
BEST = "--load_best_model_at_end true --eval_strategy epoch --num_eval_examples 2"
PAIRS = [{"prompt": f"{number} =", "completion": f" {number}"} for number in range(20)]


@pytest.mark.parametrize(("rows", "words", "error"), [
    ([chat("user", "assistant"), chat("user", "assitant")], "", "^Row 2 of rows.jsonl: A role .*Did you mean 'assistant'"),
    ([chat("user", "assistant", key="text")], "", "^Row 1 of rows.jsonl: A turn .* Rename `text` to `content`"),
    ([{"question": "1", "answer": "2"}], "", "^The data of rows.jsonl must have .*`column_mapping: {prompt: question"),
    ([{"prompt": "1", "completion": ""}], "", "^The data of rows.jsonl must have an example with text in completion"),
    (PAIRS, "--num_eval_examples 20", "`num_eval_examples` must be at most 19"),
    (PAIRS, "--eval_strategy epoch", "`num_eval_examples` must be at least 1, or `eval_files` must be set"),
    (PAIRS, f"{BEST} --metric_for_best_model accuracy", "`metric_for_best_model` must be one of loss, .*got 'accuracy'"),
    (PAIRS, "--assistant_only_loss true", "`assistant_only_loss` must be false .* `prompt` in the training data"),
    ([chat("user", "assistant")] * 2, "--assistant_only_loss true --chat_template own.jinja", "must write each answer with"),
    (PAIRS, "--max_length 2", "`max_length` must be at least "),
    (PAIRS, "--dataloader_drop_last true --per_device_train_batch_size 32", "`per_device_train_batch_size` must be at most"),
    (PAIRS, "--train_sampling_strategy batch_rebalance", "`train_sampling_strategy` must be .*random"),
    (PAIRS, "--rule learned --depth_sampling uniform", "`depth_sampling` must be 'fixed' for the rule 'learned'"),
    (PAIRS, "--p 0.1 0.2", "`p` has 2 values, but the model runs 4 loops"),
    (PAIRS, "--lr_scheduler_type cosine_with_min_lr", "`lr_scheduler_kwargs` must fit .* cosine_with_min_lr, got None"),
    (PAIRS, f"{PLATEAU} --warmup_from_first_step true", "`warmup_from_first_step` must be false for .* reduce_lr_on_plateau"),
])  # fmt: skip
def test_mistakes_in_data_come_without_a_plan(plan, rows, words, error):
    """Only the examples that are left out are printed, which may be the reason."""
    lines = plan(rows, words, error=error)
    assert [line for line in lines if not line.startswith("left out ")] == []
    assert bool(lines) == ("max_length" in words or rows[0].get("completion") == "")


def test_plan_names_held_out_examples_that_are_all_too_long(plan, tmp_path):
    """Else the measurement after the training would have none. A training that does not need them goes on without."""
    write_lines(tmp_path / "long.jsonl", [{"prompt": "1 + " * 40, "completion": " 2"}])
    words = "--eval_files long.jsonl --max_length 32"
    error = "`single_loop_batches` must be 0, got 2, because all held-out examples are longer than `max_length`"
    (line,) = plan(PAIRS, words, "--single_loop_batches 2", error=error)
    assert line.startswith("left out    1 held-out example, because")
    assert line in plan(PAIRS, words)


def test_plan_counts_the_checkpoints_of_loaded_examples(plan):
    """The number of steps follows from the number of examples here."""
    words = "--num_train_epochs 3 --per_device_train_batch_size 4 --save_strategy steps --save_steps 4"
    lines = plan(PAIRS, words)
    disk = "disk        about 0.2 MB for adapters, 1.9 MB for 4 checkpoints (set `save_total_limit` to keep fewer)"
    assert [line for line in lines if "checkpoint" in line] == [disk]
    more = "            more examples are held out than trained on (`num_eval_examples`)"
    assert more not in lines and more in plan(PAIRS, "--num_eval_examples", str(len(PAIRS) - 1))
    lines = plan(PAIRS, words, "--save_total_limit 2")
    assert "disk        about 0.2 MB for adapters, 0.9 MB for 2 checkpoints (`save_total_limit: 2`)" in lines
    lines = plan(PAIRS, words, "--per_device_train_batch_size 8 --dataloader_drop_last true")  # without the last 4
    assert "examples    20, 0 held out, 6 optimizer steps, 3 epochs" in lines and "a step has" not in "".join(lines)
    larger = plan(PAIRS, "--max_steps 4 --per_device_train_batch_size 500")
    assert "            a step has 20 of the 500 asked for, because the data have no more" in larger
    (training,) = [line for line in larger if line.startswith("training ")]
    assert training.startswith("training    4 steps, 20 examples per step, learning rate ")
    best = "--save_strategy best --eval_strategy epoch --metric_for_best_model eval_loss --num_eval_examples 2"
    lines = plan(PAIRS, best)  # whose number the training finds out
    assert any("MB for each checkp" in line for line in lines)


def test_plan_has_each_number_once_after_loading(plan):
    """Counted tokens and their hours replace the bounds, next to the lines about the examples."""
    lines = plan([*PAIRS, *PAIRS], "--num_eval_examples 2 --num_train_epochs 2", "--compare_with lora --bf16 true")
    titles = [line[:12].strip() for line in lines]
    titles = [title for title in titles if title]
    first = [
        "model",
        "trainings",
        "adapter",
        "data",
        "examples",
        "left out",
        "training",
        "settings",
        "device",
        "tokens",
    ]
    assert titles[: len(first) + 1] == [*first, "time"] and len({*titles}) == len(titles)
    text = "\n".join(lines)
    tokens = r"\ntokens      about [\d,]+ in each training, [\d,]+ in 2 trainings"
    assert re.search(rf"{tokens}\ntime        about 0.1 hours of one \w+, without", text)


def test_plan_counts_the_answers_of_all_runs_and_of_the_base_model(plan):
    """Two runs at K = 4 and 2 and in each of 4 loops, and the base model at K = 4 and 2."""
    words = "--benchmarks arithmetic_test --benchmark_limit 10 --eval_num_loops 2 4 --single_loop_accuracy true"
    lines = plan(PAIRS, words, "--compare_with lora --evaluate_base true")
    assert "answers     at most 140 problems and 11,200 generated tokens" in lines
    assert "            evaluate the base model on the same problems, also at K = 2, 4" in lines


def test_plan_names_the_printed_completions(plan):
    held_out = "--num_eval_examples 2"
    for words, line in {
        "": None,
        held_out: "completions of 1 held-out prompt after the last step (`num_sample_completions`)",
        f"{held_out} --eval_strategy epoch --num_sample_completions 2": "completions of 2 held-out prompts at each evaluation "
        "and after the last step (`num_sample_completions`)",
        f"{held_out} --num_sample_completions 0": None,
    }.items():
        samples = [text.removeprefix("samples     ") for text in plan(PAIRS, words) if text.startswith("samples")]
        assert samples == ([line] if line else [])


def test_plan_writes_many_epochs_in_full(plan):
    lines = plan(PAIRS, "--num_train_epochs 1000 --per_device_train_batch_size 4")
    assert "examples    20, 0 held out, 5,000 optimizer steps, 1,000 epochs" in lines


def test_model_of_one_depth_ends_a_dry_run(plan, hrm_text):
    """The trainer raises the same error, by the same function."""
    words = ("--model_name_or_path", str(hrm_text))
    lines = plan(
        PAIRS, *words, "--depth_sampling uniform", error="must be 'fixed' for `model_type: hrm_text`, got 'unif"
    )
    assert lines == []
    lines = plan(PAIRS, *words, "--depth_sampling fixed")
    assert lines[0] == f"model       {hrm_text}, K = 3 loops"


def test_examples_without_one_prompt_end_a_dry_run(plan, hrm_text):
    """The trainer raises the same error later, with the weights of the model."""
    words = ("--model_name_or_path", str(hrm_text))
    one, two = chat("user", "assistant"), chat("user", "assistant", "user", "assistant")
    several = r"Example 1 \(`--preview 1`\): The examples of HRM-Text must have one answer"
    assert plan([one, two], *words, "--assistant_only_loss true", error=several) == []
    plan([one], *words, error=r"Example 0 .*must begin with a prompt without a loss")
    plan(
        PAIRS,
        *words,
        "--packing true --max_length 64",
        error="`packing` and `padding_free` must be False for HRM-Text",
    )
    assert plan([one], *words, "--assistant_only_loss true")


def test_plan_has_the_disk_of_chosen_modules_and_other_models(plan, hrm_text, monkeypatch):
    for words in ("--lora_target_modules q_proj", f"--model_name_or_path {hrm_text}"):
        text = "\n".join(plan(PAIRS, words))
        number = int(re.search(r"([\d,]+) parameters", text)[1].replace(",", ""))
        assert f"disk        about {4 * number / 1e6:.1f} MB for adapters" in text, words
    error = "^`target_modules` must be modules of the model, such as .*, got q_prj. Did you mean 'q_proj'"
    plan(PAIRS, "--lora_target_modules q_prj", error=error)
    monkeypatch.setattr("loopdropout_trainer.errors._commands", ["sft"])  # as in the command
    plan(PAIRS, "--lora_target_modules q_prj", error=error.replace("target_modules", "lora_target_modules"))


def test_plan_says_why_the_disk_is_not_computed():
    model = ModelArguments(model_name_or_path="nobody/no-model")
    training = Training(LoopDropoutConfig("run", bf16=False), {}, model, {}, 16, Sizes())
    assert describe_costs([(training, 1)])["disk"] == "not computed, because the sizes of the model are not known"
    of_adapter = training._replace(rank=None)
    assert describe_costs([(of_adapter, 1)])["disk"] == "not computed, because the sizes of the adapter are not known"


def test_other_trainers_refuse_several_draws_in_a_plan():
    start = read_start(ModelArguments(model_name_or_path="tiny-ouro"), AdapterArguments())
    for config in (LoopDropoutDPOConfig, LoopDropoutGRPOConfig):
        args = config("run", rule="lora_dropout", bf16=False)
        with user_error("must have one draw for a micro-batch, got 'lora_dropout'"):
            make_training(args, {}, start)
    with user_error("`precompute_ref_log_probs` must be False"):
        LoopDropoutDPOConfig("run", precompute_ref_log_probs=True, bf16=False)


def test_plan_names_fields_that_cannot_act(plan, log):
    """Because of other fields, or of the number of steps."""
    stop = "--early_stopping_patience 2 --eval_strategy steps --num_eval_examples 2"
    plan(PAIRS, f"{stop} --max_steps 31 --eval_steps 1000 --greater_is_better true --hub_model_id me/x")
    for sentence in (
        "`early_stopping_patience` has no effect, because `eval_steps` is 1,000 and the training has 31 steps",
        "`greater_is_better` is true for the metric loss",
        "`hub_model_id` has no effect, because `push_to_hub` is false, so nothing is pushed.",
    ):
        assert sentence in log.text
    log.clear()
    plan(PAIRS, f"{stop} --max_steps 31 --eval_steps 5 --push_to_hub true --hub_model_id me/x")
    plan(PAIRS, "--merge true --push_merged_to_hub true --hub_model_id me/x")
    assert "no effect" not in log.text


def test_dry_run_ends_with_a_folder_that_cannot_be_written(plan, tmp_path, monkeypatch):
    """The training says it before it loads the model. A sweep has the same check, also when it starts."""
    (tmp_path / "file").write_text("")
    message = f"must be a folder, got file/run, but {tmp_path}/file is a file. Set another"
    assert plan(PAIRS, "--output_dir file/run", error=message)[0].startswith("model  ")
    for system_folder in ("/proc", "/sys"):  # where root seems to have the permission to write
        message = (
            f"must be a folder that can be written, got {system_folder}/run, but {system_folder} takes no files. Set"
        )
        plan(PAIRS, f"--output_dir {system_folder}/run", error=message)
        with user_error(message), lock_folder(f"{system_folder}/run"):
            pass
    with monkeypatch.context() as patch:  # another file system in which no folder can be made
        patch.setattr("loopdropout_trainer.files._SYSTEM_FOLDERS", ())
        with (
            user_error(r"`output_dir` /proc/run cannot be made \(No such file .*\). Set another"),
            lock_folder("/proc/run"),
        ):
            pass
    message = f"must be a folder that can be written, got a/run, but {tmp_path} is read-only. Set another"
    words = ["--recipe", "quickstart.yaml", "--learning_rates", "1e-4", "--output_dir", "a/run", "--dry_run"]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root can write everywhere
    plan(PAIRS, "--output_dir a/run", error=message)
    for dry_run in ("true", "false"):
        with user_error(message):
            load_script("recipes/sweep.py").main([*words, dry_run])
    assert not (tmp_path / "a").exists()


def test_plan_refuses_several_draws_under_deepspeed():
    """Which the trainer refuses by the same function."""
    args = LoopDropoutConfig("run", rule="lora_dropout", bf16=False)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with user_error("`deepspeed` must not be set with the rule 'lora_dropout', because it steps after each pass"):
        make_training(args, {}, read_start(ModelArguments(model_name_or_path="tiny-ouro"), AdapterArguments()))


@pytest.mark.parametrize("package", ["galore_torch", "liger_kernel"])
def test_plan_names_missing_packages(plan, package):
    words = {"galore_torch": "--optim galore_adamw", "liger_kernel": "--use_liger_kernel true"}[package]
    if find_spec(package) is not None:
        pytest.skip("It is installed.")
    plan(PAIRS, words, error=f"`{words.split()[0][2:]}`.* needs a missing package")


def test_plan_has_the_modules_of_the_adapter_that_trains(plan, tmp_path):
    """Its numbers are those of its files, and its kind must be that of the rule."""
    model = with_adapter(load_model("tiny-ouro"), r=4, target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "start")
    start = f"--adapter_name_or_path {tmp_path / 'start'}"
    number = model.get_nb_trainable_parameters()[0]
    lines = plan(PAIRS, start)
    assert f"adapter     starts from {tmp_path / 'start'}, rank 4, {number:,} parameters" in lines
    assert any(line.startswith(f"disk        about {4 * number / 1e6:.1f} MB for adapters") for line in lines)
    model = with_adapter(load_model("tiny-ouro"), r=4)
    add_gates(model, rule=RULES["independent"]())
    model.save_pretrained(tmp_path / "independent")
    start = f"--adapter_name_or_path {tmp_path / 'independent'}"
    plan(PAIRS, start, error="The rule 'loop_dropout' trains a shared adapter, but the model's adapter has")
    plan(PAIRS, start, "--rule independent --num_loops 2", error="belongs to 4 loops, but the model runs 2")
    number = model.get_nb_trainable_parameters()[0]  # of all loops
    assert f"disk        about {4 * number / 1e6:.1f} MB" in "\n".join(plan(PAIRS, start, "--rule independent"))


def test_plan_counts_the_problems_of_own_benchmarks(plan):
    """Which the limit only bounds. Those of a file on the Hub, which cannot be reached, are not counted."""
    own = '{"mine":{"files":"problems.jsonl","like":"gsm8k"}}'
    words = [
        "--num_eval_examples 2 --benchmarks mine --evaluate_base false --benchmark_limit 500 --own_benchmarks",
        own,
    ]
    write_lines(Path("problems.jsonl"), [{"question": "1 + 1?", "answer": "#### 2"}] * 3)
    lines = "\n".join(plan(PAIRS, *words))
    assert "evaluate mine (3 problems)\n" in lines and "at most 3 problems and 768 generated tokens" in lines
    hub_file = "hf://datasets/user/name/problems.jsonl"
    lines = "\n".join(plan(PAIRS, *words[:1], own.replace("problems.jsonl", hub_file)))
    assert "evaluate mine, at most 500 problems each\n" in lines and "at most 500 problems and 128,000" in lines


OWN = '--benchmarks mine --own_benchmarks {{"mine":{{"files":"{}.jsonl","like":"gsm8k"}}}}'


@pytest.mark.parametrize(("words", "error"), [
    ("--benchmarks gsm9k", "`gsm9k` must be a task of lm-eval or one of .* Did you mean 'gsm8k'"),
    ("--diagnose_task gsm9k", "`gsm9k` must be a task of lm-eval or one of .* Did you mean 'gsm8k'"),
    ("--benchmarks mine.yaml", "mine.yaml can run code"),
    ("--benchmarks development", "The task `development` must have held-out examples"),
    ("--single_loop_batches 1", "`num_eval_examples` must be at least 1 if `single_loop_batches` is set."),
    (OWN.format("none"), "`files` of the benchmark `mine` must be files, and none.jsonl does not exist in /.*, where"),
    (OWN.format("rows"), "The task `mine` cannot be loaded: .*question.* the columns are prompt, completion"),
])  # fmt: skip
def test_plan_refuses_tasks_that_cannot_be_measured(plan, monkeypatch, words, error):
    """As the training does before it trains."""
    from loopdropout_trainer.evaluation import loading

    load_manager = loading._load_manager  # lm-eval's index takes 10 seconds
    monkeypatch.setattr(loading, "_load_manager", lambda folder, include_defaults: load_manager(folder, False))
    assert plan(PAIRS, words, error=error) == []


def test_plan_has_every_setting_that_changes_the_training(plan):
    """Random depths in a sentence, others as in a recipe. Those at their defaults, or with another line, are left out."""
    depth = '--depth_sampling uniform --depth_sampling_args {"low":2,"high":6} --rule exactly_m'
    chosen = (
        "--packing true --lr_scheduler_type cosine --weight_decay 0.1 --gate_seed 4 --lora_dropout 0.0 --bf16 false"
    )
    lines = plan(PAIRS, depth, chosen, "--logging_steps 5 --learning_rate 1e-3 --max_length 64")
    fields = "depth_sampling: uniform, depth_sampling_args: {low: 2, high: 6}"
    assert f"depth       each step runs 2 to 6 loops, drawn at random ({fields})" in lines
    assert "trainings   Exactly m loops (m = 2) in run" in lines
    settings = "packing: true, lr_scheduler_type: cosine, weight_decay: 0.1, gate_seed: 4, max_length: 64"
    assert [line for line in lines if line.startswith("settings")] == [
        f"settings    chat_template: tulu2, bf16: false, {settings}"
    ]
    lines = plan(PAIRS, "--depth_sampling poisson --bf16 true --target_prefix", "x" * 70)
    assert "            time and memory are computed for 4 loops. The deepest step needs the most memory" in lines
    assert f"settings    chat_template: tulu2, target_prefix: {'x' * 70}" in lines
    lines = plan(PAIRS, "--depth_sampling fixed --num_eval_examples 1 --eval_strategy steps --logging_steps 5")
    assert not any(line.startswith("depth") for line in lines)
    assert any(line.endswith(", eval_strategy: steps, eval_steps: 5") for line in lines)
    error = "`low` in `depth_sampling_args` must be from 1 to `high`, 4, got 5. `high` is the model's own depth unless"
    plan(PAIRS, '--depth_sampling uniform --depth_sampling_args {"low":5}', error=error)
