"""Packed attention: requests of different lengths one after the other, `[T, H, D]` with cumulative lengths, and its gradient."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from attnops.errors import NoGradient, fail
from attnops.ops import _check as check
from attnops.ops._direct import UNBOUNDED, Direct, gradient
from attnops.ops._op import Op, applied, below, define, target_of
from attnops.ops.dense import STATICS, _packed_last, default_scale
from attnops.problem import Extent, Problem
from attnops.reference import packed as reference
from attnops.select import key_for

MAXIMA = "SymInt max_seqlen_q, SymInt max_seqlen_k"


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
) -> None:
    check.tensor("query", query, 3, check.QUERY, "[T, Hq, D]")
    check.tensor("key", key, 3, (*check.FLOATS, *check.QUANTISED), "[N, Hkv, D]")
    check.tensor("value", value, 3, (*check.FLOATS, *check.QUANTISED), "[N, Hkv, Dv]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.tensor("cu_seqlens_k", cu_seqlens_k, 1, (torch.int32,), "[B + 1]")
    check.same_device(
        query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, mask=mask, sinks=sinks,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    check.equal("value.shape[0]", value.shape[0], key.shape[0], "as many values as keys")
    check.need(cu_seqlens_q.shape[0] >= 1, "cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], ">= 1")
    check.equal("cu_seqlens_k.shape[0]", cu_seqlens_k.shape[0], cu_seqlens_q.shape[0], "as many requests as the queries")
    check.heads(query, key, value)
    check.q_scale(query, q_scale)
    check.kv_dtype(query, key, value, k_scale, v_scale)
    check.scales(key.shape[1], q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check.sinks(sinks, query.shape[1])
    check.numbers(scale, window_left, window_right, softcap, attention_chunk)
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")
    check.need(max_seqlen_k >= 0, "max_seqlen_k", max_seqlen_k, ">= 0")
    token_mask(mask, query, max_seqlen_k, "max_seqlen_k")


def token_mask(mask: Tensor | None, query: Tensor, keys: Any, meaning: str) -> None:
    """A packed mask is `[T, >= keys]`."""
    if mask is not None:
        check.tensor("mask", mask, 2, (torch.bool, *check.FLOATS), "[T, K]")
        check.equal("mask.shape[0]", mask.shape[0], query.shape[0], "the query's tokens")
        check.need(mask.shape[1] >= keys, "mask.shape[1]", mask.shape[1], f">= {keys} ({meaning})")


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, return_lse: bool = False, **__: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:2], value.shape[2]), dtype=check.result_dtype(query))
    return output, query.new_empty(query.shape[:2] if return_lse else (0,), dtype=torch.float32)


def _problem(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    mask: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Any = None,
    attention_chunk: int = 0,
    padded: bool = True,
    **more: Any,
) -> Problem:
    return Problem(
        op=more.pop("op", "varlen_attention"),
        target=target_of(query),
        dtype=query.dtype,
        kv_dtype=key.dtype,
        q_heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        head_dim=int(query.shape[2]),
        v_head_dim=int(value.shape[2]),
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap > 0,
        attention_chunk=attention_chunk,
        sinks=sinks is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        kv_scales=k_scale is not None or v_scale is not None,
        lse=return_lse,
        padded=padded,
        last_dim_contiguous=_packed_last(query) and _packed_last(key) and _packed_last(value),
        tokens=Extent.of(query.shape[0]),
        batch=Extent.of(cu_seqlens_q.shape[0] - 1),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(max_seqlen_k),
        **more,
    )


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, overload: Any, statics: dict[str, Any], return_lse: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        output, lse = below(overload, *tensors, **statics, return_lse=True)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.overload, ctx.statics = overload, statics
        ctx.set_materialize_grads(False)
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, cu_q, cu_k, mask, sinks, _, _, output, lse = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        gq, gk, gv, gs = gradient(
            BACKWARD, ctx.overload, grad_output, grad_lse, query, key, value, output, lse, cu_q, cu_k, mask, sinks, **ctx.statics
        )
        wants = ctx.needs_input_grad[3:]
        found = (gq, gk, gv, None, None, None, gs)
        return (None, None, None, *(g if w else None for g, w in zip(found, wants, strict=False)), None, None)


def _autograd(overload: Any, *args: Any, return_lse: bool = False, q_scale: Tensor | None = None, **statics: Any) -> tuple[Tensor, Tensor]:
    tensors = (*args, *[None] * (9 - len(args)))
    if q_scale is not None or tensors[7] is not None or tensors[8] is not None:
        fail(NoGradient, "varlen_attention with q_scale, k_scale or v_scale", ("query, key or value",))
    if tensors[5] is not None and tensors[5].requires_grad:
        fail(NoGradient, "varlen_attention", ("mask",))
    output, lse = applied(_Varlen, overload, statics, return_lse, *tensors)
    return output, lse if return_lse else lse.new_empty(0)


VARLEN = define(
    Op(
        name="varlen_attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? mask=None, Tensor? sinks=None, "
        f"Tensor? k_scale=None, Tensor? v_scale=None, *, {MAXIMA}, {STATICS}, bool return_lse=False, "
        'Tensor? q_scale=None, bool padded=True, str policy="") -> (Tensor output, Tensor lse)',
        check=_check,
        fake=_fake,
        problem=_problem,
        reference=reference.varlen_attention,
        autograd=_autograd,
        about="packed attention over ragged requests",
    )
)


def _forward_args(grad_output: Any, grad_lse: Any, query: Any, key: Any, value: Any, output: Any, lse: Any, *rest: Any) -> tuple[Any, ...]:
    return query, key, value, *rest


def _check_backward(*args: Any, **statics: Any) -> None:
    _check(*_forward_args(*args), **statics)
    grad_output, grad_lse, query, _, value, output, lse = args[:7]
    for field, got in (("grad_output", grad_output), ("output", output)):
        check.tensor(field, got, 3, check.FLOATS, "[T, Hq, Dv]")
        for dim, size in enumerate((*query.shape[:2], value.shape[2])):
            check.equal(f"{field}.shape[{dim}]", got.shape[dim], size, "as the forward's output")
    for field, got in (("grad_lse", grad_lse), ("lse", lse)):
        if got is not None:
            check.tensor(field, got, 2, (torch.float32,), "[T, Hq]")
            for dim, size in enumerate(query.shape[:2]):
                check.equal(f"{field}.shape[{dim}]", got.shape[dim], size, "as the forward's lse")


def _fake_backward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    query, key, value, *rest = args[2:]
    sinks = rest[5] if len(rest) > 5 else None
    grad_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), grad_sinks


def _problem_backward(*args: Any, **statics: Any) -> Problem:
    return _problem(*_forward_args(*args), **statics, op="varlen_attention_backward", grad=True, lse_grad=args[1] is not None)


BACKWARD = define(
    Op(
        name="varlen_attention_backward",
        schema="(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
        f"Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? mask=None, Tensor? sinks=None, *, {MAXIMA}, {STATICS}, bool padded=True, "
        'str policy="") '
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
        check=_check_backward,
        fake=_fake_backward,
        problem=_problem_backward,
        reference=reference.varlen_attention_backward,
        once=True,
        about="gradient of packed attention",
    )
)


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int, max_seqlen_k: int,
    return_lse: Literal[False] = False, scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, mask: Tensor | None = None, sinks: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, q_scale: Tensor | None = None, attention_chunk: int = 0, padded: bool = True,
    kernel: str | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int, max_seqlen_k: int,
    return_lse: Literal[True], scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, mask: Tensor | None = None, sinks: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, q_scale: Tensor | None = None, attention_chunk: int = 0, padded: bool = True,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over requests packed one after the other. Differentiable in query, key, value and sinks.

    Args:
        query: `[T, Hq, D]`. key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`. dtypes as in `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]`, starting at 0; request b owns tokens `cu[b]:cu[b + 1]`.
            Tokens past `cu_seqlens_q[B]` are padding: their output is 0. They, and keys past `cu_seqlens_k[B]`, may hold anything.
        max_seqlen_q, max_seqlen_k: upper bounds in tokens on the requests' lengths, host ints.
        mask: `[T, >= max_seqlen_k]`, bool or additive; column j is key j of the token's request.
        padded: False promises that every token belongs to a request, `cu_seqlens_q[B] == T` and `cu_seqlens_k[B] == N`, so that nothing
            need be spent on others: fa3 copies the value and clears the output otherwise. Output is undefined where it is not kept.
        scale, causal, window, softcap, sinks, q_scale, k_scale, v_scale, attention_chunk, kernel: as in `attention`; causal is
            bottom-right per request.

    Returns:
        output `[T, Hq, Dv]`, the query's dtype (bfloat16 for a float8 query); with return_lse also lse `[T, Hq]` float32, natural log.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel, NoKernel: `kernel` cannot run.
    """
    output, lse = _packed(
        (
            query, key, value, cu_seqlens_q, cu_seqlens_k, mask, sinks, k_scale, v_scale, q_scale,
            max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, attention_chunk, return_lse, padded, kernel,
        )
    )  # fmt: skip
    return (output, lse) if return_lse else output


def _canonical(
    query: Tensor, key: Any, value: Any, cu_q: Any, cu_k: Any, mask: Any, sinks: Any, k_scale: Any, v_scale: Any, q_scale: Any,
    max_seqlen_q: int, max_seqlen_k: int, scale: float | None, causal: bool, window: Any, softcap: float, attention_chunk: int,
    return_lse: bool, padded: bool, kernel: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    left, right = check.window(window)
    if mask is not None:
        check.mask(mask)
    return (query, key, value, cu_q, cu_k, mask, sinks, k_scale, v_scale), {
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "scale": default_scale(query, scale), "causal": causal,
        "window_left": left, "window_right": right, "softcap": softcap, "attention_chunk": attention_chunk,
        "return_lse": return_lse, "q_scale": q_scale, "padded": padded, "policy": key_for("varlen_attention", kernel),
    }  # fmt: skip


_packed = Direct(VARLEN, _canonical)
