"""One attention layer of DeepSeek-V3 in a decode step: ours against transformers', the bare kernels and the floor; writes mla.json.

    python benchmarks/mla.py [--device cuda] [--budget-s 150]

`layer`: our compiled layer, captured by hand, its plan made outside as once a step; `layer_eager`: as it is launched without either.
`kernel`: the op alone with the kernel that the layer chose. `projections`: the layer without attention, rotation, absorption and cache.
`hf_eager`: transformers' layer on a filled static cache, launched; `hf_compiled`, at 8192 keys: compiled and captured. `direct.*`: the
vendors' calls.
`glue_share`: what of the layer is neither `kernel` nor `projections`. `floor_us`: the larger of bytes over the copy bandwidth and
operations over the matrix rate, both measured in the same run, for kernel and layer. Medians of CUDA graph replays in turn, the L2 cache
flushed before each. Every layer is checked before it is timed: against transformers' layer in float32 where that fits, else against the
reference kernel. `forms`: new tokens a request over a cached prefix, absorbed and expanded, both captured as they are, and what
`latent_form` takes.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import default_device, environment, interleaved_us, spread, write
from torch import Tensor, nn

from attnops.cache import LatentCache, PagedBatch, Planner
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops.latent_form import FormDecision, watch_forms
from attnops.ops.plan_mla import LatentSpec

Run = Callable[[], Any]
NEAR = 0.02
"""Norm of the difference over the norm of the result, bfloat16."""
BASE, FACTOR, FIRST_LENGTH = 10000.0, 40.0, 4096


@dataclass(frozen=True)
class Model:
    """The layer's numbers; those of DeepSeek-V3 unless said otherwise, heads being what one GPU holds."""

    heads: int = 128
    hidden: int = 7168
    q_rank: int = 1536
    latent: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    dtype: torch.dtype = torch.bfloat16

    def weights(self) -> int:
        """Numbers of the layer's matrices."""
        q = self.q_rank * (self.hidden + self.heads * (self.nope + self.rope))
        kv = self.hidden * (self.latent + self.rope) + self.latent * self.heads * (self.nope + self.v)
        return q + kv + self.heads * self.v * self.hidden


@dataclass(frozen=True)
class Size:
    """A decode step: `keys` tokens a request, the new one included."""

    model: Model
    batch: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.model.heads} heads, {self.batch}x{self.keys}"

    def kernel_work(self) -> tuple[float, float]:
        """(bytes, operations) of attention alone."""
        m, pairs = self.model, self.batch * self.keys * self.model.heads
        moved = self.batch * (self.keys * (m.latent + m.rope) + m.heads * (2 * m.latent + m.rope))
        return m.dtype.itemsize * moved, 2.0 * pairs * (2 * m.latent + m.rope)

    def layer_work(self) -> tuple[float, float]:
        """(bytes, operations) of the layer."""
        moved, done = self.kernel_work()
        return moved + self.model.dtype.itemsize * self.model.weights(), done + 2.0 * self.batch * self.model.weights()


FULL = tuple(Size(Model(heads), b, k) for heads in (128, 16) for b in (1, 8, 64) for k in (1024, 8192, 32768))
TOY = (Size(Model(4, 64, 24, 32, 16, 8, 12, torch.float32), 2, 24),)
FORMS = (1, 8, 32, 64, 128, 256, 512)


class Filled:
    """A cache as transformers' layers take it: full of the given latents, the last token of each request about to be written."""

    def __init__(self, latents: Tensor, dim: int) -> None:
        # transformers' layer rotates pairs and writes them apart, ours leaves them where they are.
        k_pe = latents[:, None, :, dim:]
        self.keys = latents[:, None, :, :dim].contiguous()
        self.values = torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -key.shape[2] :] = key
        self.values[:, :, -value.shape[2] :] = value
        return self.keys, self.values


