"""Depth in training: how many loops a step runs, and which loops' readouts its loss scores."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    Recording,
    assert_same_weights,
    randomise,
    tiny_hrm,
    tiny_huginn,
    trained_parameters,
)
from test_layouts import forked, launched, layouts
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.gates.rule import RULES
from loopdropout_trainer.looped import Optimisations, find_looped_model
from loopdropout_trainer.training.depth import (
    DEPTH_SAMPLERS,
    LOOP_LOSSES,
    LogNormalPoisson,
    UniformDepth,
    WeightedDepth,
    step_uniforms,
)


class Watch(Recording, LoopDropoutSFTTrainer):
    """Starts from an adapter that does something."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        randomise(self.model, 0.1, seed=1)

    @property
    def depths(self):
        """Loops that ran in each micro-batch, by step."""
        return [(each.step, each.depth) for each in self.seen if each.gradients is not None]


@pytest.fixture
def train(train):
    return functools.partial(train, cls=Watch)


# Samplers


def reference_lognormal_poisson(rate, sigma, most, count=400_000):
    generator = np.random.default_rng(0)
    tau = generator.normal(math.log(rate) - sigma**2 / 2, sigma, count)
    depths = Counter(np.minimum(generator.poisson(np.exp(tau)) + 1, most).tolist())
    return {depth: times / count for depth, times in depths.items()}


@pytest.mark.parametrize(
    ("sampler", "probabilities"),
    [
        (UniformDepth(), dict.fromkeys((1, 2, 3, 4), 1 / 4)),
        (UniformDepth(low=3, high=7), dict.fromkeys(range(3, 8), 1 / 5)),
        (WeightedDepth(depths=[2, 8, 4, 5], weights=[1, 4, 3, 0]), {2: 1 / 8, 4: 3 / 8, 8: 4 / 8}),
        (LogNormalPoisson(), reference_lognormal_poisson(4, 0.5, 1024)),
        (LogNormalPoisson(rate=16, sigma=0.8, most=40), reference_lognormal_poisson(16, 0.8, 40)),
    ],
)
def test_depths_have_the_probabilities_that_they_are_said_to_have(sampler, probabilities):
    count = 2000
    depths = Counter(sampler.sample(step_uniforms(5, "depth", step), 4) for step in range(count))
    assert set(depths) <= set(probabilities)
    least, most = sampler.limits(4)
    assert least <= min(depths) and max(depths) <= most
    for depth in probabilities:  # cumulated, with Kolmogorov's bound at a level of 1e-4
        got = sum(times for d, times in depths.items() if d <= depth) / count
        want = sum(p for d, p in probabilities.items() if d <= depth)
        assert abs(got - want) < 2.23 / math.sqrt(count), depth


# Draws


def test_a_fixed_depth_through_a_sampler_is_the_papers_run_bit_for_bit(train):
    plain = train(cls=LoopDropoutSFTTrainer)
    weighted = {"depths": [4]}, {"depths": [4, 2], "weights": [1, 0]}
    ways = [("fixed", None), ("uniform", {"low": 4, "high": 4}), *(("weighted", args) for args in weighted)]
    for sampling, args in ways:
        sampled = train(cls=LoopDropoutSFTTrainer, depth_sampling=sampling, depth_sampling_args=args)
        assert_same_weights(plain, sampled)
        losses = [[log.get("loss") for log in trainer.state.log_history] for trainer in (plain, sampled)]
        assert losses[0] == losses[1]


DRAWN = {"depth_sampling": "uniform", "depth_sampling_args": {"low": 1, "high": 6}, "max_steps": 6}


@pytest.mark.parametrize("loss", ["final", "uniform", "random"])
def test_draws_are_those_of_any_split_into_micro_batches(train, loss):
    fields = {**DRAWN, "loop_loss": loss, "adam_epsilon": 1e-3}
    whole = train(per_device_train_batch_size=8, **fields)
    assert len({depth for _, depth in whole.depths}) > 2
    for rows, accumulation in ((4, 2), (2, 4)):
        split = train(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, **fields)
        assert split.depths == [each for each in whole.depths for _ in range(accumulation)]
        assert_same_weights(whole, split, atol=2e-5, rtol=2e-4)
    assert whole.num_loops == 4
    logged = [log["depth"] for log in whole.state.log_history if "depth" in log]
    assert logged == [depth for _, depth in whole.depths]


