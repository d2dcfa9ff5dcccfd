"""Our ops beside other ways to compute the same; writes <suite>.json.

    python benchmarks/compare.py direct [--device cuda] [--budget-s 150] [--only decode]

Every result is compared with an exact one before it is timed. GPU time: replays of CUDA graphs in turn, the L2 cache cleared before each,
the start of a graph (`launch_us`) included, alike for all. On a CPU the cases are tiny: they test the script.

direct: ops against the vendors' calls on the same tensors, and torch's SDPA. `ratio` is the op over the fastest direct call that runs the
same device code (`OWN`), whose metadata of the batch alone is made outside, as an engine makes it once a step. `device_kernels`: those that
torch.profiler sees for one call. `op.<kernel>` is the call as layers make it: a device plan is made outside, and the query is in one piece;
of `op.<kernel>_unplanned` the vendor's call makes its metadata, too. `op.<kernel>_bare` has neither, and no ratio: no vendor has such.
An op that may not be captured is launched, and its ratio is that to the vendor's call launched beside it.
data: kernels that move data. `eager`: the reference's torch ops; `compiled`: the same by Inductor, in place where the kernel says so;
`copy`: `copy_` of half the bytes that the case reads and writes, hence as many in all; `of_copy`: the bandwidth over that one's.
deterministic: ops under each policy; `of_default` is the default's time over the row's. Rows of `training` are forward and backward.
gradients: wall-clock time of a step, forward and backward, causal; `host_us`: until it is issued. `flash2`: SDPA by FlashAttention-2.
mla: one attention layer of DeepSeek-V3, see mla.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import beside
import mla
import torch
from common import Job, arguments, measure_all, timed, us_of
from torch import Tensor

from attnops.bench import Setup, kernels, vendors
from attnops.bench.profile import launched
from attnops.bench.rows import Way
from attnops.inputs import Pool
from attnops.kernel import Capture, Kernel, kernels_of
from attnops.measured import Shape
from attnops.measured.cost import Work
from attnops.ops import OPS
from attnops.testing import Call, Source, allowance, builders, equip, latent, oracle, with_device_plan
from attnops.testing.check import clone
from attnops.tune import Stopwatch
from attnops.tune.clock import GraphClock, Run, Timed, spread
from attnops.tune.run import runner
from attnops.tune.shapes import DENSE, MLA, PAGED

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8

# Ops beside the vendors' calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(kernels.Case):
    """A call, and makers of the vendors'. rate: unit of its figure, "TB/s" of the bytes it must move or "TFLOP/s"."""

    vendors: Mapping[str, vendors.Make] = field(default_factory=dict)
    rate: str = "TB/s"

    def call(self, pool: Pool) -> Call:
        """Its tensors. Float8 latents are rounded from 16 bits; a merge is of `batch` tokens' outputs, whose sides are clean."""
        s = self.shape
        if s.op == "merge_state":
            return builders.merge(Source(0, str(pool.device)), (self.batch, s.q_heads, s.v_head_dim), BF16, stale=False)
        if s.dtype != "float8_e4m3fn":
            return super().call(pool)
        call = replace(self, shape=replace(s, dtype="bfloat16", kv_dtype="bfloat16")).call(pool)
        scale = torch.full((1,), 0.5, device=pool.device)
        return call.with_(**{n: call.arguments[n].to(E4M3) for n in ("q_nope", "q_pe", "latent_pages")}, q_scale=scale, kv_scale=scale)

    @property
    def work(self) -> Work:
        """As that of the suite `kernels`, and a merge's."""
        s = self.shape
        return Work(6.0 * self.batch * s.q_heads * s.v_head_dim, 0.0) if s.op == "merge_state" else super().work


def sdpa(call: Call) -> Run:
    """torch's SDPA of a prompt, or over a contiguous cache of as many bytes."""
    run = vendors.sdpa(Setup(torch.device("cuda")), call)
    assert run is not None
    return run


