"""`triton` of linear layers: the grid through the interpreter, bits that do not follow the batch,
tiles, and what ptxas makes of it."""

import re
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from attnops import ops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import Policy, select
from attnops.kernels.triton.launch import linear_tiles as tiles
from attnops.ops.case_data import BF16, F16, F32
from attnops.testing import CASES, Source, check_kernel, make_call
from tests.lowering.models import compiled_code, kernel_calls
from tests.ops import test_fakes as layouts
from tests.triton.checks import SM90, check, triton
from tests.triton.compiling import MEMORY, built, compile_for, launched, waits_as_told
from tests.triton.process import compiled, interpreted

ALL = {"norm": 1.0, "bias": True, "activation": "silu", "residual": True}


@contextmanager
def tile_of(tile):
    """Every call of several rows has this tile, as far as it fits."""
    with patch.object(tiles, "SEVERAL_ROWS", ((tiles.MOST_ROWS, False, ((tile, 0.0),)),)):
        yield


@pytest.mark.full
@pytest.mark.parametrize("split", [2, 4, 8])
@interpreted
def test_columns_split_among_warps(split):
    """Columns of fewer and of more than one step, and of parts of one; parts that have no columns
    at all."""
    with tile_of(tiles.Tile(16, 256, 3, 4, described=split < 8, rows=8, split=split)):
        for columns in (1, 17, 130, 256):
            assert not check(
                make_call("linear", Source(columns), 9, columns, 21, BF16, **ALL)
            ).refused


@interpreted
def test_a_split_changes_no_more_than_the_order_of_sums():
    """The launch has the split that it is given; the same launch twice gives the same bits."""
    from attnops.kernels.triton.launch import linear as host

    call, results = make_call("linear", Source(3), 8, 330, 40, F32, norm=0.0, residual=True), []
    for split in (1, 4, 4):
        host.linear(call.record, tiles.Tile(16, 512, 3, 4, split=split))
        results.append(call.arguments["output"].clone())
        call.arguments["output"].fill_(float("nan"))
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[1])


@interpreted
def test_weights_may_be_swapped_in_place():
    """The descriptor is that of the launch."""
    call = make_call("linear", Source(1), 3, 64, 600, F32)
    triton("linear").run(call.record)
    before, weight = call.arguments["output"].clone(), call.arguments["weight"]
    weight.data = weight.data.clone().neg_()
    triton("linear").run(call.record)
    assert torch.equal(call.arguments["output"], -before)


@interpreted
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_a_graph_of_several_numbers_of_tokens(few):
    """The kernel serves those that the graph is bound to. Torch's product, fused in place, serves a
    graph that may meet more."""
    x, weight, gain = torch.randn(90, 48), torch.randn(40, 48), torch.ones(48)

    def layer(x, kernel=None):
        if few and x.shape[0] > 64:
            raise ValueError("a guard")
        return ops.linear(x, weight, norm_weight=gain, norm_eps=1e-5, kernel=kernel)

    made = torch.compile(layer, fullgraph=True, dynamic=True)
    with (
        torch.no_grad(),
        pretend(SM90),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):  # the two graphs differ in guards alone
        _, code = compiled_code(lambda: made(x[:8]))
        assert kernel_calls(code) == ["linear.triton"] * few
        for rows in (2, 33, 64 if few else 90):
            with torch.compiler.set_stance("fail_on_recompile"):
                torch.testing.assert_close(made(x[:rows]), layer(x[:rows], "aten"))


# Selection ----------------------------------------------------------------------------------------

LLAMA = make_call("linear", Source(), 8, 64, 96, BF16, norm=0.0).problem
CALLS = {
    "linear": altered(LLAMA, in_features=4096, out_features=6144),
    "experts": altered(
        make_call("experts", Source(), 8, (144, 72, 136, 16, 4), BF16).problem,
        in_features=2048,
        out_features=768,
        experts=128,
        top_k=8,
    ),
}
GRAPH = Extent(2, None, 8)
CHOSEN = [
    ("linear", SM90, 1, "triton"),
    ("linear", SM90, 32, "triton"),
    ("linear", SM90, GRAPH, "aten"),
    ("linear", SM90, 65, "triton_aten"),
    ("experts", SM90, 1, "triton"),
    ("experts", SM90, 64, "triton"),
    ("experts", SM90, GRAPH, "triton"),
    ("experts", SM90, 512, "aten"),
    *((op, Target("cuda", 80, ("triton",)), 8, "triton") for op in CALLS),
    *((op, target, 8, "aten") for op in CALLS for target in (Target(), Target("cuda", 90, ()))),
]


