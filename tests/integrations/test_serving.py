"""Serving: the command `serve`, the plugin for vLLM against an emulated engine, and vLLM itself (`.ci/serving`)."""

import copy
import json
import os
import pty
import re
import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import openai
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.errors import user_error
from helpers.files import GOLDEN, load_script
from helpers.processes import ENVIRONMENT, Program, python, wait_for
from helpers.tiny import TINY, tiny_hrm, tiny_ouro, varied, with_adapter
from loopdropout_trainer import load_model, merge_and_save, use_gates
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.integrations import register_vllm_models
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.models.layers import Attention
from loopdropout_trainer.saving.merging import export_authors_format
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.source import find_source, read_model_config
from loopdropout_trainer.serving import vllm_command
from loopdropout_trainer.settings.recipe import name_words, parse
from loopdropout_trainer.tokenizers import end_tokens, load_tokenizer


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


@pytest.mark.parametrize(
    ("family", "kind"),
    [("ouro", "pipeline"), *((name, "tensor") for name in TINY if name not in ("ouro", "nanbeige"))],
)
def test_plugin_refuses_parallelism(make_engine, family, kind):
    with user_error(f"`{kind}_parallel_size` must be 1"):
        make_engine(TINY[family]().config, **{f"{kind}_parallel_size": 2})


PENS = "Tom has {} boxes with {} pens each. How many pens does Tom have?"
CHAT = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"


@pytest.fixture
def adapter(tmp_path):
    """The folder of a run of `tiny-ouro`, and the loaded model with its tokenizer."""
    torch.manual_seed(0)
    model = with_adapter(load_model("tiny-ouro"), scale=0.02)
    tokenizer = load_tokenizer("tiny-ouro")
    tokenizer.chat_template = CHAT  # of the base model, which the training did not use
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_text("preparation: arithmetic\n")
    return tmp_path / "run", model, tokenizer


def start_server(folder, *options, **environment):
    """Start the command `serve` on a free port, and return its process and a client."""
    words = ["serve", folder, "--port", 0, "--engine", "transformers", *options]
    program = Program("-m", "loopdropout_trainer", *words, env={**ENVIRONMENT, **environment})
    wait_for(lambda: "startup complete" in program.stderr, program)
    port = re.search(r"Address: http://127.0.0.1:([1-9]\d*)/v1\n", program.stdout)[1]
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in program.stdout
    return program, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=0)


needs_fastapi = pytest.mark.skipif(find_spec("fastapi") is None, reason="the extra `serve` is not installed")


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "1e30"])
def test_ports_that_do_not_exist_raise(port):
    with user_error("`port` must be "):
        SERVE.main(["tiny-ouro", "--port", port])


@needs_fastapi
def test_server_answers_as_generate(adapter):
    folder, model, tokenizer = adapter
    model.base_model.model.config.num_loops = 2
    program, client = start_server(folder, "--num_loops", 2, "--gates", "1-0", LOOPDROPOUT_API_KEY="key")
    assert "Format of the prompts: 'Question: {question}\\nAnswer:'\nExample: 'Question: What is 7" in program.stdout
    assert f"{folder}@gates=0-0" in program.stdout
    settings = {"model": str(folder), "max_tokens": 16, "temperature": 0}
    ask = lambda prompt, **options: client.completions.create(prompt=prompt, **{**settings, **options})
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
    assert ask(prompts[2], stop=[stop]).choices[0].text == start
    turns = [{"role": "user", "content": PENS.format(3, 4)}]
    assert client.chat.completions.create(messages=turns, **settings).choices[0].message.content == chat
    unit = ask(prompts[0], model=f"{folder}@gates=1-1").choices[0].text
    assert unit == generate_greedy(model, tokenizer, prompts[:1], 16, progress=False)[0]
    for bad in ({"prompt": []}, {"model": "other"}, {"extra_body": {"x": 1, "max_tokens": "many"}}):
        with pytest.raises(openai.APIStatusError, match="Error code: 40[04]"):
            ask(**{"prompt": "a", **bad})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
