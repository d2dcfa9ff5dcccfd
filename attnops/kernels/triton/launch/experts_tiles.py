"""The tiles of the experts of a mixture, of few tokens. They follow from shapes and the GPU alone. Plain Python: no triton, no device."""

from __future__ import annotations

from typing import NamedTuple

from attnops.kernels.triton.launch.tiles import power

MOST_TOKENS = 64
"""The most tokens of one program. Of more, torch's grouped product is the faster; under a deterministic policy programs share them."""
LEAST_TOKENS = 16
"""Columns of the right operand that matrix units take at least; all that a program has under a deterministic policy."""


class Tile(NamedTuple):
    """rows: of the weight that a step reads, of each half where there are two. columns: of these rows.

    stages: steps under way at once. described: the weight is read by the tensor memory accelerator, where the GPU has one.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    described: bool = False


class Shape(NamedTuple):
    """Of one product. outs: results of a choice. columns: of a row of the weight. pairs: rows of gates and factors take turns.

    halves: gates and factors are halves of the weight. along: rows are next to each other in memory, and not columns.
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
    """For one token: a program has one of its choices in the first product, and all, a power of two from `choices` on, in the second."""
    if shape.along:
        return Tile(64, 64, 3, 4) if shape.up else Tile(32, max(128 // choices, 16), 3, 4)
    if shape.up:
        return Tile(8, 1024 // shape.itemsize, 3, 4)
    return Tile(max(16 // choices, 1), 1024 // shape.itemsize, 3, 4)


def few_tokens(shape: Shape, tokens: int, memory: int) -> Tile:
    """For as many as MOST_TOKENS. memory: bytes of shared memory that a program may have; a tile that does not fit has fewer stages."""
    columns = 128 if shape.columns % 128 == 0 else 64
    tile, block = Tile(128 if shape.pairs else 64, columns * 2 // shape.itemsize, 4, 4, True), block_of(tokens)
    while True:
        stage = (tile.rows * (2 if shape.halves else 1) + block) * tile.columns * shape.itemsize
        stages = min(tile.stages, memory // stage)
        if stages > 1 or tile.columns <= 16:
            return tile._replace(stages=max(stages, 1))
        tile = tile._replace(columns=tile.columns // 2, stages=2 * tile.stages)


def block_of(tokens: int) -> int:
    """Tokens of a program."""
    return max(LEAST_TOKENS, min(power(tokens), MOST_TOKENS))
