"""Merging partial attention results by their log-sum-exps: two of them, or any number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import data
from attnops.select import key_for


def _check(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, stale: bool = True) -> None:
    check.tensor("output_a", output_a, 3, check.FLOATS, "[T, H, D]")
    check.tensor("output_b", output_b, 3, (output_a.dtype,), "[T, H, D]")
    check.tensor("lse_a", lse_a, 2, (torch.float32,), "[T, H]")
    check.tensor("lse_b", lse_b, 2, (torch.float32,), "[T, H]")
    check.same_device(output_a, lse_a=lse_a, output_b=output_b, lse_b=lse_b)
    for field, got, dims in (("output_b", output_b, 3), ("lse_a", lse_a, 2), ("lse_b", lse_b, 2)):
        for dim in range(dims):
            check.equal(f"{field}.shape[{dim}]", got.shape[dim], output_a.shape[dim], "as output_a")


def _fake(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return output_a.new_empty(output_a.shape), lse_a.new_empty(lse_a.shape)


def _problem(output_a: Any, lse_a: Any, output_b: Any, lse_b: Any, **_: Any) -> Problem:
    tokens, heads, dim = output_a.shape
    return Problem(
        op="merge_state",
        target=target_of(output_a),
        dtype=output_a.dtype,
        kv_dtype=output_a.dtype,
        q_heads=int(heads),
        v_head_dim=int(dim),
        lse=True,
        tokens=Extent.of(tokens),
    )


MERGE = define(
    Op(
        name="merge_state",
        schema="(Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b, *, bool stale=True, "
        'str policy="") -> (Tensor output, Tensor lse)',
        check=_check,
        fake=_fake,
        problem=_problem,
        reference=data.merge_state,
        about="merge of two partial results",
    )
)


def merge_state(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, stale: bool = True, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each. No gradient.

    Args:
        output_a, output_b: `[T, H, D]`, one float dtype. lse_a, lse_b: float32 `[T, H]`, natural log.
        stale: False promises that a side whose lse is -inf holds 0, as every op here writes it, so that nothing need be spent
            on clearing it. The result is undefined where the promise is not kept.
        kernel: force a kernel by name for this call.

    Returns:
        (output `[T, H, D]`, lse `[T, H]`). A side whose lse is -inf is neutral, whatever its output holds (but see `stale`);
        both empty gives output 0 and lse -inf. Formula: FlashInfer, https://arxiv.org/abs/2501.01005, section 2.2, in base e.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    merged: tuple[Tensor, Tensor] = torch.ops.attnops.merge_state.default(
        output_a, lse_a, output_b, lse_b, stale=stale, policy=key_for("merge_state", kernel)
    )
    return merged


def _check_states(outputs: Tensor, lses: Tensor, *, stale: bool = True) -> None:
    check.tensor("outputs", outputs, 4, check.FLOATS, "[T, N, H, D]")
    check.tensor("lses", lses, 3, (torch.float32,), "[T, N, H]")
    check.same_device(outputs, lses=lses)
    check.need(outputs.shape[1] >= 1, "outputs.shape[1]", outputs.shape[1], ">= 1 part")
    for dim in range(3):
        check.equal(f"lses.shape[{dim}]", lses.shape[dim], outputs.shape[dim], "as outputs")


def _fake_states(outputs: Tensor, lses: Tensor, **_statics: Any) -> tuple[Tensor, Tensor]:
    tokens, _, heads, dim = outputs.shape
    return outputs.new_empty((tokens, heads, dim)), lses.new_empty((tokens, heads))


def _problem_states(outputs: Any, lses: Any, **_statics: Any) -> Problem:
    tokens, _, heads, dim = outputs.shape
    return Problem(
        op="merge_states",
        target=target_of(outputs),
        dtype=outputs.dtype,
        kv_dtype=outputs.dtype,
        q_heads=int(heads),
        v_head_dim=int(dim),
        lse=True,
        tokens=Extent.of(tokens),
        batch=Extent.of(outputs.shape[1]),  # the parts
    )


MERGE_STATES = define(
    Op(
        name="merge_states",
        schema='(Tensor outputs, Tensor lses, *, bool stale=True, str policy="") -> (Tensor output, Tensor lse)',
        check=_check_states,
        fake=_fake_states,
        problem=_problem_states,
        reference=data.merge_states,
        about="merge of any number of partial results",
    )
)


def merge_states(outputs: Tensor, lses: Tensor, *, stale: bool = True, kernel: str | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the union of N disjoint sets of keys, from the results over each. No gradient.

    Args:
        outputs: `[T, N, H, D]`, float, N >= 1. lses: float32 `[T, N, H]`, natural log.
        stale, kernel: as in `merge_state`.

    Returns:
        (output `[T, H, D]`, lse `[T, H]`). A part whose lse is -inf is neutral, whatever its output holds (but see `stale`); when
        all are empty, output is 0 and lse -inf. Formula: that of `merge_state`, FlashInfer, https://arxiv.org/abs/2501.01005,
        section 2.2, in base e.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    merged: tuple[Tensor, Tensor] = torch.ops.attnops.merge_states.default(
        outputs, lses, stale=stale, policy=key_for("merge_states", kernel)
    )
    return merged
