"""Tokenizers split text as their `tokenizer.json` says, and chat templates train the answer with its end."""

import json
from itertools import compress

import pytest
from datasets import Dataset
from jinja2.exceptions import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from helpers.errors import user_error
from helpers.tiny import tiny_ouro
from helpers.tokenizer import byte_tokenizer
from loopdropout_trainer import LoopDropoutSFTTrainer, tokenizers
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.tokenizers import end_token_ids, load_tokenizer, set_chat_template, warn_if_rebuilt


TEXT = "In  2023, 1234 of  7 apples"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
IN_THREES = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
SPLITS = {  # as in Ouro and SmolLM2, and as in OLMo-2 and Llama 3
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "threes": pre_tokenizers.Sequence([IN_THREES, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}


@pytest.fixture(scope="module", params=SPLITS)
def backend(request):
    """A trained tokenizer that splits digits in one way or another."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = SPLITS[request.param], decoders.ByteLevel()
    options = {"special_tokens": ["<|endoftext|>", "<|im_end|>"], "show_progress": False, "vocab_size": 420}
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    backend.train_from_iterator([f"{TEXT} {number}  {number * 37} 202 12345" for number in range(300)], trainer)
    return backend


@pytest.fixture
def published(backend, tmp_path):
    """Folder of a model, as on the Hub."""
    folder = tmp_path / "published"
    tiny_ouro(vocab_size=backend.get_vocab_size()).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "model_max_length": 512, "tokenizer_class": "GPT2Tokenizer"}
    config["additional_special_tokens"] = ["<|im_end|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def warnings(log):
    records = {id(record): record.getMessage() for record in log.records}
    return [message for message in records.values() if "load_tokenizer" in message]


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "TokenizersBackend"])
def test_load_tokenizer_keeps_the_files_tokens(published, backend, tokenizer_class, tmp_path, log):
    path = published / "tokenizer_config.json"
    path.write_text(path.read_text().replace("GPT2Tokenizer", tokenizer_class))
    tokenizer = load_tokenizer(published)
    warn_if_rebuilt(tokenizer)
    assert not warnings(log)
    tokenizer.save_pretrained(tmp_path / "saved")
    ids = backend.encode(TEXT).ids
    for kept in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert kept(TEXT)["input_ids"] == ids and kept.decode(ids) == TEXT
        assert kept("<|im_end|>")["input_ids"] == [1] and kept.decode([1], skip_special_tokens=True) == ""
        assert kept.eos_token == kept.pad_token == "<|endoftext|>" and kept.model_max_length == 512
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    fields = ("tokenizer_class", "additional_special_tokens", "extra_special_tokens")
    # transformers 4.57.6 reads the same tokenizer from these values.
    assert [config.get(field) for field in fields] == ["PreTrainedTokenizerFast", ["<|im_end|>"], None]
    assert config["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("own", [{}, {"padding": {"length": 9}, "truncation": {"max_length": 9}}])
def test_using_a_tokenizer_does_not_change_it(published, backend, own, tmp_path):
    if own:
        backend.enable_padding(**own["padding"])
        backend.enable_truncation(**own["truncation"])
        backend.save(str(published / "tokenizer.json"))
        backend.no_padding()
        backend.no_truncation()
    tokenizer = load_tokenizer(published)
    tokenizer.save_pretrained(tmp_path / "new")
    ids = tokenizer(["a", TEXT], padding="longest", truncation=True, max_length=5, padding_side="left")["input_ids"]
    assert [len(row) for row in ids] == [5, 5]
    tokenizer.encode("a", padding="max_length", max_length=7)
    tokenizer.save_pretrained(tmp_path / "used")
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("new", "used")]
    assert files[0] == files[1]
    saved = json.loads(files[0])
    assert [bool(saved[field]) for field in ("padding", "truncation")] == [bool(own)] * 2


def test_rebuilt_tokenizer_is_kept_with_a_warning(published, backend, monkeypatch, log):
    rebuilt = AutoTokenizer.from_pretrained(published)
    ids = rebuilt(TEXT)["input_ids"]
    assert ids != backend.encode(TEXT).ids
    warn_if_rebuilt(rebuilt)
    warn_if_rebuilt(rebuilt)
    (warning,) = warnings(log)
    assert "GPT2Tokenizer splits '  7' into ['Ġ', 'Ġ', '7']" in warning and str(published) in warning
    assert rebuilt(TEXT)["input_ids"] == ids
    in_cache = lambda name, file, **options: f"{published}//{file}"
    monkeypatch.setattr("loopdropout_trainer.tokenizers.cached_file", in_cache)
    rebuilt.name_or_path = "some/model"
    warn_if_rebuilt(rebuilt)
    assert len(warnings(log)) == 2


def test_trainer_reads_the_file(published, backend, config, log):
    rows = Dataset.from_list([{"text": TEXT}] * 8)
    trainer = LoopDropoutSFTTrainer(str(published), config(), train_dataset=rows)
    assert trainer.train_dataset[0]["input_ids"] == [*backend.encode(TEXT).ids, 0] and not warnings(log)
    rebuilt = AutoTokenizer.from_pretrained(published)
    LoopDropoutSFTTrainer(str(published), config(), train_dataset=rows, processing_class=rebuilt)
    assert len(warnings(log)) == 1


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<think>", "</think>"]
SPECIAL += ["<|begin_text|>", "<|begin_header|>", "<|end_header|>", "<|end_turn|>", "<|pad|>"]
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


@pytest.fixture
def chat_tokenizer():
    """One token per byte, the special tokens of each family, and the end token of plain text."""
    return byte_tokenizer(SPECIAL, **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>"))


@pytest.mark.parametrize(("name", "answer", "prompt", "trained"), RENDERED)
def test_template_trains_answers_with_their_end(chat_tokenizer, name, answer, prompt, trained):
    set_chat_template(chat_tokenizer, name)
    render = chat_tokenizer.apply_chat_template
    turns, thinking = [SYSTEM, USER], {"enable_thinking": answer is REASONED}
    assert render(turns, tokenize=False, add_generation_prompt=True, **thinking) == prompt
    assert render([*turns, answer], tokenize=False).removesuffix("\n") == prompt + trained
    encoded = render([*turns, answer, USER, answer], return_dict=True, return_assistant_tokens_mask=True)
    ids = list(compress(encoded["input_ids"], encoded["assistant_masks"]))
    assert chat_tokenizer.decode(ids) == trained * 2
    assert ids[-1:] == end_token_ids(chat_tokenizer)
    with pytest.raises(TemplateError, match="A role must be system, user or assistant; got 'tool'"):
        render([{"role": "tool", "content": "x"}], tokenize=False)


def test_ouro_is_chatml(chat_tokenizer):
    """The messages call it so. This is the template that `setup_chat_format` of TRL set."""
    chatml = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    ouro = tokenizers.CHAT_TEMPLATES["ouro"].read_text()
    turns = [{"role": role, "content": "A\n b."} for role in ("system", "user", "assistant", "user")]
    for is_prompt in (False, True):
        texts = [
            chat_tokenizer.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=is_prompt
            )
            for template in (ouro, chatml)
        ]
        assert texts[0] == texts[1]


def test_template_brings_its_special_tokens(chat_tokenizer, tmp_path):
    for name, tokens in tokenizers.CHAT_TOKENS.items():
        set_chat_template(chat_tokenizer, name)
        assert {role: getattr(chat_tokenizer, role) for role in tokens} == tokens
    chat_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, chat_template="ouro")
    assert loaded.eos_token_id == 2 and "<|im_start|>" in loaded.chat_template
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}")
    loaded = load_tokenizer(tmp_path, chat_template=str(tmp_path / "own.jinja"), eos_token="<unk>")
    assert loaded.apply_chat_template([USER], tokenize=False) == " 1+1? <unk>"


def test_missing_template_names_those_that_fit(chat_tokenizer):
    """A recipe has the field `chat_template`, and a trainer in Python `chat_template_path` or a tokenizer with a template."""
    chat_tokenizer.chat_template = None
    plain = load_tokenizer("tiny-ouro")
    for tokenizer, names, best in ((chat_tokenizer, r".*ouro \(ChatML\), .*tulu2", "ouro"), (plain, "tulu2", "tulu2")):
        with user_error(rf"^`chat_template` must be set, .* has: {names}\.$"):
            tokenizers.check_chat_template(tokenizer)
        with user_error(rf'^`chat_template_path` must be .* has: {names}\. Or .*\(name, chat_template="{best}"\)'):
            tokenizers.check_chat_template(tokenizer, in_trainer=True)
    set_chat_template(plain, "tulu2")
    tokenizers.check_chat_template(plain)


def test_tokenizer_without_configuration_has_special_tokens(tmp_path):
    byte_tokenizer(["<|bos|>", "<|eos|>", "<|pad|>"]).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved")("1\n").input_ids == tokenizer("1\n").input_ids
    with pytest.raises(UserError, match="The tokenizer SandyResearch/parcae-tokenizer cannot be loaded"):
        load_tokenizer("SandyResearch/parcae-140m")


OWN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(("template", "ids"), [(None, [0]), (OWN, [0, 2]), ("{{ messages[1].content }}", [0])])
def test_end_tokens_of_text_and_turns(chat_tokenizer, template, ids):
    chat_tokenizer.chat_template = template
    assert end_token_ids(chat_tokenizer) == ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name_or_path": "./none"}, "The folder .*none does not exist"),
        ({"chat_template": "chatml"}, "`chat_template` must be .*, ouro \\(ChatML\\), .* Did you mean 'ouro'\\?$"),
        ({"chat_template": "tulu3"}, "`chat_template` must be huginn.*, got 'tulu3'. Did you mean 'tulu2'?"),
        (
            {"chat_template": "ouro"},
            r"one whose tokens the tokenizer saved has, got 'ouro', which needs .*<\|im_start",
        ),
        ({"eos_token": "<end>"}, "`eos_token` must be a token of the tokenizer saved, got '<end>'"),
        ({}, "`eos_token` must be set"),
    ],
)
def test_wrong_tokenizer_arguments(tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(["<pad>"], pad_token="<pad>").save_pretrained("saved")
    with user_error(message):
        load_tokenizer(**{"name_or_path": "saved", **fields})


def test_mistyped_file_of_a_template_names_the_file(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    with user_error(
        f"`chat_template` must be .* a Jinja file, got '{tmp_path}/mne.jinja'. Did you mean '{tmp_path}/mine.jinja'"
    ):
        load_tokenizer("tiny-ouro", chat_template=f"{tmp_path}/mne.jinja")
