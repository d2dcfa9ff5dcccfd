"""What a caller promises of a batch, for kernels that do not know of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from attnops.errors import InvalidInput, fail
from attnops.reference.holes import how


def untold(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a kernel that does not know the promise `padded`, which it need not keep."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("padded", None)
        return run(*args, **kwargs)

    return call


_BATCH = ("page_table", "seq_lens", "cu_seqlens_q", "mask", "sinks")
PLACES = {
    "paged_attention": (("query", "k_pages", "v_pages", *_BATCH, "k_scale", "v_scale", "plan"), 6),
    "mla_attention": (("q_nope", "q_pe", "latent_pages", *_BATCH, "q_scale", "kv_scale", "plan"), 6),
    "sparse_mla_attention": (("q_nope", "q_pe", "latent_pages", "indices"), 4),
}
"""The arguments of an op that may be given by place, and how many of them every call has."""


def filled(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a table or of lists without holes, and of others: it reads no page that they do not name."""
    names, places = PLACES[op]
    clean = _slots if op == "sparse_mla_attention" else _pages

    @functools.wraps(run)
    def call(*args: Any, holes: bool = True, **kwargs: Any) -> Any:
        if holes:
            given = [*args, *(kwargs.pop(p) for p in names[len(args) : places])]
            clean(given, dict(zip(names, given, strict=False)) | kwargs)
            args = tuple(given)
        return run(*args, **kwargs)

    parameters = [*inspect.signature(run).parameters.values()]
    told = inspect.Parameter("holes", inspect.Parameter.KEYWORD_ONLY, default=True)
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = inspect.Signature([*parameters[:at], told, *parameters[at:]])  # type: ignore[attr-defined]
    return call


def _pages(given: list[Any], known: dict[str, Any]) -> None:
    # In both ops pages, table, lengths and starts have these places.
    pages, table, lengths, starts = given[2:6]
    refuse_plan_of_holes(known.get("plan"), True)
    sizes = {"num_pages": pages.shape[0], "page_size": pages.shape[1], **how(**known)}
    given[3:5] = torch.ops.attnops.named_pages.default(table, lengths, starts, **sizes)


def _slots(given: list[Any], known: dict[str, Any]) -> None:
    pages, indices = given[2:4]
    given[3] = torch.where((indices >= 0) & (indices < pages.shape[0] * pages.shape[1]), indices, -1)


def refuse_plan_of_holes(plan: torch.Tensor | None, holes: bool) -> None:
    """Raise InvalidInput for a plan on the device, which is of the table as it was, with a table that may have holes."""
    if holes and plan is not None and plan.dtype == torch.int32:
        want = "False, because a device plan is given: make it of the table that named_pages gives, and give both"
        fail(InvalidInput, "holes", holes, want)


def settled_of_whole(settled: Callable[..., Any]) -> Callable[..., Any]:
    """`settled` of calls whose tables have no holes, and None for others."""

    @functools.wraps(settled)
    def call(*args: Any, holes: bool = True, **kwargs: Any) -> Any:
        return None if holes else settled(*args, **kwargs)

    return call
