"""Host side of what moves data: the arguments of the device functions, and their launches. Importing this imports triton."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attnops.kernels.triton.device import move, tables
from attnops.kernels.triton.device.pack import pack as _pack
from attnops.kernels.triton.device.store import store as _store
from attnops.kernels.triton.launch import tiles
from attnops.reference.latent_format import GROUP, LEAST

store: Any = _store
pack: Any = _pack
copy: Any = move.copy
through: Any = move.through
clear: Any = move.clear
kv_indices: Any = tables.kv_indices
by_token: Any = tables.by_token
named_pages: Any = tables.named_pages
lists: Any = tables.lists

INTERPRETED = (4, 0)
"""Multiprocessors and arch where there is no GPU: float8 is rounded by the device function itself."""

OPTIONS = {"enable_fp_fusion": True}
"""Said outright, because Triton's default changes from release to release."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOAT8_ARCH = 89
COLUMNS = 1024
"""Columns of a table that a program makes, at most; a table's width is the server's, and does not change from step to step."""
REQUESTS = 512
"""Requests whose lengths are added up at once: one figure for all batches, so that one kernel serves them."""


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """(multiprocessors, arch)."""
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major * 10 + properties.minor


def _gpu(x: Tensor) -> tuple[int, int]:
    return _device(x.device.index) if x.is_cuda else INTERPRETED


def _bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.dtype.itemsize])


