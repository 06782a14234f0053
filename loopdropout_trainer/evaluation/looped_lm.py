"""Looped models for lm-eval: `--model looped --model_args pretrained=...,adapter=...,num_loops=6,gates=1-0-0-0,readout=2`.

All three kinds of request, over all processes. Log-likelihoods are lm-eval's `hf`, whose class this one extends, under the
gates, to the readout, and always in float32; greedy texts come from this package's own decoding.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from accelerate.utils import gather
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs
from torch import nn
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.benchmark import AnswerLog
from loopdropout_trainer.evaluation.subject import Subject, load_model
from loopdropout_trainer.generation.generation import generate_greedy
from loopdropout_trainer.processes import all_processes
from loopdropout_trainer.saving.files import sha256_of_json
from loopdropout_trainer.settings.arguments import ModelArguments


# It warns of a model that is loaded already, as it is meant here.
logging.getLogger("lm_eval.models.huggingface").addFilter(lambda record: "already-initialized" not in str(record.msg))

GREEDY_FIELDS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}
"""What a request for greedy text may say; anything else goes to transformers' `generate`."""


@register_model("looped")
class LoopedLM(HFLM):
    """A looped model, with or without an adapter, for lm-eval.

    Args:
        pretrained: Hub name or folder of a looped model, `tiny-ouro`, a loaded one (then with its `tokenizer`), or a subject.
        adapter: folder or Hub name of an adapter of any kind of this package.
        gates: [K] multipliers of the adapter's update, such as `1-0-0-0`; default: ones.
        readout: loop t, 1-based, whose readout gives the logits; default: the last one.
        decoding: how greedy text is decoded; see `generate_greedy`.
        tokenizer: of a loaded model.
        device: default: this process's accelerator, if there is one.
        kwargs: `num_loops`, `dtype`, `revision`, `attn_implementation` and `chat_template` as in a recipe; others of
            lm-eval's `hf`, such as `batch_size`, `max_length`, `add_bos_token`, `prefix_token_id`, `think_end_token`.

    Raises:
        ValueError: if model or adapter cannot be loaded, or depth, gates or readout do not fit.
    """

    def __init__(
        self,
        pretrained: str | nn.Module | Subject,
        adapter: str | None = None,
        gates: str | float | Sequence[float] | None = None,
        readout: int | None = None,
        decoding: str = "eager",
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.state = all_processes()
        if isinstance(pretrained, str):
            fields = ("num_loops", "dtype", "attn_implementation", "chat_template")
            fields = {name: kwargs.pop(name) for name in fields if name in kwargs}
            with self.state.main_process_first():
                arguments = ModelArguments(pretrained, model_revision=kwargs.pop("revision", "main"), **fields)
                pretrained, tokenizer = load_model(arguments, adapter)
            own = self.state.device
            asked = torch.device(device or "cpu")  # lm-eval asks for a GPU where there is none
            usable = device is not None and self.state.num_processes == 1 and asked.type in ("cpu", own.type)
            pretrained.to(asked if usable else own)
        if not isinstance(pretrained, Subject):
            pretrained = Subject(pretrained, tokenizer, decoding=decoding, gates=gates, readout=readout)
        self.subject = pretrained
        options = {"softmax_dtype": "float32", **kwargs}
        super().__init__(self.subject.model, tokenizer=self.subject.tokenizer, **options)
        self._rank = self.state.process_index
        self._world_size = self.state.num_processes

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather(tensor) if self.world_size > 1 else tensor

    def barrier(self) -> None:
        self.state.wait_for_everyone()

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the logits [B, S, V] of rows [B, S]; padding comes after a row's tokens, which do not see it."""
        with self.subject.running():
            return self.subject.looped(input_ids=inps, use_cache=False).logits

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        # In groups that ask for the same.
        as_given = lambda request: 0
        options_of = lambda request: request.args[1]
        groups = Collator(requests, as_given, options_of, group_by="gen_kwargs")
        answers = []
        for group in groups.get_batched(n=len(requests)):
            options = normalize_gen_kwargs(group[0].args[1], self.max_gen_toks)
            by_generate = options["do_sample"] or set(options) - GREEDY_FIELDS or self.think_end_token is not None
            with self.subject.running():
                if by_generate:
                    answers += super().generate_until(group, disable_tqdm=disable_tqdm)
                else:
                    answers += self._greedy(group, options, disable_tqdm)
        return groups.get_original(answers)

    def _greedy(self, requests: list[Instance], options: dict[str, Any], disable_tqdm: bool) -> list[str]:
        """Continue the contexts of requests that ask for the same."""
        budget = options["max_gen_toks"]
        room = self.max_length - budget
        if room < 1:
            raise UserError(f"`max_gen_toks` must be less than `max_length`, {self.max_length}; got {budget}.")
        contexts = [request.args[0] for request in requests]
        # Tokenized as `hf` does before it generates: a text that brings its first special token gets no second one.
        prompts = [self.tok_batch_encode([text], left_truncate_len=room)[0][0].tolist() for text in contexts]
        return generate_greedy(
            self.model,
            self.tokenizer,
            [prompt or [self.prefix_token_id] for prompt in prompts],
            budget,
            self._detect_batch_size() if self.batch_size == "auto" else self.batch_size,
            handle_stop_sequences(options["until"], eos=None),
            progress=not disable_tqdm and self.rank == 0,
            decoding=self.subject.decoding,
            keep=lambda index, text: self.cache_hook.add_partial("generate_until", requests[index].args, text),
        )


class LoggedLM(LoopedLM):
    """The backend of this package's own evaluation: each answer is logged, and the processes share the requests.

    To lm-eval it is one process alone: it gets every request, and every process returns the answers to all.

    Args:
        subject: the model.
        log: of the answers.
        in_turns: whether the requests are written by a chat template, which writes its special tokens itself.
        progress: show bars in the first process.
    """

    def __init__(self, subject: Subject, log: AnswerLog, in_turns: bool, progress: bool = True) -> None:
        super().__init__(subject, batch_size=subject.batch_size, add_bos_token=False if in_turns else None)
        self.log = log
        self.progress = progress and self.state.is_main_process
        self._rank = 0
        self._world_size = 1
        self.cache_hook = self  # lm-eval's models tell it every answer as soon as it is there

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._answers("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answers("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if self.subject.max_new_tokens is not None:
            for request in requests:
                request.arguments = (request.args[0], {**request.args[1], "max_gen_toks": self.subject.max_new_tokens})
        return self._answers("generate_until", requests)

    def _answers(self, kind: str, requests: list[Instance]) -> list[Any]:
        """Return the answer to each request; those in the log are not computed again."""
        # Equal requests have answers of their own, since they may be sampled: the key of each ends with its number.
        asked = Counter()
        keys = []
        for request in requests:
            hashed = sha256_of_json([kind, *request.args])
            keys.append(f"{hashed} {asked[hashed]}")
            asked[hashed] += 1
        by_key = dict(zip(keys, requests, strict=True))
        missing = {key: request for key, request in by_key.items() if key not in self.log.answers}
        # Shared out by context, since the choices of one question are computed together.
        contexts = list(dict.fromkeys(request.args[0] for request in missing.values()))
        mine = set(contexts[self.state.process_index :: self.state.num_processes])
        share = {key: request for key, request in missing.items() if request.args[0] in mine}
        if share:
            getattr(super(), kind)(list(share.values()), disable_tqdm=not self.progress)  # it calls `add_partial`
        self.log.exchange(share)
        return [self.log.answers[key] for key in keys]

    def add_partial(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        """Log an answer under the first key of its request that has none yet."""
        if kind != "generate_until" and not math.isfinite(answer[0] if kind == "loglikelihood" else answer):
            raise UserError("A log-likelihood is not a finite number: the model's outputs hold NaN or infinity.")
        hashed = sha256_of_json([kind, *arguments])
        keys = (f"{hashed} {number}" for number in count())
        self.log.keep([(next(key for key in keys if key not in self.log.answers), answer)])
