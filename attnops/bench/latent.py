"""Suite `latent`: one attention layer of DeepSeek-V3, ours beside transformers', the op alone and
the projections alone, in a decode step.

`layer`, `hf_compiled`: ours and transformers' over a filled cache, compiled. `hf_eager`: launched.
`kernel`: the op alone. `projections`: the layer's matrices alone. `glue_share`: the part of `layer`
that is neither. transformers' layer in float32 judges the layers, the reference in float64 the op.
Cases of `new` tokens are steps over a cached prefix in both forms, and in the one that
`latent_form` chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from attnops.bench import Setup
from attnops.bench.exact import exact, way
from attnops.bench.rows import Case, Rows, Way, Ways, largest_error, time_if_right, with_ratios
from attnops.cache import LatentCache, PagedBatch
from attnops.configs import config_of
from attnops.hf.cache.names import argument
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops import mla_attention, write_latent
from attnops.ops.latent.absorb_or_expand import ALWAYS
from attnops.ops.latent.record import MLA
from attnops.testing.calls import Call
from attnops.tune.clock import Run, Timed, kernels_us

OFF = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Of layers: the allowed norm of a difference over that of the result. transformers' layer has
twice as much."""

# keys of the requests that are compared: with 128 heads transformers' layer expands them to some 8
# GB in float32
MOST_EXACT = 8192
DIMS = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
# 16: the heads of one GPU of eight
HEADS, SIZES = (128, 16), ((1, 8192), (8, 8192), (64, 8192), (8, 32768))
BEFORE, NEW = (0, 2048, 16384), (8, 32, 64, 128, 256, 512)


class Step(NamedTuple):
    """Requests of `keys` tokens each, the last `new` of them new, of a layer with these heads."""

    heads: int
    batch: int
    keys: int
    new: int = 1

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.heads} heads, {self.batch}x{self.keys}" + (
            f", {self.new} of them new" if self.new > 1 else ""
        )


def cases(setup: Setup) -> dict[str, Case]:
    """The decode steps, then the forms."""
    steps, new = [Step(4, 2, 24)], [Step(4, 2, 20, 4)]
    if setup.on_gpu:
        steps = [
            Step(heads, *size) for heads in HEADS for size in SIZES[: 2 if setup.quick else None]
        ]
        new = [
            Step(heads, 4, before + n, n)
            for heads in HEADS
            for before in BEFORE
            for n in NEW[: 2 if setup.quick else None]
        ]
    return {s.name: partial(forms if s.new > 1 else measure, setup, s) for s in (*steps, *new)}


def inputs(setup: Setup, step: Step) -> tuple[Any, Tensor, Tensor]:
    """(transformers' layer with random weights, hidden `[B * new, E]`, latents `[B, K, Dc + Dr]`),
    alike in every run."""
    config = config_of("deepseek-v3-shape" if setup.on_gpu else "deepseek_v3")
    config.num_attention_heads = config.num_key_value_heads = step.heads
    config._attn_implementation = "sdpa"
    with (
        torch.device(setup.device),
        torch.random.fork_rng(devices=[setup.device] if setup.on_gpu else []),
    ):
        torch.manual_seed(0)
        layer = DeepseekV3Attention(config, 0)
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        shapes = (
            (step.batch * step.new, config.hidden_size),
            (step.batch, step.keys, config.kv_lora_rank + config.qk_rope_head_dim),
        )
        hidden, latents = (torch.randn(shape, dtype=setup.dtype) for shape in shapes)
    return layer.to(setup.dtype).eval(), hidden, latents


class Filled:
    """A cache as transformers' layers take it: full of the given latents, the last token of each
    request about to be written."""

    def __init__(self, latents: Tensor, dim: int) -> None:
        # transformers' layer rotates pairs and writes them apart, ours leaves them where they are.
        k_pe = latents[:, None, :, dim:]
        self.keys = latents[:, None, :, :dim].contiguous()
        self.values = torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As transformers calls it."""
        self.keys[:, :, -1:], self.values[:, :, -1:] = key, value
        return self.keys, self.values


def their_step(layer: Any, hidden: Tensor, latents: Tensor) -> Run:
    """transformers' layer on one token a request; hidden `[B, E]`."""
    cache = Filled(latents, layer.kv_lora_rank)
    positions = hidden.new_full((len(hidden), 1), latents.shape[1] - 1, dtype=torch.float32)
    place = DeepseekV3RotaryEmbedding(layer.config).to(hidden.device)(hidden, positions)
    return lambda: layer(
        hidden[:, None], position_embeddings=place, attention_mask=None, **argument(layer, cache)
    )[0][:, 0]


def ours(layer: Any, absorb: int | str = "auto") -> LatentAttention:
    """Our layer with the weights of transformers'."""
    config, weight = layer.config, layer.o_proj.weight
    dims: dict[str, Any] = {name: getattr(config, name) for name in DIMS} | {
        "device": weight.device,
        "dtype": weight.dtype,
    }
    rope = RotaryEmbedding(
        config.qk_rope_head_dim, config.rope_parameters["rope_theta"], interleaved=True
    )
    made = LatentAttention(num_heads=config.num_attention_heads, rope=rope, absorb=absorb, **dims)
    made.load_state_dict(layer.state_dict())
    return made.eval()


