"""Serving: the command `serve`, the plugin for vLLM against an emulated engine, and vLLM itself (`.ci/serving`)."""

import copy
import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

import openai
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.errors import user_error
from helpers.files import load_script
from helpers.processes import ENVIRONMENT, Program, free_port, python, wait_for
from helpers.tiny import TINY, tiny_ouro, varied, with_adapter
from loopdropout_trainer import load_model, merge_and_save, use_gates
from loopdropout_trainer.files import model_path
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.models.layers import Attention
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import load_tokenizer


SERVE = load_script("recipes/serve.py")


class Cached(torch.nn.Module):
    """The engine's attention of one layer, over one sequence, from [1, heads, tokens, d] to all keys so far."""

    def __init__(self, layer_name):
        super().__init__()
        self.layer_name, self.seen = layer_name, []

    def forward(self, query, key, value):
        self.seen.append((key, value))
        keys, values = (torch.cat(states, dim=2) for states in zip(*self.seen, strict=True))
        mask = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool).tril()[-query.shape[2] :]
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def attend(module, query, key, value, attention_mask, **kwargs):
    return module.attn(query, key, value).transpose(1, 2), None


class Engine(torch.nn.Module):
    """vLLM's Transformers backend, as far as the plugin uses it, in float32 and for one sequence."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.config, self.compilation_config = vllm_config.model_config.hf_config, vllm_config.compilation_config
        self.config._attn_implementation = "vllm"
        self.model = AutoModel.from_config(self.config).eval()
        modules = {f"model.{name}": module for name, module in self.model.named_modules()}
        attentions = {name: module for name, module in modules.items() if isinstance(module, Attention)}
        self.attention_fusers = {module.layer_idx: (name, None) for name, module in attentions.items()}
        self.recursive_replace()
        self._create_attention_instances(prefix)

    def recursive_replace(self):
        self.replaced = [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]

    def _create_attention_instances(self, prefix=""):
        for name, _ in self.attention_fusers.values():
            attention = Cached(f"{prefix}.{name}.attn")
            assert attention.layer_name not in self.compilation_config.static_forward_context
            self.compilation_config.static_forward_context[attention.layer_name] = attention
            self.get_submodule(name).attn = attention

    def generate(self, ids, new_tokens, head):
        """Complete a prompt greedily, after a prefill in two chunks."""
        done, row = 0, list(ids)
        for end in (len(ids) // 2, *range(len(ids), len(ids) + new_tokens)):
            inputs = {"input_ids": torch.tensor([row[done:end]]), "position_ids": torch.arange(done, end)[None]}
            hidden = self.model(**inputs, use_cache=False, return_dict=False)[0][0, -1]
            done = end
            row += [int(head(hidden).argmax())] if end == len(row) else []
        return row[len(ids) :]


@pytest.fixture
def make_engine(monkeypatch):
    """`make_engine(config, **parallel)`: the plugin's model over the emulated engine."""
    backend = {"VLLM_ATTN_ATTR": "attn", "TransformersForCausalLM": Engine}
    contents = {"vllm.config": {"VllmConfig": None}, "vllm.model_executor.models.transformers": backend}
    for name, attributes in contents.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", attend)
    plugin = runpy.run_module("loopdropout_trainer.integrations.vllm")["LoopedForCausalLM"]

    def make(config, **parallel):
        model_config = SimpleNamespace(hf_config=copy.deepcopy(config))
        sizes = SimpleNamespace(**{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **parallel})
        compilation = SimpleNamespace(static_forward_context={})
        parts = {"model_config": model_config, "parallel_config": sizes, "compilation_config": compilation}
        return plugin(vllm_config=SimpleNamespace(**parts))

    return make


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_plugin_generates_as_transformers(make_engine, family):
    model, ids = varied(TINY[family](), 0.15), torch.arange(5, 24)[None]
    texts = set()
    for num_loops in (1, 4, 6):
        model.config.num_loops = num_loops
        want = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 19:]
        engine = make_engine(model.config)
        assert len(engine.compilation_config.static_forward_context) == model.config.num_layer_runs
        assert not any("lm_head" in name or ".gate." in name for name in engine.replaced)
        engine.model.load_state_dict(model.base_model.state_dict(), strict=False)
        assert engine.generate(ids[0].tolist(), 12, model.get_output_embeddings()) == want.tolist()
        texts.add(tuple(want.tolist()))
    assert len(texts) >= 2


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engine_with_one_cache_per_layer_raises(monkeypatch, name):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attend)
    config = tiny_ouro(num_loops=2).config
    config._attn_implementation = name
    with user_error("one cache .* each layer in 2 loops. Install loopdropout-trainer next to vL"):
        AutoModel.from_config(config)
    config.num_loops = 1
    assert AutoModel.from_config(config).config._attn_implementation == name


