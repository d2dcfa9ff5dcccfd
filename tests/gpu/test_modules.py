"""Training with the modules on a GPU: dropout through torch's backends, and jagged nested tensors,
eager and compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attnops.nn import Attention, LatentAttention, RotaryEmbedding, SelfAttention

P, TOKENS, WIDTH = 0.3, 128, 256
LENGTHS = (300, 17, 128)
MASKS = ["none", "bool", "additive"]
SIZES: dict[str, int] = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
# A rounding of bfloat16 in each product and in each gradient.
FAR = 0.03


def mask_of(kind: str) -> Tensor | None:
    """Of a batch whose query 3 sees no key."""
    if kind == "none":
        return None
    seen = torch.rand(2, 1, TOKENS, TOKENS, device="cuda") < 0.8
    seen[:, :, 3] = False
    return (
        seen
        if kind == "bool"
        else torch.randn(seen.shape, device="cuda").masked_fill(~seen, float("-inf"))
    )


def heads(dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(2, TOKENS, n, 64, device="cuda", dtype=dtype, requires_grad=True)
        for n in (8, 2, 2)
    ]


def seeded(seed: int, module: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return module(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("kind", MASKS)
def test_dropout(kind: str, causal: bool, dtype: torch.dtype) -> None:
    """Seeds, the mean over them, a query that sees nothing, and gradients that are finite, through
    whichever backend torch takes."""
    module, given = Attention(8, 2, head_dim=64, causal=causal, dropout=P), heads(dtype)
    mask = mask_of(kind)
    first = seeded(1, module, *given, mask=mask)
    assert first.dtype == dtype and torch.equal(seeded(1, module, *given, mask=mask), first)
    assert not torch.equal(seeded(2, module, *given, mask=mask), first)
    grads = torch.autograd.grad(first.float().square().sum(), given)
    assert all(g.isfinite().all() and g.any() for g in grads)
    if mask is not None:
        assert not first[:, 3].any() and not grads[0][:, 3].any()
    with torch.no_grad():
        many = torch.stack([module(*given, mask=mask).float() for _ in range(64)])
        want = module.eval()(*given, mask=mask).float()
    apart = (many.mean(0) - want).abs() / (many.std(0) / 8 + 0.02)
    assert float((apart > 4).float().mean()) < 1e-3, (
        "of means over 64 seeds one in 16,000 is four standard errors away"
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["self", "latent"])
def test_jagged(name: str, compiled: bool) -> None:
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = (
        SelfAttention(WIDTH, 8, 2, 64, rope=RotaryEmbedding(64), **made)
        if name == "self"
        else LatentAttention(WIDTH, 4, rope=RotaryEmbedding(32), **SIZES, **made)
    )
    run: Any = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(sum(LENGTHS), WIDTH, requires_grad=True, **made)
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    given: Any = torch.nested.nested_tensor_from_jagged(x, ends)
    got = run(given, max_seqlen=max(LENGTHS)).values()
    want = torch.cat([layer(part[None])[0] for part in x.split(LENGTHS)])
    found, right = (
        torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])
        for out in (got, want)
    )
    for a, b in zip((got.detach(), *found), (want.detach(), *right), strict=True):
        assert a.isfinite().all() and float((a.float() - b.float()).norm()) <= FAR * float(
            b.float().norm()
        )
