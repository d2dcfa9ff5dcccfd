"""Fields of the Problems of usual calls, for `Op.typical`: those of a Llama of 8 billion
parameters, and of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import torch

from attnops.core.problem import Extent

Leaves = dict[str, Any]

BF16: Leaves = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
FLOAT8: Leaves = {"dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn, "kv_scales": True}

NEW: Leaves = {"tokens": Extent.of(512)}
STEP: Leaves = {"tokens": Extent(8, 8, 8)}
SIZES: Leaves = {
    "tokens": Extent.of(4096),
    "batch": Extent.of(8),
    "queries": Extent.of(512),
    "context": Extent.of(512),
}
DECODE: Leaves = {**STEP, "queries": Extent(1, 1, 1), "context": Extent.of(4096)}

HEADS: Leaves = {**BF16, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
PREFILL: Leaves = {**HEADS, **SIZES, "causal": True}
PAGES: Leaves = {**HEADS, "q_heads": 0, "page_size": 64}
MERGE: Leaves = {**BF16, "q_heads": 32, "v_head_dim": 128, "lse": True, **NEW}

LATENT: Leaves = {"q_heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
DEEPSEEK: Leaves = {**BF16, **LATENT, "rope_dim": 64, "page_size": 64}
LATENT_WRITE: Leaves = {**DEEPSEEK, "q_heads": 0, **NEW}

WORKSPACE: Leaves = {"workspace": 1 << 40}
"""Large enough for any kernel. Callers allocate `attnops.explain(...).workspace_bytes`."""

SHOWN = ("float32", "float8 keys", "float8 query", "equal bits")
"""For `Op.shown`, of attention."""

PLANS: tuple[Leaves, ...] = (WORKSPACE, {**WORKSPACE, "plan": "host"})
