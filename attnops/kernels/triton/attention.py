"""`triton`: attnops' own kernels, for any GPU that Triton compiles for, any page size and every feature of the ops.

Two stages: a tile of queries attends over one split of its request's keys, then the splits are merged by their log-sum-exps;
docs/triton.md has the picture. How many splits follows from shapes alone, so that a captured graph replays for other lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, Package, at_most, deterministic, one_of, register
from attnops.measured import Roofline, phases
from attnops.problem import Problem, Refusal

if TYPE_CHECKING:
    from attnops.kernels.triton.launch.plan import Choice

PACKAGE = Package("triton", ("triton",), "3.3", "pip install triton")


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    temperature: Tensor | None = None,
    choice: Choice | None = None,
) -> None:
    """See `attnops.paged_attention`. choice: what to launch, for those who measure it."""
    from attnops.kernels.triton.launch.call import Batch, Keys, attention

    _, page, heads, dims = k_pages.shape
    keys = Keys(k_pages, v_pages, dims, v_pages.shape[3], 0, heads, page, k_scale, v_scale)
    rules = (scale, causal, window_left, window_right, attention_chunk, softcap, deterministic(policy))
    batch = Batch(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, mask, sinks, *rules, temperature)
    attention(query, None, keys, batch, output, lse, choice)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    choice: Choice | None = None,
    most: int = 0,
) -> None:
    """See `attnops.ops.mla_attention`. A latent is loaded once, for the scores and for the sum. most: as in `launch.call.steps`."""
    from attnops.kernels.triton.launch.call import Batch, Keys, attention

    dims, rope = q_nope.shape[2], q_pe.shape[2]
    # One head of keys that every query head shares.
    keys = Keys(latent_pages[:, :, None], None, dims, dims, rope, 1, latent_pages.shape[1], kv_scale, kv_scale)
    rules = (scale, causal, window_left, -1, 0, softcap, deterministic(policy))
    batch = Batch(page_table, seq_lens, cu_seqlens_q, max_seqlen_q, mask, sinks, *rules)
    attention(q_nope, q_pe, keys, batch, output, lse, choice, most)


def merge_state(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, *, stale: bool = True, policy: str = ""
) -> tuple[Tensor, Tensor]:
    """See `attnops.merge_state`. An empty side is not multiplied, so `stale` makes no difference."""
    from attnops.kernels.triton.launch import call

    output, lse = output_a.new_empty(output_a.shape), lse_a.new_empty(lse_a.shape)
    call.merge_state(output_a, lse_a, output_b, lse_b, output, lse)
    return output, lse


def merge_states(outputs: Tensor, lses: Tensor, *, stale: bool = True, policy: str = "") -> tuple[Tensor, Tensor]:
    """See `attnops.ops.merge_states`. An empty part is not read."""
    from attnops.kernels.triton.launch import call

    output, lse = outputs.new_empty((outputs.shape[0], *outputs.shape[2:])), lses.new_empty((lses.shape[0], lses.shape[2]))
    call.merge_states(outputs, lses, output, lse)
    return output, lse


def _gpu(p: Problem) -> Refusal | None:
    ok = p.target.device == "cuda" and p.target.arch >= 80
    return None if ok else Refusal("target", p.target, "CUDA, sm80 or newer")


def _stored(p: Problem) -> Refusal | None:
    """Which dtypes keys and values may be stored in."""
    if p.kv_dtype == torch.float8_e4m3fn and p.target.arch < 89:
        return Refusal("kv_dtype", p.kv_dtype, "float8_e5m2 | int8 | the query's (float8_e4m3fn from sm89 on)")
    return None


PAGED = phases(Roofline(8.2, 1.1, 0.45, 0.013, 590), Roofline(7.8, 0.71, 0.46, 0.034, 510))
LATENTS = phases(Roofline(11.0, 1.1, 0.29, 0.032, 320), Roofline(8.7, 0.4, 0.38, 0.064, 250))


def _merge_cost_us(p: Problem) -> float:
    parts = max(p.batch.hint, 1) if p.op == "merge_states" else 2
    return 5.0 + (parts + 1.0) * max(p.tokens.hint, 1) * p.q_heads * p.v_head_dim * p.dtype.itemsize / 3.4e6


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NEEDS: tuple[Need, ...] = (_gpu, one_of("dtype", *FLOATS), _stored)
ATTENTION: tuple[Need, ...] = (*NEEDS, one_of("last_dim_contiguous", True))
LATENT_NEEDS: tuple[Need, ...] = (*ATTENTION, at_most("v_head_dim", 512), at_most("rope_dim", 64))

register(
    Kernel(
        "triton", "paged_attention", paged_attention, packages=(PACKAGE,), cost_us=PAGED, invariant=Invariant(),
        needs=(*ATTENTION, at_most("head_dim", 256), at_most("v_head_dim", 256)), about="attnops' own, decode and extend",
    )
)  # fmt: skip
register(
    Kernel(
        "triton", "mla_attention", mla_attention, packages=(PACKAGE,), cost_us=LATENTS, invariant=Invariant(),
        needs=LATENT_NEEDS, about="attnops' own, decode and extend over latents",
    )
)  # fmt: skip
for _op, _run in (("merge_state", merge_state), ("merge_states", merge_states)):
    register(
        Kernel(
            "triton", _op, _run, needs=NEEDS, packages=(PACKAGE,), cost_us=_merge_cost_us, invariant=Invariant(), about="attnops' own",
        )
    )  # fmt: skip
