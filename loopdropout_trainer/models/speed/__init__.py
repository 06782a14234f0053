"""The same forward pass in less time and memory: packed without padding, with frozen loops apart, results recomputed.

`LoopedBackbone` runs a pass by a `PlainPass`, or where there is something to save by a `PackedPass`, which gives the
same losses and gradients. Nothing else of the model knows of this folder.
"""
