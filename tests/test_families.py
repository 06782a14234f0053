"""What holds for every family alike: the reference's golden tensors, its brute-force oracle, cache, padding, packing."""

import json

import pytest
import torch
from conftest import (
    CONVERSIONS,
    LAYOUTS,
    NANBEIGE_3B,
    ROOT,
    TINY,
    flat_weights,
    golden_adapted,
    golden_inputs,
    golden_model,
    python,
    submodule_name,
    tiny_hrm,
    trained_parameters,
    with_adapter,
)
from peft import get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from loopdropout_trainer import default_peft_config, merge_and_save, use_gates
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models import HuginnConfig, LoopusConfig, NanbeigeConfig, OuroConfig
from loopdropout_trainer.record.measurement import read_measurements


FLEX = pytest.param("padded", "flex_attention", marks=pytest.mark.slow)  # compiles


def example_nll(logits, labels):
    """Sums of the cross entropy over each row's targets, [B]."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")
    return losses.sum(dim=1)


def assert_close(got, want, atol):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


# The reference's golden tensors


@pytest.mark.parametrize(("batch", "attention"), [("unpadded", "sdpa"), ("padded", "sdpa"), ("padded", "eager"), FLEX])
@torch.no_grad()  # torch has no backward of flex_attention on a CPU
def test_states_readouts_and_losses_agree_with_the_reference(family, batch, attention):
    model, inputs = golden_model(family, attn_implementation=attention), golden_inputs(family, batch)
    valid = inputs["attention_mask"].bool()
    out = model(**inputs, output_readouts=True)
    logits = model.get_output_embeddings()(torch.stack(out.readouts))
    got = {"loop_state": torch.stack(out.loop_states), "loop_hidden": torch.stack(out.readouts), "loop_logits": logits}
    for name, tensor in got.items():
        assert_close(tensor[:, valid], family.tensors[f"{batch}/{name}"][:, valid], atol=1e-4)
    assert_close(out.logits[valid], family.tensors[f"{batch}/logits"][valid], atol=1e-4)
    assert_close(out.loss, family.tensors[f"{batch}/loss"], atol=2e-5)
    targets = (inputs["labels"][:, 1:] != -100).sum()
    losses = torch.stack([example_nll(x, inputs["labels"]).sum() / targets for x in logits])
    assert_close(losses, family.tensors[f"{batch}/loop_loss"], atol=2e-5)
    model.config.num_loops = family.meta["deep_loops"]
    deep = model(**inputs)
    assert_close(deep.logits[valid], family.tensors[f"{batch}/deep/logits"][valid], atol=1e-4)
    assert_close(deep.loss, family.tensors[f"{batch}/deep/loss"], atol=2e-5)


@pytest.mark.parametrize("cache", ["none", "dynamic", "static", "offloaded"])
@pytest.mark.parametrize("batch", ["unpadded", "padded"])
def test_greedy_tokens_agree_with_and_without_a_cache(family, batch, cache):
    if cache == "offloaded" and not torch.accelerator.is_available():
        pytest.skip("cache offloading moves tensors between an accelerator and the CPU")
    model = golden_model(family)
    options = {"none": {"use_cache": False}, "dynamic": {}}.get(cache, {"cache_implementation": cache})
    for num_loops, name in ((family.meta["loops"], "generated"), (family.meta["deep_loops"], "deep/generated")):
        model.config.num_loops = num_loops
        inputs = golden_inputs(family, batch)
        inputs.pop("labels")
        if "initial_state" in inputs:  # one state for each column that generation will reach
            inputs["initial_state"] = family.tensors[f"{batch}/initial_state"]
        tokens = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        assert torch.equal(tokens[:, inputs["input_ids"].shape[1] :], family.tensors[f"{batch}/{name}"])


# The brute-force oracle of Loop Dropout


def assert_gradients_agree(family, peft_model, prefix, gates=None):
    tensors, named = family.tensors, dict(peft_model.get_base_model().named_parameters())
    got = {
        f"{factor}/{name}": named[f"{submodule_name(family, name)}.{factor}.default.weight"].grad
        for name in family.meta["lora"]["modules"]
        for factor in ("lora_A", "lora_B")
        if f"{prefix}/{factor}/{name}" in tensors
    }
    assert got
    for name, gradient in {**got, **({} if gates is None else {"gates": gates.grad})}.items():
        want = tensors[f"{prefix}/{name}"]
        assert (gradient - want).norm() <= max(1e-4 * want.norm(), 1e-6), name


@pytest.mark.parametrize("mean", ["token_mean", "example_mean"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_losses_and_gradients_under_gates_agree_with_the_oracle(family, layout, checkpointing, mean):
    peft_model, tensors = golden_adapted(family).train(), family.tensors
    if checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = golden_inputs(family, "oracle/left" if layout == "left" else "oracle/right")
    kept, lengths, segments = inputs["attention_mask"].bool(), [inputs["labels"].shape[1]], None
    if layout == "packed":
        inputs = {name: tensor[kept][None] for name, tensor in inputs.items() if name != "attention_mask"}
        lengths = kept.sum(dim=1).tolist()
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    gates = tensors["oracle/gates"].clone().requires_grad_()
    with use_gates(peft_model, gates, segments):
        out = peft_model(**inputs)
        rows = zip(out.logits.split(lengths, dim=1), inputs["labels"].split(lengths, dim=1), strict=True)
        nll = torch.cat([example_nll(*row) for row in rows])
        loss = out.loss if mean == "token_mean" else (nll / tensors["oracle/example_tokens"]).mean()
        loss.backward()
    assert_close(nll, tensors["oracle/example_nll"], atol=1e-4)
    assert_close(loss, tensors[f"oracle/loss_{mean}"], atol=2e-5)
    assert_gradients_agree(family, peft_model, f"oracle/grad_{mean}", gates)
    if layout == "left":
        assert_close(out.logits[kept], tensors["oracle/left/logits"][kept], atol=1e-4)


def test_zero_unit_and_single_loop_gates_agree_with_the_oracle(family):
    peft_model, inputs = golden_adapted(family), golden_inputs(family, "oracle/left")
    num_loops, tokens = family.meta["loops"], family.tensors["oracle/example_tokens"]
    want = {
        "zero_gate": torch.zeros(1, num_loops),
        "unit_gate": torch.ones(1, num_loops),
        "single_loop": torch.eye(num_loops),
    }
    for name, rows in want.items():
        losses = []
        for gates in rows:
            with torch.no_grad(), use_gates(peft_model, gates):
                losses.append(example_nll(peft_model(**inputs).logits, inputs["labels"]) / tokens)
        reference = family.tensors[f"oracle/{name}/example_loss"]
        assert_close(torch.stack(losses).view_as(reference), reference, atol=2e-5)
    with torch.no_grad():
        batch = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        readouts = torch.stack(find_looped_model(peft_model).loop_readouts(**batch))
        logits = peft_model.get_base_model().get_output_embeddings()(readouts)
    losses = torch.stack([example_nll(x, inputs["labels"]) / tokens for x in logits])
    assert_close(losses, family.tensors["oracle/unit_gate/readout_loss"], atol=2e-5)


def test_the_default_adapter_is_on_the_modules_of_the_oracle(family):
    model = golden_model(family)
    want = [submodule_name(family, name) for name in family.meta["lora"]["modules"]]
    assert find_looped_model(model).recurrent_linears() == want
    adapted = get_peft_model(model, default_peft_config(model, r=family.meta["lora"]["r"]))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == family.meta["lora"]["num_params"]


# What is published, and what is refused of it

QWEN3_4B = {
    "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
PUBLISHED = {  # config, parameters, trained ones of the default adapter
    "Ouro-1.4B": (OuroConfig, {"num_hidden_layers": 24}, 1_434_652_673, 15_138_816),
    "Ouro-2.6B": (OuroConfig, {"num_hidden_layers": 48}, 2_667_974_657, 30_277_632),
    "huginn-0125": (HuginnConfig, {}, 3_564_976_800, 6_397_440),
    "LoopUS-4B": (LoopusConfig, {"base_config_dict": QWEN3_4B}, None, 917_504 * 33),
    "Nanbeige4.2-3B": (NanbeigeConfig, NANBEIGE_3B, 4_169_800_704, 23_969_792),
    **{name: (HuginnConfig, *numbers) for name, numbers in CONVERSIONS.items()},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_come_out(name):
    config_class, fields, parameters, trained = PUBLISHED[name]
    config = config_class(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        assert parameters in (None, sum(p.numel() for p in model.parameters()))
        adapted = get_peft_model(model, default_peft_config(config))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == trained
    if name == "huginn-0125":
        assert config.init_values["std"] == pytest.approx((2 / (5 * 5280)) ** 0.5)
        assert (config.num_loops, config.bos_token_id, config.pad_token_id) == (32, 65504, 65509)


SWITCHES = ("enable_double_loop_split", "enable_hyper_connection", "enable_mhc", "enable_depth_attention")
SWITCHES += ("enable_something_new", "loop_share_kv", "qk_layernorm", "mlp_bias", "attention_bias")
VALUES = {"loop_middle_layers": [2, 3], "insert_ngram_layer_idx": [3], "ngram_vocab_size_ratio": 78.0}
NANBEIGE_SWITCHES = {**dict.fromkeys(SWITCHES, True), **VALUES, "emb_neighbor_num": 4, "emb_split_num": 4}
SPLIT = ("encoder_layer_indices", "reasoning_layer_indices", "decoder_layer_indices")
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
REFUSED = [
    *(("nanbeige", {name: value}, f"`{name}` .* must be off") for name, value in NANBEIGE_SWITCHES.items()),
    ("nanbeige", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "`rope_scaling` .* 'linear'"),
    ("nanbeige", {"kv_channels": 16}, "`kv_channels` must equal `head_dim` = 12; got 16"),
    ("ouro", SLIDING, "Only full attention"),
    ("huginn", {"injection_type": "add"}, "`injection_type`"),
    ("huginn", {"state_init": "embed"}, "`state_init`"),
    ("huginn", {"num_key_value_heads": 11}, "`num_key_value_heads`"),
    ("huginn", {"bias": True}, "`bias`"),
    ("huginn", {"n_layers": 5}, "`n_layers`"),
    ("raven_olmo", {"initial_state_mode": "embed-init"}, "`initial_state_mode` .* must be 'random'"),
    ("raven_olmo", {"qk_bias": True}, "`qk_bias` must be False"),
    ("raven_olmo", {"num_key_value_heads": 3}, "`n_heads` must be a multiple of `num_key_value_heads`"),
    ("raven_olmo", {"block_layout": "qwen"}, "`block_layout` .* must be 'huginn' or 'llama' or 'olmo'"),
    ("raven_olmo", {"tie_word_embeddings": True}, "`tie_word_embeddings` must be False"),
    ("loopus", {"base_config_dict": {"model_type": "llama"}}, "is of a 'llama' model"),
    ("loopus", SLIDING, "Only full attention"),
    ("loopus", {"lma_window": 3}, "`lma_window` 3, .* is not implemented"),
    ("loopus", dict(zip(SPLIT, ([0], [2], [3]), strict=True)), "must share the 4 base layers"),
    ("loopus", dict(zip(SPLIT, ([0, 1], [], [2, 3]), strict=True)), "at least one to loop"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=str)
def test_what_is_not_implemented_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        TINY[name](**fields)


# Loops, cache and checkpointing


def test_a_multi_token_step_on_a_filled_cache_equals_one_pass(make_tiny):
    model = make_tiny().eval()
    ids = torch.randint(2, 258, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    for num_loops in (4, 6):
        model.config.num_loops = num_loops
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            whole = model(ids, mask, use_cache=False).logits
            first = model(ids[:, :5], mask[:, :5], cache=cache).logits
            second = model(ids[:, 5:], mask, cache=cache).logits
        torch.testing.assert_close(
            torch.cat([first, second], 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-5
        )
        assert len(cache) == model.config.num_layer_runs
        assert {layer.get_seq_length() for layer in cache.layers} == {9}


def test_a_cache_of_fewer_loops_is_refused(make_tiny):
    model = make_tiny().eval()
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        for num_loops in (4, 2):
            model.config.num_loops = num_loops
            model(torch.tensor([[5, 6]]), cache=cache)
        for num_loops in (4, 6):
            model.config.num_loops = num_loops
            with pytest.raises(ValueError, match="number of loops was raised"):
                model(torch.tensor([[7]]), cache=cache)


def test_gradients_flow_through_the_last_backprop_depth_loops_only(make_tiny):
    model, ids = make_tiny().train(), torch.randint(2, 258, (2, 7))
    peft_model = with_adapter(model, scale=0.1, r=2)
    losses, reached = [], []
    for depth in (None, 4, 9, 2):
        model.config.backprop_depth = depth
        gates = torch.ones(4, 1, requires_grad=True)
        with use_gates(peft_model, gates):
            loss = peft_model(ids, labels=ids).loss
            loss.backward()
        losses.append(loss.item())
        reached.append((gates.grad != 0).flatten().tolist())
    assert len(set(losses)) == 1
    assert reached == [[True] * 4] * 3 + [[False, False, True, True]]
    with pytest.raises(ValueError, match="backprop_depth"):
        model.config.backprop_depth = 0


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_checkpointing_is_never_reentrant(make_tiny, kwargs):
    model = make_tiny()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert {module._gradient_checkpointing_func.keywords["use_reentrant"] for module in checkpointed} == {False}


# Checkpoints


def hub_folder(family, path, **config):
    """The golden model as the hub would hold it: its own keys and config fields."""
    golden_model(family).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({**family.meta["config"], **config}))


def test_a_hub_checkpoint_loads_without_remote_code_and_saves_under_its_own_names(family, tmp_path):
    hub_folder(family, tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    hub, name = json.loads((tmp_path / "config.json").read_text()), family.meta["name"]
    if name == "huginn":
        hub.pop("tie_word_embeddings")  # the original writes `tie_embeddings`, and its class stops at both
    own = {"block_layout": LAYOUTS[name]} if name in LAYOUTS else {}
    published = {"architectures": ["LDSForCausalLM"], **own, **hub}  # the golden LoopUS leaves the first out
    assert saved == published
    model.config.use_cache = False  # as training does
    merge_and_save(with_adapter(model), tmp_path / "merged")
    published.pop("auto_map")  # which names code that is not there
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == published
    tensors = {key[8:]: tensor for key, tensor in family.tensors.items() if key.startswith("weights/")}
    if name == "huginn":  # the published file has it twice, the golden one once
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for key, tensor in saved.items():
        assert_close(tensor, tensors[key], atol=2e-6)
    deep = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=family.meta["deep_loops"])
    assert_close(deep(**golden_inputs(family, "unpadded")).loss, family.tensors["unpadded/deep/loss"], atol=2e-5)


def test_a_model_that_is_cast_equals_one_that_is_loaded_so(make_tiny, tmp_path):
    make_tiny().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path).bfloat16()
    ids = torch.arange(2, 258)[None]
    with torch.no_grad():
        assert torch.equal(cast(ids).logits, loaded(ids).logits)


# Training


def test_training_with_padding_checkpointing_and_resume(make_tiny, make_trainer, tmp_path):
    first, again = (make_trainer(make_tiny(), gradient_checkpointing=True, output_dir=tmp_path / run) for run in "ab")
    first.train()
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert again.first_step == 2 and torch.equal(flat_weights(first), flat_weights(again))
    assert any("lora_B" in name and bool((p != 0).any()) for name, p in trained_parameters(first.model).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, "hrm_text"])
def test_the_command_trains_resumes_evaluates_deeper_and_merges(name, tokenizer, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    ({**TINY, "hrm_text": tiny_hrm}[name]()).save_pretrained(base)
    tokenizer.save_pretrained(base)

    def command(*words, **fields):
        options = [word for field, value in fields.items() for word in (f"--{field}", str(value))]
        python("-m", "loopdropout_trainer", *words, *options)

    recipe = tmp_path / "recipe.yaml"
    training = {
        "extends": str(ROOT / "recipes" / "quickstart.yaml"), "model_name_or_path": str(base), "output_dir": str(out),
        "num_loops": 3, "num_train_examples": 32, "num_eval_examples": 8, "per_device_train_batch_size": 4,
        "gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 2, "benchmark_limit": 2,
        "compare_with": [], "depths": [], "merge": False,
    }  # fmt: skip
    recipe.write_text(json.dumps(training))  # JSON is YAML
    command("sft", recipe, max_steps=2)
    command("sft", recipe, max_steps=4, resume_from_checkpoint="true", resume_with_changed_settings="true")
    assert (out / "checkpoint-4").is_dir()

    deeper = {"output_dir": tmp_path / "deeper", "benchmark_limit": 2, "num_loops": 5}
    command("evaluate", out / "recipe.yaml", adapter=out, **deeper)
    rows, _, _ = read_measurements(tmp_path / "deeper")
    assert {row.depth for row in rows} == {5}

    command("merge", out / "recipe.yaml", adapter=out)
    merged = json.loads((out / "merged" / "config.json").read_text())
    assert len({"total_ut_steps", "mean_recurrence", "N", "num_loops", "H_cycles"} & merged.keys()) == 1


FRESH = """
import sys, pathlib, torch, loopdropout_trainer
from peft import PeftModel
from transformers import AutoModelForCausalLM
ids = torch.arange(2, 14).view(2, 6)
for folder in map(pathlib.Path, sys.argv[1:]):
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", num_loops=merged.config.num_loops)
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    torch.save([model(ids).logits.detach() for model in (merged, adapted)], folder / "logits.pt")
"""


def test_saved_and_merged_models_reload_in_a_fresh_process(tmp_path):
    ids, wanted = torch.arange(2, 14).view(2, 6), {}
    for name, make in TINY.items():
        folder = tmp_path / name
        model = make()
        model.save_pretrained(folder / "base")
        peft_model = with_adapter(model, scale=0.1).eval()
        peft_model.save_pretrained(folder / "adapter")
        merge_and_save(peft_model, folder / "merged")
        wanted[folder] = peft_model(ids).logits
        with peft_model.disable_adapter():
            assert not torch.allclose(peft_model(ids).logits, wanted[folder], atol=1e-2)
    python("-c", FRESH, *wanted)
    for folder, want in wanted.items():
        merged, adapted = torch.load(folder / "logits.pt")
        assert torch.equal(adapted, want)
        torch.testing.assert_close(merged, want, atol=1e-5, rtol=1e-5)



def test_a_float16_base_trains_under_bfloat16_autocast(make_tiny, make_trainer):
    trainer = make_trainer(make_tiny().half(), bf16=True, max_steps=2, save_strategy="no")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(5 < loss < 6.5 for loss in losses)  # log 258 = 5.55
