"""Paged attention, one op for decode and extend, the write into the pages, and copies between
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.problem import Extent
from attnops.core.record import (
    FLOATS,
    INDEX,
    INT32,
    KW_ONLY,
    QUERY,
    STORED,
    Call,
    Sizes,
    arg,
    need,
    record,
)
from attnops.core.tensors import Rules
from attnops.ops import rules, typical
from attnops.ops.metadata.record import whole, with_named_pages
from attnops.ops.pages import reference

LEAST = {"page": ">= 1 token a page"}
PAGED_LEAST = {**LEAST, **rules.HEADS}


def _rules(call: Any, sizes: Sizes) -> None:
    rules.attention(call, sizes)
    rules.plan(call)


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    strides = call.k_pages.stride()
    return {
        "pages_alike": strides == call.v_pages.stride()
        and all(s % sizes["D"] == 0 for s in strides[:3])
    }


@record(
    "paged_attention",
    least=PAGED_LEAST,
    rules=_rules,
    facts=_facts,
    problem={"context": "max_pages * page", "kv_dtype": "k_pages"},
    sums=True,
)
class PagedAttention(rules.Visible, rules.Queries):
    """Attention of new tokens over pages that already hold their keys and values."""

    query: Tensor = arg("T, Hq, D", QUERY, unit_stride=True, holds="queries")
    k_pages: Tensor = arg("P, page, Hkv, D", STORED, unit_stride=True, holds="pages")
    v_pages: Tensor = arg("P, page, Hkv, Dv", "k_pages", unit_stride=True, holds="pages")
    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    seq_lens: Tensor = arg("B", INT32, holds="lengths_of_keys")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    mask: Tensor | None = rules.MASK_OF_PAGES
    sinks: Tensor | None = rules.SINK_LOGITS
    k_scale: Tensor | None = rules.KEY_SCALE
    v_scale: Tensor | None = rules.KEY_SCALE
    plan: Tensor | None = rules.PLAN
    _: KW_ONLY
    causal: bool = arg(default=True, facts=rules.CAUSAL)
    q_scale: Tensor | None = rules.QUERY_SCALE
    padded: bool = rules.PADDED
    holes: bool = arg(default=True, hint=True, facts=rules.HOLES, without=with_named_pages)
    output: Tensor = arg("T, Hq, Dv", rules.result_dtypes, written=True)
    lse: Tensor | None = rules.WRITTEN_LSE
    workspace: Tensor | None = rules.WORKSPACE
    temperature: Tensor | None = rules.TEMPERATURE


PAGED = define(
    Op(
        PagedAttention,
        reference.paged_attention,
        flops="2 * T * Hq * max_pages * page * (D + Dv)",
        about="attention over pages, decode and extend",
        shown=(*typical.SHOWN, "decode"),
        typical=tuple(
            {**typical.PREFILL, **more, **plan, "page_size": page}
            for plan in typical.PLANS
            for page in (64, 16, 128)
            for more in ({}, typical.DECODE, {**typical.DECODE, **typical.LATENT})
        ),
        per_layer=True,
    )
)


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = rules.UNBOUNDED,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    holes: bool = True,
    temperature: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attention of new tokens over pages that already hold their keys and values. No gradient.

    Args:
        query: `[T, Hq, D]`, the new tokens of all requests one after the other.
        k_pages, v_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`, the query's dtype or
            float8/int8 with both scales.
        page_table: int32 `[B, max_pages]`; page p of request b holds its keys
            `[p * page, (p + 1) * page)`. Entries past the request's last page may be anything. Keys
            of an id outside `[0, P)` are not seen: see `attnops.ops.named_pages`.
        seq_lens: int32 `[B]`, keys of each request, its new tokens included; at most max_pages *
            page.
        cu_seqlens_q: int32 `[B + 1]`; request b owns query tokens `cu[b]:cu[b + 1]`. Tokens past
            `cu[B]` are padding: output 0.
        max_seqlen_q: upper bound in tokens on one request's queries, a host int; 1 says decode.
        mask: `[T, >= max_pages * page]`, bool or additive as in `attention`, e.g. the tree of a
            speculative verify.
        causal: query i of n of a request with L keys sees keys up to L - n + i.
        scale, window, softcap, sinks, q_scale, k_scale, v_scale, attention_chunk: as in
            `attention`.
        padded: False promises `cu_seqlens_q[B] == T`, which saves fa3 a clear of the output. The
            output is undefined where it is broken.
        holes: False promises that every entry within a request's length is a page of the pool, and
            that entries past it are pages or negative, as PagedCache and `named_pages` make them.
            Otherwise compiled code checks once a step for all layers with the same rules, and an
            eager call each time.
        plan: the result of `plan_paged_attention` for this batch, int64 on the CPU. Kernels that
            need none ignore it. A device plan, int32 on the query's device and with `holes=False`
            only, is read by third-party kernels alone.
        output: `[T, Hq, Dv]` to write into, the query's dtype (bfloat16 for a float8 query);
            allocated when None.
        lse: float32 `[T, Hq]` to write into, or None.
        workspace: uint8 `[bytes]`, scratch for kernels that ask for it
            (`attnops.explain(...).workspace_bytes`), zeroed once by the caller, who may pass the
            same to every call on one stream.
        temperature: float32 `[T]`, a factor on each query token's logits after the soft cap, before
            mask and sinks. None: no factor.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    left, right = eager_cache.window(window)
    attention_chunk = eager_cache.chunk(attention_chunk)
    if mask is not None:
        eager_cache.mask(mask)
    if output is None:
        eager_cache.tensors(query=query, v_pages=v_pages)
        dtype = query.dtype if query.dtype in FLOATS else torch.bfloat16
        output = torch.empty(
            (*query.shape[:-1], *v_pages.shape[-1:]), dtype=dtype, device=query.device
        )
    if holes and plan is None and torch.compiler.is_compiling():
        seen = Rules(0.0, causal, left, right, chunk=attention_chunk)
        page_table, seq_lens, holes = whole(k_pages, page_table, seq_lens, cu_seqlens_q, mask, seen)
    PAGED(
        PagedAttention(
            query,
            k_pages,
            v_pages,
            page_table,
            seq_lens,
            cu_seqlens_q,
            mask,
            sinks,
            k_scale,
            v_scale,
            plan,
            max_seqlen_q=max_seqlen_q,
            scale=eager_cache.default_scale(query, scale),
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            attention_chunk=attention_chunk,
            q_scale=q_scale,
            padded=padded,
            holes=holes,
            policy=key_for("paged_attention", kernel),
            output=output,
            lse=lse,
            workspace=workspace,
            temperature=temperature,
        )
    )
    return output


def _write_rules(call: Any, sizes: Sizes) -> None:
    rules.kv_scales(call.key, "k_pages", call.k_pages, call.k_scale, call.v_scale, of="key")


@record("write_kv", least=LEAST, rules=_write_rules, problem={"kv_dtype": "k_pages"})
class WriteKV(Call):
    """The write of new keys and values into pages."""

    key: Tensor = arg("T, Hkv, D", FLOATS, unit_stride=True, holds="new_keys")
    value: Tensor = arg("T, Hkv, Dv", FLOATS, unit_stride=True, holds="new_keys")
    k_pages: Tensor = arg("P, page, Hkv, D", STORED, written=True, unit_stride=True, holds="pages")
    v_pages: Tensor = arg(
        "P, page, Hkv, Dv", "k_pages", written=True, unit_stride=True, holds="pages"
    )
    slots: Tensor = arg("T", INDEX, holds="slots_of_tokens")
    k_scale: Tensor | None = rules.KEY_SCALE
    v_scale: Tensor | None = rules.KEY_SCALE


WRITE_KV = define(
    Op(
        WriteKV,
        reference.write_kv,
        about="write of new keys and values into pages",
        typical=({**typical.PAGES, **typical.NEW},),
        shown=typical.SHOWN[:2],
    )
)


def write_kv(
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """Write new keys and values into their slots, in place. No gradient.

    Args:
        key, value: `[T, Hkv, D]`, `[T, Hkv, Dv]`, float.
        k_pages, v_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`, written. The key's dtype, or
            float8/int8 with both scales.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the
            token. Distinct among written tokens.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`; the op divides key and value by them, saturates
            and rounds.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires
            grad in grad mode.
    """
    WRITE_KV(
        WriteKV(
            key,
            value,
            k_pages,
            v_pages,
            slots,
            k_scale,
            v_scale,
            policy=key_for("write_kv", kernel),
        )
    )


PAGES = (*STORED, torch.uint8)
"""The dtypes of pages; those of packed latents are uint8."""


def _copy_rules(call: Any, sizes: Sizes) -> None:
    k, v = call.k_pages, call.v_pages
    if k.dim() not in (4, 5) or (v is not None and v.dim() != k.dim()):
        field, given = ("k_pages", k) if k.dim() not in (4, 5) else ("v_pages", v)
        fail(
            InvalidInput,
            field,
            f"shape {tuple(given.shape)}",
            "[L, P, page, Hkv, D] or [L, P, page, D], as the keys",
        )
    if v is not None and k.dim() == 5:
        need(
            v.shape[3] == k.shape[3],
            "v_pages.shape[3]",
            v.shape[3],
            f"{k.shape[3]} (Hkv, as k_pages.shape[3])",
        )


def _copy_facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    k, v = call.k_pages, call.v_pages
    return {
        "kv_heads": int(k.shape[3]) if k.dim() == 5 else 1,
        "head_dim": int(k.shape[-1]),
        "v_head_dim": 0 if v is None else int(v.shape[-1]),
    }


@record("copy_kv", least=LEAST, rules=_copy_rules, facts=_copy_facts, problem={"tokens": "N"})
class CopyKV(Call):
    """The copy of keys and values between slots, in all layers."""

    k_pages: Tensor = arg("L, P, page, ...", PAGES, written=True, unit_stride=True, holds="pages")
    v_pages: Tensor | None = arg(
        "L, P, page, ...", "k_pages", written=True, unit_stride=True, holds="pages"
    )
    source: Tensor = arg("N", INDEX)
    target: Tensor = arg("N", INDEX)
    _: KW_ONLY
    group: int = arg(default=0, least=0, hint=True)


COPY_KV = define(
    Op(
        CopyKV,
        reference.copy_kv,
        about="copy of keys and values between slots, in all layers",
        typical=({**typical.PAGES, "tokens": Extent.of(64)},),
    )
)


def copy_kv(
    k_pages: Tensor,
    v_pages: Tensor | None,
    source: Tensor,
    target: Tensor,
    *,
    group: int = 0,
    kernel: str | None = None,
) -> None:
    """Copy the contents of slots into other slots, in place, in all layers (accepted drafts that
    move up, prefixes). No gradient.

    Everything is read before anything is written, so that a slot may be source and target at once.

    Args:
        k_pages, v_pages: `[L, P, page, Hkv, D]`, `[L, P, page, Hkv, Dv]`, one dtype, written: the
            pages of L layers in one tensor each. Latents are `[L, P, page, D]` and v_pages None.
            Pages of one layer are `k_pages[None]`.
        source, target: int32 or int64 `[N]`, slots `page_id * page_size + offset`. Entry i copies
            `source[i]` to `target[i]`; a negative number in either skips it. Targets are distinct
            among the entries that are copied.
        group: a promise, which saves launches: each `group` entries in turn, e.g. those of one
            request, read no slot that entries of another group write. 0: no promise.
        kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires
            grad. UnknownKernel, NoKernel.
    """
    policy = key_for("copy_kv", kernel)
    COPY_KV(CopyKV(k_pages, v_pages, source, target, group=group, policy=policy))
