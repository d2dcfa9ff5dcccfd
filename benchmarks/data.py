"""The kernels that move data against plain torch ops and a plain copy of as many bytes; writes data.json. CUDA only.

    python benchmarks/data.py [--device cuda] [--budget-s 60] [--no-sweep]

GPU time: replays of CUDA graphs in turn, the L2 cache cleared before each; medians over 25 rounds, the start of a graph (`launch_us`)
included, alike for all. Every result is compared with the reference's bits first; differences are counted (`differs`), and fail `triton`.
`eager`: the reference's torch ops. `compiled`: the same ops by Inductor, lowered in place where the kernel says so, as a
compiled graph holds them. `copy`: `copy_` of half the bytes that the case reads and writes, hence as many bytes in all; `of_copy` is the
bandwidth reached over that one's. `sweep`: tiles beside those of the committed table (attnops/kernels/triton/launch/tiles.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from common import arguments, clock_of, device_kernels, measure_all, why
from torch import Tensor

from attnops.kernel import kernels_of
from attnops.ops import OPS
from attnops.testing import Call, Features, Source, builders, latent
from attnops.testing.check import clone
from attnops.tune.clock import Run

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
LLAMA = Features(dtype=BF16, head_dim=128, kv_heads=8, q_heads=32)
SWEEP = ((1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (16, 8), (1, 2))  # (rows, warps) of a program


@dataclass(frozen=True)
class Case:
    """One point. compiled: with Inductor's code as well, which takes seconds to make. sweep: other tiles too."""

    name: str
    make: Callable[[Source], Call]
    compiled: bool = False
    sweep: bool = False


