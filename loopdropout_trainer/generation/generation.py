"""Generation with a cache over all loops: greedily, the texts that transformers' `generate` gives, sooner; or sampled.

The gates are those in force: unit gates, or what `use_gates` applies around the call. A completion does not depend on the
rows beside it. (In bfloat16 two nearly equal logits may change places with the batch's shape and with the form of decoding.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from loopdropout_trainer.adapters import PreparedProjections
from loopdropout_trainer.generation.decoding import GreedyDecoder, SamplingDecoder, why_unsupported
from loopdropout_trainer.generation.sampling import Sampler
from loopdropout_trainer.looped import find_looped_model


logger = logging.get_logger(__name__)


def generate_greedy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool = True,
    decoding: str = "eager",
) -> list[str]:
    """Complete each prompt with the most probable tokens, at the depth `model.config.num_loops` and under the gates in force.

    Args:
        model: looped causal language model, with or without an adapter. It is put back into training if it was in it.
        tokenizer: of the model; it is not changed, whatever its padding side, with or without a padding token.
        prompts: texts, tokenized as the tokenizer does by default, as in training; or token ids.
        max_new_tokens: most tokens of a completion.
        batch_size: rows that are generated together.
        stop_strings: a completion ends before the earliest of them, and at an end token of the tokenizer or the model.
        progress: show a bar.
        decoding: `eager` (see `GreedyDecoder`), `compiled` (the same with compiled steps), or `generate` (transformers'
            own, which takes any model). A model that does not support the first two gets `generate`, and a line in the log
            says why.

    Returns:
        The completions without prompts and special tokens, in the order of `prompts`.

    Raises:
        ValueError: if a prompt has no tokens, for another `decoding`, or under gates that differ between examples.
    """
    completions = [""] * len(prompts)
    batches = generate_batches(model, tokenizer, prompts, max_new_tokens, batch_size, stop_strings, progress, decoding)
    for batch in batches:
        for index, completion in batch:
            completions[index] = completion
    return completions


def generate_batches(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 16,
    stop_strings: Sequence[str] = (),
    progress: bool = True,
    decoding: str = "eager",
) -> Iterator[list[tuple[int, str]]]:
    """Do the same as `generate_greedy`; yield (index of the prompt, completion) pairs as they come, longest prompts first.

    The gates must stay in force until the last pair has come.
    """
    if decoding not in DECODINGS:
        raise ValueError(f"`decoding` must be one of {', '.join(DECODINGS)}; got {decoding!r}.")
    token_ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    for index, ids in enumerate(token_ids):
        if not ids:
            raise ValueError(f"Prompt {index} has no tokens; there is nothing to continue.")
    order = sorted(range(len(prompts)), key=lambda index: -len(token_ids[index]))  # what fills memory comes first
    looped = find_looped_model(model)
    ends = _Ends(looped, tokenizer, tuple(stop_strings))
    form = _choose(decoding, looped)
    # A compiled step reads the weights where they are, and joins the products by itself.
    prepared = nullcontext if form == "compiled" else PreparedProjections(looped).in_use
    decoder = DECODINGS[form](looped, [token_ids[index] for index in order], max_new_tokens, batch_size, ends)
    with tqdm(total=len(prompts), unit=" prompts", disable=not progress) as bar:
        while True:
            with _inference(model, looped), prepared():  # not while the caller has the completions
                finished = decoder.advance()
            if not finished:
                return
            yield [(order[place], ends.text(tokens)) for place, tokens in finished]
            bar.update(len(finished))


def sample_completions(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    end_ids: Sequence[int],
    num_slots: int,
    compiled: bool = False,
) -> list[list[int]]:
    """Sample a completion of each prompt by continuous batching, under the gates in force.

    Args:
        model: looped causal language model, with or without an adapter, that continuous batching supports (see
            `decoding.why_unsupported`). It is put back into training if it was in it.
        prompts: token ids, none of them empty.
        sampler: draws the tokens; its row i is prompt i.
        max_new_tokens: most tokens of a completion.
        end_ids: tokens that end a completion, and are its last one.
        num_slots: rows that are decoded together; no completion depends on it, up to rounding.
        compiled: run the steps compiled.

    Returns:
        The completions' token ids, in the order of `prompts`.
    """
    looped = find_looped_model(model)
    ends = frozenset(end_ids)
    decoder = SamplingDecoder(
        looped,
        [list(prompt) for prompt in prompts],
        max_new_tokens,
        num_slots,
        lambda rows: [tokens[-1] in ends for tokens in rows],
        compiled,
        sampler=sampler,
    )
    prepared = nullcontext if compiled else PreparedProjections(looped).in_use
    completions: list[list[int]] = [[] for _ in prompts]
    with _inference(model, looped), prepared():
        while finished := decoder.advance():
            for index, tokens in finished:
                completions[index] = tokens
    return completions


def cut_before(text: str, stop_strings: Iterable[str]) -> str:
    """Return `text` up to the earliest occurrence of any of `stop_strings`."""
    return text[: min((text.find(stop) for stop in stop_strings if stop in text), default=len(text))]


def _choose(decoding: str, looped: PreTrainedModel) -> str:
    """Return the form of decoding that is used, and log it."""
    chosen = decoding
    reason = None if chosen == "generate" else why_unsupported(looped)
    if reason is not None:
        chosen = "generate"
    logger.info(f"Decoding: {chosen}{f', because {reason}' if reason else ''} (`decoding`).")
    return chosen


class _Ends:
    """Where completions end: at an end token, or before a stop string."""

    def __init__(
        self, looped: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...]
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.end_ids = _end_ids(looped, tokenizer, stop_strings)
        # Each token holds a byte or more of the text.
        self.window = max((len(stop.encode()) for stop in stop_strings), default=0) + 4

    def __call__(self, completions: list[list[int]]) -> list[bool]:
        """Tell which of these completions, not empty and not ended before their last token, have ended."""
        ended = [tokens[-1] in self.end_ids for tokens in completions]
        if self.stop_strings:
            tails = self._decode([tokens[-self.window :] for tokens in completions])
            ended = [
                end or any(stop in tail for stop in self.stop_strings) for end, tail in zip(ended, tails, strict=True)
            ]
        return ended

    def text(self, completion: list[int]) -> str:
        """Return the completion's text."""
        length = next((place for place, token in enumerate(completion) if token in self.end_ids), len(completion))
        return cut_before(self._decode([completion[:length]])[0], self.stop_strings)

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...]) -> list[int]:
    """Return the tokens that end a completion; a stop string that is a special token never shows in decoded text."""
    of_model = model.generation_config.eos_token_id
    added = tokenizer.get_added_vocab()
    ids = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    ids += [added[stop] for stop in stop_strings if stop in added]
    return sorted({token for token in ids if token is not None})


