"""Cached answers of a model: the key of everything that they depend on, and the file that keeps them.

`answer_key` alone decides which answers belong together. A cached answer is one line of JSON text, so reading a cache runs no
code. Each line has a mark that only the same user can compute, so a file in a stranger's folder is never read as an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import torch
from lm_eval.api.instance import Instance
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.answer_code import NUM_DIGITS, describe_unused, digest_code


if TYPE_CHECKING:
    from loopdropout_trainer.evaluation.looped_lm import LoopedLM


logger = logging.get_logger(__name__)

_UNREAD_CONFIG = {"_name_or_path", "transformers_version", "use_cache"}
_UNREAD_SETTINGS = {"batch_size_per_gpu", "batch_schedule", "batch_sizes", "max_batch_size", "logits_cache"}
_UNREAD_SETTINGS |= {"given_num_loops", "given_gates"}  # `num_loops` and `gates` follow from them
_UNREAD_SETTINGS |= {"pretrained", "revision", "delta", "peft", "_rank", "_world_size", "answers"}
_UNREAD_ATTRIBUTES = {
    "_is_hf_initialized",
    "gradient_checkpointing",
    "warnings_issued",
    "trained_with",
    "run_folder",
    "trained_adapter",
    "loaded_adapter",
    "adapter_source",
    "training_tokenizer",
    "name_or_path",
}
_UNREAD_ATTRIBUTES |= vars(nn.Module()).keys() - {"training"}  # parameters and buffers are read by name, hooks too
_UNREAD_TOKENIZER = {"name_or_path", "padding_side", "tokenizer_class", "verbose", "deprecation_warnings"}

MARK_FILE = "loopdropout_answers_key"
"""File in the cache folder of Hugging Face (`HF_HOME`) with the user's secret, which marks answers as the user's own."""

_SECRET_BYTES = 32


# The key of the answers


def answer_key(lm: LoopedLM) -> str:
    """Return digests of everything that the answers of a model depend on, apart from the requests and rounding.

    These are its weights and its code, all plain attributes of its modules (as the scales and the active adapter of LoRA
    layers), the depth, the gates, the readout, the end tokens, the tokenizer without its padding, and the settings of lm-eval.
    The batch size, the device, the number of processes and the name of the model's folder are left out.
    """
    digest = hashlib.sha256()
    facts = {
        "settings": _settings(lm),
        "config": _without(lm.looped.config.to_dict(), _UNREAD_CONFIG),
        "attention": lm.looped.config._attn_implementation,
        "generation": _without(lm.looped.generation_config.to_dict(), {"transformers_version"}),
        "gates in force": _gates_in_force(lm),
        "modules": [[name, *_describe_module(module)] for name, module in lm.model.named_modules()],
        "tokenizer": describe_tokenizer(lm.tokenizer),
    }
    settings = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    digest.update(json.dumps(lm.columns, sort_keys=True, default=str).encode())
    tensors = {
        **dict(lm.model.named_buffers()),
        **lm.model.state_dict(),
    }  # buffers that are not saved are used as well
    for name, tensor in sorted(tensors.items()):
        if torch.is_tensor(tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return "-".join([digest.hexdigest()[:NUM_DIGITS], settings[:NUM_DIGITS], *digest_code(lm.model)])


def _settings(lm: LoopedLM) -> dict[str, Any]:
    """Return the settings of the class and of lm-eval that are plain values."""
    settings = _without(_plain_attributes(lm), _UNREAD_SETTINGS)
    derived = {"max_length": lm.max_length, "max_gen_toks": lm.max_gen_toks, "prefix": lm.prefix_token_id}
    return {**settings, **derived, **lm.columns, "own_gates": lm.gates, "softmax_dtype": str(lm.softmax_dtype)}


def _gates_in_force(lm: LoopedLM) -> list | None:
    sampled = lm.looped.gate_state.batch.sampled
    return None if sampled is None else sampled.tolist()


def _describe_module(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the class of a module, its plain attributes, the kinds of its adapters and the names of its hooks."""
    attributes = _without(_plain_attributes(module), _UNREAD_ATTRIBUTES)
    variants = getattr(module, "lora_variant", {})
    kinds = {adapter: [_class_name(kind), _plain_attributes(kind)] for adapter, kind in variants.items()}
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    names = [getattr(hook, "__qualname__", _class_name(hook)) for hook in hooks]
    hook_names = [name for name in names if name != "_require_gradient"]  # of gradient checkpointing
    return _class_name(module), {**attributes, "kinds": kinds, "hooks": hook_names}


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return everything that decides the tokens of a text. Padding and truncation are settings of a call."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    attributes = _plain_attributes(tokenizer)
    init = attributes.pop("init_kwargs", {})
    return {
        "class": _class_name(tokenizer),
        "backend": _without(backend, {"padding", "truncation"}),
        "attributes": _without({**init, **attributes}, _UNREAD_TOKENIZER),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }


