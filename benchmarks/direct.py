"""Our ops against the vendors' own calls on the same tensors, and torch's SDPA beside them; writes direct.json. CUDA only.

    python benchmarks/direct.py [--device cuda] [--budget-s 120]

GPU time: replays of CUDA graphs in turn, the L2 cache flushed before each; medians over 25 rounds. `ratio` is the compiled op over
the fastest direct call of the vendor's that runs the same device code (`OWN`); a vendor's metadata that depends on the batch alone is made
outside, as an engine makes it once a step. `device_kernels` counts what torch.profiler sees on the device for one call.
An op that may not be captured (its plan is the host's) is launched, and its ratio is that to the vendor's call launched beside it.
`op.<kernel>` is the call as layers make it: one that reads a plan of the device has it, made outside, as the vendor's call has, the query
in one piece, and an output of its own. `op.<kernel>_unplanned` is the same call without a plan, beside the vendor's that makes its metadata
itself; besides those it makes rows of the requests, which the vendor's call is given. `op.<kernel>_bare` is the call of a stranger: no
plan, the query in two pieces, its output the caller's. No vendor's call does that work, so it has no ratio.
Of merges `op.triton` is the automatic choice, and beside the fastest vendor's; a merge's sides are clean, as the layers that merge say.
Host time: eager calls of a tiny batch, until they return.
"""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from common import arguments, device_kernels, environment, host_us, measure_all, spread, why
from torch.nn.functional import scaled_dot_product_attention

from attnops.bench import vendors
from attnops.inputs import Pool, build
from attnops.kernel import Capture, Kernel, kernels_of
from attnops.measured import Shape
from attnops.ops import OPS
from attnops.testing import Call, equip, with_device_plan
from attnops.tune import Stopwatch
from attnops.tune.clock import GraphClock
from attnops.tune.shapes import DENSE, MLA, PAGED
from attnops.tune.timing import runner

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One point. rate: what the figure is given in, "TB/s" of the bytes it must move or "TFLOP/s". make: its call, else `build`'s."""

    name: str
    shape: Shape
    batch: int
    queries: int
    keys: int
    rate: str
    vendors: dict[str, Callable[[Call], Run]] = field(default_factory=dict)
    make: Callable[[Case, Pool], Call] | None = None

    def call(self, pool: Pool) -> Call:
        """Its tensors, in the pool from its start where it is `build` that makes them."""
        return self.make(self, pool) if self.make else build(self.shape, [self.queries] * self.batch, [self.keys] * self.batch, pool)

    def amount(self) -> float:
        """Bytes or operations, in units of one a microsecond at 1 TB/s or 1 TFLOP/s."""
        s, new = self.shape, self.batch * self.queries
        width = s.head_dim + s.v_head_dim
        if self.shape.op == "merge_state":
            return 3 * 2.0 * new * s.q_heads * s.v_head_dim / 1e6
        if self.rate == "TB/s":
            stored = s.head_dim if s.rope_dim else s.kv_heads * width
            read = getattr(torch, s.kv_dtype).itemsize * (self.batch * self.keys * stored + new * s.q_heads * s.head_dim)
            return (read + 2.0 * new * s.q_heads * s.v_head_dim) / 1e6
        pairs = new * (self.keys - (self.queries - 1) / 2)
        return 2.0 * pairs * s.q_heads * width / 1e6


# What is called besides our ops ----------------------------------------------------------------------------------------


def sdpa_dense(call: Call) -> Run:
    a = call.arguments
    q, k, v = (a[n].transpose(1, 2) for n in ("query", "key", "value"))
    return lambda: scaled_dot_product_attention(q, k, v, scale=a["scale"], is_causal=True, enable_gqa=True)


def sdpa_contiguous(call: Call) -> Run:
    """The same bytes as a contiguous cache, which SDPA wants."""
    a = call.arguments
    batch = a["page_table"].shape[0]
    q = a["query"].unflatten(0, (batch, -1)).transpose(1, 2)
    k, v = (a[n].flatten(0, 1).unflatten(0, (batch, -1)).transpose(1, 2) for n in ("k_pages", "v_pages"))
    return lambda: scaled_dot_product_attention(q, k, v, scale=a["scale"], enable_gqa=True)


# Calls that `build` does not make --------------------------------------------------------------------------------------


