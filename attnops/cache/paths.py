"""Accepted paths of drafts: which new tokens of each request are kept, and where they move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from attnops.cache.batch import HostLengths, PagedBatch
from attnops.cache.ledger import Change, Ledger
from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need


def accepted(
    ledger: Ledger, step: PagedBatch, paths: Tensor | Sequence[Sequence[int]]
) -> tuple[list[list[int]], Change]:
    """(the accepted ones of each request's new tokens, the ledger's change), see `Pages.accept`."""
    host = _known(ledger, step)
    rows = paths.tolist() if isinstance(paths, Tensor) else paths
    want = f"{len(host.tokens)} rows, one a request"
    is_list = isinstance(rows, Sequence)
    need(is_list and len(rows) == len(host.tokens), "paths", _size(rows), want)
    found, change = [], []
    for i, ((request, _), after, new) in enumerate(
        zip(host.requests, host.tokens, host.new_tokens, strict=True)
    ):
        path = _path(f"paths[{i}]", rows[i], new)
        found.append(path)
        change += ledger.truncate(request, after - new + len(path))
    return found, change


def _known(ledger: Ledger, step: PagedBatch) -> HostLengths:
    """The step's requests, which nothing has happened to since."""
    host = step.host
    if host is None or len(host.requests) != len(host.tokens):
        fail(InvalidInput, "step", "a batch without its requests", "a batch as the cache made it")
    for request, changes in host.requests:
        if ledger.get(request).changes != changes:
            got = f"a step before the last change of request {request}"
            fail(InvalidInput, "step", got, "requests that were not changed or forked since")
    return host


def _size(rows: object) -> str:
    return f"{len(rows)} rows" if isinstance(rows, Sequence) else repr(rows)


def _path(field: str, row: object, new: int) -> list[int]:
    """The numbers of a row before -1. new: the request's new tokens."""
    want = f"a list of rising numbers below {new}, then -1"
    if not isinstance(row, Sequence) or not all(type(number) is int for number in row):
        fail(InvalidInput, field, repr(row), want)
    path = [*takewhile(lambda number: number >= 0, row)]
    rises = all(a < b for a, b in pairwise([*path, new]))
    ends = all(number == -1 for number in row[len(path) :])
    need(rises and ends, field, list(row), want)
    return path


def moves(batch: PagedBatch, paths: Tensor) -> tuple[Tensor, Tensor]:
    """(source, target), int64 `[B * depth]`: the slots between which `copy_kv` moves accepted
    tokens, so that they follow the request's earlier ones. Tensor code without waits.

    paths: as in `Pages.compact`. What moves nothing has source -1.
    """
    place = torch.arange(paths.shape[1], device=paths.device)
    first, new = batch.cu_seqlens_q[:-1, None], batch.cu_seqlens_q.diff()[:, None]
    moved = (paths > place) & (paths < new)
    source = batch.slots[torch.where(moved, first + paths, 0)]
    target = batch.slots[(first + place).clamp(max=batch.slots.shape[0] - 1)]
    return torch.where(moved, source, -1).flatten(), target.flatten()
