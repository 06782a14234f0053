"""Each measure against a computation that shares no code with it: smaller depths, scaled weights, merged weights, formulas."""

import copy
import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import tiny_ouro
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from loopdropout_trainer import use_gates
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.diagnostics import DIAGNOSTICS, Context, single_loop_activation
from loopdropout_trainer.diagnostics.rows import Rows
from loopdropout_trainer.diagnostics.states import linear_cka
from loopdropout_trainer.evaluation import Subject
from loopdropout_trainer.evaluation.processes import all_processes
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.looped import find_looped_model


LABELLED = [
    {"input_ids": ids, "labels": [-100] * (3 + row) + ids[3 + row :]}
    for row, length in enumerate((12, 9, 15, 7, 11))
    for ids in [[(7 * row + 13 * place) % 200 + 40 for place in range(length)]]
]
ROWS = Rows.make("test", LABELLED, batch_size=2, pad_token_id=1)


def adapted(model, seed=1, scale=0.2):
    """A PEFT model whose update is not small, on every projection that recurs."""
    targets = find_looped_model(model).recurrent_linears()
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return peft_model.eval()


def context_of(model, rows=ROWS, depths=(1, 2)):
    return Context(Subject(model, None), "adapter", rows, [], depths, all_processes())


def measure(name, model, rows=ROWS, depths=(1, 2)):
    context, diagnostic = context_of(model, rows, depths), DIAGNOSTICS[name]()
    assert diagnostic.skip_reason(context) is None
    return diagnostic.measure(context)


@torch.no_grad()
def logits_and_targets(model, rows=ROWS):
    """Logits [n, V] and target tokens [n] of all rows, from the model's own forward, one row at a time."""
    found = []
    for batch in rows.batches:
        for ids, mask, labels in zip(
            *(batch[name] for name in ("input_ids", "attention_mask", "labels")), strict=True
        ):
            length = int(mask.sum())
            logits = model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1]
            kept = labels[1:length] != -100
            found.append((logits[kept], labels[1:length][kept]))
    return torch.cat([pair[0] for pair in found]).double(), torch.cat([pair[1] for pair in found])


def loss_of(model):
    return float(F.cross_entropy(*logits_and_targets(model)))


def at_depth(model, depth):
    model = copy.deepcopy(model)
    find_looped_model(model).config.num_loops = depth
    return model


def test_readouts_and_depths_are_runs_at_smaller_depth(make_tiny):
    model = adapted(make_tiny())
    readouts = measure("readouts", model)
    runs = [logits_and_targets(at_depth(model, depth)) for depth in range(1, 5)]
    losses = [float(F.cross_entropy(*run)) for run in runs]
    accuracies = [100 * float((logits.argmax(-1) == targets).double().mean()) for logits, targets in runs]
    assert readouts["losses"] == pytest.approx(losses, abs=1e-5)
    assert readouts["accuracies_percent"] == pytest.approx(accuracies)
    assert max(losses) - min(losses) > 1e-3

    depth = measure("depth", model, depths=[1, 3, 6])
    deeper = loss_of(at_depth(model, 6))
    assert depth["losses"] == pytest.approx([losses[0], losses[2], deeper], abs=1e-5)
    assert find_looped_model(model).config.num_loops == 4


def test_relative_compute_counts_the_block_once_for_each_loop():
    model = adapted(tiny_ouro())
    layer = 4 * 32 * 32 + 3 * 32 * 48
    block, head = 2 * layer, 258 * 32
    gate = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("early_exit_gate"))
    want = [(depth * block + head + gate) / (4 * block + head + gate) for depth in (1, 2, 4, 8)]
    assert measure("depth", model, depths=[1, 2, 4, 8])["relative_compute"] == pytest.approx(want)


def test_adapters_for_one_depth_are_left_out_of_the_depths():
    for rule in ("independent", "learned"):
        model = adapted(tiny_ouro())
        add_gates(model, rule=make_rule(rule))
        assert "parameters of its own, for one depth only" in DIAGNOSTICS["depth"]().skip_reason(context_of(model))
        assert np.isfinite(measure("patterns", model)["frozen"])


