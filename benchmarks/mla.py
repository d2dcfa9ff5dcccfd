"""The suite `mla` of compare.py: one attention layer of DeepSeek-V3, ours against transformers', the bare kernels and the floor.

`layer`: a decode step of our compiled layer, captured, its plan made outside as once a step; `layer_eager`: launched without either.
`kernel`: the op alone. `projections`: the layer without attention, rotation, absorption and cache. `hf_eager`: transformers' layer on a
filled cache, launched; `hf_compiled`, at 8192 keys: compiled and captured. `direct.*`: the vendors' calls. `glue_share`: the part of the
layer that is neither `kernel` nor `projections`. `floor_us`: the larger of bytes over the bandwidth (of a pass over 1 GB in the same run,
or the most that a kernel reached) and operations over the matrix rate. `off_by`: the distance of layers, transformers' too, from `exact`,
transformers' layer in float32 for up to MOST_EXACT keys, else ours by the reference kernel.
`forms`: new tokens a request over a cached prefix, absorbed and expanded, and what `latent_form` takes. `float8`: the layer over float8
pages, with its queries as they are and quantised, and its distance from the exact result beside that of bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from common import Job, timed, us_of
from torch import Tensor, nn

from attnops.bench import kernels
from attnops.bench.rows import Make, Way, largest_error
from attnops.bench.vendors import LATENT
from attnops.cache import LatentCache, PagedBatch, Planner
from attnops.inputs import Call
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops import mla_attention, write_latent
from attnops.ops.latent_form import FormDecision, watch_forms
from attnops.ops.plan import LatentSpec
from attnops.tune.clock import Run, Timed, ceilings

# Norm of the difference over the norm of the result: of bfloat16 layers, of transformers', and of float8, which rounds query and latents by
# 0.03 in the root of the mean square; scores, of which a softmax is made, are sums of their products with a spread of some units.
NEAR, THEIRS, FAR = 0.02, 0.05, 0.15
MOST_EXACT = 8192  # keys of all requests: with 128 heads, transformers' layer expands them to some 8 GB in float32
ROPE: dict[str, Any] = {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
BASE, FIRST_LENGTH = 10000.0, 4096
SCALE = 1 / 32  # of float8: a random latent's largest number, about 6, is then stored as 192, of 448
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """The layer's numbers; those of DeepSeek-V3 unless said otherwise, with the heads that one GPU holds."""

    heads: int = 128
    hidden_size: int = 7168
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def dims(self) -> dict[str, int]:
        """As transformers' configuration and our layer name them."""
        return {name: size for name, size in asdict(self).items() if name not in ("heads", "dtype")}

    @property
    def width(self) -> int:
        """Numbers of a cached token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self) -> int:
        """Numbers of the layer's matrices."""
        layer = LatentAttention(num_heads=self.heads, **self.dims, device="meta")
        return sum(weight.numel() for weight in layer.parameters() if weight.dim() > 1)


@dataclass(frozen=True)
class Size:
    """A decode step: `keys` tokens a request, the new one included."""

    model: Model
    batch: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.model.heads} heads, {self.batch}x{self.keys}"

    def work(self, part: str) -> tuple[float, float]:
        """(bytes, operations) of the kernel or the layer."""
        m, weights = self.model, self.model.weights() if part == "layer" else 0
        both = m.width + m.kv_lora_rank
        moved = self.batch * (self.keys * m.width + m.heads * both) + weights
        return float(m.dtype.itemsize * moved), 2.0 * self.batch * (self.keys * m.heads * both + weights)

    def inputs(self, device: str, new: int = 1) -> tuple[Tensor, Tensor]:
        """Random (hidden `[B * new, E]`, latents `[B, K, Dc + Dr]`)."""
        m, make = self.model, torch.Generator(device).manual_seed(self.batch * 7919 + self.keys)
        shapes = (self.batch * new, m.hidden_size), (self.batch, self.keys, m.width)
        hidden, latents = (torch.randn(shape, generator=make, device=device, dtype=m.dtype) for shape in shapes)
        return hidden, latents


FULL = tuple(Size(Model(heads), b, k) for heads in (128, 16) for b in (1, 8, 64) for k in (1024, 8192, 32768))
TOY = (Size(Model(4, 64, 24, 32, 16, 8, 12, torch.float32), 2, 24),)


