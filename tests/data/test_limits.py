"""Files and chat templates of other people end in a sentence, in bounded time and memory."""

import gzip
import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from datasets import config
from jinja2 import TemplateError
from transformers import TokenizersBackend

from helpers.errors import user_error
from helpers.files import TINY_OURO_PATH, write_lines
from loopdropout_trainer import limits, load_model
from loopdropout_trainer.data import DataArguments, load_datasets, tokenize
from loopdropout_trainer.data.caching import digest_files
from loopdropout_trainer.evaluation import LoopedLM
from loopdropout_trainer.limits import bounded_rendering, check_nesting, render_chat
from loopdropout_trainer.prompts import PromptFormat, make_turns
from loopdropout_trainer.tokenizers import end_token_ids, load_tokenizer


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ENDLESS = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 0.3 seconds",
    ),
    "range": ("{% for i in range(9999999999) %}{% endfor %}", "Range too big"),
    "memory": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "more than (256 MB of memory|0.3 seconds)",  # a busy machine may need the time for the memory
    ),
    "product": ("{{ 'a' * 10 ** 14 }}", "more than 256 MB of memory"),
    "length": ("{{ 'a' * 10 ** 6 }}a", "makes 1,000,001 characters of the conversation"),
    "power": (
        "{{ 10 ** (10 ** 9) }}",
        "more than (256 MB of memory|0.3 seconds)",
    ),  # jinja2 itself ignores its first error
    "type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "end": ("{{ raise_exception('No system turns') }}", "cannot render .*: No system turns"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def prepare(tokenizer, folder):
    path = write_lines(folder / "chat.jsonl", [{"messages": TURNS}])
    load_datasets(DataArguments(train_files=[path]), tokenizer, 100)


def evaluate(tokenizer, folder):
    LoopedLM(load_model("tiny-ouro"), tokenizer).apply_chat_template([{"role": "system", "content": "x"}, *TURNS[:1]])


RENDERERS = {
    "data": prepare,
    "end tokens": lambda tokenizer, folder: end_token_ids(tokenizer),
    "chat and serve": lambda tokenizer, folder: PromptFormat(tokenizer, None).encode(make_turns("Hi")),
    "evaluate": evaluate,
}


@pytest.fixture
def low_limits(monkeypatch):
    monkeypatch.setattr(limits, "RENDER_SECONDS", 1)
    monkeypatch.setattr(limits, "RENDER_MEMORY", 256 << 20)
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 10**6)


def seconds_until(reason):
    """A short time where it is the limit. The other limits must be reached before it, also on a busy machine."""
    return 0.3 if "seconds" in reason else 1


def state():
    return (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL),
    )


