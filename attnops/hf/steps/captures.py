"""`Captures`: the graphs of a model by the state that it was captured in, and `Failures`: why some
could not be made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnops.cache.paged import ordinary
from attnops.core.errors import NotCapturable, one_line
from attnops.graphs import Graphed
from attnops.graphs.buckets import Bucket, Kind as BucketKind
from attnops.graphs.capturing import chain_of
from attnops.hf import not_fast
from attnops.hf.cache.idle_pages import gpu_bytes
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.generation import running_generation
from attnops.hf.steps.calls import Kind, Nodes, StepInputs
from attnops.kernels.shared.launch.beside import BESIDE

MOST = 64
"""States whose graphs are kept, however small these are, and reasons: a model whose weights are
replaced before every call has a new state each time."""

WAIT_S = 0.1
"""Seconds for which a call waits for kernels that are being compiled. Those that Triton finds on
disk are loaded in less."""

FEW = 64
"""Chunks of at most so many tokens have other kernels of linears than longer ones."""

TRIES = 3
"""How often a capture is tried again after failures that say nothing of the model."""

# Texts of errors of CUDA and of torch, in lower case.
_PASSING = (
    "out of memory",
    "operation failed due to a previous error during capture",  # which another thread may have made
    "offset increment outside graph capture",
    "generator not in capture mode",
)
_REFUSED = "operation not permitted when stream is capturing"

ModelState = tuple[Any, ...]
"""What `Glance` sees of a model, the policy and autocast."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Building:
    """The kernels of a capture, which threads compile: all that were under way when it was
    begun."""

    def __init__(self) -> None:
        self._launches, self._waited = BESIDE.pending(), False

    def done(self) -> bool:
        """Are they compiled? The first answer waits for `WAIT_S` at most."""
        end = time.monotonic() + (0.0 if self._waited else WAIT_S)
        self._waited = True
        while self._launches:
            if not self._launches[-1].done.wait(max(0.0, end - time.monotonic())):
                return False
            self._launches.pop()
        return True


@dataclass(eq=False)
class Over:
    """Graphs over one set of pages.

    cache: a cache of ours over the pages. mode: of the steps; of chunks see `of_prompts`.
    live: ones int64 `[rows]`, which mark rows of a step; empty for chunks. queries: tokens of each
    row of a step that verifies; 0: one, of a step that does not. seen: chunks that ran, by bucket.
    counted: buckets that `grew` has seen.
    steps_first: have steps of the same call no graph yet? Chunks get theirs a call later.
    building: what captures wait for, once they were begun: by bucket of steps, and by `_of_chunks`.
    """

    cache: PagedModelCache
    graphed: Graphed
    mode: str
    live: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    queries: int = 0
    seen: Counter[Any] = field(default_factory=Counter)
    counted: int = 0
    steps_first: bool = False
    building: dict[Any, Building] = field(default_factory=dict)

    def grew(self) -> bool:
        """Was a bucket captured since it was asked last?"""
        before, self.counted = self.counted, self.graphed.captured
        return self.counted != before

    def given(self, rows: int) -> dict[str, Any]:
        """Arguments of a decode step, as far as a capture reads them."""
        live = self.live[:rows]
        ids = live[:, None].expand(rows, max(1, self.queries))
        lengths = live if self.queries else None
        parents = ids.int() if isinstance(self.queries, Nodes) else None
        inputs = StepInputs(ids, ids, lengths, parents)
        return {**inputs.arguments(live), "cache": self.cache}

    def begin(self, rows: int) -> None:
        """Begin to build what the capture of a decode step of so many rows will wait for, once a
        bucket."""
        self._begin(self._step(rows), self.given(rows))

    def begin_chunk(self, tokens: int) -> None:
        """As `begin`, of a chunk of so many tokens: once for few tokens, and once for more, which
        share kernels."""
        self._begin(_of_chunks(tokens), self.padding(tokens))

    def _begin(self, kind: Any, given: dict[str, Any]) -> None:
        if kind in self.building:
            return
        self.cache.state.pages.use()
        try:
            self.graphed.begin(**given)
        finally:
            self.building[kind] = Building()

    def is_step_built(self, rows: int) -> bool:
        """Is all compiled by now that the capture of such a step waits for, as far as it was
        begun?"""
        found = self.building.get(self._step(rows))
        return found is None or found.done()

    def is_chunk_built(self, tokens: int) -> bool:
        """As `is_step_built`, of a chunk."""
        found = self.building.get(_of_chunks(tokens))
        return found is None or found.done()

    @property
    def recorded(self) -> bool:
        """Does it hold recorded layers of prompts?"""
        return self.mode in {of_prompts(True, fresh) for fresh in (True, False)}

    def padding(self, tokens: int) -> dict[str, Any]:
        """Arguments of a chunk of so many tokens. The chunk stores no token."""
        some, graphed = self.cache.state.pages.seen.new_zeros, self.graphed
        by_token = dict.fromkeys(graphed.tokens, some(tokens))
        by_request = dict.fromkeys(graphed.requests, some(self.cache.max_batch))
        return {**by_token, **by_request, "cache": self.cache}

    def _step(self, rows: int) -> Bucket | None:
        """The bucket of a step of so many rows."""
        tokens = rows * max(1, self.queries)
        kind: BucketKind = "decode" if tokens == rows else "verify"
        return self.graphed.buckets.find(kind, tokens, rows, max(1, self.queries))

    def has_step(self, rows: int) -> bool:
        """Is there a graph for a step of so many rows?"""
        return self.graphed.holds(self._step(rows))

    def captured(self, kind: BucketKind, tokens: int, requests: int) -> bool:
        """Is there a graph for this kind of batch and so many tokens and requests?"""
        return self.graphed.holds(self.graphed.buckets.find(kind, tokens, requests))

    def chunks(self, tokens: int) -> int:
        """The chunks of this bucket so far, with one of so many tokens that is about to run."""
        bucket = self.graphed.buckets.find("mixed", tokens, 1)
        self.seen[bucket] += 1
        return self.seen[bucket]


