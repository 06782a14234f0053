"""Print every rule with its fields, defaults, moments and section of the paper.

Usage: python -m loopdropout_trainer.gates [RULE ...]
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence

from loopdropout_trainer.errors import run_script
from loopdropout_trainer.gates import RULES, make_rule


def main(names: Sequence[str]) -> None:
    if {"-h", "--help"} & set(names):
        print(__doc__.strip())
        return
    for name in names or RULES:
        rule = type(make_rule(name))
        fields = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(rule) if field.init)
        print(f"{name}({fields})\n\n    " + inspect.getdoc(rule).replace("\n", "\n    ") + "\n")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
