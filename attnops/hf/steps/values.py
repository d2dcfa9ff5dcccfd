"""What the attributes of a model hold, in a form that can be compared later.

Simple values are compared by value, tensors by their address, containers by their contents. Other
objects of Python classes are followed through their attributes, functions through what they close
over.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from attnops.nn.absorb import PLAIN, SIMPLE

MOST_VALUES = 100_000
"""Values that a model may hold beside its weights."""

MOST_DEPTH = 8
"""Objects within objects that are followed. Deeper ones are compared by identity."""

MOST_BYTES = 1 << 16
"""Bytes of an array that is compared by value."""

# Compared by value, and without parts that change.
_VALUES = frozenset(
    (
        *SIMPLE, complex, range, slice, torch.Size, torch.layout, torch.memory_format,
        type(Ellipsis), type(NotImplemented),
    )
)  # fmt: skip
# Their objects do not change, or their changes are none of a computation.
_FIXED = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType,
    types.MemberDescriptorType, property, staticmethod, classmethod, weakref.ref, Enum,
)  # fmt: skip
_FIXED_FROM = frozenset(
    (
        "torch", "attnops", "logging", "threading", "_thread", "weakref", "re", "typing",
        "functools", "contextvars", "_contextvars", "types", "inspect", "abc", "warnings",
    )
)  # fmt: skip
# Of types: classes of Python have it, those of C that keep their parts to themselves have not.
_OF_PYTHON = 1 << 9
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OF_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Unknown(Exception):
    """A value that cannot be compared. The message says what it is."""


class Itself:
    """A value that is equal to itself only. It keeps the value, so that no other takes its place."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Values:
    """The values that were followed, to compare them later.

    tensors: those found. functions: of Python. classes: of objects that were followed, but those of
    libraries. unguarded: the contents of tuples that may change, which Dynamo takes for constants. All in the order in which they were met.
    """

    def __init__(self, known: Iterable[nn.Module]) -> None:
        """known: modules that are compared elsewhere."""
        self._known = {id(module) for module in known}
        self.tensors: list[Tensor] = []
        self.functions: list[types.FunctionType] = []
        self.classes: dict[type, None] = {}
        self.unguarded: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._sequences: list[Collection[Any]] = []
        self._cells: list[types.CellType] = []
        self._hosts: list[Tensor] = []
        self._arrays: list[Callable[[], bytes]] = []
        # By identity. The values are kept, so that no later one has the identity of an earlier one.
        self._met: dict[int, tuple[int, Any]] = {}
        self._seen: tuple[Any, ...] = ()
        self._identities: list[Any] = []

    def of(self, x: Any, depth: int = 0) -> Any:
        """A hashable that is equal as long as `x` has not changed. Raises Unknown."""
        kind = type(x)
        if kind in _VALUES:
            # 1, 1.0 and True are equal, and a NaN is not equal to itself.
            return x if kind is str or x is None else (kind, x if x == x else "nan")
        if (met := self._met.get(id(x))) is not None:
            return "met", met[0]
        self._met[id(x)] = len(self._met), x
        if len(self._met) > MOST_VALUES:
            raise Unknown(f"more than {MOST_VALUES} values")
        return self._followed(x, kind, depth)

    def _followed(self, x: Any, kind: type, depth: int) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, GenerationConfig):
            return kind  # generate() reads it, and no forward
        of_ours = kind.__module__.startswith("attnops.")
        if of_ours or id(x) in self._known or isinstance(x, _FIXED) or depth > MOST_DEPTH:
            return Itself(x)
        if isinstance(x, dict):
            self._dicts.append(x)
            pairs = list(x.items())
            return kind, *((self.of(k, depth + 1), self.of(v, depth + 1)) for k, v in pairs)
        if isinstance(x, _SEQUENCES):
            if not isinstance(x, (tuple, frozenset)):
                self._sequences.append(x)
            found = [self.of(value, depth + 1) for value in x]
            if isinstance(x, tuple) and not all(type(value) in _VALUES for value in x):
                self.unguarded.append(tuple(found))
            return kind, frozenset(found) if isinstance(x, (set, frozenset)) else tuple(found)
        if isinstance(x, types.FunctionType):
            return self._function(x, depth)
        if isinstance(x, types.MethodType):
            return self.of(x.__func__, depth), self.of(x.__self__, depth)
        if isinstance(x, functools.partial):
            return kind, *(self.of(part, depth) for part in (x.func, x.args, x.keywords))
        if isinstance(x, (int, float, str, bytes)):
            return kind, x
        return self._object(x, kind, depth)

    def _tensor(self, t: Tensor) -> Any:
        self.tensors.append(t)
        if type(t) not in PLAIN or t.device.type != "cpu":
            return address(t)
        # A capture for another device may hold the number of a tensor that is on the host.
        if not t.is_inference():
            self._hosts.append(t)
        return 0 if t.is_inference() else t._version, Itself(t), address(t)

    def _function(self, x: types.FunctionType, depth: int) -> Any:
        self.functions.append(x)
        cells = x.__closure__ or ()
        self._cells += cells
        parts = (x.__defaults__, x.__kwdefaults__, *map(content, cells))
        held = tuple(self.of(part, depth + 1) for part in parts)
        return Itself(x), Itself(x.__code__), *held

    def _object(self, x: Any, kind: type, depth: int) -> Any:
        home = kind.__module__.partition(".")[0]
        if isinstance(x, nn.Module):
            return self._attributes(x, kind, depth)
        if home in _FIXED_FROM:
            return Itself(x)
        if hasattr(kind, "tobytes") or isinstance(x, bytearray):
            return self._array(x, kind)
        if not all(base.__flags__ & _OF_PYTHON for base in kind.__mro__[:-1]):
            raise Unknown(f"an object of {kind.__module__}.{kind.__qualname__}")
        return self._attributes(x, kind, depth)

    def _attributes(self, x: Any, kind: type, depth: int) -> Any:
        if kind.__module__.partition(".")[0] not in ("torch", "transformers"):
            self.classes[kind] = None
        own = getattr(x, "__dict__", None)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(x, name)]
        if not isinstance(own, dict) and not slots:
            raise Unknown(f"an object of {kind.__module__}.{kind.__qualname__}")
        if slots:
            # Slots have no dictionary to look at again.
            getter = attrgetter(*slots, slots[0])
            self._sequences.append(_Slots(getter, x))
        held = [(name, self.of(getattr(x, name), depth + 1)) for name in slots]
        if isinstance(own, dict):
            self._dicts.append(own)
            held += [(name, self.of(value, depth + 1)) for name, value in list(own.items())]
        return Itself(kind), *held

    def _array(self, x: Any, kind: type) -> Any:
        read = getattr(x, "tobytes", None) or functools.partial(bytes, x)
        size = x.nbytes if hasattr(x, "nbytes") else len(x)
        if size > MOST_BYTES:
            raise Unknown(f"a {kind.__name__} of more than {MOST_BYTES} bytes")
        self._arrays.append(read)
        return kind, str(getattr(x, "dtype", "")), getattr(x, "shape", ()), read()

    def keep(self) -> None:
        """Remember what `same` compares, once all values were followed."""
        self._seen, self._identities = self._look(), self._held()

    def same(self) -> bool:
        """Are the contents of all that was followed as they were? Raises where they cannot be looked at."""
        return self._look() == self._seen and alike(self._held(), self._identities)

    def _look(self) -> tuple[Any, ...]:
        versions = [t._version for t in self._hosts]
        arrays = [read() for read in self._arrays]
        return list(map(len, self._dicts)), list(map(len, self._sequences)), versions, arrays

    def _held(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        found += chain.from_iterable(self._dicts)
        found += chain.from_iterable(self._sequences)
        found += chain.from_iterable(map(_OF_CODE, self.functions))
        found += [cell.cell_contents for cell in self._cells]
        return found


class _Slots(Collection[Any]):
    """The values of an object's slots."""

    def __init__(self, getter: Callable[[Any], Any], owner: Any) -> None:
        self._getter, self._owner = getter, owner

    def __iter__(self) -> Any:
        return iter(self._getter(self._owner))

    def __len__(self) -> int:
        return len(self._getter(self._owner))

    def __contains__(self, value: object) -> bool:
        return value in self._getter(self._owner)


def _slots(base: type) -> Iterable[str]:
    slots = vars(base).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name without a value yet
        return Ellipsis


def alike(found: list[Any], seen: list[Any]) -> bool:
    """Are they the same objects?"""
    return len(found) == len(seen) and all(map(is_, found, seen))


def getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns the values of these names in a dictionary."""
    if len(names) > 1:
        return itemgetter(*names)
    [name] = names
    return lambda held: (held[name],)


def address(t: Tensor) -> Any:
    """The place and layout of a tensor's numbers; those of a tensor subclass are in tensors of its own."""
    if type(t) in PLAIN:
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    flatten = getattr(t, "__tensor_flatten__", None)
    inner = flatten()[0] if flatten is not None else ()
    return id(t), *(address(getattr(t, name)) for name in inner)
