"""Prompts over pages through layers that are compiled once for any number of tokens, or that are
recorded for the tokens of a graph.

The tokens of a batch are packed into one row, without padding, and taken in chunks of whole
requests, or of parts of one long request. The first tokens of a request attend to each other; later
chunks, and prompts that go on with a cache, attend over pages and have graphs of their own. Chunks
are captured: padding, which fills a bucket, is one request more, whose tokens are not stored.
Recorded layers run in graphs alone: the model's own layers run the chunks that are not captured.

The pages of a sliding window are used in turn, so a chunk may overwrite keys that its first tokens
see: each layer copies them before it writes. What goes on with such a cache cannot run twice. It
runs in graphs alone, which are captured before the first chunk.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.paged import ordinary
from attnops.core.errors import (
    InvalidInput,
    NoKernel,
    NotCapturable,
    SideEffect,
    one_line,
)
from attnops.core.kernel import deterministic
from attnops.core.select import active_policy
from attnops.graphs import Graphed
from attnops.graphs.compile_pieces import Inner
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional, Regions
from attnops.graphs.stale import uncached_casts
from attnops.hf.attention.descriptor import padding_of
from attnops.hf.cache.names import cache_in
from attnops.hf.cache.paged_cache import PagedModelCache, State
from attnops.hf.models.rotations import follow_length, on_device
from attnops.hf.steps.calls import against_result, more
from attnops.hf.steps.captures import FEW, Failures, Over, passing
from attnops.hf.steps.chunk_step import ChunkStep, chunk_graphs
from attnops.hf.steps.chunks import (
    Part,
    chunk_of,
    parts_of,
    too_early,
    unpadded,
    why_unpacked,
)
from attnops.hf.steps.early import Early
from attnops.hf.steps.hidden import Outputs, Read
from attnops.hf.steps.precompile import COMPILING, chunks_await_kernels
from attnops.lowering import merge_linears_pass

CHUNK = 4096
"""The most tokens of a chunk, which bounds the memory of a long prompt."""

CAPTURED = (FEW, *range(128, 2561, 128), *range(2816, CHUNK + 1, 256))
"""Tokens of chunks in graphs. From 1,281 tokens on, padding is less than a tenth of a chunk."""

CAPTURE_AFTER = 3
"""Chunks of a bucket that the model's own layers run before it is captured with compiled layers."""

RECORD_AFTER = 1
"""So with recorded layers, which no compiler holds up."""

AHEAD = 0, 2
"""Which prompts without a graph, counted from 0, have their layers recorded ahead. Recordings for
two sizes serve all others, and no prompt waits for both."""

# Tokens of a trial, which compiles layers ahead.
_TRIAL = 256

_WRAPPED = "kv_b_proj is wrapped, and the layers keep its weights from a prompt to its steps"
_UNPLANNED = "the kernel needs a plan of the host, which later chunks do not have"
_NO_ROOM = "the budget of graphs (Decode.budget_bytes) has no room for its size"


class _NotCaptured(Exception):
    """A chunk has no graph, and its layers are recorded for graphs alone. The message says why."""


