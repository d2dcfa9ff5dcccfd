"""Pairwise cover: few points in which every two values occur together that occur together anywhere
in the grid."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")


def cover(points: Mapping[T, Mapping[str, Any]]) -> list[T]:
    """Some of the points, in their order: each pair of values of two fields that a point has, one
    of those returned has.

    Args:
        points: the values of each point by field; compared by their text.
    """
    pairs = {
        at: set(combinations(sorted((name, str(value)) for name, value in point.items()), 2))
        for at, point in points.items()
    }
    left, chosen = set[Any]().union(*pairs.values()), set()
    while left:
        best = max(
            pairs, key=lambda at: len(pairs[at] & left)
        )  # the first of the best: the same cover on every machine
        chosen.add(best)
        left -= pairs[best]
    return [at for at in points if at in chosen]


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of the product of the axes the points of a pairwise cover, for
    `pytest.mark.parametrize(",".join(axes), pairwise(**axes))`."""
    points = list(product(*(range(len(values)) for values in axes.values())))
    chosen: Iterable[tuple[int, ...]] = cover(
        {point: dict(zip(axes, point, strict=True)) for point in points}
    )
    return [
        tuple(values[at] for values, at in zip(axes.values(), point, strict=True))
        for point in chosen
    ]
