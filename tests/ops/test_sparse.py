"""Sparse latent attention and the packed format, against loops and bytes that know nothing of the reference."""

import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import attnops
from attnops import ops
from attnops.core.kernel import kernels_of
from attnops.ops import OPS
from attnops.ops.latent.cases import SMALL
from attnops.ops.sparse.cases import PAST
from attnops.ops.sparse.packed_format import GROUP, pack, packed_bytes, unpack
from attnops.testing import CASES, Source, make_call, oracle
from attnops.testing.check import clone, fill

INF = float("inf")
NARROW = [c for c in CASES["sparse_mla_attention"] if not c.label.startswith("deepseek")]
E4M3 = [s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for s in (1, -1) for e in range(16) for m in range(8)]
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


# The reference --------------------------------------------------------------------------------------------------------


def by_hand(t):
    """One token, one head at a time, in Python floats."""
    tokens, heads, latent_dim = t["q_nope"].shape
    rope_dim = t["q_pe"].shape[2]
    factor = float(t["q_scale"]) if "q_scale" in t else 1.0
    pages, lists = t["latent_pages"], t["indices"].tolist()
    output, lse = torch.zeros(tokens, heads, latent_dim, dtype=torch.float64), torch.full((tokens, heads), -INF, dtype=torch.float64)
    for i in range(tokens):
        length = int(t["topk_length"][i]) if "topk_length" in t else len(lists[i])
        keys = []
        for slot in lists[i][:length]:
            if slot >= 0:
                row = pages[slot // pages.shape[1], slot % pages.shape[1]]
                if pages.dtype == torch.uint8:
                    keys.append(read(row.tolist(), latent_dim, rope_dim))
                else:
                    keys.append((row.double() * (t["kv_scale"].double() if "kv_scale" in t else 1.0)).tolist())
        for h in range(heads):
            query = [x * factor for x in (*t["q_nope"][i, h].double().tolist(), *t["q_pe"][i, h].double().tolist())]
            scores = [t["scale"] * math.fsum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
            terms = scores + ([float(t["sinks"][h])] if "sinks" in t else [])
            if terms:
                lse[i, h] = max(terms) + math.log(math.fsum(math.exp(s - max(terms)) for s in terms))
                for s, key in zip(scores, keys, strict=True):
                    output[i, h] += math.exp(s - float(lse[i, h])) * torch.tensor(key[:latent_dim], dtype=torch.float64)
    return output, lse


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_reference_equals_loops(case):
    call = case.call()
    clean = call.map(lambda n, t: fill(clone(t), call.free[n], False) if n in call.free else t)
    got = oracle(clean)
    output, lse = by_hand(clean.arguments)
    torch.testing.assert_close(got["output"], output, rtol=1e-11, atol=1e-11)
    if "lse" in got:
        torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-6)


def small(counts=(5, 2), topk=6, **more):
    f = replace(SMALL, dtype=torch.float64, lse=True)
    return dict(make_call("sparse_mla_attention", Source(5), counts, topk, (4, 16), f, **more).arguments)


def attend(t, **more):
    lse = torch.empty(t["q_nope"].shape[:2])
    output = ops.sparse_mla_attention(**{n: v for n, v in t.items() if n not in ("output", "lse")} | more, lse=lse)
    return output, lse


def test_every_key_listed_is_latent_attention():
    t = small()
    length, tokens = 40, t["q_nope"].shape[0]
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    listed = (table.repeat_interleave(16, 1) * 16 + torch.arange(48) % 16)[:, :length].expand(tokens, -1).int()
    lse = torch.empty(t["q_nope"].shape[:2])
    want = ops.mla_attention(
        t["q_nope"], t["q_pe"], t["latent_pages"], table, torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32), max_seqlen_q=tokens, scale=t["scale"], causal=False, lse=lse,
    )  # fmt: skip
    got, z = attend(t, indices=listed)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(z, lse)


def test_twice_listed_counts_twice():
    t = small()
    once, _ = attend(t, indices=torch.tensor([[3, 7, -1], [3, 7, -1]], dtype=torch.int32))
    twice, z = attend(t, indices=torch.tensor([[3, 7, 3], [3, 3, 7]], dtype=torch.int32))
    assert not torch.allclose(once, twice)
    torch.testing.assert_close(twice[0], attend(t, indices=torch.tensor([[7, 3, 3]] * 2, dtype=torch.int32))[0][0])
    a, la = attend(t, indices=torch.tensor([[3, 7], [3, 7]], dtype=torch.int32))
    b, lb = attend(t, indices=torch.tensor([[3], [3]], dtype=torch.int32))
    merged, lse = attnops.merge_state(a, la, b, lb)
    torch.testing.assert_close(twice, merged, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z, lse)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -3.0, 2.0, 0.0])])