def theirs(m: Model, device: str) -> Any:
    """transformers' layer with random weights."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {
        "rope_type": "yarn", "rope_theta": BASE, "factor": FACTOR, "original_max_position_embeddings": FIRST_LENGTH, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=m.hidden, num_attention_heads=m.heads, num_key_value_heads=m.heads, q_lora_rank=m.q_rank, kv_lora_rank=m.latent,
        qk_nope_head_dim=m.nope, qk_rope_head_dim=m.rope, v_head_dim=m.v, max_position_embeddings=163840, rope_parameters=rope,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = DeepseekV3Attention(config, 0)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer.to(device, m.dtype).eval()


def ours(m: Model, weights: dict[str, Tensor], device: str, absorb: int | str = "auto", kernel: str | None = None) -> LatentAttention:
    """Our layer with the same weights."""
    rope = RotaryEmbedding(
        m.rope, BASE, scaling="yarn", factor=FACTOR, interleaved=True, original_max_position=FIRST_LENGTH, mscale=1.0, mscale_all_dim=1.0
    )  # fmt: skip
    layer = LatentAttention(
        m.hidden, m.heads, q_lora_rank=m.q_rank, kv_lora_rank=m.latent, qk_nope_head_dim=m.nope, qk_rope_head_dim=m.rope, v_head_dim=m.v,
        rope=rope, absorb=absorb, kernel=kernel, device=device, dtype=m.dtype,
    )  # fmt: skip
    layer.load_state_dict(weights)
    return layer.eval()


def filled(m: Model, latents: Tensor, new: int, device: str, prefix_tokens: int | None = None) -> tuple[LatentCache, PagedBatch]:
    """A cache that holds `latents` `[B, K, Dc + Dr]`, and the step of each request's last `new` tokens."""
    batch, keys = latents.shape[:2]
    cache = LatentCache(
        1, batch * (keys + 128), latent_dim=m.latent, rope_dim=m.rope, max_requests=batch, max_tokens_per_request=keys, q_heads=m.heads,
        dtype=m.dtype, device=device,
    )  # fmt: skip
    requests = [cache.alloc(keys - new) for _ in range(batch)]
    step = cache.batch(requests, new, prefix_tokens=prefix_tokens)
    flat = cache.latent_pages[0].view(-1, m.latent + m.rope)
    for request, rows in zip(requests, latents, strict=True):
        flat[cache.slots(request)] = rows
    return cache, step


