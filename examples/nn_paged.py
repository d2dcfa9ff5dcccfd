"""Two requests of different lengths decode together over a paged cache, and agree with running each of them densely.

python examples/nn_paged.py
"""

import torch
from torch import Tensor, nn

from attnops.cache import PagedBatch, PagedCache
from attnops.nn import RotaryEmbedding, SelfAttention

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, STEPS = 64, 4, 2, 16, 2, 100, 6


class Decoder(nn.Module):
    """A decoder cut down to its attention: embedding, layers, head."""

    def __init__(self) -> None:
        super().__init__()
        rope = RotaryEmbedding(HEAD_DIM)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(SelfAttention(HIDDEN, HEADS, KV_HEADS, qk_norm=True, rope=rope) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, cache: PagedCache | None = None, batch: PagedBatch | None = None) -> Tensor:
        """tokens `[B, S]` without a cache, `[T]` with one; logits `[..., VOCAB]`."""
        hidden = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            pages = {} if cache is None else {"batch": batch, "k_pages": cache.k_pages[i], "v_pages": cache.v_pages[i]}
            hidden = hidden + layer(hidden, **pages)
        return self.head(hidden)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    prompts = [torch.randint(VOCAB, (n,)) for n in (5, 11)]
    cache = PagedCache(
        LAYERS, num_pages=16, page_size=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_requests=4, max_pages_per_request=8,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    requests = [cache.alloc() for _ in prompts]

    # One call for both prompts, one after the other: the batch says which token belongs to whom.
    batch = cache.batch(requests, [len(p) for p in prompts])
    logits = model(torch.cat(prompts), cache, batch)
    last = logits[batch.cu_seqlens_q[1:].long() - 1].argmax(-1)
    paged = [last]
    for _ in range(STEPS - 1):
        paged.append(model(paged[-1], cache, cache.batch(requests)).argmax(-1))

    for i, prompt in enumerate(prompts):
        tokens = prompt[None]
        for _ in range(STEPS):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        want, got = tokens[0, len(prompt) :].tolist(), [int(step[i]) for step in paged]
        print(f"request {requests[i]}: {got} {'as dense' if got == want else f'NOT as dense: {want}'}")
    print(f"pages in use: {cache.used_pages} of {cache.num_pages - 1}")
    for request in requests:
        cache.free(request)
    print(f"after freeing both: {cache.used_pages}")


if __name__ == "__main__":
    main()
