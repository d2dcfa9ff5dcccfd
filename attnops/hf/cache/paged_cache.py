"""`PagedModelCache`: a cache in pages that attnops owns, with the interface of transformers'
caches.

It gives transformers lengths, resets, rollbacks and an object for each layer, but no keys and
values: `update` returns the new ones as they came, with one more dimension, so that a consumer
which does not know of this cache fails instead of computing nonsense. The attention function writes
and reads the pages (see `attnops.hf.attention.over_pages`).

A row is a request, and has the same pages as long as the cache lives. Padding on the left is not
stored: the token of row b at position p of the padded batch is token `p - pad[b]` of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from attnops.cache.batch import PagedBatch
from attnops.cache.planner import Planner
from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import FakeTensor, capturing, count_dispatch_modes
from attnops.core.select import _ACTIVE
from attnops.graphs.per_layer import NotRegional
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.described import (
    Masks,
    Tree,
    apart,
    described,
    single,
    tree_masks,
    tree_of,
    windows_before,
)
from attnops.hf.cache.meanwhile import Meanwhile
from attnops.hf.cache.model_pages import EMPTY, ModelPages, Past
from attnops.hf.cache.step_plans import StepPlans
from attnops.hf.models.states import PAGES, OfStates, StateLayer, States, StepsOfStates


class Behind(NamedTuple):
    """The keys of a packed chunk over a window whose pages the chunk overwrites: of each request
    those of its window, copied before, and its new ones behind them.

    slots: int64 `[N]`, of copied tokens; 0 for others. new: int64 `[T]`, the places of new tokens.
    starts: int32 `[B + 2]`, as `cu_seqlens_k`. most: copied tokens of one request.
    """

    slots: Tensor
    new: Tensor
    starts: Tensor
    most: int


class Step(NamedTuple):
    """A forward pass, shared by its layers.

    batch: of all page tables.
    past: of each page table the tokens before a step too long to attend through it; None: it is
    not. Empty: none is.
    fresh: the cache was empty before the step.
    one_launch: as `ModelPages.one_launch`, of a step of one token; else empty.
    planners: as in `StepPlans`; empty where no layer reads a plan.
    meanwhile: as `ModelPages.meanwhile`; empty where layers choose their kernels.
    masks: of a step that verifies a tree; else None. apart: is each token a request of its own?
    """

    batch: PagedBatch
    past: tuple[Past | Behind | None, ...]
    fresh: bool
    one_launch: tuple[bool, ...] = ()
    planners: tuple[Planner | None, ...] = ()
    meanwhile: tuple[Meanwhile, ...] = ()
    masks: Masks | None = None
    apart: bool = False


@dataclass(frozen=True)
class View(OfStates):
    """One layer's part of a step: its pages and window, its page table's batch and past, and is the
    cache fresh, as in `Step`?

    Compiled code of one layer is given it in place of the cache. It holds no layer number, so that
    the code serves all layers.
    heads: query heads that the batch's plan was made for. one_launch: do steps of one token take
    `decode_attention`?
    packed: are the tokens of all requests in one row, one request after the other?
    meanwhile: the kernels that this step takes; None: they are chosen.
    tree: what the step's nodes see; None: it has no tree.
    states: those of the layer, of the requests of `batch`; None for a layer without.
    apart: is each token a request of its own?
    """

    pages: tuple[Tensor, ...]
    window: int
    batch: PagedBatch
    past: Past | Behind | None = None
    fresh: bool = False
    heads: int = 0
    one_launch: bool = False
    packed: bool = False
    meanwhile: Meanwhile | None = None
    tree: Tree | None = None
    states: States | None = None
    apart: bool = False
    last_layer: ClassVar[int | None] = None
    """The step notes the writes in the cache when its layers return."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotRegional(f"the layer asks its cache for {name}")

    @property
    def latent(self) -> bool:
        """Does it hold latents?"""
        return len(self.pages) == 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """As `PagedLayer.update`."""
        return key_states[None], value_states[None]

    def window_of(self, layer: Any) -> int:
        """Its window."""
        return self.window

    def view(self, layer: Any, start: Tensor, count: int, heads: int) -> View:
        """Itself: the step began before the layer. Raises NotRegional for other heads than those
        that a plan was made for."""
        if self.batch.plan is not None and heads != self.heads:
            raise NotRegional(
                f"the plan of a step is for {self.heads} query heads, a layer has {heads}"
            )
        return self


AHEAD = 32
"""Steps of one token whose batches are made at once."""


