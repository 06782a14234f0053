"""What a trained adapter does in each loop. Every module here that defines a `Diagnostic` is one of the diagnostics."""

# ruff: noqa: F401  (handed on)
from importlib import import_module
from pkgutil import iter_modules

from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS, Context, Diagnostic
from loopdropout_trainer.diagnostics.rows import labelled_batches
from loopdropout_trainer.training.scores import (
    SingleLoopActivation,
    evaluation_batches,
    readout_losses,
    single_loop_activation,
)


for _module in iter_modules(__path__):
    if _module.name != "run":  # which asks this package for its diagnostics
        import_module(f"{__name__}.{_module.name}")
