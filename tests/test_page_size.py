"""The page size of a cache: what the kernels say they take, which is chosen, and why none can
be."""

from dataclasses import replace

import pytest
import torch

from attnops.cache import LatentCache, negotiate_page_size
from attnops.core import kernel as registry
from attnops.core.errors import InvalidInput, PageSizeConflict, UnknownKernel
from attnops.core.kernel import kernels_of, one_of
from attnops.core.problem import Target, pretend
from attnops.core.select import use
from attnops.ops import latent_layers, paged_layers
from tests.graphs.models import BOUNDARY

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SIZES = {"max_requests": 64, "max_tokens_per_request": 8192, "device": "cpu"}
SGL, FLASHINFER = ("sgl_kernel",), ("flashinfer",)
EVERYTHING = (*SGL, *FLASHINFER, "triton")
ALL = (1, 16, 32, 64, 128, 256)
SCRATCH = {"workspace_bytes": 1 << 28}


def negotiate(
    arch=0, assume=EVERYTHING, latent_dim=512, rope_dim=64, q_heads=128, dtype=BF16, **more
):
    layers = latent_layers(q_heads, 0, dtype, latent_dim + rope_dim, latent_dim)
    with pretend(Target("cuda", arch, assume=assume) if arch else None):
        return negotiate_page_size(layers, **SIZES, **more)


@pytest.fixture
def registered(monkeypatch):
    """Puts a kernel of `mla_attention` in the registry for the test, without an overload: nobody
    calls it."""
    table = registry._REGISTRY.kernels["mla_attention"]

    def add(name, **more):
        plain = replace(kernels_of("mla_attention")["reference"], name=name, cost_us=lambda p: 1.0)
        monkeypatch.setitem(table, name, replace(plain, **more))
        registry.renew()

    yield add
    monkeypatch.undo()
    registry.renew()


@pytest.mark.parametrize(
    ("arch", "more", "fastest", "takes"),
    [
        (0, {}, "reference", {}),
        (80, {"assume": ("triton",)}, "triton", {"triton": ALL}),
        (90, {"q_heads": 16, "assume": SGL}, "flashmla", {"flashmla": (64,), "fa3": ALL}),
        (90, {"assume": SGL, "dtype": E4M3}, "flashmla_fp8", {"flashmla_fp8": (64,)}),
        (90, {"assume": SGL, "max_new_tokens": 4}, "fa3", {"flashmla": (64,), "fa3": ALL}),
        (90, {"assume": SGL, "max_new_tokens": 9}, "fa3", {"fa3": ALL}),
        (100, {"assume": SGL}, "cutlass_mla", {"cutlass_mla": ALL[:-1]}),
        (100, {"assume": FLASHINFER}, "flashinfer_mla_fa2", {"flashinfer_mla_fa2": ALL}),
        (
            100,
            {"assume": FLASHINFER} | SCRATCH,
            "trtllm_mla",
            {"trtllm_mla": (32, 64), "flashinfer_mla_fa2": ALL},
        ),
        (
            100,
            {"assume": FLASHINFER, "dtype": E4M3} | SCRATCH,
            "trtllm_mla",
            {"trtllm_mla": (32, 64)},
        ),
        (
            120,
            {"assume": ("triton",), "latent_dim": 256, "rope_dim": 32, "dtype": torch.int8},
            "triton",
            {"triton": ALL},
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_negotiated(arch, more, fastest, takes):
    choice = negotiate(arch, **more)
    assert choice.page_size == 64, "which most kernels take"
    assert choice.why == f"{fastest} is the fastest kernel of a decode step"
    takes = takes | {"reference": ALL}
    assert (
        dict(choice.takes) == takes
        and set(choice.refused) == set(kernels_of("mla_attention")) - takes.keys()
    )
    assert f"  {fastest}: " in str(choice)


def test_the_nearest_refusal_is_told():
    """Over float8 pages a query may be float8 too: then scratch is all that TensorRT-LLM wants."""
    choice = negotiate(100, FLASHINFER, dtype=E4M3)
    assert [r.field for r in choice.refused["trtllm_mla"]] == ["workspace"]


def test_what_is_fastest_decides_before_what_most_take(registered):
    registered(
        "narrow",
        needs=(one_of("page_size", 16, 256),),
        cost_us=lambda p: 1e-3 if p.page_size == 16 else 1.0,
    )
    choice = negotiate()
    assert choice.page_size == 16 and choice.takes["narrow"] == (16, 256)
    assert negotiate(kernels=("reference", "narrow")).page_size == 16
    registered("wide", needs=(one_of("page_size", 128),))
    registered("wider", needs=(one_of("page_size", 128),))
    assert negotiate(kernels=("reference",)).page_size == 128, (
        "the speed of others is no matter, but that they can run is"
    )
    with use(deny=("narrow", "wide", "wider")):
        assert negotiate().page_size == 64, "the policy in force says what may be chosen"


def test_kernels_of_several_machines():
    for arch in (0, 90, 100):
        choice = negotiate(arch, kernels=("flashmla", "cutlass_mla", "trtllm_mla"))
        assert choice.page_size == 64 and choice.why == "taken by flashmla, cutlass_mla, trtllm_mla"
        assert dict(choice.takes) == {
            "flashmla": (64,),
            "cutlass_mla": ALL[:-1],
            "trtllm_mla": (32, 64),
        }
        assert "flashmla" in choice.refused or arch == 90, "it says who cannot run here"
    assert (
        negotiate(100, kernels=("cutlass_mla",), page_size=128).why
        == "as given, taken by cutlass_mla"
    )
    assert negotiate(90, page_size=7).why == "as given"


def test_no_size_suits_all(registered):
    registered("narrow", needs=(one_of("page_size", 16, 256),))
    with pytest.raises(PageSizeConflict) as caught:
        negotiate(90, kernels=("flashmla", "narrow"))
    assert caught.value.page_size is None and caught.value.takes == {
        "flashmla": (64,),
        "narrow": (16, 256),
    }
    assert "narrow takes 16, 256 only: page_size=1 (wants 16 | 256)" in str(caught.value)


def test_a_size_that_a_kernel_does_not_take():
    with pytest.raises(PageSizeConflict, match="got 128, want") as caught:
        LatentCache(
            1, 1000, page_size=128, kernels=("trtllm_mla", "cutlass_mla"), dtype=BF16, **SIZES
        )
    assert caught.value.page_size == 128 and caught.value.takes == {
        "trtllm_mla": (32, 64),
        "cutlass_mla": ALL[:-1],
    }
    with pytest.raises(
        PageSizeConflict, match="flashmla takes none: v_head_dim=256 \\(wants 512\\)"
    ):
        negotiate(90, kernels=("flashmla",), latent_dim=256)
    with pytest.raises(
        PageSizeConflict, match="cutlass_mla takes none: q_heads=130 \\(wants <= 128\\)"
    ):
        negotiate(kernels=("cutlass_mla",), q_heads=130)
    with (
        pytest.raises(PageSizeConflict, match=r"flashmla takes none: .*target=cpu"),
        use(kernel="flashmla"),
    ):
        negotiate()
    with use(kernel="flashmla"):
        assert negotiate(page_size=16).page_size == 16, "the call will say what is wrong"
    with pytest.raises(UnknownKernel, match=r"got 'flash', want one of .*cutlass_mla"):
        negotiate(kernels=("flash",))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            latent_layers(8, 0, BF16, head_dim=512, v_head_dim=512),
            "^rope_dim: got 0, want an int >= 1",
        ),
        (
            latent_layers(8, 0, BF16, head_dim=500, v_head_dim=512),
            "^rope_dim: got -12, want an int >= 1",
        ),
        (
            paged_layers(8, 8, 64, 0, BF16, kv_dtype=E4M3),
            "^kv_dtype: got torch.float8_e4m3fn, want",
        ),
        (paged_layers(8, 8, 64, 0, E4M3), "^dtype: got torch.float8_e4m3fn, want"),
        (paged_layers(8, 0, 64, 0, BF16), "^kv_heads: got 0, want"),
    ],
)
def test_layers_that_have_no_pages(layers, text):
    with pytest.raises(InvalidInput, match=text):
        negotiate_page_size(layers, **SIZES)


