"""Models and adapters on disk: loading, merging, model cards, and the formats of other programs.

Modules here may import models, LoRA layers, gates, results and tokenizers, and no trainer.
"""
