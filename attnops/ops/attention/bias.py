"""The causal biases of torch.nn.attention.bias: objects of which torch reads a rule and two sizes.

As tensors they are memory that nobody fills.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail


def is_bias(mask: Any) -> bool:
    """Is it a `torch.nn.attention.bias.CausalBias`?"""
    # By its name: the import of that module loads the compiler.
    cls = type(mask)
    return cls.__name__ == "CausalBias" and cls.__module__ == "torch.nn.attention.bias"


def as_rule(
    mask: Tensor | None,
    causal: bool,
    query: Tensor,
    key: Tensor,
    kv_end: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """(mask, causal) of a call. A bias becomes the flag if both mean the same, else a bool mask.

    Args:
        query: `[B, S, Hq, D]`. key: `[B, K, Hkv, D]`.
        kv_end: moves the last key that the flag shows, but no key of a bias.

    Raises:
        InvalidInput: a bias of other sizes than S and K.
    """
    dense = isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() == 4
    if not is_bias(mask) or not dense:
        return mask, causal  # the op refuses what is not dense
    bias: Any = mask
    queries, keys = query.shape[1], key.shape[1]
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        got = f"a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys"
        fail(InvalidInput, "mask", got, f"one of {queries} queries and {keys} keys")
    lower_right = bias.variant.name == "LOWER_RIGHT" or queries == keys
    if lower_right and kv_end is None:
        return None, True
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return seen.tril(keys - queries if lower_right else 0), causal
