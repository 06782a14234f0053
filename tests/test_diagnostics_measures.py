"""Each measure against the golden oracle, or a computation that shares no code with it; labels against the trainer's own."""

import copy
import itertools
import re

import numpy as np
import pytest
import scipy.spatial
import scipy.stats
import torch
from conftest import byte_tokenizer, golden_adapted, tiny_ouro, two_families
from datasets import Dataset
from test_generation import adapted
from torch.nn import functional as F

from loopdropout_trainer import LoopDropoutSFTTrainer, use_gates
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.data.boundary import token_lengths
from loopdropout_trainer.diagnostics import (
    DIAGNOSTICS,
    Context,
    labelled_batches,
    readout_losses,
    single_loop_activation,
)
from loopdropout_trainer.diagnostics.rows import batched
from loopdropout_trainer.diagnostics.states import linear_cka
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.settings.tokenizer import chat_template


@pytest.fixture
def batches(ouro):
    """The oracle's examples, one in each batch: the mean over batches must weigh them by their tokens."""
    inputs = {name: ouro.tensors[f"oracle/left/{name}"] for name in ("input_ids", "attention_mask", "labels")}
    rows = range(len(inputs["input_ids"]))
    return [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in rows]


def test_single_loop_activation_and_readouts_are_the_oracles(ouro, batches):
    def mean(name):  # over all target tokens, of per-example losses [..., B]
        tokens = ouro.tensors["oracle/example_tokens"].double()
        return ((ouro.tensors[f"oracle/{name}"].double() * tokens).sum(dim=-1) / tokens.sum()).tolist()

    model = golden_adapted(ouro).train()
    measured = single_loop_activation(model, batches)
    assert measured.frozen == pytest.approx(mean("zero_gate/example_loss"), abs=2e-5)
    assert measured.all_on == pytest.approx(mean("unit_gate/example_loss"), abs=2e-5)
    assert measured.only == pytest.approx(mean("single_loop/example_loss"), abs=2e-5)
    rho = [100 * (measured.frozen - loss) / measured.frozen for loss in mean("single_loop/example_loss")]
    assert measured.reductions == pytest.approx(rho, abs=2e-3)
    assert readout_losses(model, batches) == pytest.approx(mean("unit_gate/readout_loss"), abs=2e-5)
    assert model.training


def test_batches_without_targets_are_refused(ouro, batches):
    without = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in batches]
    for measure, given in itertools.product((single_loop_activation, readout_losses), (without, [])):
        with pytest.raises(ValueError, match="no target token"):
            measure(golden_adapted(ouro), given)


@pytest.fixture(scope="module")
def merging_tokenizer():
    """A token for each byte, and one for the end of "Answer:" with the space that begins its answer."""
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": chat_template("tulu2")}
    return byte_tokenizer(["<eos>", "<pad>"], [":Ġ"], [(":", "Ġ")], **names)


TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
FORMATS = {
    "prompt and completion": [{"prompt": f"{i}+{i}? Answer:", "completion": f" {2 * i}"} for i in range(3)],
    "text": [{"text": f"{i} and {i}"} for i in range(3)],
    "messages": [{"messages": TURNS}, {"messages": TURNS + TURNS}],
    "prompt and completion as messages": [{"prompt": TURNS[:1], "completion": TURNS[1:]}] * 2,
}
WITHOUT_MEANING = [("text", "assistant_only_loss"), ("text", "completion_only_loss"),
                   ("prompt and completion", "assistant_only_loss")]  # fmt: skip


