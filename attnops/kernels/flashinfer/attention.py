"""`flashinfer`: FlashInfer's kernels (https://arxiv.org/abs/2501.01005) for paged and packed calls, on plans that the host makes.

Which of them runs (CUDA cores or tensor cores for decode, FA2 or FA3 for more queries) follows from numbers that do not change between
steps. What lies in pages past a request's end may be anything: all of them zero the values they load from there and replace the
logits. Data pointers must be 16-byte aligned, as torch allocates them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.kernel import Capture, Invariant, Kernel, Need, Plan, Tolerance, arch, deterministic, dtypes, one_of, register, without
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.flashinfer import plan_batch as planner
from attnops.kernels.shared.plan import host_plan, within
from attnops.measured import Roofline, phases
from attnops.problem import Problem, Refusal, Target
from attnops.reference.attention import no_lse
from attnops.reference.holes import UNKNOWN

LN2 = math.log(2.0)


def plan_paged_attention(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    max_seqlen_q: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: bool = False,
    sinks: bool = False,
    num_pages: int = UNKNOWN,
    policy: str = "",
    plan: Tensor,
    workspace: Tensor,
) -> None:
    """See `attnops.ops.plan_paged_attention`."""
    if num_tokens == 0 or page_table.numel() == 0:
        plan.zero_()  # nothing to attend to, and nobody reads it
        return
    device = page_table.device
    c = fi.call_of(
        Target.of(device).arch, fi.sm_count(device), max_seqlen_q, num_tokens, page_table.shape[0], page_table.shape[1],
        q_heads, kv_heads, head_dim, v_head_dim, page_size, getattr(torch, dtype), getattr(torch, kv_dtype), max_seqlen_q <= 1, causal,
        window_left, softcap, sinks, deterministic(policy),
    )  # fmt: skip
    planner.make_plan(c, page_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_pages, plan, workspace)


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
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`. The kernel writes every row of `output`: padding has a request of its own in the plan.

    The page ids it reads are the plan's, which has no holes: without the caller's promise it must have been made for this many pages.
    """
    if not (query.numel() and k_pages.numel() and page_table.numel()):
        output.zero_()
        if lse is not None:
            lse.copy_(_natural(torch.full_like(lse, float("-inf")), sinks, cu_seqlens_q))
        return
    tokens, q_heads, head_dim = query.shape
    _, page_size, kv_heads, v_head_dim = v_pages.shape
    c = fi.call_of(
        Target.of(query.device).arch, fi.sm_count(query.device), max_seqlen_q, tokens, *page_table.shape, q_heads, kv_heads,
        head_dim, v_head_dim, page_size, query.dtype, k_pages.dtype, max_seqlen_q <= 1, causal, window_left, softcap > 0,
        sinks is not None, deterministic(policy),
    )  # fmt: skip
    ints, at = planner.read_plan(c, plan, workspace, k_pages.shape[0] if holes else None)
    out = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    z = lse if lse is None or lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    tensors = (query, k_pages, v_pages)
    if c.path == fi.DECODE:
        fi.run_decode(c, at, ints, tensors, out, z, scale, softcap)
    else:
        fi.run_prefill(c, at, ints, tensors, sinks, out, z, scale, softcap)
    if out is not output:
        output.copy_(out)
    if lse is not None and z is not None:
        lse.copy_(_natural(z, sinks, cu_seqlens_q)) if sinks is not None or z is not lse else lse.mul_(LN2)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The op takes no plan, so every call copies the lengths to the host and plans."""
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    cu_q, cu_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).cpu()
    for field, cu, most, tokens in (("q", cu_q, max_seqlen_q, query.shape[0]), ("k", cu_k, max_seqlen_k, key.shape[0])):
        within(f"lengths of cu_seqlens_{field}", cu.diff(), most)
        within(f"cu_seqlens_{field}[-1]", cu[-1:], tokens)
    used = int(cu_k[-1])
    if query.numel() and used:
        queries, keys = planner.ragged_tables(cu_q, cu_k, query.shape[0], causal)
        c = fi.call_of(
            Target.of(query.device).arch, fi.sm_count(query.device), max_seqlen_q, query.shape[0], len(queries) - 1, 0,
            query.shape[1], key.shape[1], query.shape[2], value.shape[2], 1, query.dtype, key.dtype, False, causal, window_left,
            softcap > 0, sinks is not None, deterministic(policy),
        )  # fmt: skip
        ints, at = planner.plan_ragged(c, queries, keys, query.device)
        # FA3 loads whole tiles of values, and a weight of 0 does not silence NaN: keys of no request are not shown to it.
        # Detached: what a training step's tensors are handed over with refuses those that want a gradient.
        tensors = (query.detach(), key[:used].detach(), value[:used].detach())
        fi.run_prefill(c, at, ints, tensors, sinks, output, lse, scale, softcap)
    else:
        output.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    return output, no_lse(query) if lse is None else _natural(lse, sinks, cu_seqlens_q)


def _natural(z: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor) -> Tensor:
    """lse `[T, Hq]` of base 2 -> natural; with sinks, theirs where no key is seen, and -inf for padding."""
    if sinks is None:
        return z * LN2
    past = torch.arange(z.shape[0], device=z.device) >= cu_seqlens_q[-1]
    return torch.where(z == float("-inf"), sinks.float(), z * LN2).masked_fill(past[:, None], float("-inf"))


def plan_sizes(
    *, max_tokens: int, max_requests: int, max_pages: int, device: torch.device, dtype: str, kv_dtype: str, window_right: int = -1,
    **statics: int,
) -> tuple[int, int]:  # fmt: skip
    """See `attnops.ops.plan_sizes`."""
    types = {"dtype": getattr(torch, dtype), "kv_dtype": getattr(torch, kv_dtype)}
    sizes = {"num_tokens": max_tokens, "requests": max_requests, "max_pages": max_pages}
    largest = fi.Shape(**sizes, **types, **statics, decode=False, deterministic=False)  # type: ignore[arg-type]
    return planner.plan_sizes(largest, fi.sm_count(device))


def _head_dims(p: Problem) -> Refusal | None:
    """What FlashInfer compiles, its merge of split keys included."""
    if (p.head_dim, p.v_head_dim) in ((64, 64), (128, 128), (256, 256), (192, 128)):
        return None
    return Refusal("head_dim, v_head_dim", (p.head_dim, p.v_head_dim), "64 | 128 | 256, or 192 with 128")


def _right(p: Problem) -> Refusal | None:
    return None if p.causal or p.window[1] < 0 else Refusal("window", p.window, "no right bound (but causal)")


def _sinks(p: Problem) -> Refusal | None:
    """The sink variant has no softcap."""
    return Refusal("softcap", True, "no (sinks)") if p.sinks and p.softcap else None


def _alike(p: Problem) -> Refusal | None:
    """One set of strides serves keys and values, but in FA2, the only one to take unlike head dims."""
    return None if p.pages_alike or p.head_dim != p.v_head_dim else Refusal("pages_alike", False, "key and value pages of equal strides")


PLAN_US = 700.0
"""Host time of a plan, about; the shipped table's `plan_us` has what was measured. A step makes one, a packed call one of its own."""


