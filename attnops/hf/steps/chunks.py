"""`Part`: a chunk of the packed tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A chunk of the packed tokens. begin, end: of its tokens. counts, before: by request, its
    tokens here and those before them.

    ends: the requests that end here. last: the place of the last token of each in the chunk.
    """

    begin: int
    end: int
    counts: list[int]
    before: list[int]
    ends: list[int]
    last: list[int]

    @property
    def size(self) -> int:
        """Its tokens."""
        return self.end - self.begin

    @property
    def fresh(self) -> bool:
        """Are its tokens the first of their requests?"""
        return not any(n and b for n, b in zip(self.counts, self.before, strict=True))


def parts_of(counts: Sequence[int], before: Sequence[int], most: int) -> list[Part]:
    """Chunks of at most `most` tokens: whole requests, or equal parts of one that is longer."""
    found: list[Part] = []
    begin = 0
    for row, n in enumerate(counts):
        pieces = -(-n // most)
        for i in range(pieces):
            first, stop = n * i // pieces, n * (i + 1) // pieces
            size, end = stop - first, begin + stop - first
            joins = (
                found
                and pieces == 1
                and end - found[-1].begin <= most
                and not _is_part(found[-1], counts)
            )
            if not joins:
                found.append(Part(begin, begin, [0] * len(counts), list(before), [], []))
            part = found[-1]
            part.counts[row], part.before[row] = size, before[row] + first
            if stop == n:
                part.ends.append(row)
                part.last.append(end - part.begin - 1)
            found[-1], begin = part._replace(end=end), end
    return found


def _is_part(part: Part, counts: Sequence[int]) -> bool:
    return any(0 < here < n for here, n in zip(part.counts, counts, strict=True))
