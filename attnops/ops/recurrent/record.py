"""The gated delta rule of linear attention, as one op that carries each request's state on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import (
    FLOAT32,
    FLOATS,
    INT32,
    KW_ONLY,
    Result,
    Sizes,
    arg,
    need,
    place,
    record,
)
from attnops.ops import rules, typical
from attnops.ops.recurrent import reference
from attnops.ops.recurrent.counted import of_states
from attnops.ops.recurrent.gradient import differentiable
from attnops.ops.recurrent.kept import ACCEPTED, check_kept, kept

LEAST = {
    "Hk": ">= 1 head",
    "Hv": ">= 1 head",
    "Dk": ">= 1 number",
    "Dv": ">= 1 number",
}


MEASURES = {"q_heads": "Hv", "kv_heads": "Hk", "head_dim": "Dk", "v_head_dim": "Dv"}


def heads_divide(call: Any, sizes: Sizes) -> None:
    """Each head of the keys serves as many of the values as another."""
    heads, kv_heads = sizes["Hv"], sizes["Hk"]
    want = f"a multiple of {kv_heads} (Hk, as {place(call.spec, 'Hk')})"
    need(heads % kv_heads == 0, place(call.spec, "Hv"), heads, want)


def rules_of_states(call: Any, sizes: Sizes) -> None:
    """The rules of `heads_divide` and `check_kept`."""
    heads_divide(call, sizes)
    check_kept(call, sizes)


@record(
    "gated_delta_rule",
    least=LEAST,
    rules=rules_of_states,
    problem=MEASURES,
    counted=of_states(flops=6.0),
)
class GatedDeltaRule(rules.Queries):
    """The tokens of packed requests, and the states that they read and write."""

    query: Tensor = arg("T, Hk, Dk", FLOATS, unit_stride=True)
    key: Tensor = arg("T, Hk, Dk", "query", unit_stride=True)
    value: Tensor = arg("T, Hv, Dv", "query", unit_stride=True)
    decay: Tensor = arg("T, Hv", FLOAT32)
    beta: Tensor = arg("T, Hv", FLOATS)
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    normalize: bool = arg(default=False, always=True)
    fresh: bool = arg(default=False, always=True)
    padded: bool = rules.PADDED
    output: Tensor = arg("T, Hv, Dv", "query", written=True)
    state: Tensor = arg("B, Hv, Dk, Dv", FLOAT32, written=True, holds="states")
    kept_key: Tensor | None = kept("B, R, Hk, Dk", "query")
    kept_value: Tensor | None = kept("B, R, Hv, Dv", "query")
    kept_decay: Tensor | None = kept("B, R, Hv", FLOAT32)
    kept_beta: Tensor | None = kept("B, R, Hv", "beta")
    accepted: Tensor | None = ACCEPTED


QWEN3_NEXT: typical.Leaves = {
    **typical.BF16,
    "q_heads": 32,
    "kv_heads": 16,
    "head_dim": 128,
    "v_head_dim": 128,
}
GATED_DELTA_RULE = define(
    Op(
        GatedDeltaRule,
        reference.gated_delta_rule,
        differentiable,
        flops="6 * T * Hv * Dk * Dv",
        about="gated delta rule of linear attention, over packed requests with their states",
        typical=(
            {**QWEN3_NEXT, **typical.SIZES},
            {**QWEN3_NEXT, **typical.SIZES, **typical.STEP, "queries": typical.DECODE["queries"]},
        ),
    )
)


@record(
    "gated_delta_rule_backward",
    *rules.gradients("query", "key", "value", "decay", "beta"),
    Result("grad_state", like="grad_after"),
    least=LEAST,
    rules=heads_divide,
    problem=MEASURES,
)
class GatedDeltaRuleBackward(rules.Queries):
    """The gradient of the gated delta rule. Without `state` the requests are fresh."""

    query: Tensor = arg("T, Hk, Dk", FLOATS, unit_stride=True)
    key: Tensor = arg("T, Hk, Dk", "query", unit_stride=True)
    value: Tensor = arg("T, Hv, Dv", "query", unit_stride=True)
    decay: Tensor = arg("T, Hv", FLOAT32)
    beta: Tensor = arg("T, Hv", FLOATS)
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    grad_output: Tensor = arg("T, Hv, Dv", "query", facts=rules.GRADIENT)
    grad_after: Tensor = arg("B, Hv, Dk, Dv", FLOAT32)
    state: Tensor | None = arg("B, Hv, Dk, Dv", FLOAT32, default=None, always=True)
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    normalize: bool = arg(default=False, always=True)
    padded: bool = rules.PADDED


define(
    Op(
        GatedDeltaRuleBackward,
        reference.gated_delta_rule_backward,
        once=True,
        flops="16 * T * Hv * Dk * Dv",
        about="gradient of the gated delta rule",
        typical=({**QWEN3_NEXT, **typical.SIZES, "grad": True},),
    )
)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    scale: float | None = None,
    normalize: bool = False,
    fresh: bool = False,
    padded: bool = True,
    output: Tensor | None = None,
    kept_key: Tensor | None = None,
    kept_value: Tensor | None = None,
    kept_decay: Tensor | None = None,
    kept_beta: Tensor | None = None,
    accepted: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The gated delta rule over the tokens of packed requests. Differentiable in query,
    key, value, decay, beta and state.

    Each value head of a request has a state S `[Dk, Dv]`. A token with key k, value v and query q
    changes it and reads it:

        S = exp(decay) * S
        S = S + beta * outer(k, v - k @ S)
        output = scale * q @ S

    https://arxiv.org/abs/2412.06464. Value head h has the query and the key of head `h // (Hv /
    Hk)`. Sums and states are float32.

    Args:
        query, key: `[T, Hk, Dk]`, float, the tokens of all requests one after the other.
        value: `[T, Hv, Dv]`, of the dtype of `query`; Hv is a multiple of Hk.
        decay: float32 `[T, Hv]`, the logarithm of what is left of the state, at most 0.
        beta: `[T, Hv]`, of any float dtype.
        state: float32 `[B, Hv, Dk, Dv]`, of each request before its first token, and changed to
            that after its last, with `kept_key` after its last accepted one. A request without such
            tokens keeps it.
        cu_seqlens_q: int32 `[B + 1]`, starting at 0; request b owns tokens `cu[b]:cu[b + 1]`. Rows
            past `cu[B]` are padding and may hold anything; their output is 0.
        max_seqlen_q: upper bound in tokens on the requests' lengths, a host int.
        scale: of the output; default `Dk**-0.5`.
        normalize: queries and keys are divided by their lengths, `x / sqrt(sum(x**2) + 1e-6)`.
        fresh: the requests have no tokens before these. The states before their first tokens are
            0, whatever `state` holds.
        padded: False promises that there are no padding rows, which saves a clear of the output.
        output: `[T, Hv, Dv]`, to write into; allocated when None. It shares no memory with the
            other tensors.
        kept_key: `[B, R, Hk, Dk]`, the keys of each request's last tokens, which may still be taken
            back: `state` is that before them. The call first lets `state` go on over the accepted
            ones, and then keeps the new tokens in place of the old. A request uses its R slots in
            turn. Its accepted and new tokens are at most R together.
        kept_value, kept_decay, kept_beta: `[B, R, Hv, Dv]` and `[B, R, Hv]`, likewise.
        accepted: int32 `[B, 2]`, the slot of each request's first accepted token, and the number of
            accepted tokens. The new tokens take the slots behind them.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract, `accepted` comes
            without all kept tensors or with a gradient, or `state` or `output` is a leaf that
            requires grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(query=query, value=value)
    for field, given, dims in (("query", query, "T, Hk, Dk"), ("value", value, "T, Hv, Dv")):
        check_strided(field, given, dims)
        if given.dim() != 3:
            fail(InvalidInput, field, f"shape {tuple(given.shape)}", f"[{dims}]")
    if output is None:
        output = value.new_empty(value.shape)
    GATED_DELTA_RULE(
        GatedDeltaRule(
            query,
            key,
            value,
            decay,
            beta,
            cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            scale=eager_cache.default_scale(query, scale),
            normalize=normalize,
            fresh=fresh,
            padded=padded,
            policy=key_for("gated_delta_rule", kernel),
            output=output,
            state=state,
            kept_key=kept_key,
            kept_value=kept_value,
            kept_decay=kept_decay,
            kept_beta=kept_beta,
            accepted=accepted,
        )
    )
    return output
