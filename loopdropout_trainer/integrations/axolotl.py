"""Plugin for axolotl, which trains a LoRA adapter with Loop Dropout."""

from __future__ import annotations

from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault
from pydantic import BaseModel
from transformers import PreTrainedModel, Trainer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.handle import LoopDropoutHandle, loop_dropout


FUSED_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
"""axolotl's fused LoRA layers, which compute the update without its gate. axolotl turns them on by default."""


class LoopDropoutArgs(BaseModel):
    """Fields of the plugin in axolotl's YAML file.

    Args:
        loop_dropout_p: Drop probability, one number or one for each loop.
        loop_dropout_rule: Name of the rule that draws the gates.
    """

    loop_dropout_p: float | list[float] = 0.5
    loop_dropout_rule: str = "loop_dropout"


class LoopDropoutPlugin(BasePlugin):
    """Apply Loop Dropout from the creation of the trainer to the end of the training."""

    handle: LoopDropoutHandle | None = None

    def get_input_args(self) -> str:
        """Return the import path of the plugin's fields."""
        return f"{__name__}.LoopDropoutArgs"

    def register(self, cfg: DictDefault) -> None:
        """Turn off fused LoRA kernels before axolotl turns them on."""
        for field in FUSED_KERNELS:
            if cfg.get(field):
                raise UserError(f"`{field}` must be false with Loop Dropout, got true. The kernel ignores the gates.")
            cfg[field] = False

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Draw gates in every training pass of the model, from axolotl's `seed`."""
        self.handle = loop_dropout(trainer.model, cfg.loop_dropout_p, cfg.loop_dropout_rule, seed=cfg.seed)

    def post_train(self, cfg: DictDefault, model: PreTrainedModel) -> None:
        """Restore the model. axolotl calls this twice."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
