"""Layers as recordings tell them apart, looked at once for all steps of a model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .forms import Form, own_tensors
from .per_layer import ANY, twin

SharedForms = dict[int, tuple[Any, Any]]
"""Forms of objects that layers share, by `id`, see `Form`."""


@dataclass(frozen=True)
class Own:
    """A layer, apart from what it is given.

    form: equal for equal layers. known: describes more values beside its tensors, by `further`.
    tensors: see `own_tensors`.
    """

    form: Any
    known: Form
    tensors: tuple[Tensor, ...]


def own_of(module: nn.Module, shared: SharedForms | None = None) -> Own:
    """What recordings tell of a layer. shared: takes the forms of objects without tensors."""
    known = Form(shared)
    return Own(known.of_module(nameless(module)), known, (*own_tensors(module).values(),))


@dataclass(frozen=True)
class _Look:
    """A layer as it was seen. number: of its form. tensors: its own. places: theirs."""

    number: int
    known: Form
    tensors: tuple[weakref.ref[Tensor], ...]
    places: tuple[Any, ...]

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Are these its tensors, in the same places?"""
        if _places(tensors) != self.places:
            return False
        return all(ref() is t for ref, t in zip(self.tensors, tensors, strict=True))


class Looks:
    """What recordings tell of each layer of a model. Only a layer's tensors are looked at again:
    after any other change of the model its caller makes new `Looks`. They keep no layer alive, and
    no plain tensor."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[nn.Module, _Look] = weakref.WeakKeyDictionary()
        self._shared: SharedForms = {}
        # A form takes longer to compare than a number.
        self._numbers: dict[Any, int] = {}

    def own(self, module: nn.Module) -> Own:
        """As `own_of`, with a number as the form."""
        tensors = (*own_tensors(module).values(),)
        look = self._seen.get(module)
        if look is None or not look.holds(tensors):
            found = own_of(module, self._shared)
            number = self._numbers.setdefault(found.form, len(self._numbers))
            refs = tuple(map(weakref.ref, tensors))
            look = self._seen[module] = _Look(number, found.known, refs, _places(tensors))
        return Own(look.number, look.known, tensors)


def _places(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Their memory, and what their forms say of it."""
    return tuple(
        (t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad)
        for t in tensors
    )


def nameless(module: nn.Module) -> nn.Module:
    """A twin whose parts do not hold their own names in the model, as those of peft do: equal
    layers differ in them."""
    made: nn.Module = twin(module)[0]
    for path, part in [*made.named_modules()][1:]:
        own = vars(part)
        own.update({name: _without(value, f".{path}") for name, value in own.items()})
    return made


def _without(value: Any, end: str) -> Any:
    """ANY in place of a word with this end, also of one that a dict holds."""
    if type(value) is dict:
        return {name: _without(each, end) for name, each in value.items()}
    return ANY if type(value) is str and value.endswith(end) else value
