"""The problem grid at the sizes GPU kernels are built for: page sizes, head ratios, head dims,
dtypes and lengths up to 32k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.ops.case_data import Rows
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Case, Features, Source
from attnops.testing.cases import table

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

TIGHT = {"padding": 0}


class DeviceSource(Source):
    """As Source, but the large tensors are made on the device: a cache of 32k tokens is not copied
    there."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        super().__init__(seed, device)
        self.there = torch.Generator(self.device).manual_seed(seed)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
    ) -> Tensor:
        return (torch.randn(shape, generator=self.there, device=self.device) * spread).to(dtype)

    def stored(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.normal(*shape, dtype=dtype, spread=8.0 if dtype in QUANTISED else 1.0)


def _decode(page: int, *lengths: int) -> tuple[Any, ...]:
    return (1,) * len(lengths), lengths, page, TIGHT


LLAMA = Features(dtype=BF16, q_heads=8, kv_heads=2, head_dim=128, causal=True, lse=True)
RAGGED = (1, 300, 2047, 4096)
NEW, KNOWN = (17, 1, 130, 64), (17, 999, 130, 1500)

VARIANTS: dict[str, Features] = {
    **{
        f"heads_{q}_{kv}": replace(LLAMA, q_heads=q, kv_heads=kv)
        for q, kv in ((4, 4), (8, 4), (12, 4), (8, 1), (16, 1), (20, 1))
    },
    **{f"d{d}": replace(LLAMA, head_dim=d) for d in (64, 96, 192, 256)},
    "d192_128": replace(LLAMA, head_dim=192, v_head_dim=128, kv_heads=8),
    "float16": replace(LLAMA, dtype=F16),
    "float16_d64": replace(LLAMA, dtype=F16, head_dim=64),
    "no_lse": replace(LLAMA, lse=False),
    "all_keys": replace(LLAMA, causal=False),
    "window": replace(LLAMA, window=(127, -1)),
    "chunk": replace(LLAMA, chunk=200),
    "tree": replace(LLAMA, mask="bool"),
    "softcap": replace(LLAMA, softcap=30.0),
    "sinks": replace(LLAMA, sinks=BF16, lse=False),
    "sinks_window_d64": replace(
        LLAMA, sinks=BF16, window=(127, -1), head_dim=64, q_heads=16, lse=False
    ),
    "float8_cache": replace(LLAMA, kv_dtype=E4M3, scale_per_head=False, lse=False),
}


def _points() -> dict[str, Rows]:
    paged: Rows = {}
    for page in (1, 16, 64, 128, 256):
        paged[f"decode_page_{page}"] = (*_decode(page, *RAGGED), LLAMA)
        paged[f"extend_page_{page}"] = (NEW, KNOWN, page, LLAMA)
    for name, f in VARIANTS.items():
        paged[f"decode_{name}"] = (*_decode(64, *RAGGED), f)
        paged[f"extend_{name}"] = (NEW, KNOWN, 64, f)
    for length in (1, 127, 8192, 32768):
        paged[f"decode_{length}"] = (*_decode(16, length), LLAMA)
    paged["decode_64_requests"] = (*_decode(16, *(17 * i + 1 for i in range(64))), LLAMA)
    paged["extend_32768"] = ((64,), (32768,), 64, LLAMA)
    paged["verify"] = ((4,) * 4, (70, 4, 900, 333), 64, TIGHT, LLAMA)
    paged["prefill"] = ((2048, 77), (2048, 77), 64, LLAMA)
    paged["mixed"] = ((700, 1, 1, 30, 0, 1), (900, 4000, 5, 31, 7, 600), 16, LLAMA)

    dense: Rows = {f"square_{n}": (2, n, n, LLAMA) for n in (1, 77, 512, 4096)}
    dense |= {name: (2, 260, 260, f) for name, f in VARIANTS.items()}
    dense |= {"decode_32768": (1, 1, 32768, LLAMA), "extend_32768": (1, 64, 32768, LLAMA)}
    dense |= {
        "lengths": (4, 1, 1024, {"kv_end": (1, 1024, 300, 77), "index": torch.int32}, LLAMA),
        "batch": (16, 130, 130, LLAMA),
    }
    dense |= {
        "tall": (2, 511, 1, LLAMA),
        "biases": (2, 300, 400, replace(LLAMA, mask="biases")),
        "d256_float32_additive": (
            2,
            130,
            200,
            replace(LLAMA, head_dim=256, dtype=F32, mask="additive"),
        ),
        "d512_float32": (2, 40, 70, replace(LLAMA, head_dim=512, dtype=F32)),
        "d512_window_tree": (
            2,
            130,
            257,
            replace(LLAMA, head_dim=512, window=(100, 0), mask="bool"),
        ),
        "d576_512": (2, 40, 70, replace(LLAMA, head_dim=576, v_head_dim=512)),
    }

    varlen: Rows = {name: (*[(1, 300, 77, 513)] * 2, f) for name, f in VARIANTS.items()}
    varlen |= {"one": (*[(4096,)] * 2, LLAMA), "many": (*[tuple(range(1, 65))] * 2, LLAMA)}
    varlen |= {f"tall_d{d}": ((511, 3), (1, 3), replace(LLAMA, head_dim=d)) for d in (64, 224, 512)}
    varlen |= {
        "extend": ((64, 1, 300), (32768, 5, 300), LLAMA),
        "plain": (*[(1, 300, 77, 513)] * 2, LLAMA),
    }

    deepseek = replace(DEEPSEEK, lse=True)
    heads = {n: replace(deepseek, q_heads=n) for n in (16, 128)}
    mla: Rows = {
        f"decode_page_{page}_heads_{n}": (*_decode(page, *RAGGED), f)
        for page in (1, 16, 64, 128)
        for n, f in heads.items()
    }
    mla |= {f"decode_{length}": (*_decode(64, length), deepseek) for length in (1, 8192, 32768)}
    for name, f in {
        "heads_64_float16": replace(deepseek, q_heads=64, dtype=F16),
        "float8_cache": replace(deepseek, kv_dtype=E4M3),
        "float8": replace(deepseek, q_dtype=E4M3, kv_dtype=E4M3),
        "no_lse": DEEPSEEK,
    }.items():
        mla[name] = (*_decode(64, *RAGGED), f)
    for drafts, f in ((2, deepseek), (4, heads[128])):
        mla[f"verify_{drafts}_heads_{f.q_heads}"] = ((drafts,) * 3, (70, 900, 333), 64, TIGHT, f)
    mla["extend"] = (NEW, KNOWN, 64, deepseek)
    mla["verify_window"] = ((8, 5), (4000, 70), 64, replace(deepseek, window=(1000, -1)))
    return {
        "paged_attention": paged,
        "attention": dense,
        "varlen_attention": varlen,
        "mla_attention": mla,
    }


WIDE: dict[str, tuple[Case, ...]] = {op: table(op, rows) for op, rows in _points().items()}
"""The grid of each attention op by name."""
