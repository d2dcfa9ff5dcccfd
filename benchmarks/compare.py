"""Our ops beside other ways to compute the same; writes <suite>.json.

    python benchmarks/compare.py data [--device cuda] [--budget-s 150] [--only write_kv]

Every result is compared with an exact one before it is timed. GPU time: replays of CUDA graphs in turn, the L2 cache cleared before each,
the start of a graph (`launch_us`) included, alike for all. On a CPU the cases are tiny: they test the script.

data: kernels that move data. `eager`: the reference's torch ops; `compiled`: the same by Inductor, in place where the kernel says so;
`copy`: `copy_` of half the bytes that the case reads and writes, hence as many in all; `of_copy`: the bandwidth over that one's.
deterministic: ops under each policy; `of_default` is the default's time over the row's. Rows of `training` are forward and backward.
gradients: wall-clock time of a step, forward and backward, causal; `host_us`: until it is issued. `flash2`: SDPA by FlashAttention-2.
mla: one attention layer of DeepSeek-V3, see mla.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import beside
import mla
import torch
from common import Job, arguments, measure_all, timed, us_of
from torch import Tensor

from attnops.bench.profile import launched
from attnops.bench.rows import Way
from attnops.kernel import Kernel, kernels_of
from attnops.ops import OPS
from attnops.testing import Call, Source, builders, latent
from attnops.testing.check import clone
from attnops.tune.clock import GraphClock, Run, Timed

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8

# Kernels that move data -----------------------------------------------------------------------------------------------


def compiled_op(kernel: Kernel) -> Callable[[Any, Any], Any]:
    """The compiled op, held to the kernel, of positional and keyword arguments."""
    packet, policy = OPS[kernel.op].packet.default, f"kernel={kernel.op}:{kernel.name}"
    return torch.compile(lambda args, kwargs: packet(*args, **kwargs, policy=policy), fullgraph=True, dynamic=False)


def device_kernels(run: Run) -> list[str]:
    """The kernels that one call launches on the device, in order; none on a CPU."""
    run()
    return [k.name[:100] for k in sorted(launched(Timed(run)), key=lambda k: k.start)] if torch.cuda.is_available() else []


def slots(source: Source, tokens: int, page: int) -> list[int]:
    """Where tokens go: whole pages in random order, or a page each when they are few, as in a decode step."""
    if tokens <= 64:
        return [p * page + (7 * p) % page for p in source.permutation(tokens)]
    return [p * page + i for p in source.permutation(-(-tokens // page)) for i in range(page)][:tokens]


def write(source: Source, tokens: int, build: Any = builders.write, page: int = 16, f: Any = beside.LLAMA, **more: Any) -> Call:
    call: Call = build(source, slots(source, tokens, page), max(2 * -(-tokens // page), 64), page, replace(f, **more))
    return call


def copies(source: Source, entries: int, layers: int) -> Call:
    return builders.copy(source, tuple(enumerate(source.permutation(entries))), layers, -(-entries // 16), 16, beside.LLAMA)


def indices(source: Source) -> Call:
    table, lens = source.ints(source.permutation(64 * 512)).reshape(64, 512), source.ints([(i * 7919) % 8192 for i in range(64)])
    return Call("kv_indices", {"page_table": table, "seq_lens": lens, "page_size": 16})


LATENTS: dict[str, Any] = {"page": 64, "f": latent.DEEPSEEK}
DATA: dict[str, Callable[[Source], Call]] = {
    **{f"write_kv {n}": partial(write, tokens=n) for n in (4096, 1, 64, 512)},
    **{f"write_kv {n} float8": partial(write, tokens=n, kv_dtype=E4M3) for n in (4096, 64)},
    "write_kv 4096 int8": partial(write, tokens=4096, kv_dtype=INT8),
    **{f"write_latent {n}": partial(write, tokens=n, build=builders.write_latent, **LATENTS) for n in (4096, 64)},
    **{f"write_latent_packed {n}": partial(write, tokens=n, build=builders.write_packed, **LATENTS) for n in (4096, 64)},
    **{f"copy_kv {n} slots, {m} layers": partial(copies, entries=n, layers=m) for n, m in ((64, 32), (8, 32), (256, 32), (2048, 8))},
    "kv_indices 64": indices,
}
COMPILED = (
    "write_kv 4096", "write_kv 64", "write_kv 4096 float8", "write_latent 4096", "write_latent_packed 4096", "copy_kv 64 slots, 32 layers",
    "kv_indices 64",
)  # fmt: skip
"""With Inductor's code as well, which takes seconds to make."""


