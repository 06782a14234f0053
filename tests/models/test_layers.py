"""Norm, SwiGLU and rotation: results, gradients and kept tensors."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from loopdropout_trainer.models.layers import rms_norm, rotate_halves, swiglu


NUM_TRAINED = {"norm": 2, "swiglu": 2, "rotation": 1}  # inputs with gradients
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operation(name, dtype, second):
    """Return the function, transformers' expression, and inputs that are not contiguous, those with gradients first."""
    x, y = draw(2, 3, 5, 8, dtype=dtype).transpose(1, 2), draw(2, 5, 3, 16, dtype=second, seed=1)[..., ::2]
    if name == "norm":
        reference = lambda x, w, eps: torch.func.functional_call(Qwen3RMSNorm(len(w), eps), {"weight": w}, (x,))
        return rms_norm, reference, (x, draw(8, dtype=second, seed=2) + 1, 1e-2)
    if name == "swiglu":
        return swiglu, lambda a, b: F.silu(a) * b, (x, y)
    cos, sin = draw(2, 2, 5, 4, dtype=second, seed=2).repeat(1, 1, 1, 2)
    reference = lambda q, cos, sin: apply_rotary_pos_emb(q, q, cos, sin)[0]
    return rotate_halves, reference, (x.transpose(1, 2), cos, sin)


def leaves(inputs, num_trained):
    """The same inputs with gradients of the first ones; the clones keep their strides."""
    trained = [x.detach().clone().requires_grad_() for x in inputs[:num_trained]]
    return [*trained, *inputs[num_trained:]]


def result_and_gradients(function, inputs, num_trained):
    inputs = leaves(inputs, num_trained)
    result = function(*inputs)
    upstream = draw(*result.shape[::-1], dtype=result.dtype, seed=3).permute(*range(result.dim())[::-1])
    result.backward(upstream)
    return [result, *(x.grad for x in inputs[:num_trained])]


MIXED = [("norm", torch.bfloat16, torch.float32), ("rotation", torch.bfloat16, torch.float32)]
CASES = [*((name, dtype, dtype) for name in NUM_TRAINED for dtype in TOLERANCES), *MIXED]


@pytest.mark.parametrize(("name", "dtype", "second"), CASES, ids=str)
def test_operations_equal_transformers(name, dtype, second):
    function, reference, inputs = operation(name, dtype, second)
    for num_trained in {1, NUM_TRAINED[name]}:  # also with a frozen weight
        got, want = (result_and_gradients(compute, inputs, num_trained) for compute in (function, reference))
        assert [x.dtype for x in got] == [x.dtype for x in want]
        torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", NUM_TRAINED)
def test_operations_keep_only_their_inputs(name):
    function, _, inputs = operation(name, torch.float32, torch.float32)
    inputs = leaves(inputs, 1 if name == "norm" else NUM_TRAINED[name])
    own = {x.untyped_storage().data_ptr() for x in inputs if torch.is_tensor(x)}
    new = []
    keep = lambda x: new.append(x.shape) if x.untyped_storage().data_ptr() not in own else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function(*inputs)
    assert new == ([(2, 5, 3, 1)] if name == "norm" else [])
