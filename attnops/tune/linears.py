"""The linear layers of models, whose times `attnops tune` and the suite `linear` measure."""

from __future__ import annotations

from collections.abc import Mapping

from attnops.measured import LinearShape


def products(hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, head_dim: int = 128) -> dict[str, LinearShape]:
    """The linears of a layer and of the logits, with what is around them. Without `inner` the layer has experts."""
    down = LinearShape(out_features=hidden, in_features=inner, residual=True)
    return {
        "qkv": LinearShape(out_features=(heads + 2 * kv_heads) * head_dim, in_features=hidden, norm=True),
        "o": LinearShape(out_features=hidden, in_features=heads * head_dim, residual=True),
        **({"gate_up": LinearShape(out_features=2 * inner, in_features=hidden, norm=True, activation=True), "down": down} if inner else {}),
        "head": LinearShape(out_features=vocabulary, in_features=hidden, norm=True),
    }


MODELS: Mapping[str, Mapping[str, LinearShape]] = {
    "llama-3-8b": products(4096, 32, 8, 14336, 128256),
    "qwen3-4b": products(2560, 32, 8, 9728, 151936),
    "llama-3.2-1b": products(2048, 32, 8, 8192, 128256, 64),
    "qwen3-8b": products(4096, 32, 8, 12288, 151936),
    "gemma-2-9b": products(3584, 16, 8, 14336, 256000, 256),
    "gpt-oss-20b": products(2880, 64, 8, 0, 201088, 64),
    "llama-3-70b-tp2": products(8192, 32, 4, 14336, 64128),
}
"""The most used first. Gemma's linears are timed with the parts of a Llama's."""

SHAPES = tuple(dict.fromkeys(shape for model in MODELS.values() for shape in model.values()))
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 17.0, 32.0, 33.0, 64.0)
"""Times of attnops' kernel are flat up to 16, 32 and 64 rows, which are the most that it takes."""
FEW_ROWS = (1.0, 2.0, 16.0, 32.0, 64.0)
"""The rows of a brief grid."""