@pytest.mark.parametrize("render", RENDERERS.values(), ids=RENDERERS)
@pytest.mark.parametrize(("template", "reason"), ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_end_in_a_sentence(tmp_path, low_limits, monkeypatch, template, reason, render):
    monkeypatch.setattr(limits, "RENDER_SECONDS", seconds_until(reason))
    tokenizer = load_tokenizer(TINY_OURO_PATH)
    tokenizer.chat_template = template
    before, began = state(), time.monotonic()
    with user_error(f"[Tt]emplate.*{reason}"):
        render(tokenizer, tmp_path)
    assert state() == before and time.monotonic() - began < 20


def test_templates_of_trl_end_in_a_sentence(low_limits, monkeypatch):
    """TRL's trainers call the tokenizer themselves. What follows the template has no limits."""
    tokenizer = load_tokenizer(TINY_OURO_PATH)
    for template, reason in (ENDLESS[name] for name in ("loops", "product", "length")):
        tokenizer.chat_template = template
        monkeypatch.setattr(limits, "RENDER_SECONDS", seconds_until(reason))
        with user_error(f"`chat_template` .*{reason}"):
            tokenizer.apply_chat_template(TURNS, return_dict=True)
    with pytest.raises(TemplateError, match="No system turns"):  # TRL and lm-eval catch it
        tokenizer.apply_chat_template(TURNS, chat_template=ENDLESS["end"][0])
    found = []

    before = state()
    encode = TokenizersBackend._encode_plus

    def watch(self, *args, **kwargs):
        found.append(state())
        return encode(self, *args, **kwargs)

    tokenizer.chat_template = "{{ messages[0].content }}"
    monkeypatch.setattr(TokenizersBackend, "_encode_plus", watch)
    tokenizer.apply_chat_template(TURNS)
    assert found == [before]


def test_the_last_of_several_threads_removes_the_limit_of_memory():
    before = state()
    first, second = bounded_rendering(TURNS), bounded_rendering(TURNS)
    with ThreadPoolExecutor(1) as pool:
        first.__enter__()
        pool.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        during = state()
        pool.submit(second.__exit__, None, None, None).result()
    assert during[0] != before[0] and state() == before


def test_a_timer_of_the_caller_runs_on():
    signal.setitimer(signal.ITIMER_REAL, 600, 7)
    try:
        load_tokenizer(TINY_OURO_PATH, chat_template="tulu2").apply_chat_template(TURNS)
        seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert 0 < seconds <= 600 and interval == 7


def test_usual_templates_are_not_limited():
    tokenizer = load_tokenizer(TINY_OURO_PATH, chat_template="tulu2")
    text = TokenizersBackend.apply_chat_template(tokenizer, TURNS, tokenize=False)
    assert render_chat(tokenizer, TURNS) == tokenizer.apply_chat_template(TURNS, tokenize=False) == text
    ids = TokenizersBackend.apply_chat_template(tokenizer, TURNS)["input_ids"]
    assert (
        tokenize({"messages": TURNS}, tokenizer)["input_ids"]
        == tokenizer.apply_chat_template(TURNS)["input_ids"]
        == ids
    )


DEEP = {
    "lists": "[" * 200_000 + "]" * 200_000,
    "objects": '{"a": ' * 200_000 + "1" + "}" * 200_000,
    "unclosed": "[" * 200_000,
    "after text": json.dumps(['"\\', "[" * 300]) + "[" * 300,
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("value", DEEP.values(), ids=DEEP)
def test_deep_json_ends_in_a_sentence(tmp_path, value, name):
    text = f'{{"text": "a"}}\n{{"text": {value}}}\n'
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    sources = [{"train_files": [str(tmp_path / name)]}]
    if not name.endswith("gz"):
        sources.append({"dataset_name": str(tmp_path)})
    # As after a command that ended while it read the file
    Path(config.HF_DATASETS_CACHE, f"contents-{digest_files([tmp_path / name])}").mkdir()
    for fields in sources:
        with user_error(f"{name} must be JSON of at most 200 levels of lists and objects, got more"):
            load_datasets(DataArguments(**fields), load_tokenizer(TINY_OURO_PATH))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_brackets_in_texts_are_not_levels(tmp_path, monkeypatch, size):
    texts = ["[" * 300, '"' + "{" * 300, "\\" + "[" * 300, '\\"' + "[" * 300 + "\\\\", "\n[" * 300]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": texts, "nested": [[[[1]]]]}) + "\n" + json.dumps({"a": "["}))
    monkeypatch.setattr(limits, "CHUNK", size)
    check_nesting(path)
    monkeypatch.setattr(limits, "MAX_NESTING", 4)
    with user_error("at most 4 levels"):
        check_nesting(path)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"text": "a"}\n{"text": "Ü"}\n'), ("a.csv", "text\nÜ")])
def test_files_in_other_encodings_are_one_sentence(tmp_path, encoding, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    source = {"utf-16": "UTF-16"}.get(encoding, "CP1252")
    with user_error(
        f"{path} must be a text in UTF-8, got the byte 0x(dc in line 2|ff in line 1). Convert it, .* `iconv -f {source} "
    ):
        load_datasets(DataArguments(train_files=[str(path)]), load_tokenizer(TINY_OURO_PATH))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("field", ["train_files", "eval_files"])
def test_pipes_and_folders_are_not_read(tmp_path, field, name):
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}])
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder").mkdir()
    for path, reason in ((tmp_path / name, "a pipe or a device"), (tmp_path / "folder", "Set `dataset_name` instead")):
        with user_error(f"`train_files` and `eval_files` must be files, got .*{path.name}.*{reason}"):
            fields = {"train_files": [rows], field: [str(path)]}
            load_datasets(DataArguments(**fields), load_tokenizer(TINY_OURO_PATH))
