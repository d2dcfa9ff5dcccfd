"""One attention layer of DeepSeek-V3 in a decode step: ours against transformers', the bare kernels and the floor; writes mla.json.

    python benchmarks/mla.py [--device cuda] [--budget-s 150]
    python benchmarks/mla.py --again FILE

`layer`: our compiled layer, captured by hand, its plan made outside as once a step; `layer_eager`: as it is launched without either.
`kernel`: the op alone with the kernel that the layer chose. `projections`: the layer without attention, rotation, absorption and cache.
`hf_eager`: transformers' layer on a filled static cache, launched; `hf_compiled`, at 8192 keys: compiled and captured. `direct.*`: the
vendors' calls.
`glue_share`: what of the layer is neither `kernel` nor `projections`. `floor_us`: the larger of bytes over the bandwidth and operations
over the matrix rate, for kernel and layer; the bandwidth is that of a pass over 1 GB in the same run, or what a kernel of the run was
seen to reach where that is more. `--again` works the floors out anew from a file's times. Medians of CUDA graph replays in turn, the L2
cache flushed before each. Every layer is checked before it is timed: against transformers' layer in float32 where that fits, else against
the reference kernel. `forms`: new tokens a request over a cached prefix, absorbed and expanded, both captured as they are, and what
`latent_form` takes. `float8`: the layer over float8 pages, with its queries as they are and quantised, its distance from the exact result
beside that of bfloat16, and its time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Job, arguments, clock_of, measure_all, tried, write_file
from mla_layers import FAR, NEAR, SCALE, Model, Size, check, filled, launched, ours, planned, projections, their_step, theirs
from torch import Tensor

import attnops.ops
from attnops.bench.vendors import LATENT
from attnops.cache import PagedBatch
from attnops.inputs import Call
from attnops.nn import LatentAttention
from attnops.ops.latent_form import FormDecision, watch_forms
from attnops.tune.clock import Run, ceilings

FULL = tuple(Size(Model(heads), b, k) for heads in (128, 16) for b in (1, 8, 64) for k in (1024, 8192, 32768))
TOY = (Size(Model(4, 64, 24, 32, 16, 8, 12, torch.float32), 2, 24),)
FORMS = (1, 8, 32, 64, 128, 256, 512)


class Bench:
    """Shared by all measurements of a run: device, clock, one layer a model, and memory."""

    def __init__(self, device: str) -> None:
        self.device, self.clock = device, clock_of(device)
        self.layers: dict[Model, tuple[Any, dict[str, Tensor]]] = {}

    def layer(self, m: Model) -> tuple[Any, dict[str, Tensor]]:
        """(transformers' layer, its weights)."""
        if m not in self.layers:
            made = theirs(m, self.device)
            self.layers[m] = (made, made.state_dict())
        return self.layers[m]

    def times(self, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
        """Median and spread of each, in turn."""
        found: dict[str, dict[str, float]] = self.clock.spreads(runs)
        return found

    def latents(self, size: Size) -> tuple[Tensor, Tensor]:
        """Random (hidden `[B, E]`, latents `[B, K, Dc + Dr]`)."""
        m = size.model
        make = torch.Generator(self.device).manual_seed(size.batch * 7919 + size.keys)
        hidden = torch.randn(size.batch, m.hidden, generator=make, device=self.device, dtype=m.dtype)
        return hidden, torch.randn(size.batch, size.keys, m.latent + m.rope, generator=make, device=self.device, dtype=m.dtype)

    def fits(self, moved: float) -> bool:
        """Is so much memory free, in bytes?"""
        return self.device != "cuda" or moved < 0.8 * torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    """A compiled call."""
    return partial(torch.compile(function, fullgraph=True, dynamic=False), *args, **kwargs)


def measure(size: Size, bench: Bench) -> dict[str, Any]:
    """One decode step's figures. Raises AssertionError where the numbers are wrong."""
    m = size.model
    hf, weights = bench.layer(m)
    hidden, latents = bench.latents(size)
    cache, step = filled(m, latents, 1, bench.device)
    pages, step = cache.latent_pages[0], planned(m, cache, step)
    torch._dynamo.reset()
    layer = ours(m, weights, bench.device)
    query = torch.randn(size.batch, m.heads, m.latent + m.rope, device=bench.device, dtype=m.dtype)
    tables = {"page_table": step.page_table, "seq_lens": step.seq_lens, "cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": 1, "scale": 0.1}
    given = {"q_nope": query[..., : m.latent], "q_pe": query[..., m.latent :], "latent_pages": pages, **tables}
    attended = torch.randn(size.batch, m.heads * m.v, device=bench.device, dtype=m.dtype)
    runs: dict[str, Run] = {
        "layer": compiled(layer, hidden, batch=step, latent_pages=pages),
        "layer_eager": launched(partial(layer, hidden, batch=step, latent_pages=pages)),
        "projections": partial(projections(layer), hidden, attended),
        "kernel": partial(attnops.ops.mla_attention, **given, plan=step.plan, workspace=step.workspace, holes=step.holes),
    }
    checked = verified(size, bench, hidden, latents, runs["layer"]())
    rivals: dict[str, Callable[[], Run]] = {}
    if bench.fits(float(size.batch * size.keys * m.heads * (2 * m.nope + m.rope + 2 * m.v) * m.dtype.itemsize) * 1.5):
        rivals["hf_eager"] = lambda: launched(their_step(hf, hidden, latents, size.keys))
        if size.keys in (8192, TOY[0].keys):
            rivals["hf_compiled"] = lambda: compiled(their_step(hf, hidden, latents, size.keys))
    if bench.device == "cuda":
        whole = {n: given[n].contiguous() for n in ("q_nope", "q_pe")}
        call = Call("mla_attention", {**given, **whole, "output": torch.empty_like(whole["q_nope"])})
        rivals |= {f"direct.{name}": partial(make, call) for name, make in LATENT.items()}
    others, left_out = tried(rivals)
    times = bench.times(runs | others)
    us = {name: t["median_us"] for name, t in times.items()}
    where = "none" if step.plan is None else "host" if step.plan.device.type == "cpu" and step.plan.dtype == torch.int64 else "device"
    out: dict[str, Any] = {"us": times, "left_out": left_out, "off_by": checked, "page_size": cache.page_size, "plan": where}
    out["glue_share"] = round((us["layer"] - us["kernel"] - us["projections"]) / us["layer"], 4)
    if direct := [t for n, t in us.items() if n.startswith("direct.")]:
        out["kernel_over_best_direct"] = round(us["kernel"] / min(direct), 4)
    return out | {f"times_{rival}": round(us[rival] / us["layer"], 2) for rival in ("hf_eager", "hf_compiled") if rival in us}


def with_floors(report: dict[str, Any], sizes: Sequence[Size]) -> dict[str, Any]:
    """The report with the floors of its layers, and the bandwidth they are worked out by."""
    found, known = report["layer"], {size.name: size for size in sizes}
    reached = [known[name].kernel_work()[0] / case["us"]["kernel"]["median_us"] / 1e6 for name, case in found.items()]
    ceilings = report["ceilings"] | {"bandwidth_tb_s": round(max(report["ceilings"]["copy_tb_s"], *reached), 3)}
    layer = {}
    for name, case in found.items():
        layer[name] = dict(case)
        for part, (moved, done) in (("kernel", known[name].kernel_work()), ("layer", known[name].layer_work())):
            floor = max(moved / ceilings["bandwidth_tb_s"], done / ceilings["matrix_tflop_s"]) / 1e6
            layer[name] |= {f"{part}_floor_us": round(floor, 2), f"{part}_over_floor": round(case["us"][part]["median_us"] / floor, 3)}
    return report | {"ceilings": ceilings, "layer": layer}


def verified(size: Size, bench: Bench, hidden: Tensor, latents: Tensor, found: Tensor) -> dict[str, float]:
    """Distances of our layer's result from transformers' in float32 and from our own by the reference kernel."""
    m, (hf, weights) = size.model, bench.layer(size.model)
    out = {}
    if bench.fits(6.0 * latents.shape[0] * size.keys * m.heads * (m.nope + m.rope + m.v) * 4) and size.batch * size.keys <= 8192:
        exact = their_step(copy.deepcopy(hf).float(), hidden.float(), latents.float(), size.keys)()
        out["hf_float32"] = check(found, exact, "transformers in float32")
    cache, step = filled(m, latents, 1, bench.device)
    by_reference = ours(m, weights, bench.device, kernel="reference")(hidden, batch=step, latent_pages=cache.latent_pages[0])
    return out | {"reference": check(found, by_reference, "the reference kernel")}


def forms(m: Model, bench: Bench, keys: int, batch: int, new: tuple[int, ...]) -> dict[str, Any]:
    """Both forms of the layer for some new tokens a request, `keys` before them."""
    _, weights = bench.layer(m)
    out: dict[str, Any] = {}
    for queries in new:
        size = Size(m, batch, keys + queries)
        _, latents = bench.latents(size)
        hidden = torch.randn(batch * queries, m.hidden, device=bench.device, dtype=m.dtype)
        cache, step = filled(m, latents, queries, bench.device, prefix_tokens=1 << 16)
        runs, results = {}, []
        for form, absorb in (("absorbed", 1 << 20), ("expanded", 0)):
            layer = ours(m, weights, bench.device, absorb=absorb)
            given = step if form == "expanded" else replace(step, prefix=None)
            runs[form] = partial(layer, hidden, batch=given, latent_pages=cache.latent_pages[0])
            results.append(runs[form]())
        check(results[0], results[1], f"absorbed against expanded, {queries} new tokens")
        us = {name: t["median_us"] for name, t in bench.times(runs).items()}
        taken = chosen(ours(m, weights, bench.device), hidden, step, cache.latent_pages[0])
        out[str(queries)] = {"us": us, "chosen": taken, "regret_percent": round(100 * (us[taken] / min(us.values()) - 1), 2)}
    return out


def chosen(layer: LatentAttention, hidden: Tensor, step: PagedBatch, pages: Tensor) -> str:
    """The form that the layer takes by itself."""
    found: list[FormDecision] = []
    stop = watch_forms(found.append)
    try:
        layer(hidden, batch=step, latent_pages=pages)
    finally:
        stop()
    return found[0].form


def float8(size: Size, bench: Bench) -> dict[str, Any]:
    """The layer over float8 pages against itself over its own dtype's."""
    m = size.model
    _, weights = bench.layer(m)
    hidden, latents = bench.latents(size)
    layer, wide = ours(m, weights, bench.device), replace(m, dtype=torch.float32)
    cache, step = filled(wide, latents.float(), 1, bench.device)
    reference = ours(wide, {n: w.float() for n, w in weights.items()}, bench.device, kernel="reference")
    exact = reference(hidden.float(), batch=step, latent_pages=cache.latent_pages[0])
    del cache, reference
    kv_scale, e4m3 = torch.full((1,), SCALE, device=bench.device), torch.float8_e4m3fn

    def run(kv: torch.dtype | None, query: torch.dtype, **given: Any) -> Run:
        cache, step = filled(m, latents, 1, bench.device, dtype=kv)
        torch._dynamo.reset()
        return compiled(layer, hidden, batch=planned(m, cache, step, query, kv), latent_pages=cache.latent_pages[0], **given)

    own = str(m.dtype).removeprefix("torch.")
    runs, left_out = tried(
        {
            own: lambda: run(None, m.dtype),
            "float8_pages": lambda: run(e4m3, m.dtype, kv_scale=kv_scale),
            "float8_both": lambda: run(e4m3, e4m3, float8_scales=(SCALE, SCALE)),
        }
    )
    off_by = {name: check(call(), exact, name, NEAR if name == own else FAR) for name, call in runs.items()}
    return {"off_by": off_by, "left_out": left_out, "us": {name: t["median_us"] for name, t in bench.times(runs).items()}}


def main() -> int:
    parser = arguments(__doc__, ("cpu", "cuda"), 150.0)
    parser.add_argument("--again", type=Path, default=None, help="a mla.json: work its floors out anew")
    given = parser.parse_args()
    if given.again:
        write_file(with_floors(json.loads(given.again.read_text()), FULL), given.again)
        return 0
    bench = Bench(given.device)
    sizes, keys, batch, new = (FULL, (0, 2048, 16384), 4, FORMS) if given.device == "cuda" else (TOY, (0, 16), 2, (1, 4))
    with torch.no_grad():
        found = ceilings(torch.device(given.device), torch.bfloat16 if given.device == "cuda" else torch.float32, quick=True)
    head = {"ceilings": {"copy_tb_s": round(found["bandwidth_tb_s"], 3), "matrix_tflop_s": round(found["matmul_tflop_s"], 3)}}
    jobs: list[Job] = [("layer", size.name, partial(measure, size, bench)) for size in sizes]
    some = [size for size in sizes if size.keys in (8192, TOY[0].keys) and size.batch > 1]
    jobs += [("float8", size.name, partial(float8, size, bench)) for size in some]
    models = dict.fromkeys(size.model for size in sizes)
    jobs += [("forms", f"{m.heads} heads, {batch}x{k} before", partial(forms, m, bench, k, batch, new)) for m in models for k in keys]
    return measure_all(jobs, head, "mla.json", given.device, given.budget_s, finish=lambda report: with_floors(report, sizes))


if __name__ == "__main__":
    raise SystemExit(main())
