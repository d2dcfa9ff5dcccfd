"""`PLAN_CASES`: the grid of the ops that plan on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnops.inputs import plan_call
from attnops.kernel import kernels_of
from attnops.testing import builders, latent
from attnops.testing.inputs import Call, Case, Features, Source


def _case(label: str, q_lens: Sequence[int], seq_lens: Sequence[int], page: int, f: Features, **more: Any) -> Case:
    def build(source: Source) -> Call:
        call = builders.paged(source, q_lens, seq_lens, page, f, **more)
        # Enough for any kernel: on a GPU, some bytes for each multiprocessor.
        size = 1 << (26 if source.device.type == "cuda" else 21)
        buffers = torch.zeros(1 << 15, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of("plan_paged_attention")["reference"], buffers)

    return Case("plan_paged_attention", label, build)


def _latent(label: str, q_lens: Sequence[int], seq_lens: Sequence[int], page: int, f: Features, **more: Any) -> Case:
    def build(source: Source) -> Call:
        call = latent.mla(source, q_lens, seq_lens, page, f, **more)
        # As above; the needs of FlashInfer's latent planner depend on the GPU alone.
        size = 1 << (25 if source.device.type == "cuda" else 21)
        buffers = torch.zeros(1 << 17, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of("plan_mla_attention")["reference"], buffers)

    return Case("plan_mla_attention", label, build)


_LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=8, causal=True)
PLAN_CASES: dict[str, tuple[Case, ...]] = {
    "plan_paged_attention": (
        _case("decode", (1, 1, 1), (5, 40, 16), 16, _LLAMA),
        _case("decode_padded", (1, 0, 1), (5, 3, 33), 16, _LLAMA),
        _case("extend", (1, 4, 0, 2), (6, 4, 0, 21), 16, _LLAMA),
        _case("window", (1, 4), (6, 40), 16, replace(_LLAMA, window=(7, -1))),
        _case("sinks", (1, 4), (6, 40), 16, replace(_LLAMA, sinks=torch.bfloat16)),
        _case("softcap", (1, 4), (6, 40), 16, replace(_LLAMA, softcap=30.0, dtype=torch.float16, head_dim=64)),
        _case("not_causal", (1, 4), (6, 40), 1, replace(_LLAMA, causal=False, head_dim=256)),
        _case("unlike_dims", (3, 4), (6, 40), 64, replace(_LLAMA, head_dim=192, v_head_dim=128)),
        _case("no_requests", (), (), 4, _LLAMA),
        _case("no_table", (1, 1), (0, 0), 4, _LLAMA, wider=0),
        _case("nothing", (), (), 4, _LLAMA, padding=0, spare=0, wider=0),
    ),
    "plan_mla_attention": (
        _latent("decode", (1, 1, 1), (5, 40, 16), 16, latent.DEEPSEEK),
        _latent("decode_padded", (1, 0, 1), (5, 3, 33), 64, latent.DEEPSEEK),
        _latent("decode_heads_128", (1, 1), (5, 300), 64, replace(latent.DEEPSEEK, q_heads=128)),
        _latent("extend", (1, 4, 0, 2), (6, 4, 0, 21), 1, latent.DEEPSEEK),
        _latent("not_causal", (1, 4), (6, 40), 64, replace(latent.DEEPSEEK, causal=False, dtype=torch.float16)),
        _latent("no_requests", (), (), 64, latent.DEEPSEEK),
        _latent("no_table", (1, 1), (0, 0), 64, latent.DEEPSEEK, wider=0),
        _latent("nothing", (), (), 64, latent.DEEPSEEK, padding=0, spare=0, wider=0),
    ),
}
