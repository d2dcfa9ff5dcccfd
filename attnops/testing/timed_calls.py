"""Calls of a kind at any size. Inputs are views of one pool, so that a call takes no longer to make than to time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.problem import Extent, Extents, Problem, Target, altered
from attnops.measured import Sizes
from attnops.measured.cost import decodes
from attnops.ops import OPS
from attnops.testing.calls import QUANTISED, Call, filled
from attnops.testing.linear_calls import build_linear, linear_problem
from attnops.testing.pool import Pool

GRADIENT, SOFTCAP = "_backward", 30.0
SHORTEST = 0.6
"""The shortest request of a batch that reads a cache, as a share of the longest."""


def call_of(kind: Problem, at: Sizes, pool: Pool) -> Call:
    """The call of `kind` that is timed at these sizes. Resets the pool."""
    return build_linear(kind, int(at.batch), pool) if OPS[kind.op].spec.weights else build(kind, *lengths(kind, at), pool)


def problem_at(kind: Problem, at: Sizes, target: Target) -> Problem:
    """The Problem of the call that `call_of` makes, on any target."""
    if OPS[kind.op].spec.weights:
        return linear_problem(kind, int(at.batch), target)
    return problem_of(kind, *lengths(kind, at), target)


def lengths(kind: Problem, at: Sizes) -> tuple[list[int], list[int]]:
    """(new tokens, keys) of each request of a timed call.

    Selection knows the longest cached length only, so requests that read a cache are evenly spread from SHORTEST of it to all of it.
    The documents of a packed training step are evenly spread from half the mean length to one and a half of it. Other requests have equal
    lengths.
    """
    batch, queries, keys = int(at.batch), int(at.queries), int(at.queries * at.ratio)
    if "cu_seqlens_k" in OPS[kind.op].spec.names and (kind.results.lse or kind.results.grad):
        ragged = [max(round(queries * (0.5 + (i + 0.5) / batch)), 1) for i in range(batch)]
        return ragged, ragged
    cached = decodes(kind) or kind.rules.kv_range or (kind.page_size > 0 and at.ratio > 1)
    step = (1 - SHORTEST) / max(batch - 1, 1) if cached else 0.0
    return [queries] * batch, [max(round(keys * (1 - i * step)), 1 if kind.rules.kv_range else queries) for i in range(batch)]


def build(kind: Problem, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> Call:
    """A call of `kind` with these new tokens and keys of each request. Pages are in random order. Resets the pool.

    Dense attention wants one query length; under `kv_range` the keys are as many as the longest, and `kv_end` ends each request.
    A gradient's output and lse are those of the forward, by the kernel that is chosen for it.
    """
    if kind.results.grad:
        return _gradient(build(altered(kind, op=kind.op.removesuffix(GRADIENT), grad=False), q_lens, k_lens, pool), pool)
    pool.reset()
    rules, spec, dtype, device = kind.rules, OPS[kind.op].spec, kind.dtype, pool.device
    given: dict[str, Any] = {"scale": (192 if kind.rope_dim else kind.head_dim) ** -0.5, "causal": rules.causal}
    if rules.window[0] >= 0:
        given["window_left"] = rules.window[0]
    if rules.softcap:
        given["softcap"] = SOFTCAP
    if kind.results.lse:
        given["return_lse"] = True
    if rules.sinks:
        given["sinks"] = pool.take(kind.q_heads, dtype=dtype).clone()
    scale, narrow = torch.full((1,), 0.5, device=device), dtype in QUANTISED
    if kind.kv_dtype != dtype or narrow:
        given |= {"kv_scale": scale} if kind.rope_dim else {"k_scale": scale, "v_scale": scale}
        given |= {"q_scale": scale} if narrow else {}
    if "padded" in spec.names:  # timed calls have no padding, as `PagedCache` promises of its batches
        given["padded"] = False
    given |= {"cu_seqlens_q": pool.cumulative(q_lens), "max_seqlen_q": max(q_lens)}
    given |= {"cu_seqlens_k": pool.cumulative(k_lens), "max_seqlen_k": max(k_lens)}
    given |= {"kv_end": pool.ints(k_lens)} if rules.kv_range else {}
    sizes = {"Hq": kind.q_heads, "H": kind.q_heads, "Hkv": kind.kv_heads, "D": kind.head_dim, "Dv": kind.v_head_dim}
    sizes |= {"Dc": kind.v_head_dim, "Dr": kind.rope_dim, "T": sum(q_lens), "N": sum(k_lens), "B": len(q_lens)}
    sizes |= {"S": max(q_lens), "K": max(k_lens)}
    if kind.page_size:
        counts = torch.tensor([-(-n // kind.page_size) for n in k_lens])
        pages, width = int(counts.sum()), int(counts.max())
        table = torch.zeros(len(k_lens), width, dtype=torch.int32, device=device)
        order = torch.randperm(pages, generator=pool.generator, device=device).to(torch.int32)
        table[(torch.arange(width) < counts[:, None]).to(device)] = order
        given |= {"page_table": table, "seq_lens": pool.ints(k_lens), "holes": False}
        sizes |= {"P": pages, "page": kind.page_size}
        if "slots" in spec.names:
            last = pool.ints(k_lens).long() - 1
            slots = table.gather(1, last[:, None] // kind.page_size)[:, 0] * kind.page_size + last % kind.page_size
            given |= {"slots": slots.int()}
            given |= {a: pool.take(len(q_lens), kind.head_dim, dtype=dtype) for a in sorted(kind.asks)}

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.default is not REQUIRED:
            return None
        if a.written:
            return torch.empty(dims, dtype=torch.bfloat16 if narrow else dtype, device=device)
        return pool.take(*dims, dtype=kind.kv_dtype if spec.stored in (a.name, a.dtypes) else dtype)

    arguments = filled(kind.op, sizes, given, make)
    return Call(kind.op, arguments, writes=("output",) if "output" in arguments else ())


def _gradient(forward: Call, pool: Pool) -> Call:
    with torch.no_grad():
        output, lse = OPS[forward.op].packet.default(*forward.args, **forward.kwargs, return_lse=True)
    grad = pool.take(*output.shape, dtype=output.dtype)
    return Call(forward.op + GRADIENT, {**forward.arguments, "output": output, "lse": lse, "grad_output": grad})


def problem_of(kind: Problem, q_lens: Sequence[int], k_lens: Sequence[int], target: Target) -> Problem:
    """The Problem of the call that `build` makes, on any target."""
    spec, queries, most = OPS[kind.op].spec, max(q_lens), max(k_lens)
    keys = -(-most // kind.page_size) * kind.page_size if kind.page_size else most
    dense = "context" in spec.measures and not {"cu_seqlens_q", "page_table"} & {*spec.names}
    counts = {"tokens": sum(q_lens), "batch": len(q_lens), "queries": queries, "context": keys}
    return altered(
        kind,
        target=target,
        sizes=Extents(**{name: Extent.of(count if name in spec.measures else 0) for name, count in counts.items()}),
        sizes_equal=dense and queries == keys,
        padded="padded" not in spec.names,
        sinks_dtype=kind.dtype if kind.rules.sinks else None,
    )
