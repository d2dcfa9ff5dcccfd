"""`copy_kv` against loops that know nothing of the reference."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attnops import ops
from attnops.ops.pages.cases import PAIRS
from attnops.testing import Features, Source, make_call
from tests.helpers import ROOT
from tests.ops.strategies import CALLS

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def raw(x):
    """The bits; a number's bytes are one more dim."""
    return x.contiguous().flatten().view(torch.uint8).view(*x.shape, x.dtype.itemsize)


@given(data=st.data())
@settings(max_examples=40)
def test_copies(data):
    t = data.draw(CALLS["copy_kv"]).arguments
    pools = {n: t[n] for n in ("k_pages", "v_pages") if n in t}
    want = {n: raw(x).clone() for n, x in pools.items()}
    for n, x in pools.items():
        page = x.shape[2]
        for a, b in zip(t["source"].tolist(), t["target"].tolist(), strict=True):
            if a >= 0 and b >= 0:
                want[n][:, b // page, b % page] = raw(x)[:, a // page, a % page]
    ops.copy_kv(t["k_pages"], t.get("v_pages"), t["source"], t["target"])
    for n, x in pools.items():
        assert torch.equal(raw(x), want[n])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_copy_back_restores(dtype):
    call = make_call("copy_kv", Source(2), PAIRS["cycle"], 3, 4, 3, Features(kv_dtype=dtype))
    t, before = call.arguments, raw(call.arguments["k_pages"]).clone()
    ops.copy_kv(t["k_pages"], t["v_pages"], t["source"], t["target"])
    assert not torch.equal(raw(t["k_pages"]), before)
    ops.copy_kv(t["k_pages"], t["v_pages"], t["target"], t["source"])
    assert torch.equal(raw(t["k_pages"]), before)


def test_one_layer_and_latents():
    pages = torch.arange(24.0).reshape(2, 3, 4)
    want = pages.clone()
    want[1, 2] = pages[0, 0]
    ops.copy_kv(pages[None], None, torch.tensor([0]), torch.tensor([5]))
    assert torch.equal(pages, want)


def test_where_it_is_told_of():
    assert "copy_kv" in (ROOT / "docs" / "triton.md").read_text()
