"""`Paths`: trees of drafts, and the moves that put the accepted tokens together in the pages."""

from __future__ import annotations

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
            self._path = torch.full_like(self.parents, -1)
            self._stored = torch.zeros(rows, dtype=torch.int64, device=device)
            self._most = torch.full((rows,), most, dtype=torch.int32, device=device)
            self._columns = torch.arange(most, dtype=torch.int32, device=device)
            self._rows = torch.arange(rows, device=device).repeat(2)
        self._pages: ref[ModelPages] | None = None
        # A graph holds addresses of the pages, and no graph may hold pages.
        self._graphs: WeakKeyDictionary[ModelPages, ChoiceGraphs] = WeakKeyDictionary()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its buffers."""
        return self.parents, self.depths, self._path, self._stored

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

    def of(self, nodes: int) -> Tensor:
        """int32 `[B, nodes]`, contiguous."""
        return self.parents[:, :nodes].contiguous()

    def note(self, path: Tensor, stored: Tensor) -> None:
        """Keep what `move` needs. path: int32 `[B, nodes]`, of accepted nodes. stored: int64 `[B]`,
        the tokens of each row in the pages before the step that verified them."""
        self._path[:, : path.shape[1]].copy_(path)
        self._stored.copy_(stored)

    @property
    def nbytes(self) -> int:
        """Bytes of its graphs."""
        return sum(made.nbytes for made in self._graphs.values())

    def use(self, pages: ModelPages, device: Device) -> None:
        """Move within these pages from now on."""
        self._pages = ref(pages)
        if pages not in self._graphs:
            made = ChoiceGraphs()
            made.capture(device, self.parents.shape[1:], self._clear, self._move)
            self._graphs[pages] = made

    def move(self, nodes: int) -> None:
        """Put the accepted nodes of the last step behind the tokens before them, in all layers. The
        host does not wait."""
        self._graphs[self._held()].run(nodes, self._move)

    def _held(self) -> ModelPages:
        pages = None if self._pages is None else self._pages()
        assert pages is not None, "pages live as long as the call that uses them"
        return pages

    def _clear(self) -> None:
        self._path.fill_(-1)
        self._stored.zero_()

    def _move(self, nodes: int) -> None:
        pages = self._held()
        path, columns = self._path[:, :nodes], self._columns[:nodes]
        moved, first = (path > columns).flatten(), self._stored[:, None]
        # What does not move is copied from nowhere, and has a place of the row all the same.
        places = torch.cat((first + torch.maximum(path, columns), first + columns))
        owner = self._rows[:, None].expand_as(places).flatten()
        for number, table in enumerate(pages.tables):
            at = places % (table.shape[1] * pages.page_size)  # pages of a window serve in turn
            slots = slot_mapping(at.flatten(), owner, table, page_size=pages.page_size)
            source, target = slots.chunk(2)
            pages.copy_slots(number, torch.where(moved, source, -1), target, group=nodes)
