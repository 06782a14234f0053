"""Test the moments, support and pairing of every rule's gates, and its random streams."""

import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from helpers.errors import user_error
from loopdropout_trainer.gates import RULES, Draw, GateRule, LoopDropout, make_rule, register_rule
from loopdropout_trainer.gates.__main__ import main
from loopdropout_trainer.gates.streams import Streams
from loopdropout_trainer.means import measure_mean


K, M = 4, 3
LAYERS = (0, 0, 1)
MANY = 15_000
IDENTITY = torch.eye(K, dtype=torch.float64)
PARALLEL = torch.full((K, K), 1 / K, dtype=torch.float64)
T = torch.arange(1, K + 1, dtype=torch.float64)
EARLIER, LATER = torch.minimum(T, T[:, None]), torch.maximum(T, T[:, None])
PROFILE = (0.75, 0.6, 0.4, 0.25)


def draw(num_examples=16, **fields):
    defaults = {"seed": 101, "step": 3, "num_steps": 10, "num_loops": K, "num_modules": M, "layers": LAYERS}
    return Draw(**{**defaults, "example_ids": [(row, 0) for row in range(num_examples)], **fields})


def odds(p):
    return 1 / (1 - torch.as_tensor(p, dtype=torch.float64)) - 1


EXPECTED = [  # rule, fields, mean, covariance [K, K], or of K M gates
    ("lora", {}, 1, 0 * IDENTITY),
    ("loop_dropout", {"p": 0.5}, 1, IDENTITY),
    ("loop_dropout", {"p": PROFILE}, 1, torch.diag(odds(PROFILE))),
    ("unscaled", {"p": 0.3}, 0.7, 0.21 * IDENTITY),
    ("dose_control", {"p": PROFILE}, 1, odds(PROFILE).mean() * PARALLEL),
    ("module_wise", {"p": 0.3}, 1, odds(0.3) * torch.eye(K * M)),
    ("parallel_noise", {"p": 0.3, "c": 2}, 1, 4 * odds(0.3) * IDENTITY),
    ("exactly_m", {"m": 1}, 1, 3 * K / (K - 1) * (IDENTITY - PARALLEL)),
    ("exactly_m", {"m": 2}, 1, K / (K - 1) * (IDENTITY - PARALLEL)),
    ("random_prefix", {}, 1, (EARLIER - 1) / (K + 1 - EARLIER)),
    ("random_suffix", {}, 1, K / LATER - 1),
    ("schedule", {"p_start": 0.75, "p_end": 0.3}, 1, odds(0.6) * IDENTITY),
]


def assert_moments(gates, mean, covariance):
    """Check sample moments of [K, N] or [K, N, M] gates to five standard errors, which are taken from the sample itself."""
    gates = gates.double().movedim(1, -1).flatten(0, -2)
    centered = gates - mean
    for samples, want in ((gates, mean), (centered[:, None] * centered, covariance)):
        error = 5 * samples.std(dim=-1) / samples.shape[-1] ** 0.5 + 1e-6
        assert ((samples.mean(dim=-1) - want).abs() <= error).all()


@pytest.mark.parametrize(("name", "fields", "mean", "covariance"), EXPECTED)
def test_rule_mean_and_covariance(name, fields, mean, covariance):
    assert_moments(make_rule(name, **fields).sample(draw(MANY)), mean, covariance)


def test_rules_share_events_of_one_seed():
    d = draw(2000)
    gates = make_rule("loop_dropout", p=PROFILE).sample(d)
    removed = gates == 0
    for name in ("unscaled", "independent", "learned"):
        assert torch.equal(make_rule(name, p=PROFILE).sample(d) == 0, removed)
    noisy = make_rule("parallel_noise", p=PROFILE).sample(d)
    assert torch.equal(noisy != 1, removed) and (noisy < 0).any() and (noisy != 0).all()
    seeds = make_rule("weight_noise", p=PROFILE).seeds(d)
    assert torch.equal(seeds != 0, removed[..., None].expand_as(seeds))
    assert len(seeds.unique()) == (seeds != 0).sum() + 1
    assert torch.equal(make_rule("module_wise", p=PROFILE).sample(d)[..., 0], gates)
    torch.testing.assert_close(make_rule("dose_control", p=PROFILE).sample(d), gates.mean(dim=0).expand(K, -1))
    assert (removed <= (make_rule("loop_dropout", p=0.8).sample(d) == 0)).all()
    # The loop that is retained least: when such a rule retains it, Loop Dropout at p <= 1 - 1/K also retains it.
    kept = make_rule("loop_dropout", p=0.5).sample(d) > 0
    for name, loop in (("random_suffix", 0), ("random_prefix", K - 1)):
        assert ((make_rule(name).sample(d)[loop] > 0) <= kept[loop]).all(), name
    assert ((make_rule("exactly_m", m=2).sample(d) > 0) == kept).double().mean() > 0.75


