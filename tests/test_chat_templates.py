"""Chat templates: what is rendered, what is trained, where generation stops, and that a trained model keeps all of it."""

import copy
import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, load_script, tiny_ouro
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopdropout_trainer import (
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutSFTTrainer,
    load_adapter,
    merge_and_save,
)
from loopdropout_trainer.data import load_tokenizer, set_chat_template
from loopdropout_trainer.errors import SetupError
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH, ModelArguments
from loopdropout_trainer.settings.tokenizer import CHAT_TOKENS, apply_chat_template, check_turn_end


# First tokens of the published vocabularies; then one token a byte.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<think>", "</think>"]
SPECIAL += ["<|begin_text|>", "<|begin_header|>", "<|end_header|>", "<|end_turn|>", "<|pad|>"]


@pytest.fixture
def chat_tokenizer():
    """A byte tokenizer with the special tokens of all families, and base models' idea of where text ends."""
    return byte_tokenizer(SPECIAL, **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>"))


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1+1? "}
ANSWER = {"role": "assistant", "content": "2\n"}
REASONED = {**ANSWER, "reasoning_content": "Add."}
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


HUGINN = "<|begin_text|><|begin_header|>system<|end_header|>\n\nBe brief.<|end_turn|>"
HUGINN += "<|begin_header|>user<|end_header|>\n\n1+1?<|end_turn|><|begin_header|>Huginn<|end_header|>\n\n"
RENDERED = [
    ("ouro", ANSWER, CHATML, "2<|im_end|>"),
    ("ouro_thinking", ANSWER, CHATML, "2<|im_end|>"),
    ("ouro_thinking", REASONED, CHATML, "<think>\nAdd.\n</think>\n\n2<|im_end|>"),
    ("nanbeige", REASONED, CHATML + "<think>\n", "Add.\n</think>\n\n2<|im_end|>"),
    ("nanbeige", ANSWER, CHATML + "<think>\n\n</think>\n\n", "2<|im_end|>"),
    ("tulu2", ANSWER, "<|system|>\nBe brief.\n<|user|>\n1+1?\n<|assistant|>\n", "2<|endoftext|>"),
    ("huginn", ANSWER, HUGINN, "2<|end_turn|>"),
]


@pytest.mark.parametrize(("name", "answer", "prompt", "trained"), RENDERED)
def test_the_prompt_is_not_trained_and_the_answer_with_its_end_is(chat_tokenizer, name, answer, prompt, trained):
    set_chat_template(chat_tokenizer, name)
    thinking = {"enable_thinking": answer is REASONED}
    turns = [SYSTEM, USER]
    shown = chat_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **thinking)
    assert shown == prompt
    joined = chat_tokenizer.apply_chat_template([*turns, answer], tokenize=False)
    assert joined.removesuffix("\n") == prompt + trained
    encoded = chat_tokenizer.apply_chat_template(
        [*turns, answer, USER, answer], return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    pieces = [[token for token, _ in run] for mask, run in groupby(pairs, key=lambda pair: pair[1]) if mask]
    assert [chat_tokenizer.decode(piece) for piece in pieces] == [trained] * 2
    assert all(piece[-1] == chat_tokenizer.eos_token_id for piece in pieces)


HARMFUL = {  # what a template tries: what its error says; None: it gets nothing at all
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "'__class__' of 'str' object is unsafe",
    "{{ messages | attr('__class__') }}{{ strftime_now.__globals__ }}": None,
    "{{ lipsum.__globals__['os'].system('touch EVIL') }}": "'__globals__' of 'function' object is unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ open('EVIL', 'w') }}": "'open' is undefined",
    "{% set _ = messages.append({}) %}": "'append' of 'list' object is unsafe",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "maximum recursion depth",
    "{% for message in messages %}": "Unexpected end of template",  # broken ones
    "{{ messages[5].content }}": "no element 5",
    "{{ raise_exception('two\nlines') }}": "two lines",
}


@pytest.mark.parametrize(("template", "says"), HARMFUL.items())
def test_a_harmful_or_broken_template_ends_in_one_sentence(chat_tokenizer, tmp_path, template, says):
    evil, turns = tmp_path / "evil", [{"role": "user", "content": "question"}]
    chat_tokenizer.chat_template = template.replace("EVIL", str(evil))
    if says is None:
        assert apply_chat_template(chat_tokenizer, turns, tokenize=False) == ""
    else:
        with pytest.raises(SetupError, match="The chat template of .* cannot be applied: ") as error:
            apply_chat_template(chat_tokenizer, turns, tokenize=False)
        assert says in str(error.value) and "\n" not in str(error.value)
        (tmp_path / "own.jinja").write_text(chat_tokenizer.chat_template)
        with pytest.raises(SetupError, match="own.jinja.* cannot be used|cannot be applied"):
            set_chat_template(chat_tokenizer, str(tmp_path / "own.jinja"))
    assert not evil.exists() and turns == [{"role": "user", "content": "question"}]


def test_trls_chat_template_path_is_another_name_for_a_jinja_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}")
    model = ModelArguments(str(TINY_OURO_PATH))
    own = load_tokenizer(model, chat_template_path=str(tmp_path / "own.jinja"))
    assert own.chat_template == (tmp_path / "own.jinja").read_text()
    with pytest.raises(ValueError, match="A chat template must be .*tulu2, or the path of a Jinja file; got 'x/y'"):
        load_tokenizer(model, chat_template_path="x/y")
    model.chat_template = "ouro"
    with pytest.raises(ValueError, match="`chat_template` and `chat_template_path` exclude each other"):
        load_tokenizer(model, chat_template_path="x/y")


