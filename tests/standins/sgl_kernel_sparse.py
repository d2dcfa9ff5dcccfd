"""Stand-ins for FlashMLA's sparse ops in the sgl_kernel wheel (sglang-kernel 0.4.3): not the
kernels.

The same schema strings, argument checks and shapes, over a plain torch body on the CPU, so that a
wrapper's whole path runs where the wheel cannot. Like the wheel they register one backend and no
fake. Messages of checks are the wheel's. That a tensor is on CUDA is the one thing they do not
check; what the real kernels do not check and read regardless (slots past the pages, misaligned
rows), these raise for, and what comes of it there as garbage or NaN comes of it here as NaN.
"""

import torch

from tests.standins.checks import ALL, LAST, architecture, check, laid_out
from tests.standins.libraries import register
from tests.standins.schemas import SPARSE_DECODE, SPARSE_PREFILL
from tests.standins.sgl_kernel_mla import CALLS

LOG_BASE_OF_PREFILL: float | None = 2.0
"""2 as the wheel's docstring says and an H200 showed; None: natural."""

SM_PARTS, METADATA_INTS = 132, 8
BYTES, I32, PACKED = 656, torch.int32, (torch.float8_e4m3fn, torch.int8, torch.uint8)


def asserted(ok: bool, text: str) -> None:
    """KU_ASSERT: an exception that is no TORCH_CHECK's."""
    check(ok, f"Assertion `{text}` failed.")


def aligned(name: str, tensor: torch.Tensor, size: int) -> None:
    """Rows are loaded or described in pieces of `size` bytes; the GPU calls anything else a
    misaligned address."""
    strides = (
        n * tensor.element_size()
        for length, n in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if length > 1
    )
    good = tensor.data_ptr() % size == 0 and all(n % size == 0 for n in strides)
    check(good, f"CUDA error: misaligned address ({name}: {size} bytes)")


def attend(q, keys, valid, scale, sinks):
    """q `[n, h, d]`, keys `[n, topk, d]` zero where not `valid` `[n, topk]` -> (out, max, lse
    without sinks, +inf for none)."""
    # As the kernels do: masked before the scale.
    scores = (
        torch.einsum("nhd,nkd->nhk", q.float(), keys).masked_fill(~valid[:, None], float("-inf"))
        * scale
    )
    top = scores.amax(-1)
    lse = torch.logsumexp(scores, -1)
    below = lse if sinks is None else torch.logaddexp(lse, sinks.expand_as(lse))
    weights = torch.exp(scores - torch.where(below == float("-inf"), 0.0, below)[..., None])
    out = torch.einsum("nhk,nkd->nhd", weights, keys[..., :512])
    return out.to(q.dtype), top, torch.where(lse == float("-inf"), float("inf"), lse)


