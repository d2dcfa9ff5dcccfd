"""Stand-ins for the MLA ops of the sgl_kernel wheel (sglang-kernel 0.4.3): not the kernels.

The same schema strings, argument checks and shapes, over a plain torch body on the CPU, so that a wrapper's whole path runs where the
wheel cannot. Like the wheel they register one backend and no fake. Where the real kernels read unpredictably or return garbage,
these raise or return NaN. That a tensor is on CUDA is the one thing they do not check.
"""

import torch

from tests.standins.checks import architecture, check
from tests.standins.schemas import CUTLASS_DECODE, CUTLASS_SIZE, DECODE_FP8, DENSE_DECODE, METADATA_DENSE, METADATA_FP8

CALLS: list[str] = []
"""The stand-ins called, in order."""

HALVES = (torch.float16, torch.bfloat16)
SM_PARTS, METADATA_INTS = 132, 8


def keys_of(pages: torch.Tensor, table: torch.Tensor, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`[length, D]` latents of one request. A page id outside the pool is what the GPU calls an illegal memory access."""
    page = pages.shape[1]
    ids = table[: -(-length // page)]
    check(bool(((ids >= 0) & (ids < pages.shape[0])).all()), "CUDA error: an illegal memory access was encountered")
    keys = pages[ids.long()].flatten(0, 1)[:length]
    return (keys if dtype is None else keys.view(dtype)).float()


def dense_decode_fwd(q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, tile_scheduler_metadata, num_splits):
    CALLS.append("dense_decode_fwd")
    check(architecture() == 90, "Dense decode MLA is only supported on SM90a architecture")
    check(q.dtype in HALVES, "Expected q_dtype == torch::kBFloat16 || q_dtype == torch::kHalf to be true, but got false.")
    check(kcache.dtype == q.dtype, "query and key must have the same dtype")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(q.stride(-1) == 1, "q must have contiguous last dimension")
    check(kcache.stride(-1) == 1, "kcache must have contiguous last dimension")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    batch, queries, heads, dim = q.shape
    check(batch > 0, "batch size must be positive")
    check(dim in (576, 512) and head_size_v == 512, "head_size_k must be 576 or 512, head_size_v must be 512")
    check(kcache.shape[1] == 64, "Currently page_block_size must be 64")
    check(heads % kcache.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(kcache.shape[3] == dim, "kcache must have shape (num_blocks, page_block_size, num_heads_k, head_size_k)")
    check(tuple(seqlens_k.shape) == (batch,), "seqlens_k must have shape (batch_size)")
    check(block_table.dim() == 2 and block_table.shape[0] == batch, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
    check(kcache.shape[2] == 1 and queries == 1, "this stand-in takes one key head and one query")
    shape = (parts_of(heads), METADATA_INTS)
    if tile_scheduler_metadata is None:
        tile_scheduler_metadata, num_splits = schedule(seqlens_k, shape[0])
    else:
        check(num_splits is not None, "bad optional access")
        check(tile_scheduler_metadata.is_contiguous(), "tile_scheduler_metadata must be contiguous")
        check(num_splits.is_contiguous(), "num_splits must be contiguous")
        check(tile_scheduler_metadata.dtype == torch.int32, "tile_scheduler_metadata must have dtype torch::kInt32")
        check(num_splits.dtype == torch.int32, "num_splits must have dtype torch::kInt32")
        want = "(num_sm_parts, sizeof(DecodingSchedMeta)/sizeof(int))"
        check(tuple(tile_scheduler_metadata.shape) == shape, f"tile_scheduler_metadata must have shape {want}")
        check(tuple(num_splits.shape) == (batch + 1,), "num_splits must have shape (batch_size+1)")
        follows(seqlens_k, tile_scheduler_metadata, num_splits)
    out = q.new_empty(batch, queries, heads, head_size_v)
    lse = torch.empty(batch, heads, queries)
    for b, length in enumerate(seqlens_k.tolist()):
        keys = keys_of(kcache[:, :, 0], block_table[b], length)
        scores = q[b, 0].float() @ keys.T * softmax_scale
        # Without keys the accumulator is 0 and what it is divided by is set to 1.
        out[b, 0] = (torch.softmax(scores, -1) @ keys[:, :head_size_v]).to(q.dtype)
        lse[b, :, 0] = torch.logsumexp(scores, -1) if length else float("inf")
    return out, lse, tile_scheduler_metadata, num_splits


def parts_of(heads: int) -> int:
    return max(SM_PARTS // -(-heads // 64), 1)


def schedule(lengths: torch.Tensor, parts: int, float8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Not the real numbers, but like those they follow from the lengths and the number of parts."""
    # The last words of an entry are not written: 3 for float8, 1 else.
    tiles = torch.randint(1 << 30, (parts, METADATA_INTS), dtype=torch.int32)
    tiles[:, 2 : 5 if float8 else 7] = 0
    tiles[:, 0] = torch.arange(parts)
    tiles[:, 1] = int(lengths.sum())
    return tiles, torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])