model_args, task = json.loads(sys.argv[1])
results = simple_evaluate("local-completions", model_args, [task], task_manager=TaskManager(include_defaults=False))
print("RESULT", results["results"]["pens"]["exact_match,none"])
"""


@needs_fastapi
@pytest.mark.peer
@pytest.mark.skipif(find_spec("tenacity") is None, reason="the extra `api` of lm-eval is not installed")
def test_client_of_lm_eval_gets_the_texts_of_generate(adapter, tmp_path):
    folder, model, tokenizer = adapter
    questions = [f"Question: {PENS.format(a, 5)}\nAnswer:" for a in range(2, 8)]
    texts = generate_greedy(model, tokenizer, questions, 12, progress=False)
    assert len({*texts}) > 1
    rows = [{"question": question, "answer": text} for question, text in zip(questions, texts, strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "pens",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["no such text"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
    }
    _, client = start_server(folder, LOOPDROPOUT_API_KEY="key")
    address = str(client.base_url.join("completions"))
    model_args = {"model": str(folder), "base_url": address, "tokenizer": str(folder), "num_concurrent": 4}
    environment = {**ENVIRONMENT, "OPENAI_API_KEY": "key"}
    output = python("-c", LM_EVAL, json.dumps([model_args, task]), env=environment, fresh=True)
    assert output.splitlines()[-1] == "RESULT 1.0"


@needs_fastapi
def test_chat_template_option_allows_conversations(adapter, tmp_path):
    folder, _, _ = adapter
    (tmp_path / "own.jinja").write_text(CHAT)
    turns = [{"role": role, "content": PENS.format(3, 4)} for role in ("system", "user")]
    settings = {"model": str(folder), "max_tokens": 12, "temperature": 0}
    _, client = start_server(folder)
    with pytest.raises(openai.BadRequestError, match="one turn of the role user, got the roles system, user"):
        client.chat.completions.create(messages=turns, **settings)
    program, client = start_server(folder, "--chat_template", tmp_path / "own.jinja")
    assert "Format of the prompts: the tokenizer's chat template\nExample: '[user] What" in program.stdout
    raw = "".join(f"[{turn['role']}] {turn['content']}\n" for turn in turns)
    answer = client.chat.completions.create(messages=turns, **settings)
    completion = client.completions.create(prompt=raw, **settings)
    assert answer.choices[0].message.content == completion.choices[0].text
    assert answer.usage == completion.usage


# The choice of the engine, and the command line of vLLM.


@pytest.fixture
def installed_vllm(monkeypatch):
    """Let vLLM count as installed. Nothing here runs it."""
    monkeypatch.setattr(vllm_command, "find_spec", lambda name: name)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def choose(model, *words):
    """Return the engine for a command line."""
    own, options = SERVE.split_options([str(model), *map(str, words)])
    (args,) = parse([SERVE.ServeArguments], name_words(own, "model"))
    return SERVE.choose_engine(args, find_source(args.model), options)


def test_engine_is_vllm_where_it_can_serve(adapter, installed_vllm, monkeypatch, tmp_path):
    folder = adapter[0]
    merge_and_save(adapter[1], tmp_path / "merged", adapter[2])
    for model in (folder, tmp_path / "merged", "tiny-ouro"):
        assert choose(model) == "vllm"
        assert choose(model, "--engine", "transformers") == "transformers"
    assert choose(folder, "--", "--max-model-len", 64) == "vllm"
    assert choose(folder, "--gates", "1-0-0-0") == "transformers"
    with user_error("vLLM cannot serve .*, because vLLM does not gate adapters. Use `--engine transformers`"):
        choose(folder, "--gates", "1-0-0-0", "--engine", "vllm")
    with user_error("`engine` must be vllm, because options after `--` are vLLM's, got transformers"):
        choose(folder, "--engine", "transformers", "--", "--max-model-len", 64)
    monkeypatch.undo()
    if find_spec("vllm") is None:
        assert choose(folder) == "transformers"
        with user_error("because vLLM is not installed"):
            choose(folder, "--", "--max-model-len", 64)


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_registered_with_vllm(installed_vllm, monkeypatch, tmp_path, tokenizer, family):
    registered = {}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    register_vllm_models()
    for saved in (TINY[family](), tokenizer):
        saved.save_pretrained(tmp_path)
    (architecture,) = read_model_config(str(tmp_path)).architectures
    assert registered[architecture] == "loopdropout_trainer.integrations.vllm:LoopedForCausalLM"
    assert choose(tmp_path) == "vllm"


@pytest.mark.parametrize("rule", ["independent", "learned"])
def test_vllm_refuses_updates_that_differ_between_loops(installed_vllm, tmp_path, rule):
    model = with_adapter(load_model("tiny-ouro"))
    add_gates(model, rule=make_rule(rule))
    model.save_pretrained(tmp_path)
    write_metadata(tmp_path, {"rule": rule, "num_loops": 4})
    assert choose(tmp_path) == "transformers"
    with user_error(f"the update of the rule '{rule}' differs between loops, and vLLM's LoRA has one update for all"):
        choose(tmp_path, "--engine", "vllm")


def test_vllm_refuses_other_adapters(installed_vllm, tmp_path, tokenizer):
    export_authors_format(GOLDEN / "authors" / "adapter", tmp_path / "authors")
    with user_error("the adapter has the format of the paper authors' program, so it must be merged first"):
        choose(tmp_path / "authors", "--engine", "vllm")
    with_adapter(load_model("tiny-ouro"), r=513).save_pretrained(tmp_path / "large")
    with user_error("the adapter has rank 513, and vLLM's largest is 512, so it must be merged first"):
        choose(tmp_path / "large", "--engine", "vllm")
    tiny_hrm().save_pretrained(tmp_path / "hrm")
    tokenizer.save_pretrained(tmp_path / "hrm")
    with user_error("the plugin for vLLM has no class for this model"):
        choose(tmp_path / "hrm", "--engine", "vllm")
    config = tmp_path / "hrm" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": "wide"}))
    with user_error("the config.json of .* cannot be read"):
        choose(tmp_path / "hrm", "--engine", "vllm")


@pytest.mark.parametrize("plugins", ["", "lora_filesystem_resolver"])
def test_vllm_needs_the_plugin(adapter, installed_vllm, monkeypatch, plugins):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with user_error("`VLLM_PLUGINS` must contain loop_dropout, the plugin that gives each loop its own cache, got"):
        choose(adapter[0])
    monkeypatch.setenv("VLLM_PLUGINS", f"{plugins},loop_dropout")
    assert choose(adapter[0]) == "vllm"
    for option in ("--model-impl=transformers", "--model_impl"):
        with user_error("`--model-impl` must be left out, because loop_dropout, the plugin of this package"):
            choose(adapter[0], "--", option, "transformers")
    with user_error("`--port` must not come after `--`. Set `--port` before it"):
        choose(adapter[0], "--", "--port", 1)


def test_vllm_command_serves_an_adapter_at_its_depth(adapter, installed_vllm, tmp_path):
    folder, model, tokenizer = adapter
    write_metadata(folder, {"num_loops": 6, "eos_token_id": [7]})
    source = find_source(folder)
    prompt_format = source.choose_prompt_format(source.load_tokenizer())
    make = partial(vllm_command.vllm_command, host="::1", port=5)
    options = parse_options(make(source, prompt_format, options=["--max-model-len", "64"]))
    assert json.loads(options["--lora-modules"]) == {"name": str(folder), "path": str(folder)}
    assert json.loads(options["--hf-overrides"]) == {"num_loops": 6}
    assert (options["--max-lora-rank"], options["--dtype"], options["--max-model-len"]) == ("16", "float32", "64")
    assert (options["--host"], options["--port"], options["--tokenizer"]) == ("::1", "5", str(folder))
    assert options["--chat-template"] == prompt_format.chat_template
    ends = GenerationConfig.from_pretrained(options["--generation-config"]).eos_token_id
    assert {*ends} == {7, *end_tokens(load_model("tiny-ouro"))}
    assert 'num_loops": 2' in parse_options(make(source, prompt_format, num_loops=2))["--hf-overrides"]

    merge_and_save(model.to(torch.bfloat16), tmp_path / "merged", tokenizer)
    source = find_source(tmp_path / "merged")
    options = parse_options(make(source, source.choose_prompt_format(source.load_tokenizer())))
    assert options["--served-model-name"] == str(tmp_path / "merged")
    assert not {"--lora-modules", "--hf-overrides", "--dtype", "--generation-config", "--tokenizer"} & {*options}


# `loopdropout` whose standard input is a terminal, and which finds packages in a folder.
SERVE_AT_TERMINAL = """
import os, runpy, sys
terminal, folder, *sys.argv = sys.argv[1:]
os.dup2(os.open(terminal, os.O_RDWR), 0)
sys.path.insert(0, folder)
runpy.run_module("loopdropout_trainer", run_name="__main__")
"""


def test_vllm_cannot_ask_at_a_terminal(adapter, tmp_path):
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"  # in place of vLLM's
    server.parent.mkdir(parents=True)
    server.write_text("import sys; print('VLLM', sys.stdin.isatty(), repr(sys.stdin.read()))")
    for folder in (server.parents[2], server.parents[1], server.parents[0]):
        (folder / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    controller, terminal = pty.openpty()
    os.write(controller, b"y\n\x04")
    words = [os.ttyname(terminal), tmp_path, "loopdropout", "serve", adapter[0], "--port", 0, "--engine", "vllm"]
    program = Program("-c", SERVE_AT_TERMINAL, *words, env={**ENVIRONMENT, "PYTHONPATH": path})
    program.wait()
    assert program.stdout.endswith("VLLM False ''\n"), program.stderr


def parse_options(command):
    """Return the options of a command line by name."""
    names = [place for place, word in enumerate(command) if word.startswith("--")]
    return {command[place]: (command[place + 1 : place + 2] or [""])[0] for place in names}


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
    if "tensor_parallel_size" in options:  # by itself vLLM asks for a NUMA node for each process
        cores = sorted(os.sched_getaffinity(0))
        env["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    argument = json.dumps([str(folder), adapter and str(adapter), prompts, options])
    output = python("-c", RUN_VLLM, argument, env=env, fresh=True)
    passes = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT")]
    for answers in passes:
        assert sum(tokens == row for (tokens, _), row in zip(answers, want, strict=True)) >= least
    assert max(cached for _, cached in passes[1]) >= 128


needs_vllm = [pytest.mark.peer, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def tiny_model(family):
    """A random model of a family, in sizes that vLLM's kernels accept."""
    width = "n_embd" if family in ("huginn", "parcae", "raven_llama", "raven_olmo") else "hidden_size"
    head = {} if family == "parcae" else {"head_dim": 32}  # whose heads share the width
    return varied(TINY[family](**{width: 128, **head}), 0.12)


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_vllm) for name in TINY])
def test_vllm_generates_as_transformers(family, tokenizer, tmp_path):
    model = with_adapter(tiny_model(family), scale=0.02).eval()
    merge_and_save(model, tmp_path, tokenizer, standalone=family in ("ouro", "huginn"))
    model = load_model(tmp_path, num_loops=3)
    check_vllm(tmp_path, model, tokenizer, dtype="float32", hf_overrides={"num_loops": 3})


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_vllm) for name in TINY])
def test_vllm_serves_unmerged_adapters(family, tokenizer, tmp_path):
    for saved in (tiny_model(family), tokenizer):
        saved.save_pretrained(tmp_path / "base")
    with_adapter(load_model(tmp_path / "base"), scale=0.05).save_pretrained(tmp_path / "run")
    model, options = load_model(tmp_path / "run", num_loops=3), {"dtype": "float32", "enable_lora": True}
    ids = tokenizer("Tom has 3 boxes.", return_tensors="pt").input_ids
    with torch.no_grad(), model.disable_adapter():
        base = model(ids).logits
    assert (model(ids).logits - base).abs().max() > 0.01
    check_vllm(tmp_path / "base", model, tokenizer, tmp_path / "run", hf_overrides={"num_loops": 3}, **options)


