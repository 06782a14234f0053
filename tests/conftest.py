"""Shared fixtures: golden tensors of the reference implementations, and models and data small enough for seconds."""

import gc
import importlib.util
import json
import logging
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import datasets.config
import huggingface_hub.constants
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from processes import ENVIRONMENT, ROOT, kill_all, python  # noqa: F401
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import functional as F
from transformers import HrmTextForCausalLM, PreTrainedTokenizerFast

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config, models


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it


# For this process, which has read the variable already.
huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = os.environ["HF_HUB_OFFLINE"] == "1"
torch.set_num_threads(1)  # two threads on a busy machine spin: a hundred times slower
TINY_OURO_PATH = ROOT / "loopdropout_trainer" / "tiny_ouro"
GOLDEN, SAMPLES = ROOT / "tests" / "golden", ROOT / "tests" / "samples"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `pairs` run all cases of the first family and one of each other family; the others are slow."""
    tables = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs"):
            (family,) = {"family", "make_tiny", "base"} & item.callspec.indices.keys()
            tables[item.path, item.originalname, item.callspec.indices[family]].append(item)
    for (*_, place), cases in tables.items():
        for number, item in enumerate(cases):
            if place > 0 and number != place % len(cases):  # another case for each family
                item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n` the tests of a file run in one process: what they share is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_collection_finish():
    """Keep what was imported out of the garbage collections: each training makes one, which would take a third of a second."""
    gc.collect()
    gc.freeze()


def load_script(path):
    """A script of the repository, such as `recipes/sft.py`, as a module."""
    name = f"script_{Path(path).stem}"  # a package is called `evaluate`, too
    sys.path.append(str((ROOT / path).parent))  # scripts import one another
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_lines(path, rows):
    """Write a JSONL file and return its path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def no_program_outlives_its_test():
    yield
    kill_all()


FAMILIES = {
    "ouro": models.OuroForCausalLM, "huginn": models.HuginnForCausalLM, "loopus": models.LoopusForCausalLM,
    "nanbeige": models.NanbeigeForCausalLM, "nanbeige_skip": models.NanbeigeForCausalLM, "parcae": models.ParcaeForCausalLM,
    "raven_llama": models.HuginnForCausalLM, "raven_olmo": models.HuginnForCausalLM,
}  # fmt: skip
LAYOUTS = {"raven_llama": "llama", "raven_olmo": "olmo"}  # what no field of the hub's says


@pytest.fixture(scope="session")
def golden():
    """`golden(family)`: metadata, tensors and published weights of one family."""

    def load(family):
        meta = {**json.loads((GOLDEN / f"{family}.json").read_text()), "name": family}
        tensors = load_file(GOLDEN / f"{family}.safetensors")
        weights = {name[len("weights/") :]: x for name, x in tensors.items() if name.startswith("weights/")}
        return SimpleNamespace(meta=meta, tensors=tensors, weights=weights)

    return load


FOREIGN = {"dory": getattr(transformers, "DoryForCausalLM", None)}  # since transformers 5.24


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, golden):
    """Golden data of each family in turn."""
    return golden(request.param)


def golden_model(data, **config):
    """The tiny model of the reference with its weights; `data` is what `golden(family)` gives."""
    name = data.meta["name"]
    layout = {"block_layout": LAYOUTS[name]} if name in LAYOUTS else {}
    model_class = {**FAMILIES, **FOREIGN}[name]
    config = model_class.config_class(**{**data.meta["config"], **layout, **config})
    return model_class.from_pretrained(None, config=config, state_dict=dict(data.weights))


def golden_adapted(data, model=None, modules=None):
    """The same with the oracle's adapter on it, or on some of its modules."""
    lora = data.meta["lora"]
    modules = modules or lora["modules"]
    config = LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules=modules, task_type="CAUSAL_LM")
    model = golden_model(data) if model is None else model
    peft_model = get_peft_model(model, config)
    for name in modules:
        layer = model.get_submodule(submodule_name(data, name))
        layer.lora_A["default"].weight.data.copy_(data.tensors[f"oracle/lora_A/{name}"])
        layer.lora_B["default"].weight.data.copy_(data.tensors[f"oracle/lora_B/{name}"])
    return peft_model


def submodule_name(data, name):
    """The name in our model of what the reference calls `name`; LoopUS has its backbone inside a causal model here."""
    return f"model.{name}" if data.meta["family"] == "loopus" else name


def golden_inputs(data, batch):
    """Inputs, labels, and for Huginn the initial state, of a batch such as `padded` or `oracle/left`."""
    names = ("input_ids", "attention_mask", "labels", "initial_state")
    inputs = {name: data.tensors[f"{batch}/{name}"] for name in names if f"{batch}/{name}" in data.tensors}
    if "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"][:, : inputs["input_ids"].shape[1]]
    return inputs


def example_nll(logits, labels):
    """Sums of the cross entropy over each row's targets, [B]."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")
    return losses.sum(dim=1)


def byte_tokenizer(special, more=(), merges=(), **names):
    """One token for each byte, and `more` that `merges` make: tokenizes any text and needs no file."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def make_tokenizer():
    return byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>")


tokenizer = pytest.fixture(make_tokenizer, scope="session")


def tiny(model_class, **fields):
    """A function that makes a random model over the byte tokenizer, with the same weights at every call."""

    def make(**config):
        torch.manual_seed(0)
        return model_class(model_class.config_class(**{**fields, **config}))

    return make


