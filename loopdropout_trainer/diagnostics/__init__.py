"""What a trained adapter does in each loop."""

from loopdropout_trainer.diagnostics.readouts import readout_losses
from loopdropout_trainer.diagnostics.single_loop import SingleLoopActivation, final_loop_loss, single_loop_activation


__all__ = ["SingleLoopActivation", "final_loop_loss", "readout_losses", "single_loop_activation"]
