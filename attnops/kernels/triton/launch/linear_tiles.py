"""The tiles of linear layers of few rows. They follow from shapes and the GPU alone. Plain Python: no triton, no device."""

from __future__ import annotations

from typing import NamedTuple

from attnops.kernels.triton.launch.tiles import power

MOST_ROWS = 64
"""The most rows of one program. More are refused, for torch's own product is the faster; under a deterministic policy programs share
them."""
LEAST_ROWS = 16
"""Columns of the right operand that matrix units take at least."""
FILLED = 0.45
"""Programs a multiprocessor that a tile must leave: half of the multiprocessors read as fast as all, and larger tiles read faster."""


HELD = 32 * 64
"""Numbers of the rows that a warp holds while a norm scales them, 64 a thread."""


class Tile(NamedTuple):
    """outs: results of a program, as many rows of the weight (of each half, where there are two). bytes: of a row that a step reads.

    stages: steps under way at once. described: the weight is read by the tensor memory accelerator, where the GPU has one.
    overlap: the launch begins while the kernel before it ends, where the GPU can.
    """

    outs: int
    bytes: int
    stages: int
    warps: int
    described: bool = False
    overlap: bool = True


ONE_ROW = (Tile(16, 512, 3, 4), Tile(8, 512, 4, 4), Tile(4, 1024, 4, 2))
ONE_GATED = Tile(4, 1024, 4, 2)
FEW_ROWS = (Tile(128, 256, 4, 8, True), Tile(64, 512, 4, 4, True), Tile(32, 512, 6, 4, True), Tile(16, 1024, 4, 2))
"""From the widest weights to the narrowest, by times on an H200. The first that leaves every multiprocessor enough programs serves the
call."""
WAVES = 3.0
"""As FILLED, for one row: its programs hold so little that many of them share a multiprocessor."""


def one_row(outs: int, gated: bool, sms: int) -> Tile:
    """For one row of `outs` results. gated: two rows of the weight make one."""
    return ONE_GATED if gated else _first(ONE_ROW, outs, WAVES * sms)


def few_rows(rows: int, outs: int, itemsize: int, gated: bool, sms: int, memory: int) -> Tile:
    """For as many as MOST_ROWS. memory: bytes of shared memory that a program may have; a tile that does not fit has fewer stages."""
    tile, block = _first(FEW_ROWS, outs, FILLED * sms), block_of(rows)
    while True:
        # Rows that a norm has scaled go to the matrix units through one buffer more.
        stage = (tile.outs * (2 if gated else 1) + block) * tile.bytes
        stages, held = min(tile.stages, (memory - block * tile.bytes) // stage), block * tile.bytes // itemsize
        if (stages > 1 and held <= HELD * tile.warps) or tile.bytes <= 16 * itemsize:
            return tile._replace(stages=max(stages, 1))
        tile = tile._replace(bytes=tile.bytes // 2, stages=2 * tile.stages)


def block_of(rows: int) -> int:
    """Rows of a program."""
    return max(LEAST_ROWS, min(power(rows), MOST_ROWS))


def _first(tiles: tuple[Tile, ...], outs: int, programs: float) -> Tile:
    return next((t for t in tiles if -(-outs // t.outs) >= programs), tiles[-1])