@pytest.mark.parametrize("form", [pytest.param(form, marks=needs_vllm) for form in ("bfloat16", "two processes")])
def test_vllm_serves_tiny_ouro(adapter, form, tmp_path):
    _, model, tokenizer = adapter
    merge_and_save(model, tmp_path / "merged", tokenizer)
    if form == "bfloat16":
        merged = load_model(tmp_path / "merged", dtype="bfloat16")
        check_vllm(tmp_path / "merged", merged, tokenizer, least=12, dtype="bfloat16")  # rounding differs
    else:
        merged = load_model(tmp_path / "merged")
        check_vllm(tmp_path / "merged", merged, tokenizer, dtype="float32", tensor_parallel_size=2)


@pytest.mark.parametrize("family", [pytest.param("nanbeige", marks=needs_vllm)])  # and `tiny-ouro`, above
def test_vllm_divides_families_with_a_plan(family, tokenizer, tmp_path):
    merge_and_save(with_adapter(tiny_model(family), scale=0.02).eval(), tmp_path, tokenizer)
    options = {"dtype": "float32", "hf_overrides": {"num_loops": 3}, "tensor_parallel_size": 2}
    check_vllm(tmp_path, load_model(tmp_path, num_loops=3), tokenizer, **options)


def start_vllm(folder, *options, **environment):
    """Start the command `serve` with vLLM, and return its process and a client."""
    env = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    words = ["-m", "loopdropout_trainer", "serve", folder, "--port", 0, "--engine", "vllm"]
    program = Program(*words, "--", "--enforce-eager", "--max-model-len", 256, *options, env=env, fresh=True)
    wait_for(lambda: "startup complete" in program.stderr, program)
    address = re.search(r"Address: (\S+)\n", program.stdout)[1]
    return program, openai.OpenAI(base_url=address, api_key="key", max_retries=0, timeout=300)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_vllm) for kind in ("adapter", "merged")])