class _Generate:
    """transformers' own greedy generation, in left-padded batches: the arguments and the results of `GreedyDecoder`."""

    def __init__(
        self, looped: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, batch_size: int, ends: _Ends
    ) -> None:
        self.looped = looped
        self.batches = iter(
            [(start, prompts[start : start + batch_size]) for start in range(0, len(prompts), batch_size)]
        )
        self.max_new_tokens = max_new_tokens
        self.ends = ends

    @torch.no_grad()
    def advance(self) -> list[tuple[int, list[int]]]:
        start, batch = next(self.batches, (0, []))
        if not batch:
            return []
        pad_id = self.ends.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = next(iter(self.ends.end_ids), 0)
        length = max(map(len, batch))
        device = self.looped.device
        ids = torch.tensor([[pad_id] * (length - len(row)) + row for row in batch], device=device)  # [B, S]
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in batch], device=device)
        rows = self.looped.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=pad_id,
                eos_token_id=self.ends.end_ids or None,
            ),
            stopping_criteria=StoppingCriteriaList([_Stop(self.ends, length)] if self.ends.stop_strings else []),
        )
        return list(enumerate(rows[:, length:].tolist(), start))


class _Stop(StoppingCriteria):
    """Ends a row of `generate` where `ends` does."""

    def __init__(self, ends: _Ends, prompt_length: int) -> None:
        self.ends = ends
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        return torch.tensor(self.ends(input_ids[:, self.prompt_length :].tolist()), device=input_ids.device)


DECODINGS = {
    "eager": GreedyDecoder,
    "compiled": partial(GreedyDecoder, compiled=True),
    "generate": _Generate,
}


@contextmanager
def _inference(model: torch.nn.Module, looped: PreTrainedModel) -> Iterator[None]:
    """Generate without dropout, and without what a checkpoint's generation config adds to greedy."""
    gates = looped.loop_state.gates
    if gates is not None and gates.shape[1] > 1:
        raise ValueError(
            f"Generation applies the same gates to all prompts, [K] or [K, 1]; gates for {gates.shape[1]} examples are in "
            "force."
        )
    was_training, generation_config = model.training, looped.generation_config
    model.eval()
    looped.generation_config = GenerationConfig()  # `generate` fills unset fields from it: penalties, minimum lengths
    try:
        yield
    finally:
        looped.generation_config = generation_config
        model.train(was_training)