def test_patterns_are_use_gates(make_tiny):
    model = adapted(make_tiny())
    found = measure("patterns", model)
    assert len(found["patterns"]) == 16
    for pattern in found["patterns"]:
        with use_gates(model, [float(loop in pattern["loops"]) for loop in (1, 2, 3, 4)]):
            assert pattern["loss"] == pytest.approx(loss_of(model), abs=1e-5)
    with model.disable_adapter():
        assert found["frozen"] == pytest.approx(loss_of(model), abs=1e-5)
    kinds = {tuple(each["loops"]): each["kinds"] for each in found["patterns"]}
    assert kinds[1, 2] == ["prefix"] and kinds[3, 4] == ["suffix"] and kinds[1, 3] == []
    assert kinds[()] == kinds[1, 2, 3, 4] == ["prefix", "suffix"]


def test_single_loop_is_the_patterns_of_one_loop():
    model = adapted(tiny_ouro())
    found, patterns = measure("single_loop", model), measure("patterns", model)["patterns"]
    of = {tuple(each["loops"]): each for each in patterns}
    assert found["only"] == tuple(of[loop,]["loss"] for loop in (1, 2, 3, 4))
    assert found["reductions_percent"] == pytest.approx([of[loop,]["reduction_percent"] for loop in (1, 2, 3, 4)])
    assert found["all_on"] == of[1, 2, 3, 4]["loss"]
    alone = single_loop_activation(model, ROWS.batches)  # without a run around it
    assert alone.only == pytest.approx(found["only"]) and alone.frozen == pytest.approx(found["frozen"])


def test_only_prefixes_and_suffixes_of_many_loops():
    model = adapted(tiny_ouro(total_ut_steps=7))
    sets = [tuple(each["loops"]) for each in measure("patterns", model)["patterns"]]
    assert len(sets) == len(set(sets)) == 14
    assert all(loops in (tuple(range(1, len(loops) + 1)), tuple(range(8 - len(loops), 8))) for loops in sets)


def test_dose_is_the_update_times_its_gate(make_tiny):
    model = adapted(make_tiny())
    found = measure("dose", model)
    for dose, loss in zip(found["doses"], found["losses"], strict=True):
        scaled = copy.deepcopy(model)
        for name, parameter in scaled.named_parameters():
            if "lora_B" in name:
                parameter.data *= dose
        assert loss == pytest.approx(loss_of(scaled), abs=1e-5)


