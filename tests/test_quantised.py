"""QLoRA: over a 4-bit base the gates, the losses and the trained adapter are those over the same weights dequantised."""

import pytest
import torch
from conftest import ROOT, tiny_ouro, trained_parameters
from transformers import BitsAndBytesConfig

from loopdropout_trainer import LoopDropoutSFTTrainer, merge_and_save
from loopdropout_trainer.recipe import load_recipe


pytest.importorskip("bitsandbytes")


@pytest.fixture
def saved_model(tmp_path, tokenizer):
    tiny_ouro(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def nf4(double=False):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)


def dequantised(model):
    """An ordinary model with the weights that the 4-bit one computes with."""
    from bitsandbytes.functional import dequantize_4bit

    plain = tiny_ouro(hidden_size=64, intermediate_size=128)
    modules = dict(model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            layer = getattr(modules[name], "base_layer", modules[name])
            state = getattr(layer.weight, "quant_state", None)
            weight = layer.weight.data if state is None else dequantize_4bit(layer.weight.data, state)
            module.weight.data = weight.float().clone()
    return plain


@pytest.mark.parametrize("double", [False, True], ids=["nf4", "nf4, double quantisation"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_over_a_4_bit_base_is_training_over_its_dequantised_weights(
    saved_model, config, dataset, tokenizer, double, checkpointing, tmp_path
):
    fields = {"gradient_checkpointing": checkpointing, "adam_epsilon": 1e-4}
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    quantised = LoopDropoutSFTTrainer(saved_model, config(**fields), quantization_config=nf4(double), **data)
    base = quantised.model.get_base_model()
    layer = base.model.layers[0].mlp.up_proj
    assert type(layer.base_layer).__name__ == "Linear4bit" and layer.base_layer.weight.dtype == torch.uint8
    plain = LoopDropoutSFTTrainer(dequantised(base), config(**fields), **data)

    got, want = trained_parameters(quantised.model), trained_parameters(plain.model)
    for name, parameter in want.items():
        assert got[name].dtype == torch.float32
        parameter.data.copy_(got[name].data)
    start = {name: p.detach().clone() for name, p in want.items()}
    quantised.train()
    plain.train()
    for one, other in zip(quantised.state.log_history, plain.state.log_history, strict=True):
        for key in {"loss", "gate_mean", "train_loss"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-4)
    moved = max((p - start[name]).abs().max() for name, p in want.items())
    torch.testing.assert_close(got, want, rtol=0, atol=float(moved) * 1e-3)
    with pytest.raises(ValueError, match="load the base model unquantized"):
        merge_and_save(quantised.model, tmp_path / "merged")


def test_training_on_over_weights_packed_for_inference_is_refused(saved_model, config, dataset, tokenizer):
    args = config(eval_strategy="steps", eval_steps=1)
    data = {"train_dataset": dataset, "eval_dataset": dataset.select(range(4)), "processing_class": tokenizer}
    trainer = LoopDropoutSFTTrainer(saved_model, args, quantization_config=nf4(), **data)
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes packs weights on processors with AVX512-BF16 only")
    with pytest.raises(ValueError, match="bitsandbytes packed the 4-bit weights .* set `eval_strategy: no`"):
        trainer.train()


def test_a_recipe_can_ask_for_a_4_bit_base(saved_model, train):
    recipe = load_recipe(ROOT / "recipes" / "nanbeige" / "qlora.yaml")
    trainer = train(saved_model, max_steps=1, model_init_kwargs={**recipe["model_init_kwargs"], "dtype": "float32"})
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.quant_type == "nf4" and layer.base_layer.weight.quant_state.nested
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
