"""Modules: attention in any of its three forms, a self-attention layer, and torch's MultiheadAttention. And the paged cache."""

from attnops.cache import PagedBatch as PagedBatch
from attnops.cache import PagedCache as PagedCache
from attnops.nn.attention import Attention as Attention
from attnops.nn.multihead import MultiheadAttention as MultiheadAttention
from attnops.nn.rotary import RotaryEmbedding as RotaryEmbedding
from attnops.nn.self_attention import SelfAttention as SelfAttention
