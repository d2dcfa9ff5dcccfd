"""Launches of the ops that move data. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.kernels.shared.launch.gpu import flat, gpu_of, launch
from attnops.kernels.shared.launch.rows import _columns
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import move, tables
from attnops.kernels.triton.device.store import pack, store
from attnops.kernels.triton.launch import tiles
from attnops.ops.sparse.packed_format import GROUP, LEAST

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla
    from attnops.ops.metadata import record as metadata
    from attnops.ops.pages import record as paged
    from attnops.ops.sparse import record as sparse

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REQUESTS = 512
"""Requests whose lengths a program adds up at once. One number serves all batches, so that one
kernel is compiled."""


def _bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.dtype.itemsize])


# Writes -------------------------------------------------------------------------------------------


def write_kv(call: paged.WriteKV) -> None:
    _write(
        call.slots,
        ((call.key, call.k_pages, call.k_scale), (call.value, call.v_pages, call.v_scale)),
    )


def write_latent(call: mla.WriteLatent) -> None:
    """The two parts of a latent are a key and a value with one head; they are never
    concatenated."""
    latent, rope, pages, scale = (
        call.latent,
        call.k_pe,
        call.latent_pages[:, :, None],
        call.kv_scale,
    )
    first, rest = pages.split([latent.shape[1], rope.shape[1]], -1)
    _write(call.slots, ((latent[:, None], first, scale), (rope[:, None], rest, scale)))


def _write(
    slots: Tensor,
    parts: tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    """parts: (`[T, H, D]`, pages `[P, page, H, D]`, scale `[1]` or `[H]` or None) of each."""
    (a, a_pages, _), (b, *_) = parts
    if slots.shape[0] == 0 or a_pages.shape[0] == 0:
        return
    gpu, heads, page = gpu_of(slots), a.shape[1], a_pages.shape[1]
    a_width, b_width = heads * a.shape[2], heads * b.shape[2]
    tile = tiles.store_tile(
        slots.shape[0], (a_width, b_width), a.dtype.itemsize, gpu.multiprocessors
    )
    a_block = min(tile.columns, tiles.block(a_width))
    b_block = min(tile.columns, tiles.block(b_width))
    args: list[Any] = [slots, slots.stride(0), slots.shape[0], a_pages.shape[0] * page]
    stored = []
    for rows, pages, scale in parts:
        same = scale is None and pages.dtype == rows.dtype
        stored.append("same" if same else str(pages.dtype).removeprefix("torch."))
        if same and rows.dtype.itemsize == 1:
            rows = _bits(rows)  # Triton has float8 from SM89 on
        bits = pages if same and pages.dtype == rows.dtype else _bits(pages)
        args += [
            rows,
            bits,
            flat(scale),
            *rows.stride(),
            *pages.stride(),
            int(scale is not None and scale.shape[0] > 1),
        ]
    launch(
        store,
        (-(-slots.shape[0] // tile.rows), -(-a_width // a_block) + -(-b_width // b_block)),
        {
            "PAGE": page,
            "HEADS": heads,
            "A_D": a.shape[2],
            "B_D": b.shape[2],
            "BLOCK_T": tile.rows,
            "A_BLOCK": a_block,
            "B_BLOCK": b_block,
            "A_AS": stored[0],
            "B_AS": stored[1],
            "HARDWARE": gpu.float8,
        },
        tuple(args),
        tile.warps,
    )


def write_latent_packed(call: sparse.WriteLatentPacked) -> None:
    latent, rope, pages, slots = call.latent, call.k_pe, call.latent_pages, call.slots
    if slots.shape[0] == 0 or pages.shape[0] == 0:
        return
    gpu, (tokens, dims), (count, page, _) = gpu_of(slots), latent.shape, pages.shape
    rows = tiles.store_tile(tokens, (GROUP,), latent.dtype.itemsize, gpu.multiprocessors).rows
    args = (
        slots,
        slots.stride(0),
        tokens,
        count * page,
        latent,
        rope,
        pages,
        *latent.stride(),
        *rope.stride(),
        *pages.stride(),
    )
    launch(
        pack,
        (-(-tokens // rows), dims // GROUP + 1),
        {
            "PAGE": page,
            "DC": dims,
            "DR": rope.shape[1],
            "BLOCK_T": rows,
            "BLOCK_R": power(2 * rope.shape[1]),
            "GROUP": GROUP,
            "LEAST": LEAST,
            "HARDWARE": gpu.float8,
        },
        args,
    )


# Moves --------------------------------------------------------------------------------------------


def copy_kv(call: paged.CopyKV) -> None:
    source, target, pools = call.source, call.target, _pools(call)
    entries = source.shape[0]
    if not pools or entries == 0:
        return
    layers, pages, page, heads, dim = pools[0].shape
    index = (source, target, source.stride(0), target.stride(0), entries, pages * page)
    group = min(call.group or entries, entries)
    if group > tiles.WHOLE:
        for pool in pools:
            _copy_through(pool, index)
        return
    widths = [heads * pool.shape[4] for pool in pools]
    tile = tiles.copy_tile(group, max(widths), pools[0].dtype.itemsize)
    second = (pools[1], *pools[1].stride()) if len(pools) > 1 else (None, 0, 0, 0, 0, 0)
    launch(
        move.copy,
        (-(-entries // group), sum(-(-w // tile.columns) for w in widths), layers),
        {
            "PAGE": page,
            "HEADS": heads,
            "A_D": dim,
            "B_D": pools[1].shape[4] if len(pools) > 1 else 1,
            "BLOCK_N": tile.rows,
            "BLOCK": tile.columns,
        },
        (*index, group, pools[0], *pools[0].stride(), *second),
        tile.warps,
    )


def _pools(call: paged.CopyKV) -> list[Tensor]:
    """The pools that hold something, with a dim of heads, as bits."""
    given = [x for x in (call.k_pages, call.v_pages) if x is not None and x.numel()]
    return [_bits(x if x.dim() == 5 else x[:, :, :, None]) for x in given]


def _copy_through(pool: Tensor, index: tuple[Any, ...]) -> None:
    """Copy by way of a scratch buffer, as many layers at once as fit."""
    layers, _, page, heads, dim = pool.shape
    entries, columns = index[4], heads * dim
    tile = tiles.store_tile(
        entries * layers, (columns,), pool.dtype.itemsize, gpu_of(pool).multiprocessors
    )
    at_once = tiles.layers_at_once(layers, entries, columns * pool.dtype.itemsize)
    scratch = pool.new_empty(at_once * entries * columns)
    for first in range(0, layers, at_once):
        some = pool[first : first + at_once]
        for out in (True, False):
            launch(
                move.through,
                (-(-entries // tile.rows), -(-columns // tile.columns), some.shape[0]),
                {
                    "PAGE": page,
                    "HEADS": heads,
                    "D": dim,
                    "BLOCK_N": tile.rows,
                    "BLOCK": tile.columns,
                    "OUT": out,
                },
                (*index, some, scratch, *pool.stride()),
                tile.warps,
            )


# Tables -------------------------------------------------------------------------------------------


def kv_indices(call: metadata.KVIndices) -> tuple[Tensor, Tensor, Tensor]:
    table, lengths, (batch, width) = call.page_table, call.seq_lens, call.page_table.shape
    indptr, indices, last = (table.new_empty(n) for n in (batch + 1, batch * width, batch))
    constants = {"PAGE": call.page_size, "BLOCK_B": REQUESTS, "BLOCK": _columns(width)}
    args = (table, lengths, indptr, indices, last, batch, width, *table.stride(), lengths.stride(0))
    launch(
        tables.kv_indices, (max(batch, 1), max(-(-width // constants["BLOCK"]), 1)), constants, args
    )
    return indptr, indices, last


def decode_rows(call: metadata.DecodeRows) -> Tensor:
    table, lengths, starts, tokens = (
        call.page_table,
        call.seq_lens,
        call.cu_seqlens_q,
        call.num_tokens,
    )
    batch, width = table.shape
    out = (lengths.new_empty if batch else lengths.new_zeros)(tokens * (1 + width))
    if tokens and batch:
        constants = {"CAUSAL": call.causal, "BLOCK_B": REQUESTS, "BLOCK": _columns(width)}
        args = (
            table,
            lengths,
            starts,
            out,
            tokens,
            batch,
            width,
            *table.stride(),
            lengths.stride(0),
            starts.stride(0),
        )
        launch(tables.by_token, (tokens, max(-(-width // constants["BLOCK"]), 1)), constants, args)
    return out


def named_pages(call: metadata.NamedPages) -> tuple[Tensor, Tensor]:
    table, lengths, starts, (batch, width) = (
        call.page_table,
        call.seq_lens,
        call.cu_seqlens_q,
        call.page_table.shape,
    )
    out, out_lengths = table.new_empty(table.shape), lengths.new_empty(lengths.shape)
    if batch:
        launch(
            tables.named_pages,
            (batch,),
            {"PAGE": call.page_size, "SQUEEZE": call.squeeze, "BLOCK": _columns(width)},
            (
                table,
                lengths,
                starts,
                out,
                out_lengths,
                width,
                call.num_pages,
                call.window_left,
                *table.stride(),
                lengths.stride(0),
                starts.stride(0),
            ),
        )
    return out, out_lengths
