"""The calls of layers that carry a state that `attnops tune` times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnops.core.problem import Problem, altered
from attnops.ops.recurrent import conv, record, scan
from attnops.ops.recurrent.counted import KEPT
from attnops.ops.sweeps import SHORTEST, SINGLE, Sweep, decoding, toy
from attnops.ops.typical import BF16

RULE = Problem.kind("gated_delta_rule", **record.QWEN3_NEXT)
SCAN = Problem.kind("mamba2_scan", **scan.GRANITE_4)
CONV = Problem.kind("causal_conv1d", **BF16, in_features=8192, asks=conv.QWEN3_NEXT["asks"])

VALUES = {"causal_conv1d": {"activation": "silu"}}
"""Of arguments that are no tensors, where a kind asks for them."""


def _heads(kind: Problem, tokens: int, pool: Any) -> list[Tensor]:
    """Random numbers of a token: two of the key's size, one of the value's."""
    keys, values = (kind.kv_heads, kind.head_dim), (kind.q_heads, kind.v_head_dim)
    return [pool.take(tokens, *shape, dtype=kind.dtype) for shape in (keys, keys, values)]


def _rule(kind: Problem, batch: int, tokens: int, pool: Any) -> dict[str, Any]:
    """Decays and betas are in their bounds, so that states stay small at any length."""
    query, key, value = _heads(kind, tokens, pool)
    decay, beta = (pool.take(tokens, kind.q_heads, dtype=kind.dtype).sigmoid() for _ in range(2))
    state = batch, kind.q_heads, kind.head_dim, kind.v_head_dim
    return {
        "query": query,
        "key": key,
        "value": value,
        "decay": -decay.float(),
        "beta": beta,
        "normalize": True,
        "state": torch.zeros(state, device=pool.device),
        "output": torch.empty_like(value),
    }


def _scan(kind: Problem, batch: int, tokens: int, pool: Any) -> dict[str, Any]:
    """With all that published models have."""
    b, c, x = _heads(kind, tokens, pool)
    rate = softplus(pool.take(kind.q_heads, dtype=kind.dtype).float())
    state = batch, kind.q_heads, kind.v_head_dim, kind.head_dim
    return {
        "x": x,
        "dt": pool.take(tokens, kind.q_heads, dtype=kind.dtype),
        "a": -rate,
        "b": b,
        "c": c,
        "d": pool.take(kind.q_heads, dtype=kind.dtype),
        "dt_bias": pool.take(kind.q_heads, dtype=kind.dtype),
        "dt_softplus": True,
        "state": torch.zeros(state, device=pool.device),
        "output": torch.empty_like(x),
    }


def _conv(kind: Problem, batch: int, tokens: int, pool: Any) -> dict[str, Any]:
    channels, dtype = kind.in_features, kind.dtype
    bias = {"bias": pool.take(channels, dtype=dtype)} if "bias" in kind.asks else {}
    x = pool.take(tokens, channels, dtype=dtype)
    return {
        "x": x,
        "weight": pool.take(channels, KEPT, dtype=dtype),
        "state": torch.zeros(batch, channels, KEPT, dtype=dtype, device=pool.device),
        "output": torch.empty_like(x),
        **bias,
    }


MADE = {"gated_delta_rule": _rule, "mamba2_scan": _scan, "causal_conv1d": _conv}
"""The tensors of a call of so many requests and tokens, whose numbers have bounds."""

BATCHES = (1.0, 2.0, 8.0, 32.0, 128.0, 256.0)
FEW = (1.0, 8.0)
TOKENS = (2.0, 16.0, 64.0, 128.0, 512.0, 4096.0, 65536.0)


def _sweeps(turn: int, kind: Problem) -> tuple[Sweep, ...]:
    """Steps of one token, and more tokens of a request."""
    few = altered(toy(kind), in_features=24) if kind.in_features else toy(kind)
    return (
        Sweep(decoding(kind), BATCHES, SINGLE, SINGLE, turn),
        Sweep(kind, FEW, TOKENS, SINGLE, turn),
        Sweep(decoding(few), (1.0, 2.0), SINGLE, SINGLE, turn, "tiny"),
        Sweep(few, (1.0, 2.0), SHORTEST, SINGLE, turn, "tiny"),
    )


TIMED = {kind.op: _sweeps(7, kind) for kind in (RULE, SCAN, CONV)}
