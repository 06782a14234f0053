"""The key of cached answers changes with everything that they depend on, and reading a cache never runs code."""

import gc
import json
import os
import pickle
import sqlite3
import stat
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from lm_eval.api.instance import Instance
from peft import LoraConfig

from helpers.errors import user_error
from helpers.tiny import adapted, tiny_ouro, varied
from loopdropout_trainer import use_gates
from loopdropout_trainer.evaluation import LoopedLM, answer_code, answers, evaluate_tasks, looped_lm
from loopdropout_trainer.evaluation.answer_code import count_kept
from loopdropout_trainer.evaluation.answers import AnswerCache, answer_key
from loopdropout_trainer.files import PACKAGE
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.results import imported_code
from loopdropout_trainer.tokenizers import load_tokenizer


def first(model, ending):
    return next(parameter for name, parameter in model.named_parameters() if name.endswith(ending))


def lora_layer(model):
    return next(module for module in model.modules() if hasattr(module, "lora_A"))


def set_second_adapter(model):
    model.add_adapter("other", LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=list(layer_names(model))))
    model.set_adapter("other")


def layer_names(model):
    return [
        name.removeprefix("base_model.model.") for name, module in model.named_modules() if hasattr(module, "lora_A")
    ]


def add_token(tokenizer):
    tokenizer.add_tokens(["<new>"])


def set_attribute(path, value):
    """Return a function that sets `model.path` of the looped model."""

    def change(model, tokenizer):
        *parents, name = path.split(".")
        target = find_looped_model(model)
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


CHANGES = {
    "weight": lambda model, tokenizer: first(model, "down_proj.base_layer.weight").data[0, 0].add_(1),
    "dtype": lambda model, tokenizer: model.to(torch.bfloat16),
    "frequencies, a buffer that is not saved": lambda model, tokenizer: first_buffer(model).mul_(2),
    "A": lambda model, tokenizer: first(model, "lora_A.default.weight").data[0, 0].add_(1),
    "B": lambda model, tokenizer: first(model, "lora_B.default.weight").data[0, 0].add_(1),
    "scale of one layer": lambda model, tokenizer: lora_layer(model).set_scale("default", 0.5),
    "scale as of another alpha": lambda model, tokenizer: lora_layer(model).scaling.update(default=3.5),
    "active adapter": lambda model, tokenizer: set_second_adapter(model),
    "adapters off": lambda model, tokenizer: model.base_model.disable_adapter_layers(),
    "adapter merged": lambda model, tokenizer: model.merge_adapter(),
    "hook": lambda model, tokenizer: norm(model).register_forward_hook(lambda module, args, output: 2 * output),
    "depth": set_attribute("num_loops", 3),
    "norm": set_attribute("config.rms_norm_eps", 1e-2),
    "attention": set_attribute("config._attn_implementation", "eager"),
    "norm of one layer": lambda model, tokenizer: vars(norm(model)).update(variance_epsilon=0.5, eps=0.5),
    "end token": set_attribute("generation_config.eos_token_id", [0, 40]),
    "penalty": set_attribute("generation_config.repetition_penalty", 2.0),
    "tokens": lambda model, tokenizer: add_token(tokenizer),
    "special token": lambda model, tokenizer: setattr(tokenizer, "eos_token", "a"),
    "chat template": lambda model, tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
    "longest text": lambda model, tokenizer: setattr(tokenizer, "model_max_length", 77),
}


def norm(model):
    return next(module for name, module in model.named_modules() if "norm" in name)


def first_buffer(model):
    return next(buffer for name, buffer in model.named_buffers())


def use(tokenizer):
    """Pad and truncate, which changes the state of the backend of any other tokenizer."""
    tokenizer(["a", "bcd"], padding="longest", truncation=True, max_length=2)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(3)


