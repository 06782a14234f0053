"""Trainers: gates drawn in `compute_loss`, callbacks, and the setup of an adapter.

Scripts, the folders of plans and of jobs, and the package itself import them.
"""
