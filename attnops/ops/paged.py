"""Paged attention, one op for decode and extend, and the write into the pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._direct import UNBOUNDED, Direct
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import STATICS, _packed_last, default_scale
from attnops.ops.holes import whole
from attnops.ops.varlen import token_mask
from attnops.problem import Extent, Problem
from attnops.promises import refuse_plan_of_holes
from attnops.reference import data, packed
from attnops.select import key_for


def _check_paged(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    holes: bool = True,
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    check.tensor("query", query, 3, check.QUERY, "[T, Hq, D]")
    _check_pages(query.device, k_pages, v_pages)
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.tensor("output", output, 3, (check.result_dtype(query),), "[T, Hq, Dv]")
    check.same_device(
        query, k_pages=k_pages, v_pages=v_pages, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, mask=mask,
        sinks=sinks, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, output=output, lse=lse, workspace=workspace,
        temperature=temperature,
    )  # fmt: skip
    check.plan(query.device, plan)
    refuse_plan_of_holes(plan, holes)
    check.workspace(workspace)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.heads(query, k_pages, v_pages)
    check.q_scale(query, q_scale)
    check.kv_dtype(query, k_pages, v_pages, k_scale, v_scale)
    check.scales(k_pages.shape[2], q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check.sinks(sinks, query.shape[1])
    if temperature is not None:
        check.tensor("temperature", temperature, 1, (torch.float32,), "[T]")
        check.equal("temperature.shape[0]", temperature.shape[0], query.shape[0], "one factor a query token")
    check.numbers(scale, window_left, window_right, softcap, attention_chunk)
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")
    token_mask(mask, query, page_table.shape[1] * k_pages.shape[1], "max_pages * page_size")
    for dim, size in enumerate((query.shape[0], query.shape[1], v_pages.shape[3])):
        check.equal(f"output.shape[{dim}]", output.shape[dim], size, "[T, Hq, Dv]")
    if lse is not None:
        check.tensor("lse", lse, 2, (torch.float32,), "[T, Hq]")
        for dim, size in enumerate(query.shape[:2]):
            check.equal(f"lse.shape[{dim}]", lse.shape[dim], size, "[T, Hq]")


def _check_pages(device: torch.device, k_pages: Tensor, v_pages: Tensor) -> None:
    check.tensor("k_pages", k_pages, 4, (*check.FLOATS, *check.QUANTISED), "[P, page, Hkv, D]")
    check.tensor("v_pages", v_pages, 4, (*check.FLOATS, *check.QUANTISED), "[P, page, Hkv, Dv]")
    check.equal("v_pages.shape[0]", v_pages.shape[0], k_pages.shape[0], "as many pages as the keys")
    check.equal("v_pages.shape[1]", v_pages.shape[1], k_pages.shape[1], "the keys' page size")
    check.need(k_pages.shape[1] >= 1, "k_pages.shape[1]", k_pages.shape[1], ">= 1 token a page")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _problem_paged(
    query: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    mask: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    plan: Any = None,
    *,
    max_seqlen_q: Any,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    q_scale: Any = None,
    attention_chunk: int = 0,
    padded: bool = True,
    holes: bool = True,
    output: Any = None,
    lse: Any = None,
    workspace: Any = None,
    temperature: Any = None,
) -> Problem:
    page_size = int(k_pages.shape[1])
    return Problem(
        op="paged_attention",
        target=target_of(query),
        dtype=query.dtype,
        kv_dtype=k_pages.dtype,
        q_heads=int(query.shape[1]),
        kv_heads=int(k_pages.shape[2]),
        head_dim=int(query.shape[2]),
        v_head_dim=int(v_pages.shape[3]),
        page_size=page_size,
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap > 0,
        attention_chunk=attention_chunk,
        temperature=temperature is not None,
        sinks=sinks is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        kv_scales=k_scale is not None or v_scale is not None,
        per_head_scales=any(s is not None and s.shape[0] != 1 for s in (k_scale, v_scale)),
        lse=lse is not None,
        plan=check.plan_kind(plan),
        holes=holes,
        padded=padded,
        last_dim_contiguous=_packed_last(query) and _packed_last(k_pages) and _packed_last(v_pages),
        pages_alike=_alike(k_pages, v_pages),
        workspace=check.workspace_bytes(workspace),
        tokens=Extent.of(query.shape[0]),
        batch=Extent.of(page_table.shape[0]),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(page_table.shape[1] * page_size),
    )


def _alike(k_pages: Any, v_pages: Any) -> bool:
    strides = k_pages.stride()
    return strides == v_pages.stride() and all(s % k_pages.shape[3] == 0 for s in strides[:3])


PAGED = define(
    Op(
        name="paged_attention",
        schema="(Tensor query, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, Tensor? mask=None, "
        "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? plan=None, *, SymInt max_seqlen_q, "
        f'{STATICS.replace("causal=False", "causal=True")}, Tensor? q_scale=None, bool padded=True, bool holes=True, str policy="", '
        "Tensor(a!) output, Tensor(b!)? lse=None, Tensor(c!)? workspace=None, Tensor? temperature=None) -> ()",
        check=_check_paged,
        fake=_nothing,
        problem=_problem_paged,
        reference=packed.paged_attention,
        about="attention over pages, decode and extend",
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
    window: tuple[int, int] = UNBOUNDED,
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
        k_pages, v_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`, the query's dtype or float8/int8 with both scales.
        page_table: int32 `[B, max_pages]`; page p of request b holds its keys `[p * page, (p + 1) * page)`. Entries past the
            request's last page may be anything. Keys of an id outside `[0, P)` are not seen, as `attnops.ops.named_pages` says, and
            no page is read that the request's row does not name.
        seq_lens: int32 `[B]`, keys of each request, its new tokens included; at most max_pages * page.
        cu_seqlens_q: int32 `[B + 1]`; request b owns query tokens `cu[b]:cu[b + 1]`. Tokens past `cu[B]` are padding: output 0.
        max_seqlen_q: upper bound in tokens on one request's queries, a host int; 1 says decode.
        mask: `[T, >= max_pages * page]`, bool or additive, e.g. the tree of a speculative verify.
        causal: query i of n of a request with L keys sees keys up to L - n + i.
        scale, window, softcap, sinks, q_scale, k_scale, v_scale, attention_chunk: as in `attention`.
        padded: False promises that every token belongs to a request, `cu_seqlens_q[B] == T`, so that nothing need be spent on others:
            fa3 clears the output first otherwise. Output is undefined where the promise is not kept.
        holes: False promises that every entry within a request's length is a page of the pool, as PagedCache keeps and `named_pages`
            makes them, and that entries past it are pages or negative, so that no call need look. Compiled code looks once a step for
            all layers with the same rules, and an eager call looks each time.
        plan: what a kernel's plan op made for this batch: int32 on the query's device, or int64 on the CPU. Kernels that plan
            otherwise, or not at all, do not read it. A kernel may count in a device plan while it runs and leaves it as it was:
            calls that share one must not run at the same time. A device plan is taken only with `holes=False`.
        output: `[T, Hq, Dv]` to write into, the query's dtype (bfloat16 for a float8 query); allocated when None.
        lse: float32 `[T, Hq]` to write into, or None.
        workspace: uint8 `[bytes]`, scratch for kernels that ask for one, zeroed once by its owner, the caller, who may bring the same
            to every call on one stream; see `attnops.explain(...).workspace_bytes`.
        temperature: float32 `[T]`, one factor a query token: a logit is multiplied by it after the soft cap, before the mask is added and
            the sinks join. None: no factor.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    if output is None:
        output = torch.empty((*query.shape[:-1], v_pages.shape[-1]), dtype=check.result_dtype(query), device=query.device)
    if holes and plan is None and torch.compiler.is_compiling():
        page_table, seq_lens, holes = whole(
            k_pages, page_table, seq_lens, cu_seqlens_q, mask=mask, causal=causal, window=window, attention_chunk=attention_chunk
        )
    _paged(
        (
            query, k_pages, v_pages, page_table, seq_lens, cu_seqlens_q, mask, sinks, k_scale, v_scale, plan, q_scale, output, lse,
            workspace, temperature, max_seqlen_q, scale, causal, window, softcap, attention_chunk, padded, holes, kernel,
        )
    )  # fmt: skip
    return output


def _canonical(
    query: Tensor, k_pages: Any, v_pages: Any, page_table: Any, seq_lens: Any, cu: Any, mask: Any, sinks: Any, k_scale: Any, v_scale: Any,
    plan: Any, q_scale: Any, output: Any, lse: Any, workspace: Any, temperature: Any,
    max_seqlen_q: int, scale: float | None, causal: bool, window: Any, softcap: float, attention_chunk: int, padded: bool,
    holes: bool, kernel: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    left, right = check.window(window)
    if mask is not None:
        check.mask(mask)
    return (query, k_pages, v_pages, page_table, seq_lens, cu, mask, sinks, k_scale, v_scale, plan), {
        "max_seqlen_q": max_seqlen_q, "scale": default_scale(query, scale), "causal": causal, "window_left": left,
        "window_right": right, "softcap": softcap, "attention_chunk": attention_chunk, "q_scale": q_scale, "padded": padded, "holes": holes,
        "policy": key_for("paged_attention", kernel), "output": output, "lse": lse, "workspace": workspace,
        "temperature": temperature,
    }  # fmt: skip


_paged = Direct(PAGED, _canonical)


def _check_write(
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    check.tensor("key", key, 3, check.FLOATS, "[T, Hkv, D]")
    check.tensor("value", value, 3, check.FLOATS, "[T, Hkv, Dv]")
    _check_pages(key.device, k_pages, v_pages)
    check.tensor("slots", slots, 1, check.INDEX, "[T]")
    check.same_device(key, value=value, k_pages=k_pages, v_pages=v_pages, slots=slots, k_scale=k_scale, v_scale=v_scale)
    check.equal("value.shape[0]", value.shape[0], key.shape[0], "as many values as keys")
    check.equal("slots.shape[0]", slots.shape[0], key.shape[0], "one slot a token")
    for field, new, pages in (("key", key, k_pages), ("value", value, v_pages)):
        check.equal(f"{field}.shape[1]", new.shape[1], pages.shape[2], "the pages' heads")
        check.equal(f"{field}.shape[2]", new.shape[2], pages.shape[3], "the pages' head dim")
    check.kv_dtype(key, k_pages, v_pages, k_scale, v_scale)
    check.scales(k_pages.shape[2], k_scale=k_scale, v_scale=v_scale)


def _problem_write(
    key: Any, value: Any, k_pages: Any, v_pages: Any, slots: Any, k_scale: Any = None, v_scale: Any = None, **_: Any
) -> Problem:
    return Problem(
        op="write_kv",
        target=target_of(key),
        dtype=key.dtype,
        kv_dtype=k_pages.dtype,
        kv_heads=int(k_pages.shape[2]),
        head_dim=int(k_pages.shape[3]),
        v_head_dim=int(v_pages.shape[3]),
        page_size=int(k_pages.shape[1]),
        kv_scales=k_scale is not None or v_scale is not None,
        last_dim_contiguous=all(map(_packed_last, (key, value, k_pages, v_pages))),
        tokens=Extent.of(key.shape[0]),
    )


WRITE_KV = define(
    Op(
        name="write_kv",
        schema="(Tensor key, Tensor value, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots, Tensor? k_scale=None, "
        'Tensor? v_scale=None, *, str policy="") -> ()',
        check=_check_write,
        fake=_nothing,
        problem=_problem_write,
        reference=data.write_kv,
        about="write of new keys and values into pages",
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
        k_pages, v_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`, written. The key's dtype, or float8/int8 with both scales.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the token. Distinct among written tokens.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`; what is stored is the key divided by k_scale, saturated.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    _write((key, value, k_pages, v_pages, slots, k_scale, v_scale, kernel))


_write = Direct(WRITE_KV, lambda *given: (given[:-1], {"policy": key_for("write_kv", given[-1])}))
