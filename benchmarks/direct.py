"""Our ops against the vendors' own calls on the same tensors, and torch's SDPA beside them; writes direct.json. CUDA only.

    python benchmarks/direct.py [--device cuda] [--budget-s 120]

GPU time: replays of CUDA graphs in turn, the L2 cache cleared before each; medians over 25 rounds. `ratio` is the compiled op over
the fastest direct call of the vendor's that runs the same device code (`OWN`); a vendor's metadata that depends on the batch alone is made
outside, as an engine makes it once a step. `device_kernels` counts the kernels that torch.profiler sees for one call.
An op that may not be captured (its plan is the host's) is launched, and its ratio is that to the vendor's call launched beside it.
`op.<kernel>` is the call as layers make it: a plan of the device is made outside, as the vendor's call has it, the query is in one piece,
and the output is its own. `op.<kernel>_unplanned` is the same call without a plan, beside the vendor's that makes its metadata
itself; besides those it makes rows of the requests, which the vendor's call is given. `op.<kernel>_bare` is the call of a stranger: no
plan, the query in two pieces, its output the caller's. No vendor's call does that work, so it has no ratio.
Of merges `op.triton` is the automatic choice, and beside the fastest vendor's; a merge's sides are clean, as the layers that merge say.
Every call is compared with the exact result before it is timed, as in the suite `kernels` of `attnops bench`, and may have twice a
kernel's budget. Host time of eager calls: `attnops bench overhead`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from common import arguments, candidates, clock_of, device_kernels, measure_all
from torch import Tensor

from attnops.bench import Setup, kernels, vendors
from attnops.bench.rows import Way, time_if_right
from attnops.inputs import Pool
from attnops.kernel import Capture, Kernel, kernels_of
from attnops.measured import Shape
from attnops.ops import OPS
from attnops.testing import Call, Source, allowance, builders, equip, oracle, with_device_plan
from attnops.tune.clock import Run, Timed, Times, spread
from attnops.tune.run import runner
from attnops.tune.shapes import DENSE, MLA, PAGED

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case(kernels.Case):
    """One point. vendors: makers of direct calls. rate: unit of the figure, "TB/s" of the bytes it must move or "TFLOP/s"."""

    vendors: dict[str, Callable[[Call], Run]] = field(default_factory=dict)
    rate: str = "TB/s"

    def call(self, pool: Pool) -> Call:
        """Its tensors. Float8 latents are rounded from 16 bits; a merge is of `batch` tokens' outputs."""
        s, float8 = self.shape, self.shape.dtype == "float8_e4m3fn"
        if s.op == "merge_state":
            return builders.merge(Source(0, str(pool.device)), (self.batch, s.q_heads, s.v_head_dim), torch.bfloat16, stale=False)
        if not float8:
            return super().call(pool)
        call = kernels.Case("", replace(s, dtype="bfloat16", kv_dtype="bfloat16"), self.batch, self.queries, self.keys).call(pool)
        scale = torch.full((1,), 0.5, device=pool.device)
        return call.with_(**{n: call.arguments[n].to(E4M3) for n in ("q_nope", "q_pe", "latent_pages")}, q_scale=scale, kv_scale=scale)

    def amount(self) -> float:
        """Bytes or operations, in units of one a microsecond at 1 TB/s or 1 TFLOP/s."""
        s = self.shape
        if s.op == "merge_state":
            return 3 * 2.0 * self.batch * s.q_heads * s.v_head_dim / 1e6
        return (self.work.bytes if self.rate == "TB/s" else self.work.flops) / 1e6


def sdpa(call: Call) -> Run:
    """torch's SDPA of a prompt, or over a contiguous cache of as many bytes."""
    run = vendors.sdpa(Setup(torch.device("cuda")), call)
    assert run is not None
    return run


def flashmla_with_metadata(call: Call) -> Run:
    import sgl_kernel.flash_mla  # noqa: F401, loads the ops

    a, query, pages = vendors.latents(call)
    op = torch.ops.sgl_kernel.dense_decode_fwd.default
    return lambda: op(query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False, None, None)


def flashmla_fp8(call: Call, planned: bool = True) -> Run:
    """FlashMLA's dense decode in float8, as `sgl_kernel.flash_mla` calls its ops. planned: with metadata made beforehand."""
    import sgl_kernel.flash_mla  # noqa: F401, loads the ops

    (a, query, pages), ops = vendors.latents(call), torch.ops.sgl_kernel
    given = (query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False)
    metadata = partial(ops.get_mla_decoding_metadata_dense_fp8, a["seq_lens"], query.shape[2], 1)
    made = metadata() if planned else None
    return lambda: ops.fwd_kvcache_mla_fp8(*given, *(made or metadata()), a["q_scale"], a["kv_scale"])


