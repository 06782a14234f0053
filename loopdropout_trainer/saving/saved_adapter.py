"""Reading the files of a saved adapter, in PEFT's format or in the format of the paper authors' program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.errors import UserError, check_type
from loopdropout_trainer.files import model_path, read_json_object
from loopdropout_trainer.saving import authors_format
from loopdropout_trainer.saving.authors_format import CONFIG_FILE, WEIGHTS_FILE


if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from loopdropout_trainer.lora import GatedLora


def adapter_folder(folder: str | Path, adapter: str) -> Path:
    """Return where PEFT saves an adapter: `default` in the folder itself, and another one in the subfolder with its name."""
    return Path(folder) if adapter == "default" else Path(folder, adapter)


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder itself holds an adapter, which other files must not be mixed with."""
    return (folder / CONFIG_FILE).is_file()


def holds_model(folder: str | Path) -> bool:
    """Return whether a folder itself holds a whole model, such as a merged one, which an adapter must not be saved next to.

    transformers finds the adapter in the folder of the model, and applies it. A merged model would have its update twice.
    """
    folder = Path(folder)
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return bool(weights) and (folder / "config.json").is_file()


def check_adapter_folder(folder: str | Path, fix: str) -> None:
    """Raise UserError if a folder holds a whole model. `fix`: the sentence that says what to do."""
    if holds_model(folder):
        raise UserError(
            "`output_dir` must not be the folder of a whole model, such as a merged one, to which transformers would apply "
            f"the adapter, got {folder}. {fix}"
        )


@dataclass(frozen=True)
class SavedAdapter:
    """The files of an adapter.

    Attributes:
        folder: Folder with the files.
        fields: Content of its `adapter_config.json`.
        is_authors: Whether it has the format of the paper authors' program.
    """

    folder: Path
    fields: Mapping[str, Any]
    is_authors: bool

    @property
    def base(self) -> str:
        """Folder or Hub name of the base model of the training."""
        name = self.fields["model_id"] if self.is_authors else self.fields.get("base_model_name_or_path")
        return str(model_path(name or ""))

    @property
    def revision(self) -> str | None:
        """Commit of the base model of the training, or its branch or tag, or None if it is not known."""
        return self.fields.get("model_revision" if self.is_authors else "revision")

    def read_config(self) -> LoraConfig:
        """Return the LoRA configuration.

        Raises:
            UserError: If a file is missing, or a field has a wrong value.
        """
        from loopdropout_trainer.lora import parse_peft_config

        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not (self.folder / file).is_file():
                raise UserError(f"{self.folder} must hold an adapter in safetensors, but it has no {file}.")
        if self.is_authors:
            config = authors_format.to_peft_config(self.fields)
        else:
            config = parse_peft_config(self.fields, self.folder / CONFIG_FILE)
        config.base_model_name_or_path = model_path(config.base_model_name_or_path)
        return config

    def read_weights(self) -> dict[str, Tensor]:
        """Return the tensors under PEFT's names."""
        from safetensors.torch import load_file

        weights = load_file(self.folder / WEIGHTS_FILE)
        return authors_format.to_peft_weights(weights) if self.is_authors else weights

    def check_mergeable(self) -> None:
        """Raise UserError if the update differs between loops, by the rule that `merge_and_save` has."""
        from loopdropout_trainer.lora import ADAPTER_KINDS

        weights = self.read_weights()
        for kind in ADAPTER_KINDS.values():
            if kind.saved_num_loops(weights) is not None:
                kind.check_mergeable(weights)

    def read_shapes(self) -> dict[str, Tensor]:
        """Return tensors without numbers of the shapes of `read_weights`, or an empty dict if loading would be an error."""
        import torch
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / WEIGHTS_FILE, "pt") as file:
                names = list(file.keys())  # of a file that is no dictionary
                weights = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
        except (OSError, SafetensorError):  # loading it says what is wrong
            return {}
        return authors_format.to_peft_weights(weights) if self.is_authors else weights

    def find_own_depth(self) -> int | None:
        """Return the depth of an adapter with parameters for each loop, or None for an adapter that all loops share."""
        return self.find_kind_and_depth()[1]

    def find_kind_and_depth(self) -> tuple[type[GatedLora], int | None]:
        """Return the kind of the adapter, and its depth if it has parameters for each loop. Only names and shapes are read."""
        from loopdropout_trainer.lora import ADAPTER_KINDS, GatedLora

        weights = self.read_shapes()
        for kind in ADAPTER_KINDS.values():
            depth = kind.saved_num_loops(weights) if kind.one_depth else None
            if depth is not None:
                return kind, depth
        return GatedLora, None


def read_saved_adapter(folder: Path) -> SavedAdapter:
    """Return the files of the adapter in a folder.

    Raises:
        UserError: If its `adapter_config.json` is damaged.
    """
    file = folder / CONFIG_FILE
    fields = read_json_object(file)
    is_authors = authors_format.is_authors_format(fields)
    types = {"base_model_name_or_path": str | None, "revision": str | None}
    if is_authors:
        types = authors_format.FIELD_TYPES
    for name, hint in types.items():
        check_type(f"`{name}` in {file}", fields.get(name), hint)
    return SavedAdapter(folder, fields, is_authors)
