"""The code that a model's forward may run, as names that can be looked up again.

From the forward of each class a walk follows the names in its code, without running it: functions
and modules among the globals of its file, and methods of the model's classes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from attnops.hf.steps.values import Itself, Unknown, Values, content, getter

MOST_FUNCTIONS = 1000
"""Functions whose code is followed."""

# What the call of a module begins with.
_ENTRIES = ("forward", "__call__", "_call_impl")
_CODE = (types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "attnops", "numpy"))

Holder = Mapping[str, Any]


class Code:
    """The places of the names that a model's code looks up.

    places: (the dictionary that holds a name, whose it is, the name), in the order of the walk.
    state: their values. functions: those of them that are code.
    values: the contents of these functions, and of the globals that the files of models look up.
    """

    def __init__(
        self,
        classes: Sequence[type],
        given: Sequence[types.FunctionType],
        modules: Iterable[nn.Module],
    ) -> None:
        """given: the functions that the model's attributes hold. modules: are compared
        elsewhere."""
        self._of = _with_code(classes, given)
        self.values = Values(modules)
        self.places: dict[tuple[int, str], tuple[Holder, str, str]] = {}
        self.state: list[Any] = []
        self.functions: list[Itself] = []
        self.unknown = ""
        self._classes = list(dict.fromkeys(chain.from_iterable(c.__mro__[:-1] for c in classes)))
        self._held_by: dict[type, Holder] = {base: vars(base) for base in self._classes}
        self._own = [base for base in self._classes if _home(base) not in _LIBRARIES]
        self._members: dict[str, list[type]] = {}
        for base in self._own:
            for name in self._held_by[base]:
                self._members.setdefault(name, []).append(base)
        self._entered: set[types.FunctionType] = set()
        self._waiting: list[types.FunctionType] = []
        self._walk(given)
        self._prepare()

    def _walk(self, given: Iterable[types.FunctionType]) -> None:
        for base in self._classes:
            for name in _ENTRIES:
                if name in self._held_by[base]:
                    follow = _home(base) not in _LIBRARIES
                    self._place(self._held_by[base], base.__qualname__, name, follow)
        for function in given:
            self._enter(function)
        done = 0
        while self._waiting or done < len(self.values.functions):
            while self._waiting and len(self._entered) < MOST_FUNCTIONS:
                self._names_of(self._waiting.pop())
            self._waiting.clear()
            # Following contents may meet functions.
            for function in self.values.functions[done:]:
                done += 1
                self._enter(function)

    def _names_of(self, function: types.FunctionType) -> None:
        names = _names(function.__code__)
        follow, of_file = _is_model_code(function), function.__globals__
        modules = []
        for name in names:
            if name in of_file:
                value = self._place(of_file, _file(function), name, follow)
                modules += [value] if isinstance(value, types.ModuleType) else []
            for base in self._members.get(name, ()):
                self._place(self._held_by[base], base.__qualname__, name, follow)
        for module in modules:  # grows in the loop
            for name in vars(module).keys() & names:
                value = self._place(vars(module), module.__name__, name, follow=False)
                if isinstance(value, types.ModuleType) and value not in modules:
                    modules.append(value)

    def _place(self, holder: Holder, whose: str, name: str, follow: bool) -> Any:
        """Take a name up. Returns its value. follow: its contents, too, where it is no function of
        a library."""
        value, key = holder[name], (id(holder), name)
        if key in self.places:
            return value
        self.places[key] = holder, whose, name
        found, why = self._compared(value, follow)
        self.state.append(found)
        # Files of transformers keep nothing in such values that changes.
        if why and not str(holder.get("__module__", holder.get("__name__"))).startswith(
            "transformers."
        ):
            self.unknown = self.unknown or f"{whose}.{name} holds {why}"
        if isinstance(value, _CODE):
            self.functions.append(Itself(value))
        self._enter(value)
        return value

    def _compared(self, value: Any, follow: bool) -> tuple[Any, str]:
        """(what is compared of a value, why its contents cannot be or "")."""
        shared = isinstance(value, types.FunctionType) and not _is_model_code(value)
        if not follow or shared or isinstance(value, (types.ModuleType, type)):
            return Itself(value), ""
        try:
            return self.values.of(value), ""
        except Unknown as why:
            return Itself(value), str(why)

    def _enter(self, value: Any) -> None:
        """Follow the code of a function later, and of those within it."""
        for function in _functions(value):
            if function in self._entered or _home(function) in _LIBRARIES:
                continue
            self._entered.add(function)
            self._waiting.append(function)
            for cell in function.__closure__ or ():
                self._enter(content(cell))

    def _prepare(self) -> None:
        names: dict[int, tuple[Holder, list[str]]] = {}
        for (holder_id, _), (holder, _, name) in self.places.items():
            names.setdefault(holder_id, (holder, []))[1].append(name)
        for holder, found in names.values():
            self.values.watch(holder, getter(found), sized=False)
        for base in self._own:
            self.values.watch(self._held_by[base])
        self.values.keep()

    def same(self) -> bool:
        """Do all names have their values still, with their contents? Raises where one is gone or
        cannot be looked at.

        Not compared are the addresses of tensors among the contents.
        """
        return self.values.same()

    def holds(self, classes: Sequence[type], given: Sequence[types.FunctionType]) -> bool:
        """Would a new walk from these classes and functions find the same?"""
        try:
            return (
                not self.values.tensors and _with_code(classes, given) == self._of and self.same()
            )
        except Exception:  # a name is gone, or a value cannot be compared
            return False


def _with_code(classes: Iterable[type], given: Iterable[types.FunctionType]) -> tuple[Any, ...]:
    return list(classes), [(function, function.__code__) for function in given]


@functools.lru_cache(2 * MOST_FUNCTIONS)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code looks up, each once. Code never changes, and most of a model's is looked
    at again."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names(constant)))
        elif isinstance(constant, str) and constant.isidentifier():
            found[constant] = None  # of getattr
    return tuple(found)


def _functions(value: Any) -> list[types.FunctionType]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value) if isinstance(value, types.MethodType) else value
    wrapped = vars(value).get("__wrapped__") if isinstance(value, types.FunctionType) else None
    found = [value] if isinstance(value, types.FunctionType) else []
    return found + ([wrapped] if isinstance(wrapped, types.FunctionType) else [])


def _home(value: Any) -> str:
    """The package in which a class or function is defined."""
    is_function = isinstance(value, types.FunctionType)
    name = _file(value) if is_function else str(getattr(value, "__module__", None) or "")
    return name.partition(".")[0]


def _file(function: types.FunctionType) -> str:
    """Where the code of a function is. A wrapper says the name of what it wraps."""
    return str(function.__globals__.get("__name__", ""))


def _is_model_code(function: types.FunctionType) -> bool:
    """Is it of a model's file, or of the caller's, and not of a library that all models share?"""
    file = _file(function)
    home = file.partition(".")[0]
    if home == "transformers":
        return file.startswith("transformers.models.")
    return home not in _LIBRARIES