def _plain_attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, texts, or lists and mappings of them."""
    return {name: _sorted(value) for name, value in vars(instance).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | torch.dtype)


def _sorted(value: Any) -> Any:
    """Return a set as a sorted list, because the order of a set differs between processes."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value


def _without(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _class_name(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


# The file of the answers


class AnswerCache:
    """The answers of one model in a folder. Several processes keep a file each, and all of them read all files.

    It takes the place of lm-eval's `CacheHook`, which gets each answer as soon as the model has given it. A line is a mark and
    JSON with the kind of the request, the hash of its arguments, and the answer.

    Args:
        folder: Folder of the caches.
        key: Key of the answers, `answer_key(lm)`.
        rank: Index of the process.

    Raises:
        UserError: If a file of the answers is not a regular file.
    """

    def __init__(self, folder: str | Path, key: str, rank: int = 0) -> None:
        self.key = key
        self.secret = _read_secret()
        self.answers: dict[tuple[str, str], Any] = {}
        Path(folder).mkdir(parents=True, exist_ok=True)
        own = Path(folder, f"answers_{key}_rank{rank}.jsonl")
        own_end = b""
        for path in sorted({own, *Path(folder).glob(f"answers_{key}_rank*.jsonl")}):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise UserError(f"The cache {path} must be a regular file. Delete it.")
            if path.exists():
                end = self._read(path)
                own_end = end if path == own else own_end
        unused = None if self.answers else describe_unused(Path(folder), key)
        if unused is not None and rank == 0:
            logger.warning(unused)
        self.file = os.open(own, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if own_end not in (b"", b"\n"):
            os.write(self.file, b"\n")  # a killed process has left a part of a line

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)

    def complete(self, kind: str, requests: Sequence[Instance], compute: Callable[[list[Instance]], list]) -> list:
        """Return the answers to requests in their order. `compute` gives the missing ones.

        Args:
            kind: Kind of the requests, such as "generate_until".
            requests: Requests of lm-eval.
            compute: Function from requests to their answers.
        """
        answers = [self.answers.get((kind, _hash_arguments(request.args))) for request in requests]
        missing = [index for index, answer in enumerate(answers) if answer is None]
        if missing:
            new = compute([requests[index] for index in missing])
            for index, answer in zip(missing, new, strict=True):
                answers[index] = answer
                self.add_partial(kind, requests[index].args, answer)
        return answers

    def add_partial(self, attr: str, req: Sequence[Any], res: Any) -> None:
        """Keep an answer, unless it is random or already kept.

        Args:
            attr: Kind of the request.
            req: Arguments of the request.
            res: Answer, a text, a log-likelihood, or a log-likelihood with whether the text is the most probable one.
        """
        is_sampled = attr == "generate_until" and req[1].get("do_sample", False)
        request = (attr, _hash_arguments(req))
        if is_sampled or request in self.answers:
            return
        self.answers[request] = res
        text = json.dumps([*request, res]).encode()
        os.write(self.file, self._mark(text) + b" " + text + b"\n")

    def _read(self, path: Path) -> bytes:
        """Read the answers of a file that have a right mark, and return the last byte of the file."""
        line = b""
        with open(path, "rb") as file:
            for line in file:
                mark, _, text = line.rstrip(b"\n").partition(b" ")
                if hmac.compare_digest(mark, self._mark(text)):
                    kind, request, answer = json.loads(text)
                    self.answers[kind, request] = tuple(answer) if isinstance(answer, list) else answer
        return line[-1:]

    def _mark(self, text: bytes) -> bytes:
        return hmac.new(self.secret, f"{self.key} ".encode() + text, hashlib.sha256).hexdigest().encode()


def _hash_arguments(arguments: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(arguments), sort_keys=True, default=repr).encode()).hexdigest()


def _read_secret() -> bytes:
    """Return the user's secret, and make it at the first call. If it cannot be kept, no later process reads the answers."""
    path = Path(huggingface_hub.constants.HF_HOME, MARK_FILE)
    try:
        if path.exists() and path.stat().st_size != _SECRET_BYTES:  # not written completely
            path.unlink()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # only its user can read it
                file.write(secrets.token_bytes(_SECRET_BYTES))
                file.flush()
                with suppress(FileExistsError):
                    os.link(file.name, path)  # of several processes, the first one decides
        return path.read_bytes()
    except OSError as error:
        logger.warning(f"The answers of this evaluation cannot be reused, because {path} cannot be written ({error}).")
        return secrets.token_bytes(_SECRET_BYTES)
