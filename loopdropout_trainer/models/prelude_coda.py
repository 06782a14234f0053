"""Models of three stacks of blocks, prelude, core and coda, whose core is the recurrent block and starts from a random state.

e = prelude(wte[ids]),   s_0 random,   for t = 1..K:  s_t = core(mix(s_{t-1}, e)),   readout of loop t = coda(s_t)
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, cached_file

from loopdropout_trainer.errors import UserError, first_line
from loopdropout_trainer.models.backbone import LoopedBackbone
from loopdropout_trainer.models.layers import RecurrentLayer, RMSNorm
from loopdropout_trainer.models.looped_modeling import LoopedConfigMixin, LoopedForCausalLM, LoopedPreTrainedModel
from loopdropout_trainer.models.passes import LoopInputs


@strict
class PreludeCodaConfig(LoopedConfigMixin, PreTrainedConfig):
    """Fields of the configurations of Huginn and Parcae."""

    attribute_map = {"num_loops": "mean_recurrence", "hidden_size": "n_embd"}
    keys_to_ignore_at_inference = ["past_key_values"]
    attention_dropout = 0.0
    rotates_pairs = True  # channels (2i, 2i + 1)

    block_size: int = 4096
    padded_vocab_size: int | None = None
    tie_embeddings: bool = True
    num_key_value_heads: int | None = None
    state_init: str = "like-init"
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 2
    n_layers_in_coda: int = 2
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    state_seed: int = 0

    @property
    def num_recurrent_layers(self) -> int:
        return self.n_layers_in_recurrent_block

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all three stacks."""
        return self.n_layers_in_prelude + self.n_layers_in_recurrent_block + self.n_layers_in_coda

    def set_missing(self, **defaults: Any) -> None:
        """Set the fields that are None."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def check_choices(self, choices: dict[str, tuple], values: dict[str, Any]) -> None:
        """Raise UserError if the value of a field is not among its choices."""
        for name, supported in choices.items():
            value = values.get(name, supported[0])
            if value not in supported:
                family = type(self).__name__.removesuffix("Config")
                valid = " or ".join(map(repr, supported))
                raise UserError(f"`{name}` must be {valid} for {family}, got {value!r}.")

    def check_head_dim(self, heads: str) -> None:
        """Raise UserError unless the width of a head is even, since pairs of channels are rotated.

        Args:
            heads: Field with the number of heads.
        """
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(
                f"`head_dim` must be even and at least 2, got {self.head_dim} from `n_embd` {self.n_embd} and `{heads}` "
                f"{getattr(self, heads)}."
            )


def rotary_angles(config: PreludeCodaConfig, position_ids: Tensor) -> Tensor:
    """Return the rotation angles [..., d / 2] of positions [...], float32: p * base^(-2i / d)."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = config.rope_base ** (-channels / config.head_dim)
    return position_ids[..., None].float() * frequencies


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of x [B, heads, S, d] by the angles of cos and sin, [B or 1, S, d / 2].

    The computation is in float32 or float64.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).type_as(x)


# Random initial states without a random state. The source is Philox-4x32-10 (Salmon et al. 2011): 64-bit key, counter
# (channel // 4, position, 0, 0). A token's state depends only on its key and its position. So it is the same with a cache,
# in another batch, with padding, with other processes and in a resumed run.

_WORD = 0xFFFFFFFF


@torch.compiler.assume_constant_result
def stream_key(*parts: str | int) -> int:
    """Return the signed 64-bit key of the stream for a purpose, a seed, an optimizer step, ..."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox-4x32-10, as int64 tensors, for broadcastable counter and key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first = c0 * 0xD2511F53  # 64 bits, of which int64 takes the highest as a sign
        second = c2 * 0xCD9E8D57
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def truncated_normals(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return standard normal numbers [..., width], float32, truncated at 3 sigma.

    Args:
        keys: int64 keys of streams, in a shape that broadcasts with `positions`.
        positions: [...] int64.
        width: Number of channels.
    """
    blocks = torch.arange(math.ceil(width / 4), device=positions.device)
    positions = positions.unsqueeze(-1)
    keys = keys.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    words = philox((blocks, positions, zero, zero), (keys & _WORD, (keys >> 32) & _WORD))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :width]  # 32 bits each
    uniforms = ((words >> 8).to(torch.float32) + 0.5) * 2.0**-24  # in (0, 1), by the 24 bits that float32 can hold
    # The inverse of the distribution of a normal number z, P(|z| < x) = erf(x / sqrt(2)), for |z| < 3 only.
    inside = math.erf(3 / math.sqrt(2))
    return math.sqrt(2) * torch.erfinv(inside * (2 * uniforms - 1))


