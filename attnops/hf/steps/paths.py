"""`Paths`: trees of drafts, and the moves that put the accepted tokens together in the pages."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from attnops.cache.paged import ordinary
from attnops.graphs.cuda_graphs import Device
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.ops import slot_mapping, tree_mask


class Paths:
    """Of B rows of N nodes at most.

    parents: int32 `[B, N]`, of the next input, as in `accept`. Of a chain too, so that one graph
    accepts both. depths: int64 `[B, N]`, 0 for the root.
    """

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        with ordinary():
            self.parents = torch.zeros((rows, most), dtype=torch.int32, device=device)
            self.depths = torch.zeros_like(self.parents, dtype=torch.int64)
            self._most = torch.full((rows,), most, dtype=torch.int32, device=device)
            self._columns = torch.arange(most, dtype=torch.int32, device=device)
            self._rows = torch.arange(rows, device=device).repeat(2)
        self._pages: ref[ModelPages] | None = None
        # A graph holds addresses of the pages, and no graph may hold pages.
        self._graphs: WeakKeyDictionary[ModelPages, ChoiceGraphs] = WeakKeyDictionary()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its buffers."""
        return self.parents, self.depths

    @property
    def nbytes(self) -> int:
        """Bytes of its graphs."""
        return sum(made.nbytes for made in self._graphs.values())

    def take(self, parents: Tensor | None) -> None:
        """Take the next input. parents: int32 `[B, K]`, of a proposal; None: it is a chain."""
        if parents is None:
            self.parents.copy_(self._columns - 1)
            self.depths.copy_(self._columns)
            return
        rows, most = self.parents.shape
        some = parents[:, : most - 1]
        self.parents.fill_(-1)
        # The root is the first node.
        self.parents[:, 1 : 1 + some.shape[1]].copy_(some + 1)
        seen = tree_mask(self.parents, self._most, num_keys=most)
        torch.sum(seen.view(rows, most, most), 2, out=self.depths).sub_(1)

    def use(
        self,
        pages: ModelPages,
        device: Device,
        clear: Callable[[], None],
        move: Callable[[int], None],
    ) -> None:
        """Move within these pages from now on. clear, move: as `ChoiceGraphs.capture` takes them;
        the second calls `move`."""
        self._pages = ref(pages)
        if pages not in self._graphs:
            made = ChoiceGraphs()
            made.capture(device, self.parents.shape[1:], clear, move)
            self._graphs[pages] = made

    def run(self, nodes: int, move: Callable[[int], None]) -> None:
        """Move what the last step of so many nodes has verified, in a graph where there is one. The
        host does not wait."""
        self._graphs[self._held()].run(nodes, move)

    def move(self, path: Tensor, first: Tensor) -> None:
        """Put the kept nodes together in all layers. path: int32 `[B, N]`, their numbers in order,
        and -1 beyond. first: int64 `[B]`, the place of the root in the pages."""
        pages, columns = self._held(), self._columns[: path.shape[1]]
        moved, first = (path > columns).flatten(), first[:, None]
        # What does not move is copied from nowhere, and has a place of the row all the same.
        places = torch.cat((first + torch.maximum(path, columns), first + columns))
        owner = self._rows[:, None].expand_as(places).flatten()
        for number, table in enumerate(pages.tables):
            at = places % (table.shape[1] * pages.page_size)  # pages of a window serve in turn
            slots = slot_mapping(at.flatten(), owner, table, page_size=pages.page_size)
            source, target = slots.chunk(2)
            group = path.shape[1]
            pages.copy_slots(number, torch.where(moved, source, -1), target, group=group)

    def _held(self) -> ModelPages:
        pages = None if self._pages is None else self._pages()
        assert pages is not None, "pages live as long as the call that uses them"
        return pages