@pytest.mark.parametrize(("op", "target", "tokens", "chosen"), CHOSEN)
def test_the_choice_follows_the_number_of_tokens(op, target, tokens, chosen):
    tokens = tokens if tokens is GRAPH else Extent.of(tokens)
    problem = altered(CALLS[op], target=target, tokens=tokens)
    found = select(problem)
    assert found.kernel.name == chosen
    if target == SM90 and op == "linear":
        assert (chosen == "triton") is ("triton" not in found.refused)
        assert "triton" not in select(altered(problem, tokens=Extent.of(64))).refused, (
            "the most, whatever is faster there"
        )
        assert select(problem, Policy(deterministic=True)).kernel.name == "triton"


def test_a_norm_of_float16_is_refused():
    problem = altered(LLAMA, target=SM90, dtype=F16, kv_dtype=F16)
    assert "may overflow" in str(select(problem).refused["triton"][0])
    assert select(altered(problem, asks=frozenset())).kernel.name == "triton"


# Tiles --------------------------------------------------------------------------------------------

OUTS = {"qkv": 6144, "o": 4096, "gate_up": 14336, "head": 128256, "qwen_o": 2560}


@pytest.mark.parametrize("memory", MEMORY.values())
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_tiles_fit(normed, rows, itemsize, memory):
    for name, outs in OUTS.items():
        gated = name == "gate_up"
        tile = tiles.few_rows(rows, outs, itemsize, gated, normed, 132, memory)
        assert (
            (tile.outs << gated) + tiles.block_of(rows, tile)
        ) * tile.bytes * tile.stages <= memory
        assert tile.bytes // itemsize >= 16 and tile.stages >= 1
        assert -(-outs // tile.outs) >= 0.3 * 132
        assert (tile.rows == 8) == (
            rows <= 8 and itemsize == 2 and not normed and name in ("qkv", "o", "qwen_o")
        )
        with tile_of(tiles.Tile(64, 512, 6, 8, split=8)):
            shared = tiles.few_rows(rows, outs, itemsize, gated, normed, 132, memory)
        assert shared.split == (8 if itemsize == 2 else 1)
        assert shared.bytes // itemsize >= 16 * shared.split


# What is compiled ---------------------------------------------------------------------------------


@pytest.mark.sweep(9)
@pytest.mark.parametrize(
    ("arch", "rows", "name"),
    [
        *((90, rows, name) for rows in (1, 64) for name in ("qkv", "gate_up")),
        (90, 8, "o"),
        (80, 1, "qkv"),
        (89, 64, "gate_up"),
    ],
)
@compiled
def test_nothing_spills(arch, rows, name):
    given = (
        {"norm": 0.0, "activation": "silu"}
        if name == "gate_up"
        else {"norm": 0.0}
        if name == "qkv"
        else {"residual": True}
    )
    [(function, arguments)] = launched(
        make_call("linear", Source(), rows, 1024, OUTS[name], BF16, **given), arch, "linear"
    )
    binary = built(arch, function, arguments, BF16, 0 if arch == 90 else 512)
    ptx = binary.asm["ptx"]
    assert "cp.async" in ptx, "weights are not loaded ahead"
    assert ("mma" in ptx) == (rows > 1)
    assert ("cp.async.bulk.tensor" in ptx) == (arch == 90 and rows > 1), "which tiles are described"
    waits_as_told(binary, arguments, arch)


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("arch", "described"), [(90, True), (90, False), (80, False)])
@pytest.mark.parametrize(
    "given", [{"residual": True}, {"norm": 0.0}, {"norm": 0.0, "activation": "silu"}], ids=str
)
@compiled
def test_warps_share_the_columns(given, arch, described):
    """No warp computes what another one does, and a tile in shared memory is not written again in
    another order."""
    counts = []
    for split in (1, 4):
        with tile_of(tiles.Tile(16, 512, 3, 4, described, rows=8, split=split)):
            [(function, arguments)] = launched(
                make_call("linear", Source(), 8, 1024, 2560, BF16, **given), arch, "linear"
            )
        binary = built(arch, function, arguments, BF16)
        waits_as_told(binary, arguments, arch)
        counts.append(len(re.findall(r"mma\.sync", binary.asm["ptx"])))
        assert "ldmatrix" in binary.asm["ptx"]
    assert counts[0] == 4 * counts[1]


