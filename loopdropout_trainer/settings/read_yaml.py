"""Read YAML and JSON of other people in bounded time and memory, and without running code.

YAML is dangerous in small files: aliases can repeat a value exponentially often, and nesting is limited by the stack only. A
file can also be a pipe or a device, which never ends.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from loopdropout_trainer.errors import UserError, find_unusable, short_repr
from loopdropout_trainer.hints import READ_RECIPES


LARGEST_FILE = 500_000
"""Largest size of a file in bytes. Reading so much takes a few seconds."""

MOST_VALUES = 100_000
"""Largest number of values in a text. An alias counts as often as it is used."""

MOST_LEVELS = 50
"""Largest number of levels of mappings and lists."""

MOST_DIGITS = 1000
"""Largest length of a number. Python needs quadratic time for longer ones."""


class _Loader(yaml.SafeLoader):
    """Read YAML without duplicate fields, very long numbers, and names like `a:b` for a missing space."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise UserError(f"`{key.value}` is set twice.")
                names.add(key.value)
                first, colon, rest = key.value.partition(":")
                if colon and key.style is None and value.value == "":  # `{a:b}` is the name `a:b` without a value
                    raise UserError(
                        f"`{key.value}` must have a space after the colon, as in `{first}: {rest.strip()}`."
                    )
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > MOST_DIGITS:
            raise UserError(f"Numbers must have at most {MOST_DIGITS} digits, got {len(node.value)}.")
        is_integer = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_implicit_resolver(  # `1e-4` is a number, as in YAML 1.2
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml_file(path: Path, title: str) -> Any:
    """Return the content of a YAML or JSON file.

    Args:
        path: Existing file.
        title: Name of the file at the start of an error message.

    Raises:
        UserError: If it is not a file, or is not readable YAML within the limits of this module.
    """
    if not path.is_file():  # a folder, or a pipe or a device, which may never end
        raise UserError(f"{title} must be a file, and {path} is none.")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{title} is not readable: {error}") from None
    if len(content) > LARGEST_FILE:
        raise UserError(f"{title} must have at most {LARGEST_FILE:,} bytes.")
    value = read_yaml(text, title)
    READ_RECIPES[path] = value
    return value


def read_yaml(text: str, title: str) -> Any:
    """Return the value of a YAML or JSON text.

    Args:
        text: Text.
        title: Name of the text at the start of an error message.

    Raises:
        UserError: If it is not readable, or exceeds the limits of this module.
    """
    try:
        return copy.deepcopy(_parse(text))  # the caller may change it
    except RecursionError:
        raise UserError(f"{title} is not readable: it must have at most {MOST_LEVELS} levels.") from None
    except (ValueError, yaml.YAMLError) as error:
        fix = ""
        if "found character '\\t'" in str(error):
            fix = "\nIndent lines by spaces instead of tabs."
        raise UserError(f"{title} is not readable: {error}{fix}") from None


@functools.lru_cache(maxsize=512)
def _parse(text: str) -> Any:
    """Return the value of a text. It is kept, because a training reads its recipe twenty times, which takes 0.1 seconds."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MOST_VALUES:
            raise UserError(f"it must have at most {MOST_VALUES:,} values, also with its aliases.")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_text(node: yaml.ScalarNode) -> None:
    """Raise UserError for a text that cannot be the name of a file. YAML writes such characters as `\\0` and `\\ud800`."""
    if problem := find_unusable(node.value):
        raise UserError(f"line {node.start_mark.line + 1:,} must not have {problem}, got {short_repr(node.value)}.")


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int], level: int = 1) -> int:
    """Return the number of values in a node. `counts` holds the nodes that are counted, so that aliases take no time."""
    if node in counts:
        return counts[node]
    if level > MOST_LEVELS:  # also an alias of a value that contains it
        raise UserError(f"it must have at most {MOST_LEVELS} levels.")
    if isinstance(node, yaml.ScalarNode):
        _check_text(node)
    number = 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            number += _count_values(key, counts, level + 1) + _count_values(value, counts, level + 1)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            number += _count_values(item, counts, level + 1)
    counts[node] = number
    return number
