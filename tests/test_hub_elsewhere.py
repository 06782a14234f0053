"""Merged models in other programs: the base models' own code, MLX-LM, llama.cpp. `pytest -m "network or peer"`.

- The original code comes from the Hub, or from the folder LOOPDROPOUT_ORIGINAL_CODE, which has one folder for each family with
  its Python files and its config.json. pip installs the transformers release that the code was written for. LoopUS's code is a
  torch module with its own loader, in the folder `models` of its authors' repository.
- MLX-LM: `pip install mlx-lm`, and `mlx[cpu]` without an Apple GPU.
- llama.cpp: `pip install xllamacpp sentencepiece`, and LLAMA_CPP, the folder of llama.cpp's source, for its converter.
"""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import golden_model, python, tiny_nanbeige, with_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopdropout_trainer import merge_and_save


def merged(model, folder, tokenizer=None):
    """Merge an adapter with random factors into a model; return the folder."""
    return merge_and_save(with_adapter(model, scale=0.1).eval(), folder, tokenizer)


OLD = "transformers==4.51.0 huggingface_hub==0.36.2 tokenizers==0.21.4"
NEWER = "transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.1"
ORIGINALS = {  # repository of the code, and the transformers release that runs it
    "ouro": ("ByteDance/Ouro-1.4B", NEWER),
    "huginn": ("tomg-group-umd/huginn-0125", NEWER),
    "loopus": (
        "Thrillcrazyer/Qwen3-4B_LoopUS",
        "transformers==5.3.0 huggingface_hub==1.5.0 tokenizers==0.22.2 httpx==0.28.1 httpcore==1.0.9",
    ),
    "nanbeige": ("Nanbeige/Nanbeige4.2-3B", OLD),
    "raven_llama": ("smcleish/Recurrent-Llama-3.2-train-recurrence-32", OLD),
    "raven_olmo": ("smcleish/Recurrent-OLMo-2-0425-train-recurrence-32", OLD),
}
FORWARD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, arguments, logits, has_own_loader = sys.argv[1:]
if has_own_loader == "True":
    from base.modeling_lds import LDSForCausalLM
    model = LDSForCausalLM.from_pretrained(folder, tokenizer=object(), torch_dtype=torch.float32).eval()
else:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.float32).eval()
assert "loopdropout_trainer" not in sys.modules
arguments = torch.load(arguments)
with torch.no_grad():
    torch.save(model(**arguments).logits, logits)
"""


def original_code(family, folder):
    """Put a family's Python files and config.json into `folder`."""
    given = os.environ.get("LOOPDROPOUT_ORIGINAL_CODE")
    if given is None:
        from huggingface_hub import snapshot_download

        snapshot_download(ORIGINALS[family][0], allow_patterns=["*.py", "config.json"], local_dir=folder)
    elif not (Path(given) / family).is_dir():
        pytest.skip(f"{given} has no code of {family}")
    else:
        shutil.copytree(Path(given) / family, folder)


@pytest.mark.network
@pytest.mark.parametrize("name", ORIGINALS)
def test_original_code_gives_logits_of_merged_model(name, golden, tmp_path):
    original_code(name, tmp_path / "base")
    auto_map = json.loads((tmp_path / "base" / "config.json").read_text()).get("auto_map", {})
    model = golden_model(golden(name))
    if auto_map:
        model.config.auto_map = auto_map
    model.config.name_or_path = model.name_or_path = str(tmp_path / "base")
    folder = merged(model, tmp_path / "merged")
    assert set(json.loads((folder / "config.json").read_text()).get("auto_map", ())) == set(auto_map)

    ids = torch.arange(2, 22).view(2, 10)
    arguments, own_arguments = {"input_ids": ids, "use_cache": False}, {}
    if hasattr(model.config, "n_embd"):  # a random initial state, unless one is given
        state = torch.zeros(*ids.shape, model.config.n_embd)
        arguments |= {"input_states": state, "num_steps": torch.tensor([0, model.config.num_loops])}
        own_arguments["initial_state"] = state
    torch.save(arguments, tmp_path / "arguments.pt")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    subprocess.run([*install, *ORIGINALS[name][1].split()], check=True)
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "packages")}
    files = (folder, tmp_path / "arguments.pt", tmp_path / "logits.pt")
    python("-c", FORWARD, *files, not auto_map, env=env, cwd=tmp_path, fresh=True)
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder)(ids, **own_arguments).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt").float(), want, atol=1e-4, rtol=1e-4)


