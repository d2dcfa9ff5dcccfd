"""`Buckets`: the sizes that graphs are captured for, and the one that serves a batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ..core.errors import BatchTooLarge, fail
from ..core.record import need

Kind = Literal["decode", "verify", "mixed"]
"""decode: every request brings at most one token. verify: every request brings at most a few, a
number that is fixed at capture, e.g. the drafts of a speculative step. mixed: any other batch, of
prefill or of both."""


def need_word(name: str, got: str, words: object) -> None:
    """Raise InvalidInput unless it is one of the words, a Literal."""
    known = get_args(words)
    need(got in known, name, repr(got), " | ".join(map(repr, known)))


Over = Literal["raise", "eager"]
Padding = Literal["absent", "null"]


@dataclass(frozen=True, order=True)
class Bucket:
    """One captured size: `tokens` rows of every tensor by token, `requests` rows of the page
    table. shared: of batches with a shared prefix, whose layers make other calls."""

    tokens: int
    requests: int
    kind: Kind
    shared: bool = False

    @property
    def queries(self) -> int:
        """The most tokens of one request, `max_seqlen_q` of the captured batch."""
        return (
            self.tokens // self.requests
            if self.kind == "verify"
            else 1
            if self.kind == "decode"
            else self.tokens
        )

    @property
    def trace(self) -> str:
        """The trace that serves this bucket, by its kind, its shared prefix and, for verify steps,
        the queries, which select kernels."""
        queries = f" {self.queries}" if self.kind == "verify" else ""
        return f"{self.kind}{queries}{self._shared}"

    @property
    def label(self) -> str:
        """The kind of its batches, for reports."""
        return f"{self.kind}{self._shared}"

    @property
    def _shared(self) -> str:
        return " shared" if self.shared else ""

    def __str__(self) -> str:
        tokens = f" {self.tokens} tokens" if self.kind == "mixed" else ""
        return f"{self.trace}{tokens} x{self.requests}"


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 to 256, then of 16, up to and including `most` requests."""
    return _ending((1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(272, most + 1, 16)), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """From 16 on, eight sizes per power of two, at least 16 apart, up to and including `most`:
    about an eighth is padding at most."""
    sizes, at = [], 16
    while at < most:
        sizes.append(at)
        at += max(16, (1 << (at.bit_length() - 1)) // 8)
    return _ending(tuple(sizes), most)


def _ending(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(s for s in sizes if s < most) + ((most,) if most else ())


@dataclass(frozen=True)
class Buckets:
    """Sizes to capture, and the fallback beyond them.

    decode: requests of decode batches.
    tokens: new tokens of mixed batches; `()`: mixed batches are not captured.
    requests: page table rows in mixed buckets; 0: as many as the largest decode bucket.
    verify: the most tokens of a request in verify batches, each captured for the requests of
    `decode`. A batch runs in the smallest
        bucket that holds its longest request; a batch of more requests runs as a mixed one.
    over: for a batch over the largest bucket, "raise" BatchTooLarge, or run it "eager", which the
    report counts.
    padding: padding rows of decode buckets. "absent": rows of length 0, neither read nor written;
    batches have
        `padded=True`. "null": requests of one token that is not stored and reads the null page 0;
            batches keep `padded=False`, which
        saves some kernels a launch. Verify buckets always use "absent", because a request may bring
        fewer tokens.

    Raises:
        InvalidInput: sizes that are not ascending ints >= 1 (`verify`: 2), an unknown word, or
            `verify` without `decode`.
    """

    decode: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    requests: int = 0
    over: Over = "raise"
    padding: Padding = "absent"
    dropped: frozenset[Bucket] = field(default=frozenset(), repr=False)
    verify: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("decode", 1), ("tokens", 1), ("verify", 2)):
            sizes = getattr(self, name)
            right = all(type(s) is int and s >= least for s in sizes) and list(sizes) == sorted(
                set(sizes)
            )
            need(right, name, sizes, f"ascending ints >= {least}")
        need_word("over", self.over, Over)
        need_word("padding", self.padding, Padding)
        need(bool(self.decode or self.tokens), "decode, tokens", "no size", "at least one bucket")
        need(
            bool(self.decode or not self.verify),
            "verify",
            self.verify,
            "() without decode: verify buckets take their requests from it",
        )
        need(
            type(self.requests) is int and self.requests >= 0,
            "requests",
            self.requests,
            "an int >= 0",
        )

    @classmethod
    def up_to(
        cls,
        requests: int = 0,
        tokens: int = 0,
        *,
        over: Over = "raise",
        padding: Padding = "absent",
        verify: tuple[int, ...] = (),
    ) -> Buckets:
        """The default sizes up to so many requests in decode batches and new tokens in mixed ones;
        0: no bucket of that kind."""
        return cls(
            decode_sizes(requests), token_sizes(tokens), requests, over, padding, verify=verify
        )

    @property
    def rows(self) -> int:
        """Rows of the page table in graphs of `tokens`."""
        return self.requests or max(self.decode, default=0)

    @functools.cached_property
    def _captured(self) -> tuple[Bucket, ...]:
        """All buckets, dropped ones included, in the order of search."""
        plain = self._plain
        # One request shares its pages with no other.
        several = (bucket for bucket in plain if bucket.requests > 1)
        return (*plain, *(replace(bucket, shared=True) for bucket in several))

    @property
    def _plain(self) -> tuple[Bucket, ...]:
        """The buckets of batches without a shared prefix."""
        verify = (Bucket(n * queries, n, "verify") for queries in self.verify for n in self.decode)
        return (
            *(Bucket(n, n, "decode") for n in self.decode),
            *verify,
            *(Bucket(n, self.rows, "mixed") for n in self.tokens),
        )

    @functools.cached_property
    def _kept(self) -> dict[tuple[Kind, bool], list[Bucket]]:
        kinds: tuple[Kind, ...] = ("decode", "verify", "mixed")
        kept: dict[tuple[Kind, bool], list[Bucket]] = {
            (kind, shared): [] for kind in kinds for shared in (False, True)
        }
        for bucket in self._captured:
            if bucket not in self.dropped:
                kept[bucket.kind, bucket.shared].append(bucket)
        return kept

    def all(self, shared: bool = False) -> tuple[Bucket, ...]:
        """Every bucket that is not dropped, largest first, so that later ones fit into memory that
        the first left. shared: those of batches with a shared prefix."""
        kept = (b for buckets in self._kept.values() for b in buckets if b.shared is shared)
        return tuple(sorted(kept, reverse=True))

    @property
    def most(self) -> tuple[int, int]:
        """(tokens, requests) of buffers that serve every bucket."""
        return max(b.tokens for b in self._captured), max(b.requests for b in self._captured)

    def of_trace(self, trace: str) -> tuple[Bucket, ...]:
        """The buckets of one trace, smallest first, dropped ones included."""
        return tuple(b for b in self._captured if b.trace == trace)

    def kind(self, tokens: int, requests: int, queries: int, shared: bool = False) -> Kind:
        """The kind of a batch of so many tokens and requests, with at most `queries` tokens of a
        request. shared: it has a shared prefix."""
        if queries <= 1 and tokens <= requests:
            # Padding rows alone serve an idle step, in whichever bucket there is.
            idle = not requests and not self._kept["decode", shared]
            return "mixed" if idle and self._kept["mixed", shared] else "decode"
        if not 1 < queries <= max(self.verify, default=0):
            return "mixed"
        # A batch that no verify bucket holds runs in a mixed one, where any exists.
        return (
            "verify"
            if not self.tokens or self._fitting("verify", tokens, requests, queries, shared)
            else "mixed"
        )

    def find(
        self, kind: Kind, tokens: int, requests: int, queries: int = 1, shared: bool = False
    ) -> Bucket | None:
        """The smallest bucket for such a batch, see `kind`, or None where the policy is "eager".
        Raises BatchTooLarge."""
        found = self._fitting(kind, tokens, requests, queries, shared)
        if found is not None or self.over == "eager":
            return found
        batch = f"{kind} shared" if shared else kind
        if kind == "mixed" and self.tokens and requests > self.rows:
            fail(BatchTooLarge, batch, "requests", requests, self.rows)
        field = "tokens" if kind == "mixed" else "requests"
        largest = max(
            (
                getattr(b, field)
                for b in self._kept[kind, shared]
                if kind != "verify" or b.queries >= queries
            ),
            default=0,
        )
        fail(BatchTooLarge, batch, field, tokens if kind == "mixed" else requests, largest)

    def _fitting(
        self, kind: Kind, tokens: int, requests: int, queries: int, shared: bool
    ) -> Bucket | None:
        kept = self._kept[kind, shared]
        fitting = (b for b in kept if b.requests >= requests and b.tokens >= tokens)
        return next((b for b in fitting if kind != "verify" or b.queries >= queries), None)
