"""Our Triton kernels against the vendors' fastest for each shape, the cost of a first use and the number of variants. CUDA only.

    python benchmarks/triton_vendors.py [--device cuda] [--budget-s 180]

Writes triton.json. `us`: medians of CUDA graph replays in turn, the L2 cache cleared before each, the start of a graph (`launch_us`)
included for all. `speed`: the time of the fastest vendor's call whose name holds `against` (of all vendors without one) over ours; `met`:
whether it reaches `goal`. Each call is compared with the exact result before it is timed, as in the suite `kernels` of `attnops bench`.
`first_uses`: the first call of a kind in a fresh process with an empty cache, less its second.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from common import arguments, candidates, clock_of, measure_all, why

from attnops.bench import Setup, kernels
from attnops.bench.rows import Row
from attnops.bench.vendors import DECODE, EXTEND as PROMPTS, LATENT as LATENTS, flashinfer_paged
from attnops.inputs import Call, Pool, build
from attnops.kernel import kernels_of
from attnops.measured import Shape
from attnops.testing import CASES as CALLS, Features, Source, builders
from attnops.tune import side_by_side
from attnops.tune.clock import Run
from attnops.tune.run import runner
from attnops.tune.shapes import FP8, MLA, PAGED

BUILDS = ("flashinfer", "xqa")  # vendors whose modules are built at first use
# Goals: seconds of a first use, and variants that one attention layer compiles over a run of any lengths (docs/triton.md).
FIRST_USE_S, VARIANTS = 3.0, 12
COPIES = 4096  # tokens of a timed KV write
UNITS = {"bandwidth_tb_s": 1.0, "matmul_tflop_s": 1.0}  # shares of these are TB/s and TFLOP/s


@dataclass(frozen=True)
class Case(kernels.Case):
    """One shape at one size.

    vendors: makers of direct calls. registered: names of kernels. goal: our speed over that of the fastest call whose name holds
    `against`, 0 for no goal.
    """

    goal: float = 0.0
    against: str = ""
    vendors: dict[str, Any] = field(default_factory=dict)
    registered: tuple[str, ...] = ("fa3", "flashinfer", "xqa")

    @property
    def compiled_as(self) -> tuple[Shape, str]:
        """Equal for cases that share their compiled code, but for tiles and splits."""
        return self.shape, str(self.more)

    def small(self, pool: Pool) -> Call:
        """A call of the same compiled code that can be checked against the exact result."""
        lens = [(1, 900), (1, 70)] if self.queries == 1 else [(300, 300 + min(self.keys - self.queries, 400))]
        return build(self.shape, [q for q, _ in lens], [k for _, k in lens], pool).with_(**dict(self.more))


STEP = replace(PAGED, decode=True)
H16, H128 = replace(MLA, q_heads=16, decode=True), replace(MLA, decode=True)
CORES = partial(flashinfer_paged, kind="Decode", use_tensor_cores=False)
PREFILL_FA3, TENSOR = partial(flashinfer_paged, kind="Prefill", backend="fa3"), DECODE["flashinfer_tensor_cores"]
PLAIN: dict[str, Any] = {"against": "fa3", "vendors": {"fa3": DECODE["fa3"], "flashinfer_cores": CORES, "flashinfer_tensor": TENSOR}}
LATENT: dict[str, Any] = {
    "against": "flashmla", "vendors": {n: LATENTS[n] for n in ("flashmla", "flashinfer_fa3")}, "registered": ("fa3", "flashmla"),
}  # fmt: skip
EXTEND: dict[str, Any] = {
    "against": "fa3", "vendors": {"fa3": PROMPTS["fa3"], "flashinfer_fa3": PREFILL_FA3}, "registered": ("fa3",),
}  # fmt: skip
FEATURES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "softcap": (STEP, {"softcap": 30.0}), "sinks": (replace(STEP, sinks=True), {}), "window": (replace(STEP, window=1023), {}),
    "fp8": (replace(STEP, **FP8), {}),
}  # fmt: skip
CASES: dict[str, Case] = {
    "decode_1x8192": Case("", STEP, 1, 1, 8192, goal=1.3, **PLAIN),
    "decode_64x4096": Case("", STEP, 64, 1, 4096, goal=0.95, **PLAIN),
    "mla16_64x8192": Case("", H16, 64, 1, 8192, goal=0.85, **LATENT),
    "mla128_64x8192": Case("", H128, 64, 1, 8192, goal=0.6, **LATENT),
    "extend_2048_on_8192": Case("", PAGED, 1, 2048, 10240, goal=0.6, **EXTEND),
    "decode_8x4096": Case("", STEP, 8, 1, 4096, goal=1.0, **PLAIN),
    "decode_1x32768": Case("", STEP, 1, 1, 32768, goal=1.3, **PLAIN),
    "extend_8192_on_0": Case("", PAGED, 1, 8192, 8192, **EXTEND),
    "mla16_1x8192": Case("", H16, 1, 1, 8192, **LATENT),
    "mla128_1x8192": Case("", H128, 1, 1, 8192, **LATENT),
    **{f"{n}_8x4096": Case("", s, 8, 1, 4096, "", tuple(more.items()), goal=0.9) for n, (s, more) in FEATURES.items()},
    **{f"{n}_64x4096": Case("", s, 64, 1, 4096, "", tuple(more.items()), goal=0.9) for n, (s, more) in FEATURES.items()},
}


def rows_of(case: Case, pool: Pool, late: set[Any], ours: Mapping[str, Callable[[Call], Run]] = MappingProxyType({})) -> dict[str, Row]:
    """The rows of a case by call, as the suite `kernels` has them: ours, `op.*` of vendors' kernels, `direct.*` as the vendor has them.

    late: kinds of cases and vendors whose modules were not built in time. ours: more of our calls instead of `triton`.
    """
    registered = [vendor for vendor in case.registered if (case.compiled_as, vendor) not in late]
    others = {f"direct.{name}": make for name, make in case.vendors.items()} | dict(ours)
    names = (*registered, *(() if ours else ("triton",)))
    rows = kernels.measure(Setup(pool.device, ceilings=UNITS), pool, case, names, others)
    return {f"op.{row['way']}" if row["way"] in registered else row["way"]: row for row in rows if row["way"] != "automatic"}


def measure(name: str, pool: Pool, late: set[Any]) -> dict[str, Any]:
    """One case's figures. Raises AssertionError for wrong numbers."""
    case, found = CASES[name], rows_of(CASES[name], pool, late)
    left_out, ours = {n: row["wrong"] for n, row in found.items() if "wrong" in row}, found["triton"]
    assert "triton" not in left_out, left_out["triton"]
    times = {n: {"median_us": row["median_us"], "spread_us": row["spread_us"]} for n, row in found.items() if "wrong" not in row}
    share = round(ours["error"] / ours["budget"], 4)
    return {"us": times, "left_out": left_out, "worst_share_of_budget": share, **speeds(case, times)}


