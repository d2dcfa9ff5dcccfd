"""The state of a model that graphs of its steps depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import getitem
from typing import Any

from torch import Tensor, nn

from attnops.core.eager_cache import guards_of
from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import same_addresses
from attnops.hf.generation import running_generation
from attnops.hf.models.methods import modules_in
from attnops.hf.steps.around import flags, global_hooks
from attnops.hf.steps.forward_code import Code
from attnops.hf.steps.values import Getter, Itself, Unknown, Values, address, getter
from attnops.nn.absorb import HELD, INTERNAL, PLAIN
from attnops.nn.steady import is_linear

# What torch's linear holds and its forward does not read.
_UNREAD = ("in_features", "out_features")
_NOT_READ = INTERNAL | {HELD, "_is_hf_initialized"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Layout = tuple[list[str], tuple[Getter, ...]]
"""Of modules of one class that hold the same names: the attributes that are their own, and what
gets those that `same` compares."""


Places = tuple[list[dict[str, Any]], list[str]]
"""Dictionaries, and a name in each."""


class Glance:
    """A model as it is now. `same` says later, in far less time than a new one takes, whether the
    model has changed.

    The state has of each module its identity, its hooks, its attributes (see `Values`) and the
    addresses of its tensors; the code that the model may run (see `Code`), torch's flags and its
    hooks for all modules. It holds the modules and their attributes, and no parameter.

    state: hashable; equal for models whose graphs may be exchanged.
    objects: hashable; the state without the addresses of parameters and buffers. Recorded layers,
        whose inputs these are, serve every model of equal objects.
    code: hashable; compiled code for a model with another one is not used, for Dynamo does not
    guard on it: functions, methods, forwards
        of instances, and the contents of tuples.
    unknown: why the model cannot be compared, with the attribute's name; "" where it can.
    """

    def __init__(self, model: nn.Module, before: Glance | None = None) -> None:
        """before: an earlier glance at the model; its walk over the code is kept where that has not
        changed.

        Raises InvalidInput for a weight on meta.
        """
        self._model = model
        self._modules = modules_in(model)
        self._values = Values(self._modules)
        self.unknown = ""
        # Of each module its number and the names of its part of the state; the code and torch's
        # flags are those of -1.
        self._places: list[tuple[int, Sequence[str]]] = []
        self._found: list[Any] = []
        self._addresses = set[int]()  # the places of those in the state
        self._forwards: list[Any] = []
        self._layout: Callable[[type, tuple[str, ...], bool], Layout] = functools.cache(_layout)
        for number, module in enumerate(self._modules):
            self._take(number, module)
        self._code = self._walk(before)
        self.unknown = self.unknown or self._code.unknown
        code = [f"{whose}.{name}" for _, whose, name in self._code.places.values()]
        self._places.append((-1, (*code, "torch's flags", "torch's global module hooks")))
        self._found += [*self._code.state, flags(), global_hooks()]
        self.state = tuple(self._found)
        addresses = self._addresses
        self.objects = tuple(x for at, x in enumerate(self._found) if at not in addresses)
        self.code = (
            *self._code.functions,
            *self._forwards,
            *self._values.unguarded,
            *self._code.values.unguarded,
        )
        self._prepare()

    def _walk(self, before: Glance | None) -> Code:
        classes, given = [*map(type, self._modules), *self._values.classes], self._values.functions
        if before is not None and before._code.holds(classes, given):
            return before._code
        return Code(classes, given, self._modules)

    def _take(self, number: int, module: nn.Module) -> None:
        own, kind = vars(module), type(module)
        names, read = self._layout(kind, tuple(own), is_linear(module))
        self._values.watch(own, *read)
        hooks, before = own["_forward_hooks"], own["_forward_pre_hooks"]
        self._found.append((id(module), kind, own["training"], tuple(hooks), tuple(before)))
        for name in names:
            try:
                found = self._values.of(own[name])
            except Unknown as why:
                self.unknown = self.unknown or f"{kind.__name__}.{name} holds {why}"
                found = Itself(own[name])
            self._found.append(found)
            if name == "forward":
                self._forwards.append(found)
        absorbed = (HELD,) if HELD in own else ()
        # Made from the parameters, and made anew in the same memory at every prompt.
        self._found += [id(own[name].weight) for name in absorbed]
        parameters, buffers = own["_parameters"], own["_buffers"]
        tensors = (*parameters.values(), *buffers.values())
        first = len(self._found)
        self._addresses.update(range(first, first + len(tensors)))
        self._found += [None if t is None else address(t) for t in tensors]
        self._places.append((number, ("", *names, *absorbed, *parameters, *buffers)))

    def _refuse_meta(self) -> None:
        for module in self._modules:
            tensors = {**module._parameters, **module._buffers}
            for name in [name for name, t in tensors.items() if t is not None and t.is_meta]:
                got = f"graphs over {type(module).__name__}.{name}, which is on meta"
                want = "weights that stay on the device; decode='hf' for a model that is offloaded"
                fail(InvalidInput, "decode", got, want)

    def _names(self) -> list[str]:
        """Of each part of the state the attribute, from the model on, or the name in its code."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        paths = {
            number: paths.get(id(each), type(each).__name__)
            for number, each in enumerate(self._modules)
        }
        places = [(number, name) for number, names in self._places for name in names]
        found = (".".join(filter(None, (paths.get(number), name))) for number, name in places)
        return [name or type(self._model).__name__ for name in found]

    def changed(self, later: Glance) -> str:
        """The name of what differs in a later glance at the model; "" where nothing does."""
        before, after = (
            dict(zip(glance._names(), glance.state, strict=True)) for glance in (self, later)
        )
        names = dict.fromkeys((*before, *after))
        return next((name for name in names if before.get(name) != after.get(name)), "")

    def without(self, names: Collection[str]) -> int:
        """A hash of the state, of these attributes only of their kind, or which function they
        are."""
        named = zip(self._names(), self.state, strict=True)
        return hash(tuple(_kind(value) if name in names else value for name, value in named))

    def _prepare(self) -> None:
        owned = list(map(vars, self._modules))
        inside = [own[name] for own in owned for name in ("_modules", *_HOOKS)]
        tensors = [own[name] for own in owned for name in ("_parameters", "_buffers")]
        self._empty = [held for held in inside + tensors if not held]
        self._inside, self._tensors = list(filter(None, inside)), list(filter(None, tensors))
        places = [(each, name) for each in self._tensors for name in each]
        self._weights = _columns([(each, n) for each, n in places if each[n] is not None])
        self._absent = _columns([(each, n) for each, n in places if each[n] is None])
        held = self._held()
        if any(t.is_meta for t in held):
            self._refuse_meta()
        # Parts of other tensors, and versions of weights, are for the state.
        plain = all(type(t) in PLAIN for t in held)
        self._plain = plain and not any(HELD in own for own in owned)
        if self._plain:
            self._values.keep()
            self._alike = guards_of(tuple(held))
            self._pointers, self._every = list(map(Tensor.data_ptr, held)), list(range(len(held)))
            self._seen = self._look()

    def in_place(self) -> bool:
        """Are all tensors where they were, and alike? Graphs may then read their memory, whatever
        else of the model has changed. In a fraction of the time of `same`."""
        try:
            return self._plain and self._are_in_place()
        except Exception:  # tensors that are gone
            return False

    def same(self) -> bool:
        """Has nothing changed? False may also be the answer where only what does not count has."""
        try:
            if not self._plain or any(self._empty) or self._look() != self._seen:
                return False
            return self._are_in_place() and self._values.same() and self._code.same()
        except Exception:  # attributes that cannot be compared, or are gone
            return False

    def _held(self) -> list[Any]:
        """All tensors."""
        return _each(self._weights) + self._values.tensors + self._code.values.tensors

    def _are_in_place(self) -> bool:
        """`_alike` compares the types, dtypes and layouts of all tensors, whether they require a
        gradient, and torch's modes of dispatch."""
        held = self._held()
        alike: bool = self._alike.check(*held)
        return alike and same_addresses(held, self._pointers, self._every)

    def _look(self) -> tuple[Any, ...]:
        return (
            list(map(len, self._tensors)),
            _each(self._absent),
            list(map(type, self._modules)),
            _flat(self._inside),
            flags(),
            global_hooks(),
        )


