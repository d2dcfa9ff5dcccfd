"""`triton` of experts with weights of MXFP4: the grid through the interpreter, bits that do not follow the batch, and what is compiled."""

import re
from unittest.mock import patch

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import pretend
from attnops.core.select import Policy, select
from attnops.ops.experts.cases import SHAPED
from attnops.testing import Source, make_call
from tests.mates import same_bits
from tests.triton.checks import SM90, triton
from tests.triton.process import compiled, interpreted
from tests.triton.test_compile import MEMORY, compile_for, from_3_9, launches_overlap, recorded, spilled, waits_first

BF16 = torch.bfloat16


@interpreted
def test_a_token_does_not_see_its_mates():
    call = make_call("mxfp4_experts", Source(1), 18, (64, 64, 16, 3, 2), BF16, **SHAPED)
    with pretend(SM90):
        assert select(call.problem, Policy(deterministic=True)).kernel is triton("mxfp4_experts")
    same_bits(call, [(0,), (17,), range(9)], triton("mxfp4_experts"))


@interpreted
def test_numbers_far_out_of_range_read_nothing():
    call = make_call("mxfp4_experts", Source(1), 3, (64, 64, 16, 3, 2))
    index = call.arguments["top_k_index"]
    index[0, 0], index[1, 1], index[2] = 2**62, -(2**62), 6
    triton("mxfp4_experts").run(call.record)
    got = call.arguments["output"].clone()
    kernels_of("mxfp4_experts")["reference"].run(call.record)
    torch.testing.assert_close(got, call.arguments["output"])
    assert not got[2].any()


# What is compiled -----------------------------------------------------------------------------------------------------


def loaded_ahead(sass):
    """In the loop of products: of how many loads of 16 bytes the loop has no use up to its last product."""
    loops = re.findall(r"^\s*(\w+):$((?:(?!^\s*\w+:$).)*?\bHMMA\b(?:(?!^\s*\w+:$).)*?\bBRA \1;)", sass, re.MULTILINE | re.DOTALL)
    [(_, loop)] = loops
    loop = loop[: loop.rindex("HMMA")]
    found = [(int(m[1]), loop[m.end() :]) for m in re.finditer(r"LDG\.E\.128 R(\d+),", loop)]
    return sum(not re.search("|".join(rf"\bR{n}\b" for n in range(at, at + 4)), after) for at, after in found)


def launched(tokens, arch):
    from attnops.kernels.shared.launch.gpu import Gpu
    from attnops.kernels.triton.launch import mxfp4_experts as host

    call = make_call("mxfp4_experts", Source(), tokens, (2880, 2880, 64, 4, 4), BF16, index=torch.int32, **SHAPED)
    overlaps = patch.object(host, "overlaps", lambda device: arch == 90 and launches_overlap())
    with recorded(host, Gpu(132, MEMORY[arch], arch == 90, True)) as found, overlaps:
        triton("mxfp4_experts").run(call.record)
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("arch", "tokens"), [(90, 1), (90, 8), (80, 1), (89, 8)])
@compiled
def test_nothing_spills(arch, tokens):
    found = launched(tokens, arch)
    assert len(found) == (2 if tokens == 1 else 3)
    for function, arguments in found:
        binary = compile_for(arch, function, dict(arguments), BF16)
        assert spilled(binary, arch) == 0
        ptx = binary.asm["ptx"]
        assert ("mma.sync" in ptx) == (function.__name__ != "combine")
        assert waits_first(ptx) == arguments.get("launch_pdl", False) == (arch == 90 and launches_overlap())
        if "mma.sync" in ptx and not from_3_9():
            assert loaded_ahead(binary.asm["sass"]) > 0
