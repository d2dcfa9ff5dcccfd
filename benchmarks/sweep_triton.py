"""Times launch configurations of our Triton kernels, the vendors' kernels beside them, to fill the table of `_triton/plan.py`. CUDA only.

    python benchmarks/sweep_triton.py [--budget-s 200] [--case decode_1x8192,...] [--top 10]

Configurations are compiled by processes side by side into Triton's cache, then each is checked (the op's budget on a small call, the
first vendor's numbers on the call itself) and timed: CUDA graph replays in turn, the L2 cache flushed before each, medians of 25 rounds.
Prints a line a configuration, fastest first, and writes sweep.json after every case, so that a cut run leaves data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from common import environment, write
from direct import why
from triton_cases import CASES, FEATURES, NEAR, error_of, expected_of, is_vendor, vendors_of

from attnops.inputs import Pool
from attnops.kernel import Kernel, kernels_of
from attnops.kernels._triton.plan import Choice, Tile
from attnops.testing import Call, check_kernel
from attnops.tune import Stopwatch
from attnops.tune.clock import GraphClock
from attnops.tune.timing import runner

WORKERS = 14
COMPILING = 0.5
"""The share of the budget after which what is not compiled is left out."""

LATE = "not compiled in time"

OURS = Choice(Tile(0, 0, 0, 0))
"""Stands for what plan.py says now."""

DECODE_TILES = [
    Tile(16, 64, 4, 3), Tile(16, 64, 4, 2), Tile(16, 64, 4, 4), Tile(16, 64, 2, 2), Tile(16, 64, 2, 3), Tile(16, 64, 8, 3),
    Tile(16, 32, 4, 3), Tile(16, 32, 4, 4), Tile(16, 32, 4, 5), Tile(16, 32, 2, 3), Tile(16, 32, 2, 4), Tile(16, 16, 1, 5),
    Tile(16, 32, 1, 3), Tile(16, 16, 2, 5), Tile(16, 16, 2, 4), Tile(16, 16, 2, 6), Tile(16, 128, 4, 2),
    Tile(16, 128, 4, 3), Tile(16, 128, 8, 2), Tile(16, 128, 8, 3), Tile(16, 64, 4, 3, 128),
]  # fmt: skip
LATENT_16 = [
    Tile(16, 32, 4, 2), Tile(16, 32, 4, 3), Tile(16, 32, 4, 4), Tile(16, 32, 8, 2), Tile(16, 32, 8, 3), Tile(16, 64, 4, 2),
    Tile(16, 64, 4, 3), Tile(16, 64, 8, 2), Tile(16, 64, 8, 3), Tile(16, 16, 4, 4), Tile(16, 16, 2, 4), Tile(16, 64, 4, 2, 128),
]  # fmt: skip
LATENT_128 = [
    Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 3), Tile(64, 32, 16, 3), Tile(64, 64, 16, 2), Tile(32, 32, 8, 2),
    Tile(32, 32, 8, 3), Tile(32, 32, 4, 2), Tile(32, 64, 8, 2), Tile(32, 64, 4, 2), Tile(16, 64, 8, 2),
]  # fmt: skip
EXTEND_TILES = [
    Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 4), Tile(128, 128, 8, 2), Tile(128, 32, 8, 3), Tile(128, 32, 8, 4),
    Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 32, 4, 4), Tile(64, 128, 4, 2), Tile(64, 128, 8, 2),
    Tile(64, 64, 4, 3, 224), Tile(256, 64, 8, 2), Tile(256, 64, 16, 2), Tile(256, 64, 16, 3),
]  # fmt: skip
FEW = [
    Tile(16, 64, 4, 3), Tile(16, 64, 4, 2), Tile(16, 32, 4, 3), Tile(16, 32, 4, 4), Tile(16, 128, 4, 2), Tile(16, 128, 8, 2),
    Tile(16, 64, 2, 2), Tile(16, 16, 2, 5),
]  # fmt: skip
FEW_8 = [*FEW, Tile(16, 64, 8, 2), Tile(16, 64, 8, 3), Tile(16, 128, 4, 3)]
TRIED: dict[str, tuple[list[Tile], tuple[int, ...]]] = {
    "decode_1x8192": (DECODE_TILES, (16, 32, 64, 128)),
    "decode_64x4096": (DECODE_TILES, (1, 2, 3, 4, 8)),
    "mla16_64x8192": (LATENT_16, (2, 4, 6, 8, 16)),
    "mla128_64x8192": (LATENT_128, (1, 2, 4)),
    "extend_2048_on_8192": (EXTEND_TILES, (1,)),
    "decode_8x4096": (DECODE_TILES, (2, 4, 6, 8, 16)),
    "decode_1x32768": (DECODE_TILES, (16, 33, 49, 66, 128)),
    "extend_8192_on_0": (EXTEND_TILES, (1,)),
    "mla16_1x8192": (LATENT_16, (32, 64, 128)),
    "mla128_1x8192": (LATENT_128, (16, 33, 66)),
    **{f"{n}_8x4096": (FEW_8 if n == "fp8" else FEW, (2, 4, 8)) for n in FEATURES},
    **{f"{n}_64x4096": (FEW_8 if n == "fp8" else FEW, (1, 2, 4)) for n in FEATURES},
}
"""Tiles and numbers of splits, each with each."""


def choices_of(name: str) -> list[Choice]:
    """What is tried for a case."""
    tiles, splits = TRIED[name]
    found = [OURS, *(Choice(tile, n) for tile in tiles for n in splits)]
    # What launching stage two early is worth, once a size.
    return [*found, *(Choice(tiles[0], n, overlap=False) for n in splits if n > 1)]


# Compiling ------------------------------------------------------------------------------------------------------------


def chosen(call: Call, choice: Choice) -> Kernel:
    """`triton`, to launch `choice`."""
    kernel = kernels_of(call.op)["triton"]
    return kernel if choice == OURS else replace(kernel, run=partial(kernel.run, choice=choice))


@contextlib.contextmanager
def recorded(found: list[Any]) -> Iterator[None]:
    """Within, the kernels' `run` compiles what it would launch, and launches nothing."""
    from attnops.kernels._triton import call as host

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: found.append(self.kernel.warmup(grid=grid, **given))

    before = host.attend, host.combine
    host.attend, host.combine = (Compiled(k) for k in before)
    try:
        yield
    finally:
        host.attend, host.combine = before


