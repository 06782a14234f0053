"""The format of prompts, which `chat` and both engines of `serve` share."""

import jinja2
import pytest
from tokenizers.processors import TemplateProcessing

from helpers.errors import user_error
from helpers.files import load_script
from helpers.tiny import with_adapter
from loopdropout_trainer import load_model
from loopdropout_trainer.prompts import PromptFormat, choose_prompt_format, make_turns
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.tokenizers import load_tokenizer


TEXT = "Question: {question}\nAnswer:"
CHAT = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}{% endfor %}[assistant]"
PENS = "Tom has 3 boxes. {% raw %} \\n How many? {question}"


def turns(*roles):
    return [{"role": role, "content": PENS} for role in roles]


@pytest.fixture
def tokenizer():
    return load_tokenizer("tiny-ouro")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("text", [TEXT, '{% "ü" {# Q: {Question Text}\\n\n'])
def test_text_is_the_training_prompt_in_all_engines(tokenizer, text, begins):
    if begins:
        token = tokenizer.eos_token, tokenizer.eos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{token[0]} $A", special_tokens=[token])
    prompt_format = choose_prompt_format(tokenizer, text)
    prompt = text.replace("{question}", PENS, 1).replace("{Question Text}", PENS)
    assert prompt_format.render(turns("user")) == prompt
    ids = tokenizer(prompt)["input_ids"]
    assert prompt_format.encode(turns("user")) == prompt_format.encode(make_turns(PENS)) == ids
    in_engine = {"chat_template": prompt_format.chat_template, "return_dict": False}
    assert tokenizer.apply_chat_template(turns("user"), **in_engine) == ids
    assert (ids[0] == tokenizer.eos_token_id) == begins


@pytest.mark.parametrize("roles", [("system", "user"), ("user", "assistant", "user"), ("assistant",)])
def test_text_refuses_other_conversations(tokenizer, roles):
    prompt_format = choose_prompt_format(tokenizer, TEXT)
    got = ", ".join(roles)
    sentence = f"one turn of the role user, got the roles {got}. Send .* raw prompt, or start with `--chat_template`"
    with user_error(sentence):
        prompt_format.render(turns(*roles))
    with pytest.raises(jinja2.TemplateError, match=sentence):
        tokenizer.apply_chat_template(turns(*roles), chat_template=prompt_format.chat_template)
    with user_error("`messages` must have at least one turn"):
        prompt_format.render([])


def test_text_with_several_fields_refuses_a_question(tokenizer):
    prompt_format = choose_prompt_format(tokenizer, "{context}\n{question}\n")
    with user_error("prompts with the fields context, question, which one question cannot fill"):
        prompt_format.render(turns("user"))
    assert "context, question" in prompt_format.describe()
    with user_error("`prompt_template` must be a text with a {field}"):
        PromptFormat(tokenizer, "no field")


def test_training_comes_before_the_chat_template(tokenizer):
    assert choose_prompt_format(tokenizer).text == "{prompt}"
    tokenizer.chat_template = CHAT
    assert choose_prompt_format(tokenizer, TEXT).text == TEXT
    assert choose_prompt_format(tokenizer, is_chat=False).text == "{prompt}"
    for options in ({}, {"is_chat": True}, {"trained_text": TEXT, "chat_template": "own.jinja"}):
        assert choose_prompt_format(tokenizer, **options).text is None
    prompt_format = choose_prompt_format(tokenizer)
    assert prompt_format.render(turns("system", "user")) == f"[system] {PENS}[user] {PENS}[assistant]"
    assert (
        prompt_format.encode(turns("user"))
        == tokenizer(f"[user] {PENS}[assistant]", add_special_tokens=False).input_ids
    )


def test_chat_template_error_is_one_sentence(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('No tools.') }}"
    with user_error("The chat template cannot render `messages`: No tools."):
        choose_prompt_format(tokenizer).render(turns("user"))


def test_content_may_be_text_parts(tokenizer):
    prompt_format = choose_prompt_format(tokenizer, TEXT)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_format.render([{"role": "user", "content": parts}]) == "Question: a\nb\nAnswer:"
    with user_error("`content` must be a text or a list of text parts, got the part"):
        prompt_format.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_start_prints_format_and_example(tokenizer):
    assert choose_prompt_format(tokenizer, TEXT).describe().splitlines() == [
        f"Format of the prompts: {TEXT!r}",
        "Example: 'Question: What is 7 times 8?\\nAnswer:'",
    ]
    tokenizer.chat_template = CHAT
    expected = ["the tokenizer's chat template", "'[user] What is 7 times 8?[assistant]'"]
    assert [line.split(": ", 1)[1] for line in choose_prompt_format(tokenizer).describe().splitlines()] == expected


def test_evaluation_and_chat_ask_for_a_choice(tokenizer, tmp_path):
    with_adapter(load_model("tiny-ouro")).save_pretrained(tmp_path)
    write_metadata(tmp_path, {"prompt_template": TEXT})
    tokenizer.chat_template = CHAT  # of the base model
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text(CHAT)
    words = ["--benchmarks", "arithmetic_easy_test", "--apply_chat_template", "true"]
    words += ["--output_dir", str(tmp_path / "results")]
    with user_error("`apply_chat_template` must not be true for .*, because it was trained on prompts 'Question"):
        load_script("recipes/evaluate.py").main(["--adapter", str(tmp_path), *words])
    templates = ["--chat_template", str(tmp_path / "own.jinja"), "--prompt_template", TEXT]
    with user_error("Set either `chat_template` or `prompt_template`, not both"):
        load_script("recipes/chat.py").main([str(tmp_path), "1 + 2?", *templates])


def test_chat_template_option_changes_the_prompt(tokenizer, tmp_path, capsys):
    (tmp_path / "own.jinja").write_text(CHAT)
    words = ["tiny-ouro", "1 + 2?", "--chat_template", str(tmp_path / "own.jinja"), "--max_new_tokens", "1"]
    load_script("recipes/chat.py").main(words)
    assert "Example: '[user] What is 7 times 8?[assistant]'" in capsys.readouterr().out
