"""The plugins for axolotl and ms-swift, through their command lines, and the part of the package that they import.

The tests of a program run where it is installed: `.ci/integrations` makes such environments. ms-swift needs an older TRL than
`conftest.py`, so this file imports neither.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from processes import ENVIRONMENT, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopdropout_trainer


MODEL = str(ROOT / "loopdropout_trainer" / "tiny_ouro")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
needs_axolotl = pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
needs_swift = pytest.mark.skipif(find_spec("swift") is None, reason="ms-swift is not installed")


def run(*words, folder, **environment):
    """Run a Python program without a network, and return its output."""
    command = [sys.executable, *map(str, words)]
    environment = {**ENVIRONMENT, "AXOLOTL_DO_NOT_TRACK": "1", **environment}
    program = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert program.returncode == 0, program.stdout[-4000:]
    return program.stdout


def load(adapter):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


@pytest.fixture
def adapter(tmp_path):
    """Folder of an adapter that changes the loss, so that gates change it too."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def saved_losses(checkpoint):
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


# axolotl

AXOLOTL = {
    "base_model": MODEL, "plugins": ["loopdropout_trainer.integrations.axolotl.LoopDropoutPlugin"],
    "datasets": [{"path": "texts.jsonl", "ds_type": "json", "type": "completion"}], "dataset_prepared_path": "rows",
    "sequence_len": 128, "val_set_size": 0, "adapter": "lora", "lora_model_dir": "adapter", "output_dir": "out",
    "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "save_steps": 3, "logging_steps": 1,
    "optimizer": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler": "constant", "seed": 7, "bf16": False,
    "gradient_checkpointing": True,
}  # fmt: skip


def axolotl_losses(folder, **fields):
    (folder / "config.yml").write_text(yaml.safe_dump({**AXOLOTL, **fields}))
    run("-m", "axolotl.cli.main", "train", "config.yml", "--launcher", "python", folder=folder)
    return saved_losses(folder / "out" / "checkpoint-3")


def write_texts(folder):
    texts = [{"text": f"Tom has {i} apples and buys {i * i} more. He has {i + i * i}."} for i in range(12)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))


def trainer_losses(folder, adapter, p):
    """Losses of the package's trainer on the rows that axolotl prepared."""
    from datasets import load_from_disk

    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer

    (rows,) = (folder / "rows").glob("*/dataset_info.json")
    args = LoopDropoutConfig(
        str(folder / "ours"), p=p, seed=7, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", bf16=False, use_cpu=True,
    )  # fmt: skip
    dataset = load_from_disk(str(rows.parent)).select_columns(["input_ids", "labels"])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = LoopDropoutSFTTrainer(load(adapter), args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@needs_axolotl
@pytest.mark.parametrize("p", [0, 0.5])
def test_axolotl_has_losses_of_trainer(tmp_path, adapter, p):
    write_texts(tmp_path)
    losses = axolotl_losses(tmp_path, loop_dropout_p=p)
    assert losses == pytest.approx(trainer_losses(tmp_path, adapter, p), abs=2e-4)


@needs_axolotl
def test_axolotl_fused_kernels_raise():
    from axolotl.utils.dict import DictDefault

    from loopdropout_trainer.integrations.axolotl import LoopDropoutPlugin

    with pytest.raises(ValueError, match=r"`lora_o_kernel` must be false.*got true"):
        LoopDropoutPlugin().register(DictDefault(lora_o_kernel=True))


# ms-swift

SWIFT = {
    "model": MODEL, "check_model": False, "torch_dtype": "float32", "use_chat_template": False, "adapters": "adapter",
    "load_args": False, "external_plugins": "plugin.py", "callbacks": "loop_dropout", "dataset": "rows.jsonl",
    "dataset_shuffle": False, "train_dataloader_shuffle": False, "output_dir": "out", "add_version": False, "seed": 7,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "save_steps": 3,
    "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "warmup_ratio": 0,
    "weight_decay": 0, "max_grad_norm": 0, "report_to": "none", "use_cpu": True,
}  # fmt: skip
ROWS = [{"query": f"Tom has {i} apples and buys {i * i} more.", "response": f" He has {i + i * i}."} for i in range(4)]


def swift_losses(folder, **fields):
    (folder / "plugin.py").write_text("import loopdropout_trainer.integrations.ms_swift\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "sft.yaml").write_text(yaml.safe_dump({**SWIFT, **fields}))
    run("-m", "swift.cli.main", "sft", "sft.yaml", folder=folder)
    return saved_losses(folder / "out" / "checkpoint-3")


def loop_losses(adapter, p):
    """Losses of a plain loop over ms-swift's batch."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    encode = lambda text: tokenizer(text).input_ids
    ids = [encode(row["query"]) + encode(row["response"]) + [tokenizer.eos_token_id] for row in ROWS]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for target, row in zip(labels, ROWS, strict=True):
        target[: len(encode(row["query"]))] = -100
    model = load(adapter).train()
    loopdropout_trainer.loop_dropout(model, p=p, seed=SWIFT["seed"])
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_swift
@pytest.mark.parametrize("p", [0, 0.5])
def test_swift_has_losses_of_plain_loop(tmp_path, adapter, p):
    losses = swift_losses(tmp_path, model_kwargs={"loop_dropout_p": p})
    assert losses == pytest.approx(loop_losses(adapter, p), abs=2e-4)


# The part of the package that the plugins import

BLOCKED = ("trl", "datasets", "lm_eval", "evaluate", "axolotl", "swift")
HANDLE = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED}))  # an import of one of them raises ImportError
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
from loopdropout_trainer import loop_dropout
model = get_peft_model(AutoModelForCausalLM.from_pretrained({MODEL!r}), LoraConfig(target_modules={MODULES}))
handle = loop_dropout(model.train(), p=0.5, seed=0)
ids = __import__("torch").arange(8).view(2, 4)
model(input_ids=ids, labels=ids).loss.backward()
handle.remove()
"""


def test_handle_needs_no_trl_and_no_datasets(tmp_path):
    run("-c", HANDLE, folder=tmp_path)


def test_evaluation_with_lm_eval_of_axolotl_raises(tmp_path):
    folder = tmp_path / "lm_eval-0.4.11.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0.4.11\n")
    script = "try: import loopdropout_trainer.evaluation\nexcept ValueError as error: print(error)"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert "`lm-eval` must be 0.4.13 for evaluation, got 0.4.11" in run("-c", script, folder=tmp_path, PYTHONPATH=path)