class Ahead(NamedTuple):
    """The batches of coming steps of one token each, valid while the other fields are unchanged.

    seen: positions before the first of the steps. start, pad: the padding of the rows of a step,
    and of all. policy: that in force. one_launch: as in `ModelPages`.
    """

    seen: int
    start: Tensor
    pad: Tensor
    policy: str
    batches: tuple[PagedBatch, ...]
    one_launch: tuple[bool, ...]


@dataclass(eq=False)
class State(StepsOfStates):
    """The pages while one cache uses them, shared by the cache and its layers: when all of these
    are gone, the pages are free again.

    give_back: of pages that are lent, the function that frees them now.
    step: the step under way.
    filled: are there tokens? A Python bool, because the form of a step depends on it.
    unfinished: positions of a step that counts as seen, and that not all layers have written. It
    stays when a layer raises.
    before: positions before the step under way, where it counts as seen before its masks are made.
    ahead: the batches of coming steps of one token, where the host may look at their numbers.
    waits: the model's own layers run its steps for now, while kernels of graphs are being compiled.
    moved: layers with states that tokens have reached.
    begun, rows: as `StepsOfStates` has them.
    early: a prompt that runs on a stream of its own (`hf.steps.early`). Other work does not wait
        for it: it reads counters, which the prompt leaves alone.
    start, real: set while a step in graphs, of one token each, is traced or captured (see
    `decode`). int64 `[B]`, the padding, and
        bool `[B]`, is the row stored?
    parents: int32 `[B, N]`, of the nodes of the step under way; None: it is no tree.
    """

    pages: Any
    give_back: Any = None
    step: Step | None = None
    filled: bool = False
    unfinished: int = 0
    start: Tensor | None = None
    real: Tensor | None = None
    parents: Tensor | None = None
    before: Tensor | None = None
    ahead: Ahead | None = None
    waits: bool = False
    early: Any = None
    moved: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    rows: int = 0
    name: ClassVar[str] = cache_names.NAME

    @property
    def whole(self) -> bool:
        """Are there tokens, and has every layer those of the last step?"""
        return self.filled and not (self.unfinished or self.begun)

    def use(self) -> None:
        """As `ModelPages.use`, but for the trace or capture of a step, around which they are
        used."""
        if self.start is None and self.early is None and not torch.compiler.is_compiling():
            stream = self.pages.stream
            if not stream.ordered:
                stream.use()

    def follow_early(self) -> None:
        """Let work to come on the pages follow a prompt that started early."""
        if self.early is not None:
            self.early.follow()
            self.early = None

    def end_step(self) -> None:
        """End the step under way: its last layer has written, or it does not count."""
        self.step = self.start = self.real = self.parents = self.before = self.verified = None
        self.unfinished = 0
        self.begun.clear()

    def clear(self) -> None:
        """Forget every token."""
        self.pages.clear()
        self.moved.clear()
        self.end_step()
        self.filled = False

    def left(self, tokens_to_remove: Any) -> Tensor:
        """int64 `[]`, positions that are left without the last `-tokens_to_remove`, or a positive
        number's first ones.

        Raises InvalidInput when a sliding window needs tokens whose pages have been used again.
        """
        self.pages.use()
        seen: Tensor = self.pages.seen
        asked = torch.as_tensor(tokens_to_remove, dtype=seen.dtype, device=seen.device).reshape(())
        left = torch.where(asked > 0, torch.minimum(seen, asked), (seen + asked).clamp(min=0))
        self.pages.check_length(left)
        return left

    def keep(self, length: Tensor) -> None:
        """Forget all but the first `length` `[]` positions."""
        if self.unfinished:
            self.unfinished = max(0, self.unfinished - int(self.pages.seen - length))
        self.pages.seen.copy_(length)


