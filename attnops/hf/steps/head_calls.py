"""`Calls`: how the module of a draft head runs, and how its kernels begin to be compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.private_torch import FakeTensor, unset_fake_temporarily
from attnops.graphs.forms import mapped
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional
from attnops.hf.steps.graphed_steps import Passes

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, by place and by name."""


class Calls:
    """Calls of a head's module, whose linears are fused where it can be recorded. It computes in
    its own dtype, which its pages have, whatever autocast is on around the model."""

    def __init__(self, module: nn.Module, passes: Passes) -> None:
        self._module, self._device = module, next(module.parameters()).device
        self._kinds: Kinds | None = Kinds(passes)

    def __call__(self, args: tuple[Any, ...], where: dict[str, Any]) -> Any:
        with self.uncast():
            if self._kinds is not None:
                self._kinds.begin()
                try:
                    return self._recorded(self._kinds, args, where)
                except NotRegional:
                    self._kinds = None
            return self._module(*args, **where)

    def uncast(self) -> AbstractContextManager[Any]:
        """Without autocast. Prompts are of all lengths and are not recorded."""
        return torch.autocast(self._device.type, enabled=False)

    def _recorded(self, kinds: Kinds, args: tuple[Any, ...], where: dict[str, Any]) -> Any:
        if not any(isinstance(x, FakeTensor) for x in args):
            return kinds(self._module, 1, args, where)
        # Kernels begin to be compiled (`Round.begin_kernels`). Layers are recorded of real tensors,
        # whose numbers do not matter.
        with unset_fake_temporarily(), kinds.way("ahead"):
            args, where = _real((args, where))
            return kinds(self._module, 1, args, where)


def _real(call: Call) -> Call:
    """The arguments with tensors of the forms of fake ones, which share memory as these do. A
    tensor that two arguments have stays one: kinds of layers tell it from two views."""
    memory, made = dict[int, Tensor](), dict[int, Tensor]()

    def real(x: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return x
        if id(x) in made:
            return made[id(x)]
        held = x.untyped_storage()
        if held._cdata not in memory:
            numbers = held.nbytes() // x.itemsize
            memory[held._cdata] = torch.zeros(numbers, dtype=x.dtype, device=x.device)
        own = memory[held._cdata].as_strided(x.shape, x.stride(), x.storage_offset())
        made[id(x)] = own
        return own

    found: Call = mapped(call, real)
    return found