class Filled:
    """A cache as transformers' layers take it: full of the given latents, the last token of each request about to be written."""

    def __init__(self, latents: Tensor, dim: int) -> None:
        # transformers' layer rotates pairs and writes them apart, ours leaves them where they are.
        k_pe = latents[:, None, :, dim:]
        self.keys, self.values = latents[:, None, :, :dim].contiguous(), torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -key.shape[2] :] = key
        self.values[:, :, -value.shape[2] :] = value
        return self.keys, self.values


@lru_cache(maxsize=2)
def theirs(m: Model, device: str) -> Any:
    """transformers' layer with random weights."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {"rope_type": "yarn", "rope_theta": BASE, "original_max_position_embeddings": FIRST_LENGTH, "beta_fast": 32, "beta_slow": 1}
    config = DeepseekV3Config(
        **m.dims, num_attention_heads=m.heads, num_key_value_heads=m.heads, max_position_embeddings=163840, rope_parameters=rope | ROPE,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = DeepseekV3Attention(config, 0)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer.to(device, m.dtype).eval()


def their_step(layer: Any, hidden: Tensor, latents: Tensor) -> Run:
    """transformers' layer on one token a request; hidden `[B, E]`."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    cache = Filled(latents, layer.kv_lora_rank)
    positions = torch.full((hidden.shape[0], 1), latents.shape[1] - 1, device=hidden.device)
    place = DeepseekV3RotaryEmbedding(layer.config).to(hidden.device)(hidden, positions)
    return lambda: layer(hidden[:, None], position_embeddings=place, attention_mask=None, past_key_values=cache)[0][:, 0]


def ours(m: Model, device: str, absorb: int | str = "auto", kernel: str | None = None, dtype: Any = None) -> LatentAttention:
    """Our layer with the same weights, in `dtype` if not the model's."""
    rope = RotaryEmbedding(m.qk_rope_head_dim, BASE, scaling="yarn", interleaved=True, original_max_position=FIRST_LENGTH, **ROPE)
    layer = LatentAttention(num_heads=m.heads, **m.dims, rope=rope, absorb=absorb, kernel=kernel, device=device, dtype=dtype or m.dtype)
    layer.load_state_dict(theirs(m, device).state_dict())
    return layer.eval()


def filled(
    m: Model, latents: Tensor, new: int = 1, prefix_tokens: int | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, PagedBatch, Callable[..., PagedBatch]]:
    """(pages that hold `latents`, in `dtype` if not theirs; the step of each request's last `new` tokens; the step with its plan)."""
    batch, keys = latents.shape[:2]
    cache = LatentCache(
        1, batch * (keys + 128), latent_dim=m.kv_lora_rank, rope_dim=m.qk_rope_head_dim, max_requests=batch, max_tokens_per_request=keys,
        q_heads=m.heads, dtype=dtype or latents.dtype, device=latents.device,
    )  # fmt: skip
    requests = [cache.alloc(keys - new) for _ in range(batch)]
    step, pages = cache.batch(requests, new, prefix_tokens=prefix_tokens), cache.latent_pages[0]
    scale = None if dtype is None else torch.full((1,), SCALE, device=latents.device)
    for request, rows in zip(requests, latents, strict=True):
        write_latent(*rows.split([m.kv_lora_rank, m.qk_rope_head_dim], -1), pages, cache.slots(request), kv_scale=scale)

    def planned(query: torch.dtype | None = None) -> PagedBatch:
        """With the plan that the layer's kernel reads, made as once a step. query: its dtype, unless the model's."""
        spec = LatentSpec(m.heads, cache.page_size, query or m.dtype, m.width, m.kv_lora_rank, kv_dtype=dtype)
        width = cache.page_table.shape[1]
        return Planner(spec, max_tokens=batch, max_requests=batch, max_pages=width, device=pages.device)(step)

    return pages, step, planned


def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    """A compiled call."""
    return partial(torch.compile(function, fullgraph=True, dynamic=False), *args, **kwargs)


