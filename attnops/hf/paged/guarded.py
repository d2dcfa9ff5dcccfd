"""The state of a model that graphs of its steps depend on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnops.errors import InvalidInput, fail
from attnops.graphs.guard import casting
from attnops.nn.absorb import HELD, INTERNAL, PLAIN
from attnops.select import active_policy


def guarded_state(model: nn.Module) -> tuple[Any, ...]:
    """The state that graphs of a model's steps depend on besides their arguments: graphs captured at an equal state may be replayed.

    It is the policy, autocast, and for each module its identity, its hooks, its strings, flags and fractions (`training`, names and
    scales of adapters) and the addresses of its tensors. Whole numbers are left out: they may count calls. It takes some microseconds a
    module. Raises InvalidInput for a weight on meta (offloaded).
    """
    found: list[Any] = [active_policy(), casting()]
    for module in model.modules():
        own = vars(module)
        found += id(module), type(module), module.training, tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
        for field, value in ((field, own[field]) for field in own.keys() - INTERNAL):
            if isinstance(value, (bool, str, float)):
                found += field, value
            elif isinstance(value, dict) and all(isinstance(x, float) for x in value.values()):
                found += field, tuple(value.items())
            elif isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value):
                found += field, tuple(value)
        if (absorbed := own.get(HELD)) is not None:
            # Made from the parameters, and kept until these are written.
            found += id(absorbed.weight), tuple(0 if p.is_inference() else p._version for p in module.parameters())
        for field, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and t.is_meta:
                want = "weights that stay on the device; decode='hf' for a model that is offloaded"
                fail(InvalidInput, "decode", f"graphs over {type(module).__name__}.{field}, which is on meta", want)
            if t is not None:
                found.append(_address(t))
    return tuple(found)


def _address(t: Tensor) -> Any:
    """The place and layout of a tensor's numbers; those of a tensor subclass are in tensors of its own."""
    if type(t) in PLAIN:
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    flatten = getattr(t, "__tensor_flatten__", None)
    return id(t), *(_address(getattr(t, inner)) for inner in (flatten()[0] if flatten is not None else ()))
