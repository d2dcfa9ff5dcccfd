"""Suite `kernels`: every kernel that can answer a call, the one chosen by itself, and what else torch has, over kinds of calls.

`automatic` is the op as it is called; `kernel` in its row names what it ran. `torch.*` are SDPA, flex_attention compiled and varlen_attn;
`direct.*` the vendors' own calls of their kernels (`attnops.bench.vendors`).
`of_bandwidth` and `of_flops` are shares of the ceilings measured in the same run, of the bytes that must be moved and the operations that
must be done. Of every result the last rows of the first requests are compared with the exact ones; all of it has to be finite.
The last row counts the calls of a grid that the GPU (off one, an H200) leaves to the reference, see `attnops.bench.judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import judge, peers, report, vendors
from attnops.bench.setup import Setup
from attnops.bench.timing import Timed, kernels_us
from attnops.bench.verdict import Row, Way, judged, why
from attnops.kernel import kernels_of
from attnops.measured import Shape
from attnops.measured.shape import Sizes
from attnops.ops import OPS
from attnops.problem import Target
from attnops.select import select
from attnops.testing import Call, allowance, oracle
from attnops.tune import COMPILED, Pool, Stopwatch, build
from attnops.tune.clock import HostClock
from attnops.tune.shapes import DENSE, MLA, PACKED, PAGED
from attnops.tune.timing import runner

ROWS = 32
REQUESTS = 3
"""What is compared: the last queries of the first requests. All of them would be more work than what is timed."""

PAGES = ("k_pages", "v_pages", "latent_pages")
SLOW = ("reference", "flex")
"""Not on a GPU, where a plain body needs the scores of all pairs at once; nor is what compiles for seconds timed at toy size."""


@dataclass(frozen=True)
class Case:
    """A call: its shape, `batch` requests of `queries` new tokens with `keys` keys each. kind, remark: words of its name.

    more: arguments that a Shape has no field for.
    """

    kind: str
    shape: Shape
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

    def sized(self, size: str) -> Case:
        """At the size of the run: shorter on a CPU, and in float32."""
        if size in ("full", "quick"):
            return self
        toy, s = size == "toy", self.shape
        keys = min(self.keys, 32 if toy else 512)
        queries = min(self.queries, keys if self.queries == self.keys else keys // 2)
        kv_dtype = s.kv_dtype if s.kv_dtype != s.dtype else "float32"
        shape = replace(s, dtype="float32", kv_dtype=kv_dtype, window=min(s.window, keys // 2))
        if toy:
            shape = replace(shape, q_heads=4, kv_heads=min(s.kv_heads, 2))
        if toy and not s.rope_dim:
            shape = replace(shape, head_dim=16, v_head_dim=16)
        return replace(self, shape=shape, batch=min(self.batch, 2), queries=queries, keys=keys)


STEP = replace(PAGED, decode=True)
GPT_OSS = replace(STEP, q_heads=64, kv_heads=8, head_dim=64, v_head_dim=64, sinks=True, window=127)
CASES = (
    Case("decode", STEP, 8, 1, 4096),
    Case("prefill", DENSE, 1, 4096, 4096),
    Case("extend", PAGED, 4, 256, 4096),
    Case("latent decode", replace(MLA, decode=True), 64, 1, 4096),
    Case("decode", replace(STEP, kv_dtype="float8_e4m3fn"), 8, 1, 4096, "float8 pages"),
    Case("decode", GPT_OSS, 64, 1, 2048, "window and sinks"),
    Case("decode", STEP, 64, 1, 4096),
    Case("decode", STEP, 1, 1, 32768),
    Case("prefill", replace(DENSE, window=1023), 1, 4096, 4096, "window"),
    Case("prefill", DENSE, 1, 2048, 2048, "soft cap", (("softcap", 30.0),)),
    Case("packed prefill", PACKED, 4, 2048, 2048),
    Case("latent decode", replace(MLA, q_heads=16, decode=True), 64, 1, 4096),
    Case("prefill", DENSE, 1, 16384, 16384),
)
COUNT = {"toy": 4, "small": 4, "quick": 6, "full": len(CASES)}


def cases(setup: Setup) -> dict[str, report.Case]:
    """Of the suite."""
    pool = Pool(setup.device)
    chosen = [case.sized(setup.size) for case in CASES[: COUNT[setup.size]]]
    found: dict[str, report.Case] = {case.name: partial(measure, setup, pool, case) for case in chosen}
    return found | {"calls left to the reference": lambda: [judge.row(Target.of(setup.device) if setup.on_gpu else judge.H200)]}


def measure(setup: Setup, pool: Pool, case: Case) -> list[Row]:
    """One case."""
    call = build(case.shape, [case.queries] * case.batch, [case.keys] * case.batch, pool).with_(**dict(case.more))
    want, allowed, part = exact(call)
    ways: dict[str, Way] = {}
    slow = SLOW if setup.on_gpu else SLOW[1:] if setup.size == "toy" else ()
    names = tuple(n for n in kernels_of(call.op) if n not in slow)
    for kernel, mine, _ in Stopwatch(HostClock(), names=names).candidates(call):
        if not (setup.size == "toy" and kernel.name in COMPILED):
            ways[kernel.name] = way(runner(kernel, mine), mine, part, allowed * kernel.tolerance)
    chosen = select(call.problem).kernel
    if chosen is not None:
        op = partial(OPS[call.op].packet.default, *call.args, **call.kwargs)
        ways["automatic"] = replace(way(op, call, part, allowed * chosen.tolerance), more={"kernel": chosen.name})
    some = {n: make for n, make in peers.PEERS.items() if setup.size != "toy" or n == "torch.sdpa"}
    others: dict[str, Callable[[Call], peers.Run | None]] = {n: partial(make, setup) for n, make in some.items()}
    if setup.on_gpu:
        others |= vendors.vendors_of(call)
    broken = []
    for name, make in others.items():
        try:
            run_it = make(call)
        except Exception as error:  # what this torch or machine lacks is said
            broken.append(Row(case.name, name, wrong=why(error)))
            continue
        if run_it is not None:
            # They may round weights to the dtype where ours do not; a factor of two is what the budget has for block-wise rescaling.
            ways[name] = Way(Timed(run_it), partial(_rows_of, run_it, part), budget=2 * allowed)
    work = case.shape.work(Sizes(case.batch, case.queries, case.keys / case.queries))

    def clock(steps: Mapping[str, Timed]) -> dict[str, dict[str, float]]:
        return kernels_us(setup.device, {name: step.call for name, step in steps.items()})

    def shares(us: float) -> dict[str, float]:
        moved, done = work.bytes / us / 1e6 / setup.ceilings["bandwidth_tb_s"], work.flops / us / 1e6 / setup.ceilings["matmul_tflop_s"]
        return {"of_bandwidth": round(moved, 4), "of_flops": round(done, 4), "of_ceiling": round(max(moved, done), 4)}

    return judged(case.name, ways, want, allowed, clock, more=shares) + broken


def _rows_of(run: Callable[[], Any], part: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a peer's result, which may come with an lse, and as `[B, 1, Hq, D]`."""
    returned = run()
    out: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return _compared(out, lambda whole: part(whole.flatten(0, -3)))


