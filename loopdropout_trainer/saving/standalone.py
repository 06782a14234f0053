"""Write or copy the code of a model next to its saved weights, so that transformers loads it without this package."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging

import loopdropout_trainer
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.hub import is_hub_name


logger = logging.get_logger(__name__)


_IMPORT = re.compile(r"from (loopdropout_trainer\.[\w.]+) import")


def check_code(model: PreTrainedModel) -> None:
    """Raise UserError for a model of a class that is part neither of this package nor of transformers."""
    module = type(model).__module__
    if not module.startswith(("loopdropout_trainer.", "transformers.")):
        raise UserError(
            f"`standalone` must be false for {type(model).__name__} of {module}, because only the code of this package's "
            "classes can be written next to a model."
        )


def write_code(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Write the modules that define a model into a folder, with relative imports.

    Args:
        model: Looped model.
        folder: Folder of the saved model.

    Returns:
        The `auto_map` of the model's `config.json`. It is empty for a class of transformers, which needs none.
    """
    modules = [type(model).__module__]
    if not modules[0].startswith("loopdropout_trainer."):
        return {}
    for module in modules:  # grows
        text = Path(import_module(module).__file__).read_text(encoding="utf-8")
        modules += [name for name in dict.fromkeys(_IMPORT.findall(text)) if name not in modules]
        text = _IMPORT.sub(lambda match: f"from .{match[1].rpartition('.')[2]} import", text)
        head = f"# Copied from loopdropout-trainer {loopdropout_trainer.__version__} (Apache-2.0): {module}\n"
        Path(folder, f"{module.rpartition('.')[2]}.py").write_text(head + text, encoding="utf-8")
    classes = {
        "AutoConfig": model.config_class,
        "AutoModel": model.backbone_class,
        "AutoModelForCausalLM": type(model),
    }
    return {name: f"{modules[0].rpartition('.')[2]}.{cls.__name__}" for name, cls in classes.items()}


def _name_code(name: str, base: str) -> str:
    """Return an entry of a base model's `auto_map` with the name of its repository."""
    if "--" in name:  # it has one
        return name
    return f"{base}--{name}"


def copy_code(auto_map: Mapping[str, str], base: str | None, folder: Path) -> dict[str, str]:
    """Return the `auto_map` of a merged model, under which other programs find the base model's own code.

    The entries of a base model name Python files next to its `config.json`. A merged model refers to the base model's
    repository (`org/name--file.Class`), or gets copies of the files. They are never run here.
    """
    if is_hub_name(base):
        return {key: _name_code(name, base) for key, name in auto_map.items()}
    files = {path.name: path for path in Path(base or "?").glob("*.py")}
    found = {}
    for key, name in auto_map.items():
        is_of_repository = "--" in name  # which the entry names
        if is_of_repository or f"{name.split('.')[0]}.py" in files:
            found[key] = name
    missing = [key for key in auto_map if key not in found]
    if missing:
        logger.warning(
            f"The merged model has no `auto_map` for {', '.join(missing)}, because the base model's own code was not found "
            "next to it. To load the model without this package, merge with `standalone=True`."
        )
    if found:
        for file in files.values():
            shutil.copy2(file, folder)
    return found
