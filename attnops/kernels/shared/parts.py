"""Some requests of a call by themselves, and the results of such parts joined: by the layouts of
the op's record.

A dim of a CUDA grid but the first has at most 65,535 programs. Vendors' kernels hold requests in
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import layout_of
from attnops.core.kernel import demand
from attnops.core.record import Result, changed, sizes_of

Run = Callable[[Any], Any]
Rows = dict[str, slice]
"""A part's rows of the tensors whose first dimension has the name: tokens `T`, keys `N`, requests
`B`."""

GRID = 65_535
"""Programs of such a dim."""
MOST_REQUESTS = GRID
"""Requests of one launch of a kernel that holds them in such a dim."""
FEW_HEADS = demand("q_heads", f"<= {GRID} (CUDA)", lambda p: p.q_heads <= GRID, on="cuda")
"""The need of a kernel that holds heads in another one."""


def rows_named(dims: str) -> str:
    """The name of a layout's first dimension, which may be 1, too."""
    return dims.split(",")[0].removeprefix("1 | ")


def tensors_of(call: Any, rows: Rows) -> dict[str, Tensor]:
    """The part's rows of every tensor that has them, by argument; views."""
    sizes, found = sizes_of(call), dict[str, Tensor]()
    for a in call.spec.args:
        x, name = getattr(call, a.name), rows_named(a.dims)
        if isinstance(x, Tensor) and name in rows and x.shape[0] == sizes[name]:
            found[a.name] = x[rows[name]]
    return found


Part = tuple[Rows, tuple[Tensor, ...]]
"""A part's rows and its results."""


def joined(call: Any, parts: list[Part]) -> tuple[Tensor, ...]:
    """The results of the whole call: the parts' rows, or the sum of a gradient that they share."""
    found = []
    for i, result in enumerate(call.spec.results):
        found.append(_joined(call, result, [(rows, results[i]) for rows, results in parts]))
    return tuple(found)


def _joined(call: Any, result: Result, parts: list[tuple[Rows, Tensor]]) -> Tensor:
    like, first = getattr(call, result.like, None), parts[0][1]
    if result.when and not getattr(call, result.when):
        return first
    name, size = (
        rows_named(call.spec[result.like].dims if result.like else str(result.dims)),
        sizes_of(call),
    )
    if name not in parts[0][0] or (like is not None and like.shape[0] != size[name]):
        stacked = torch.stack([part for _, part in parts])
        return stacked.sum(0, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(
            stacked.dtype
        )
    whole = first.new_full(
        (size[name], *first.shape[1:]), float("-inf") if result.name == "lse" else 0.0
    )
    for rows, part in parts:
        whole[rows[name]] = part
    return whole


def turns_of(call: Any, name: str, at_once: int) -> Iterator[tuple[Rows, Any]]:
    """Rows and call of every part with at most `at_once` of the rows that the layouts call
    `name`."""
    size = sizes_of(call)[name]
    if 0 < size <= at_once:
        yield {name: slice(0, size)}, call
        return
    for first in range(0, size, at_once):
        rows = {name: slice(first, min(first + at_once, size))}
        yield rows, changed(call, **tensors_of(call, rows))


def in_turns(run: Run, most: Callable[[Any], int] = lambda call: MOST_REQUESTS) -> Run:
    """`run`, of a dense op, that takes the requests of a larger batch in turns.

    A bound among a kernel's needs would refuse every batch whose size a compiler does not know.

    most: the requests that `run` takes of a call at once.
    """

    @functools.wraps(run)
    def turns(call: Any) -> Any:
        batch, at_once = call.query.shape[0], most(call)
        if batch <= at_once:
            return run(call)
        return joined(call, [(rows, run(part)) for rows, part in turns_of(call, "B", at_once)])

    return turns


def packed_in_turns(run: Run) -> Run:
    """As `in_turns`, of an op of packed requests, whose results have rows of tokens or of keys.

    Each turn has all rows and some of the cumulative lengths. Rows of other requests hold anything.
    """

    @functools.wraps(run)
    def turns(call: Any) -> Any:
        requests = call.cu_seqlens_q.shape[0] - 1
        if requests <= MOST_REQUESTS:
            return run(call)
        *before, last = range(0, requests, MOST_REQUESTS)
        whole = run(_between(call, last, requests))  # padding rows are the last turn's
        for first in reversed(before):
            end = first + MOST_REQUESTS
            part = run(changed(_between(call, first, end), padded=False))
            whole = [_rows_before(call, end, i, part, whole) for i in range(len(whole))]
        return tuple(whole)

    return turns


def _between(call: Any, first: int, end: int) -> Any:
    lengths = {n: getattr(call, n)[first : end + 1] for n in ("cu_seqlens_q", "cu_seqlens_k")}
    return changed(call, **lengths)


def _rows_before(
    call: Any, end: int, i: int, parts: Sequence[Tensor], wholes: Sequence[Tensor]
) -> Tensor:
    """Result i of `wholes`, with those rows of `parts` that come before the rows of request
    `end`."""
    result, part, whole = call.spec.results[i], parts[i], wholes[i]
    dims = call.spec[result.like].layout if result.like else layout_of(str(result.dims))
    cu_seqlens = {"T": call.cu_seqlens_q, "N": call.cu_seqlens_k}.get(dims[0].text)
    if cu_seqlens is None or not whole.numel():
        return whole
    mine = torch.arange(whole.shape[0], device=whole.device) < cu_seqlens[end]
    return torch.where(mine.view(-1, *[1] * (whole.dim() - 1)), part, whole)
