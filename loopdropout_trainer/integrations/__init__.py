"""Plugins for other training programs, with one module for each program. See docs/integrations.md."""
