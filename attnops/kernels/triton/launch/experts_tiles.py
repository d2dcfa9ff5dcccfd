"""The tiles of the experts of a mixture, of few tokens. They follow from shapes and the GPU alone.
Plain Python: no triton, no device."""

from __future__ import annotations

import functools
from typing import NamedTuple

from attnops.kernels.shared.sizes import power

MOST_TOKENS = 64
"""The most tokens of one program. Of more, torch's grouped product is the faster; under a
deterministic policy programs share them."""
LEAST_TOKENS = 16
"""Columns of the right operand that matrix units take at least."""


class Tile(NamedTuple):
    """rows: of the weight that a step reads, of each half where there are two. columns: of these
    rows.

    stages: steps under way at once. described: the weight is read by the tensor memory accelerator,
    where the GPU has one.
    overlap: the launch begins while the kernel before it ends, where the GPU can.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    described: bool = False
    overlap: bool = True


class Shape(NamedTuple):
    """Of one product. outs: results of a choice. columns: of a row of the weight. pairs: rows of
    gates and factors take turns.

    halves: gates and factors are halves of the weight. along: rows are next to each other in
    memory, and not columns.
    """

    outs: int
    columns: int
    itemsize: int
    pairs: bool = False
    halves: bool = False
    along: bool = False

    @property
    def up(self) -> bool:
        """Is it the first product?"""
        return self.pairs or self.halves


def one_token(shape: Shape, choices: int) -> Tile:
    """For one token: a program has one of its choices in the first product, and all, a power of two
    from `choices` on, in the second."""
    return (
        Tile(16, 512 // shape.itemsize, 3, 4)
        if shape.up
        else Tile(max(32 // choices, 1), 256 // shape.itemsize, 3, 4)
    )


@functools.lru_cache(maxsize=1024)
def few_tokens(shape: Shape, tokens: int, memory: int) -> Tile:
    """For as many as MOST_TOKENS. memory: bytes of shared memory that a program may have; a tile
    that does not fit has fewer stages."""
    # By times on an H200.
    tile = Tile(64, 64, 6, 4, True) if shape.along else Tile(64, 128, 4 if shape.up else 3, 4, True)
    tile, block = tile._replace(columns=tile.columns * 2 // shape.itemsize), block_of(tokens)
    while True:
        stage = (tile.rows * (2 if shape.halves else 1) + block) * tile.columns * shape.itemsize
        stages = min(tile.stages, memory // stage)
        if stages > 1 or tile.columns <= 16:
            return tile._replace(stages=max(stages, 1))
        tile = tile._replace(columns=tile.columns // 2, stages=2 * tile.stages)


def block_of(tokens: int) -> int:
    """Tokens of a program."""
    return max(LEAST_TOKENS, min(power(tokens), MOST_TOKENS))
