"""Generation against a plain loop and against transformers' own, in slots to which rows are admitted and evicted."""

import copy
from contextlib import nullcontext

import pytest
import torch
from conftest import TINY, tiny_hrm, tiny_ouro, two_families, with_adapter
from torch.nn.utils.rnn import pad_sequence

from loopdropout_trainer import use_gates
from loopdropout_trainer.generation import decoding, generate_greedy
from loopdropout_trainer.generation.decoding import SlotCache
from loopdropout_trainer.generation.generation import decoding_memory, sample_completions
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import PreparedProjections, adapted_layers, add_gates, prepared


PROMPTS = [
    "3+4=",
    "What is twenty-one minus nine?",
    "a",
    "Ann has 30 shells and loses 12.\nShe finds 5.",
    "Wörter: ähm",
]


def varied(model, std=0.3):
    """Weights that make a random model's greedy text wander."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def adapted(model, seed=1):
    """The same with an adapter that changes what it says."""
    torch.manual_seed(seed)
    return with_adapter(model, seed, scale=0.2, r=4).eval()


@torch.no_grad()
def plain_greedy(model, tokenizer, prompt, max_new_tokens):
    """Token ids of one completion: no padding, no cache."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    length = ids.shape[1]
    for _ in range(max_new_tokens):
        token = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        if token.item() == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, token], dim=1)
    return ids[0, length:].tolist()


@pytest.mark.pairs
@pytest.mark.parametrize("num_loops", [1, 6])
def test_completions_are_those_of_a_plain_loop_for_any_batch_size(make_tiny, tokenizer, num_loops):
    model = adapted(varied(make_tiny())).double()
    find_looped_model(model).config.num_loops = num_loops
    tokens = [plain_greedy(model, tokenizer, prompt, 10) for prompt in PROMPTS]
    want = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    for batch_size in (1, 2, 16):
        assert generate_greedy(model, tokenizer, PROMPTS, 10, batch_size, progress=False) == want
    assert len(set(want)) == len(want)


@pytest.mark.pairs
@pytest.mark.parametrize("gates", [[1, 0, 0, 0], [0, 0, 0, 0], [0.5, 2.0, 0.0, 1.3]])
def test_generation_is_under_the_gates_that_the_caller_applies(make_tiny, tokenizer, gates):
    model = adapted(varied(make_tiny())).double()
    unit, want = generate_greedy(model, tokenizer, PROMPTS, 12, progress=False), []
    with use_gates(model, gates) as loop_state:
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            (row,) = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
            want.append(tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True))
        for form in ("eager", "generate"):
            got = generate_greedy(model, tokenizer, PROMPTS, 12, 3, progress=False, decoding=form)
            assert got == want != unit and loop_state.gates.flatten().tolist() == pytest.approx(gates)
    assert generate_greedy(model, tokenizer, PROMPTS, 12, progress=False) == unit


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in TINY.items()] + [tiny_hrm])
@pytest.mark.parametrize("gates", [None, [0.5, 2.0, 0.0]], ids=["unit gates", "use_gates"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_generate_agrees_with_and_without_a_cache(make, gates, padding, tokenizer):
    model = adapted(varied(make())).double()
    find_looped_model(model).config.num_loops = 3
    prompts = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    inputs = {
        "input_ids": pad_sequence(prompts, batch_first=True, padding_value=1, padding_side=padding),
        "attention_mask": pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side=padding),
    }
    length = inputs["input_ids"].shape[1]
    rows = [index for index, prompt in enumerate(prompts) if padding == "left" or len(prompt) == length]
    with nullcontext() if gates is None else use_gates(model, gates):
        tokens = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert torch.equal(tokens, model.generate(**inputs, max_new_tokens=10, do_sample=False, use_cache=False))
        texts = generate_greedy(model, tokenizer, PROMPTS, 10, 3, progress=False)
    answers = tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=True)
    assert [answers[row] for row in rows] == [texts[row] for row in rows]  # a right-padded row continues its padding
    assert len(set(texts)) > 2