@pytest.mark.parametrize("losses", [{}, {"assistant_only_loss": True}, {"completion_only_loss": False}])
@pytest.mark.parametrize("form", FORMATS)
def test_labels_are_the_trainers(form, losses, merging_tokenizer, config):
    if any((form, name) in WITHOUT_MEANING for name in losses):
        pytest.skip("TRL refuses it, or it means nothing")
    data = {"train_dataset": Dataset.from_list(FORMATS[form]), "processing_class": merging_tokenizer}
    trainer = LoopDropoutSFTTrainer(tiny_ouro(vocab_size=259), config(**losses), **data)
    mine = labelled_batches(FORMATS[form], merging_tokenizer, 1, **losses)
    for batch, row in zip(mine, trainer.train_dataset, strict=True):
        want = trainer.data_collator([row])
        assert all(torch.equal(batch[name], want[name]) for name in ("input_ids", "labels"))
    if form == "prompt and completion":  # as one text, the prompt's end would have merged into the first target
        assert 258 in merging_tokenizer("".join(FORMATS[form][0].values()))["input_ids"]
        assert 258 not in mine[0]["input_ids"]
        assert token_lengths(data["train_dataset"], merging_tokenizer).tolist() == [
            len(b["input_ids"][0]) for b in mine
        ]
        targets = [merging_tokenizer.decode(row[row != -100]) for batch in mine for row in batch["labels"]]
        assert losses or targets == [" 0<eos>", " 2<eos>", " 4<eos>"]


IDS = [[(7 * row + 13 * place) % 200 + 40 for place in range(length)] for row, length in enumerate((12, 9, 15, 7, 11))]
LABELLED = {"input_ids": IDS, "labels": [[-100] * (3 + row) + ids[3 + row :] for row, ids in enumerate(IDS)]}
BATCHES = batched(LABELLED, batch_size=2, pad_token_id=1)


def measure(name, model, batches=BATCHES, depths=(1, 2)):
    context, diagnostic = Context(model, "adapter", batches, depths), DIAGNOSTICS[name]()
    assert diagnostic.skip_reason(context) is None
    return list(diagnostic.measure(context))


def numbers(rows, metric):
    return [row["value"] for row in rows if row["metric"] == metric]


def matrix(rows, metric):
    return np.array(numbers(rows, metric)).reshape(4, 4)


@torch.no_grad()
def logits_and_targets(model):
    """Logits [n, V] and target tokens [n] of all rows, from the model's own forward, one row at a time."""
    found = []
    for ids, labels in zip(*LABELLED.values(), strict=True):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(labels[1:])
        found.append((logits[labels != -100], labels[labels != -100]))
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
    assert numbers(readouts, "readout_loss") == pytest.approx(losses, abs=1e-5)
    assert numbers(readouts, "readout_token_accuracy") == pytest.approx(accuracies)
    assert max(losses) - min(losses) > 1e-3

    depth = measure("depth", model, depths=[1, 3, 6])
    deeper = loss_of(at_depth(model, 6))
    assert numbers(depth, "depth_loss") == pytest.approx([losses[0], losses[2], deeper], abs=1e-5)
    assert find_looped_model(model).config.num_loops == 4


@pytest.mark.parametrize("rule", ["independent", "learned"])
def test_adapters_for_one_depth_are_left_out_of_the_depths(rule):
    model = adapted(tiny_ouro())
    add_gates(model, rule=make_rule(rule))
    assert "for one depth only" in DIAGNOSTICS["depth"]().skip_reason(Context(model, "adapter", BATCHES, (1, 2)))


@two_families
def test_patterns_and_doses_are_use_gates(make_tiny):
    model = adapted(make_tiny())
    found = measure("patterns", model)
    losses = {row["gates"]: row["value"] for row in found if row["metric"] == "pattern_loss"}
    assert len(losses) == 16
    for gates, loss in losses.items():
        with use_gates(model, [1.0] * 4 if gates == "all" else list(map(float, gates.split("-")))):
            assert loss == pytest.approx(loss_of(model), abs=1e-5)
    with model.disable_adapter():
        assert losses["0-0-0-0"] == pytest.approx(loss_of(model), abs=1e-5)
    for row in measure("dose", model):
        if row["metric"] == "dose_loss":
            with use_gates(model, [row["dose"]] * 4):
                assert row["value"] == pytest.approx(loss_of(model), abs=1e-5)
    single = measure("single_loop", model)
    alone = ["1-0-0-0", "0-1-0-0", "0-0-1-0", "0-0-0-1"]
    assert numbers(single, "loss") == [losses[gates] for gates in (*alone, "all")]
    reductions = {row["gates"]: row["value"] for row in found if row["metric"] == "pattern_loss_reduction"}
    assert numbers(single, "loss_reduction") == pytest.approx([reductions[gates] for gates in (*alone, "all")])
    for kind, sets in (("prefix", ["1-0-0-0", "1-1-0-0", "1-1-1-0"]), ("suffix", ["0-0-0-1", "0-0-1-1", "0-1-1-1"])):
        of_kind = [(row["loop"], row["gates"]) for row in found if row["metric"] == f"{kind}_loss_reduction"]
        assert sorted(of_kind) == list(enumerate(["0-0-0-0", *sets, "all"]))


