"""The order of the training examples is the same in every process and after a resume."""

import json
import os
from collections import Counter

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from peft import get_peft_model_state_dict

from helpers.errors import user_error
from helpers.processes import ended, fork, ranks
from helpers.tiny import tiny_ouro
from helpers.tokenizer import make_tokenizer
from helpers.trainers import Recorder, assert_same_weights
from loopdropout_trainer import LoopDropoutConfig, default_peft_config


FIELDS = {
    "max_steps": 10, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2,
    "report_to": "none", "bf16": False, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def make_trainer(folder, **fields):
    """A trainer on 16 examples whose adapter drops inputs, so that the global random state differs between processes."""
    rows = Dataset.from_list([{"prompt": f"{i}+", "completion": "x" * (i % 5 + 1)} for i in range(16)])
    model = tiny_ouro(num_hidden_layers=1, num_loops=2)
    adapter = default_peft_config(model, lora_dropout=0.1)
    args = LoopDropoutConfig(str(folder), **{**FIELDS, **fields})
    data = {"train_dataset": rows, "processing_class": make_tokenizer()}
    return Recorder(model, args, peft_config=adapter, **data)


def examples_of(trainer):
    """Steps with their examples, without the padding."""
    rows = [(seen.step, row) for seen in trainer.seen for row in seen.batch["input_ids"].tolist()]
    padding = trainer.processing_class.pad_token_id
    return [[step, [token for token in row if token != padding]] for step, row in rows]


def train_and_resume(folder, environment, strategy):
    """Train ten steps, four for each epoch, and once more from the middle of the second epoch."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    straight = make_trainer(folder, train_sampling_strategy=strategy)
    straight.train()
    resumed = make_trainer(folder, train_sampling_strategy=strategy)
    resumed.train(f"{folder}/checkpoint-6")
    weights = [get_peft_model_state_dict(trainer.model) for trainer in (straight, resumed)]
    record = {
        "is_same": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "straight": examples_of(straight),
        "resumed": examples_of(resumed),
    }
    (folder / f"rank{environment['RANK']}.json").write_text(json.dumps(record))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="It cannot load an optimizer in two processes on a CPU.",
)
@pytest.mark.parametrize("strategy", ["group_by_length", pytest.param("random", marks=pytest.mark.slow)])
def test_two_processes_train_each_example_once(tmp_path, strategy):
    programs = [fork(train_and_resume, tmp_path, environment, strategy) for environment in ranks(2)]
    assert [ended(program) for program in programs] == [0, 0]
    records = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for epoch in (0, 1):
        steps = range(4 * epoch, 4 * epoch + 4)
        rows = Counter(str(row) for record in records for step, row in record["straight"] if step in steps)
        assert len(rows) == 16 and set(rows.values()) == {1}
    for record in records:
        assert record["resumed"] == [seen for seen in record["straight"] if seen[0] >= 6]
        assert record["is_same"]


@pytest.mark.parametrize("strategy", ["group_by_length", "random", "sequential"])
def test_one_process_resumes_in_a_later_epoch(tmp_path, strategy):
    fields = {"per_device_train_batch_size": 4, "train_sampling_strategy": strategy}
    straight, resumed = (make_trainer(tmp_path, **fields) for _ in range(2))
    straight.train()
    resumed.train(f"{tmp_path}/checkpoint-6")
    assert min(seen.step for seen in resumed.seen) == 6
    assert_same_weights(resumed, straight)


def test_order_that_a_resume_cannot_restore_raises(tmp_path):
    with user_error("`accelerator_config` must have `use_seedable_sampler: true`"):
        make_trainer(tmp_path, accelerator_config={"use_seedable_sampler": False})
    with user_error("`train_sampling_strategy` must be .* got 'batch_rebalance'"):
        make_trainer(tmp_path, train_sampling_strategy="batch_rebalance")
