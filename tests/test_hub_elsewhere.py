"""Merged models in MLX-LM and llama.cpp: `pytest -m peer tests/test_hub_elsewhere.py`.

Both need `pip install sentencepiece protobuf`.

- MLX-LM: `pip install mlx-lm`, and `mlx[cpu]` without an Apple GPU.
- llama.cpp: `pip install xllamacpp`, and LLAMA_CPP, the folder of llama.cpp's source, for its converter.
"""

import io
import json
import os
import shlex

import pytest
import torch
from conftest import python, tiny_nanbeige, with_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopdropout_trainer import merge_and_save


pytestmark = pytest.mark.peer


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
    return merge_and_save(with_adapter(model, scale=0.1).eval(), tmp_path / "merged", tokenizer), tokenizer


def commands_of(card, program):
    """The commands of a card for a program, each split into words."""
    text = (card / "README.md").read_text().split(f"\n{program}")[1]
    block = text.split("```bash\n")[1].split("```")[0]
    return [shlex.split(line) for line in block.strip().splitlines()]


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
    settings = {"temperature": 0, "logprobs": 1, "ignore_eos": True, "max_tokens": 8}
    answer = server.handle_completions({"prompt": ids[0].tolist(), **settings})
    tokens = answer["choices"][0]["logprobs"]["content"]
    row = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        want = model(row).logits[0, ids.shape[1] - 1 : -1].log_softmax(dim=-1).amax(dim=-1)
    assert [token["id"] for token in tokens] == row[0, ids.shape[1] :].tolist()
    got = torch.tensor([token["logprob"] for token in tokens])
    torch.testing.assert_close(got, want, atol=0.05, rtol=0)  # its keys and values pass through float16
