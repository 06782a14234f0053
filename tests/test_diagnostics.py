"""Single-loop activation and readouts, against the golden oracle."""

import pytest
import torch
from conftest import golden_adapted

from loopdropout_trainer.diagnostics import readout_losses, single_loop_activation
from loopdropout_trainer.diagnostics.plots import plot_single_loop
from loopdropout_trainer.diagnostics.style import method_styles


@pytest.fixture
def batches(ouro):
    """The oracle's examples, one in each batch: the mean over batches must weigh them by their tokens."""
    inputs = {name: ouro.tensors[f"oracle/left/{name}"] for name in ("input_ids", "attention_mask", "labels")}
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(inputs["input_ids"]))
    ]


def token_mean(ouro, losses):
    """Mean over all target tokens of per-example losses [..., B]."""
    tokens = ouro.tensors["oracle/example_tokens"].double()
    return ((losses.double() * tokens).sum(dim=-1) / tokens.sum()).tolist()


def test_single_loop_activation_is_the_oracles(ouro, batches):
    model = golden_adapted(ouro).train()
    measured = single_loop_activation(model, batches)
    want = ouro.tensors
    assert measured.frozen == pytest.approx(token_mean(ouro, want["oracle/zero_gate/example_loss"]), abs=2e-5)
    assert measured.all_on == pytest.approx(token_mean(ouro, want["oracle/unit_gate/example_loss"]), abs=2e-5)
    only = token_mean(ouro, want["oracle/single_loop/example_loss"])
    assert measured.only == pytest.approx(only, abs=2e-5)
    rho = [100 * (measured.frozen - loss) / measured.frozen for loss in only]
    assert measured.reductions == pytest.approx(rho, abs=2e-3)
    assert model.training


def test_readout_losses_are_the_oracles(ouro, batches):
    losses = readout_losses(golden_adapted(ouro), batches)
    assert losses == pytest.approx(token_mean(ouro, ouro.tensors["oracle/unit_gate/readout_loss"]), abs=2e-5)


def test_batches_without_targets_are_refused(ouro, batches):
    for batch in batches:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    for measure in (single_loop_activation, readout_losses):
        with pytest.raises(ValueError, match="no target token"):
            measure(golden_adapted(ouro), batches)


def test_the_chart_is_a_picture(tmp_path):
    png, pdf = plot_single_loop({"Loop Dropout": [5.0, 6.0, -1.0], "LoRA": [1.0, 2.0, 9.0]}, tmp_path / "chart")
    assert png == tmp_path / "chart.png" and png.read_bytes().startswith(b"\x89PNG")
    assert pdf == tmp_path / "chart.pdf" and pdf.read_bytes().startswith(b"%PDF")


def test_a_method_looks_the_same_in_every_figure():
    everything = method_styles(["base", "LoRA", "Loop Dropout (p=0.5)", "coto", "unscaled"])
    assert method_styles(["loop_dropout"])["loop_dropout"] == everything["Loop Dropout (p=0.5)"]
    assert method_styles(["coto", "LoRA"]) == {name: everything[name] for name in ("coto", "LoRA")}
    for look in ("color", "marker", "linestyle", "hatch"):  # each alone tells methods apart
        assert len({str(getattr(style, look)) for style in everything.values()}) == 5
    two_rates = method_styles(["LoRA (1e-4)", "LoRA (3e-4)"])  # one known look cannot serve both
    assert two_rates["LoRA (1e-4)"] != two_rates["LoRA (3e-4)"]
