"""A decode step whose layers are compiled once a kind: each is given its own part of the step, in place of the cache of all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.graphs.regional import NUMBER, NotRegional, Regions, varying
from attnops.hf.attention import descriptor
from attnops.hf.paged.cache import PagedModelCache, View
from attnops.lowering.regional import repeated_blocks


def layered(step: Callable[..., Any], model: nn.Module, regions: Regions, cache: PagedModelCache) -> Callable[..., Any]:
    """`step`, a function of the model over `cache`, that calls the model's layers through `regions`. Raises NotRegional when called."""

    def run(**values: Any) -> Any:
        layers = _numbered(model, cache)
        try:
            for layer, number in layers.items():
                # An attribute of the instance for the time of the step. Calls with another cache run as ever.
                vars(layer)["forward"] = functools.partial(_forward, layer, number, regions, cache)
            return step(**values)
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)
            cache.state.end_step()

    return run


def _numbered(model: nn.Module, cache: PagedModelCache) -> dict[nn.Module, int]:
    """The repeated layers with pages, and the number of each. Raises NotRegional for pages of other modules, or of several in a layer."""
    found: dict[nn.Module, int] = {}
    for name in repeated_blocks(model):
        block = model.get_submodule(name)
        numbers = {n for part in block.modules() if (n := getattr(part, NUMBER, None)) in cache.numbers}
        if len(numbers) > 1:
            raise NotRegional(f"{name} holds several layers, {sorted(numbers)}")
        if numbers:
            if "forward" in vars(block) or getattr(block, "_compiled_call_impl", None) is not None:
                raise NotRegional(f"{name} has a forward of its own instance, or is compiled")
            found[block] = numbers.pop()
    if missing := sorted(cache.numbers.keys() - set(found.values())):
        raise NotRegional(f"layers {missing} are in no list of layers of one class")
    return found


def _forward(layer: Any, number: int, regions: Regions, cache: PagedModelCache, *args: Any, **kwargs: Any) -> Any:
    """The layer's forward of this step."""
    if not any(value is cache for value in (*args, *kwargs.values())):
        return type(layer).forward(layer, *args, **kwargs)
    state, pages = cache.state, cache.state.pages
    assert state.start is not None
    heads = pages.sizes.layers[0].q_heads
    view = cache.view(number, state.start, 1, heads)
    # Sliding layers whose pages hold the whole text, or less, share code once their windows are compared.
    window = 0 if _within(kwargs.get("attention_mask"), view.window) else view.window
    given = View(tuple(varying(t.detach(), 0) for t in view.pages), window, _any_sizes(view.batch), heads=heads)
    args = tuple(given if value is cache else value for value in args)
    kwargs = {name: given if value is cache else value for name, value in kwargs.items()}
    # The kernel is chosen at the trace, for all of its sizes. Pages for which another one is faster have a trace of their own.
    out = regions(layer, state.start.shape[0], args, kwargs, apart=pages.kernels[cache.numbers[number]])
    cache.wrote(number)
    return out


def _within(mask: Any, window: int) -> bool:
    """Does the mask see no more than the window?"""
    known = isinstance(mask, Tensor) and mask.dtype == descriptor.DTYPE and mask.dim() == 4
    return known and 0 <= descriptor.read(mask, mask.shape[0]).window_left < window


def _any_sizes(batch: PagedBatch) -> PagedBatch:
    tensors = {f.name: x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)}
    # Kernels look at the size of scratch.
    dims = {name: () if name == "workspace" else range(t.dim()) for name, t in tensors.items()}
    changes: dict[str, Any] = {name: varying(t.detach(), *dims[name]) for name, t in tensors.items()}
    return replace(batch, others=(), **changes)
