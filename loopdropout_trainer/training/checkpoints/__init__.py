"""Runs that lose nothing: sealed checkpoints, whose run they are of, resuming, stopping, and what must not be saved."""

from loopdropout_trainer.processes import TrainingInterrupted
from loopdropout_trainer.training.checkpoints.mixin import CheckpointsMixin, NonFiniteLossError
from loopdropout_trainer.training.checkpoints.sealing import CheckpointError


__all__ = ["CheckpointError", "CheckpointsMixin", "NonFiniteLossError", "TrainingInterrupted"]