@pytest.mark.parametrize(("family", "kind"), [("ouro", "pipeline"), ("huginn", "tensor"), ("loopus", "tensor")])
def test_plugin_refuses_parallelism(make_engine, family, kind):
    with user_error(f"`{kind}_parallel_size` must be 1"):
        make_engine(TINY[family]().config, **{f"{kind}_parallel_size": 2})


@pytest.fixture
def adapter(tokenizer, tmp_path):
    """The folder of a run of `tiny-ouro`, and the loaded model with its tokenizer."""
    model = with_adapter(load_model("tiny-ouro"), scale=0.02)
    tokenizer = load_tokenizer("tiny-ouro")
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_text("preparation: arithmetic\n")
    return tmp_path / "run", model, tokenizer


PENS = "Tom has {} boxes with {} pens each. How many pens does Tom have?"


@pytest.mark.parametrize("begins", [False, True])
def test_chats_have_the_format_of_the_training(adapter, begins):
    folder, _, tokenizer = adapter
    text = '{% "ü" {# Q: {Question Text}\\n\n'
    (folder / "recipe.yaml").write_text(json.dumps({"prompt_template": text}))
    if begins:
        token = tokenizer.eos_token, tokenizer.eos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{token[0]} $A", special_tokens=[token])
    tokenizer.chat_template = SERVE.find_chat_template(find_source(folder), tokenizer)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": PENS}], return_dict=False)
    assert ids == tokenizer(text.replace("{Question Text}", PENS))["input_ids"]
    assert (ids[0] == tokenizer.eos_token_id) == begins
    (folder / "recipe.yaml").unlink()  # a chat template of the tokenizer stays
    assert SERVE.find_chat_template(find_source(folder), tokenizer) == tokenizer.chat_template


@pytest.mark.parametrize("port", ["0", "-1", "99999", "1e30"])
def test_ports_that_do_not_exist_raise(port):
    with user_error("`port` must be "):
        SERVE.main(["tiny-ouro", "--port", port])


