"""What the update does to the state in each loop: how much, and whether the loops pull the same way.

With h_{t-1} from the adapted run, let F be loop t without its update and F' loop t with it. Its effect is

    u_t = F'(h_{t-1}) - F(h_{t-1})
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from loopdropout_trainer.diagnostics.diagnostic import Context, Diagnostic, Report
from loopdropout_trainer.diagnostics.plots import draw_curves, draw_heat_map, new_figure, save_figure
from loopdropout_trainer.diagnostics.scores import Batch
from loopdropout_trainer.diagnostics.states import carries_states, target_states


class Updates(Diagnostic):
    """K + 1 passes: all loops adapted, and all but one. Both runs share the state before the loop that is left out."""

    name = "updates"
    title = "Effect of the update in each loop, relative to the state"
    needs_adapter = True

    def passes(self, context: Context) -> int:
        return 1  # one walk over the batches, in which each is run K + 1 times

    def measure(self, context: Context) -> dict[str, Any]:
        num_loops = context.num_loops
        parts = context.over_batches(lambda batch: self._of_batch(context, batch))
        sizes, cosines = (np.concatenate([part[i] for part in parts]) for i in (0, 1))  # [n, K], [n, K, K]
        assert sizes.shape[1] == num_loops
        return {
            "states": "carried" if carries_states(context.model) else "readout",
            "relative_sizes": sizes.mean(axis=0).tolist(),
            "cosines": cosines.mean(axis=0).tolist(),
        }

    def _of_batch(self, context: Context, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return relative sizes [n, K] and cosines [n, K, K] for the batch's n target tokens."""
        with_update, _ = target_states(context.model, batch)  # [K, n, H]
        without = []
        for loop in range(context.num_loops):
            gates = torch.ones(context.num_loops)
            gates[loop] = 0
            with context.gated(gates):
                without.append(target_states(context.model, batch)[0][loop])
        without = torch.stack(without).float()
        effects = with_update.float() - without
        sizes = effects.norm(dim=-1) / without.norm(dim=-1)
        directions = F.normalize(effects, dim=-1)
        cosines = torch.einsum("snh,tnh->nst", directions, directions)
        return sizes.T.double().cpu().numpy(), cosines.double().cpu().numpy()

    def table(self, report: Report):
        rows = {f"size, loop {loop}": ("relative_sizes", loop - 1) for loop in report.loops}
        rows |= {
            f"cosine, loops {loop} and {loop + 1}": ("cosines", loop - 1, loop) for loop in range(1, report.num_loops)
        }
        return report.table(rows)

    def draw(self, report: Report, path):
        with new_figure() as (figure, axes):
            draw_curves(axes, report.loops, report.series("relative_sizes"))
            axes.set(xlabel="Loop", ylabel="Update / state", xticks=report.loops)
            files = save_figure(figure, path, legend_of=axes)
        return files + draw_loop_matrices(report, "cosines", "Cosine of updates", f"{path}_cosines")


def draw_loop_matrices(report: Report, key: str, label: str, path, low: float | None = None):
    """Save one loop x loop heat map for each method, on one colour scale."""
    matrices = {method: mean for method, (mean, _) in report.series(key).items()}
    columns = 2 if len(matrices) == 4 else min(3, len(matrices))
    rows, names = -(-len(matrices) // columns), [str(loop) for loop in report.loops]
    low = min(m.min() for m in matrices.values()) if low is None else low
    width = {1: 2.6, 2: 4.6, 3: 6.4}[columns]
    with new_figure(rows, columns, width=width, height=2.0, squeeze=False) as (figure, axes):
        for axis in axes.flat[len(matrices) :]:
            axis.remove()
        for axis, (method, matrix) in zip(axes.flat, matrices.items(), strict=False):
            image = draw_heat_map(axis, matrix, names, names, low, 1.0, ".2f")
            axis.set(title=method, xlabel="Loop", ylabel="Loop")
        shown = list(axes.flat[: len(matrices)])
        figure.colorbar(image, ax=shown, label=label).outline.set_visible(False)
        return save_figure(figure, path)
