"""The launch that rotates and writes new tokens. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnops.core.kernel import deterministic
from attnops.kernels.shared.launch.gpu import flat, launch, steady
from attnops.kernels.shared.sizes import padded
from attnops.kernels.triton.device.rotate import rotate
from attnops.kernels.triton.launch.decode import rotation

if TYPE_CHECKING:
    from attnops.ops.pages.rotate import RotateAndWriteKV

NUMBERS = 2048
"""Those of one program: 16 a thread of four warps. One number serves every batch, so that the order
of a norm's sum does not follow from the batch."""


def rotate_and_write_kv(call: RotateAndWriteKV) -> None:
    """Write `turned_query`, `turned_key` and the pages."""
    query, key, value = call.query, call.key, call.value
    (tokens, heads, dims), (pages, page, kv_heads, _) = query.shape, call.k_pages.shape
    if tokens == 0:
        return
    if deterministic(call.policy):
        # Only norms add numbers up.
        query = query if call.q_norm is None else steady(query)
        key = key if call.k_norm is None else steady(key)
    cos, cos_t, sin, sin_t = rotation(call.cos, call.sin)
    block, value_block = padded(dims), padded(value.shape[2])
    rows = max(1, NUMBERS // max(block, value_block))
    launch(
        rotate,
        (-(-tokens // rows), heads + 2 * kv_heads),
        {
            "D": dims,
            "BLOCK_D": block,
            "VALUE_D": value.shape[2],
            "VALUE_BLOCK": value_block,
            "WIDTH": call.cos.shape[1],
            "PAGE": page,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "BLOCK_T": rows,
        },
        (
            query,
            *query.stride()[:2],
            key,
            *key.stride()[:2],
            value,
            *value.stride()[:2],
            call.k_pages,
            *call.k_pages.stride()[:3],
            call.v_pages,
            *call.v_pages.stride()[:3],
            call.slots,
            call.slots.stride(0),
            cos,
            cos_t,
            sin,
            sin_t,
            call.turned_query,
            *call.turned_query.stride()[:2],
            call.turned_key,
            *call.turned_key.stride()[:2],
            flat(call.q_norm),
            flat(call.k_norm),
            call.eps,
            tokens,
            pages * page,
        ),
    )
