"""`Buckets`: the sizes that graphs are captured for, and which of them serves a batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from ..errors import BatchTooLarge, InvalidInput

Kind = Literal["decode", "verify", "mixed"]
"""decode: every request brings at most one token. verify: every request brings at most a few, a number that is fixed at capture, e.g. the
drafts of a speculative step. mixed: any other batch, of prefill or of both."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One captured size: `tokens` rows of every tensor by token, `requests` rows of the page table."""

    tokens: int
    requests: int
    kind: Kind

    @property
    def queries(self) -> int:
        """The most tokens of one request: `max_seqlen_q` of the captured batch."""
        return self.tokens // self.requests if self.kind == "verify" else 1 if self.kind == "decode" else self.tokens

    @property
    def trace(self) -> str:
        """The name of the buckets that one trace serves: the kind, and of verify steps the queries, which kernels are chosen by."""
        return f"verify {self.queries}" if self.kind == "verify" else self.kind

    def __str__(self) -> str:
        return f"mixed {self.tokens} tokens x{self.requests}" if self.kind == "mixed" else f"{self.trace} x{self.requests}"


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
    verify: the most tokens of a request in verify batches, each captured for the requests of `decode`. A batch runs in the smallest
        that holds its longest request; a batch of more requests runs as any other batch.
    over: what becomes of a batch over the largest bucket: "raise" BatchTooLarge, or run it "eager", which is counted and reported.
    padding: what fills a decode bucket. "absent": tokens of no request, in rows of length 0; nothing is read or written for them, and
        batches say `padded=True`. "null": requests of one token, not stored, that read the null page 0, which nobody owns; the batch
        keeps its promise `padded=False`, which spares some kernels a launch. Verify buckets are always filled as "absent", because
        a request may bring fewer tokens.

    Raises InvalidInput: a size is no int of at least 1 (`verify`: 2), sizes do not ascend, a word is not one of those above, or there is
    `verify` without `decode`.
    """

    decode: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    requests: int = 0
    over: Literal["raise", "eager"] = "raise"
    padding: Literal["absent", "null"] = "absent"
    dropped: frozenset[Bucket] = field(default=frozenset(), repr=False)
    verify: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("decode", 1), ("tokens", 1), ("verify", 2)):
            sizes = getattr(self, name)
            if any(isinstance(s, bool) or not isinstance(s, int) or s < least for s in sizes) or list(sizes) != sorted(set(sizes)):
                raise InvalidInput(name, sizes, f"ascending ints >= {least}")
        for name, words in (("over", ("raise", "eager")), ("padding", ("absent", "null"))):
            if getattr(self, name) not in words:
                raise InvalidInput(name, repr(getattr(self, name)), " | ".join(map(repr, words)))
        if not self.decode and not self.tokens:
            raise InvalidInput("decode, tokens", "no size", "at least one bucket")
        if self.verify and not self.decode:
            raise InvalidInput("verify", self.verify, "() without decode, whose requests verify batches are captured for")
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
        verify: tuple[int, ...] = (),
    ) -> Buckets:
        """The default sizes up to so many requests of decode batches and new tokens of other batches; 0: none of that kind."""
        return cls(decode_sizes(requests), token_sizes(tokens), requests, over, padding, verify=verify)

    @property
    def rows(self) -> int:
        """Rows of the page table in graphs of `tokens`."""
        return self.requests or max(self.decode, default=0)

    @functools.cached_property
    def _every(self) -> tuple[Bucket, ...]:
        """Dropped ones included, in the order in which they are looked through."""
        verify = (Bucket(n * queries, n, "verify") for queries in self.verify for n in self.decode)
        return (*(Bucket(n, n, "decode") for n in self.decode), *verify, *(Bucket(n, self.rows, "mixed") for n in self.tokens))

    @functools.cached_property
    def _kept(self) -> dict[Kind, tuple[Bucket, ...]]:
        kinds: tuple[Kind, ...] = ("decode", "verify", "mixed")
        return {kind: tuple(b for b in self._every if b.kind == kind and b not in self.dropped) for kind in kinds}

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket that is not dropped, largest first: what later ones need then fits into what the first have left."""
        return tuple(sorted((b for kept in self._kept.values() for b in kept), reverse=True))

    @property
    def most(self) -> tuple[int, int]:
        """(tokens, requests): what serves every bucket."""
        return max(b.tokens for b in self._every), max(b.requests for b in self._every)

    def alike(self, trace: str) -> tuple[Bucket, ...]:
        """The buckets that one trace serves, smallest first, dropped ones included."""
        return tuple(b for b in self._every if b.trace == trace)

    def kind(self, tokens: int, requests: int, queries: int) -> Kind:
        """The kind of a batch of so many tokens and requests, with at most `queries` tokens of a request."""
        if queries <= 1 and tokens <= requests:
            return "decode"
        if not 1 < queries <= max(self.verify, default=0):
            return "mixed"
        # One that no verify bucket holds is left to those of mixed batches, where there are any.
        return "verify" if not self.tokens or self._fitting("verify", tokens, requests, queries) else "mixed"

    def find(self, kind: Kind, tokens: int, requests: int, queries: int = 1) -> Bucket | None:
        """The smallest bucket for such a batch, see `kind`, or None where the policy is "eager". Raises BatchTooLarge."""
        found = self._fitting(kind, tokens, requests, queries)
        if found is not None or self.over == "eager":
            return found
        if kind == "mixed" and self.tokens and requests > self.rows:
            raise BatchTooLarge(kind, "requests", requests, self.rows)
        field = "tokens" if kind == "mixed" else "requests"
        largest = max((getattr(b, field) for b in self._kept[kind] if kind != "verify" or b.queries >= queries), default=0)
        raise BatchTooLarge(kind, field, tokens if kind == "mixed" else requests, largest)

    def _fitting(self, kind: Kind, tokens: int, requests: int, queries: int) -> Bucket | None:
        for b in self._kept[kind]:
            if b.requests >= requests and b.tokens >= tokens and (kind != "verify" or b.queries >= queries):
                return b
        return None
