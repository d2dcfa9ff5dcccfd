"""The calls that `attnops bench` times, as an op's family lists them in `bench_points.POINTS`: by
op and suite, as data.

place: of a point among those of all ops in its suite, the most used first. A short run takes the
first ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnops.core.problem import Problem

Points = Mapping[str, Mapping[str, tuple[Any, ...]]]
NAMES = {"bfloat16": "", "float8_e4m3fn": " float8", "int8": " int8"}


@dataclass(frozen=True)
class Requests:
    """A call of `batch` requests of `queries` new tokens with `keys` keys each. more: arguments
    that say more than a Problem does."""

    place: int
    kind: str
    shape: Problem
    batch: int
    queries: int
    keys: int
    remark: str = ""
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Kind and sizes."""
        sizes = (
            f"{self.keys}" if self.queries in (1, self.keys) else f"{self.queries} of {self.keys}"
        )
        remark = f"{self.shape.q_heads} heads" if self.shape.rope_dim else self.remark
        return f"{self.kind} {self.batch}x{sizes}" + (f", {remark}" if remark else "")


@dataclass(frozen=True)
class Trained:
    """A forward and its backward. lengths: the tokens of each request. chunk: attention_chunk.
    bias: with a mask `[1, Hq, S, S]`, added."""

    place: int
    name: str
    shape: Problem
    lengths: tuple[int, ...]
    chunk: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Filled:
    """A call whose tensors follow from sizes, but for those that it gives."""

    place: int

    def filled(self, pool: Any) -> tuple[dict[str, int], dict[str, Any]]:
        """(sizes by the layouts' letters, arguments). pool: an `attnops.testing.pool.Pool`."""
        raise NotImplementedError

    def moved(self, given: Mapping[str, Any], written: tuple[str, ...]) -> int:
        """The bytes that are read and written at least, without tables and scales. written: the
        arguments that the op writes."""
        return 0

    def used(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of results that are compared: the rest is free."""
        return results


@dataclass(frozen=True)
class Written(Filled):
    """Tokens that go into whole pages in random order, or into a page each when they are few, as in
    a decode step.

    op: before the sizes in the name. sizes: of the layouts' letters. dtype: of the pages.
    """

    op: str
    tokens: int
    sizes: Mapping[str, int] = field(hash=False)
    page: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Op, dtype and size."""
        return f"{self.op}{NAMES[self.dtype]} {self.tokens}"

    def filled(self, pool: Any) -> tuple[dict[str, int], dict[str, Any]]:
        """Slots."""
        n = self.tokens
        pages = max(2 * -(-self.tokens // self.page), 64)
        at = torch.arange(self.tokens, device=pool.device)
        order = torch.randperm(pages, generator=pool.generator, device=pool.device)
        slots = (
            order[at] * self.page + 7 * at % self.page
            if n <= 64
            else order[at // self.page] * self.page + at % self.page
        )
        return {**self.sizes, "T": n, "P": pages, "page": self.page}, {"slots": slots}

    def moved(self, given: Mapping[str, Any], written: tuple[str, ...]) -> int:
        """Tokens that are new, and what they are where they go."""
        new = sum(x.nbytes for n, x in given.items() if n not in written and x.dim() > 1)
        return int(new + self.tokens * sum(given[n][0, 0].nbytes for n in written))


def documents(count: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """`count` random lengths of `tokens` in all, the longest about ten times the shortest."""
    rng = random.Random(seed)
    parts = [rng.uniform(0.2, 2.0) for _ in range(count)]
    lengths = [max(int(tokens * part / sum(parts)), 1) for part in parts]
    lengths[-1] += tokens - sum(lengths)
    return tuple(lengths)
