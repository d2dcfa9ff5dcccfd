"""A decode step whose layers are compiled once a kind: each is given its own part of the step, in
place of the cache of all layers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnops.cache.batch import PagedBatch
from attnops.core.private_torch import assert_async
from attnops.graphs.per_layer import NUMBER, NotRegional, Regions, Twin, twin, write_back
from attnops.hf.attention import descriptor
from attnops.hf.cache.described import Masks, described, tree_masks, tree_of
from attnops.hf.cache.model_pages import EMPTY, ModelPages
from attnops.hf.cache.names import argument_of
from attnops.hf.cache.paged_cache import Behind, PagedModelCache, Step, View
from attnops.hf.models.methods import is_replaced
from attnops.hf.models.states import States
from attnops.hf.steps.hidden import Outputs, outputs_of
from attnops.lowering.compile_layers import repeated_blocks
from attnops.nn.steady import is_linear

NOTHING = -1
"""In place of the number of a layer that keeps nothing of the tokens."""

_STOP = "attnops: rows that the step before did not have, or a cache that is full"


def layered(forward: Callable[..., Any], model: nn.Module, regions: Regions) -> Callable[..., Any]:
    """A decode step of the model, as `starts` and `forward` make it, that calls its layers through
    `regions`.

    So are the modules beside the layers, such as a norm, and the tensor code that begins the step.
    Raises NotRegional when called.
    """

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        live: Tensor,
        cache: PagedModelCache,
        lengths: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Any:
        layers, beside = modules_of(model, cache)
        try:
            here = Here(regions, cache, live.shape[0], threading.get_ident())
            here.begin(live, lengths, input_ids.shape[1], parents)
            with here.calls(layers, beside):
                return run_model(forward, argument_of(model), input_ids, position_ids, cache)
        finally:
            cache.state.end_step()

    return step


def verifying(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of `layered` or `step_of` that verifies drafts, as graphs of such steps call it."""

    def verify(
        tokens: Tensor,
        positions: Tensor,
        lengths: Tensor,
        live: Tensor,
        cache: PagedModelCache,
        parents: Tensor | None = None,
    ) -> Any:
        """tokens, positions: int64 `[B * N]`. lengths, live: int64 `[B]`. parents: int32
        `[B * N]`."""
        rows = live.shape[0], -1
        tree = None if parents is None else parents.view(rows)
        return step(tokens.view(rows), positions.view(rows), live, cache, lengths, tree)

    return verify


def run_model(
    forward: Callable[..., Any],
    argument: str,
    input_ids: Tensor,
    position_ids: Tensor,
    cache: PagedModelCache,
) -> Outputs:
    """A step by a model's forward. argument: the name of the model's cache."""
    given: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, argument: cache}
    return outputs_of(forward(**given, use_cache=True, return_dict=True))


def starts(pages: ModelPages, live: Tensor, queries: int = 1) -> tuple[Tensor, Tensor]:
    """(int64 `[B]`, the padding; bool `[B]`, is the row stored?) of a step of `queries` tokens.

    live: int64 `[B]`, 1 for a row of the batch, 0 for one that fills the bucket.
    """
    # A slice may be shorter to torch 2.11
    pad, real = pages.pad.narrow(0, 0, live.shape[0]), live != 0
    last = pages.seen + (queries - 1) if queries > 1 else pages.seen
    assert_async((~real | ((pad < EMPTY) & (last < pages.most))).all(), _STOP)
    # A padding row stores no token and reads the first slot of its pages, so that no kernel meets a
    # length of 0.
    return torch.where(real, pad, pages.seen), real


def place(pages: ModelPages, lengths: Tensor, live: Tensor) -> None:
    """Count `lengths` int64 `[B]` tokens in the pages of each row, whatever was counted before. All
    rows end at one position, behind padding. live: as in `starts`."""
    real = live != 0
    seen = torch.where(real, lengths, 0).amax()
    pages.seen.copy_(seen)
    pages.advance(torch.where(real, seen - lengths, EMPTY), 0)
    pages.states.accept(lengths, real)


def _begin(
    pages: ModelPages,
    live: Tensor,
    heads: int,
    planned: bool,
    lengths: Tensor | None = None,
    count: int = 1,
    parents: Tensor | None = None,
) -> tuple[Tensor, Tensor, PagedBatch, Masks | None]:
    """(the padding, positions before the step, its batch, its masks). The step of `count` tokens a
    row counts as seen. lengths: see `place`; None: the tokens that the pages count. parents: see
    `tree_masks`."""
    if lengths is not None:
        place(pages, lengths, live)
    (start, real), before = starts(pages, live, count), pages.seen.clone()
    batch = described(pages, before - start, real, count, heads, planned)
    masks = None if parents is None else tree_masks(pages, batch, parents)
    pages.advance(torch.where(real, start, EMPTY), count)
    return start, before, batch, masks


