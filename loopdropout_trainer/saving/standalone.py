"""Write the code of a model family next to a saved model, so that transformers loads it without this package."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from transformers import PreTrainedModel

import loopdropout_trainer
from loopdropout_trainer.errors import UserError


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
