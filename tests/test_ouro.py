"""The native Ouro against the reference's golden tensors, and what the reference's own code cannot do."""

import json

import pytest
import torch
from conftest import golden_ouro, tiny_ouro
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM


BATCHES = ("unpadded", "padded")


def inputs_of(ouro, batch):
    return {name: ouro.tensors[f"{batch}/{name}"] for name in ("input_ids", "attention_mask", "labels")}


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("batch", BATCHES)
def test_states_readouts_losses_and_exit_gate_agree_with_the_reference(ouro, batch, attention):
    model = golden_ouro(ouro, attn_implementation=attention)
    inputs, want = inputs_of(ouro, batch), lambda name: ouro.tensors[f"{batch}/{name}"]
    valid = inputs["attention_mask"].bool()
    with torch.no_grad():
        out = model(**inputs, output_readouts=True)
        readouts = torch.stack(out.readouts)
        logits = model.lm_head(readouts)
        exit_pdf = model.model.exit_distribution(out.readouts)
        gate_logits = model.model.early_exit_gate(readouts).squeeze(-1)
        mixture = torch.einsum("bsk,kbsv->bsv", exit_pdf, logits)

    for got, name in ((readouts, "loop_state"), (readouts, "loop_hidden"), (logits, "loop_logits")):
        torch.testing.assert_close(got[:, valid], want(name)[:, valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(gate_logits[:, valid], want("gate_logits")[:, valid], atol=1e-4, rtol=0)
    for got, name in ((out.logits, "logits"), (exit_pdf, "exit_pdf"), (mixture, "expected_logits")):
        torch.testing.assert_close(got[valid], want(name)[valid], atol=1e-4, rtol=0)

    loss = lambda logits: model.loss_function(logits=logits, labels=inputs["labels"], vocab_size=97)
    torch.testing.assert_close(out.loss, want("loss"), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.stack([loss(x) for x in logits]), want("loop_loss"), atol=2e-5, rtol=0)
    torch.testing.assert_close(loss(mixture), want("expected_exit_loss"), atol=2e-5, rtol=0)


@pytest.mark.parametrize("cache", ["none", "dynamic", "static", "offloaded"])
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_tokens_agree_with_and_without_a_cache(ouro, batch, cache):
    if cache == "offloaded" and not torch.accelerator.is_available():
        pytest.skip("cache offloading moves tensors between an accelerator and the CPU")
    model = golden_ouro(ouro)
    inputs = inputs_of(ouro, batch)
    inputs.pop("labels")
    options = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    if cache == "dynamic":
        options = {}
    for num_loops, name in ((4, "generated"), (6, "deep/generated")):
        model.config.num_loops = num_loops
        tokens = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        assert torch.equal(tokens[:, inputs["input_ids"].shape[1] :], ouro.tensors[f"{batch}/{name}"])


@pytest.mark.parametrize("batch", BATCHES)
def test_a_deeper_run_agrees_with_the_reference(ouro, batch):
    model = golden_ouro(ouro, num_loops=ouro.meta["deep_loops"])
    inputs = inputs_of(ouro, batch)
    valid = inputs["attention_mask"].bool()
    out = model(**inputs)
    torch.testing.assert_close(out.logits[valid], ouro.tensors[f"{batch}/deep/logits"][valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(out.loss, ouro.tensors[f"{batch}/deep/loss"], atol=2e-5, rtol=0)


def test_the_readout_of_loop_t_is_a_run_of_depth_t_bit_for_bit(ouro):
    model = golden_ouro(ouro)
    inputs = inputs_of(ouro, "padded")
    readouts = model.model(inputs["input_ids"], inputs["attention_mask"], output_readouts=True).readouts
    for loop, readout in enumerate(readouts, start=1):
        model.config.num_loops = loop
        assert torch.equal(model.model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state, readout)


def test_a_multi_token_step_on_a_filled_cache_equals_one_pass(model):
    model.eval()
    ids = torch.randint(2, 258, (2, 9))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :5], past_key_values=cache).logits
        second = model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-5, rtol=1e-5)
    assert len(cache) == 4 * 2  # one slot for every (loop, layer)


def test_raising_the_depth_on_a_filled_cache_is_refused(model):
    model.eval()
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[5, 6]]), past_key_values=cache)
    model.config.num_loops = 6
    with pytest.raises(ValueError, match="number of loops was raised"):
        model(torch.tensor([[7]]), past_key_values=cache)


def test_packed_rows_equal_separate_rows(model):
    model.eval()
    rows = [torch.randint(2, 258, (length,)) for length in (3, 6, 4)]
    packed = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    together = model(packed, position_ids=positions, use_cache=False).logits[0]
    alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing_changes_no_gradient_and_is_never_reentrant(kwargs, caplog):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_ouro().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
            assert all(function.keywords["use_reentrant"] is False for function in functions)
        ids = torch.arange(2, 22).view(2, 10)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_hub_checkpoint_loads_without_remote_code_and_saves_under_its_own_names(ouro, tmp_path):
    model = golden_ouro(ouro)
    model.save_pretrained(tmp_path)
    hub = {**ouro.meta["config"], "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(hub))  # as the hub has it: 4.x fields and remote code

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is OuroForCausalLM
    assert loaded.config.rope_parameters["rope_theta"] == 1e6
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    for name, value in ouro.meta["config"].items():
        assert saved[name] == value, name
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(n[8:] for n in ouro.tensors if n.startswith("weights/"))


def test_num_loops_is_a_keyword_of_from_pretrained_and_changes_on_a_loaded_model(ouro, tmp_path):
    golden_ouro(ouro).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_loops == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=6)
    inputs = inputs_of(ouro, "unpadded")
    torch.testing.assert_close(model(**inputs).loss, ouro.tensors["unpadded/deep/loss"], atol=2e-5, rtol=0)
    model.config.num_loops = 4
    torch.testing.assert_close(model(**inputs).loss, ouro.tensors["unpadded/loss"], atol=2e-5, rtol=0)
    assert model.config.total_ut_steps == 4


@pytest.mark.parametrize("depth", [0, -1, 2.0, True, "4"])
def test_a_depth_that_is_no_depth_is_refused_when_it_is_set(depth):
    with pytest.raises(ValueError, match="num_loops|total_ut_steps"):
        OuroConfig(num_loops=depth)
    config = OuroConfig()
    with pytest.raises(ValueError, match="whole number of at least 1"):
        config.num_loops = depth
    assert config.num_loops == 4


@pytest.mark.parametrize(
    ("num_layers", "parameters", "trainable"), [(24, 1_434_652_673, 15_138_816), (48, 2_667_974_657, 30_277_632)]
)
def test_published_sizes_come_out(num_layers, parameters, trainable):
    from peft import get_peft_model

    config = OuroConfig(num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = OuroForCausalLM(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
        adapted = get_peft_model(model, default_peft_config(config))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == trainable


def test_a_model_without_loops_is_named_as_such():
    with pytest.raises(NotLoopedError, match="Linear is not a looped model"):
        find_looped_model(torch.nn.Linear(2, 2))


def test_hidden_states_and_attentions_can_be_asked_for(model):
    out = model(torch.tensor([[3, 4, 5]]), output_hidden_states=True, output_attentions=False)
    assert torch.equal(out.hidden_states[-1], model.model(torch.tensor([[3, 4, 5]])).last_hidden_state)
