"""Modules: dense, packed, jagged and paged attention, layers around it and latents, layers that
keep a state, torch's MultiheadAttention, and the paged cache."""

from attnops.cache import PagedBatch as PagedBatch, PagedCache as PagedCache
from attnops.nn.attention import Attention as Attention
from attnops.nn.dflash import DFlashHead as DFlashHead
from attnops.nn.drafts import (
    Draft as Draft,
    DraftState as DraftState,
    DraftTree as DraftTree,
    Proposal as Proposal,
)
from attnops.nn.eagle3 import Eagle3Head as Eagle3Head
from attnops.nn.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from attnops.nn.latent import (
    LatentDims as LatentDims,
    NewTokens as NewTokens,
    absorbed_weights as absorbed_weights,
    attend_absorbed as attend_absorbed,
    attend_expanded as attend_expanded,
    attend_float8 as attend_float8,
    attend_latents as attend_latents,
)
from attnops.nn.latent_attention import LatentAttention as LatentAttention
from attnops.nn.mamba2 import Mamba2 as Mamba2
from attnops.nn.mtp import MTPLayer as MTPLayer
from attnops.nn.multihead import MultiheadAttention as MultiheadAttention
from attnops.nn.packed import Packed as Packed, pack_linears as pack_linears
from attnops.nn.recurrent import RecurrentState as RecurrentState
from attnops.nn.rotary import RotaryEmbedding as RotaryEmbedding
from attnops.nn.self_attention import SelfAttention as SelfAttention
