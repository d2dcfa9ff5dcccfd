"""`pack_linears`: places the weights of neighbouring linears in one contiguous memory, so that `attnops.lowering.fuse_linears` can read
them as one weight. The parameters stay the same objects, with the same names and values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnops.nn.absorb import PLAIN

ALIGNED = 16
"""Bytes. A matrix product is slower on a weight that begins elsewhere, and Inductor copies one."""

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that hold layers. Packed side by side, each of these would have other offsets, and share no compiled code."""


@dataclass(frozen=True)
class PackedGroup:
    """Linears with contiguous weights.

    linears: their names, in the order of their memory.
    rows: of each weight.
    nbytes: of weights and biases together.
    moved: False: they were contiguous before.
    """

    linears: tuple[str, ...]
    rows: tuple[int, ...]
    nbytes: int
    moved: bool


@dataclass(frozen=True)
class Packed:
    """The result of `pack_linears`. groups: in the order of the model. skipped: by name the linears that must not move, with the reason."""

    model: nn.Module = field(repr=False)
    groups: tuple[PackedGroup, ...]
    skipped: dict[str, str]

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights and biases at a new address."""
        return sum(g.nbytes for g in self.groups if g.moved)

    def holds(self) -> bool:
        """Are all groups still contiguous? `model.to(dtype)`, an assigned weight, `load_state_dict(assign=True)` and another module in
        place of a linear end it."""
        modules = self._modules()
        return all(len(row) == len(g.linears) and _contiguous(row) for g in self.groups for row in _rows(g, modules))

    def unpack(self) -> None:
        """Give each weight and bias memory of its own again, a group at a time. Idempotent. Modules that are gone are left out."""
        modules = self._modules()
        for group in self.groups:
            for tensor in (tensor for row in _rows(group, modules) for tensor in row):
                if tensor.untyped_storage().nbytes() > tensor.nbytes:
                    with torch.inference_mode(False), torch.no_grad():
                        tensor.data = tensor.data.clone()

    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))


def _rows(group: PackedGroup, modules: dict[str, nn.Module]) -> list[list[Tensor]]:
    """Weights, and biases if any, of those linears that are still there."""
    found = [modules.get(name) for name in group.linears]
    weights, biases = ([t for m in found if isinstance(t := getattr(m, name, None), Tensor)] for name in ("weight", "bias"))
    return [weights, biases] if biases else [weights]


def pack_linears(model: nn.Module) -> Packed:
    """Place the weights of linears that may share an input, and their biases, one behind the other in memory.

    A group are the children of one module, which is no container of layers, that are torch.nn.Linear and alike in in_features, dtype,
    device and whether they have a bias, in the order of registration: q, k and v of attention, gate and up of an MLP. Each
    `weight.data` becomes a contiguous slice `[n, K]` of the group's memory `[n1 + n2 + ..., K]`. Parameters, names, values,
    requires_grad and state_dict stay. Memory: at most one group more than before while it runs, and no more afterwards. Idempotent.

    Linears are skipped that something else may look at or move: subclasses, parametrised, quantised or distributed weights, those with
    hooks or a forward of their own, tied ones, those on meta or in shared memory, and those whose bytes are no multiple of 16.

    Call it before a CUDA graph is captured, which would go on reading the old memory.

    Returns:
        Packed, with the groups, the skipped linears, and `unpack()`.
    """
    taken = _Taken(model)
    skipped: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():
        found = (_pack(m, taken, skipped) for path, module in model.named_modules() for m in _alike(module, path, taken, skipped))
        groups = tuple(group for group in found if group is not None)
    return Packed(model, groups, skipped)


class _Taken:
    """The tensors of a model by storage, and how often each is registered."""

    def __init__(self, model: nn.Module) -> None:
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.names = Counter(id(tensor) for _, tensor in named)
        self.by_storage: dict[Any, set[int]] = {}
        for _, tensor in named:
            if type(tensor) in PLAIN and not tensor.is_meta:
                self.by_storage.setdefault(_storage(tensor), set()).add(id(tensor))

    def others(self, tensor: Tensor, known: Sequence[Tensor]) -> bool:
        """Does its storage hold tensors that are not among `known`?"""
        return bool(self.by_storage[_storage(tensor)] - {id(t) for t in known})

    def move(self, tensor: Tensor, to: Tensor) -> None:
        """Give `tensor` the memory of `to`."""
        self.by_storage[_storage(tensor)].discard(id(tensor))
        tensor.data = to
        self.by_storage.setdefault(_storage(tensor), set()).add(id(tensor))


def _storage(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _parameters(linear: nn.Linear) -> list[Tensor]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def _alike(module: nn.Module, path: str, taken: _Taken, skipped: dict[str, str]) -> Iterator[dict[str, nn.Linear]]:
    found: dict[Any, dict[str, nn.Linear]] = {}
    for name, child in () if isinstance(module, CONTAINERS) else module.named_children():
        if not isinstance(child, nn.Linear):
            continue
        full = f"{path}.{name}" if path else name
        if why := _against(child, taken):
            skipped[full] = why
            continue
        key = (child.in_features, *((t.dtype, t.device) for t in _parameters(child)))
        found.setdefault(key, {})[full] = child
    yield from found.values()


def _against(linear: nn.Linear, taken: _Taken) -> str:
    """The reason why it may not be moved; "": it may."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}"
    if "forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks, or a forward of its own"
    for tensor in _parameters(linear):
        if type(tensor) not in PLAIN:
            return f"it holds a {type(tensor).__name__}"
        if tensor.is_meta or tensor.is_inference():
            return "it is on meta" if tensor.is_meta else "it was made in inference mode"
        if not tensor.is_contiguous() or tensor.numel() == 0:
            return "it is not contiguous, or empty"
        if taken.names[id(tensor)] > 1:
            return "it is tied"
        if tensor.device.type == "cpu" and tensor.is_shared():
            return "its memory is shared with other processes"
        if tensor.nbytes % ALIGNED:
            return f"its bytes are no multiple of {ALIGNED}"
    return ""


def _pack(members: dict[str, nn.Linear], taken: _Taken, skipped: dict[str, str]) -> PackedGroup | None:
    alone: dict[str, nn.Linear] = {}
    every = [t for linear in members.values() for t in _parameters(linear)]
    for name, linear in members.items():
        before = [t for other in alone.values() for t in _parameters(other)]
        if any(taken.others(t, every) or any(_overlap(t, b) for b in before) for t in _parameters(linear)):
            skipped[name] = "its memory holds something else, too"
        else:
            alone[name] = linear
    if len(alone) < 2:
        return None
    rows = [list(row) for row in zip(*(_parameters(linear) for linear in alone.values()), strict=True)]
    moved = not all(map(_contiguous, rows))
    for row in rows if moved else ():
        memory = row[0].new_empty((sum(map(len, row)), *row[0].shape[1:]), requires_grad=False)
        for tensor, part in zip(row, memory.split([len(t) for t in row]), strict=True):
            part.copy_(tensor.data)
            taken.move(tensor, part)
    return PackedGroup(tuple(alone), tuple(len(t) for t in rows[0]), sum(t.nbytes for row in rows for t in row), moved)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return _storage(a) == _storage(b) and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _contiguous(row: Sequence[Tensor]) -> bool:
    return all(
        _storage(a) == _storage(b) and a.dtype == b.dtype and a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(row)
    )
