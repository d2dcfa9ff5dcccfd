"""The reference of a decode step beside the plain formula: which keys a new token sees, around
holes in its page table."""

import pytest
import torch

from attnops.ops import OPS
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import Features, Source, make_call
from tests.formula import plain

PAGE = 4
HOLES = {
    "none": (),
    "first page": ((0, 0), (2, 0)),
    "middle page": ((0, 1), (2, 1)),
    "page of the new token": ((0, 2), (1, 0), (2, 2)),
    "all but one": ((0, 0), (0, 2), (2, 0), (2, 1)),
}


def by_formula(call, b):
    """The output `[Hq, D]` of a request: the keys of its holes are hidden by a mask, and the new
    token's are the last."""
    t, length = call.arguments, int(call.arguments["seq_lens"][b])
    ids = t["page_table"][b][torch.arange(length - 1) // PAGE]
    there, at = (ids >= 0) & (ids < t["k_pages"].shape[0]), torch.arange(length - 1) % PAGE
    pairs = ((t["k_pages"], t["key"]), (t["v_pages"], t["value"]))
    key, value = (
        torch.cat([pages[ids.clamp(0, pages.shape[0] - 1), at].nan_to_num(), new[b : b + 1]])
        for pages, new in pairs
    )
    mask = torch.cat([there, torch.ones(1, dtype=torch.bool)])[None, None]
    return plain(t["query"][b : b + 1], key, value, mask, None, {**t, "causal": True})[0][0]


@pytest.mark.parametrize("window", [-1, 2, 5])
@pytest.mark.parametrize("holes", HOLES.values(), ids=HOLES)
def test_what_a_new_token_sees(holes, window):
    """Lengths that end within a page, with its first and with its last token."""
    f = Features(dtype=torch.float64, head_dim=4, q_heads=4, kv_heads=2, window=(window, -1))
    for lengths in ((10, 3, 11), (9, 1, 9), (12, 4, 12)):
        call = make_call("decode_attention", Source(3), lengths, PAGE, f, Angles(""), missing=holes)
        want = torch.stack([by_formula(call, b) for b in range(3)])
        OPS["decode_attention"](call.with_(policy="kernel=decode_attention:reference").record)
        torch.testing.assert_close(call.arguments["output"], want)
