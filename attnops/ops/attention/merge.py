"""Merging partial attention results by their log-sum-exps: two of them, or any number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.eager_cache import key_for
from attnops.core.op import OPS, Op, applied, below, blank, define, tensors_of
from attnops.core.record import FLOAT32, FLOATS, KW_ONLY, Call, Result, arg, changed, record
from attnops.ops import typical
from attnops.ops.attention import reference

SIZES = {"q_heads": "H", "v_head_dim": "D", "head_dim": "0"}


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, run: Any, call: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = below(run, changed(call, **dict(zip(OPS[op].tensors, tensors, strict=True))))
        ctx.save_for_backward(*tensors, output)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, output = ctx.saved_tensors
        # Outputs and lses alternate. Two of each are the parts of `merge_state`.
        outputs, lses = (
            tensors if len(tensors) == 2 else (torch.stack(tensors[i::2], 1) for i in range(2))
        )
        found = reference.merge_gradients(outputs, lses, output, grad_output, grad_lse)
        grads = (
            found
            if len(tensors) == 2
            else (g for both in zip(*(x.unbind(1) for x in found), strict=True) for g in both)
        )
        wants = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(g if wanted else None for g, wanted in zip(grads, wants, strict=True)),
        )


def differentiable(run: Any, call: Any) -> tuple[Tensor, Tensor]:
    """(output, lse) of a merge whose gradient is asked for. The gradient is plain torch, which a
    compiler fuses, whatever merged."""
    merged: tuple[Tensor, Tensor] = applied(
        _Merge, call.spec.op, run, blank(call), *tensors_of(call)
    )
    return merged


@record(
    "merge_state",
    Result("output", like="output_a"),
    Result("lse", like="lse_a"),
    facts={"lse": True},
    problem=SIZES,
)
class MergeState(Call):
    """The merge of two partial results."""

    output_a: Tensor = arg("T, H, D", FLOATS)
    lse_a: Tensor = arg("T, H", FLOAT32)
    output_b: Tensor = arg("T, H, D", "output_a")
    lse_b: Tensor = arg("T, H", FLOAT32)
    _: KW_ONLY
    stale: bool = arg(default=True, hint=True)


MERGED: dict[str, Any] = {"typical": (typical.MERGE,), "shown": ("float32",)}
MERGE = define(
    Op(
        MergeState,
        reference.merge_state,
        differentiable,
        about="merge of two partial results",
        **MERGED,
    )
)


def merge_state(
    output_a: Tensor,
    lse_a: Tensor,
    output_b: Tensor,
    lse_b: Tensor,
    *,
    stale: bool = True,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.
    Differentiable in outputs and lses.

    Args:
        output_a, output_b: `[T, H, D]`, one float dtype. lse_a, lse_b: float32 `[T, H]`, natural
            log.
        stale: False promises that a side whose lse is -inf holds 0, as every op here writes it; the
            result is undefined otherwise.
        kernel: force a kernel by name for this call.

    Returns:
        (output `[T, H, D]`, lse `[T, H]`). A side whose lse is -inf is neutral, whatever its output
        holds (but see `stale`); both empty gives output 0 and lse -inf. An lse of +inf, which some
        kernels write where no key is seen, is taken for -inf.
        Formula: FlashInfer, https://arxiv.org/abs/2501.01005, section 2.2, in base e.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input has a
            forward-mode tangent.
    """
    merged: tuple[Tensor, Tensor] = MERGE(
        MergeState(
            output_a, lse_a, output_b, lse_b, stale=stale, policy=key_for("merge_state", kernel)
        )
    )
    return merged


RESULTS = (Result("output", "T, H, D", "outputs"), Result("lse", "T, H"))


@record(
    "merge_states",
    *RESULTS,
    least={"N": ">= 1 part"},
    facts={"lse": True},
    problem={**SIZES, "batch": "N"},
)
class MergeStates(Call):
    """The merge of any number of partial results."""

    outputs: Tensor = arg("T, N, H, D", FLOATS)
    lses: Tensor = arg("T, N, H", FLOAT32)
    _: KW_ONLY
    stale: bool = arg(default=True, hint=True)


MERGE_STATES = define(
    Op(
        MergeStates,
        reference.merge_states,
        differentiable,
        about="merge of any number of partial results",
        **MERGED,
    )
)


def merge_states(
    outputs: Tensor, lses: Tensor, *, stale: bool = True, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """As `merge_state`, from the results over N disjoint sets of keys. Differentiable likewise.

    Args:
        outputs: `[T, N, H, D]`, float, N >= 1. lses: float32 `[T, N, H]`, natural log. stale,
            kernel: as in `merge_state`.

    Returns:
        (output `[T, H, D]`, lse `[T, H]`).

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input has a
            forward-mode tangent.
    """
    merged: tuple[Tensor, Tensor] = MERGE_STATES(
        MergeStates(outputs, lses, stale=stale, policy=key_for("merge_states", kernel))
    )
    return merged