@dataclass(frozen=True)
class Here:
    """A step under way in a thread, of `rows` rows of as many tokens each, or packed: of `rows`
    tokens of a prompt in one row.

    twins: of layers of a packed step that have not changed since.
    batches: of the step, by page table.
    """

    regions: Regions
    cache: PagedModelCache
    rows: int
    thread: int
    packed: bool = False
    twins: dict[nn.Module, Twin] = field(default_factory=dict)
    batches: dict[int, PagedBatch] = field(default_factory=dict)

    @contextmanager
    def calls(self, layers: Mapping[nn.Module, int], beside: Sequence[nn.Module]) -> Iterator[None]:
        """Within the block, this thread's calls of these modules are those of the step. layers:
        with their numbers."""
        try:
            # Attributes of the instances for the time of the step, as hooks, the public way, run
            # beside a forward and not in its place. Calls of other threads run as ever.
            for layer, number in layers.items():
                vars(layer)["forward"] = partial(self.layer, layer, number)
            for module in beside:
                vars(module)["forward"] = partial(self.module, module)
            yield
        finally:
            for module in (*layers, *beside):
                vars(module).pop("forward", None)

    def begin(
        self, live: Tensor, lengths: Tensor | None, count: int, parents: Tensor | None
    ) -> None:
        """Begin the step of the cache, of `count` tokens a row. lengths, parents: of `_begin`."""
        state, rows = self.cache.state, self.rows
        pages = state.pages
        any_size = copy.copy(pages)
        any_size.pad = self.regions.varying(pages.pad.detach(), 0)
        any_size.tables = tuple(self.regions.varying(table[:rows], 0, 1) for table in pages.tables)
        plans = pages.plans()
        planned = plans is not None and plans.whole
        given = any_size, live, pages.sizes.layers[0].q_heads, planned, lengths, count, parents
        state.start, state.before, batch, masks = self.regions(_begin, rows, given, {})
        state.verified = None if lengths is None else state.start
        planners = () if plans is None else plans.planners
        one_launch = pages.one_launch() if count == 1 else ()
        state.step = Step(batch, (), False, one_launch, planners, masks=masks)
        state.filled = True
        state.unfinished = count

    def layer(self, layer: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward."""
        if threading.get_ident() != self.thread:
            return type(layer).forward(layer, *args, **kwargs)
        cache, pages = self.cache, self.cache.state.pages
        view = self._view(number, kwargs.get("attention_mask"))
        if number in cache.states:
            kwargs = _without_padding(kwargs)
        kernel = pages.kernels[cache.numbers[number]] if number in cache.numbers else ""
        args = tuple(view if value is cache else value for value in args)
        kwargs = {name: view if value is cache else value for name, value in kwargs.items()}
        if self.packed:
            self._let_vary(args, kwargs)
        # The kernel is chosen at the trace, for all of its sizes. Pages for which another one is
        # faster have a trace of their own.
        same = None
        if self.packed and self.regions.takes_twins:
            same = self.twins.get(layer) or twin(layer)
        out = self.regions(layer, self.rows, args, kwargs, apart=kernel, same=same)
        if same is not None and layer not in self.twins:
            wrote = write_back(layer, same[0])
            if not wrote:  # a twin whose run set attributes is not the layer's any more
                self.twins[layer] = same
        return out

    def _let_vary(self, *given: Any) -> None:
        """Compiled code shall take any number of tokens."""
        for t in pytree.tree_leaves(given):
            if isinstance(t, Tensor) and t.dim() > 1 and t.shape[:2] == (1, self.rows):
                self.regions.varying(t, 1)

    def _view(self, number: int, mask: Any) -> View:
        cache, pages, step = self.cache, self.cache.state.pages, self.cache.state.step
        assert step is not None
        if number not in cache.numbers:
            return self._without_pages(number, step)
        at = cache.numbers[number]
        heads = pages.sizes.layers[0].q_heads
        window = cache.window_of(number)
        table = pages.table_of[at]
        if table not in self.batches:
            self.batches[table] = _any_sizes(self.regions, step.batch.of(table))
        batch = self.batches[table]
        if step.planners and (planner := step.planners[at]) is not None:
            # Not of varying sizes: kernels look at those of scratch, and a plan has one.
            batch = replace(batch, plan=planner.plan, workspace=planner.workspace)
        own = tuple(self.regions.varying(t.detach(), 0) for t in pages.layers[at])
        past = step.past[table] if step.past else None
        if isinstance(past, Behind):
            slots, new, starts = (self.regions.varying(t.detach(), 0) for t in past[:3])
            past = Behind(slots, new, starts, past.most)
        # Sliding layers whose pages hold the whole text, or less, share code once their windows are
        # compared.
        window = 0 if _within(mask, window) else window
        one_launch = bool(step.one_launch) and step.one_launch[at]
        return View(
            own,
            window,
            batch,
            past,
            fresh=step.fresh,
            heads=heads,
            packed=self.packed,
            one_launch=one_launch,
            tree=None if step.masks is None else tree_of(pages, step.masks, at),
            states=self._states(number, step),
        )

    def _without_pages(self, number: int, step: Step) -> View:
        """Of a layer that keeps no keys: a state, or nothing."""
        states = self._states(number, step)
        return View((), 0, step.batch, fresh=step.fresh, packed=self.packed, states=states)

    def _states(self, number: int, step: Step) -> States | None:
        """Those of a layer, of the requests of a step."""
        if number not in self.cache.states:
            return None
        state = self.cache.state
        requests = step.batch.cu_seqlens_q.shape[0] - 1
        own: States = state.pages.states.of(self.cache.states[number], requests, state.verifies)
        return own

    def module(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of a module beside the layers."""
        if threading.get_ident() != self.thread:
            return type(module).forward(module, *args, **kwargs)
        return self.regions(module, self.rows, args, kwargs)


def modules_of(
    model: nn.Module, cache: PagedModelCache
) -> tuple[dict[nn.Module, int], list[nn.Module]]:
    """(the repeated layers and the number of each, modules beside them).

    Raises NotRegional for those of other modules, or of several in a layer, and for a module that
    is compiled or has a forward of its own.
    """
    found: dict[nn.Module, int] = {}
    served = cache.numbers.keys() | cache.states.keys()
    parents: dict[nn.Module, None] = {}
    for name in repeated_blocks(model):
        block = model.get_submodule(name)
        numbers = {n for part in block.modules() if (n := getattr(part, NUMBER, None)) in served}
        if len(numbers) > 1:
            raise NotRegional(f"{name} holds several layers, {sorted(numbers)}")
        if numbers:
            found[block] = numbers.pop()
            parents[_list_of(model, name)] = None
    # Layers that keep nothing, as of experts alone, between others.
    for name in repeated_blocks(model):
        block = model.get_submodule(name)
        if block not in found and _list_of(model, name) in parents:
            found[block] = NOTHING
    if missing := sorted(served.difference(found.values())):
        raise NotRegional(f"layers {missing} are in no list of layers of one class")
    beside = _beside(model, parents)
    own = [type(m).__name__ for m in (*found, *beside) if is_replaced(m)]
    if own:
        raise NotRegional(f"{own[0]} has a forward of its own instance, or is compiled")
    return found, beside


def _list_of(model: nn.Module, name: str) -> nn.Module:
    """The module whose list of layers holds the layer of this name."""
    return model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])


