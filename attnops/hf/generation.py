"""Recognises the steps of a `generate()`, whose 2-D mask is the previous mask with ones appended, and needs no further check.

Other calls in the meantime (another model in a LogitsProcessor, the same model on a negative prompt, a nested `generate()`) make no such
promise. It holds for one model and one chain of masks: `generate()` makes the arguments of each step by `prepare_inputs_for_generation`,
whose mask is the very object that the forward gets; `_update_model_kwargs_for_generation` makes the next mask from the last. Where that
chain breaks, masks are checked.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Verdict(NamedTuple):
    """The check of a 2-D mask. run: every row is one run of ones. full: it has no zeros. grows: it stays one run with ones appended."""

    run: bool
    full: bool
    grows: bool


class Generation:
    """The masks of one `generate()` call. After a mask that fails the check, all masks of the call are checked.

    owner: the model, or None for a block in which all masks grow.
    inside: a step of the owner is under way.
    checked: the padding `[rows]` of the cache of pages which the prompt's mask was found to fit (see attnops.hf.mask).
    prompt: columns of the prompt's mask, None without one.
    lent: the caches made for it (attnops.hf.paged).
    """

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = owner
        self.inside = owner is None
        self.verdict: Verdict | None = None
        self.checked: Tensor | None = None
        self.prompt: int | None = None
        self.lent: list[Any] = []
        self._begun = False
        self._last: Any = None  # the mask that the last step left behind
        self._prepared: Any = None  # the mask of the next step's forward

    def note(self, new: Verdict) -> None:
        """Take the check of one more mask into account."""
        lasting = Verdict(new.grows, new.full and new.grows, new.grows)
        old = self.verdict or lasting
        self.verdict = Verdict(*(a and b for a, b in zip(old, lasting, strict=True)))

    def continues(self, mask: Any) -> bool:
        """Is this the mask of its next step? Of a prompt in chunks each brings one of its own."""
        return not self._begun or (mask is not None and mask is self._last)

    def prepared(self, inputs: dict[str, Any]) -> None:
        """The next step will be given these."""
        self._prepared = inputs.get("attention_mask")

    def enter(self, mask: Any) -> None:
        """The model is called with this mask."""
        if self.owner is not None:
            self.inside = mask is not None and mask is self._prepared

    def leave(self) -> None:
        """The call is over."""
        if self.owner is not None:
            self.inside, self._prepared = False, None

    def updated(self, kwargs: dict[str, Any]) -> None:
        """A step has ended, and left these arguments for the next."""
        self._begun, self._last = True, kwargs.get("attention_mask")


class _Current(threading.local):
    running: Generation | None = None


_GENERATION = _Current()


def running_generation() -> Generation | None:
    """That of the innermost `generate()` of a patched model which this thread is in."""
    return _GENERATION.running


def current_generation() -> Generation | None:
    """The same, while one of its own steps is under way."""
    running = _GENERATION.running
    return running if running is not None and running.inside else None


@contextmanager
def growing(owner: nn.Module | None = None) -> Iterator[Generation]:
    """Within the block (and this thread) the steps of `owner` are those of one `generate()`. None: so is every call of any model."""
    before = _GENERATION.running
    _GENERATION.running = Generation(owner)
    try:
        yield _GENERATION.running
    finally:
        _GENERATION.running = before


# Methods and hooks of a model -----------------------------------------------------------------------------------------

_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class _Method:
    """A method of one model that keeps the chain of masks. It holds data only, so that a deep copy of the model has one of its own."""

    def __init__(self, owner: Any, name: str, own: Callable[..., Any] | None) -> None:
        self.owner, self.name, self.own = owner, name, own

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers inspects its arguments."""
        return inspect.signature(self._call())

    def _call(self) -> Callable[..., Any]:
        return functools.partial(getattr(type(self.owner), self.name), self.owner) if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _GENERATION.running
        if running is None or running.owner is not self.owner:
            return self._call()(*args, **kwargs)
        given = kwargs if self.name == _METHODS[0] else kwargs.get("model_kwargs") or (args[1] if len(args) > 1 else {})
        if not running.continues(given.get("attention_mask")):
            return self._call()(*args, **kwargs)
        if self.name == _METHODS[0]:
            running.inside = True  # it makes the masks of a step that will be compiled
            try:
                made = self._call()(*args, **kwargs)
            finally:
                running.inside = False
            running.prepared(made)
            return made
        made = self._call()(*args, **kwargs)
        running.updated(made)
        return made


def _enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling() and (running := _GENERATION.running) is not None and running.owner is module:
        running.enter(kwargs.get("attention_mask"))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and (running := _GENERATION.running) is not None and running.owner is module:
        running.leave()


def watch(owner: Any) -> list[RemovableHandle]:
    """Follow the model's calls, to recognise the steps of its `generate()`. Returns the hooks, for `unwatch`."""
    for name in _METHODS:
        if hasattr(owner, name):
            owner.__dict__[name] = _Method(owner, name, owner.__dict__.get(name))
    hooks = owner.register_forward_pre_hook(_enter, with_kwargs=True), owner.register_forward_hook(_leave, always_call=True)
    return list(hooks)


def unwatch(owner: Any, hooks: list[RemovableHandle]) -> None:
    """Give the model back as it was."""
    for hook in hooks:
        hook.remove()
    for name in _METHODS:
        if isinstance(ours := owner.__dict__.get(name), _Method):
            del owner.__dict__[name]
            if ours.own is not None:
                owner.__dict__[name] = ours.own
