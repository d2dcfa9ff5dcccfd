"""Compares what was recorded of a layer with its own code, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..core.fx_effects import storages
from ..core.op import OPS
from ..core.private_torch import OpOverload
from .forms import filled, tensors_of
from .record_functions import Recording

MOST_COMPARED = 2**26
"""Bytes of pages that are compared: those of a server may take most of the memory."""


class Before:
    """The states that a module's forward is about to read and write, as they are now. graph: of the
    recording."""

    def __init__(self, graph: fx.Graph, flat: tuple[Any, ...]) -> None:
        self.states = [flat[i] for i in _inputs(graph, "states")]
        self._copies = [t.clone() for t in self.states]

    def again(self) -> list[Tensor]:
        """Put the states back. Returns copies of what the forward has made of them."""
        moved = [t.clone() for t in self.states]
        for state, copy in zip(self.states, self._copies, strict=True):
            state.copy_(copy)
        return moved


def differs(found: Recording, flat: tuple[Any, ...], result: Any, before: Before) -> bool:
    """Does the graph, before it is rewritten, give other numbers than the module's forward, which
    has run on the same tensors, or write other ones into pages or states? result: of the forward.
    before: the states before that."""
    graph = found.module.graph
    pages = [flat[i] for i in _inputs(graph, "pages") if flat[i].nbytes <= MOST_COMPARED]
    want = tensors_of(result)
    written = [t.clone() for t in pages] + before.again()
    pages += before.states
    got = tensors_of(filled(found.out, found.module(*flat)))
    alike = all(
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        for a, b in zip(got, want, strict=True)
    )
    return not (alike and all(map(_equal, got + pages, want + written)))


def _inputs(graph: fx.Graph, holds: str) -> list[int]:
    """Which inputs our ops take as "pages" or "states", which they may write. holds: one of these
    words."""
    taken: list[Any] = []
    for node in graph.nodes:
        op = OPS.get(_name(node.target))
        if op is None:
            continue
        names = (argument.name for argument in node.target._schema.arguments)
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        taken += (given[a.name] for a in op.spec.args if a.holds == holds and a.name in given)
    found = {*_storages(x for x in taken if isinstance(x, fx.Node))}
    inputs = graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if not found.isdisjoint(_storages([node]))]


def _name(target: Any) -> str:
    """Of an op of ours; "" of another."""
    ours = isinstance(target, OpOverload) and target.namespace == "attnops"
    return target._schema.name.removeprefix("attnops::") if ours else ""


def _storages(nodes: Iterable[fx.Node]) -> Iterator[Any]:
    return storages([node.meta.get("example_value") for node in nodes])  # sizes have none


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        # torch compares few of the small floats on every device.
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