class Prompts:
    """The prompts of one model.

    forward: the model's own. regions: the compiled layers.
    failures: why there are no "layers", or no graphs of them.
    due: by their mode graphs, and the tokens of a chunk to record for them, see `begin`. A prompt
        that failed may leave them.
    graphs: what failures of captures are of now: recorded layers of a state, or compiled ones.
    why: why the model's own layers ran the last prompt, "" where compiled ones did. took: how these
    ran it, "compiled" or "captured".
    read: the hidden states of its chunks, where a draft head reads them.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], inner: str | Inner, pack: bool
    ) -> None:
        self._model, self._forward, self._inner = model, forward, inner
        self._passes = (merge_linears_pass,) if pack else ()
        self.why, self.took, self._ran = "", "", False
        self._failed = False  # has a capture of this prompt failed? Its later chunks try none
        self._replayed = False  # did a graph run a chunk of it?
        # May it overwrite keys that it would need if it ran again? Has it begun to?
        self._once, self._overwrote = False, False
        self._recorded = False  # did its layers need no compiler?
        self._early = False  # did it start while transformers prepared its call?
        self.due: dict[str, tuple[weakref.ref[Over], int]] = {}
        self._begun = Counter[str]()  # by the mode of graphs, the prompts that were `due`
        self.changed()
        self.regions: Regions | None = None  # which starts the compiler's workers
        self._of_length = follow_length(model)
        self._by_host = self._of_length and not on_device(model)
        self.failures, self.graphs = Failures[str](), "graphs"
        self.read = list[Read]()
        self._chooses = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def changed(self) -> None:
        """Forget the layers as they were: the model may have changed."""
        self._step = ChunkStep(self._model, self._forward)

    def forget(self) -> None:
        """Forget the compiled layers, and why there were none: the code of the model has
        changed."""
        self.regions = None
        self.failures.lasting.clear()

    def _failed_of(self, fresh: bool) -> str:
        """What a failure of a capture is of: the graphs of first chunks, or of later ones."""
        return f"{self.graphs}, {'first' if fresh else 'later'} chunks"

    def uncaptured(self, fresh: bool) -> str:
        """Why no chunk is captured. fresh: of first chunks, or of later ones."""
        if self._by_host:
            return "rotations depend on the length of the text"
        return self.failures.lasting.get(self._failed_of(fresh), "")

    def notes(self) -> tuple[str, ...]:
        """How the last prompt ran, for the report; no line before the first."""
        ran = ""
        if self.why:
            ran = f"the model's own layers ({self.why})"
        elif self.took:
            ran = f"{self.took} layers"
            ran += ", without a compiler" if self._recorded else ""
            ran += ", while transformers prepared its call" if self._early else ""
        reasons = dict.fromkeys(map(self.uncaptured, (True, False)))
        why = "; ".join(filter(None, reasons))
        apart = f"; some are not captured: {why}" if why else ""
        return (f"the last prompt ran through {ran}{apart}",) if ran else ()

    def why_not(self, given: dict[str, Any], recorded: bool) -> Iterator[str]:
        """Each reason why the model's own layers run this prompt. recorded: see `run`."""
        cache, ids, positions = cache_in(given), given["input_ids"], given.get("position_ids")
        state = cache.state
        if more(given):
            yield "it asks for more than logits"
        if "layers" in self.failures.lasting:
            yield f"its layers cannot be compiled: {self.failures.lasting['layers']}"
        if deterministic(active_policy()):
            yield "under a deterministic policy bits may not follow from the prompts before"
        if cache.latent and not recorded:
            yield "the pages hold latents, and compiled layers take none"
        if state.filled and not state.whole:
            yield "the step before it failed"
        if positions is not None and positions.shape not in (ids.shape, (1, ids.shape[1])):
            yield "it has no positions for each row"
        if not self._chooses:
            yield "the model keeps no logits of chosen tokens"
        yield from against_result(given, self._model.config)

    def run(
        self, given: dict[str, Any], graphs: Callable[[bool], Over], recorded: bool
    ) -> Tensor | None:
        """Logits `[B, 1, V]` of the last tokens. None, with the reason in `why`, where the model's
        own layers must run them; the cache is as it was then, and where an error is raised but for
        later chunks over windows, see `_parts`.

        graphs: returns the graphs over the pages, of first chunks (True) or of later ones.
        recorded: graphs hold recorded layers, and no layers are compiled.

        Raises InvalidInput: a mask that pages cannot follow.
        """
        self.due.clear()
        self._overwrote = False
        packed = self._packed(given, recorded)
        if packed is None:
            return None
        start, parts, tokens = packed
        over = self._graphs_of(parts, graphs, recorded)
        if self.why:
            return None
        cache, (rows, columns) = cache_in(given), given["input_ids"].shape
        state = cache.state
        state.take_rows(rows)
        try:
            logits = self._ran_early(state, parts, over, tokens)
            if logits is None:
                logits = self._tried(parts, over, tokens, cache)
        except BaseException:
            if self._overwrote:  # as after an error half way of the model's own layers
                state.pages.advance(start, columns)
                state.unfinished = columns
            raise
        if logits is None:
            self.read.clear()
            return None
        state.pages.advance(start, columns)
        state.filled, state.unfinished = True, 0
        state.moved.update(cache.states)
        state.begun.clear()
        self.took = "captured" if self._replayed else "compiled"
        self._recorded = recorded
        if not recorded:
            self._ran = True
            self.failures.done("layers")
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def early(
        self, given: dict[str, Any], graphs: Callable[[bool], Over], recorded: bool
    ) -> Early | None:
        """Run a prompt over a new cache, which counts none of its tokens, where graphs have all of
        it. Arguments as of `run`."""
        packed = self._packed(given, recorded)
        if packed is None:
            return None
        _, parts, tokens = packed
        over = list[Over | None]()
        for part in parts:
            each = graphs(part.fresh)
            if self.uncaptured(part.fresh) or not each.captured("mixed", part.size, 1):
                return None
            over.append(each)
        cache = cache_in(given)
        stream = cache.state.pages.stream
        with stream.aside():
            stream.reads(tokens)
            logits = self._tried(parts, over, tokens, cache)
        return None if logits is None else Early(cache, stream, parts, over, tokens, logits)

    def _ran_early(
        self, state: State, parts: list[Part], over: list[Over | None], tokens: Tensor
    ) -> list[Tensor] | None:
        """The logits of each chunk, where just these started early. From here on work on the pages
        follows what did."""
        early: Early | None = state.early
        self._early = early is not None and early.ran(parts, over, tokens)
        state.follow_early()
        if early is None or not self._early:
            return None
        self._replayed = True
        logits, early.logits = early.logits, []  # no longer held than others
        return logits

    def _packed(
        self, given: dict[str, Any], recorded: bool
    ) -> tuple[Tensor, list[Part], Tensor] | None:
        """(int64 `[B]`, the padding; the chunks; the tokens of `unpadded`). None, with the reason
        in `why`, where the model's own layers must run them."""
        cache, ids, positions = cache_in(given), given["input_ids"], given.get("position_ids")
        state, (rows, columns) = cache.state, ids.shape
        start, (seen, *starts) = padding_of(
            given.get("attention_mask"), state.pages, rows, columns, fresh=not state.filled
        )
        counts = [columns - max(s - seen, 0) for s in starts]
        padded = positions is None and any(starts)
        self.why = why_unpacked(counts, padded, compiled=not recorded)
        if self.why:
            return None
        if positions is None:
            positions = state.pages.positions[seen : seen + columns]
        # Later chunks would attend to the latents themselves, with three times the operations.
        most = sum(counts) if cache.latent else CHUNK
        self._once = state.filled and bool(any(state.pages.windows) or cache.states)
        before = [max(seen - s, 0) for s in starts]
        parts = parts_of(counts, before, most, self._of_length)
        self.why = self._why_pages(parts, cache)
        return None if self.why else (start, parts, unpadded(ids, positions, counts))

    def _why_pages(self, parts: list[Part], cache: PagedModelCache) -> str:
        """The reason in the pages to run the model's own layers; "" without one. The model was
        looked at."""
        plans = cache.state.pages.plans()
        if plans is not None and plans.forced and not all(part.fresh for part in parts):
            return _UNPLANNED
        return _WRAPPED if cache.latent and not self._step.unfolds_plainly else ""

    def _is_of_compiler(self, error: Exception) -> bool:
        """Could layers not be compiled? An error of layers that ran before is one of the step."""
        traced = isinstance(error, (NotRegional, NotCapturable, NoKernel))
        return traced or not (self._ran or isinstance(error, InvalidInput))

    def _graphs_of(
        self, parts: list[Part], graphs: Callable[[bool], Over], recorded: bool
    ) -> list[Over | None]:
        """The graphs that have each chunk. Sets `why` where the model's own layers must run them,
        as for want of recorded layers, or where a short prompt's are as fast as compiled ones."""
        after = RECORD_AFTER if recorded else CAPTURE_AFTER
        due = [self._due(part, graphs, after) for part in parts]
        against = [why for why in due if isinstance(why, str)]
        found = [None if isinstance(each, str) else each for each in due]
        if against and (recorded or self._once or due == [too_early(after)]):
            self.why = against[0]
        elif recorded:
            sizes = [(each, part.size) for each, part in zip(found, parts, strict=True) if each]
            self.why = COMPILING if chunks_await_kernels(sizes) else ""
        return found

    def _due(self, part: Part, graphs: Callable[[bool], Over], after: int) -> Over | str:
        """The graphs that have a chunk, or why it has none by now. after: as `CAPTURE_AFTER`."""
        if why := self.uncaptured(part.fresh):
            return why
        if part.size > CAPTURED[-1]:
            return f"it has more than {CAPTURED[-1]:,} tokens, and such prompts are not captured"
        over = graphs(part.fresh)
        if over.graphed.buckets.find("mixed", part.size, 1) is None:
            return _NO_ROOM
        if over.chunks(part.size) > after + over.steps_first:
            return over
        if over.recorded and self._may_begin(over):
            self.due[over.mode] = weakref.ref(over), part.size
        return too_early(after)

    def _may_begin(self, over: Over) -> bool:
        """May the layers of a chunk be recorded ahead? After the first, not in a call that records
        its steps."""
        number = self._begun[over.mode]
        return number == 0 or (number <= AHEAD[-1] and not over.steps_first)

    def begin(self, turn: AbstractContextManager[Any]) -> None:
        """Record the layers of the first sizes of each mode, see `AHEAD`, while the device runs the
        prompt, and begin to compile their kernels, which later sizes share. Those are recorded with
        their graphs: of many lengths, most come once.

        turn: a thread's, to use the graphs.
        """
        if not self.due:
            return
        with turn:
            due, self.due = self.due, {}  # none: another thread has begun
            for mode, (graphs, tokens) in due.items():
                over = graphs()
                if over is None:
                    continue  # they were freed
                number = self._begun[mode]
                self._begun[mode] += 1
                if number in AHEAD:
                    with suppress(Exception):  # the capture raises it
                        over.begin_chunk(tokens)

    def _tried(
        self,
        parts: list[Part],
        over: list[Over | None],
        tokens: Tensor,
        cache: PagedModelCache,
    ) -> list[Tensor] | None:
        """As `_parts`; None, with the reason in `why`, where layers could not be compiled, or
        recorded ones not captured."""
        try:
            return self._parts(parts, over, tokens, cache)
        except SideEffect:
            raise
        except _NotCaptured as error:
            if self._overwrote:
                raise
            self.why = str(error)
            return None
        except Exception as error:
            if self._overwrote or not self._is_of_compiler(error):
                raise
            self.why = one_line(error)
            self.failures.note("layers", error)
            return None

    def _parts(
        self,
        parts: list[Part],
        over: list[Over | None],
        tokens: Tensor,
        cache: PagedModelCache,
    ) -> list[Tensor]:
        """The logits of each chunk. tokens: see `unpadded`."""
        self._failed = self._replayed = False
        pages = cache.state.pages
        with ordinary(), uncached_casts():
            if self._once:
                self._capture(parts, over, cache)
                self._overwrote = True
            # At once and before the first chunk: a copy from the host's own memory waits until the
            # device is idle.
            lists = [each for part in parts for each in part[2:6]]
            sent = pages.upload([n for each in lists for n in each])
            sent = sent.split_with_sizes(list(map(len, lists)))
            self.read.clear()
            return [
                self._part(
                    part,
                    graphs,
                    sent[4 * i : 4 * i + 4],
                    chunk_of(part, tokens),
                    cache,
                )
                for i, (part, graphs) in enumerate(zip(parts, over, strict=True))
            ]

    def _capture(self, parts: list[Part], over: list[Over | None], cache: PagedModelCache) -> None:
        """Capture chunks that have no graph yet, on padding. Raises _NotCaptured."""
        some = cache.state.pages.seen.new_zeros
        for part, graphs in zip(parts, over, strict=True):
            if graphs is None or not graphs.captured("mixed", part.size, 1):
                none = some(len(part.counts))
                sent = none, none, none[:1], none[:1]
                self._part(part, graphs, sent, some(2, part.size), cache)
            if self._failed:
                raise _NotCaptured(self.failures.why(self._failed_of(part.fresh)))

    def _part(
        self,
        part: Part,
        over: Over | None,
        sent: Sequence[Tensor],
        chunk: Tensor,
        cache: PagedModelCache,
    ) -> Tensor:
        """Logits `[N, 1, V]` of the requests that end in a chunk. over: the graphs that have it, or
        None.

        sent: `part.counts`, `before`, `ends` and `last` on the device. chunk: of `chunk_of`.
        Raises _NotCaptured where recorded layers could not be captured.
        """
        tokens, positions = chunk.unbind()
        counts, before, ends, last = sent
        if over is not None and not self.uncaptured(part.fresh) and not self._failed:
            given = {"tokens": tokens, "positions": positions, "counts": counts}
            if not part.fresh:
                given["before"] = before
            try:
                out: Outputs = over.graphed(**given, cache=over.cache)
            except (SideEffect, _NotCaptured):
                raise
            except Exception as error:
                # An error before there is a graph may be one of recorded layers alone.
                first = over.recorded and not over.captured("mixed", part.size, 1)
                known = isinstance(error, (NotCapturable, NotRegional)) or passing(error)
                if self._overwrote or not (known or first):
                    raise
                self._failed = True
                self.failures.note(self._failed_of(part.fresh), error)
                if over.recorded:
                    raise _NotCaptured(one_line(error)) from error
            else:
                self.failures.done(self._failed_of(part.fresh))
                self._replayed = True
                # Copies: graphs write their memory again.
                self._note(out, counts, before, len(tokens))
                return out.logits[ends]
        # Compiled code is guarded on the place of a slice. Without a last token, the logits of some
        # other one are dropped.
        last = last if part.last else before.new_zeros(1)
        regions = self._compiled()
        out = self._step(
            tokens.clone(), positions.clone(), counts, before, last, part.fresh, cache, regions
        )
        self._note(out, counts, before, len(tokens))
        return out.logits[: len(part.last)]

    def _note(self, out: Outputs, counts: Tensor, before: Tensor, tokens: int) -> None:
        """Keep the hidden states of a chunk of so many tokens."""
        if out.hidden is not None:
            self.read.append(Read(counts, before, out.hidden[0, :tokens].clone()))

    def _compiled(self) -> Regions:
        self.regions = self.regions or Regions(self._inner, self._passes)
        return self.regions

    def compile(self, cache: PagedModelCache) -> None:
        """Compile the layers of first chunks now, on padding. The cache stays as it is."""
        if cache.latent or "layers" in self.failures.lasting:
            return
        none, padding = (cache.state.pages.seen.new_zeros(n) for n in (cache.max_batch, _TRIAL))
        try:
            with torch.no_grad(), ordinary(), uncached_casts():
                regions = self._compiled()
                self._step(padding, padding, none, none, none[:1], True, cache, regions)
        except Exception as error:
            self.failures.note("layers", error)

    def graphed(
        self, cache: PagedModelCache, options: dict[str, Any], kinds: Kinds | None, fresh: bool
    ) -> Graphed:
        """Graphs of chunks, over a cache of ours. options: of `Graphed`. kinds: of recorded layers;
        None: they are compiled. fresh: of first chunks."""

        def step(
            tokens: Tensor,
            positions: Tensor,
            counts: Tensor,
            cache: PagedModelCache,
            before: Tensor | None = None,
        ) -> Outputs:
            if kinds is not None and tokens.shape[0] not in CAPTURED:
                raise _NotCaptured(_NO_ROOM)  # the bucket was dropped in this call
            last = (counts.cumsum(0) - 1).clamp(min=0)
            before = torch.zeros_like(counts) if before is None else before
            regions = kinds or self._compiled()
            return self._step(tokens, positions, counts, before, last, fresh, cache, regions)

        return chunk_graphs(step, CAPTURED, cache.max_batch, fresh, kinds, options)
