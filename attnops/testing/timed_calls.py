"""Calls of a `Shape` at any size. Inputs are views of one pool, so that a call takes no longer to make than to time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.problem import Extent, Extents, Problem, Results, StepFacts, Target, Visibility
from attnops.measured import LinearShape, Shape, Sizes
from attnops.measured.table import AnyShape
from attnops.ops import OPS
from attnops.testing.calls import QUANTISED, Call, filled
from attnops.testing.linear_calls import build_linear, linear_problem
from attnops.testing.pool import Pool

GRADIENT, SOFTCAP = "_backward", 30.0
STEP, ANGLES = "decode_attention", ("cos", "sin")
SHORTEST = 0.6
"""The shortest request of a batch that reads a cache, as a share of the longest."""


def call_of(shape: AnyShape, at: Sizes, pool: Pool) -> Call:
    """The call of `shape` that is timed at these sizes. Resets the pool."""
    return build_linear(shape, int(at.batch), pool) if isinstance(shape, LinearShape) else build(shape, *lengths(shape, at), pool)


def problem_at(shape: AnyShape, at: Sizes, target: Target) -> Problem:
    """The Problem of the call that `call_of` makes, on any target."""
    if isinstance(shape, LinearShape):
        return linear_problem(shape, int(at.batch), target)
    return problem_of(shape, *lengths(shape, at), target)


def lengths(shape: Shape, at: Sizes) -> tuple[list[int], list[int]]:
    """(new tokens, keys) of each request of a timed call.

    Selection knows the longest cached length only, so requests that read a cache are evenly spread from SHORTEST of it to all of it.
    The documents of a packed training step are evenly spread from half the mean length to one and a half of it. Other requests have equal
    lengths.
    """
    batch, queries, keys = int(at.batch), int(at.queries), int(at.queries * at.ratio)
    if shape.op.removesuffix(GRADIENT) == "varlen_attention" and (shape.lse or shape.op.endswith(GRADIENT)):
        ragged = [max(round(queries * (0.5 + (i + 0.5) / batch)), 1) for i in range(batch)]
        return ragged, ragged
    cached = shape.decode or shape.kv_range or (shape.page_size > 0 and at.ratio > 1)
    step = (1 - SHORTEST) / max(batch - 1, 1) if cached else 0.0
    return [queries] * batch, [max(round(keys * (1 - i * step)), 1 if shape.kv_range else queries) for i in range(batch)]


def build(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], pool: Pool) -> Call:
    """A call of `shape` with these new tokens and keys of each request. Pages are in random order. Resets the pool.

    `attention` wants one query length; under `kv_range` the keys are as many as the longest, and `kv_end` ends each request.
    A gradient's output and lse are those of the forward, by the kernel that is chosen for it.
    """
    if shape.op.endswith(GRADIENT):
        return _gradient(build(replace(shape, op=shape.op.removesuffix(GRADIENT)), q_lens, k_lens, pool), pool)
    pool.reset()
    dtype, kv_dtype, device = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), pool.device
    given: dict[str, Any] = {"scale": (192 if shape.rope_dim else shape.head_dim) ** -0.5, "causal": shape.causal}
    if shape.window >= 0:
        given["window_left"] = shape.window
    if shape.softcap:
        given["softcap"] = SOFTCAP
    if shape.lse:
        given["return_lse"] = True
    if shape.sinks:
        given["sinks"] = pool.take(shape.q_heads, dtype=dtype).clone()
    scale, narrow = torch.full((1,), 0.5, device=device), dtype in QUANTISED
    if kv_dtype != dtype or narrow:
        given |= {"kv_scale": scale} if shape.rope_dim else {"k_scale": scale, "v_scale": scale}
        given |= {"q_scale": scale} if narrow else {}
    if "padded" in OPS[shape.op].spec.names:  # timed calls have no padding, as `PagedCache` promises of its batches
        given["padded"] = False
    sizes = {"Hq": shape.q_heads, "H": shape.q_heads, "Hkv": shape.kv_heads, "D": shape.head_dim, "Dv": shape.v_head_dim}
    sizes |= {"Dc": shape.v_head_dim, "Dr": shape.rope_dim, "T": sum(q_lens), "B": len(q_lens)}
    if shape.op == "attention":
        sizes |= {"S": max(q_lens), "K": max(k_lens)}
        given |= {"kv_end": pool.ints(k_lens)} if shape.kv_range else {}
    elif shape.op != STEP:
        given |= {"cu_seqlens_q": pool.cumulative(q_lens), "max_seqlen_q": max(q_lens)}
    if shape.op == "varlen_attention":
        given |= {"cu_seqlens_k": pool.cumulative(k_lens), "max_seqlen_k": max(k_lens)}
        sizes["N"] = sum(k_lens)
    elif shape.page_size:
        counts = torch.tensor([-(-n // shape.page_size) for n in k_lens])
        pages, width = int(counts.sum()), int(counts.max())
        table = torch.zeros(len(k_lens), width, dtype=torch.int32, device=device)
        order = torch.randperm(pages, generator=pool.generator, device=device).to(torch.int32)
        table[(torch.arange(width) < counts[:, None]).to(device)] = order
        given |= {"page_table": table, "seq_lens": pool.ints(k_lens), "holes": False}
        sizes |= {"P": pages, "page": shape.page_size}
        if shape.op == STEP:
            last = pool.ints(k_lens).long() - 1
            slots = table.gather(1, last[:, None] // shape.page_size)[:, 0] * shape.page_size + last % shape.page_size
            given |= {"slots": slots.int()} | {name: pool.take(len(q_lens), shape.head_dim, dtype=dtype) for name in ANGLES}
    stored = OPS[shape.op].spec.stored

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.default is not REQUIRED:
            return None
        if a.written:
            return torch.empty(dims, dtype=torch.bfloat16 if narrow else dtype, device=device)
        return pool.take(*dims, dtype=kv_dtype if stored in (a.name, a.dtypes) else dtype)

    arguments = filled(shape.op, sizes, given, make)
    return Call(shape.op, arguments, writes=("output",) if "output" in arguments else ())


def _gradient(forward: Call, pool: Pool) -> Call:
    with torch.no_grad():
        output, lse = OPS[forward.op].packet.default(*forward.args, **forward.kwargs, return_lse=True)
    grad = pool.take(*output.shape, dtype=output.dtype)
    return Call(forward.op + GRADIENT, {**forward.arguments, "output": output, "lse": lse, "grad_output": grad})


def problem_of(shape: Shape, q_lens: Sequence[int], k_lens: Sequence[int], target: Target) -> Problem:
    """The Problem of the call that `build` makes, on any target."""
    s, queries, most = shape, max(q_lens), max(k_lens)
    keys = -(-most // s.page_size) * s.page_size if s.page_size else most
    dense = s.op.removesuffix(GRADIENT) == "attention"
    sizes = queries * len(q_lens) if dense else sum(q_lens), len(q_lens), queries, keys
    sinks_dtype = getattr(torch, s.dtype) if s.sinks else None
    rules = Visibility(s.causal, (s.window, -1), s.softcap, sinks=s.sinks, sinks_dtype=sinks_dtype, kv_range=s.kv_range)
    return Problem(
        s.op, target, getattr(torch, s.dtype), getattr(torch, s.kv_dtype), s.q_heads, s.kv_heads, s.head_dim, s.v_head_dim, s.rope_dim,
        s.page_size, rules=rules, sizes=Extents(*map(Extent.of, sizes)), results=Results(s.lse, s.op.endswith(GRADIENT)),
        step=StepFacts(padded="padded" not in OPS[s.op].spec.names, sizes_equal=dense and queries == keys),
        asks=frozenset(ANGLES if s.op == STEP else ()),
    )  # fmt: skip
