"""
A hybrid of your own
====================

How to build a model whose layers keep states, with one layer that attends, train it on packed
texts, and generate with states beside pages.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.cache import PagedCache
from attnops.nn import GatedDeltaNet, RotaryEmbedding, SelfAttention

# %%
# The model
# ---------
#
# Three layers are :class:`~attnops.nn.GatedDeltaNet`, linear attention whose state has one size
# however long the text is, and one is :class:`~attnops.nn.SelfAttention`. All take packed texts:
# ``[T, E]``, one text behind the other, and where each begins. ``kept`` is what a layer keeps of
# each request: a state, or a batch of a cache with the layer's pages.
# :class:`~attnops.nn.Mamba2` takes the place of GatedDeltaNet with the same arguments of a call.

VOCAB, HIDDEN, HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 16, 4
torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.mixer = (
            SelfAttention(HIDDEN, HEADS, rope=RotaryEmbedding(HEAD_DIM))
            if attends
            else GatedDeltaNet(HIDDEN, HEADS, num_k_heads=2, head_dim=HEAD_DIM)
        )
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, hidden: Tensor, texts: dict, kept) -> Tensor:
        x = self.norm(hidden)
        if isinstance(self.mixer, GatedDeltaNet):
            x = self.mixer(x, state=kept, **texts)
        else:
            x = self.mixer(x, **(texts if kept is None else kept))
        hidden = hidden + x
        return hidden + self.mlp(self.mlp_norm(hidden))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(attends=i == 2) for i in range(LAYERS))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, kept=None) -> Tensor:
        """tokens ``[T]``; logits ``[T, VOCAB]``."""
        hidden, texts = self.embed(tokens), {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        for layer, own in zip(self.layers, kept or [None] * LAYERS, strict=True):
            hidden = layer(hidden, texts, own)
        return self.head(hidden)


model = Hybrid()

# %%
# Train
# -----
#
# Every text repeats a few tokens of its own, which the model has to remember. A step packs eight
# texts of different lengths into one row: neither attention nor states pass from one to the next,
# and no token is padding. The layers and their gradients are ops, so ``torch.compile(model,
# fullgraph=True)`` trains as well.


def pack(texts: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    lengths = [len(text) for text in texts]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.cat(texts), starts, max(lengths)


def text_of(length: int) -> Tensor:
    return torch.randint(VOCAB, (3,)).repeat(length)[:length]


optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
losses = []
for _ in range(180):
    row, starts, longest = pack([text_of(int(n)) for n in torch.randint(8, 24, (8,))])
    labels = row.roll(-1)
    labels[starts[1:].long() - 1] = -100  # the last token of a text has none after it
    loss = F.cross_entropy(model(row, starts, longest), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
assert losses[-1] < 0.3 * losses[0]

# %%
# Generate
# --------
#
# The cache has pages for the one layer that attends. Each other layer has a state of the requests,
# which its calls change in place. The prompts go through the model in one step, and then one token
# of each request.

model.eval().requires_grad_(False)
prompts = [text_of(n) for n in (7, 11)]
cache = PagedCache(
    1,
    num_pages=16,
    page_size=4,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    max_requests=2,
    max_pages_per_request=8,
    dtype=torch.float32,
    device="cpu",
)
requests = [cache.alloc() for _ in prompts]
states = [
    layer.mixer.new_state(len(prompts)) if isinstance(layer.mixer, GatedDeltaNet) else None
    for layer in model.layers
]


def step(tokens: Tensor, new: list[int]) -> Tensor:
    """The next token of each request. new: how many tokens each brings."""
    batch = cache.batch(requests, new)
    pages = {"batch": batch, "k_pages": cache.k_pages[0], "v_pages": cache.v_pages[0]}
    kept = [pages if state is None else state for state in states]
    logits = model(tokens, batch.cu_seqlens_q, batch.max_seqlen_q, kept)
    return logits[batch.cu_seqlens_q[1:].long() - 1].argmax(-1)


answers = [step(torch.cat(prompts), [len(prompt) for prompt in prompts])]
while len(answers) < 9:
    answers.append(step(answers[-1], [1, 1]))
answers = torch.stack(answers, 1)
for prompt, answer in zip(prompts, answers, strict=True):
    print(prompt.tolist(), "->", answer.tolist())

# %%
# Without anything kept, each request has the same tokens.

for prompt, answer in zip(prompts, answers, strict=True):
    text = prompt
    for _ in answer:
        text = torch.cat([text, model(*pack([text]))[-1:].argmax(-1)])
    assert torch.equal(text[len(prompt) :], answer)
