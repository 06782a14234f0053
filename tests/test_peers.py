"""Checks of transformers' model and generation suites and of PEFT's LoRA suite, on every family: `pytest -m peer`."""

import copy

import pytest
import torch
from conftest import tiny_ouro, with_adapter
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import output_capturing

from loopdropout_trainer import use_gates
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.models.looped_modeling import CACHE


pytestmark = pytest.mark.peer
IDS = torch.arange(2, 16).view(2, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.fixture
def model(make_tiny):
    return make_tiny().eval()


# transformers: generation.


def test_greedy_tokens_are_equal_for_all_options(model):
    greedy = model.generate(IDS, **GREEDY)
    for options in (
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"attention_mask": torch.ones_like(IDS)},
    ):
        assert torch.equal(model.generate(IDS, **GREEDY, **options), greedy), options
    embeddings = model.get_input_embeddings()(IDS)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY), greedy[:, IDS.shape[1] :])
    short = {**GREEDY, "max_new_tokens": 3}
    half = model.generate(IDS, **short, return_dict_in_generate=True)
    assert torch.equal(model.generate(half.sequences, **short, **{CACHE: half[CACHE]}), greedy)
    out = model.generate(IDS, **GREEDY, return_dict_in_generate=True, output_logits=True)
    logits = model(out.sequences).logits[:, IDS.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits, atol=1e-4, rtol=1e-4)


BEAMS = [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0}]
SAMPLES = {"do_sample": True, "top_k": 20, "temperature": 0.7, "num_return_sequences": 2}


@pytest.mark.parametrize("options", [*BEAMS, SAMPLES], ids=str)
def test_beams_and_samples_equal_without_cache(model, options):
    results = []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        results.append(model.generate(IDS, use_cache=use_cache, **{**GREEDY, **options}))
    assert torch.equal(*results[:2]) and torch.equal(*results[1:])


def test_assisted_decoding_gives_greedy_tokens(model):
    row = IDS[:1]
    want = model.generate(row, **GREEDY)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert torch.equal(model.generate(row, assistant_model=assistant, **GREEDY), want)
    assert torch.equal(model.generate(row, prompt_lookup_num_tokens=2, **GREEDY), want)


def test_continuous_batching_raises(model):
    with pytest.raises(UserError, match="Continuous batching"):
        model.generate_batch([[3, 4, 5]], generation_config=GenerationConfig(max_new_tokens=3))


# transformers: model.


def test_attention_can_be_switched(model):
    want = model(IDS).logits
    model.set_attn_implementation("eager")
    assert model.base_model.config._attn_implementation == "eager"
    out = model(IDS, output_attentions=True)
    assert len(out.attentions) == model.config.num_layer_runs and out.attentions[0].shape[-2:] == (7, 7)
    torch.testing.assert_close(out.logits, want, atol=1e-5, rtol=1e-5)


def test_hidden_states_of_each_run_of_a_layer(model):
    states = model(IDS, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_layer_runs + 1
    if not hasattr(output_capturing, "selected_hidden_states"):
        pytest.skip("this transformers returns all hidden states or none")
    for chosen in ([-1], [0, 2], [-2, 1]):
        some = model(IDS, output_hidden_states=chosen).hidden_states
        kept = {index % len(states) for index in chosen}
        assert {index for index, state in enumerate(some) if state is not None} == kept
        assert all(torch.equal(some[index], states[index]) for index in kept)


@pytest.mark.parametrize("size", [300, 200])
def test_resized_vocabulary_reloads(model, size, tmp_path):
    model.resize_token_embeddings(size)
    assert model.get_output_embeddings().weight.shape[0] == model.config.vocab_size == size
    ids = IDS.clamp(max=size - 1)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_forward_can_be_exported(model):
    program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(IDS, use_cache=False).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_forward_and_backward_can_be_compiled():
    models = tiny_ouro(), torch.compile(tiny_ouro(), backend="aot_eager")
    losses = [model(IDS, labels=IDS, use_cache=False).loss for model in models]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*(model.model.norm.weight.grad for model in models))


# PEFT: LoRA.


@pytest.fixture
def gated(model):
    peft_model = with_adapter(model, scale=0.1).eval()
    add_gates(peft_model)
    return peft_model


def test_gated_adapter_merges_and_switches_off(gated):
    adapted = gated(IDS).logits
    with gated.disable_adapter():
        base = gated(IDS).logits
    assert not torch.allclose(base, adapted, atol=1e-3)
    for safe in (False, True):
        gated.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(gated(IDS).logits, adapted, atol=1e-4, rtol=1e-4)
        gated.unmerge_adapter()
        torch.testing.assert_close(gated(IDS).logits, adapted, atol=1e-4, rtol=1e-4)
    with use_gates(gated, torch.zeros(gated.config.num_loops)):
        torch.testing.assert_close(gated(IDS).logits, base, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gated.merge_and_unload()(IDS).logits, adapted, atol=1e-4, rtol=1e-4)
