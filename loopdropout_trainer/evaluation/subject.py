"""The model that is evaluated: how it is loaded, its depth, gates and readout, how it is prompted, and what trained it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from loopdropout_trainer.lora import add_gates, use_gates
from loopdropout_trainer.checks import check_integer
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.looped import as_gate_matrix, find_looped_model
from loopdropout_trainer.processes import all_processes, from_main_process
from loopdropout_trainer.record.identity import (
    Identity,
    adapter_identity,
    differences,
    identity_key,
    model_identity,
)
from loopdropout_trainer.record.measurement import NONE, gates_text
from loopdropout_trainer.saving import adapter_files
from loopdropout_trainer.saving.files import read_json, sha256_of_json
from loopdropout_trainer.settings.arguments import BenchmarkArguments, ModelArguments
from loopdropout_trainer.settings.recipe import method_title
from loopdropout_trainer.settings.tokenizer import (
    apply_chat_template,
    as_in_its_file,
    check_vocabulary,
    load_tokenizer,
)
from loopdropout_trainer.training.checkpoints.sealing import CheckpointError, is_sealed, run_of


def load_model(model: ModelArguments, adapter: str | None = None) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a looped model at its evaluation depth, with an adapter on it if there is one, and its tokenizer.

    Raises:
        ValueError: if there is no such model or adapter, its weights are not finite, or the adapter is of another kind of
            model or method.
    """
    tokenizer = load_tokenizer(model)
    with user_supplied(f"The model {model.model_name_or_path} cannot be loaded"):
        base = AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path, trust_remote_code=False, **model.init_kwargs
        )
    check_vocabulary(tokenizer, find_looped_model(base).config)
    if adapter is None:
        return base.eval(), tokenizer
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        adapted = adapter_files.load_adapter(base, adapter_files.adapter_folder(adapter))
    add_gates(adapted, in_activation_dtype=True)  # as in training: the same answers as those that sft.py reports
    return adapted.eval(), tokenizer


def load_in_all_processes(
    model: ModelArguments, adapter: str | None
) -> tuple[nn.Module, PreTrainedTokenizerBase, Identity]:
    """Load a model as `load_model` does, in each process onto its device; beside it what its measurements depend on."""
    state = all_processes()
    with state.main_process_first():
        loaded, tokenizer = load_model(model, adapter)
    identity = from_main_process(lambda: model_identity(loaded, tokenizer))
    return loaded.to(state.device), tokenizer, identity


class Training(NamedTuple):
    """The training that an adapter comes from, as far as its folder tells."""

    identity: Identity | None = None
    method: str | None = None
    seed: int | None = None
    steps: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the adapter's measurements."""
        run = None if self.identity is None else identity_key(self.identity)
        return {"run": run, "seed": self.seed, "steps": self.steps}


