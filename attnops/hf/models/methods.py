"""`Method`: a function in place of one model's method, until it is removed. And what else is asked
of a module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from attnops.adapters.replicas import place, take_back


def modules_in(model: nn.Module) -> list[nn.Module]:
    """Those of `model.modules()`, in a fraction of its time."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


class Walk(NamedTuple):
    """Modules of a model: those with hooks around their forward, but for the model itself, and
    those in training mode."""

    hooked: list[nn.Module]
    training: list[nn.Module]


def walked(model: nn.Module, inside: list[nn.Module]) -> Walk:
    """One walk over the modules of a model for all questions of a call: each touches memory that
    the model's own run has taken out of the caches."""
    hooked = [m for m in inside if m._forward_pre_hooks or m._forward_hooks]
    training = [m for m in inside if m.training]
    return Walk([m for m in hooked if m is not model], training)


class Tree:
    """The modules of a model. They are looked for again only where one was set or taken away, which
    costs a fraction of a search."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._search()

    def _search(self) -> None:
        self._modules = modules_in(self._model)
        self._inside = self._now()

    def _now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable([m._modules.values() for m in self._modules])]

    def walk(self) -> Walk:
        """As `walked`, of the modules that the model has now."""
        if self._now() != self._inside:
            self._search()
        return walked(self._model, self._modules)


class Method:
    """A function in place of a method of one model. It holds data only, so that a deep copy of the
    model has one of its own.

    There is no public way: hooks run beside a forward and not in its place, and a function for
    `generate(custom_generate=...)` is an argument of every call.

    function: is called with this object before the method's arguments. None after `remove`: a
    wrapper around this object may still call it.
    own: the instance's own method before, or None.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.owner, self.name, self.own = owner, name, owner.__dict__.get(name)
        self.function: Callable[..., Any] | None = function
        self._signed: tuple[Any, inspect.Signature] | None = None
        place(owner, name, self)

    @property
    def original(self) -> Callable[..., Any]:
        """The method that was there before."""
        # A partial and not a bound method, which would be pickled as a name that the model's class
        # does not have.
        return (
            functools.partial(getattr(type(self.owner), self.name), self.owner)
            if self.own is None
            else self.own
        )

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers inspects the arguments of a model's methods, some of them several times a
        call: it is kept for one function."""
        own = self.own
        if isinstance(own, Method):
            return own.__signature__
        function = getattr(type(self.owner), self.name) if own is None else own
        if self._signed is None or self._signed[0] is not function:
            self._signed = function, inspect.signature(self.original)
        return self._signed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_signed": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self.original(*args, **kwargs)
            if self.function is None
            else self.function(self, *args, **kwargs)
        )

    def remove(self) -> None:
        """Put the method from before back, unless another has replaced this one."""
        self.function = None
        take_back(self.owner, self.name, self, self.own)


def is_compiled(module: nn.Module) -> bool:
    """Did the caller compile it in place (`module.compile()`)?"""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_replaced(module: nn.Module) -> bool:
    """Does a call of it run code other than its class' forward?"""
    return "forward" in vars(module) or is_compiled(module)
