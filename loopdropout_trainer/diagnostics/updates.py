"""What the update does to the state in each loop: how much, and whether the loops pull the same way.

With h_{t-1} from the adapted run, let F be loop t without its update and F' loop t with it. Its effect is

    u_t = F'(h_{t-1}) - F(h_{t-1})
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Measurements
from loopdropout_trainer.diagnostics.scores import Batch, carries_states, target_states


class Updates(Diagnostic):
    """K + 1 passes: all loops adapted, and all but one. Both runs share the state before the loop that is left out."""

    name = "updates"
    title = "Effect of the update in each loop, relative to the state"
    needs_adapter = True

    def measure(self, context: Context) -> dict[str, Any]:
        parts = context.over_batches(lambda batch: self._of_batch(context, batch))
        sizes, cosines = (np.concatenate([part[i] for part in parts]) for i in (0, 1))  # [n, K], [n, K, K]
        return {
            "states": "carried" if carries_states(context.model) else "readout",
            "relative_sizes": sizes.mean(axis=0).tolist(),
            "cosines": cosines.mean(axis=0).tolist(),
        }

    def _of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return relative sizes [n, K] and cosines [n, K, K] for the batch's n target tokens."""
        with_update, _ = target_states(context.model, batch)  # [K, n, H]
        without = []
        for loop, one_hot in enumerate(torch.eye(context.num_loops)):
            with context.gated(1 - one_hot):
                without.append(target_states(context.model, batch)[0][loop])
        without = torch.stack(without).float()
        effects = with_update.float() - without
        sizes = effects.norm(dim=-1) / without.norm(dim=-1)  # [K, n]
        directions = F.normalize(effects, dim=-1)
        cosines = torch.einsum("snh,tnh->nst", directions, directions)
        return sizes.T.double().cpu().numpy(), cosines.double().cpu().numpy()

    def rows(self, found: Measurements):
        pairs = {
            f"cosine, loops {loop} and {loop + 1}": ("cosines", loop - 1, loop) for loop in range(1, found.num_loops)
        }
        return found.by_loop("size, loop {}", "relative_sizes") | pairs
