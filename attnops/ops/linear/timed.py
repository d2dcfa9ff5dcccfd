"""The linear layers of models, whose times `attnops tune` and the suite `linear` measure."""

from __future__ import annotations

from collections.abc import Mapping

from attnops.core.problem import Problem
from attnops.ops.sweeps import SINGLE, Sweep
from attnops.ops.typical import BF16

VALUES = {"linear": {"norm_eps": 1e-5, "activation": "silu"}}
"""Of arguments that are no tensors, where a kind asks for them."""

NORM, GATE, RESIDUAL = ("norm_weight", "norm_eps"), ("activation",), ("residual",)


def product(outs: int, width: int, *asks: str) -> Problem:
    """The kind of a linear layer with a weight `[outs, width]`. asks: the arguments for what is
    around its product."""
    return Problem.kind(
        "linear", **BF16, out_features=outs, in_features=width, asks=frozenset(asks)
    )


def products(
    hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, head_dim: int = 128
) -> dict[str, Problem]:
    """The linears of a layer and of the logits, with what is around them. Without `inner` the layer
    has experts."""
    gated = {
        "gate_up": product(2 * inner, hidden, *NORM, *GATE),
        "down": product(hidden, inner, *RESIDUAL),
    }
    return {
        "qkv": product((heads + 2 * kv_heads) * head_dim, hidden, *NORM),
        "o": product(hidden, heads * head_dim, *RESIDUAL),
        **(gated if inner else {}),
        "head": product(vocabulary, hidden, *NORM),
    }


PARTS = {
    "qkv": "norm, then q, k and v",
    "o": "o and the residual",
    "gate_up": "norm, then gate and up with their activation",
    "down": "down and the residual",
    "head": "norm, then the logits",
}
"""What each product is, with what is around it."""

MODELS: Mapping[str, Mapping[str, Problem]] = {
    "llama-3-8b": products(4096, 32, 8, 14336, 128256),
    "qwen3-4b": products(2560, 32, 8, 9728, 151936),
    "llama-3.2-1b": products(2048, 32, 8, 8192, 128256, 64),
    "qwen3-8b": products(4096, 32, 8, 12288, 151936),
    "gemma-2-9b": products(3584, 16, 8, 14336, 256000, 256),
    "gpt-oss-20b": products(2880, 64, 8, 0, 201088, 64),
    "llama-3-70b-tp2": products(8192, 32, 4, 14336, 64128),
}
"""The most used first. Gemma's linears are timed with the parts of a Llama's."""

KINDS = tuple(dict.fromkeys(kind for model in MODELS.values() for kind in model.values()))
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 17.0, 32.0, 33.0, 64.0)
"""Times of attnops' kernel are flat up to 16, 32 and 64 rows, which are the most that it takes."""
FEW_ROWS = (1.0, 2.0, 16.0, 32.0, 64.0)
"""The rows of a brief grid."""

TIMED = {"linear": tuple(Sweep(kind, ROWS, SINGLE, SINGLE, 7, few=FEW_ROWS) for kind in KINDS)}
