"""The experts of a mixture with weights of MXFP4, four bits a number: both products, their gated
activation and the weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.eager_cache import key_for
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, INDEX, KW_ONLY, Call, Sizes, arg, need, record
from attnops.ops import typical
from attnops.ops.experts.mxfp4_reference import COLUMNS, ROWS, experts as reference
from attnops.ops.experts.record import enough_experts, facts_of, prepared

WIDE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that hold every weight. float16 does not: its exponents are too few."""
BYTES = (torch.uint8,)
DIMS = {"x": "T, In", "gate_up": "E, 2 Inner, In // 2", "down": "E, Out, Inner // 2"}
LEAST = {
    "E": ">= 1 expert",
    "In": ">= 1 column",
    "Half": ">= 1 column",
    "Out": ">= 1 row",
    "K": ">= 1 expert",
}


def _rules(call: Any, sizes: Sizes) -> None:
    enough_experts(sizes)
    for field, name, step in (
        ("x.shape[1]", "In", COLUMNS),
        ("down.shape[2]", "Half", COLUMNS // 2),
        ("down.shape[1]", "Out", ROWS),
    ):
        need(
            sizes[name] % step == 0,
            field,
            sizes[name],
            f"a multiple of {step}: weights are stored in tiles",
        )


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return facts_of(2 * sizes["Half"], sizes)


@record("mxfp4_experts", least=LEAST, rules=_rules, facts=_facts)
class Mxfp4Experts(Call):
    """The experts of a mixture with weights of MXFP4, and those chosen for each token."""

    x: Tensor = arg("T, In", WIDE, unit_stride=True)
    gate_up: Tensor = arg("E, 4 * Half, In // 2", BYTES, holds="weight_rows")
    gate_up_scales: Tensor = arg("E, 4 * Half, In // 32", BYTES, holds="exponents")
    down: Tensor = arg("E, Out, Half", BYTES, holds="weight_rows")
    down_scales: Tensor = arg("E, Out, Half // 16", BYTES, holds="exponents")
    top_k_index: Tensor = arg("T, K", INDEX)
    top_k_weights: Tensor = arg("T, K", FLOATS, holds="shares")
    gate_up_bias: Tensor | None = arg("E, 4 * Half", "x", default=None)
    down_bias: Tensor | None = arg("E, Out", "x", default=None)
    _: KW_ONLY
    alpha: float = 1.0
    limit: float = arg(default=0.0, least=0)
    offset: float = 0.0
    output: Tensor = arg("T, Out", "x", written=True)


MXFP4_EXPERTS = define(
    Op(
        Mxfp4Experts,
        reference,
        flops="4 * T * K * Half * (2 * In + Out)",
        about="experts of a mixture with weights of MXFP4, four bits a number",
        typical=(
            {
                **typical.BF16,
                **typical.STEP,
                "in_features": 2880,
                "out_features": 2880,
                "experts": 32,
                "top_k": 4,
            },
        ),
    )
)


def mxfp4_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    output: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """As `experts`, with weights of four bits a number. No gradient.

    A number of a weight is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign, times the power of
    two that 32 neighbours of a row share:
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
    `attnops.ops.experts.mxfp4_reference.arranged` gives weights and scales, as gpt-oss' checkpoints
    have them, the order in which they are read here. Rows of gates and factors take turns, the gate
    first; the activation is `g * sigmoid(alpha * g) * (u + offset)`.

    Args:
        x: `[T, In]`, bfloat16, float32 or float64; In is a multiple of 64.
        gate_up: uint8 `[E, 2 Inner, In // 2]`, arranged with `interleaved=True`; Inner is a
            multiple of 64.
        gate_up_scales: uint8 `[E, 2 Inner, In // 32]`.
        down: uint8 `[E, Out, Inner // 2]`, arranged; Out is a multiple of 16.
        down_scales: uint8 `[E, Out, Inner // 32]`.
        top_k_index: int32 or int64 `[T, K]`, the experts of each token; K is at most E. An expert
            that comes twice counts twice. A number that is no expert adds nothing to the sum; on a
            CPU it is refused.
        top_k_weights: float `[T, K]`, of any float dtype.
        gate_up_bias: `[E, 2 Inner]`, of the dtype of `x`. down_bias: `[E, Out]`.
        alpha: 1.702 for gpt-oss.
        limit: 7 for gpt-oss: gates are at most that, factors within plus and minus that; 0: no
            limit.
        offset: what is added to the factor; 1 for gpt-oss.
        output: `[T, Out]`, to write into; allocated when None. It shares no memory with the other
            tensors.
        kernel: force a kernel by name for this call.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    output = prepared(x, gate_up, down, top_k_index, output, DIMS)
    MXFP4_EXPERTS(
        Mxfp4Experts(
            x,
            gate_up,
            gate_up_scales,
            down,
            down_scales,
            top_k_index,
            top_k_weights,
            gate_up_bias,
            down_bias,
            alpha=alpha,
            limit=limit,
            offset=offset,
            policy=key_for("mxfp4_experts", kernel),
            output=output,
        )
    )
    return output