@pytest.mark.skipif(find_spec("fastapi") is None, reason="the extra `serve` is not installed")
def test_server_answers_as_generate(adapter):
    folder, model, tokenizer = adapter
    model.base_model.model.config.num_loops, port = 2, free_port()
    program = Program("-m", "loopdropout_trainer", "serve", folder, "--num_loops", 2, "--gates", "1-0", "--port", port)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")  # retries a closed connection
    wait_for(lambda: "Uvicorn running" in program.stderr, program)
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in program.stdout
    settings = {"model": str(folder), "max_tokens": 16, "temperature": 0}
    ask = lambda prompt, **options: client.completions.create(prompt=prompt, **settings, **options)
    prompts = [PENS.format(a, 9 - a) + "\n" for a in (3, 4, 5)]
    question = f"Question: {PENS.format(3, 4)}\nAnswer:"
    with use_gates(model, [1, 0]):
        *want, chat = generate_greedy(model, tokenizer, [*prompts, question], 16, progress=False)
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(ask, prompts))
    assert [answer.choices[0].text for answer in answers] == want
    assert answers[0].usage.prompt_tokens == len(tokenizer(prompts[0]).input_ids)
    assert "".join(chunk.choices[0].text for chunk in ask(prompts[1], stream=True)) == want[1]
    start, stop, rest = want[2].partition(":")
    assert rest
    assert ask(prompts[2], stop=[stop]).choices[0].text == start + stop
    turns = [{"role": "user", "content": PENS.format(3, 4)}]
    assert client.chat.completions.create(messages=turns, **settings).choices[0].message.content == chat
    for bad in ({"prompt": ["a", "b"]}, {"prompt": "a", "model": "other"}, {"prompt": "a", "extra_body": {"x": 1}}):
        with pytest.raises(openai.APIStatusError, match="40|422"):
            client.completions.create(**{**settings, **bad})
    with pytest.raises(openai.InternalServerError):
        ask("a", extra_body={"max_tokens": "many"})
    assert ask(prompts[0]).choices[0].text == want[0]


# vLLM itself, by `.ci/serving`.

RUN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
folder, adapter, prompts, options = json.loads(sys.argv[1])
llm = LLM(folder, enforce_eager=True, max_num_seqs=4, max_num_batched_tokens=64, **options)
settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
lora = {"lora_request": LoRARequest("adapter", 1, adapter)} if adapter else {}
for _ in range(2):
    outputs = llm.generate(prompts, settings, **lora)
    print("RESULT", json.dumps([(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]))
"""


def check_vllm(folder, model, tokenizer, adapter=None, least=15, **options):
    """Compare the tokens of 15 prompts in two passes, the second with cached prefixes."""
    prompts = [PENS.format(a, b) + "\n" for a in (3, 5, 7) for b in (4, 6, 9)] + ["Tom has 3 boxes.", "How many", "7"]
    long = PENS.format(5, 9) * (7 if len(tokenizer) < 300 else 12)
    prompts += [long, PENS.format(7, 6) * 2, "Anna has 8 apples and buys 5 more.\n"]
    want = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        row = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        want.append(row[0, ids.shape[1] :].tolist())
    env = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    argument = json.dumps([str(folder), adapter and str(adapter), prompts, options])
    output = python("-c", RUN_VLLM, argument, env=env, fresh=True)
    passes = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT")]
    for answers in passes:
        assert sum(tokens == row for (tokens, _), row in zip(answers, want, strict=True)) >= least
    assert max(cached for _, cached in passes[1]) >= 128


needs_vllm = [pytest.mark.peer, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_vllm) for name in TINY if name != "parcae"])
def test_vllm_generates_as_transformers(family, tokenizer, tmp_path):
    make, standalone = TINY[family], family in ("ouro", "huginn")
    width = "n_embd" if "raven" in family or family == "huginn" else "hidden_size"
    size = {width: 128, "head_dim": 32}
    model = with_adapter(varied(make(**size), 0.12), scale=0.02).eval()
    merge_and_save(model, tmp_path, tokenizer, standalone=standalone)
    model = load_model(tmp_path, num_loops=3)
    check_vllm(tmp_path, model, tokenizer, dtype="float32", hf_overrides={"num_loops": 3})


@pytest.mark.parametrize("form", [pytest.param(form, marks=needs_vllm) for form in ("bfloat16", "adapter")])
def test_vllm_serves_tiny_ouro(adapter, form, tmp_path):
    folder, model, tokenizer = adapter
    if form == "adapter":
        check_vllm(model_path("tiny-ouro"), model.eval(), tokenizer, folder, dtype="float32", enable_lora=True)
    else:
        merge_and_save(model, tmp_path / "merged", tokenizer)
        merged = load_model(tmp_path / "merged", dtype="bfloat16")
        check_vllm(tmp_path / "merged", merged, tokenizer, least=12, dtype="bfloat16")  # rounding differs
