"""The plugins for axolotl and ms-swift, through their command lines, and the part of the package that they import.

`.ci/integrations` runs this file where a program is installed. ms-swift needs an older TRL than the shared fixtures.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import loopdropout_trainer  # noqa: F401 (registers the model)
from helpers.files import ROOT
from helpers.processes import ENVIRONMENT, python


MODEL = ROOT / "loopdropout_trainer" / "tiny_ouro"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS = [{"query": f"Tom has {i} apples and buys {i * i} more.", "response": f" He has {i + i * i}."} for i in range(4)]
AXOLOTL = "-m axolotl.cli.main train axolotl.yaml --launcher python"
COMMANDS = {"axolotl": AXOLOTL, "ms_swift": "-m swift.cli.main sft ms_swift.yaml"}
LOSSES = {0: [9.92760, 8.16467, 6.61331], 0.5: [11.08287, 10.37035, 8.68816]}
"""Losses of three steps on `ROWS` by p, which depend on each drawn gate."""


@pytest.fixture
def folder(tmp_path):
    """A folder with the data, the model and an adapter that changes the loss."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "tiny_ouro").symlink_to(MODEL)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(tmp_path / "adapter")
    return tmp_path


def check_losses(history, p):
    assert [row["loss"] for row in history if "loss" in row] == pytest.approx(LOSSES[p], abs=2e-4)


@pytest.mark.parametrize("p", LOSSES)
def test_trainer_has_losses_of_plugins(folder, p):
    pytest.importorskip("trl", minversion="1.9")
    from datasets import Dataset

    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer

    base = AutoModelForCausalLM.from_pretrained(MODEL)
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    args = LoopDropoutConfig(
        folder / "out", p=p, seed=7, max_steps=3, per_device_train_batch_size=4, train_sampling_strategy="sequential",
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", bf16=False, logging_steps=1, report_to="none",
    )  # fmt: skip
    rows = Dataset.from_list(ROWS).rename_columns({"query": "prompt", "response": "completion"})
    trainer = LoopDropoutSFTTrainer(model, args, train_dataset=rows)
    trainer.train()
    check_losses(trainer.state.log_history, p)


@pytest.mark.parametrize("program", COMMANDS)
@pytest.mark.parametrize("p", LOSSES)
def test_plugin_has_losses_of_trainer(folder, program, p):
    command = COMMANDS[program].split()
    pytest.importorskip(command[1].partition(".")[0])
    sample = ROOT / "tests" / "samples" / f"{program}.yaml"
    (folder / sample.name).write_text(sample.read_text().replace("loop_dropout_p: 0.5", f"loop_dropout_p: {p}"))
    (folder / "plugin.py").write_text("import loopdropout_trainer.integrations.ms_swift")
    python(*command, cwd=folder, env={**ENVIRONMENT, "AXOLOTL_DO_NOT_TRACK": "1"}, fresh=True)
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    check_losses(state["log_history"], p)


@pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
def test_axolotl_fused_kernel_and_evaluation_raise():
    from loopdropout_trainer.integrations.axolotl import LoopDropoutPlugin

    with pytest.raises(ValueError, match=r"`lora_o_kernel` must be false.*got true"):
        LoopDropoutPlugin().register({"lora_o_kernel": True})
    with pytest.raises(ValueError, match="`lm-eval` must be 0.4.13 for evaluation, got 0.4.11"):
        import loopdropout_trainer.evaluation  # noqa: F401


HANDLE = f"""
import sys
for name in [*sys.modules]:
    if name.startswith("loopdropout_trainer"):
        del sys.modules[name]
sys.modules.update(dict.fromkeys(["trl", "datasets", "lm_eval", "evaluate"]))  # importing one raises ImportError
import torch
from loopdropout_trainer import LoopDescription, loop_dropout, looped
from loopdropout_trainer.models import external
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
model = get_peft_model(AutoModelForCausalLM.from_pretrained("{MODEL}"), LoraConfig(target_modules={MODULES}))
handle = loop_dropout(model.train(), p=0.5, seed=0)
ids = torch.arange(8).view(2, 4)
model(input_ids=ids, labels=ids).loss.backward()
assert handle.num_draws == 1
"""


def test_interfaces_need_neither_trl_nor_datasets():
    """A fork has imported the shared fixtures, which do not work with axolotl and ms-swift."""
    python("-c", HANDLE, fresh=any(map(find_spec, ("axolotl", "swift"))))
