"""Shared fixtures: golden tensors of the reference implementations, and models and data small enough for seconds."""

import json
import logging
import os
import signal
from types import SimpleNamespace

import datasets.config
import huggingface_hub.constants
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from helpers.caches import keep_results
from helpers.files import GOLDEN
from helpers.golden import FAMILIES
from helpers.processes import SERVER, TRAINING, kill_all
from helpers.tiny import TINY, adapted, steady, tiny_ouro
from helpers.tokenizer import make_tokenizer
from helpers.trainers import SHORT_RUN
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, merge_and_save
from loopdropout_trainer.own_code import IMPORTED


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it
# For this process, which has read the variable already.
huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = os.environ["HF_HUB_OFFLINE"] == "1"
torch.set_num_threads(1)  # two threads on a busy machine spin: a hundred times slower
keep_results()
SERVER.begin(TRAINING)


@pytest.fixture(autouse=True)
def no_program_outlives_its_test():
    yield
    kill_all()


@pytest.fixture(autouse=True)
def imported_files_end_with_their_test():
    """A recipe names the files that its process has imported. For a user that is one command, and here many tests."""
    before = [*IMPORTED]
    yield
    IMPORTED[:] = before


@pytest.fixture(scope="session")
def golden():
    """`golden(family)`: metadata, tensors and published weights of one family."""

    def load(family):
        meta = {**json.loads((GOLDEN / f"{family}.json").read_text()), "name": family}
        tensors = load_file(GOLDEN / f"{family}.safetensors")
        weights = {name[len("weights/") :]: x for name, x in tensors.items() if name.startswith("weights/")}
        return SimpleNamespace(meta=meta, tensors=tensors, weights=weights)

    return load


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, golden):
    """Golden data of each family in turn."""
    return golden(request.param)


tokenizer = pytest.fixture(make_tokenizer, scope="session")


@pytest.fixture(params=TINY)
def make_tiny(request):
    """The function that makes a tiny random model of each family in turn."""
    return TINY[request.param]


@pytest.fixture
def model():
    return tiny_ouro()


@pytest.fixture(scope="session")
def dataset():
    """48 short prompt-completion rows of different lengths."""
    return Dataset.from_list([{"prompt": f"{i}+{i % 7}", "completion": "=" + "x" * (i % 5 + 1)} for i in range(48)])


@pytest.fixture
def config(tmp_path):
    """`config(cls, **fields)`: arguments of a short float32 run that logs every step."""

    def make(cls=LoopDropoutConfig, **fields):
        return cls(**{"output_dir": str(tmp_path / "run"), **SHORT_RUN, **fields})

    return make


@pytest.fixture
def make_sft(config, dataset, tokenizer):
    """`make_sft(model, cls, rows, **fields)`: a trainer of a short run, by default of a tiny Ouro.

    It does not compute layers again in the backward pass. Tests of that ask for it.
    """

    def make(model=None, cls=LoopDropoutSFTTrainer, rows=dataset, peft_config=None, callbacks=None, **fields):
        data = {"train_dataset": rows, "eval_dataset": dataset.select(range(4)), "processing_class": tokenizer}
        model = tiny_ouro(num_hidden_layers=1) if model is None else model
        fields = {"gradient_checkpointing": False, **fields}
        return cls(model, config(**fields), peft_config=peft_config, callbacks=callbacks, **data)

    return make


@pytest.fixture
def train(make_sft):
    """The same, after its training."""

    def run(*given, **fields):
        trainer = make_sft(*given, **fields)
        trainer.train()
        return trainer

    return run


@pytest.fixture
def log(caplog):
    """What the package logs. A warning that is printed once is there although another test has seen it."""
    transformers_logging.warning_once.cache_clear()
    own_logger = logging.getLogger("loopdropout_trainer")
    own_logger.addHandler(caplog.handler)
    yield caplog
    own_logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Folders of a model, its adapter, and the merged model."""
    folder = tmp_path_factory.mktemp("saved")
    model = adapted(steady())
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    steady().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model.save_pretrained(folder / "adapter")
    merge_and_save(model, folder / "merged", tokenizer)
    return folder
