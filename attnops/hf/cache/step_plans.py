"""`StepPlans`: the host's plans of steps of one token, for layers whose kernel reads one.

They lie in the buffers of `Planner`s, which graphs read at every replay. A plan made for other
lengths serves as long as every row has as many pages: then only the tokens of each row's last page
are copied to the device.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.cache.planner import Planner
from attnops.cache.step import Tokens, host_lengths
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem
from attnops.core.select import Policy
from attnops.measured.store import in_force

if TYPE_CHECKING:
    from attnops.hf.cache.model_pages import ModelPages


class Kind(NamedTuple):
    """Layers that share a plan. table: the number of their page table. window: of that, in tokens;
    0: none."""

    planner: Planner
    table: int
    window: int

    def last(self) -> Tensor | None:
        """See `Plan.last`."""
        spec, name = self.planner.spec, self.planner.kernel
        assert name is not None
        find = kernels_of(f"plan_{spec.op}")[name].plan.last
        return None if find is None else find(self.planner.plan, self.planner.workspace)


def is_asked(policy: Policy, op: str, kernel: str | None) -> bool:
    """Is the kernel forced or preferred?"""
    names = {kernel, f"{op}:{kernel}"}
    return policy.forced(op) is not None or not names.isdisjoint(policy.prefer)


def mean_plan_us(planning: Kernel, step: Problem, rows: int) -> float:
    """Microseconds of the host that the plans of a step take, in the mean of many.

    A step is planned anew where a row begins a page. The table in force has the time of a plan,
    else the kernel that plans estimates it.
    """
    table = in_force(step.target).table
    near = None if table is None else table.nearest(step)
    known = {} if near is None else near[0].plan_us
    us = known[planning.name] if planning.name in known else planning.cost_us(step)
    return us * (1 - (1 - 1 / step.page_size) ** rows)


class StepPlans:
    """The plans of all layers of a model's pages, under one policy.

    kinds: by the layers' Problem. planners: for each layer its own, or None. forced: is the kernel
    to serve steps of several tokens, too? asked: are steps outside of graphs planned, for which
    the host waits? So they are for a kernel that is forced or preferred.
    """

    def __init__(self, pages: ModelPages, kinds: dict[Problem, Kind], policy: Policy) -> None:
        op = pages.sizes.layers[0].op
        self.forced = policy.forced(op) is not None
        self.asked = any(is_asked(policy, op, kind.planner.kernel) for kind in kinds.values())
        self._pages, self._kinds = pages, tuple(kinds.values())
        known = map(kinds.get, pages.sizes.layers)
        self.planners = tuple(kind and kind.planner for kind in known)
        self._windows = {kind.window for kind in self._kinds if kind.window}
        # Of the latest plans: the pages of each row, and, by window, those behind it.
        self._made: list[list[int]] = []
        self._last: list[Tensor | None] = []

    def make(self, lengths: list[int]) -> None:
        """Plan a step. lengths: tokens of each row, the new one included. It waits for nothing."""
        size, device = self._pages.page_size, self._pages.sizes.device
        numbers = partial(torch.tensor, device="cpu", pin_memory=device.type == "cuda")
        asked = [[-(-n // size) for n in lengths]]
        asked += ([max(n - w, 0) // size for n in lengths] for w in self._windows)
        if asked == self._made and None not in self._last:
            tails = numbers([(n - 1) % size + 1 for n in lengths], dtype=torch.int32)
            for last in self._last:
                assert last is not None
                last.copy_(tails, non_blocking=True)
            return
        self._made = []  # until all plans are
        with ordinary():
            before = numbers(lengths, dtype=torch.int64).to(device, non_blocking=True) - 1
            self._anew(lengths, self._batch(before))
        self._made = asked

    def extend(
        self, lengths: list[int], count: int, batch: PagedBatch
    ) -> tuple[Planner | None, ...]:
        """For each layer a Planner of this one step, of `count` tokens of each row, or None."""
        made: dict[Planner | None, Planner | None] = {None: None}
        new = [count] * len(lengths)
        for kind in self._kinds:
            own, table = kind.planner, batch.of(kind.table)
            made[own] = planner = Planner(
                own.spec,
                max_tokens=table.slots.shape[0],
                max_requests=len(lengths),
                max_pages=table.page_table.shape[1],
                device=table.page_table.device,
                kernel=own.kernel,
            )
            planner(table.known(host_lengths(lengths, new, kind.window, self._pages.page_size)))
        return tuple(made[own] for own in self.planners)

    def _anew(self, lengths: list[int], batch: PagedBatch) -> None:
        new, size = [1] * len(lengths), self._pages.page_size
        for kind in self._kinds:
            known = host_lengths(lengths, new, kind.window, size)
            kind.planner(batch.of(kind.table).known(known))
        self._last = [kind.last() for kind in self._kinds]

    def _batch(self, before: Tensor) -> PagedBatch:
        """The batch of a step. before: int64 `[rows]`, tokens of each row before it."""
        rows, device = before.shape[0], before.device
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        tokens = Tokens(before, torch.arange(rows, device=device), starts, 1)
        return self._pages.describe(tokens, rows, (before + 1).to(torch.int32))