SAME = {
    "nothing": lambda model, tokenizer: None,
    "padding and truncation": lambda model, tokenizer: use(tokenizer),
    "padding side": lambda model, tokenizer: setattr(tokenizer, "padding_side", "left"),
    "name of the folder": set_attribute("config._name_or_path", "elsewhere"),
    "name of the tokenizer": lambda model, tokenizer: setattr(tokenizer, "name_or_path", "elsewhere"),
    "training of the weights": lambda model, tokenizer: model.requires_grad_(False),
    "gradient checkpointing": lambda model, tokenizer: model.gradient_checkpointing_enable(),
    "a use of the model": lambda model, tokenizer: LoopedLM(model, tokenizer).generate_until(
        [Instance("generate_until", {}, ("1 + 1", {"max_gen_toks": 2, "until": []}), 0)], disable_tqdm=True
    ),
}


def new_model():
    return adapted(varied(tiny_ouro(vocab_size=614), std=0.1)), load_tokenizer("tiny-ouro")


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with(change):
    model, tokenizer = new_model()
    before = answer_key(LoopedLM(model, tokenizer))
    CHANGES[change](model, tokenizer)
    assert answer_key(LoopedLM(model, tokenizer)) != before


@pytest.mark.parametrize("change", SAME)
def test_key_stays_with(change):
    model, tokenizer = new_model()
    before = answer_key(LoopedLM(model, tokenizer))
    SAME[change](model, tokenizer)
    assert answer_key(LoopedLM(model, tokenizer)) == before
    assert answer_key(LoopedLM(*new_model(), batch_size=3)) == before


OPTIONS = [
    {"num_loops": 2}, {"gates": "1-0-0-0"}, {"gates": "0-1-0-0"}, {"gates": "2-1-1-1"}, {"readout": 2},
    {"max_length": 100}, {"add_bos_token": True}, {"prefix_token_id": 7}, {"softmax_dtype": "bfloat16"},
    {"chat_template_args": {"a": 1}}, {"think_end_token": "x"}, {"truncation": True},
]  # fmt: skip


def test_key_changes_with_each_setting():
    model, tokenizer = new_model()
    keys = {answer_key(LoopedLM(model, tokenizer, **options)) for options in [{}, *OPTIONS]}
    with use_gates(model, [1, 0, 1, 1]):  # in force around the evaluation
        keys.add(answer_key(LoopedLM(model, tokenizer)))
    assert len(keys) == len(OPTIONS) + 2