def follows(lengths: torch.Tensor, tiles: torch.Tensor, splits: torch.Tensor, float8: bool = False) -> None:
    """The GPU would share out other keys than there are: results would be wrong, or memory read where there is none."""
    check(tiles.data_ptr() % (4 * METADATA_INTS) == 0, "CUDA error: misaligned address")
    own, ends = schedule(lengths, tiles.shape[0], float8)
    read = 5 if float8 else 7
    fits = torch.equal(tiles[:, :read], own[:, :read]) and torch.equal(splits, ends)
    check(fits, "CUDA error: an illegal memory access was encountered (a schedule of other lengths)")


def get_mla_decoding_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk):
    CALLS.append("get_mla_decoding_metadata")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(seqlens_k.shape[0] > 0, "batch size must be positive")
    check(not is_fp8_kvcache, "Use get_mla_decoding_metadata_dense_fp8 for dense fp8 metadata")
    check(topk is None and h_k == 1 and h_q in (None, num_q_tokens_per_head_k), "this stand-in takes one key head and one query")
    return list(schedule(seqlens_k, parts_of(num_q_tokens_per_head_k)))


def get_mla_decoding_metadata_dense_fp8(seqlens_k, num_heads_per_head_k, num_heads_k):
    CALLS.append("get_mla_decoding_metadata_dense_fp8")
    check(seqlens_k.is_contiguous() and seqlens_k.dtype == torch.int32, "seqlens_k must be contiguous int32")
    check(seqlens_k.shape[0] < 4096, "params.batch_size < MaxBatchSize")
    parts = SM_PARTS // num_heads_k // -(-num_heads_per_head_k // 64)
    return list(schedule(seqlens_k, parts, True))


def fwd_kvcache_mla_fp8(
    q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, tile_scheduler_metadata, num_splits, descale_q, descale_k
):
    CALLS.append("fwd_kvcache_mla_fp8")
    check(architecture() == 90, "Dense FP8 MLA is only supported on SM90")
    check(q.dtype == torch.float8_e4m3fn, "Expected q.dtype() == torch::kFloat8_e4m3fn to be true, but got false.")
    check(kcache.dtype == q.dtype, "query and key must have the same dtype")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(q.stride(-1) == 1, "q must have contiguous last dimension")
    check(kcache.stride(-1) == 1, "kcache must have contiguous last dimension")
    check(seqlens_k.is_contiguous() and num_splits.is_contiguous(), "seqlens_k must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    batch, queries, heads, dim = q.shape
    check(dim == 576 and head_size_v == 512, "Only head_size_k == 576 is supported")
    check(kcache.shape[1] == 64, "Currently page_block_size must be 64")
    check(batch > 0, "batch size must be positive")
    check(descale_q is not None and descale_k is not None, "descale is required when input dtype is fp8")
    check(descale_q.dtype == descale_k.dtype == torch.float32, "descale must have dtype float32")
    check(tuple(descale_q.shape) == tuple(descale_k.shape) == (1,), "descale_q must have shape (1)")
    check(tuple(seqlens_k.shape) == (batch,) and tuple(num_splits.shape) == (batch + 1,), "seqlens_k must have shape (batch_size)")
    check(tile_scheduler_metadata.shape[1] == METADATA_INTS, "tile_scheduler_metadata.size(1) == TileSchedulerMetaDataSize")
    check(queries == 1 and kcache.shape[2] == 1, "this stand-in takes one key head and one query")
    check(tile_scheduler_metadata.is_contiguous() and tile_scheduler_metadata.shape[0] == parts_of(heads), "not the parts of this call")
    follows(seqlens_k, tile_scheduler_metadata, num_splits, True)
    check(bool((seqlens_k > 0).all()), "CUDA error: an illegal memory access was encountered (a page table is read at -1)")
    out = torch.empty(batch, queries, heads, head_size_v, dtype=torch.bfloat16)
    lse = torch.empty(batch, heads, queries)
    for b, length in enumerate(seqlens_k.tolist()):
        keys = keys_of(kcache[:, :, 0].view(torch.uint8), block_table[b], length, kcache.dtype) * descale_k
        scores = q[b, 0].float() @ keys.T * (softmax_scale * descale_q)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        found = weights.to(q.dtype).float() @ keys[:, :head_size_v] / weights.sum(-1, keepdim=True)
        out[b, 0] = found.to(torch.bfloat16)
        lse[b, :, 0] = torch.logsumexp(scores, -1)
    return [out, lse]


def cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int) -> int:
    """The accumulators and sums of every split, float32: what is known of the formula."""
    return num_batches * num_kv_splits * 128 * (512 + 1) * 4