def test_draws_go_on_after_a_resume(train):
    fields = {**DRAWN, "loop_loss": "random", "save_strategy": "steps", "save_steps": 2}
    whole = train(**fields)
    resumed = train(resume=f"{whole.args.output_dir}/checkpoint-2", **fields)
    assert resumed.depths == whole.depths[2:]
    assert_same_weights(whole, resumed)


def test_evaluation_scores_the_final_loop_at_the_models_depth(train, dataset):
    trainer = train(**DRAWN, loop_loss="uniform")
    rows = trainer.train_dataset.select(range(8))
    want = []
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = trainer.model.eval()(ids).logits
        want.append(F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")[labels[0, 1:] != -100])
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(torch.cat(want).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["ddp, accumulation", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero2", "zero3", "fsdp2"))]
)
def test_two_processes_train_as_one_does(name, tmp_path):
    runs = list(layouts.DEPTHS)
    alone = forked(layouts.LAYOUTS[layouts.REFERENCE], tmp_path / "one", runs)
    ddp = name.startswith("ddp")
    two = forked(layouts.LAYOUTS[name], tmp_path / "two", runs) if ddp else launched(name, tmp_path / "two", runs)
    for run, got in two.items():
        assert {len(gates) for gates in alone[run].gates.values()} >= {2, 5}
        assert got.gates == alone[run].gates
        for record in got.records:
            assert record["losses"] == pytest.approx(alone[run].records[0]["losses"], rel=1e-4)
        assert got.distance(alone[run]) < 2e-4


# Losses against a direct computation: each loop's loss by a run of its own, of that depth, with full logits


def direct_loss(trainer, gated, inputs, depth, weights_of):
    looped, model = find_looped_model(trainer.model), trainer.model
    own, labels = looped.config.num_loops, inputs["labels"]
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    losses, hidden = [], []
    for loop in range(1, depth + 1):
        looped.config.num_loops = loop
        trainer.loop_state.apply(gated)
        out = model(**inputs, use_cache=False, output_hidden_states=False)
        logits = out.logits[:, :-1].transpose(1, 2).float()
        losses.append(F.cross_entropy(logits, labels[:, 1:], reduction="none"))  # [B, S - 1]
        trainer.loop_state.apply(gated)
        hidden.append(looped.base_model(**inputs, use_cache=False).last_hidden_state.detach())
    looped.config.num_loops = own
    weights = weights_of(looped, hidden)
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    return total.sum() / (labels[:, 1:] != -100).sum()


def exit_weights(looped, hidden):
    """Ouro's: lambda_t times the probability of not having left before; the rest leaves after the last loop."""
    gate, stay, weights = looped.base_model.early_exit_gate, 1.0, []
    for state in hidden[:-1]:
        leave = torch.sigmoid(state[:, :-1] @ gate.weight[0] + gate.bias).detach()
        weights.append(stay * leave)
        stay = stay * (1 - leave)
    return [*weights, stay]


def drawn_weights(trainer):
    """The loop that ran, alone."""
    ran = trainer.seen[0].depth
    return lambda looped, hidden: [float(loop == ran) for loop in range(1, len(hidden) + 1)]


LOSSES = {
    "final": (None, lambda looped, hidden: [0] * (len(hidden) - 1) + [1]),
    "uniform": (None, lambda looped, hidden: [1 / len(hidden)] * len(hidden)),
    "progressive": ({"power": 2}, lambda looped, hidden: [t**2 / 30 for t in range(1, 5)]),
    "weighted": ({"loop_weights": [1, 0, 2, 5]}, lambda looped, hidden: [1 / 8, 0, 2 / 8, 5 / 8]),
    "exit": (None, exit_weights),
    "random": (None, None),
}
ROWS, PACKED = {"remove_padding": False}, {"padding_free": True, "max_length": None}
CHECKPOINTED = {"gradient_checkpointing": True}
DEPTH_5 = {"depth_sampling": "weighted", "depth_sampling_args": {"depths": [5]}}
ONE_DEPTH = ("independent", "learned", "adaptive")  # rules
CASES = [
    (family, loss, fields)
    for family in TINY
    for loss, fields in (("uniform", DEPTH_5), ("progressive", {**PACKED, **CHECKPOINTED}), ("random", CHECKPOINTED))
]
CASES += [
    ("ouro", "final", {**PACKED, **DEPTH_5}), ("ouro", "exit", {**PACKED, **CHECKPOINTED, **DEPTH_5}), ("ouro", "exit", ROWS),
    ("ouro", "weighted", {}), ("ouro", "uniform", {**ROWS, **CHECKPOINTED}),
    ("ouro", "uniform", {"p": [0.9, 0.9, 0.5, 0.5]}),  # the first loops wait
    ("ouro", "uniform", {"packing": True, "max_length": 64}), ("ouro", "random", {"p": [0.1, 0.9, 0.9, 0.1]}),
]  # fmt: skip
for rule in RULES:
    args = {"rule_args": {"num_masks": 1}} if rule == "lora_dropout" else {}
    CASES.append(("ouro", "uniform", {"rule": rule, **args, **({} if rule in ONE_DEPTH else DEPTH_5)}))


def test_every_loss_has_a_direct_computation_and_is_documented_with_every_sampler():
    text = (Path(__file__).parents[1] / "docs" / "depth.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert names == ["depth_sampling", *DEPTH_SAMPLERS, "loop_loss", *LOOP_LOSSES]
    assert {*LOSSES} == {*LOOP_LOSSES}


@pytest.mark.parametrize(("family", "loss", "fields"), CASES)
def test_losses_and_all_gradients_are_those_of_a_direct_computation(train, family, loss, fields):
    loss_args, weights_of = LOSSES[loss]
    fields = {"gradient_checkpointing": False, **fields, "loop_loss": loss, "loop_loss_args": loss_args}
    trainer = train(TINY[family](), **fields, max_steps=1)
    (seen,) = trainer.seen
    assert seen.depth == (5 if "depth_sampling" in fields else 4) or loss == "random"
    # The same weights as before the step, and an adapter that acts: by a trainer of the same start.
    given = {"train_dataset": trainer.train_dataset, "processing_class": trainer.processing_class}
    fresh = Watch(TINY[family](), trainer.args, **given)
    fresh.model.train()
    plain = replace(seen.gated, optimisations=Optimisations())
    want = direct_loss(fresh, plain, seen.batch, seen.depth, weights_of or drawn_weights(trainer))
    assert seen.loss.item() == pytest.approx(want.item(), rel=2e-6)
    want.backward()
    wanted = {name: p.grad for name, p in trained_parameters(fresh.model).items()}
    largest = max(gradient.norm() for gradient in wanted.values() if gradient is not None)
    assert largest > 1e-3
    for name, gradient in wanted.items():
        gradient = torch.zeros_like(seen.gradients[name]) if gradient is None else gradient
        assert (seen.gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7 * largest, name


class LogitRows(TorchDispatchMode):
    """Notes the most rows that any tensor of the vocabulary's width had, but for the head's weight (32 rows, transposed)."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if torch.is_tensor(x) and x.dim() >= 2 and x.shape[-1] == 258 and x.numel() // 258 != 32:
                self.most = max(self.most, x.numel() // 258)
        return out


def test_no_loops_logits_are_ever_in_memory_as_a_whole(train, monkeypatch):
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 8)
    with LogitRows() as rows:
        trainer = train(loop_loss="uniform", max_steps=1)
    assert trainer.seen[0].batch["labels"][:, 1:].numel() > 16  # of one loop
    assert rows.most == 8


@pytest.mark.parametrize(
    ("make", "fields", "fault"),
    [
        (tiny_huginn, {"loop_loss": "exit"}, "`loop_loss: exit` needs a model with an exit gate"),
        (tiny_hrm, {"depth_sampling": "uniform"}, "trains at the depth that it was built for"),
        (tiny_hrm, {"loop_loss": "uniform"}, "trains at the depth that it was built for"),
    ],
)
def test_what_a_model_cannot_be_trained_by_is_refused(train, make, fields, fault):
    with pytest.raises(ValueError, match=fault):
        train(make(), **fields)
