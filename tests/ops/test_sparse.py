"""Sparse latent attention and the packed format, against loops and bytes that know nothing of the
reference."""

import math
import struct
from dataclasses import replace
from itertools import accumulate, chain

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attnops import ops
from attnops.core.kernel import kernels_of
from attnops.ops import OPS
from attnops.ops.latent.cases import SMALL
from attnops.ops.sparse.packed_format import GROUP, pack, packed_bytes, unpack
from attnops.testing import CASES, Call, Source, make_call, oracle
from tests.formula import clean, formula

INF = float("inf")
NARROW = [c for c in CASES["sparse_mla_attention"] if not c.label.startswith("deepseek")]
E4M3 = [
    s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
    for s in (1, -1)
    for e in range(16)
    for m in range(8)
]
"""What each byte of float8_e4m3fn says; 0x7f and 0xff say NaN."""


def read(row: list[int], latent_dim: int, rope_dim: int) -> list[float]:
    """The numbers of one packed token, from its bytes alone."""
    raw = bytes(row)
    groups = latent_dim // 128
    scales = struct.unpack_from(f"<{groups}f", raw, latent_dim)
    rope = struct.unpack_from(f"<{rope_dim}H", raw, latent_dim + 4 * groups)
    return [E4M3[b] * scales[i // 128] for i, b in enumerate(raw[:latent_dim])] + [
        struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in rope
    ]


# The reference ------------------------------------------------------------------------------------


def by_formula(t):
    """As packed attention of one token a request, over the keys that it lists, as often as it lists
    them."""
    latent_dim, rope_dim = t["q_nope"].shape[2], t["q_pe"].shape[2]
    lengths = t["topk_length"].tolist() if "topk_length" in t else [None] * len(t["indices"])
    listed = [
        [slot for slot in row[:n] if slot >= 0]
        for row, n in zip(t["indices"].tolist(), lengths, strict=True)
    ]
    rows = t["latent_pages"].flatten(0, 1)[torch.tensor([*chain(*listed)], dtype=torch.long)]
    if rows.dtype == torch.uint8:
        numbers = [read(row, latent_dim, rope_dim) for row in rows.tolist()]
        rows = torch.tensor(numbers, dtype=torch.float64).reshape(-1, latent_dim + rope_dim)
    key = rows[:, None]
    given = {
        "query": torch.cat([t["q_nope"].double(), t["q_pe"].double()], -1),
        "key": key,
        "value": key[..., :latent_dim],
    }
    starts = {
        "cu_seqlens_q": range(len(listed) + 1),
        "cu_seqlens_k": accumulate(map(len, listed), initial=0),
    }
    given |= {n: torch.tensor([*ends]) for n, ends in starts.items()} | {
        "k_scale": t.get("kv_scale"),
        "v_scale": t.get("kv_scale"),
    }
    return formula(
        Call("varlen_attention", given | {n: t[n] for n in ("scale", "sinks", "q_scale") if n in t})
    )


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_reference_equals_the_formula(case):
    call = clean(case.call())
    got, (output, lse) = oracle(call), by_formula(call.arguments)
    torch.testing.assert_close(got["output"], output, rtol=1e-11, atol=1e-11)
    if "lse" in got:
        torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-6)


def test_a_quantised_query_gives_bfloat16():
    f = replace(
        SMALL, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, q_dtype=torch.float8_e4m3fn
    )
    t = make_call("sparse_mla_attention", Source(1), (3, 1), 4, (4, 16), f).arguments
    assert (
        ops.sparse_mla_attention(**{n: v for n, v in t.items() if n != "output"}).dtype
        == torch.bfloat16
    )


# The packed format --------------------------------------------------------------------------------


def test_the_bytes_are_these():
    assert packed_bytes(512, 64) == 656, "a token of DeepSeek"
    latent = torch.zeros(1, 256)
    latent[0, :4] = torch.tensor([448.0, -1.0, 0.5, 100.0])
    latent[0, 128] = 3 * 448.0
    row = pack(latent, torch.tensor([[1.0, -2.5, 3.14159]]))[0].tolist()
    assert len(row) == 256 + 8 + 6
    assert row[:4] == [0x7E, 0xB8, 0x30, 0x6C]  # 100 is on a tie, and 96 is even
    assert not any(row[4:128])
    assert row[128] == 0x7A  # 336 = 1344 / 4
    assert bytes(row[256:264]) == struct.pack("<ff", 1.0, 4.0)
    assert bytes(row[264:]) == struct.pack("<HHH", 0x3F80, 0xC020, 0x4049)


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=6), st.integers(-40, 90)
)
@settings(max_examples=60)
def test_the_scale_is_the_least_power_of_two_that_does(values, power):
    latent = torch.zeros(1, GROUP)
    latent[0, : len(values)] = torch.tensor(values) * 2.0 ** (power - 100)
    row = pack(latent, torch.zeros(1, 1))[0]
    scale = struct.unpack("<f", bytes(row[GROUP : GROUP + 4].tolist()))[0]
    top = float(latent.abs().max())
    assert math.frexp(scale)[0] == 0.5 and scale >= 2.0**-13
    assert top <= 448 * scale
    assert scale == 2.0**-13 or top > 448 * scale / 2
    back = unpack(row, GROUP, 1)[:GROUP]
    assert (
        (back - latent[0]).abs()
        <= torch.maximum(latent[0].abs() / 16, torch.tensor(scale * 2.0**-10))
    ).all()