def turned(layer: Any, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers' layers take of the positions."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    cos, sin = DeepseekV3RotaryEmbedding(layer.config).to(like.device)(like, positions)
    return cos, sin


def their_step(layer: Any, hidden: Tensor, latents: Tensor, keys: int) -> Run:
    """transformers' layer on one token a request; hidden `[B, E]`."""
    cache, tokens = Filled(latents, layer.kv_lora_rank), hidden[:, None]
    place = turned(layer, torch.full((hidden.shape[0], 1), keys - 1, device=hidden.device), hidden)
    return lambda: layer(tokens, position_embeddings=place, attention_mask=None, past_key_values=cache)[0][:, 0]


def projections(layer: LatentAttention) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The layer without what lies between its matrices: absorption, rotation, cache, attention."""

    def run(hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        kv = layer.kv_a_proj_with_mqa(hidden)
        return layer.o_proj(attended), q, kv

    return run


def launched(run: Run) -> Run:
    """`run`, which a clock cannot capture."""

    def call() -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("to be launched")
        return run()

    return call


def check(found: Tensor, exact: Tensor, what: str) -> float:
    """Raises AssertionError for a result that is too far from the exact one."""
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert error < NEAR, f"{what}: off by {error:.4f}"
    return error


class Bench:
    """What all measurements of a run share: device, clock, one layer a model, and memory."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.layers: dict[Model, tuple[Any, dict[str, Tensor]]] = {}
        if device == "cuda":
            from attnops.tune.clock import GraphClock

            self.clock = GraphClock("cuda")

    def layer(self, m: Model) -> tuple[Any, dict[str, Tensor]]:
        """(transformers' layer, its weights)."""
        if m not in self.layers:
            made = theirs(m, self.device)
            self.layers[m] = (made, made.state_dict())
        return self.layers[m]

    def times(self, runs: dict[str, Run]) -> dict[str, dict[str, float]]:
        """Median and spread of each, in turn."""
        if self.device == "cuda":
            return {name: spread(us) for name, us in self.clock.in_turn(runs).items()}
        return interleaved_us(runs, repeats=3, inner=1)

    def latents(self, size: Size) -> tuple[Tensor, Tensor]:
        """Random (hidden `[B, E]`, latents `[B, K, Dc + Dr]`)."""
        m = size.model
        make = torch.Generator(self.device).manual_seed(size.batch * 7919 + size.keys)
        hidden = torch.randn(size.batch, m.hidden, generator=make, device=self.device, dtype=m.dtype)
        return hidden, torch.randn(size.batch, size.keys, m.latent + m.rope, generator=make, device=self.device, dtype=m.dtype)

    def fits(self, moved: float) -> bool:
        """Is so much memory, in bytes, to be had?"""
        return self.device != "cuda" or moved < 0.8 * torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def ceilings(self) -> dict[str, float]:
        """TB/s of a copy, read and written, and TFLOP/s of a matrix product, as measured."""
        n = 1 << 30 if self.device == "cuda" else 1 << 22
        side = 8192 if self.device == "cuda" else 512
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        a, b = torch.empty(n, dtype=torch.uint8, device=self.device), torch.zeros(n, dtype=torch.uint8, device=self.device)
        x = torch.randn(side, side, device=self.device, dtype=dtype)
        found = self.times({"copy": lambda: a.copy_(b), "matrix": lambda: x @ x})
        return {"copy_tb_s": 2 * n / found["copy"]["median_us"] / 1e6, "matrix_tflop_s": 2 * side**3 / found["matrix"]["median_us"] / 1e6}


def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    """A compiled call."""
    run = torch.compile(function, fullgraph=True, dynamic=False)
    return lambda: run(*args, **kwargs)


def measure(size: Size, bench: Bench, ceilings: dict[str, float]) -> dict[str, Any]:
    """One decode step's figures. Raises AssertionError where the numbers are wrong."""
    m = size.model
    hf, weights = bench.layer(m)
    hidden, latents = bench.latents(size)
    cache, step = filled(m, latents, 1, bench.device)
    pages, page_size = cache.latent_pages[0], cache.page_size
    spec = LatentSpec(m.heads, page_size, m.dtype, m.latent + m.rope, m.latent)
    width = cache.page_table.shape[1]
    planner = Planner(spec, max_tokens=size.batch, max_requests=size.batch, max_pages=width, device=bench.device)
    planned = planner(step)

    torch._dynamo.reset()
    layer = ours(m, weights, bench.device)
    runs: dict[str, Run] = {"layer": compiled(layer, hidden, batch=planned, latent_pages=pages)}
    found = runs["layer"]()
    checked = verified(size, bench, hidden, latents, found)
    runs["layer_eager"] = launched(partial(layer, hidden, batch=planned, latent_pages=pages))
    attended = torch.randn(size.batch, m.heads * m.v, device=bench.device, dtype=m.dtype)
    runs["projections"] = partial(projections(layer), hidden, attended)
    runs |= kernels(size, planned, pages)
    left_out = {}
    for name, run in rivals(size, bench, hf, hidden, latents, planned, pages):
        try:
            run()
            runs[name] = run
        except Exception as error:  # the others stand
            left_out[name] = f"{type(error).__name__}: {str(error)[:150]}"
    times = bench.times(runs)
    us = {name: t["median_us"] for name, t in times.items()}
    out: dict[str, Any] = {"us": times, "left_out": left_out, "off_by": checked, "page_size": page_size, "plan": kind_of(planned)}
    out["glue_share"] = round((us["layer"] - us["kernel"] - us["projections"]) / us["layer"], 4)
    for name, (moved, done) in (("kernel", size.kernel_work()), ("layer", size.layer_work())):
        floor = max(moved / ceilings["copy_tb_s"], done / ceilings["matrix_tflop_s"]) / 1e6
        out[f"{name}_floor_us"] = round(floor, 2)
        out[f"{name}_over_floor"] = round(us[name] / floor, 3)
    direct = {n: t for n, t in us.items() if n.startswith("direct.")}
    if direct:
        out["kernel_over_best_direct"] = round(us["kernel"] / min(direct.values()), 4)
    for rival in ("hf_eager", "hf_compiled"):
        if rival in us:
            out[f"times_{rival}"] = round(us[rival] / us["layer"], 2)
    return out


def kind_of(step: PagedBatch) -> str:
    """Where the plan of a step lies."""
    return "none" if step.plan is None else "host" if step.plan.device.type == "cpu" and step.plan.dtype == torch.int64 else "device"


def verified(size: Size, bench: Bench, hidden: Tensor, latents: Tensor, found: Tensor) -> dict[str, float]:
    """Distances of our layer's result from transformers' in float32 and from our own by the reference kernel."""
    m, (hf, weights) = size.model, bench.layer(size.model)
    out = {}
    if bench.fits(6.0 * latents.shape[0] * size.keys * m.heads * (m.nope + m.rope + m.v) * 4) and size.batch * size.keys <= 8192:
        import copy

        exact = their_step(copy.deepcopy(hf).float(), hidden.float(), latents.float(), size.keys)()
        out["hf_float32"] = check(found, exact, "transformers in float32")
    _, step = (made := filled(m, latents, 1, bench.device))
    by_reference = ours(m, weights, bench.device, kernel="reference")(hidden, batch=step, latent_pages=made[0].latent_pages[0])
    return out | {"reference": check(found, by_reference, "the reference kernel")}


def kernels(size: Size, step: PagedBatch, pages: Tensor) -> dict[str, Run]:
    """The op alone, as the layer calls it."""
    import attnops.ops

    m = size.model
    query = torch.randn(size.batch, m.heads, m.latent + m.rope, device=pages.device, dtype=m.dtype)
    q_nope, q_pe = query[..., : m.latent], query[..., m.latent :]
    call = partial(
        attnops.ops.mla_attention, q_nope, q_pe, pages, step.page_table, step.seq_lens, step.cu_seqlens_q, max_seqlen_q=1, scale=0.1,
        plan=step.plan, workspace=step.workspace,
    )  # fmt: skip
    return {"kernel": call}


def rivals(
    size: Size, bench: Bench, hf: Any, hidden: Tensor, latents: Tensor, step: PagedBatch, pages: Tensor
) -> Iterator[tuple[str, Run]]:
    """transformers' layer and the vendors' own calls, as far as they fit."""
    m = size.model
    expanded = float(size.batch * size.keys * m.heads * (2 * m.nope + m.rope + 2 * m.v) * m.dtype.itemsize) * 1.5
    if bench.fits(expanded):
        run = their_step(hf, hidden, latents, size.keys)
        yield "hf_eager", launched(run)
        if size.keys in (8192, TOY[0].keys):
            yield "hf_compiled", compiled(run)
    if bench.device == "cuda":
        from direct import flashinfer_mla, flashmla

        from attnops.testing import Call

        query = torch.randn(size.batch, m.heads, m.latent + m.rope, device="cuda", dtype=m.dtype)
        given = {
            "q_nope": query[..., : m.latent].contiguous(), "q_pe": query[..., m.latent :].contiguous(), "latent_pages": pages,
            "page_table": step.page_table, "seq_lens": step.seq_lens, "cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": 1, "scale": 0.1,
            "output": query[..., : m.latent].contiguous(),
        }  # fmt: skip
        call = Call("mla_attention", given)
        for name, make in (("flashmla", flashmla), ("flashinfer_fa2", flashinfer_mla("fa2")), ("flashinfer_fa3", flashinfer_mla("fa3"))):
            try:
                yield f"direct.{name}", make(call)
            except Exception as error:
                print(name, error)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--budget-s", type=float, default=150.0)
    given = parser.parse_args()
    start, bench = time.monotonic(), Bench(given.device)
    sizes, keys, batch, new = (FULL, (0, 2048, 16384), 4, FORMS) if given.device == "cuda" else (TOY, (0, 16), 2, (1, 4))
    report: dict[str, Any] = {**environment(given.device), "layer": {}, "forms": {}, "failed": {}}
    with torch.no_grad():
        report["ceilings"] = {n: round(x, 3) for n, x in bench.ceilings().items()}
        jobs: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
        jobs += [("layer", size.name, partial(measure, size, bench, report["ceilings"])) for size in sizes]
        models = dict.fromkeys(size.model for size in sizes)
        jobs += [("forms", f"{m.heads} heads, {batch}x{k} before", partial(forms, m, bench, k, batch, new)) for m in models for k in keys]
        for section, name, job in jobs:
            if time.monotonic() - start > given.budget_s:
                report["failed"][name] = "left out: the budget was spent"
                continue
            try:
                report[section][name] = job()
                print(section, name, json.dumps(report[section][name]), flush=True)
            except Exception as error:  # the others stand
                traceback.print_exc()
                report["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    report["seconds"] = round(time.monotonic() - start, 1)
    print(report["failed"], write(report, "mla.json", given.device))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