def cutlass_mla_decode(out, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits):
    CALLS.append("cutlass_mla_decode")
    sm = architecture()
    check(sm == 100, f"cutlass_mla_decode is only supported on compute capability 10.0, but found sm version {sm}")
    batch, heads, latent = q_nope.shape
    page = kv_c_and_k_pe_cache.shape[1]
    # The first group is asserted by the wheel's Python around the op; the kernel itself takes it on trust.
    assert heads == 128 and latent == 512 and tuple(q_pe.shape) == (batch, 128, 64) and kv_c_and_k_pe_cache.shape[2] == 576
    assert tuple(out.shape) == (batch, 128, 512) and page_table.shape[0] == batch and tuple(seq_lens.shape) == (batch,)
    assert page_table.shape[1] > 0 and page_table.shape[1] % (128 / page) == 0 and page in (1, 2, 4, 8, 16, 32, 64, 128)
    assert q_nope.dtype in HALVES and q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype == out.dtype
    assert seq_lens.dtype == page_table.dtype == torch.int32 and workspace.dtype == torch.uint8
    assert all(t.is_contiguous() for t in (out, q_nope, q_pe, seq_lens, page_table, workspace))
    check(num_kv_splits == 1, "the real kernel hangs or gives wrong results with more splits")
    size = cutlass_mla_get_workspace_size(page_table.shape[1] * page, batch, 0, num_kv_splits)
    check(workspace.numel() >= size, f"CUDA error: an illegal memory access was encountered (workspace of {size} bytes)")
    workspace.fill_(0xFF)
    for b, length in enumerate(seq_lens.tolist()):
        # Whole tiles of 128 keys are fetched, so every page id in them must exist.
        tile = keys_of(kv_c_and_k_pe_cache, page_table[b], -(-length // 128) * 128)[:length]
        scores = (q_nope[b].float() @ tile[:, :512].T + q_pe[b].float() @ tile[:, 512:].T) * sm_scale
        out[b] = (torch.softmax(scores, -1) @ tile[:, :512]).to(out.dtype) if length else float("nan")


LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
if not hasattr(torch.ops.sgl_kernel, "dense_decode_fwd"):
    LIBRARY.define(DENSE_DECODE)
    LIBRARY.impl("dense_decode_fwd", dense_decode_fwd, "CPU")
    LIBRARY.define(METADATA_DENSE)
    LIBRARY.impl("get_mla_decoding_metadata", get_mla_decoding_metadata, "CPU")
    LIBRARY.define(METADATA_FP8)
    LIBRARY.impl("get_mla_decoding_metadata_dense_fp8", get_mla_decoding_metadata_dense_fp8, "CPU")
    LIBRARY.define(DECODE_FP8)
    LIBRARY.impl("fwd_kvcache_mla_fp8", fwd_kvcache_mla_fp8, "CPU")
if not hasattr(torch.ops.sgl_kernel, "cutlass_mla_decode"):
    LIBRARY.define(CUTLASS_DECODE)
    LIBRARY.impl("cutlass_mla_decode", cutlass_mla_decode, "CPU")
    LIBRARY.define(CUTLASS_SIZE)
    LIBRARY.impl("cutlass_mla_get_workspace_size", cutlass_mla_get_workspace_size, "CompositeImplicitAutograd")
