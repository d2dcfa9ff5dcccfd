"""`StepPlans`: the host's plans of steps of one token, for layers whose kernel reads one.

They lie in the buffers of `Planner`s, which graphs read at every replay. A plan made for other
lengths serves as long as every row has as many pages: then only the tokens of each row's last page
are copied to the device.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import HostLengths, PagedBatch, pages_behind
from attnops.cache.paged import ordinary
from attnops.cache.planner import Planner
from attnops.cache.step import Tokens
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem
from attnops.core.select import Policy
from attnops.measured.store import in_force

if TYPE_CHECKING:
    from attnops.hf.cache.model_pages import ModelPages

# Sizes of steps of several tokens whose Planners are kept: a prompt in chunks has two.
SIZES = 2


class Kind(NamedTuple):
    """Layers that share a plan. table: the number of their page table. window: of that, in tokens;
    0: none. asked: is its kernel forced or preferred, or is there none but one of last resort?"""

    planner: Planner
    table: int
    window: int
    asked: bool

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

    A step is planned anew where a row begins a page, or each is where the plan has no `last`. The
    table in force has the time of a plan, else the kernel that plans estimates it.
    """
    table = in_force(step.target).table
    near = None if table is None else table.nearest(step)
    known = {} if near is None else near[0].plan_us
    us = known[planning.name] if planning.name in known else planning.cost_us(step)
    if planning.plan.last is None:
        return us
    return us * (1 - (1 - 1 / step.page_size) ** rows)


class StepPlans:
    """The plans of all layers of a model's pages, under one policy.

    kinds: by the layers' Problem.
    planners: for each layer its own, or None. whole: has each layer one?
    forced: is the kernel to serve steps of several tokens, too?
    asked: are steps outside of graphs planned, for which the host waits? So they are where one of
    the kinds is.
    """

    def __init__(self, pages: ModelPages, kinds: dict[Problem, Kind], policy: Policy) -> None:
        op = pages.sizes.layers[0].op
        self.forced = policy.forced(op) is not None
        self.asked = any(kind.asked for kind in kinds.values())
        self._kinds = tuple(kinds.values())
        known = map(kinds.get, pages.sizes.layers)
        self.planners = tuple(kind and kind.planner for kind in known)
        self.whole = None not in self.planners
        self._windows = {kind.window for kind in self._kinds if kind.window}
        # Of the latest plans: the tokens of each row; the pages of each, and, by window, those
        # behind it.
        self._lengths: list[int] = []
        self._made: list[list[int]] = []
        self._last: list[Tensor | None] = []
        # Of steps of several tokens, by tokens and rows.
        self._longer: dict[tuple[int, int], list[Planner]] = {}

    @property
    def workspaces(self) -> list[Tensor]:
        """Those of all plans."""
        longer = chain.from_iterable(self._longer.values())
        return [each.workspace for each in (*(kind.planner for kind in self._kinds), *longer)]

    def make(self, pages: ModelPages, lengths: list[int]) -> None:
        """Plan a step, unless it is the one that the latest plans are of. lengths: tokens of each
        row, the new one included. It waits for nothing.

        The device reads plans in the order of the stream: those of the step under way lie in its
        buffers until its kernels are done.
        """
        if lengths == self._lengths:
            return
        self._lengths = []  # until all plans are made
        self._write(pages, lengths)
        self._lengths = lengths

    def _write(self, pages: ModelPages, lengths: list[int]) -> None:
        size, device = pages.page_size, pages.sizes.device
        numbers = partial(torch.tensor, device="cpu", pin_memory=device.type == "cuda")
        asked = [[-(-n // size) for n in lengths]]
        asked += ([pages_behind(n - 1, w, size) for n in lengths] for w in self._windows)
        if asked == self._made and None not in self._last:
            tails = numbers([(n - 1) % size + 1 for n in lengths], dtype=torch.int32)
            for last in self._last:
                assert last is not None
                last.copy_(tails, non_blocking=True)
            return
        self._made = []  # until all plans are
        with ordinary():
            before = numbers(lengths, dtype=torch.int64).to(device, non_blocking=True) - 1
            self._anew(lengths, _batch(pages, before), size)
        self._made = asked

    def extend(
        self, pages: ModelPages, lengths: list[int], count: int, batch: PagedBatch
    ) -> tuple[Planner | None, ...]:
        """For each layer a Planner of a step of `count` tokens of each row, or None. It serves
        until the next such step."""
        new, size = [count] * len(lengths), pages.page_size
        planners = self._of(pages, count, batch)
        for kind, planner in zip(self._kinds, planners, strict=True):
            known = HostLengths(lengths, new, kind.window, size)
            planner(batch.of(kind.table).known(known))
        owners = [kind.planner for kind in self._kinds]
        made = dict(zip(owners, planners, strict=True))
        return tuple(own and made[own] for own in self.planners)

    def _of(self, pages: ModelPages, count: int, batch: PagedBatch) -> list[Planner]:
        """The Planners of steps of several tokens, by kind: those of the last few sizes are
        kept."""
        rows = batch.page_table.shape[0]
        found = self._longer.pop((count, rows), None)
        if found is None:
            found = [
                replanner(kind.planner, batch.of(kind.table), rows * count) for kind in self._kinds
            ]
            pages.stream.own(*(planner.workspace for planner in found))
            while len(self._longer) >= SIZES:
                dropped = self._longer.pop(next(iter(self._longer)))
                pages.stream.leave(*(planner.workspace for planner in dropped))
        self._longer[count, rows] = found
        return found

    def _anew(self, lengths: list[int], batch: PagedBatch, size: int) -> None:
        new = [1] * len(lengths)
        for kind in self._kinds:
            known = HostLengths(lengths, new, kind.window, size)
            kind.planner(batch.of(kind.table).known(known))
        self._last = [kind.last() for kind in self._kinds]


class Held:
    """The plans that graphs over pages read, which stay while the graphs do: `ahead` of
    `Graphed`."""

    def __init__(self, pages: ModelPages, policy: str, plans: StepPlans) -> None:
        self._pages, self._policy, self._plans = pages, policy, plans
        self._rows = 0  # of the latest step

    def plan_step(self, rows: int, live: int) -> None:
        """As `ModelPages.plan_step`, with these plans."""
        if self._pages.known_plans.get(self._policy) is not self._plans:
            self._pages.keep(self._policy, self._plans)  # those of others had taken their place
            self._pages.use()
        self._rows = rows
        self._pages.plan_step(self._plans, rows, live)

    def stepped(self) -> None:
        """As `ModelPages.stepped`. While the device runs the step, the host plans one more of the
        same rows."""
        pages = self._pages
        pages.stepped()
        known = pages.lengths
        if known is None or max(known.rows, default=0) >= pages.sizes.length:
            return
        after = [n + 1 for n in known.rows]
        with suppress(Exception):  # the next step meets it again
            self._plans.make(pages, after + [1] * (self._rows - len(after)))


def replanner(own: Planner, table: PagedBatch, tokens: int) -> Planner:
    """A Planner like another one, for a page table's steps of so many tokens."""
    rows, columns = table.page_table.shape
    return Planner(
        own.spec,
        max_tokens=tokens,
        max_requests=rows,
        max_pages=columns,
        device=table.page_table.device,
        kernel=own.kernel,
    )


def _batch(pages: ModelPages, before: Tensor) -> PagedBatch:
    """The batch of a step. before: int64 `[rows]`, tokens of each row before it."""
    rows, device = before.shape[0], before.device
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    tokens = Tokens(before, torch.arange(rows, device=device), starts, 1)
    return pages.describe(tokens, rows, (before + 1).to(torch.int32))
