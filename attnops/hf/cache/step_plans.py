"""`StepPlans`: the host's plans of steps of one token, for layers whose kernel reads one.

They lie in the buffers of `Planner`s, which graphs read at every replay. A plan made for other
lengths serves as long as every row has as many pages: then only the tokens of each row's last page
are copied to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.cache.planner import Planner
from attnops.cache.step import host_lengths
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem


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


class StepPlans:
    """The plans of all layers of a model's pages, under one policy.

    kinds: by the layers' Problem. describe: makes the batch of a step from the tokens of each row
    on the device, int64 `[rows]`, those of the step left out.
    """

    def __init__(
        self,
        kinds: Mapping[Problem, Kind],
        page_size: int,
        describe: Callable[[Tensor], PagedBatch],
    ) -> None:
        self.kinds, self.page_size, self._describe = kinds, page_size, describe
        self._pages: list[list[tuple[int, int]]] = []
        self._last: list[Tensor | None] = []

    def make(self, lengths: list[int], device: torch.device) -> None:
        """Plan a step. lengths: tokens of each row, the new one included. It waits for nothing."""
        size = self.page_size
        pages = [
            [(-(-n // size), max(n - kind.window, 0) // size * bool(kind.window)) for n in lengths]
            for kind in self.kinds.values()
        ]
        pinned = device.type == "cuda"
        with ordinary():
            if pages != self._pages or None in self._last:
                self._anew(lengths, device, pinned)
                self._pages = pages
                return
            tail = [(n - 1) % size + 1 for n in lengths]
            staged = torch.tensor(tail, dtype=torch.int32, device="cpu", pin_memory=pinned)
            for last in self._last:
                assert last is not None
                last.copy_(staged, non_blocking=True)

    def _anew(self, lengths: list[int], device: torch.device, pinned: bool) -> None:
        self._pages = []  # until all plans are made
        before = torch.tensor(lengths, dtype=torch.int64, device="cpu", pin_memory=pinned)
        batch = self._describe(before.to(device, non_blocking=True) - 1)
        new = [1] * len(lengths)
        for kind in self.kinds.values():
            known = host_lengths(lengths, new, kind.window, self.page_size)
            kind.planner(batch.of(kind.table).known(known))
        self._last = [kind.last() for kind in self.kinds.values()]
