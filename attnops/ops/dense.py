"""Dense attention, `[B, S, H, D]`, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from attnops.errors import NoGradient, fail
from attnops.ops import _check as check
from attnops.ops._direct import UNBOUNDED, Direct, gradient
from attnops.ops._op import Op, applied, below, define, target_of
from attnops.problem import Extent, Problem, surely
from attnops.reference import attention as reference
from attnops.select import key_for

STATICS = "float scale, bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0, int attention_chunk=0"


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
) -> None:
    check.tensor("query", query, 4, check.QUERY, "[B, S, Hq, D]")
    check.tensor("key", key, 4, (*check.FLOATS, *check.QUANTISED), "[B, K, Hkv, D]")
    check.tensor("value", value, 4, (*check.FLOATS, *check.QUANTISED), "[B, K, Hkv, Dv]")
    check.same_device(
        query, key=key, value=value, mask=mask, sinks=sinks, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, kv_start=kv_start,
        kv_end=kv_end,
    )  # fmt: skip
    check.equal("key.shape[0]", key.shape[0], query.shape[0], "the query's batch")
    check.equal("value.shape[0]", value.shape[0], key.shape[0], "the key's batch")
    check.equal("value.shape[1]", value.shape[1], key.shape[1], "as many values as keys")
    check.heads(query, key, value)
    check.q_scale(query, q_scale)
    check.kv_dtype(query, key, value, k_scale, v_scale)
    check.scales(key.shape[2], q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check.sinks(sinks, query.shape[2])
    check.numbers(scale, window_left, window_right, softcap, attention_chunk)
    for field, rows in (("kv_start", kv_start), ("kv_end", kv_end)):
        if rows is not None:
            check.tensor(field, rows, 1, check.INDEX, "[B]")
            check.equal(f"{field}.shape[0]", rows.shape[0], query.shape[0], "the batch")
    if mask is not None:
        check.tensor("mask", mask, 4, (torch.bool, *check.FLOATS), "[B or 1, Hq or 1, S or 1, K]")
        for dim, size in enumerate((query.shape[0], query.shape[2], query.shape[1])):
            got = mask.shape[dim]
            check.need((isinstance(got, int) and got == 1) or got == size, f"mask.shape[{dim}]", got, f"1 or {size}")
        check.equal("mask.shape[3]", mask.shape[3], key.shape[1], "the number of keys")


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    return_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:3], value.shape[3]), dtype=check.result_dtype(query))
    return output, query.new_empty(query.shape[:3] if return_lse else (0,), dtype=torch.float32)


def _problem(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_start: Any = None,
    kv_end: Any = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Any = None,
    attention_chunk: int = 0,
    **more: Any,
) -> Problem:
    batch, queries, q_heads, head_dim = query.shape
    _, keys, kv_heads, v_head_dim = value.shape
    return Problem(
        op=more.pop("op", "attention"),
        target=target_of(query),
        dtype=query.dtype,
        kv_dtype=key.dtype,
        q_heads=int(q_heads),
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        v_head_dim=int(v_head_dim),
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap > 0,
        attention_chunk=attention_chunk,
        sinks=sinks is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        kv_range=kv_start is not None or kv_end is not None,
        kv_scales=k_scale is not None or v_scale is not None,
        lse=return_lse,
        last_dim_contiguous=_packed_last(query) and _packed_last(key) and _packed_last(value),
        sizes_equal=surely(queries == keys),
        tokens=Extent.of(batch * queries),
        batch=Extent.of(batch),
        queries=Extent.of(queries),
        context=Extent.of(keys),
        **more,
    )


def _packed_last(x: Any) -> bool:
    stride = x.stride(-1)
    return isinstance(stride, int) and stride == 1


class _Attention(torch.autograd.Function):
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
        query, key, value, mask, sinks, _, _, kv_start, kv_end, output, lse = ctx.saved_tensors
        wants = ctx.needs_input_grad[3:]
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        gq, gk, gv, gm, gs = gradient(
            BACKWARD, ctx.overload, grad_output, grad_lse, query, key, value, output, lse, mask, sinks, kv_start, kv_end, **ctx.statics,
            mask_grad=wants[3],
        )  # fmt: skip
        found = (gq, gk, gv, gm, gs)
        return (None, None, None, *(g if w else None for g, w in zip(found, wants, strict=False)), None, None, None, None)


def _autograd(overload: Any, *args: Any, return_lse: bool = False, q_scale: Tensor | None = None, **statics: Any) -> tuple[Tensor, Tensor]:
    tensors = (*args, *[None] * (9 - len(args)))
    if q_scale is not None or tensors[5] is not None or tensors[6] is not None:
        fail(NoGradient, "attention with q_scale, k_scale or v_scale", ("query, key or value",))
    output, lse = applied(_Attention, overload, statics, return_lse, *tensors)
    return output, lse if return_lse else lse.new_empty(0)


ATTENTION = define(
    Op(
        name="attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? sinks=None, Tensor? k_scale=None, "
        f"Tensor? v_scale=None, Tensor? kv_start=None, Tensor? kv_end=None, *, {STATICS}, bool return_lse=False, "
        'Tensor? q_scale=None, str policy="") -> (Tensor output, Tensor lse)',
        check=_check,
        fake=_fake,
        problem=_problem,
        reference=reference.attention,
        autograd=_autograd,
        about="dense attention",
    )
)


def _backward_args(grad_output: Any, grad_lse: Any, query: Any, key: Any, value: Any, output: Any, lse: Any, *rest: Any) -> tuple[Any, ...]:
    return query, key, value, *rest[:2], None, None, *rest[2:]


def _check_backward(*args: Any, mask_grad: bool = False, **statics: Any) -> None:
    _check(*_backward_args(*args), **statics)
    grad_output, grad_lse, query, _, value, output, lse = args[:7]
    for field, got in (("grad_output", grad_output), ("output", output)):
        check.tensor(field, got, 4, check.FLOATS, "[B, S, Hq, Dv]")
        for dim, size in enumerate((*query.shape[:3], value.shape[3])):
            check.equal(f"{field}.shape[{dim}]", got.shape[dim], size, "as the forward's output")
    for field, got in (("grad_lse", grad_lse), ("lse", lse)):
        if got is not None:
            check.tensor(field, got, 3, (torch.float32,), "[B, S, Hq]")
            for dim, size in enumerate(query.shape[:3]):
                check.equal(f"{field}.shape[{dim}]", got.shape[dim], size, "as the forward's lse")


def _fake_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *_: Any,
    mask_grad: bool = False,
    **__: Any,
) -> tuple[Tensor, ...]:
    wants_mask = mask_grad and mask is not None
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        mask.new_empty(mask.shape) if wants_mask and mask is not None else query.new_empty(0),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _problem_backward(*args: Any, mask_grad: bool = False, **statics: Any) -> Problem:
    more: dict[str, Any] = {"op": "attention_backward", "grad": True, "mask_grad": mask_grad, "lse_grad": args[1] is not None}
    build: Callable[..., Problem] = _problem
    return build(*_backward_args(*args), **statics, **more)


BACKWARD = define(
    Op(
        name="attention_backward",
        schema="(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
        f"Tensor? mask=None, Tensor? sinks=None, Tensor? kv_start=None, Tensor? kv_end=None, *, {STATICS}, bool mask_grad=False, "
        'str policy="") '
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_sinks)",
        check=_check_backward,
        fake=_fake_backward,
        problem=_problem_backward,
        reference=reference.attention_backward,
        once=True,
        about="gradient of dense attention",
    )
)


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, scale: float | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, mask: Tensor | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, kv_start: Tensor | None = None, kv_end: Tensor | None = None,
    q_scale: Tensor | None = None, attention_chunk: int = 0, kernel: str | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], scale: float | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, mask: Tensor | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, kv_start: Tensor | None = None, kv_end: Tensor | None = None,
    q_scale: Tensor | None = None, attention_chunk: int = 0, kernel: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = UNBOUNDED,
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
    """Attention over a rectangular batch. Differentiable in query, key, value, sinks and an additive mask.

    Args:
        query: `[B, S, Hq, D]`, float16, bfloat16, float32 or float64, or float8_e4m3fn with q_scale. Not scaled beforehand.
        key, value: `[B, K, Hkv, D]`, `[B, K, Hkv, Dv]`, the query's dtype, or float8/int8 with both scales. Hq is a multiple of Hkv.
        scale: factor on q.k; default `1 / sqrt(D)`.
        causal: query i sees keys up to its own position. The last query stands at the last visible key (bottom-right).
        window: (left, right) keys visible besides the query's own position; -1 is unbounded.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 is off.
        mask: `[B or 1, Hq or 1, S or 1, K]`; bool (True: visible) or float (added to the logits after the soft cap). As in torch's
            scaled_dot_product_attention, `[Hq or 1, S or 1, K]` and `[S or 1, K]` serve every request.
        sinks: `[Hq]` one logit a query head, part of the softmax denominator only.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`; the stored key times k_scale is the key.
        q_scale: float32 `[1]` or `[Hkv]`, one for the query heads of each key head, for a float8 query, which has no gradient; the
            key is then quantised too. A kernel may round the weights to the query's dtype, as it does for other dtypes.
        attention_chunk: query and key see each other only if their positions, from the first key on, lie in one chunk of so many;
            0 is off.
        kv_start, kv_end: int32 or int64 `[B]`; keys outside `[kv_start, kv_end)` are invisible and may hold anything.
        return_lse: also return the log-sum-exp.
        kernel: force a kernel by name for this call.

    Returns:
        output `[B, S, Hq, Dv]` contiguous, the query's dtype (bfloat16 for a float8 query); with return_lse also lse `[B, S, Hq]`
        float32, natural log.
        A query that sees no key gives output 0 and lse -inf.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel, NoKernel: `kernel` cannot run.
    """
    if mask is not None and 2 <= check.mask(mask).dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    output, lse = _dense(
        (
            query, key, value, mask, sinks, k_scale, v_scale, kv_start, kv_end, q_scale,
            scale, causal, window, softcap, attention_chunk, return_lse, kernel,
        )
    )  # fmt: skip
    return (output, lse) if return_lse else output


def _canonical(
    query: Tensor, key: Any, value: Any, mask: Any, sinks: Any, k_scale: Any, v_scale: Any, kv_start: Any, kv_end: Any, q_scale: Any,
    scale: float | None, causal: bool, window: Any, softcap: float, attention_chunk: int, return_lse: bool, kernel: str | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    left, right = check.window(window)
    return (query, key, value, mask, sinks, k_scale, v_scale, kv_start, kv_end), {
        "scale": default_scale(query, scale), "causal": causal, "window_left": left, "window_right": right, "softcap": softcap,
        "attention_chunk": attention_chunk, "return_lse": return_lse, "q_scale": q_scale, "policy": key_for("attention", kernel),
    }  # fmt: skip


_dense = Direct(ATTENTION, _canonical)


def default_scale(query: Tensor, scale: float | None) -> float:
    """`scale`, or one over the root of the query's head dim."""
    return float(query.size(-1)) ** -0.5 if scale is None else scale
