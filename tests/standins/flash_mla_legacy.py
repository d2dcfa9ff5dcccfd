"""Stand-ins for FlashMLA's ops in the wheel sgl-flash-mla 1.0.0: not the kernels.

The bodies are those for the first wheel (sgl_kernel_mla, sgl_kernel_sparse), under the second
one's schemas: metadata that are given come back as the same tensors, and the lse of a prefill is
natural unless base 2 is asked for.
"""

import math

import torch

from tests.standins import sgl_kernel_mla as dense, sgl_kernel_sparse as sparse
from tests.standins.schemas import LEGACY_OPS

CALLS: list[str] = []
"""The stand-ins called, in order."""


def _called(name):
    CALLS.append(name)


def dense_decode_fwd(*given):
    _called("dense_decode_fwd")
    return dense.dense_decode_fwd(*given)


def fwd_kvcache_mla_fp8(*given):
    _called("fwd_kvcache_mla_fp8")
    return dense.fwd_kvcache_mla_fp8(*given)


def get_mla_decoding_metadata(*given):
    _called("get_mla_decoding_metadata")
    return dense.get_mla_decoding_metadata(*given)


def get_mla_decoding_metadata_dense_fp8(*given):
    _called("get_mla_decoding_metadata_dense_fp8")
    return dense.get_mla_decoding_metadata_dense_fp8(*given)


def sparse_decode_fwd(*given):
    _called("sparse_decode_fwd")
    # `kv_format` tells formats apart that have as many bytes a token; 656 bytes have one.
    *rest, kv_format = (*given, *[None] * (13 - len(given)))
    assert kv_format is None, "this stand-in takes the format of 656 bytes"
    return sparse.sparse_decode_fwd(*rest)


def sparse_prefill_fwd(
    q,
    kv,
    indices,
    sm_scale,
    d_v,
    attn_sink=None,
    topk_length=None,
    return_log2_stats=False,
    return_stats=True,
):
    _called("sparse_prefill_fwd")
    out, top, lse = sparse.sparse_prefill_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    if not return_stats:
        return [out, None, None]
    # The body for the first wheel gives the lse to base 2, and the largest logits natural.
    natural = lse * math.log(2.0)
    scale = 1.0 / math.log(2.0) if return_log2_stats else 1.0
    return [out, top * scale, natural * scale]


LIBRARY = torch.library.Library("flash_mla_legacy", "FRAGMENT")
if not hasattr(torch.ops.flash_mla_legacy, "dense_decode_fwd"):
    for schema in LEGACY_OPS:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, globals()[name], "CPU")
