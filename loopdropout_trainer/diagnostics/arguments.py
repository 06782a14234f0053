"""The settings of recipes/diagnose.py: which adapters, which diagnostics, on what."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.settings.arguments import check_depths
from loopdropout_trainer.settings.ranges import check_folder, check_integer, check_list


HELD_OUT = "held_out"


@dataclass
class RowArguments(DataArguments):
    """Which rows losses are measured on. The recipe's data settings are needed for held-out rows only."""

    rows: str = HfArg(
        default=HELD_OUT,
        help="`held_out` for the recipe's held-out rows, or a benchmark for its prompts with reference solutions.",
    )
    benchmark_files: dict[str, str] | None = HfArg(
        default=None, help="Local files of benchmarks, as a mapping name: path (JSON on the command line)."
    )
    num_rows: int = HfArg(default=500, help="At most so many rows, from the first on.")
    rows_batch_size: int = HfArg(default=8, help="Rows that one process computes at a time.")
    max_length: int | None = HfArg(default=1024, help="As in training: held-out rows with more tokens are dropped.")
    completion_only_loss: bool | None = HfArg(
        default=None, help="As in training: whether only completions are scored."
    )
    assistant_only_loss: bool = HfArg(
        default=False, help="As in training: whether only the assistant's turns are scored."
    )

    def __post_init__(self):
        if self.rows == HELD_OUT:
            super().__post_init__()
        check_integer("num_rows", self.num_rows)
        check_integer("rows_batch_size", self.rows_batch_size)


@dataclass
class DiagnosticArguments:
    """What is diagnosed, how, and where the results go."""

    adapters: list[str] = HfArg(
        default_factory=list,
        help="Adapters as name=folder or name=Hub name; a name that comes again is another seed of that method.",
    )
    models: list[str] = HfArg(default_factory=list, help="Merged models, likewise as name=folder.")
    diagnostics: list[str] | None = HfArg(default=None, help="Names of the diagnostics to run. Default: all.")
    imports: list[str] = HfArg(
        default_factory=list,
        aliases=["--import"],
        help="Files (or module names) with diagnostics of your own; from the command line only.",
    )
    depths: list[int] | None = HfArg(
        default=None, help="Numbers of loops to run at. Default: 1 to twice the model's own."
    )
    output_dir: str = HfArg(default="outputs", help="Results go to its subfolder `diagnostics`.")

    def __post_init__(self):
        check_folder("output_dir", self.output_dir)
        for name in ("adapters", "models", "diagnostics", "imports"):
            check_list(name, getattr(self, name))
        if not self.adapters and not self.models:
            raise ValueError("`adapters` must name one or more as name=path, or `models` a merged model.")
        check_depths("depths", self.depths)
