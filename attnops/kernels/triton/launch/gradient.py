"""Host side of the gradient: tiles, arguments, launches. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnops.kernels.triton.device.gradient import grad_keys as _grad_keys
from attnops.kernels.triton.device.gradient import grad_queries as _grad_queries
from attnops.kernels.triton.launch.call import INTERPRETED, LOG2E, OPTIONS, Step, _device
from attnops.kernels.triton.launch.plan import padded
from attnops.reference.attention import Rules

grad_keys: Any = _grad_keys
grad_queries: Any = _grad_queries


class Tile(NamedTuple):
    """Rows that a program keeps, rows of a step, warps, and loads in flight."""

    kept: int
    step: int
    warps: int
    stages: int


# By what is multiplied and the wider padded head dim: for a tile of queries, for one of keys. Smaller ones follow where memory is short.
TILES: dict[tuple[str, int], tuple[Tile, Tile]] = {
    ("half", 64): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("half", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    ("half", 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("float32", 64): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("float32", 128): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("float32", 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


class Packed(NamedTuple):
    """A call on packed tokens: tensors `[T, H, ...]` by their strides, the last dim's 1. bounds: as `grad_queries` has it.

    longest: queries and keys of a request, at most. covered: is every row some request's?
    """

    grad_output: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    sinks: Tensor | None
    bounds: Tensor
    longest: tuple[int, int]
    covered: bool


def tiles_of(dtype: torch.dtype, head_dim: int, v_head_dim: int, memory: int) -> tuple[Tile, Tile]:
    """The tiles of a call's two launches, from static facts alone. memory: bytes of shared memory that a program may have."""
    width, wider = padded(head_dim) + padded(v_head_dim), max(padded(head_dim), padded(v_head_dim), 64)
    found = TILES["float32" if dtype == torch.float32 else "half", wider]
    first, second = (_fitting(t, width, dtype.itemsize, memory) for t in found)
    return first, second


def _fitting(tile: Tile, width: int, itemsize: int, memory: int) -> Tile:
    while _shared_bytes(tile, width, itemsize) > memory and max(tile.kept, tile.step) > 16:
        tile = tile._replace(step=tile.step // 2) if tile.step > 32 or tile.kept <= 32 else tile._replace(kept=tile.kept // 2, warps=4)
    return tile


def _shared_bytes(tile: Tile, width: int, itemsize: int) -> int:
    return (width * (tile.kept + tile.stages * tile.step) + 2 * tile.kept * tile.step) * itemsize + 2048


def gradients(p: Packed, rules: Rules, tiles: tuple[Tile, Tile] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks, contiguous. tiles: for those who measure."""
    new = torch.empty if p.covered else torch.zeros
    found = [new(x.shape, dtype=x.dtype, device=x.device) for x in (p.query, p.key, p.value)]
    parts = None if p.sinks is None else torch.zeros(p.lse.shape, dtype=torch.float32, device=p.lse.device)
    with torch.cuda.device_of(p.query):
        for step in steps(p, rules, found, parts, tiles):
            step.kernel[(step.blocks,)](**step.given)
    grad_sinks = None if parts is None or p.sinks is None else parts.sum(0).to(p.sinks.dtype)
    return found[0], found[1], found[2], grad_sinks


def steps(p: Packed, rules: Rules, found: list[Tensor], parts: Tensor | None, tiles: tuple[Tile, Tile] | None = None) -> Iterator[Step]:
    """What `gradients` launches. found: query's, key's and value's. parts: of the sinks', by token."""
    heads, kv_heads = p.query.shape[1], p.key.shape[1]
    requests = p.bounds.shape[1]
    _, memory, _ = _device(p.query.device.index) if p.query.is_cuda else INTERPRETED
    of_queries, of_keys = tiles or tiles_of(p.query.dtype, p.query.shape[2], p.value.shape[2], memory)
    lse, delta = p.lse.contiguous(), torch.empty(p.lse.shape, dtype=torch.float32, device=p.lse.device)
    scale, cap = (rules.scale / rules.softcap, rules.softcap * LOG2E) if rules.softcap > 0 else (rules.scale * LOG2E, 0.0)
    wide = p.query.dtype == torch.float32 or not p.query.is_cuda
    shared = {
        "g_ptr": p.grad_output, "q_ptr": p.query, "k_ptr": p.key, "v_ptr": p.value, "lse_ptr": lse, "bounds_ptr": p.bounds,
        "delta_ptr": delta, "scale": scale, "factor": rules.scale, "cap": cap, "left": rules.left, "right": rules.right,
        "chunk": rules.chunk, "requests": requests,
        "g_t": p.grad_output.stride(0), "g_h": p.grad_output.stride(1), "q_t": p.query.stride(0), "q_h": p.query.stride(1),
        "k_t": p.key.stride(0), "k_h": p.key.stride(1), "v_t": p.value.stride(0), "v_h": p.value.stride(1),
        "HEADS": heads, "GROUP": heads // kv_heads, "D": p.query.shape[2], "DV": p.value.shape[2],
        "BLOCK_D": padded(p.query.shape[2]), "BLOCK_DV": padded(p.value.shape[2]),
        "COMPUTE": tl.float32 if wide else tl.float16 if p.query.dtype == torch.float16 else tl.bfloat16,
        "CAUSAL": rules.causal, "LEFT": rules.left >= 0, "RIGHT": rules.right >= 0 and not rules.causal, "CHUNKED": rules.chunk > 0,
        "CAP": rules.softcap > 0, **OPTIONS,
    }  # fmt: skip
    count = -(-p.longest[0] // of_queries.kept)
    yield Step(grad_queries, heads * count * requests, {
        **shared, "grad_lse_ptr": None if p.grad_lse is None else p.grad_lse.contiguous(), "o_ptr": p.output,
        "o_t": p.output.stride(0), "o_h": p.output.stride(1), "sinks_ptr": None if p.sinks is None else p.sinks.contiguous(),
        "sink_parts_ptr": parts, "out_ptr": found[0], "tiles": count, "TILE_Q": of_queries.kept, "TILE_K": of_queries.step,
        "num_warps": of_queries.warps, "num_stages": of_queries.stages,
    })  # fmt: skip
    count = -(-p.longest[1] // of_keys.kept)
    yield Step(grad_keys, kv_heads * count * requests, {
        **shared, "out_k_ptr": found[1], "out_v_ptr": found[2], "tiles": count, "TILE_Q": of_keys.step, "TILE_K": of_keys.kept,
        "num_warps": of_keys.warps, "num_stages": of_keys.stages,
    })  # fmt: skip
