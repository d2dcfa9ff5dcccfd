"""Writes into pages, copies between them, and what says where a token lies, against plain
Python."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import attnops
from attnops import ops
from attnops.core.kernel import kernels_of
from attnops.testing import Call, Features, Pages, Source, make_call
from tests.checks import case_of
from tests.ops.strategies import CALLS

PAGED = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
LENGTHS = st.lists(st.integers(0, 40), max_size=6)
INDEX = st.sampled_from([torch.int32, torch.int64])
PAGE = st.sampled_from([1, 2, 3, 16])


@pytest.mark.parametrize("kernel", list(kernels_of("write_kv")))
@pytest.mark.parametrize(
    ("dtype", "top"),
    [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.int8, 127.0)],
)
def test_quantised_stores_saturate(kernel, dtype, top):
    pages = torch.zeros(2, 2, 1, 2, dtype=torch.uint8).view(dtype)
    values = torch.tensor([1e30, -1e30]).reshape(1, 1, 2)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(1))
    arguments = {
        "key": values,
        "value": values,
        "k_pages": pages,
        "v_pages": pages.clone(),
        "slots": torch.tensor([3]),
        **scales,
    }
    if refused := kernels_of("write_kv")[kernel].refusals(Call("write_kv", arguments).problem):
        pytest.skip("; ".join(map(str, refused)))
    attnops.write_kv(**arguments, kernel=kernel)
    assert pages.double()[1, 1, 0].tolist() == [top, -top]
    assert not pages.double()[0].any()


@given(st.data())
@settings(max_examples=25)
def test_written_keys_are_read_back(data):
    """slot_mapping, write_kv and paged_attention agree on where a token lies."""
    page, lens = data.draw(PAGE), data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    source, f = Source(data.draw(st.integers(0, 99))), Features(dtype=torch.float64)
    t = make_call(
        "paged_attention", source, lens, lens, page, f, padding=0, pages=Pages(spare=1)
    ).arguments
    total, starts = sum(lens), t["cu_seqlens_q"]
    key, value = (source.normal(total, 2, 16, dtype=torch.float64) for _ in range(2))
    rows = ops.token_rows(starts, total)
    positions = torch.arange(total) - starts.long()[rows.long()]
    slots = ops.slot_mapping(positions, rows, t["page_table"], page_size=page)
    pages = [torch.full_like(t[n], float("nan")) for n in ("k_pages", "v_pages")]
    attnops.write_kv(key, value, *pages, slots)
    longest = max(lens)
    out = attnops.paged_attention(
        t["query"], *pages, t["page_table"], t["seq_lens"], starts, max_seqlen_q=longest
    )
    want = attnops.varlen_attention(
        t["query"],
        key,
        value,
        starts,
        starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    torch.testing.assert_close(out, want)


def test_paged_attention_writes_into_what_it_is_given():
    t = case_of("paged_attention", "lse").arguments
    output, lse, given = t["output"], t["lse"].fill_(float("nan")), [t[n] for n in PAGED]
    asked = {"max_seqlen_q": 4, "causal": False, "kernel": "reference"}
    returned = attnops.paged_attention(*given, **asked, output=output, lse=lse)
    assert returned.data_ptr() == output.data_ptr()
    assert not lse.isnan().any()
    assert torch.equal(output, attnops.paged_attention(*given, **asked))


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


# Metadata -----------------------------------------------------------------------------------------


def is_row(got, want, dtype=torch.int32):
    assert (got.dtype, got.tolist()) == (dtype, want)


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([[1, 1, 0], [1, 0, 0]], [0, 1, 3, 6]),
        ([[1], [1]], [0, 1, 2]),
        ([[1, 1, 0]], [0, 1, 3, 3]),
        ([[]], [0, 0]),
    ],
)
def test_request_starts(rows, want):
    """The length of a result is never that of a row, nor 1."""
    assert len(want) not in (1, len(rows[0]))
    is_row(ops.request_starts(torch.tensor(rows, dtype=torch.bool)), want)


@given(LENGTHS, INDEX, st.integers(-20, 5))
@settings(max_examples=40)
def test_cu_seqlens_and_token_rows(lens, dtype, more):
    """Of tokens past the requests, too, and of fewer than they have."""
    starts = ops.cu_seqlens(torch.tensor(lens, dtype=dtype))
    is_row(starts, [sum(lens[:i]) for i in range(len(lens) + 1)])
    rows, count = [b for b, n in enumerate(lens) for _ in range(n)], max(sum(lens) + more, 0)
    is_row(ops.token_rows(starts, count), (rows + [-1] * max(more, 0))[:count])


def drawn_table(data, batch, width, least):
    """A page table as lists, and as a tensor."""
    rows = [[data.draw(st.integers(least, 99)) for _ in range(width)] for _ in range(batch)]
    return rows, torch.tensor(rows, dtype=torch.int32).reshape(batch, width)


@given(st.data(), INDEX, PAGE)
@settings(max_examples=40)
def test_slot_mapping(data, dtype, page):
    batch = data.draw(st.integers(1, 3))
    width = data.draw(st.integers(0, 3))
    tokens = data.draw(st.integers(0, 8))
    table, named = drawn_table(data, batch, width, -1)
    positions = [data.draw(st.integers(-2, page * 4)) for _ in range(tokens)]
    rows = [data.draw(st.integers(-1, batch - 1)) for _ in range(tokens)]

    def slot(position, row):
        if position < 0 or row < 0 or position // page >= width or table[row][position // page] < 0:
            return -1
        return table[row][position // page] * page + position % page

    got = ops.slot_mapping(
        torch.tensor(positions, dtype=dtype), torch.tensor(rows, dtype=dtype), named, page_size=page
    )
    is_row(got, list(map(slot, positions, rows)), torch.int64)


@given(st.data(), INDEX, PAGE)
@settings(max_examples=40)
def test_kv_indices(data, dtype, page):
    batch, width = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    table, named = drawn_table(data, batch, width, 0)
    lens = [data.draw(st.integers(0, width * page)) for _ in range(batch)]
    counts = [-(-n // page) for n in lens]
    used = [p for row, n in zip(table, counts, strict=True) for p in row[:n]]
    indptr, indices, last = ops.kv_indices(named, torch.tensor(lens, dtype=dtype), page_size=page)
    is_row(indptr, [sum(counts[:i]) for i in range(batch + 1)])
    is_row(indices, used + [0] * (batch * width - len(used)))
    is_row(last, [(n - 1) % page + 1 if n else 0 for n in lens])
