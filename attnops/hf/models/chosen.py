"""Does a kernel of attnops answer for a module of transformers? Asked at every eager call."""

from __future__ import annotations

import functools

import torch

from attnops.core.problem import Extent, Problem, Target, pretended
from attnops.core.select import select

Sizes = tuple[tuple[str, int], ...]

STOCK = "aten"
"""The kernel that is torch's own ops, which transformers' code calls by itself."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_ours(
    op: str,
    policy: str,
    device: torch.device,
    dtype: torch.dtype,
    most: int | None,
    sizes: Sizes,
    asks: tuple[str, ...],
) -> bool:
    """Is a kernel chosen that is not torch's own ops?

    Args:
        op: whose calls they are.
        policy: the one in force.
        device, dtype: of the tokens.
        most: tokens of a call, at most; None: any number.
        sizes: fields of the Problem and their values.
        asks: the arguments that are not at their defaults.
    """
    problem = _problem(pretended(), op, device, dtype, most, sizes, asks)
    kernel = select(problem, policy).kernel
    return kernel is not None and kernel.name != STOCK


# To build a Problem takes several times as long as to choose for one that `select` has seen. What
# is chosen is not kept here: a kernel that failed to answer is asked again.
@functools.lru_cache(maxsize=512)
def _problem(
    target: Target | None,
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    most: int | None,
    sizes: Sizes,
    asks: tuple[str, ...],
) -> Problem:
    """The Problem of these calls. target: the one of `pretend`, which `Target.of` follows."""
    given: dict[str, int] = dict(sizes)
    tokens = Extent(1, most, 8)
    return Problem.of(
        op,
        Target.of(device),
        dtype=dtype,
        kv_dtype=dtype,
        asks=frozenset(asks),
        tokens=tokens,
        **given,
    )
