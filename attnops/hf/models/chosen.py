"""Does a kernel of attnops answer for a module of transformers? Asked at every eager call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnops.core.kernel import generation
from attnops.core.problem import Extent, Problem, Target, pretended
from attnops.core.select import Decision, active_policy, has_failed, select
from attnops.core.told import installs, tell

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
    key = generation(), pretended(), op, policy, device, dtype, most, sizes, asks
    if (known := _ANSWERS.get(key)) is not None:
        return known
    decision = select(_problem(pretended(), op, device, dtype, most, sizes, asks), policy)
    if decision.kernel is not None:
        tell(decision.kernel, decision.problem)
    answer = named(decision) not in ("", STOCK)
    if not has_failed(decision):
        if len(_ANSWERS) >= MOST:
            _ANSWERS.clear()
        _ANSWERS[key] = answer
    return answer


def named(decision: Decision) -> str:
    """The kernel's name; "" where there is none."""
    return "" if decision.kernel is None else decision.kernel.name


def kernel_now(op: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> tuple[str, str]:
    """(the name of the kernel that answers now: of attnops, or "" for torch's own ops; what to
    install for a faster one, "" for nothing)."""
    target = pretended()
    problem = _problem(target, op, device, dtype, None, sizes, ())
    kernel = select(problem, active_policy()).kernel
    if kernel is None:
        return "", ""
    return "" if kernel.name == STOCK else kernel.name, installs(kernel, problem)


MOST = 512
"""Answers that are kept: a model has one for each kind of its layers and each policy."""
_ANSWERS: dict[tuple[Any, ...], bool] = {}


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
