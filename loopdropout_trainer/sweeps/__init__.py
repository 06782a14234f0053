"""Sweeps: the trainings of several methods, learning rates and seeds in subprocesses, and their summary."""
