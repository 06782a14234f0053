"""Parts of single families: Ouro, Huginn and converted models, Parcae, LoopUS, Nanbeige, HRM-Text."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from helpers.errors import user_error
from helpers.files import load_script
from helpers.golden import (
    assert_close,
    assert_gradients_match,
    change_weights,
    golden_adapted,
    golden_inputs,
    golden_model,
    save_published,
)
from helpers.tiny import TINY, sharp_hrm, tiny_hrm
from helpers.trainers import example_nll
from loopdropout_trainer import LoopDropoutSFTTrainer, load_model, use_gates
from loopdropout_trainer.looped import attach_looped_model, find_looped_model, use_depth
from loopdropout_trainer.models import HuginnForCausalLM, LoopusConfig, ParcaeForCausalLM
from loopdropout_trainer.models.prelude_coda import philox, truncated_normals
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES


IDS = torch.tensor([[1, 1, 5, 6, 9], [2, 3, 4, 5, 8]])
GREEDY = {"attention_mask": (IDS != 1).long(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module", params=["huginn", "raven_llama", "raven_olmo"])
def raven(golden, request):
    return golden(request.param)


# Huginn and converted models.


def test_huginn_core_adapter_matches_oracle(raven):
    peft_model = golden_adapted(raven, modules=raven.meta["lora"]["modules_core_only"])
    inputs = golden_inputs(raven, "oracle/left")
    with use_gates(peft_model, raven.tensors["oracle_core_only/gates"]):
        out = peft_model(**inputs)
        out.loss.backward()
    assert_close(example_nll(out.logits, inputs["labels"]), raven.tensors["oracle_core_only/example_nll"])
    assert_gradients_match(raven, peft_model, "oracle_core_only/grad_token_mean")


def test_philox_gives_a_known_answer():
    """Of the Random123 library for Philox-4x32-10."""
    words = lambda text: tuple(torch.tensor(int(word, 16)) for word in text.split())
    numbers = philox(words("243f6a88 85a308d3 13198a2e 03707344"), words("a4093822 299f31d0"))
    assert numbers == words("d16cfe09 94fdcceb 5001e420 24126ea1")


def record_states(model):
    """Return a list that gets the [rows, S, E] state before each loop."""
    seen, size = [], model.config.n_embd
    model.transformer.adapter.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., :size].detach()))
    return seen


def test_huginn_states_have_published_distribution():
    published = stats.truncnorm(-3, 3)
    numbers = truncated_normals(torch.tensor([7]), torch.arange(64), 512).flatten()
    assert stats.kstest(numbers, published.cdf).pvalue > 0.01
    converted = TINY["raven_llama"](init_values={"std": 0.0087, "embed_scale": 1.0})
    huginn, parcae = TINY["huginn"](n_embd=512, n_heads=8), TINY["parcae"](n_embd=512)
    models = [(huginn, published.std() * 0.4**0.5), (converted, published.std() * 0.0087)]
    models.append((parcae, published.std() * (0.4 / 512) ** 0.5))
    for model, std in models:
        states = record_states(model)
        model(torch.arange(2, 40)[None])
        assert states[0].std().item() == pytest.approx(std, rel=0.02 if len(states[0].flatten()) > 2e4 else 0.1)


def test_huginn_state_depends_on_seed_and_position():
    model = TINY["huginn"]().eval()
    first = model(IDS).logits
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(model(IDS).logits, first) and torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(model(IDS[1:]).logits, first[1:], atol=1e-5, rtol=1e-5)
    assert torch.equal(model.generate(IDS, **GREEDY), model.generate(IDS, use_cache=False, **GREEDY))
    assert not torch.allclose(TINY["huginn"](state_seed=1).eval()(IDS).logits, first, atol=1e-3)


def test_huginn_trains_with_a_state_per_example(train):
    def first_tokens(size=4, accumulation=1, **fields):  # by row of the global batch
        fields |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        model = TINY["huginn"]()
        states = record_states(model)
        train(model, max_steps=1, remove_padding=False, **fields)
        return torch.cat([state[:, 0] for state in states[:: model.config.num_loops]])

    states = first_tokens()
    assert len(states.unique(dim=0)) == 4
    assert torch.equal(states, first_tokens(2, 2))
    assert not torch.equal(states, first_tokens(gate_seed=5))
    model = TINY["huginn"]()
    packed = record_states(model)
    train(model, max_steps=1, padding_free=True, max_length=None)
    assert len(packed[0][0].unique(dim=0)) == len(packed[0][0])  # although positions repeat


@pytest.mark.parametrize("duplicate", [False, True])
def test_huginn_loads_tied_heads_and_float32_rotations(golden, duplicate, tmp_path):
    huginn = golden("huginn")
    save_published(huginn, tmp_path)  # has the head twice
    if not duplicate:
        change_weights(tmp_path, **{"lm_head.weight": None})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model(IDS).logits.dtype == torch.float32
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved["transformer.wte.weight"].dtype == torch.bfloat16
    assert_close(saved["freqs_cis"], huginn.weights["freqs_cis"], atol=2e-6)


@torch.no_grad()
def test_converted_llama_equals_llama():
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=30, rope_parameters=rope, **sizes)).eval()
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
    model = load_script("docs/replication/make_small_base.py").looped(llama, tokenizer)
    half = torch.eye(24) / 2
    assert torch.equal(model.transformer.adapter.weight, torch.cat([half, half], dim=1))
    model.transformer.adapter.weight.copy_(torch.cat([0 * half, 2 * half], dim=1))  # only the prelude's output
    model.config.num_loops = 1
    torch.testing.assert_close(model(IDS).logits, llama(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True])
def test_names_of_weights_tell_the_block_layout(raven, sharded, tmp_path):
    save_published(raven, tmp_path)
    if sharded:
        (file,) = tmp_path.glob("*.safetensors")
        file.rename(tmp_path / "part.safetensors")
        index = {"weight_map": dict.fromkeys(load_file(tmp_path / "part.safetensors"), "part.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    for auto_class in (AutoModelForCausalLM, AutoModel, HuginnForCausalLM):
        layout = auto_class.from_pretrained(tmp_path).config.block_layout
        assert layout == raven.meta["name"].removeprefix("raven_")
    if layout == "olmo":
        with user_error("unexpected weights, such as `transformer.*k_norm.weight`"):
            AutoModelForCausalLM.from_pretrained(tmp_path, block_layout="llama")


def test_converted_models_drop_special_tokens_of_huginn(tmp_path):
    tokens = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}
    TINY["raven_olmo"]().save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**fields, **tokens}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


# Parcae.


@torch.no_grad()
def test_parcae_loads_published_files(golden, make_sft, tmp_path):
    parcae = golden("parcae")  # `model_type` is not in its config.json
    (tmp_path / "config.json").write_text(json.dumps(parcae.meta["config"]))
    head = parcae.weights["transformer.wte.weight"]
    torch.save({**parcae.weights, "lm_head.weight": head}, tmp_path / "pytorch_model.bin")
    inputs = golden_inputs(parcae, "unpadded")
    for load in (load_model, AutoModelForCausalLM.from_pretrained, ParcaeForCausalLM.from_pretrained):
        assert_close(load(tmp_path)(**inputs).loss, parcae.tensors["unpadded/loss"], atol=2e-5)
    assert type(make_sft(str(tmp_path)).looped) is ParcaeForCausalLM
    backbone = AutoModel.from_pretrained(tmp_path, use_safetensors=True)
    readout = backbone(inputs["input_ids"], initial_state=inputs["initial_state"]).last_hidden_state
    assert_close(readout, parcae.tensors["unpadded/loop_hidden"][-1])
    torch.save({"lm_head.weight": head, "code": SimpleNamespace()}, tmp_path / "pytorch_model.bin")
    with user_error("pytorch_model.bin must hold tensors only"):
        load_model(tmp_path)


# LoopUS.


@torch.no_grad()
def test_loopus_parts_match_reference(golden):
    loopus = golden("loopus")
    model, inputs, calls = golden_model(loopus), golden_inputs(loopus, "padded"), []
    valid, tensors = inputs["attention_mask"].bool(), loopus.tensors
    model.model.reasoning.gate.register_forward_pre_hook(lambda module, args: calls.append(args))
    states = torch.stack(model(**inputs, output_readouts=True).loop_states)  # [K, B, S, H]
    last = (inputs["attention_mask"] * torch.arange(states.shape[2])).argmax(-1)  # each row's last token
    outputs, inputs_of_gate = zip(*calls, strict=True)
    assert_close(inputs_of_gate[0][valid], tensors["padded/encoder_state"][valid])
    assert_close(torch.stack(outputs)[:, valid], tensors["padded/pre_gate_state"][:, valid])
    q = model.model.q_head(states[:, torch.arange(len(last)), last]).squeeze(-1)
    assert_close(q.sigmoid(), tensors["padded/q_values"])


def test_loopus_gate_stays_float32(tmp_path):
    TINY["loopus"]().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    full = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert full == {name for name in model.state_dict() if name.startswith(("model.reasoning.gate.", "model.q_head."))}
    seen = []
    model.model.reasoning.gate.delta_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(IDS).logits.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {f"model.{name}" for name, tensor in saved.items() if tensor.dtype == torch.float32} == full


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_loopus_loads_old_names_of_weights(golden, auto_class, tmp_path):
    loopus = golden("loopus")
    save_published(loopus, tmp_path)
    to_old = lambda name: name.replace("reasoning.", "plateau.").replace(".layers.", ".module.layers.")
    old_weights = {to_old(name): tensor for name, tensor in loopus.weights.items()}
    save_file(old_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto_class.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert_close(load_file(tmp_path / "again" / "model.safetensors"), loopus.weights, atol=0)


def test_loopus_reads_both_forms_of_rope_theta():
    fields = TINY["loopus"]().config.to_diff_dict()
    base = {name: value for name, value in fields["base_config_dict"].items() if name != "rope_parameters"}
    config = LoopusConfig(**{**fields, "base_config_dict": {**base, "rope_theta": 12345.0}})
    assert config.rope_parameters["rope_theta"] == 12345.0
    assert config.to_diff_dict()["base_config_dict"]["rope_theta"] == 12345.0


# Nanbeige.


def test_nanbeige_depth_follows_loss_weights(tmp_path):
    model = TINY["nanbeige"](num_loops=1, loop_loss_weights=[0.1, 0.2])
    for depth, weights in ((3, [0.1, 0.2]), (5, []), (3, [0.1, 0.2])):
        model.config.num_loops = depth
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert (saved["num_loops"], saved["loop_loss_weights"]) == (depth, weights)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_loops == depth
    assert AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=2).config.num_loops == 2


# HRM-Text.


def test_hrm_batches_mark_the_prompt(make_sft):
    model = sharp_hrm()
    reference = HrmTextForCausalLM(model.config).eval()
    reference.load_state_dict(model.state_dict())
    trainer = make_sft(model)
    collated = trainer.data_collator([trainer.train_dataset[i] for i in (0, 5, 20)])
    batch = find_looped_model(model).complete_batch(collated)
    answered = (batch["labels"] != -100).cumsum(dim=1) > 0
    assert torch.equal(batch["token_type_ids"], 1 - answered.long()) and batch["token_type_ids"][:, 1].all()
    with torch.no_grad():
        want = reference(**batch).loss
        causal = reference(**{**batch, "token_type_ids": None}).loss
        got = trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(collated))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert abs(causal - want) > 1e-4
    trainer.train()
    with use_depth(trainer.model, model.config.H_cycles + 2):  # still in training mode
        trainer.model.generate(collated["input_ids"][:1], max_new_tokens=1)
        with user_error("HRM-Text trains only at the depth that it was loaded with"):
            trainer.model(**batch)


def test_hrm_rows_of_several_examples_raise(train):
    batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[-100, 4]])}
    assert find_looped_model(tiny_hrm(prefix_lm=False)).complete_batch(batch) is batch
    with user_error("`packing` and `padding_free` must be False"):
        train(tiny_hrm(), padding_free=True, max_length=None)


EXAMPLES = {  # labels of a row, whose first token is padding
    "one answer": ([-100, -100, -100, 7, 8, -100], [0, 1, 1, 0, 0, 0]),
    "no answer": ([-100] * 6, [0] * 6),
    "no prompt": ([-100, 5, 6, 7, 8, 9], "begin with a prompt without a loss"),
    "two answers": ([-100, -100, 6, -100, 8, 9], "have one answer, but one has several"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_hrm_trains_on_one_answer_after_a_prompt(name):
    labels, expected = EXAMPLES[name]
    batch = {"input_ids": torch.arange(4, 10)[None], "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}
    batch["labels"] = torch.tensor([labels])
    if isinstance(expected, str):
        with user_error(f"The examples of HRM-Text must {expected}"):
            find_looped_model(tiny_hrm()).complete_batch(batch)
    else:
        assert find_looped_model(tiny_hrm()).complete_batch(batch)["token_type_ids"].tolist() == [expected]
    assert find_looped_model(tiny_hrm(prefix_lm=False)).complete_batch(batch).keys() == {
        "input_ids",
        "attention_mask",
        "labels",
    }


def test_hrm_examples_are_checked_before_the_training(make_sft, tokenizer, monkeypatch):
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    one = Dataset.from_list([{"messages": turns}] * 70)
    two = Dataset.from_list([{"messages": turns}] * 69 + [{"messages": turns * 2}])

    def make(train, held_out=None, **fields):
        cls = lambda *args, **data: LoopDropoutSFTTrainer(*args, **{**data, "eval_dataset": held_out})
        return make_sft(fields.pop("model", tiny_hrm()), cls, train, assistant_only_loss=True, **fields)

    with user_error("must begin with a prompt without a loss"):
        make_sft(tiny_hrm(), rows=one, eval_strategy="no")
    for datasets in ((two, one), (one, two), (one, {"a": one, "b": two})):
        with user_error("must have one answer, but one has several"):
            make(*datasets, eval_strategy="epoch")
    make(one, {"a": one}, eval_strategy="epoch")
    make(one, two, eval_strategy="no")
    make(two, model=tiny_hrm(prefix_lm=False), eval_strategy="no")


def test_hrm_conversations_mark_what_generation_marks(train, tokenizer, monkeypatch):
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    one, two = (Dataset.from_list([{"messages": conversation}] * 4) for conversation in (turns, turns * 2))
    options = {"max_steps": 1, "eval_strategy": "no"}
    train(tiny_hrm(), rows=one, assistant_only_loss=True, **options)
    with user_error("must begin with a prompt without a loss"):
        train(tiny_hrm(), rows=one, **options)
    with user_error("must have one answer, but one has several"):
        train(tiny_hrm(), rows=two, assistant_only_loss=True, **options)
    train(tiny_hrm(prefix_lm=False), rows=two, **options)


def test_hrm_generates_without_proposed_tokens():
    model = tiny_hrm().eval()
    attach_looped_model(model)
    settings = GenerationConfig(prompt_lookup_num_tokens=2)
    for options in ({"prompt_lookup_num_tokens": 2}, {"generation_config": settings}, {"assistant_model": tiny_hrm()}):
        with user_error("must not be set for HRM-Text, because proposed tokens would count as prompt"):
            model.generate(IDS[1:], max_new_tokens=2, **options)
    causal = tiny_hrm(prefix_lm=False).eval()
    attach_looped_model(causal)
    causal.generate(IDS[1:], max_new_tokens=2, prompt_lookup_num_tokens=2)


def test_hrm_generates_with_the_input_as_prompt():
    model = sharp_hrm().eval()
    attach_looped_model(model)
    tokens = model.generate(IDS, **GREEDY)
    assert torch.equal(tokens, model.generate(IDS, use_cache=False, **GREEDY))
    rows = IDS  # by hand: columns of the prompt attend to each other, later columns to all before them
    for _ in range(6):
        kinds, mask = torch.zeros_like(rows), torch.ones_like(rows)
        kinds[:, :5] = mask[:, :5] = IDS != 1
        inputs = {"attention_mask": mask, "token_type_ids": kinds, "use_cache": False}
        logits = HrmTextForCausalLM.forward(model, rows, **inputs).logits
        rows = torch.cat([rows, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, rows)
    assert not torch.equal(tokens, model.generate(IDS, token_type_ids=torch.zeros_like(IDS), **GREEDY))