def merge(call: Call, vendor: str) -> Run:
    """A vendor's merge. FlashInfer's logs are of base 2."""
    sides = [call.arguments[n] for n in ("output_a", "lse_a", "output_b", "lse_b")]
    if vendor == "flashinfer":
        from flashinfer import merge_state

        return partial(merge_state, *(x / math.log(2) if i % 2 else x for i, x in enumerate(sides)))
    import sgl_kernel  # noqa: F401, loads the ops

    results = torch.empty_like(sides[0]), torch.empty_like(sides[1])

    def run() -> tuple[Tensor, Tensor]:
        torch.ops.sgl_kernel.merge_state_v2(*sides, *results)
        return results

    return run


CUDA_CORES = partial(vendors.flashinfer_paged, kind="Decode", use_tensor_cores=False)
DECODE = {**vendors.DECODE, "flashinfer_cuda_cores": CUDA_CORES, "sdpa_contiguous": sdpa}
PREFILL = {**vendors.DENSE, "sdpa": sdpa}
EXTEND = {**vendors.EXTEND, "flashinfer_fa3": partial(vendors.flashinfer_paged, kind="Prefill", backend="fa3")}
MERGE = {f"{vendor}_merge": partial(merge, vendor=vendor) for vendor in ("sgl", "flashinfer")}
FLOAT8_LATENT = {"flashmla_fp8": flashmla_fp8, "flashmla_fp8_with_metadata": partial(flashmla_fp8, planned=False)}
STEP = replace(PAGED, decode=True)
FLOAT8 = replace(MLA, decode=True, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
LATENT: dict[str, Any] = {"vendors": {**vendors.LATENT, "flashmla_with_metadata": flashmla_with_metadata}}
CASES = {
    **{f"decode {b}x{k}": Case("", STEP, b, 1, k, vendors=DECODE) for b, k in ((1, 8192), (8, 4096), (64, 4096))},
    **{f"causal prefill {n}": Case("", DENSE, 1, n, n, vendors=PREFILL, rate="TFLOP/s") for n in (2048, 8192, 16384)},
    **{f"merge of {n} tokens": Case("", Shape("merge_state"), n, 1, 0, vendors=MERGE) for n in (64, 4096)},
    **{f"paged prefill {n}": Case("", PAGED, 1, n, n, vendors=EXTEND, rate="TFLOP/s") for n in (2048, 8192)},
    "latent decode 64x8192, 16 heads": Case("", replace(MLA, q_heads=16, decode=True), 64, 1, 8192, **LATENT),
    "latent decode 64x8192, 128 heads": Case("", replace(MLA, decode=True), 64, 1, 8192, **LATENT, rate="TFLOP/s"),
    "float8 latent decode 64x8192, 128 heads": Case("", FLOAT8, 64, 1, 8192, vendors=FLOAT8_LATENT, rate="TFLOP/s"),
}
# By kernel, the vendor's calls that run the same device code on the same metadata; of `triton`, the calls that it replaces.
OWN = {
    "fa3": ("fa3",),
    "flashinfer": ("flashinfer_tensor_cores", "flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer_mla_fa2": ("flashinfer_fa2",),
    "flashinfer_mla_fa3": ("flashinfer_fa3",),
    "flashmla": ("flashmla",),
    "flashmla_unplanned": ("flashmla_with_metadata",),
    "flashmla_fp8_unplanned": ("flashmla_fp8_with_metadata",),
    "triton": tuple(MERGE),
}


def op_of(kernel: Kernel, call: Call, compiled: bool = True) -> Run:
    """The op, held to the kernel."""
    packet, policy = OPS[call.op].packet.default, f"kernel={call.op}:{kernel.name}"

    def function(args: Any, kwargs: Any) -> Any:
        return packet(*args, **kwargs, policy=policy)

    return partial(torch.compile(function, fullgraph=True, dynamic=False) if compiled else function, call.args, call.kwargs)


def layers_op(kernel: Kernel, call: Call, planned: bool) -> Run:
    """The op as `runner` calls it, with the kernel's device plan or without, and the query's parts side by side."""
    if call.op == "mla_attention":
        a, latent = call.arguments, call.arguments["q_nope"].shape[2]
        query = torch.cat([a[n].view(torch.uint8) for n in ("q_nope", "q_pe")], -1).view(a["q_nope"].dtype)
        call = call.with_(q_nope=query[..., :latent], q_pe=query[..., latent:])
    return runner(kernel, with_device_plan(kernel, call) if planned else call)


def makers_of(case: Case, call: Call) -> dict[str, Callable[[], Run]]:
    """Every call to be timed, by `direct.*`, `op.*` (compiled) and `eager.*`."""
    makers: dict[str, Callable[[], Run]] = {f"direct.{name}": partial(make, call) for name, make in case.vendors.items()}
    for kernel, mine in candidates(call, equip=equip):
        if not kernel.packages:
            continue
        name = f"op.{kernel.name}"
        makers |= {name: partial(op_of, kernel, mine), f"eager.{kernel.name}": partial(op_of, kernel, mine, False)}
        if kernel.plan.device is not None:
            makers |= {f"{name}_bare": makers[name], name: partial(layers_op, kernel, mine, True)}
            makers[f"{name}_unplanned"] = partial(layers_op, kernel, mine, False)
    return makers


def exact(call: Call) -> tuple[Tensor, float, Callable[[Tensor], Tensor]]:
    """As `kernels.exact`; of a merge all rows are compared."""
    if call.op != "merge_state":
        return kernels.exact(call)
    found = oracle(call)
    return found["output"], float(torch.as_tensor(allowance(call, found)["output"]).max()), lambda out: out


def measure(case: Case, clock: Any, pool: Pool) -> dict[str, Any]:
    """One case's figures."""
    torch._dynamo.reset()
    call, runs = case.call(pool), dict[str, Run]()
    want, allowed, part = exact(call)

    def way(name: str, make: Callable[[], Run]) -> Way:
        runs[name] = make()
        return kernels.way(runs[name], part, 2 * allowed, call.arguments.get("output"))

    def spreads(steps: Mapping[str, Timed]) -> Times:
        found: Times = clock.spreads({name: step.call for name, step in steps.items()})
        return found

    ways = {name: partial(way, name, make) for name, make in makers_of(case, call).items()}
    rows = {row["way"]: row for row in time_if_right("", ways, want, allowed, spreads)}
    left_out = {name: row["wrong"] for name, row in rows.items() if "wrong" in row}
    times = {name: {n: row[n] for n in ("median_us", "spread_us") if n in row} for name, row in rows.items() if "wrong" not in row}
    for figures in times.values():
        figures["rate"] = round(case.amount() / figures["median_us"], 3)
    runs = {name: runs[name] for name in times}
    counts = {name: device_kernels(run) for name, run in runs.items() if not name.startswith("eager.")}
    against: dict[str, Any] = {}
    for name in (n for n in times if n.startswith("op.")):
        kernel = name.removeprefix("op.")
        own = [n for n in (f"direct.{own}" for own in OWN.get(kernel, (kernel,))) if n in times]
        if not own:
            continue
        registered = kernels_of(call.op).get(kernel)
        launched = registered is not None and registered.capture is Capture.NEVER
        us = {n: times[n]["median_us"] for n in (name, *own)}
        if launched:
            us = {n: spread(found)["median_us"] for n, found in clock.in_turn({n: runs[n] for n in us}, launched=True).items()}
        best = min(own, key=lambda n: us[n])
        more = len(counts[name]) - len(counts[best])
        against[name] = {"direct": best, "ratio": round(us[name] / us[best], 4), "more_device_kernels": more}
        against[name] |= {"launched_us": us} if launched else {}
    return {"left_out": left_out, "unit": case.rate, "gpu": times, "device_kernels": counts, "against": against}


def main() -> int:
    given = arguments(__doc__, budget_s=120.0).parse_args()
    pool, clock = Pool("cuda"), clock_of("cuda")
    pool.reserve(torch.bfloat16, 1 << 30)
    jobs = [("cases", name, partial(measure, case, clock, pool)) for name, case in CASES.items()]

    def brief(found: dict[str, Any]) -> str:
        return json.dumps({n: (f["median_us"], f["rate"]) for n, f in found["gpu"].items()} | found["against"])

    return measure_all(jobs, {"launch_us": round(clock.launch_us, 2)}, "direct.json", "cuda", given.budget_s, brief)


if __name__ == "__main__":
    raise SystemExit(main())
