"""Does a kernel of attnops answer for a module of transformers? Asked at every eager call, so that the answers are kept."""

from __future__ import annotations

import functools

import torch

from attnops.core.kernel import generation
from attnops.core.problem import Extent, Problem, Target, pretended, repeatable
from attnops.core.select import select

Sizes = tuple[tuple[str, int], ...]

STOCK = "aten"
"""The kernel that is torch's own ops, which transformers' code calls by itself."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_ours(op: str, policy: str, device: torch.device, dtype: torch.dtype, most: int | None, sizes: Sizes, asks: tuple[str, ...]) -> bool:
    """Is a kernel chosen that is not torch's own ops?

    Args:
        op: whose calls they are.
        policy: the one in force.
        device, dtype: of the tokens.
        most: tokens of a call, at most; None: any number.
        sizes: fields of the Problem and their values.
        asks: the arguments that are not at their defaults.
    """
    return _is_ours(generation(), pretended(), repeatable(), op, policy, device, dtype, most, sizes, asks)


@functools.lru_cache(maxsize=512)
def _is_ours(
    registered: int,
    target: Target | None,
    bits: str,
    op: str,
    policy: str,
    device: torch.device,
    dtype: torch.dtype,
    most: int | None,
    sizes: Sizes,
    asks: tuple[str, ...],
) -> bool:
    """registered, target, bits: what a choice depends on beside the call: kernels and tables, `pretend`, and whether bits shall repeat."""
    given: dict[str, int] = dict(sizes)
    tokens = Extent(1, most, 8)
    problem = Problem.of(op, Target.of(device), dtype=dtype, kv_dtype=dtype, asks=frozenset(asks), tokens=tokens, **given)
    kernel = select(problem, policy).kernel
    return kernel is not None and kernel.name != STOCK
