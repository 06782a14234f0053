"""Pushes to a Hub, and another person who loads from it with an empty cache."""

import pytest

from helpers.files import ROOT
from helpers.hub import running_hub
from helpers.processes import ENVIRONMENT, python


TRAIN = """
from datasets import Dataset
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, load_model, merge_and_save, push_merged_to_hub

rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(16)]
args = LoopDropoutConfig(
    "run", max_steps=2, save_steps=1, bf16=False, report_to="none", push_to_hub=True, hub_model_id="me/adapter",
    hub_private_repo=True, hub_always_push=True, num_train_epochs=1, hub_token="hf_mine",
)
trainer = LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.push_to_hub(tags=["sums"], dataset_name="me/sums")
for name, standalone in (("merged", False), ("alone", True)):
    folder = merge_and_save(trainer.model, name, trainer.processing_class, standalone=standalone)
    push_merged_to_hub(folder, f"me/{name}", token="hf_mine")
"""
PRIVATE_RUN = """
--max_steps 1 --num_train_examples 8 --num_eval_examples 8 --benchmarks null --eval_num_loops null
--single_loop_accuracy false --compare_with null --output_dir run
--push_merged_to_hub true --hub_model_id me/secret --hub_private_repo true --hub_token hf_mine
"""
READ = """
import sys
from loopdropout_trainer import load_model
from loopdropout_trainer.tokenizers import load_tokenizer

tokenizer = load_tokenizer("tiny-ouro")
ids = tokenizer("1 + 1 =", return_tensors="pt").input_ids
texts = {load_model(name).generate(ids, max_new_tokens=4, do_sample=False).sum().item() for name in sys.argv[1:]}
assert len(texts) == 1
"""
ALONE = """
import re, sys
sys.modules["loopdropout_trainer"] = None
from huggingface_hub import ModelCard
code = re.findall(r"(?ms)^```python\\n(.*?)^```", ModelCard.load("me/alone").text)[1]
exec(code)
assert model.config.num_loops == 4 and tokenizer("1")["input_ids"]
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with running_hub() as hub:
        env = {**ENVIRONMENT, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HOME": str(folder / "mine"), "HF_TOKEN": "hf_mine"}
        python("-c", TRAIN, cwd=folder, env=env, fresh=True)
        yield hub, {**env, "HF_HOME": str(folder / "theirs")}


def test_pushes_have_settings_and_no_locks(pushed):
    hub, _ = pushed
    commits = [(message, files) for repository, _, message, files in hub.commits if repository == "me/adapter"]
    in_progress = [files for message, files in commits if message.startswith("Training in progress")]
    assert len(in_progress) == 2 and "private" in str(hub.repositories["me/adapter"])
    for files in in_progress:
        assert {"adapter_model.safetensors", "loop_dropout.json", "adapter_config.json"} <= {*files}
    for *_, files in hub.commits:
        assert not [name for name in files if "lock" in name]


def test_merged_model_of_a_private_run_is_private(tmp_path):
    with running_hub() as hub:
        env = {**ENVIRONMENT, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        env["HF_HOME"] = str(tmp_path / "home")
        words = [ROOT / "recipes/sft.py", ROOT / "recipes/quickstart.yaml", *PRIVATE_RUN.split()]
        python(*words, cwd=tmp_path, env=env, fresh=True)  # the endpoint is read at the import
    assert "model.safetensors" in hub.files("me/secret")
    assert hub.repositories["me/secret"]["visibility"] == "private"


def test_cards_name_their_repository(pushed):
    hub, _ = pushed
    card = hub.files("me/adapter")["README.md"].decode()
    assert "- sums\n" in card and "me/sums" in card and "loopdropout serve me/adapter" in card
    for name in ("merged", "alone"):
        card = hub.files(f"me/{name}")["README.md"].decode()
        assert f"# me/{name}\n" in card and f'from_pretrained("me/{name}"' in card and '"."' not in card
        assert f"vllm serve me/{name}\n" in card and f"loopdropout chat me/{name}\n" in card


def test_another_person_loads_pushed_models(pushed, tmp_path):
    _, env = pushed
    python("-c", READ, "me/adapter", "me/merged", cwd=tmp_path, env=env, fresh=True)
    python("-c", ALONE, cwd=tmp_path, env=env, fresh=True)
