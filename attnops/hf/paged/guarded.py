"""The state of a model that graphs of its steps depend on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from attnops.errors import InvalidInput, fail
from attnops.graphs.guard import in_force
from attnops.nn.absorb import HELD, INTERNAL, PLAIN


def guarded_state(model: nn.Module) -> tuple[Any, ...]:
    """The state that graphs of a model's steps depend on besides their arguments: graphs captured at an equal state may be replayed.

    It is what is `in_force`, and for each module its identity, its hooks, a forward of its own, its
    strings, flags and fractions (`training`, names and scales of adapters) and the addresses of its
    tensors. Whole numbers are left out: they may count calls. It takes some microseconds a module.
    Raises InvalidInput for a weight on meta (offloaded).
    """
    found: list[Any] = [*in_force()]
    for module in model.modules():
        own = vars(module)
        found += id(module), type(module), module.training, tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
        forward = own.get("forward")
        found.append(forward if isinstance(forward, Hashable) else id(forward))
        for field, value in ((field, own[field]) for field in own.keys() - INTERNAL):
            if (words := _words(value)) is not None:
                found += field, words
        if (absorbed := own.get(HELD)) is not None:
            # Made from the parameters, and made anew in the same memory at every prompt.
            found.append(id(absorbed.weight))
        for field, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and t.is_meta:
                want = "weights that stay on the device; decode='hf' for a model that is offloaded"
                fail(InvalidInput, "decode", f"graphs over {type(module).__name__}.{field}, which is on meta", want)
            if t is not None:
                found.append(_address(t))
    return tuple(found)


def _words(value: Any) -> Any:
    """What an attribute says of a module's state: a flag, text or fraction, several texts, or fractions by name. None: nothing."""
    if isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, dict) and all(isinstance(x, float) for x in value.values()):
        return tuple(value.items())
    return tuple(value) if isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value) else None


class Glance:
    """A model as it is now, to see later that nothing has changed: in a fifth of the time of `guarded_state`, because no Python code runs
    for each attribute.

    It holds the modules and their attributes, and no parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        owned = [vars(module) for module in self._modules]
        inside = [own[name] for own in owned for name in ("_modules", "_forward_hooks", "_forward_pre_hooks")]
        tensors = [own[name] for own in owned for name in ("_parameters", "_buffers")]
        # Of empty ones, most of them, the length says all.
        self._dicts, self._attributes, self._tensors = inside + tensors, [*owned, *filter(len, inside)], list(filter(len, tensors))
        self._lists = [x for own in owned for field in own.keys() - INTERNAL if isinstance(x := own[field], (dict, list))]
        # Parts of other tensors, and versions of weights, are for `guarded_state`.
        plain = all(type(t) in PLAIN for t in _flat(self._tensors) if t is not None)
        self._plain = plain and not any(HELD in own for own in owned)
        self._seen = self._look() if self._plain else ()

    def same(self) -> bool:
        """Has nothing changed? False may also be the answer where only what does not count has."""
        try:
            return self._plain and self._look() == self._seen
        except Exception:  # attributes that cannot be compared
            return False

    def _look(self) -> tuple[Any, ...]:
        found = [t for t in _flat(self._tensors) if t is not None]
        return (
            list(map(Tensor.data_ptr, found)), [t.shape for t in found], list(map(Tensor.stride, found)), [t.dtype for t in found],
            list(map(type, found)), list(map(type, self._modules)), list(map(_words, self._lists)),
            list(map(len, self._dicts)), _flat(self._attributes),
        )  # fmt: skip


def _flat(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    """All their values."""
    return list(chain.from_iterable(map(dict.values, dicts)))


def _address(t: Tensor) -> Any:
    """The place and layout of a tensor's numbers; those of a tensor subclass are in tensors of its own."""
    if type(t) in PLAIN:
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    flatten = getattr(t, "__tensor_flatten__", None)
    return id(t), *(_address(getattr(t, inner)) for inner in (flatten()[0] if flatten is not None else ()))
