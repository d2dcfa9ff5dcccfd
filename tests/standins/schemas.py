"""What the wheels of sglang-kernel hold: each op's schema as it is written in the library, and the
versions that have it. Data only."""

from __future__ import annotations

from typing import NamedTuple

FIRST = "0.3.18"
"""The oldest wheel that was looked into; the newest is 0.4.10."""

READ_IN = "0.4.3"
"""The wheel the schemas below were read in, letter by letter but for runs of spaces."""

FLASH, FLASHMLA, COMMON = "flash_ops.*", "flashmla_ops.*", "sm*/common_ops.*"
"""Two builds of the last, for SM90 and for the other GPUs, hold the same ops."""


class Foreign(NamedTuple):
    """library: its file. since, dropped: the first version that has the op, and the first that has
    not ("": still there).

    since_schema, until_schema: the versions whose schema this is, the second exclusive ("": all).
    """

    library: str
    schema: str
    since: str = FIRST
    dropped: str = ""
    since_schema: str = READ_IN
    until_schema: str = ""

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


_SPARSE_ARGS = (
    "Tensor! q, Tensor k, Tensor v, Tensor block_count, Tensor block_offset, Tensor "
    "column_count, Tensor column_index, Tensor!? out, "
)
_CONVERT_ARGS = (
    "Tensor! block_count, Tensor! block_offset, Tensor! column_count, Tensor! column_index, "
    "Tensor q_seqlens, Tensor q_seqlens, "
    "Tensor vertical_indexes, Tensor slash_indexes, "
)

FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? "
    "out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? "
    "max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? "
    "rotary_sin, Tensor? seqlens_rotary, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool "
    "is_causal, int window_size_left, "
    "int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks) -> (Tensor(a!), Tensor, "
    "Tensor, Tensor)"
)
CUTLASS_DECODE = (
    "cutlass_mla_decode(Tensor! out, Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, "
    "Tensor seq_lens, Tensor page_table, "
    "Tensor! workspace, float sm_scale, int num_kv_splits) -> ()"
)
# Registered without a schema: torch infers this one from the C++ function, so that it stands in no
# library.
CUTLASS_SIZE = "cutlass_mla_get_workspace_size(int _0, int _1, int _2, int _3) -> int _0"
DENSE_DECODE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor "
    "block_table, float softmax_scale, "
    "bool is_causal, Tensor? tile_scheduler_metadata, Tensor? num_splits) -> (Tensor, Tensor, "
    "Tensor?, Tensor?)"
)
SPARSE_DECODE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? "
    "attn_sink, Tensor? tile_scheduler_metadata, "
    "Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, int "
    "d_v, float sm_scale) "
    "-> (Tensor, Tensor, Tensor?, Tensor?)"
)
SPARSE_PREFILL = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? "
    "attn_sink=None, "
    "Tensor? topk_length=None) -> Tensor[]"
)
DECODE_FP8 = (
    "fwd_kvcache_mla_fp8(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor "
    "block_table, float softmax_scale, "
    "bool is_causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor? descale_q, "
    "Tensor? descale_k) -> Tensor[]"
)
METADATA_DENSE = (
    "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, "
    "bool is_fp8_kvcache, int? topk) "
    "-> Tensor[]"
)
METADATA_FP8 = (
    "get_mla_decoding_metadata_dense_fp8(Tensor seqlens_k, int num_heads_per_head_k, int "
    "num_heads_k) -> Tensor[]"
)
FWD_SPARSE = (
    f"fwd_sparse({_SPARSE_ARGS}Tensor? alibi_slopes, float p_dropout, float softmax_scale, bool "
    "is_causal, float softcap, "
    "bool return_softmax, Generator? gen)-> Tensor[]"
)
VARLEN_FWD_SPARSE = (
    f"varlen_fwd_sparse({_SPARSE_ARGS}Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? "
    "seqused_k, Tensor? alibi_slopes, "
    "int max_seqlen_q, int max_seqlen_k, float p_dropout, float softmax_scale, bool "
    "zero_tensors, bool is_causal, float softcap, "
    "bool return_softmax, Generator? gen) -> Tensor[]"
)
CONVERT = (
    f"convert_vertical_slash_indexes({_CONVERT_ARGS}int context_size, int block_size_M, int "
    "block_size_N, bool causal) -> ()"
)
CONVERT_MERGEHEAD = (
    f"convert_vertical_slash_indexes_mergehead({_CONVERT_ARGS}Tensor vertical_indices_count, "
    "Tensor slash_indices_count, "
    "int context_size, int block_size_M, int block_size_N, bool causal) -> ()"
)

OPS = (
    Foreign(FLASH, FWD, since_schema="0.4.1.post1", until_schema="0.4.4"),
    Foreign(COMMON, CUTLASS_DECODE, dropped="0.4.7"),
    Foreign(COMMON, CUTLASS_SIZE, dropped="0.4.7"),
    Foreign(FLASHMLA, DENSE_DECODE, since="0.4.3"),
    Foreign(FLASHMLA, SPARSE_DECODE, since="0.4.3"),
    Foreign(FLASHMLA, SPARSE_PREFILL),
    Foreign(FLASHMLA, DECODE_FP8),
    Foreign(FLASHMLA, METADATA_DENSE),
    Foreign(FLASHMLA, METADATA_FP8),
    Foreign(COMMON, FWD_SPARSE, dropped="0.4.7"),
    Foreign(COMMON, VARLEN_FWD_SPARSE, dropped="0.4.7"),
    Foreign(COMMON, CONVERT, dropped="0.4.7"),
    Foreign(COMMON, CONVERT_MERGEHEAD, dropped="0.4.7"),
)
"""Every op that attnops wraps, and those it may."""

# Of sgl-flash-mla 1.0.0, in torch.ops.flash_mla_legacy: letter by letter, as its library holds
# them.
_LEGACY_META = "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits"
_LEGACY_RESULTS = "(Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
LEGACY_DENSE_DECODE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor "
    "block_table, "
    f"float softmax_scale, bool is_causal, {_LEGACY_META}) -> {_LEGACY_RESULTS}"
)
LEGACY_SPARSE_DECODE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? "
    "attn_sink, "
    f"{_LEGACY_META}, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, int d_v, "
    f"float sm_scale, str? kv_format=None) -> {_LEGACY_RESULTS}"
)
LEGACY_SPARSE_PREFILL = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, "
    "Tensor? attn_sink=None, Tensor? topk_length=None, bool return_log2_stats=False, "
    "bool return_stats=True) -> Tensor?[]"
)
LEGACY_OPS = (
    LEGACY_DENSE_DECODE,
    LEGACY_SPARSE_DECODE,
    LEGACY_SPARSE_PREFILL,
    METADATA_DENSE,
    METADATA_FP8,
    DECODE_FP8,
)
"""FlashMLA's ops that attnops wraps, as the second wheel has them. The last three are the
first's."""

BY_NAME = {foreign.name: foreign for foreign in OPS}
