"""The causal biases of torch.nn.attention.bias: masks without numbers, of which torch itself reads a rule and two sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail


def is_bias(mask: Any) -> bool:
    """Is it a `torch.nn.attention.bias.CausalBias`? By its name: the import of that module loads the compiler."""
    cls = type(mask)
    return cls.__name__ == "CausalBias" and cls.__module__ == "torch.nn.attention.bias"


def is_lower_right(bias: Any) -> bool:
    """Is the last query at the last key? Of as many keys as queries both variants mean the same."""
    return bool(bias.variant.name == "LOWER_RIGHT" or bias.seq_len_q == bias.seq_len_kv)


def as_rule(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor, kv_end: Tensor | None = None) -> tuple[Tensor | None, bool]:
    """(mask, causal) of a call. A bias becomes the flag where both mean the same, and else a bool mask `[S, K]`.

    Args:
        query: `[B, S, Hq, D]`. key: `[B, K, Hkv, D]`.
        kv_end: moves the flag's last visible key, and no key of a bias.

    Raises:
        InvalidInput: a bias of other sizes than S and K.
    """
    dense = isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() == 4
    if not is_bias(mask) or not dense:
        return mask, causal  # the op refuses what is not dense
    bias: Any = mask
    queries, keys = query.shape[1], key.shape[1]
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        fail(InvalidInput, "mask", f"a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys", f"{queries} and {keys}")
    lower_right = is_lower_right(bias)
    if lower_right and kv_end is None:
        return None, True
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return seen.tril(keys - queries if lower_right else 0), causal
