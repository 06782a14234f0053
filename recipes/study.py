"""Run a study: all comparisons of one file, from training to what is measured of every adapter.

    python recipes/study.py recipes/studies/small.yaml
    python recipes/study.py recipes/studies/small.yaml --scale smoke
    python recipes/study.py recipes/studies/small.yaml --only main controls --results docs/replication/small.json
    python recipes/study.py recipes/studies/ouro_1.4b.yaml --dry_run true
    python recipes/study.py recipes/studies/ouro_1.4b.yaml --print_commands true

Each method's learning rate is chosen on the development split of the first seed. The same command continues a study that
was interrupted, or prints what a scheduler can start next. `--results` gets the numbers, `--document` the
claims with their verdicts, also of a study that is not finished (`--collect_only true`).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS
from loopdropout_trainer.runs.measuring import measure_adapter
from loopdropout_trainer.runs.result import show_log
from loopdropout_trainer.runs.study import Study, StudyArguments
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.command import run_command
from loopdropout_trainer.settings.recipe import RecipeError, build, load_recipe, parse_recipe


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    (arguments,), _ = parse_recipe([StudyArguments], argv, description=__doc__)
    study = Study(arguments, Path(__file__).parent, (sys.executable, str(Path(__file__)), *argv))
    asked = {name for measure in study.measure.values() for name in measure.benchmarks}
    unknown = sorted(asked - set(BENCHMARKS))
    if unknown:
        raise RecipeError(f"`measure` must name `benchmarks` among {', '.join(BENCHMARKS)}; got {unknown[0]!r}.")
    if arguments.measure_adapter:
        show_log()
        adapter = Path(arguments.measure_adapter)
        method = adapter.parent.parent.name
        recipe = load_recipe(study.recipe_path(method))
        measured = measure_adapter(build(ModelArguments, recipe), adapter, study.measure[method])
        for name, counts in measured["benchmarks"].items():
            print(f"{name}: {counts['correct']}/{counts['total']} = {counts['score']:.2f}%")
        return
    if arguments.dry_run:
        Console().print(study.plan_table())
        return
    if arguments.print_commands:
        print("\n".join(study.commands()))
        return
    if arguments.collect_only:
        study.write_recipes()
        study.save_document()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("study.py: asked to stop; the same command continues."))
    study.run()
    for name, sweep in study.sweeps():
        console = Console()
        console.rule(name)
        for table in sweep.tables():
            console.print(table)


if __name__ == "__main__":
    run_command(main, interrupted="interrupted; the same command continues.")