def holds(glance: Glance) -> bool:
    """Has nothing changed since a glance at a model? Once a `generate()` whose loop is ours looks,
    up to its prompt: no code but transformers' and ours runs in between."""
    running = running_generation()
    looked = running is not None and running.looked is glance and not running.loop
    return looked or glance.same()


def _kind(value: Any) -> Any:
    """Of the state of an attribute: the class of its value, or the function that it is; None for a
    tensor."""
    while isinstance(value, tuple) and value:
        value = value[0]
    return value if isinstance(value, (type, Itself)) else None


def _layout(kind: type, held: tuple[str, ...], linear: bool) -> Layout:
    """For a class of modules that hold these names. Sorted, for one may be taken away and set
    again. linear: is it torch's?"""
    unread = _NOT_READ.union(_UNREAD) if linear else _NOT_READ
    names = sorted(name for name in held if name not in unread)
    return names, () if linear and not names else (getter(["training", *names]),)


def _columns(places: Sequence[tuple[dict[str, Any], str]]) -> Places:
    return [each for each, _ in places], [name for _, name in places]


def _each(places: Places) -> list[Any]:
    """The values in these places. Raises KeyError where one is gone."""
    return list(map(getitem, *places))


def _flat(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    """All their values."""
    return list(chain.from_iterable(map(dict.values, dicts)))