def test_generation_leaves_model_and_tokenizer_as_they_were(tokenizer):
    model, tokenizer = adapted(varied(tiny_ouro())), copy.deepcopy(tokenizer)
    want = generate_greedy(model, tokenizer, PROMPTS, 12, progress=False)
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    model.generation_config.repetition_penalty = 1.9
    model.base_model.model.generation_config.repetition_penalty = 1.9
    before = copy.deepcopy(model.base_model.model.generation_config.to_dict())
    model.train()
    assert generate_greedy(model, tokenizer, PROMPTS, 12, progress=False) == want
    assert model.training and all(layer.training for layer in model.modules())
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, "right")
    assert model.base_model.model.generation_config.to_dict() == before
    with model.disable_adapter():
        assert generate_greedy(model, tokenizer, PROMPTS, 12, progress=False) != want


def test_completions_end_before_the_earliest_stop_string_and_generation_ends_there(tokenizer):
    model = varied(tiny_ouro())
    free = generate_greedy(model, tokenizer, PROMPTS[:3], 24, progress=False)
    stops = [text[3:5] for text in free]
    want = [text[: min(text.find(stop) for stop in stops if stop in text)] for text in free]
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    assert generate_greedy(model, tokenizer, PROMPTS[:3], 24, 3, stops, progress=False) == want and len(calls) < 24
    # A stop string that is a special token is left out of decoded text.
    tokenizer, ids = copy.deepcopy(tokenizer), plain_greedy(model, tokenizer, PROMPTS[0], 6)
    end = next(place for place in range(1, 6) if ids[place] not in ids[:place])
    special = tokenizer.convert_ids_to_tokens(ids[end])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    completions = generate_greedy(model, tokenizer, PROMPTS[:1], 24, stop_strings=[special], progress=False)
    assert completions == [tokenizer.decode(ids[:end])]


MANY = [text[: 3 + 11 * i % 40] for i, text in enumerate(PROMPTS * 4)]
STOPS = ["e", "7", "Z", "&"]  # among random bytes: completions of many lengths


def stops_for(texts):
    """Characters, the rarest first, that end most of the texts, at many lengths, and leave some as they are."""
    rows = {c: {row for row, text in enumerate(texts) if c in text} for c in set("".join(texts)) if "!" <= c <= "~"}
    stops, ended = [], set()
    for character in sorted(rows, key=lambda c: (len(rows[c]), c)):
        if len(ended | rows[character]) <= 0.8 * len(texts):
            stops.append(character)
            ended |= rows[character]
    return stops


@two_families
def test_rows_that_come_and_go_say_what_they_say_in_plain_batches(make_tiny, tokenizer, monkeypatch):
    for seed in range(1, 20):  # until completions end at many lengths, some past three blocks of columns
        model = adapted(varied(make_tiny()), seed).double()  # in float32 rounding decides near ties
        plain = generate_greedy(model, tokenizer, MANY, 70, 10, progress=False, decoding="generate")
        stops = stops_for(plain)
        want = [min((text.split(stop)[0] for stop in stops), key=len, default=text) for text in plain]
        if len(set(map(len, want))) >= 7 and max(map(len, want)) > 48:
            break
    else:
        pytest.fail("No random weights gave completions of many lengths.")
    assert generate_greedy(model, tokenizer, MANY, 70, 5, stops, progress=False) == want
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 90)  # two prompts at a time
    find_looped_model(model).set_attn_implementation("eager")
    assert generate_greedy(model, tokenizer, MANY, 70, 12, stops, progress=False) == want


def test_prompts_in_any_order_are_read_in_batches_of_bounded_size(monkeypatch):
    model, read = varied(tiny_ouro()), []
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 50)
    model.model.register_forward_hook(lambda module, args, output: read.append(output.last_hidden_state.shape[:2]))
    prompts = [*[[2, 3]] * 8, [2] * 40]
    assert len(sample_completions(model, prompts, decoding.Sampler(torch.rand(9, 4)), 4, [0], 9)) == 9
    assert max(rows * length for rows, length in read) <= 50


