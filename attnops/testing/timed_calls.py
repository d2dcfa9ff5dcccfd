"""Calls of a kind at any size. Inputs are views of one pool, so that a call takes no longer to make
than to time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED, REQUIRED, Arg
from attnops.core.problem import Extent, Extents, Problem, Target, altered, value_of
from attnops.core.record import INTS
from attnops.measured import Sizes
from attnops.measured.cost import decodes
from attnops.ops import OPS
from attnops.testing.calls import Call, filled
from attnops.testing.pool import Pool

GRADIENT, SOFTCAP, SCALE = "_backward", 30.0, 0.5
PROMISES = ("padded", "holes")
"""Facts that are false of timed calls, as `PagedCache` promises of its batches."""
HALVES = ("D // 2",)
"""Sizes of angles that are not taken where the layout leaves the choice: transformers' have as many
as a head has numbers."""
SHORTEST = 0.6
"""The shortest request of a batch that reads a cache, as a share of the longest."""
COLD_BYTES = 600_000_000
"""Bytes of all copies of a weight together: several times the L2 cache of any GPU."""


def call_of(kind: Problem, at: Sizes, pool: Pool) -> Call:
    """The call of `kind` that is timed at these sizes. Resets the pool."""
    return build(kind, *lengths(kind, at), pool)


def problem_at(kind: Problem, at: Sizes, target: Target) -> Problem:
    """The Problem of the call that `call_of` makes, on any target."""
    return problem_of(kind, *lengths(kind, at), target)


def lengths(kind: Problem, at: Sizes) -> tuple[list[int], list[int]]:
    """(new tokens, keys) of each request of a timed call.

    Selection knows the longest cached length only, so requests that read a cache are evenly spread
    from SHORTEST of it to all of it. The documents of a packed training step are evenly spread from
    half the mean length to one and a half of it. Other requests have equal lengths.
    """
    batch, queries, keys = int(at.batch), int(at.queries), int(at.queries * at.ratio)
    if "starts_of_keys" in OPS[kind.op].spec.roles and (kind.results.lse or kind.results.grad):
        ragged = [max(round(queries * (0.5 + (i + 0.5) / batch)), 1) for i in range(batch)]
        return ragged, ragged
    cached = decodes(kind) or kind.rules.kv_range or (kind.page_size > 0 and at.ratio > 1)
    step = (1 - SHORTEST) / max(batch - 1, 1) if cached else 0.0
    least = 1 if kind.rules.kv_range else queries
    return [queries] * batch, [max(round(keys * (1 - i * step)), least) for i in range(batch)]


def build(kind: Problem, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> Call:
    """A call of `kind` with these new tokens and keys of each request. Pages are in random order.
    Resets the pool.

    Dense attention wants one query length; under `kv_range` the keys are as many as the longest,
    and `kv_end` ends each request. A gradient's output and lse are those of the forward, by the
    kernel that is chosen for it.
    """
    if kind.results.grad:
        return _gradient(
            build(
                altered(kind, op=kind.op.removesuffix(GRADIENT), grad=False), q_lens, k_lens, pool
            ),
            pool,
        )
    pool.reset()
    spec, dtype = OPS[kind.op].spec, kind.dtype
    held, sizes = _requests(kind, q_lens, k_lens, pool)
    if kind.page_size:
        paged, more = _pages(kind, k_lens, pool)
        held |= paged
        sizes |= more
    given: dict[str, Any] = {}
    for a in spec.args:
        value = (
            held.get(a.holds)
            if a.holds and (a.tensor or a.default is REQUIRED)
            else _number(kind, a)
        )
        if value is not None:
            given[a.name] = value
    if (made := OPS[kind.op].of_family("timed", "MADE")) is not None:
        given |= made(kind, len(q_lens), sum(q_lens), pool)

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.written and a.default is REQUIRED:
            return torch.empty(
                dims, dtype=torch.bfloat16 if dtype in QUANTISED else dtype, device=pool.device
            )
        if not _is_asked(kind, a):
            return None
        return pool.take(*dims, dtype=kind.kv_dtype if spec.stored in (a.name, a.dtypes) else dtype)

    numbers = {a.name: given.get(a.name, a.default) for a in spec.args if not a.tensor}
    arguments = filled(kind.op, numbers | sizes, given, make, HALVES)
    return Call(kind.op, arguments, writes=(spec.output,) if spec.output else ())


def _requests(
    kind: Problem, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool
) -> tuple[dict[str, Any], dict[str, int]]:
    """(what arguments hold of these requests, the sizes by the layouts' letters)."""
    held: dict[str, Any] = {
        "starts_of_queries": pool.cumulative(q_lens),
        "most_queries": max(q_lens),
        "starts_of_keys": pool.cumulative(k_lens),
        "most_keys": max(k_lens),
        "lengths_of_keys": pool.ints(k_lens),
    }
    if kind.head_dim:
        held["scale_of_logits"] = (192 if kind.rope_dim else kind.head_dim) ** -0.5
    if kind.rules.kv_range:
        held["ends_of_keys"] = held["lengths_of_keys"]
    if kind.kv_dtype != kind.dtype or kind.dtype in QUANTISED:
        held["scale_of_keys"] = torch.full((1,), SCALE, device=pool.device)
    if kind.dtype in QUANTISED:
        held["scale_of_query"] = held["scale_of_keys"]
    sizes = {letter: getattr(kind, field) for field, letter in INTS.items()}
    sizes |= {
        "H": kind.q_heads,
        "Dc": kind.v_head_dim,
        "In": kind.in_features,
        "Out": kind.out_features,
    }
    return held, sizes | {
        "T": sum(q_lens),
        "N": sum(k_lens),
        "B": len(q_lens),
        "S": max(q_lens),
        "K": max(k_lens),
    }


def _pages(
    kind: Problem, k_lens: Sequence[int], pool: Pool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """(the pages of requests in random order and the slots of their last tokens, the sizes of
    pages)."""
    size, device = kind.page_size, pool.device
    counts = torch.tensor([-(-n // size) for n in k_lens])
    pages, width = int(counts.sum()), int(counts.max())
    order = torch.randperm(pages, generator=pool.generator, device=device).to(torch.int32)
    table = torch.zeros(len(k_lens), width, dtype=torch.int32, device=device)
    table[(torch.arange(width) < counts[:, None]).to(device)] = order
    last = pool.ints(k_lens).long() - 1
    slots = table.gather(1, last[:, None] // size)[:, 0] * size + last % size
    return {"page_ids": table, "slots_of_tokens": slots.int()}, {"P": pages, "page": size}


def _number(kind: Problem, a: Arg) -> Any:
    """The value of an argument that is no tensor as the kind asks for it; None: its default."""
    if a.tensor:
        return None
    if a.name in kind.asks:
        values: dict[str, Any] = OPS[kind.op].of_family("timed", "VALUES") or {}
        return values.get(a.name)
    for fact in a.facts:
        if fact.field in PROMISES:
            return False
        value = value_of(kind, fact)
        if value is True and a.kind == "float":
            value = SOFTCAP
        if value != a.default:
            return value
    return None


def _is_asked(kind: Problem, a: Arg) -> bool:
    """Does a call of the kind have a random tensor here?"""
    if a.default is REQUIRED or a.name in kind.asks:
        return True
    return not a.holds and any(value_of(kind, fact) is True for fact in a.facts)


def _gradient(forward: Call, pool: Pool) -> Call:
    with torch.no_grad():
        made = OPS[forward.op].packet.default(*forward.args, **forward.kwargs, return_lse=True)
    named = dict(zip((r.name for r in forward.spec.results), made, strict=True))
    arguments = dict(forward.arguments)
    for a in OPS[forward.op + GRADIENT].spec.args:
        of = a.name.removeprefix("grad_")
        if a.name in named:
            arguments[a.name] = named[a.name]
        elif of in named and a.kind == "Tensor":
            arguments[a.name] = pool.take(*named[of].shape, dtype=named[of].dtype)
    return Call(forward.op + GRADIENT, arguments)


def problem_of(
    kind: Problem, q_lens: Sequence[int], k_lens: Sequence[int], target: Target
) -> Problem:
    """The Problem of the call that `build` makes, on any target."""
    spec, queries, most = OPS[kind.op].spec, max(q_lens), max(k_lens)
    keys = -(-most // kind.page_size) * kind.page_size if kind.page_size else most
    dense = "context" in spec.measures and not {"starts_of_queries", "page_ids"} & spec.roles.keys()
    counts = {"tokens": sum(q_lens), "batch": len(q_lens), "queries": queries, "context": keys}
    return altered(
        kind,
        target=target,
        sizes=Extents(
            **{
                name: Extent.of(count if name in spec.measures else 0)
                for name, count in counts.items()
            }
        ),
        sizes_equal=dense and queries == keys,
        padded=not any(fact.field == "padded" for a in spec.args for fact in a.facts),
        sinks_dtype=kind.dtype if kind.rules.sinks else None,
    )


def with_copies(call: Call, pool: Pool) -> list[Call]:
    """The call, and on a GPU calls with other weights, which make every read of a weight cold when
    all calls run in turn."""
    names = call.spec.weights
    if not names or pool.device.type != "cuda":
        return [call]
    given = call.tensors()
    count = max(2, -(-COLD_BYTES // sum(given[n].nbytes for n in names)))
    copies = []
    for _ in range(count - 1):
        weights = {n: pool.take(*given[n].shape, dtype=given[n].dtype) for n in names}
        copies.append(call.with_(**weights))
    return [call, *copies]
