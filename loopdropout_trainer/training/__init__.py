"""Trainers: gates drawn in `compute_loss`, callbacks, and the setup of an adapter.

Modules here may import all folders but `integrations`. Only scripts, `progress.py` and the package itself import them.

Importing transformers' modeling code takes most of the seconds of a start. It is delayed until a model is loaded, so that
errors in a recipe appear early. PEFT imports it, too, so PEFT is imported later than usual.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec

from transformers import integrations
from wrapt import register_post_import_hook


def _import_trainer_utils() -> None:
    """Import `transformers.trainer_utils`, which training arguments need, without PEFT, which imports the modeling code.

    That module only asks if a model is an instance of two classes of PEFT. No model is one before PEFT is imported, so two
    empty classes give the same answer. The import of PEFT replaces them.
    """
    name, classes = "transformers.trainer_utils", ("PeftModel", "PeftMixedModel")
    if name in sys.modules or "peft" in sys.modules:
        return
    sys.modules["peft"] = stand_in = module_from_spec(find_spec("peft"))
    stand_in.__path__ = []
    vars(stand_in).update({key: type(key, (), {}) for key in classes})
    try:
        import_module(name)
    except ImportError:  # of other names of PEFT: both modules are imported as usual, then
        return
    finally:
        del sys.modules["peft"]
    register_post_import_hook(
        lambda peft: vars(sys.modules[name]).update({key: getattr(peft, key) for key in classes}), "peft"
    )


def _is_kubeflow_available() -> bool:
    """Ask transformers only inside of a Kubeflow job, because importing its function is slow."""
    name = "transformers.integrations.integration_utils"
    return "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and import_module(name).is_kubeflow_available()


_import_trainer_utils()
integrations.is_kubeflow_available = _is_kubeflow_available