def speeds(case: Case, times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Our speed against the vendors', and against the goal."""
    us = {n: t["median_us"] for n, t in times.items()}
    ours, vendors = us["triton"], {n: t for n, t in us.items() if n != "triton"}
    out: dict[str, Any] = {"tb_s": round(case.work.bytes / ours / 1e6, 3), "tflop_s": round(case.work.flops / ours / 1e6, 1)}
    if vendors:
        best = min(vendors, key=lambda n: vendors[n])
        out |= {"best": best, "speed_of_best": round(vendors[best] / ours, 3)}
    rivals = [t for n, t in vendors.items() if case.against in n]
    return out | (met(case.against or "all", min(rivals) / ours, case.goal) if case.goal and rivals else {})


def met(against: str, speed: float, goal: float) -> dict[str, Any]:
    """A speed beside its goal."""
    return {"against": against, "speed": round(speed, 3), "goal": goal, "met": speed >= goal}


def copies(clock: Any) -> dict[str, Any]:
    """A KV write of 8 heads of 128 numbers against a copy of as many bytes."""
    slots = torch.randperm(COPIES * 4).tolist()[:COPIES]
    call = builders.write(Source(0, "cuda"), slots, COPIES // 4, 16, Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8))
    key, value, at = (call.arguments[n] for n in ("key", "value", "slots"))
    usable = [k for k in kernels_of("write_kv").values() if not k.refusals(call.problem)]
    runs: dict[str, Run] = {("" if k.name == "triton" else "op.") + k.name: partial(k.run, call.record) for k in usable}
    runs["triton"]()
    for pages, rows in (("k_pages", key), ("v_pages", value)):
        assert torch.equal(call.arguments[pages].flatten(0, 1)[at], rows), f"{pages} does not hold the rows that were written"
    both = torch.stack([key, value])
    target = torch.empty_like(both)
    times = clock.spreads({"copy": lambda: target.copy_(both), **runs})
    return {"us": times, **met("copy", times["copy"]["median_us"] / times["triton"]["median_us"], 0.85)}


# In worker processes ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def first_uses(cache: str) -> dict[str, float]:
    """Seconds of the first call of each kind, less its second; both stages if there are two."""
    os.environ["TRITON_CACHE_DIR"] = cache
    calls: dict[str, Call] = {n: CASES[n].small(Pool("cuda")) for n in CASES if not n.endswith("64x4096") or n == "decode_64x4096"}
    calls["decode_64x4096"] = build(CASES["decode_64x4096"].shape, [1] * 64, [256] * 64, Pool("cuda"))
    for op in CALLS:
        if op not in ("paged_attention", "mla_attention") and "triton" in kernels_of(op):
            calls[op] = CALLS[op][0].call(0, "cuda")
    taken = {}
    for name, call in calls.items():
        kernel, times = kernels_of(call.op)["triton"], []
        if kernel.refusals(call.problem):
            continue
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            kernel.run(call.record)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        taken[name] = round(times[0] - times[1], 2)
    return taken


@torch.no_grad()
def variants(cache: str) -> dict[str, int]:
    """The number of variants that one layer compiles over prompts, batches and contexts of many lengths."""
    os.environ["TRITON_CACHE_DIR"] = cache
    from attnops.kernels.triton.device.attend import attend
    from attnops.kernels.triton.device.merge import combine

    f = Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
    for queries in (1, 2, 7, 8, 33, 65, 300):
        for requests in (1, 2, 5, 16, 64):
            for keys in (300, 1100, 4096):
                call = builders.paged(Source(0, "cuda"), (queries,) * requests, (keys,) * requests, 16, f)
                kernels_of("paged_attention")["triton"].run(call.record)
    return {n: len(k.device_caches[torch.cuda.current_device()][0]) for n, k in {"attend": attend, "combine": combine}.items()}


@torch.no_grad()
def build_one(name: str, vendor: str) -> None:
    """Build a vendor's module for a case, if it has one."""
    for kernel, given in candidates(CASES[name].small(Pool("cuda")), names=(vendor,)):
        runner(kernel, given)()
        torch.cuda.synchronize()


def main() -> int:
    given = arguments(__doc__, budget_s=180.0).parse_args()
    todo = {(case.compiled_as, vendor): name for name, case in CASES.items() for vendor in case.registered if vendor in BUILDS}
    built = side_by_side({job: (build_one, (name, job[1])) for job, name in todo.items()}, len(todo), 0.5 * given.budget_s)
    late = {job for job, result in built.items() if result is not None}
    print("without", sorted(f"{todo[job]}: {job[1]}" for job in late), flush=True)
    clock, pool = clock_of("cuda"), Pool("cuda")
    pool.reserve(torch.bfloat16, 1 << 30)
    jobs: list[Any] = [("cases", name, partial(measure, name, pool, late)) for name in CASES]
    jobs.append(("cases", f"write_kv_{COPIES}", partial(copies, clock)))

    def brief(found: dict[str, Any]) -> dict[str, Any]:
        return {n: found[n] for n in ("speed_of_best", "best", "speed", "goal", "met", "tb_s", "tflop_s") if n in found}

    def finish(report: dict[str, Any]) -> dict[str, Any]:
        goals = {"first_uses": FIRST_USE_S, "variants": VARIANTS}
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            found = side_by_side({"first_uses": (first_uses, (one,)), "variants": (variants, (other,))}, 1, 120.0)
        report["failed"] |= {n: why(f) for n, f in found.items() if isinstance(f, BaseException)}
        report |= {n: f for n, f in found.items() if not isinstance(f, BaseException)}
        missed = sorted(n for n, f in report["cases"].items() if f.get("met") is False)
        missed += [f"{figure} of {n}" for figure, goal in goals.items() for n, x in report.get(figure, {}).items() if x > goal]
        return report | {"missed": missed}

    return measure_all(jobs, {"launch_us": round(clock.launch_us, 2)}, "triton.json", "cuda", given.budget_s, brief, finish)


if __name__ == "__main__":
    raise SystemExit(main())
