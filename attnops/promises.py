"""What a caller promises of a batch, for kernels that do not know of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from attnops.reference.holes import how


def untold(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a kernel that does not know the promise `padded`, which it need not keep."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("padded", None)
        return run(*args, **kwargs)

    return call


def filled(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a table without holes, and of one with them: it reads no page that the table does not name."""

    @functools.wraps(run)
    def call(*args: Any, holes: bool = True, **kwargs: Any) -> Any:
        if holes:
            # In both ops pages, table, lengths and starts have these places, and a mask the next.
            given = [*args, *(kwargs.pop(p) for p in names[len(args) : 6])]
            pages, table, lengths, starts = given[2:6]
            mask = given[6] if len(given) > 6 else kwargs.get("mask")
            rules: dict[str, Any] = kwargs | {"mask": mask}
            sizes = {"num_pages": pages.shape[0], "page_size": pages.shape[1], **how(**rules)}
            given[3:5] = torch.ops.attnops.named_pages.default(table, lengths, starts, **sizes)
            plan = given[10] if len(given) > 10 else kwargs.get("plan")
            if plan is not None and plan.dtype == torch.int32:
                # A device plan is of the table as it was.
                given[10:11], kwargs = ([None], kwargs) if len(given) > 10 else ([], kwargs | {"plan": None})
            args = tuple(given)
        return run(*args, **kwargs)

    parameters = [*inspect.signature(run).parameters.values()]
    names = [p.name for p in parameters]
    told = inspect.Parameter("holes", inspect.Parameter.KEYWORD_ONLY, default=True)
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = inspect.Signature([*parameters[:at], told, *parameters[at:]])  # type: ignore[attr-defined]
    return call


def settled_of_whole(settled: Callable[..., Any]) -> Callable[..., Any]:
    """`settled` of calls whose tables have no holes, and None for others."""

    @functools.wraps(settled)
    def call(*args: Any, holes: bool = True, **kwargs: Any) -> Any:
        return None if holes else settled(*args, **kwargs)

    return call
