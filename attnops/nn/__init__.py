"""Modules: dense, packed and paged attention, layers around it and around latents, torch's MultiheadAttention, and the paged cache."""

from attnops.cache import PagedBatch as PagedBatch
from attnops.cache import PagedCache as PagedCache
from attnops.nn.absorb import absorbed_weights as absorbed_weights
from attnops.nn.attention import Attention as Attention
from attnops.nn.latent import LatentDims as LatentDims
from attnops.nn.latent import attend_absorbed as attend_absorbed
from attnops.nn.latent import attend_expanded as attend_expanded
from attnops.nn.latent import attend_float8 as attend_float8
from attnops.nn.latent import attend_latents as attend_latents
from attnops.nn.latent_attention import LatentAttention as LatentAttention
from attnops.nn.multihead import MultiheadAttention as MultiheadAttention
from attnops.nn.packed import Packed as Packed
from attnops.nn.packed import pack_linears as pack_linears
from attnops.nn.rotary import RotaryEmbedding as RotaryEmbedding
from attnops.nn.self_attention import SelfAttention as SelfAttention
