"""Random calls of the gradients, each from a seed: rules that the grid does not combine, on lengths
that it does not have."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from attnops.testing import Call, Features, Source, gradient_call, make_call

OPS = ("attention_backward", "varlen_attention_backward")
SHORT, TILES = (0, 1, 2, 3, 5, 8), (0, 1, 3, 17, 64, 65, 100, 130, 200)
"""Lengths in tokens: of small calls, and those about the edges of tiles."""


def features(
    draw: random.Random, dtypes: Sequence[torch.dtype], head_dims: Sequence[int]
) -> Features:
    """Random rules. Half the time they are off, so that kernels of few rules get calls, too."""
    kv_heads, bare = draw.choice([1, 2]), draw.random() < 0.45
    f = Features(
        dtype=draw.choice(dtypes),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw.choice([1, 2, 3]),
        head_dim=draw.choice(head_dims),
        v_head_dim=None if bare else draw.choice([None, None, 16, 20]),
        causal=draw.random() < 0.6,
    )
    if bare:
        return f
    rules: dict[str, Any] = {
        "window": draw.choice([(-1, -1), (-1, -1), (2, -1), (20, -1), (70, 30), (0, 0)]),
        "chunk": draw.choice([0, 0, 0, 3, 7, 50]),
        "softcap": draw.choice([0.0, 0.0, 2.0]),
        "sinks": draw.choice([None, torch.float32]),
        "mask": draw.choice(["none", "none", "bool", "additive"]),
        "mask_shape": draw.choice(["bhq", "b", "h", "q", ""]),
    }
    return Features(
        **{
            n: getattr(f, n)
            for n in ("dtype", "kv_heads", "q_heads", "head_dim", "v_head_dim", "causal")
        },
        **rules,
    )


def drawn(
    draw: random.Random,
    source: Source,
    f: Features,
    lengths: Sequence[int],
    op: str = "",
    least: int = 0,
    fewest: int = 1,
) -> Call:
    """A call with these rules. op: which of the two; "": any. least: tokens that some request has
    at least, of queries and of keys. fewest: requests of a dense call."""
    lse_grad = draw.random() < 0.2
    if op == OPS[1] or (not op and draw.random() < 0.5):
        pairs = [(draw.choice(lengths), draw.choice(lengths)) for _ in range(draw.randint(0, 4))]
        pairs += [(least + draw.choice(lengths), least + draw.choice(lengths))] * (least > 0)
        q_lens, k_lens = [q for q, _ in pairs], [k for _, k in pairs]
        return gradient_call(
            source,
            make_call(
                "varlen_attention", source, q_lens, k_lens, f, padding=draw.choice([(0, 0), (2, 3)])
            ),
            lse_grad=lse_grad,
        )
    batch = draw.randint(fewest, 3)
    queries = least + draw.choice(lengths)
    keys = least + draw.choice(lengths)
    queries = keys if draw.random() < 0.6 else queries
    ends = [sorted((draw.randint(0, keys), draw.randint(0, keys))) for _ in range(batch)]
    ranged = draw.random() < 0.2
    ranges: dict[str, Any] = (
        {
            "kv_start": [low for low, _ in ends],
            "kv_end": [high for _, high in ends],
            "index": torch.int32,
        }
        if ranged
        else {}
    )
    forward = make_call("attention", source, batch, queries, keys, f, **ranges)
    return gradient_call(
        source, forward, mask_grad=f.mask == "additive" and draw.random() < 0.7, lse_grad=lse_grad
    )