def test_missing_tokens_roles_and_an_end_that_does_not_stop_are_refused(tokenizer, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"`chat_template: ouro` needs <\|im_start\|>"):
        set_chat_template(tokenizer, "ouro")
    for name in CHAT_TOKENS:
        set_chat_template(chat_tokenizer, name)
        with pytest.raises(SetupError, match="A role must be system, user or assistant; got 'tool'"):
            apply_chat_template(chat_tokenizer, [{"role": "tool", "content": "x"}], tokenize=False)
    set_chat_template(chat_tokenizer, "ouro")
    chat_tokenizer.eos_token = "<|endoftext|>"
    with pytest.raises(ValueError, match=r"turn with '<\|im_end\|>', and generation stops at '<\|endof"):
        check_turn_end(chat_tokenizer)


OWN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OWN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = OWN.replace("{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
TURNS = {"messages": [USER, ANSWER]}
CONVERSATIONS = {
    "messages": (OWN, TURNS, {}),
    "marked": (MARKED, TURNS, {"assistant_only_loss": True}),
    "prompt and completion": (OWN, {"prompt": [USER], "completion": [ANSWER]}, {}),
    "chosen and rejected": (
        OWN,
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "3"}]},
        None,
    ),
    "template by path": (None, TURNS, {"chat_template_path": "own.jinja"}),
    "texts": (None, {"prompt": "1+1?", "completion": " 2"}, {}),
    "texts with another end": (None, {"prompt": "1+1?", "completion": " 2"}, {"eos_token": "<|im_end|>"}),
}


@pytest.mark.parametrize("way", CONVERSATIONS)
def test_generation_stops_at_what_is_trained_as_the_end(config, chat_tokenizer, tmp_path, monkeypatch, way):
    """Ouro's shape: text ends with <|endoftext|>, turns with <|im_end|>."""
    template, row, fields = CONVERSATIONS[way]
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(OWN)
    tiny_ouro(vocab_size=280, eos_token_id=0, bos_token_id=0, pad_token_id=0).save_pretrained("base")
    chat_tokenizer.chat_template = template
    cls, config_class = LoopDropoutSFTTrainer, LoopDropoutConfig
    if fields is None:
        cls, config_class, fields = LoopDropoutDPOTrainer, LoopDropoutDPOConfig, {}
    rows = Dataset.from_list([row] * 8)
    args = config(config_class, max_steps=1, **fields)
    trainer = cls("base", args=args, train_dataset=rows, processing_class=chat_tokenizer)
    trained = trainer.train_dataset[0].get("chosen_ids") or trainer.train_dataset[0]["input_ids"]
    end = [token for token in trained if token < len(SPECIAL)][-1]
    assert end == (0 if way == "texts" else 2)
    trainer.save_model("adapter")
    merge_and_save(trainer.model, "merged", chat_tokenizer)
    again = load_adapter(AutoModelForCausalLM.from_pretrained("base"), "adapter")
    merge_and_save(again, "merged_again", chat_tokenizer)
    for folder in ("merged", "merged_again"):
        ends = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
        assert ends == 0 if way == "texts" else sorted(ends) == [0, 2], folder


