"""Launches of the gradient: one body for rectangular and for packed batches. Importing this module
imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnops.core.kernel import deterministic
from attnops.core.tensors import Rules
from attnops.kernels.shared.launch.gpu import (
    NO_MASK,
    computed_in,
    flat,
    gpu_of,
    launch,
    masked,
    ruled,
    steady,
    strides,
)
from attnops.kernels.shared.sizes import padded, power
from attnops.kernels.triton.device.gradient import grad_keys, grad_queries
from attnops.kernels.triton.device.gradient_mask import grad_mask
from attnops.kernels.triton.launch.grids import Tile

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen


# By kind of numbers, for padded dims of query and value together up to the width: (tile of queries,
# tile of keys), smaller where shared memory is short. A tile's `rows` are those that a program
# keeps, its `keys` the rows of a step. Those of half numbers up to 320 dims were chosen by times of
# an H200, where the sums of 128 keys of 320 dims were fastest although registers spill. With 128
# registers a thread, a multiprocessor has two programs of queries.
TILES: dict[str, dict[int, tuple[Tile, Tile]]] = {
    "half": {
        128: (Tile(128, 64, 8, 3, 128), Tile(128, 64, 8, 3)),
        256: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        320: (Tile(128, 32, 8, 3), Tile(128, 64, 8, 2)),
        512: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
    "float32": {
        128: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        256: (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
        512: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
}
WITH_MASK = {128: Tile(64, 64, 4, 3), 256: Tile(128, 32, 8, 2), 320: Tile(128, 32, 8, 3)}
"""Tiles of keys in place of those: a tile of the mask takes registers."""


class Batch(NamedTuple):
    """Requests, and where their rows begin: of packed ones by cumulative lengths, of others by
    their widths, `[start, end)` visible."""

    requests: int
    width_q: int = 0
    width_k: int = 0
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None

    def tiles(self, rows: int, width: int, tile: int) -> tuple[int, int]:
        """(tiles of all requests, those of each). rows, width: of all requests, and of one where
        they have one width."""
        if self.cu_q is not None:
            return rows // tile + self.requests, 0
        each = -(-width // tile)
        return self.requests * each, each


def attention_backward(call: dense.AttentionBackward) -> tuple[Tensor, ...]:
    (batch, queries), keys = call.query.shape[:2], call.key.shape[1]
    at = Batch(batch, queries, keys, start=flat(call.kv_start), end=flat(call.kv_end))
    return _gradients(call, at, covered=call.kv_start is None and call.kv_end is None)


def varlen_attention_backward(call: varlen.VarlenAttentionBackward) -> tuple[Tensor, ...]:
    cu_q, cu_k = call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous()
    query, key, value, _, sinks = _gradients(
        call, Batch(cu_q.shape[0] - 1, cu_q=cu_q, cu_k=cu_k), covered=not call.padded
    )
    return query, key, value, sinks


def _gradients(call: Any, batch: Batch, covered: bool) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, mask and sinks, contiguous; the last two are `[0]` where
    there is none.

    covered: does every row belong to a request, and every key to its range?
    """
    query, key, value, sinks = call.query, call.key, call.value, call.sinks
    graded = call.mask if getattr(call, "mask_grad", False) else None
    # Without keys the log-sum-exp is the sink, which then has a gradient all the same.
    if not (batch.requests and query.numel()):
        return _zeros(call, graded)
    new = torch.empty if covered else torch.zeros
    found = [new(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    (heads, dims), (kv_heads, v_dims), rules = query.shape[-2:], value.shape[-2:], Rules.of(call)
    tokens, keys = query.numel() // (heads * dims), key.numel() // (kv_heads * dims)
    stats = torch.empty((heads, tokens, 2), dtype=torch.float32, device=query.device)
    parts = (
        None if sinks is None else new((heads, tokens), dtype=torch.float32, device=query.device)
    )
    fixed = deterministic(call.policy)
    grad_output, output = _as_read(call.grad_output, fixed), _as_read(call.output, fixed)
    block, rest = parted(dims)
    shared = {
        **ruled(rules),
        "g_ptr": grad_output,
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "stats_ptr": stats,
        "start_ptr": batch.start,
        "end_ptr": batch.end,
        "requests": batch.requests,
        "width_q": batch.width_q,
        "width_k": batch.width_k,
        "tokens": tokens,
        **strides(g=grad_output, q=query, k=key, v=value),
        **_masked(call.mask),
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": dims,
        "DV": v_dims,
        "BLOCK_DV": padded(v_dims),
        "COMPUTE": computed_in(query),
    }
    both = {
        **shared,
        "cu_q_ptr": batch.cu_q,
        "cu_k_ptr": batch.cu_k,
        "steps": batch.requests.bit_length(),
        "factor": rules.scale,
        "BLOCK_D": block,
        "REST": rest,
    }
    gpu = gpu_of(query)
    of_queries, of_keys = tiles_of(query.dtype, dims, v_dims, gpu.memory, call.mask is not None)
    # Windows and chunks need more registers: with fewer, ptxas has each product wait for the one
    # before it.
    capped = gpu.warpgroups and all(shared[n] is None for n in ("left", "right", "chunk"))
    of_output = strides(o=output)
    count, each = batch.tiles(tokens, batch.width_q, of_queries.rows)
    launch(
        grad_queries,
        (heads * count,),
        {
            **both,
            **of_output,
            "OFFSETS": offsets_of(of_queries, shared | of_output),
            "grad_lse_ptr": flat(call.grad_lse),
            "o_ptr": output,
            "lse_ptr": call.lse.contiguous(),
            "sinks_ptr": flat(sinks),
            "sink_parts_ptr": parts,
            "out_ptr": found[0],
            "tiles": count,
            "each": each,
            "TILE_Q": of_queries.rows,
            "TILE_K": of_queries.keys,
            **options_of(of_queries, capped),
        },
        warps=of_queries.warps,
    )
    count, each = batch.tiles(keys, batch.width_k, of_keys.rows)
    launch(
        grad_keys,
        (kv_heads * count,),
        {
            **both,
            "OFFSETS": offsets_of(of_keys, shared),
            "out_k_ptr": found[1],
            "out_v_ptr": found[2],
            "tiles": count,
            "each": each,
            "TILE_Q": of_keys.keys,
            "TILE_K": of_keys.rows,
            **options_of(of_keys, capped),
        },
        warps=of_keys.warps,
    )
    # Each result has memory of its own, an empty one, too: opcheck refuses a result that is
    # returned twice.
    grad_sinks = (
        query.new_empty(0) if sinks is None or parts is None else parts.sum(1).to(sinks.dtype)
    )
    return *found, query.new_empty(0) if graded is None else of_mask(shared, graded), grad_sinks


def _as_read(x: Tensor, fixed: bool) -> Tensor:
    """`x` with contiguous rows. fixed: under a deterministic policy."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return steady(x) if fixed else x


def _masked(mask: Tensor | None) -> dict[str, Any]:
    """The arguments about the mask."""
    if mask is None:
        return {**NO_MASK, "mask_t": 0, "MASK_STEP": 1}
    found = masked(mask)
    # Eight numbers at once, where a row is whole eights.
    step = 1 if mask.shape[-1] % 8 else 8
    return {**found, "mask_t": found["mask_q"] if mask.dim() == 2 else 0, "MASK_STEP": step}


def _zeros(call: Any, graded: Tensor | None) -> tuple[Tensor, ...]:
    """The results of `_gradients` without keys or queries."""
    inputs = call.query, call.key, call.value, graded, call.sinks
    return tuple(call.query.new_empty(0) if x is None else x.new_zeros(x.shape) for x in inputs)


def of_mask(shared: dict[str, Any], mask: Tensor) -> Tensor:
    """The gradient of an additive mask `[1 | B, 1 | H, 1 | S, K]`, contiguous, in a third launch.

    The products of queries and keys are computed once more, so that no buffer holds what the mask
    broadcasts over.
    """
    found = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
    half, wide = shared["q_ptr"].element_size() == 2, max(padded(shared["D"]), shared["BLOCK_DV"])
    tile = (
        Tile(64, 64, 4, 1)
        if half and wide <= 128
        else Tile(32, 32, 4, 1)
        if half or wide <= 128
        else Tile(16, 16, 4, 1)
    )
    of_all = [size == 1 for size in mask.shape[:3]]
    each = -(-shared["width_q"] // tile.rows)
    given = {n: x for n, x in shared.items() if n not in ("MASK", "mask_t")}
    tiles = -(-mask.shape[3] // tile.keys) * (1 if of_all[2] else each)
    launch(
        grad_mask,
        (tiles * mask.shape[0] * mask.shape[1],),
        {
            **given,
            "OFFSETS": offsets_of(tile, shared),
            "out_ptr": found,
            "each": each,
            "BLOCK_D": padded(shared["D"]),
            "ALL_REQUESTS": of_all[0],
            "ALL_HEADS": of_all[1],
            "ALL_QUERIES": of_all[2],
            "TILE_Q": tile.rows,
            "TILE_K": tile.keys,
            "num_stages": tile.stages,
        },
        warps=tile.warps,
    )
    return found


def offsets_of(tile: Tile, given: dict[str, Any]) -> Any:
    """The dtype of offsets within a tile: of 32 bits, unless its last row or key is further
    away."""
    steps = (step for name, step in given.items() if name.endswith(("_t", "mask_q", "mask_k")))
    return tl.int32 if max(steps) * max(tile.rows, tile.keys) < 2**31 else tl.int64


def options_of(tile: Tile, capped: bool) -> dict[str, int]:
    """Triton's options for a tile, but its warps. capped: do threads have no more than the tile's
    registers?"""
    return {
        "num_stages": tile.stages,
        **({"maxnreg": tile.registers} if capped and tile.registers else {}),
    }


def parted(dims: int) -> tuple[int, int]:
    """A head dim as two padded parts, or as one and 0, where two would not be narrower."""
    low = power(dims + 1) // 2
    if low < 16 or low == dims or low + padded(dims - low) >= padded(dims):
        return padded(dims), 0
    return low, padded(dims - low)


def tiles_of(
    dtype: torch.dtype, head_dim: int, v_head_dim: int, memory: int, masked: bool = False
) -> tuple[Tile, Tile]:
    """The tiles of both launches, from static facts alone. memory: bytes of shared memory that a
    program may have."""
    width, by_width = (
        sum(parted(head_dim)) + padded(v_head_dim),
        TILES["float32" if dtype == torch.float32 else "half"],
    )
    wide = min(w for w in by_width if w >= width)
    queries, keys = by_width[wide]
    if masked and dtype != torch.float32:
        keys = WITH_MASK.get(wide, keys)
    return _fitting(queries, width, dtype.itemsize, memory), _fitting(
        keys, width, dtype.itemsize, memory
    )


def _fitting(tile: Tile, width: int, itemsize: int, memory: int) -> Tile:
    def taken() -> int:
        return (
            width * (tile.rows + tile.stages * tile.keys) + 2 * tile.rows * tile.keys
        ) * itemsize + 2048

    while taken() > memory and max(tile.rows, tile.keys) > 16:
        tile = (
            tile._replace(keys=tile.keys // 2)
            if tile.keys > 32 or tile.rows <= 32
            else tile._replace(rows=tile.rows // 2, warps=4)
        )
    return tile
