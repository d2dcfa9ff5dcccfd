"""The device functions of a round of speculation through Triton's compiler and ptxas: nothing
spilled, and a tree in one warp."""

import pytest

from attnops.ops.case_data import BF16
from attnops.testing import Source, make_call
from tests.triton.compiling import built, launched
from tests.triton.process import compiled

CALLS = {
    "lookup_drafts": ((32768,), 32768, 3, 8),
    "accept": (8, 64, "tree"),
    "advance_rows": ((9,) * 8, 4096, (4000,), 64, "tree", (1, 2)),
    "next_inputs": ((9,) * 8, 4096, 7, 8),
    "accept_sampled": (1, 8, "tree", 128256),
    "build_tree": (2, 510, 64),
    "tree_mask": ((2100, 64), 64, 2304, "tree"),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("op", CALLS)
@compiled
def test_rounds(op, arch):
    call = make_call(op, Source(), *CALLS[op])
    [(kernel, given)] = launched(call, arch, "speculation")
    ptx = built(arch, kernel, given, BF16).asm["ptx"]
    assert op not in ("accept", "advance_rows") or "bar.sync" not in ptx, (
        "threads wait for each other"
    )