def compile_choice(call: Call, choice: Choice) -> list[Any]:
    found: list[Any] = []
    with recorded(found):
        chosen(call, choice).run(*call.args, **call.kwargs)
    return found


def in_worker(name: str, choice: Choice | None, vendor: str = "") -> float:
    """Seconds that it took to have a configuration in Triton's cache, or a vendor's module built."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ptxas prints a whole module where it fails
    os.dup2(2, 1)
    start, pool = time.perf_counter(), Pool("cuda")
    # What plan.py says follows from the sizes.
    call = CASES[name].call(pool) if choice == OURS else CASES[name].small(pool)
    if choice is not None:
        compile_choice(call, choice)
    for kernel, mine, _ in Stopwatch(lambda *_: 0.0, names=(vendor,)).candidates(call) if vendor else ():
        runner(kernel, mine)()
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compile_all(names: list[str], until: float) -> tuple[dict[Any, str], dict[str, float]]:
    """(what did not compile or not in time, with the reason; seconds of the vendors' builds)."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(WORKERS, context)
    jobs: dict[Future[float], Any] = {}
    seen: dict[Any, Any] = {}
    for name in names:
        for vendor in set(CASES[name].kernels) - {"fa3"}:
            kind = (*CASES[name].kind, vendor)
            if kind not in seen:
                seen[kind] = (name, vendor)
                jobs[pool.submit(in_worker, name, None, vendor)] = kind
    for name in names:
        for choice in choices_of(name):
            # Sizes are not compiled for; whether there are splits is.
            size = (CASES[name].batch, CASES[name].keys) if choice == OURS else ()
            kind = (*CASES[name].kind, choice.tile, (min(choice.splits, 2), choice.overlap), size)
            if kind not in seen:
                seen[kind] = (name, choice)
                jobs[pool.submit(in_worker, name, choice)] = kind
    done, late = wait(jobs, timeout=max(1.0, until - time.monotonic()))
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()  # what still compiles would disturb the clock
    failed = dict.fromkeys((jobs[f] for f in late), LATE)
    built = {}
    for f in done:
        if error := f.exception():
            failed[jobs[f]] = why(error if isinstance(error, Exception) else RuntimeError(str(error)))
        elif len(jobs[f]) == 3:
            built[" ".join(seen[jobs[f]])] = round(f.result(), 1)
    return failed, built


# Timing ---------------------------------------------------------------------------------------------------------------


def label(choice: Choice) -> str:
    t = choice.tile
    if choice == OURS:
        return "as in plan.py"
    return f"{t.rows}x{t.keys} w{t.warps} s{t.stages} r{t.registers} n{choice.splits}{'' if choice.overlap else ' in turn'}"


def figures_of(compiled: list[Any]) -> dict[str, Any]:
    """Registers, spills and shared bytes of stage one, and of stage two where there is one."""
    out: dict[str, Any] = {}
    for stage, kernel in zip(("attend", "combine"), compiled, strict=False):
        kernel._init_handles()
        out[stage] = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    return out


def measure(name: str, pool: Pool, small: Pool, clock: GraphClock, failed: dict[Any, str]) -> dict[str, Any]:
    case = CASES[name]
    call, little = case.call(pool), case.small(small)
    missing = {kind[2] for kind in failed if len(kind) == 3 and kind[:2] == case.kind}
    runs, left_out = vendors_of(case, call, missing)
    expected = expected_of(call)
    late = {kind[2] for kind, reason in failed.items() if kind[:2] == case.kind and reason == LATE}
    checked, compiled = {}, {}
    for choice in choices_of(name):
        who = label(choice)
        if choice.tile in late:
            left_out[who] = LATE
            continue
        try:
            compiled[who] = figures_of(compile_choice(call, choice))
            kind = (choice.tile, choice.splits > 1, choice.overlap)
            if kind not in checked:
                few = choice if choice == OURS else choice._replace(splits=min(choice.splits, 5))
                checked[kind] = check_kernel(chosen(little, few), little)
            run = partial(chosen(call, choice).run, *call.args, **call.kwargs)
            if expected and not (error := error_of(call, run, expected[1])) < NEAR:
                left_out[who] = f"WRONG: {error:.3f} of the largest value from {expected[0]}"
                continue
            runs[who] = run
        except torch.AcceleratorError:  # the device is lost
            raise
        except Exception as error:
            left_out[who] = why(error)
    times = {n: round(median(us), 2) for n, us in clock.in_turn(runs).items()}
    rows = [{"name": n, "us": us, "tb_s": round(case.bytes / us / 1e6, 3), **compiled.get(n, {})} for n, us in times.items()]
    worst = {str(kind): round(figures.worst, 3) for kind, figures in checked.items()}
    return {"rows": sorted(rows, key=lambda r: r["us"]), "left_out": left_out, "worst": worst}


def show(name: str, found: dict[str, Any], top: int) -> None:
    rows = found["rows"]
    vendor = min((r["us"] for r in rows if is_vendor(r["name"])), default=float("nan"))
    print(f"\n== {name}: best vendor {vendor:.2f} us")
    shown = 0
    for r in rows:
        ours = not is_vendor(r["name"])
        shown += ours
        if ours and shown > top and r["name"] != label(OURS):
            continue
        a = r.get("attend", {})
        more = f"{a.get('registers')} regs {a.get('spills')} spills {a.get('shared')} B" if a else ""
        print(f"{r['us']:9.2f} us  {vendor / r['us']:5.2f} of the vendor's speed  {r['tb_s']:6.3f} TB/s  {r['name']:28} {more}")
    for who, reason in found["left_out"].items():
        print(f"   left out: {who}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--case", default="", help="some of the cases, with commas; all by default")
    parser.add_argument("--top", type=int, default=10, help="how many of ours are printed; sweep.json has all")
    given = parser.parse_args()
    start = time.monotonic()
    names = given.case.split(",") if given.case else list(CASES)
    if unknown := set(names) - CASES.keys():
        parser.error(f"case: got {', '.join(sorted(unknown))}, want {', '.join(CASES)}")
    failed, built = compile_all(names, start + COMPILING * given.budget_s)
    compiled_s = round(time.monotonic() - start, 1)
    print(f"compiled in {compiled_s} s; vendors' builds {built}; {len(failed)} failed or late", flush=True)
    for kind, reason in list(failed.items())[:40]:
        print("  ", kind[0].op, *kind[1:], reason)
    clock, pool, small = GraphClock("cuda"), Pool("cuda"), Pool("cuda", 1)
    pool.reserve(torch.bfloat16, 1 << 30)
    report: dict[str, Any] = {**environment("cuda"), "compiled_s": compiled_s, "cases": {}, "failed": {}}
    report["launch_us"] = round(clock.launch_us, 2)
    path = write(report, "sweep.json", "cuda")
    with torch.no_grad():
        for name in names:
            if time.monotonic() - start > given.budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                report["cases"][name] = measure(name, pool, small, clock, failed)
                show(name, report["cases"][name], given.top)
            except Exception as error:  # the other cases stand
                traceback.print_exc()
                report["failed"][name] = why(error)
            report["seconds"] = round(time.monotonic() - start, 1)
            path = write(report, "sweep.json", "cuda")
            print(end="", flush=True)
    print(json.dumps(report["failed"]), path)
    return 0 if report["cases"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
