"""An RMS norm whose result no linear takes in, with its gate and the residual after it, as one
op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, KW_ONLY, Call, Sizes, arg, need, record
from attnops.ops import typical
from attnops.ops.linear.record import rows_of
from attnops.ops.linear.reference import rms_norm as reference


def _rules(call: Any, sizes: Sizes) -> None:
    need(call.eps > 0, "eps", call.eps, "> 0")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"in_features": int(sizes["In"])}


@record("rms_norm", least={"In": ">= 1 column"}, rules=_rules, facts=_facts)
class RmsNorm(Call):
    """An RMS norm with its gate and its residual."""

    x: Tensor = arg("T, In", FLOATS, unit_stride=True)
    weight: Tensor = arg("In", "x")
    eps: float = arg()
    _: KW_ONLY
    offset: float = 0.0
    wide_gain: bool = False
    gate: Tensor | None = arg("T, In", "x", default=None)
    residual: Tensor | None = arg("T, In", "x", default=None)
    output: Tensor = arg("T, In", "x", written=True)


RMS_NORM = define(
    Op(
        RmsNorm,
        reference,
        about="RMS norm that feeds no linear, with its gate and the residual after it",
        typical=(
            {
                **typical.BF16,
                **typical.STEP,
                "in_features": 4096,
                "asks": frozenset(("residual",)),
            },
        ),
    )
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    wide_gain: bool = False,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    output: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The RMS norm of each row, times a gate and plus a residual if they are given. No gradient.

    The result is `residual + x * rsqrt(mean(x**2) + eps) * (offset + weight) * silu(gate)`,
    https://arxiv.org/abs/1910.07467, computed in float32, or in float64 of float64, and rounded to
    the dtype of `x` where transformers rounds it: before the gain and after it (Llama, GLM-4), or
    after it alone with `wide_gain` or an offset (Gemma, OLMo 2, gpt-oss), and once more after the
    gate (Qwen3-Next) and after the residual.

    Args:
        x: `[..., In]`, float.
        weight: `[In]`, the gain. All tensors have the dtype of `x`.
        eps: above 0.
        offset: what is added to the gain; 1 for the norms of Gemma.
        wide_gain: the gain multiplies in float32.
        gate: of the shape of `x`; its SiLU multiplies the result.
        residual: of the shape of `x`; added to the result.
        output: of the shape of `x`, to write into; allocated when None. It shares no memory with
            the other tensors.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(x=x)
    if x.dim() == 0:
        fail(InvalidInput, "x", f"shape {tuple(x.shape)}", "[..., In]")
    rows, given = rows_of("x", x, x), rows_of("output", output, x)
    if output is None:
        # A buffer of two dims, as the op has it: the compiler reads a view of one that is written
        # from memory again.
        given = x.new_empty(rows.shape)
    RMS_NORM(
        RmsNorm(
            rows,
            weight,
            eps,
            offset=offset,
            wide_gain=wide_gain,
            gate=rows_of("gate", gate, x),
            residual=rows_of("residual", residual, x),
            policy=key_for("rms_norm", kernel),
            output=given,
        )
    )
    return given.view(x.shape) if output is None else output
