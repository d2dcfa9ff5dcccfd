"""Decode steps of `generate()` in CUDA graphs: `patch(model, cache="paged", decode="piecewise")`.

The graph holds the whole step, from the tokens to the logits: it computes positions in the pages,
masks and lengths from the cache's own tensors. The arguments of a step are copied into the buffers
of its bucket of rows. Padding rows, which fill a bucket, are rows of the cache without a request:
they store no token, and stay unused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor

from attnops.core.errors import InvalidInput, NotCapturable, SideEffect, fail, one_line
from attnops.core.kernel import deterministic
from attnops.core.select import active_policy
from attnops.graphs import Graphed, Report
from attnops.graphs.graphed import Progress
from attnops.graphs.kinds import Kept as Recorded, Kinds
from attnops.graphs.per_layer import Regions
from attnops.hf import not_fast
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.names import argument_of, cache_in
from attnops.hf.cache.paged_cache import PagedModelCache, State
from attnops.hf.generation import after_others, look_again, note_hidden
from attnops.hf.steps.calls import (
    Kind,
    StepInputs,
    kind_of,
    modes_now,
    plain_step,
    positions,
    state_of,
    state_of_step,
)
from attnops.hf.steps.captures import (
    Captures,
    Failed,
    Failures,
    Kept,
    Over,
    cannot_compile,
    of_prompts,
    of_steps,
    over_steps,
    remember,
    why_steps,
)
from attnops.hf.steps.graphed_steps import against_graphs, graphed_steps, options_of, passes_of
from attnops.hf.steps.hidden import Modules, Outputs, reading
from attnops.hf.steps.model_state import Glance, holds
from attnops.hf.steps.options import Decode
from attnops.hf.steps.precompile import awaits_kernels
from attnops.hf.steps.prompt import Prompts
from attnops.hf.steps.reasons import runs_hooks
from attnops.lowering import Product
from attnops.lowering.products import summary


class Decoder:
    """The graphs of one model, over each set of pages that a cache uses or that waits in the pool.
    A step waits for that of another thread.

    forward: the model's own, which `decode=` replaced, `reading` the outputs of `reads`.
    make: returns a cache over given pages, which keep their tokens.
    reads: modules of the model that a draft head reads; None: there is no head.
    plain_steps: steps that ran without graphs, because they asked for more than logits, or because
    graphs could not be made, or not yet.
    regions: the compiled layers, for graphs over any pages; None before the first piecewise step.
    prompts: the compiled layers of prompts. captures: all graphs.
    products: the linears of compiled steps and the kernels of their calls, equal ones of all traces
    once.
    failures: with mode "auto", why graphs of a kind of step cannot be made, until
    `Patched.release`.
    look: the model may have changed: the next step looks at it. So it is after a call of the
    model's own layers, and at every prompt.
    glance: the model when it was last looked at; None: it is looked at anew.
    aside: why the model's steps and prompts run without graphs; "" where they may have some.
    last_mode: of the last step.
    turn: a thread's turn to capture and replay: there is one buffer set a set of pages, and one
    tracer.
    anew: what had changed when steps were last captured anew, "" before that.
    """

    def __init__(
        self,
        model: Any,
        how: Decode,
        forward: Callable[..., Any],
        make: Callable[[Any], PagedModelCache],
        reads: Modules | None = None,
    ) -> None:
        self.turn = threading.RLock()
        self.forward = reading(forward, reads, self.turn)
        self.how, self.plain_steps, self.look = how, 0, True
        self.failures = Failures[Failed]()
        self.regions: Regions | None = None
        self.prompts = Prompts(model, self.forward, how.inner, how.pack)
        self.products: dict[Product, None] = {}
        self._code: Any = None  # that of what is compiled: `free` forgets the glance alone
        self._recorded = Recorded()  # layers of the present state, for graphs over any pages
        self._model, self._make = model, make
        self.captures = Captures(how.budget_bytes)
        self._kept = Kept({}, Counter())
        # By the hash of a state, which may hold thousands of addresses. States whose graphs are
        # freed for others in turn are compiled, too.
        self._taken: dict[int, Counter[Kind]] = {}
        self._state: int | None = None  # the hash of the present state
        self._latest: ref[Over] | None = None
        self.last_mode = "hf"
        # Caches that stepped since the weights were looked at.
        self._looked = WeakSet[State]()
        self._modes: tuple[Any, ...] = ()  # the policy and autocast of the last step
        self.glance: Glance | None = None
        self.aside = self.anew = ""
        # The attributes that steps were found to write, and why models without them, by a hash,
        # have no graphs.
        self._written: set[str] = set()
        self._effects: dict[int, str] = {}
        # Caches whose last prompt or step had no graphs.
        self._without = WeakSet[State]()
        self.at_once, self._last_kind = False, ""  # of the last step

    @property
    def compiled(self) -> bool:
        """Were layers compiled for steps or prompts?"""
        return self.regions is not None or self.prompts.regions is not None

    @property
    def graphed(self) -> Graphed | None:
        """The graphs of the last step, for reports."""
        over = None if self._latest is None else self._latest()
        return None if over is None else over.graphed

    def _mode(self, rows: int, queries: int = 0) -> str:
        """The mode of the next step; "hf" where graphs cannot be made. The model's state was looked
        at. queries: as `StepInputs` has it; steps that verify have no compiled layers."""
        if self.how.mode != "auto":
            return self.how.mode
        # Compiled code rounds in other places, and under such a policy bits may not follow from the
        # steps before.
        due = self._kept.reached(kind_of(rows), self.how.compile_after)
        compiled = self.at_once or (due and not deterministic(active_policy()))
        modes = ("piecewise", "breakable") if compiled and not queries else ("breakable",)
        return next(
            (m for m in modes if self._kind(rows, m, queries) not in self.failures.lasting), "hf"
        )

    def _kind(self, rows: int, mode: str = "breakable", queries: int = 0) -> Failed:
        return Failed(self._state, of_steps(kind_of(rows), queries), mode)

    def notes(self) -> tuple[str, ...]:
        """How far steps are on their way to compiled ones, how prompts ran, the linears of compiled
        steps, and the kinds of steps without graphs, for the report."""
        waits = self.how.mode == "auto" and not (self.at_once or deterministic(active_policy()))
        return (
            *(self._kept.notes(self.how.compile_after) if waits else ()),
            *self.prompts.notes(),
            *summary(self.products),
            *self.captures.notes(self.aside, self.anew),
            *self.failures.notes(),
        )

    @property
    def why(self) -> str:
        """Why the kind of the last step has no graphs, or none that are compiled."""
        return self.aside or why_steps(self.failures, self._state, self._last_kind)

    def why_not(self, rows: int) -> str:
        """Why steps of so many rows, of the model as it is now, get no graphs; "" where they may be
        tried."""
        if not self.failures.lasting and not self.aside:
            return ""
        with self.turn:
            aside = ""
            with suppress(InvalidInput):  # weights on meta: a model without a state
                self._see(modes_now())
                aside = self.aside
            return aside or self.failures.lasting.get(self._kind(rows), "")

    def step(
        self, input_ids: Tensor, cache: PagedModelCache, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits `[B, 1, V]` of one token more for each row. See `Patched.step`.

        cache: of this model, with a first step behind it, of as many rows.
        """
        state = state_of_step(input_ids, cache, position_ids)
        forward = self.forward
        with self.turn:
            self._look(state)
            if runs_hooks(self._model):
                forward = self._model  # they see calls of it; those of its parts set steps aside
            elif not self.aside:
                try:
                    out = self._replayed(StepInputs(input_ids, position_ids), state)
                    if out is not None:
                        return out.logits
                    self.plain_steps += 1
                    self.look = True
                except SideEffect as error:
                    self._set_aside(error, state)
            return plain_step(forward, input_ids, cache, position_ids, argument_of(self._model))

    def _replayed(self, asked: StepInputs, state: State) -> Outputs | None:
        """None: kernels of the step are still being compiled."""
        rows = asked.rows
        with self._graphs_of(state, rows, asked.queries) as found:
            may_wait = self.how.mode == "auto" and not self.at_once
            state.waits = may_wait and awaits_kernels(found, rows)
            if state.waits:
                return None
            if asked.position_ids is None:
                asked = asked._replace(position_ids=positions(state, rows))
            out: Outputs = found.graphed(**asked.arguments(found.live[:rows]), cache=found.cache)
            if not asked.queries:
                self._kept.taken[kind_of(rows)] += 1
            state.rows = rows
            # Another thread's step may write the memory of the graphs as soon as it has its turn.
            return out.copied()

    def try_step(self, asked: StepInputs, cache: PagedModelCache) -> Outputs | None:
        """As `step`; with mode "auto" also one that verifies. None where the model's own forward is
        to run the step, and the cache is as before: the step is set `aside`, or, with mode "auto",
        graphs cannot be made, and `failures` has the reason, or their kernels are being compiled.
        """
        with self.turn:
            if cache.state in self._without:
                return None
            try:
                if self.how.mode == "auto":
                    return self._tried(asked, cache.state)
                self._look(cache.state)
                aside = self._is_aside(cache.state)
                return None if aside else self._replayed(asked, cache.state)
            except SideEffect as error:
                self._set_aside(error, cache.state)
        return None

    def _tried(self, asked: StepInputs, state: State) -> Outputs | None:
        rows, queries = asked.rows, asked.queries
        self._last_kind = of_steps(kind_of(rows), queries)
        while Failed(None, self._last_kind, "breakable") not in self.failures.lasting:
            mode = "breakable"
            try:
                self._look(state)
                if self._is_aside(state) or (mode := self._mode(rows, queries)) == "hf":
                    return None
                out = self._replayed(asked, state)
                if self.failures.passing and out is not None:
                    self.failures.done(self._kind(rows, mode, queries))
                return out
            except SideEffect:
                raise
            except Exception as error:
                over = self._kept.over.get((state.pages, of_steps(mode, queries)))
                if over is not None and over.has_step(rows):
                    raise  # of a replay, not of a capture
                if self._noted(error, self._kind(rows, mode, queries), state):
                    return None
        return None

    def _noted(self, error: Exception, kind: Failed, state: State) -> bool:
        """Note that a capture failed. Returns whether that costs the rest of this call its graphs,
        and no more."""
        self.forget(state.pages)
        if again := self.failures.note(kind, error):
            self._without.add(state)
        not_fast.warn(self._model, kind.loss, self.failures.why(kind), passing=again)
        return again

    def _is_aside(self, state: State) -> bool:
        """Are the steps of this cache left to the model's own forward? It is not looked at again
        before its next prompt."""
        if self.aside:
            self._without.add(state)
        return bool(self.aside)

    def _set_aside(self, error: SideEffect, state: State) -> None:
        """Run the model without graphs until it changes. Its steps have a side effect, which a
        replay would leave out."""
        self.forget(state.pages)
        glance = self.glance
        assert glance is not None
        self._written.add(error.what)
        why = f"the model's own forward writes {error.what}"
        self.aside = remember(self._effects, glance.without(self._written), why)
        self._without.add(state)
        not_fast.warn(self._model, not_fast.GRAPHS, self.aside)

    def try_prompt(self, given: dict[str, Any]) -> Tensor | None:
        """Logits `[B, 1, V]` of a prompt, by compiled or recorded layers. None where the model's
        own are to run it: `prompts` has the reason.

        given: the arguments of a call of the model, with a cache of ours.
        """
        state = cache_in(given).state
        with after_others(self.turn):
            self._without.discard(state)
            if (graphs := self.graphs_of_prompt(given)) is None:
                return None
            try:
                logits = self.prompts.run(given, *graphs)
                self.captures.bound(*self._kept.over.values())
                note_hidden(self.prompts.read)
                return logits
            except SideEffect as error:
                self._set_aside(error, state)
                self.prompts.why = self.aside
                return None

    def graphs_of_prompt(self, given: dict[str, Any]) -> tuple[Any, bool] | None:
        """What `Prompts.run` takes for a prompt, within a turn. None where the model's own layers
        are to run it: `prompts` has the reason."""
        cache, tokens = cache_in(given), given["input_ids"].numel()
        recorded = self.how.mode == "auto" and (cache.latent or not self.at_once)
        why = next(self.prompts.why_not(given, recorded), "")
        self.prompts.why = why or self._why_state(cache.state, tokens, recorded)
        steps = recorded and self._kept.await_steps(cache.state.pages, *given["input_ids"].shape)
        graphs = partial(self._prompt_graphs, cache.state, recorded, steps)
        return None if self.prompts.why else (graphs, recorded)

    def _why_state(self, state: State, tokens: int, recorded: bool) -> str:
        """The reason in the model's present state to run its own layers; "" without one."""
        self.look = True  # the model may have changed since the last prompt
        try:
            self._look(state)
        except InvalidInput as error:  # weights on meta: a model without a state
            if not recorded:
                raise
            return one_line(error)
        self.prompts.graphs = f"graphs of {self._state}" if recorded else "graphs"
        if recorded or self.aside:
            return self.aside
        broken = cannot_compile(self.failures, self._state)
        compiled = self.regions or self.at_once or self._kept.compiled
        if self.how.mode == "breakable" or broken or not compiled:
            return "steps are not compiled"
        return self._kept.too_few(tokens, 0 if self.at_once else self.how.prompts_after)

    def _kinds(self, pages: ModelPages) -> Kinds:
        """Recorded layers of the present state."""
        passes = passes_of(self.how, self.products)
        return Kinds(passes, self._recorded, (pages.sizes, pages.forced))

    def begin(self, state: State, rows: int, queries: int = 0) -> None:
        """Record the layers of a first step, and begin to compile their kernels. Raises as it.
        queries: as `StepInputs` has it."""
        with self.turn:
            self._look(state)
            look_again()
            if not self.aside and self._mode(rows, queries) == "breakable":
                self._of(state, rows, queries).begin(rows)

    def _prompt_graphs(self, state: State, recorded: bool, steps: bool, fresh: bool) -> Over:
        """The graphs of chunks of prompts over these pages. steps: see `Over.steps_first`. fresh:
        see `of_prompts`."""
        made, pages = self._kept.over, state.pages
        key = pages, of_prompts(recorded, fresh)
        self._kept.free_prompts(pages, not recorded)
        if key not in made:
            cache, options = self._make(pages), options_of(self._model, self.how)
            kinds = self._kinds(pages) if recorded else None
            graphed = self.prompts.graphed(cache, options, kinds, fresh)
            made[key] = Over(cache, graphed, key[1])
        made[key].steps_first = steps
        return made[key]

    def capture(self, cache: PagedModelCache, progress: Progress | None = None) -> Report:
        """Capture every bucket up to the cache's rows now, of compiled steps with mode "auto", and
        compile the layers of prompts.

        The cache's tokens stay. Raises as `Graphed`.
        """
        state = state_of(cache)
        self.at_once = not cache.states  # compiled layers take none
        with self.turn:
            self._look(state)
            if self.aside:
                fail(NotCapturable, "decode steps", self.aside)
        with self._graphs_of(state, cache.max_batch) as found:
            report = found.graphed.capture(progress=progress, **found.given(1))
            if found.mode == "piecewise":
                self.prompts.compile(found.cache)
            return report

    @contextmanager
    def _graphs_of(self, state: State, rows: int, queries: int = 0) -> Iterator[Over]:
        """The graphs over these pages, for the block alone."""
        with self.turn:
            state.pages.use()
            found = self._of(state, rows, queries)
            self._latest, self.last_mode = ref(found), found.mode
            if found.graphed.ahead is None:
                state.pages.lengths = None
            try:
                yield found
            finally:
                # A capture that failed half way leaves no step behind.
                found.cache.state.end_step()
            self.captures.bound(found)

    def forget(self, pages: ModelPages) -> None:
        """Free the graphs over these pages. The next step over them captures anew."""
        with self.turn:
            self.captures.forget(pages)

    def free(self) -> None:
        """Free all graphs. Compiled code is kept."""
        with self.turn:
            self.captures.free()
            # The next call looks at the model as if for the first time.
            self.glance, self.look, self.aside = None, True, ""
            self._written.clear()
            self._effects.clear()
            self._recorded = Recorded()
            self._without.clear()
            self.failures.clear()
            self.prompts.failures.clear()
            self.prompts.changed()

    def _look(self, state: State) -> None:
        """Look at the model if its state may have changed since the last step over this cache."""
        modes = modes_now()
        if self.look or state not in self._looked or modes != self._modes:
            self._see(modes)
            if self.look:
                self._looked = WeakSet()
            self._looked.add(state)
            self.look = False

    def _see(self, modes: tuple[Any, ...]) -> None:
        """Look at the model now, where the `generate()` that runs has not."""
        if modes != self._modes or self.glance is None or not holds(self.glance):
            self._look_closely(modes)

    def _look_closely(self, modes: tuple[Any, ...]) -> None:
        """Take the graphs of the model's state."""
        before, self._state, self.glance = self.glance, None, None
        glance = Glance(self._model, before)
        given = modes, *glance.state
        self._state, self._modes = hash(given), modes
        self.aside = against_graphs(self._model, glance.unknown)
        if not self.aside and self._effects:
            self.aside = self._effects.get(glance.without(self._written), "")
        taken = remember(self._taken, self._state, self._taken.get(self._state, Counter()))
        if self.aside:
            self._kept = Kept({}, taken)  # graphs of other states stay
        else:
            if before is not None and given not in self.captures:
                self.anew = before.changed(glance) or "the policy or autocast"
            self._kept = self.captures.use(given, taken)
        self.prompts.changed()
        if before is None or before.objects != glance.objects:
            # Nothing guards on what objects hold that are equal to themselves.
            self._recorded = Recorded()
        if self._code is not None and self._code != glance.code:
            self.regions = None  # Dynamo does not guard on the code
            self.prompts.forget()
        self.glance, self._code = glance, glance.code

    def _of(self, state: State, rows: int, queries: int = 0) -> Over:
        """The graphs over these pages, made now if they were not before."""
        self._look(state)
        mode, made, pages = self._mode(rows, queries), self._kept.over, state.pages
        key = pages, of_steps(mode, queries)
        over = made.get(key)
        waits = not self.at_once and self._kept.waits(self.how.compile_after)
        if mode == "piecewise" and not waits:
            self._kept.free(pages, "breakable")
        if over is None:
            cache, passes = self._make(pages), passes_of(self.how, self.products)
            regions: Regions | None = None
            if mode == "piecewise":
                regions = self.regions = self.regions or Regions(self.how.inner, passes)
            elif self.how.mode == "auto" and not deterministic(active_policy()):
                regions = self._kinds(pages)
            graphed = graphed_steps(
                self._model, self.forward, cache, self.how, passes, regions, queries
            )
            over = made[key] = over_steps(cache, graphed, mode, queries)
        return over
