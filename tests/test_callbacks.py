"""Callbacks: logged gates, sampled depths, the adaptive rule's estimate in checkpoints, and live diagnostics."""

import pytest
from conftest import Recorder, assert_same_weights

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.gates.depth import sample_depth


EXACT = {"adam_epsilon": 1e-3, "max_grad_norm": 0}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
DEPTHS = {"depth_sampling": "uniform", "depth_sampling_args": {"low": 1, "high": 6}}


@pytest.mark.parametrize("fields", [{}, SPLIT], ids=["whole", "split"])
def test_gates_are_logged(train, fields):
    trainer = train(cls=Recorder, p=[0.9, 0.5, 0.5, 0.1], **fields)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for step, log in enumerate(logs):
        gates = [seen.gates for seen in trainer.seen if seen.step == step]
        assert log["gate_mean"] == pytest.approx(sum(g.mean().item() for g in gates) / len(gates))
        for loop in range(4):
            shares = [(g[loop] != 0).float().mean().item() for g in gates]
            assert log[f"active_loop_{loop + 1}"] == pytest.approx(sum(shares) / len(shares))


def test_depths_are_sampled_for_each_step(train):
    whole = train(cls=Recorder, max_steps=6, **DEPTHS, **EXACT)
    sampler, seed = whole.args.make_depth_sampler(), whole.args.seed
    depths = [sample_depth(sampler, seed, step, 4) for step in range(6)]
    assert [seen.depth for seen in whole.seen] == depths and len(set(depths)) > 2
    assert [len(seen.gates) for seen in whole.seen] == depths
    assert [log["depth"] for log in whole.state.log_history if "depth" in log] == depths
    assert whole.num_loops == 4
    split = train(cls=Recorder, max_steps=6, **DEPTHS, **EXACT, **SPLIT)
    assert [seen.depth for seen in split.seen[::2]] == [seen.depth for seen in split.seen[1::2]] == depths
    assert_same_weights(whole, split, atol=1e-5, rtol=1e-3)


def test_resumed_training_samples_the_same_depths(make_sft):
    trainers = []
    for resume in (None, "checkpoint-2"):
        trainer = make_sft(save_strategy="steps", save_steps=2, **DEPTHS)
        trainer.train(resume and f"{trainer.args.output_dir}/{resume}")
        trainers.append(trainer)
    assert_same_weights(*trainers)
    logs = [[log.get("loss") for log in trainer.state.log_history] for trainer in trainers]
    assert logs[0][:4] == logs[1][:4]


def test_sensitivity_is_summed_over_micro_batches(train):
    whole, split = (train(rule="adaptive", **EXACT, **fields) for fields in ({}, SPLIT))
    assert whole.rule.estimate.tolist() == pytest.approx(split.rule.estimate.tolist(), rel=2e-3)


def test_live_diagnostics_leave_training_unchanged(train):
    live = train(live_diagnostics_steps=3, live_diagnostics_rows=4)
    assert_same_weights(live, train())
    logs = [log for log in live.state.log_history if "live/rho_loop_1" in log]
    assert [log["step"] for log in logs] == [3, 4]
    for log in logs:
        assert {f"live/{name}_loop_{t}" for name in ("rho", "readout") for t in range(1, 5)} <= log.keys()
    assert ["entropy" in log for log in live.state.log_history if "loss" in log] == [True] * 4


def test_live_diagnostics_need_evaluation_examples(config, dataset, tokenizer, model):
    args = config(live_diagnostics_steps=1)
    with pytest.raises(ValueError, match="`eval_dataset` must be given"):
        LoopDropoutSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