def launched(run: Run) -> Any:
    """The result of `run`, which a clock cannot capture."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("to be launched")
    return run()


def near(run: Run, exact: Tensor, most: float = NEAR) -> Way:
    """A layer whose result is this near, by the norm of the difference over that of the exact result."""
    return Way(Timed(run), lambda: float((run().double() - exact.double()).norm() / exact.double().norm()), most)


times_of = partial(timed, want=None, budget=NEAR, distance=lambda error, _: error)
"""Of a device and ways whose results are errors."""


def projections(layer: LatentAttention, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
    """The matrices of the layer, without absorption, rotation, cache and attention between them."""
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    return layer.o_proj(attended), q, layer.kv_a_proj_with_mqa(hidden)


def measure(size: Size, device: str) -> dict[str, Any]:
    """One decode step's figures. Raises AssertionError where the layer or the kernel is wrong."""
    m, (hidden, latents) = size.model, size.inputs(device)
    hf, layer = theirs(m, device), ours(m, device)
    pages, step, planned = filled(m, latents)
    want = ours(m, device, kernel="reference")(hidden, batch=step, latent_pages=pages)  # and the pages hold the new tokens
    if independent := size.batch * size.keys <= MOST_EXACT:
        want = their_step(copy.deepcopy(hf).float(), hidden.float(), latents.float())()
    step = planned()
    query = torch.randn(size.batch, m.heads, m.width, device=device, dtype=m.dtype)
    given = {"latent_pages": pages, "page_table": step.page_table, "seq_lens": step.seq_lens, "cu_seqlens_q": step.cu_seqlens_q}
    given |= {"q_nope": query[..., : m.kv_lora_rank], "q_pe": query[..., m.kv_lora_rank :], "max_seqlen_q": 1, "scale": 0.1}
    whole = {n: given[n].contiguous() for n in ("q_nope", "q_pe")}
    call = Call("mla_attention", {**given, **whole, "output": torch.empty_like(whole["q_nope"])})
    exact, allowed, part = kernels.exact(call)

    def bare(make: Callable[[], Run]) -> Way:
        way = kernels.way(make(), part, 2 * allowed, call.arguments["output"])
        return replace(way, result=lambda: largest_error(way.computed(), exact))

    def rival(compile: bool) -> Way:
        need = 1.5 * size.batch * size.keys * m.heads * (2 * m.qk_nope_head_dim + m.qk_rope_head_dim + 2 * m.v_head_dim) * m.dtype.itemsize
        if device == "cuda":
            torch.cuda.empty_cache()
            if need > 0.8 * torch.cuda.mem_get_info()[0]:
                raise torch.OutOfMemoryError(f"{need / 1e9:.0f} GB are needed")
        run = their_step(hf, hidden, latents)
        return near(compiled(run) if compile else partial(launched, run), want, THEIRS)

    attended = torch.randn(size.batch, m.heads * m.v_head_dim, device=device, dtype=m.dtype)
    op = partial(mla_attention, **given, plan=step.plan, workspace=step.workspace, holes=step.holes)
    ways: dict[str, Way | Make] = {
        "layer": lambda: near(compiled(layer, hidden, batch=step, latent_pages=pages), want),
        "layer_eager": near(partial(launched, partial(layer, hidden, batch=step, latent_pages=pages)), want),
        "projections": Way(Timed(partial(projections, layer, hidden, attended)), lambda: 0.0),  # no result of its own
        "kernel": partial(bare, lambda: op), "hf_eager": partial(rival, False),
    }  # fmt: skip
    ways |= {"hf_compiled": partial(rival, True)} if size.keys in (8192, TOY[0].keys) else {}
    ways |= {f"direct.{name}": partial(bare, partial(make, call)) for name, make in LATENT.items()} if device == "cuda" else {}
    rows, left_out = times_of(device, ways)
    assert rows.keys() >= {"layer", "kernel", "projections"}, left_out
    us = {name: row["median_us"] for name, row in rows.items()}
    out: dict[str, Any] = {"us": us_of(rows), "left_out": left_out}
    out["exact"] = "transformers in float32" if independent else "ours by the reference kernel"
    out["off_by"] = {name: rows[name]["error"] for name in ("layer", "hf_eager", "hf_compiled") if name in rows}
    out["glue_share"] = round((us["layer"] - us["kernel"] - us["projections"]) / us["layer"], 4)
    if direct := [t for n, t in us.items() if n.startswith("direct.")]:
        out["kernel_over_best_direct"] = round(us["kernel"] / min(direct), 4)
    return out


