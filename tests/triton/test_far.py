"""Every op of `triton` over tensors that reach past 2^31 numbers, in the interpreter: the bits that it has over near ones."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from attnops.core.arguments import Arg
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels, kernels_of
from attnops.kernels.triton.launch import tiles
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import CASES, Call, Features, Source, equip, gradient_call, make_call
from tests.triton.checks import mode
from tests.triton.process import interpreted
from tests.triton.test_decode import many_splits

F32 = torch.float32
FAR = 1 << 31
NOT_RESERVED = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
PLAIN = Features(q_heads=3, kv_heads=3, causal=True, sinks=F32)
LATENT = Features(q_heads=3, head_dim=20, v_head_dim=16, causal=True, lse=True)
LENGTHS = (1, 2, 1), (9, 12, 10)
EXPERTS = (24, 20, 28, 3, 2)
GATED = {"norm": 0.0, "bias": True, "residual": True, "activation": "silu"}
MOVES = ((1, 2), (2, 3), (3, 1), (8, 0))


def gradient(forward: Call) -> Call:
    return gradient_call(Source(2), forward, mask_grad=forward.op == "attention", lse_grad=True)


def labelled(op: str, label: str) -> Call:
    return next(case for case in CASES[op] if case.label == label).call()


def dense(f: Features) -> Call:
    return make_call("attention", Source(1), 3, 5, 7, replace(f, lse=True))


def packed(f: Features) -> Call:
    return make_call("varlen_attention", Source(1), (5, 3, 1), (7, 3, 4), replace(f, lse=True))


def paged(f: Features) -> Call:
    return make_call("paged_attention", Source(1), *LENGTHS, 4, replace(f, lse=True))


BIAS = replace(PLAIN, mask="additive")
CALLS: dict[str, tuple[Callable[[], Call], ...]] = {
    "attention": (lambda: dense(PLAIN), lambda: dense(replace(BIAS, mask_shape="h"))),
    "varlen_attention": (lambda: packed(replace(PLAIN, mask="bool")), lambda: packed(replace(PLAIN, head_dim=40))),
    "attention_backward": (lambda: gradient(dense(BIAS)), lambda: gradient(dense(replace(BIAS, mask_shape="h")))),
    "varlen_attention_backward": (
        lambda: gradient(packed(replace(PLAIN, mask="bool"))),
        lambda: gradient(packed(replace(PLAIN, head_dim=40))),
    ),
    "paged_attention": (lambda: paged(replace(PLAIN, temperature=True)), lambda: paged(BIAS)),
    "mla_attention": (lambda: make_call("mla_attention", Source(1), *LENGTHS, 4, LATENT),),
    "decode_attention": (lambda: make_call("decode_attention", Source(1), (9, 12, 0, 40), 4, PLAIN, Angles(norms=True)),),
    "merge_state": (lambda: make_call("merge_state", Source(1), (5, 4, 16), F32, 0.3),),
    "merge_states": (lambda: make_call("merge_states", Source(1), (5, 3, 4, 16), F32, 0.3),),
    "linear": (lambda: make_call("linear", Source(1), 1, 48, 40, **GATED), lambda: make_call("linear", Source(1), 5, 48, 40, **GATED)),
    "experts": tuple(lambda tokens=tokens: make_call("experts", Source(1), tokens, EXPERTS, bias=True) for tokens in (1, 4)),
    "mxfp4_experts": (
        lambda: make_call("mxfp4_experts", Source(1), 1, (64, 64, 16, 3, 1), bias=True),
        lambda: make_call("mxfp4_experts", Source(1), 3, (64, 64, 16, 3, 1), bias=True),
    ),
    "route": (lambda: make_call("route", Source(1), 5, 24, 4, bias=F32),),
    "write_kv": tuple(
        lambda kept=kept: make_call("write_kv", Source(1), (7, -1, 0, 11), 4, 3, replace(PLAIN, kv_dtype=kept))
        for kept in (None, torch.int8)
    ),
    "write_latent": (lambda: make_call("write_latent", Source(1), (7, -1, 0, 11), 4, 3, LATENT),),
    "write_latent_packed": (lambda: labelled("write_latent_packed", "plain"),),
    "copy_kv": (
        lambda: make_call("copy_kv", Source(1), MOVES[:3], 3, 4, 3, PLAIN), lambda: make_call("copy_kv", Source(1), MOVES, 3, 4, 3, PLAIN),
    ),
    "kv_indices": (lambda: labelled("kv_indices", "ragged-3-int32"),),
    "decode_rows": (lambda: labelled("decode_rows", "ragged-3-3-True-rows"),),
    "named_pages": tuple(lambda way=way: labelled("named_pages", f"second-ragged-{way}") for way in ("squeeze", "window")),
}  # fmt: skip
REFUSED = {"page", ">= max_pages * page"}
"""The dims that are left out here: see the last tests."""
ROWS_OF_32_BITS = {"attention", "varlen_attention"}
"""The ops whose keys of a row of a mask are left out: see the last test."""


def far_dims(op: str, a: Arg, x: Tensor) -> list[int]:
    """The dims of an argument that may have any stride, and are long enough for an offset that wraps."""
    if a.hint:
        return []
    names = {i: a.layout[min(i, len(a.layout) - 1)].text for i in range(x.dim())}
    near_last = a.unit_stride or (a.name == "mask" and op in ROWS_OF_32_BITS)
    last = x.dim() - 1 if near_last else x.dim()
    return [i for i, name in names.items() if x.shape[i] > 2 and i != last and name not in REFUSED]


def spread(x: Tensor, dim: int) -> Tensor:
    """`x` with its entries along `dim` so far apart that 32 bits do not hold the last one's offset.

    The memory is mapped and not reserved. As much lies before and behind, so that an address that wraps
    reads zeros and does not end the process.
    """
    rest = [n for i, n in enumerate(x.shape) if i != dim]
    near = torch.empty(rest, device="meta").stride()
    apart = -(-FAR // (x.shape[dim] - 1) // 16) * 16 + 16
    bytes_ = (3 * FAR + x.numel() * apart // FAR + (x.shape[dim] + 1) * 16 + torch.Size(rest).numel()) * x.itemsize
    mapped = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
    strides = (*near[:dim], apart, *near[dim:])
    return torch.empty(0, dtype=x.dtype).set_(memory, FAR, x.shape, strides).copy_(x)


def near(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def results(call: Call) -> list[Tensor]:
    found = kernels_of(call.op)["triton"].run(call.record)
    if found is None:
        return [call.arguments[name] for name in call.mutated if name != "workspace"]
    return list(found) if isinstance(found, tuple) else [found]


def test_every_op_is_called():
    assert {k.op for k in all_kernels() if k.name == "triton"} == set(CALLS)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("op", "number"), [(op, n) for op, calls in CALLS.items() for n in range(len(calls))])
@interpreted
def test_far_tensors(op, number):
    """One dim of every tensor at a time: the first of each, then the second, and so on."""
    call = CALLS[op][number]()
    call = call.map(lambda n, t: t.masked_fill(call.free[n], 0) if n in call.free else t)
    dims = {a.name: far_dims(op, a, t) for a in call.spec.args if a.tensor and (t := call.arguments.get(a.name)) is not None}
    # Splits of decode steps, and copies by way of scratch, of so few keys and slots.
    with mode("split"), many_splits(), patch.object(tiles, "WHOLE", 3):
        call = equip(kernels_of(op)["triton"], call)
        wanted = results(call.map(lambda _, t: near(t)))
        for turn in range(max(map(len, dims.values()))):
            where = {n: found[turn] for n, found in dims.items() if turn < len(found)}
            given = call.map(lambda n, t, at=where: spread(t, at[n]) if n in at else near(t))
            for got, want in zip(results(given), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, at=where: f"{at}: {m}")


@interpreted
def test_far_keys_of_a_page_are_refused():
    """Their offsets have 32 bits, and so have those of a row of a mask of keys in pages. Before any launch."""
    pages = {"paged_attention": ("v_pages", "mask"), "decode_attention": ("k_pages",), "mla_attention": ("latent_pages",)}
    for op, field in ((op, field) for op, fields in pages.items() for field in fields):
        call = CALLS[op][-1]()
        with pytest.raises(InvalidInput, match=rf"{field}.stride\(1\): got \d+, want < 2\*\*31"):
            results(call.with_(**{field: spread(call.arguments[field], 1)}))


@interpreted
@pytest.mark.parametrize("op", sorted(ROWS_OF_32_BITS))
def test_far_keys_of_a_mask_are_refused(op):
    """The keys of its rows have offsets of 32 bits. Before any launch."""
    build = dense if op == "attention" else packed
    call = build(replace(PLAIN, mask="bool"))
    keys = call.arguments["key"].shape[1] if op == "attention" else call.arguments["max_seqlen_k"]
    mask = call.arguments["mask"][..., :keys]
    last = mask.dim() - 1
    with pytest.raises(InvalidInput, match=rf"mask.stride\({last}\): got \d+, want < 2\*\*31"):
        results(call.with_(mask=spread(mask, last)))