def _of_chunks(tokens: int) -> str:
    """The chunks that share kernels with one of so many tokens."""
    return "few tokens" if tokens <= FEW else "more tokens"


def over_steps(cache: PagedModelCache, graphed: Graphed, mode: str, queries: int) -> Over:
    """Graphs of decode steps, or of those that verify `queries` tokens of each row."""
    with ordinary():
        live = torch.ones(cache.max_batch, dtype=torch.int64, device=cache.state.pages.seen.device)
    return Over(cache, graphed, mode, live, queries)


class Kept(NamedTuple):
    """Of one state of a model.

    over: the graphs by their pages and mode.
    taken: the steps so far, by kind, and the tokens of prompts.
    """

    over: dict[tuple[ModelPages, str], Over]
    taken: Counter[Kind]

    def free(self, pages: ModelPages, mode: str) -> None:
        """Free the graphs over these pages of this mode, if there are any."""
        if (pages, mode) in self.over:
            self.over.pop((pages, mode)).graphed.free()

    def free_prompts(self, pages: ModelPages, recorded: bool) -> None:
        """Free the graphs of prompts over these pages, by recorded or compiled layers."""
        for fresh in (True, False):
            self.free(pages, of_prompts(recorded, fresh))

    def await_steps(self, pages: ModelPages, rows: int, columns: int) -> bool:
        """Will a `generate()` make steps after a prompt of this shape that have no graph over these
        pages yet?"""
        running = running_generation()
        if running is None or running.asked is None or running.asked.length <= columns:
            return False
        steps = [each for (own, _), each in self.over.items() if own is pages and each.live.numel()]
        return not any(each.has_step(rows) for each in steps)

    @property
    def compiled(self) -> bool:
        """Has it graphs of compiled steps, as a state that comes back may?"""
        return any(mode == "piecewise" for _, mode in self.over)

    def too_few(self, tokens: int, most: int) -> str:
        """Count the tokens of a prompt. Why it gets no compiled layers, where fewer than `most`
        came before it; else ""."""
        before = self.taken["prompt"]
        if before >= most:
            return ""
        self.taken["prompt"] += tokens
        return f"{before} tokens of prompts have run, compiled are those after {most}"

    def reached(self, kind: Kind, most: int | None) -> bool:
        """Have steps of a kind run `most` times, after which they are compiled? None: never."""
        return most is not None and self.taken[kind] >= most

    def waits(self, most: int | None) -> bool:
        """Is a kind of step not yet compiled?"""
        return not all(self.reached(kind, most) for kind in self.taken if kind != "prompt")

    def notes(self, most: int | None) -> Iterator[str]:
        """How far each kind of step is on its way to compiled ones, which come after `most`."""
        after = "" if most is None else f"after {most}, or "
        for kind, steps in self.taken.items():
            if kind == "prompt":
                continue
            if self.reached(kind, most):
                yield f"steps of {kind} are compiled"
            else:
                yield (
                    f"steps of {kind} run without a compiler, {steps} so far; they are compiled "
                    f"{after}by capture()"
                )


