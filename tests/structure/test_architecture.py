"""The structure of the package: its imports, and the length of the method's path."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import loopdropout_trainer
from helpers.files import ROOT


PACKAGE = Path(loopdropout_trainer.__file__).parent
FLOORS = """
arithmetic bounds memory own_code published_sizes renames terminal usual_names
errors
keywords
blocks files gate_texts gate_values gates limits rewards
hints
hub reruns
gate_state tokenizers
looped means
lora models settings
data gate_labels generation handle | cli
integrations prompts results | __main__
diagnostics saving
reports serving training
costs
evaluation
jobs lm_eval
sweeps
"""
"""From the ground up. A module imports modules of its own folder and of the floors below its own."""
BASE = {"errors", "keywords", "renames", "usual_names"}
MEETING = {*BASE, "gate_state", "looped"}
APART = {
    "blocks": BASE,
    "reruns": {*BASE, "blocks"},
    "gate_state": {*BASE, "blocks", "reruns"},
    "looped": {*MEETING, "blocks"},
    "gate_texts": BASE,
    "gate_values": BASE,
    "gates": BASE,
    "lora": {*MEETING, "blocks", "bounds", "gate_texts", "gate_values"},
    "models": MEETING,
}
"""Places that meet in `gate_state.py` and `looped.py` only, and what else they import."""


def imports():
    """Return (place, place that it imports, file) for every import in the package, also inside functions."""
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in re.findall(rf"\bfrom {PACKAGE.name}\.(\w+)", path.read_text()):
            if place not in (name, "__init__"):
                yield place, name, path


def test_imports_point_down():
    floors = [floor.split() for floor in re.split(r"\||\n(?!$)", FLOORS.strip())]
    floor_of = {place: index for index, floor in enumerate(floors) for place in floor}
    assert {place for place, *_ in imports()} <= {*floor_of}
    for place, name, path in imports():
        assert floor_of[name] < floor_of[place], path
        assert name in APART.get(place, {name}), path


class ImportsOfFolder(ast.NodeVisitor):
    """Collect the modules of a folder that a module of it imports, except for annotations."""

    def __init__(self, folder):
        self.prefix, self.found = f"{PACKAGE.name}.{folder}.", set()

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_ImportFrom(self, node):
        if (node.module or "").startswith(self.prefix):
            self.found.add(node.module.removeprefix(self.prefix))


def find_circle(imported, path):
    """Return the modules of a circle of imports that `path` leads to, or None."""
    for name in sorted(imported[path[-1]]):
        if name in path:
            return [*path[path.index(name) :], name]
        circle = find_circle(imported, [*path, name])
        if circle is not None:
            return circle
    return None


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_imports_inside_of_a_folder_have_no_circle(folder):
    imported = {}
    for path in (PACKAGE / folder).glob("*.py"):
        visitor = ImportsOfFolder(folder)
        visitor.visit(ast.parse(path.read_text()))
        imported[path.stem] = visitor.found
    for name in imported:
        circle = find_circle(imported, [name])
        assert circle is None, " -> ".join(circle)


def count_code(text):
    """Return the number of lines with code, without comments and strings that stand alone, such as docstrings."""
    tree = ast.parse(text)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_files_are_short():
    """A model's file has its whole family. Any other file has one job."""
    files = [
        path for folder in ("loopdropout_trainer", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    sizes = {str(path.relative_to(ROOT)): count_code(path.read_text()) for path in files if "models" not in path.parts}
    assert len(sizes) > 100 and {path: size for path, size in sizes.items() if size > 300} == {}


def test_page_names_every_part_of_the_package():
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Layout")[2].partition("\n## ")[0]
    own = [path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in own]
    assert len(names) > 30 and [name for name in sorted(names) if f"`{name}`" not in table] == []


def test_public_names_are_imported_when_used():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If)).body
    shown = {name.name: node.module for node in checked for name in node.names}
    assert shown == {name: f"{PACKAGE.name}.{home}" for name, home in loopdropout_trainer._HOMES.items()}
    assert all(hasattr(loopdropout_trainer, name) for name in shown)


GATE = torch.tensor(1 / 0.7).item()  # of p = 0.3


def holds_gates(value):
    return torch.is_tensor(value) and value.is_floating_point() and {*value.unique().tolist(), 0.0} == {0.0, GATE}


@pytest.mark.parametrize("fields", [{}, {"remove_padding": False}], ids=["optimized", "plain"])
def test_gates_pass_through_few_functions(train, fields):
    """From the Bernoulli draw to the multiplication of an activation, in one training step."""
    names = []

    def note(frame, event, value):
        is_own = event == "return" and frame.f_code.co_filename.startswith(str(PACKAGE))
        if is_own and any(map(holds_gates, (value, *frame.f_locals.values()))):
            names.append(frame.f_code.co_qualname)

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            sys.setprofile(note)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            sys.setprofile(None)

    train(callbacks=[Watch()], max_steps=1, p=0.3, **fields)
    assert names[0] == "MaskedRule.sample" and len(set(names)) <= 6, names
