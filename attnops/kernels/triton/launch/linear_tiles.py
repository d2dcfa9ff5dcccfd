"""The tiles of linear layers of few rows. They follow from shapes and the GPU alone. Plain Python:
no triton, no device."""

from __future__ import annotations

from typing import NamedTuple

from attnops.kernels.shared.sizes import power

MOST_ROWS = 64
"""The most rows of one program. More are refused, for torch's own product is the faster; under a
deterministic policy programs share them."""
LEAST_ROWS = 16
"""Columns of the right operand of a program at least. Matrix units take 8, too."""
LEAST_COLUMNS = 16
"""Of a step, and of each part of it: the inner dim of a matrix instruction."""
HELD = 32 * 64
"""Numbers of the rows that a warp holds while a norm scales them, 64 a thread."""


class Tile(NamedTuple):
    """outs: results of a program, as many rows of the weight (of each half, where there are two).
    bytes: of a row that a step reads.

    stages: steps under way at once. described: the weight is read by the tensor memory accelerator,
    where the GPU has one.
    overlap: the launch begins while the kernel before it ends, where the GPU can. rows: of x, those
    of a program at least, a power of two.
    split: parts of a step's columns that have sums of their own, a power of two; of several rows
    alone. LEAST_COLUMNS is the least of each.
    """

    outs: int
    bytes: int
    stages: int
    warps: int
    described: bool = False
    overlap: bool = True
    rows: int = LEAST_ROWS
    split: int = 1


Ladder = tuple[tuple[Tile, float], ...]
"""Tiles from the widest weights to the narrowest, by times on an H200, each with the programs a
multiprocessor that it must leave."""

ONE_ROW: Ladder = (
    (Tile(16, 512, 3, 4), 3.0),
    (Tile(8, 512, 4, 4), 3.0),
    (Tile(4, 1024, 4, 2), 0.0),
)
"""Programs of one row hold so little that many of them share a multiprocessor."""
ONE_GATED = Tile(4, 1024, 4, 2)
WIDEST, NARROWEST = (Tile(128, 256, 4, 8, True), 0.45), (Tile(16, 1024, 4, 2), 0.0)
FEW_ROWS: Ladder = (
    WIDEST,
    (Tile(64, 512, 4, 4, True), 0.3),
    (Tile(32, 512, 6, 4, True), 0.45),
    NARROWEST,
)
"""Half of the multiprocessors read as fast as all, and a third of them where SM90's warps multiply
in groups, with 64 results or more."""
SPLIT = (Tile(16, 1024, 4, 4, True, rows=8, split=4), 0.0)
"""One warp's products of a narrow weight would wait for each other longer than for the weight."""
SEVERAL_ROWS: tuple[tuple[int, bool, Ladder], ...] = (
    (8, True, (WIDEST, SPLIT)),
    (32, True, (*FEW_ROWS[:2], SPLIT)),
    (MOST_ROWS, False, FEW_ROWS),
)
"""The most rows of a ladder, and whether it is for 16 bits a number without norm and gate alone.
The first that takes a call serves it."""


def one_row(outs: int, gated: bool, sms: int) -> Tile:
    """For one row of `outs` results. gated: two rows of the weight make one."""
    return ONE_GATED if gated else _first(ONE_ROW, outs, sms)


def few_rows(
    rows: int, outs: int, itemsize: int, gated: bool, normed: bool, sms: int, memory: int
) -> Tile:
    """For as many as MOST_ROWS. memory: bytes of shared memory that a program may have; a tile that
    does not fit has fewer stages."""
    plain = itemsize == 2 and not gated and not normed
    ladder = next(
        ladder for most, is_plain, ladder in SEVERAL_ROWS if rows <= most and plain >= is_plain
    )
    tile = _first(ladder, outs, sms)
    if itemsize > 2:
        tile = tile._replace(split=1)  # no matrix unit multiplies them
    block = block_of(rows, tile)
    while True:
        # Rows that a norm has scaled go to the matrix units through one buffer more.
        stage = (tile.outs * (2 if gated else 1) + block) * tile.bytes
        stages, held = (
            min(tile.stages, (memory - block * tile.bytes) // stage),
            block * tile.bytes // itemsize,
        )
        if (
            stages > 1 and held <= HELD * tile.warps
        ) or tile.bytes <= LEAST_COLUMNS * tile.split * itemsize:
            return tile._replace(stages=max(stages, 1))
        tile = tile._replace(bytes=tile.bytes // 2, stages=2 * tile.stages)


def block_of(rows: int, tile: Tile) -> int:
    """Rows of a program."""
    return max(tile.rows, min(power(rows), MOST_ROWS))


def _first(tiles: Ladder, outs: int, sms: int) -> Tile:
    return next(tile for tile, filled in tiles if -(-outs // tile.outs) >= filled * sms)
