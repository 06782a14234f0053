"""The second example of docs/extending.md: IQuest-Coder-Loop, by a class of its own in tests/samples."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import with_adapter
from test_extending import assert_gradients_are_those_of_swapped_weights
from torch import nn

from loopdropout_trainer import check_loops, merge_and_save
from loopdropout_trainer.looped.described import DESCRIPTIONS


ROOT = Path(__file__).parents[1]
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[1]


@pytest.fixture(autouse=True, scope="module")
def loop_coder():
    """The module of the class, described as the documentation does; afterwards all is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "samples")
        module = importlib.import_module("modeling_loop_coder")
        exec(EXAMPLE, {"__name__": "example"})
        yield module
        del DESCRIPTIONS[module.LoopCoderForCausalLM], sys.modules["modeling_loop_coder"]


def tiny(module, **config):
    torch.manual_seed(0)
    fields = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1, "loop_window_size": 4}
    model = module.LoopCoderForCausalLM(module.LoopCoderConfig(**{**fields, **heads, "bos_token_id": None, **config}))
    for gate in model.model.gate_projections:
        nn.init.normal_(gate.weight)
        nn.init.normal_(gate.bias)
    return model


def test_the_example_announces_both_loops_and_reads_both(loop_coder):
    model, ids = tiny(loop_coder).eval(), torch.arange(3, 12)[None]
    check_loops(model, input_ids=ids)
    assert len(EXAMPLE.splitlines()) <= 40 and model.config.num_loops == 2
    assert len(model.recurrent_linears()) == 2 * 7
    first, last = model.loop_readouts(input_ids=ids)
    assert torch.equal(last, model.model(ids).last_hidden_state) and not torch.equal(first, last)
    with pytest.raises(ValueError, match="runs 2 loops and no other number; got 3"):
        model.config.num_loops = 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_swapping_the_weights_by_hand(loop_coder, checkpointing):
    gates = torch.tensor([[0.0, 2.0], [0.5, -1.0]])
    assert_gradients_are_those_of_swapped_weights(
        lambda: tiny(loop_coder), lambda model: model.model.layers[-1], gates, checkpointing
    )


def test_it_trains_and_merges(loop_coder, train, tmp_path):
    trainer = train(tiny(loop_coder), gradient_checkpointing=True, max_steps=3)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    merge_and_save(trainer.model, tmp_path / "merged")
    merged = loop_coder.LoopCoderForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.peer
def test_mlx_lm_gives_the_logits_of_a_merged_model(loop_coder, tmp_path):
    mlx, mlx_utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    peft_model = with_adapter(tiny(loop_coder, rope_theta=500_000.0, initializer_range=0.3), scale=0.1).eval()
    merge_and_save(peft_model, tmp_path)
    ids = torch.arange(3, 63).view(2, 30)
    logits = mlx_utils.load_model(tmp_path)[0](mlx.array(ids.tolist()))
    with torch.no_grad():
        want = peft_model(ids).logits
    torch.testing.assert_close(torch.tensor(logits.tolist()), want, atol=1e-4, rtol=1e-4)