def test_vllm_command_answers_thirty_clients(adapter, kind, tmp_path):
    folder, model, tokenizer = adapter
    source = folder
    if kind == "merged":
        source = tmp_path / "merged"
        merge_and_save(model, source, tokenizer)
        write_metadata(source, {"prompt_template": "Question: {question}\nAnswer:"})
    questions = [PENS.format(a, b) for a in range(2, 8) for b in range(3, 8)]
    texts = [f"Question: {question}\nAnswer:" for question in questions]
    want = generate_greedy(model, tokenizer, texts, 12, progress=False)
    program, client = start_vllm(source, LOOPDROPOUT_API_KEY="key")
    assert "Engine: vllm\nFormat of the prompts: 'Question: {question}\\nAnswer:'" in program.stdout
    settings = {"model": str(source), "max_tokens": 12, "temperature": 0}
    ask = lambda question: client.chat.completions.create(messages=[{"role": "user", "content": question}], **settings)
    with ThreadPoolExecutor(30) as clients:
        answers = list(clients.map(ask, questions))
    assert [answer.choices[0].message.content for answer in answers] == want
    parts = [{"role": "user", "content": [{"type": "text", "text": questions[0]}]}]
    assert client.chat.completions.create(messages=parts, **settings).choices[0].message.content == want[0]

    turns = [{"role": role, "content": questions[0]} for role in ("system", "user")]
    with pytest.raises(openai.BadRequestError, match="one turn of the role user, got the roles system, user"):
        client.chat.completions.create(messages=turns, **settings)
    with pytest.raises(openai.BadRequestError):  # vLLM has its options
        client.completions.create(prompt=[5] * 300, **settings)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()

    running = lambda: re.search(r"^vllm:num_requests_running\S* (\S+)", read_metrics(client), re.MULTILINE)[1]
    stream = client.completions.create(
        prompt="a", stream=True, extra_body={"ignore_eos": True}, **settings | {"max_tokens": 250}
    )
    next(iter(stream))
    assert float(running()) == 1
    stream.close()
    began = time.monotonic()
    wait_for(lambda: float(running()) == 0)
    assert time.monotonic() - began < 5
    program.end(signal.SIGTERM)


def read_metrics(client):
    """Return vLLM's metrics as text."""
    address = client.base_url.copy_with(path="/metrics")
    return client._client.get(address).text
