"""Test values, gradients and saved tensors of norm, SwiGLU and rotation against transformers."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from loopdropout_trainer.models.layers import rms_norm, rotate_halves, swiglu


TRAINED = {"norm": 2, "swiglu": 2, "rotation": 1}  # number of inputs that get gradients
DTYPES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operation(name, dtype=torch.float64, second=None):
    """Return the function, the reference in transformers, and inputs that are not contiguous, trained inputs first."""
    second = second or dtype
    x, y = draw(2, 3, 5, 8, dtype=dtype).transpose(1, 2), draw(2, 5, 3, 16, dtype=second, seed=1)[..., ::2]
    if name == "norm":
        reference = lambda x, w, eps: torch.func.functional_call(Qwen3RMSNorm(len(w), eps), {"weight": w}, (x,))
        return rms_norm, reference, (x, draw(8, dtype=second, seed=2) + 1, 1e-2)
    if name == "swiglu":
        return swiglu, lambda a, b: F.silu(a) * b, (x, y)
    cos, sin = draw(2, 2, 5, 4, dtype=second, seed=2).repeat(1, 1, 1, 2)  # any values, since rotation is bilinear
    reference = lambda q, cos, sin: apply_rotary_pos_emb(q, q, cos, sin)[0]
    return rotate_halves, reference, (x.transpose(1, 2), cos, sin)


def leaves(inputs, kept=2):
    return [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_(i < kept) if torch.is_tensor(x) else x
        for i, x in enumerate(inputs)
    ]


def result_and_gradients(compute, inputs, kept):
    given = leaves(inputs, kept)
    result = compute(*given)
    upstream = draw(*result.shape[::-1], dtype=result.dtype, seed=3).permute(*range(result.dim())[::-1])
    result.backward(upstream)
    with torch.no_grad():
        assert torch.equal(compute(*given), result)
    return [result, *(x.grad for x in given[:kept])]


MIXED = [("norm", torch.bfloat16, torch.float32), ("rotation", torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("name", "dtype", "second"), [*((n, d, d) for n in TRAINED for d in DTYPES), *MIXED], ids=str)
def test_operations_equal_transformers(name, dtype, second):
    function, reference, inputs = operation(name, dtype, second)
    for kept in {1, TRAINED[name]}:  # also with a frozen second input
        results = [result_and_gradients(compute, inputs, kept) for compute in (function, reference)]
        assert [x.dtype for x in results[0]] == [x.dtype for x in results[1]]
        torch.testing.assert_close(*results, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("name", TRAINED)
def test_operations_save_only_inputs(name):
    function, _, inputs = operation(name, torch.float32)
    given = leaves(inputs, 1 if name == "norm" else TRAINED[name])
    own = {x.untyped_storage().data_ptr() for x in given if torch.is_tensor(x)}
    new = []
    keep = lambda x: new.append(x) if x.untyped_storage().data_ptr() not in own else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function(*given)
    assert [(x.dtype, x.shape) for x in new] == ([(torch.float32, (2, 5, 3, 1))] if name == "norm" else [])
