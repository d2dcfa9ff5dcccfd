"""A decoder of `attnops.nn` over a `PagedCache`, in the shape of Llama: the same code in every mode of compilation and of graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnops.bench import memory
from attnops.cache import PagedBatch, PagedCache
from attnops.nn import RotaryEmbedding, SelfAttention


@dataclass(frozen=True)
class Dims:
    """Widths: of the residual stream, heads, key heads, of the MLP, and tokens there are."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int


LLAMA_8B = Dims(4096, 32, 8, 14336, 128256)
TINY = Dims(64, 4, 2, 96, 128)
PAGE = 16


class Block(nn.Module):
    """One layer."""

    def __init__(self, dims: Dims, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(dims.hidden, eps=1e-5), nn.RMSNorm(dims.hidden, eps=1e-5)
        self.attention = SelfAttention(dims.hidden, dims.heads, dims.kv_heads, rope=rope)
        self.gate_up = nn.Linear(dims.hidden, 2 * dims.inner, bias=False)
        self.down = nn.Linear(dims.inner, dims.hidden, bias=False)

    def forward(self, x: Tensor, batch: PagedBatch, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """x: `[T, hidden]`; k_pages, v_pages: this layer's."""
        x = x + self.attention(self.before(x), batch=batch, k_pages=k_pages, v_pages=v_pages)
        gate, up = self.gate_up(self.after(x)).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


class Decoder(nn.Module):
    """The model."""

    def __init__(self, layers: int, dims: Dims) -> None:
        super().__init__()
        rope = RotaryEmbedding(dims.hidden // dims.heads)
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(Block(dims, rope) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dims.hidden, eps=1e-5), nn.Linear(dims.hidden, dims.vocab, bias=False)

    def forward(self, tokens: Tensor, batch: PagedBatch, k_pages: tuple[Tensor, ...], v_pages: tuple[Tensor, ...]) -> Tensor:
        """Logits `[T, vocab]` of tokens int64 `[T]`; k_pages, v_pages: of every layer."""
        x = self.embed(tokens)
        for layer, keys, values in zip(self.layers, k_pages, v_pages, strict=True):
            x = layer(x, batch, keys, values)
        out: Tensor = self.head(self.norm(x))
        return out


def built(layers: int, dims: Dims, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """A Decoder with random weights, for inference."""
    place = torch.device(device)
    with torch.device("meta"):
        need = memory.needed(Decoder(layers, dims).to(dtype))
    if (there := memory.free(place)) is not None:
        memory.refuse(f"{layers} layers of a decoder of {dims.hidden}", need, there)
    with place:
        return Decoder(layers, dims).to(dtype).eval().requires_grad_(False)


def step_values(layers: int, dims: Dims, requests: int, context: int, device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a decode step of `requests` whose caches hold `context - 1` tokens each, all zeros, and the cache as `cache`."""
    width = -(-context // PAGE)
    cache = PagedCache(
        layers, requests * width + 1, PAGE, num_kv_heads=dims.kv_heads, head_dim=dims.hidden // dims.heads, max_requests=requests,
        max_pages_per_request=width, dtype=dtype, device=device,
    )  # fmt: skip
    ids = [cache.alloc(context - 1) for _ in range(requests)]
    tokens = torch.randint(dims.vocab, (requests,), generator=torch.Generator().manual_seed(0)).to(device)
    return {"tokens": tokens, "batch": cache.batch(ids), "k_pages": cache.k_pages, "v_pages": cache.v_pages, "cache": cache}