def slots(source: Source, tokens: int, page: int) -> list[int]:
    """Where tokens go: whole pages in random order, or a page each when they are few, as in a decode step."""
    if tokens <= 64:
        return [p * page + (7 * p) % page for p in source.permutation(tokens)]
    return [p * page + i for p in source.permutation(-(-tokens // page)) for i in range(page)][:tokens]


def kv(tokens: int, page: int = 16, **more: Any) -> Callable[[Source], Call]:
    pages = max(2 * -(-tokens // page), 64)
    return lambda s: builders.write(s, slots(s, tokens, page), pages, page, replace(LLAMA, **more))


def mla(build: Any, tokens: int, **more: Any) -> Callable[[Source], Call]:
    return lambda s: build(s, slots(s, tokens, 64), max(2 * -(-tokens // 64), 64), 64, replace(latent.DEEPSEEK, **more))


def copies(entries: int, layers: int) -> Callable[[Source], Call]:
    return lambda s: builders.copy(s, tuple(enumerate(s.permutation(entries))), layers, -(-entries // 16), 16, LLAMA)


def tables(op: str, batch: int = 64, width: int = 512, page: int = 16) -> Callable[[Source], Call]:
    def make(s: Source) -> Call:
        lens = s.ints([(i * 7919) % (width * page) for i in range(batch)])
        return Call(op, {"page_table": s.ints(s.permutation(batch * width)).reshape(batch, width), "seq_lens": lens, "page_size": page})

    return make


CASES = (
    Case("write_kv 4096", kv(4096), compiled=True, sweep=True),
    Case("write_kv 1", kv(1)),
    Case("write_kv 64", kv(64), compiled=True),
    Case("write_kv 512", kv(512), sweep=True),
    Case("write_kv 4096 float8", kv(4096, kv_dtype=E4M3), compiled=True, sweep=True),
    Case("write_kv 64 float8", kv(64, kv_dtype=E4M3)),
    Case("write_kv 4096 int8", kv(4096, kv_dtype=INT8)),
    Case("write_latent 4096", mla(builders.write_latent, 4096), compiled=True),
    Case("write_latent 64", mla(builders.write_latent, 64)),
    Case("write_latent_packed 4096", mla(builders.write_packed, 4096), compiled=True),
    Case("write_latent_packed 64", mla(builders.write_packed, 64)),
    Case("copy_kv 64 slots, 32 layers", copies(64, 32), compiled=True),
    Case("copy_kv 8 slots, 32 layers", copies(8, 32)),
    Case("copy_kv 256 slots, 32 layers", copies(256, 32)),
    Case("copy_kv 2048 slots, 8 layers", copies(2048, 8)),
    Case("kv_indices 64", tables("kv_indices"), compiled=True),
)


def moved_bytes(call: Call) -> int:
    """The bytes that a case reads and writes at least, without tables of a few kilobytes; 0 for ops that make only tables."""
    t = call.arguments
    if call.op in ("write_kv", "write_latent", "write_latent_packed"):
        new = [t[n] for n in ("key", "value", "latent", "k_pe") if n in t]
        pages = [t[n] for n in ("k_pages", "v_pages", "latent_pages") if n in t]
        return sum(x.nbytes for x in new) + sum(t["slots"].shape[0] * x[0, 0].nbytes for x in pages)
    if call.op == "copy_kv":
        return sum(2 * t["source"].shape[0] * x[:, 0, 0].nbytes for x in (t["k_pages"], t["v_pages"]))
    return 0


def results(call: Call, run: Callable[[Call], Any]) -> list[Tensor]:
    """The bits of the results that a call returns or writes; the call itself is not changed."""
    mine = call.map(lambda _, t: clone(t))
    returned = run(mine)
    values = returned if isinstance(returned, tuple) else (returned,) if returned is not None else [mine.arguments[n] for n in mine.mutated]
    return [x.contiguous().flatten().view(torch.uint8) for x in values]


def way(name: str, like: Call) -> Callable[[Call], Any]:
    """Makes calls through the kernel of this name; `compiled`: the plain torch ops as a compiled graph has them."""
    kernels, op = kernels_of(like.op), OPS[like.op]
    if name != "compiled":
        return lambda c: kernels[name].run(c.record)
    inline = [k for k in kernels.values() if k.inline and not k.refusals(like.problem)]
    policy = f"kernel={like.op}:{inline[0].name}" if inline else ""

    @torch.compile(fullgraph=True, dynamic=False)
    def function(args: Any, kwargs: Any) -> Any:
        return op.packet.default(*args, **kwargs, policy=policy) if policy else op.reference(op.call(*args, **kwargs))

    return lambda c: function(c.args, c.kwargs)


def tiled(call: Call, rows: int, warps: int) -> Run:
    """`triton` with another tile than the table's."""
    from attnops.kernels.triton.launch import tiles

    def run() -> None:
        with mock.patch.object(tiles, "store_tile", lambda *a, before=tiles.store_tile: before(*a)._replace(rows=rows, warps=warps)):
            kernels_of(call.op)["triton"].run(call.record)

    return run


def measure(case: Case, clock: Any, names: tuple[str, ...], sweep: bool, device: str = "cuda") -> dict[str, Any]:
    """One case's figures."""
    torch._dynamo.reset()
    call = case.make(Source(1, device))
    # The timed call writes its tensors again and again; the compared one has its own.
    timed = call.map(lambda _, t: clone(t))
    want, differs, runs, left_out = results(call, way("reference", call)), {}, {}, {}
    for name in names:
        kernel, label = kernels_of(call.op).get(name), "eager" if name == "reference" else name
        if (kernel is None and name != "compiled") or (name == "compiled" and not case.compiled):
            continue
        if kernel is not None and (refused := kernel.refusals(call.problem)):
            left_out[name] = "; ".join(map(str, refused))
            continue
        try:
            make = way(name, call)
            wrong = [int((a != b).sum()) for a, b in zip(results(call, make), want, strict=True)]
            if any(wrong):
                differs[label] = f"{wrong} bytes of {[x.numel() for x in want]}"
            runs[label] = partial(make, timed)
        except Exception as error:  # the other kernels go on
            left_out[name] = why(error)
    counts = {label: len(device_kernels(run)) for label, run in runs.items()}
    if moved := moved_bytes(call):
        source, target = torch.zeros(2, moved // 2, dtype=torch.uint8, device=device)
        runs["copy"] = lambda: target.copy_(source)
    if sweep and case.sweep and "triton" in runs:
        runs |= {f"sweep.{rows}x{warps}": tiled(timed, rows, warps) for rows, warps in SWEEP}
    out: dict[str, Any] = {"left_out": left_out, "differs": differs, "device_kernels": counts, "gpu": clock.spreads(runs)}
    for figures in out["gpu"].values() if moved else ():
        figures["TB/s"] = round(moved / figures["median_us"] / 1e6, 3)
        figures["of_copy"] = round(out["gpu"]["copy"]["median_us"] / figures["median_us"], 3)
    failed = {"failed": str({**differs, **left_out})} if "triton" in names and "triton" in {**differs, **left_out} else {}
    return out | ({"bytes": moved} if moved else {}) | failed


def main() -> int:
    parser = arguments(__doc__, budget_s=60.0)
    parser.add_argument("--no-sweep", action="store_true")
    given, clock = parser.parse_args(), clock_of("cuda")
    names = ("triton", "reference", "compiled")
    jobs = [("cases", case.name, partial(measure, case, clock, names, not given.no_sweep)) for case in CASES]

    def brief(found: dict[str, Any]) -> str:
        return json.dumps({n: (f["median_us"], f.get("of_copy")) for n, f in found["gpu"].items()})

    return measure_all(jobs, {"launch_us": round(clock.launch_us, 2)}, "data.json", "cuda", given.budget_s, brief)


if __name__ == "__main__":
    raise SystemExit(main())
