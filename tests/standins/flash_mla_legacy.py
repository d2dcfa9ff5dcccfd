"""Stand-ins for FlashMLA's ops in the wheel sgl-flash-mla 1.0.0: not the kernels.

The bodies are those for the first wheel (sgl_kernel_mla, sgl_kernel_sparse), under the second
one's schemas: metadata that are given come back as the same tensors, and the lse of a prefill is
natural unless base 2 is asked for.
"""

import math

from tests.standins import sgl_kernel_mla as dense, sgl_kernel_sparse as sparse
from tests.standins.libraries import name_of, register
from tests.standins.schemas import LEGACY_OPS

CALLS: list[str] = []
"""The stand-ins called, in order."""


def sparse_decode_fwd(*given):
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
    out, top, lse = sparse.sparse_prefill_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    if not return_stats:
        return [out, None, None]
    # The body for the first wheel gives the lse to base 2, and the largest logits natural.
    natural = lse * math.log(2.0)
    scale = 1.0 / math.log(2.0) if return_log2_stats else 1.0
    return [out, top * scale, natural * scale]


OWN = {"sparse_decode_fwd": sparse_decode_fwd, "sparse_prefill_fwd": sparse_prefill_fwd}
BODIES = {
    schema: OWN.get(name_of(schema)) or getattr(dense, name_of(schema)) for schema in LEGACY_OPS
}
LIBRARY = register("flash_mla_legacy", BODIES, CALLS)
