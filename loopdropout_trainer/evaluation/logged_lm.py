"""The lm-eval backend of this package's own evaluation: each answer is logged, and the processes share the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from accelerate.utils import gather_object
from lm_eval.api.instance import Instance

from loopdropout_trainer.evaluation.answer_log import AnswerLog
from loopdropout_trainer.evaluation.looped_lm import LoopedLM
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json


def request_key(kind: str, arguments: Iterable[Any], occurrence: int = 0) -> str:
    """Return the hash of a request: its kind, its texts and options.

    Args:
        occurrence: number of equal requests before this one, where each gets an answer of its own (sampling).
    """
    return sha256_of_json([kind, *arguments, *([occurrence] if occurrence else [])])


class LoggedLM(LoopedLM):
    """To lm-eval one process alone: it gets every request, and every process returns the answers to all.

    Args:
        subject: the model.
        log: of the answers, by `request_key`.
        in_turns: whether the requests are written by a chat template.
        progress: show bars in the first process.
    """

    def __init__(self, subject: Subject, log: AnswerLog, in_turns: bool, progress: bool = True) -> None:
        super().__init__(
            subject.model,
            tokenizer=subject.tokenizer,
            gates=subject.gates,
            readout=subject.readout,
            decoding=subject.decoding,
            batch_size=subject.batch_size,
            add_bos_token=False if in_turns else None,  # a chat template writes its special tokens itself
        )
        self.subject = subject
        self.log = log
        self.progress = progress and self.state.is_main_process
        self._rank, self._world_size = 0, 1
        self.cache_hook = _LogHook(log)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers = self._answers_to("loglikelihood", requests, super().loglikelihood)
        return [(log_likelihood, greedy) for log_likelihood, greedy in answers]  # lists, if they come from the log

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answers_to("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if self.subject.max_new_tokens is not None:
            requests = [copy(request) for request in requests]
            for request in requests:
                context, options = request.args
                request.arguments = (context, {**options, "max_gen_toks": self.subject.max_new_tokens})
        return self._answers_to("generate_until", requests, super().generate_until)

    def _answers_to(self, kind: str, requests: list[Instance], compute: Callable[..., list[Any]]) -> list[Any]:
        """Return the answer to each request; equal requests are computed once, unless they are sampled."""
        keys, occurrences, found = [], {}, self.log.found
        for request in requests:
            key = request_key(kind, request.args)
            if _is_sampled(kind, request.args):
                occurrences[key] = occurrences.get(key, -1) + 1
                key = request_key(kind, request.args, occurrences[key])
            keys.append(key)
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}
        # Shared out by context, since the choices of one question are computed together.
        contexts = list(dict.fromkeys(request.args[0] for request in missing.values()))
        mine = set(contexts[self.state.process_index :: self.state.num_processes])
        share = {key: request for key, request in missing.items() if request.args[0] in mine}
        answers = compute(list(share.values()), disable_tqdm=not self.progress) if share else []
        # What `_LogHook` has not kept already: sampled texts.
        self.log.keep((key, answer) for key, answer in zip(share, answers, strict=True) if key not in found)
        for part in gather_object([{key: found[key] for key in share}]):
            found.update(part)
        return [found[key] for key in keys]


class _LogHook:
    """Logs every answer as soon as it is there; takes the place of lm-eval's cache hook."""

    def __init__(self, log: AnswerLog) -> None:
        self.log = log

    def add_partial(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        arguments = tuple(arguments)
        if not _is_sampled(kind, arguments):  # which of the equal requests this is, is not known here
            self.log.keep([(request_key(kind, arguments), answer)])


def _is_sampled(kind: str, arguments: Any) -> bool:
    return kind == "generate_until" and bool(arguments[1].get("do_sample"))
