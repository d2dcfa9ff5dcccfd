"""Packed attention: requests of different lengths one after the other, `[T, H, D]` with cumulative
lengths, and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.op import Op, define
from attnops.core.record import (
    FLOAT32,
    FLOATS,
    INT32,
    KW_ONLY,
    MASK,
    QUERY,
    STORED,
    Result,
    arg,
    record,
)
from attnops.ops import rules, typical
from attnops.ops.attention import reference
from attnops.ops.attention.record import Options, differentiable

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

SIZES = {"batch": "starts - 1", "kv_dtype": "key"}
LEAST = {"starts": ">= 1", **rules.HEADS}


PACKED_MASK = arg("T, >= max_seqlen_k", MASK, default=None, facts=rules.MASK_FACTS)
RESULTS = (
    Result("output", "T, Hq, Dv", rules.result_dtype),
    Result("lse", "T, Hq", when="return_lse"),
)


@record(
    "varlen_attention",
    *RESULTS,
    least=LEAST,
    rules=rules.attention,
    problem=SIZES,
    sums=True,
)
class VarlenAttention(rules.Visible, rules.Lengths):
    """Attention over requests packed one after the other."""

    query: Tensor = arg("T, Hq, D", QUERY, unit_stride=True, holds="queries")
    key: Tensor = arg("N, Hkv, D", STORED, unit_stride=True, holds="keys")
    value: Tensor = arg("N, Hkv, Dv", "key", unit_stride=True, holds="keys")
    cu_seqlens_q: Tensor = arg("starts", INT32, holds="starts_of_queries")
    cu_seqlens_k: Tensor = arg("starts", INT32, holds="starts_of_keys")
    mask: Tensor | None = PACKED_MASK
    sinks: Tensor | None = rules.SINK_LOGITS
    k_scale: Tensor | None = rules.KEY_SCALE
    v_scale: Tensor | None = rules.KEY_SCALE
    _: KW_ONLY
    return_lse: bool = rules.RETURN_LSE
    q_scale: Tensor | None = rules.QUERY_SCALE
    padded: bool = rules.PADDED


VARLEN = define(
    Op(
        VarlenAttention,
        reference.varlen_attention,
        differentiable,
        flops="2 * T * Hq * max_seqlen_k * (D + Dv)",
        about="packed attention over ragged requests",
        typical=(typical.PREFILL,),
        shown=(*typical.SHOWN, "heads 192/128"),
        per_layer=True,
    )
)


GRADIENTS = rules.gradients("query", "key", "value", "sinks")


@record(
    "varlen_attention_backward",
    *GRADIENTS,
    least=LEAST,
    rules=rules.attention,
    problem=SIZES,
    sums=True,
)
class VarlenAttentionBackward(rules.Visible, rules.Lengths):
    """The gradient of packed attention."""

    grad_output: Tensor = arg("T, Hq, Dv", FLOATS, facts=rules.GRADIENT)
    grad_lse: Tensor | None = arg("T, Hq", FLOAT32, facts=rules.LSE_GRAD)
    query: Tensor = arg("T, Hq, D", QUERY, unit_stride=True, holds="queries")
    key: Tensor = arg("N, Hkv, D", STORED, unit_stride=True, holds="keys")
    value: Tensor = arg("N, Hkv, Dv", "key", unit_stride=True, holds="keys")
    output: Tensor = arg("T, Hq, Dv", FLOATS)
    lse: Tensor = arg("T, Hq", FLOAT32)
    cu_seqlens_q: Tensor = arg("starts", INT32, holds="starts_of_queries")
    cu_seqlens_k: Tensor = arg("starts", INT32, holds="starts_of_keys")
    mask: Tensor | None = PACKED_MASK
    sinks: Tensor | None = rules.SINK_LOGITS
    _: KW_ONLY
    padded: bool = rules.PADDED


BACKWARD = define(
    Op(
        VarlenAttentionBackward,
        reference.varlen_attention_backward,
        once=True,
        flops="2 * T * Hq * max_seqlen_k * (3 * D + 2 * Dv)",
        about="gradient of packed attention",
        typical=({**typical.PREFILL, "grad": True},),
        shown=("float32", "equal bits", "heads 192/128"),
    )
)


class _Packed(Options, total=False):
    max_seqlen_q: Required[int]
    max_seqlen_k: Required[int]
    padded: bool


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **more: Unpack[_Packed],
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **more: Unpack[_Packed],
) -> tuple[Tensor, Tensor]: ...
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
    window: tuple[int, int] = rules.UNBOUNDED,
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
    """Attention over requests packed one after the other. Differentiable in query, key, value and
    sinks.

    Args:
        query: `[T, Hq, D]`. key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`. dtypes as in `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]`, starting at 0; request b owns tokens
            `cu[b]:cu[b + 1]`. Rows past `cu[B]` are padding and may hold anything; the output of
            such a query is 0.
        max_seqlen_q, max_seqlen_k: upper bounds in tokens on the requests' lengths, host ints.
        mask: `[T, >= max_seqlen_k]`, bool or additive as in `attention`; column j is key j of the
            token's request.
        padded: False promises that there are no padding rows, which saves fa3 a copy of the value
            and a clear of the output. The output is undefined where the promise is broken.
        scale, causal, window, softcap, sinks, q_scale, k_scale, v_scale, attention_chunk, kernel:
            as in `attention`, by request.

    Returns:
        output `[T, Hq, Dv]`, the query's dtype (bfloat16 for float8); with return_lse also lse
        `[T, Hq]` float32, natural log.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel,
            NoKernel: `kernel` cannot run.
    """
    left, right = eager_cache.window(window)
    attention_chunk = eager_cache.chunk(attention_chunk)
    if mask is not None:
        eager_cache.mask(mask)
    output, lse = VARLEN(
        VarlenAttention(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            mask,
            sinks,
            k_scale,
            v_scale,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            scale=eager_cache.default_scale(query, scale),
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            attention_chunk=attention_chunk,
            return_lse=return_lse,
            q_scale=q_scale,
            padded=padded,
            policy=key_for("varlen_attention", kernel),
        )
    )
    return (output, lse) if return_lse else output