def filled(
    config: Any, latents: Tensor, new: int = 1, prefix_tokens: int | None = None
) -> tuple[Tensor, PagedBatch]:
    """(pages that hold the latents, the step of each request's last `new` tokens with the plan of
    its kernel)."""
    (batch, keys), dims = latents.shape[:2], (config.kv_lora_rank, config.qk_rope_head_dim)
    cache = LatentCache(
        1,
        batch * (keys + 128),
        latent_dim=dims[0],
        rope_dim=dims[1],
        max_requests=batch,
        max_tokens_per_request=keys,
        q_heads=config.num_attention_heads,
        dtype=latents.dtype,
        device=latents.device,
    )
    requests = [cache.alloc(keys - new) for _ in range(batch)]
    step, pages = cache.batch(requests, new, prefix_tokens=prefix_tokens), cache.latent_pages[0]
    for request, rows in zip(requests, latents, strict=True):
        latent, k_pe = rows.split(dims, -1)
        write_latent(latent, k_pe, pages, cache.slots(request))
    return pages, step


def launched(run: Run) -> Any:
    """The result of a run that no clock captures."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("to be launched")
    return run()


def near(run: Run, want: Tensor, allowed: float) -> Way:
    """A layer that gives `want` in its last rows. Its result is the error."""
    norm = want.double().norm()
    return Way(
        Timed(run),
        lambda: float((run()[-len(want) :].double() - want.double()).norm() / norm),
        allowed,
    )


def compared(setup: Setup, case: str, ways: Ways) -> Rows:
    """The rows of ways whose results are errors."""
    own = ("layer", "kernel", "projections")
    return time_if_right(
        case,
        ways,
        None,
        0.0,
        partial(kernels_us, setup.device),
        lambda error, _: float(error),
        own=own,
    )


@torch.no_grad()
def measure(setup: Setup, step: Step) -> Rows:
    """The rows of a decode step."""
    hf, hidden, latents = inputs(setup, step)
    layer = ours(hf)
    pages, batch = filled(hf.config, latents)
    dim = hf.kv_lora_rank
    allowed = OFF[setup.dtype]
    last = -max(1, min(step.batch, MOST_EXACT // step.keys))
    want = their_step(copy.deepcopy(hf).float(), hidden[last:].float(), latents[last:].float())()
    run = partial(layer, hidden, batch=batch, latent_pages=pages)
    their = their_step(hf, hidden, latents)
    run()  # writes the new tokens, which the op alone reads
    draw = partial(torch.randn, step.batch, device=setup.device, dtype=setup.dtype)
    q_nope, q_pe = (draw(step.heads, size) for size in (dim, latents.shape[2] - dim))
    attended, written = draw(step.heads * hf.v_head_dim), torch.empty_like(q_nope)
    requests = {name: getattr(batch, name) for name in ("page_table", "seq_lens", "cu_seqlens_q")}
    query = {"q_nope": q_nope, "q_pe": q_pe, "max_seqlen_q": 1, "scale": 0.1}
    call = Call.of(MLA.name, **query, latent_pages=pages, **requests, output=written)

    def kernel() -> Way:
        want, most, part = exact(call)
        op = partial(
            mla_attention,
            **call.arguments,
            plan=batch.plan,
            workspace=batch.workspace,
            holes=batch.holes,
        )
        made = way(op, part, 2 * most, written)
        return replace(made, result=lambda: largest_error(made.computed(), want))

    def matrices() -> Any:
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        return layer.o_proj(attended), q, layer.kv_a_proj_with_mqa(hidden)

    compiled: Callable[..., Run] = partial(setup.compiled, fullgraph=True, dynamic=False)
    rows = compared(
        setup,
        step.name,
        {
            "layer": lambda: near(compiled(run), want, allowed),
            "kernel": kernel,
            "projections": Way(Timed(matrices), lambda: 0.0),
            "hf_eager": near(partial(launched, their), want, 2 * allowed),
            "hf_compiled": lambda: near(compiled(their), want, 2 * allowed),
        },
    )
    us = {row["way"]: row["median_us"] for row in rows if "median_us" in row}
    if us.keys() >= {"layer", "kernel", "projections"}:
        rows[0]["glue_share"] = round(1 - (us["kernel"] + us["projections"]) / us["layer"], 4)
    return with_ratios(rows, "hf_eager", "hf_compiled")


@torch.no_grad()
def forms(setup: Setup, step: Step) -> Rows:
    """A step of several new tokens in both forms, each judged by the other, and in the one that the
    layer takes."""
    hf, hidden, latents = inputs(setup, step)
    pages, batch = filled(hf.config, latents, step.new, 1 << 16)
    forms: dict[str, int | str] = {"absorbed": ALWAYS, "expanded": 0, "automatic": "auto"}
    runs = {
        name: partial(ours(hf, absorb), hidden, batch=batch, latent_pages=pages)
        for name, absorb in forms.items()
    }
    other = {"expanded": runs["absorbed"]()}
    want = runs["expanded"]()
    return compared(
        setup,
        step.name,
        {name: near(run, other.get(name, want), OFF[setup.dtype]) for name, run in runs.items()},
    )
