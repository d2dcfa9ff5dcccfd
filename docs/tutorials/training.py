"""
Training
========

How to train on packed documents with gradients through attnops.
"""

import torch
from torch import Tensor, nn

import attnops
from attnops.nn import RotaryEmbedding, SelfAttention

# %%
# Packed documents
# ----------------
#
# Documents go one behind the other, without padding. ``cu_seqlens`` int32 ``[B + 1]`` says where
# each begins and ends, and ``max_seqlen`` how long the longest is. No token sees another document,
# and positions start at 0 in each. A label is the next token of the same document; the last token
# of a document has none.

VOCAB = 32


def documents(*lengths: int) -> tuple[Tensor, Tensor, dict]:
    """Documents that repeat two random tokens, their labels, and the arguments that say where each
    begins."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.cat([torch.randint(VOCAB, (2,)).repeat(n)[:n] for n in lengths])
    labels = tokens.roll(-1)
    labels[ends[1:] - 1] = -100  # which cross_entropy ignores
    return tokens, labels, {"cu_seqlens": ends.int(), "max_seqlen": max(lengths)}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, VOCAB)
        self.layers = nn.ModuleList(
            SelfAttention(64, num_heads=4, num_kv_heads=2, rope=RotaryEmbedding(16))
            for _ in range(2)
        )

    def forward(self, tokens: Tensor, **packed) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden, **packed)
        return self.head(self.norm(hidden))


# %%
# Packed is as one by one
# -----------------------
#
# The loss of packed documents and its gradients are those of the documents one by one.

torch.manual_seed(0)
model = Decoder()
tokens, labels, packed = documents(8, 13, 6)


def gradients(logits: Tensor) -> list[Tensor]:
    return torch.autograd.grad(
        nn.functional.cross_entropy(logits, labels), list(model.parameters())
    )


alone = [model(text[None])[0] for text in tokens.split(packed["cu_seqlens"].diff().tolist())]
want = gradients(torch.cat(alone))
torch.testing.assert_close(gradients(model(tokens, **packed)), want)

# %%
# The gradient's kernel
# ---------------------
#
# The gradient is an op with kernels of its own, chosen as those of every op. ``explain`` shows the
# backward pass beside the forward pass, here packed bfloat16 on an H200. The guide :doc:`/training`
# says which calls have a gradient, and how to checkpoint and to compile.


def forward_and_backward(query: Tensor) -> None:
    ends = packed["cu_seqlens"]
    attended = attnops.varlen_attention(
        query, query, query, ends, ends, max_seqlen_q=13, max_seqlen_k=13, causal=True
    )
    attended.sum().backward()


query = torch.randn(27, 4, 64, dtype=torch.bfloat16, requires_grad=True)
found = attnops.explain(forward_and_backward, query, target="h200", quiet=True)
print(*found.chosen(), sep="\n")
assert [call.partition(".")[0] for call in found.chosen()] == [
    "varlen_attention",
    "varlen_attention_backward",
]

# %%
# A loop
# ------
#
# Each batch has other lengths. A model that does not attend cannot know the next token: its loss
# stays at ``log(32)``, which is 3.47.

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(81):
    tokens, labels, packed = documents(*torch.randint(4, 16, (16,)).tolist())
    loss = nn.functional.cross_entropy(model(tokens, **packed), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}: loss {loss.item():.2f}")
assert loss.item() < 1.5
