"""How many of our files a call enters, its kernel's own work included, once everything is imported;
and docs/architecture.md names them, in the order in which they are first entered."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from tests.helpers import ROOT, torch_process

LOOK = """
import functools, json, os, sys
import torch, attnops
from attnops.core.kernel import kernels_of

root = os.path.dirname(os.path.dirname(os.path.realpath(attnops.__file__)))
ours = tuple(os.path.join(root, folder, "") for folder in ("attnops", "lowering", "graphs"))
kernels = {kernel.run.__code__ for kernel in kernels_of("paged_attention").values()}

real = functools.cache(os.path.realpath)

def look(frame, event, arg):
    file = real(frame.f_code.co_filename)
    if event == "call" and file.startswith(ours):
        entered.append(os.path.relpath(file, root))
        starts.append(frame.f_code in kernels)

def report(call):
    global entered, starts
    entered, starts = [], []
    with torch.no_grad():
        sys.setprofile(look)
        call()
        sys.setprofile(None)
    print(json.dumps([entered, starts.index(True) if True in starts else -1]))
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
for _ in range(5):
    batch = cache.batch([request])
    report(lambda: layer(torch.randn(1, 64), batch=batch, latent_pages=cache.latent_pages[0]))
"""  # noqa: E501

DECODE = """
from attnops.hf import tiny

model = tiny.model("llama")
ids = torch.randint(0, 100, (2, 9))
cache = attnops.patch(model, cache="paged", decode="hf").new_cache(2, 64)
with torch.no_grad():
    model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
for step in range(5):
    mask = torch.ones(2, 10 + step, dtype=torch.int64)
    report(lambda: model(ids[:, :1], attention_mask=mask, past_key_values=cache))
"""

COMPILED = """
from attnops.nn import Attention, PagedCache

layer = Attention(4, 2, head_dim=16)
cache = PagedCache(1, 20, 4, 2, 16, max_requests=2, max_pages_per_request=8, dtype=torch.float32, device="cpu")
request, pages = cache.alloc(), {"k_pages": cache.k_pages[0], "v_pages": cache.v_pages[0]}
step = torch.compile(lambda query, key, batch: layer(query, key, key, batch=batch, **pages))
for _ in range(2):
    batch = cache.batch([request], 3)
    report(lambda: step(torch.randn(3, 4, 16), torch.randn(3, 2, 16), batch))
"""  # noqa: E501


def calls(tmp_path, script):
    """Of each call that is reported: the files entered, one for each Python call, and how many come
    before the kernel's own."""
    found = torch_process(LOOK + script, env={"ATTNOPS_CACHE_DIR": str(tmp_path)})
    return [json.loads(line) for line in found.splitlines() if line.startswith("[[")]


def files(call):
    return [*dict.fromkeys(call[0])]


def moves(call):
    return sum(one != other for one, other in pairwise(call[0]))


def way(heading):
    """The rows of the table under a heading of the page: (file, last cell)."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    [section] = re.findall(rf"^## {re.escape(heading)}.*?\n(.*?)^## ", page, re.M | re.S)
    rows = re.findall(r"^\| `(\S+\.py)` \| .* \| ?(.*?) ?\|$", section, re.M)
    return rows or [(name, "") for name in re.findall(r"^\| `(\S+\.py)` \| ", section, re.M)]


def test_a_paged_call(tmp_path):
    first, second, third = calls(tmp_path, PAGED)
    assert len(files(first)) <= 12, files(first)
    assert len(files(second)) <= 4 and second == third, second
    assert 0 < second[1] <= 9, "Python calls of an eager call like the one before, up to its kernel"
    table = way("An eager call")
    assert files(first) == [name for name, _ in table]
    assert files(second) == [name for name, again in table if again == "yes"]


def test_a_step_of_latents(tmp_path):
    prefill, *_, decode = calls(tmp_path, LATENT)
    assert len(files(prefill)) <= 21, files(prefill)
    assert len(files(decode)) <= 8 and moves(decode) <= 25, (files(decode), moves(decode))


def test_a_decode_step_of_a_patched_model(tmp_path):
    *_, fifth = calls(tmp_path, DECODE)
    assert len(files(fifth)) <= 10 and moves(fifth) <= 40, (files(fifth), moves(fifth))
    assert files(fifth) == [name for name, _ in way("A decode step of a patched model")]


def test_a_compiled_call(tmp_path):
    first, second = calls(tmp_path, COMPILED)
    table = way("A compiled call")
    assert {name for name, _ in table} <= {*files(first)}
    assert {*files(second)} == {name for name, when in table if "call" in when}
