"""The kernels that the model's own layers take while those of graphs are being compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem
from attnops.core.select import parse_policy, select


class Meanwhile(NamedTuple):
    """Kernels of a layer that need no compilation at their first launch: of attention over pages,
    and of the write. None where there is none."""

    attention: str | None
    write: str | None


def uncompiled(problem: Problem, key: str) -> str | None:
    """Such a kernel, under a policy."""
    policy, op = parse_policy(key), problem.op
    compiled = (name for name, each in kernels_of(op).items() if each.ahead is not None)
    denied = tuple(f"{op}:{name}" for name in compiled)
    kernel = select(problem, replace(policy, deny=(*policy.deny, *denied))).kernel
    return None if kernel is None else kernel.name
