"""`triton`'s kernels that move data, through the interpreter: the grid, the reference's bits, any
layout, overlap, opcheck."""

from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.launch import tiles
from attnops.ops import OPS
from attnops.ops.case_data import BF16, E4M3, E5M2, F16, F32, F64, INT8, U8
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Features, Source, make_call
from attnops.testing.check import clone
from tests.triton.checks import SM90, check
from tests.triton.process import interpreted
from tests.triton.values import every_number

WRITES = ("write_kv", "write_latent", "write_latent_packed")
MOVES = ("copy_kv",)
TABLES = ("kv_indices", "decode_rows", "named_pages")
DATA = (*WRITES, *MOVES, *TABLES)


def ran(op, *args, **kwargs):
    """The kernel's results of an op's arguments."""
    return kernels_of(op)["triton"].run(OPS[op].call(*args, **kwargs))


def results(run, call):
    """What a call returns or writes, by bits; the call is left alone."""
    mine = call.map(lambda _, t: clone(t))
    with pretend(SM90):
        returned = run(mine.record)
    values = (
        returned
        if isinstance(returned, tuple)
        else (returned,)
        if returned is not None
        else [mine.arguments[n] for n in mine.mutated]
    )
    return [v.contiguous().view(U8) for v in values]


def check_bits(call):
    kernels = kernels_of(call.op)
    for ours, theirs in zip(
        results(kernels["triton"].run, call), results(kernels["reference"].run, call), strict=True
    ):
        assert torch.equal(ours, theirs), call


# Bit for bit --------------------------------------------------------------------------------------


