"""`triton` of a decode step: in the interpreter against the exact result, split and whole, and
through Triton's compiler and ptxas."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.ops.case_data import BF16, F32
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import CASES, Features, Source, check_kernel, equip, make_call
from tests.mates import invariant
from tests.triton.checks import SM90
from tests.triton.compiling import built, launched, waits_as_told
from tests.triton.process import compiled, interpreted

KERNEL = kernels_of("decode_attention")["triton"]
LONG = Features(dtype=F32, head_dim=16, q_heads=4, kv_heads=2)


@contextmanager
def many_splits():
    """Small calls are not worth a split. Here they are split all the same, and few parts are merged
    at once."""
    from attnops.kernels.triton.launch import grids

    few = {"LEAST_DECODED": 1, "DECODE_BLOCKS": 4, "MERGED": 128, "LONG_SPLIT": 1, "SPLIT_KEYS": 32}
    with patch.multiple(grids, **few):
        yield


def check(call, refused=(), kernel=KERNEL):
    with pretend(SM90):
        figures = check_kernel(kernel, call)
    assert {r.field for r in figures.refused} <= set(refused), figures
    assert figures.worst <= 1.0, figures
    return figures


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", ["whole", "split", "deterministic"])
@interpreted
def test_grid(way):
    for case in CASES["decode_attention"][:: 1 if way == "split" else 4]:
        with nullcontext() if way == "whole" else many_splits():
            check(
                case.call(),
                refused=("dtype",),
                kernel=invariant(KERNEL) if way == "deterministic" else KERNEL,
            )


def sloped(call, slope):
    """The call with keys whose logits grow by `slope` from a token to the next, or fall."""
    given = call.arguments
    page, numbers = given["k_pages"].shape[1], given["query"].shape[-1]
    pages = given["k_pages"].clone()
    for row in given["page_table"].tolist():
        for column, number in enumerate(row):
            if 0 <= number < pages.shape[0]:
                at = torch.arange(column * page, column * page + page) * slope / numbers
                pages[number] = at[:, None, None].to(pages.dtype)
    return call.with_(query=torch.ones_like(given["query"]), k_pages=pages, scale=1.0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("slope", [0.1, -0.1])
@interpreted
def test_splits_of_other_sizes(slope):
    """Two are merged at once. Later ones have the larger logits, or earlier ones: one of both
    fades."""
    from attnops.kernels.triton.launch import grids
    from tests.triton.test_numerics import check as check_paged

    few = {"MANY_SPLITS": 2, "FEW_SPLITS": 2}
    call = sloped(make_call("decode_attention", Source(2), (300, 40), 16, LONG, Angles("")), slope)
    with many_splits(), patch.multiple(grids, **few, MERGED=64):
        for kernel in (KERNEL, invariant(KERNEL)):
            assert not check(call, kernel=kernel).refused
    paged = sloped(
        make_call("paged_attention", Source(2), (1, 2), (300, 200), 16, replace(LONG, lse=True)),
        slope,
    )
    with patch.multiple(grids, **few):
        assert not check_paged(paged, "split").refused


@interpreted
def test_counters_are_zero_after_every_launch():
    """One workspace serves steps of other lengths and batches."""
    with pretend(SM90):
        workspace = equip(KERNEL, make_call("decode_attention", Source(), (5,), 4, LONG)).arguments[
            "workspace"
        ]
    with many_splits(), pretend(SM90):
        for seed, lengths in enumerate([(300, 7, 129), (64,), (1, 290)]):
            call = make_call("decode_attention", Source(seed), lengths, 16, LONG).with_(
                workspace=workspace
            )
            KERNEL.run(call.record)
            assert not workspace.any()
            check(call)


@interpreted
def test_programs_in_any_order():
    """The last program to arrive merges, whichever it is; the interpreter runs the first one
    first."""
    from attnops.kernels.triton.device import decode

    call, seen = make_call("decode_attention", Source(1), (300, 40), 16, LONG), []
    with many_splits(), pretend(SM90):
        first, again = (equip(KERNEL, call).map(lambda _, t: t.clone()) for _ in range(2))
        KERNEL.run(first.record)
        forward = decode.tl.program_id

        def backward(axis, **more):
            n = forward(axis, **more)
            seen.append(axis)
            return decode.tl.num_programs(axis, **more) - 1 - n if axis == 1 else n

        decode.tl.program_id = backward
        try:
            KERNEL.run(again.record)
        finally:
            decode.tl.program_id = forward
    assert seen.count(1) > 8
    for name in ("output", "k_pages", "v_pages"):
        assert torch.equal(
            first.arguments[name].nan_to_num(), again.arguments[name].nan_to_num()
        ), name


# Compiled -----------------------------------------------------------------------------------------

LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8)
STEPS = {
    "llama": (LLAMA, Angles(), 64),
    "qwen3": (LLAMA, Angles(norms=True), 16),
    "gpt_oss": (
        replace(LLAMA, head_dim=64, q_heads=64, sinks=BF16, window=(127, -1)),
        Angles("half"),
        64,
    ),
    "gemma2": (replace(LLAMA, head_dim=256, q_heads=16, softcap=50.0), Angles(), 64),
    "float32": (replace(LLAMA, dtype=F32), Angles(), 64),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize(
    ("arch", "name", "rows"),
    [(90, n, 1) for n in STEPS] + [(90, "llama", 64), (80, "llama", 1), (89, "gemma2", 1)],
)
@compiled
def test_compiles(arch, name, rows):
    f, angles, page = STEPS[name]
    call = make_call("decode_attention", Source(), (1024,) * rows, page, f, angles, missing=None)
    with pretend(Target("cuda", arch, assume=("triton",))):
        [(kernel, given)] = launched(equip(KERNEL, call), arch, "decode")
    assert given["SPLIT"] == (rows == 1 and given["left"] is None)
    binary = built(arch, kernel, given, f.dtype, 64)
    waits_as_told(binary, given, arch)
    assert "cp.async" in binary.asm["ptx"], "keys are not loaded ahead"
    assert ("mma" in binary.asm["ptx"]) == (f.dtype != F32)