@pytest.mark.parametrize("direction, power", [("more", 1), ("less", -1)])
def test_adaptive_p_follows_sensitivity(direction, power):
    rule = make_rule("adaptive", p=0.4, direction=direction, decay=0.5)
    assert rule.probabilities(K).tolist() == [0.4] * K
    rule.observe(T)
    p = 0.4 * T**power / (T**power).mean()
    torch.testing.assert_close(rule.probabilities(K), p)
    assert_moments(rule.sample(draw(MANY)), 1, torch.diag(odds(p)))

    rule.observe(100 * T.flip(0))  # the scale of a step's loss cancels
    assert rule.probabilities(K).tolist() == pytest.approx([0.4] * K)


def test_adaptive_p_is_clipped_and_keeps_its_mean():
    rule, again = (make_rule("adaptive", p=0.5, p_min=0.3, p_max=0.8) for _ in range(2))
    rule.observe(torch.tensor([0.0, 1.0, 1.0, 1000.0]))
    p = rule.probabilities(K)
    assert p.tolist() == pytest.approx([0.3, 0.45, 0.45, 0.8])
    again.load_state_dict(rule.state_dict())
    for broken in (torch.zeros(K), torch.full((K,), float("inf"))):
        again.observe(broken)
        assert torch.equal(again.probabilities(K), p)


@pytest.mark.parametrize("q", [0.1, 0.6])
def test_coto_switches_whole_layers(q):
    rule = make_rule("coto", keep_start=q)
    gates = torch.cat([rule.sample(draw(1, step=step, num_steps=10**9)) for step in range(1000)], dim=1)
    first, _, second = gates[0].T
    assert torch.equal(gates, torch.stack([first, first, second], dim=1).expand(K, -1, -1))
    mean = q + (1 - q) ** 2 / 2
    variance, between = mean * (1 - mean), -((1 - mean) ** 2)  # one of the two layers is always on
    assert_moments(torch.stack([first, second]), mean, torch.tensor([[variance, between], [between, variance]]))
    assert (first + second).unique().tolist() == [1, 2]
    assert [rule.keep_at(step, 8) for step in (0, 3, 6, 7)] == pytest.approx([q, (1 + q) / 2, 1, 1])


@pytest.mark.parametrize("name", RULES)
def test_rule_draws_are_stateless(name):
    rule = make_rule(name)
    rule.check(K)
    before = torch.get_rng_state()
    gates, seeds = rule.sample(draw()), rule.seeds(draw())
    assert torch.equal(torch.get_rng_state(), before)
    assert gates.dtype == torch.float32 and gates.shape in ((K, 16), (K, 1, M), (K, 16, M))
    assert torch.equal(gates, rule.sample(draw()))
    part = rule.sample(draw(example_ids=[(5, 0), (11, 0)]))  # another micro-batch split
    assert torch.equal(part, gates if gates.shape[1] == 1 else gates[:, [5, 11]])
    if seeds is not None:
        assert seeds.dtype == torch.int64 and torch.equal(seeds, rule.seeds(draw()))


@pytest.mark.parametrize("name", RULES)
def test_rule_docstring_names_all_facts(name, capsys):
    """The docstring of each rule has a line for its gate, its mean, its covariance and its place in the paper."""
    main([name])
    out = capsys.readouterr().out
    for fact in ("Gate", "Mean", "Covariance", "Paper"):
        assert f"\n    {fact}: " in out, f"The docstring of {RULES[name].__name__} needs a line `{fact}: ...`."


def test_unknown_rule_names_a_file_that_is_not_imported(monkeypatch):
    """As after a new file in `gates/`, which `gates/__init__.py` must import."""
    monkeypatch.delitem(sys.modules, "loopdropout_trainer.gates.noise")
    with user_error("The rules in `gates/noise.py` are not known, because `gates/__init__.py` does not import them"):
        make_rule("new_noise")


