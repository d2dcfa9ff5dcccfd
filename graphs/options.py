"""`Options`: what `piecewise` and `breakable` are given, and what follows from it for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NoReturn, Protocol, TypedDict, get_args

from torch import Tensor

from ..cache.batch import PagedBatch, SharedPrefix
from ..cache.paged import Pages
from ..core.errors import InvalidInput, fail
from ..core.record import need
from .buckets import Bucket, Buckets, Kind, need_word
from .cuda_graphs import Device

Rows = Literal["tokens", "requests", "whole"]
OverBudget = Literal["raise", "drop"]

Values = dict[str, Any]
"""The arguments of a call, by name."""


class Ahead(Protocol):
    """Work of the host for a step, outside of graphs."""

    def plan_step(self, rows: int, live: int) -> None:
        """Before a step runs, is captured or is replayed. rows: of its bucket. live: of the call, 0
        at a capture."""

    def stepped(self) -> None:
        """After a replay."""


class Shared(TypedDict, total=False):
    """The arguments of `Graphed` that `piecewise` hands on, for type checkers and completion."""

    batch: str | None
    tokens: Sequence[str]
    requests: Sequence[str]
    returns: Rows
    cache: Pages | None
    prepare: Callable[[PagedBatch], PagedBatch] | None
    eager: Mapping[Kind, Sequence[str]] | None
    budget_bytes: int | None
    over_budget: OverBudget
    check_every: int
    tolerance: float | None
    graphs: Device | None
    state: Sequence[Tensor]
    watch: Callable[[], AbstractContextManager[Any]]
    draws: bool
    ahead: Ahead | None


@dataclass(eq=False, repr=False)
class Options:
    """The arguments that `piecewise` and `breakable` share: see `Graphed`."""

    model: Callable[..., Any]
    buckets: Buckets
    _: KW_ONLY
    batch: str | None = "batch"
    tokens: Sequence[str]
    requests: Sequence[str] = ()
    returns: Rows = "tokens"
    cache: Pages | None = None
    prepare: Callable[[PagedBatch], PagedBatch] | None = None
    eager: Mapping[Kind, Sequence[str]] | None = None
    budget_bytes: int | None = None
    over_budget: OverBudget = "raise"
    check_every: int = 0
    tolerance: float | None = None
    graphs: Device | None = None
    state: Sequence[Tensor] = ()
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext
    draws: bool = False
    ahead: Ahead | None = None

    def __post_init__(self) -> None:
        rows = (*self.tokens, *self.requests)
        right = len(set(rows)) == len(rows) > 0 and self.batch not in rows
        need(right, "tokens, requests", rows, "one or more different names, none equal to batch")
        need_word("returns", self.returns, Rows)
        need_word("over_budget", self.over_budget, OverBudget)
        for kind, names in (self.eager or {}).items():
            need(kind in get_args(Kind), "eager", [kind], "'decode', 'verify' and 'mixed' as keys")
            listed = "a sequence of names of ops for each kind of batch"
            need(not isinstance(names, str), "eager", repr(names), listed)
        need(self.check_every >= 0, "check_every", self.check_every, "an int >= 0, 0 for never")
        known = not isinstance(self.state, Tensor) and all(
            isinstance(t, Tensor) for t in self.state
        )
        want = "a sequence of tensors, those that a step changes"
        need(known, "state", type(self.state).__name__, want)
        want = "() where the model takes no batch, and no tensors by token and by request"
        drafts, counted = self.buckets.verify, bool(self.tokens and self.requests)
        need(self.batch is not None or counted or not drafts, "verify", drafts, want)
        follows = self.graphs is None or hasattr(self.graphs, "follow")
        want = "a Device with a method follow(), which orders streams"
        need(follows, "graphs", type(self.graphs).__name__, want)

    def fixed(self, values: Values) -> Values:
        """The arguments that are the same objects at every call."""
        copied = (self.batch, *self.tokens, *self.requests)
        return {n: v for n, v in values.items() if n not in copied}

    def sizes(self, values: Values) -> tuple[Kind, int, int, int, bool]:
        """(kind, new tokens, requests, the most tokens of a request, has it a shared prefix?) of a
        call.

        Without a batch, the rows of the first tensor by request are the requests, with one token
        each if no tensor is by token. Raises InvalidInput.
        """
        if self.batch is None:
            return self._without_batch(values)
        batch = values.get(self.batch)
        if not isinstance(batch, PagedBatch):
            want = "a PagedBatch, as PagedCache.batch makes it"
            fail(InvalidInput, self.batch, type(batch).__name__, want)
        if batch.prefix:
            _refuse_prefix(self.batch, batch)
        shared = batch.shared is not None
        if shared and not isinstance(batch.shared, SharedPrefix):
            want = "a SharedPrefix or None"
            fail(InvalidInput, f"{self.batch}.shared", type(batch.shared).__name__, want)
        for at, other in enumerate(batch.others, 1):
            _check_other(self.batch, at, other, batch)
        tokens, requests = batch.slots.shape[0], batch.page_table.shape[0]
        kind = self.buckets.kind(tokens, requests, batch.max_seqlen_q, shared)
        return kind, tokens, requests, batch.max_seqlen_q, shared

    def _without_batch(self, values: Values) -> tuple[Kind, int, int, int, bool]:
        """As `sizes`. Requests of a verify step have as many tokens each as its bucket."""
        requests = rows_of(self.requests[0], values).shape[0] if self.requests else 0
        tokens = rows_of(self.tokens[0], values).shape[0] if self.tokens else requests
        if self.buckets.decode and self.requests and tokens == requests:
            return "decode", tokens, requests, tokens, False
        queries = tokens // max(requests, 1)
        if queries in self.buckets.verify and queries * requests == tokens:
            return "verify", tokens, requests, queries, False
        return "mixed", tokens, requests, tokens, False

    def plan_maker(self, bucket: Bucket) -> Callable[[PagedBatch], Tensor] | None:
        """Makes the device plan in the graph of a bucket.

        A plan that came with the batch would be of the lengths at capture.
        """
        if self.cache is None or self.prepare is not None or bucket.kind == "mixed":
            return None
        # The plan is for the whole tables, not for the two parts of a cascade.
        if bucket.shared:
            return None
        return self.cache.plan_maker(bucket.tokens, bucket.requests, bucket.queries)

    def planned(self, bucket: Bucket, values: Values) -> Values:
        """The inputs with the plan that is made in the graph, if any."""
        name, make = self.batch, self.plan_maker(bucket)
        if name is None or make is None:
            return values
        return {**values, name: replace(values[name], plan=make(values[name]))}

    def kept_out(self, bucket: Bucket) -> Sequence[str]:
        """The ops that run between the graphs of a bucket, because the user asked for it."""
        return (self.eager or {}).get(bucket.kind, ())


def rows_of(name: str, values: Values) -> Tensor:
    """The tensor of this name. Raises InvalidInput."""
    found = values.get(name)
    if not isinstance(found, Tensor) or found.dim() == 0:
        want = "a tensor whose first dim counts tokens or requests"
        fail(InvalidInput, name, type(found).__name__, want)
    return found


def path(name: str, table: int) -> str:
    """The batch of a page table in the batch of this name, for messages."""
    return f"{name}.others[{table - 1}]" if table else name


def _check_other(name: str, at: int, other: object, batch: PagedBatch) -> None:
    """Raise InvalidInput for what is no batch of page table `at` of `batch`."""
    if not isinstance(other, PagedBatch):
        want = "a PagedBatch, as PagedCache.batch makes it"
        fail(InvalidInput, path(name, at), type(other).__name__, want)
    if other.prefix:
        _refuse_prefix(path(name, at), other)
    if other.shared is not None or other.others:
        want = "None and (): only the batch itself has them"
        fail(InvalidInput, f"{path(name, at)}.shared, others", "further tables", want)
    if other.max_seqlen_q != batch.max_seqlen_q:
        want = f"{batch.max_seqlen_q}, as in the batch"
        fail(InvalidInput, f"{path(name, at)}.max_seqlen_q", other.max_seqlen_q, want)


def _refuse_prefix(name: str, batch: PagedBatch) -> NoReturn:
    got = f"{len(batch.prefix or ())} chunks of cached tokens"
    want = (
        "None or (): their number and sizes differ at every step. Make the batch without "
        "prefix_tokens, or call the model itself"
    )
    fail(InvalidInput, f"{name}.prefix", got, want)
