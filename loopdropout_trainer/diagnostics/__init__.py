"""What a trained adapter does in each loop. Every module here that defines a `Diagnostic` is one of the diagnostics."""

from importlib import import_module
from pkgutil import iter_modules

from loopdropout_trainer.diagnostics.diagnostic import DIAGNOSTICS as DIAGNOSTICS
from loopdropout_trainer.diagnostics.diagnostic import Context as Context
from loopdropout_trainer.diagnostics.diagnostic import Diagnostic as Diagnostic
from loopdropout_trainer.diagnostics.live import LiveDiagnosticsCallback as LiveDiagnosticsCallback
from loopdropout_trainer.diagnostics.rows import evaluation_batches as evaluation_batches
from loopdropout_trainer.diagnostics.rows import labelled_batches as labelled_batches
from loopdropout_trainer.diagnostics.scores import SingleLoopActivation as SingleLoopActivation
from loopdropout_trainer.diagnostics.scores import readout_losses as readout_losses
from loopdropout_trainer.diagnostics.scores import single_loop_activation as single_loop_activation


for _module in iter_modules(__path__):
    if _module.name != "run":  # which asks this package for its diagnostics
        import_module(f"{__name__}.{_module.name}")
