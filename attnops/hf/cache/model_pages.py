"""`ModelPages`: the pages of a cache for a patched model, with the counters that its steps read on
the device.

Every row of a batch is one request of `attnops.cache.Pages`, allocated once for the whole length.
Its pages never change, so that captured graphs may hold the tables. Layers with a sliding window
have pages for the window and a few new tokens, and use them in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.ledger import check_kept
from attnops.cache.page_size import negotiate_page_size
from attnops.cache.paged import Pages, fix_address, ordinary
from attnops.cache.planner import Planner, device_plan
from attnops.cache.step import Tokens
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.private_torch import count_dispatch_modes
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import (
    _ACTIVE,
    active_policy,
    decode_us,
    key_for,
    parse_policy,
    select,
    workspace_bytes,
)
from attnops.graphs.streams import LastStream
from attnops.hf.cache.meanwhile import Meanwhile, uncompiled
from attnops.hf.cache.names import NAME
from attnops.hf.cache.page_sizes import Sizes, room_of
from attnops.hf.cache.step_plans import Held, Kind, StepPlans, is_asked, mean_plan_us
from attnops.hf.models.states import AllStates
from attnops.kernels.shared.memory import COUNTERS
from attnops.ops.pages.plan import over_latents, step_of

# Padding of a row without tokens: more than any position.
EMPTY = 2**62
# Pages are negotiated as if scratch were free. The workspace is then as large as the chosen kernel
# asks for.
_PLENTY = 2**30
# The most policies whose plans are kept.
POLICIES = 8
# The most new tokens of a request for which a plan is made: kernels that read one on the device
# decode, they do not prefill.
_PLANNED = 8


# The W tokens of each row's window before a step that is too long for the window's pages: their
# slots, int64 `[B * W]`, and int64 `[B]`, the first of a row's W entries that is one of its tokens.
Past = tuple[Tensor, Tensor]


class Lengths(NamedTuple):
    """Tokens of each row, and the versions of the counters that say so."""

    versions: tuple[int, int]
    rows: list[int]


class ModelPages(Pages):
    """Pages for `sizes.rows` requests of `sizes.length` tokens, and the counters of the batch. All
    tensors keep their addresses.

    choice: the negotiated page size. forced: the one that the caller asked for, or None.
    seen: int64 `[]`, positions so far, padding included.
    most: int64 `[]`, positions there is room for.
    pad: int64 `[rows]`, the positions of each row that are padding; EMPTY for a row that the last
    step did not have.
    high: int64 `[]`, the most positions there have been since the cache was empty, where there are
    windows.
    positions: int64 `[length]`, those of a row: prompts take parts of them, and launch nothing.
    plan_of: the kernel of decode steps that may read a plan, and its layer; None: no kernel does.
    kernels: for each layer, the one that decode steps of all rows choose, "" for none.
    known_plans: what `plans` found, by the policy, of the last few policies.
    begun: kinds of steps whose kernels have begun to be compiled.
    lengths: tokens of each row, as the host knows them. Code that replays a graph which counts
        tokens sets it to None: a replay changes no version of a counter.
    captured: did the caller capture a step? The pages do not see its replays, so each planned step
        reads the lengths from the device.
    counters: the tensors that a step writes besides keys, values and latents.
    states: of the layers with states.
    """

    def __init__(self, sizes: Sizes, page_size: int | None = None) -> None:
        self.sizes, rows, length, kernel = sizes, sizes.rows, sizes.length, sizes.kernel
        self.forced = page_size
        # One page size for all layers, by the kind of layer that most of them are.
        kinds = Counter(altered(layer, window=(-1, -1)) for layer in sizes.layers)
        self.choice = negotiate_page_size(
            kinds.most_common(1)[0][0],
            max_requests=rows,
            max_tokens_per_request=length,
            page_size=page_size,
            kernels=None if kernel is None else (kernel,),
            device=sizes.device,
            workspace_bytes=_PLENTY,
        )
        room = room_of(sizes, self.choice.page_size)
        super().__init__(room, dtype=sizes.layers[0].dtype, device=sizes.device)
        for _ in range(rows):
            self.alloc(length)
        self.begun: set[Hashable] = set()
        self.plan_of: tuple[Kernel, Problem] | None = None
        self._kinds: dict[Problem, int] = dict(
            zip(sizes.layers, self.table_of, strict=True)
        )  # and a page table of each
        self.add_workspace(max(map(self._scratch, self._kinds)))
        chosen = {layer: self._chosen(layer) for layer in self._kinds}
        self.kernels = tuple(chosen[layer] for layer in sizes.layers)
        self._one_launch: dict[str, tuple[bool, ...]] = {}  # by the policy
        self._meanwhile: dict[str, tuple[Meanwhile, ...]] = {}  # likewise
        self.known_plans: dict[str, StepPlans | None] = {}
        self.lengths: Lengths | None = None
        self.captured = False
        # The tokens of each row after the step under way.
        self._after: list[int] = []
        self.one_launch()
        with ordinary():
            self.seen = torch.zeros((), dtype=torch.int64, device=sizes.device)
            self.high = torch.zeros_like(self.seen)
            self.most = torch.full((), length, dtype=torch.int64, device=sizes.device)
            self.pad = torch.full((rows,), EMPTY, dtype=torch.int64, device=sizes.device)
            self.positions = torch.arange(length, device=sizes.device)
            self.states = AllStates(sizes.states, rows, sizes.device)
        self.counters = self.seen, self.pad, self.high
        # Slices of one allocation are not known to the allocator.
        pages = [each for alike in self.allocations for each in alike.whole]
        scratch = () if self.workspace is None else (self.workspace,)
        small = *self.tables, self.seq_lens, *self.counters, self.most, self.positions
        self.stream = LastStream(sizes.device, (*pages, *scratch, *small, *self.states.tensors))
        self.use()
        self.plans()
        fix_address(self.seen, self.high, self.most)
        for tensors, dims in ((self.tables, (0, 1)), (self.pools, (0,)), ((self.pad,), (0,))):
            fix_address(*tensors, dynamic=() if sizes.fixed else dims)

    @property
    def _room(self) -> int:
        """Bytes of the workspace."""
        return 0 if self.workspace is None else self.workspace.nbytes

    def _decode(self, layer: Problem) -> Problem:
        """The attention of a decode step of this layer."""
        spec = replace(layer, page_size=self.page_size)
        rows = self.sizes.rows
        table = self.tables[self._kinds[layer]]
        decode = step_of(spec, Target.of(self.sizes.device), rows, rows, table.shape[1], 1)
        if over_latents(spec):
            return altered(decode, plan="device")
        return altered(
            decode, plan="none", padded=False, pages_alike=spec.head_dim == spec.v_head_dim
        )

    def _scratch(self, layer: Problem) -> int:
        """Bytes that the kernel of a decode step of this layer asks for. Of latents, the kernel is
        kept: it may read a device plan."""
        decode, key = self._decode(layer), key_for(layer.op, self.sizes.kernel)
        scratch = workspace_bytes(decode, key)
        if self._takes_one_launch(layer, _PLENTY):
            scratch = max(scratch, workspace_bytes(self._step(layer, _PLENTY), active_policy()))
        if over_latents(layer):
            kernel = select(altered(decode, workspace=scratch), key).kernel
            self.plan_of = (
                None if kernel is None else (kernel, replace(layer, page_size=self.page_size))
            )
        return scratch

    def one_launch(self) -> tuple[bool, ...]:
        """For each layer: do steps of one token take `decode_attention`, under the policy in force?
        Empty in a trace under another policy than those before, for kernels are compared outside of
        traces.

        It is taken where its kernel costs less than rotation, write and attention together, or is
        forced; and never where the kernel of attention is forced.
        """
        key = _ACTIVE.key
        if key not in self._one_launch:
            if torch.compiler.is_compiling():
                return ()
            taken = {layer: self._takes_one_launch(layer, self._room) for layer in self._kinds}
            self._one_launch[key] = tuple(taken[layer] for layer in self.sizes.layers)
        return self._one_launch[key]

    def plans(self) -> StepPlans | None:
        """The host's plans of steps of one token, under the policy in force; None where no kernel
        reads one, and in a trace or under a mode with another policy than those before.

        A kernel that reads one is taken where it is forced or preferred, or where its layers win
        more time than its plans take.
        """
        key = _ACTIVE.key
        if key not in self.known_plans:
            # Modes may be those of a capture, or make tensors without memory.
            if torch.compiler.is_compiling() or count_dispatch_modes():
                return None
            kinds: dict[Problem, Kind] = {}
            for layer, table in self._kinds.items():
                if (planned := self._planned(layer)) is not None:
                    planner, asked = planned
                    kinds[layer] = Kind(planner, table, self.windows[table], asked)
            policy = parse_policy(key_for(self.sizes.layers[0].op, self.sizes.kernel))
            self.keep(key, StepPlans(self, kinds, policy) if kinds else None)
        return self.known_plans[key]

    def keep(self, policy: str, plans: StepPlans | None) -> None:
        """Keep the plans of a policy, and those of the last few others."""
        known = self.known_plans
        dropped = [known.pop(policy, None)]
        # A policy without plans holds no memory, and its graphs stay without.
        held = [each for each, made in known.items() if made is not None]
        more = len(held) + 1 - POLICIES
        if plans is not None and more > 0:
            dropped += [known.pop(each) for each in held[:more]]
        for old in filter(None, dropped):
            self.stream.leave(*old.workspaces)
        known[policy] = plans
        if plans is not None:
            self.stream.own(*plans.workspaces)

    def held_plans(self) -> Held | None:
        """As `plans`, for graphs."""
        plans = self.plans()
        return None if plans is None else Held(self, active_policy(), plans)

    def _planned(self, layer: Problem) -> tuple[Planner, bool] | None:
        """(the Planner of a kind of layer, is its kernel asked for, or alone of its rank?). None:
        no step is planned."""
        if self._takes_one_launch(layer, self._room):
            return None
        decode = altered(self._decode(layer), workspace=self._room)
        key = key_for(layer.op, self.sizes.kernel)
        found, rows = select(altered(decode, plan="host"), key), self.sizes.rows
        without = select(decode, key)
        if found.kernel is None or found.rank >= without.rank:
            return None
        planning = kernels_of(f"plan_{layer.op}").get(found.kernel.name)
        if planning is None or planning.plan.sizes is None:
            return None
        won_us = self.sizes.layers.count(layer) * (decode_us(without) - decode_us(found))
        behind = found.rank[:3] != without.rank[:3]  # the other is one of last resort
        asked = behind or is_asked(found.policy, layer.op, planning.name)
        if not asked and won_us <= mean_plan_us(planning, found.problem, rows):
            return None
        planner = Planner(
            replace(layer, page_size=self.page_size),
            max_tokens=rows,
            max_requests=rows,
            max_pages=self.tables[self._kinds[layer]].shape[1],
            device=self.sizes.device,
            kernel=planning.name,
        )
        return planner, asked

    def plan_step(self, plans: StepPlans, rows: int, live: int) -> None:
        """Plan a step of a graph, of one token a row. The host waits for the lengths where the step
        before ran without graphs.

        rows: of the graph. live: the first of them, which are rows of the batch. The others are
        padding rows and read the first token of their pages, as in the graph.
        """
        known, self.lengths = self.lengths, None  # until the step is done
        if known is None or known.versions != self._versions() or len(known.rows) != live:
            before = (self.seen - self.pad[:live]).tolist()
        else:
            before = known.rows
        self._check(before)
        self._after = [n + 1 for n in before]
        plans.make(self, self._after + [1] * (rows - live))

    def _check(self, before: list[int]) -> None:
        """Raise InvalidInput for rows of so many tokens that have no room for one more."""
        most = self.sizes.length
        if min(before, default=0) < 0:
            got = "rows that the step before did not have"
            fail(InvalidInput, NAME, got, "the rows of the step before, or reset()")
        if max(before, default=0) >= most:
            fail(InvalidInput, NAME, "a cache that is full", f"fewer than {most} tokens of a row")

    def stepped(self) -> None:
        """The step of `plan_step` was launched."""
        if not self.captured:
            self.lengths = Lengths(self._versions(), self._after)

    def _versions(self) -> tuple[int, int]:
        """They change with every write but those of graphs: graphs of prompts leave the counters
        alone."""
        return self.seen._version, self.pad._version

    def _takes_one_launch(self, layer: Problem, room: int) -> bool:
        if over_latents(layer) or layer.v_head_dim != layer.head_dim:
            return False
        apart = altered(self._decode(layer), workspace=room)
        key = key_for(layer.op, self.sizes.kernel)
        whole, forced = select(self._step(layer, room), key), parse_policy(key).forced
        if whole.kernel is None or forced(layer.op):
            return False
        if forced("decode_attention") or whole.kernel.judge:
            return forced("decode_attention") is not None
        both = apart, self._write_of(apart)
        attention, written = (decode_us(select(problem, key)) for problem in both)
        # The compiler's rotation is a launch more, which moves about as many numbers as the write
        # does.
        return decode_us(whole) < attention + 2 * written

    def _step(self, layer: Problem, room: int) -> Problem:
        """As `_decode`, of `decode_attention`."""
        decode = self._decode(layer)
        return altered(
            decode,
            op="decode_attention",
            causal=False,
            padded=True,
            window=(decode.rules.window[0], -1),
            workspace=room,
        )

    def _chosen(self, layer: Problem) -> str:
        kernel = select(
            altered(self._decode(layer), workspace=self._room), key_for(layer.op, self.sizes.kernel)
        ).kernel
        return "" if kernel is None else kernel.name

    def step_kernel(self, layer: Problem, page_size: int) -> Kernel | None:
        """The kernel of attention in a step of one token, under the policy in force, over pages of
        so many tokens."""
        whole = self._takes_one_launch(layer, self._room)
        problem = self._step(layer, self._room) if whole else self._decode(layer)
        found = altered(problem, workspace=self._room, page_size=page_size)
        return select(found, key_for(layer.op, self.sizes.kernel)).kernel

    def meanwhile(self) -> tuple[Meanwhile, ...]:
        """For each layer, under the policy in force; empty for latents. See `State.waits`."""
        key = _ACTIVE.key
        if key not in self._meanwhile:
            found = {layer: self._meanwhile_of(layer) for layer in self._kinds}
            layers = () if over_latents(self.sizes.layers[0]) else self.sizes.layers
            self._meanwhile[key] = tuple(found[layer] for layer in layers)
        return self._meanwhile[key]

    def _meanwhile_of(self, layer: Problem) -> Meanwhile:
        decode = altered(self._decode(layer), workspace=self._room)
        key = key_for(layer.op, self.sizes.kernel)
        return Meanwhile(uncompiled(decode, key), uncompiled(self._write_of(decode), key))

    def _write_of(self, decode: Problem) -> Problem:
        """The write of a decode step."""
        names = ("dtype", "kv_dtype", "kv_heads", "head_dim", "v_head_dim", "page_size")
        sizes = {name: getattr(decode, name) for name in names}
        return Problem.of("write_kv", decode.target, **sizes, tokens=decode.sizes.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, the workspace, and those of plans."""
        plans = filter(None, tuple(self.known_plans.values()))
        scratch = (each.nbytes for made in plans for each in made.workspaces)
        whole = (each.nbytes for alike in self.allocations for each in alike.whole)
        return self._room + sum(whole) + sum(scratch) + self.states.nbytes

    def use(self) -> None:
        """Let work to come on the current stream follow the work so far on the pages.

        To be called before each use of them.
        """
        self.stream.use()

    def clear(self) -> None:
        """Forget every token."""
        self.use()
        with ordinary():
            self.seen.zero_()
            if any(self.windows):
                self.high.zero_()
            self.pad.fill_(EMPTY)
            if self.workspace is not None:
                self.workspace[
                    :COUNTERS
                ].zero_()  # a launch that an error ended early leaves counts behind

    def advance(self, start: Tensor, count: int) -> None:
        """Count `count` new positions of rows with padding `start` `[B]` as seen."""
        # A row that is not in this step lacks the step's tokens: it may come back only with padding
        # in their place.
        self.pad.fill_(EMPTY)
        # Not into a slice, of which Inductor of torch 2.13 asks whether it is as long as the whole.
        self.pad.index_copy_(0, torch.arange(start.shape[0], device=start.device), start)
        self.seen.add_(count)
        if any(self.windows):
            self.high.copy_(torch.maximum(self.high, self.seen))

    def check_length(self, length: Tensor) -> None:
        """Raise InvalidInput when a window at position `length` `[]` needs tokens that are
        overwritten. With windows the host waits."""
        if any(self.windows):
            left, high = torch.stack([length, self.high]).tolist()
            for window, table in zip(self.windows, self.tables, strict=True):
                check_kept(
                    "crop, positions to keep", left, high, window, table.shape[1] * self.page_size
                )

    def step(self, tokens: Tokens, before: Tensor, heads: int, planned: bool = False) -> PagedBatch:
        """The batch of a step that is not yet counted as seen. tokens: as many of each row. heads:
        query heads of the first layer. planned: does every layer read a plan of the host?

        before: int64 `[B]`, tokens of each row in the pages; negative while padding is still to
        come.
        """
        batch = self.describe(tokens, before.shape[0], (before + tokens.longest).to(torch.int32))
        if self.plan_of is not None and not planned and tokens.longest <= _PLANNED:
            kernel, spec = self.plan_of
            batch = replace(batch, plan=device_plan(kernel, spec, batch, heads))
        return batch

    def steps(self, before: Tensor, count: int) -> tuple[PagedBatch, ...]:
        """The batches of the next `count` steps of one token each, at the price of one: of pages
        that have no windows, for kernels without a plan. before: as in `step`."""
        rows, device = before.shape[0], before.device
        at = before + torch.arange(count, device=device)[:, None]
        owner = torch.arange(rows, device=device).repeat(count)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = (at + 1).to(torch.int32).unbind(0)
        batch = self.describe(Tokens(at.reshape(-1), owner, starts, 1), rows, lengths[0])
        each = zip(lengths, batch.slots.view(count, rows).unbind(0), at.unbind(0), strict=True)
        return tuple(
            replace(batch, seq_lens=length, slots=slots, positions=positions)
            for length, slots, positions in each
        )
