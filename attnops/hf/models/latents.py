"""Modules of Multi-head Latent Attention: their sizes, and up to how many tokens they attend
without unfolding latents."""

from __future__ import annotations

from typing import Any

from attnops.nn.latent import LatentDims

ABSORB_UP_TO = 1
"""New tokens of a request, above which the first tokens of an empty cache are attended to in
expanded form."""


def dims_of(module: Any) -> LatentDims:
    """The sizes of an MLA module."""
    return LatentDims(
        module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank, module.v_head_dim
    )
