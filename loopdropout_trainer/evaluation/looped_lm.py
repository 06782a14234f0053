"""Looped language models for lm-eval, at any recurrence depth, under any gates and with the readout of any loop."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.api.model
import lm_eval.api.task
import torch
from accelerate import PartialState
from accelerate.utils import gather
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.answers import AnswerCache, answer_key
from loopdropout_trainer.evaluation.arguments import (
    check_batch_size,
    check_keywords,
    check_unused_by_loaded_model,
    check_unused_by_name,
)
from loopdropout_trainer.files import public_name
from loopdropout_trainer.gate_labels import label_gates
from loopdropout_trainer.gate_state import cut_gates
from loopdropout_trainer.gate_texts import parse_gates
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.limits import rendering_error
from loopdropout_trainer.looped import attach_looped_model, check_num_loops, use_depth
from loopdropout_trainer.lora import is_enabled, use_gates
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import find_source_of


# HFLM warns about a model that is already loaded, which is the normal case here.
_WARNINGS = re.compile("already-initialized|not of type `str`")
logging.getLogger("lm_eval.models.huggingface").addFilter(lambda record: not _WARNINGS.search(str(record.msg)))
# lm-eval shows progress bars of the prompts and the cached answers, which take no time. No option turns them off.
lm_eval.api.model.tqdm = lm_eval.api.task.tqdm = lambda items, **kwargs: items

_GREEDY_FIELDS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


@register_model("looped")
class LoopedLM(HFLM):
    """A looped model for lm-eval.

    Greedy texts come from `generate_greedy`. Log-likelihoods, in float32, and sampled texts come from lm-eval's `hf`.

    Args:
        pretrained: Looped model with or without an adapter, or its folder or Hub name.
        tokenizer: Tokenizer of a loaded model.
        batch_size: Number of requests that a process computes at a time.
        num_loops: Recurrence depth K. Default: the model's own, or the depth of a block of `use_depth` around the evaluation.
        gates: Gates [K] of the adapter, or a string such as "1-0-0-0". Default: unit gates, or the gates of a block of
            `use_gates` around the evaluation. Results name the gates.
        readout: Loop (from 1) whose readout gives the logits. Default: the last loop.
        adapter: Folder or Hub name of an adapter. This and the next arguments are for the name of a model only.
        revision: Branch, tag or commit of the model on the Hub.
        dtype: Data type of the weights.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...
        chat_template: Name or Jinja file of a chat template.
        device: Device of the model. Default: the accelerator of the process.
        **kwargs: Further arguments of lm-eval's `hf`, such as `max_length` or `add_bos_token`.

    Raises:
        UserError: if the depth, the gates or the readout do not fit the model, or for an argument that has no effect.
    """

    def __init__(
        self,
        pretrained: str | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int | str = 16,
        num_loops: int | None = None,
        gates: str | float | Sequence[float] | None = None,
        readout: int | None = None,
        adapter: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        chat_template: str | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the model, unless it is loaded already. The class describes the arguments."""
        check_keywords(kwargs, inspect.signature(LoopedLM.__init__).parameters)
        state = PartialState(cpu=not torch.accelerator.is_available())
        if isinstance(pretrained, str):
            check_unused_by_name(tokenizer)
            source = find_source_of(pretrained, adapter, revision)
            source.check_run(num_loops, gates)
            device = _choose_device(device, state)
            options = {"dtype": dtype, "attn_implementation": attn_implementation, "device": device}
            pretrained = load(source, num_loops=num_loops, **options)
            tokenizer = source.load_tokenizer(chat_template)
        else:
            check_unused_by_loaded_model(
                adapter=adapter,
                revision=revision,
                dtype=None if dtype == "auto" else dtype,
                attn_implementation=attn_implementation,
                chat_template=chat_template,
                device=device,
            )
        self.looped = attach_looped_model(pretrained)
        _check_complete(pretrained)
        check_batch_size(batch_size)
        lm_eval_options = {"backend": "causal", "softmax_dtype": "float32", **kwargs}
        super().__init__(pretrained, tokenizer=tokenizer, batch_size=batch_size, **lm_eval_options)
        if num_loops is not None:
            check_num_loops(num_loops)
        self.given_num_loops = num_loops
        self.given_gates = gates
        self.readout = readout
        self.answers: AnswerCache | None = None
        self._context_lengths: dict[tuple[int, ...], int] = {}
        if self.gates and not is_enabled(pretrained):
            raise UserError("`gates` must not be set for a model without an adapter, or whose adapter is disabled.")
        self._check_readout()

    def __repr__(self) -> str:
        name = public_name(self.looped.config.name_or_path) or "a model"
        columns = self.columns
        columns.pop("loop", None)  # `gates` names it
        state = ", ".join(f"{column} {value}" for column, value in columns.items())
        return f"LoopedLM of {name}: {state}"

    @property
    def rank(self) -> int:
        """Index of this process."""
        return PartialState().process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return PartialState().num_processes

    @property
    def num_loops(self) -> int:
        """Recurrence depth K of the next evaluation."""
        if self.given_num_loops is not None:
            return self.given_num_loops
        return self.looped.num_loops

    @property
    def gates(self) -> list[float] | None:
        """Own gates [K] of the next evaluation. None: unit gates, or those of a block of `use_gates`."""
        gates = parse_gates(self.given_gates, self.num_loops)
        if gates is None and self.given_gates is not None and self.looped.gate_state.gates is not None:
            return [1.0] * self.num_loops  # own unit gates apply instead of those of a block
        return gates

    def _check_readout(self) -> None:
        if self.readout is not None and not 1 <= self.readout <= self.num_loops:
            raise UserError(f"`readout` must be a loop from 1 to {self.num_loops}, got {self.readout}.")

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of results that describe the depth, the gates and the readout."""
        gates = label_gates(self.model, self.num_loops, self.gates)
        columns = {"num_loops": self.num_loops, "gates": gates}
        if gates.startswith("loop "):
            columns["loop"] = int(gates.removeprefix("loop "))
        if self.readout is not None:
            columns["readout"] = self.readout
        return columns

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run the model at its depth and under its gates, with a cache of keys and values for generation only.

        The readout after loop t is the output of t loops. Inside of it, `num_loops` is that of the pass.
        """
        self._check_readout()
        depth = self.readout or self.num_loops
        gates, state = self.gates, self.looped.gate_state
        if gates is None:
            state.batch.check_depth(self.num_loops)
        else:
            gates = gates[:depth]
        config = self.looped.config
        use_cache = config.use_cache
        config.use_cache = False  # generation asks for a cache itself
        try:
            with use_depth(self.model, depth), cut_gates(state, depth), use_gates(self.model, gates):
                yield
        finally:
            config.use_cache = use_cache

    @contextmanager
    def keep_answers(self, folder: str | Path | None) -> Iterator[None]:
        """Read known answers in a folder inside the block, and keep new ones there. None: keep no answers."""
        if folder is None:
            yield
            return
        self.answers = AnswerCache(folder, answer_key(self), self.rank)
        self.set_cache_hook(self.answers)
        try:
            yield
        finally:
            self.set_cache_hook(CacheHook(None))
            self.answers.close()
            self.answers = None

    def _complete(self, kind: str, requests: list[Instance], compute: Callable[[list[Instance]], list]) -> list:
        """Return the answers to requests at the depth and under the gates, and compute only those that are not kept."""

        def run(missing: list[Instance]) -> list:
            with self._running():
                return compute(missing)

        # lm-eval lets the processes wait for one another in rolling log-likelihoods, so all of them compute or none.
        is_common = kind == "loglikelihood_rolling" and self.world_size > 1
        if self.answers is None or is_common:
            return run(requests)
        return self.answers.complete(kind, requests, run)

    def loglikelihood(self, requests, disable_tqdm=False):
        return self._complete(
            "loglikelihood", requests, lambda missing: super(LoopedLM, self).loglikelihood(missing, disable_tqdm)
        )

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return self._complete(
            "loglikelihood_rolling",
            requests,
            lambda missing: super(LoopedLM, self).loglikelihood_rolling(missing, disable_tqdm),
        )

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        """Compute log-likelihoods. A model that reads prompts gets the lengths of the contexts by `_model_call`.

        The lengths are found by the tokens of a row without its padding of zeros. Rows with the same tokens and other contexts
        run one after the other.
        """
        if not self.looped.reads_prompts:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        rounds: list[tuple[dict[tuple[int, ...], int], list[int]]] = []
        for index, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-(self.max_length + 1) : -1]
            row, length = _without_zeros(tokens), len(tokens) - len(continuation) + 1
            for lengths, indices in rounds:
                if lengths.setdefault(row, length) == length:
                    indices.append(index)
                    break
            else:
                rounds.append(({row: length}, [index]))
        answers = {}
        try:
            for lengths, indices in rounds:
                self._context_lengths = lengths
                part = [requests[index] for index in indices]
                found = super()._loglikelihood_tokens(part, disable_tqdm, override_bs)
                answers.update(zip(indices, found, strict=True))
        finally:
            self._context_lengths = {}
        return [answers[index] for index in range(len(requests))]

    def _model_call(self, inps, attn_mask=None, labels=None):
        if not self._context_lengths:
            return super()._model_call(inps, attn_mask, labels)
        width = inps.shape[1]  # also the length of the rows of ones with which lm-eval looks for a batch size
        lengths = [self._context_lengths.get(_without_zeros(row), width) for row in inps.tolist()]
        columns = torch.arange(width, device=inps.device)
        marks = self.looped.mark_prompts(columns < torch.tensor(lengths, device=inps.device)[:, None])
        add_marks = lambda module, args, kwargs: (args, {**kwargs, **marks})
        hook = self.model.register_forward_pre_hook(add_marks, with_kwargs=True)
        try:
            return super()._model_call(inps)
        finally:
            hook.remove()

    def generate_until(self, requests, disable_tqdm=False):
        place = f"K = {self.num_loops}, gates: {self.columns['gates']}"
        if disable_tqdm or self.rank != 0:
            place = None
        return self._complete("generate_until", requests, lambda missing: self._generate(missing, place))

    def _generate(self, requests: list[Instance], place: str | None) -> list[str]:
        """Return the texts of requests, of which each group with the same options runs together."""
        groups = Collator(requests, lambda _: 0, lambda request: request.args[1], group_by="gen_kwargs")
        answers = []
        for group in groups.get_batched(n=len(requests)):
            options = normalize_gen_kwargs(group[0].args[1], self.max_gen_toks)
            is_greedy = not options["do_sample"] and not set(options) - _GREEDY_FIELDS and self.think_end_token is None
            if is_greedy:
                answers += self._generate_greedy(group, options, place)
            else:
                answers += super().generate_until(group, disable_tqdm=place is None)
        return groups.get_original(answers)

    def _generate_greedy(self, requests: list[Instance], options: dict[str, Any], place: str | None) -> list[str]:
        max_new_tokens = options["max_gen_toks"]
        room = self.max_length - max_new_tokens
        if room < 1:
            raise UserError(f"`max_new_tokens` must be less than {self.max_length}, got {max_new_tokens}.")
        prompts = []
        for request in requests:
            ids, _ = self.tok_batch_encode([request.args[0]], left_truncate_len=room)  # [1, S]
            prompts.append(ids[0].tolist() or [self.prefix_token_id])
        batch_size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        progress: str | bool = False
        if place is not None:
            progress = f"{requests[0].task_name}, {place}"
        return generate_greedy(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens,
            batch_size,
            handle_stop_sequences(options["until"], eos=None),
            progress=progress,
            on_completion=lambda index, text: self.cache_hook.add_partial(
                "generate_until", requests[index].args, text
            ),
        )

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """Return the text of a chat. The beginning of an answer follows the generation prompt unchanged."""
        turns = list(chat_history)
        beginning = "" if add_generation_prompt else turns.pop()["content"]
        try:
            return super().apply_chat_template(turns) + beginning
        except TemplateError as error:  # also without a system turn, which lm-eval leaves out then
            raise rendering_error(turns, error) from None

    def all_gather(self, tensor):
        return gather(tensor) if self.world_size > 1 else tensor

    def barrier(self):
        PartialState().wait_for_everyone()


def _check_complete(model: nn.Module) -> None:
    """Raise UserError if this process has only a part of the weights, as under FSDP (`DTensor`) and DeepSpeed (`ds_id`)."""
    if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters()):
        raise UserError(
            "The model's weights must be complete in each process, but they are sharded. Leave `benchmarks` out of the "
            "training, and evaluate the saved adapter with `loopdropout evaluate`."
        )


def _choose_device(device: str | None, state: PartialState) -> str | torch.device:
    """Return the device of a model: the given one, if this process alone uses it and it exists, else the process's own.

    lm-eval asks for "cuda" by default, also on a machine without a GPU.
    """
    if device is None or state.num_processes > 1:
        return state.device
    exists = torch.device(device).type in ("cpu", state.device.type)
    return device if exists else state.device


def _without_zeros(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return tokens without the zeros at their end, with which lm-eval pads."""
    length = len(tokens)
    while length > 0 and tokens[length - 1] == 0:
        length -= 1
    return tuple(tokens[:length])
