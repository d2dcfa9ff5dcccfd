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
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
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
        *SIMPLE,
        complex,
        range,
        slice,
        torch.Size,
        torch.layout,
        torch.memory_format,
        type(Ellipsis),
        type(NotImplemented),
    )
)
# Their objects do not change, or their changes are none of a computation.
_FIXED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    property,
    staticmethod,
    classmethod,
    weakref.ref,
    Enum,
)
_FIXED_FROM = frozenset(
    (
        "torch",
        "attnops",
        "logging",
        "threading",
        "_thread",
        "weakref",
        "re",
        "typing",
        "functools",
        "contextvars",
        "_contextvars",
        "types",
        "inspect",
        "abc",
        "warnings",
    )
)
# Of types: classes of Python have it, those of C that keep their parts to themselves have not.
_OF_PYTHON = 1 << 9
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OF_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_CELL = attrgetter("cell_contents", "cell_contents")

Getter = Callable[[Any], Iterable[Any]]
"""Gets parts of an object."""


class Unknown(Exception):
    """A value that cannot be compared. The message says what it is."""


class Itself:
    """A value that is equal to itself only. It keeps the value, so that no other takes its
    place."""

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
    libraries. unguarded: the contents of tuples that may change, which Dynamo takes for constants.
    All in the order in which they were met.
    """

    def __init__(self, known: Iterable[nn.Module]) -> None:
        """known: modules that are compared elsewhere."""
        self._known = {id(module) for module in known}
        self.tensors: list[Tensor] = []
        self.functions: list[types.FunctionType] = []
        self.classes: dict[type, None] = {}
        self.unguarded: list[Any] = []
        # What `same` looks at again: sizes, what getters return, versions of tensors on the host,
        # bytes of arrays.
        self._sized: list[Sized] = []
        self._parts: list[tuple[Getter, Any]] = []
        self._hosts: list[Tensor] = []
        self._arrays: list[Callable[[], bytes]] = []
        # By identity. The values are kept, so that no later one has the identity of an earlier one.
        self._met: dict[int, tuple[int, Any]] = {}
        self._seen: tuple[Any, ...] = ()
        self._identities: list[Any] = []

    def watch(self, holder: Any, *getters: Getter, sized: bool = True) -> None:
        """Compare by identity what these get of an object. sized: its size, too."""
        self._parts += [(get, holder) for get in getters]
        if sized:
            self._sized.append(holder)

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
        if (
            id(x) in self._known
            or isinstance(x, _FIXED)
            or depth > MOST_DEPTH
            or kind.__module__.startswith("attnops.")
        ):
            return Itself(x)
        if isinstance(x, dict):
            self.watch(x, iter, dict.values)
            return kind, *(
                (self.of(k, depth + 1), self.of(v, depth + 1)) for k, v in list(x.items())
            )
        if isinstance(x, _SEQUENCES):
            return self._sequence(x, kind, depth)
        if isinstance(x, types.FunctionType):
            return self._function(x, depth)
        if isinstance(x, types.MethodType):
            return self.of(x.__func__, depth), self.of(x.__self__, depth)
        return self._object(x, kind, depth)

    def _sequence(self, x: Collection[Any], kind: type, depth: int) -> Any:
        if not isinstance(x, (tuple, frozenset)):
            self.watch(x, iter)
        found = [self.of(value, depth + 1) for value in x]
        if isinstance(x, tuple) and not all(type(value) in _VALUES for value in x):
            self.unguarded.append(tuple(found))
        return kind, frozenset(found) if isinstance(x, (set, frozenset)) else tuple(found)

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
        self.watch(x, _OF_CODE, sized=False)
        cells = x.__closure__ or ()
        for cell in cells:
            self.watch(cell, _OF_CELL, sized=False)
        parts = (x.__defaults__, x.__kwdefaults__, *map(content, cells))
        held = tuple(self.of(part, depth + 1) for part in parts)
        return Itself(x), Itself(x.__code__), *held

    def _object(self, x: Any, kind: type, depth: int) -> Any:
        if isinstance(x, functools.partial):
            return kind, *(self.of(part, depth) for part in (x.func, x.args, x.keywords))
        if isinstance(x, (int, float, str, bytes)):
            return kind, x
        if isinstance(x, (nn.Module, types.SimpleNamespace)):
            return self._attributes(x, kind, depth)
        if _home(kind) in _FIXED_FROM:
            return Itself(x)
        if hasattr(kind, "tobytes") or isinstance(x, bytearray):
            return self._array(x, kind)
        if all(base.__flags__ & _OF_PYTHON for base in kind.__mro__[:-1]):
            return self._attributes(x, kind, depth)
        raise Unknown(f"an object of {kind.__module__}.{kind.__qualname__}")

    def _attributes(self, x: Any, kind: type, depth: int) -> Any:
        own = getattr(x, "__dict__", None)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(x, name)]
        if not slots and not isinstance(own, dict):
            raise Unknown(f"an object of {kind.__module__}.{kind.__qualname__}")
        if _home(kind) not in ("torch", "transformers", "types"):
            self.classes[kind] = None
        if slots:
            # Slots have no dictionary to look at again.
            self.watch(x, attrgetter(*slots, slots[0]), sized=False)
        held = [(name, getattr(x, name)) for name in slots]
        if isinstance(own, dict):
            self.watch(own, iter, dict.values)
            held += own.items()
        return Itself(kind), *((name, self.of(value, depth + 1)) for name, value in held)

    def _array(self, x: Any, kind: type) -> Any:
        read = getattr(x, "tobytes", None) or functools.partial(bytes, x)
        size = x.nbytes if hasattr(x, "nbytes") else len(x)
        if size > MOST_BYTES:
            raise Unknown(f"a {kind.__name__} of more than {MOST_BYTES} bytes")
        self._arrays.append(read)
        return kind, str(getattr(x, "dtype", "")), getattr(x, "shape", ()), read()

    def keep(self) -> None:
        """Remember what `same` compares, once all values were followed."""
        self._seen, self._identities = self._look(), [*self._held()]

    def same(self) -> bool:
        """Are the contents of all that was followed as they were? Raises where they cannot be
        looked at."""
        if self._look() != self._seen:
            return False
        # As many as before, for their holders have the same sizes.
        return all(map(is_, self._held(), self._identities))

    def _look(self) -> tuple[Any, ...]:
        versions = [t._version for t in self._hosts]
        return list(map(len, self._sized)), versions, [read() for read in self._arrays]

    def _held(self) -> Iterable[Any]:
        return chain.from_iterable([get(holder) for get, holder in self._parts])


def _home(kind: type) -> str:
    """The package of a class."""
    return kind.__module__.partition(".")[0]


def _slots(base: type) -> Iterable[str]:
    slots = vars(base).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name without a value yet
        return Ellipsis


def getter(names: Sequence[str]) -> Getter:
    """Returns the values of these names in a dictionary."""
    return itemgetter(*names, names[0])


def address(t: Tensor) -> Any:
    """The place and layout of a tensor's numbers; those of a tensor subclass are in tensors of its
    own."""
    if type(t) in PLAIN:
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    flatten = getattr(t, "__tensor_flatten__", None)
    inner = flatten()[0] if flatten is not None else ()
    return id(t), *(address(getattr(t, name)) for name in inner)
