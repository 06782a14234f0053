"""The settings of recipes/diagnose.py: which adapters, which diagnostics, on what."""

from __future__ import annotations

from dataclasses import dataclass, field

from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.looped.model import MOST_LOOPS
from loopdropout_trainer.settings.arguments import BenchmarkArguments
from loopdropout_trainer.settings.ranges import check_folder, check_integer, check_list


HELD_OUT = "held_out"


@dataclass
class RowArguments(DataArguments):
    """Which rows losses are measured on. The recipe's data settings are needed for held-out rows only."""

    rows: str = field(
        default=HELD_OUT,
        metadata={
            "help": "`held_out` for the recipe's held-out rows, or a benchmark for its prompts with reference solutions."
        },
    )
    num_rows: int = field(default=500, metadata={"help": "At most so many rows, from the first on."})
    rows_batch_size: int = field(default=8, metadata={"help": "Rows that one process computes at a time."})
    max_length: int | None = field(
        default=1024, metadata={"help": "As in training: held-out rows with more tokens are dropped."}
    )
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "As in training: whether only completions are scored."}
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "As in training: whether only the assistant's turns are scored."}
    )

    def __post_init__(self):
        if self.rows == HELD_OUT:
            super().__post_init__()
        for name in ("num_rows", "rows_batch_size"):
            check_integer(name, getattr(self, name))


@dataclass
class DiagnosticArguments(BenchmarkArguments):
    """What is diagnosed, how, and where the results go."""

    adapters: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Adapters as name=folder or name=Hub name; a name that comes again is another seed of that method.",
            "nargs": "+",
        },
    )
    models: list[str] = field(
        default_factory=list, metadata={"help": "Merged models, likewise as name=folder.", "nargs": "+"}
    )
    evaluations: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files of evaluate.py as name=FILE.json, whose results are taken instead of generating them.",
            "nargs": "+",
        },
    )
    diagnostics: list[str] | None = field(
        default=None, metadata={"help": "Names of the diagnostics to run. Default: all.", "nargs": "+"}
    )
    imports: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files (or module names) with diagnostics of your own; from the command line only.",
            "aliases": ["--import"],
            "nargs": "+",
        },
    )
    depths: list[int] | None = field(
        default=None,
        metadata={"help": "Numbers of loops to run at. Default: 1 to twice the model's own.", "nargs": "+"},
    )
    group_by: list[str] = field(
        default_factory=lambda: ["subject", "level", "num_steps"],
        metadata={"help": "Columns of a benchmark's rows by which accuracies are broken down, where it has them."},
    )
    output_dir: str = field(default="outputs", metadata={"help": "Results go to its subfolder `diagnostics`."})

    def __post_init__(self):
        super().__post_init__()
        check_folder("output_dir", self.output_dir)
        for name in ("adapters", "models", "evaluations", "diagnostics", "imports", "group_by"):
            check_list(name, getattr(self, name))
        if not self.adapters and not self.models:
            raise ValueError("`adapters` must name one or more as name=path, or `models` a merged model.")
        if self.depths is not None:
            for depth in self.depths or [None]:
                check_integer("depths", depth, 1, MOST_LOOPS)
            self.depths = sorted(set(self.depths))
