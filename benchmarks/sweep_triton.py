"""Times launch configurations of our Triton kernels, vendors' kernels beside them, to fill the table of `launch/grids.py`. CUDA only.

    python benchmarks/sweep_triton.py [--budget-s 200] [--case decode_1x8192,...] [--top 10]

Worker processes compile the configurations into Triton's cache. Each is then compared with the exact result and timed as in the suite
`kernels` of `attnops bench`. Prints a line a configuration, fastest first, and writes sweep.json after every case.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import arguments, clock_of, measure_all, why
from triton_vendors import CASES, FEATURES, build_one, rows_of

from attnops.inputs import Call, Pool
from attnops.kernel import Kernel, kernels_of
from attnops.kernels.triton.launch.grids import Choice, Tile
from attnops.tune import side_by_side
from attnops.tune.clock import Run

WORKERS = 14
COMPILING = 0.5  # the share of the budget after which configurations that are not compiled are left out
LATE = "not compiled in time"
OURS = Choice(Tile(0, 0, 0, 0))  # marks the way that leaves the choice to grids.py

# Rows, keys, warps and stages, and sometimes registers.
TILES = {
    name: [Tile(*map(int, tile.split("x"))) for tile in text.split()]
    for name, text in {
        "decode": (
            "16x64x4x3 16x64x4x2 16x64x4x4 16x64x2x2 16x64x2x3 16x64x8x3 16x32x4x3 16x32x4x4 16x32x4x5 16x32x2x3 16x32x2x4 "
            "16x16x1x5 16x32x1x3 16x16x2x5 16x16x2x4 16x16x2x6 16x128x4x2 16x128x4x3 16x128x8x2 16x128x8x3 16x64x4x3x128 "
        ),
        "latent16": (
            "16x32x4x2 16x32x4x3 16x32x4x4 16x32x8x2 16x32x8x3 16x64x4x2 16x64x4x3 16x64x8x2 16x64x8x3 16x16x4x4 16x16x2x4 16x64x4x2x128 "
        ),
        "latent128": ("64x64x8x2 64x32x8x2 64x32x8x3 64x32x16x3 64x64x16x2 32x32x8x2 32x32x8x3 32x32x4x2 32x64x8x2 32x64x4x2 16x64x8x2 "),
        "extend": (
            "128x64x8x3 128x64x8x2 128x64x8x4 128x128x8x2 128x32x8x3 128x32x8x4 64x64x4x2 64x64x4x3 64x32x4x3 64x32x4x4 64x128x4x2 "
            "64x128x8x2 64x64x4x3x224 256x64x8x2 256x64x16x2 256x64x16x3 "
        ),
        "few": ("16x64x4x3 16x64x4x2 16x32x4x3 16x32x4x4 16x128x4x2 16x128x8x2 16x64x2x2 16x16x2x5 "),
    }.items()
}

# Tiles and numbers of splits, each with each.
TRIED: dict[str, tuple[str, tuple[int, ...]]] = {
    "decode_1x8192": ("decode", (16, 32, 64, 128)),
    "decode_64x4096": ("decode", (1, 2, 3, 4, 8)),
    "mla16_64x8192": ("latent16", (2, 4, 6, 8, 16)),
    "mla128_64x8192": ("latent128", (1, 2, 4)),
    "extend_2048_on_8192": ("extend", (1,)),
    "decode_8x4096": ("decode", (2, 4, 6, 8, 16)),
    "decode_1x32768": ("decode", (16, 33, 49, 66, 128)),
    "extend_8192_on_0": ("extend", (1,)),
    "mla16_1x8192": ("latent16", (32, 64, 128)),
    "mla128_1x8192": ("latent128", (16, 33, 66)),
    **{f"{n}_8x4096": ("few", (2, 4, 8)) for n in FEATURES},
    **{f"{n}_64x4096": ("few", (1, 2, 4)) for n in FEATURES},
}


def choices_of(name: str) -> list[Choice]:
    """The configurations of a case: every tile with every number of splits."""
    kind, splits = TRIED[name]
    tiles = TILES[kind] + [Tile(16, 64, 8, 2), Tile(16, 64, 8, 3), Tile(16, 128, 4, 3)] * name.startswith("fp8")
    found = [OURS, *(Choice(tile, n) for tile in tiles for n in splits)]
    # The gain of launching stage two early, once a size.
    return [*found, *(Choice(tiles[0], n, overlap=False) for n in splits if n > 1)]


# Compiling ------------------------------------------------------------------------------------------------------------


def chosen(call: Call, choice: Choice) -> Kernel:
    """`triton`, launched with `choice`."""
    from attnops.kernels.triton.launch.attention import attention

    kernel = kernels_of(call.op)["triton"]
    return kernel if choice == OURS else replace(kernel, run=lambda call: attention(call, choice))


@contextlib.contextmanager
def recorded(found: list[Any]) -> Iterator[None]:
    """Let the kernels' `run` compile without launching."""
    from attnops.kernels.triton.launch import attention as host
    from attnops.kernels.triton.launch.gpu import OPTIONS

    def compiled(kernel: Any, grid: Any, given: dict[str, Any], args: tuple[Any, ...] = (), warps: int = 4) -> None:
        found.append(kernel.warmup(*args, grid=grid, **given, num_warps=warps, **OPTIONS))

    before, host.launch = host.launch, compiled
    try:
        yield
    finally:
        host.launch = before