def _compared(out: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """The part that is compared; NaN, where anything else of the result is not finite."""
    rows = part(out)
    return rows if bool(torch.isfinite(out).all()) else torch.full_like(rows, float("nan"))


def way(run: Callable[[], Any], call: Call, part: Callable[[Tensor], Tensor], allowed: float) -> Way:
    """A call of ours. What it does not write stays NaN, which is wrong."""

    def result() -> Tensor:
        written = call.arguments.get("output")
        if written is not None:
            written.fill_(float("nan"))
        returned = run()
        returned = returned[0] if isinstance(returned, tuple) else returned
        return _compared(returned if isinstance(returned, Tensor) else call.arguments["output"], part)

    return Way(Timed(run), result, budget=allowed)


def exact(call: Call) -> tuple[Tensor, float, Callable[[Tensor], Tensor]]:
    """Some rows of the result in float64, how far a kernel's may be, and what takes the same rows of a whole result."""
    small, part = _some(call)
    found = oracle(small)
    budget = allowance(small, found)["output"]
    return found["output"].flatten(0, -3), float(torch.as_tensor(budget).max()), part


def _some(call: Call) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """The call of the last ROWS queries of the first REQUESTS requests, all of one length as `build` makes them; and those rows."""
    a = call.arguments
    if call.op == "attention":
        batch, queries = min(REQUESTS, a["query"].shape[0]), min(ROWS, a["query"].shape[1])
        small = call.map(lambda n, t: t if n == "sinks" else t[:batch, -queries:] if n == "query" else t[:batch])
        length = a["query"].shape[1]
        return small, lambda out: (out.unflatten(0, (-1, length)) if out.dim() == 3 else out)[:batch, -queries:].flatten(0, 1)
    new = a["max_seqlen_q"]
    batch, queries = min(REQUESTS, a["cu_seqlens_q"].shape[0] - 1), min(ROWS, new)

    def part(out: Tensor) -> Tensor:
        rows: Tensor = out.unflatten(0, (-1, new))[:batch, -queries:].flatten(0, 1)
        return rows

    given: dict[str, Any] = {n: part(a[n]) for n in ("query", "q_nope", "q_pe", "output") if n in a}
    ends = torch.arange(batch + 1, device=a["cu_seqlens_q"].device, dtype=torch.int32)
    given |= {"cu_seqlens_q": ends * queries, "max_seqlen_q": queries}
    if "page_table" in a:
        table = a["page_table"][:batch]
        # As bytes: not every torch picks rows of float8 numbers.
        given |= {n: a[n].view(torch.uint8)[table.flatten().long()].view(a[n].dtype) for n in PAGES if n in a}
        order = torch.arange(table.numel(), device=table.device, dtype=table.dtype)
        given |= {"page_table": order.view(table.shape), "seq_lens": a["seq_lens"][:batch]}
    else:
        keys = a["max_seqlen_k"]
        given |= {n: a[n][: batch * keys] for n in ("key", "value")} | {"cu_seqlens_k": ends * keys}
    return call.with_(**given), part