def moved_bytes(call: Call) -> int:
    """The bytes that a case reads and writes at least, without tables; 0 for ops that make only tables."""
    t = call.arguments
    if call.op == "copy_kv":
        return sum(2 * t["source"].shape[0] * x[:, 0, 0].nbytes for x in (t["k_pages"], t["v_pages"]))
    new, pages = ([t[n] for n in names if n in t] for names in (("key", "value", "latent", "k_pe"), ("k_pages", "v_pages", "latent_pages")))
    return sum(x.nbytes for x in new) + sum(t["slots"].shape[0] * x[0, 0].nbytes for x in pages)


def results(call: Call, run: Callable[[Call], Any]) -> list[Tensor]:
    """The bits of the results that a call returns or writes; the call itself is not changed."""
    mine = call.map(lambda _, t: clone(t))
    returned = run(mine)
    values = [mine.arguments[n] for n in mine.mutated] if returned is None else list(returned)
    if call.op == "kv_indices":  # the rest is free
        values[1] = values[1][: int(values[0][-1])]
    return [x.contiguous().flatten().view(torch.uint8) for x in values]


def inlined(like: Call) -> Callable[[Call], Any]:
    """The plain torch ops as a compiled graph has them."""
    op, inline = OPS[like.op], [k for k in kernels_of(like.op).values() if k.inline and not k.refusals(like.problem)]
    plain = torch.compile(lambda args, kwargs: op.reference(op.call(*args, **kwargs)), fullgraph=True, dynamic=False)
    function = compiled_op(inline[0]) if inline else plain
    return lambda call: function(call.args, call.kwargs)


def moving(name: str, make: Callable[[Source], Call], device: str) -> dict[str, Any]:
    """One case's figures. Fails where `triton` does."""
    call = make(Source(1, device))
    known = kernels_of(call.op)
    own = call.map(lambda _, t: clone(t))  # the timed call writes its tensors again and again
    moved, runs = moved_bytes(call), dict[str, Run]()

    def way(label: str, run: Callable[[Call], Any]) -> Way:
        runs[label] = partial(run, own)
        return Way(Timed(runs[label]), partial(results, call, run))

    def by_kernel(label: str, kernel: Kernel) -> Way:
        if refused := kernel.refusals(call.problem):
            raise ValueError("; ".join(map(str, refused)))
        return way(label, lambda c: kernel.run(c.record))

    ways = {label: partial(by_kernel, label, known[n]) for label, n in (("triton", "triton"), ("eager", "reference")) if n in known}
    ways |= {"compiled": lambda: way("compiled", inlined(call))} if name in COMPILED else {}
    if moved:
        source, target = torch.zeros(2, moved // 2, dtype=torch.uint8, device=device)
        ways["copy"] = lambda: Way(Timed(lambda: target.copy_(source)), lambda: want)
    want = results(call, lambda c: known["reference"].run(c.record))
    rows, left_out = timed(device, ways, want, 0.0, lambda a, b: float(sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))))
    out: dict[str, Any] = {"left_out": left_out, "gpu": us_of(rows)}
    out["device_kernels"] = {label: len(device_kernels(runs[label])) for label in rows if label != "copy"}
    for figures in out["gpu"].values() if moved else ():
        figures["TB/s"] = round(moved / figures["median_us"] / 1e6, 3)
        figures["of_copy"] = round(out["gpu"]["copy"]["median_us"] / figures["median_us"], 3)
    return out | ({"bytes": moved} if moved else {}) | ({"failed": left_out["triton"]} if "triton" in left_out and device == "cuda" else {})


def moves(device: str) -> Iterator[Job]:
    """All that move data; on a CPU the short ones."""
    for name, make in DATA.items():
        if device == "cuda" or "64" in name:
            yield "cases", name, partial(moving, name, make, device)


SUITES: dict[str, Callable[[str], Iterator[Job]]] = {
    "data": moves, "deterministic": beside.deterministic, "gradients": beside.training, "mla": mla.jobs,
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, budget_s=150.0)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    asked = parser.parse_args(given)
    jobs = [job for job in SUITES[asked.suite](asked.device) if asked.only in job[1]]
    head = {"suite": asked.suite} | ({"launch_us": round(GraphClock().launch_us, 2)} if asked.device == "cuda" else {})
    finish = partial(mla.with_floors, device=asked.device) if asked.suite == "mla" else dict
    return measure_all(jobs, head, f"{asked.suite}.json", asked.device, asked.budget_s, finish)


if __name__ == "__main__":
    raise SystemExit(main())