@torch.no_grad()
def one_loop_from(model, batch, states):
    """The states after one loop of a plain model, started from `states` [B, S, H]."""
    model = at_depth(model, 1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.model(**inputs, initial_state=states, use_cache=False, output_readouts=True).loop_states[0]


def test_updates_are_a_merged_loop_against_a_frozen_one():
    """No gates: one loop with merged weights and one with the base's, both from the merged model's state."""
    base = tiny_ouro()
    model = adapted(copy.deepcopy(base))
    merged = copy.deepcopy(model).merge_and_unload()
    found = measure("updates", model)
    sizes, cosines = [], []
    for batch in ROWS.batches:
        states = merged.model.get_input_embeddings()(batch["input_ids"])
        kept, effects = batch["labels"][:, 1:] != -100, []
        for _ in range(4):
            with_update, without = (one_loop_from(each, batch, states) for each in (merged, base))
            effect = (with_update - without)[:, :-1][kept].detach()
            sizes.append(effect.norm(dim=-1) / without[:, :-1][kept].norm(dim=-1))
            effects.append(effect)
            states = with_update
        cosines.append([[F.cosine_similarity(a, b, dim=-1) for b in effects] for a in effects])
    sizes = [torch.cat(sizes[loop::4]).mean().item() for loop in range(4)]
    want = [[torch.cat([part[s][t] for part in cosines]).mean().item() for t in range(4)] for s in range(4)]
    assert found["relative_sizes"] == pytest.approx(sizes, rel=1e-4)
    assert np.array(found["cosines"]) == pytest.approx(np.array(want), abs=1e-4)
    assert found["states"] == "carried" and sizes[0] > 0.01


def test_settling_is_the_distance_between_runs_of_different_depth():
    model = adapted(tiny_ouro())
    found = measure("settling", model)
    probabilities = [logits_and_targets(at_depth(model, depth))[0].softmax(-1).numpy() for depth in range(1, 5)]
    divergences = [scipy.stats.entropy(probabilities[3], each, axis=1).mean() for each in probabilities]
    same = [100 * np.mean(each.argmax(1) == probabilities[3].argmax(1)) for each in probabilities]
    assert found["readout_divergences"] == pytest.approx(divergences, abs=1e-6)
    assert found["agreements_percent"] == pytest.approx(same)
    assert divergences[0] > 1e-4 and divergences[3] == 0
    distances = []
    for batch in ROWS.batches:
        with torch.no_grad():
            runs = [
                at_depth(model, depth)
                .base_model.model.model(batch["input_ids"], batch["attention_mask"], output_readouts=True)
                .loop_states[-1][:, :-1][batch["labels"][:, 1:] != -100]
                for depth in range(1, 5)
            ]
        distances.append([np.linalg.norm(each - runs[3], axis=-1) / np.linalg.norm(runs[3], axis=-1) for each in runs])
    want = [np.concatenate([part[loop] for part in distances]).mean() for loop in range(4)]
    assert found["state_distances"] == pytest.approx(want, rel=1e-4, abs=1e-6)


def hsic(k, m):
    """The U-statistic by its definition: means over all tuples of different indices."""
    n = range(len(k))
    pairs = np.mean([k[i, j] * m[i, j] for i, j in itertools.permutations(n, 2)])
    quads = np.mean([k[i, j] * m[q, r] for i, j, q, r in itertools.permutations(n, 4)])
    triples = np.mean([k[i, j] * m[i, q] for i, j, q in itertools.permutations(n, 3)])
    return pairs + quads - 2 * triples


def test_cka_is_its_definition():
    states = np.random.default_rng(0).normal(size=(3, 7, 5))
    states[1] = states[0] @ np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0] + 3  # rotated and shifted
    kernels = states @ states.transpose(0, 2, 1)
    want = [[hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m)) for m in kernels] for k in kernels]
    found = linear_cka(states)
    assert found == pytest.approx(np.array(want))
    assert found[0, 1] == pytest.approx(1)
    noise = np.random.default_rng(2).normal(size=(2, 400, 3000))  # wider than there are tokens, and unrelated
    assert abs(linear_cka(noise)[0, 1]) < 0.1


def test_similarity_looks_at_the_states():
    model = adapted(tiny_ouro())
    found = measure("similarity", model)
    assert found["num_tokens"] == ROWS.identity["num_tokens"]
    states = []
    for batch in ROWS.batches:
        with torch.no_grad():
            output = model.base_model.model.model(batch["input_ids"], batch["attention_mask"], output_readouts=True)
        kept = batch["labels"][:, 1:] != -100
        states.append(np.stack([state[:, :-1][kept].numpy() for state in output.loop_states]))
    assert np.array(found["cka"]) == pytest.approx(linear_cka(np.concatenate(states, axis=1)), abs=1e-4)


def test_results_do_not_depend_on_the_batch_size(make_tiny):
    model = adapted(make_tiny())
    others = Rows.make("test", LABELLED, batch_size=5, pad_token_id=1)
    assert others.identity == ROWS.identity and len(others.batches) == 1
    for name in ("readouts", "single_loop", "settling", "updates"):
        found, other = measure(name, model), measure(name, model, others)
        for key in set(found) - {"states"}:
            assert np.array(other[key]) == pytest.approx(np.array(found[key]), abs=1e-4)
