"""The lm-eval backend of this package's own evaluation: answers are kept one by one, and shared out over the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from accelerate.utils import gather_object
from lm_eval.api.instance import Instance

from loopdropout_trainer.evaluation.answer_log import Answers
from loopdropout_trainer.evaluation.looped_lm import LoopedLM
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.saving.files import sha256_of_json


def request_key(kind: str, arguments: Iterable[Any], occurrence: int = 0) -> str:
    """Return the hash of what is asked for: the kind of request, its texts and options.

    Args:
        occurrence: number of equal requests before this one, where each gets an answer of its own (sampling).
    """
    return sha256_of_json([kind, *arguments, *([occurrence] if occurrence else [])])


class LoggedLM(LoopedLM):
    """To lm-eval one process alone: it asks for everything, and every process returns all answers.

    Args:
        subject: the model.
        answers: those that are known, by `request_key`; new ones are kept there.
        in_turns: whether the requests are written by a chat template.
        progress: show bars in the first process.
    """

    def __init__(self, subject: Subject, answers: Answers, in_turns: bool, progress: bool = True) -> None:
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
        self.answers = answers
        self.progress = progress and self.state.is_main_process
        self._rank, self._world_size = 0, 1
        self.cache_hook = _Keep(answers)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers = self._answer("loglikelihood", requests, super().loglikelihood)
        return [(log_likelihood, greedy) for log_likelihood, greedy in answers]  # lists, if they come from the log

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answer("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        requests = [self._with_own_budget(request) for request in requests]
        return self._answer("generate_until", requests, super().generate_until)

    def _with_own_budget(self, request: Instance) -> Instance:
        if self.subject.max_new_tokens is None:
            return request
        context, options = request.args
        request = copy(request)
        request.arguments = (context, {**options, "max_gen_toks": self.subject.max_new_tokens})
        return request

    def _answer(self, kind: str, requests: list[Instance], compute: Callable[..., list[Any]]) -> list[Any]:
        """Return an answer for each request; what is asked for twice is computed once, unless it is sampled."""
        keys, occurrences = [], {}
        for request in requests:
            key = request_key(kind, request.args)
            if _is_sampled(kind, request.args):
                occurrences[key] = occurrences.get(key, -1) + 1
                key = request_key(kind, request.args, occurrences[key])
            keys.append(key)
        still_open = {
            key: request for key, request in zip(keys, requests, strict=True) if key not in self.answers.found
        }
        # By context, since the choices of one question are computed together.
        contexts = list(dict.fromkeys(request.args[0] for request in still_open.values()))
        mine = set(contexts[self.state.process_index :: self.state.num_processes])
        share = {key: request for key, request in still_open.items() if request.args[0] in mine}
        known = set(self.answers.found)
        new = compute(list(share.values()), disable_tqdm=not self.progress) if share else []
        new = dict(zip(share, new, strict=True))
        self.answers.keep((key, answer) for key, answer in new.items() if key not in self.answers.found)
        for part in gather_object([new]):
            self.answers.found.update({key: answer for key, answer in part.items() if key not in known})
        return [self.answers.found[key] for key in keys]


class _Keep:
    """Keeps every answer as soon as it is there; takes the place of lm-eval's cache hook."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def add_partial(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        arguments = tuple(arguments)
        if not _is_sampled(kind, arguments):  # which of the equal requests this is, is not known here
            self.answers.keep([(request_key(kind, arguments), answer)])


def _is_sampled(kind: str, arguments: Any) -> bool:
    return kind == "generate_until" and bool(arguments[1].get("do_sample"))
