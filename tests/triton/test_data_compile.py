"""The device functions that move data through Triton's compiler and ptxas: wide accesses, nothing
spilled, the GPU's own float8."""

import re
from dataclasses import replace

import pytest
import torch

from attnops.ops.case_data import BF16, E4M3, E5M2, F32, INT8
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import Call, Features, Source, make_call
from tests.triton.compiling import built, launched
from tests.triton.process import compiled

LLAMA = Features(dtype=BF16, head_dim=128, kv_heads=8, q_heads=32)


def write(f, tokens=4096, page=16):
    return lambda: make_call("write_kv", Source(), range(tokens), -(-tokens // page), page, f)


def stored(dtype, tokens=4096):
    return write(Features(dtype=BF16, head_dim=128, kv_heads=8, kv_dtype=dtype), tokens)


def rotated(f):
    return lambda: make_call(
        "rotate_and_write_kv", Source(), range(1024), 64, 16, Angles(norms=True), f
    )


def copy(entries, f=LLAMA, latents=False):
    pairs = [(i, entries - 1 - i) for i in range(entries)]
    return lambda: make_call(
        "copy_kv", Source(), pairs, 2, -(-entries // 16), 16, f, latents=latents
    )


def indices():
    source, batch, width = Source(), 64, 256
    table = source.ints(range(batch * width)).reshape(batch, width)
    return Call(
        "kv_indices",
        {
            "page_table": table,
            "seq_lens": source.ints([17 * i for i in range(batch)]),
            "page_size": 16,
        },
    )


# What is called, and the widest accesses that there are to be, in bits: (load, store).
CALLS = {
    "write_kv": (write(LLAMA), (128, 128)),
    "write_kv_1": (write(LLAMA, 1), (128, 128)),
    "write_kv_float32": (write(Features(dtype=F32, head_dim=128, kv_heads=8)), (128, 128)),
    "write_kv_float8": (stored(E4M3), (128, 64)),
    "write_kv_float8_e5m2": (stored(E5M2), (128, 64)),
    "write_kv_int8": (stored(INT8), (128, 64)),
    "rotate_and_write_kv": (rotated(LLAMA), (128, 128)),
    "rotate_and_write_kv_256": (rotated(replace(LLAMA, head_dim=256)), (128, 128)),
    "write_latent": (
        lambda: make_call("write_latent", Source(), range(4096), 64, 64, DEEPSEEK),
        (128, 128),
    ),
    "write_latent_quantised": (
        lambda: make_call(
            "write_latent",
            Source(),
            range(4096),
            64,
            64,
            replace(DEEPSEEK, kv_dtype=E4M3),
            quantised=True,
        ),
        (128, 128),
    ),
    "write_latent_packed": (
        lambda: make_call("write_latent_packed", Source(), range(4096), 64, 64, DEEPSEEK),
        (128, 64),
    ),
    "copy_kv_4": (copy(4), (128, 128)),
    "copy_kv_256": (copy(256), (128, 128)),
    "copy_kv_latents": (copy(64, Features(dtype=BF16, head_dim=576), True), (128, 128)),
    "kv_indices": (indices, (32, 32)),
}
ELSEWHERE = [
    (arch, name)
    for arch in (80, 89, 100)
    for name in ("write_kv", "write_kv_float8", "write_kv_float8_e5m2", "write_kv_int8")
]
ELSEWHERE += [(80, "write_latent_quantised")]
ELSEWHERE += [(80, "write_latent_packed"), (100, "write_latent_packed"), (80, "copy_kv_256")]


def width(ptx, word):
    """Bits of the widest access of a kind: `ld` or `st`."""
    found = re.findall(rf"{word}\.global[\w.:]*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    return max(int(n or 1) * int(bits) for n, bits in found)


ON = [(90, name) for name in CALLS] + ELSEWHERE


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("arch", "name"), ON)
@compiled
def test_accesses_are_wide(arch, name):
    make, (load, store) = CALLS[name]
    for kernel, given in launched(make(), arch, "rotate" if "rotate" in name else "data"):
        ptx = built(arch, kernel, given, BF16).asm["ptx"]
        assert width(ptx, "ld") >= load and width(ptx, "st") >= store, (
            name,
            width(ptx, "ld"),
            width(ptx, "st"),
        )
        if "float8" in name:
            assert ("cvt.rn.satfinite.e" in ptx) == (arch >= 89)
        if "write_kv_float8" in name or "write_kv_int8" in name:
            assert "div.rn.f32" in ptx and "div.full" not in ptx
        if kernel.__name__ == "copy":
            assert "bar.sync" in ptx, "writes may overtake reads"


@compiled
def test_rows_are_cleared_16_bytes_at_a_time():
    from attnops.kernels.shared.device.rows import clear

    starts, rows = torch.zeros(3, dtype=torch.int32), torch.zeros(130, 1024, dtype=BF16)
    given = {
        f"{n}_{k}": v
        for n in "abc"
        for k, v in {"starts_ptr": starts, "end": 2, "ptr": rows, "rows": 130, "fill": 0.0}.items()
    }
    tile = {**{f"{n}_COLUMNS": 1024 for n in "ABC"}, "BLOCK_R": 64, "BLOCK": 256, "num_warps": 4}
    assert width(built(90, clear, {**given, **tile}, BF16).asm["ptx"], "st") == 128
