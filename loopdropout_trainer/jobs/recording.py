"""The record of a run: its `recipe.yaml`, and the state and the facts of its `run.json`. Only this module begins it."""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer, TrainerCallback

from loopdropout_trainer.data import LoadedExamples
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.results.imported_code import describe_accepted, describe_imports
from loopdropout_trainer.results.run_files import RECIPE_FILE, has_trained, write_run
from loopdropout_trainer.settings.recipe import dump_recipe


class RunRecord(TrainerCallback):
    """Replace the record in the folder of a run as soon as it is no longer true.

    A training that continues can be refused, fail or be stopped before its first step, and the record of the training before
    stays until then. If that training had ended, it stays until a step is done, because its adapter is still the one in the
    folder.

    Args:
        trainer: Trainer of the run.
        run: Run.
        loaded: Training examples.
    """

    def __init__(self, trainer: Trainer, run: Run, loaded: LoadedExamples) -> None:
        self.trainer, self.run, self.loaded = trainer, run, loaded
        self.is_written = False

    def write(self, status: str = "training") -> None:
        """Write the record once, with the status "training", or "trained" of a run that is only measured further."""
        trainer, run = self.trainer, self.run
        if self.is_written or not trainer.is_world_process_zero():
            return
        self.is_written = True
        folder, is_trained = Path(trainer.args.output_dir), status == "trained"
        facts = describe_imports(run.recipe, trainer.model, folder if is_trained else None)
        if self.loaded.sources and not is_trained:
            facts["trained_shares"] = self.loaded.trained_shares
        # The status comes first. The new recipe next to the former status could look like a run that has ended.
        write_run(folder, status=status, **facts)
        recipe = {"command": run.args.command, **run.recipe}
        dump_recipe(recipe, folder / RECIPE_FILE, describe_accepted(facts["accepted_imports"]), facts["used_imports"])

    def on_step_begin(self, args, state, control, **kwargs):
        if not has_trained(args.output_dir):
            self.write()

    def on_step_end(self, args, state, control, **kwargs):
        self.write()
