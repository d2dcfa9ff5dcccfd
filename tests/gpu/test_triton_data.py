"""`triton`'s kernels that move data on a GPU, at sizes that are served: the reference's bits, and
copies that overlap."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnops.core.kernel import kernels_of
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Call, Features, Pages, make_call
from attnops.testing.check import clone
from tests.gpu.wide import DeviceSource
from tests.triton.values import every_number

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LLAMA = Features(dtype=BF16, head_dim=128, kv_heads=8, q_heads=32)


def source() -> DeviceSource:
    return DeviceSource(1, "cuda")


def scattered(tokens: int) -> list[int]:
    """Slots in random order, every ninth token skipped."""
    return [-1 if i % 9 == 5 else n for i, n in enumerate(source().permutation(tokens))]


def write(f: Features, tokens: int, page: int = 16, op: str = "write_kv", **more: Any) -> Call:
    return make_call(op, source(), scattered(tokens), -(-tokens // page), page, f, **more)


def copy(
    entries: int, layers: int = 4, f: Features = LLAMA, latents: bool = False, group: int = 0
) -> Call:
    order = source().permutation(group or entries)
    pairs = tuple((i, i - i % len(order) + order[i % len(order)]) for i in range(entries))
    more = {"latents": latents, "group": group}
    return make_call("copy_kv", source(), pairs, layers, -(-entries // 16), 16, f, **more)


def table(batch: int, width: int = 512, page: int = 16) -> Call:
    s = source()
    lens = s.ints([(i * 7919) % (width * page + 1) for i in range(batch)])
    given = {
        "page_table": s.ints(s.permutation(batch * width)).reshape(batch, width),
        "seq_lens": lens,
    }
    return Call("kv_indices", {**given, "page_size": page})


CALLS: dict[str, Callable[[], Call]] = {
    **{f"write_kv_{n}": partial(write, LLAMA, n) for n in (1, 3, 64, 512, 4096, 30000)},
    **{f"write_kv_page_{n}": partial(write, LLAMA, 1000, n) for n in (1, 48, 64, 256)},
    **{
        f"write_kv_{d}": partial(write, replace(LLAMA, kv_dtype=d), 4096)
        for d in (E4M3, E5M2, INT8)
    },
    "write_kv_float16_float8": partial(
        write, replace(LLAMA, dtype=F16, kv_dtype=E4M3, scale_per_head=False), 777
    ),
    "write_kv_float32_int8": partial(write, replace(LLAMA, dtype=F32, kv_dtype=INT8), 777),
    "write_kv_odd": partial(write, replace(LLAMA, head_dim=80, v_head_dim=24, kv_heads=5), 999),
    "write_kv_interleaved": partial(write, LLAMA, 999, pages=Pages(interleaved=True)),
    "write_latent": partial(write, DEEPSEEK, 4096, 64, op="write_latent"),
    "write_latent_float8": partial(
        write, replace(DEEPSEEK, kv_dtype=E4M3), 4096, 64, op="write_latent"
    ),
    "write_latent_packed": partial(write, DEEPSEEK, 4096, 64, op="write_latent_packed"),
    **{f"copy_kv_{n}": partial(copy, n) for n in (1, 7, 64, 256, 257, 4000)},
    "copy_kv_layers": partial(copy, 200, 40),
    "copy_kv_groups": partial(copy, 4000, 8, group=100),
    "copy_kv_float8": partial(copy, 100, 8, replace(LLAMA, kv_dtype=E4M3)),
    "copy_kv_latents": partial(copy, 33, 8, Features(dtype=BF16, head_dim=576), True),
    "copy_kv_latents_packed": partial(
        copy, 300, 8, Features(kv_dtype=torch.uint8, head_dim=656), True
    ),
    **{f"kv_indices_{n}": partial(table, n) for n in (1, 64, 2000)},
}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def results(name: str, call: Call) -> list[Tensor]:
    mine = call.map(lambda _, t: clone(t))
    returned = kernels_of(call.op)[name].run(mine.record)
    if returned is None:
        return [bits(mine.arguments[n]) for n in mine.mutated]
    return [bits(x) for x in (returned if isinstance(returned, tuple) else (returned,))]


@pytest.mark.parametrize("name", CALLS)
def test_same_bits_as_the_reference(name: str) -> None:
    call = CALLS[name]()
    for nth, (ours, theirs) in enumerate(
        zip(results("triton", call), results("reference", call), strict=True)
    ):
        wrong = torch.nonzero(ours != theirs).flatten()
        assert not wrong.numel(), (
            f"result {nth}: {wrong.numel()} of {ours.numel()} bytes differ, the first at "
            f"{wrong[:5].tolist()}"
        )


@pytest.mark.parametrize("stored", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_number_is_rounded_as_the_reference_does(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    """All finite numbers of two bytes, and float32 on and between the edges of float8, under
    several scales."""
    x = every_number(dtype, 4, 64).cuda()
    pages = torch.zeros(-(-x.shape[0] // 16), 16, 4, 64, dtype=stored, device="cuda")
    given = {
        "key": x,
        "value": x.flip(0),
        "k_pages": pages,
        "v_pages": pages.clone(),
        "slots": torch.arange(x.shape[0], device="cuda"),
    }
    for scales in ((1.0,), (1 / 3,), (0.07, 3.0, 1.0, 1e-3)):
        scale = torch.tensor(scales, device="cuda")
        call = Call("write_kv", {**given, "k_scale": scale, "v_scale": scale[:1].clone()})
        for numbers, ours, theirs in zip(
            (x, x.flip(0)), results("triton", call), results("reference", call), strict=True
        ):
            wrong = torch.nonzero(ours != theirs).flatten()[:5]
            shown = [y.flatten()[wrong].tolist() for y in (numbers, ours, theirs)]
            assert not wrong.numel(), (
                f"under scales {scales} the numbers, ours and the reference's: {shown}"
            )


@pytest.mark.parametrize(("entries", "group"), [(16, 0), (100, 0), (256, 0), (400, 40)], ids=str)
def test_a_copy_reads_before_it_writes(entries: int, group: int) -> None:
    """Again and again: an order that is left to chance comes out wrong now and then."""
    call = copy(entries, 32, group=group)
    t = call.arguments
    k, v, target = t["k_pages"], t["v_pages"], t["target"]
    want = [x.flatten(1, 2).clone() for x in (k, v)]
    kernel = kernels_of("copy_kv")["triton"]
    for nth in range(50):
        kernel.run(call.record)
        for x in want:
            x[:, target] = x[:, t["source"]].clone()
        assert torch.equal(k.flatten(1, 2), want[0]) and torch.equal(v.flatten(1, 2), want[1]), (
            f"run {nth}"
        )
