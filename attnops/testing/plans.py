"""`PLAN_CASES`: the grid of the ops that plan on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnops.inputs import plan_call
from attnops.kernel import kernels_of
from attnops.testing import builders, latent
from attnops.testing.builders import Pages
from attnops.testing.inputs import Call, Features, Source, table


def _plan(attention: Callable[..., Call], words: int, gpu_bytes: int) -> Callable[..., Call]:
    def build(source: Source, *lengths: Any, **more: Any) -> Call:
        call = attention(source, *lengths, **more)
        # Enough for any kernel: on a GPU, some bytes for each multiprocessor.
        size = gpu_bytes if source.device.type == "cuda" else 1 << 21
        buffers = torch.zeros(words, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of(f"plan_{call.op}")["reference"], buffers)

    return build


_LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=8, causal=True)
PAGED: dict[str, tuple[Any, ...]] = {
    "decode": ((1, 1, 1), (5, 40, 16), 16, _LLAMA),
    "decode_padded": ((1, 0, 1), (5, 3, 33), 16, _LLAMA),
    "extend": ((1, 4, 0, 2), (6, 4, 0, 21), 16, _LLAMA),
    "window": ((1, 4), (6, 40), 16, replace(_LLAMA, window=(7, -1))),
    "sinks": ((1, 4), (6, 40), 16, replace(_LLAMA, sinks=torch.bfloat16)),
    "softcap": ((1, 4), (6, 40), 16, replace(_LLAMA, softcap=30.0, dtype=torch.float16, head_dim=64)),
    "not_causal": ((1, 4), (6, 40), 1, replace(_LLAMA, causal=False, head_dim=256)),
    "unlike_dims": ((3, 4), (6, 40), 64, replace(_LLAMA, head_dim=192, v_head_dim=128)),
    "no_requests": ((), (), 4, _LLAMA),
    "no_table": ((1, 1), (0, 0), 4, _LLAMA, {"pages": Pages(wider=0)}),
    "nothing": ((), (), 4, _LLAMA, {"padding": 0, "pages": Pages(0, 0)}),
}
LATENT: dict[str, tuple[Any, ...]] = {
    "decode": ((1, 1, 1), (5, 40, 16), 16, latent.DEEPSEEK),
    "decode_padded": ((1, 0, 1), (5, 3, 33), 64, latent.DEEPSEEK),
    "decode_heads_128": ((1, 1), (5, 300), 64, replace(latent.DEEPSEEK, q_heads=128)),
    "extend": ((1, 4, 0, 2), (6, 4, 0, 21), 1, latent.DEEPSEEK),
    "not_causal": ((1, 4), (6, 40), 64, replace(latent.DEEPSEEK, causal=False, dtype=torch.float16)),
    "no_requests": ((), (), 64, latent.DEEPSEEK),
    "no_table": ((1, 1), (0, 0), 64, latent.DEEPSEEK, {"pages": Pages(wider=0)}),
    "nothing": ((), (), 64, latent.DEEPSEEK, {"padding": 0, "pages": Pages(0, 0)}),
}
PLAN_CASES = {
    "plan_paged_attention": table("plan_paged_attention", _plan(builders.paged, 1 << 15, 1 << 26), PAGED),
    "plan_mla_attention": table("plan_mla_attention", _plan(latent.mla, 1 << 17, 1 << 25), LATENT),
}