def chat_tokenizer(folder):
    """A tokenizer like Nanbeige's: SentencePiece and ChatML, without tokens of single bytes, which llama.cpp joins."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"loop {i} of {j} runs the block again" for i in range(30) for j in range(10)]),
        model_writer=written,
        vocab_size=90,
        model_type="bpe",
        pad_id=-1,
        minloglevel=2,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **tokens}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=[False, True], ids=["norm in every loop", "norm after the last"])
def nanbeige(request, tmp_path):
    """A merged tiny Nanbeige with the published theta, and its tokenizer."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    published = {"num_loops": 2, "rope_theta": 70_000_000.0, "rms_norm_eps": 1e-5}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    differ = {"skip_loop_final_norm": request.param, "initializer_range": 0.3}  # logits that differ
    model = tiny_nanbeige(vocab_size=len(tokenizer), **tokens, **published, **differ)
    return merged(model, tmp_path / "merged", tokenizer), tokenizer


def commands_of(card, program):
    """The commands of a card for a program, each split into words."""
    text = (card / "README.md").read_text().split(f"\n{program}")[1]
    block = text.split("```bash\n")[1].split("```")[0]
    return [shlex.split(line) for line in block.strip().splitlines()]


@pytest.mark.peer
def test_mlx_lm_gives_logits_of_merged_nanbeige(nanbeige):
    mlx, mlx_utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    folder, _ = nanbeige
    ids = torch.arange(5, 85).view(2, 40)
    logits = mlx_utils.load_model(folder)[0](mlx.array(ids.tolist()))
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(torch.tensor(logits.tolist()), want, atol=1e-4, rtol=1e-4)
    ((program, *words),) = commands_of(folder, "MLX-LM")
    assert program == "mlx_lm.generate"
    assert "4 tokens" in python(
        "-m", "mlx_lm", "generate", *words, "--max-tokens", "4", env=None, cwd=folder, fresh=True
    )


@pytest.mark.peer
def test_llama_cpp_gives_probabilities_of_nanbeige(nanbeige, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp")
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP does not name the folder of llama.cpp's source")
    folder, tokenizer = nanbeige
    (convert, _) = commands_of(folder, "llama.cpp")
    assert convert[0] == "python"
    (folder / "llama.cpp").symlink_to(os.environ["LLAMA_CPP"])
    python(*convert[1:], "--outtype", "f32", env=None, cwd=folder, fresh=True)
    file = folder / "model.gguf"

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(file), 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("loop 7 of 8 runs the block again and loop 9 of 3", return_tensors="pt").input_ids
    settings = {"temperature": 0, "logprobs": 5, "ignore_eos": True, "max_tokens": 8}
    answer = server.handle_completions({"prompt": ids[0].tolist(), **settings})["choices"][0]
    tokens = answer["logprobs"]["content"]
    with torch.no_grad():
        row = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        want = model(row).logits[0, ids.shape[1] - 1 : -1].log_softmax(dim=-1).topk(5)
    assert [token["id"] for token in tokens] == row[0, ids.shape[1] :].tolist()
    got = torch.tensor([[top["logprob"] for top in token["top_logprobs"]] for token in tokens])
    torch.testing.assert_close(got, want.values, atol=0.05, rtol=0)  # its keys and values pass through float16
