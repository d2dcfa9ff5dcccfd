"""`pack_linears`: places the weights of neighbouring linears in one contiguous memory.

`attnops.lowering.merge_linears_pass` can then read them as one weight. The parameters stay the same
objects, with the same names and values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from attnops.nn.absorb import PLAIN, changed
from attnops.nn.steady import is_linear

# bytes: a matrix product is slower on a weight that begins elsewhere, and Inductor copies one
ALIGNED = 16
# Modules that hold layers. Packed side by side, each of these would have other offsets, and share
# no compiled code.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class PackedGroup:
    """Linears with contiguous weights, by name in the order of their memory.

    rows: of each weight. nbytes: of weights and biases together. moved: False: they were contiguous
    before.
    """

    linears: tuple[str, ...]
    rows: tuple[int, ...]
    nbytes: int
    moved: bool


@dataclass(frozen=True)
class Packed:
    """The result of `pack_linears`. groups: in the order of the model. skipped: by name the linears
    that must not move, with the reason."""

    model: nn.Module = field(repr=False)
    groups: tuple[PackedGroup, ...]
    skipped: dict[str, str]

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights and biases at a new address."""
        return sum(g.nbytes for g in self.groups if g.moved)

    def holds(self) -> bool:
        """Are all groups still contiguous? `model.to(dtype)`, an assigned weight,
        `load_state_dict(assign=True)` and another module in place of a linear end it."""
        return all(
            len(row) == len(group.linears) and _contiguous(row) for group, row in self._rows()
        )

    def unpack(self) -> None:
        """Give each weight and bias memory of its own again, a group at a time. Idempotent. Modules
        that are gone are left out."""
        for _, row in self._rows():
            for tensor in row:
                if tensor.untyped_storage().nbytes() > tensor.nbytes:
                    with torch.inference_mode(False), torch.no_grad():
                        tensor.data = tensor.data.clone()

    def undo(self) -> None:
        """Unpack what `pack_linears` has moved. Groups that were contiguous before stay."""
        replace(self, groups=tuple(group for group in self.groups if group.moved)).unpack()

    def _rows(self) -> Iterator[tuple[PackedGroup, list[Tensor]]]:
        """The weights of each group, and the biases if any, of those linears that are still
        there."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for group in self.groups:
            found = [modules.get(name) for name in group.linears]
            for name in ("weight", "bias"):
                row = [t for m in found if isinstance(t := getattr(m, name, None), Tensor)]
                if row or name == "weight":
                    yield group, row


def pack_linears(model: nn.Module) -> Packed:
    """Place the weights of linears that may share an input, and their biases, one behind the other
    in memory.

    A group are the children of one module, which is no container of layers, that are
    torch.nn.Linear and have the same in_features, dtype and device, and all or none a bias, in the
    order of registration: q, k and v of attention, gate and up of an MLP. Each `weight.data`
    becomes a contiguous slice `[n, K]` of the group's memory `[n1 + n2 + ..., K]`. Parameters,
    names, values, requires_grad and state_dict stay. Memory: at most one group more than before
    while it runs, and no more afterwards. Idempotent.

    Linears are skipped that something else may look at or move: subclasses, parametrised, quantised
    or distributed weights, those with hooks or a forward of their own, tied ones, those on meta or
    in shared memory, those whose bytes are no multiple of 16, and groups for which memory is short.
    Call it before a CUDA graph is captured, which would go on reading the old memory.
    """
    taken, skipped = _Taken(model), dict[str, str]()
    with torch.inference_mode(False), torch.no_grad():
        found = (
            _pack(m, taken, skipped)
            for path, module in model.named_modules()
            for m in _alike(module, path, taken, skipped)
        )
        groups = tuple(group for group in found if group is not None)
    return Packed(model, groups, skipped)


class _Taken:
    """How often each tensor of a model is registered, and the tensors in each storage before any of
    them moves."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [
            t
            for _, t in (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        ]
        self.times = Counter(map(id, tensors))
        self.by_storage: dict[Any, set[int]] = defaultdict(set)
        for tensor in tensors:
            if type(tensor) in PLAIN and not tensor.is_meta:
                self.by_storage[_storage(tensor)].add(id(tensor))


