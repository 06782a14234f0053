"""The structure of the package: its imports, its dependence on private methods, and the length of the method's path."""

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import loopdropout_trainer


PACKAGE = Path(loopdropout_trainer.__file__).parent
ALLOWED = {  # folders that meet in `looped.py` only
    "gates": {"errors", "gates"},
    "lora": {"errors", "looped", "lora"},
    "models": {"errors", "looped", "foreign", "models", "versions"},
    "looped.py": {"errors"},
}
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "lm_eval")


def imports(path):
    """The modules of the package that a file imports, by the first part of their names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            found.add((node.module.split(".") + [""])[1])
    return found


@pytest.mark.parametrize("place", ALLOWED)
def test_gates_lora_and_models_are_independent(place):
    paths = [PACKAGE / place] if place.endswith(".py") else list((PACKAGE / place).rglob("*.py"))
    assert paths
    for path in paths:
        assert imports(path) <= ALLOWED[place], path


def test_public_names_are_imported_when_used():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If)).body
    shown = {name.name: node.module for node in checked for name in node.names}
    homes = {name: getattr(loopdropout_trainer, name).__module__ for name in loopdropout_trainer.__all__}
    assert shown.keys() == homes.keys()
    assert all(home.startswith(shown[name]) for name, home in homes.items())


def overridden_private_methods():
    """The private methods of libraries that classes of the package override, as `method: class`."""
    found = {}
    for module in pkgutil.walk_packages(loopdropout_trainer.__path__, f"{PACKAGE.name}."):
        if module.name.endswith("__main__") or ".integrations." in module.name:  # these import other programs
            continue
        classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        for cls in (cls for _, cls in classes if cls.__module__ == module.name):
            private = {name for name, value in vars(cls).items() if name[0] == "_" != name[1] and callable(value)}
            for heir in (cls, *cls.__subclasses__()):  # a mixin overrides the methods of its neighbors
                bases = [base for base in heir.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
                for name in private:
                    if any(inspect.isfunction(vars(base).get(name)) for base in bases):
                        found[name] = cls.__name__
    return found


def test_few_private_methods_are_overridden():
    found = overridden_private_methods()
    assert len(found) <= 5, found


GATE = torch.tensor(1 / 0.7, dtype=torch.float64).float()


def holds_gates(value):
    """Whether a value is a tensor of the two gates of p = 0.3."""
    if not torch.is_tensor(value) or not value.is_floating_point() or not value.numel():
        return False
    return bool(((value == 0) | (value == GATE)).all()) and bool((value != 0).any())


@pytest.mark.parametrize("fields", [{}, {"remove_padding": False}], ids=["optimized", "plain"])
def test_gates_pass_through_few_functions(train, fields):
    """From the Bernoulli draw to the multiplication of an activation, in one training step."""
    seen = {}

    def note(frame, event, value):
        if event == "return" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            held = [name for name, local in frame.f_locals.items() if holds_gates(local)]
            if held or holds_gates(value):
                seen.setdefault(frame.f_code.co_qualname, held)

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            sys.setprofile(note)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            sys.setprofile(None)

    train(callbacks=[Watch()], max_steps=1, p=0.3, **fields)
    names = list(seen)
    assert names[0] == "MaskedRule.sample" and len(names) <= 6, names
