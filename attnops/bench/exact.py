"""The exact result of a call of attention, in the rows that are compared, and a way that is
compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops import testing
from attnops.bench.rows import Way
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance
from attnops.tune.clock import Run, Timed

# The last queries of the first requests are compared. All of them would take longer than the
# measurement.
ROWS, REQUESTS = 32, 3

Part = Callable[[Tensor], Tensor]
"""The rows of a whole result that are compared."""


def way(run: Run, part: Part, allowed: float, output: Tensor | None = None) -> Way:
    """A call that returns its output (and lse), or writes `output`, which is filled with NaN first,
    so that unwritten rows are wrong."""

    def result() -> Tensor:
        if output is not None:
            output.fill_(float("nan"))
        returned = run()
        out: Any = (
            output if returned is None else returned[0] if isinstance(returned, tuple) else returned
        )
        found = part(out.flatten(0, -3))
        return found if bool(torch.isfinite(out).all()) else torch.full_like(found, float("nan"))

    return Way(Timed(run), result, allowed)


def exact(call: Call) -> tuple[Tensor, float, Part]:
    """(rows of the result in float64, the error allowed to a kernel, a function that takes these
    rows of a whole result)."""
    small, part = _some_rows(call)
    return *oracle(small), part


def oracle(call: Call) -> tuple[Tensor, float]:
    """(the result in float64, the error allowed to a kernel)."""
    result = call.spec.output or call.spec.results[0].name
    # The oracle copies whole storages, and the tensors of a suite are views of one large one.
    found = testing.oracle(call.map(lambda _, t: t.clone()))[result]
    return found.flatten(0, -3), float(
        torch.as_tensor(allowance(call, {result: found})[result]).max()
    )


def _some_rows(call: Call) -> tuple[Call, Part]:
    """The call of the last ROWS queries of the first `REQUESTS`, all of one length as `build` makes
    them; and their rows."""
    held, spec = call.held(), call.spec
    dense = "most_queries" not in held
    requests, new = (
        held["queries"].shape[:2]
        if dense
        else (held["starts_of_queries"].shape[0] - 1, held["most_queries"])
    )
    batch, queries = min(REQUESTS, requests), min(ROWS, new)

    def part(out: Tensor) -> Tensor:
        taken: Tensor = out.unflatten(0, (-1, new))[:batch, -queries:].flatten(0, 1)
        return taken

    if dense:
        return call.map(lambda n, t: _of_first(spec[n].layout, t, batch, queries)), part
    given: dict[str, Any] = {
        n: part(t) for n, t in call.tensors().items() if spec[n].layout[0].text == "T"
    }
    for role, value in _first_requests(held, batch, queries).items():
        given |= dict.fromkeys(spec.roles.get(role, ()), value)
    for role, taken in _first_keys(held, batch).items():
        given |= {n: taken(call.arguments[n]) for n in spec.roles.get(role, ())}
    return call.with_(**given), part


def _of_first(layout: Any, t: Tensor, batch: int, queries: int) -> Tensor:
    """The part of a tensor of dense attention; what all requests share stays whole."""
    if layout[0].text != "B":
        return t
    return t[:batch, -queries:] if len(layout) > 1 and layout[1].text == "S" else t[:batch]


def _first_requests(held: dict[str, Any], batch: int, queries: int) -> dict[str, Any]:
    """What arguments hold of the first requests, with as many new tokens each."""
    ends = torch.arange(batch + 1, device=held["starts_of_queries"].device, dtype=torch.int32)
    found = {"starts_of_queries": ends * queries, "most_queries": queries}
    if "page_ids" not in held:
        return found | {"starts_of_keys": ends * held["most_keys"]}
    table = held["page_ids"][:batch]
    order = torch.arange(table.numel(), device=table.device, dtype=table.dtype)
    return found | {
        "page_ids": order.view(table.shape),
        "lengths_of_keys": held["lengths_of_keys"][:batch],
    }


def _first_keys(held: dict[str, Any], batch: int) -> dict[str, Part]:
    """By role, what takes the keys of the first requests: their pages in order, or their rows."""
    if "page_ids" not in held:
        return {"keys": lambda t: t[: batch * held["most_keys"]]}
    taken = held["page_ids"][:batch].flatten().long()
    return {
        "pages": lambda t: t.view(torch.uint8)[taken].view(t.dtype)
    }  # as bytes: older torch cannot index float8 tensors
