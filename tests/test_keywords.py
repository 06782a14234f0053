"""The keywords of every family's `forward`: both names of the cache, transformers' own keywords, and no others."""

import pytest
import torch
from conftest import TINY, tiny_hrm
from transformers import DynamicCache

from loopdropout_trainer.looped import LoopedModelMixin
from loopdropout_trainer.models.keywords import CACHE


FAMILIES = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in TINY.items()] + [tiny_hrm])
IDS = torch.arange(2, 14).view(2, 6)


@FAMILIES
@pytest.mark.parametrize("keyword", ["past_kv", "kv_cache", "usecache"])
def test_forward_rejects_unknown_keywords(make, keyword):
    model = make().eval()
    modules = [module for module in (model, model.base_model) if isinstance(module, LoopedModelMixin)]
    for module in modules:
        with pytest.raises(TypeError, match=f"{type(module).__name__}.* unexpected keyword argument '{keyword}'"):
            module(IDS, **{keyword: None})


@FAMILIES
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_forward_takes_both_names_of_the_cache(make, name):
    model = make().eval()
    want = model(IDS, use_cache=False).logits[:, -1:]
    cache = model(IDS[:, :-1], **{name: DynamicCache(config=model.config)})[CACHE]
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(model(IDS[:, -1:], **{name: cache}).logits, want, atol=1e-5, rtol=1e-5)


@FAMILIES
def test_forward_takes_documented_keywords(make):
    model = make().eval()
    options = {"output_attentions": None, "output_hidden_states": True, "output_router_logits": False}
    out = model(IDS, labels=IDS, num_items_in_batch=torch.tensor(20), return_dict=True, **options)
    torch.testing.assert_close(out.loss, model(IDS, labels=IDS).loss / 2)
    assert out.hidden_states is not None and model(IDS, return_dict=False)[0].shape == (2, 6, 258)
