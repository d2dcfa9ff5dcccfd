"""Launches of the gradient: one body for rectangular and for packed batches. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.call import changed
from attnops.kernels.triton.device.gradient import grad_keys, grad_queries
from attnops.kernels.triton.launch.gpu import computed_in, flat, gpu_of, launch, ruled
from attnops.kernels.triton.launch.grids import Tile, padded
from attnops.reference.rows import Rules

if TYPE_CHECKING:
    from attnops.ops import dense, varlen


# (kind of numbers, the wider padded head dim) -> (tile of queries, tile of keys), smaller where shared memory is short. A tile's `rows`
# are those that a program keeps, its `keys` the rows of a step.
TILES: dict[tuple[str, int], tuple[Tile, Tile]] = {
    ("half", 64): (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    ("half", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    ("half", 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ("float32", 64): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("float32", 128): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    ("float32", 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def attention_backward(call: dense.AttentionBackward) -> tuple[Tensor, ...]:
    query, start, end = call.query, call.kv_start, call.kv_end
    batch, queries, keys = *query.shape[:2], call.key.shape[1]
    at = torch.arange(batch, device=query.device)
    low = torch.zeros_like(at) if start is None else start.clamp(min=0)
    high = torch.full_like(at, keys) if end is None else end
    bounds = torch.stack([at * queries, torch.full_like(at, queries), at * keys, low, high.clamp(max=keys), high - queries])
    names = ("grad_output", "grad_lse", "query", "key", "value", "output", "lse")
    packed = changed(call, **{n: x.flatten(0, 1) for n in names if (x := getattr(call, n)) is not None})
    found = _gradients(packed, bounds, (queries, keys), covered=start is None and end is None)
    grads = (x.view(like.shape) for x, like in zip(found[:3], (query, call.key, call.value), strict=True))
    return *grads, query.new_empty(0), found[3]


def varlen_attention_backward(call: varlen.VarlenAttentionBackward) -> tuple[Tensor, ...]:
    queries, keys = call.cu_seqlens_q.diff(), call.cu_seqlens_k.diff()
    bounds = torch.stack([call.cu_seqlens_q[:-1], queries, call.cu_seqlens_k[:-1], torch.zeros_like(keys), keys, keys - queries])
    return _gradients(call, bounds, (call.max_seqlen_q, call.max_seqlen_k), covered=not call.padded)


def _gradients(call: Any, bounds: Tensor, longest: tuple[int, int], covered: bool) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and sinks, contiguous; that of the sinks is `[0]` where there are none.

    Args:
        call: tensors `[T, H, ...]`.
        bounds: `[6, requests]`, as `grad_queries` has it.
        longest: queries and keys of a request, at most.
        covered: does every row belong to a request?
    """
    query, key, value, sinks, lse, requests = call.query, call.key, call.value, call.sinks, call.lse, bounds.shape[1]
    grad_sinks = query.new_empty(0) if sinks is None else torch.zeros_like(sinks, memory_format=torch.contiguous_format)
    inputs = (query, key, value)
    if not (all(x.numel() for x in inputs) and requests and min(longest) > 0):
        return *(x.new_zeros(x.shape) for x in inputs), grad_sinks
    new = torch.empty if covered else torch.zeros
    found = [new(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    parts = None if sinks is None else torch.zeros(lse.shape, dtype=torch.float32, device=query.device)  # those of the sinks, by token
    grad_output, output = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.grad_output, call.output))
    (_, heads, dims), (_, kv_heads, v_dims), rules = query.shape, value.shape, Rules.of(call)
    shared = {
        **ruled(rules), "g_ptr": grad_output, "q_ptr": query, "k_ptr": key, "v_ptr": value, "lse_ptr": lse.contiguous(),
        "bounds_ptr": bounds.int(), "delta_ptr": torch.empty(lse.shape, dtype=torch.float32, device=lse.device), "factor": rules.scale,
        "requests": requests, "g_t": grad_output.stride(0), "g_h": grad_output.stride(1), "q_t": query.stride(0), "q_h": query.stride(1),
        "k_t": key.stride(0), "k_h": key.stride(1), "v_t": value.stride(0), "v_h": value.stride(1),
        "HEADS": heads, "GROUP": heads // kv_heads, "D": dims, "DV": v_dims, "BLOCK_D": padded(dims), "BLOCK_DV": padded(v_dims),
        "COMPUTE": computed_in(query),
    }  # fmt: skip
    of_queries, of_keys = tiles_of(query.dtype, dims, v_dims, gpu_of(query).memory)
    count = -(-longest[0] // of_queries.rows)
    launch(grad_queries, (heads * count * requests,), {
        **shared, "grad_lse_ptr": flat(call.grad_lse), "o_ptr": output, "o_t": output.stride(0), "o_h": output.stride(1),
        "sinks_ptr": flat(sinks), "sink_parts_ptr": parts, "out_ptr": found[0], "tiles": count,
        "TILE_Q": of_queries.rows, "TILE_K": of_queries.keys, "num_stages": of_queries.stages,
    }, warps=of_queries.warps)  # fmt: skip
    count = -(-longest[1] // of_keys.rows)
    launch(grad_keys, (kv_heads * count * requests,), {
        **shared, "out_k_ptr": found[1], "out_v_ptr": found[2], "tiles": count,
        "TILE_Q": of_keys.keys, "TILE_K": of_keys.rows, "num_stages": of_keys.stages,
    }, warps=of_keys.warps)  # fmt: skip
    return *found, grad_sinks if parts is None else parts.sum(0).to(grad_sinks.dtype)


def tiles_of(dtype: torch.dtype, head_dim: int, v_head_dim: int, memory: int) -> tuple[Tile, Tile]:
    """The tiles of both launches, from static facts alone. memory: bytes of shared memory that a program may have."""
    width, wider = padded(head_dim) + padded(v_head_dim), max(padded(head_dim), padded(v_head_dim), 64)
    found = TILES["float32" if dtype == torch.float32 else "half", wider]
    first, second = (_fitting(t, width, dtype.itemsize, memory) for t in found)
    return first, second


def _fitting(tile: Tile, width: int, itemsize: int, memory: int) -> Tile:
    def taken() -> int:
        return (width * (tile.rows + tile.stages * tile.keys) + 2 * tile.rows * tile.keys) * itemsize + 2048

    while taken() > memory and max(tile.rows, tile.keys) > 16:
        tile = tile._replace(keys=tile.keys // 2) if tile.keys > 32 or tile.rows <= 32 else tile._replace(rows=tile.rows // 2, warps=4)
    return tile
