"""Our Triton kernels against the vendors' fastest for each shape, what their first use costs and how many are compiled. CUDA only.

    python benchmarks/triton_vendors.py [--device cuda] [--budget-s 180]

Writes triton.json. `us`: medians of 25 CUDA graph replays in turn, the L2 cache flushed before each, the start of a graph (`launch_us`)
included for all. `speed`: the time of the fastest call of a vendor whose name holds `against` (of all vendors without one) over ours; `met`
says whether it reaches `goal`. Each call is checked before it is timed: a small one of its kind within the op's budget of the exact result,
the timed one against a vendor's numbers. `first_use_s`: the first call of a kind in a fresh process with an empty cache, above its second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import default_device, environment, spread, write
from direct import why
from triton_cases import CASES, NEAR, Case, error_of, expected_of, is_vendor, vendors_of

from attnops.inputs import Pool, build
from attnops.kernel import kernels_of
from attnops.testing import CASES as CALLS
from attnops.testing import Call, Features, Source, builders, check_kernel
from attnops.tune import Stopwatch
from attnops.tune.clock import GraphClock
from attnops.tune.timing import runner

BUILDS = ("flashinfer", "xqa")
"""Vendors whose modules are built at first use."""

FIRST_USE_S = 3.0
VARIANTS = 12
"""Goals: of a first use, and of what one attention layer compiles over a run of any lengths (docs/triton.md)."""

COPIES = 4096
"""Tokens of a timed KV write."""


def measure(name: str, pool: Pool, small: Pool, clock: GraphClock, late: set[Any]) -> dict[str, Any]:
    """One case's figures. Raises AssertionError where the numbers are wrong."""
    case, kernel = CASES[name], kernels_of(CASES[name].shape.op)["triton"]
    call, little = case.call(pool), case.small(small)
    figures = check_kernel(kernel, little)
    assert not figures.refused, figures
    runs, left_out = vendors_of(case, call, {vendor for kind, vendor in late if kind == case.kind})
    ours = partial(kernel.run, *call.args, **call.kwargs)
    expected = expected_of(call)
    if expected is not None and expected[0] != "triton":
        error = error_of(call, ours, expected[1])
        assert error < NEAR, f"{error:.3f} of the largest value from {expected[0]}"
    times = {n: spread(us) for n, us in clock.in_turn({"triton": ours, **runs}).items()}
    return {"us": times, "left_out": left_out, "worst_share_of_budget": round(figures.worst, 4), **judged(case, times)}


