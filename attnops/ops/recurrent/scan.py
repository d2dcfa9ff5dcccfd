"""The scan of Mamba-2, as one op that carries each request's state on."""

from __future__ import annotations

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOAT32, FLOATS, INT32, KW_ONLY, Result, arg, record
from attnops.ops import rules, typical
from attnops.ops.recurrent import reference, scan_gradient_reference
from attnops.ops.recurrent.counted import of_states
from attnops.ops.recurrent.gradient import differentiable
from attnops.ops.recurrent.kept import ACCEPTED, kept
from attnops.ops.recurrent.record import LEAST, MEASURES, heads_divide, rules_of_states


@record(
    "mamba2_scan",
    least=LEAST,
    rules=rules_of_states,
    problem=MEASURES,
    counted=of_states(flops=4.0),
)
class Mamba2Scan(rules.Queries):
    """The tokens of packed requests, and the states that they read and write."""

    x: Tensor = arg("T, Hv, Dv", FLOATS, unit_stride=True)
    dt: Tensor = arg("T, Hv", FLOATS)
    a: Tensor = arg("Hv", FLOAT32)
    b: Tensor = arg("T, Hk, Dk", "x", unit_stride=True)
    c: Tensor = arg("T, Hk, Dk", "x", unit_stride=True)
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    d: Tensor | None = arg("Hv", FLOATS, default=None, always=True)
    dt_bias: Tensor | None = arg("Hv", FLOATS, default=None, always=True)
    _: KW_ONLY
    dt_softplus: bool = arg(default=False, always=True)
    dt_min: float = arg(default=0.0, least=0, always=True)
    dt_max: float = arg(default=0.0, least=0, always=True)
    fresh: bool = arg(default=False, always=True)
    padded: bool = rules.PADDED
    output: Tensor = arg("T, Hv, Dv", "x", written=True)
    state: Tensor = arg("B, Hv, Dv, Dk", FLOAT32, written=True, holds="states")
    kept_x: Tensor | None = kept("B, R, Hv, Dv", "x")
    kept_dt: Tensor | None = kept("B, R, Hv", "dt")
    kept_b: Tensor | None = kept("B, R, Hk, Dk", "x")
    accepted: Tensor | None = ACCEPTED


GRANITE_4: typical.Leaves = {
    **typical.BF16,
    "q_heads": 128,
    "kv_heads": 1,
    "head_dim": 128,
    "v_head_dim": 64,
}
MAMBA2_SCAN = define(
    Op(
        Mamba2Scan,
        reference.mamba2_scan,
        differentiable,
        flops="4 * T * Hv * Dk * Dv",
        about="scan of Mamba-2, over packed requests with their states",
        typical=(
            {**GRANITE_4, **typical.SIZES},
            {**GRANITE_4, **typical.SIZES, **typical.STEP, "queries": typical.DECODE["queries"]},
        ),
    )
)


@record(
    "mamba2_scan_backward",
    *rules.gradients("x", "dt", "a", "b", "c", "d", "dt_bias"),
    Result("grad_state", like="grad_after"),
    least=LEAST,
    rules=heads_divide,
    problem=MEASURES,
)
class Mamba2ScanBackward(rules.Queries):
    """The gradient of the scan. Without `state` the requests are fresh."""

    x: Tensor = arg("T, Hv, Dv", FLOATS, unit_stride=True)
    dt: Tensor = arg("T, Hv", FLOATS)
    a: Tensor = arg("Hv", FLOAT32)
    b: Tensor = arg("T, Hk, Dk", "x", unit_stride=True)
    c: Tensor = arg("T, Hk, Dk", "x", unit_stride=True)
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    grad_output: Tensor = arg("T, Hv, Dv", "x", facts=rules.GRADIENT)
    grad_after: Tensor = arg("B, Hv, Dv, Dk", FLOAT32)
    state: Tensor | None = arg("B, Hv, Dv, Dk", FLOAT32, default=None, always=True)
    d: Tensor | None = arg("Hv", FLOATS, default=None, always=True)
    dt_bias: Tensor | None = arg("Hv", FLOATS, default=None, always=True)
    _: KW_ONLY
    dt_softplus: bool = arg(default=False, always=True)
    dt_min: float = arg(default=0.0, least=0, always=True)
    dt_max: float = arg(default=0.0, least=0, always=True)
    padded: bool = rules.PADDED


