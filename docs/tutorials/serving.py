"""
A serving loop
==============

How to serve requests that join and leave a running batch over one paged cache, and admit only those
that can finish.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attnops.cache import PagedBatch, PagedCache
from attnops.errors import OutOfPages
from attnops.nn import RotaryEmbedding, SelfAttention

# %%
# The model takes the new tokens of all requests, packed ``[T]``, and gives logits ``[T, V]``.


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rope = RotaryEmbedding(16)
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.layers = nn.ModuleList(
            SelfAttention(64, num_heads=4, num_kv_heads=2, rope=rope) for _ in range(2)
        )

    def forward(
        self,
        tokens: Tensor,
        batch: PagedBatch,
        k_pages: tuple[Tensor, ...],
        v_pages: tuple[Tensor, ...],
    ) -> Tensor:
        hidden = self.embed(tokens)
        for layer, keys, values in zip(self.layers, k_pages, v_pages, strict=True):
            hidden = hidden + layer(hidden, batch=batch, k_pages=keys, v_pages=values)
        return self.head(hidden)


torch.manual_seed(0)
model = Decoder().requires_grad_(False)

# %%
# The cache
# ---------
#
# The cache has 11 pages of 4 tokens (page 0 is never handed out) and rows for 4 requests: too few
# for all requests at once, on purpose.

cache = PagedCache(
    2,
    12,
    4,
    num_kv_heads=2,
    head_dim=16,
    max_requests=4,
    max_pages_per_request=8,
    dtype=torch.float32,
    device="cpu",
)


@dataclass(eq=False)
class Request:
    prompt: list[int]
    most: int
    done: list[int] = field(default_factory=list)
    id: int = -1  # the cache's, while the request runs

    def rest(self) -> int:
        """Tokens that it has yet to store. The last token that it gets is never stored."""
        return len(self.prompt) + self.most - 1 - (cache.length(self.id) if self.id >= 0 else 0)


# %%
# Admission
# ---------
#
# ``cache.fits`` counts ahead: the tokens that the running requests may still bring, and all tokens
# of a new request. A request that joins only when all of it fits never meets a full cache half way,
# and never takes the pages that a running request needs.


def join(waiting: deque[Request], running: list[Request]) -> None:
    while waiting and cache.fits(
        [r.rest() for r in (*running, waiting[0])], [r.id for r in running]
    ):
        running.append(waiting.popleft())
        running[-1].id = cache.alloc()


# %%
# A step
# ------
#
# A new request brings its prompt, a running request the token that it got last, all in one call of
# the model. ``cache.batch`` makes room for the tokens and describes the step. The logits of each
# request's last token give its next token.
#
# On a GPU, ``attnops.graphs.piecewise(model, Buckets.up_to(requests=4, tokens=64),
# tokens=("tokens",), cache=cache)`` takes the place of ``model`` and runs the step from CUDA
# graphs; ``examples/serve.py`` of the repository does so.


def step(running: list[Request]) -> None:
    new = [r.done[-1:] or r.prompt for r in running]
    batch = cache.batch([r.id for r in running], [len(tokens) for tokens in new])
    packed = torch.tensor([token for tokens in new for token in tokens])
    logits = model(packed, batch, cache.k_pages, cache.v_pages)[batch.cu_seqlens_q[1:].long() - 1]
    for request, token in zip(running, logits.argmax(-1).tolist(), strict=True):
        request.done.append(token)


# %%
# The loop
# --------


def serve(*requests: Request) -> None:
    waiting, running, steps = deque(requests), [], 0
    while waiting or running:
        before = len(waiting)
        join(waiting, running)
        if len(waiting) < before:
            print(
                f"after step {steps}: {len(running)} run, {len(waiting)} wait, "
                f"{cache.used_pages} pages in use"
            )
        step(running)
        steps += 1
        for request in [r for r in running if len(r.done) == r.most]:
            cache.free(request.id)
            running.remove(request)
    print(f"all done after {steps} steps")


prompts = [torch.randint(100, (n,)).tolist() for n in (5, 11, 3, 9, 1, 14)]
together = [Request(prompt, 17 - len(prompt)) for prompt in prompts]
serve(*together)
assert cache.used_pages == 0

# %%
# Every request has the tokens that it gets when it is served alone.

for request in together:
    alone = Request(request.prompt, request.most)
    join(deque([alone]), running := [])
    while len(alone.done) < alone.most:
        step(running)
    cache.free(alone.id)
    assert alone.done == request.done, (
        f"a request of {len(request.prompt)} tokens has other tokens alone"
    )

# %%
# Without admission
# -----------------
#
# A step that does not fit raises, and leaves the cache as it was:

cache.alloc(32)
second = cache.alloc(10)
try:
    cache.batch([second], 4)
except OutOfPages as error:
    print(error)
else:
    raise AssertionError("46 tokens went into 11 pages of 4")
assert cache.length(second) == 10
