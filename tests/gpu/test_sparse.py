"""FlashMLA's sparse kernels on a real GPU: what no document settles, and the whole path
compiled."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.kernels.sgl import flashmla_sparse, sources
from attnops.ops import sparse_mla_attention, write_latent_packed
from attnops.ops.sparse.packed_format import pack, unpack
from tests.gpu.helpers import kernels_in, need
from tests.lowering.models import compiled_code, kernel_calls

KERNEL = kernels_of("sparse_mla_attention")["flashmla"]
SCALE = 192**-0.5
VENDOR = (
    "sparse_attn_fwd",
    "splitkv_mla",
    "mla_combine",
    "mla_metadata",
    "sched_meta",
    "sm90::",
    "sm100::",
    "smxx::",
)
"""Words in the names of FlashMLA's device kernels."""


@pytest.fixture(autouse=True)
def installed_wheel() -> None:
    need(KERNEL)
    target = Target.of(torch.device("cuda"))
    if target.arch not in (90, 100):
        pytest.skip(f"FlashMLA has no sparse kernel for {target}")


def made(
    tokens: int, slots: int, topk: int, heads: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """query `[T, H, 576]`, latents `[slots, 576]` that packing does not change, lists `[T, topk]`
    without a slot twice."""
    torch.manual_seed(seed)
    query = torch.randn(tokens, heads, 576, device="cuda").bfloat16()
    latents = unpack(
        pack(torch.randn(slots, 512, device="cuda"), torch.randn(slots, 64, device="cuda")), 512, 64
    ).bfloat16()
    return query, latents, torch.rand(tokens, slots, device="cuda").argsort(1)[:, :topk].int()


def packed_pages(latents: Tensor, page: int = 64) -> Tensor:
    return pack(latents[:, :512], latents[:, 512:]).unflatten(0, (-1, page))


def exact(query: Tensor, latents: Tensor, lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, natural lse, largest logit) in float64."""
    keys = latents[lists.long()].double()
    scores = torch.einsum("thd,tkd->thk", query.double(), keys) * SCALE
    return (
        torch.einsum("thk,tkd->thd", scores.softmax(-1), keys[..., :512]),
        scores.logsumexp(-1),
        scores.amax(-1),
    )


def prefill(
    wheel: sources.Source,
    query: Tensor,
    latents: Tensor,
    lists: Tensor,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(output, lse, largest logit) of the raw op."""
    out, top, lse = wheel.ops.sparse_prefill_fwd(
        query, latents[:, None], lists[:, None], SCALE, 512, sinks, None
    )
    return out, lse, top


def decode(
    wheel: sources.Source,
    query: Tensor,
    latents: Tensor,
    lists: Tensor,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(output, lse) of the raw op."""
    pages, rest = packed_pages(latents)[:, :, None], (None, None, None, None, None, 512, SCALE)
    out, lse, *_ = wheel.ops.sparse_decode_fwd(
        query[:, None], pages, lists[:, None], None, sinks, *rest
    )
    assert (out.shape, lse.shape) == (
        (len(query), 1, query.shape[1], 512),
        (len(query), query.shape[1], 1),
    )
    return out[:, 0], lse[:, :, 0]


@pytest.mark.parametrize(("op", "heads"), [(prefill, 64), (decode, 64), (decode, 128)])
def test_the_log_base_of_lse(op: Any, heads: int, flashmla_wheel: sources.Source) -> None:
    """Of a sparse prefill the docstring of the first wheel says 2 and its source e; the constant
    must say what the kernel does."""
    given = made(5, 320, 128, heads)
    out, *logs = op(flashmla_wheel, *given)
    want, *natural = exact(*given)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    base = math.e if op is decode else flashmla_wheel.lse_base
    for got, log in zip(logs, natural, strict=False):  # decode gives no largest logit
        off = float((got.double() - log / math.log(base)).abs().max())
        assert off < 1e-3, (
            f"{op.__name__} is off by {off} to base {base}, the lse_base of "
            f"{flashmla_wheel.namespace} in sources.py"
        )


@pytest.mark.parametrize("op", [prefill, decode])
def test_rows_without_entries_and_sinks_of_the_raw_ops(
    op: Any, flashmla_wheel: sources.Source
) -> None:
    """+inf for no entry, and sinks that change the output and not lse: what the wrapper undoes."""
    query, latents, lists = made(3, 320, 128, 64)
    lists[1] = -1
    out, lse, *_ = op(flashmla_wheel, query, latents, lists)
    sunk, same, *_ = op(
        flashmla_wheel, query, latents, lists, torch.full((64,), 2.0, device="cuda")
    )
    assert bool((lse[1] == math.inf).all()) and not out[1].any()
    assert torch.equal(lse, same), "lse holds the sinks already; _write_lse adds them again"
    assert not torch.equal(out, sunk)


def forms(latents: Tensor) -> dict[str, Tensor]:
    """Pages of the same numbers in both forms."""
    return {"packed": packed_pages(latents), "bfloat16": latents.unflatten(0, (-1, 64))}


def attend(query: Tensor, pages: Tensor, lists: Tensor, **more: Any) -> Tensor:
    return sparse_mla_attention(
        query[..., :512], query[..., 512:], pages, lists, scale=SCALE, kernel="flashmla", **more
    )


@pytest.mark.parametrize("form", ["bfloat16", "packed"])
def test_only_the_kernel_and_one_copy_run(form: str) -> None:
    query, latents, lists = made(16, 4096, 2048, 128)
    pages = forms(latents)[form]
    output = torch.empty(16, 128, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        names = kernels_in(lambda: attend(query, pages, lists, output=output, holes=False))
    ours = [n for n in names if not any(word in n for word in VENDOR)]
    # A wheel that gives lse and the largest logits of a prefill to base 2 takes them there with a
    # kernel of torch's for each.
    natural = form == "packed" or sources.source().lse_base == math.e
    assert len(ours) == (1 if natural else 3), (
        f"besides FlashMLA's own there ran {ours}; want one copy into the output"
    )


@pytest.mark.parametrize("heads", [16, 128])
def test_more_tokens_than_one_call_takes(heads: int) -> None:
    tokens = 2 * flashmla_sparse.MOST_TOKENS + 76
    query, latents, lists = made(tokens, 4096, 1024, heads)
    lists[::7, 100:] = -1
    results = []
    for pages in forms(latents).values():
        lse = torch.empty(tokens, heads, device="cuda")
        results.append((attend(query, pages, lists, lse=lse).float(), lse))
    (packed, of_packed), (plain, of_plain) = results
    torch.testing.assert_close(packed, plain, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(of_packed, of_plain, rtol=1e-5, atol=1e-3)


class Layer(nn.Module):
    """Writes its latents and attends to what a list names."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.register_buffer("pages", torch.full((pages, 64, 656), 0xFF, dtype=torch.uint8))

    def forward(
        self, query: Tensor, latent: Tensor, k_pe: Tensor, slots: Tensor, lists: Tensor
    ) -> Tensor:
        write_latent_packed(latent, k_pe, self.pages, slots)
        return (
            sparse_mla_attention(query[..., :512], query[..., 512:], self.pages, lists, scale=SCALE)
            * 1.0
        )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_write_and_read_the_packed_cache(mode: str) -> None:
    layer, other = Layer(8).cuda(), Layer(8).cuda()
    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    order = torch.randperm(512, device="cuda")
    calls: list[str] = []
    with torch.no_grad():
        for step in range(5):
            torch.manual_seed(step)
            query = torch.randn(4, 64, 576, device="cuda").bfloat16()
            latent = torch.randn(4, 512, device="cuda").bfloat16()
            k_pe = torch.randn(4, 64, device="cuda").bfloat16()
            slots = order[4 * step : 4 * step + 4].clone()
            lists = torch.full((4, 64), -1, dtype=torch.int32, device="cuda")
            lists[:, : 4 * step + 4] = order[: 4 * step + 4].int()
            got, code = compiled_code(lambda: compiled(query, latent, k_pe, slots, lists).clone())  # noqa: B023
            calls = calls or kernel_calls(code)
            want = other(query, latent, k_pe, slots, lists)
            written = order[: 4 * step + 4]
            kept, stored = (unpack(m.pages.flatten(0, 1)[written], 512, 64) for m in (other, layer))
            assert torch.equal(stored, kept), (
                f"step {step}: the compiled write stores other numbers than the eager one"
            )
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    assert calls == ["write_latent_packed.triton", "sparse_mla_attention.flashmla"]
