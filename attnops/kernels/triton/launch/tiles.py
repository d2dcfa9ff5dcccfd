"""The tiles of the ops that move rows. They follow from shapes alone. Plain Python: no triton, no
device.

Serving never tunes: `BYTES` and `WARPS` are the committed table.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from attnops.kernels.shared.sizes import power

WIDEST = 1024
"""Columns of a program at most: 16 bytes a thread of four warps, in two-byte numbers."""
WAVE = 4
"""Programs a multiprocessor must have before a program takes more rows."""
BYTES = (2048, 4096, 8192)
"""Bytes that a program reads: the largest that leaves WAVE programs a multiprocessor, else the
first."""
WARPS = 4
WHOLE = 256
"""The most entries of a group of a copy between slots in one launch. A program reads all of its
group before it writes."""
HELD = 16384
"""Bytes that such a program keeps in registers, 32 registers a thread."""
SCRATCH = 32 << 20
"""Bytes of scratch of a longer copy, which takes as many layers at once as fit. The L2 cache holds
the scratch."""


class Tile(NamedTuple):
    """Rows and columns of a program, and its warps."""

    rows: int
    columns: int
    warps: int


@functools.lru_cache(1024)
def block(columns: int) -> int:
    """Columns of a program: the widest power of two with at most an eighth of the columns past the
    row's end, or that of the whole row."""
    wide = [
        w
        for w in (1024, 512, 256, 128, 64)
        if w <= min(columns, WIDEST) and -columns % w * 8 <= columns
    ]
    return wide[0] if wide else min(power(columns), WIDEST)


@functools.lru_cache(1024)
def store_tile(rows: int, columns: tuple[int, ...], itemsize: int, sms: int) -> Tile:
    """For `rows` rows of sets of `columns` numbers of `itemsize` bytes, on `sms`
    multiprocessors."""
    total = rows * sum(columns) * itemsize
    each = max((b for b in BYTES[1:] if total // b >= WAVE * sms), default=BYTES[0])
    wide = max(map(block, columns))
    return Tile(max(1, min(power(rows), each // (wide * itemsize))), wide, WARPS)


def copy_tile(entries: int, columns: int, itemsize: int) -> Tile:
    """For a copy in one launch of groups of at most WHOLE entries: all of a group, and as many
    columns as fit."""
    rows = power(entries)
    return Tile(rows, min(max(HELD // (rows * itemsize), 16), power(columns)), WARPS)


def layers_at_once(layers: int, entries: int, row_bytes: int) -> int:
    """The layers that go through the scratch of a longer copy together, at least one."""
    return max(1, min(layers, SCRATCH // max(entries * row_bytes, 1)))
