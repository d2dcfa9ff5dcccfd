"""Arguments of the modules and the caches that are out of their range: each is refused by its
name."""

from typing import Any

import pytest
import torch

from attnops.cache import LatentCache, PagedCache
from attnops.nn import (
    Attention,
    LatentAttention,
    MultiheadAttention,
    RotaryEmbedding,
    SelfAttention,
)
from tests.modules import NAN, refused

CACHE = {"num_layers": 1, "max_requests": 2, "dtype": torch.float32, "device": "cpu"}
GOOD = {
    Attention: {"num_heads": 4, "head_dim": 8},
    SelfAttention: {"hidden_size": 24, "num_heads": 4, "qk_norm": True},
    LatentAttention: {"hidden_size": 24, "num_heads": 4},
    MultiheadAttention: {"embed_dim": 12, "num_heads": 3},
    RotaryEmbedding: {
        "head_dim": 16,
        "scaling": "yarn",
        "factor": 8.0,
        "original_max_position": 64,
        "beta_fast": 6.0,
        "beta_slow": 0.5,
    },
    PagedCache: CACHE
    | {
        "num_pages": 4,
        "page_size": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "max_pages_per_request": 3,
    },
    LatentCache: CACHE | {"num_tokens": 8, "max_tokens_per_request": 4},
}
WRONG: dict[Any, dict[str, Any]] = {
    Attention: {
        "num_heads": 4.0,
        "num_kv_heads": 3,
        "head_dim": 0,
        "v_head_dim": True,
        "window": (-2, 0),
        "softcap": NAN,
        "scale": float("inf"),
        "dropout": 1.0,
    },
    SelfAttention: {"hidden_size": 0, "head_dim": "6", "norm_eps": -1},
    LatentAttention: {
        "hidden_size": 0,
        "num_heads": 2.0,
        "q_lora_rank": 0,
        "kv_lora_rank": -1,
        "qk_nope_head_dim": True,
        "qk_rope_head_dim": 0,
        "v_head_dim": None,
        "norm_eps": -1.0,
        "scale": NAN,
        "absorb": True,
        "dropout": -0.1,
    },
    MultiheadAttention: {"embed_dim": 12.0, "num_heads": 5, "dropout": 1.5, "kdim": 0, "vdim": "6"},
    RotaryEmbedding: {
        "head_dim": 7,
        "theta": 1.0,
        "scaling": "ntk",
        "factor": 0.5,
        "original_max_position": None,
        "beta_slow": 0.0,
        "beta_fast": 0.1,
        "mscale": -1.0,
        "mscale_all_dim": "1",
        "attention_factor": NAN,
    },
    PagedCache: {
        "num_layers": 0,
        "num_pages": 1,
        "page_size": 2.0,
        "num_kv_heads": -1,
        "head_dim": 0,
        "v_head_dim": 0,
        "max_requests": True,
        "max_pages_per_request": "3",
        "dtype": torch.int64,
        "workspace_bytes": -1,
    },
    LatentCache: {
        "num_layers": 0,
        "num_tokens": 0,
        "latent_dim": 0,
        "rope_dim": 0,
        "max_requests": 0,
        "max_tokens_per_request": 0,
        "page_size": 2.5,
        "q_heads": 0,
        "max_new_tokens": 0,
        "workspace_bytes": -1,
        "dtype": torch.float8_e5m2,
        "kernels": "flashmla",
    },
}


@pytest.mark.parametrize(
    ("build", "field"), [(build, field) for build, fields in WRONG.items() for field in fields]
)
def test_out_of_range(build, field):
    value = WRONG[build][field]
    refused(lambda: build(**GOOD[build] | {field: value}), f"{field}: got {value!r}, want ")


TOGETHER = {
    "head_dim: got None, want an int, because hidden_size 10": lambda: SelfAttention(10, 4),
    "rope: got str, want a RotaryEmbedding": lambda: SelfAttention(24, 4, rope="yes"),
    "rope.head_dim: got 4, want 6, the layer's head_dim": lambda: SelfAttention(
        24, 4, rope=RotaryEmbedding(4)
    ),
    "rope.head_dim: got 4, want 64, the layer's qk_rope_head_dim": lambda: LatentAttention(
        24, 4, rope=RotaryEmbedding(4)
    ),
    "absorb: got 'never', want 'auto'": lambda: LatentAttention(24, 4, absorb="never"),
    "factor: got 2.0, want 1.0, because scaling is 'none'": lambda: RotaryEmbedding(8, factor=2.0),
    "theta: got 0.5, want a number >= 1.0": lambda: RotaryEmbedding(8, 0.5),
    "mscale: got 1.0, want None unless scaling is 'yarn'": lambda: RotaryEmbedding(8, mscale=1.0),
    "beta_fast: got 2.0, want > beta_slow = 2.0, because scaling is 'llama3'": lambda: (
        RotaryEmbedding(8, scaling="llama3", original_max_position=9, beta_fast=2.0, beta_slow=2.0)
    ),
    "original_max_position: got 64, want None unless": lambda: RotaryEmbedding(
        8, original_max_position=64
    ),
    "attention_factor: got 1.0, want None unless": lambda: RotaryEmbedding(
        8, scaling="linear", attention_factor=1.0
    ),
    "kernels: got (), want None, or at least one": lambda: LatentCache(
        **GOOD[LatentCache], kernels=()
    ),
    "kernels: got (1,), want None, or at least one": lambda: LatentCache(
        **GOOD[LatentCache], kernels=(1,)
    ),
}


@pytest.mark.parametrize("text", TOGETHER)
def test_that_do_not_go_together(text):
    refused(TOGETHER[text], text)
