"""Trainers, and what a training run needs around its steps: gates, distribution, checkpoints, faults."""
