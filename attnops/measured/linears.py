"""`LinearShape`: the facts of a linear layer that do not change with its rows, as tables of measured times name it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from attnops.core.problem import Problem
from attnops.measured.cost import Sizes, Work, octaves

PARTS = {"norm": "norm_weight", "activation": "activation", "residual": "residual"}
"""Fields of a LinearShape, and the arguments of a call that they say are given."""


@dataclass(frozen=True)
class LinearShape:
    """A linear layer with a weight of `out_features` rows and `in_features` columns, and what is around its product.

    In its Sizes `batch` is the number of rows of the input, and `ratio` the size of the weight as a multiple of this shape's.
    """

    op: str = "linear"
    dtype: str = "bfloat16"
    out_features: int = 1
    in_features: int = 1
    norm: bool = False
    activation: bool = False
    residual: bool = False

    def distance(self, p: Problem) -> float:
        """Octaves between the weights' sizes, and 1 for each part that one of both has; infinite for another op or width of numbers."""
        if p.op != self.op or not p.in_features or not p.out_features or p.dtype.itemsize != self.itemsize:
            return inf
        others = sum(bool(getattr(self, field)) != (argument in p.asks) for field, argument in PARTS.items())
        return octaves(self.out_features, p.out_features) + octaves(self.in_features, p.in_features) + others

    def place(self, p: Problem) -> Sizes:
        """The rows of `p`, and the size of its weight."""
        numbers = p.in_features * p.out_features / (self.in_features * self.out_features)
        return Sizes(float(max(p.sizes.tokens.hint, 1)), 1.0, numbers)

    def work(self, at: Sizes) -> Work:
        """The bytes and operations of a call of this shape."""
        outs = self.out_features // 2 if self.activation else self.out_features
        numbers = at.ratio * self.in_features * self.out_features
        rows = at.batch * (self.in_features + outs * (2 if self.residual else 1))
        return Work((numbers + rows) * self.itemsize, 2.0 * at.batch * numbers)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def sound(self) -> bool:
        """Has the weight rows, columns and a dtype?"""
        return min(self.out_features, self.in_features) >= 1 and isinstance(getattr(torch, self.dtype, None), torch.dtype)

    def __str__(self) -> str:
        parts = "".join(f" {name}" for name in PARTS if getattr(self, name))
        return f"{self.op} {self.out_features}x{self.in_features}{parts} {self.dtype}"