def test_a_token_without_entries(sinks):
    t = small()
    for more in (
        {"indices": torch.full((2, 6), -1, dtype=torch.int32)},
        {"indices": torch.empty((2, 0), dtype=torch.int32)},
        {"topk_length": torch.zeros(2, dtype=torch.int32), "indices": torch.full((2, 6), PAST, dtype=torch.int32)},
    ):
        output, lse = attend(t, sinks=sinks, **more)
        assert not output.any()
        assert torch.equal(lse, torch.full_like(lse, -INF) if sinks is None else sinks.expand_as(lse))


def test_sinks_are_those_of_attention():
    t, sinks = small(counts=(6, 6)), torch.tensor([0.5, -3.0, 2.0, 0.0])
    keys = t["latent_pages"].flatten(0, 1)[t["indices"].long()][:, :, None]
    query = torch.cat([t["q_nope"], t["q_pe"]], -1)[:, None]
    want, lse = attnops.attention(query, keys, keys[..., :16], scale=t["scale"], sinks=sinks, return_lse=True)
    got, z = attend(t, sinks=sinks)
    torch.testing.assert_close(got, want[:, 0])
    torch.testing.assert_close(z, lse[:, 0])


def test_a_quantised_query_gives_bfloat16():
    f = replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    t = dict(make_call("sparse_mla_attention", Source(1), (3, 1), 4, (4, 16), replace(f, q_dtype=torch.float8_e4m3fn)).arguments)
    assert ops.sparse_mla_attention(**{n: v for n, v in t.items() if n != "output"}).dtype == torch.bfloat16


def test_lists_of_positions_become_slots():
    """As docs/ops.md says."""
    page_table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    positions, rows = torch.tensor([[0, 17, -1], [3, 16, 1]], dtype=torch.int32), torch.tensor([0, 1])
    slots = ops.slot_mapping(positions.flatten(), rows.repeat_interleave(3), page_table, page_size=16)
    assert slots.int().view_as(positions).tolist() == [[64, 17, -1], [3, 48, 1]]


# The packed format ----------------------------------------------------------------------------------------------------


def test_a_token_of_deepseek_takes_656_bytes():
    assert packed_bytes(512, 64) == 656


def test_the_bytes_are_these():
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


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=6), st.integers(-40, 90))
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
    assert ((back - latent[0]).abs() <= torch.maximum(latent[0].abs() / 16, torch.tensor(scale * 2.0**-10))).all()


@pytest.mark.parametrize("power", [-12, -1, 0, 1, 20, 100])
def test_the_scale_on_the_edge(power):
    edge = torch.tensor(448.0 * 2.0**power)
    for top, want in ((edge, power), (edge.nextafter(2 * edge), power + 1), (edge.nextafter(edge / 2), power)):
        row = pack(torch.nn.functional.pad(top.reshape(1, 1), (0, GROUP - 1)), torch.zeros(1, 2))[0]
        assert struct.unpack("<f", bytes(row[GROUP : GROUP + 4].tolist()))[0] == 2.0**want
        assert float(unpack(row, GROUP, 2)[0]) == pytest.approx(float(top), rel=2**-4)


def runs_here(kernel):
    """Skips where it does not, and says why; tests/triton and tests/gpu are where `triton` does."""
    latent, pages = torch.zeros(1, 128), torch.zeros(1, 1, packed_bytes(128, 4), dtype=torch.uint8)
    op = OPS["write_latent_packed"]
    problem = op.problem(op.call(latent, torch.zeros(1, 4), pages, torch.zeros(1, dtype=torch.int64)))
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


def test_what_is_packed_is_exact_in_bfloat16():
    back = unpack(pack(torch.randn(50, 512), torch.randn(50, 64)), 512, 64)
    assert torch.equal(back.bfloat16().float(), back)


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
    want = ops.sparse_mla_attention(query[..., :128], query[..., 128:], plain, torch.stack([order, order.flip(0)]), scale=0.1)
    torch.testing.assert_close(got, want)
