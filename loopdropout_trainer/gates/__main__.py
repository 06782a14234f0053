"""Print every rule with its fields, defaults, mean, covariance and place in the paper.

Usage: python -m loopdropout_trainer.gates [RULE ...]
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopdropout_trainer.gates import RULES, GateRule, make_rule


FACTS = ("Gate", "Mean", "Covariance", "Paper")


def facts(rule: type[GateRule]) -> dict[str, str]:
    """Return what the docstring of a rule states: the lines that begin with `Gate:`, `Mean:`, `Covariance:`, `Paper:`."""
    lines = [line.partition(": ") for line in inspect.getdoc(rule).splitlines()]
    return {name: text.strip() for name, colon, text in lines if colon and name in FACTS}


def fields(rule: type[GateRule]) -> str:
    """Return the fields of a rule with their defaults."""
    return ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(rule) if field.init) or "none"


def rules_table(names: Sequence[str]) -> Table:
    """Return the table of the named rules."""
    table = Table("Rule", "Fields", *FACTS, title="Rules (`rule`, `p`, `rule_args` of a recipe)", show_lines=True)
    for name in names:
        rule = RULES[name]
        table.add_row(*map(Text, (name, fields(rule), *(facts(rule)[fact] for fact in FACTS))))
    return table


def main(names: Sequence[str]) -> None:
    if {"-h", "--help"} & set(names):
        print(__doc__.strip())
        return
    for name in names:
        if name not in RULES:
            make_rule(name)  # which says what is valid
    console = Console()
    # Piped, rich assumes 80 columns, in which six of text would be torn to shreds.
    console = console if console.is_terminal else Console(width=180)
    console.print(rules_table(names or list(RULES)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"gates: {error}", file=sys.stderr)
        sys.exit(2)
