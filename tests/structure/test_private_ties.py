"""The private interfaces of other libraries in docs/architecture.md. A test fails with the name of a tie that changes."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS
from transformers import PreTrainedConfig, PreTrainedModel, TrainerControl
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.generic import TransformersKwargs
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import loopdropout_trainer
from helpers.files import ROOT
from helpers.processes import python
from helpers.tiny import FOREIGN, with_adapter
from loopdropout_trainer.gate_state import example_starts


PAGE = (ROOT / "docs/architecture.md").read_text().partition("## Ties to other libraries")[2]
TIES, library = {}, ""
for bold, cell, use in re.findall(r"^\| (\**)(`.*?`)\** \| (.*?) ?\|$", PAGE, re.MULTILINE):
    place, *members = re.findall("`(.*?)`", cell)
    if bold:
        library = f"{place}."
    else:
        TIES |= {f"{library}{place}{member}": use for member in members or [""]}
PACKAGE = Path(loopdropout_trainer.__file__).parent
NOT_TIES = {"_asdict", "_replace", "_exit", "_abc_impl", "_backward_cls"}
"""Names of Python's own library and of metaclasses."""
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "lm_eval")


def lora_layer():
    return next(module for module in with_adapter().modules() if isinstance(module, Linear))


def logged_names(make):
    trainer = make(max_steps=1)
    trainer.train()
    return {name for log in trainer.state.log_history for name in log}


def collate(**row):
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free="seq_lengths" in row)([row])
    return {name: torch.as_tensor(values).tolist() for name, values in batch.items()}


def shard():
    loader = torch.utils.data.DataLoader([1, 2, 3])
    return prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False).batch_sampler