def test_only_prefixes_and_suffixes_of_many_loops():
    model = adapted(tiny_ouro(total_ut_steps=7))
    sets = [row["gates"] for row in measure("patterns", model) if row["metric"] == "pattern_loss"]
    assert len(sets) == len(set(sets)) == 14
    assert all(gates == "all" or re.fullmatch("[01](-[01]){6}", gates) and gates.count("0-1") + gates.count("1-0") <= 1
               for gates in sets)  # fmt: skip


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
    for batch in BATCHES:
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
    assert numbers(found, "state_update_size") == pytest.approx(sizes, rel=1e-4)
    assert matrix(found, "state_update_cosine") == pytest.approx(np.array(want), abs=1e-4)
    assert sizes[0] > 0.01


@torch.no_grad()
def states_of(model):
    """The states of each loop at all target tokens, [K, n, H]."""
    parts = []
    for batch in BATCHES:
        output = model.base_model.model.model(batch["input_ids"], batch["attention_mask"], output_readouts=True)
        kept = batch["labels"][:, 1:] != -100
        parts.append(np.stack([state[:, :-1][kept].numpy() for state in output.loop_states]))
    return np.concatenate(parts, axis=1)


def test_settling_is_the_distance_between_runs_of_different_depth():
    model = adapted(tiny_ouro())
    found = measure("settling", model)
    probabilities = [logits_and_targets(at_depth(model, depth))[0].softmax(-1).numpy() for depth in range(1, 5)]
    divergences = [scipy.stats.entropy(probabilities[3], each, axis=1).mean() for each in probabilities]
    assert numbers(found, "readout_divergence") == pytest.approx(divergences, abs=1e-6)
    assert divergences[0] > 1e-4 and divergences[3] == 0
    runs = [states_of(at_depth(model, depth))[-1] for depth in range(1, 5)]
    norm = lambda states: np.linalg.norm(states, axis=-1)
    want = [(norm(each - runs[3]) / norm(runs[3])).mean() for each in runs]
    assert numbers(found, "state_distance") == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_agreement_is_between_runs_of_different_depth(make_tiny):
    model = adapted(make_tiny())
    found = measure("agreement", model)
    probabilities = [logits_and_targets(at_depth(model, depth))[0].softmax(-1).numpy() for depth in range(1, 5)]
    same = [100 * np.mean(each.argmax(1) == probabilities[3].argmax(1)) for each in probabilities]
    variations = [scipy.spatial.distance.cdist(each, probabilities[3], "cityblock").diagonal().mean() / 2
                  for each in probabilities]  # fmt: skip
    assert numbers(found, "same_tokens") == pytest.approx(same) and same[3] == 100
    assert numbers(found, "overlap") == pytest.approx([100 * (1 - each) for each in variations], abs=1e-4)
    assert variations[0] > 1e-3 and numbers(found, "overlap")[3] == pytest.approx(100)


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
    assert matrix(found, "state_cka") == pytest.approx(linear_cka(states_of(model)), abs=1e-4)


def test_results_do_not_depend_on_the_batch_size(make_tiny):
    model, one_batch = adapted(make_tiny()), batched(LABELLED, batch_size=5, pad_token_id=1)
    for name in ("readouts", "single_loop", "settling", "agreement", "updates"):
        found, other = measure(name, model), measure(name, model, one_batch)
        assert [row["metric"] for row in other] == [row["metric"] for row in found]
        assert [row["value"] for row in other] == pytest.approx([row["value"] for row in found], abs=1e-4)