def compile_choice(call: Call, choice: Choice) -> list[Any]:
    found: list[Any] = []
    with recorded(found):
        chosen(call, choice).run(call.record)
    return found


def in_worker(name: str, choice: Choice) -> None:
    """Compile a configuration into Triton's cache."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ptxas prints a whole module where it fails
    # The choice of grids.py depends on the sizes.
    compile_choice(CASES[name].call(Pool("cuda")) if choice == OURS else CASES[name].small(Pool("cuda")), choice)


def compile_all(names: list[str], limit_s: float) -> dict[Any, str]:
    """By kind of case and configuration (or vendor): why it did not compile in time."""
    jobs: dict[Any, Any] = {}
    for name in names:
        case = CASES[name]
        for vendor in set(case.registered) - {"fa3"}:
            jobs.setdefault((*case.compiled_as, vendor), (build_one, (name, vendor)))
    for name in names:
        case = CASES[name]
        for choice in choices_of(name):
            # The code depends on whether there are splits, and for grids.py's choice on the sizes.
            size = (case.batch, case.keys) if choice == OURS else ()
            jobs.setdefault((*case.compiled_as, choice.tile, (min(choice.splits, 2), choice.overlap), size), (in_worker, (name, choice)))
    found = side_by_side(jobs, WORKERS, limit_s)
    return {kind: LATE if isinstance(e, TimeoutError) else why(e) for kind, e in found.items() if isinstance(e, Exception)}


# Timing ---------------------------------------------------------------------------------------------------------------


def label(choice: Choice) -> str:
    t = choice.tile
    if choice == OURS:
        return "as in grids.py"
    return f"{t.rows}x{t.keys} w{t.warps} s{t.stages} r{t.registers} n{choice.splits}{'' if choice.overlap else ' in turn'}"


def figures_of(compiled: list[Any]) -> dict[str, Any]:
    """Registers, spills and shared bytes of stage one, and of stage two if there is one."""
    out: dict[str, Any] = {}
    for stage, kernel in zip(("attend", "combine"), compiled, strict=False):
        kernel._init_handles()
        out[stage] = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    return out


def measure(name: str, pool: Pool, failed: dict[Any, str]) -> dict[str, Any]:
    case, compiled = CASES[name], dict[str, Any]()
    late = {kind[2] for kind, reason in failed.items() if kind[:2] == case.compiled_as and (len(kind) == 3 or reason == LATE)}

    def made(choice: Choice, call: Call) -> Run:
        compiled[label(choice)] = figures_of(compile_choice(call, choice))
        return partial(chosen(call, choice).run, call.record)

    ours = {label(choice): partial(made, choice) for choice in choices_of(name) if choice.tile not in late}
    found = rows_of(case, pool, {(case.compiled_as, vendor) for vendor in late}, ours)
    right = {n: row for n, row in found.items() if "wrong" not in row}
    rows = [{"name": n, "us": row["median_us"], "tb_s": round(row["of_bandwidth"], 3), **compiled.get(n, {})} for n, row in right.items()]
    left_out = {label(choice): LATE for choice in choices_of(name) if choice.tile in late}
    left_out |= {n: row["wrong"] for n, row in found.items() if "wrong" in row}
    worst = {n: round(row["error"] / row["budget"], 3) for n, row in right.items()}
    return {"rows": sorted(rows, key=lambda r: r["us"]), "left_out": left_out, "worst": worst}


def brief(found: dict[str, Any], top: int) -> str:
    """The best vendor, and the fastest configurations."""
    vendors, ours = ([r for r in found["rows"] if r["name"].startswith(("direct.", "op.")) == theirs] for theirs in (True, False))
    vendor = min((r["us"] for r in vendors), default=float("nan"))
    shown = [r for i, r in enumerate(ours) if i < top or r["name"] == label(OURS)]
    lines = [f"{r['us']:9.2f} us  {vendor / r['us']:5.2f} of the vendor's speed  {r['tb_s']:6.3f} TB/s  {r['name']}" for r in shown]
    return "\n".join([f"best vendor {vendor:.2f} us", *lines, *(f"   left out: {who}: {why}" for who, why in found["left_out"].items())])


def main() -> int:
    parser = arguments(__doc__, budget_s=200.0)
    parser.add_argument("--case", default="", help="some of the cases, with commas; all by default")
    parser.add_argument("--top", type=int, default=10, help="how many of ours are printed; sweep.json has all")
    given = parser.parse_args()
    names = given.case.split(",") if given.case else list(CASES)
    if unknown := set(names) - CASES.keys():
        parser.error(f"case: got {', '.join(sorted(unknown))}, want {', '.join(CASES)}")
    failed = compile_all(names, COMPILING * given.budget_s)
    print(*(f"{kind[0].op} {kind[1:]}: {reason}" for kind, reason in list(failed.items())[:40]), sep="\n", flush=True)
    pool, head = Pool("cuda"), {"launch_us": round(clock_of("cuda").launch_us, 2)}
    pool.reserve(torch.bfloat16, 1 << 30)
    jobs = [("cases", name, partial(measure, name, pool, failed)) for name in names]
    return measure_all(jobs, head, "sweep.json", "cuda", (1 - COMPILING) * given.budget_s, partial(brief, top=given.top))


if __name__ == "__main__":
    raise SystemExit(main())
