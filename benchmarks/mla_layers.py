"""The layers that mla.py measures: transformers', ours with the same weights, and filled caches for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache import LatentCache, PagedBatch, Planner
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops import write_latent
from attnops.ops.plan import LatentSpec
from attnops.tune.clock import Run

NEAR = 0.02  # norm of the difference over the norm of the result, bfloat16
# The same of float8: query and latents are rounded by 0.03 in the root of the mean square, and scores, of which a softmax is made, are
# sums of their products with a spread of some units.
FAR = 0.15
BASE, FACTOR, FIRST_LENGTH = 10000.0, 40.0, 4096
SCALE = 1 / 32  # of float8: a random latent's largest number, about 6, is then stored as 192, of 448


@dataclass(frozen=True)
class Model:
    """The layer's numbers; those of DeepSeek-V3 unless said otherwise, with the heads that one GPU holds."""

    heads: int = 128
    hidden: int = 7168
    q_rank: int = 1536
    latent: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    dtype: torch.dtype = torch.bfloat16

    def weights(self) -> int:
        """Numbers of the layer's matrices."""
        q = self.q_rank * (self.hidden + self.heads * (self.nope + self.rope))
        kv = self.hidden * (self.latent + self.rope) + self.latent * self.heads * (self.nope + self.v)
        return q + kv + self.heads * self.v * self.hidden


@dataclass(frozen=True)
class Size:
    """A decode step: `keys` tokens a request, the new one included."""

    model: Model
    batch: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.model.heads} heads, {self.batch}x{self.keys}"

    def kernel_work(self) -> tuple[float, float]:
        """(bytes, operations) of attention alone."""
        m, pairs = self.model, self.batch * self.keys * self.model.heads
        moved = self.batch * (self.keys * (m.latent + m.rope) + m.heads * (2 * m.latent + m.rope))
        return m.dtype.itemsize * moved, 2.0 * pairs * (2 * m.latent + m.rope)

    def layer_work(self) -> tuple[float, float]:
        """(bytes, operations) of the layer."""
        moved, done = self.kernel_work()
        return moved + self.model.dtype.itemsize * self.model.weights(), done + 2.0 * self.batch * self.model.weights()


class Filled:
    """A cache as transformers' layers take it: full of the given latents, the last token of each request about to be written."""

    def __init__(self, latents: Tensor, dim: int) -> None:
        # transformers' layer rotates pairs and writes them apart, ours leaves them where they are.
        k_pe = latents[:, None, :, dim:]
        self.keys = latents[:, None, :, :dim].contiguous()
        self.values = torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -key.shape[2] :] = key
        self.values[:, :, -value.shape[2] :] = value
        return self.keys, self.values


def theirs(m: Model, device: str) -> Any:
    """transformers' layer with random weights."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {
        "rope_type": "yarn", "rope_theta": BASE, "factor": FACTOR, "original_max_position_embeddings": FIRST_LENGTH, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=m.hidden, num_attention_heads=m.heads, num_key_value_heads=m.heads, q_lora_rank=m.q_rank, kv_lora_rank=m.latent,
        qk_nope_head_dim=m.nope, qk_rope_head_dim=m.rope, v_head_dim=m.v, max_position_embeddings=163840, rope_parameters=rope,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = DeepseekV3Attention(config, 0)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer.to(device, m.dtype).eval()


def ours(m: Model, weights: dict[str, Tensor], device: str, absorb: int | str = "auto", kernel: str | None = None) -> LatentAttention:
    """Our layer with the same weights."""
    rope = RotaryEmbedding(
        m.rope, BASE, scaling="yarn", factor=FACTOR, interleaved=True, original_max_position=FIRST_LENGTH, mscale=1.0, mscale_all_dim=1.0
    )  # fmt: skip
    layer = LatentAttention(
        m.hidden, m.heads, q_lora_rank=m.q_rank, kv_lora_rank=m.latent, qk_nope_head_dim=m.nope, qk_rope_head_dim=m.rope, v_head_dim=m.v,
        rope=rope, absorb=absorb, kernel=kernel, device=device, dtype=m.dtype,
    )  # fmt: skip
    layer.load_state_dict(weights)
    return layer.eval()


def filled(
    m: Model, latents: Tensor, new: int, device: str, prefix_tokens: int | None = None, dtype: torch.dtype | None = None
) -> tuple[LatentCache, PagedBatch]:
    """A cache that holds `latents` `[B, K, Dc + Dr]`, in `dtype` if not the model's, and the step of each request's last `new` tokens."""
    batch, keys = latents.shape[:2]
    cache = LatentCache(
        1, batch * (keys + 128), latent_dim=m.latent, rope_dim=m.rope, max_requests=batch, max_tokens_per_request=keys, q_heads=m.heads,
        dtype=dtype or m.dtype, device=device,
    )  # fmt: skip
    requests = [cache.alloc(keys - new) for _ in range(batch)]
    step = cache.batch(requests, new, prefix_tokens=prefix_tokens)
    scale = None if dtype is None else torch.full((1,), SCALE, device=device)
    for request, rows in zip(requests, latents, strict=True):
        write_latent(*rows.split([m.latent, m.rope], -1), cache.latent_pages[0], cache.slots(request), kv_scale=scale)
    return cache, step


def planned(m: Model, cache: LatentCache, step: PagedBatch, query: torch.dtype | None = None, kv: torch.dtype | None = None) -> PagedBatch:
    """The step with the plan that its kernel reads, made as once a step. query, kv: dtypes other than the model's."""
    batch, width = step.page_table.shape[0], cache.page_table.shape[1]
    spec = LatentSpec(m.heads, cache.page_size, query or m.dtype, m.latent + m.rope, m.latent, kv_dtype=kv)
    return Planner(spec, max_tokens=batch, max_requests=batch, max_pages=width, device=cache.latent_pages[0].device)(step)


def their_step(layer: Any, hidden: Tensor, latents: Tensor, keys: int) -> Run:
    """transformers' layer on one token a request; hidden `[B, E]`."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    cache, positions = Filled(latents, layer.kv_lora_rank), torch.full((hidden.shape[0], 1), keys - 1, device=hidden.device)
    place = DeepseekV3RotaryEmbedding(layer.config).to(hidden.device)(hidden, positions)
    return lambda: layer(hidden[:, None], position_embeddings=place, attention_mask=None, past_key_values=cache)[0][:, 0]


def projections(layer: LatentAttention) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The matrices of the layer, without absorption, rotation, cache and attention between them."""

    def run(hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        kv = layer.kv_a_proj_with_mqa(hidden)
        return layer.o_proj(attended), q, kv

    return run


def launched(run: Run) -> Run:
    """`run`, which a clock cannot capture."""

    def call() -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("to be launched")
        return run()

    return call


def check(found: Tensor, exact: Tensor, what: str, most: float = NEAR) -> float:
    """Raises AssertionError for a result that is too far from the exact one."""
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert error < most, f"{what}: off by {error:.4f}"
    return error
