"""`triton` of experts: the grid through the interpreter, bits that do not follow the batch, and what ptxas makes of it."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.record import changed
from attnops.core.select import Policy, select
from attnops.ops.experts.cases import OSS
from attnops.testing import Source, make_call
from tests.mates import same_bits
from tests.triton.checks import SM90, triton
from tests.triton.process import compiled, interpreted
from tests.triton.test_compile import MEMORY, compile_for, launches_overlap, recorded, spilled, waits_first

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WIDE = (144, 72, 136)


@interpreted
def test_a_token_does_not_see_its_mates():
    call = make_call("experts", Source(1), 40, (72, 20, 70, 5, 2), BF16, **OSS)
    with pretend(SM90):
        assert select(call.problem, Policy(deterministic=True)).kernel is triton("experts")
    same_bits(call, [(0,), (5,), (39,), range(17)], triton("experts"))


@interpreted
def test_more_tokens_than_a_program_has_are_left_to_torch():
    """A graph compiled for a few tokens may meet many."""
    call, other = (make_call("experts", Source(1), 65, (*WIDE, 6, 2), BF16) for _ in range(2))
    triton("experts").run(call.record)
    kernels_of("experts")["aten"].run(other.record)
    assert torch.equal(call.arguments["output"], other.arguments["output"])


@pytest.mark.parametrize("op", ["experts", "mxfp4_experts"])
@interpreted
def test_one_way_serves_every_number_of_tokens_under_a_deterministic_policy(op):
    from attnops.kernels.triton.launch import experts as plain, mxfp4_experts as host

    host, sizes = {
        "experts": (plain, (24, 20, 28, 3, 2)),
        "mxfp4_experts": (host, (64, 64, 16, 3, 1)),
    }[op]
    for policy in ("", "deterministic"):
        ways = []
        with patch.multiple(host, **{way: partial(record_way, ways, way) for way in ("_one_token", "_few_tokens", "composed")}):
            for tokens in (1, 2, 40, 66):
                kernels_of(op)["triton"].run(changed(make_call(op, Source(1), tokens, sizes).record, policy=policy))
        assert [way for way, *_ in ways][:: len(ways) - 1] == (["_few_tokens"] * 2 if policy else ["_one_token", "composed"])
        assert len({*ways}) == (1 if policy else 4), ways


def record_way(ways, way, call, *more):
    """Which it is, and the tokens of a block."""
    ways.append((way, more[-1] if way == "_few_tokens" else 0))


@pytest.mark.parametrize(("op", "tokens"), [("experts", 66), ("mxfp4_experts", 18)])
@interpreted
def test_more_tokens_than_a_grid_holds_take_turns(op, tokens):
    """The bits of one launch, of a grid of one block of tokens."""
    from attnops.kernels.triton.launch import experts as plain, mxfp4_experts as host

    small = make_call("experts", Source(1), tokens, (24, 20, 28, 3, 2), bias=True)
    call = small if op == "experts" else make_call("mxfp4_experts", Source(1), tokens, (64, 64, 16, 3, 1), bias=True)
    found = []
    for most in (9, 1):
        with patch.object(plain, "GRID", most), patch.object(host, "GRID", most):
            given = call.with_(output=torch.full_like(call.arguments["output"], float("nan")))
            kernels_of(op)["triton"].run(changed(given.record, policy="deterministic"))
        found.append(given.arguments["output"])
    assert torch.equal(*found) and found[0].isfinite().all()


@interpreted
def test_numbers_far_out_of_range_read_nothing():
    call = make_call("experts", Source(1), 3, (*WIDE, 6, 2), F32)
    index = call.arguments["top_k_index"]
    index[0, 0], index[1, 1], index[2] = 2**62, -(2**62), 6
    triton("experts").run(call.record)
    got = call.arguments["output"].clone()
    kernels_of("experts")["reference"].run(call.record)
    torch.testing.assert_close(got, call.arguments["output"])
    assert not got[2].any()


# Selection ------------------------------------------------------------------------------------------------------------

QWEN = make_call("experts", Source(), 8, (*WIDE, 16, 4), BF16).problem


@pytest.mark.parametrize(("target", "tokens", "chosen"), [
    (SM90, Extent.of(1), "triton"), (SM90, Extent.of(64), "triton"), (SM90, Extent(2, None, 8), "triton"), (SM90, Extent.of(512), "aten"),
    (Target("cuda", 80, ("triton",)), Extent.of(8), "triton"), (Target("cuda", 90, ()), Extent.of(8), "aten"),
    (Target(), Extent.of(8), "aten"),
])  # fmt: skip
def test_the_choice_follows_the_number_of_tokens(target, tokens, chosen):
    problem = altered(QWEN, target=target, tokens=tokens, in_features=2048, out_features=768, experts=128, top_k=8)
    assert select(problem).kernel.name == chosen


# What is compiled -----------------------------------------------------------------------------------------------------

MODELS = {"gpt-oss": ((2880, 2880, 2880), 4, OSS), "qwen3": ((2048, 768, 2048), 8, {})}


def launched(name, tokens, arch, dtype=BF16):
    from attnops.kernels.shared.launch.gpu import Gpu
    from attnops.kernels.triton.launch import experts as host

    sizes, k, more = MODELS[name]
    call = make_call("experts", Source(), tokens, (64, 32, 64, 8, k), dtype, **more).map(
        lambda n, t: t.to(torch.int32) if n == "top_k_index" else t
    )
    inner, out = sizes[1:]
    shapes = {"x": (tokens, sizes[0]), "gate_up": (8, 2 * inner, sizes[0]), "down": (8, out, inner), "output": (tokens, out)}
    shapes |= {"gate_up_bias": (8, 2 * inner), "down_bias": (8, out)}

    def wide(n, t):
        if n not in shapes:
            return t
        if more and len(shapes[n]) == 3:
            count, rows, columns = shapes[n]
            return torch.empty(count, columns, rows, dtype=dtype).transpose(1, 2)
        return torch.empty(shapes[n], dtype=dtype)

    overlaps = patch.object(host, "overlaps", lambda device: arch == 90 and launches_overlap())
    with recorded(host, Gpu(132, MEMORY[arch], arch == 90, True)) as found, overlaps:
        triton("experts").run(call.map(wide).record)
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("arch", "name", "tokens", "dtype"), [
    (90, "gpt-oss", 1, BF16), (90, "gpt-oss", 32, BF16), (90, "qwen3", 1, BF16), (90, "qwen3", 32, BF16), (80, "qwen3", 64, BF16),
    (89, "gpt-oss", 8, BF16), (90, "qwen3", 1, F16), (90, "gpt-oss", 8, F16),
])  # fmt: skip
@compiled
def test_nothing_spills(arch, name, tokens, dtype):
    found = launched(name, tokens, arch, dtype)
    one = tokens == 1 and name == "qwen3"
    assert len(found) == (2 if one else 3)
    for function, arguments in found[:2]:
        binary = compile_for(arch, function, arguments, dtype)
        assert binary.metadata.shared <= MEMORY[arch]
        assert spilled(binary, arch) == 0
        ptx = binary.asm["ptx"]
        assert "cp.async" in ptx, "weights are not loaded ahead"
        assert ("mma" in ptx) == (not one)
        assert ("cp.async.bulk.tensor" in ptx) == (arch == 90 and not one), "which tiles are described"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("tokens", [1, 8])
@compiled
def test_every_launch_waits_before_any_access(tokens, arch):
    for function, arguments in launched("qwen3", tokens, arch):
        ptx = compile_for(arch, function, dict(arguments), BF16).asm["ptx"]
        assert waits_first(ptx) == arguments.get("launch_pdl", False) == (arch == 90 and launches_overlap())
