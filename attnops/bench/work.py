"""The work of a model: bytes that a step reads, and operations of a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attnops.bench import Point
from attnops.hf.cache.names import argument
from attnops.hf.cache.other_layers import keeps_states, layers_with_states


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


def experts(config: Any) -> int:
    """How many a mixture of experts has; 0 without any."""
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    return next((many for n in names if (many := getattr(config, n, None))), 0)


def read_of(weight: Any, config: Any, tokens: int) -> float:
    """The bytes of a weight that so many tokens read. Of experts: the mean, if each is equally
    likely to be chosen."""
    many = experts(config)
    if weight.dim() < 3 or weight.shape[0] != many:
        return float(weight.nbytes)
    left = (1 - config.num_experts_per_tok / many) ** tokens
    return float(weight.nbytes * (1 - left))


def bytes_of(model: Any, point: Point) -> int:
    """The bytes a step must read, and those of states that it writes: weights without the
    embedding, cached keys and values, states."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    read = [p for p in model.parameters() if p is not embedding or tied]
    weights = sum(read_of(p, config, point.batch) for p in read)
    if layers_with_states(config):
        return int(weights + point.batch * _kept(model, point.context))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or point.context
    seen = sum(
        min(point.context, window) if kind == "sliding_attention" else point.context
        for kind in kinds
    )
    return int(weights + point.batch * seen * kv_width(config) * embedding.element_size())


@torch.no_grad()
def _kept(model: Any, tokens: int) -> int:
    """Bytes of the keys and values of a request of so many tokens, and twice those of its states,
    as transformers' cache has them after two tokens."""
    cache, prompt = DynamicCache(config=model.config), torch.ones(1, 2, dtype=torch.int64)
    model(prompt.to(model.device), **argument(model, cache), use_cache=True)
    found, layers = 0, list[Any](cache.layers)
    for layer in layers:
        keys = [x for n in ("keys", "values") if (x := getattr(layer, n, None)) is not None]
        found += sum(x.nbytes for x in keys) // 2 * tokens
        found += 2 * sum(x.nbytes for x in states_in(layer))
    return found


def states_in(layer: Any) -> list[Tensor]:
    """The states that a layer of transformers' cache keeps; none for one of keys alone."""
    if not keeps_states(layer):
        return []
    both = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [x for x in both if x is not None]


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
