"""What is Huginn's own, and its conversions': initial state, tied head, rotations, core-only adapters."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import golden_adapted, golden_inputs, golden_model, load_script, tiny_huginn, tiny_llama_conversion
from safetensors.torch import load_file, save_file
from test_families import assert_close, assert_gradients_agree, example_nll
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from loopdropout_trainer import use_gates
from loopdropout_trainer.models.huginn import philox, rotate_pairs, truncated_normals


@pytest.fixture(scope="module")
def huginn(golden):
    return golden("huginn")


@pytest.fixture(scope="module", params=["huginn", "raven_llama", "raven_olmo"])
def raven(golden, request):
    """Golden data of Huginn and of the conversions in its frame."""
    return golden(request.param)


@pytest.mark.parametrize("batch", ["unpadded", "padded"])
def test_prelude_and_latents_agree_with_the_reference(raven, batch):
    model, inputs = golden_model(raven), golden_inputs(raven, batch)
    valid = inputs["attention_mask"].bool()
    seen = {}
    model.transformer.prelude[-1].register_forward_hook(lambda module, args, output: seen.update(prelude=output))
    with torch.no_grad():
        states = torch.stack(model(**inputs, output_readouts=True).loop_states)
    assert_close(seen["prelude"][valid], raven.tensors[f"{batch}/prelude"][valid], atol=1e-4)
    if f"{batch}/loop_latent" in raven.tensors:  # the conversions' coda reads the state itself
        latents = model.transformer.ln_f(states)
        assert_close(latents[:, valid], raven.tensors[f"{batch}/loop_latent"][:, valid], atol=1e-4)


def test_the_zero_state_agrees_with_the_reference(raven):
    model = golden_model(raven, state_init="zero")
    ids = raven.tensors["unpadded/input_ids"]
    assert_close(model(ids).logits, raven.tensors["unpadded/zero_state/logits"], atol=1e-4)
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(tokens[:, ids.shape[1] :], raven.tensors["unpadded/zero_state/generated"])


def test_an_adapter_on_the_core_alone_agrees_with_the_oracle(raven):
    peft_model = golden_adapted(raven, modules=raven.meta["lora"]["modules_core_only"])
    inputs = golden_inputs(raven, "oracle/left")
    with use_gates(peft_model, raven.tensors["oracle_core_only/gates"]):
        out = peft_model(**inputs)
        out.loss.backward()
    assert_close(example_nll(out.logits, inputs["labels"]), raven.tensors["oracle_core_only/example_nll"], atol=1e-4)
    assert_gradients_agree(raven, peft_model, "oracle_core_only/grad_token_mean")


# The stream of initial states


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # known answers of the Random123 library for Philox-4x32-10
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_random_source_gives_its_known_answers(counter, key, want):
    words = lambda text: tuple(torch.tensor(int(word, 16)) for word in text.split())
    assert philox(words(counter), words(key)) == words(want)


def first_state(model):
    """The initial states [1, 38, E] of 38 tokens."""
    seen = []
    model.transformer.adapter.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(torch.arange(2, 40)[None])
    return seen[0][..., : model.config.n_embd]


def test_states_have_the_published_distribution():
    numbers = truncated_normals(torch.tensor([7]), torch.arange(64), 512).flatten().double()
    inside = math.erf(3 / 2**0.5)
    quantiles = (torch.erf(numbers.sort().values / 2**0.5) / inside + 1) / 2
    ideal = (torch.arange(len(numbers)) + 0.5) / len(numbers)
    assert (quantiles - ideal).abs().max() < 1.63 / len(numbers) ** 0.5  # Kolmogorov-Smirnov, 1%
    std = (1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / inside) ** 0.5
    state = first_state(tiny_huginn(n_embd=512, n_heads=8))
    assert state.abs().max() <= 1.8975  # 3 sqrt(2 / 5)
    assert state.std().item() == pytest.approx(0.4**0.5 * std, rel=0.02)
    stored = {"std": 0.008703882797784892, "embed_scale": 1.0}  # a conversion's
    state = first_state(tiny_llama_conversion(init_values=stored))
    assert 0.02 < state.abs().max() <= 3 * stored["std"]
    assert state.std().item() == pytest.approx(0.00858, rel=0.1)  # 0.9866 of the untruncated


def test_in_evaluation_a_state_depends_on_seed_and_position_alone():
    model = tiny_huginn().eval()
    ids = torch.arange(2, 14)[None]
    torch.manual_seed(1)
    first = model(ids).logits
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(model(ids).logits, first)
    assert torch.equal(torch.get_rng_state(), before)
    prompts = torch.stack([ids[0], ids[0].flip(0), ids[0]])
    torch.testing.assert_close(model(prompts).logits[[0, 2]], first.expand(2, -1, -1), atol=1e-5, rtol=1e-5)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    other = tiny_huginn(state_seed=1).eval()
    assert not torch.allclose(other(ids).logits, first, atol=1e-3)


def states_of_training(train, model=None, **fields):
    """Initial states of the tokens that the first optimizer step sees, [rows, S, E]."""
    model, seen = tiny_huginn(**(model or {})), []
    model.transformer.adapter.register_forward_pre_hook(lambda module, args: seen.append(args[0][..., :32].detach()))
    train(model, max_steps=1, **fields)
    return seen[:: model.config.num_loops]


def test_in_training_each_example_and_step_has_its_own_state_whatever_the_layout(train):
    def first_tokens(size=4, accumulated=1, **fields):  # by row of the global batch
        fields |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        # Removing padding would run the rows as one.
        states = states_of_training(train, remove_padding=False, **fields)
        return torch.cat([state[:, 0] for state in states])

    whole = first_tokens()
    assert torch.equal(whole, first_tokens(2, 2))
    assert len(whole.unique(dim=0)) == 4
    assert not torch.equal(whole, first_tokens(gate_seed=5))
    assert len(first_tokens(model={"redraw_state": False}).unique(dim=0)) == 1
    packed = {"padding_free": True, "max_length": None, "per_device_train_batch_size": 3}
    (tokens,) = states_of_training(train, **packed)[0]
    assert len(tokens.unique(dim=0)) == len(tokens)  # no two alike, though positions repeat


# Traps


def test_depth_is_never_sampled_a_given_state_must_fit_and_readouts_with_a_cache_are_refused(huginn):
    model, inputs = golden_model(huginn).train(), golden_inputs(huginn, "unpadded")
    assert_close(model(**inputs).loss, huginn.tensors["unpadded/loss"], atol=2e-5)
    ids, state = inputs["input_ids"], inputs["initial_state"]
    with pytest.raises(ValueError, match=r"`initial_state` must have the shape \[B, S, H\]"):
        model(ids, initial_state=state[:, 1:])
    with pytest.raises(ValueError, match="`initial_state` has 10 columns, but generation has reached 11 tokens"):
        model.generate(ids, initial_state=state, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with pytest.raises(ValueError, match="`output_readouts` cannot be combined with a cache"):
        model(ids, use_cache=True, output_readouts=True)


@pytest.mark.parametrize("duplicate", [False, True])
def test_the_head_may_be_stored_twice_and_rotations_stay_float32(huginn, duplicate, tmp_path):
    weights = {name[8:]: tensor for name, tensor in huginn.tensors.items() if name.startswith("weights/")}
    if duplicate:
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(huginn.meta["config"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model(torch.tensor([[3, 4]])).logits.dtype == torch.float32
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved["transformer.wte.weight"].dtype == torch.bfloat16
    assert_close(saved["freqs_cis"], huginn.tensors["weights/freqs_cis"], atol=2e-6)


def test_rotations_of_a_float64_model_are_not_rounded():
    generator = torch.Generator().manual_seed(0)
    x, angles = (torch.randn(1, 5, *size, generator=generator, dtype=torch.float64) for size in ((2, 8), (4,)))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angles)[:, :, None]
    want = torch.view_as_real(turned).flatten(-2).transpose(1, 2)
    torch.testing.assert_close(
        rotate_pairs(x.transpose(1, 2), angles.cos(), angles.sin()), want, rtol=1e-14, atol=1e-14
    )


@torch.no_grad()
def test_a_llama_is_its_looped_model_run_once_on_what_the_prelude_gives():
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=30, rope_parameters=rope, **sizes)).eval()
    model = load_script("recipes/make_small_base.py").looped(llama, SimpleNamespace(eos_token_id=1, pad_token_id=0))
    ids = torch.arange(2, 20)[None]
    half = torch.eye(24) / 2
    assert torch.equal(model.transformer.adapter.weight, torch.cat([half, half], dim=1))
    model.transformer.adapter.weight.copy_(torch.cat([0 * half, 2 * half], dim=1))
    model.config.num_loops = 1
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=1e-4, atol=1e-5)
