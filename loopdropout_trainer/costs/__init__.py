"""The costs of trainings and evaluations before they begin: published numbers, and estimates from operations."""
