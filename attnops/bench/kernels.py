"""Suite `kernels`: every kernel that can answer a call, the automatic choice, and torch's and the vendors' own calls.

`automatic` is the plain op, `deterministic` the op under that policy; `kernel` in their rows names the chosen kernel. `torch.*` are SDPA,
compiled flex_attention and varlen_attn; `direct.*` the vendors' own calls of their kernels (`attnops.bench.direct`). `of_direct` of a
kernel: the time of the vendor's fastest call of the same device code over its own. `of_automatic`: that of `automatic` over the row's.
`of_bandwidth` and `of_flops` are shares of the ceilings measured in the same run, for the bytes a call must move and its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Setup, direct, rows
from attnops.bench.rows import Row, Way, time_if_right, with_ratios
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, altered
from attnops.core.select import select
from attnops.measured import Sizes, work
from attnops.ops import OPS
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.latent.timed import MLA
from attnops.ops.pages.timed import FP8, PAGED
from attnops.ops.sweeps import F32, GPT_OSS, decoding, toy
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build
from attnops.tune.clock import Run, Timed, kernels_us
from attnops.tune.run import COMPILED, Stopwatch, runner

ROWS, REQUESTS = 32, 3  # the last queries of the first requests are compared. All of them would take longer than the measurement.

PAGES = ("k_pages", "v_pages", "latent_pages")
# Not measured on a GPU, where a plain body holds the scores of all pairs; at toy size, compilers are not measured.
SLOW = ("reference", "flex")


@dataclass(frozen=True)
class Case:
    """A call of `batch` requests of `queries` new tokens with `keys` keys each. more: arguments that a kind does not have."""

    kind: str
    shape: Problem
    batch: int
    queries: int
    keys: int
    remark: str = ""
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Kind and sizes."""
        sizes = f"{self.keys}" if self.queries in (1, self.keys) else f"{self.queries} of {self.keys}"
        remark = f"{self.shape.q_heads} heads" if self.shape.rope_dim else self.remark
        return f"{self.kind} {self.batch}x{sizes}" + (f", {remark}" if remark else "")

    def call(self, pool: Pool) -> Call:
        """The call itself."""
        return build(self.shape, [self.queries] * self.batch, [self.keys] * self.batch, pool).with_(**dict(self.more))

    def sized(self, size: str) -> Case:
        """At the size of the run: shorter and float32 on a CPU."""
        if size in ("full", "quick"):
            return self
        s, keys = self.shape, min(self.keys, 32 if size == "toy" else 512)
        queries = min(self.queries, keys if self.queries == self.keys else keys // 2)
        shape = altered(toy(s) if size == "toy" else altered(s, **F32), window=(min(s.rules.window[0], keys // 2), -1))
        shape = shape if s.kv_dtype == s.dtype else altered(shape, kv_dtype=s.kv_dtype)
        return replace(self, shape=shape, batch=min(self.batch, 2), queries=queries, keys=keys)


STEP = decoding(PAGED)
CASES = (
    Case("decode", STEP, 8, 1, 4096),
    Case("prefill", DENSE, 1, 4096, 4096),
    Case("extend", PAGED, 4, 256, 4096),
    Case("latent decode", decoding(MLA), 64, 1, 4096),
    Case("decode", altered(STEP, **FP8), 8, 1, 4096, "float8 pages"),
    Case("decode", altered(STEP, **GPT_OSS), 64, 1, 2048, "window and sinks"),
    Case("decode", STEP, 64, 1, 4096),
    Case("decode", STEP, 1, 1, 32768),
    Case("prefill", altered(DENSE, window=(1023, -1)), 1, 4096, 4096, "window"),
    Case("prefill", DENSE, 1, 2048, 2048, "soft cap", (("softcap", 30.0),)),
    Case("packed prefill", PACKED, 4, 2048, 2048),
    Case("latent decode", altered(decoding(MLA), q_heads=16), 64, 1, 4096),
    Case("prefill", DENSE, 1, 16384, 16384),
    Case("paged prefill", PAGED, 1, 8192, 8192),
    Case("float8 latent decode", altered(decoding(MLA), **FP8, dtype=FP8["kv_dtype"]), 64, 1, 8192),
)
COUNT = {"toy": 4, "small": 4, "quick": 6, "full": len(CASES)}


def cases(setup: Setup) -> dict[str, rows.Case]:
    """The calls."""
    pool, chosen = Pool(setup.device), [case.sized(setup.size) for case in CASES[: COUNT[setup.size]]]
    return {case.name: partial(measure, setup, pool, case) for case in chosen}


def measure(setup: Setup, pool: Pool, case: Case) -> list[Row]:
    """One case: our kernels that are fast, the automatic choice, torch's calls and the vendors'."""
    call, brief = case.call(pool), setup.size == "toy"
    want, allowed, part = exact(call)
    ways: dict[str, Way | rows.Make] = {}
    slow = SLOW if setup.on_gpu else (*SLOW[1:], *COMPILED) if brief else ()
    fast = tuple(n for n in kernels_of(call.op) if n not in slow)
    for kernel, mine, _ in Stopwatch(names=fast).candidates(call):
        ways[kernel.name] = way(runner(kernel, mine), part, allowed * kernel.tolerance.factor, mine.arguments.get("output"))
    for name, policy in (("automatic", ""), ("deterministic", "deterministic")):
        if (chosen := select(call.problem, policy).kernel) is not None:
            op = partial(OPS[call.op].packet.default, *call.args, **call.kwargs, policy=policy)
            plain = way(op, part, allowed * chosen.tolerance.factor, call.arguments.get("output"))
            ways[name] = replace(plain, more={"kernel": chosen.name})

    def other(make: Callable[[Call], Run | None]) -> Way | None:
        # Other calls may round weights to the dtype; the budget has a factor of two for block-wise rescaling.
        run = make(call)
        return None if run is None else way(run, part, 2 * allowed, call.arguments.get("output"))

    others: dict[str, Callable[[Call], Run | None]]
    others = {name: partial(direct.torch_call, name, setup) for name in direct.TORCH if name == "torch.sdpa" or not brief}
    others |= direct.vendors_of(call) if setup.on_gpu else {}
    ways |= {name: partial(other, make) for name, make in others.items()}

    needs = work(case.shape, Sizes(case.batch, case.queries, case.keys / case.queries))

    def shares(us: float, way: Way) -> Row:
        ceilings = (setup.ceilings[name] for name in ("bandwidth_tb_s", "matmul_tflop_s"))
        moved, done = (amount / us / 1e6 / ceiling for amount, ceiling in zip(needs, ceilings, strict=True))
        return {"of_bandwidth": round(moved, 4), "of_flops": round(done, 4), "of_ceiling": round(max(moved, done), 4)}

    found = time_if_right(case.name, ways, want, allowed, partial(kernels_us, setup.device), more=shares)
    return with_ratios(direct.with_direct(found, direct.own_calls), "automatic")


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
    a, dense = call.arguments, call.op == "attention"
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