def _beside(model: nn.Module, parents: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules beside the layers, and the product of the logits. parents: of the layers."""
    # torch's own are one kernel each, but for the product of the logits another kernel may be
    # faster.
    found = [
        m
        for parent in parents
        for m in parent.children()
        if not type(m).__module__.startswith("torch.")
    ]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) and is_linear(head) and not is_replaced(head):
        found.append(head)
    return found


def _without_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer with a state without masks of padding `[B, S]`: the tokens of a step
    have none."""
    changed = kwargs.copy()
    for name, x in kwargs.items():
        if name.endswith("attention_mask") and isinstance(x, Tensor) and x.dim() == 2:
            changed[name] = None
    return changed


def _within(mask: Any, window: int) -> bool:
    """Does the mask see no more than the window?"""
    known = isinstance(mask, Tensor) and mask.dtype == descriptor.DTYPE and mask.dim() == 4
    return known and 0 <= descriptor.read(mask, mask.shape[0]).window_left < window


def _any_sizes(regions: Regions, batch: PagedBatch) -> PagedBatch:
    tensors = {f.name: x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor)}
    # Kernels look at the size of scratch.
    dims = {name: () if name == "workspace" else range(t.dim()) for name, t in tensors.items()}
    changes: dict[str, Any] = {
        name: regions.varying(t.detach(), *dims[name]) for name, t in tensors.items()
    }
    return replace(batch, others=(), **changes)
