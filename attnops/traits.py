"""The records of a Kernel's further traits: capture, lowering in place, batch invariance, plans, tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from attnops.needs import Need
from attnops.problem import Problem


class Capture(Enum):
    """May the kernel live inside a CUDA graph? WHOLE: yes. NEVER: the graph is split around it."""

    WHOLE = "whole"
    NEVER = "never"


@dataclass(frozen=True)
class Core:
    """The foreign call amid the torch ops of an `Inline` kernel: an op of its own, `attnops::<op>__<kernel>`, which `run` calls.

    schema, run, fake: as those of an Op. It returns fresh tensors and writes nothing, so that the compiler may put the result where
    the op's output belongs, without a copy.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]


@dataclass(frozen=True)
class Inline:
    """`run` is plain torch ops that the compiler may fuse, so it is lowered in place and not called.

    when: the Problems for which that is done; elsewhere the kernel is called, and timed, like any other. None: all.
    core: the one call that the compiler cannot look into.
    """

    when: Callable[[Problem], bool] | None = None
    core: Core | None = None


@dataclass(frozen=True)
class Invariant:
    """Under a deterministic policy a request's result does not depend, bit for bit, on the other requests of the batch.

    needs: further demands on the Problem for that. cost_us: as `Kernel.cost_us`, where the policy costs time.
    """

    needs: tuple[Need, ...] = ()
    cost_us: Callable[[Problem], float] | None = None


@dataclass(frozen=True)
class Plan:
    """How a kernel plans for a batch.

    sizes: of a kernel that plans on the host: (length of the plan, bytes of the workspace) from its op's statics and the largest
        sizes; see `attnops.ops.plan`.
    device: takes the op's arguments by name and returns the `plan` that the kernel reads on the device. Its users make it once a
        step, so it is timed with the kernel. The kernel runs without one too, and then makes the same in every layer: `cost_us`
        tells the two apart by `Problem.plan`.
    """

    sizes: Callable[..., tuple[int, int]] | None = None
    device: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Tolerance:
    """How far results may be off.

    factor: on the numerics budget of the op's dtype; 1.0: as good as the dtype allows.
    rounded_sums: the lse adds up weights already rounded to the query's dtype.
    """

    factor: float = 1.0
    rounded_sums: bool = False
