"""Ops that move rows: a copy of keys and values between slots of all layers, and ragged queries to a rectangle and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INDEX, INT32, KW_ONLY, QUERY, STORED, Call, Result, Sizes, arg, need, record
from attnops.errors import InvalidInput, fail
from attnops.ops.op import Op, define
from attnops.reference import moves
from attnops.select import key_for

PAGES = (*STORED, torch.uint8)
"""What pages may hold; uint8 is that of packed latents."""


def _rules(call: Any, sizes: Sizes) -> None:
    k, v = call.k_pages, call.v_pages
    need(sizes["page"] >= 1, "k_pages.shape[2]", sizes["page"], ">= 1 token a page")
    if k.dim() not in (4, 5) or (v is not None and v.dim() != k.dim()):
        field, given = ("k_pages", k) if k.dim() not in (4, 5) else ("v_pages", v)
        fail(InvalidInput, field, f"shape {tuple(given.shape)}", "[L, P, page, Hkv, D] or [L, P, page, D], as the keys")
    if v is not None and k.dim() == 5:
        need(v.shape[3] == k.shape[3], "v_pages.shape[3]", v.shape[3], f"{k.shape[3]} (Hkv, as k_pages.shape[3])")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    k, v = call.k_pages, call.v_pages
    return {
        "kv_heads": int(k.shape[3]) if k.dim() == 5 else 1,
        "head_dim": int(k.shape[-1]),
        "v_head_dim": 0 if v is None else int(v.shape[-1]),
    }


@record("copy_kv", rules=_rules, facts=_facts, problem={"tokens": "N"})
class CopyKV(Call):
    """The copy of keys and values between slots, in all layers."""

    k_pages: Tensor = arg("L, P, page, ...", PAGES, written=True, unit_stride=True)
    v_pages: Tensor | None = arg("L, P, page, ...", "k_pages", written=True, unit_stride=True)
    source: Tensor = arg("N", INDEX)
    target: Tensor = arg("N", INDEX)
    _: KW_ONLY
    policy: str = ""


COPY_KV = define(Op(CopyKV, moves.copy_kv, about="copy of keys and values between slots, in all layers"))


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
    COPY_KV(CopyKV(k_pages, v_pages, source, target, policy=key_for("copy_kv", kernel)))


def _starts(call: Any, sizes: Sizes) -> None:
    need(sizes["starts"] >= 1, "cu_seqlens_q.shape[0]", sizes["starts"], ">= 1")


@record(
    "pad_queries",
    Result("", "starts - 1, max_seqlen_q, H, D", "query"),
    rules=_starts,
    problem={"q_heads": "H", "batch": "starts - 1"},
)
class PadQueries(Call):
    """Ragged queries to a rectangle."""

    query: Tensor = arg("T, H, D", QUERY, unit_stride=True)
    cu_seqlens_q: Tensor = arg("starts", INT32)
    _: KW_ONLY
    max_seqlen_q: int = arg(least=0, symbolic=True)
    policy: str = ""


PAD = define(Op(PadQueries, moves.pad_queries, about="ragged queries to a rectangle"))


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
    out: Tensor = PAD(PadQueries(query, cu_seqlens_q, max_seqlen_q=max_seqlen_q, policy=key_for("pad_queries", kernel)))
    return out


@record("unpad_queries", Result("", "num_tokens, H, D", "padded"), problem={"q_heads": "H", "tokens": "num_tokens", "queries": "S"})
class UnpadQueries(Call):
    """A rectangle of queries or results back to ragged tokens."""

    padded: Tensor = arg("B, S, H, D", QUERY, unit_stride=True)
    cu_seqlens_q: Tensor = arg("B + 1", INT32)
    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True)
    policy: str = ""


UNPAD = define(Op(UnpadQueries, moves.unpad_queries, about="a rectangle of queries or results back to ragged tokens"))


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
    out: Tensor = UNPAD(UnpadQueries(padded, cu_seqlens_q, num_tokens=num_tokens, policy=key_for("unpad_queries", kernel)))
    return out
