"""Replicas that `torch.nn.DataParallel` makes of a patched module.

A replica begins with a copy of the module's `__dict__`. A method that attnops put there holds the
module, and would run its weights, pages and graphs in place of the replica's weights: replicas
leave it out. They keep attnops' data, such as the rule of a router. It serves whichever module it
is looked up on.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_METHOD = "_replicate_for_data_parallel"


class Replicas:
    """A module's method that makes a replica. It holds data only, so that a deep copy of the module
    has one of its own.

    kept_out: names in the module's `__dict__`, each with attnops' value and the one that was there
    before, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept_out: dict[str, tuple[Any, Any]] = {}

    def __call__(self) -> Any:
        replica = getattr(type(self.module), _METHOD)(self.module)
        own = vars(replica)
        del own[_METHOD]
        for name, (value, before) in self.kept_out.items():
            if own.get(name) is value:
                _put(own, name, before)
        return replica


def place(module: Any, name: str, value: Any) -> None:
    """Put a value into the `__dict__` of a module, and into that of none of its replicas."""
    own = vars(module)
    if isinstance(module, nn.Module):
        replicas = own.setdefault(_METHOD, Replicas(module))
        replicas.kept_out[name] = (value, own.get(name))
    own[name] = value


def take_back(module: Any, name: str, value: Any, before: Any = None) -> None:
    """Take out the value that `place` put there, unless another has replaced it, and put `before`
    there if it is not None."""
    own = vars(module)
    if own.get(name) is value:
        _put(own, name, before)
    replicas = own.get(_METHOD)
    if isinstance(replicas, Replicas):
        replicas.kept_out.pop(name, None)
        if not replicas.kept_out:
            del own[_METHOD]


def _put(own: dict[str, Any], name: str, value: Any) -> None:
    own.pop(name, None)
    if value is not None:
        own[name] = value
