"""A tiny decoder over a paged cache, the main model of these tests, and steps for it."""

from dataclasses import replace

import torch
from torch import nn

from attnops.cache import PagedCache
from attnops.core.kernel import Capture, kernels_of, register
from attnops.nn import RotaryEmbedding, SelfAttention

HIDDEN, HEADS, KV_HEADS, D, PAGE, VOCAB = 32, 4, 2, 8, 4, 50
BOUNDARY = "uncapturable"


def boundary():
    """A kernel of paged attention that may not be captured, chosen where it is asked for."""
    if BOUNDARY not in kernels_of("paged_attention"):
        register(
            replace(
                kernels_of("paged_attention")["reference"],
                name=BOUNDARY,
                capture=Capture.NEVER,
                cost_us=lambda p: 1e9,
            )
        )
    return BOUNDARY


class Decoder(nn.Module):
    def __init__(self, layers=3, kernel=None, mlp=None, head_dim=D):
        super().__init__()
        rope, hidden = RotaryEmbedding(head_dim), HEADS * head_dim
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(
            SelfAttention(hidden, HEADS, KV_HEADS, head_dim, qk_norm=True, rope=rope, kernel=kernel)
            for _ in range(layers)
        )
        self.mlps = nn.ModuleList(
            (mlp or (lambda: nn.Linear(hidden, hidden)))() for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens, batch, k_pages, v_pages):
        hidden = self.embed(tokens)
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            hidden = hidden + layer(hidden, batch=batch, k_pages=k_pages[i], v_pages=v_pages[i])
            hidden = hidden + mlp(hidden)
        return self.head(hidden)


class Windowed(Decoder):
    """Layers that see so many tokens each, their own included; 0: all of them. tables: of a cache
    of these windows, the page table of each layer."""

    def __init__(self, windows, tables, head_dim=D):
        super().__init__(len(windows), head_dim=head_dim)
        self.tables = tables
        for layer, window in zip(self.layers, windows, strict=True):
            layer.attention.window = (window - 1, 0) if window else (-1, -1)

    def forward(self, tokens, batch, k_pages, v_pages):
        hidden = self.embed(tokens)
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            own = batch.of(self.tables[i])
            hidden = hidden + layer(hidden, batch=own, k_pages=k_pages[i], v_pages=v_pages[i])
            hidden = hidden + mlp(hidden)
        return self.head(hidden)


class Decaying(nn.Module):
    """A state for every row, and a count of steps in a buffer. fails: called on the rows."""

    def __init__(self, rows=4, fails=None):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.state, self.fails, self.scale = torch.randn(rows, 3), fails, 1.0

    def forward(self, x):
        self.steps.add_(1)
        rows = self.state[: x.shape[0]]
        rows.mul_(0.5).add_(x)
        if self.fails is not None:
            x = self.fails(x)
        return rows * self.scale + self.steps + x * 0


def decoder(layers=3, **more):
    torch.manual_seed(0)
    return Decoder(layers, **more).eval()


def paged_cache(
    layers=3,
    pages=64,
    requests=8,
    width=8,
    device="cpu",
    dtype=torch.float32,
    page=PAGE,
    head_dim=D,
    **more,
):
    """A cache whose every page, the null page included, is NaN until it is written."""
    cache = PagedCache(
        layers,
        pages,
        page,
        KV_HEADS,
        head_dim,
        max_requests=requests,
        max_pages_per_request=width,
        dtype=dtype,
        device=device,
        **more,
    )
    for pool in (*cache.k_pages, *cache.v_pages):
        pool.fill_(float("nan"))
    return cache