BYTES = {"vocab_size": 258, "pad_token_id": 1, "eos_token_id": 0, "intermediate_size": 48}
DECODER = {
    **BYTES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
FRAME = {
    **BYTES, "n_embd": 32, "mean_recurrence": 4, "block_size": 512,
    "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
}  # fmt: skip
FOUR_LAYERS = {**DECODER, "num_hidden_layers": 4}
RAVEN = {**FRAME, "n_heads": 4}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
INIT = {"std": 0.1, "embed_scale": 1.0}
CONVERTED = {**RAVEN, "tie_embeddings": False, "qk_bias": False, "rope_theta": 500_000.0, "init_values": INIT}
LLAMA = {"block_layout": "llama", "num_key_value_heads": 2, "rope_scaling": {**SCALING, "rope_type": "llama3"}}
OLMO = {"block_layout": "olmo", "num_key_value_heads": 4, "rope_scaling": None, "head_dim": 12}
tiny_ouro = tiny(models.OuroForCausalLM, **DECODER)
tiny_hrm = tiny(HrmTextForCausalLM, **{**DECODER, "num_hidden_layers": 1}, head_dim=8, L_cycles=2, H_cycles=3)


def tiny_dory(**config):
    """A random Dory whose scales differ."""
    fields = {
        **DECODER, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
        "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "initializer_range": 0.1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    model = tiny(FOREIGN["dory"], **fields)(**config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data *= 1 + 0.5 * torch.rand_like(parameter)
    return model


NEEDS_DORY = pytest.mark.skipif(FOREIGN["dory"] is None, reason="transformers has no such model")
DORY = pytest.param(tiny_dory, id="dory", marks=NEEDS_DORY)
TINY = {
    "ouro": tiny_ouro,
    "huginn": tiny(models.HuginnForCausalLM, **RAVEN),
    "loopus": tiny(models.LoopusForCausalLM, **FOUR_LAYERS, num_key_value_heads=2, head_dim=8, N=4),
    "nanbeige": tiny(models.NanbeigeForCausalLM, **DECODER, num_key_value_heads=2, head_dim=12, num_loops=4),
    "raven_llama": tiny(models.HuginnForCausalLM, **CONVERTED, **LLAMA),
    "raven_olmo": tiny(models.HuginnForCausalLM, **CONVERTED, **OLMO),
    "parcae": tiny(models.ParcaeForCausalLM, **{**FRAME, "n_layers_in_recurrent_block": 2}, num_attention_heads=4),
}


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
        defaults = {
            "output_dir": str(tmp_path / "run"), "max_steps": 4, "per_device_train_batch_size": 4, "bf16": False,
            "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        return cls(**{**defaults, **fields})

    return make


class Recording:
    """Keeps each micro-batch of a trainer: inputs, gates, depth, loss, gradients, and the weights before."""

    seen = ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        kept = SimpleNamespace(step=self.state.global_step)
        kept.weights = {name: p.detach().clone() for name, p in trained_parameters(self.model).items()}
        kept.batch = {name: x.clone() for name, x in inputs.items() if torch.is_tensor(x)}
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        kept.gated, kept.gates, kept.depth = self.gate_state.batch, self.gate_state.gates, self.num_loops
        kept.loss = loss.detach()
        self.seen = [*self.seen, kept]
        return loss

    def training_step(self, *args, **kwargs):
        """Keep the gradients after the backward pass, with zeros where the loss does not depend on a weight."""
        loss = super().training_step(*args, **kwargs)
        trained = trained_parameters(self.model).items()
        self.seen[-1].gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained}
        return loss


class Recorder(Recording, LoopDropoutSFTTrainer):
    pass


@pytest.fixture
def make_sft(config, dataset, tokenizer):
    """`make_sft(model, cls, rows, **fields)`: a trainer of a short run, by default of a tiny Ouro."""

    def make(model=None, cls=LoopDropoutSFTTrainer, rows=dataset, peft_config=None, callbacks=None, **fields):
        data = {"train_dataset": rows, "eval_dataset": dataset.select(range(4)), "processing_class": tokenizer}
        model = tiny_ouro() if model is None else model
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
    """What the package logs."""
    own_logger = logging.getLogger("loopdropout_trainer")
    own_logger.addHandler(caplog.handler)
    yield caplog
    own_logger.removeHandler(caplog.handler)


def randomise(peft_model, scale=0.3, seed=0):
    """Add random numbers to the factors B and learned gates of a model's adapters; return the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name or "lora_loop_gates" in name:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return peft_model


def varied(model, std=0.3):
    """Give a random model weights with which its greedy texts vary."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def with_adapter(model=None, seed=1, scale=0.05, **config):
    """A PEFT model, by default over a tiny Ouro, whose adapter changes the output."""
    model = tiny_ouro() if model is None else model
    return randomise(get_peft_model(model, default_peft_config(model, **config)), scale, seed)


def trained_parameters(model):
    """The parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def logged(trainer, name):
    """All values that a trainer has logged under a name."""
    return [log[name] for log in trainer.state.log_history if name in log]


def assert_same_weights(one, other, **close):
    """Compare the adapters of two trainers: bit for bit, or as closely as `rtol` and `atol` say."""
    got, want = (get_peft_model_state_dict(trainer.model) for trainer in (one, other))
    torch.testing.assert_close(got, want, **(close or {"rtol": 0, "atol": 0}))
