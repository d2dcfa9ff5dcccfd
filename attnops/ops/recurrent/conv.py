"""A causal convolution of each channel over packed requests, as one op that keeps the last inputs
of each request."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, INT32, KW_ONLY, Result, Sizes, arg, record
from attnops.ops import rules, typical
from attnops.ops.recurrent import reference
from attnops.ops.recurrent.counted import OF_CONVOLUTIONS
from attnops.ops.recurrent.gradient import differentiable
from attnops.ops.recurrent.kept import ACCEPTED, check_kept, kept


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"in_features": int(sizes["C"])}


LEAST = {"C": ">= 1 channel", "W": ">= 1 number"}
SILU = arg(default="", choices=("", "silu"))


@record("causal_conv1d", least=LEAST, rules=check_kept, facts=_facts, counted=OF_CONVOLUTIONS)
class CausalConv1d(rules.Queries):
    """The tokens of packed requests, and the inputs before them."""

    x: Tensor = arg("T, C", FLOATS)
    weight: Tensor = arg("C, W", "x")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    bias: Tensor | None = arg("C", "x", default=None)
    _: KW_ONLY
    activation: str = SILU
    fresh: bool = arg(default=False, always=True)
    padded: bool = rules.PADDED
    output: Tensor = arg("T, C", "x", written=True)
    state: Tensor = arg("B, C, >= W - 1", "x", written=True, holds="states")
    kept_x: Tensor | None = kept("B, R, C", "x")
    accepted: Tensor | None = ACCEPTED


QWEN3_NEXT: typical.Leaves = {
    **typical.BF16,
    **typical.SIZES,
    "in_features": 8192,
    "asks": frozenset(("activation",)),
}
CAUSAL_CONV1D = define(
    Op(
        CausalConv1d,
        reference.causal_conv1d,
        differentiable,
        about="causal convolution of each channel, over packed requests with their last inputs",
        typical=(QWEN3_NEXT,),
    )
)


@record(
    "causal_conv1d_backward",
    Result("grad_x", like="x"),
    Result("grad_weight", like="weight"),
    Result("grad_bias", like="bias"),
    Result("grad_state", like="grad_after"),
    least=LEAST,
    facts=_facts,
)
class CausalConv1dBackward(rules.Queries):
    """The gradient of the convolution. Without `state` the requests are fresh."""

    x: Tensor = arg("T, C", FLOATS)
    weight: Tensor = arg("C, W", "x")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    grad_output: Tensor = arg("T, C", "x", facts=rules.GRADIENT)
    grad_after: Tensor = arg("B, C, >= W - 1", "x")
    state: Tensor | None = arg("B, C, S", "x", default=None, always=True)
    bias: Tensor | None = arg("C", "x", default=None)
    _: KW_ONLY
    activation: str = SILU
    padded: bool = rules.PADDED


define(
    Op(
        CausalConv1dBackward,
        reference.causal_conv1d_backward,
        once=True,
        about="gradient of the causal convolution",
        typical=({**QWEN3_NEXT, "grad": True},),
    )
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens_q: Tensor,
    bias: Tensor | None = None,
    *,
    max_seqlen_q: int,
    activation: str = "",
    fresh: bool = False,
    padded: bool = True,
    output: Tensor | None = None,
    kept_x: Tensor | None = None,
    accepted: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """A causal convolution of each channel over the tokens of packed requests.
    Differentiable in x, weight, bias and state.

    Token t of a request gives `sum(weight[:, w] * x[t + w - (W - 1)] for w in range(W)) + bias`,
    where inputs before its first token are the last numbers of `state`.

    Args:
        x: `[T, C]`, float, the tokens of all requests one after the other, of any strides.
        weight: `[C, W]`. All tensors have the dtype of `x`.
        state: `[B, C, S]`, the last S inputs of each request before its first token, the newest at
            the end; 0 for what was not there. S is at least W - 1. It is changed to the last S
            inputs after the request's last token; with `kept_x`, after its last accepted one.
        cu_seqlens_q: int32 `[B + 1]`, starting at 0; request b owns tokens `cu[b]:cu[b + 1]`. Rows
            past `cu[B]` are padding and may hold anything; their output is 0.
        bias: `[C]`.
        max_seqlen_q: upper bound in tokens on the requests' lengths, a host int.
        activation: `"silu"`, or `""` for none.
        fresh: the requests have no tokens before these. The inputs before their first tokens are 0,
            whatever `state` holds.
        padded: False promises that there are no padding rows, which saves a clear of the output.
        output: `[T, C]`, to write into; allocated when None. It shares no memory with the other
            tensors.
        kept_x: `[B, R, C]`, the inputs of each request's last tokens, which may still be taken
            back: `state` is that before them. The call first lets `state` go on over the accepted
            ones, and then keeps the new tokens in place of the old. A request uses its R slots in
            turn. Its accepted and new tokens are at most R together.
        accepted: int32 `[B, 2]`, the slot of each request's first accepted token, and the number of
            accepted tokens. The new tokens take the slots behind them.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract, `accepted` comes
            without `kept_x` or with a gradient, or `state` or `output` is a leaf that requires
            grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(x=x)
    check_strided("x", x, "T, C")
    if x.dim() != 2:
        fail(InvalidInput, "x", f"shape {tuple(x.shape)}", "[T, C]")
    if output is None:
        output = x.new_empty(x.shape)
    CAUSAL_CONV1D(
        CausalConv1d(
            x,
            weight,
            cu_seqlens_q,
            bias,
            max_seqlen_q=max_seqlen_q,
            activation=activation,
            fresh=fresh,
            padded=padded,
            policy=key_for("causal_conv1d", kernel),
            output=output,
            state=state,
            kept_x=kept_x,
            accepted=accepted,
        )
    )
    return output
