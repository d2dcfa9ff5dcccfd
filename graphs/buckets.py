"""`Buckets`: the sizes that graphs are captured for, and which of them serves a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attnops.errors import BatchTooLarge, InvalidInput

Kind = Literal["decode", "mixed"]
"""decode: every request brings at most one token. mixed: any other batch, of prefill or of both."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One captured size: `tokens` rows of every tensor by token, `requests` rows of the page table."""

    tokens: int
    requests: int
    kind: Kind

    def __str__(self) -> str:
        return f"decode x{self.requests}" if self.kind == "decode" else f"mixed {self.tokens} tokens x{self.requests}"


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then by 8 to 256, then by 16, up to `most` requests, which is always one of them."""
    return _ending((1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(272, most + 1, 16)), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """From 16 on eight sizes an octave, of at least 16 tokens each, up to `most` tokens, so that little more than an eighth is padding."""
    sizes, at = [], 16
    while at < most:
        sizes.append(at)
        at += max(16, (1 << (at.bit_length() - 1)) // 8)
    return _ending(tuple(sizes), most)


def _ending(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(s for s in sizes if s < most) + ((most,) if most else ())


@dataclass(frozen=True)
class Buckets:
    """Sizes to capture, and what to do beside them.

    decode: requests of decode batches. tokens: new tokens of all other batches; `()`: none of these is captured.
    requests: rows of the page table in graphs of `tokens`; 0: as many as the largest decode bucket.
    over: what becomes of a batch over the largest bucket: "raise" BatchTooLarge, or run it "eager", which is counted and reported.
    padding: what fills a decode bucket. "absent": tokens of no request, in rows of length 0; nothing is read or written for them, and
        batches say `padded=True`. "null": requests of one token, not stored, that read the null page 0, which nobody owns; the batch
        keeps its promise `padded=False`, which spares some kernels a launch.

    Raises InvalidInput: a size is no int of at least 1, sizes do not ascend, or a word is not one of those above.
    """

    decode: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    requests: int = 0
    over: Literal["raise", "eager"] = "raise"
    padding: Literal["absent", "null"] = "absent"
    dropped: frozenset[Bucket] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        for name in ("decode", "tokens"):
            sizes = getattr(self, name)
            if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes) or list(sizes) != sorted(set(sizes)):
                raise InvalidInput(name, sizes, "ascending ints >= 1")
        for name, words in (("over", ("raise", "eager")), ("padding", ("absent", "null"))):
            if getattr(self, name) not in words:
                raise InvalidInput(name, repr(getattr(self, name)), " | ".join(map(repr, words)))
        if not self.decode and not self.tokens:
            raise InvalidInput("decode, tokens", "no size", "at least one bucket")
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or self.requests < 0:
            raise InvalidInput("requests", self.requests, "an int >= 0")

    @classmethod
    def up_to(
        cls,
        requests: int = 0,
        tokens: int = 0,
        *,
        over: Literal["raise", "eager"] = "raise",
        padding: Literal["absent", "null"] = "absent",
    ) -> Buckets:
        """The default sizes up to so many requests of decode batches and new tokens of other batches; 0: none of that kind."""
        return cls(decode_sizes(requests), token_sizes(tokens), requests, over, padding)

    @property
    def rows(self) -> int:
        """Rows of the page table in graphs of `tokens`."""
        return self.requests or max(self.decode, default=0)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket that is not dropped, largest first: what later ones need then fits into what the first have left."""
        found = [Bucket(n, n, "decode") for n in self.decode] + [Bucket(n, self.rows, "mixed") for n in self.tokens]
        return tuple(b for b in sorted(found, reverse=True) if b not in self.dropped)

    @property
    def most(self) -> tuple[int, int]:
        """(tokens, requests): what serves every bucket."""
        found = [*self.all(), *self.dropped]
        return max(b.tokens for b in found), max(b.requests for b in found)

    def span(self, kind: Kind) -> tuple[int, int]:
        """(smallest, largest) size of a kind that a trace has to serve."""
        sizes = self.decode if kind == "decode" else self.tokens
        return min(sizes), max(sizes)

    def find(self, kind: Kind, tokens: int, requests: int) -> Bucket | None:
        """The smallest bucket for a batch of so many new tokens and requests, or None where the policy is "eager". Raises BatchTooLarge."""
        sizes, got = (self.decode, requests) if kind == "decode" else (self.tokens, tokens)
        if kind == "decode" or requests <= self.rows:
            for size in sizes:
                if size >= got and (found := Bucket(size, size if kind == "decode" else self.rows, kind)) not in self.dropped:
                    return found
        if self.over == "eager":
            return None
        if kind == "mixed" and self.tokens and requests > self.rows:
            raise BatchTooLarge(kind, "requests", requests, self.rows)
        kept = [b for b in self.all() if b.kind == kind]
        largest = max((b.requests if kind == "decode" else b.tokens for b in kept), default=0)
        raise BatchTooLarge(kind, "requests" if kind == "decode" else "tokens", got, largest)
