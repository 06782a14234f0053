"""Adapters and merged models on disk and on the Hub."""
