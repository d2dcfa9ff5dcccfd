"""Ops that move rows: a copy of keys and values between slots of all layers, and ragged queries to a rectangle and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last
from attnops.problem import Extent, Problem
from attnops.reference import moves
from attnops.select import key_for

STORED = (*check.FLOATS, *check.QUANTISED, torch.uint8)
"""What pages may hold; uint8 is that of packed latents."""


def _check_copy(k_pages: Tensor, v_pages: Tensor | None, source: Tensor, target: Tensor) -> None:
    check.tensor("k_pages", k_pages, (4, 5), STORED, "[L, P, page, Hkv, D] or [L, P, page, D]")
    check.need(k_pages.shape[2] >= 1, "k_pages.shape[2]", k_pages.shape[2], ">= 1 token a page")
    if v_pages is not None:
        check.tensor("v_pages", v_pages, k_pages.dim(), STORED, "[L, P, page, Hkv, Dv] or [L, P, page, Dv], as the keys")
        if v_pages.dtype != k_pages.dtype:
            fail(InvalidInput, "v_pages.dtype", check.name(v_pages.dtype), f"{check.name(k_pages.dtype)}, as the keys")
        for dim, meaning in enumerate(("layers", "pages", "page size", "heads")[: k_pages.dim() - 1]):
            check.equal(f"v_pages.shape[{dim}]", v_pages.shape[dim], k_pages.shape[dim], f"the keys' {meaning}")
    check.tensor("source", source, 1, check.INDEX, "[N]")
    check.tensor("target", target, 1, check.INDEX, "[N]")
    check.equal("target.shape[0]", target.shape[0], source.shape[0], "one a source")
    check.same_device(k_pages, v_pages=v_pages, source=source, target=target)


def _problem_copy(k_pages: Any, v_pages: Any, source: Any, target: Any, **_: Any) -> Problem:
    return Problem(
        op="copy_kv",
        target=target_of(k_pages),
        dtype=k_pages.dtype,
        kv_dtype=k_pages.dtype,
        kv_heads=int(k_pages.shape[3]) if k_pages.dim() == 5 else 1,
        head_dim=int(k_pages.shape[-1]),
        v_head_dim=0 if v_pages is None else int(v_pages.shape[-1]),
        page_size=int(k_pages.shape[2]),
        last_dim_contiguous=_packed_last(k_pages) and (v_pages is None or _packed_last(v_pages)),
        tokens=Extent.of(source.shape[0]),
    )


COPY_KV = define(
    Op(
        name="copy_kv",
        schema='(Tensor(a!) k_pages, Tensor(b!)? v_pages, Tensor source, Tensor target, *, str policy="") -> ()',
        check=_check_copy,
        fake=lambda *_, **__: None,
        problem=_problem_copy,
        reference=moves.copy_kv,
        about="copy of keys and values between slots, in all layers",
    )
)


def copy_kv(k_pages: Tensor, v_pages: Tensor | None, source: Tensor, target: Tensor, *, kernel: str | None = None) -> None:
    """Copy what slots hold into other slots, in place, in all layers (accepted drafts that move up, prefixes). No gradient.

    Everything is read before anything is written, so that a slot may be source and target at once.

    Args:
        k_pages, v_pages: `[L, P, page, Hkv, D]`, `[L, P, page, Hkv, Dv]`, one dtype, written: the pages of L layers in one tensor each.
            Latents are `[L, P, page, D]` and v_pages None. Pages of one layer are `k_pages[None]`.
        source, target: int32 or int64 `[N]`, slots `page_id * page_size + offset`. Entry i copies `source[i]` to `target[i]`; a
            negative number in either skips it. Targets are distinct among the entries that are copied.
        kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    torch.ops.attnops.copy_kv.default(k_pages, v_pages, source, target, policy=key_for("copy_kv", kernel))