class PagedLayer(CacheLayerMixin):
    """A layer's view of the cache. All layers share one length, which the first one crops, and the
    later ones this object."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: State, first: bool) -> None:
        super().__init__()
        self.state, self.first, self.is_initialized = state, first, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, `[1, B, ...]` of `[B, ...]`. They are not stored yet.

        Raises InvalidInput: the pages were taken back.
        """
        _ = self.state.pages.sizes  # any attribute of pages that were taken back raises
        return key_states[None], value_states[None]

    def get_seq_length(self) -> Any:
        """int64 `[]`, positions so far, padding included."""
        self.state.use()
        return self.state.pages.seen if self.state.before is None else self.state.before

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(room in tokens, padding `[rows]`), for the mask function of attnops, which knows this
        cache by the tensor.

        The padding is `[B, 1]` in a captured step, which makes no check of the mask.
        """
        self.state.use()
        start = self.state.start
        return self.state.pages.sizes.length, self.state.pages.pad if start is None else start[
            :, None
        ]

    def get_max_length(self) -> int:
        """Positions there is room for."""
        return int(self.state.pages.sizes.length)

    def reset(self) -> None:
        """Forget every token."""
        self.state.clear()

    def crop(self, tokens_to_remove: Any) -> None:
        """As `PagedModelCache.crop`, for the layers with pages."""
        if self.first:
            self.state.keep(self.state.left(tokens_to_remove))

    def offload(self, *_: Any) -> None:
        """No effect: pages exist, and stay on their device."""

    prefetch = offload
    lazy_initialization: Any = offload

    def reorder_cache(self, *_: Any) -> None:
        """Raises InvalidInput: rows keep their pages."""
        want = (
            "a cache of transformers' own, for a way to generate that reorders the batch "
            "(beam search)"
        )
        fail(InvalidInput, cache_names.NAME, "a cache of pages", want)

    batch_repeat_interleave = batch_select_indices = reorder_cache


class PagedStateLayer(PagedLayer, StateLayer):
    """A layer with pages that keeps a state, too."""

    is_croppable = False

    def __init__(self, state: State, first: bool, number: int, place: int) -> None:
        PagedLayer.__init__(self, state, first)
        StateLayer.__init__(self, state, number, place)

    def crop(self, tokens_to_remove: Any) -> None:
        """Raises RuntimeError, as `StateLayer.crop`."""
        StateLayer.crop(self, tokens_to_remove)


class PagedModelCache(Cache):
    """A batch in pages, the cache of a model patched with `cache="paged"`. Made by
    `Patched.new_cache`.

    It holds `max_batch` rows of `max_length` positions each, padding included. Each call of the
    model brings as many new positions to every row. Batches may shrink. A row that was left out
    comes back as a new request: behind padding over all positions so far, or after `reset()`, which
    makes the cache as new. `crop(-n)` takes back the last n positions.
    """

    latent = False
    """Does it hold latents?"""
    own: ClassVar[Any] = None
    """The class of cache that the model takes alone, see `own_class`; None: it takes any."""

    def __init__(
        self,
        pages: ModelPages,
        paged_layers: Sequence[int],
        others: Callable[[], dict[int, Any]],
        filled: bool = False,
        states: Sequence[int] = (),
    ) -> None:
        """A cache over `pages`, for the layers of these numbers, which rise.

        others: makes the caches of the other layers, by number.
        states: the layers whose states are beside the pages.
        filled: the pages keep their tokens.
        """
        self.state = State(pages, filled=filled)
        if not filled:
            pages.clear()
        self.numbers = {layer: number for number, layer in enumerate(paged_layers)}
        self.states = {layer: place for place, layer in enumerate(states)}
        if filled:
            self.state.moved.update(states)
        self.first_layer, self.last_layer = paged_layers[0], paged_layers[-1]
        self._others, rest = others, others()
        rest |= {n: self._with_state(n, place) for n, place in self.states.items()}
        first, later = PagedLayer(self.state, first=True), PagedLayer(self.state, first=False)
        of_layer = {**dict.fromkeys(paged_layers, later), self.first_layer: first, **rest}
        Cache.__init__(self, layers=[of_layer[number] for number in sorted(of_layer)])

    def _with_state(self, number: int, place: int) -> StateLayer:
        if number not in self.numbers:
            return StateLayer(self.state, number, place)
        return PagedStateLayer(self.state, number == self.first_layer, number, place)

    def __bool__(self) -> bool:
        """Are there tokens? Phi-3 drops the cache of a long text that does not have them yet, as an
        empty one, unless it is false."""
        return self.state.filled

    def reset(self) -> None:
        """Forget every token. The states of linear attention, whose shape is that of a batch, are
        made anew."""
        self.state.clear()
        for layer, states in self._others().items():
            self.layers[layer] = states

    def crop(self, tokens_to_remove: Any) -> None:
        """Forget the last `-tokens_to_remove` positions of all layers, or of none. A positive
        number is the length to keep.

        Raises InvalidInput when a sliding window needs tokens that are gone. States of linear
        attention that cannot go back raise transformers' own RuntimeError.
        """
        left = self.state.left(tokens_to_remove)
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, StateLayer) or not isinstance(layer, PagedLayer):
                layer.crop(tokens_to_remove)
        self.state.keep(left)

    @property
    def max_batch(self) -> int:
        """Rows of the cache."""
        return int(self.state.pages.sizes.rows)

    @property
    def max_length(self) -> int:
        """Positions each row has room for, padding included."""
        return int(self.state.pages.sizes.length)

    def pages_of(self, layer: int) -> Any:
        """The pages of the model's layer `layer`: `[P, page, Dc + Dr]`, or `[P, page, Hkv, D]` and
        `[P, page, Hkv, Dv]`."""
        pages = self.state.pages.layers[self.numbers[layer]]
        return pages if len(pages) > 1 else pages[0]

    def window_of(self, layer: int) -> int:
        """Tokens that a query of `layer` sees in its pages, its own included; 0: all."""
        pages = self.state.pages
        return int(pages.windows[pages.table_of[self.numbers[layer]]])

    def view(self, layer: int, start: Tensor, count: int, heads: int) -> View:
        """The part of `layer` in the step of the forward that it runs in, see `step_of`."""
        step = self.step_of(layer, start, count, heads)
        pages = self.state.pages
        number = self.numbers[layer]
        table = pages.table_of[number]
        batch = step.batch if table == 0 else step.batch.of(table)
        if step.planners and (planner := step.planners[number]) is not None:
            batch = replace(batch, plan=planner.plan, workspace=planner.workspace)
        past = step.past[table]
        one_launch = bool(step.one_launch) and step.one_launch[number]
        own = pages.layers[number]
        return View(
            single(own) if step.apart and self.state.parents is not None else own,
            pages.windows[table],
            batch,
            past,
            step.fresh,
            one_launch=one_launch,
            meanwhile=step.meanwhile[number] if step.meanwhile else None,
            tree=None if step.masks is None else tree_of(pages, step.masks, number),
            apart=step.apart,
        )

    def step_of(self, layer: int, start: Tensor, count: int, heads: int) -> Step:
        """The step of the forward that `layer` runs in. The first layer makes it, and counts the
        new positions as seen.

        start: int64 `[B]`, the padding of each row. count: new positions of each row. heads: query
        heads of the layer. Raises InvalidInput: an earlier layer has not run, or the step before
        this one ended in an error half way.
        """
        if layer == self.first_layer:
            self.state.step = self._begin(start, count, heads)
        if self.state.step is None:
            fail(
                InvalidInput,
                "layer_idx",
                layer,
                f"layer {self.first_layer} before it: the first layer begins a step of this cache",
            )
        return self.state.step

    def wrote(self, layer: int) -> None:
        """Note that `layer` has written its part of the step. With the last layer's part the step
        is whole."""
        if layer == self.last_layer:
            self.state.step, self.state.unfinished = None, 0
            if self.states:
                self.state.end_part(PAGES)

    def _begin(self, start: Tensor, count: int, heads: int) -> Step:
        state, unfinished = self.state, self.state.unfinished
        if unfinished:
            got = f"a cache whose last step, of {unfinished} positions, did not reach every layer"
            want = f"reset(), or crop(-{unfinished}), before it is used again"
            fail(InvalidInput, cache_names.NAME, got, want)
        state.use()
        pages = state.pages
        # A compiler would take the numbers of a step for constants.
        if count == 1 and state.filled and not torch.compiler.is_compiling():
            step = self._foreseen(start)
            if step is not None:
                return step
        real = state.real
        fresh = not state.filled
        before = state.pages.seen - start
        by_hand = _captured_by_hand(state, before)
        # Several tokens of a fresh step attend to each other.
        plans = None if by_hand or (fresh and count > 1) else pages.plans()
        in_graph = state.start is not None and count == 1
        planned = in_graph and plans is not None and plans.whole
        batch, masks, is_apart = self._described(before, count, heads, planned)
        past = windows_before(pages, before, long=not fresh and count > pages.sizes.drafts)
        planners = () if plans is None else _planned(plans, state, before, count, batch)
        # A run on fake tensors, as of `explain`, stores no token.
        if torch.compiler.is_compiling() or not isinstance(before, FakeTensor):
            pages.advance(start if real is None else torch.where(real, start, EMPTY), count)
            state.filled, state.unfinished = True, count
        meanwhile = () if by_hand else self._meanwhile(before)
        one_launch = self._one_launch(meanwhile) if count == 1 or is_apart else ()
        return Step(batch, past, fresh, one_launch, planners, meanwhile, masks, is_apart)

    def _described(
        self, before: Tensor, count: int, heads: int, planned: bool
    ) -> tuple[PagedBatch, Masks | None, bool]:
        """The batch of a step, the masks of a tree, and is each token a request of its own? So it
        is in a step that verifies under a deterministic policy, which needs no masks."""
        state = self.state
        pages, real, parents = state.pages, state.real, state.parents
        if state.verified is not None and count > 1 and _ACTIVE.deterministic:
            return apart(pages, before, real, count, parents), None, True
        batch = described(pages, before, real, count, heads, planned)
        return batch, None if parents is None else tree_masks(pages, batch, parents), False

    def _meanwhile(self, before: Tensor) -> tuple[Meanwhile, ...]:
        """As `ModelPages.meanwhile` where the step waits for graphs; else empty. So in a trace,
        which others run later, and on fake tensors, by which kernels begin to be compiled."""
        state = self.state
        if not state.waits or torch.compiler.is_compiling() or isinstance(before, FakeTensor):
            return ()
        found: tuple[Meanwhile, ...] = state.pages.meanwhile()
        return found

    def _one_launch(self, meanwhile: tuple[Meanwhile, ...]) -> tuple[bool, ...]:
        """As `ModelPages.one_launch`; empty where other kernels of attention serve meanwhile."""
        there = meanwhile and all(each.attention for each in meanwhile)
        found: tuple[bool, ...] = () if there else self.state.pages.one_launch()
        return found

    def _foreseen(self, start: Tensor) -> Step | None:
        """The next step of one token, which is then counted as seen; None where its batch must be
        made by itself: on a device for which the host would wait, or with windows or plans.

        start: as in `step_of`.
        """
        state, pages = self.state, self.state.pages
        if type(start) is not Tensor or not start.is_cpu or state.real is not None:
            return None
        if count_dispatch_modes() or any(pages.windows) or pages.plan_of:
            return None
        seen, policy, ahead = int(pages.seen), _ACTIVE.key, state.ahead
        known = (
            ahead is not None
            and 0 <= seen - ahead.seen < AHEAD
            and policy == ahead.policy
            and torch.equal(start, ahead.start)
            and torch.equal(pages.pad, ahead.pad)
        )
        # The step counts as unfinished before it counts as seen: an error leaves no hole.
        if ahead is None or not known:
            if pages.plans() is not None:
                return None
            batches, one_launch = pages.steps(seen - start, AHEAD), pages.one_launch()
            state.unfinished = 1
            pages.advance(start, 1)
            # A copy of the padding: `start` may be memory of the caller's mask.
            ahead = Ahead(seen, start.clone(), pages.pad.clone(), policy, batches, one_launch)
            state.ahead = ahead
        else:
            state.unfinished = 1
            pages.seen.add_(1)
        batch, past = ahead.batches[seen - ahead.seen], (None,) * len(pages.windows)
        meanwhile = self._meanwhile(start)
        one_launch = self._one_launch(meanwhile) if meanwhile else ahead.one_launch
        return Step(batch, past, False, one_launch, meanwhile=meanwhile)


def _captured_by_hand(state: State, before: Tensor) -> bool:
    """Is this step in a graph of the caller's? Its pages note that. before: as in `_planned`."""
    ours = torch.compiler.is_compiling() or isinstance(before, FakeTensor)
    if ours or state.start is not None or not before.is_cuda or not capturing(before):
        return False
    state.pages.captured = True
    return True


def _planned(
    plans: StepPlans, state: State, before: Tensor, count: int, batch: PagedBatch
) -> tuple[Planner | None, ...]:
    """The Planners of a step; empty where no plan is made.

    A step in a graph is planned before each replay. Another step is planned here, and the host
    waits for its lengths: only a kernel that was asked for is worth it.

    before: int64 `[rows]`, the tokens of each row before the step, of `count` tokens each.
    """
    compiles = torch.compiler.is_compiling()
    if state.start is not None:
        return plans.planners if count == 1 else ()  # graphs plan one token a row
    if isinstance(before, FakeTensor) and not compiles:
        return plans.planners if count == 1 or plans.forced else ()
    if compiles or not (plans.forced or (count == 1 and plans.asked)):
        return ()
    pages, lengths = state.pages, [max(n + count, 1) for n in before.tolist()]
    if count > 1:
        return plans.extend(pages, lengths, count, batch)
    plans.make(pages, lengths)
    return plans.planners


class PagedLatentCache(PagedModelCache):
    """A `PagedModelCache` of latents."""

    latent = True


class PagedKeyCache(PagedModelCache):
    """A `PagedModelCache` of keys and values."""
