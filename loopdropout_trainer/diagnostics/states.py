"""The states of the loops: how fast they settle and agree with the last, how alike they are, what the update does to them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from loopdropout_trainer.lora import use_gates
from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Row, by_loop, by_two_loops
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models.backbone import LoopedBackbone
from loopdropout_trainer.training.scores import Batch, over_batches, split_batch


MOST_TOKENS = 500
"""Most target tokens whose states are compared by CKA, spread over all batches of rows."""


class _OfStates(Diagnostic):
    """A function of the states at all n target tokens: `of_batch` gives arrays [n, ...], `summary` the rows of their means."""

    def measure(self, context: Context) -> list[Row]:
        of_batch = partial(self.of_batch, context)
        parts = over_batches(context.model, context.batches, of_batch)
        states = "state" if carries_states(context.model) else "readout"  # what takes their place
        return self.summary(states, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def carries_states(model: nn.Module) -> bool:
    """Return whether the model tells the states that it carries; of a described model only the readouts are known."""
    return isinstance(find_looped_model(model).base_model, LoopedBackbone)


def states_and_readouts(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states (or what takes their place) and the readouts after each loop at the n target tokens, [K, n, H]."""
    looped, inputs, labels = split_batch(model, batch)
    if carries_states(model):
        output = looped.base_model(**inputs, use_cache=False, output_readouts=True)
        groups = (output.loop_states, output.readouts)
    else:
        groups = (looped.loop_readouts(**inputs),) * 2
    return tuple(torch.stack([states[:, :-1][labels != -100] for states in group]) for group in groups)


def _by_token(values: torch.Tensor) -> np.ndarray:
    """Return numbers of loops and tokens, [K, n], as [n, K]."""
    return values.T.double().cpu().numpy()


class Settling(_OfStates):
    """How far each loop's state and readout are from the last one's: one pass with every loop adapted."""

    name = "settling"

    def of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return distances and divergences, [n, K] each."""
        states, readouts = states_and_readouts(context.model, batch)
        states = states.float()
        distances = (states - states[-1]).norm(dim=-1) / states[-1].norm(dim=-1)
        head = find_looped_model(context.model).get_output_embeddings()
        last = F.log_softmax(head(readouts[-1]).float(), dim=-1)  # [n, V]
        divergences = []
        for readout in readouts:  # one loop's logits at a time
            own = F.log_softmax(head(readout).float(), dim=-1)
            divergences.append((last.exp() * (last - own)).sum(dim=-1))
        return _by_token(distances), _by_token(torch.stack(divergences))

    def summary(self, states: str, distances: np.ndarray, divergences: np.ndarray) -> list[Row]:
        distances = by_loop(f"{states}_distance", distances.mean(axis=0))
        return distances + by_loop("readout_divergence", divergences.mean(axis=0), "nats")


def linear_cka(states: np.ndarray) -> np.ndarray:
    """Return the linear CKA [K, K] of K sets of states of the same n tokens, [K, n, H]; n must be at least 4.

        CKA(X, Y) = HSIC(X X', Y Y') / sqrt(HSIC(X X', X X') HSIC(Y Y', Y Y'))

    with the unbiased estimator of HSIC (Song et al. 2012, eq. 5): the biased one tends to 1 for states that are wider than
    there are tokens.
    """
    kernels = states.astype(np.float64) @ states.astype(np.float64).transpose(0, 2, 1)  # [K, n, n]
    n = kernels.shape[1]
    kernels[:, np.arange(n), np.arange(n)] = 0
    products = np.einsum("sij,tij->st", kernels, kernels)
    sums = kernels.sum(axis=(1, 2))  # [K]
    columns = kernels.sum(axis=2)  # [K, n]
    hsic = products + np.outer(sums, sums) / ((n - 1) * (n - 2)) - 2 / (n - 2) * columns @ columns.T
    sizes = np.sqrt(np.diag(hsic))
    return hsic / np.outer(sizes, sizes)


class Similarity(_OfStates):
    """How alike the states of the loops are: linear CKA of every pair of loops, every loop adapted."""

    name = "similarity"

    def of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray]:
        """Return the states [n, K, H] of at most a batch's share of target tokens, evenly spaced."""
        states, _ = states_and_readouts(context.model, batch)
        n = states.shape[1]
        most = max(1, MOST_TOKENS // len(context.batches))
        chosen = torch.linspace(0, n - 1, min(most, n)).round().long()
        return (states[:, chosen].transpose(0, 1).float().cpu().numpy(),)

    def summary(self, kind: str, states: np.ndarray) -> list[Row]:
        states = states[:MOST_TOKENS].transpose(1, 0, 2)
        return by_two_loops(f"{kind}_cka", linear_cka(states))


class Updates(_OfStates):
    """What the update does to the state in each loop: how much, and whether the loops pull the same way.

    With h_{t-1} from the adapted run, let F be loop t without its update and F' loop t with it. Its effect is
    u_t = F'(h_{t-1}) - F(h_{t-1}). It takes K + 1 passes: all loops adapted, and all but one; both runs share the state
    before the loop that is left out.
    """

    name = "updates"
    needs_adapter = True

    def of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return relative sizes [n, K] and cosines [n, K, K]."""
        with_update, _ = states_and_readouts(context.model, batch)  # [K, n, H]
        without = []
        for loop, one_hot in enumerate(torch.eye(context.num_loops)):
            with use_gates(context.model, 1 - one_hot):
                without.append(states_and_readouts(context.model, batch)[0][loop])
        without = torch.stack(without).float()
        effects = with_update.float() - without
        sizes = effects.norm(dim=-1) / without.norm(dim=-1)  # [K, n]
        directions = F.normalize(effects, dim=-1)
        cosines = torch.einsum("snh,tnh->nst", directions, directions)
        return _by_token(sizes), cosines.double().cpu().numpy()

    def summary(self, states: str, sizes: np.ndarray, cosines: np.ndarray) -> list[Row]:
        sizes = by_loop(f"{states}_update_size", sizes.mean(axis=0))
        return sizes + by_two_loops(f"{states}_update_cosine", cosines.mean(axis=0))


class Agreement(_OfStates):
    """Agreement of every loop's readout with the last one's: one pass with every loop adapted.

    With the distributions p_t and p_K of the next token, loop t keeps the most probable token of loop K, and it overlaps with
    it by 1 - TV(p_t, p_K), the sum over tokens of min(p_t, p_K). The two are the shares of drafted tokens that speculative
    decoding accepts, greedy and sampled (Leviathan et al. 2023), where loop t drafts what loop K checks.
    """

    name = "agreement"

    def of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return whether the most probable tokens are the same, and overlaps, [n, K] each."""
        _, readouts = states_and_readouts(context.model, batch)
        head = find_looped_model(context.model).get_output_embeddings()
        last = head(readouts[-1]).float().softmax(dim=-1)  # [n, V]
        same = []
        overlaps = []
        for readout in readouts:  # one loop's probabilities at a time
            own = head(readout).float().softmax(dim=-1)
            same.append(own.argmax(dim=-1) == last.argmax(dim=-1))
            overlaps.append(torch.minimum(own, last).sum(dim=-1))
        return _by_token(torch.stack(same)), _by_token(torch.stack(overlaps))

    def summary(self, kind: str, same: np.ndarray, overlaps: np.ndarray) -> list[Row]:
        same_tokens = by_loop("same_tokens", 100 * same.mean(axis=0), "%")
        return same_tokens + by_loop("overlap", 100 * overlaps.mean(axis=0), "%")
