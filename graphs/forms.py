"""Structures of tensors and other values, and their forms, which code cannot tell apart."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ALIGNED = 16
"""Bytes. Kernels and passes ask whether a tensor is so aligned."""

PLAIN = (Tensor, nn.Parameter)
VALUES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the results of a graph."""

    index: int


class _Same:
    """An object that is equal to itself only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """The structure with its leaves changed. Tuples, lists, dicts and dataclasses are followed;
    other objects are leaves."""
    if type(x) in (tuple, list):
        return type(x)(mapped(value, change) for value in x)
    if _is_named(x):
        return x._make(mapped(value, change) for value in x)
    if type(x) is dict:
        return {name: mapped(value, change) for name, value in x.items()}
    if not _has_fields(x) or isinstance(x, Slot):
        return change(x)
    new = {name: mapped(value, change) for name, value in _held(x).items()}
    if isinstance(x, Mapping):
        return type(x)(**new)
    made = copy.copy(x)
    for name, value in new.items():
        object.__setattr__(made, name, value)
    return made


def filled(x: Any, results: Any) -> Any:
    """The structure with the tensors of its slots."""
    return mapped(x, lambda leaf: results[leaf.index] if isinstance(leaf, Slot) else leaf)


def _is_named(x: Any) -> bool:
    """Is it a NamedTuple?"""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _has_fields(x: Any) -> bool:
    """Is it an object of a dataclass? One that is a dict as well is made of its fields, as those of
    transformers' results are."""
    if isinstance(x, type) or not is_dataclass(x):
        return False
    return not isinstance(x, Mapping) or x.keys() <= {each.name for each in fields(x)}


def _held(x: Any) -> dict[str, Any]:
    """What an object of a dataclass holds, by name: also what is set beside its fields."""
    own = {each.name: getattr(x, each.name) for each in fields(x) if hasattr(x, each.name)}
    return own | getattr(x, "__dict__", {})


def tensors_of(x: Any) -> list[Tensor]:
    """Those among the leaves of a structure, in order."""
    found: list[Tensor] = []
    mapped(x, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, buffers and other attributes of the module and its submodules that are
    tensors, by names as Dynamo gives them to inputs."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=True):
        own = vars(part)
        prefix = "".join(f"_modules_{name}" for name in path.split(".") if name)
        kinds = {"parameters": own["_parameters"], "buffers": own["_buffers"], "attributes": own}
        for kind, held in kinds.items():
            for name, value in held.items():
                if isinstance(value, Tensor):
                    found[f"l_call{prefix}_{kind}_{name}_"] = value
    return found


class Form:
    """Hashable descriptions of values, equal for those for which code does the same.

    Tensors are described by layout, alignment and which of them share memory; numbers, words and
    containers by value; other objects are equal to themselves only.

    known: takes the forms of objects without tensors, which do not change meanwhile: layers share
    a config of many fields.
    """

    def __init__(self, known: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._storages: dict[int, tuple[int, int]] = {}
        self._tensors: dict[int, int] = {}
        self._met = 0  # tensors
        self._known = {} if known is None else known

    def further(self) -> Form:
        """Describes more values, beside tensors that were described."""
        made = Form()
        made._storages, made._tensors = self._storages.copy(), self._tensors.copy()
        return made

    def of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._layout(x)
        if type(x) is int:
            return int, x
        if isinstance(x, VALUES):
            return type(x), str(x)  # a NaN is equal to itself, and 1 is not True
        if type(x) in (tuple, list) or _is_named(x):
            return type(x), tuple(map(self.of, x))
        if type(x) in (dict, OrderedDict):
            return type(x), tuple((name, self.of(value)) for name, value in x.items())
        if type(x) in (set, frozenset):
            return type(x), frozenset(map(self.of, x))
        if _has_fields(x):
            return self._of_fields(x)
        if type(x) is partial:
            return partial, self.of((x.func, x.args, x.keywords))
        return _Same(x)

    def _of_fields(self, x: Any) -> Any:
        if id(x) in self._known:
            return self._known[id(x)][1]
        before = self._met
        found = type(x), self.of(dict(sorted(_held(x).items())))
        if self._met == before:
            self._known[id(x)] = x, found  # with the object, so that no other one has its id
        return found

    def of_module(self, module: nn.Module) -> Any:
        """Of a twin (see `twin`), which has no number of its own."""
        return tuple(
            (path, type(part), self.of({**vars(part), "_modules": tuple(part._modules)}))
            for path, part in module.named_modules()
        )

    def _layout(self, t: Tensor) -> Any:
        self._met += 1
        if type(t) not in PLAIN or t.layout is not torch.strided:
            return _Same(t)
        storage, offset = t.untyped_storage()._cdata, int(t.storage_offset())
        number, first = self._storages.setdefault(storage, (len(self._storages), offset))
        same = self._tensors.setdefault(id(t), len(self._tensors))
        sizes = tuple(t.shape), t.stride(), offset - first
        kind = type(t), t.dtype, t.device, t.requires_grad
        # In one word: these are no sizes, in which recordings may differ.
        return f"{number} {same} {t.data_ptr() % ALIGNED}", sizes, kind
