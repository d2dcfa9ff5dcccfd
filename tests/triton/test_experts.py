"""`triton` of experts: the grid through the interpreter, bits that do not follow the batch, and
what ptxas makes of it."""

import re
from functools import partial
from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.ops.case_data import BF16, F16
from attnops.ops.experts.cases import OSS, SHAPED
from attnops.testing import Source, make_call
from tests.triton.checks import triton
from tests.triton.compiling import built, from_3_9, launched, waits_as_told
from tests.triton.process import compiled, interpreted

WIDE = (144, 72, 136)
MIXTURES = {"experts": (24, 20, 28, 3, 2), "mxfp4_experts": (64, 64, 16, 3, 2)}


@interpreted
def test_more_tokens_than_a_program_has_are_left_to_torch():
    """A graph compiled for a few tokens may meet many."""
    call, other = (make_call("experts", Source(1), 65, (*WIDE, 6, 2), BF16) for _ in range(2))
    triton("experts").run(call.record)
    kernels_of("experts")["aten"].run(other.record)
    assert torch.equal(call.arguments["output"], other.arguments["output"])


@pytest.mark.parametrize("op", MIXTURES)
@interpreted
def test_one_way_serves_every_number_of_tokens_under_a_deterministic_policy(op):
    host = import_module(f"attnops.kernels.triton.launch.{op}")
    for policy in ("", "deterministic"):
        ways = []
        with patch.multiple(
            host,
            **{
                way: partial(record_way, ways, way)
                for way in ("_one_token", "_few_tokens", "composed")
            },
        ):
            for tokens in (1, 2, 40, 66):
                triton(op).run(
                    changed(make_call(op, Source(1), tokens, MIXTURES[op]).record, policy=policy)
                )
        assert [way for way, *_ in ways][:: len(ways) - 1] == (
            ["_few_tokens"] * 2 if policy else ["_one_token", "composed"]
        )
        assert len({*ways}) == (1 if policy else 4), ways


def record_way(ways, way, call, *more):
    """Which it is, and the tokens of a block."""
    ways.append((way, more[-1] if way == "_few_tokens" else 0))


@pytest.mark.parametrize(("op", "tokens"), [("experts", 66), ("mxfp4_experts", 18)])
@interpreted
def test_more_tokens_than_a_grid_holds_take_turns(op, tokens):
    """The bits of one launch, of a grid of one block of tokens."""
    host = import_module(f"attnops.kernels.triton.launch.{op}")
    call, found = make_call(op, Source(1), tokens, MIXTURES[op], bias=True), []
    for most in (9, 1):
        with patch.object(host, "GRID", most):
            given = call.with_(output=torch.full_like(call.arguments["output"], float("nan")))
            triton(op).run(changed(given.record, policy="deterministic"))
        found.append(given.arguments["output"])
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("op", MIXTURES)
@interpreted
def test_numbers_far_out_of_range_read_nothing(op):
    call = make_call(op, Source(1), 3, MIXTURES[op])
    index = call.arguments["top_k_index"]
    index[0, 0], index[1, -1], index[2] = 2**62, -(2**62), 6
    triton(op).run(call.record)
    got = call.arguments["output"].clone()
    kernels_of(op)["reference"].run(call.record)
    torch.testing.assert_close(got, call.arguments["output"])
    assert not got[2].any()


# What is compiled ---------------------------------------------------------------------------------

MODELS = {"gpt-oss": ((2880, 2880, 2880), 4, OSS), "qwen3": ((2048, 768, 2048), 8, {})}


def model_call(name, tokens, dtype=BF16):
    sizes, k, more = MODELS[name]
    call = make_call(
        "experts", Source(), tokens, (64, 32, 64, 8, k), dtype, index=torch.int32, **more
    )
    inner, out = sizes[1:]
    shapes = {
        "x": (tokens, sizes[0]),
        "gate_up": (8, 2 * inner, sizes[0]),
        "down": (8, out, inner),
        "output": (tokens, out),
    }
    shapes |= {"gate_up_bias": (8, 2 * inner), "down_bias": (8, out)}

    def wide(n, t):
        if n not in shapes:
            return t
        if more and t.dim() == 3:  # gpt-oss has its weights' columns first
            count, rows, columns = shapes[n]
            return torch.empty(count, columns, rows, dtype=dtype).transpose(1, 2)
        return torch.empty(shapes[n], dtype=dtype)

    return call.map(wide)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("arch", "name", "tokens", "dtype"),
    [
        (90, "gpt-oss", 1, BF16),
        (90, "gpt-oss", 32, BF16),
        (90, "qwen3", 1, BF16),
        (90, "qwen3", 32, BF16),
        (80, "qwen3", 64, BF16),
        (89, "gpt-oss", 8, BF16),
        (90, "qwen3", 1, F16),
        (90, "gpt-oss", 8, F16),
        (80, "qwen3", 1, BF16),
    ],
)
@compiled
def test_nothing_spills(arch, name, tokens, dtype):
    found = launched(model_call(name, tokens, dtype), arch, "experts")
    one = tokens == 1 and name == "qwen3"
    assert len(found) == (2 if one else 3)
    for function, arguments in found:
        binary = built(arch, function, arguments, dtype)
        waits_as_told(binary, arguments, arch)
        ptx = binary.asm["ptx"]
        if function.__name__ != "combine":
            assert "cp.async" in ptx, "weights are not loaded ahead"
            assert ("mma" in ptx) == (not one)
            assert ("cp.async.bulk.tensor" in ptx) == (arch == 90 and not one), (
                "which tiles are described"
            )


def loaded_ahead(sass):
    """In the loop of products: of how many loads of 16 bytes the loop has no use up to its last
    product."""
    [(_, loop)] = re.findall(
        r"^\s*(\w+):$((?:(?!^\s*\w+:$).)*?\bHMMA\b(?:(?!^\s*\w+:$).)*?\bBRA \1;)",
        sass,
        re.MULTILINE | re.DOTALL,
    )
    loop = loop[: loop.rindex("HMMA")]
    found = [(int(m[1]), loop[m.end() :]) for m in re.finditer(r"LDG\.E\.128 R(\d+),", loop)]
    return sum(
        not re.search("|".join(rf"\bR{n}\b" for n in range(at, at + 4)), after)
        for at, after in found
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("arch", "tokens"), [(90, 1), (90, 8), (80, 1), (89, 8)])
@compiled
def test_nothing_of_mxfp4_spills(arch, tokens):
    call = make_call(
        "mxfp4_experts", Source(), tokens, (2880, 2880, 64, 4, 4), BF16, index=torch.int32, **SHAPED
    )
    found = launched(call, arch, "mxfp4_experts")
    assert len(found) == (2 if tokens == 1 else 3)
    for function, arguments in found:
        binary = built(arch, function, arguments, BF16)
        waits_as_told(binary, arguments, arch)
        assert ("mma.sync" in binary.asm["ptx"]) == (function.__name__ != "combine")
        if function.__name__ != "combine" and not from_3_9():
            assert loaded_ahead(binary.asm["sass"]) > 0
