"""Norm, SwiGLU and rotation agree with transformers' modules, have the right gradients, and keep no more than they say."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_ouro
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from loopdropout_trainer.models.layers import GatedMLP, RMSNorm
from loopdropout_trainer.models.operations import rms_norm, rotate_halves, swiglu


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operation(name, dtype=torch.float64):
    """Return the function, transformers' expression of it, and inputs: what gets gradients first, and not contiguous."""
    x, y = draw(2, 3, 5, 8, dtype=dtype).transpose(1, 2), draw(2, 5, 3, 16, dtype=dtype, seed=1)[..., ::2]
    if name == "norm":
        return rms_norm, _reference_norm, (x, draw(8, dtype=dtype, seed=2) + 1, 1e-2)
    if name == "swiglu":
        return swiglu, lambda a, b: F.silu(a) * b, (x, y)
    cos, sin = draw(2, 2, 5, 8, dtype=dtype, seed=2)  # halves that differ, and no cosines of anything: it is bilinear
    x = x.transpose(1, 2)
    reference = lambda q, cos, sin: apply_rotary_pos_emb(q, q, cos, sin)[0]
    return rotate_halves, reference, (x, cos, sin)


def _reference_norm(x, weight, eps):
    module = Qwen3RMSNorm(len(weight), eps)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


def leaves(inputs, kept=2):
    return [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_(i < kept) if torch.is_tensor(x) else x
        for i, x in enumerate(inputs)
    ]


NAMES = ("norm", "swiglu", "rotation")
TRAINED = {"norm": 2, "swiglu": 2, "rotation": 1}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_formula(name):
    function, _, inputs = operation(name)
    assert gradcheck(function, leaves(inputs, TRAINED[name]))
    assert gradcheck(function, leaves(inputs, 1))  # a frozen weight, a value that needs none
    if name == "swiglu":
        assert gradcheck(lambda b: swiglu(inputs[0], b), leaves(inputs[1:]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_transformers(name, dtype):
    function, reference, inputs = operation(name, dtype)
    results = []
    for compute in (function, reference):
        given = leaves(inputs, TRAINED[name])
        result = compute(*given)
        upstream = draw(*result.shape[::-1], dtype=dtype, seed=3).permute(*range(result.dim())[::-1])
        result.backward(upstream)
        results.append([result, *(x.grad for x in given[: TRAINED[name]])])
        with torch.no_grad():
            assert torch.equal(compute(*given), result)
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_float32_norm_of_bfloat16_gives_float32_as_in_transformers():
    x, ours, theirs = draw(2, 8, dtype=torch.bfloat16).requires_grad_(), RMSNorm(8), LlamaRMSNorm(8)
    assert ours(x).dtype == theirs(x).dtype == torch.float32
    assert torch.autograd.grad(ours(x).sum(), x)[0].dtype == torch.bfloat16
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_same_under_compilation_and_checkpointing(name):
    function, _, inputs = operation(name, torch.float32)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for compute in (function, compiled, lambda *args: checkpoint(function, *args, use_reentrant=False)):
        given = leaves(inputs, TRAINED[name])
        result = compute(*given)
        result.square().sum().backward()
        results.append([result, *(x.grad for x in given[: TRAINED[name]])])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)


def test_a_bfloat16_rotation_by_float32_angles_is_that_of_transformers():
    x, (cos, sin) = draw(2, 3, 5, 8, dtype=torch.bfloat16).requires_grad_(), draw(2, 2, 5, 8, dtype=torch.float32)
    got, want = rotate_halves(x, cos, sin), apply_rotary_pos_emb(x, x, cos, sin)[0]
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(result.square().sum(), x)[0] for result in (got, want)]
    torch.testing.assert_close(*grads, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_modules_are_those_of_transformers(activation, autocast):
    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act=activation, mlp_bias=False)
    for ours, theirs in ((GatedMLP(config), LlamaMLP(config)), (RMSNorm(8, 1e-3), LlamaRMSNorm(8, 1e-3))):
        theirs.load_state_dict(ours.state_dict())
        results = []
        for module in (ours, theirs):
            x = draw(2, 3, 8, dtype=torch.float32).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result = module(x)
            result.float().square().sum().backward()
            results.append([result, x.grad, *(p.grad for p in module.parameters())])
        tolerance = 2e-2 if autocast else 1e-5
        torch.testing.assert_close(results[0], results[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept(name):
    function, _, inputs = operation(name, torch.bfloat16)
    given = leaves(inputs, 1 if name == "norm" else TRAINED[name])
    own = {x.untyped_storage().data_ptr() for x in given if torch.is_tensor(x)}
    new = []
    keep = lambda x: new.append(x) if x.untyped_storage().data_ptr() not in own else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function(*given)
    assert [(x.dtype, x.shape) for x in new] == ([(torch.float32, (2, 5, 3, 1))] if name == "norm" else [])


def test_a_new_model_s_norms_are_ones_and_other_activations_are_kept():
    model = tiny_ouro(hidden_act="gelu")
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 9
    assert all(bool((norm.weight == 1).all()) for norm in norms)
    assert isinstance(model.model.layers[0].mlp.act_fn, torch.nn.Module)
