"""The floors of docs/architecture.md: what each folder of the package may import, read from the source without running it."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import loopdropout_trainer


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "loopdropout_trainer"
FLOORS = (  # a folder or file imports from the floors below its own, never from a neighbour on its floor
    ("errors",),
    ("checks",),
    ("looped", "processes"),
    ("gates", "adapters", "models"),
    ("settings",),
    ("saving", "data"),
    ("record",),
    ("generation", "training"),
    ("evaluation",),
    ("diagnostics", "experimental"),
    ("reports",),
    ("runs",),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}

FAMILIES = {"ouro", "huginn", "loopus", "nanbeige", "hrm_text"}


def public_names() -> dict[str, str]:
    """The folder of each name that the package itself hands on."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for_type_checkers = next(node for node in tree.body if isinstance(node, ast.If)).body
    return {each.name: node.module.split(".")[1] for node in for_type_checkers for each in node.names}


def test_the_names_that_type_checkers_see_are_those_that_come_late():
    late = {name: getattr(loopdropout_trainer, name).__module__ for name in loopdropout_trainer.__all__}
    assert {name: module.split(".")[1] for name, module in late.items()} == public_names()


def imports(source: str, names: dict[str, str]) -> list[list[str]]:
    """What a file imports of the package, anywhere in it, as paths below the package: [["looped", "plan"], ...]."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(PACKAGE.name):
            parts = node.module.split(".")[1:]
            found += [parts] if parts else [[names.get(each.name, each.name)] for each in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno}"
        if isinstance(node, ast.Import):
            found += [each.name.split(".")[1:] for each in node.names if each.name.startswith(f"{PACKAGE.name}.")]
    return found


def files(room: str) -> list[Path]:
    """A folder's modules or the file, but the script of `data`, which shows what a trainer is given and so builds one."""
    inside = [path for path in (PACKAGE / room).rglob("*.py") if path != PACKAGE / "data" / "__main__.py"]
    return inside or [PACKAGE / f"{room}.py"]


def test_every_folder_of_code_has_a_floor():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {room for room in FLOOR if (PACKAGE / room).is_dir()}


def test_what_the_package_raises_is_the_users_to_mend_or_a_class_of_its_own():
    """`is_user_error` goes by classes: a plain ValueError is a fault, unless the lines around it catch it."""
    caught_nearby = {
        "evaluation/benchmarks/metamath.py", "evaluation/benchmarks/generated.py", "data/rows.py",
        "saving/authors_format.py",
    }  # fmt: skip
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*.py")):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Raise)]
        plain = [
            each.lineno for each in raised if isinstance(each, ast.Call) and ast.unparse(each.func) == "ValueError"
        ]
        assert not plain or path.relative_to(ROOT).as_posix().split("/", 1)[1] in caught_nearby, (path, plain)


@pytest.mark.parametrize("folder", FLOOR)
def test_imports_go_downwards(folder):
    names, read = public_names(), 0
    for path in files(folder):
        for target, *rest in imports(path.read_text(encoding="utf-8"), names):
            read += 1
            if target == folder:
                continue
            assert FLOOR[target] < FLOOR[folder], f"{path.relative_to(ROOT)} imports `{target}`"
            assert target != "models" or not FAMILIES & set(rest), f"{path.relative_to(ROOT)} imports a model family"
    assert read or folder in ("errors", "processes")


def test_an_import_is_seen_wherever_it_stands():
    names = {"LoopDropoutConfig": "training"}
    assert imports("def f():\n    from loopdropout_trainer.runs.plan import plan", names) == [["runs", "plan"]]
    assert imports("from loopdropout_trainer import LoopDropoutConfig, gates", names) == [["training"], ["gates"]]
    assert imports("import loopdropout_trainer.models.ouro\nimport torch", names) == [["models", "ouro"]]


def test_the_document_draws_these_floors():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = text.split("```")[1].splitlines()
    found = [line.split("  #")[0].split() for line in drawn if FLOOR.keys() & set(line.split("  #")[0].split())]
    assert [set(line) for line in found] == [set(folders) for folders in reversed(FLOORS)]


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "lm_eval")


def overridden_private_methods() -> set[str]:
    """The names of private methods of libraries' classes that a class of the package overrides."""
    names = set()
    for module in pkgutil.walk_packages(loopdropout_trainer.__path__, f"{PACKAGE.name}."):
        if module.name.endswith("__main__"):
            continue
        classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        for cls in (cls for _, cls in classes if cls.__module__ == module.name):
            private = {name for name, value in vars(cls).items() if name[0] == "_" != name[1] and callable(value)}
            for heir in (cls, *cls.__subclasses__()):  # a mixin overrides the methods of those it is mixed with
                bases = [base for base in heir.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
                names |= {name for name in private for base in bases if inspect.isfunction(vars(base).get(name))}
    return names


def test_the_page_names_every_private_method_that_is_overridden():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = overridden_private_methods()
    assert len(names) > 15 and {name for name in names if f"`{name}`" not in page} == set()
