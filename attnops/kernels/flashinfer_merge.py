"""`flashinfer_merge`: FlashInfer's cascade kernels, which merge two or any number of partial results (in base 2).

The kernel multiplies an empty part by 0, so that NaN in it would spread: an empty part's output is zeroed first, in a copy, unless
the caller promises that it is. That all parts are empty is told apart by versions 0.7.2 and later only; earlier ones give NaN
(flashinfer-ai/flashinfer#4051).
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from attnops.kernel import Kernel, arch, dtypes, register
from attnops.kernels import _flashinfer_pkg as _pkg
from attnops.kernels._rows import aligned, cleared, countable
from attnops.problem import Problem
from attnops.reference.attention import compact

LN_2 = log(2.0)


def merge_state(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, stale: bool = True, policy: str = ""
) -> tuple[Tensor, Tensor]:
    """See `attnops.merge_state`."""
    if output_a.numel() == 0:
        return _nothing(output_a.shape, output_a)
    countable(output_a=output_a)
    a, b = _part(output_a, lse_a, stale), _part(output_b, lse_b, stale)
    output, lse = _pkg.module("cascade").merge_state(*a, *b)
    return output, lse.mul_(LN_2)


def merge_states(outputs: Tensor, lses: Tensor, *, stale: bool = True, policy: str = "") -> tuple[Tensor, Tensor]:
    """See `attnops.ops.merge_states`."""
    if outputs.numel() == 0:
        return _nothing((outputs.shape[0], *outputs.shape[2:]), outputs)
    countable(outputs=outputs)
    output, lse = _pkg.module("cascade").merge_states(*_part(outputs, lses, stale))
    return output, lse.mul_(LN_2)


def _part(output: Tensor, lse: Tensor, stale: bool) -> tuple[Tensor, Tensor]:
    # The results take their strides from these, odd ones of sizes of 1 included.
    output = compact(cleared(output, lse) if stale else output)
    aligned(output=output)
    return output, compact(lse * (1 / LN_2))


def _nothing(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(shape), like.new_full(shape[:-1], float("-inf"), dtype=torch.float32)


def _cost_us(p: Problem) -> float:
    """Every part is read, copied and read again, and some launches; not measured."""
    parts = max(p.batch.hint, 1) if p.op == "merge_states" else 2
    return 16.0 + (3 * parts + 1) * max(p.tokens.hint, 1) * p.q_heads * p.v_head_dim * p.dtype.itemsize / 3.1e6


for _op, _run in (("merge_state", merge_state), ("merge_states", merge_states)):
    register(
        Kernel(
            "flashinfer_merge",
            _op,
            _run,
            needs=(
                arch(*_pkg.ARCHS),
                dtypes(torch.float16, torch.bfloat16),
                _pkg.one_block("q_heads", "v_head_dim", "dtype"),
            ),
            packages=(_pkg.package(),),
            probe=_pkg.missing,
            cost_us=_cost_us,
            # Which of two kernels merges many parts, and in which order, follows from the number of tokens.
            batch_invariant=_op == "merge_state",
            about="FlashInfer's cascade kernels",
        )
    )