def test_the_cache_says_what_it_chose():
    with pretend(Target("cuda", 90, assume=SGL)):
        cache = LatentCache(1, 1000, q_heads=16, dtype=BF16, **SIZES)
    assert (
        cache.page_size == cache.page_size_choice.page_size == cache.latent_pages[0].shape[1] == 64
    )
    assert "flashmla: 64" in str(cache.page_size_choice)


# Keys and values ----------------------------------------------------------------------------------


def negotiate_kv(arch=0, page_size=None, kernels=None, **more):
    with pretend(Target("cuda", arch, assume=EVERYTHING) if arch else None):
        layers = paged_layers(32, 8, 128, 0, BF16, **more)
        return negotiate_page_size(
            layers, **SIZES, page_size=page_size, kernels=kernels, workspace_bytes=2**30
        )


def test_pages_of_keys():
    """Asked of the kernels of paged attention, with what the layers want of them."""
    found = negotiate_kv(90)
    assert (
        found.page_size == 64
        and found.takes["xqa"] == (16, 32, 64, 128)
        and found.takes["triton"] == ALL
    )
    assert "xqa" not in negotiate_kv(90, softcap=True).takes, "it has no soft cap"
    assert "xqa" not in negotiate_kv(90, v_head_dim=64).takes
    assert negotiate_kv(kernels=("fa4",)).page_size in (16, 64), "wherever it runs"
    assert negotiate_kv(page_size=4).page_size == 4
    # Other tests of this process may have registered kernels: torch takes no overload back.
    assert set(negotiate_kv().takes) - {BOUNDARY, "few_queries"} == {"reference", "sdpa"}


def test_no_page_size_of_keys():
    with pytest.raises(PageSizeConflict, match=r"(?s)256.*xqa takes 16, 32, 64, 128"):
        negotiate_kv(kernels=("xqa",), page_size=256)
    with pytest.raises(UnknownKernel, match="op paged_attention"):
        negotiate_kv(kernels=("flashmla",))
