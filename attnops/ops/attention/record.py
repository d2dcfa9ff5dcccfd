"""Dense attention and its gradient, and the autograd of attention: the gradient of the op `x` is
the op `x_backward`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, NoGradient, fail
from attnops.core.op import OPS, Op, applied, below, blank, define, gradients, tensors_of
from attnops.core.problem import surely
from attnops.core.record import (
    FLOAT32,
    FLOATS,
    KW_ONLY,
    MASK,
    QUERY,
    STORED,
    Fact,
    Result,
    Sizes,
    arg,
    changed,
    record,
)
from attnops.ops import rules, typical
from attnops.ops.attention import by_sdpa, reference
from attnops.ops.attention.bias import as_rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

SIZES = {"tokens": "B * S", "queries": "S", "context": "K", "kv_dtype": "key"}


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"sizes_equal": surely(sizes["S"] == sizes["K"])}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: str, run: Any, call: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = changed(call, **dict(zip(OPS[op].tensors, tensors, strict=True)))
        output, lse = below(run, changed(given, return_lse=True))
        ctx.save_for_backward(*tensors, output, lse)
        ctx.op, ctx.call = op, call
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        op = OPS[ctx.op]
        wants = dict(zip(op.tensors, ctx.needs_input_grad[3:], strict=True))
        given = dict(zip(op.names, ctx.call, strict=True)) | dict(
            zip(op.tensors, tensors, strict=True)
        )
        given |= {"output": output, "lse": lse, "grad_lse": grad_lse, "mask_grad": wants["mask"]}
        given["grad_output"] = torch.zeros_like(output) if grad_output is None else grad_output
        return None, None, None, *gradients(ctx.op, given, wants)


def differentiable(run: Any, call: Any) -> tuple[Tensor, Tensor]:
    """(output, lse) of a call whose gradient is asked for. Raises NoGradient where the gradient
    does not know an argument."""
    op = call.spec.op
    if call.q_scale is not None or call.k_scale is not None or call.v_scale is not None:
        fail(NoGradient, f"{op} with q_scale, k_scale or v_scale", ("query, key or value",))
    if (
        call.mask is not None
        and call.mask.requires_grad
        and "grad_mask" not in OPS[f"{op}_backward"].results
    ):
        fail(NoGradient, op, ("mask",))
    output, lse = applied(_Attention, op, run, blank(call), *tensors_of(call))
    return output, lse if call.return_lse else lse.new_empty(0)


DENSE_MASK = arg("1 | B, 1 | Hq, 1 | S, K", MASK, default=None, facts=rules.MASK_FACTS)
RESULTS = (
    Result("output", "B, S, Hq, Dv", rules.result_dtype),
    Result("lse", "B, S, Hq", when="return_lse"),
)


@record(
    "attention",
    *RESULTS,
    least=rules.HEADS,
    rules=rules.attention,
    facts=_facts,
    problem=SIZES,
    grows="K",
    sums=True,
)
class Attention(rules.Visible):
    """Attention over a rectangular batch."""

    query: Tensor = arg("B, S, Hq, D", QUERY, unit_stride=True, holds="queries")
    key: Tensor = arg("B, K, Hkv, D", STORED, unit_stride=True, holds="keys")
    value: Tensor = arg("B, K, Hkv, Dv", "key", unit_stride=True, holds="keys")
    mask: Tensor | None = DENSE_MASK
    sinks: Tensor | None = rules.SINK_LOGITS
    k_scale: Tensor | None = rules.KEY_SCALE
    v_scale: Tensor | None = rules.KEY_SCALE
    kv_start: Tensor | None = rules.FIRST_KEYS
    kv_end: Tensor | None = rules.ENDS_OF_KEYS
    _: KW_ONLY
    return_lse: bool = rules.RETURN_LSE
    q_scale: Tensor | None = rules.QUERY_SCALE


ATTENTION = define(
    Op(
        Attention,
        reference.attention,
        differentiable,
        flops="2 * B * Hq * S * K * (D + Dv)",
        about="dense attention",
        typical=({**typical.PREFILL, "sizes_equal": True}, {**typical.PREFILL, **typical.DECODE}),
        shown=(*typical.SHOWN, "heads 192/128"),
        per_layer=True,
        by_torch=by_sdpa.attention,
    )
)


GRADIENTS = rules.gradients("query", "key", "value", "mask", "sinks")


@record(
    "attention_backward",
    *GRADIENTS,
    least=rules.HEADS,
    rules=rules.attention,
    facts=_facts,
    problem=SIZES,
    sums=True,
)
class AttentionBackward(rules.Visible):
    """The gradient of dense attention."""

    grad_output: Tensor = arg("B, S, Hq, Dv", FLOATS, facts=rules.GRADIENT)
    grad_lse: Tensor | None = arg("B, S, Hq", FLOAT32, facts=rules.LSE_GRAD)
    query: Tensor = arg("B, S, Hq, D", QUERY, unit_stride=True, holds="queries")
    key: Tensor = arg("B, K, Hkv, D", STORED, unit_stride=True, holds="keys")
    value: Tensor = arg("B, K, Hkv, Dv", "key", unit_stride=True, holds="keys")
    output: Tensor = arg("B, S, Hq, Dv", FLOATS)
    lse: Tensor = arg("B, S, Hq", FLOAT32)
    mask: Tensor | None = DENSE_MASK
    sinks: Tensor | None = rules.SINK_LOGITS
    kv_start: Tensor | None = rules.FIRST_KEYS
    kv_end: Tensor | None = rules.ENDS_OF_KEYS
    _: KW_ONLY
    mask_grad: bool = arg(default=False, facts=(Fact("mask_grad"),))


BACKWARD = define(
    Op(
        AttentionBackward,
        reference.attention_backward,
        once=True,
        flops="2 * B * Hq * S * K * (3 * D + 2 * Dv)",
        about="gradient of dense attention",
        typical=({**typical.PREFILL, "sizes_equal": True, "grad": True},),
        shown=("float32", "equal bits", "heads 192/128"),
    )
)


class Options(TypedDict, total=False):
    """The options of `attention` and `varlen_attention`, for type checkers."""

    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    mask: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_scale: Tensor | None
    attention_chunk: int
    kernel: str | None


class _Ranged(Options, total=False):
    kv_start: Tensor | None
    kv_end: Tensor | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    **more: Unpack[_Ranged],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **more: Unpack[_Ranged]
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = rules.UNBOUNDED,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a rectangular batch. Differentiable in query, key, value, sinks and an
    additive mask.

    Args:
        query: `[B, S, Hq, D]`, float16, bfloat16, float32 or float64, or float8_e4m3fn with
            q_scale. Not scaled beforehand.
        key, value: `[B, K, Hkv, D]`, `[B, K, Hkv, Dv]`, the query's dtype, or float8/int8 with both
            scales. Hq is a multiple of Hkv.
        scale: factor on q.k; default `1 / sqrt(D)`.
        causal: query i sees keys up to its own position. The last query is at the last visible key
            (bottom-right).
        window: (left, right) keys visible besides the query's own position; -1 is unbounded, and so
            is 2**30 or more.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 is off.
        mask: `[B or 1, Hq or 1, S or 1, K]`, leading dims optional; bool (True: visible) or float
            (added after the soft cap); or `causal_lower_right(S, K)` or `causal_upper_left(S, K)`
            of torch.nn.attention.bias. -inf hides a key. So does a number as low as -1e9 or
            finfo.min beside visible keys. A query all of whose logits are finite and below -1e6 has
            finite results and gradients that are not specified; it changes no other query's.
        sinks: `[Hq]` one logit a query head, part of the softmax denominator only. One of +inf
            takes all of the weight: its head gives output 0 and lse +inf. Kernels of other packages
            may give NaN there.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`; the stored key times k_scale is the key.
        q_scale: float32 `[1]` or `[Hkv]`, one for the query heads of each key head. A float8 query
            needs it, has no gradient, and wants a quantised key. A kernel may round the weights to
            the query's dtype.
        attention_chunk: query and key see each other only within one chunk of this many positions;
            0 is off, and so is 2**30 or more.
        kv_start, kv_end: int32 or int64 `[B]`; keys outside `[kv_start, kv_end)` are invisible and
            may hold anything.
        return_lse: also return the log-sum-exp.
        kernel: force a kernel by name for this call.

    Returns:
        output `[B, S, Hq, Dv]` contiguous, the query's dtype (bfloat16 for float8); with return_lse
        also lse `[B, S, Hq]` float32, natural log. A query that sees no key gives output 0 and lse
        -inf. Autocast changes neither dtypes nor numbers, here and in every other op.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel,
            NoKernel: `kernel` cannot run.
    """
    left, right = eager_cache.window(window)
    attention_chunk = eager_cache.chunk(attention_chunk)
    mask, causal = as_rule(mask, causal, query, key, kv_end)
    if mask is not None:
        eager_cache.mask(mask)
        mask = with_leading_dims(mask, query)
    output, lse = ATTENTION(
        Attention(
            query,
            key,
            value,
            mask,
            sinks,
            k_scale,
            v_scale,
            kv_start,
            kv_end,
            scale=eager_cache.default_scale(query, scale),
            causal=causal,
            window_left=left,
            window_right=right,
            softcap=softcap,
            attention_chunk=attention_chunk,
            return_lse=return_lse,
            q_scale=q_scale,
            policy=key_for("attention", kernel),
        )
    )
    return (output, lse) if return_lse else output


def with_leading_dims(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as `[B or 1, Hq or 1, S or 1, K]`. Raises InvalidInput for one of `[B, K]`."""
    if not 2 <= mask.dim() < 4:
        return mask  # the op refuses other numbers of dims
    if not torch.compiler.is_compiling():
        _refuse_mask_of_batch(mask, query)
    return mask[(None,) * (4 - mask.dim())]


def _refuse_mask_of_batch(mask: Tensor, query: Tensor) -> None:
    """Raise InvalidInput for a mask `[B, K]`: two dims are `[S, K]`."""
    if mask.dim() != 2 or query.dim() != 4:
        return
    rows, (batch, queries) = mask.shape[0], query.shape[:2]
    if rows == batch and rows not in (1, queries):
        want = f"[S, K] with {queries} rows; of a mask [B, K] give mask[:, None, None]"
        fail(InvalidInput, "mask", f"shape {tuple(mask.shape)}", want)
