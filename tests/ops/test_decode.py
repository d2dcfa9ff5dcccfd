"""The reference of a decode step beside plain Python: which keys a new token sees, around holes in its page table."""

import math

import pytest
import torch

from attnops.ops import OPS
from attnops.ops.pages.decode_cases import Angles
from attnops.testing import Features, Source, make_call

PAGE = 4
HOLES = {
    "none": (),
    "first page": ((0, 0), (2, 0)),
    "middle page": ((0, 1), (2, 1)),
    "page of the new token": ((0, 2), (1, 0), (2, 2)),
    "all but one": ((0, 0), (0, 2), (2, 0), (2, 1)),
}


def attended(call, b, head):
    """The output of a request and a head, a number at a time."""
    given = call.arguments
    length, left = int(given["seq_lens"][b]), given.get("window_left", -1)
    own, seen = head // (given["query"].shape[1] // given["key"].shape[1]), []
    for p in range(length):
        page = int(given["page_table"][b, p // PAGE])
        if p == length - 1:
            seen.append((given["key"][b, own], given["value"][b, own]))
        elif 0 <= page < given["k_pages"].shape[0] and (left < 0 or p >= length - 1 - left):
            seen.append((given["k_pages"][page, p % PAGE, own], given["v_pages"][page, p % PAGE, own]))
    weights = [math.exp(float(given["query"][b, head] @ key) * given["scale"]) for key, _ in seen]
    return sum(w * value for w, (_, value) in zip(weights, seen, strict=True)) / sum(weights)


@pytest.mark.parametrize("window", [-1, 2, 5])
@pytest.mark.parametrize("holes", HOLES.values(), ids=HOLES)
def test_what_a_new_token_sees(holes, window):
    """Lengths that end within a page, with its first and with its last token."""
    f = Features(dtype=torch.float64, head_dim=4, q_heads=4, kv_heads=2, window=(window, -1))
    for lengths in ((10, 3, 11), (9, 1, 9), (12, 4, 12)):
        call = make_call("decode_attention", Source(3), lengths, PAGE, f, Angles(""), missing=holes)
        want = [[attended(call, b, head) for head in range(4)] for b in range(3)]
        OPS["decode_attention"](call.with_(policy="kernel=decode_attention:reference").record)
        torch.testing.assert_close(call.arguments["output"], torch.stack([torch.stack(row) for row in want]))
