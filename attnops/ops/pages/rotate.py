"""What comes before attention over new tokens, as one op: norm and rotation of query and key, and
the write of the new key and value into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, INDEX, KW_ONLY, Call, arg, record
from attnops.ops import typical
from attnops.ops.pages import decode_reference
from attnops.ops.pages.decode import angle_rules
from attnops.ops.rules import HEADS

ANGLES = "T, D | D // 2"


@record(
    "rotate_and_write_kv",
    least={"page": ">= 1 token a page", **HEADS},
    rules=angle_rules,
    problem={"kv_dtype": "k_pages"},
)
class RotateAndWriteKV(Call):
    """Norm and rotation of new queries and keys, and the write of the keys and values into
    pages."""

    query: Tensor = arg("T, Hq, D", FLOATS, unit_stride=True, holds="queries")
    key: Tensor = arg("T, Hkv, D", "query", unit_stride=True, holds="new_keys")
    value: Tensor = arg("T, Hkv, Dv", "query", unit_stride=True, holds="new_keys")
    k_pages: Tensor = arg("P, page, Hkv, D", "query", written=True, unit_stride=True, holds="pages")
    v_pages: Tensor = arg(
        "P, page, Hkv, Dv", "k_pages", written=True, unit_stride=True, holds="pages"
    )
    slots: Tensor = arg("T", INDEX, holds="slots_of_tokens")
    cos: Tensor = arg(ANGLES, FLOATS)
    sin: Tensor = arg(ANGLES, "cos")
    q_norm: Tensor | None = arg("D", FLOATS, default=None)
    k_norm: Tensor | None = arg("D", FLOATS, default=None)
    _: KW_ONLY
    eps: float = arg(default=1e-6, least=0, always=True)
    turned_query: Tensor = arg("T, Hq, D", "query", written=True, unit_stride=True)
    turned_key: Tensor = arg("T, Hkv, D", "query", written=True, unit_stride=True)


ROTATE = define(
    Op(
        RotateAndWriteKV,
        decode_reference.rotate_and_write_kv,
        about="norm and rotation of new queries and keys, and the write into pages",
        typical=({**typical.HEADS, **typical.NEW, "page_size": 64},),
        shown=("float32",),
    )
)


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    turned_query: Tensor | None = None,
    turned_key: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate the queries and keys of new tokens, and write the keys and values into their
    slots. No gradient.

    The same as an RMS norm and rotation of query and key, then `write_kv`, without the roundings
    between norm and rotation. `decode_attention` attends, too, for one token a request.

    Args:
        query: `[T, Hq, D]`, before norm and rotation. key, value: `[T, Hkv, D]`, `[T, Hkv, Dv]`, in
            the query's dtype.
        k_pages, v_pages: `[P, page, Hkv, D]`, `[P, page, Hkv, Dv]`, the query's dtype, written.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the write
            of the token. Distinct among written tokens.
        cos, sin: `[T, D]`, any float dtype: number i of a head pairs with number i + D / 2. `[T, D
            / 2]` serves both halves.
        q_norm, k_norm: `[D]`, weights of an RMS norm of each head before the rotation. None: no
            norm.
        eps: of the norms.
        turned_query, turned_key: `[T, Hq, D]`, `[T, Hkv, D]` to write into, the query's dtype, of
            other memory than the inputs; allocated when None.
        kernel: force a kernel by name for this call.

    Returns:
        (`turned_query`, `turned_key`).

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(query=query, key=key)
    if turned_query is None:
        turned_query = torch.empty((*query.shape,), dtype=query.dtype, device=query.device)
    if turned_key is None:
        turned_key = torch.empty((*key.shape,), dtype=key.dtype, device=key.device)
    ROTATE(
        RotateAndWriteKV(
            query,
            key,
            value,
            k_pages,
            v_pages,
            slots,
            cos,
            sin,
            q_norm,
            k_norm,
            eps=eps,
            policy=key_for("rotate_and_write_kv", kernel),
            turned_query=turned_query,
            turned_key=turned_key,
        )
    )
    return turned_query, turned_key