def float8_latents(case: Case, pool: Pool) -> Call:
    """Query and latents of the 16-bit call, rounded."""
    call = replace(case, shape=replace(case.shape, dtype="bfloat16", kv_dtype="bfloat16"), make=None).call(pool)
    small = {n: call.arguments[n].to(torch.float8_e4m3fn) for n in ("q_nope", "q_pe", "latent_pages")}
    scale = torch.full((1,), 0.5, device=pool.device)
    return call.with_(**small, q_scale=scale, kv_scale=scale)


def two_parts(case: Case, pool: Pool) -> Call:
    """A merge of `batch` tokens' outputs."""
    s = case.shape
    sides = {f"output_{n}": torch.randn(case.batch, s.q_heads, s.v_head_dim, device=pool.device, dtype=torch.bfloat16) for n in "ab"}
    sides |= {f"lse_{n}": torch.randn(case.batch, s.q_heads, device=pool.device) for n in "ab"}
    return Call("merge_state", {**sides, "stale": False}, {}, ())


DECODE = {**vendors.DECODE, "sdpa_contiguous": sdpa_contiguous}
EXTEND, LATENT = vendors.EXTEND, vendors.LATENT
PREFILL = {**vendors.PREFILL, "sdpa": sdpa_dense}
STEP = replace(PAGED, decode=True)
FLOAT8 = replace(MLA, decode=True, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
CASES = (
    *(Case(f"decode {b}x{k}", STEP, b, 1, k, "TB/s", DECODE) for b, k in ((1, 8192), (8, 4096), (64, 4096))),
    *(Case(f"causal prefill {n}", DENSE, 1, n, n, "TFLOP/s", PREFILL) for n in (2048, 8192, 16384)),
    *(Case(f"merge of {n} tokens", Shape("merge_state"), n, 1, 0, "TB/s", vendors.MERGE, two_parts) for n in (64, 4096)),
    *(Case(f"paged prefill {n}", PAGED, 1, n, n, "TFLOP/s", EXTEND) for n in (2048, 8192)),
    Case("latent decode 64x8192, 16 heads", replace(MLA, q_heads=16, decode=True), 64, 1, 8192, "TB/s", LATENT),
    Case("latent decode 64x8192, 128 heads", replace(MLA, decode=True), 64, 1, 8192, "TFLOP/s", LATENT),
    Case("float8 latent decode 64x8192, 128 heads", FLOAT8, 64, 1, 8192, "TFLOP/s", vendors.FLOAT8_LATENT, float8_latents),
)
OWN = {
    "fa3": ("fa3",),
    "flashinfer": ("flashinfer_tensor_cores", "flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer_mla_fa2": ("flashinfer_fa2",),
    "flashinfer_mla_fa3": ("flashinfer_fa3",),
    "flashmla": ("flashmla",),
    "flashmla_unplanned": ("flashmla_with_metadata",),
    "flashmla_fp8_unplanned": ("flashmla_fp8_with_metadata",),
    "triton": tuple(vendors.MERGE),
}
"""By kernel, the vendor's calls that run the same device code on the same metadata; of `triton`, the calls that it replaces."""

TINY = {"paged_attention": Case("decode 1x64", STEP, 1, 1, 64, "TB/s", DECODE)}


# Measuring ------------------------------------------------------------------------------------------------------------


def op_of(kernel: Kernel, call: Call, compiled: bool) -> Run:
    packet = OPS[call.op].packet.default
    args, kwargs, policy = call.args, call.kwargs, f"kernel={call.op}:{kernel.name}"

    def function(args: Any, kwargs: Any) -> Any:
        return packet(*args, **kwargs, policy=policy)

    run = torch.compile(function, fullgraph=True, dynamic=False) if compiled else function
    return lambda: run(args, kwargs)


def layers_op(kernel: Kernel, call: Call, planned: bool) -> Run:
    """The compiled op as `runner` calls it, with the kernel's device plan or without, and the query's parts side by side."""
    if call.op == "mla_attention":
        a, latent = call.arguments, call.arguments["q_nope"].shape[2]
        query = torch.cat([a[n].view(torch.uint8) for n in ("q_nope", "q_pe")], -1).view(a["q_nope"].dtype)
        call = call.with_(q_nope=query[..., :latent], q_pe=query[..., latent:])
    return runner(kernel, with_device_plan(kernel, call) if planned else call)


def runs_of(case: Case, call: Call) -> tuple[dict[str, Run], dict[str, str]]:
    """Every call to be timed, by `direct.*`, `op.*` (compiled) and `eager.*`, and what is left out with its reason."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name, make in case.vendors.items():
        try:
            run = make(call)
            run()
            torch.cuda.synchronize()
            runs[f"direct.{name}"] = run
        except Exception as error:
            left_out[f"direct.{name}"] = why(error)
    torch._dynamo.reset()
    given = {k.name: (k, c) for k, c, _ in Stopwatch(lambda *_: 0.0, equip=equip).candidates(call) if k.packages}
    for name, (kernel, mine) in given.items():
        kinds = {f"op.{name}": partial(op_of, kernel, mine, True), f"eager.{name}": partial(op_of, kernel, mine, False)}
        if kernel.plan.device is not None:
            kinds |= {f"op.{name}_bare": kinds[f"op.{name}"], f"op.{name}": partial(layers_op, kernel, mine, True)}
            kinds |= {f"op.{name}_unplanned": partial(layers_op, kernel, mine, False)}
        for kind, make_run in kinds.items():
            try:
                run = make_run()
                run()
                torch.cuda.synchronize()
                runs[kind] = run
            except Exception as error:
                left_out[kind] = why(error)
                traceback.print_exc()
    return runs, left_out


def measure(case: Case, clock: GraphClock, pool: Pool) -> dict[str, Any]:
    """One case's figures."""
    call = case.call(pool)
    runs, left_out = runs_of(case, call)
    times = {name: spread(us) for name, us in clock.in_turn(runs).items()}
    out: dict[str, Any] = {"left_out": left_out, "unit": case.rate, "gpu": times}
    for figures in times.values():
        figures["rate"] = round(case.amount() / figures["median_us"], 3)
    out["device_kernels"] = {name: device_kernels(run) for name, run in runs.items() if not name.startswith("eager.")}
    out["against"] = {}
    registered = kernels_of(call.op)
    for name in (n for n in times if n.startswith("op.")):
        kernel = name.removeprefix("op.")
        own = [n for n in (f"direct.{own}" for own in OWN.get(kernel, (kernel,))) if n in times]
        if own:
            launched = kernel in registered and registered[kernel].capture is Capture.NEVER
            alike = [name, *own]
            us = clock.in_turn({n: runs[n] for n in alike}, launched=True) if launched else {n: [times[n]["median_us"]] for n in alike}
            median = {n: statistics.median(us[n]) for n in alike}
            best = min(own, key=lambda n: median[n])
            out["against"][name] = {
                "direct": best,
                "ratio": round(median[name] / median[best], 4),
                "more_device_kernels": len(out["device_kernels"][name]) - len(out["device_kernels"][best]),
                **({"launched_us": {n: round(median[n], 2) for n in alike}} if launched else {}),
            }
    return out


def eager(case: Case, pool: Pool) -> dict[str, Any]:
    """Host microseconds of eager calls of a tiny batch: the op that selects, the overload, the kernel's `run`, the vendor's function."""
    call = case.call(pool)
    runs, left_out = runs_of(replace(case, vendors={n: v for n, v in case.vendors.items() if n == "fa3"}), call)
    for name in [n.removeprefix("eager.") for n in runs if n.startswith("eager.")]:
        kernel, mine, _ = next(c for c in Stopwatch(lambda *_: 0.0, equip=equip).candidates(call) if c[0].name == name)
        overload, args, kwargs = getattr(OPS[mine.op].packet, name), mine.args, mine.kwargs
        runs[f"overload.{name}"] = lambda o=overload, a=args, k=kwargs: o(*a, **k)
        runs[f"kernel_run.{name}"] = lambda r=kernel.run, c=mine.record: r(c)
    host = {n: r for n, r in runs.items() if not n.startswith("op.")}
    return {"left_out": left_out, "host": host_us(host, repeats=25, inner=20, wait=False)}


def main() -> int:
    given = arguments(__doc__, budget_s=120.0).parse_args()
    pool, clock = Pool("cuda"), GraphClock("cuda")
    pool.reserve(torch.bfloat16, 1 << 30)
    jobs = [("cases", case.name, partial(measure, case, clock, pool)) for case in CASES]
    jobs += [("eager", op, partial(eager, case, pool)) for op, case in TINY.items()]
    head = {**environment("cuda"), "launch_us": round(clock.launch_us, 2)}

    def told(found: dict[str, Any]) -> str:
        return json.dumps(
            {n: (f["median_us"], f.get("rate")) for n, f in found.get("gpu", found.get("host", {})).items()} | found.get("against", {})
        )

    return measure_all(jobs, head, "direct.json", "cuda", given.budget_s, told)


if __name__ == "__main__":
    raise SystemExit(main())