def _storage(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _parameters(linear: nn.Linear) -> list[Tensor]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def _alike(
    module: nn.Module, path: str, taken: _Taken, skipped: dict[str, str]
) -> Iterable[dict[str, nn.Linear]]:
    found: dict[Any, dict[str, nn.Linear]] = defaultdict(dict)
    for name, child in () if isinstance(module, CONTAINERS) else module.named_children():
        if not isinstance(child, nn.Linear):
            continue
        full = f"{path}.{name}" if path else name
        if why := _against(child, taken):
            skipped[full] = why
        else:
            key = (child.in_features, *((t.dtype, t.device) for t in _parameters(child)))
            found[key][full] = child
    return found.values()


def _against(linear: nn.Linear, taken: _Taken) -> str:
    """The reason why it may not be moved; "": it may."""
    if not is_linear(linear):
        return f"it is a {type(linear).__name__}"
    if changed(linear):
        return "it has hooks, or a forward of its own"
    return next(
        filter(None, (_against_moving(tensor, taken) for tensor in _parameters(linear))), ""
    )


def _against_moving(tensor: Tensor, taken: _Taken) -> str:
    if type(tensor) not in PLAIN:
        return f"it holds a {type(tensor).__name__}"
    if tensor.is_meta:
        return "it is on meta"
    if tensor.is_inference():
        return "it was made in inference mode"
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return "it is not contiguous, or empty"
    if taken.times[id(tensor)] > 1:
        return "it is tied"
    if tensor.device.type == "cpu" and tensor.is_shared():
        return "its memory is shared with other processes"
    return f"its bytes are no multiple of {ALIGNED}" if tensor.nbytes % ALIGNED else ""


def _pack(
    members: dict[str, nn.Linear], taken: _Taken, skipped: dict[str, str]
) -> PackedGroup | None:
    alone = _alone(members, taken, skipped)
    if len(alone) < 2:
        return None
    rows = [list(row) for row in zip(*alone.values(), strict=True)]
    moved = not all(map(_contiguous, rows))
    if moved and not _moved(rows):
        skipped.update(dict.fromkeys(alone, "there is no memory to move it"))
        return None
    return PackedGroup(
        tuple(alone), tuple(map(len, rows[0])), sum(t.nbytes for t in chain(*rows)), moved
    )


def _alone(
    members: dict[str, nn.Linear], taken: _Taken, skipped: dict[str, str]
) -> dict[str, list[Tensor]]:
    """The tensors of those members whose memory holds nothing but members, each at a place of its
    own."""
    every = {id(t) for linear in members.values() for t in _parameters(linear)}
    alone: dict[str, list[Tensor]] = {}
    for name, linear in members.items():
        own = _parameters(linear)
        others = any(taken.by_storage[_storage(t)] - every for t in own)
        if others or any(_overlap(a, b) for a, b in product(own, chain(*alone.values()))):
            skipped[name] = "its memory holds something else, too"
        else:
            alone[name] = own
    return alone


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _moved(rows: list[list[Tensor]]) -> bool:
    """Move the tensors of each row into one memory. False: there is none."""
    try:
        places = [
            row[0].new_empty((sum(map(len, row)), *row[0].shape[1:]), requires_grad=False)
            for row in rows
        ]
    except torch.OutOfMemoryError:
        return False
    for row, memory in zip(rows, places, strict=True):
        for tensor, part in zip(row, memory.split([*map(len, row)]), strict=True):
            tensor.data = part.copy_(tensor.data)
    return True


def _contiguous(row: Sequence[Tensor]) -> bool:
    return all(
        (_storage(a), a.dtype, a.data_ptr() + a.nbytes) == (_storage(b), b.dtype, b.data_ptr())
        for a, b in pairwise(row)
    )