PAGED = phases(Roofline(16.7, 1.2, 0.52, 0.00056, 28_000), Roofline(15.4, 0.47, 0.65, 0.0035))
PACKED = Roofline(281.0, 0.47, 0.65, 0.0035)
"""Its launches wait for a plan, which the host makes in every call."""


NEEDS: tuple[Need, ...] = (
    arch(80, 86, 87, 89, 90, 100, 103, 120, 121),
    dtypes(torch.float16, torch.bfloat16),
    _head_dims,
    _right,
    _sinks,
    one_of("last_dim_contiguous", True),
    *without("mask", "kv_scales"),
)
ABOUT = "FlashInfer: decode and prefill, FA2 and FA3, planned by the host"
# A compiled graph is split around these. Planning waits for the device. The paged kernels themselves can be captured, and are when a
# graph is captured by hand; but Inductor's recorder makes copies of a partition's inputs, and those of a CPU tensor, the plan, it
# frees while it keeps writing to them (torch/_inductor/cudagraph_trees.py, reconstructed_inputs, seen in 2.11 and 2.13).
# FA2 adds up the weights that its matrix units are given.
_SHARED = {
    "packages": (fi.PACKAGE,),
    "tolerance": Tolerance(rounded_sums=True),
    "capture": Capture.NEVER,
    "invariant": Invariant(),
    "about": ABOUT,
}
register(
    Kernel(
        "flashinfer",
        "plan_paged_attention",
        plan_paged_attention,
        needs=NEEDS,
        cost_us=lambda p: PLAN_US,
        plan=Plan(sizes=plan_sizes),
        **_SHARED,  # type: ignore[arg-type]
    )
)
for _op, _run, _us, _more in (
    ("paged_attention", paged_attention, PAGED, (_alike, host_plan(planner.MAKER))),
    ("varlen_attention", varlen_attention, PACKED, ()),
):
    register(Kernel("flashinfer", _op, _run, needs=(*NEEDS, *_more), cost_us=_us, **_SHARED))  # type: ignore[arg-type]