def download_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that say where the files are."""
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    return {name: options[name] for name in names if name in options}


def weight_names(name_or_path: str, **download: Any) -> tuple[list[str], bool]:
    """Return the names of the weights in a checkpoint, without loading them, and whether it is in safetensors."""
    with suppress(OSError):
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **download)
        return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]), True
    with suppress(OSError):
        file = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **download)
        return list(safe_open(file, framework="pt").keys()), True
    file = cached_file(name_or_path, WEIGHTS_NAME, **download)
    try:
        return list(torch.load(file, map_location="meta", weights_only=True)), False
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise UserError(f"{file} must hold tensors only: {first_line(error)}") from error


class PreludeCodaPreTrainedModel(LoopedPreTrainedModel):
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _keys_to_ignore_on_load_unexpected = [r"^freqs_cis$", r"rotary_emb\.inv_freq$"]


class PreludeCodaModel(PreludeCodaPreTrainedModel, LoopedBackbone):
    """Embeddings and the three stacks. Prelude and coda run once. The coda makes a loop's readout of its state.

    A subclass names its class of blocks, mixes the state with the prelude's output in `recurrent_step`, and calls `post_init`.

    Args:
        config: Configuration.
        mixer: Module that mixes the state with the prelude's output. Published weights name it `adapter`.
    """

    block_class: type[RecurrentLayer]

    def __init__(self, config: PreludeCodaConfig, mixer: nn.Module) -> None:
        super().__init__(config)
        blocks = [self.block_class(config, index) for index in range(config.num_hidden_layers)]  # the cache's order
        prelude = config.n_layers_in_prelude
        outside = prelude + config.n_layers_in_coda
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.add_embeddings(config)
        self.prelude = nn.ModuleList(blocks[:prelude])
        self.adapter = mixer
        self.core_block = nn.ModuleList(blocks[outside:])  # the loop's layers are the last ones of the cache
        self.coda = nn.ModuleList(blocks[prelude:outside])
        self.ln_f = RMSNorm(config.n_embd, eps=config.norm_eps)

    def add_embeddings(self, config: PreludeCodaConfig) -> None:
        """Add further embeddings of the tokens. By default there are none."""

    def recurrent_layers(self) -> list[nn.Module]:
        return [self.adapter, *self.core_block]

    def attention_inputs(
        self, embeddings: Tensor, position_ids: Tensor, input_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        angles = rotary_angles(self.config, position_ids)
        return angles.cos(), angles.sin()

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        injected = inputs.run(self.prelude)
        return replace(inputs, injected=injected, state=self.initial_state(inputs).to(injected))

    @torch.no_grad()
    def initial_state(self, inputs: LoopInputs) -> Tensor:
        """Return the tokens' initial states [B, S, E]: N(0, std^2) truncated at 3 std, with `config.state_std`.

        In training, a token's state depends on the step, the example's place in the global batch, `config.state_seed` and the
        position. Otherwise it depends only on the last two.
        """
        config, batch = self.config, self.gate_state.batch
        if config.state_init == "zero":
            return torch.zeros_like(inputs.state)
        examples: list[tuple[int, ...]] = [()]  # one stream for all examples
        draw = batch.draw
        if self.training and draw is not None:
            examples = [(draw.seed, draw.step, *example) for example in draw.example_ids]
        keys = [stream_key("initial state", config.state_seed, *example) for example in examples]
        keys = torch.tensor(keys, device=inputs.state.device)  # [N], or [1] for all examples
        keys = self.gate_state.per_token(keys, inputs.state).squeeze(-1)  # [B or 1, S or 1]
        positions = inputs.position_ids.expand(len(inputs.state), -1)
        return config.state_std * truncated_normals(keys, positions, config.n_embd)


class PreludeCodaForCausalLM(PreludeCodaPreTrainedModel, LoopedForCausalLM):
    """The stacks with their head, which is the embedding if `config.tie_embeddings`. Logits are float32."""

    float32_logits = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Change the size of the vocabulary. It takes the arguments of transformers."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = len(embeddings.weight)
        return embeddings

    # The published checkpoint holds the head twice, and a table of rotations. The table is computed in float32 and never
    # read, because a model that is cast to bfloat16 would cast it too.

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_word_embeddings:
            head = weights["transformer.wte.weight"].clone()  # safetensors does not save tensors that share memory
            weights = {**weights, "lm_head.weight": head}
        if not self.config.rotates_pairs:
            return weights
        angles = rotary_angles(self.config, torch.arange(self.config.block_size))
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return {**weights, "freqs_cis": table[None, :, None]}