def test_no_row_is_computed_long_after_its_end(tokenizer):
    model, computed = varied(tiny_ouro()), {}
    stops = stops_for(generate_greedy(model, tokenizer, MANY, 60, 8, progress=False))
    for form in ("generate", "eager"):
        rows = computed[form] = []
        count = lambda module, args, output, rows=rows: rows.append(len(output.last_hidden_state))
        hook = model.model.register_forward_hook(count)
        generate_greedy(model, tokenizer, MANY, 60, 8, stops, progress=False, decoding=form)
        hook.remove()
    assert sum(computed["eager"]) < 0.75 * sum(computed["generate"])


def test_answers_come_as_they_are_complete_and_the_model_is_itself_in_between(tokenizer):
    model, seen = adapted(varied(tiny_ouro())).train(), []

    def keep(*pair):
        assert model.training and loop_state.gates.tolist() == [[0]] * 4
        seen.append(pair)

    with use_gates(model, torch.zeros(4)) as loop_state:
        texts = generate_greedy(model, tokenizer, MANY, 40, 8, STOPS, progress=False, keep=keep)
    assert seen != sorted(seen) == list(enumerate(texts))
    assert model.training
    assert generate_greedy(model, tokenizer, [], 4, progress=False) == []


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])  # the second needs a C++ compiler
def backend(request, monkeypatch, tmp_path):
    """What torch.compile compiles by: the same graphs, without programs or with them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an earlier run may have compiled for fewer lengths
    compile_ = torch.compile
    if request.param == "eager":  # which knows no options
        monkeypatch.setattr(torch, "compile", lambda *args, options: compile_(*args, backend="eager"))
    decoding._compiled.cache_clear()
    yield
    decoding._compiled.cache_clear()


def test_compiled_steps_give_the_same_text_and_are_compiled_once(tokenizer, caplog, backend):
    model = adapted(varied(tiny_ouro(num_hidden_layers=1, num_loops=2))).double()
    arguments = model, tokenizer, MANY, 290, 6, STOPS[:1]
    want = generate_greedy(*arguments, progress=False, decoding="generate")
    assert max(map(len, want)) > 256  # the cache grows past its first 256 columns
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with caplog.at_level("WARNING", "loopdropout_trainer"):
        assert generate_greedy(*arguments, progress=False, decoding="compiled") == want
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert not [record for record in warned if record.name.startswith("loopdropout_trainer")]


@torch.no_grad()
def logits_of(model, prepared=None):
    ids = torch.arange(12).view(2, 6) + 3
    with nullcontext() if prepared is None else prepared.in_use():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("gates", [None, [0.5, 2.0, 0.0, 1.3]])
def test_prepared_projections_compute_what_the_layers_compute_and_leave_them_as_they_are(make_tiny, gates):
    model = adapted(varied(make_tiny())).double()
    add_gates(model)
    looped = find_looped_model(model)
    for layer in adapted_layers(model):
        if layer.get_base_layer().bias is not None:
            torch.nn.init.normal_(layer.get_base_layer().bias)
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    prepared = PreparedProjections(looped)
    with nullcontext() if gates is None else use_gates(model, gates):
        want = logits_of(model)
        torch.testing.assert_close(logits_of(model, prepared), want, atol=1e-9, rtol=1e-9)
    assert any(matrix is not None for matrix in prepared._made.values())  # it was not left to the layers
    with torch.no_grad():  # between two uses the weights may change
        adapted_layers(model)[0].lora_B["default"].weight.mul_(3)
        assert not torch.allclose(logits_of(model), want)
        torch.testing.assert_close(logits_of(model, prepared), logits_of(model), atol=1e-9, rtol=1e-9)
        adapted_layers(model)[0].lora_B["default"].weight.div_(3)
    with model.disable_adapter():
        torch.testing.assert_close(logits_of(model, prepared), logits_of(model), atol=1e-9, rtol=1e-9)
    for name, parameter in model.named_parameters():
        same, address, values = before[name]
        assert parameter is same and parameter.data_ptr() == address
        torch.testing.assert_close(parameter, values, atol=1e-15, rtol=1e-15)
    assert not any(vars(module).get("project_together") for module in model.modules())


def test_no_update_is_merged_in_bfloat16():
    model = adapted(varied(tiny_ouro()))
    add_gates(model, in_activation_dtype=True)
    model.bfloat16()
    prepared = PreparedProjections(find_looped_model(model))
    exact = logits_of(copy.deepcopy(model).double())
    errors = [(logits - exact).abs().mean() for logits in (logits_of(model, prepared), logits_of(model))]
    assert 0 < errors[0] < 1.5 * errors[1]
    assert all(matrix.up is not None for matrix in prepared._made.values())


def test_other_models_are_left_to_transformers_generate(tokenizer, monkeypatch, log):
    log.set_level("INFO", "loopdropout_trainer")
    model = varied(tiny_ouro())
    want = generate_greedy(model, tokenizer, PROMPTS, 12)
    assert log.messages[-1] == "Decoding: eager (`decoding`)."
    assert "Memory of decoding: about " in log.text  # with the bar, not once for every depth that has none
    log.clear()
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    assert generate_greedy(model, tokenizer, PROMPTS, 12, progress=False, decoding="compiled") == want
    assert "generate, because OuroForCausalLM does not support static caches" in log.messages[-1]
    assert "Memory" not in log.text
    monkeypatch.undo()
    model.config._attn_implementation = "flex_attention"
    assert "flex_attention" in decoding.why_unsupported(model)
    model.config._attn_implementation = "sdpa"
    model.config.sliding_window, model.config.layer_types = 8, ["full_attention", "sliding_attention"]
    assert decoding.why_unsupported(model) == "some layers do not attend to all tokens"


def test_what_cannot_be_generated_is_refused(tokenizer):
    model = adapted(varied(tiny_ouro()))
    for prompts, form, gates, message in (
        (["a", ""], "eager", torch.ones(4), "Prompt 1 has no tokens"),
        (PROMPTS, "fast", torch.ones(4), "`decoding` must be one of eager, compiled, generate; got 'fast'"),
        (PROMPTS[:2], "eager", torch.ones(4, 2) / 2, "same gates to all prompts"),
    ):
        with use_gates(model, gates), pytest.raises(ValueError, match=message):
            generate_greedy(model, tokenizer, prompts, 4, progress=False, decoding=form)


def test_keys_and_values_take_what_decoding_allocates(make_tiny, tokenizer, monkeypatch):
    model, caches, build = make_tiny(num_loops=3).eval(), [], SlotCache.__init__
    monkeypatch.setattr(SlotCache, "__init__", lambda cache, *args: (caches.append(cache), build(cache, *args))[1])
    generate_greedy(model, tokenizer, [[3] * 20, [4] * 300, [5] * 7], max_new_tokens=3, batch_size=2, progress=False)
    allocated = sum(states.numel() for layer in caches[0].layers for states in layer.allocated) * model.dtype.itemsize
    assert decoding_memory(model, [20, 300, 7], 3, num_slots=2)["keys and values"] == allocated


def test_large_weights_in_16_bits_are_used_where_they_lie(monkeypatch):
    model = tiny_ouro().bfloat16()
    assert PreparedProjections(model).copied_bytes == sum(
        2 * model.get_submodule(name).weight.numel() for name in model.recurrent_linears()
    )
    monkeypatch.setattr(prepared, "LARGE", 100)
    assert PreparedProjections(model).copied_bytes == 0
    with PreparedProjections(model).in_use():
        assert not any(hasattr(model.get_submodule(name), "project_together") for name in model.recurrent_linears())
    assert PreparedProjections(model.float()).copied_bytes > 0  # in float32 copies are faster at any size