def saved_names():
    model = with_adapter()
    model.base_model.lora_loop_gates = torch.nn.ParameterDict({"default": torch.ones(4)})
    return {*get_peft_model_state_dict(model)}


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 9, 10, 0, 1]])
PAIRS = [{"prompt_ids": [row], "chosen_ids": [row + 1], "rejected_ids": [row + 2]} for row in (1, 4)]
BATCH = {"input_ids", "attention_mask", "labels"}
SHARD = ("num_processes", "process_index", "split_batches", "drop_last", "even_batches", "batch_sampler")
SAVED = {"base_model.lora_loop_gates", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"}
BEHAVIORS = {
    "config._attn_implementation": lambda make: PreTrainedConfig(attn_implementation="x")._attn_implementation == "x",
    "config._name_or_path": lambda make: PreTrainedConfig(name_or_path="x").to_dict()["_name_or_path"] == "x",
    "PreTrainedModel": lambda make: {*re.findall(r"_\w+", TIES["PreTrainedModel"])} <= {*dir(PreTrainedModel)},
    "TransformersKwargs.__optional_keys__": lambda make: "num_items_in_batch" in TransformersKwargs.__optional_keys__,
    "TrainerState.stateful_callbacks": lambda make: {*TrainerControl().state()} == {"args", "attributes"},
    "TrainerState.log_history": lambda make: {"loss", "step", "num_tokens", "train_runtime"} <= logged_names(make),
    "find_packed_sequence_indices": lambda make: torch.equal(
        find_packed_sequence_indices(POSITIONS), example_starts(POSITIONS).cumsum(-1) - 1
    ),
    "SFTTrainer._total_train_tokens": lambda make: make()._total_train_tokens == 0,
    "SFTTrainer._metrics": lambda make: make()._metrics["eval"] == {},
    "forward of a trainer's model": lambda make: isinstance(vars(make().looped)["forward"], MethodType),
    "hooks of a module": lambda make: {"_forward_hooks", "_forward_pre_hooks"} <= vars(torch.nn.Module()).keys(),
    "shift_labels": lambda make: "shift_labels" in make().looped.forward.__func__.__code__.co_varnames,
    "DataCollatorForLanguageModeling": lambda make: {*collate(input_ids=[1])} == BATCH,
    "seq_lengths": lambda make: collate(input_ids=[1, 2, 3], seq_lengths=[2, 1])["position_ids"][0] == [0, 1, 0],
    "DataCollatorForPreference": lambda make: (
        DataCollatorForPreference(pad_token_id=0)(PAIRS)["input_ids"].tolist() == [[1, 2], [4, 5], [1, 3], [4, 6]]
    ),
    "LoraLayer.lora_variant": lambda make: (
        type(lora_layer().lora_variant) is dict
        and all("lora_variant" in getattr(Linear, name).__code__.co_names for name in ("forward", "merge", "unmerge"))
    ),
    "is_lora_variant": lambda make: LoraConfig.__dataclass_fields__["use_dora"].metadata["is_lora_variant"] is True,
    "default target modules": lambda make: bool(lora_layer()) and isinstance(TARGETS["ouro"], str),
    "get_peft_model_state_dict": lambda make: saved_names() >= SAVED,
    "BatchSamplerShard": lambda make: type(shard()) is BatchSamplerShard and {*SHARD} <= {*dir(shard())},
}


@pytest.mark.parametrize("name", TIES)
def test_tie(name, make_sft):
    if "Dory" in TIES[name] and FOREIGN["dory"] is None:
        pytest.skip("This transformers has no Dory.")
    path, parameters, texts = re.fullmatch(r"(.+?)(?:\((.*)\)|(( \".+?\")+))?", name).groups()[:3]
    try:
        if texts:
            source = inspect.getsource(pkgutil.resolve_name(path))
            places = [source.find(text) for text in re.findall('"(.+?)"', texts)]
            holds = places[0] >= 0 and places == sorted(places)
        elif parameters:
            tied, expected = pkgutil.resolve_name(path), parameters.split(", ")
            is_operator = isinstance(tied, torch._ops.OpOverload)
            names = [a.name for a in tied._schema.arguments] if is_operator else inspect.signature(tied).parameters
            holds = [name for name in names if name != "self"][: len(expected)] == expected
        else:
            holds = bool(BEHAVIORS[name](make_sft) if name in BEHAVIORS else pkgutil.resolve_name(path))
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        holds = repr(error)
    assert holds is True, f"The tie `{name}` of docs/architecture.md has changed: {holds}"


def private_names():
    """Yield the names that the package and the scripts read, set, give, import or override."""
    used, own = set(), set(NOT_TIES)
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Name("self"), name, ast.Store()) | ast.FunctionDef(name):
                    own.add(name)
                case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                    own.add(name)
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.alias(name):
                    used.add(name)
    yield from used - own
    modules = [module.name for module in pkgutil.walk_packages(loopdropout_trainer.__path__, f"{PACKAGE.name}.")]
    for name in modules:
        is_apart = name.endswith(("__main__", ".dory")) or ".integrations." in name  # they need other programs
        members = [] if is_apart else vars(importlib.import_module(name)).values()
        for cls in filter(inspect.isclass, members):
            names = {base: {*vars(base)} - NOT_TIES for base in cls.__mro__}
            ours = {base for base in names if base.__module__.startswith(PACKAGE.name)}
            theirs = {base for base in names if base.__module__.startswith(LIBRARIES)}
            yield from set().union(*map(names.get, ours)) & set().union(*map(names.get, theirs))


def test_private_names_are_listed():
    assert {*BEHAVIORS} <= {*TIES}
    names = {name for name in private_names() if re.match("_[^_]", name)}
    assert names - {*re.findall(r"\w+", PAGE)} == set()


def test_moved_name_makes_only_dory_unsupported():
    move = "import sys, transformers.conversion_mapping, transformers.core_model_loading as moved\n"
    move += "vars(moved).pop('LayerPairCollapse', None)\n"
    move += "for name in [name for name in sys.modules if name.startswith('loopdropout_trainer.models')]:\n"
    move += "    del sys.modules[name]  # a fork has imported them\n"
    ask = "import loopdropout_trainer.models\nprint(loopdropout_trainer.models.UNSUPPORTED['dory'])"
    assert "it needs the interface of transformers 5.24" in python("-c", move + ask)