@pytest.mark.parametrize("power", [-12, -1, 0, 1, 20, 100])
def test_the_scale_on_the_edge(power):
    edge = torch.tensor(448.0 * 2.0**power)
    for top, want in (
        (edge, power),
        (edge.nextafter(2 * edge), power + 1),
        (edge.nextafter(edge / 2), power),
    ):
        row = pack(torch.nn.functional.pad(top.reshape(1, 1), (0, GROUP - 1)), torch.zeros(1, 2))[0]
        assert struct.unpack("<f", bytes(row[GROUP : GROUP + 4].tolist()))[0] == 2.0**want
        assert float(unpack(row, GROUP, 2)[0]) == pytest.approx(float(top), rel=2**-4)


def runs_here(kernel):
    """Skips where it does not, and says why; tests/triton and tests/gpu are where `triton` does."""
    latent, pages = torch.zeros(1, 128), torch.zeros(1, 1, packed_bytes(128, 4), dtype=torch.uint8)
    op = OPS["write_latent_packed"]
    problem = op.problem(
        op.call(latent, torch.zeros(1, 4), pages, torch.zeros(1, dtype=torch.int64))
    )
    if reasons := kernels_of("write_latent_packed")[kernel].refusals(problem):
        pytest.skip(f"{kernel}: {'; '.join(map(str, reasons))}")


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kernel", list(kernels_of("write_latent_packed")))
def test_what_is_not_finite_spoils_its_group_and_no_other(kernel, bad):
    latent, k_pe = torch.randn(2, 384), torch.randn(2, 4)
    latent[0, 200], k_pe[1, 2] = bad, bad
    runs_here(kernel)
    pages = torch.zeros(1, 2, packed_bytes(384, 4), dtype=torch.uint8)
    ops.write_latent_packed(latent, k_pe, pages, torch.tensor([0, 1]), kernel=kernel)
    back = unpack(pages[0], 384, 4)
    spoilt = torch.zeros(2, 384, dtype=torch.bool)
    spoilt[0, 128:256] = True
    assert torch.equal(back[:, :384].isnan(), spoilt)
    torch.testing.assert_close(back[1, 386], torch.tensor(bad), equal_nan=True)
    assert back[:, 384:].isfinite().sum() == 7


def test_reading_is_by_bytes():
    """Every byte and every scale, powers of two or not."""
    rows = torch.randint(0, 256, (20, packed_bytes(256, 3)), dtype=torch.uint8)
    rows[:, :256][(rows[:, :256] & 0x7F) == 0x7F] = 0
    rows[:, 256:264] = torch.randn(20, 2).view(torch.uint8)
    rows[:, 264:] = torch.randn(20, 3).bfloat16().view(torch.uint8)
    want = torch.tensor([read(row, 256, 3) for row in rows.tolist()], dtype=torch.float64)
    assert torch.equal(unpack(rows, 256, 3, torch.float64), want)
    # Wherever the rows lie.
    askew = torch.nn.functional.pad(rows, (1, 2))[:, 1:-2]
    assert torch.equal(unpack(askew, 256, 3, torch.float64), want)


@pytest.mark.parametrize("kernel", list(kernels_of("write_latent_packed")))
@given(data=st.data())
@settings(max_examples=15)
def test_written_latents_are_read_back(kernel, data):
    runs_here(kernel)
    page, tokens = data.draw(st.sampled_from([1, 3, 16])), data.draw(st.integers(1, 6))
    source = Source(data.draw(st.integers(0, 99)))
    latent, k_pe = source.normal(tokens, 128), source.normal(tokens, 6)
    pages = torch.full((7, page, packed_bytes(128, 6)), 0xFF, dtype=torch.uint8)
    slots = source.ints(source.permutation(7 * page)[:tokens])
    ops.write_latent_packed(latent, k_pe, pages, slots, kernel=kernel)
    query = source.normal(2, 3, 134)
    listed = torch.stack([slots, slots.flip(0)])
    got = ops.sparse_mla_attention(query[..., :128], query[..., 128:], pages, listed, scale=0.1)
    plain = unpack(pack(latent, k_pe), 128, 6)[:, None]
    order = torch.arange(tokens, dtype=torch.int32)
    want = ops.sparse_mla_attention(
        query[..., :128], query[..., 128:], plain, torch.stack([order, order.flip(0)]), scale=0.1
    )
    torch.testing.assert_close(got, want)