def most_graph_bytes(device: torch.device) -> float:
    """A twentieth of a GPU's memory."""
    return gpu_bytes(device) / 20


class Captures:
    """The graphs of one model, of adapters and policies that are switched to and fro.

    Those of the state in use stay, and with them, within the budget, those that were used last.

    budget_bytes: of the graphs of all states, their buffers included. None: `most_graph_bytes`.
    freed: states whose graphs were freed for the budget.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget, self.freed = budget_bytes, 0
        self._kept: dict[ModelState, Kept] = {}  # the state in use is the last

    def __contains__(self, state: ModelState) -> bool:
        return state in self._kept

    def __iter__(self) -> Iterator[Over]:
        """All graphs."""
        return (over for kept in tuple(self._kept.values()) for over in tuple(kept.over.values()))

    @property
    def nbytes(self) -> int:
        """Bytes that all graphs and their buffers hold."""
        return sum(over.graphed.nbytes for over in self)

    @property
    def budget(self) -> float:
        """Bytes."""
        if self._budget is not None:
            return self._budget
        devices = {over.cache.state.pages.sizes.device for over in self}
        return min(map(most_graph_bytes, devices), default=0)

    def notes(self, aside: str, anew: str) -> Iterator[str]:
        """Why there are no graphs, what was captured anew, and what was freed, for the report.
        aside, anew: see `Decoder`."""
        if aside:
            yield f"decode steps and prompts have no graphs: {aside}"
        if anew:
            yield f"graphs were last captured anew for a change of {anew}"
        if self.freed:
            freed = f"graphs of {self.freed} states of the model were freed"
            budget = f"the budget of {self.budget / 2**20:.1f} MiB (Decode.budget_bytes) or "
            yield f"{freed}, over {budget if isfinite(self.budget) else ''}{MOST} states"

    def use(self, state: ModelState, taken: Counter[Kind]) -> Kept:
        """The graphs of a state, which is in use from now on.

        taken: its steps so far, where it has no graphs.
        """
        kept = self._kept[state] = self._kept.pop(state, Kept({}, taken))
        self.fit()
        return kept

    def bound(self, *graphs: Over) -> None:
        """Free graphs of other states where a capture of these has taken more memory than all may
        have."""
        if sum(over.grew() for over in graphs):
            self.fit()

    def fit(self) -> None:
        """Free the graphs of the states that were not used for longest, down to the budget."""
        held, budget = self.nbytes, self.budget
        for state in list(self._kept)[:-1]:
            kept = self._kept[state]
            if kept.over and len(self._kept) <= MOST and held <= budget:
                continue
            held -= sum(over.graphed.nbytes for over in kept.over.values())
            self.freed += bool(kept.over)  # without any, its pages are gone
            del self._kept[state]
            for over in kept.over.values():
                over.graphed.free()

    def forget(self, pages: ModelPages) -> None:
        """Free the graphs over these pages."""
        for kept in self._kept.values():
            for key in [key for key in kept.over if key[0] is pages]:
                kept.over.pop(key).graphed.free()

    def free(self) -> None:
        """Free all graphs."""
        for pages in {over.cache.state.pages for over in self}:
            self.forget(pages)
        self.freed = 0


class Failed(NamedTuple):
    """A kind of step whose graphs cannot be made.

    state: of the model, as a hash; None where the model itself cannot be looked at. kind: by its
    rows. mode: of the graphs.
    """

    state: int | None
    kind: str
    mode: str

    @property
    def loss(self) -> not_fast.Loss:
        """What such steps do not get."""
        return not_fast.COMPILED if self.mode == "piecewise" else not_fast.GRAPHS

    def __str__(self) -> str:
        return f"decode steps of {self.kind} have no {self.mode} graphs until release()"


class Failures(Generic[Key]):
    """Why graphs could not be made, by what they were of.

    lasting: reasons that stay until `clear`.
    passing: of what the next `generate()` tries again, the number of failures since a success, and
    the reason.
    """

    def __init__(self) -> None:
        self.lasting: dict[Key, str] = {}
        self.passing: dict[Key, tuple[int, str]] = {}

    def why(self, key: Key) -> str:
        """Why this failed last; "" after a success."""
        return self.passing[key][1] if key in self.passing else self.lasting.get(key, "")

    def note(self, key: Key, error: BaseException) -> bool:
        """Note a failure. Returns whether the next `generate()` tries again."""
        count, _ = self.passing.pop(key, (0, ""))
        why, again = one_line(error), passing(error) and count < TRIES
        if again:
            remember(self.passing, key, (count + 1, f"{why}; the next generate() tries again"))
        else:
            remember(self.lasting, key, why)
        return again

    def notes(self) -> tuple[str, ...]:
        """The lasting ones, for the report."""
        return tuple(dict.fromkeys(f"{key}: {why}" for key, why in self.lasting.items()))

    def done(self, key: Key) -> None:
        """Note a success."""
        self.passing.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self.lasting.clear()
        self.passing.clear()


def cannot_compile(failures: Failures[Failed], state: int | None) -> bool:
    """Do compiled steps of a state of the model have no graphs?"""
    return any(
        kind.mode == "piecewise" and kind.state in (None, state) for kind in failures.lasting
    )


def why_steps(failures: Failures[Failed], state: int | None, kind: str) -> str:
    """Why steps of a kind, of a state of the model, have no graphs, or none that are compiled; ""
    where they have."""
    modes = "piecewise", "breakable"
    kinds = [Failed(each, kind, mode) for each in (None, state) for mode in modes]
    return "; ".join(filter(None, dict.fromkeys(map(failures.why, kinds))))


@cache
def of_prompts(recorded: bool, fresh: bool) -> str:
    """The mode of graphs of prompts, among the modes of steps. fresh: of chunks whose requests have
    no tokens before them."""
    return f"{'first' if fresh else 'later'} chunks, {'recorded' if recorded else 'compiled'}"


def of_steps(word: str, queries: int) -> str:
    """The word for the mode or the kind of steps. Those that verify `queries` tokens of a row have
    one of their own, and those of trees."""
    if not queries:
        return word
    what = "nodes of a tree" if isinstance(queries, Nodes) else "tokens"
    return f"{word}, {queries} {what} a row"


def remember(found: dict[Key, Value], key: Key, value: Value) -> Value:
    """Add a value as the newest, and drop the oldest ones above MOST. attnops tries again what it
    dropped.

    Returns the value.
    """
    found.pop(key, None)
    found[key] = value
    while len(found) > MOST:
        del found[next(iter(found))]
    return value


def passing(error: BaseException) -> bool:
    """Does this failure of a capture say nothing of the model, so that a later capture may succeed?

    So it is where memory was short, where CUDA had ended the capture before the error (a wait for
    the whole device in another thread does that), and where a generator of random numbers was in
    another capture, or was left in one. A call that CUDA refuses because a stream captures is the
    model's own where our capture was open (`NotCapturable`), and another's where none was.
    """
    for each in chain_of(error):
        text = str(each).lower()
        if isinstance(each, torch.OutOfMemoryError) or any(words in text for words in _PASSING):
            return True
    return not isinstance(error, NotCapturable) and _REFUSED in str(error)
