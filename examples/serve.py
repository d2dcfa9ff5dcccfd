"""Requests join and leave a running batch over one cache of pages, on a GPU in CUDA graphs, and get
the tokens that they get alone.

python examples/serve.py
"""

import torch
from torch import Tensor, nn

from attnops.cache import PagedBatch, PagedCache
from attnops.graphs import Buckets, Graphed, piecewise
from attnops.nn import RotaryEmbedding, SelfAttention


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


def serve(
    step: Decoder | Graphed, cache: PagedCache, asked: list[tuple[list[int], int]]
) -> list[list[int]]:
    """The tokens that follow each prompt. asked: (prompt, number of new tokens), in the order of
    arrival."""
    done: list[list[int]] = [[] for _ in asked]
    # Numbers in `asked`; of those that run, the cache's ids
    waiting, running = list(range(len(asked))), dict[int, int]()
    while waiting or running:
        # A request joins when all that it and the running ones have yet to store fits, so that no
        # step runs out of pages.
        rest = {
            i: len(prompt) + new - 1 - (cache.length(running[i]) if i in running else 0)
            for i, (prompt, new) in enumerate(asked)
        }
        while waiting and cache.fits(
            [rest[i] for i in (*running, waiting[0])], list(running.values())
        ):
            running[waiting.pop(0)] = cache.alloc()
        tokens = [done[i][-1:] or asked[i][0] for i in running]
        batch = cache.batch(list(running.values()), [len(new) for new in tokens])
        packed = torch.tensor([token for new in tokens for token in new], device=batch.slots.device)
        logits = step(packed, batch=batch, k_pages=cache.k_pages, v_pages=cache.v_pages)[
            batch.cu_seqlens_q[1:].long() - 1
        ]
        for i, token in zip(tuple(running), logits.argmax(-1).tolist(), strict=True):
            done[i].append(token)
            if len(done[i]) == asked[i][1]:
                cache.free(running.pop(i))
    return done


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder().requires_grad_(False).to(device)
    asked = [(torch.randint(100, (n,)).tolist(), 17 - n) for n in (5, 11, 3, 9, 1, 14)]
    cache = PagedCache(
        2,
        12,
        4,
        num_kv_heads=2,
        head_dim=16,
        max_requests=4,
        max_pages_per_request=8,
        dtype=torch.float32,
        device=device,
    )
    step = (
        model
        if device == "cpu"
        else piecewise(model, Buckets.up_to(requests=4, tokens=64), tokens=("tokens",), cache=cache)
    )
    for i, together in enumerate(serve(step, cache, asked)):
        assert serve(step, cache, asked[i : i + 1]) == [together], (
            f"request {i} has other tokens than alone"
        )
        print(f"request {i}: {together}, as alone")


if __name__ == "__main__":
    main()
