"""Decoding of looped models: greedy and sampled, with continuous batching, equal to transformers' `generate`."""

from loopdropout_trainer.generation.generation import generate_greedy


__all__ = ["generate_greedy"]
