"""A linear layer with the RMS norm before it, and the gated activation and the residual after it,
as one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, KW_ONLY, Call, Sizes, arg, need, record
from attnops.ops import typical
from attnops.ops.linear.counted import COUNTING
from attnops.ops.linear.reference import GATES, linear as reference

RESULT = "T, Out // 2 if activation else Out"
LEAST = {"In": ">= 1 column", "Out": ">= 1 row"}


def _rules(call: Any, sizes: Sizes) -> None:
    if call.activation:
        need(
            sizes["Out"] % 2 == 0,
            "weight.shape[0]",
            sizes["Out"],
            "a multiple of 2: rows of the gate, then rows of what it multiplies",
        )
    if call.norm_weight is not None:
        need(call.norm_eps > 0, "norm_eps", call.norm_eps, "> 0, because norm_weight is given")
        return
    for field in ("norm_eps", "norm_offset"):
        if given := getattr(call, field):
            fail(InvalidInput, field, given, "0, because norm_weight is None")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"in_features": int(sizes["In"]), "out_features": int(sizes["Out"])}


@record("linear", least=LEAST, rules=_rules, facts=_facts, counted=COUNTING)
class Linear(Call):
    """A linear layer with its norm, activation and residual."""

    x: Tensor = arg("T, In", FLOATS, unit_stride=True)
    weight: Tensor = arg("Out, In", "x", unit_stride=True, weight=True, holds="weight_rows")
    bias: Tensor | None = arg("Out", "x", default=None)
    _: KW_ONLY
    norm_weight: Tensor | None = arg("In", "x", default=None)
    norm_eps: float = arg(default=0.0, least=0)
    norm_offset: float = 0.0
    activation: str = arg(default="", choices=("", *GATES))
    residual: Tensor | None = arg(RESULT, "x", default=None)
    output: Tensor = arg(RESULT, "x", written=True)


LINEAR = define(
    Op(
        Linear,
        reference,
        flops="2 * T * In * Out",
        about="linear layer with its norm, gated activation and residual",
        typical=(
            {**typical.BF16, **typical.STEP, "in_features": 4096, "out_features": 6144},
            {
                **typical.BF16,
                **typical.NEW,
                "in_features": 4096,
                "out_features": 6144,
                "asks": frozenset(("norm_weight", "norm_eps")),
            },
        ),
    )
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
    output: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """A linear layer with the RMS norm of its input, the gated activation of its result and a
    residual, each if asked for. No gradient.

    With `n = x * rsqrt(mean(x**2) + norm_eps) * (norm_offset + norm_weight)`, or `n = x` without a
    norm, and `y = n @ weight.T + bias`, the result is `y`, or with an activation
    `act(y[..., :M]) * y[..., M:]`; then `residual` is added.

    Args:
        x: `[..., In]`, float.
        weight: `[Out, In]`, as torch.nn.Linear has it; with an activation Out is 2 M: the M rows of
            the gate, then those of what it multiplies. All tensors have the dtype of `x`.
        bias: `[Out]`.
        norm_weight: `[In]`, the gain of an RMS norm of `x`, https://arxiv.org/abs/1910.07467. It
            comes with `norm_eps`.
        norm_eps: above 0 with `norm_weight`, 0 without.
        norm_offset: what is added to the gain; 1 for the norms of Gemma.
        activation: `"silu"`, `"gelu"`, `"gelu_tanh"` (its tanh approximation), or `""` for no
            activation. GLU variants: https://arxiv.org/abs/2002.05202.
        residual: `[..., Out]`, or `[..., M]` with an activation; added to the result.
        output: of the residual's shape, to write into; allocated when None. It shares no memory
            with the other tensors.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(x=x, weight=weight)
    if x.dim() == 0 or weight.dim() != 2:
        field, given, want = (
            ("x", x, "[..., In]") if x.dim() == 0 else ("weight", weight, "[Out, In]")
        )
        fail(InvalidInput, field, f"shape {tuple(given.shape)}", want)
    rows, given = rows_of("x", x, x), rows_of("output", output, x)
    if output is None:
        # A buffer of two dims, as the op has it: the compiler reads a view of one that is written
        # from memory again.
        given = x.new_empty(
            (rows.shape[0], weight.shape[0] // 2 if activation else weight.shape[0])
        )
    LINEAR(
        Linear(
            rows,
            weight,
            bias,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            activation=activation,
            residual=rows_of("residual", residual, x),
            policy=key_for("linear", kernel),
            output=given,
        )
    )
    return given.view(*x.shape[:-1], given.shape[-1]) if output is None else output


def rows_of(field: str, given: Any, x: Tensor) -> Any:
    """`given` `[..., C]` as `[T, C]`, its leading dims being those of `x`; a view, for the output
    is written."""
    if not isinstance(given, Tensor) or given.dim() == x.dim() == 2:
        return given  # the op checks it
    check_strided(field, given, "..., C")
    need(given.dim() == x.dim(), field, f"shape {tuple(given.shape)}", f"{x.dim()} dims, as x")
    for i in range(x.dim() - 1):
        need(
            given.shape[i] == x.shape[i],
            f"{field}.shape[{i}]",
            given.shape[i],
            f"{x.shape[i]}, as x",
        )
    if x.dim() == 1:
        return given[None]
    if field != "output":
        return given.flatten(0, -2)
    try:
        return given.view(x.shape[:-1].numel(), given.shape[-1])
    except RuntimeError:
        fail(
            InvalidInput,
            "output.stride()",
            given.stride(),
            "leading dims that are one dim in memory, as a contiguous tensor has",
        )
