"""How many of our files an eager call enters on its way to a kernel, once everything is imported."""

from __future__ import annotations

from tests.helpers import fresh_process

SCRIPT = """
import os, sys
import torch, attnops
from attnops.kernel import kernels_of

root = os.path.dirname(attnops.__file__)
kernels = {kernel.run.__code__ for kernel in kernels_of("paged_attention").values()}

def look(frame, event, arg):
    global calls
    if frame.f_code in kernels:
        sys.setprofile(None)
    elif event == "call" and frame.f_code.co_filename.startswith(root):
        entered.add(os.path.relpath(frame.f_code.co_filename, root))
        calls += 1

query, pages = torch.randn(3, 4, 8), torch.randn(4, 4, 2, 8)
table, lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1], [2, 3]], [5, 6], [0, 1, 3]))
for _ in range(3):
    entered, calls = set(), 0
    with torch.no_grad():
        sys.setprofile(look)
        attnops.paged_attention(query, pages, pages.clone(), table, lengths, starts, max_seqlen_q=2)
    print(len(entered), calls, *sorted(entered))
"""


def test_files_on_the_way_to_a_kernel(tmp_path):
    """The kernel's own work is not counted. Five of the files are `sdpa`, the reference, and the estimates that choose between them."""
    first, second, third = (line.split() for line in fresh_process(SCRIPT, env={"ATTNOPS_CACHE_DIR": str(tmp_path)}).splitlines())
    assert int(first[0]) <= 16, first
    assert int(second[0]) <= 4 and second == third, second
    assert int(second[1]) <= 9, "Python calls of an eager call like the one before"
