"""Checks of the modules' arguments, and their common defaults. The ops check further shapes and
dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.checks import python_number
from attnops.core.errors import NOT_SCRIPTED, InvalidInput, NotRecordable, fail
from attnops.core.record import need
from attnops.core.tracers import wanted
from attnops.ops import token_rows

Given = Mapping[str, object]  # arguments by name


def size(field: str, value: Any, unit: str = "") -> int:
    value = python_number(value)
    need(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        field,
        repr(value),
        f"an int >= 1{unit and f' ({unit})'}",
    )
    return int(value)


def number(field: str, value: Any, least: float, below: float = math.inf) -> float:
    value = python_number(value)
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    need(
        numeric and least <= value < below, field, repr(value), f"a number >= {least} and < {below}"
    )
    return float(value)


def tensor(field: str, value: Any, layout: str, *dims: int) -> Tensor:
    """`value`, a tensor of one of `dims` dimensions."""
    if not isinstance(value, Tensor):
        fail(InvalidInput, field, type(value).__name__, wanted(f"a tensor {layout}", value))
    if value.dim() not in dims:
        fail(InvalidInput, field, f"shape {tuple(value.shape)}", layout)
    return value


def last(field: str, value: Tensor, *sizes: int) -> Tensor:
    """`value`, whose last sizes are `sizes`, as a view in which the compiler knows them as
    constants."""
    lead = value.dim() - len(sizes)
    for dim, want in enumerate(sizes, lead):
        if value.shape[dim] != want:
            fail(
                InvalidInput,
                f"{field}.shape[{dim}]",
                value.shape[dim],
                f"{want}, as the module was built",
            )
    return value.view(*value.shape[:lead], *sizes)


def nested(*given: object) -> bool:
    """Is one of these a nested tensor?"""
    return any(isinstance(x, Tensor) and x.is_nested for x in given)


def absent(why: str, **given: object) -> None:
    """Raise InvalidInput unless all of `given` are None."""
    for field, value in given.items():
        if value is not None:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            fail(InvalidInput, field, got, wanted(f"None {why}", value))


def kind_of_call(
    cu: str, cu_seqlens: Tensor | None, batch: object, *, dense: Given, packed: Given, paged: Given
) -> bool:
    """Is the call dense? `cu_seqlens`, an argument named `cu`, makes it packed, and `batch` paged.

    Raises InvalidInput for arguments of another kind of call, and for a paged call without its
    "..._pages".
    """
    if cu_seqlens is not None or batch is not None:
        absent("(dense calls only)", **dense)
    if cu_seqlens is None:
        absent(f"without {cu}", **packed)
    if batch is None:
        absent("without batch", **paged)
        return cu_seqlens is None
    absent("with batch", **{cu: cu_seqlens})
    need(
        isinstance(batch, PagedBatch),
        "batch",
        type(batch).__name__,
        "a PagedBatch, as a cache makes it",
    )
    pages = [name for name in paged if name.endswith("_pages")]
    given = all(paged[name] is not None for name in pages)
    need(given, ", ".join(pages), None, "this layer's pages of the cache, because batch is given")
    return False


def longest(field: str, value: int | None, cu: str) -> int:
    """`value`, which packed calls require."""
    if value is None:
        fail(
            InvalidInput,
            field,
            None,
            f"an upper bound in tokens on the requests' lengths, because {cu} is given",
        )
    return value


def hidden_states(value: Any, size: int, dense: bool) -> Tensor:
    """`value`, `[B, S, E]` or `[T, E]` with E = `size`."""
    layout = f"[B, S, {size}]" if dense else f"[T, {size}] (packed or paged)"
    return last("hidden", tensor("hidden", value, layout, 3 if dense else 2), size)


def positions_of(
    hidden: Tensor, given: Tensor | None, cu_seqlens: Tensor | None, batch: PagedBatch | None
) -> Tensor:
    """int `[S]`, `[B, S]` or `[T]`: those given for hidden `[B, S, E]` or `[T, E]`, the batch's, or
    from 0 in each request."""
    if given is not None:
        dense = hidden.dim() == 3
        tensor("positions", given, "[S] or [B, S]" if dense else "[T]", 1, *(2,) * dense)
        if given.shape != hidden.shape[-1 - given.dim() : -1]:
            fail(
                InvalidInput,
                "positions",
                f"shape {tuple(given.shape)}",
                f"one a token of hidden {tuple(hidden.shape)}",
            )
        return given
    if batch is not None:
        return batch.positions
    at = torch.arange(hidden.shape[-2], device=hidden.device)
    if cu_seqlens is None:
        return at
    owner = token_rows(cu_seqlens, hidden.shape[0])
    return at - torch.where(owner >= 0, cu_seqlens[owner], 0)


def shown(*first: str, **fields: tuple[Any, Any]) -> str:
    """The text of `extra_repr`: `first`, then `name=value` of each field (value, default) that
    differs from its default."""
    return ", ".join(
        [
            *first,
            *(f"{name}={value!r}" for name, (value, default) in fields.items() if value != default),
        ]
    )


def not_scripted(module: nn.Module) -> nn.Module:
    """Raise NotRecordable: torch.jit.script asks every module for the one that it shall compile."""
    fail(NotRecordable, type(module).__name__, "torch.jit.script", NOT_SCRIPTED)
