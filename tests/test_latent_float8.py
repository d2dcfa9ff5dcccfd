"""LatentAttention over float8 pages with float8 queries: as its parts one by one, shared prefixes,
both layouts of RoPE, bad arguments."""

import pytest
import torch

import attnops
from attnops.nn import LatentDims, NewTokens, RotaryEmbedding, attend_float8
from attnops.ops import mla_attention, rope_quantize_latent
from tests import test_latent_attention as latents
from tests.modules import pages_of, refused
from tests.test_latent_attention import DC, F32, NOPE, ROPE as DR, E, H, V

SCALES = (2.0**-5, 2.0**-6)
E4M3 = torch.float8_e4m3fn


def layer(**more):
    return latents.layer(F32, **more).requires_grad_(False)


def cache_for():
    return latents.cache_for(E4M3)


def quantised(x, scale):
    return (x / scale).clamp(-448, 448).to(E4M3).to(F32) * scale


@pytest.mark.parametrize("interleaved", [True, False])
def test_as_its_parts_one_by_one(interleaved):
    """Rotated, rounded to float8 and back in plain torch, attended to in float32: the layer's own
    numbers, but for its sums' order."""
    module, cache = layer(interleaved=interleaved), cache_for()
    ids, x = [cache.alloc(), cache.alloc()], torch.randn(12, E)
    pages, wide = cache.latent_pages[0], cache.latent_pages[0].float()
    w_uk, w_uv = module.kv_b_proj.weight.view(H, NOPE + V, DC).split([NOPE, V], 1)
    for counts, rows, how in (
        ((5, 1), x[:6], {"prefix_tokens": 8}),
        ((1, 1), x[6:8], {}),
        ((1, 3), x[8:], {}),
    ):
        batch = cache.batch(ids, counts, **how)
        got = module(rows, batch=batch, latent_pages=pages, float8_scales=SCALES)
        q_nope, q_pe, latent, k_pe = module._project(rows, batch.positions)
        wide.view(-1, DC + DR)[batch.slots] = quantised(torch.cat([latent, k_pe], -1), SCALES[1])
        if batch.prefix is not None:
            continue  # unfolded, and not attended to as latents
        query = quantised(
            torch.cat([torch.einsum("thn,hnc->thc", q_nope, w_uk), q_pe], -1), SCALES[0]
        )
        tables = (batch.page_table, batch.seq_lens, batch.cu_seqlens_q)
        out = mla_attention(
            query[..., :DC],
            query[..., DC:],
            wide,
            *tables,
            max_seqlen_q=batch.max_seqlen_q,
            scale=module.scale,
        )
        want = module.o_proj(torch.einsum("thc,hvc->thv", out, w_uv).flatten(-2))
        # A product off by float32's last bit may round to the next float8.
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(
            pages.to(F32) * SCALES[1], wide, rtol=2**-3, atol=2**-9 * SCALES[1], equal_nan=True
        )


def test_a_shared_prefix():
    """A cascade of its two parts gives what the whole tables give."""
    module, outs = layer(), {}
    for share in (False, True):
        torch.manual_seed(1)
        cache = cache_for()
        first = cache.alloc()
        module(
            torch.randn(9, E),
            batch=cache.batch([first], 9),
            latent_pages=cache.latent_pages[0],
            float8_scales=SCALES,
        )
        ids = [first, cache.fork(first), cache.fork(first)]
        batch = cache.batch(ids, (1, 2, 1), share=share)
        assert (batch.shared is not None) == share
        outs[share] = module(
            torch.randn(4, E), batch=batch, latent_pages=cache.latent_pages[0], float8_scales=SCALES
        )
    torch.testing.assert_close(outs[True], outs[False], rtol=1e-5, atol=1e-5)


def test_explain_shows_the_form():
    cache = cache_for()
    ids = [cache.alloc(), cache.alloc()]
    cache.batch(ids, 4)
    given = {
        "batch": cache.batch(ids, 1),
        "latent_pages": cache.latent_pages[0],
        "float8_scales": SCALES,
    }
    found = attnops.explain(layer(), torch.randn(2, E), **given, target="sm90", quiet=True)
    assert [(f.count, f.decision.form, f.decision.queries) for f in found.forms] == [
        (1, "absorbed", 1)
    ]
    chosen = found.forms[0].decision.absorbed
    assert chosen.problem.dtype == E4M3 and f"mla_attention.{chosen.kernel.name}" in {
        c.partition(" ")[0] for c in found.chosen()
    }