define(
    Op(
        Mamba2ScanBackward,
        scan_gradient_reference.mamba2_scan_backward,
        once=True,
        flops="10 * T * Hv * Dk * Dv",
        about="gradient of the scan of Mamba-2",
        typical=({**GRANITE_4, **typical.SIZES, "grad": True},),
    )
)


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    cu_seqlens_q: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    max_seqlen_q: int,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = 0.0,
    fresh: bool = False,
    padded: bool = True,
    output: Tensor | None = None,
    kept_x: Tensor | None = None,
    kept_dt: Tensor | None = None,
    kept_b: Tensor | None = None,
    accepted: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The selective scan of Mamba-2 over the tokens of packed requests. Differentiable in x,
    dt, a, b, c, d, dt_bias and state.

    Each head of a request has a state S `[Dv, Dk]`. A token with x, b and c changes it and reads
    it, after a step of the length dt:

        step = clamp(softplus(dt + dt_bias), dt_min, dt_max)
        S = exp(step * a) * S + step * outer(x, b)
        output = S @ c + d * x

    https://arxiv.org/abs/2405.21060, which calls these numbers A, B, C and D, Dv the head dim P,
    and Dk the state size N. Head h has the b and the c of group `h // (Hv / Hk)`. Sums and states
    are float32.

    Lightning attention (https://arxiv.org/abs/2401.04658), which is linear and forgets at one rate
    a head, is the case of values, keys and queries as x, b and c, minus its slopes as a, and a dt
    of 1. `torch.ones(1, 1).expand(T, Hv)` is such a dt.

    Args:
        x: `[T, Hv, Dv]`, float, the tokens of all requests one after the other.
        dt: `[T, Hv]`, of any float dtype.
        a: float32 `[Hv]`, the rate at which the state is forgotten, at most 0.
        b, c: `[T, Hk, Dk]`, of the dtype of `x`; Hv is a multiple of Hk.
        state: float32 `[B, Hv, Dv, Dk]`, of each request before its first token, and changed to
            that after its last, with `kept_x` after its last accepted one. A request without such
            tokens keeps it.
        cu_seqlens_q: int32 `[B + 1]`, starting at 0; request b owns tokens `cu[b]:cu[b + 1]`. Rows
            past `cu[B]` are padding and may hold anything; their output is 0.
        d: `[Hv]`, of any float dtype; None adds no x to the output.
        dt_bias: `[Hv]`, of any float dtype.
        max_seqlen_q: upper bound in tokens on the requests' lengths, a host int.
        dt_softplus: False takes `dt + dt_bias` without a softplus.
        dt_min: the shortest step, at least 0.
        dt_max: the longest step; 0 for no limit.
        fresh: the requests have no tokens before these. The states before their first tokens are
            0, whatever `state` holds.
        padded: False promises that there are no padding rows, which saves a clear of the output.
        output: `[T, Hv, Dv]`, to write into; allocated when None. It shares no memory with the
            other tensors.
        kept_x: `[B, R, Hv, Dv]`, x of each request's last tokens, which may still be taken back:
            `state` is that before them. The call first lets `state` go on over the accepted ones,
            and then keeps the new tokens in place of the old. A request uses its R slots in turn.
            Its accepted and new tokens are at most R together.
        kept_dt, kept_b: `[B, R, Hv]` and `[B, R, Hk, Dk]`, likewise.
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
    eager_cache.tensors(x=x)
    check_strided("x", x, "T, Hv, Dv")
    if x.dim() != 3:
        fail(InvalidInput, "x", f"shape {tuple(x.shape)}", "[T, Hv, Dv]")
    if output is None:
        output = x.new_empty(x.shape)
    MAMBA2_SCAN(
        Mamba2Scan(
            x,
            dt,
            a,
            b,
            c,
            cu_seqlens_q,
            d,
            dt_bias,
            max_seqlen_q=max_seqlen_q,
            dt_softplus=dt_softplus,
            dt_min=dt_min,
            dt_max=dt_max,
            fresh=fresh,
            padded=padded,
            policy=key_for("mamba2_scan", kernel),
            output=output,
            state=state,
            kept_x=kept_x,
            kept_dt=kept_dt,
            kept_b=kept_b,
            accepted=accepted,
        )
    )
    return output
