"""Checks before every replay, and the comparison of a replay with eager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import ReplayMismatch, StaleGraph, fail
from ..core.private_torch import autocasting, same_addresses
from ..core.problem import repeatable
from ..core.select import active_policy

Leaves = list[tuple[str, Any]]
"""The values in a structure, each with its path."""


class Guard:
    """State that a captured graph depends on: fixed arguments, further tensors that the model
    reads, the policy and autocast.

    The same objects pass in a microsecond. Other objects, and lists and dicts, whose contents may
    change, are compared leaf by leaf.
    """

    def __init__(
        self, fixed: Mapping[str, Any], watched: Mapping[str, Tensor], others: int
    ) -> None:
        """fixed: arguments that are the same at every call. watched: further tensors. others: the
        number of arguments that are copied."""
        self.in_force = in_force()
        self._fixed = {n: (v, _is_frozen(v), _leaves(v)) for n, v in fixed.items()}
        self._count = len(fixed) + others
        named = {
            f"{n}{path}": leaf
            for n, (*_, leaves) in self._fixed.items()
            for path, leaf in leaves
            if isinstance(leaf, Tensor)
        }
        known = {id(t) for t in named.values()}
        self._watched = {**named, **{n: t for n, t in watched.items() if id(t) not in known}}
        self._tensors = list(self._watched.values())
        self._pointers = [t.data_ptr() for t in self._tensors]
        self._every = list(range(len(self._tensors)))

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise StaleGraph with the name of an argument, policy or dtype that differs."""
        policy, casts, repeats = self.in_force
        if active_policy() != policy or casting() != casts or repeatable() != repeats:
            self._fail_of_modes()
        if len(values) != self._count or not values.keys() >= self._fixed.keys():
            want = f"{self._count}, {', '.join(self._fixed)} among them"
            fail(StaleGraph, "arguments", sorted(values), want)
        for name, (value, frozen, leaves) in self._fixed.items():
            if values[name] is not value or not frozen:
                _compare_leaves(name, _leaves(values[name]), leaves)
        if not same_addresses(self._tensors, self._pointers, self._every):
            self._fail_of_addresses()

    def _fail_of_modes(self) -> None:
        names = "policy", "autocast", "repeatable (torch.use_deterministic_algorithms)"
        for name, got, want in zip(names, _shown(*in_force()), _shown(*self.in_force), strict=True):
            if got != want:
                fail(StaleGraph, name, got, want)

    def _fail_of_addresses(self) -> None:
        for (name, t), pointer in zip(self._watched.items(), self._pointers, strict=True):
            if t.data_ptr() != pointer:
                fail(StaleGraph, name, f"address {t.data_ptr():#x}", f"{pointer:#x}")


def _shown(policy: str, casts: object, repeats: str) -> tuple[object, ...]:
    return repr(policy), casts or "off", repeats


def _compare_leaves(name: str, given: Leaves, captured: Leaves) -> None:
    if [p for p, _ in given] != [p for p, _ in captured]:
        fail(StaleGraph, name, f"{len(given)} values", f"the {len(captured)}")
    for (path, want), (_, got) in zip(captured, given, strict=True):
        if want is got:
            continue
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            if _layout(want) != _layout(got):
                told = described(got, address=True), described(want, address=True)
                fail(StaleGraph, f"{name}{path}", *told)
        elif type(want) is not type(got) or want != got:
            fail(StaleGraph, f"{name}{path}", repr(got), repr(want))


def in_force() -> tuple[str, tuple[tuple[str, torch.dtype], ...], str]:
    """What is in force around a call and decides how it runs: policy, autocast, and what
    torch.use_deterministic_algorithms asks for (see `repeatable`)."""
    return active_policy(), casting(), repeatable()


def casting() -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) of every enabled autocast."""
    if not autocasting():
        return ()
    return tuple(
        (on, torch.get_autocast_dtype(on))
        for on in ("cuda", "cpu")
        if torch.is_autocast_enabled(on)
    )


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Disable autocast's cache of cast weights: autocast frees the casts when it ends, and graphs
    would still read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _leaves(value: Any) -> Leaves:
    if isinstance(value, Tensor):
        return [("", value)]
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]


def _is_frozen(value: Any) -> bool:
    """Does the object always hold the same objects? An object that is no container to pytree counts
    as one value."""
    if isinstance(value, tuple):
        return all(map(_is_frozen, value))
    return isinstance(value, Tensor) or pytree.tree_is_leaf(value)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def described(t: Tensor | None, rows: bool = False, address: bool = False) -> str:
    """For errors. rows: without the number of rows. address: where it is, in place of its
    device."""
    if t is None:
        return "None"
    shape = f"[{', '.join(['*', *map(str, t.shape[1:])])}]" if rows else list(t.shape)
    return (
        f"{str(t.dtype).removeprefix('torch.')} {shape} "
        f"{f'at {t.data_ptr():#x}' if address else f'on {t.device}'}"
    )


def compare(bucket: object, got: Any, want: Any, tolerance: float | None) -> None:
    """Raise ReplayMismatch where outputs differ by more than `tolerance` times eager's largest
    number. None: the error that reordered sums of a whole model may have, some hundred roundings of
    the dtype and at most 0.1."""
    for (path, a), (_, b) in zip(_leaves(got), _leaves(want), strict=True):
        if isinstance(b, Tensor) and b.numel():
            usual = min(256 * torch.finfo(b.dtype).eps, 0.1) if b.is_floating_point() else 0.0
            largest = float(b.double().abs().nan_to_num(posinf=0.0).max())
            limit = (usual if tolerance is None else tolerance) * max(largest, 1e-30)
            if (error := _error(a, b)) > limit:
                fail(ReplayMismatch, bucket, path or "0", error, limit)


def _error(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one of the two is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    alike = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().nan_to_num(nan=float("inf")).masked_fill(alike, 0.0).max())


def restore(state: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for t, copy in zip(state, copies, strict=True):
        t.copy_(copy)


@contextmanager
def unchanged(state: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors after the block, also where it raises."""
    copies = [t.detach().clone() for t in state]
    try:
        yield
    finally:
        restore(state, copies)
