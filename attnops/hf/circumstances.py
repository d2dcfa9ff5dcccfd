"""What graphs of a model's steps take as given beside what is passed to them: where weights lie, which modules there are, and modes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnops.errors import InvalidInput
from attnops.graphs.guard import casting
from attnops.nn.absorb import HELD, INTERNAL, PLAIN
from attnops.select import active_policy


def circumstances(model: nn.Module) -> tuple[Any, ...]:
    """Two answers that are equal: graphs captured at the first may be replayed at the second.

    The policy, autocast, and by module its identity, how many hooks it has, words and flags (`training`, names of adapters that are merged)
    and where its tensors lie. It takes some microseconds a module. Raises InvalidInput: a weight is on meta, as accelerate offloads it.
    """
    found: list[Any] = [active_policy(), casting()]
    for module in model.modules():
        _add(module, found)
    return tuple(found)


def _add(module: nn.Module, found: list[Any]) -> None:
    own = vars(module)
    found += id(module), type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks)
    for name in own.keys() - INTERNAL:
        value = own[name]
        if isinstance(value, (bool, str)):
            found += name, value
        elif isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value):
            found += name, tuple(value)
    if (absorbed := own.get(HELD)) is not None:
        # Made from parameters, and kept until they are written.
        found += id(absorbed.weight), tuple(0 if p.is_inference() else p._version for p in module.parameters())
    for held in (module._parameters, module._buffers):
        found += [_place(module, name, t) for name, t in held.items() if t is not None]


def _place(module: nn.Module, name: str, t: Tensor) -> Any:
    if t.is_meta:
        want = "weights that stay on the device; decode='hf' for a model that is offloaded"
        raise InvalidInput("decode", f"graphs over {type(module).__name__}.{name}, which is on meta", want)
    # Others keep their numbers in tensors of their own, and have no address.
    return (t.data_ptr(), t.dtype, t.shape, t.stride()) if type(t) in PLAIN else id(t)
