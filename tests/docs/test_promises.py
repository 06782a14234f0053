"""tests/PROMISES.md names tests that exist, and has promises of every page of the documentation."""

import ast
import re

from helpers.files import ROOT


TESTS = ROOT / "tests"
TEXT = (TESTS / "PROMISES.md").read_text(encoding="utf-8")
TESTED, WITHOUT_TEST = TEXT.split("## Promises without a test")
AREAS = TESTED.split("\n## ")[1:]


def existing_tests():
    """All tests as PROMISES.md writes them: `gates/test_gates.py::test_rule_mean_and_covariance`."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.add(f"{path.relative_to(TESTS)}::{node.name}")
    return names


def test_named_tests_exist():
    assert {*re.findall(r"`([^`\s]+::\w+)`", TEXT)} <= existing_tests()


def test_each_promise_names_a_test():
    for area in AREAS:
        promises = re.findall("^- .*", area, re.MULTILINE)
        assert promises, area
        assert [line for line in promises if "::test_" not in line] == []


def test_every_page_has_promises():
    named = {
        page for area in AREAS for page in re.findall(r"`([^`]+)`", re.search("^Pages: (.*)", area, re.MULTILINE)[1])
    }
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {*pages, "README.md", "recipes/README.md"} <= named
    assert [page for page in named if not (ROOT / page).exists()] == []