def test_key_changes_with_the_code(tmp_path, monkeypatch):
    lm = LoopedLM(*new_model())
    keys = {answer_key(lm)}
    file = tmp_path / "models.py"
    (tmp_path / "own_part.py").write_text("")
    file.write_text("import own_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imported_code, "IMPORTED", [str(file)])
    keys.add(answer_key(lm))
    file.write_text("import own_part\nA = 2\n")
    keys.add(answer_key(lm))
    (tmp_path / "own_part.py").write_text("B = 2\n")
    keys.add(answer_key(lm))
    monkeypatch.setattr(answer_code, "version", lambda name: "0")
    keys.add(answer_key(lm))
    monkeypatch.setattr(answer_code, "PACKAGE", PACKAGE / "models")
    keys.add(answer_key(lm))
    assert len(keys) == 6


def test_answers_of_other_code_are_named(tokenizer, tmp_path, monkeypatch, log):
    """As after an update in the middle of an evaluation, also in the plan. It is said once, and not of other settings."""

    def evaluate(**options):
        log.clear()
        lm = LoopedLM(*new_model(), **options)
        evaluate_tasks(lm, ["arithmetic_test"], limit=2, max_new_tokens=2, cache_dir=tmp_path / "cache")
        return log.text

    file = tmp_path / "own_models.py"
    file.write_text("A = 1\n")
    monkeypatch.setattr(imported_code, "IMPORTED", [str(file)])
    assert "answers" not in evaluate() + evaluate(num_loops=2) + evaluate(truncation=True)
    assert count_kept(tmp_path / "cache") == (6, 0)
    file.write_text("A = 2\n")
    assert count_kept(tmp_path / "cache") == (0, 6)
    sentence = (
        f"The 2 kept answers of this model in {tmp_path / 'cache'} cannot be used, because {{}} changed since. So all"
    )
    assert sentence.format("a file of `--import`") in evaluate(num_loops=2)
    assert "answers" not in evaluate(num_loops=2) + evaluate(num_loops=2, truncation=True)
    file.write_text("A = 3\n")
    monkeypatch.setattr(answer_code, "version", lambda name: "0")
    sentence = sentence.format("a file of `--import` and a library or the model's code")
    assert sentence in evaluate(num_loops=2)
    assert count_kept(tmp_path / "cache") == (2, 10)


def request(text, kind="generate_until", **options):
    arguments = (text, {"until": [], "max_gen_toks": 2, **options}) if kind == "generate_until" else (text, " 2")
    return Instance(kind, {}, arguments if kind != "loglikelihood_rolling" else (text,), 0)


def test_same_command_generates_nothing_again(tokenizer, tmp_path, monkeypatch):
    """An evaluation at several depths changes the padding of a tokenizer of transformers."""
    model, _ = new_model()
    counts, generate = [], looped_lm.generate_greedy
    monkeypatch.setattr(
        looped_lm, "generate_greedy", lambda *args, **kw: counts.append(len(args[2])) or generate(*args, **kw)
    )
    for _ in range(3):
        for depth in (2, 3):
            lm = LoopedLM(model, tokenizer, num_loops=depth)
            evaluate_tasks(lm, ["arithmetic_test"], limit=2, max_new_tokens=2, cache_dir=tmp_path)
    assert counts == [2, 2]


def test_answers_of_each_kind_are_kept(tokenizer, tmp_path):
    model, _ = new_model()
    lm = LoopedLM(model, tokenizer)
    kinds = ("generate_until", "loglikelihood", "loglikelihood_rolling")
    asked = {kind: [request(text, kind) for text in ("1 + 1", "2", "1 + 1")] for kind in kinds}
    expected = {kind: getattr(lm, kind)(requests, disable_tqdm=True) for kind, requests in asked.items()}
    for number in range(2):
        with lm.keep_answers(tmp_path):
            for kind, requests in asked.items():
                if number:  # nothing is computed
                    lm.answers.complete = lambda kind, found, compute: AnswerCache.complete(
                        lm.answers, kind, found, None
                    )
                assert getattr(lm, kind)(requests, disable_tqdm=True) == expected[kind]
    (path,) = tmp_path.iterdir()
    assert len(path.read_bytes().splitlines()) == 6


def test_random_answers_are_not_kept(tokenizer, tmp_path):
    model, _ = new_model()
    lm = LoopedLM(model, tokenizer)
    asked = [request("1 + 1", do_sample=True, temperature=3.0, max_gen_toks=8)] * 3
    with lm.keep_answers(tmp_path):
        texts = lm.generate_until(asked, disable_tqdm=True) + lm.generate_until(asked, disable_tqdm=True)
    assert len({*texts}) > 1
    assert not next(tmp_path.iterdir()).read_bytes()


def keep(folder, key="k", answer="7", **options):
    cache = AnswerCache(folder, key, **options)
    (found,) = cache.complete("generate_until", [request("a")], lambda missing: [answer])
    cache.close()
    return found


def test_only_own_answers_are_read(tmp_path, monkeypatch):
    """A stranger makes the file, or edits the file of the user."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    assert keep(tmp_path / "run") == "7" == keep(tmp_path / "run", answer="8")
    assert stat.S_IMODE((tmp_path / "home" / answers.MARK_FILE).stat().st_mode) == 0o600
    (path,) = (tmp_path / "run").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"7"', b'"9"'))
    assert keep(tmp_path / "run", answer="8") == "8"
    path.rename(path.with_name(path.name.replace("_k_", "_other_")))
    path.with_name(path.name.replace("_k_", "_other_")).write_bytes(whole)
    assert keep(tmp_path / "run", key="other", answer="8") == "8"  # an answer of another model
    (tmp_path / "home" / answers.MARK_FILE).write_bytes(b"")  # after a power failure
    assert keep(tmp_path / "new") == "7" == keep(tmp_path / "new", answer="8")
    assert len((tmp_path / "home" / answers.MARK_FILE).read_bytes()) == 32
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "victim"))
    path.write_bytes(whole)
    assert keep(tmp_path / "run", answer="8") == "8"


def test_part_of_a_line_is_not_an_answer(tmp_path):
    keep(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for end in range(len(whole) - 1):  # without its last newline, the line is whole
        path.write_bytes(whole[:end])
        assert keep(tmp_path, answer="8") == "8" == keep(tmp_path, answer="9")
    path.write_bytes(b"[" * 300_000 + b"\n\xff\n" + whole)
    assert keep(tmp_path, answer="8") == "7"


def test_answers_of_other_processes_are_read(tmp_path):
    assert keep(tmp_path, rank=1) == "7" == keep(tmp_path, rank=0, answer="8")


class Touch:
    """A pickle that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_read(tokenizer, tmp_path):
    model, _ = new_model()
    lm, marker, folder = LoopedLM(model, tokenizer), tmp_path / "marker", tmp_path / "cache"
    key = answer_key(lm)
    evaluate_tasks(lm, ["arithmetic_test"], limit=1, max_new_tokens=2, cache_dir=folder)
    (path,) = folder.iterdir()
    path.write_bytes(pickle.dumps(Touch(marker)) + b"\n")
    for name in (f"{key}_rank0.db", f"{key[:16]}_rank0.db"):
        with sqlite3.connect(folder / name) as database:
            database.execute("create table unnamed (key text, value blob)")
            database.execute("insert into unnamed values (?, ?)", ("x", pickle.dumps(Touch(marker))))
    evaluate_tasks(lm, ["arithmetic_test"], limit=1, max_new_tokens=2, cache_dir=folder)
    gc.collect()
    assert not marker.exists()


def test_cache_that_is_not_a_file_raises(tmp_path):
    path = tmp_path / "answers_k_rank0.jsonl"
    for make in (lambda: path.symlink_to(tmp_path / "victim"), lambda: os.mkfifo(path), path.mkdir):
        make()
        with user_error("The cache .*answers_k_rank0.jsonl must be a regular file"):
            keep(tmp_path)
        assert not (tmp_path / "victim").exists()
        path.rmdir() if path.is_dir() else path.unlink()


def test_evaluation_without_a_home_keeps_no_answers(tmp_path, monkeypatch, log):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "file" / "home"))
    assert keep(tmp_path / "run") == "7" and keep(tmp_path / "run", answer="8") == "8"
    assert "The answers of this evaluation cannot be reused" in log.text


def test_strong_adapter_does_not_answer_for_weak(tokenizer, tmp_path):
    """Two folders with the same tensors and another `lora_alpha`."""
    model, _ = new_model()
    model.save_pretrained(tmp_path / "strong")
    model.save_pretrained(tmp_path / "weak")
    config = json.loads((tmp_path / "weak" / "adapter_config.json").read_text())
    changes = [{"lora_alpha": 1}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}, {}]
    tiny_ouro_folder = tmp_path / "base"
    varied(tiny_ouro(), std=0.1).save_pretrained(tiny_ouro_folder)
    tokenizer.save_pretrained(tiny_ouro_folder)
    keys = []
    for change in changes:
        Path(tmp_path / "weak" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        keys.append(answer_key(LoopedLM(str(tiny_ouro_folder), adapter=str(tmp_path / "weak"))))
    assert len({*keys}) == 4
    assert keys[-1] == answer_key(LoopedLM(str(tiny_ouro_folder), adapter=str(tmp_path / "strong")))
