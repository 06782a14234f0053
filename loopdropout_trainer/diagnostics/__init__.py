"""What a trained adapter does in each loop. Every module here that defines a `Diagnostic` is one of the diagnostics."""

from importlib import import_module
from pkgutil import iter_modules

from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.readouts import readout_losses
from loopdropout_trainer.diagnostics.scores import Scores, score_batches
from loopdropout_trainer.diagnostics.single_loop import SingleLoopActivation, final_loop_loss, single_loop_activation


__all__ = [
    "DIAGNOSTICS",
    "Context",
    "Diagnostic",
    "Report",
    "Scores",
    "SingleLoopActivation",
    "final_loop_loss",
    "readout_losses",
    "score_batches",
    "single_loop_activation",
]

for _module in iter_modules(__path__):
    if _module.name != "run":  # which loads models, and asks this package for its diagnostics
        import_module(f"{__name__}.{_module.name}")
