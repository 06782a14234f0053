"""Greedy decoding: the texts of a plain loop and of transformers' `generate`, in slots that rows enter and leave."""

import copy

import pytest
import torch

from helpers.errors import user_error
from helpers.tiny import DORY, tiny_hrm, tiny_ouro, varied, with_adapter
from loopdropout_trainer import generation, use_gates
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.looped import find_looped_model


PROMPTS = ["3+4=", "What is 21 minus nine?", "a", "Ann has 30 shells and loses 12.\nShe finds 5.", "Wörter: ähm"]
MANY = [text[: 3 + 11 * i % 40] for i, text in enumerate(PROMPTS * 4)]
STOPS = ["e", "7", "Z", "&"]  # end completions of random bytes at many lengths


def adapted(model):
    """The same with an adapter that changes the texts, in float64, in which no two logits are nearly equal."""
    return with_adapter(varied(model), seed=1, scale=0.2, r=4).double().eval()


@pytest.mark.pairs
@pytest.mark.parametrize("gates", [[1], [1] * 5, [1, 0, 0, 0], [0.5, 2.0, 0.0, 1.3]])
def test_completions_equal_generate_without_cache(make_tiny, tokenizer, gates):
    model, prompts = adapted(make_tiny()), [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    find_looped_model(model).config.num_loops = len(gates)
    with use_gates(model, gates):
        rows = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False) for ids in prompts]
        ids = [row[0, prompt.shape[1] :] for row, prompt in zip(rows, prompts, strict=True)]
        want = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for batch_size in (1, 2, 16):
            assert generate_greedy(model, tokenizer, PROMPTS, 5, batch_size, progress=False) == want
    assert len({*want}) == len(want)
    is_ungated = generate_greedy(model, tokenizer, PROMPTS, 5, progress=False) == want
    assert is_ungated == ({*gates} == {1})


@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm, DORY])
def test_generation_changes_neither_model_nor_tokenizer(make, tokenizer):
    model, tokenizer = adapted(make()), copy.deepcopy(tokenizer)
    want = generate_greedy(model, tokenizer, PROMPTS, 12, progress=False)
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    config = model.base_model.model.generation_config
    config.repetition_penalty = 1.9
    before = config.to_dict()
    model.train()
    assert generate_greedy(model, tokenizer, PROMPTS, 12, progress=False) == want
    assert all(layer.training for layer in model.modules()) and config.to_dict() == before
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, "right")


def test_depth_is_no_keyword_of_generate():
    """The error names the block that runs another depth."""
    block = r"Run it at another depth in a block `with use_depth\(model, 2\):`"
    prompt = torch.tensor([[1, 2]])
    for model in (tiny_ouro(), with_adapter(tiny_ouro())):
        for name in ("num_loops", "num_steps", "total_ut_steps"):
            with user_error(f"^`{name}` is not an argument of `generate`. {block}"):
                model.generate(prompt, max_new_tokens=1, **{name: 2})
        with pytest.raises(TypeError, match=f"unexpected keyword argument 'num_loops'. {block}"):
            model(prompt, num_loops=2)


def test_stop_strings_may_be_special_tokens(tokenizer):
    """A special token is not part of decoded text."""
    model = varied(tiny_ouro())
    tokenizer, prompt = copy.deepcopy(tokenizer), tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    ids = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :].tolist()
    end = next(place for place in range(1, 6) if ids[place] not in ids[:place])
    special = tokenizer.convert_ids_to_tokens(ids[end])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    texts = generate_greedy(model, tokenizer, PROMPTS[:1], 24, stop_strings=[special], progress=False)
    assert texts == [tokenizer.decode(ids[:end])]


def test_rows_in_slots_equal_generate(tokenizer, monkeypatch):
    model = adapted(tiny_ouro())
    with monkeypatch.context() as patch:
        patch.setattr(generation, "supports_slots", lambda model: False)
        want = generate_greedy(model, tokenizer, MANY, 50, 20, STOPS, progress=False)
    assert len(set(map(len, want))) > 6 and max(map(len, want)) > 30
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 90)  # two prompts at a time
    monkeypatch.setattr(generation, "COLUMN_BLOCK", 16)
    looped, sizes, finished = find_looped_model(model), [], []
    looped.base_model.register_forward_hook(lambda _, args, output: sizes.append(output.last_hidden_state.shape[:2]))
    note = lambda *completion: finished.append(completion)
    assert generate_greedy(model, tokenizer, MANY, 50, 7, STOPS, progress=False, on_completion=note) == want
    assert finished != sorted(finished) == list(enumerate(want))
    assert max(rows * length for rows, length in sizes) <= 90
    num_tokens = sum(min(len(text) + 1, 50) for text in want)  # a text has one byte for each token
    assert sum(rows for rows, length in sizes if length == 1) <= 1.3 * num_tokens
    looped.set_attn_implementation("eager")
    assert generate_greedy(model, tokenizer, MANY[:8], 50, 3, STOPS, progress=False) == want[:8]


@pytest.mark.parametrize("make", [tiny_hrm, DORY])
def test_other_models_use_generate(tokenizer, make):
    model = adapted(make())
    assert not generation.supports_slots(find_looped_model(model))
    one_by_one = [generate_greedy(model, tokenizer, [prompt], 7, progress=False)[0] for prompt in PROMPTS]
    assert generate_greedy(model, tokenizer, PROMPTS, 7, 3, progress=False) == one_by_one
    for attention, has_slots in (("sdpa", True), ("flex_attention", False)):
        assert generation.supports_slots(tiny_ouro(attn_implementation=attention)) == has_slots


@pytest.mark.parametrize("make", [tiny_ouro, tiny_hrm])
def test_on_text_streams_one_completion(tokenizer, make):
    model, texts = adapted(make()), []
    generate_greedy(model, tokenizer, PROMPTS[:1], 5, progress=False, on_text=texts.append)
    assert texts == [generate_greedy(model, tokenizer, PROMPTS[:1], n, progress=False)[0] for n in range(1, 6)]


def test_empty_prompts_and_gates_of_examples(tokenizer):
    model = with_adapter()
    assert generate_greedy(model, tokenizer, [], 4, progress=False) == []
    with user_error("`prompts` must not be empty texts, got one at index 1"):
        generate_greedy(model, tokenizer, ["a", ""], 4, progress=False)
    with use_gates(model, torch.full((4, 2), 0.5)), user_error("same for all prompts"):
        generate_greedy(model, tokenizer, PROMPTS, 4, progress=False)