def forms(m: Model, device: str, keys: int, batch: int, new: Sequence[int]) -> dict[str, Any]:
    """Both forms of the layer for some new tokens a request, `keys` before them."""
    out: dict[str, Any] = {}
    for queries in new:
        hidden, latents = Size(m, batch, keys + queries).inputs(device, queries)
        pages, step, _ = filled(m, latents, queries, prefix_tokens=1 << 16)
        runs = {
            form: partial(ours(m, device, absorb), hidden, batch=batch_, latent_pages=pages)
            for form, absorb, batch_ in (("absorbed", 1 << 20, replace(step, prefix=None)), ("expanded", 0, step))
        }
        rows, wrong = times_of(device, {form: near(run, runs["expanded"]()) for form, run in runs.items()})
        assert not wrong, wrong
        found: list[FormDecision] = []
        stop = watch_forms(found.append)
        try:
            ours(m, device)(hidden, batch=step, latent_pages=pages)
        finally:
            stop()
        us, taken = {form: row["median_us"] for form, row in rows.items()}, found[0].form
        out[str(queries)] = {"us": us, "chosen": taken, "regret_percent": round(100 * (us[taken] / min(us.values()) - 1), 2)}
    return out


def float8(size: Size, device: str) -> dict[str, Any]:
    """The layer over float8 pages against itself over its own dtype's."""
    m, (hidden, latents) = size.model, size.inputs(device)
    pages, step, _ = filled(m, latents.float())
    layer, exact = ours(m, device), ours(m, device, kernel="reference", dtype=torch.float32)(hidden.float(), batch=step, latent_pages=pages)
    del pages

    def way(kv: torch.dtype | None, query: torch.dtype | None, most: float, **given: Any) -> Way:
        pages, _, planned = filled(m, latents, dtype=kv)
        return near(compiled(layer, hidden, batch=planned(query), latent_pages=pages, **given), exact, most)

    ways = {
        str(m.dtype).removeprefix("torch."): partial(way, None, None, NEAR),
        "float8_pages": partial(way, E4M3, None, FAR, kv_scale=torch.full((1,), SCALE, device=device)),
        "float8_both": partial(way, E4M3, E4M3, FAR, float8_scales=(SCALE, SCALE)),
    }
    rows, left_out = times_of(device, ways)
    off_by, us = ({name: row[figure] for name, row in rows.items()} for figure in ("error", "median_us"))
    return {"off_by": off_by, "left_out": left_out, "us": us}


def jobs(device: str) -> Iterator[Job]:
    """All three sections."""
    sizes, keys, batch, new = (FULL, (0, 2048, 16384), 4, (1, 8, 32, 64, 128, 256, 512)) if device == "cuda" else (TOY, (0, 16), 2, (1, 4))
    for size in sizes:
        yield "layer", size.name, partial(measure, size, device)
    for size in sizes:
        if size.keys in (8192, TOY[0].keys) and size.batch > 1:
            yield "float8", size.name, partial(float8, size, device)
    for m in dict.fromkeys(size.model for size in sizes):
        for before in keys:
            yield "forms", f"{m.heads} heads, {batch}x{before} before", partial(forms, m, device, before, batch, new)


def with_floors(report: dict[str, Any], device: str) -> dict[str, Any]:
    """The report with the floors of its layers, and the bandwidth they are worked out by; ceilings that it lacks are measured."""
    known = {size.name: size for size in (*FULL, *TOY)}
    if "ceilings" not in report:
        found = ceilings(torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32, quick=True)
        report = report | {
            "ceilings": {"copy_tb_s": round(found["bandwidth_tb_s"], 3), "matrix_tflop_s": round(found["matmul_tflop_s"], 3)}
        }
    layer = {name: dict(case) for name, case in report.get("layer", {}).items()}
    reached = [known[name].work("kernel")[0] / case["us"]["kernel"]["median_us"] / 1e6 for name, case in layer.items()]
    rates = report["ceilings"] | {"bandwidth_tb_s": round(max([report["ceilings"]["copy_tb_s"], *reached]), 3)}
    for name, case in layer.items():
        for part in ("kernel", "layer"):
            moved, done = known[name].work(part)
            floor = max(moved / rates["bandwidth_tb_s"], done / rates["matrix_tflop_s"]) / 1e6
            case |= {f"{part}_floor_us": round(floor, 2), f"{part}_over_floor": round(case["us"][part]["median_us"] / floor, 3)}
    return report | {"ceilings": rates, "layer": layer}
