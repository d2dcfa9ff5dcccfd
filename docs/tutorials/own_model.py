"""
A model of your own
===================

How to build a decoder from attnops' modules, compile it as one graph, ask for its kernels, and
decode several requests over pages.
"""

import copy

import torch
from torch import Tensor, nn

import attnops
from attnops.cache import PagedBatch, PagedCache
from attnops.nn import RotaryEmbedding, SelfAttention

# %%
# The model
# ---------
#
# :class:`~attnops.nn.SelfAttention` has the projections, the rotation and the attention of a layer.
# The arguments of the call say how it attends: hidden states ``[B, S, E]`` alone are dense; ``[T,
# E]`` with a batch and the layer's pages are paged. A layer of your own can call the ops:
# :func:`attnops.attention`, :func:`attnops.varlen_attention` and :func:`attnops.paged_attention`
# take tokens first, ``[B, S, H, D]`` or ``[T, H, D]``.

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 100, 64, 4, 2, 64, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = SelfAttention(
            HIDDEN, HEADS, KV_HEADS, HEAD_DIM, qk_norm=True, rope=RotaryEmbedding(HEAD_DIM)
        )
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, hidden: Tensor, **where) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), **where)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self,
        tokens: Tensor,
        batch: PagedBatch | None = None,
        pages: tuple[tuple[Tensor, Tensor], ...] = (),
    ) -> Tensor:
        """tokens ``[B, S]``, or ``[T]`` with a batch and each layer's pages; logits ``[...,
        VOCAB]``."""
        hidden = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            where = (
                {}
                if batch is None
                else {"batch": batch, "k_pages": pages[i][0], "v_pages": pages[i][1]}
            )
            hidden = layer(hidden, **where)
        return self.head(hidden)


torch.manual_seed(0)
model = Decoder().eval().requires_grad_(False)

# %%
# Compile
# -------
#
# The ops are one node each in the graph, so ``fullgraph=True`` holds. Inductor writes the chosen
# kernel into the code that it generates; ``TORCH_LOGS=output_code`` shows it.

compiled = torch.compile(model, fullgraph=True)
text = torch.randint(VOCAB, (1, 12))
torch.testing.assert_close(compiled(text), model(text))

# %%
# Which kernel, here and on another machine
# -----------------------------------------
#
# ``explain`` runs the compiled model uncompiled, on fake tensors. ``target`` is another machine,
# here an H200, with a longer text.

print("here:", *attnops.explain(compiled, text, quiet=True).chosen())
hopper = attnops.explain(
    copy.deepcopy(model).bfloat16(),
    torch.zeros(1, 8192, dtype=torch.int64),
    target="h200",
    quiet=True,
)
print("H200:", *hopper.chosen())
assert hopper.chosen() == ("attention.fa3",)

# %%
# Pages
# -----
#
# A :class:`~attnops.cache.PagedCache` owns the pages of all layers and knows which belong to which
# request. ``cache.batch`` makes room for the new tokens of a step and describes it; the same batch
# goes to every layer. Here two prompts of different lengths go through the model in one step, one
# behind the other, and then one token per request and step.

cache = PagedCache(
    LAYERS,
    num_pages=16,
    page_size=4,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_requests=4,
    max_pages_per_request=8,
    dtype=torch.float32,
    device="cpu",
)
pages = tuple(zip(cache.k_pages, cache.v_pages, strict=True))
prompts = [torch.randint(VOCAB, (n,)) for n in (5, 11)]
requests = [cache.alloc() for _ in prompts]

batch = cache.batch(requests, [len(prompt) for prompt in prompts])
logits = model(torch.cat(prompts), batch, pages)
answers = [logits[batch.cu_seqlens_q[1:].long() - 1].argmax(-1)]  # the last token of each prompt
while len(answers) < 6:
    answers.append(model(answers[-1], cache.batch(requests), pages).argmax(-1))
print("tokens: ", torch.stack(answers, 1).tolist())
print("pages: ", cache.used_pages, "of", cache.num_pages - 1)

# %%
# Each request has the tokens that the dense model gives it alone.

for row, prompt in enumerate(prompts):
    tokens = prompt[None]
    for _ in answers:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert tokens[0, len(prompt) :].tolist() == [int(step[row]) for step in answers], (
        f"request {row} differs from the dense model"
    )
    cache.free(requests[row])
assert cache.used_pages == 0