def flashmla(call: Call, float8: bool = False, planned: bool = False) -> Run:
    """FlashMLA's dense decode as `sgl_kernel.flash_mla` calls its ops. planned: float8 with metadata made beforehand."""
    import sgl_kernel.flash_mla  # noqa: F401, loads the ops

    (a, query, pages), ops = vendors.latents(call), torch.ops.sgl_kernel
    given = (query, pages, 512, a["seq_lens"], a["page_table"], a["scale"], False)
    if not float8:
        return partial(ops.dense_decode_fwd.default, *given, None, None)
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


CORES = partial(vendors.flashinfer_paged, kind="Decode", use_tensor_cores=False)
DECODE = {**vendors.DECODE, "flashinfer_cuda_cores": CORES, "sdpa_contiguous": sdpa}
EXTEND = {**vendors.EXTEND, "flashinfer_fa3": partial(vendors.flashinfer_paged, kind="Prefill", backend="fa3")}
MERGE = {f"{vendor}_merge": partial(merge, vendor=vendor) for vendor in ("sgl", "flashinfer")}
FLOAT8 = {"flashmla_fp8": partial(flashmla, float8=True, planned=True), "flashmla_fp8_with_metadata": partial(flashmla, float8=True)}
LATENT = {**vendors.LATENT, "flashmla_with_metadata": flashmla}
STEP, H128 = replace(PAGED, decode=True), replace(MLA, decode=True)
H16, H128_FP8 = replace(H128, q_heads=16), replace(H128, dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
DIRECT = {
    **{f"decode {b}x{k}": Case("", STEP, b, 1, k, vendors=DECODE) for b, k in ((1, 8192), (8, 4096), (64, 4096))},
    **{f"causal prefill {n}": Case("", DENSE, 1, n, n, "", (), vendors.DENSE | {"sdpa": sdpa}, "TFLOP/s") for n in (2048, 8192, 16384)},
    **{f"merge of {n} tokens": Case("", Shape("merge_state"), n, 1, 0, vendors=MERGE) for n in (64, 4096)},
    **{f"paged prefill {n}": Case("", PAGED, 1, n, n, vendors=EXTEND, rate="TFLOP/s") for n in (2048, 8192)},
    "latent decode 64x8192, 16 heads": Case("", H16, 64, 1, 8192, vendors=LATENT),
    "latent decode 64x8192, 128 heads": Case("", H128, 64, 1, 8192, vendors=LATENT, rate="TFLOP/s"),
    "float8 latent decode 64x8192, 128 heads": Case("", H128_FP8, 64, 1, 8192, vendors=FLOAT8, rate="TFLOP/s"),
}  # fmt: skip
# By kernel, the vendor's calls that run the same device code on the same metadata; of `triton`, the calls that it replaces.
OWN = {
    "fa3": ("fa3",), "flashinfer": ("flashinfer_tensor_cores", "flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer_mla_fa2": ("flashinfer_fa2",), "flashinfer_mla_fa3": ("flashinfer_fa3",), "flashmla": ("flashmla",),
    "flashmla_unplanned": ("flashmla_with_metadata",), "flashmla_fp8_unplanned": ("flashmla_fp8_with_metadata",), "triton": tuple(MERGE),
}  # fmt: skip


def compiled_op(kernel: Kernel) -> Callable[[Any, Any], Any]:
    """The compiled op, held to the kernel, of positional and keyword arguments."""
    packet, policy = OPS[kernel.op].packet.default, f"kernel={kernel.op}:{kernel.name}"
    return torch.compile(lambda args, kwargs: packet(*args, **kwargs, policy=policy), fullgraph=True, dynamic=False)


def layers_op(kernel: Kernel, call: Call, planned: bool) -> Run:
    """The op as `runner` calls it, with the kernel's device plan or without, and the query's parts side by side."""
    if call.op == "mla_attention":
        a, (_, query, _) = call.arguments, vendors.latents(call)
        q_nope, q_pe = query[:, 0].split([a[n].shape[2] for n in ("q_nope", "q_pe")], -1)
        call = call.with_(q_nope=q_nope, q_pe=q_pe)
    return runner(kernel, with_device_plan(kernel, call) if planned else call)


def makers_of(case: Case, call: Call) -> dict[str, Callable[[], Run]]:
    """Every call to be timed, by `direct.*` and `op.*`."""
    makers: dict[str, Callable[[], Run]] = {f"direct.{name}": partial(make, call) for name, make in case.vendors.items()}
    for kernel, mine, _ in Stopwatch(lambda *_: 0.0, equip=equip).candidates(call):
        if not kernel.packages:
            continue
        name = f"op.{kernel.name}"
        makers[name] = lambda kernel=kernel, mine=mine: partial(compiled_op(kernel), mine.args, mine.kwargs)
        if kernel.plan.device is not None:
            makers |= {f"{name}_bare": makers[name], name: partial(layers_op, kernel, mine, True)}
            makers[f"{name}_unplanned"] = partial(layers_op, kernel, mine, False)
    return makers


def device_kernels(run: Run) -> list[str]:
    """The kernels that one call launches on the device, in order; none on a CPU."""
    run()
    return [k.name[:100] for k in sorted(launched(Timed(run)), key=lambda k: k.start)] if torch.cuda.is_available() else []


def beside_vendors(case: Case, pool: Pool) -> dict[str, Any]:
    """Our op, and the vendors' calls; each may have twice a kernel's budget."""
    call, runs = case.call(pool), dict[str, Run]()
    if call.op == "merge_state":
        want, part = oracle(call)["output"], lambda out: out
        allowed = float(torch.as_tensor(allowance(call, oracle(call))["output"]).max())
    else:
        want, allowed, part = kernels.exact(call)

    def way(name: str, make: Callable[[], Run]) -> Way:
        runs[name] = make()
        return kernels.way(runs[name], part, 2 * allowed, call.arguments.get("output"))

    ways = {name: partial(way, name, make) for name, make in makers_of(case, call).items()}
    rows, left_out = timed(pool.device.type, ways, want, allowed)
    amount, times = (case.work.bytes if case.rate == "TB/s" else case.work.flops) / 1e6, us_of(rows)
    for figures in times.values():
        figures["rate"] = round(amount / figures["median_us"], 3)
    counts = {name: device_kernels(runs[name]) for name in times}
    against: dict[str, Any] = {}
    for name in (n for n in times if n.startswith("op.")):
        kernel = name.removeprefix("op.")
        if own := [n for n in (f"direct.{own}" for own in OWN.get(kernel, (kernel,))) if n in times]:
            us = {n: times[n]["median_us"] for n in (name, *own)}
            registered, more = kernels_of(call.op).get(kernel), {}
            if registered is not None and registered.capture is Capture.NEVER:
                found = GraphClock(pool.device).in_turn({n: runs[n] for n in us}, launched=True)
                more["launched_us"] = us = {n: spread(samples)["median_us"] for n, samples in found.items()}
            best = min(own, key=lambda n: us[n])
            extra = len(counts[name]) - len(counts[best])
            against[name] = {"direct": best, "ratio": round(us[name] / us[best], 4), "more_device_kernels": extra, **more}
    return {"left_out": left_out, "unit": case.rate, "gpu": times, "device_kernels": counts, "against": against}


def direct(device: str) -> Iterator[Job]:
    """The cases, at toy size on a CPU."""
    pool = Pool(device)
    if device == "cuda":
        pool.reserve(BF16, 1 << 30)
    for name, case in DIRECT.items():
        yield "cases", name, partial(beside_vendors, case.sized("full" if device == "cuda" else "toy"), pool)


# Kernels that move data -----------------------------------------------------------------------------------------------


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
    "direct": direct, "data": moves, "deterministic": beside.deterministic, "gradients": beside.training, "mla": mla.jobs,
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