@pytest.mark.parametrize("rows", [1, 3])
@compiled
def test_addresses_are_int64(rows):
    """Also of one result a row, as the gate of a shared expert has: Triton makes a constant of a
    1."""
    for outs in (1, 40):
        columns = {
            name: torch.empty(outs, 3, dtype=BF16).T[:rows] for name in ("residual", "output")
        }
        call = make_call("linear", Source(), rows, 48, outs, BF16, **ALL).with_(**columns)
        [(function, arguments)] = launched(call, 90, "linear")
        ir = compile_for(90, function, arguments, BF16).asm["ttir"]
        assert "arith.muli" in ir and not re.search(r"arith\.muli.*tensor<.*xi32>", ir)


AROUND = kernels_of("linear")["triton_aten"]
MANY = {
    case.label: case
    for case in CASES["linear"]
    if not AROUND.refusals(altered(case.call().problem, target=SM90))
}


def check_around(call):
    with pretend(SM90):
        figures = check_kernel(AROUND, call)
    assert not figures.refused and figures.worst <= 1.0, figures


@pytest.mark.parametrize("label", MANY)
@interpreted
def test_launches_around_a_product(label):
    check_around(MANY[label].call())


@pytest.mark.parametrize(
    "given", [ALL, {**ALL, "norm": 0.0}, {"norm": 0.0, "residual": True}], ids=str
)
@interpreted
def test_launches_around_a_product_of_any_layout(given):
    """Of each tensor in turn, and of all."""
    call = make_call("linear", Source(5), 66, 40, 24, BF16, **given)
    tensors = {name: t for name, t in call.tensors().items() if name not in ("bias", "norm_weight")}
    turned = {
        name: layouts.raw(layouts.transposed, t, 0)
        for name, t in tensors.items()
        if name in ("residual", "output")
    }
    spread = {name: layouts.raw(layouts.strided, t, 0) for name, t in tensors.items()}
    for changed in (*({name: t} for name, t in {**spread}.items()), turned, {**spread, **turned}):
        check_around(call.with_(**changed))


def test_what_is_left_to_torch():
    """Few rows have a kernel of their own; a product alone, and float16, whose products saturate,
    are torch's."""

    def fields(rows, dtype=BF16, **given):
        problem = make_call("linear", Source(), rows, 48, 40, dtype, **given).problem
        return {refusal.field for refusal in AROUND.refusals(altered(problem, target=SM90))}

    assert not fields(65, norm=0.0) and not fields(65, activation="silu")
    assert fields(64, norm=0.0) == {"tokens"}
    assert fields(65, residual=True) == {"norm_weight"}
    assert fields(65, F16, norm=0.0) == {"dtype"}


def test_a_compiler_fuses_more_than_two_launches():
    problem = altered(
        make_call("linear", Source(), 512, 48, 40, BF16, norm=0.0, activation="silu").problem,
        target=SM90,
    )
    eager, compiled = (AROUND.cost_us(altered(problem, compiled=c)) for c in (False, True))
    assert eager < kernels_of("linear")["aten"].cost_us(problem) < compiled


@pytest.mark.parametrize("arch", [80, 90])
@compiled
def test_launches_around_a_product_compile(arch):
    call = make_call("linear", Source(), 80, 4096, 2048, BF16, **ALL)
    found = launched(call, arch, "linear", "triton_aten")
    assert [function.__name__ for function, _ in found] == ["norm_rows", "gate_rows"]
    for function, arguments in found:
        waits_as_told(built(arch, function, arguments, BF16), arguments, arch)
