"""FlashMLA's sparse kernels on a real GPU: what no document settles, and the whole path compiled."""

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
from tests.lowering.models import compiled_code, kernel_calls

KERNEL = kernels_of("sparse_mla_attention")["flashmla"]
SCALE = 192**-0.5
VENDOR = ("sparse_attn_fwd", "splitkv_mla", "mla_combine", "mla_metadata", "sched_meta", "sm90::", "sm100::", "smxx::")
"""Words in the names of FlashMLA's device kernels."""


@pytest.fixture(autouse=True)
def installed_wheel() -> None:
    target = Target.of(torch.device("cuda"))
    if absent := KERNEL.absences(target):
        pytest.skip("; ".join(map(str, absent)))
    if target.arch not in (90, 100):
        pytest.skip(f"FlashMLA has no sparse kernel for {target}")


def made(tokens: int, slots: int, topk: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """query `[T, H, 576]`, latents `[slots, 576]` that packing does not change, lists `[T, topk]` without a slot twice."""
    torch.manual_seed(seed)
    query = torch.randn(tokens, heads, 576, device="cuda").bfloat16()
    latents = unpack(pack(torch.randn(slots, 512, device="cuda"), torch.randn(slots, 64, device="cuda")), 512, 64).bfloat16()
    return query, latents, torch.rand(tokens, slots, device="cuda").argsort(1)[:, :topk].int()


def packed_pages(latents: Tensor, page: int = 64) -> Tensor:
    return pack(latents[:, :512], latents[:, 512:]).unflatten(0, (-1, page))


def exact(query: Tensor, latents: Tensor, lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, natural lse, largest logit) in float64."""
    keys = latents[lists.long()].double()
    scores = torch.einsum("thd,tkd->thk", query.double(), keys) * SCALE
    return torch.einsum("thk,tkd->thd", scores.softmax(-1), keys[..., :512]), scores.logsumexp(-1), scores.amax(-1)


def base_of(got: Tensor, natural: Tensor) -> tuple[str, dict[str, float]]:
    """(the log base that fits better, how far off each is)."""
    off = {"e": float((got.double() - natural).abs().max()), "2": float((got.double() - natural / math.log(2)).abs().max())}
    return min(off, key=lambda base: off[base]), off


def test_the_log_base_of_sparse_prefill(flashmla_wheel: sources.Source, found: dict[str, Any]) -> None:
    """The docstring of the first wheel says 2 and its source e; the constant must say what the kernel does."""
    query, latents, lists = made(5, 320, 128, 64)
    out, top, lse = flashmla_wheel.ops.sparse_prefill_fwd(query, latents[:, None], lists[:, None], SCALE, 512, None, None)
    want, natural, most = exact(query, latents, lists)
    base, off = base_of(lse, natural)
    base_of_logits, off_logits = base_of(top, most)
    figures = found.setdefault("flashmla_sparse", {})
    figures[f"prefill_lse_{flashmla_wheel.namespace}"] = {"base": base, "off": off}
    figures[f"prefill_max_logits_{flashmla_wheel.namespace}"] = {"base": base_of_logits, "off": off_logits}
    assert off[base] < 1e-3, f"lse fits neither base: off by {off}"
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    says = "e" if flashmla_wheel.lse_base == math.e else f"{flashmla_wheel.lse_base:g}"
    assert base == says, f"sparse_prefill_fwd gives lse to base {base}: set lse_base of {flashmla_wheel.namespace} in sources.py to it"


@pytest.mark.parametrize("heads", [64, 128])
def test_sparse_decode_is_natural(heads: int, flashmla_wheel: sources.Source, found: dict[str, Any]) -> None:
    query, latents, lists = made(5, 320, 128, heads)
    rest = (None, None, None, None, None, None, None, 512, SCALE)
    out, lse, _, _ = flashmla_wheel.ops.sparse_decode_fwd(query[:, None], packed_pages(latents)[:, :, None], lists[:, None], *rest)
    want, natural, _ = exact(query, latents, lists)
    assert (out.shape, lse.shape) == ((5, 1, heads, 512), (5, heads, 1))
    base, off = base_of(lse[:, :, 0], natural)
    found.setdefault("flashmla_sparse", {})[f"decode_lse_{heads}_{flashmla_wheel.namespace}"] = {"base": base, "off": off}
    assert base == "e" and off[base] < 1e-3, f"lse: off by {off}"
    torch.testing.assert_close(out[:, 0].double(), want, rtol=2e-2, atol=2e-2)


def test_rows_without_entries_and_sinks_of_the_raw_ops(flashmla_wheel: sources.Source, found: dict[str, Any]) -> None:
    """+inf for no entry, and sinks that change the output and not lse: what the wrapper undoes."""
    query, latents, lists = made(3, 320, 128, 64)
    lists[1] = -1
    sinks = torch.full((64,), 2.0, device="cuda")
    prefill, decode = flashmla_wheel.ops.sparse_prefill_fwd, flashmla_wheel.ops.sparse_decode_fwd
    pages = packed_pages(latents)[:, :, None]

    def run(given: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
        a = prefill(query, latents[:, None], lists[:, None], SCALE, 512, given, None)
        b = decode(query[:, None], pages, lists[:, None], None, given, None, None, None, None, None, 512, SCALE)
        return {"prefill": (a[0], a[2]), "decode": (b[0][:, 0], b[1][:, :, 0])}

    plain, sunk = run(None), run(sinks)
    for name in plain:
        out, lse = plain[name]
        empty = {"lse": lse[1].unique().tolist(), "output": out[1].float().unique().tolist()}
        same = torch.equal(lse, sunk[name][1])
        found.setdefault("flashmla_sparse", {})[f"{name}_empty_{flashmla_wheel.namespace}"] = {**empty, "lse_without_sinks": same}
        assert empty == {"lse": [math.inf], "output": [0.0]}, f"{name}: a row without entries gives {empty}"
        assert same, f"{name}: lse holds the sinks already; _write_lse adds them again"
        assert not torch.equal(out, sunk[name][0])


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "packed"])
def test_only_the_kernel_and_one_copy_run(packed: bool, found: dict[str, Any]) -> None:
    query, latents, lists = made(16, 4096, 2048, 128)
    pages = packed_pages(latents) if packed else latents.unflatten(0, (-1, 64))
    output = torch.empty(16, 128, 512, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        sparse_mla_attention(
            query[..., :512], query[..., 512:], pages, lists, scale=SCALE, output=output, holes=False, kernel="flashmla"
        )  # fmt: skip

    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            call()
        end.record()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if str(e.device_type).endswith("CUDA")]
    if not names:
        pytest.skip("the profiler saw no device kernel")
    label = "packed" if packed else "bfloat16"
    found.setdefault("flashmla_sparse", {})[f"device_kernels_{label}"] = [n[:80] for n in names]
    found["flashmla_sparse"][f"us_16x2048_h128_{label}"] = round(start.elapsed_time(end) * 50, 1)
    ours = [n for n in names if not any(word in n for word in VENDOR)]
    # A wheel that gives lse and the largest logits of a prefill to base 2 takes them there with a kernel of torch's for each.
    natural = packed or sources.source().lse_base == math.e
    assert len(ours) == (1 if natural else 3), f"besides FlashMLA's own there ran {ours}; want one copy into the output"


@pytest.mark.parametrize("heads", [16, 128])
def test_more_tokens_than_one_call_takes(heads: int, found: dict[str, Any]) -> None:
    tokens = 2 * flashmla_sparse.MOST_TOKENS + 76
    query, latents, lists = made(tokens, 4096, 1024, heads)
    lists[::7, 100:] = -1
    results = {}
    for name, pages in (("packed", packed_pages(latents)), ("bfloat16", latents.unflatten(0, (-1, 64)))):
        lse = torch.empty(tokens, heads, device="cuda")
        results[name] = sparse_mla_attention(
            query[..., :512], query[..., 512:], pages, lists, scale=SCALE, lse=lse, kernel="flashmla"
        ), lse  # fmt: skip
    # The latents are the same numbers in both forms.
    torch.testing.assert_close(results["packed"][0].float(), results["bfloat16"][0].float(), rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(results["packed"][1], results["bfloat16"][1], rtol=1e-5, atol=1e-3)
    found.setdefault("flashmla_sparse", {})[f"tokens_{tokens}_heads_{heads}"] = "packed equals bfloat16"


class Layer(nn.Module):
    """Writes its latents and attends to what a list names."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.register_buffer("pages", torch.full((pages, 64, 656), 0xFF, dtype=torch.uint8))

    def forward(self, query: Tensor, latent: Tensor, k_pe: Tensor, slots: Tensor, lists: Tensor) -> Tensor:
        write_latent_packed(latent, k_pe, self.pages, slots)
        return sparse_mla_attention(query[..., :512], query[..., 512:], self.pages, lists, scale=SCALE) * 1.0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_write_and_read_the_packed_cache(mode: str, found: dict[str, Any]) -> None:
    layer, other = Layer(8).cuda(), Layer(8).cuda()
    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    order = torch.randperm(512, device="cuda")
    calls: list[str] = []
    with torch.no_grad():
        for step in range(5):
            torch.manual_seed(step)
            query = torch.randn(4, 64, 576, device="cuda").bfloat16()
            latent, k_pe = torch.randn(4, 512, device="cuda").bfloat16(), torch.randn(4, 64, device="cuda").bfloat16()
            slots = order[4 * step : 4 * step + 4].clone()
            lists = torch.full((4, 64), -1, dtype=torch.int32, device="cuda")
            lists[:, : 4 * step + 4] = order[: 4 * step + 4].int()
            got, code = compiled_code(lambda: compiled(query, latent, k_pe, slots, lists).clone())  # noqa: B023
            calls = calls or kernel_calls(code)
            want = other(query, latent, k_pe, slots, lists)
            written = order[: 4 * step + 4]
            kept, stored = (unpack(m.pages.flatten(0, 1)[written], 512, 64) for m in (other, layer))
            assert torch.equal(stored, kept), f"step {step}: the compiled write stores other numbers than the eager one"
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    assert calls == ["write_latent_packed.triton", "sparse_mla_attention.flashmla"]
    found.setdefault("flashmla_sparse", {})[f"compiled_{mode}"] = "equal over 5 steps"