def _check_cu(cu_seqlens_q: Tensor) -> None:
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.need(cu_seqlens_q.shape[0] >= 1, "cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], ">= 1")


def _check_pad(query: Tensor, cu_seqlens_q: Tensor, *, max_seqlen_q: int) -> None:
    check.tensor("query", query, 3, check.QUERY, "[T, H, D]")
    _check_cu(cu_seqlens_q)
    check.same_device(query, cu_seqlens_q=cu_seqlens_q)
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")


def _check_unpad(padded: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int) -> None:
    check.tensor("padded", padded, 4, check.QUERY, "[B, max_seqlen_q, H, D]")
    _check_cu(cu_seqlens_q)
    check.same_device(padded, cu_seqlens_q=cu_seqlens_q)
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], padded.shape[0] + 1, "one more than the requests")
    check.need(num_tokens >= 0, "num_tokens", num_tokens, ">= 0")


def _problem_rows(op: str, rows: Any, tokens: Any, batch: Any, queries: Any) -> Problem:
    return Problem(
        op=op,
        target=target_of(rows),
        dtype=rows.dtype,
        kv_dtype=rows.dtype,
        q_heads=int(rows.shape[-2]),
        head_dim=int(rows.shape[-1]),
        last_dim_contiguous=_packed_last(rows),
        tokens=Extent.of(tokens),
        batch=Extent.of(batch),
        queries=Extent.of(queries),
    )


PAD = define(
    Op(
        name="pad_queries",
        schema='(Tensor query, Tensor cu_seqlens_q, *, SymInt max_seqlen_q, str policy="") -> Tensor',
        check=_check_pad,
        fake=lambda query, cu_seqlens_q, *, max_seqlen_q: query.new_empty((cu_seqlens_q.shape[0] - 1, max_seqlen_q, *query.shape[1:])),
        problem=lambda query, cu_seqlens_q, *, max_seqlen_q: _problem_rows(
            "pad_queries", query, query.shape[0], cu_seqlens_q.shape[0] - 1, max_seqlen_q
        ),
        reference=moves.pad_queries,
        about="ragged queries to a rectangle",
    )
)
UNPAD = define(
    Op(
        name="unpad_queries",
        schema='(Tensor padded, Tensor cu_seqlens_q, *, SymInt num_tokens, str policy="") -> Tensor',
        check=_check_unpad,
        fake=lambda padded, cu_seqlens_q, *, num_tokens: padded.new_empty((num_tokens, *padded.shape[2:])),
        problem=lambda padded, cu_seqlens_q, *, num_tokens: _problem_rows(
            "unpad_queries", padded, num_tokens, padded.shape[0], padded.shape[1]
        ),
        reference=moves.unpad_queries,
        about="a rectangle of queries or results back to ragged tokens",
    )
)


def pad_queries(query: Tensor, cu_seqlens_q: Tensor, *, max_seqlen_q: int, kernel: str | None = None) -> Tensor:
    """`[B, max_seqlen_q, H, D]`, the query's dtype: ragged queries as a rectangle, for kernels that want one (draft extend). No gradient.

    Args:
        query: `[T, H, D]`, float or float8_e4m3fn, the tokens of all requests one after the other.
        cu_seqlens_q: int32 `[B + 1]`; request b owns tokens `cu[b]:cu[b + 1]`. Tokens past `cu[B]` are dropped.
        max_seqlen_q: tokens a request has room for, a host int. What a request has beyond it is dropped; what is left over is 0.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    out: Tensor = torch.ops.attnops.pad_queries.default(
        query, cu_seqlens_q, max_seqlen_q=max_seqlen_q, policy=key_for("pad_queries", kernel)
    )
    return out


def unpad_queries(padded: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int, kernel: str | None = None) -> Tensor:
    """`[num_tokens, H, D]`, dtype of `padded`: the way back from `pad_queries`. No gradient.

    Args:
        padded: `[B, max_seqlen_q, H, D]`, float or float8_e4m3fn; what lies past a request's end is not read.
        cu_seqlens_q: int32 `[B + 1]`, as in `pad_queries`.
        num_tokens: T, a host int. Tokens past `cu[B]`, and those past max_seqlen_q of a request, are 0.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    out: Tensor = torch.ops.attnops.unpad_queries.default(
        padded, cu_seqlens_q, num_tokens=num_tokens, policy=key_for("unpad_queries", kernel)
    )
    return out
