"""QLoRA: training over a 4-bit base equals training over the same weights, dequantized."""

from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig

from helpers.errors import user_error
from helpers.files import ROOT, load_script
from helpers.tiny import tiny_ouro, trained_parameters, with_adapter
from helpers.trainers import assert_same_weights
from loopdropout_trainer import LoopDropoutSFTTrainer, load_model, merge_and_save
from loopdropout_trainer.settings.recipe import dump_recipe, load_recipe


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


@pytest.mark.parametrize(("double", "checkpointing"), [(False, True), (True, False)])
def test_4_bit_base_trains_as_dequantized(saved_model, config, dataset, tokenizer, double, checkpointing, tmp_path):
    fields = {"gradient_checkpointing": checkpointing, "adam_epsilon": 1e-4}
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    quantized = LoopDropoutSFTTrainer(saved_model, config(**fields), quantization_config=nf4, **data)
    base = quantized.model.get_base_model()
    assert base.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    plain = LoopDropoutSFTTrainer(dequantize(base), config(**fields), **data)
    want = trained_parameters(plain.model)
    for name, parameter in trained_parameters(quantized.model).items():
        assert parameter.dtype == torch.float32
        want[name].data.copy_(parameter.data)
    quantized.train()
    plain.train()
    losses = [[log.get("loss") for log in trainer.state.log_history] for trainer in (quantized, plain)]
    assert losses[0][:-1] == pytest.approx(losses[1][:-1], rel=1e-4)
    assert_same_weights(quantized, plain, rtol=0, atol=2e-5)  # the first step changes weights by 1e-2

    # Merging dequantizes the weights.
    merged, ids = load_model(merge_and_save(quantized.model, tmp_path / "merged")), torch.arange(2, 42).view(4, 10)
    assert merged.dtype == torch.float32 and not hasattr(merged.config, "quantization_config")
    torch.testing.assert_close(merged(ids).logits, quantized.model.eval()(ids).logits, atol=2e-5, rtol=1e-4)
    assert "| 4-bit, here dequantized |" in (tmp_path / "merged" / "README.md").read_text()


def test_merge_script_quantizes_as_in_training(saved_model, train):
    quantization = load_recipe(ROOT / "recipes" / "nanbeige" / "qlora.yaml")["model_init_kwargs"]
    trainer = train(saved_model, max_steps=1, model_init_kwargs={**quantization, "dtype": "float32"})
    assert trainer.model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.quant_state.nested
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
    with user_error("load the base model unquantized"):
        merge_and_save(with_adapter(model), tmp_path / "merged")
