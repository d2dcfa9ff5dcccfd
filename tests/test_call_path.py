"""How many of our files an eager call enters, its kernel's own work included, once everything is
imported."""

from __future__ import annotations

from tests.helpers import torch_process

LOOK = """
import os, sys
import torch, attnops
from attnops.core.kernel import kernels_of

root = os.path.dirname(attnops.__file__)
kernels = {kernel.run.__code__ for kernel in kernels_of("paged_attention").values()}

def look(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        entered.append(os.path.relpath(os.path.realpath(frame.f_code.co_filename), root))
        starts.append(frame.f_code in kernels)

def report(call):
    global entered, starts
    entered, starts = [], []
    with torch.no_grad():
        sys.setprofile(look)
        call()
        sys.setprofile(None)
    print(len({*entered}), starts.index(True) if True in starts else -1, *sorted({*entered}))
"""

PAGED = """
query, pages = torch.randn(3, 4, 8), torch.randn(4, 4, 2, 8)
table, lengths, cu_seqlens = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1], [2, 3]], [5, 6], [0, 1, 3]))
for _ in range(3):
    report(lambda: attnops.paged_attention(query, pages, pages.clone(), table, lengths, cu_seqlens, max_seqlen_q=2))
"""  # noqa: E501

LATENT = """
from attnops.cache import LatentCache
from attnops.nn import LatentAttention, RotaryEmbedding

layer = LatentAttention(64, 4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope=RotaryEmbedding(8))
sizes = {"max_requests": 2, "max_tokens_per_request": 64, "page_size": 4, "dtype": torch.float32, "device": "cpu"}
cache = LatentCache(1, 200, latent_dim=32, rope_dim=8, **sizes)
cache.extend(request := cache.alloc(), 7)
batch = cache.batch([request], 7, prefix_tokens=7)
report(lambda: layer(torch.randn(7, 64), batch=batch, latent_pages=cache.latent_pages[0]))
"""  # noqa: E501


def lines(tmp_path, script):
    """Of each call: files, Python calls before the kernel's own, and the files by name."""
    return [
        line.split()
        for line in torch_process(
            LOOK + script, env={"ATTNOPS_CACHE_DIR": str(tmp_path)}
        ).splitlines()
    ]


def test_a_paged_call(tmp_path):
    first, second, third = lines(tmp_path, PAGED)
    assert int(first[0]) <= 13, first
    assert int(second[0]) <= 4 and second == third, second
    assert 0 < int(second[1]) <= 9, (
        "Python calls of an eager call like the one before, up to its kernel"
    )


def test_a_first_prefill_of_latents(tmp_path):
    (first,) = lines(tmp_path, LATENT)
    assert int(first[0]) <= 25, first