def called(built=None, tokens=1, **change):
    """A decode step of the layer with one argument changed; of more tokens a prompt."""

    def call():
        cache = cache_for()
        ids = [cache.alloc(4 * (tokens == 1))]
        given = {
            "batch": cache.batch(ids, tokens),
            **pages_of(cache),
            "float8_scales": SCALES,
        } | change
        layer(**built or {})(torch.randn(tokens, E), **given)

    return call


def attended(**change):
    """`attend_float8` with one argument changed."""

    def call():
        cache = cache_for()
        new = NewTokens(
            torch.randn(1, H, NOPE), torch.randn(1, H, DR), torch.randn(1, DC), torch.randn(1, DR)
        )
        given = {
            "dims": LatentDims(NOPE, DR, DC, V),
            "new": new,
            "kv_b": layer().kv_b_proj,
            "rope": RotaryEmbedding(DR),
        }
        given |= {
            "positions": torch.zeros(1).int(),
            "batch": cache.batch([cache.alloc()], 1),
            **pages_of(cache),
        }
        with torch.no_grad():
            attend_float8(**given | {"scale": 0.2, "scales": (0.1, 0.1)} | change)

    return call


def quantising(**scale):
    parts = torch.zeros(1, H, DC), torch.zeros(1, H, DR), torch.zeros(1, DC), torch.zeros(1, DR)
    return lambda: rope_quantize_latent(*parts, torch.zeros(1, DR), torch.zeros(1).int(), **scale)


ON_DEVICE, INF = torch.tensor(0.5), float("inf")
WANTED = ", want (q_scale, kv_scale), finite host floats > 0"
BAD = {
    "float8_scales: got 0.5" + WANTED: called(float8_scales=0.5),
    "float8_scales: got (0.0, 1.0)" + WANTED: called(float8_scales=(0.0, 1.0)),
    "float8_scales: got (tensor(0.5000), tensor(0.5000))" + WANTED: called(
        float8_scales=(ON_DEVICE, ON_DEVICE)
    ),
    # A prompt hands one of them on as a tensor, which nobody looks into.
    "float8_scales: got (1.0, -1.0)" + WANTED: called(tokens=4, float8_scales=(1.0, -1.0)),
    "float8_scales: got (nan, 1.0)" + WANTED: called(tokens=4, float8_scales=(float("nan"), 1.0)),
    "float8_scales: got (1.0, inf)" + WANTED: called(tokens=4, float8_scales=(1.0, INF)),
    "float8_scales: got ('1', 1.0)" + WANTED: called(tokens=4, float8_scales=("1", 1.0)),
    "float8_scales: got (True, True)" + WANTED: called(tokens=4, float8_scales=(True, True)),
    f"float8_scales: got {SCALES}, want None: this layer has no rope": called({"rope": None}),
    "kv_scale: got shape (1,), want None with float8_scales": called(kv_scale=torch.ones(1)),
    "latent_pages.dtype: got torch.float32, want float8_e4m3fn": called(
        latent_pages=torch.zeros(41, 4, DC + DR)
    ),
    "w_uk.shape[0]: got 2, want 4": attended(kv_b=torch.nn.Linear(DC, 2 * (NOPE + V), bias=False)),
    "w_uk.shape[2]: got 32, want 33": attended(dims=LatentDims(NOPE, DR, DC + 1, V)),
    "latent_pages: got list, want a tensor": attended(latent_pages=[0]),
    "rope: got None, want a RotaryEmbedding": attended(rope=None),
    "rope.head_dim: got 16, want 8": attended(rope=RotaryEmbedding(DR * 2)),
    "scales: got (0.1,)" + WANTED: attended(scales=(0.1,)),
    "q_scale: got a tensor": quantising(q_scale=ON_DEVICE),
    "kv_scale: got a tensor": quantising(kv_scale=ON_DEVICE),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_arguments(text):
    refused(BAD[text], text)
