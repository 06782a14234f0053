"""QLoRA: training over a 4-bit base equals training over the same weights, dequantized."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, load_script, tiny_ouro, trained_parameters, with_adapter
from transformers import BitsAndBytesConfig

from loopdropout_trainer import LoopDropoutSFTTrainer, load_model, merge_and_save
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.recipe import dump_recipe, load_recipe


pytest.importorskip("bitsandbytes")


@pytest.fixture
def saved_model(tmp_path, tokenizer):
    tiny_ouro(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def dequantize(model):
    """Return an ordinary model with the weights that the 4-bit model computes with."""
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


@pytest.mark.parametrize("double", [False, True], ids=["nf4", "double"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_4_bit_base_trains_as_dequantized(saved_model, config, dataset, tokenizer, double, checkpointing, tmp_path):
    fields = {"gradient_checkpointing": checkpointing, "adam_epsilon": 1e-4}
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    quantized = LoopDropoutSFTTrainer(saved_model, config(**fields), quantization_config=nf4, **data)
    base = quantized.model.get_base_model()
    assert base.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    plain = LoopDropoutSFTTrainer(dequantize(base), config(**fields), **data)
    got, want = trained_parameters(quantized.model), trained_parameters(plain.model)
    for name, parameter in want.items():
        assert got[name].dtype == torch.float32
        parameter.data.copy_(got[name].data)
    start = {name: p.detach().clone() for name, p in want.items()}
    quantized.train()
    plain.train()
    for one, other in zip(quantized.state.log_history, plain.state.log_history, strict=True):
        for key in {"loss", "gate_mean", "train_loss"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-4)
    moved = max((p.detach() - start[name]).abs().max() for name, p in want.items())
    torch.testing.assert_close(got, want, rtol=0, atol=float(moved) * 1e-3)
    check_merge(quantized.model, tmp_path / "merged")


def check_merge(model, folder):
    """Merge into the dequantized weights, and compare the saved model with the quantized one and its adapter."""
    ids = torch.arange(2, 42).view(4, 10)
    merged = load_model(merge_and_save(model, folder))
    assert merged.dtype == torch.float32 and not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model.eval()(ids).logits, atol=2e-5, rtol=1e-4)
    assert "| Base weights in training | 4-bit, here dequantized |" in (folder / "README.md").read_text()


def test_merge_script_quantizes_as_in_training(saved_model, train):
    quantization = load_recipe(ROOT / "recipes" / "nanbeige" / "qlora.yaml")["model_init_kwargs"]
    trainer = train(saved_model, max_steps=1, model_init_kwargs={**quantization, "dtype": "float32"})
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.quant_type == "nf4" and layer.base_layer.weight.quant_state.nested
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    dump_recipe({"model_init_kwargs": quantization}, folder / "recipe.yaml")
    merge = load_script("recipes/merge.py").main
    merge([str(folder)])
    merge([str(folder), "--model_name_or_path", saved_model, "--output_dir", str(folder / "published")])
    weights = [load_model(folder / name).model.layers[0].mlp.up_proj.weight for name in ("merged", "published")]
    assert 0.001 < (weights[0] - weights[1]).abs().max() < 0.1  # the error of quantization


def test_8_bit_base_is_not_merged(saved_model, tmp_path):
    model = load_model(saved_model, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(UserError, match="load the base model unquantized"):
        merge_and_save(with_adapter(model), tmp_path / "merged")
