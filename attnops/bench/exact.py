"""The exact result of a call of attention, in the rows that are compared, and a way that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.bench.rows import Way
from attnops.ops import OPS
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance
from attnops.tune.clock import Run, Timed

ROWS, REQUESTS = 32, 3  # the last queries of the first requests are compared. All of them would take longer than the measurement.

PAGES = ("k_pages", "v_pages", "latent_pages")


def way(run: Run, part: Callable[[Tensor], Tensor], allowed: float, output: Tensor | None = None) -> Way:
    """A call that returns its output (and lse), or writes `output`, which is filled with NaN first, so that unwritten rows are wrong."""

    def result() -> Tensor:
        if output is not None:
            output.fill_(float("nan"))
        returned = run()
        out: Any = output if returned is None else returned[0] if isinstance(returned, tuple) else returned
        found = part(out.flatten(0, -3))
        return found if bool(torch.isfinite(out).all()) else torch.full_like(found, float("nan"))

    return Way(Timed(run), result, allowed)


def exact(call: Call) -> tuple[Tensor, float, Callable[[Tensor], Tensor]]:
    """(rows of the result in float64, the error allowed to a kernel, a function that takes these rows of a whole result)."""
    small, part = _some(call)
    return *oracle(small), part


def oracle(call: Call) -> tuple[Tensor, float]:
    """(the result in float64, the error allowed to a kernel)."""
    wide = call.map(lambda n, t: t.double() if t.is_floating_point() and t.dtype.itemsize > 1 else t)
    returned = OPS[call.op].reference(wide.record)
    found = wide.arguments["output"] if returned is None else returned[0]
    return found.flatten(0, -3), float(torch.as_tensor(allowance(call, {"output": found})["output"]).max())


def _some(call: Call) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """The call of the last ROWS queries of the first `REQUESTS` requests, all of one length as `build` makes them; and their rows."""
    a = call.arguments
    dense = "max_seqlen_q" not in a
    requests, new = a["query"].shape[:2] if dense else (a["cu_seqlens_q"].shape[0] - 1, a["max_seqlen_q"])
    batch, queries = min(REQUESTS, requests), min(ROWS, new)

    def part(out: Tensor) -> Tensor:
        taken: Tensor = out.unflatten(0, (-1, new))[:batch, -queries:].flatten(0, 1)
        return taken

    if dense:
        return call.map(lambda n, t: t if n == "sinks" else t[:batch, -queries:] if n == "query" else t[:batch]), part
    given: dict[str, Any] = {n: part(a[n]) for n in ("query", "q_nope", "q_pe", "output") if n in a}
    ends = torch.arange(batch + 1, device=a["cu_seqlens_q"].device, dtype=torch.int32)
    given |= {"cu_seqlens_q": ends * queries, "max_seqlen_q": queries}
    if "page_table" in a:
        table = a["page_table"][:batch]
        # As bytes: older torch cannot index float8 tensors.
        given |= {n: a[n].view(torch.uint8)[table.flatten().long()].view(a[n].dtype) for n in PAGES if n in a}
        order = torch.arange(table.numel(), device=table.device, dtype=table.dtype)
        given |= {"page_table": order.view(table.shape), "seq_lens": a["seq_lens"][:batch]}
    else:
        keys = a["max_seqlen_k"]
        given |= {n: a[n][: batch * keys] for n in ("key", "value")} | {"cu_seqlens_k": ends * keys}
    return call.with_(**given), part