def judged(case: Case, times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Our speed against the vendors', and whether it is what is aimed at."""
    vendors = {n: t["median_us"] for n, t in times.items() if is_vendor(n)}
    ours = times["triton"]["median_us"]
    out: dict[str, Any] = {"tb_s": round(case.bytes / ours / 1e6, 3), "tflop_s": round(case.flops / ours / 1e6, 1)}
    if vendors:
        best = min(vendors, key=lambda n: vendors[n])
        out |= {"best": best, "speed_of_best": round(vendors[best] / ours, 3)}
    rivals = {n: us for n, us in vendors.items() if case.against in n}
    if case.goal and rivals:
        speed = min(rivals.values()) / ours
        out |= {"against": case.against or "all", "speed": round(speed, 3), "goal": case.goal, "met": speed >= case.goal}
    return out


def copies(clock: GraphClock) -> dict[str, Any]:
    """A KV write of 8 heads of 128 numbers against a copy of as many bytes."""
    kernel = kernels_of("write_kv").get("triton")
    if kernel is None:
        return {}
    slots = torch.randperm(COPIES * 4).tolist()[:COPIES]
    call = builders.write(Source(0, "cuda"), slots, COPIES // 4, 16, Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8))
    key, value, at = (call.arguments[n] for n in ("key", "value", "slots"))
    others = {k.name: k for k in kernels_of("write_kv").values() if k.name != "triton" and not k.refusals(call.problem)}
    kernel.run(*call.args, **call.kwargs)
    for pages, rows in (("k_pages", key), ("v_pages", value)):
        assert torch.equal(call.arguments[pages].flatten(0, 1)[at], rows), f"{pages} does not hold what was written"
    both = torch.stack([key, value])
    target = torch.empty_like(both)
    runs: dict[str, Callable[[], Any]] = {"triton": partial(kernel.run, *call.args, **call.kwargs), "copy": lambda: target.copy_(both)}
    runs |= {f"op.{n}": partial(k.run, *call.args, **call.kwargs) for n, k in others.items()}
    times = {n: spread(us) for n, us in clock.in_turn(runs).items()}
    speed = times["copy"]["median_us"] / times["triton"]["median_us"]
    return {"us": times, "against": "copy", "speed": round(speed, 3), "goal": 0.85, "met": speed >= 0.85}


# In a process of its own ----------------------------------------------------------------------------------------------


def first_uses() -> dict[str, float]:
    """Seconds of the first call of each kind above its second; both stages where there are two."""
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
            kernel.run(*call.args, **call.kwargs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        taken[name] = round(times[0] - times[1], 2)
    return taken


def variants() -> dict[str, int]:
    """What one layer compiles over prompts, batches and contexts of many lengths."""
    from attnops.kernels._triton.device.attend import attend
    from attnops.kernels._triton.device.combine import combine

    kernels = {"attend": attend, "combine": combine}
    device = torch.cuda.current_device()

    def count() -> dict[str, int]:
        return {n: len(k.device_caches[device][0]) for n, k in kernels.items()}

    before = count()
    f = Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
    for queries in (1, 2, 7, 8, 33, 65, 300):
        for requests in (1, 2, 5, 16, 64):
            for keys in (300, 1100, 4096):
                call = builders.paged(Source(0, "cuda"), (queries,) * requests, (keys,) * requests, 16, f)
                kernels_of("paged_attention")["triton"].run(*call.args, **call.kwargs)
    return {n: now - before[n] for n, now in count().items()}


def build_one(name: str, vendor: str) -> bool:
    """Have a vendor's module for a case built, if it builds any."""
    for kernel, call, _ in Stopwatch(lambda *_: 0.0, names=(vendor,)).candidates(CASES[name].small(Pool("cuda"))):
        runner(kernel, call)()
        torch.cuda.synchronize()
    return True


def build_ahead(limit_s: float) -> set[Any]:
    """Have the vendors' modules built side by side. Those (kind of case, vendor) that took too long or failed."""
    todo = {(case.kind, vendor): name for name, case in CASES.items() for vendor in case.kernels if vendor in BUILDS}
    start = time.monotonic()
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, __file__, "--only"]
    running = {kind: subprocess.Popen([*command, f"{name}:{kind[1]}"], **quiet) for kind, name in todo.items()}
    late = set()
    for kind, process in running.items():
        try:
            ok = process.wait(max(1.0, limit_s - (time.monotonic() - start))) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            ok = False
        late |= set() if ok else {kind}
    print(f"vendors' modules in {time.monotonic() - start:.0f} s; without", sorted(f"{todo[k]}: {k[1]}" for k in late), flush=True)
    return late


def alone(what: str) -> Any:
    """`what` of this file in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command, env = [sys.executable, __file__, "--only", what], {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default=default_device())
    parser.add_argument("--budget-s", type=float, default=180.0)
    parser.add_argument("--only", default="", help="first_uses, variants or a case:vendor to build, from this process alone")
    given = parser.parse_args()
    if given.only:
        with torch.no_grad():
            what = {"first_uses": first_uses, "variants": variants}.get(given.only) or partial(build_one, *given.only.split(":"))
            print(json.dumps(what()))
        return 0
    start = time.monotonic()
    late = build_ahead(0.5 * given.budget_s)
    clock, pool, small = GraphClock("cuda"), Pool("cuda"), Pool("cuda", 1)
    pool.reserve(torch.bfloat16, 1 << 30)
    report: dict[str, Any] = {**environment("cuda"), "launch_us": round(clock.launch_us, 2), "cases": {}, "failed": {}}
    parts: dict[str, Callable[[], Any]] = {name: partial(measure, name, pool, small, clock, late) for name in CASES}
    parts[f"write_kv_{COPIES}"] = partial(copies, clock)
    with torch.no_grad():
        for name, part in parts.items():
            if time.monotonic() - start > given.budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                found = report["cases"][name] = part()
                write(report, "triton.json", "cuda")  # a run that is cut short leaves what it had
                told = ("speed_of_best", "best", "speed", "goal", "met", "tb_s", "tflop_s")
                print(f"{name:22}", *(f"{n} {found[n]}" for n in told if n in found), flush=True)
            except Exception as error:  # the other cases stand
                traceback.print_exc()
                report["failed"][name] = why(error)
    for what, goal in (("first_uses", FIRST_USE_S), ("variants", VARIANTS)):
        try:
            report[what] = alone(what)
            print(what, report[what], "want at most", goal, "each")
        except Exception as error:
            report["failed"][what] = why(error)
    report["missed"] = sorted(n for n, found in report["cases"].items() if found.get("met") is False)
    report["missed"] += [f"first use of {n}" for n, s in report.get("first_uses", {}).items() if s > FIRST_USE_S]
    report["missed"] += [f"variants of {n}" for n, count in report.get("variants", {}).items() if count > VARIANTS]
    report["seconds"] = round(time.monotonic() - start, 1)
    print("missed:", report["missed"], "failed:", report["failed"], write(report, "triton.json", "cuda"))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
