"""Every op of `triton` over tensors that reach past 2^31 numbers, in the interpreter: the bits that
it has over near ones."""

import mmap
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from attnops.core.arguments import Arg
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.problem import pretend
from attnops.kernels.triton.launch import tiles
from attnops.ops.case_data import U8
from attnops.testing import CASES, Call, Source, equip, make_call
from tests.formula import clean
from tests.triton.checks import SM90, mode, triton
from tests.triton.process import interpreted
from tests.triton.test_decode import many_splits

OPS = [k.op for k in all_kernels() if k.name == "triton"]
LONG = 20_000
"""Numbers of a call that the interpreter would take long for."""

FAR = 1 << 31
NOT_RESERVED = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
REFUSED = {"page", ">= max_pages * page"}
"""The dims that are left out here: see the last tests."""
ROWS_OF_32_BITS = {"attention", "varlen_attention"}
"""The ops whose keys of a row of a mask are left out: see the last test."""


def far_dims(op: str, a: Arg, x: Tensor) -> list[int]:
    """The dims of an argument that may have any stride, and have more than one entry."""
    if a.hint:
        return []
    names = {i: a.layout[min(i, len(a.layout) - 1)].text for i in range(x.dim())}
    near_last = a.unit_stride or (a.name == "mask" and op in ROWS_OF_32_BITS)
    last = x.dim() - 1 if near_last else x.dim()
    return [i for i, name in names.items() if x.shape[i] > 1 and i != last and name not in REFUSED]


def spread(x: Tensor, dim: int) -> Tensor:
    """`x` with its entries along `dim` so far apart that 32 bits do not hold the last one's offset.

    The memory is mapped and not reserved. As much lies before and behind, so that an address that
    wraps reads zeros and does not end the process.
    """
    rest = [n for i, n in enumerate(x.shape) if i != dim]
    near = torch.empty(rest, device="meta").stride()
    apart = -(-FAR // (x.shape[dim] - 1) // 16) * 16 + 16
    bytes_ = (
        3 * FAR + x.numel() * apart // FAR + (x.shape[dim] + 1) * 16 + torch.Size(rest).numel()
    ) * x.itemsize
    mapped = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=U8).untyped_storage()
    strides = (*near[:dim], apart, *near[dim:])
    return torch.empty(0, dtype=x.dtype).set_(memory, FAR, x.shape, strides).copy_(x)


MORE = {"mxfp4_experts": [make_call("mxfp4_experts", Source(1), 1, (64, 64, 16, 3, 1), bias=True)]}
"""The grid's calls of one token are long."""


def taken(op: str) -> list[Call]:
    """The calls of the grid that the kernel takes, but for long ones. What may hold anything holds
    0."""
    kernel = triton(op)
    with pretend(SM90):
        calls = [
            equip(kernel, call)
            for call in (*(case.call() for case in CASES[op]), *MORE.get(op, ()))
        ]
        calls = [
            call for call in calls if not kernel.refusals(call.problem) and numbers(call) < LONG
        ]
    assert calls
    return [clean(call) for call in calls]


def numbers(call: Call) -> int:
    return sum(t.numel() for n, t in call.tensors().items() if not call.spec[n].hint)


def places(call: Call) -> set[tuple[str, int, bool]]:
    """(argument, dim, is it a call of one row?) of all that can be far. Several ops have kernels of
    one row alone."""
    tensors = call.tensors()
    single = next(iter(tensors.values())).shape[0] == 1
    return {
        (n, dim, single) for n, t in tensors.items() for dim in far_dims(call.op, call.spec[n], t)
    }


def covering(op: str) -> list[Call]:
    """Few of those calls, which together have every place."""
    calls, found = taken(op), list[Call]()
    left = set[tuple[str, int, bool]]().union(*map(places, calls))
    while left:
        found.append(max(calls, key=lambda call: len(places(call) & left)))
        left -= places(found[-1])
    return found


def near(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def results(call: Call) -> list[Tensor]:
    found = kernels_of(call.op)["triton"].run(call.record)
    if found is None:
        return [call.arguments[name] for name in call.mutated if name != "workspace"]
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", OPS)
@interpreted
def test_far_tensors(op):
    """One dim of every tensor at a time: the first of each, then the second, and so on."""
    # Splits of decode steps of so few keys; copies of so few slots in one launch, and by way of
    # scratch.
    ways = product(covering(op), (1, tiles.WHOLE) if op == "copy_kv" else (1,))
    for call, whole in ways:
        with mode("split"), many_splits(), patch.object(tiles, "WHOLE", whole):
            dims = {
                a.name: far_dims(op, a, t)
                for a in call.spec.args
                if a.tensor and (t := call.arguments.get(a.name)) is not None
            }
            wanted = results(call.map(lambda _, t: near(t)))
            for turn in range(max(map(len, dims.values()))):
                where = {n: found[turn] for n, found in dims.items() if turn < len(found)}
                given = call.map(lambda n, t, at=where: spread(t, at[n]) if n in at else near(t))
                for got, want in zip(results(given), wanted, strict=True):
                    assert got.dtype == want.dtype
                    torch.testing.assert_close(
                        got.double(),
                        want.double(),
                        rtol=1e-4,
                        atol=1e-4,
                        equal_nan=True,
                        msg=lambda m, at=where: f"{at}: {m}",
                    )


@interpreted
def test_far_keys_of_a_page_are_refused():
    """Their offsets have 32 bits, and so have those of a row of a mask of keys in pages. Before any
    launch."""
    pages = {
        "paged_attention": ("v_pages", "mask"),
        "decode_attention": ("k_pages",),
        "mla_attention": ("latent_pages",),
    }
    for op, field in ((op, field) for op, fields in pages.items() for field in fields):
        call = next(call for call in taken(op) if field in call.arguments)
        with pytest.raises(InvalidInput, match=rf"{field}.stride\(1\): got \d+, want < 2\*\*31"):
            results(call.with_(**{field: spread(call.arguments[field], 1)}))


@interpreted
@pytest.mark.parametrize("op", sorted(ROWS_OF_32_BITS))
def test_far_keys_of_a_mask_are_refused(op):
    """The keys of its rows have offsets of 32 bits. Before any launch."""
    call = next(call for call in taken(op) if "mask" in call.arguments)
    keys = call.arguments["key"].shape[1] if op == "attention" else call.arguments["max_seqlen_k"]
    mask = call.arguments["mask"][..., :keys]
    last = mask.dim() - 1
    with pytest.raises(InvalidInput, match=rf"mask.stride\({last}\): got \d+, want < 2\*\*31"):
        results(call.with_(mask=spread(mask, last)))