def training_of(adapter: str | None) -> Training:
    """Return the training that an adapter comes from.

    The identity is that of its manifest, if weights and configuration are those that were sealed; else what was saved with
    the adapter.
    """
    if adapter is None:
        return Training()
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        folder = adapter_files.adapter_folder(adapter)
        identity = _sealed_identity(folder) or _saved_identity(folder)
    fields = {**identity.get("adapter", {}), **identity.get("settings", {})}
    try:
        steps = read_json(folder / "trainer_state.json")["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        steps = None
    seed = identity.get("seeds", {}).get("seed")
    return Training(
        identity,
        method_title(fields) if fields.get("rule") else None,
        seed if isinstance(seed, int) else None,
        steps if isinstance(steps, int) else None,
    )


def _sealed_identity(folder: Path) -> Identity | None:
    try:
        run = run_of(folder) if is_sealed(folder, adapter_files.WEIGHTS_FILE) else None
    except CheckpointError:  # of another version
        return None
    adapter = adapter_identity(adapter_files.read_adapter_config(folder))
    return None if differences(run, adapter, ("adapter",)) else run


def _saved_identity(folder: Path) -> Identity:
    config, settings = adapter_files.read_adapter_config(folder), adapter_files.adapter_metadata(folder)
    targets = config.target_modules
    return {
        "adapter": {
            **{name: getattr(config, name) for name in ("r", "lora_alpha", "use_rslora")},
            "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
        },
        "loops": {name: settings.pop(name) for name in ("num_loops",) if name in settings},
        "seeds": {"seed": settings.pop("gate_seed")} if "gate_seed" in settings else {},
        "settings": settings,
    }


@dataclass
class Subject:
    """A model with all that its answers depend on.

    Attributes:
        model: looped causal language model, with or without an adapter.
        tokenizer: of the model.
        batch_size: rows that one process computes together; the answers do not depend on it.
        decoding: see `generate_greedy`.
        gates: [K] multipliers of the adapter, or a string such as `1-0-0-0`; None: those in force, which are unit gates
            unless the caller has applied others.
        readout: loop t, 1-based, after which the model stops and is read out; None: the last one.
        apply_chat_template: whether prompts are turns of a chat; None: as the benchmark's protocol has it.
        system_instruction: text of a system turn before them.
        max_new_tokens: maximum number of tokens of a completion; None: as the benchmark's protocol has it.

    Raises:
        ValueError: for gates or a readout that the model does not have, or a system turn without turns.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 16
    decoding: str = "eager"
    gates: str | float | Sequence[float] | None = None
    readout: int | None = None
    apply_chat_template: bool | None = None
    system_instruction: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        self.looped = find_looped_model(self.model)
        self.tokenizer = as_in_its_file(self.tokenizer)
        check_vocabulary(self.tokenizer, self.looped.config)
        self.num_loops = self.looped.config.num_loops
        if self.gates is not None:
            self.gates = parse_gates(self.gates, self.num_loops)
        if self.gates is not None and not isinstance(self.model, PeftModel):
            raise UserError("`gates` multiply an adapter's update, and the model has no adapter: leave them out.")
        if self.readout is not None:
            check_integer("readout", self.readout, 1, self.num_loops)
        if self.system_instruction is not None and not self.apply_chat_template:
            raise UserError("`system_instruction` is a turn of a chat: set `apply_chat_template` to true.")

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, arguments: BenchmarkArguments, **fields: Any):
        """Return the subject that a recipe describes."""
        for name in ("decoding", "apply_chat_template", "system_instruction", "max_new_tokens"):
            fields[name] = getattr(arguments, name)
        return cls(model, tokenizer, arguments.benchmark_batch_size, **fields)

    def running(self):
        """Run the model inside the block under its gates and to its readout; see `run_as`."""
        return run_as(self.model, self.gates, self.readout)

    def in_turns(self, protocol: bool) -> bool:
        """Return whether the prompts of a benchmark are turns of a chat, if its protocol says `protocol`.

        Raises:
            ValueError: if it is, and the tokenizer has no chat template.
        """
        turns = protocol if self.apply_chat_template is None else self.apply_chat_template
        if turns and not self.tokenizer.chat_template:
            raise UserError(
                "The benchmark's prompts are turns, and the tokenizer has no chat template: set `chat_template` (tulu2, ...)."
            )
        return turns

    def prompt_text(self, prompt: str, in_turns: bool) -> str:
        """Return the text that the model continues."""
        if not in_turns:
            return prompt
        system = [] if self.system_instruction is None else [{"role": "system", "content": self.system_instruction}]
        turns = [*system, {"role": "user", "content": prompt}]
        return apply_chat_template(self.tokenizer, turns, tokenize=False, add_generation_prompt=True)

    def tokenize(self, text: str, in_turns: bool) -> list[int]:
        """Return the token ids of a text; a chat template writes its special tokens itself."""
        return self.tokenizer(text, add_special_tokens=not in_turns)["input_ids"]

    @property
    def loops(self) -> dict[str, Any]:
        """Which loops run, with which gates, and which of them is read out: a part of the identity of what is measured."""
        return {"num_loops": self.num_loops, "gates": self.gates, "readout": self.readout}

    @property
    def place(self) -> dict[str, Any]:
        """The fields of `Measurement` that say the same."""
        if not isinstance(self.model, PeftModel):
            return {"depth": self.num_loops, "gates": NONE, "readout": self.readout}
        gates = self.gates or []
        alone = gates.index(1) + 1 if sorted(gates) == [*[0] * (len(gates) - 1), 1] and len(gates) > 1 else None
        return {"depth": self.num_loops, "gates": gates_text(self.gates), "loop": alone, "readout": self.readout}

    def settings(self, in_turns: bool) -> dict[str, Any]:
        """Return how the model is asked, whatever the problems."""
        return {
            "chat_template": sha256_of_json(self.tokenizer.chat_template) if in_turns else None,
            "system_instruction": self.system_instruction,
            "own_max_new_tokens": self.max_new_tokens,
        }


@contextmanager
def run_as(model: nn.Module, gates: Sequence[float] | None = None, readout: int | None = None) -> Iterator[None]:
    """Run a model inside the block under given gates, and read it out after a given loop.

    The readout after loop t is what a run of t loops gives, so that the loops after it are not computed.

    Args:
        model: looped model, with an adapter if there are gates.
        gates: [K] for its K loops; None: those in force.
        readout: t, 1-based; None: the last loop.
    """
    config = find_looped_model(model).config
    num_loops = config.num_loops
    config.num_loops = num_loops if readout is None else readout
    try:
        with nullcontext() if gates is None else use_gates(model, list(gates)[: config.num_loops]):
            yield
    finally:
        config.num_loops = num_loops


def parse_gates(gates: str | float | Sequence[float], num_loops: int) -> list[float] | None:
    """Return one gate for each loop, [K], from numbers or a string such as `1-0-0-0`; None for unit gates."""
    try:
        numbers = [float(gate) for gate in (str(gates).split("-") if isinstance(gates, str | int | float) else gates)]
        as_gate_matrix(numbers, num_loops)
    except (TypeError, ValueError):
        raise UserError(f"`gates` must be one for each of {num_loops} loops, as 1-0-0-0; got {gates!r}.") from None
    return None if all(number == 1 for number in numbers) else numbers
