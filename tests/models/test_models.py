"""Every family: reference outputs, gradients under gates, cache, keywords, published layouts, strict loading."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from helpers.errors import user_error
from helpers.files import ROOT, load_script
from helpers.golden import (
    FAMILIES,
    LAYOUTS,
    assert_close,
    assert_gradients_match,
    change_weights,
    golden_adapted,
    golden_inputs,
    golden_model,
    save_published,
    submodule_name,
)
from helpers.tiny import DORY, TINY, randomise, tiny_hrm, trained_parameters, with_adapter
from helpers.trainers import example_nll, logged
from loopdropout_trainer import (
    LoopDropoutSFTTrainer,
    check_loops,
    default_peft_config,
    load_model,
    merge_and_save,
    use_gates,
)
from loopdropout_trainer.looped import NotLoopedError, attach_looped_model, find_looped_model
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.models.looped_modeling import CACHE


MAKERS = [*(pytest.param(make, id=name) for name, make in TINY.items()), pytest.param(tiny_hrm, id="hrm_text")]
ALL_FAMILIES = pytest.mark.parametrize("make", [*MAKERS, DORY])
with_dory = pytest.mark.parametrize("family", [*FAMILIES, pytest.param("dory", marks=DORY.marks)], indirect=True)
IDS = torch.arange(2, 14).view(2, 6)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
OF_OLD_CHECKPOINTS = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}


# Reference outputs.

FLEX = pytest.param("padded", "flex_attention", marks=pytest.mark.slow)  # compiles


@pytest.mark.parametrize(("batch", "attention"), [("unpadded", "sdpa"), ("padded", "sdpa"), ("padded", "eager"), FLEX])
@with_dory
@torch.no_grad()
def test_forward_matches_reference(family, batch, attention):
    model, inputs = golden_model(family, attn_implementation=attention), golden_inputs(family, batch)
    looped, valid = attach_looped_model(model), inputs["attention_mask"].bool()
    check_loops(model, input_ids=inputs["input_ids"])
    without_labels = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    got = {"loop_hidden": looped.loop_readouts(**without_labels)}
    if looped is model:
        got["loop_state"] = model(**inputs, output_readouts=True).loop_states
    for name, states in got.items():
        assert_close(torch.stack(states)[:, valid], family.tensors[f"{batch}/{name}"][:, valid])
    for looped.num_loops, prefix in ((family.meta["deep_loops"], f"{batch}/deep"), (family.meta["loops"], batch)):
        out = model(**inputs)
        assert_close(out.logits[valid], family.tensors[f"{prefix}/logits"][valid])
        assert_close(out.loss, family.tensors[f"{prefix}/loss"], atol=2e-5)
    if f"{batch}/zero_state/logits" in family.tensors:  # of families with a random start state
        logits = golden_model(family, state_init="zero")(inputs["input_ids"], inputs["attention_mask"]).logits
        assert_close(logits[valid], family.tensors[f"{batch}/zero_state/logits"][valid])


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
@with_dory
def test_generate_matches_reference(family, cache):
    options = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}[cache]
    cases = {"generated": family.meta["loops"], "deep/generated": family.meta["deep_loops"]}
    names = ("input_ids", "attention_mask", "initial_state")  # the states of the new tokens, too
    inputs = {name: family.tensors[f"padded/{name}"] for name in names if f"padded/{name}" in family.tensors}
    model = golden_model(family)
    looped = attach_looped_model(model)
    for name, looped.num_loops in cases.items():
        tokens = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 12}, pad_token_id=0, **options)
        assert torch.equal(tokens[:, inputs["input_ids"].shape[1] :], family.tensors[f"padded/{name}"])


# The oracle of Loop Dropout: one example at a time, with the gated weights of each loop.


LAYOUT_CASES = [
    ("left", False, "token_mean"), ("left", True, "example_mean"), ("right", True, "token_mean"),
    ("packed", False, "example_mean"), ("packed", True, "token_mean"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "checkpointing", "mean"), LAYOUT_CASES)
@with_dory
def test_gated_gradients_match_oracle(family, layout, checkpointing, mean):
    peft_model, tensors = golden_adapted(family).train(), family.tensors
    if checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = golden_inputs(family, "oracle/left" if layout == "left" else "oracle/right")
    kept, lengths, token_examples = inputs["attention_mask"].bool(), [inputs["labels"].shape[1]], None
    if layout == "packed":
        inputs = {name: tensor[kept][None] for name, tensor in inputs.items() if name != "attention_mask"}
        lengths = kept.sum(dim=1).tolist()
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        token_examples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    gates = tensors["oracle/gates"].clone().requires_grad_()
    with use_gates(peft_model, gates, token_examples):
        out = peft_model(**inputs)
        rows = zip(out.logits.split(lengths, dim=1), inputs["labels"].split(lengths, dim=1), strict=True)
        nll = torch.cat([example_nll(*row) for row in rows])
        loss = out.loss if mean == "token_mean" else (nll / tensors["oracle/example_tokens"]).mean()
        loss.backward()
    assert_close(nll, tensors["oracle/example_nll"])
    assert_close(loss, tensors[f"oracle/loss_{mean}"], atol=2e-5)
    assert_gradients_match(family, peft_model, f"oracle/grad_{mean}", gates)


@with_dory
@torch.no_grad()
def test_losses_by_loop_match_oracle(family):
    peft_model, inputs = golden_adapted(family), golden_inputs(family, "oracle/left")
    num_loops, tokens = family.meta["loops"], family.tensors["oracle/example_tokens"]
    losses = [family.tensors[f"oracle/{name}/example_loss"] for name in ("zero_gate", "unit_gate", "single_loop")]
    rows = torch.cat([torch.zeros(1, num_loops), torch.ones(1, num_loops), torch.eye(num_loops)])
    for gates, want in zip(rows, torch.cat([x.view(-1, len(tokens)) for x in losses]), strict=True):
        with use_gates(peft_model, gates):
            assert_close(example_nll(peft_model(**inputs).logits, inputs["labels"]) / tokens, want, atol=2e-5)
    labels = inputs.pop("labels")
    readouts = torch.stack(find_looped_model(peft_model).loop_readouts(**inputs))
    losses = [example_nll(x, labels) / tokens for x in peft_model.get_output_embeddings()(readouts)]
    assert_close(torch.stack(losses), family.tensors["oracle/unit_gate/readout_loss"], atol=2e-5)


@with_dory
def test_default_adapter_has_modules_of_oracle(family):
    model, lora = golden_model(family), family.meta["lora"]
    looped = find_looped_model(model)
    names = looped.recurrent_linears()
    assert names == [submodule_name(family, name) for name in lora["modules"]]
    targets = names if looped.optional_linears else None  # the oracle adapts optional projections, too
    adapted = get_peft_model(model, default_peft_config(model, r=lora["r"], target_modules=targets))
    assert sum(p.numel() for p in trained_parameters(adapted).values()) == lora["num_params"]


@ALL_FAMILIES
def test_adapters_stay_in_the_recurrent_block(make):
    names = find_looped_model(make()).default_targets()
    wanted = (None, "all-linear", {name.rpartition(".")[2] for name in names})
    configs = [default_peft_config(make(), LoraConfig(target_modules=targets)) for targets in wanted]
    if make in TINY.values():
        configs.append(LoraConfig())  # PEFT's own table
    for config in configs:
        adapted = get_peft_model(make(), config).get_base_model()
        assert [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)] == names
    config = default_peft_config(make(), LoraConfig(target_modules=[names[0], "lm_head"]))
    with user_error("or write `get_peft_model.model, default_peft_config.model, your_config"):
        add_gates(get_peft_model(make(), config))


def test_chosen_layers_keep_the_names_of_their_targets():
    """Huginn has a `proj` in its attention and one in its MLP."""
    config = LoraConfig(target_modules=["attn.proj"], layers_to_transform=[0])
    assert default_peft_config(TINY["huginn"](), config).target_modules == {"attn.proj"}


# Cache and keywords.


@ALL_FAMILIES
@torch.no_grad()
def test_cached_steps_equal_one_pass(make):
    model = make().eval()
    ids = torch.randint(2, 258, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    for num_loops in (3, 5):
        attach_looped_model(model).num_loops = num_loops
        cache = DynamicCache(config=model.config)
        want = model(ids, mask, use_cache=False).logits
        first = model(ids[:, :5], mask[:, :5], cache=cache)
        second = model(ids[:, 5:], mask, past_key_values=first[CACHE])
        logits = torch.cat([first.logits, second.logits], dim=1)
        torch.testing.assert_close(logits[mask.bool()], want[mask.bool()], atol=1e-5, rtol=1e-5)
        assert {layer.get_seq_length() for layer in cache.layers} == {9}


EMBEDS = lambda model: {"inputs": None, "inputs_embeds": model.get_input_embeddings()(IDS)}
DRAFTS = lambda model: {"inputs": IDS[:1], "assistant_model": model, "num_assistant_tokens": 2}
GENERATE = {
    "sampling": {"do_sample": True, "num_return_sequences": 2, "stop_strings": ["@"]},
    "embeddings": EMBEDS,
    "draft": DRAFTS,
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": IDS, "cache_implementation": "static"},
    "outputs": {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True},
}  # fmt: skip
EARLY_EXIT = {"inputs": IDS[:1], "assistant_early_exit": 1}
UNSUPPORTED_ARGUMENTS = {"early exit": EARLY_EXIT, "paged": {"cache_implementation": "paged"}}


@pytest.mark.parametrize("name", [*GENERATE, *UNSUPPORTED_ARGUMENTS])
@ALL_FAMILIES
def test_generate_takes_documented_arguments(make, name, tokenizer):
    model = make().eval()
    attach_looped_model(model)
    options = {**GENERATE, **UNSUPPORTED_ARGUMENTS}[name]
    options = options(model) if callable(options) else options
    generate = lambda **more: model.generate(**{"inputs": IDS, "max_new_tokens": 3, "pad_token_id": 1, **more})
    messages = dict.fromkeys(UNSUPPORTED_ARGUMENTS, "support looped models. Use `")
    if make is tiny_hrm:
        messages |= dict.fromkeys(("draft", "early exit"), "proposed tokens would count as prompt")
    if make is TINY["parcae"]:
        messages["embeddings"] = "`input_ids` must be set instead of `inputs_embeds`"
    if name in messages:
        with user_error(messages[name]):
            generate(**options)
        options = {}
    out = generate(tokenizer=tokenizer, **options)
    assert (out if torch.is_tensor(out) else out.sequences).shape[1] > 1


def test_decoding_equals_decoding_without_cache(make_tiny):
    model, start = make_tiny().eval(), {"initial_state": torch.randn(2, 7, 32)}  # later tokens have the family's own
    starts = [model.generate(IDS, **start, **GREEDY, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*starts)
    with user_error("`initial_state` must have shape .2, number of tokens, 32., got .2, 6, 33."):
        model(input_ids=IDS, initial_state=torch.zeros(2, 6, 33))
    beams = [model.generate(IDS, num_beams=4, use_cache=use_cache, **GREEDY) for use_cache in (True, False)]
    assert torch.equal(*beams)
    drafted = model.generate(IDS[:1], prompt_lookup_num_tokens=2, **GREEDY)  # rejected tokens leave the cache
    assert torch.equal(drafted, model.generate(IDS[:1], use_cache=False, **GREEDY))


def test_cache_of_fewer_loops_raises(make_tiny):
    model = make_tiny().eval()
    cache = model(IDS).get(CACHE)
    model.config.num_loops += 1
    with user_error("The number of loops was raised"):
        model(IDS[:, :1], cache=cache)
    with user_error("`use_cache` must be False with `output_readouts`"):
        model(IDS, use_cache=True, output_readouts=True)
    with user_error("Continuous batching"):
        model.generate_batch([[3]], generation_config=model.generation_config)


@ALL_FAMILIES
def test_forward_checks_keywords(make):
    model = make(attn_implementation="eager").eval()
    looped = attach_looped_model(model)
    for module in (model, model.base_model):  # a model with its head passes its keywords on
        with pytest.raises(
            TypeError, match=f"{type(model.base_model).__name__}.* unexpected keyword argument 'kv_cache'"
        ):
            module(IDS, kv_cache=None)
    options = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": False}
    out = model(IDS, labels=IDS, num_items_in_batch=torch.tensor(20), return_dict=True, **options)
    torch.testing.assert_close(out.loss, model(IDS, labels=IDS).loss / 2)
    assert len(out.attentions) == len(out.hidden_states) - 1 and model(IDS, return_dict=False)[0].shape == (2, 6, 258)
    assert looped is not model or len(out.attentions) == model.config.num_layer_runs


# Configurations.

SIZES = load_script("benchmarks/memory.py")
QWEN3_4B = {**SIZES.QWEN, "num_hidden_layers": 36, "tie_word_embeddings": True}
STACKS = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
CONVERTED = {
    "model_type": "huginn_raven", "tie_embeddings": False, "qk_bias": False, "mean_recurrence": 32, "n_embd": 2048,
    "rope_theta": 500_000.0, "intermediate_size": 8192, "init_values": {"std": 0.0087, "embed_scale": 1.0},
    **dict(zip(STACKS, (4, 6, 4), strict=True)),
}  # fmt: skip
LLAMA_3_2 = {
    **CONVERTED, "block_layout": "llama", "vocab_size": 128256, "n_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
OLMO_2 = {
    **CONVERTED, "block_layout": "olmo", "vocab_size": 100352, "n_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
}  # fmt: skip
PARCAE_13B = {"model_type": "parcae", "n_embd": 1536, "num_attention_heads": 12, **dict.fromkeys(STACKS, 8)}
PUBLISHED = {  # fields, number of parameters, number of trained parameters of the default adapter
    "Ouro-1.4B": ({"model_type": "ouro", "num_hidden_layers": 24}, 1_434_652_673, 15_138_816),
    "huginn-0125": ({"model_type": "huginn_raven"}, 3_564_976_800, 6_397_440),
    "LoopUS-4B": ({"model_type": "lds", "base_config_dict": QWEN3_4B}, None, 917_504 * 33),
    "Nanbeige4.2-3B": (SIZES.SHAPES["Nanbeige4.2-3B"], 4_169_800_704, 23_969_792),
    "recurrent_llama": (LLAMA_3_2, 1_385_228_288, 3_735_552),
    "recurrent_olmo": (OLMO_2, 1_359_071_232, 4_030_464),
    "parcae-140m": ({"model_type": "parcae"}, 144_323_136, 442_368),
    "parcae-1.3b": (PARCAE_13B, 1_338_591_744, 3_538_944),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    fields, parameters, trained = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
        assert parameters in (None, sum(p.numel() for p in model.parameters()))
        adapted = get_peft_model(model, default_peft_config(model))
    assert sum(p.numel() for p in trained_parameters(adapted).values()) == trained


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
SPLIT = ("encoder_layer_indices", "reasoning_layer_indices", "decoder_layer_indices")
UNSUPPORTED = [
    ("nanbeige", {"enable_something_new": True}, "`enable_something_new` must be off"),
    ("nanbeige", {"kv_channels": 16}, "`kv_channels` must equal `head_dim` = 12, got 16"),
    ("ouro", SLIDING, "`use_sliding_window` must be False"),
    ("ouro", {"num_loops": 0}, "`num_loops` must be an integer from 1"),
    ("huginn", {"injection_type": "add"}, "`injection_type` must be 'linear'"),
    ("raven_olmo", {"initial_state_mode": "embed-init"}, "`initial_state_mode` must be 'random'"),
    ("raven_olmo", {"block_layout": "qwen"}, "`block_layout` must be 'huginn' or 'llama' or 'olmo'"),
    ("huginn", {"n_heads": 55}, "`head_dim` must be even and at least 2, got 0 from `n_embd` 32 and `n_heads` 55"),
    ("parcae", {"num_attention_heads": 6}, "got 5 from `n_embd` 32 and `num_attention_heads` 6"),
    ("parcae", {"injection_type": "linear"}, "`injection_type` must be 'diagonal' for Parcae, got 'linear'"),
    ("parcae", {"num_key_value_heads": 2}, "`num_key_value_heads` must be 4 for Parcae, got 2"),
    ("parcae", {"rope_settings": {"use_rope": False}}, "`use_rope` must be True for Parcae, got False"),
    ("parcae", {"n_layers_in_recurrent_block": 3}, "must be even for Parcae, got 3 of 5 blocks"),
    ("loopus", {"base_config_dict": {"model_type": "llama"}}, "must describe a 'qwen3' model, got 'llama'"),
    ("loopus", {"lma_window": 3}, "`lma_window` must be 0, got 3"),
    ("loopus", dict(zip(SPLIT, ([0], [2], [3]), strict=True)), "must share the 4 base layers"),
    ("loopus", dict(zip(SPLIT, ([0, 1], [], [2, 3]), strict=True)), "at least one to loop"),
]


@pytest.mark.parametrize(("name", "fields", "message"), UNSUPPORTED, ids=str)
def test_unsupported_architectures_raise(name, fields, message):
    with user_error(message):
        TINY[name](**fields)


def test_tiny_models_of_the_page_train(tmp_path, monkeypatch, config, dataset):
    """The page names the fields of Dory, which not all supported releases of transformers have."""
    monkeypatch.chdir(tmp_path)
    example = re.search(
        r"## Tiny random models\n.*?```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL
    )[1]
    if hasattr(transformers, "DoryConfig"):
        dory = "**layers, num_key_value_heads=2, head_dim=8, n_recurrent_loops=2, n_input_layers=1, n_output_layers=1"
        example = example.replace("configs = {", f'configs = {{"dory": transformers.DoryConfig({dory}),')
    names = {"__name__": "example", "transformers": transformers}
    exec(example, names)
    assert {*names["configs"]} >= {"ouro", "huginn", "loopus", "nanbeige", "parcae", "hrm_text"}
    for family in names["configs"]:
        args = config(output_dir=family, max_steps=1, model_init_kwargs={"dtype": "float32"})
        trainer = LoopDropoutSFTTrainer(f"tiny/{family}", args, train_dataset=dataset)
        trainer.train()
        assert logged(trainer, "grad_norm")[0] > 0, family


UNSUPPORTED_MODELS = [
    ({"model_type": "inkling2_loop"}, "Inkling-2 is not supported: its looped layers"),
    ({"model_type": "new", "architectures": ["IQuestLoopCoderForCausalLM"]}, "IQuest-Coder-Loop is not supported"),
    ({"model_type": "new", "_name": "SenseNova-Loop-9B"}, "SenseNova-Loop is not supported: it has linear attention"),
    ({"model": {"arch": "huginn"}, "_name": "LoopedLM-P1-dense-huginn-336b"}, "IFM's LoopedLM is not supported"),
    ({"model_type": "lds", "base_config_dict": {"model_type": "phi3"}}, "LoopUS over other models is not supported"),
    (
        {"model_type": "new"},
        "supported `model_type`, got 'new'. Code in a checkpoint is never run.*or import the code that",
    ),
]


@pytest.mark.parametrize(("fields", "message"), UNSUPPORTED_MODELS, ids=str)
def test_unsupported_models_raise(fields, message, tmp_path, make_sft):
    folder = tmp_path / fields.get("_name", "base")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    for load in (load_model, make_sft):
        with user_error(message):
            load(str(folder))


def test_model_of_an_unsupported_class_raises():
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="inkling2_loop_text")
    with pytest.raises(NotLoopedError, match="Inkling-2 is not supported"):
        find_looped_model(model)


# Checkpoints.


def test_checkpoints_keep_the_published_layout(family, tmp_path):
    save_published(family, tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    name = family.meta["name"]
    published = {"architectures": ["LDSForCausalLM"], **json.loads((tmp_path / "config.json").read_text())}
    if name == "parcae":
        published.pop("architectures")  # the original class does not accept it
    if name == "huginn":
        published.pop("tie_word_embeddings")  # the original class reads `tie_embeddings`
    if name in LAYOUTS:
        published["block_layout"] = LAYOUTS[name]
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == published
    # The published files of Huginn and Parcae have the head twice.
    tied = {"lm_head.weight": family.weights["transformer.wte.weight"]} if name in ("huginn", "parcae") else {}
    saved = load_file(tmp_path / "again" / "model.safetensors")
    torch.testing.assert_close(saved, {**family.weights, **tied}, atol=2e-6, rtol=0)
    deep = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=family.meta["deep_loops"])
    assert_close(deep(**golden_inputs(family, "unpadded")).loss, family.tensors["unpadded/deep/loss"], atol=2e-5)
    model.config.use_cache = False  # as training does
    peft_model = with_adapter(model, scale=0.1).eval()
    merge_and_save(peft_model, tmp_path / "merged")
    published.pop("auto_map")  # the folder has no code
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == published
    peft_model.save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for loaded in (adapted, merged):
        assert_close(loaded(IDS).logits, peft_model(IDS).logits)


@torch.no_grad()
def test_resized_and_cast_models_reload(make_tiny, tmp_path):
    model, ids = make_tiny().eval(), torch.arange(2, 258)[None]
    model.resize_token_embeddings(300)
    assert len(model.get_output_embeddings().weight) == model.config.vocab_size == 300
    model.save_pretrained(tmp_path)
    change_weights(tmp_path, **OF_OLD_CHECKPOINTS)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.bfloat16()(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("make", MAKERS)
def test_incomplete_checkpoints_raise(make, tmp_path):
    load = load_model if make is tiny_hrm else AutoModelForCausalLM.from_pretrained
    make().save_pretrained(tmp_path)
    name = max(load_file(tmp_path / "model.safetensors"), key=lambda name: "mlp" in name)
    other = name.replace(".weight", ".other")
    change_weights(tmp_path, **OF_OLD_CHECKPOINTS, **{other: torch.zeros(3)})
    with user_error(f"got 1 unexpected weights, such as `.*{other}`"):
        load(tmp_path)
    change_weights(tmp_path, **{other: None, name: None})
    with user_error(f"got 1 missing weights, such as `.*{name}`"):
        load(tmp_path)


@pytest.mark.pairs
@pytest.mark.parametrize("checkpointing", [False, True])
def test_float16_base_trains_under_autocast(make_tiny, train, checkpointing):
    fields = {"bf16": True, "max_steps": 2, "gradient_checkpointing": checkpointing}
    losses = [entry["loss"] for entry in train(make_tiny().half(), **fields).state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(4.5 < loss < 6.5 for loss in losses)  # log 258 = 5.55


# The loss of TRL's trainer, which multiplies by the head's weight and does not run the head.

share = lambda logits, labels: logits.softmax(-1).gather(1, labels[:, None])[:, 0].detach()
LOSSES = {
    "nll": F.cross_entropy,
    "chunked_nll": F.cross_entropy,
    "dft": lambda logits, labels: (F.cross_entropy(logits, labels, reduction="none") * share(logits, labels)).mean(),
    "smoothed": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
}


CASES = [(make, "chunked_nll") for make in (*TINY.values(), tiny_hrm)]
CASES += [pytest.param(*DORY.values, loss, marks=DORY.marks) for loss in LOSSES]


@pytest.mark.parametrize(("make", "loss"), CASES)
def test_trainer_has_the_loss_of_the_model(make, loss, make_sft):
    model = make(**({"state_init": "zero"} if hasattr(make().config, "state_init") else {}))
    fields = {"label_smoothing_factor": 0.1} if loss == "smoothed" else {"loss_type": loss}
    trainer = make_sft(model, rule="lora", remove_padding=False, **fields)
    peft_model = randomise(trainer.model).train()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    labels = batch["labels"][:, 1:]
    inputs = {name: x for name, x in trainer.looped.complete_batch(batch).items() if name != "labels"}
    logits = peft_model(**inputs, use_cache=False).logits[:, :-1]
    want = LOSSES[loss](logits[labels != -100], labels[labels != -100])
    got = trainer.compute_loss(peft_model, batch)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    parameters = list(trained_parameters(peft_model).values())
    for gradient, wanted in zip(*(torch.autograd.grad(x, parameters) for x in (got, want)), strict=True):
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7
