"""Trainers: gates drawn in `compute_loss`, callbacks, and the setup of an adapter.

Modules here may import all folders but `integrations`. Only scripts, `progress.py` and the package itself import them.
"""
