"""Checks before every replay that the tensors of a graph are where they were, compares results with eager, and restores state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as _any_autocast
from torch.utils import _pytree as pytree

from ..errors import ReplayMismatch, StaleGraph, fail
from ..select import active_policy

_equal_pointers = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Guard:
    """State that a captured graph depends on: fixed arguments, further tensors that the model reads, the policy and autocast.

    The same objects at the same addresses pass in a microsecond. Other objects are compared leaf by leaf, and so are lists and dicts at
    every call, because their contents may change.
    """

    def __init__(self, fixed: Mapping[str, Any], watched: Mapping[str, Tensor], others: int) -> None:
        """fixed: arguments that are the same at every call. watched: further tensors. others: the number of arguments that are copied."""
        self.policy, self.casting = active_policy(), casting()
        self._fixed = dict(fixed)
        self._leaves = {n: _leaves(v) for n, v in fixed.items()}
        # Mutable containers are compared at every call.
        self._items = tuple((n, v, _is_frozen(v)) for n, v in self._fixed.items())
        self._count = len(self._fixed) + others
        named = {f"{n}{path}": leaf for n, leaves in self._leaves.items() for path, leaf in leaves if isinstance(leaf, Tensor)}
        known = {id(t) for t in named.values()}
        self._watched = {**named, **{n: t for n, t in watched.items() if id(t) not in known}}
        self._tensors = list(self._watched.values())
        self._pointers = [t.data_ptr() for t in self._tensors]
        self._every = list(range(len(self._tensors)))

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise StaleGraph with the name of an argument, policy or dtype that differs."""
        if active_policy() != self.policy:
            fail(StaleGraph, "policy", repr(active_policy()), repr(self.policy))
        if casting() != self.casting:
            fail(StaleGraph, "autocast", casting() or "off", self.casting or "off")
        if len(values) != self._count or not values.keys() >= self._fixed.keys():
            fail(StaleGraph, "arguments", sorted(values), f"{self._count}, {', '.join(self._fixed)} among them")
        for name, value, frozen in self._items:
            if values[name] is not value or not frozen:
                self._compare(name, values[name])
        if _equal_pointers is not None:
            same = bool(_equal_pointers(self._tensors, self._pointers, self._every))
        else:
            same = [t.data_ptr() for t in self._tensors] == self._pointers
        if not same:
            for (name, t), pointer in zip(self._watched.items(), self._pointers, strict=True):
                if t.data_ptr() != pointer:
                    fail(StaleGraph, name, f"address {t.data_ptr():#x}", f"{pointer:#x}")

    def _compare(self, name: str, value: Any) -> None:
        ours, theirs = self._leaves[name], _leaves(value)
        if [p for p, _ in ours] != [p for p, _ in theirs]:
            fail(StaleGraph, name, f"{len(theirs)} values", f"the {len(ours)}")
        for (path, want), (_, got) in zip(ours, theirs, strict=True):
            if want is got:
                continue
            if isinstance(want, Tensor) and isinstance(got, Tensor):
                if _layout(want) != _layout(got):
                    fail(StaleGraph, f"{name}{path}", _described(got), _described(want))
            elif type(want) is not type(got) or want != got:
                fail(StaleGraph, f"{name}{path}", repr(got), repr(want))


def casting() -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) of every enabled autocast."""
    if not _any_autocast():
        return ()
    return tuple((on, torch.get_autocast_dtype(on)) for on in ("cuda", "cpu") if torch.is_autocast_enabled(on))


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Disable autocast's cache of cast weights: autocast frees the casts when it ends, and graphs would still read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _leaves(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor):
        return [("", value)]
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]


def _is_frozen(value: Any) -> bool:
    """Does the object always hold the same objects? An object that is no container to pytree counts as one value."""
    if isinstance(value, tuple):
        return all(map(_is_frozen, value))
    return isinstance(value, Tensor) or pytree.tree_is_leaf(value)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _described(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} at {t.data_ptr():#x}"


def allowed(dtype: torch.dtype) -> float:
    """The relative error that reordered sums of a whole model may have: some hundred roundings of the dtype, at most 0.1."""
    return min(256 * torch.finfo(dtype).eps, 0.1) if dtype.is_floating_point else 0.0


def compare(bucket: object, got: Any, want: Any, tolerance: float | None) -> None:
    """Raise ReplayMismatch where outputs differ by more than `tolerance` times eager's largest number; None: `allowed` for the dtype."""
    for (path, a), (_, b) in zip(_leaves(got), _leaves(want), strict=True):
        if not isinstance(b, Tensor) or b.numel() == 0:
            continue
        largest = float(b.double().abs().nan_to_num(posinf=0.0).max())
        limit = (allowed(b.dtype) if tolerance is None else tolerance) * max(largest, 1e-30)
        if (error := _error(a, b)) > limit:
            fail(ReplayMismatch, bucket, path or "0", error, limit)


def _error(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one of the two is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    alike = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().nan_to_num(nan=float("inf")).masked_fill(alike, 0.0).max())


def saved(state: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in state]


def restore(state: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, copy in zip(state, copies, strict=True):
            t.copy_(copy)


@contextmanager
def unchanged(state: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors after the block, also where it raises."""
    copies = saved(state)
    try:
        yield
    finally:
        restore(state, copies)
