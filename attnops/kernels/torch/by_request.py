"""The reference under a deterministic policy: every request by itself, at its own lengths, or every
token.

A matrix product's order of summation may follow from the sizes of the whole batch, and from how far
a request is padded. The loops read lengths on the host, so this serves tensors on the CPU only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnops.core.kernel import Invariant, Kernel, deterministic, device, register
from attnops.core.problem import Problem
from attnops.core.record import changed, sizes_of
from attnops.kernels.shared.parts import Rows, Run, joined, rows_named, tensors_of
from attnops.kernels.shared.tokens import see_nothing


def by_request(run: Run) -> Run:
    """`run`, a reference body, that takes the requests one by one where the policy is
    deterministic."""

    @functools.wraps(run)
    def either(call: Any) -> Any:
        return _each(run, call) if deterministic(call.policy) else run(call)

    # Eager calls know their policy when the kernel is chosen, and go straight to `run`. A function
    # that wraps this one takes over its attributes, and is not passed by.
    vars(either)["ordinary"] = either, run
    return either


def by_state(run: Run) -> Run:
    """As `by_request`. The states of requests without new tokens go on over accepted ones, too."""
    each = by_request(run)

    @functools.wraps(each)
    def either(call: Any) -> None:
        each(call)
        if call.accepted is None or not deterministic(call.policy):
            return
        starts = call.cu_seqlens_q.new_zeros(2)
        for b in (call.cu_seqlens_q.diff() == 0).nonzero().flatten().tolist():
            rows = {"T": slice(0, 0), "B": slice(b, b + 1)}
            run(_part(call, rows, cu_seqlens_q=starts, max_seqlen_q=0))

    vars(either)["ordinary"] = either, run
    return either


def by_token(run: Run) -> Run:
    """`run`, a reference body that writes its results, that takes the tokens one by one where the
    policy is deterministic.

    torch's product of one row sums in another order than that of several, and pointwise functions
    compute the last numbers of a tensor by other code than the rest.
    """

    @functools.wraps(run)
    def either(call: Any) -> None:
        if not deterministic(call.policy):
            run(call)
            return
        for t in range(sizes_of(call)["T"]):
            run(_part(call, {"T": slice(t, t + 1)}))

    return either


def register_by_token(
    op: str,
    run: Run,
    takes: frozenset[str],
    dtypes: tuple[torch.dtype, ...],
    cost_us: Callable[[Problem], float],
    about: str = "plain torch, float32 accumulation",
) -> None:
    """Register `reference` of an op whose tokens do not know of each other.

    run: the result of `by_token`. cost_us: of torch's own kernel.
    """
    register(
        Kernel(
            "reference",
            op,
            run,
            takes,
            dtypes,
            cost_us=lambda p: 1000.0 + 10.0 * cost_us(p),
            judge=True,
            invariant=Invariant((device("cpu"),)),
            about=about,
        )
    )


def _each(run: Run, call: Any) -> tuple[Tensor, ...] | None:
    results = call.spec.results
    if not results:
        see_nothing(call.output, getattr(call, "lse", None))
    found = [(rows, run(part)) for rows, part in _requests(call)]
    if not results:
        return None
    if not found:
        return run(call)  # type: ignore[no-any-return]
    return joined(call, found)


def _part(call: Any, rows: Rows, **changes: Any) -> Any:
    """A request's call. Its inputs are copies, because a product may also depend on the alignment
    of its operands."""
    own = tensors_of(call, rows)
    for name, x in own.items():
        if not call.spec[name].written:
            own[name] = x.clone(memory_format=torch.contiguous_format)
    return changed(call, **own | changes)


def _requests(call: Any) -> Iterator[tuple[Rows, Any]]:
    """Rows and call of every request with tokens."""
    if not hasattr(call, "cu_seqlens_q"):
        name = rows_named(
            call.spec.args[0].dims
        )  # a row of a dense batch, or a token that has a list of its own
        for i in range(sizes_of(call)[name]):
            rows = {name: slice(i, i + 1)}
            part = _part(call, rows, **_own_pages(call, i))
            yield rows, _in_range(part) if call.spec.op == "attention" else part
        return
    starts, ends = (
        call.cu_seqlens_q.tolist(),
        call.cu_seqlens_k.tolist() if hasattr(call, "cu_seqlens_k") else None,
    )
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        rows, own = (
            {"T": slice(begin, end), "B": slice(b, b + 1)},
            {"cu_seqlens_q": call.cu_seqlens_q.new_tensor([0, end - begin])},
        )
        if ends:
            rows["N"], count = slice(ends[b], ends[b + 1]), ends[b + 1] - ends[b]
            own |= {
                "cu_seqlens_k": call.cu_seqlens_k.new_tensor([0, count]),
                "max_seqlen_k": max(count, 1),
            }
        else:
            own |= _own_pages(call, b)
        yield rows, _part(call, rows, max_seqlen_q=end - begin, **own)


def _own_pages(call: Any, b: int) -> dict[str, Tensor]:
    """The request's row of the page table, so that no page past the request's end is gathered.

    Where it can, the row names tokens and not pages, so that sums end with the request's keys: the
    size of pages does not matter then.
    """
    spec = call.spec
    pools = {a.name: getattr(call, a.name) for a in spec.args if a.holds == "pages"}
    if not pools or "page_table" not in spec.names:
        return {}
    length, page = max(int(call.seq_lens[b]), 1), next(iter(pools.values())).shape[1]
    table = call.page_table[b : b + 1, : -(-length // page)]
    # What is written must be the pages themselves, and no copy.
    copied = any(x.stride(0) != page * x.stride(1) for n, x in pools.items() if spec[n].written)
    if copied or call.holes or getattr(call, "mask", None) is not None:
        return {"page_table": table}
    slots = (table[:, :, None] * page + torch.arange(page, dtype=table.dtype)).flatten(1)
    tokens = {name: x.flatten(0, 1).unsqueeze(1) for name, x in pools.items()}
    return {"page_table": slots[:, :length], **tokens}


def _in_range(call: Any) -> Any:
    """One request's call without the keys outside of its range, so that its sums do not depend on
    the longest request."""
    start, end, keys = call.kv_start, call.kv_end, call.key.shape[1]
    # Chunks are counted from the first key, which then stays.
    first = 0 if start is None or call.attention_chunk else min(max(int(start), 0), keys)
    last = keys if end is None else min(max(int(end), 0), keys)
    if last <= first:
        return call
    short = {n: getattr(call, n)[:, first:last].contiguous() for n in ("key", "value")}
    short |= {n: x - first for n in ("kv_start", "kv_end") if (x := getattr(call, n)) is not None}
    return changed(call, **short, mask=None if call.mask is None else call.mask[..., first:last])
