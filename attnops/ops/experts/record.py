"""The experts of a mixture: both products of the experts chosen for each token, and their weighted
sum, as one op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.private_torch import count_dispatch_modes
from attnops.core.record import FLOATS, INDEX, KW_ONLY, Call, Sizes, arg, need, record
from attnops.ops import typical
from attnops.ops.experts.reference import experts as reference
from attnops.ops.linear.reference import GATES

LEAST = {
    "E": ">= 1 expert",
    "In": ">= 1 column",
    "Inner": ">= 1 column",
    "Out": ">= 1 row",
    "K": ">= 1 expert",
}


def enough_experts(sizes: Sizes) -> None:
    """A token chooses at most as many experts as there are."""
    need(
        sizes["K"] <= sizes["E"],
        "top_k_index.shape[1]",
        sizes["K"],
        f"<= {sizes['E']} (E, as gate_up.shape[0])",
    )


def facts_of(inner: Any, sizes: Sizes) -> dict[str, Any]:
    """What a Problem says of a mixture. inner: the width of its experts."""
    return {
        "in_features": int(sizes["In"]),
        "out_features": int(inner),
        "experts": int(sizes["E"]),
        "top_k": int(sizes["K"]),
    }


def _rules(call: Any, sizes: Sizes) -> None:
    enough_experts(sizes)
    if call.activation != "silu" and call.alpha != 1:
        fail(InvalidInput, "alpha", call.alpha, "1, because activation is not 'silu'")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return facts_of(sizes["Inner"], sizes)


@record("experts", least=LEAST, rules=_rules, facts=_facts)
class Experts(Call):
    """The experts of a mixture, and those chosen for each token."""

    x: Tensor = arg("T, In", FLOATS, unit_stride=True)
    gate_up: Tensor = arg("E, 2 * Inner, In", "x", holds="weight_rows")
    down: Tensor = arg("E, Out, Inner", "x", holds="weight_rows")
    top_k_index: Tensor = arg("T, K", INDEX)
    top_k_weights: Tensor = arg("T, K", FLOATS, holds="shares")
    gate_up_bias: Tensor | None = arg("E, 2 * Inner", "x", default=None)
    down_bias: Tensor | None = arg("E, Out", "x", default=None)
    _: KW_ONLY
    activation: str = arg(default="silu", choices=tuple(GATES))
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = arg(default=0.0, least=0)
    offset: float = 0.0
    output: Tensor = arg("T, Out", "x", written=True)


EXPERTS = define(
    Op(
        Experts,
        reference,
        flops="2 * T * K * Inner * (2 * In + Out)",
        about="experts of a mixture: both products, the gated activation and the weighted sum",
        typical=(
            {
                **typical.BF16,
                **typical.STEP,
                "in_features": 2048,
                "out_features": 768,
                "experts": 128,
                "top_k": 8,
            },
        ),
    )
)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    output: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The weighted sum of the experts chosen for each token. No gradient.

    Expert e takes `y = x @ gate_up[e].T + gate_up_bias[e]`, a gate g and a factor u of each of
    Inner numbers. With a limit, g is at most that and u within plus and minus that. Then
    `h = act(g) * (u + offset)`, where silu is `g * sigmoid(alpha * g)`, and the expert gives
    `h @ down[e].T + down_bias[e]`. In float16 g, u, h and what the expert gives saturate at 65,504.
    Weights may have any strides: of layers that keep them as `[E, In, 2 Inner]`, pass
    `.transpose(1, 2)`.

    Args:
        x: `[T, In]`, float.
        gate_up: `[E, 2 Inner, In]`, the Inner rows of the gates, then those of the factors. All
            weights and biases have the dtype of `x`.
        down: `[E, Out, Inner]`.
        top_k_index: int32 or int64 `[T, K]`, the experts of each token; K is at most E. An expert
            that comes twice counts twice. A number that is no expert adds nothing to the sum; on a
            CPU it is refused.
        top_k_weights: float `[T, K]`, of any float dtype.
        gate_up_bias: `[E, 2 Inner]`. down_bias: `[E, Out]`.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`. GLU variants:
            https://arxiv.org/abs/2002.05202.
        interleaved: rows of gates and factors take turns, the gate first, as gpt-oss has them.
        alpha: of silu; 1.702 for gpt-oss.
        limit: 7 for gpt-oss; 0: no limit.
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
    output = prepared(x, gate_up, down, top_k_index, output)
    EXPERTS(
        Experts(
            x,
            gate_up,
            down,
            top_k_index,
            top_k_weights,
            gate_up_bias,
            down_bias,
            activation=activation,
            interleaved=interleaved,
            alpha=alpha,
            limit=limit,
            offset=offset,
            policy=key_for("experts", kernel),
            output=output,
        )
    )
    return output


DIMS = {"x": "T, In", "gate_up": "E, 2 Inner, In", "down": "E, Out, Inner"}


def prepared(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k_index: Tensor,
    output: Tensor | None,
    dims: Mapping[str, str] = DIMS,
) -> Tensor:
    """`output`, allocated when None.

    dims: of `x` and the weights as they are stored. Raises InvalidInput: a tensor that a public
    function looks into before the op checks its call is none, or has other dims; a number of
    `top_k_index` on the CPU is no expert.
    """
    eager_cache.tensors(x=x, gate_up=gate_up, down=down, top_k_index=top_k_index)
    for given, (field, names) in zip((x, gate_up, down), dims.items(), strict=True):
        check_strided(field, given, names)
        if given.dim() != names.count(",") + 1:
            fail(InvalidInput, field, f"shape {tuple(given.shape)}", f"[{names}]")
    # A mode that captures reads no data.
    if top_k_index.device.type == "cpu" and not (
        torch.compiler.is_compiling() or count_dispatch_modes()
    ):
        _check_index(top_k_index, gate_up.shape[0])
    return x.new_empty((x.shape[0], down.shape[1])) if output is None else output


def _check_index(index: Tensor, experts: int) -> None:
    """Raise InvalidInput for a number that is no expert, in a tensor of integers on the CPU."""
    if (
        type(index) is not Tensor
        or index.is_nested
        or index.layout != torch.strided
        or index.dtype not in INDEX
        or not index.numel()
    ):
        return  # the op checks it; a tensor subclass may hold no data
    low, high = (int(n) for n in index.aminmax())
    for n in (low, high):
        need(0 <= n < experts, "top_k_index", n, f"0 to {experts - 1}, the experts of gate_up")