def sparse_decode_fwd(
    q,
    kv,
    indices,
    topk_length,
    attn_sink,
    tile_scheduler_metadata,
    num_splits,
    extra_kv,
    extra_indices,
    extra_topk_length,
    d_v,
    sm_scale,
):
    s = laid_out(
        q=(q, "b, s_q, h_q, d_qk", torch.bfloat16, LAST),
        kv=(kv, f"num_blocks, page_block_size, h_kv, {BYTES}", PACKED, LAST),
        indices=(indices, "b, s_q, topk", I32, LAST),
        topk_length=(topk_length, "b", I32, ALL),
        attn_sink=(attn_sink, "h_q", torch.float32, ALL),
    )
    batch = s.b
    queries = s.s_q
    heads = s.h_q
    topk = s.topk
    blocks = s.num_blocks
    page = s.page_block_size
    check(
        min(batch, queries, heads, topk) > 0,
        "Expected b > 0, s_q > 0, h_q > 0 and topk > 0 to be true, but got false.",
    )
    check(s.h_kv == 1, "Currently only MQA (i.e. h_kv == 1) is supported for sparse decoding")
    check(s.d_qk in (576, 512), "Only head_size_k == 576 or 512 is supported for sparse decoding")
    check(d_v == 512, "Only head_size_v == 512 is supported for sparse decoding")
    check(
        extra_kv is None and extra_indices is None and extra_topk_length is None,
        "this stand-in takes no extra pages",
    )
    check(s.d_qk == 576, "this stand-in takes 576")
    check(
        kv.stride(1) == BYTES,
        "The whole block must be contiguous when is_fp8_cache is True for kv cache",
    )
    check(heads in (64, 128), f"Unsupported h_q: {heads}")
    check(architecture() in (90, 100), "Unsupported architecture for sparse decode fwd")
    check(
        tile_scheduler_metadata is None and num_splits is None,
        "this stand-in takes no scheduler metadata",
    )
    asserted(topk % 64 == 0, "params.topk % TOPK_BLOCK_SIZE == 0")
    asserted(
        topk_length is None,
        "params.topk_length == nullptr, V3.2 does not support dynamic topk length",
    )
    aligned("q", q, 16)
    aligned("kv", kv, 16)
    aligned("indices", indices, 8)
    slots = indices.flatten(0, 1).long()
    valid = slots != -1
    # -1 alone is no slot; any other is read.
    check(
        bool(((slots >= -1) & (slots < blocks * page)).all()),
        "CUDA error: an illegal memory access was encountered",
    )
    rows = kv.view(torch.uint8)[slots.clamp(min=0) // page, slots.clamp(min=0) % page, 0]
    scales = rows[..., 512:528].clone().view(torch.float32).bfloat16().float()
    nope = rows[..., :512].clone().view(torch.float8_e4m3fn).float() * scales.repeat_interleave(
        128, -1
    )
    keys = torch.cat(
        [nope.bfloat16().float(), rows[..., 528:].clone().view(torch.bfloat16).float()], -1
    )
    out, _, lse = attend(
        q.flatten(0, 1), torch.where(valid[..., None], keys, 0.0), valid, sm_scale, attn_sink
    )
    metadata = torch.zeros(SM_PARTS, METADATA_INTS, dtype=torch.int32)
    lse = lse.unflatten(0, (batch, queries)).transpose(1, 2)
    return (
        out.unflatten(0, (batch, queries)),
        lse,
        metadata,
        torch.arange(batch + 1, dtype=torch.int32),
    )


def sparse_prefill_fwd(q, kv, indices, sm_scale, d_v, attn_sink=None, topk_length=None):
    good = architecture() in (90, 100)
    check(
        good, "Sparse Attention Forward Kernel is only supported on SM90a and SM100f architectures."
    )
    s = laid_out(
        q=(q, "s_q, h_q, d_qk", torch.bfloat16, LAST),
        kv=(kv, "s_kv, h_kv, d_qk", torch.bfloat16, LAST),
        indices=(indices, "s_q, h_kv, topk", I32, LAST),
        attn_sink=(attn_sink, "h_q", torch.float32, LAST),
        topk_length=(topk_length, "s_q", I32, LAST),
    )
    tokens, heads, topk, slots_in_all, kv_heads = s.s_q, s.h_q, s.topk, s.s_kv, s.h_kv
    check(s.d_qk in (576, 512), f"Invalid d_qk: {s.d_qk}")
    check(d_v == 512, f"Invalid d_v{d_v}")
    check(heads in (64, 128), f"Unsupported h_q: {heads}")
    asserted(kv_heads == 1, "params.h_kv == 1")
    asserted(topk % 128 == 0, "params.topk % (2*B_TOPK) == 0")
    asserted(topk > 0, "params.topk > 0")
    check(tokens > 0, "CUDA error: invalid configuration argument")  # a grid of no blocks
    aligned("q", q, 16)
    aligned("kv", kv, 16)
    aligned("indices", indices, 4 if architecture() == 90 else 32)
    slots = indices[:, 0].long()
    valid = (slots >= 0) & (slots < slots_in_all)
    if topk_length is not None:
        check(
            bool(((topk_length >= 0) & (topk_length <= topk)).all()),
            "CUDA error: an illegal memory access was encountered",
        )
        valid = valid & (torch.arange(topk) < topk_length[:, None])
    keys = kv[torch.where(valid, slots, 0), 0].float()
    out, top, lse = attend(q, torch.where(valid[..., None], keys, 0.0), valid, sm_scale, attn_sink)
    if LOG_BASE_OF_PREFILL is not None:
        lse = lse / torch.log(torch.tensor(LOG_BASE_OF_PREFILL))
    return [out, top, lse]


LIBRARY = register(
    "sgl_kernel", {SPARSE_DECODE: sparse_decode_fwd, SPARSE_PREFILL: sparse_prefill_fwd}, CALLS
)
