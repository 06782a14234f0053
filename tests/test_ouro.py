"""What is Ouro's own: its exit gate; and what is refused of any family."""

import pytest
import torch
from conftest import golden_inputs, golden_model
from test_families import assert_close

from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.models import OuroConfig


@pytest.mark.parametrize("batch", ["unpadded", "padded"])
def test_the_exit_gate_agrees_with_the_reference_and_is_not_read(ouro, batch):
    model, inputs = golden_model(ouro), golden_inputs(ouro, batch)
    want, valid = (lambda name: ouro.tensors[f"{batch}/{name}"]), inputs["attention_mask"].bool()
    with torch.no_grad():
        out = model(**inputs, output_readouts=True)
        readouts = torch.stack(out.readouts)
        exit_pdf = model.model.exit_distribution(out.readouts)
        gate_logits = model.model.early_exit_gate(readouts).squeeze(-1)
        mixture = torch.einsum("bsk,kbsv->bsv", exit_pdf, model.lm_head(readouts))
    assert_close(gate_logits[:, valid], want("gate_logits")[:, valid], atol=1e-4)
    assert_close(exit_pdf[valid], want("exit_pdf")[valid], atol=1e-4)
    assert_close(mixture[valid], want("expected_logits")[valid], atol=1e-4)
    loss = model.loss_function(logits=mixture, labels=inputs["labels"], vocab_size=97)
    assert_close(loss, want("expected_exit_loss"), atol=2e-5)
    for parameter in model.model.early_exit_gate.parameters():
        parameter.data.fill_(float("nan"))
    assert_close(model(**inputs).loss, want("loss"), atol=2e-5)


@pytest.mark.parametrize("depth", [0, -1, 2.0, True, "4"])
def test_a_depth_that_is_no_depth_is_refused_when_it_is_set(depth):
    config = OuroConfig()
    for set_depth in (lambda: OuroConfig(num_loops=depth), lambda: setattr(config, "num_loops", depth)):
        with pytest.raises(ValueError, match="num_loops|total_ut_steps"):
            set_depth()
    assert config.num_loops == 4


def test_a_model_without_loops_is_named_as_such():
    with pytest.raises(NotLoopedError, match="Linear is not a looped model"):
        find_looped_model(torch.nn.Linear(2, 2))
