"""The launch of a decode step. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.kernel import deterministic
from attnops.core.tensors import Rules
from attnops.kernels.shared.launch.gpu import (
    computed_in,
    flat,
    gpu_of,
    launch,
    overlapped,
    overlaps,
    ruled,
    steady,
)
from attnops.kernels.shared.memory import split
from attnops.kernels.shared.sizes import padded, power
from attnops.kernels.triton.device.decode import decode
from attnops.kernels.triton.launch import grids
from attnops.kernels.triton.launch.attention import refuse_far

if TYPE_CHECKING:
    from attnops.ops.pages.decode import DecodeAttention


def decode_attention(call: DecodeAttention, choice: grids.Choice | None = None) -> None:
    """Write the new keys and values, and the output. choice: a configuration to launch in place of
    the rules'.

    Under a deterministic policy a request's keys are cut at the same places in every batch and page
    table, and merged as many at once.
    """
    query, key, value, output = call.query, call.key, call.value, call.output
    k, v = call.k_pages, call.v_pages
    if output.numel() == 0:
        return
    (requests, heads, dims), (pages, page, kv_heads, _) = query.shape, k.shape
    refuse_far(("k_pages", k, page), ("v_pages", v, page))
    rules, gpu, fixed = ruled(Rules.of(call)), gpu_of(output), deterministic(call.policy)
    if fixed:
        query, key = steady(query), steady(key)
    group, keys = heads // kv_heads, call.page_table.shape[1] * page
    groups, itemsize = requests * kv_heads, query.dtype.itemsize
    at = choice or grids.decode(
        groups, dims, itemsize, keys, call.window_left, gpu.multiprocessors, gpu.memory, fixed
    )
    tile, splits, apart = at.tile, at.splits, fixed or at.splits > 1
    least, most = (
        (grids.SPLIT_KEYS, grids.MANY_SPLITS) if fixed else (grids.LEAST_DECODED, power(splits))
    )
    numbers = requests * heads * splits * dims
    parts = output.new_empty(numbers + numbers // dims, dtype=torch.float32) if apart else None
    counters = split(call.workspace, 0)[0].view(torch.int32) if apart else None
    table = call.page_table if call.page_table.stride(1) == 1 else call.page_table.contiguous()
    cos, cos_b, sin, sin_b = rotation(call.cos, call.sin)
    rows, block = power(group), padded(dims)
    launch(
        decode,
        (requests * kv_heads, splits),
        {
            "D": dims,
            "BLOCK_D": block,
            "WIDTH": dims if cos is None else cos.shape[1],
            "PAGE": page,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "ROWS": rows,
            "AT_ONCE": max(1, min(most, grids.MERGED // (rows * block))),
            "TILE_M": tile.rows,
            "TILE_N": tile.keys,
            "COMPUTE": computed_in(query),
            "HOLES": call.holes,
            "SPLIT": apart,
            "num_stages": tile.stages,
            **overlapped(at.overlap and overlaps(output.device)),
        },
        (
            query,
            *query.stride()[:2],
            key,
            *key.stride()[:2],
            value,
            *value.stride()[:2],
            k,
            *k.stride()[:3],
            v,
            *v.stride()[:3],
            table,
            table.stride(0),
            call.seq_lens,
            call.seq_lens.stride(0),
            call.slots,
            call.slots.stride(0),
            cos,
            cos_b,
            sin,
            sin_b,
            output,
            *output.stride(),
            flat(call.q_norm),
            flat(call.k_norm),
            flat(call.sinks),
            parts,
            counters,
            rules["scale"],
            rules["cap"],
            rules["left"],
            call.eps,
            pages,
            splits,
            least,
            numbers,
        ),
        tile.warps,
    )


def rotation(
    cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor | None, int, Tensor | None, int]:
    """Both contiguous within a row, each with its stride by row."""
    if cos is None or sin is None:
        return None, 0, None, 0
    cos = cos if cos.stride(1) == 1 else cos.contiguous()
    sin = sin if sin.stride(1) == 1 else sin.contiguous()
    return cos, cos.stride(0), sin, sin.stride(0)
