"""Looped models for lm-eval: `--model looped --model_args pretrained=...,adapter=...,num_loops=6,gates=1-0-0-0,readout=2`.

All three kinds of request, over all processes. Log-likelihoods are made of the states at the scored tokens alone, in
float32, so that the prompt's logits are never there; greedy texts come from this package's own decoding. At unit gates and
the model's own depth the numbers are those of lm-eval's `hf`, whose class this one extends.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import gather
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.evaluation.loading import load_model, quiet
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.evaluation.subject import Subject, end_of_turn
from loopdropout_trainer.generation.generation import generate_batches
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.settings.arguments import ModelArguments


logger = logging.getLogger(__name__)

HEAD_ROWS = 1024
"""Most scored tokens whose logits over the vocabulary are there at a time."""

GREEDY_FIELDS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}
"""What a request for greedy text may say; anything else goes to transformers' `generate`."""


@register_model("looped")
class LoopedLM(HFLM):
    """A looped model, with or without an adapter, for lm-eval.

    Args:
        pretrained: Hub name or folder of a looped model, `tiny-ouro`, or a loaded one (then with its `tokenizer`).
        adapter: folder or Hub name of an adapter of any kind of this package.
        num_loops: recurrence depth K; default: the model's own.
        gates: [K] multipliers of the adapter's update, such as `1-0-0-0`; default: ones.
        readout: loop t, 1-based, whose readout gives the logits; default: the last one.
        dtype, revision, attn_implementation, chat_template: as in a recipe.
        decoding: how greedy text is decoded; see `generate_greedy`.
        tokenizer: of a loaded model.
        device: default: this process's accelerator, if there is one.
        batch_size: rows that one process computes together; `auto` tries what fits, up to `max_batch_size`.
        kwargs: of lm-eval's `hf`, such as `max_length`, `add_bos_token`, `prefix_token_id`, `think_end_token`.

    Raises:
        RecipeError, ValueError: if model or adapter cannot be loaded, or depth, gates or readout do not fit.
    """

    def __init__(
        self,
        pretrained: str | nn.Module,
        adapter: str | None = None,
        num_loops: int | None = None,
        gates: str | float | Sequence[float] | None = None,
        readout: int | None = None,
        dtype: str = "bfloat16",
        revision: str = "main",
        attn_implementation: str = "sdpa",
        chat_template: str | None = None,
        decoding: str = "eager",
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = 64,
        **kwargs: Any,
    ) -> None:
        state = all_processes(timeout=timedelta(days=7))  # the first process may wait long for the last one
        self.described = {"pretrained": pretrained, "adapter": adapter, "num_loops": num_loops}
        if isinstance(pretrained, str):
            arguments = ModelArguments(
                pretrained,
                model_revision=revision,
                num_loops=num_loops,
                dtype=dtype,
                attn_implementation=attn_implementation,
                chat_template=chat_template,
            )
            with state.main_process_first():
                pretrained, tokenizer = load_model(arguments, adapter)
            pretrained.to(_device(device, state))
        self.subject = Subject(pretrained, tokenizer, decoding=decoding, gates=gates, readout=readout)
        self.described.update(num_loops=self.subject.num_loops, gates=self.subject.gates, readout=readout)
        with quiet(
            "lm_eval.models.huggingface"
        ):  # it warns of a model that is loaded already, which is how it is meant
            super().__init__(
                pretrained, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=max_batch_size or 64, **kwargs
            )
        self.looped = find_looped_model(pretrained)
        self.state = state
        self._rank, self._world_size = state.process_index, state.num_processes
        self.turn_ends: list[str] = []  # what ends a turn, once the chat template is in use

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather(tensor) if self.world_size > 1 else tensor

    def barrier(self) -> None:
        self.state.wait_for_everyone()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self.turn_ends:
            # Some models' files do not name it as an end token (Ouro's do not), and their answers would run on.
            self.turn_ends = [token for token in (end_of_turn(self.tokenizer),) if token is not None]
        return super().apply_chat_template(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.looped.dtype),
            **{key: value for key, value in self.described.items() if not isinstance(value, nn.Module)},
        }

    # Log-likelihoods

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood in nats of each continuation, and whether it is the greedy one.

        Args:
            requests: texts, if their answer may be cached, and tokens of context and continuation, both not empty.
        """
        rows: dict[tuple[int, ...], list[int]] = defaultdict(
            list
        )  # what the model reads -> the requests it is read for
        for index, (_, context, continuation) in enumerate(requests):
            if not context or not continuation or len(continuation) > self.max_length:
                raise ValueError(
                    f"A continuation must have 1 to {self.max_length} tokens (`max_length`) after a context of one or more; "
                    f"got {len(continuation)} after {len(context)}."
                )
            rows[tuple((context + continuation)[-(self.max_length + 1) :][:-1])].append(index)
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if cut:
            logger.warning(
                f"{cut} texts are longer than {self.max_length} tokens (`max_length`) and lost their beginning."
            )
        order = sorted(rows, key=lambda row: (-len(row), row))  # what fills memory comes first
        answers: list[Any] = [None] * len(requests)
        size = override_bs or self._rows_at_a_time([(None, [*order[0]], [0])] if order else [])
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Log-likelihoods")
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            wanted = [(place, index) for place, row in enumerate(batch) for index in rows[row]]
            scores = self._score(batch, [(place, requests[index][2]) for place, index in wanted])
            for (_, index), answer in zip(wanted, scores, strict=True):
                answers[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
            bar.update(len(wanted))
        bar.close()
        return answers

    @torch.no_grad()
    def _score(self, rows: list[tuple[int, ...]], wanted: list[tuple[int, list[int]]]) -> list[tuple[float, bool]]:
        """Score continuations of rows: (place of the row, tokens that follow on its last ones)."""
        width = max(map(len, rows))
        # Padding comes after the row's tokens, which do not see it.
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)  # [B, S]
        with self.subject.running():
            states = self.looped.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [B, S, H]
        places = [
            place * width + len(rows[place]) - len(tokens) + i for place, tokens in wanted for i in range(len(tokens))
        ]
        # A state serves every token that is scored at it: the choices of one question, for example.
        states, at = states.flatten(0, 1), torch.tensor(places, device=self.device)
        scored, at = at.unique(return_inverse=True)  # [P], [Q]
        targets = torch.tensor([token for _, tokens in wanted for token in tokens], device=self.device)  # [Q]
        values, greedy = torch.empty(len(at), device=self.device), torch.empty_like(at, dtype=torch.bool)
        head = self.looped.get_output_embeddings()
        for start in range(0, len(scored), HEAD_ROWS):
            part = scored[start : start + HEAD_ROWS]
            logits = head(states[part]).float()  # [p, V]
            here = (at >= start) & (at < start + len(part))
            values[here] = logits.log_softmax(dim=-1)[at[here] - start, targets[here]]
            greedy[here] = logits.argmax(dim=-1)[at[here] - start] == targets[here]
        if not bool(values.isfinite().all()):
            raise ValueError("A log-likelihood is not a finite number: the model's outputs hold NaN or infinity.")
        lengths = [len(tokens) for _, tokens in wanted]
        sums, alike = values.double().cpu().split(lengths), greedy.cpu().split(lengths)
        return [(float(one.sum()), bool(same.all())) for one, same in zip(sums, alike, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = []
        for request in requests:
            pairs = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([(None, *utils.make_disjoint_window(pair)) for pair in pairs])
        longest = max((window for text in windows for window in text), key=lambda window: len(window[2]), default=None)
        size = self._rows_at_a_time([longest] if longest else [])
        answers: list[float] = []
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Rolling log-likelihoods")
        while len(answers) < len(requests):
            texts: list[list] = []  # as many complete ones as fill a batch
            while len(answers) + len(texts) < len(requests) and sum(map(len, texts)) < size:
                texts.append(windows[len(answers) + len(texts)])
            scores = iter(self._loglikelihood_tokens([each for text in texts for each in text], True, size))
            for text in texts:
                answer = sum(next(scores)[0] for _ in text)
                self.cache_hook.add_partial("loglikelihood_rolling", requests[len(answers)].args, answer)
                answers.append(answer)
                bar.update()
        bar.close()
        return answers

    # Texts

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        answers = [""] * len(requests)
        for indices in groups.values():
            group = [requests[index] for index in indices]
            options = normalize_gen_kwargs(group[0].args[1], self.max_gen_toks)
            if options["do_sample"] or set(options) - GREEDY_FIELDS or self.think_end_token is not None:
                with self.subject.running():
                    texts = super().generate_until(group, disable_tqdm=disable_tqdm)
            else:
                texts = self._greedy(group, options, disable_tqdm)
            for index, text in zip(indices, texts, strict=True):
                answers[index] = text
        return answers

    def _greedy(self, requests: list[Instance], options: dict[str, Any], disable_tqdm: bool) -> list[str]:
        """Continue the contexts of requests that ask for the same."""
        room = self.max_length - options["max_gen_toks"]
        if room < 1:
            raise ValueError(
                f"`max_gen_toks` must be less than the model's length of {self.max_length} tokens (`max_length`); got "
                f"{options['max_gen_toks']}."
            )
        prompts = [self._encode_prompt(request.args[0])[-room:] for request in requests]
        longest = max(prompts, key=len)
        answers = [""] * len(requests)
        with self.subject.running():
            for batch in generate_batches(
                self.model,
                self.tokenizer,
                prompts,
                options["max_gen_toks"],
                self._rows_at_a_time([(None, longest, [0] * options["max_gen_toks"])]),
                handle_stop_sequences(options["until"], eos=None) + self.turn_ends,
                progress=not disable_tqdm and self.rank == 0,
                decoding=self.subject.decoding,
            ):
                for index, text in batch:
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return answers

    def _encode_prompt(self, text: str) -> list[int]:
        """Tokenize as `hf` does before it generates; a text that brings its first special token gets no second one."""
        special = self.add_bos_token
        if has_bos_prefix(text, self.tokenizer.bos_token):
            special = False
        ids = self.tokenizer.encode(text, **({} if special is None else {"add_special_tokens": special}))
        return ids or [self.prefix_token_id]

    def _rows_at_a_time(self, longest: list[tuple[None, list[int], list[int]]]) -> int:
        """Return the batch size; for `auto` the one that fits the longest request."""
        if self.batch_size != "auto":
            return self.batch_size
        size = self._detect_batch_size(longest) if longest else 1
        self.batch_sizes[len(self.batch_sizes)] = size
        return size


def _device(wanted: str | None, state: Any) -> torch.device:
    """Return the device asked for, if this machine has it and no other process could want it; else the process's own."""
    if wanted is None or state.num_processes > 1:
        return state.device
    device = torch.device(wanted)
    there = device.type == "cpu" or (torch.accelerator.is_available() and state.device.type == device.type)
    return device if there else state.device
