"""A subclass of a module's class in its place, under its name, and the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

_OF_EVERY_CLASS = ("__dict__", "__weakref__")


def subclass(own: Any, body: Mapping[str, Any], again: tuple[Any, ...], base: Any = None) -> type:
    """A subclass of `base` that goes by the name of `own`, so that what is saved names `own`.

    again: the cached function that made this class, and its arguments: another process makes an
    empty object of it by them. base: `own`, or a subclass of it; None: `own`.
    """
    base = base or own

    def reduce(self: Any, protocol: Any) -> Any:
        as_usual = base.__reduce_ex__(self, protocol)
        return (_empty, again, *as_usual[2:]) if type(self) is made else as_usual

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    made = type(own.__name__, (base,), {**named, **body, "__reduce_ex__": reduce})
    return made


def _empty(make: Callable[..., type], *args: Any) -> Any:
    return object.__new__(make(*args))


class Swap:
    """A class in place of an object's own, and attributes beside it, from now until `undo()`.

    It holds no class of ours, which pickle would look up by the name of its own.

    make: makes the class of the object's own and of `args`. attributes: to set on the object.
    """

    def __init__(
        self, target: Any, make: Callable[..., Any], *args: Any, attributes: Mapping[str, Any]
    ) -> None:
        self.target, self.attributes = target, attributes
        self.own: Any = type(target)
        self._make, self._args, here = make, args, vars(target)
        self._before = {name: here[name] for name in attributes if name in here}
        # The public ways were tried. Hooks run beside a forward and not in its place. The forward
        # of an object goes into its deep copies with the weights of the object, and keeps its layer
        # from being traced alone. fully_shard and parametrisations of torch assign it, too.
        target.__class__ = self.ours
        here.update(attributes)

    @property
    def ours(self) -> Any:
        """The class in place of the object's own."""
        return self._make(self.own, *self._args)

    def is_whole(self) -> bool:
        """Has the object the class and the attributes that it was given?"""
        here = vars(self.target)
        same = all(here.get(name) is value for name, value in self.attributes.items())
        return same and type(self.target) is self.ours

    def undo(self) -> None:
        """Give the object its class and its attributes back.

        An attribute that has changed since then stays. So does a class; one that was made over
        ours, as fully_shard and parametrisations do it, is made anew over the object's own. An
        object of a class that cannot be made anew stays as it is.
        """
        now: Any = type(self.target)
        here = vars(self.target)
        cls = taken_out(now, self.ours, self.own)
        if cls is None:
            return
        if cls is not now:
            self.target.__class__ = cls
        for name, value in self.attributes.items():
            if name in here and here[name] is value:
                del here[name]
                if name in self._before:
                    here[name] = self._before[name]


@functools.cache
def taken_out(cls: Any, ours: Any, own: Any) -> Any:
    """`cls` with `own` in the place of `ours`; None where it cannot be made.

    fully_shard and parametrisations make a class over that of a module.
    """
    if ours is own or not issubclass(cls, ours):
        return cls
    if cls is ours:
        return own
    bases = [taken_out(base, ours, own) for base in cls.__bases__]
    if None in bases or any(map(_knows_its_class, vars(cls).values())):
        return None
    body = {name: value for name, value in vars(cls).items() if name not in _OF_EVERY_CLASS}
    try:
        return type(cls)(cls.__name__, tuple(bases), body)
    except Exception:  # of a class that refuses such bases
        return None


def _knows_its_class(value: Any) -> bool:
    """Does it call `super()`, which holds the class in whose body it stands?"""
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars
