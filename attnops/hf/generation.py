"""Recognises the steps of a `generate()`, whose 2-D mask is the previous mask with ones appended,
and needs no further check.

Other calls in the meantime (another model in a LogitsProcessor, the same model on a negative
prompt, a nested `generate()`) make no such promise. It holds for one model and one chain of masks:
`generate()` makes the arguments of each step by `prepare_inputs_for_generation`, whose mask is the
object that the forward gets; `_update_model_kwargs_for_generation` makes the next mask from the
last. Where that chain breaks, masks are checked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from attnops.hf.models.methods import Method


class Verdict(NamedTuple):
    """The check of a 2-D mask. run: every row is one run of ones. full: it has no zeros. grows: it
    stays one run with ones appended."""

    run: bool
    full: bool
    grows: bool


@dataclass(eq=False)
class Generation:
    """The masks of one `generate()` call. After a mask that fails the check, all masks of the call
    are checked.

    owner: the model, or None for a block in which all masks grow.
    inside: a step of the owner is under way.
    verdict: the check of its masks so far; None before the first.
    checked: the padding `[rows]` of the cache of pages which the prompt's mask was found to fit
    (see attnops.hf.attention.mask).
    prompt: columns of the prompt's mask, None without one.
    lent: the caches made for it (attnops.hf.page_model).
    why: why its cache is transformers' own, "" where it is not, None before the cache is chosen.
    custom: the caller passed a loop of its own.
    stepped: did the model's forward get a step after the prompt? Only graphs make it look.
    graphs: the mode of graphs that its last step ran in, "" without.
    layers: how compiled layers ran its prompt, "compiled" or "captured"; "" where the model's own
    ran it.
    loop: why the loop around its steps is transformers' own, "" where it is not
    (attnops.hf.steps.decode_loop).
    drafts: the most tokens of a row that a round of drafts verifies; 0 without rounds.
    rounds: what drafts were worth, or why there were none; "" where none were asked for.
    tokens_a_round: tokens that a row got in a round, on average; 0.0 without rounds.
    waits: why its last step had no graph yet; "" where it had one.
    last: (the mask that the last step left behind,), or () before the first.
    prepared: (the mask of the next step's forward,) from its preparation to its end, else ().
    around: the generation in whose call this one began, as in a LogitsProcessor.
    looked: the glance at the owner (attnops.hf.steps.model_state) that still held when its cache
    was chosen. None after code that may have changed the owner.
    asked: the sizes of the pages that its cache was asked for with (`page_sizes.Sizes`), or None.
    early: its prompt, where that started early (`hf.steps.early`), or None.
    read: (the last mask that the host has read, its version, what it read), or (), see `on_host`.
    hidden: of its prompt so far (`hf.steps.hidden.Read`), for a draft head; None: nothing reads it.
    """

    owner: nn.Module | None = None
    inside: bool = False
    verdict: Verdict | None = None
    checked: Tensor | None = None
    prompt: int | None = None
    lent: list[Any] = field(default_factory=list)
    why: str | None = None
    custom: bool = False
    stepped: bool = False
    graphs: str = ""
    layers: str = ""
    loop: str = ""
    drafts: int = 0
    rounds: str = ""
    tokens_a_round: float = 0.0
    waits: str = ""
    last: tuple[Any, ...] = ()
    prepared: tuple[Any, ...] = ()
    around: Generation | None = None
    looked: Any = None
    asked: Any = None
    early: Any = None
    read: tuple[Any, ...] = ()
    hidden: list[Any] | None = None

    def note(self, new: Verdict) -> None:
        """Take the check of one more mask into account."""
        lasting = Verdict(new.grows, new.full and new.grows, new.grows)
        old = self.verdict or lasting
        self.verdict = Verdict(*(a and b for a, b in zip(old, lasting, strict=True)))

    def goes_on(self, mask: Any) -> bool:
        """Is this the mask of a call behind the prompt? The prompt's mask was checked, and
        generate() only appends ones to it. Each chunk of a prompt brings more of the mask."""
        prompt = self.prompt
        return prompt is None or (
            isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > prompt
        )

    def note_cache(self, cache: Any, why: str) -> None:
        """Note the pages that were lent to it, or None, and why it got none."""
        self.why = why
        if cache is not None:
            self.lent.append(cache)


THREAD = threading.local()
"""running: the innermost generation. given: the positions of the model's call, see `note`."""


def running_generation() -> Generation | None:
    """The generation of the innermost `generate()` of a patched model that runs in this thread."""
    running: Generation | None = getattr(THREAD, "running", None)
    return running


def is_generating(owner: nn.Module) -> bool:
    """Is a `generate()` of this model under way in this thread?"""
    running = running_generation()
    while running is not None and running.owner is not owner:
        running = running.around
    return running is not None


def current_generation() -> Generation | None:
    """The running generation while a step of its owner is under way."""
    running = running_generation()
    return running if running is not None and running.inside else None


def on_host(mask: Tensor) -> Tensor:
    """A mask as bools on the CPU. The host waits for the device, once for each mask of a
    `generate()`."""
    running = running_generation()
    if running is None or mask.is_inference():  # which has no version
        return mask.to("cpu", torch.bool)
    if not running.read or running.read[0] is not mask or running.read[1] != mask._version:
        running.read = mask, mask._version, mask.to("cpu", torch.bool)
    read: Tensor = running.read[2]
    return read


def note_hidden(hidden: list[Any]) -> None:
    """Hand on the hidden states of a prompt, or of a part of it."""
    running = running_generation()
    if running is not None and running.hidden is not None:
        running.hidden += hidden
    hidden.clear()


@contextmanager
def after_others(turn: Any) -> Iterator[None]:
    """Within the block this thread has a lock. While another one had it, the model may have
    changed."""
    if not turn.acquire(blocking=False):
        look_again()
        turn.acquire()
    try:
        yield
    finally:
        turn.release()


def look_again() -> None:
    """The model may have changed since its `generate()` looked at it."""
    if (running := running_generation()) is not None:
        running.looked = None


@contextmanager
def growing(owner: nn.Module | None = None) -> Iterator[Generation]:
    """Within the block (and this thread) the steps of `owner` are those of one `generate()`. None:
    so is every call of any model."""
    before = running_generation()
    THREAD.running = Generation(owner, inside=owner is None, around=before)
    try:
        yield THREAD.running
    finally:
        THREAD.running = before


def _running(owner: Any) -> Generation | None:
    """The generation that runs, if it is the owner's."""
    running = None if is_dynamo_compiling() else running_generation()
    return None if running is None or running.owner is not owner else running


def _of(owner: Any, mask: Any) -> Generation | None:
    """The generation of the owner that runs, if this is the mask of its next step. Each chunk of a
    prompt brings a mask of its own."""
    running = _running(owner)
    return None if running is None or (running.last and mask is not running.last[0]) else running


def _prepare(method: Method, *args: Any, **kwargs: Any) -> Any:
    if (running := _of(method.owner, kwargs.get("attention_mask"))) is None:
        return method.original(*args, **kwargs)
    running.inside = True  # it makes the masks of a step that will be compiled
    try:
        made = method.original(*args, **kwargs)
    finally:
        running.inside = False
    running.prepared = (made.get("attention_mask"),)
    return made


def _update(method: Method, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("model_kwargs") or (args[1] if len(args) > 1 else {})
    running = _of(method.owner, given.get("attention_mask"))
    made = method.original(*args, **kwargs)
    if running is not None:
        running.last = (made.get("attention_mask"),)
    return made


def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a model: the positions by which its documents may be packed are for the
    next mask of this thread (see attnops.hf.attention.positions)."""
    if is_dynamo_compiling():
        return
    THREAD.given = None
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] == 1:
        return
    if kwargs.get("attention_mask") is None and kwargs.get("cu_seq_lens_q") is None:
        THREAD.given = type(module).__name__, weakref.ref(positions)


def _enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if (running := _running(module)) is not None:
        # transformers 5.23 drops a mask without zeros: None is then the mask of every step.
        running.inside = any(mask is kwargs.get("attention_mask") for mask in running.prepared)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if (running := _running(module)) is not None:
        running.inside, running.prepared, running.looked = False, (), None


def watch(owner: Any) -> list[Method | RemovableHandle]:
    """Follow the model's calls, to recognise the steps of its `generate()`. The `remove()` of each
    result ends it."""
    chain = {
        "prepare_inputs_for_generation": _prepare,
        "_update_model_kwargs_for_generation": _update,
    }
    methods = [
        Method(owner, name, function) for name, function in chain.items() if hasattr(owner, name)
    ]
    return [
        *methods,
        owner.register_forward_pre_hook(_enter, with_kwargs=True),
        owner.register_forward_hook(_leave, always_call=True),
    ]
