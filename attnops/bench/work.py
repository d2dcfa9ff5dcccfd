"""The work of a model: bytes that a step reads, and operations of a prompt."""

from __future__ import annotations

from typing import Any

from attnops.bench import Point


def heads(config: Any) -> tuple[int, int, int]:
    """(query heads, key heads, the width of a head). Raises AttributeError or TypeError if layers
    differ."""
    many = config.num_attention_heads
    return (
        many,
        getattr(config, "num_key_value_heads", None) or many,
        getattr(config, "head_dim", None) or config.hidden_size // many,
    )


def kv_width(config: Any) -> int:
    """Numbers of the keys and values of a token in one layer. Raises as `heads`."""
    _, kv_heads, head_dim = heads(config)
    return int(2 * kv_heads * head_dim)


def experts(config: Any) -> bool:
    """Is it the config of a mixture of experts?"""
    return any(
        getattr(config, n, None) for n in ("num_local_experts", "n_routed_experts", "num_experts")
    )


def bytes_of(model: Any, point: Point) -> int:
    """The bytes a step must read: weights without the embedding, cached keys and values. 0 if it
    reads some experts of many."""
    config = model.config
    if experts(config):
        return 0
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(p.nbytes for p in model.parameters() if p is not embedding or tied)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or point.context
    seen = sum(
        min(point.context, window) if kind == "sliding_attention" else point.context
        for kind in kinds
    )
    return int(weights + point.batch * seen * kv_width(config) * embedding.element_size())


def flop_of(model: Any, lengths: list[int]) -> int:
    """Operations of the products and of causal attention, without the embedding and the logits. 0
    if a token sees some experts of many."""
    config = model.config
    if experts(config) or getattr(config, "sliding_window", None):
        return 0
    kept = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in kept)
    q_heads, _, head_dim = heads(config)
    return int(
        2 * weights * sum(lengths)
        + 2 * config.num_hidden_layers * q_heads * head_dim * sum(n * n for n in lengths)
    )
