"""The job of a training script: its plan, its trainings, its progress and its measurements."""
