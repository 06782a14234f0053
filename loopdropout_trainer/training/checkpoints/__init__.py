"""Old names. They go with their last users."""

from loopdropout_trainer.training.checkpoints.sealing import CheckpointError


__all__ = ["CheckpointError"]
