"""Calls of any size to be timed: inputs are views of one pool, so that making one takes no longer than timing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.measured import Shape
from attnops.problem import Extent, Problem, Target
from attnops.testing import Call
from attnops.testing.inputs import QUANTISED

PAGED_OPS = ("paged_attention", "mla_attention")
PROMISING_OPS = ("paged_attention", "varlen_attention")


class Pool:
    """Random numbers on a device, dealt out as tensors that do not overlap until `reset`. One buffer a dtype, grown as needed."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}

    def reset(self) -> None:
        """What was dealt out may be dealt out again."""
        self._used.clear()

    def drop(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reserve(self, dtype: torch.dtype, numbers: int) -> None:
        """Have at least `numbers` of `dtype`. What was dealt out before keeps its memory but is no longer the pool's."""
        have = self._buffers.get(dtype)
        if have is None or have.numel() < numbers:
            self._buffers.pop(dtype, None)
            self._buffers[dtype] = self._random(numbers, dtype)

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of normal numbers, of about one where `dtype` is a float."""
        size = math.prod(shape)
        start = self._used.get(dtype, 0)
        self._used[dtype] = start + -(-size // 256) * 256
        self.reserve(dtype, self._used[dtype])
        return self._buffers[dtype][start : start + size].view(shape)

    def ints(self, values: Sequence[int]) -> Tensor:
        """int32, on the device."""
        return torch.tensor(list(values), dtype=torch.int32).to(self.device)

    def cumulative(self, lengths: Sequence[int]) -> Tensor:
        """int32 `[B + 1]`."""
        return torch.nn.functional.pad(torch.tensor(list(lengths)).cumsum(0), (1, 0)).to(torch.int32).to(self.device)

    def _random(self, numbers: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(numbers, dtype=dtype, device=self.device)
        step = 1 << 28
        for start in range(0, numbers, step):
            part = out[start : start + step]
            if dtype in QUANTISED:
                part.copy_(torch.randn(part.shape, generator=self.generator, device=self.device).mul_(2.0))
            else:
                part.normal_(generator=self.generator)
        return out


def build(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> Call:
    """A call of `shape` with these lengths of each request, in tokens. Pages lie in random order. Uses the pool from its start.

    `attention` wants one query length; with `kv_range` the keys are as many as the longest, and each request ends at its own.
    """
    pool.reset()
    arguments: dict[str, Any] = {"scale": (192 if shape.rope_dim else shape.head_dim) ** -0.5, "causal": shape.causal}
    if shape.window >= 0:
        arguments["window_left"] = shape.window
    if shape.sinks:
        arguments["sinks"] = pool.take(shape.q_heads, dtype=getattr(torch, shape.dtype)).clone()
    if shape.kv_dtype != shape.dtype:
        scale = torch.full((1,), 0.5, device=pool.device)
        arguments |= {"kv_scale": scale} if shape.rope_dim else {"k_scale": scale, "v_scale": scale}
    if shape.op in PROMISING_OPS:
        arguments["padded"] = False  # as PagedCache says of its batches
    if shape.op in PAGED_OPS:
        arguments["holes"] = False
    make = {"attention": _dense, "varlen_attention": _packed, "paged_attention": _paged, "mla_attention": _paged}[shape.op]
    written = ("output",) if shape.op in PAGED_OPS else ()
    return Call(shape.op, arguments | make(shape, q_lens, k_lens, pool), {}, written)


def problem_of(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], target: Target) -> Problem:
    """The Problem of such a call on `target`, without making it."""
    s, queries, most = shape, max(q_lens), max(k_lens)
    keys = -(-most // s.page_size) * s.page_size if s.page_size else most
    dense = s.op == "attention"
    return Problem(
        s.op, target, getattr(torch, s.dtype), getattr(torch, s.kv_dtype), s.q_heads, s.kv_heads, s.head_dim, s.v_head_dim, s.rope_dim,
        s.page_size, s.causal, (s.window, -1), sinks=s.sinks, kv_range=s.kv_range, sizes_equal=dense and queries == keys,
        tokens=Extent.of(queries * len(q_lens) if dense else sum(q_lens)), batch=Extent.of(len(q_lens)),
        queries=Extent.of(queries), context=Extent.of(keys), padded=s.op not in PROMISING_OPS,
    )  # fmt: skip


def _dense(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> dict[str, Any]:
    batch, queries, keys = len(q_lens), max(q_lens), max(k_lens)
    out = _qkv(shape, (batch, queries), (batch, keys), pool)
    return out | ({"kv_end": pool.ints(k_lens)} if shape.kv_range else {})


def _packed(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> dict[str, Any]:
    lengths = {"cu_seqlens_q": pool.cumulative(q_lens), "cu_seqlens_k": pool.cumulative(k_lens)}
    most = {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens)}
    return _qkv(shape, (sum(q_lens),), (sum(k_lens),), pool) | lengths | most


def _qkv(shape: Shape, queries: Sequence[int], keys: Sequence[int], pool: Pool) -> dict[str, Any]:
    dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    return {
        "query": pool.take(*queries, shape.q_heads, shape.head_dim, dtype=dtype),
        "key": pool.take(*keys, shape.kv_heads, shape.head_dim, dtype=kv_dtype),
        "value": pool.take(*keys, shape.kv_heads, shape.v_head_dim, dtype=kv_dtype),
    }


def _paged(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> dict[str, Any]:
    dtype, kv_dtype, tokens = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), sum(q_lens)
    counts = torch.tensor([-(-n // shape.page_size) for n in k_lens])
    pages, width = int(counts.sum()), int(counts.max())
    order = torch.randperm(pages, generator=pool.generator, device=pool.device).to(torch.int32)
    table = torch.zeros(len(k_lens), width, dtype=torch.int32, device=pool.device)
    table[(torch.arange(width) < counts[:, None]).to(pool.device)] = order
    out: dict[str, Any] = {
        "page_table": table,
        "seq_lens": pool.ints(k_lens),
        "cu_seqlens_q": pool.cumulative(q_lens),
        "max_seqlen_q": max(q_lens),
        "output": torch.empty(tokens, shape.q_heads, shape.v_head_dim, dtype=dtype, device=pool.device),
    }
    if shape.op == "mla_attention":
        return out | {
            "q_nope": pool.take(tokens, shape.q_heads, shape.v_head_dim, dtype=dtype),
            "q_pe": pool.take(tokens, shape.q_heads, shape.rope_dim, dtype=dtype),
            "latent_pages": pool.take(pages, shape.page_size, shape.head_dim, dtype=kv_dtype),
        }
    return out | {
        "query": pool.take(tokens, shape.q_heads, shape.head_dim, dtype=dtype),
        "k_pages": pool.take(pages, shape.page_size, shape.kv_heads, shape.head_dim, dtype=kv_dtype),
        "v_pages": pool.take(pages, shape.page_size, shape.kv_heads, shape.v_head_dim, dtype=kv_dtype),
    }
