"""The problem grid at the sizes GPU kernels are built for: page sizes, head ratios, head dims, dtypes and lengths up to 32k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.testing import builders, latent
from attnops.testing.inputs import QUANTISED, Call, Case, Features, Source

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

Build = Callable[[Source, Features], Call]


class DeviceSource(Source):
    """As Source, but the large tensors are made on the device: a cache of 32k tokens is not copied there."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        super().__init__(seed, device)
        self.there = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.there, device=self.device) * spread).to(dtype)

    def stored(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.normal(*shape, dtype=dtype, spread=8.0 if dtype in QUANTISED else 1.0)


def _paged(q_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, **more: Any) -> Build:
    return lambda source, f: builders.paged(source, q_lens, seq_lens, page_size, f, **more)


def _dense(batch: int, queries: int, keys: int, **more: Any) -> Build:
    return lambda source, f: builders.dense(source, batch, queries, keys, f, **more)


def _varlen(lengths: Sequence[int], keys: Sequence[int] | None = None) -> Build:
    return lambda source, f: builders.varlen(source, lengths, lengths if keys is None else keys, f)


def _mla(q_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, **more: Any) -> Build:
    return lambda source, f: latent.mla(source, q_lens, seq_lens, page_size, f, **more)


def _decode(page: int, *lengths: int) -> Build:
    return _paged((1,) * len(lengths), lengths, page, padding=0)


LLAMA = Features(dtype=BF16, q_heads=8, kv_heads=2, head_dim=128, causal=True, lse=True)
RAGGED = (1, 300, 2047, 4096)
NEW, KNOWN = (17, 1, 130, 64), (17, 999, 130, 1500)

VARIANTS: dict[str, Features] = {
    **{f"heads_{q}_{kv}": replace(LLAMA, q_heads=q, kv_heads=kv) for q, kv in ((4, 4), (8, 4), (12, 4), (8, 1), (16, 1))},
    **{f"d{d}": replace(LLAMA, head_dim=d) for d in (64, 96, 192, 256)},
    "d192_128": replace(LLAMA, head_dim=192, v_head_dim=128, kv_heads=8),
    "float16": replace(LLAMA, dtype=F16),
    "float16_d64": replace(LLAMA, dtype=F16, head_dim=64),
    "no_lse": replace(LLAMA, lse=False),
    "all_keys": replace(LLAMA, causal=False),
    "window": replace(LLAMA, window=(127, -1)),
    "softcap": replace(LLAMA, softcap=30.0),
    "sinks": replace(LLAMA, sinks=BF16, lse=False),
    "sinks_window_d64": replace(LLAMA, sinks=BF16, window=(127, -1), head_dim=64, q_heads=16, lse=False),
    "float8_cache": replace(LLAMA, kv_dtype=E4M3, scale_per_head=False, lse=False),
}


def _points() -> dict[str, dict[str, tuple[Build, Features]]]:
    paged: dict[str, tuple[Build, Features]] = {}
    for page in (1, 16, 64, 128, 256):
        paged[f"decode_page_{page}"] = (_decode(page, *RAGGED), LLAMA)
        paged[f"extend_page_{page}"] = (_paged(NEW, KNOWN, page), LLAMA)
    for name, f in VARIANTS.items():
        paged[f"decode_{name}"] = (_decode(64, *RAGGED), f)
        paged[f"extend_{name}"] = (_paged(NEW, KNOWN, 64), f)
    for length in (1, 127, 8192, 32768):
        paged[f"decode_{length}"] = (_decode(16, length), LLAMA)
    paged["decode_64_requests"] = (_decode(16, *(17 * i + 1 for i in range(64))), LLAMA)
    paged["extend_32768"] = (_paged((64,), (32768,), 64), LLAMA)
    paged["verify"] = (_paged((4,) * 4, (70, 4, 900, 333), 64, padding=0), LLAMA)
    paged["prefill"] = (_paged((2048, 77), (2048, 77), 64), LLAMA)

    dense: dict[str, tuple[Build, Features]] = {f"square_{n}": (_dense(2, n, n), LLAMA) for n in (1, 77, 512, 4096)}
    dense |= {name: (_dense(2, 260, 260), f) for name, f in VARIANTS.items()}
    dense |= {"decode_32768": (_dense(1, 1, 32768), LLAMA), "extend_32768": (_dense(1, 64, 32768), LLAMA)}
    dense |= {"lengths": (_dense(4, 1, 1024, end=(1, 1024, 300, 77)), LLAMA), "batch": (_dense(16, 130, 130), LLAMA)}

    varlen: dict[str, tuple[Build, Features]] = {name: (_varlen((1, 300, 77, 513)), f) for name, f in VARIANTS.items()}
    varlen |= {"one": (_varlen((4096,)), LLAMA), "many": (_varlen(tuple(range(1, 65))), LLAMA)}
    varlen |= {"extend": (_varlen((64, 1, 300), (32768, 5, 300)), LLAMA), "plain": (_varlen((1, 300, 77, 513)), LLAMA)}

    deepseek = replace(latent.DEEPSEEK, lse=True)
    mla: dict[str, tuple[Build, Features]] = {}
    for page in (1, 16, 64, 128):
        for heads in (16, 128):
            mla[f"decode_page_{page}_heads_{heads}"] = (_mla((1,) * 4, RAGGED, page, padding=0), replace(deepseek, q_heads=heads))
    for length in (1, 8192, 32768):
        mla[f"decode_{length}"] = (_mla((1,), (length,), 64, padding=0), deepseek)
    mla["heads_64_float16"] = (_mla((1,) * 4, RAGGED, 64, padding=0), replace(deepseek, q_heads=64, dtype=F16))
    mla["verify_2"] = (_mla((2,) * 3, (70, 900, 333), 64, padding=0), deepseek)
    mla["verify_4_heads_128"] = (_mla((4,) * 3, (70, 900, 333), 64, padding=0), replace(deepseek, q_heads=128))
    mla["extend"] = (_mla(NEW, KNOWN, 64), deepseek)
    mla["float8_cache"] = (_mla((1,) * 4, RAGGED, 64, padding=0), replace(deepseek, kv_dtype=E4M3))
    mla["float8"] = (_mla((1,) * 4, RAGGED, 64, padding=0, q_dtype=E4M3), replace(deepseek, kv_dtype=E4M3))
    mla["no_lse"] = (_mla((1,) * 4, RAGGED, 64, padding=0), latent.DEEPSEEK)
    return {"paged_attention": paged, "attention": dense, "varlen_attention": varlen, "mla_attention": mla}


def _bound(build: Build, f: Features) -> Callable[[Source], Call]:
    return lambda source: build(source, f)


WIDE: dict[str, tuple[Case, ...]] = {
    op: tuple(Case(op, name, _bound(build, f)) for name, (build, f) in points.items()) for op, points in _points().items()
}
"""The grid of each attention op by name."""