SCALES = {"one": (1.0,), "a_third": (1 / 3,), "by_head": (0.07, 3.0, 1.0, 1e-3)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("stored", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@interpreted
def test_quantised_bits(dtype, stored, scale):
    """To the nearest, ties to even, saturated, subnormal: what the reference stores."""
    x = every_number(dtype, 4, 64)
    pages = torch.zeros(-(-x.shape[0] // 16), 16, 4, 64, dtype=stored)
    slots = torch.arange(x.shape[0], dtype=torch.int32)
    scales = torch.tensor(SCALES[scale])
    call = make_call("write_kv", Source(), (0,), 1, 1, Features(kv_dtype=stored)).with_(
        key=x,
        value=x.flip(0),
        k_pages=pages,
        v_pages=pages.clone(),
        slots=slots,
        k_scale=scales,
        v_scale=scales[:1].clone(),
    )
    check_bits(call)


@interpreted
def test_float_pages_with_scales():
    for dtype in (BF16, F16, F32):
        x = Source(3).normal(40, 2, 16, dtype=dtype)
        for k_scale, v_scale in ((torch.tensor([0.3]), None), (None, torch.tensor([0.7, 3.0]))):
            call = make_call("write_kv", Source(), range(40), 3, 16, Features(dtype=dtype)).with_(
                key=x, value=x.clone()
            )
            check_bits(
                call.with_(
                    **{
                        n: s
                        for n, s in (("k_scale", k_scale), ("v_scale", v_scale))
                        if s is not None
                    }
                )
            )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", [*WRITES[1:], *MOVES])
@interpreted
def test_same_bits_as_the_reference(op):
    for case in CASES[op]:
        for seed in (1, 2):
            call = case.call(seed)
            if not {t.dtype for t in call.tensors().values()} & {F64} or op in MOVES:
                check_bits(call)


@interpreted
def test_what_is_not_finite_stays_so():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]).repeat(4).reshape(1, 1, 16)
    for stored in (E4M3, E5M2):
        call = make_call(
            "write_kv", Source(), (2,), 1, 4, Features(kv_heads=1, kv_dtype=stored)
        ).with_(key=x, value=x.clone())
        call = call.with_(k_scale=torch.ones(1), v_scale=torch.ones(1))
        kernels_of("write_kv")["triton"].run(call.record)
        got, top = call.arguments["k_pages"][0, 2, 0].float(), torch.finfo(stored).max
        assert got[0].isnan() and got[1:4].tolist() == [top, -top, 1.0]


# Layouts, sizes -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("op", WRITES)
@interpreted
def test_many_tokens(op):
    """Tiles of several tokens, ragged ends, rows wider than a tile."""
    f = (
        Features(dtype=BF16, head_dim=128, kv_heads=12, v_head_dim=80)
        if op == "write_kv"
        else DEEPSEEK
    )
    call = make_call(
        op, Source(2), [i if i % 7 else -1 for i in Source(2).permutation(300)], 20, 16, f
    )
    check(call)
    check_bits(call)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("entries", [1, 5, 256, 257, 600])
@interpreted
def test_copies_that_overlap(entries):
    """On both sides of the change from one launch to a scratch, and with a scratch that holds one
    layer at a time."""
    turned = Source(entries).permutation(entries)
    call = make_call(
        "copy_kv",
        Source(1),
        tuple(enumerate(turned)),
        3,
        40,
        16,
        Features(dtype=BF16, head_dim=24, v_head_dim=40, kv_heads=3),
    )
    check_bits(call)
    with patch.object(tiles, "SCRATCH", 1):
        check_bits(call)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("requests", "depth"), [(45, 7), (3, 256)], ids=str)
@interpreted
def test_groups_of_a_copy_take_one_launch(requests, depth):
    """Accepted paths of many requests, whose slots lie across each other's."""
    source, places = Source(depth), Source(1).permutation(requests * depth)
    pairs = [
        (places[first + i], places[first + to])
        for first in range(0, requests * depth, depth)
        for to, i in enumerate(source.permutation(depth))
    ]
    f = Features(dtype=BF16, head_dim=24, v_head_dim=40, kv_heads=3)
    call = make_call("copy_kv", Source(1), pairs, 3, requests * depth, 1, f, group=depth)
    with patch("attnops.kernels.triton.launch.data._copy_through") as through:
        check_bits(call)
    assert not through.called


@pytest.mark.full
@interpreted
def test_long_tables():
    source = Source(5)
    for batch, width, page in ((1, 3000, 1), (70, 5, 16), (520, 2, 4), (3, 1025, 64)):
        lens = source.ints([(i * 37) % (width * page + 1) for i in range(batch)])
        table = source.ints(source.permutation(batch * width)).reshape(batch, width)
        call = OPS["kv_indices"].call(table, lens, page_size=page)
        with pretend(SM90):
            ours, theirs = (kernels_of("kv_indices")[k].run(call) for k in ("triton", "reference"))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Tiles ------------------------------------------------------------------------------------------


def test_tiles_fill_the_gpu_before_they_grow():
    sizes = [tiles.store_tile(t, (1024, 1024), 2, 132) for t in (1, 512, 4096, 65536)]
    assert [(s.rows, s.columns) for s in sizes] == [(1, 1024), (1, 1024), (4, 1024), (4, 1024)]


def test_blocks_waste_little():
    for columns in range(1, 3000):
        wide = tiles.block(columns)
        assert wide == power(wide) and wide <= tiles.WIDEST
        assert -columns % wide * 8 <= columns or wide == power(columns) or wide == tiles.WIDEST


def test_a_copy_is_held_in_registers():
    for entries in (1, 2, 16, 100, tiles.WHOLE):
        tile = tiles.copy_tile(entries, 4096, 2)
        assert tile.rows >= entries and tile.rows * tile.columns * 2 <= tiles.HELD
    assert tiles.layers_at_once(80, 4096, 2048) == 4 and tiles.layers_at_once(3, 10**9, 2048) == 1


@interpreted
def test_slots_outside_the_pages_are_neither_written_nor_copied():
    key, value, pages = (torch.randn(*shape) for shape in ((5, 2, 16), (5, 2, 16), (4, 3, 2, 16)))
    for slots, same in (([7, 12, 0, 2**31 - 1, -5], [7, -1, 0, -1, -1]), ([12] * 5, [-1] * 5)):
        found = []
        for at in (slots, same):
            pair = pages.clone(), pages.clone()
            ran("write_kv", key, value, *pair, torch.tensor(at))
            ran("copy_kv", pair[0][None], None, torch.tensor(at), torch.tensor(at[::-1]))
            found.append(pair)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("shape", [(130, 3, 5), (64, 2), (1, 4, 700)], ids=str)
@interpreted
def test_rows_of_no_request_are_cleared(shape):
    """As what aten's flash kernels leave unwritten: the rest keeps its bits, in one tensor or
    two."""
    from attnops.kernels.shared.launch.rows import clear_rows

    for end in {0, 1, shape[0] - 1, shape[0], min(64, shape[0])}:
        for count in (1, 2, 3):
            parts, before = [], []
            for n in range(count):
                rows = torch.randn(shape[0] + 70 * n, *shape[1:], dtype=(BF16, F32, BF16)[n])
                before.append(rows.clone())
                rows[end + n :] = float("nan")
                parts.append(
                    (
                        torch.tensor([0, 7, end + n], dtype=torch.int32),
                        rows,
                        (0.0, -float("inf"), 0.0)[n],
                    )
                )
            clear_rows(tuple(parts))
            for (starts, x, fill), old in zip(parts, before, strict=True):
                last = int(starts[-1])
                assert torch.equal(x[:last], old[:last]) and (x[last:] == fill).all()


@pytest.mark.parametrize(("page", "apart"), [(1, 1), (8, 8), (8, 11)])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("topk", [5, 128, 700])
@interpreted
def test_lists_name_slots_alone(topk, lengths, page, apart):
    from attnops.kernels.shared.launch.rows import make_lists

    tokens, slots, width = 3, 40, -(-topk // 128) * 128
    given = torch.randint(-3, 50, (topk, tokens), dtype=torch.int32).T
    given[0, :4] = torch.tensor([slots, slots - 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    length = torch.tensor([topk, 0, 2], dtype=torch.int32) if lengths else None
    out = torch.full((tokens, width), 99, dtype=torch.int32)
    make_lists(given, length, slots, out, page, apart)
    want = torch.where((given >= 0) & (given < slots), given // page * apart + given % page, -1)
    if length is not None:
        want = want.masked_fill(torch.arange(topk) >= length[:, None], -1)
    assert torch.equal(out, torch.nn.functional.pad(want, (0, width - topk), value=-1))