def test_an_end_that_cannot_stop_generation_is_refused(config, chat_tokenizer):
    rows = Dataset.from_list([TURNS] * 8)

    def train(template, **fields):
        chat_tokenizer.chat_template = template
        model = tiny_ouro(vocab_size=280, eos_token_id=0, bos_token_id=0, pad_token_id=0)
        LoopDropoutSFTTrainer(model, config(**fields), train_dataset=rows, processing_class=chat_tokenizer)

    with pytest.raises(ValueError, match=r"turn with ' END\\n', without a special token .*: let it write `eos_token`"):
        train(OWN.replace("<|im_end|>", " END"))
    late = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    with pytest.raises(ValueError, match=r"generation marks leave out <\|im_end\|>"):
        train(late, assistant_only_loss=True)
    train(late)  # all tokens are targets


def test_the_end_of_a_recipes_turns_is_saved_and_can_be_named(chat_tokenizer, tmp_path):
    tiny_ouro(vocab_size=280, eos_token_id=0, bos_token_id=0, pad_token_id=0).save_pretrained(tmp_path / "base")
    chat_tokenizer.chat_template = OWN
    chat_tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps(TURNS) + "\n")
    (tmp_path / "marked.jinja").write_text(MARKED)
    command = ["--model_name_or_path", tmp_path / "base", "--train_files", tmp_path / "rows.jsonl", "--max_steps", 1]
    command += ["--dtype", "float32", "--bf16", "false", "--report_to", "none", "--merge", "true"]
    marked = ["--chat_template", tmp_path / "marked.jinja", "--assistant_only_loss", "true"]
    sft = load_script("recipes/sft.py")
    for name, more in {"own": [], "named": [*marked, "--eos_token", "<|im_end|>"]}.items():
        sft.main([*map(str, [*command, *more, "--output_dir", tmp_path / name])])
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name / "merged")
        assert 2 in merged.generation_config.eos_token_id
        saved = AutoTokenizer.from_pretrained(tmp_path / name / "merged")
        assert saved.eos_token_id == (2 if name == "named" else 0)
    with pytest.raises(ValueError, match=r"generation stops at '<\|endoftext\|>': set `eos_token` to the template's"):
        sft.main([*map(str, [*command, *marked, "--output_dir", tmp_path / "refused"])])
    with pytest.raises(ValueError, match=r"`eos_token` <\|none\|> is no token of the tokenizer"):
        sft.main([*map(str, [*command, "--eos_token", "<|none|>", "--output_dir", tmp_path / "refused"])])


def test_a_trained_model_keeps_template_and_end_of_turn(config, chat_tokenizer, tmp_path):
    tiny_ouro(vocab_size=280, eos_token_id=0, bos_token_id=0, pad_token_id=0).save_pretrained(tmp_path / "base")
    set_chat_template(chat_tokenizer, "ouro_thinking")
    rows = Dataset.from_list([{"messages": [SYSTEM, USER, REASONED]}] * 8)
    args = config(max_steps=1, assistant_only_loss=True)
    trainer = LoopDropoutSFTTrainer(str(tmp_path / "base"), args, train_dataset=rows, processing_class=chat_tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    trained = batch["labels"][batch["labels"] != -100]
    assert chat_tokenizer.decode(trained) == "<think>\nAdd.\n</think>\n\n2<|im_end|>"
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    merge_and_save(trainer.model, tmp_path / "merged", chat_tokenizer)
    for folder in ("adapter", "merged"):
        saved = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert saved.chat_template == chat_tokenizer.chat_template
        assert (saved.bos_token_id, saved.eos_token_id, saved.pad_token_id) == (1, 2, 0)
        check_turn_end(saved)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ends = torch.tensor(model.generation_config.eos_token_id).flatten().tolist()
    assert 2 in ends and model.generation_config.pad_token_id == 0


def test_a_tokenizer_as_template_whose_tokens_the_model_lacks_is_refused(tokenizer, make_sft, tmp_path):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    other.save_pretrained(tmp_path / "padded")
    other.add_tokens(["<turn>"])
    other.save_pretrained(tmp_path / "longer")
    for name, what in (("padded", "as many tokens as divide by 64"), ("longer", "its <turn>")):
        with pytest.raises(ValueError, match=f"{name} is a tokenizer, and TRL would give the model {what}, untrained"):
            make_sft(chat_template_path=str(tmp_path / name))