def write(slots: Tensor, parts: tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Write two sets of rows: of each (`[T, H, D]`, pages `[P, page, H, D]`, scale `[1]` or `[H]` or None)."""
    (a, a_pages, _), (b, *_) = parts
    if slots.shape[0] == 0 or a_pages.shape[0] == 0:
        return
    sms, arch = _gpu(slots)
    heads, page = a.shape[1], a_pages.shape[1]
    columns = heads * a.shape[2], heads * b.shape[2]
    tile = tiles.store_tile(slots.shape[0], columns, a.dtype.itemsize, sms)
    blocks = [min(tile.columns, tiles.block(c)) for c in columns]
    given: dict[str, Any] = {}
    for name, (rows, pages, scale) in zip("ab", parts, strict=True):
        same = scale is None and pages.dtype == rows.dtype
        if same and rows.dtype.itemsize == 1:
            rows, pages = _bits(rows), _bits(pages)  # Triton knows float8 from SM89 on
        strides = dict(zip((f"{name}_{s}" for s in ("t", "h", "d")), rows.stride(), strict=True))
        strides |= dict(zip((f"{name}_{s}" for s in ("p", "n", "ph", "pd")), pages.stride(), strict=True))
        given |= strides | {
            f"{name}_ptr": rows, f"{name}_pages_ptr": pages if same else _bits(pages),
            f"{name}_scale_ptr": None if scale is None else scale.contiguous(),
            f"{name}_scale_h": 0 if scale is None or scale.numel() == 1 else 1,
            f"{name.upper()}_AS": "same" if same else str(pages.dtype).removeprefix("torch."),
        }  # fmt: skip
    with torch.cuda.device_of(slots):
        store[(-(-slots.shape[0] // tile.rows), sum(-(-c // w) for c, w in zip(columns, blocks, strict=True)))](
            slots_ptr=slots, slots_t=slots.stride(0), tokens=slots.shape[0], total=a_pages.shape[0] * page, **given, PAGE=page, HEADS=heads,
            A_D=a.shape[2], B_D=b.shape[2], BLOCK_T=tile.rows, A_BLOCK=blocks[0], B_BLOCK=blocks[1], HARDWARE=arch >= FLOAT8_ARCH,
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip


def write_packed(latent: Tensor, k_pe: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write `[T, Dc]` and `[T, Dr]` into packed pages `[P, page, bytes]`."""
    if slots.shape[0] == 0 or pages.shape[0] == 0:
        return
    sms, arch = _gpu(slots)
    (tokens, dims), rope = latent.shape, k_pe.shape[1]
    rows = tiles.store_tile(tokens, [GROUP], latent.dtype.itemsize, sms).rows
    with torch.cuda.device_of(slots):
        pack[(-(-tokens // rows), dims // GROUP + 1)](
            slots, slots.stride(0), tokens, pages.shape[0] * pages.shape[1], latent, k_pe, pages, *latent.stride(), *k_pe.stride(),
            *pages.stride(), PAGE=pages.shape[1], DC=dims, DR=rope, BLOCK_T=rows, BLOCK_R=tiles.power(2 * rope), GROUP=GROUP, LEAST=LEAST,
            HARDWARE=arch >= FLOAT8_ARCH, num_warps=tiles.WARPS, **OPTIONS,
        )  # fmt: skip


def copy_slots(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copy between slots of every pool `[L, P, page, H, D]`, of one dtype and shape up to D. One or two pools."""
    filled = [_bits(pool) for pool in pools if pool.numel()]
    entries = source.shape[0]
    if not filled or entries == 0:
        return
    index = {"source_ptr": source, "target_ptr": target, "source_t": source.stride(0), "target_t": target.stride(0), "entries": entries}
    layers, pages, page, heads, dim = filled[0].shape
    index["total"] = pages * page
    with torch.cuda.device_of(source):
        if entries > tiles.WHOLE:
            for pool in filled:
                _copy_through(pool, index)
            return
        widths = [heads * pool.shape[4] for pool in filled]
        tile = tiles.copy_tile(entries, max(widths), filled[0].dtype.itemsize)
        b = filled[1] if len(filled) > 1 else None
        strides = [*filled[0].stride(), *(b.stride() if b is not None else (0,) * 5)]
        names = [f"{part}_{s}" for part in "ab" for s in "lpnhd"]
        copy[(sum(-(-w // tile.columns) for w in widths), layers)](
            **index, a_ptr=filled[0], b_ptr=b, **dict(zip(names, strides, strict=True)),
            PAGE=page, HEADS=heads, A_D=dim, B_D=1 if b is None else b.shape[4], BLOCK_N=tile.rows, BLOCK=tile.columns,
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip


def _copy_through(pool: Tensor, index: dict[str, Any]) -> None:
    layers, _, page, heads, dim = pool.shape
    entries, columns = index["entries"], heads * dim
    tile = tiles.store_tile(entries * layers, [columns], pool.dtype.itemsize, _gpu(pool)[0])
    at_once = tiles.layers_at_once(layers, entries, columns * pool.dtype.itemsize)
    scratch = pool.new_empty(at_once * entries * columns)
    for first in range(0, layers, at_once):
        some = pool[first : first + at_once]
        for out in (True, False):
            through[(-(-entries // tile.rows), -(-columns // tile.columns), some.shape[0])](
                **index, pages_ptr=some, scratch_ptr=scratch, **dict(zip(("layer", *"pnhd"), pool.stride(), strict=True)),
                PAGE=page, HEADS=heads, D=dim, BLOCK_N=tile.rows, BLOCK=tile.columns, OUT=out, num_warps=tile.warps, **OPTIONS,
            )  # fmt: skip


def make_kv_indices(table: Tensor, lengths: Tensor, page: int, indptr: Tensor, indices: Tensor, last: Tensor) -> None:
    """Write the compressed rows of page table `[B, M]`."""
    batch, width = table.shape
    block = max(64, min(COLUMNS, tiles.power(width)))
    with torch.cuda.device_of(table):
        kv_indices[(max(batch, 1), max(-(-width // block), 1))](
            table, lengths, indptr, indices, last, batch, width, *table.stride(), lengths.stride(0),
            PAGE=page, BLOCK_B=REQUESTS, BLOCK=block, num_warps=tiles.WARPS, **OPTIONS,
        )  # fmt: skip


def make_rows(table: Tensor, lengths: Tensor, starts: Tensor, tokens: int, causal: bool, out: Tensor) -> None:
    """Write the keys that each token sees, then its row of page table `[B, M]`; B is at least 1."""
    batch, width = table.shape
    if tokens == 0:
        return
    block = max(64, min(COLUMNS, tiles.power(width)))
    with torch.cuda.device_of(table):
        by_token[(tokens, max(-(-width // block), 1))](
            table, lengths, starts, out, tokens, batch, width, *table.stride(), lengths.stride(0), starts.stride(0),
            CAUSAL=causal, BLOCK_B=REQUESTS, BLOCK=block, num_warps=tiles.WARPS, **OPTIONS,
        )  # fmt: skip


def make_named_pages(
    table: Tensor, lengths: Tensor, starts: Tensor, sizes: tuple[int, int, int], squeeze: bool, out: Tensor, out_lengths: Tensor
) -> None:
    """Write a table without holes, and its lengths. sizes: pages of the pool, tokens a page, window."""
    batch, width = table.shape
    pages, page, left = sizes
    if batch == 0:
        return
    with torch.cuda.device_of(table):
        named_pages[(batch,)](
            table, lengths, starts, out, out_lengths, width, pages, left, *table.stride(), lengths.stride(0), starts.stride(0),
            PAGE=page, SQUEEZE=squeeze, BLOCK=max(64, min(COLUMNS, tiles.power(width))), num_warps=tiles.WARPS, **OPTIONS,
        )  # fmt: skip


def make_lists(indices: Tensor, lengths: Tensor | None, slots: int, out: Tensor) -> None:
    """Write `[T, width]` lists that name slots below `slots`, and -1 elsewhere, from those of `[T, topk]` within their lengths."""
    if out.numel() == 0:
        return
    tokens, width = out.shape
    block = max(64, min(COLUMNS, tiles.power(width)))
    with torch.cuda.device_of(out):
        lists[(tokens, -(-width // block))](
            indices, lengths, out, indices.shape[1], width, slots, *indices.stride(), 0 if lengths is None else lengths.stride(0),
            LENGTHS=lengths is not None, BLOCK=block, num_warps=tiles.WARPS, **OPTIONS,
        )  # fmt: skip


def clear_rows(parts: tuple[tuple[Tensor, Tensor, float], ...]) -> None:
    """Of up to three (starts, contiguous rows, fill), set the rows from `starts[-1]` on to `fill`."""
    most = max(rows.shape[0] for _, rows, _ in parts)
    if most == 0:
        return
    given: dict[str, Any] = {}
    for name, (starts, rows, fill) in zip("abc", (*parts, *[parts[0]] * (3 - len(parts))), strict=True):
        columns = rows[0].numel() if rows.shape[0] else 1
        given |= {
            f"{name}_starts_ptr": starts, f"{name}_end": starts.stride(0) * (starts.shape[0] - 1), f"{name}_ptr": rows,
            f"{name}_rows": rows.shape[0], f"{name}_fill": fill, f"{name.upper()}_COLUMNS": columns,
        }  # fmt: skip
    with torch.cuda.device_of(parts[0][1]):
        clear[(-(-most // CLEARED), len(parts))](**given, BLOCK_R=CLEARED, BLOCK=CLEARED_COLUMNS, num_warps=tiles.WARPS, **OPTIONS)


CLEARED_COLUMNS = 256
CLEARED = 64
"""Rows a program looks at: most look at the last length only, and leave."""