def test_stream_values_are_pinned():
    normals = Streams(2**63 + 1, 10**6, [(9, 9), (4095, 7)]).normals("parallel noise", 2)[1]
    assert normals.tolist() == pytest.approx([2.1344748077946987, -1.3518345620144894], rel=1e-12)
    masks = (make_rule("loop_dropout").sample(draw(6)) > 0).int().tolist()
    assert masks == [[1, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("adaptive", {"estimate": 1}, "It takes p, direction, p_min, p_max, decay"),
        ("adaptive", {"p": (0.5, 0.5)}, "`p` must be one"),
        ("adaptive", {"direction": "up"}, "`direction` must be 'more' or 'less'"),
        ("adaptive", {"p": 0.5, "p_max": 0.4}, "`p_min`"),
        ("exactly_m", {"m": 5}, "`m` must be an integer from 1 to 4, got 5"),
        ("parallel_noise", {"c": -1}, "`c` must be a number from 0 to 1000, got -1"),
        ("schedule", {"p_end": 2}, "`p_end`"),
        ("loop_dropout", {"p": 1}, r"`p` must be a number in \[0, 1\), got 1"),
        ("loop_dropout", {"p": (0.5, 0.5)}, "2 values"),
        ("loop_dropot", {}, "Did you mean 'loop_dropout'.*If it is your own, run or import the code"),
    ],
)
def test_make_rule_names_valid_fields(name, fields, message):
    with user_error(message):
        make_rule(name, **fields).check(K)


@pytest.mark.parametrize(
    ("declared", "p", "given"),
    [
        (float, [0.5], 0.5),
        ("float", [0.5], 0.5),
        (tuple, [0.5], 0.5),
        (tuple, [0.5, 0.25, 0, 0], (0.5, 0.25, 0.0, 0.0)),
    ],
)
def test_rule_gets_p_as_it_declares(declared, p, given):
    own = type("Own", (GateRule,), {"name": "own", "__annotations__": {"p": declared}, "p": 0.0, "sample": None})
    with patch.dict(RULES):
        register_rule(dataclass(frozen=True)(own))
        rule = make_rule("own", p=p)
        assert rule.p == given and type(rule.p) is type(given)
        rule.check(K)
        with user_error("`p` must be one drop|`p` has 2 values, but the model runs 4 loops"):
            make_rule("own", p=[0.5, 0.25]).check(K)


def test_rules_of_the_package_are_not_replaced():
    """A baseline `lora` would be another method then. A notebook cell with a user's rule may run again."""
    for name, message in (("lora", "`name` of its own, got 'lora'"), ("own", None)):
        own = dataclass(frozen=True)(type("Own", (GateRule,), {"name": name, "sample": LoopDropout.sample}))
        with patch.dict(RULES), user_error(message) if message else nullcontext():
            register_rule(own)
            register_rule(own)


@pytest.mark.parametrize(
    ("base", "fields", "is_dataclass", "message"),
    [
        (GateRule, {"name": "own"}, False, "must be a dataclass. Write `@dataclass` under `@register_rule`"),
        (GateRule, {}, False, "must have a `name` of its own. Write `name = 'own'` in the class"),
        (LoopDropout, {}, True, "must have a `name` of its own. Write `name = 'own'` in the class"),
        (GateRule, {"name": 5}, True, "must be a text such as `name = 'own'`, got 5"),
        (GateRule, {"name": "own", "__annotations__": {"name": str}}, True, "must not be a field. .* without a type"),
    ],
)  # fmt: skip
def test_rule_without_dataclass_or_name_raises(base, fields, is_dataclass, message):
    rule = type("Own", (base,), {"sample": LoopDropout.sample, **fields})
    if is_dataclass:
        rule = dataclass(frozen=base is LoopDropout)(rule)
    with patch.dict(RULES), user_error(message):
        register_rule(rule)


def test_rule_without_sample_raises():
    own = dataclass(frozen=True)(type("Own", (GateRule,), {"name": "own"}))
    with user_error(
        r"The rule Own must have a method `sample\(self, draw\)`. Write one that returns the gates \[K, N\]"
    ):
        register_rule(own)


@pytest.mark.parametrize("name", RULES)
def test_rules_say_if_their_mean_gate_is_one(name):
    means, _ = measure_mean(make_rule(name), K, LAYERS, batch_size=64)
    error = 5 * means.std(dim=0) / len(means) ** 0.5 + 1e-6
    assert bool(((means.mean(dim=0) - 1).abs() <= error).all()) is RULES[name].has_unit_mean


def test_help_of_rules_describes_their_options():
    options = {*GateRule.__annotations__, "adapter", "passes"}  # the last two are old names
    described = set(re.findall(r"^    (\w+): [A-Z]", inspect.getdoc(GateRule), re.MULTILINE))
    assert options == described and {"lora_kind", "has_unit_mean", "draws_per_batch"} < options
