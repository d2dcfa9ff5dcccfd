"""
Hugging Face models
===================

How to patch a transformers model, read what the patch did, check it, compile it, and pad prompts of
different lengths.
"""

import torch

import attnops
from attnops.hf import tiny

# %%
# Patch and read the report
# -------------------------
#
# A small Mistral with random weights and a sliding window stands for
# ``AutoModelForCausalLM.from_pretrained(...)``. The report has a line for every attention module:
# patched, or skipped with the reason. A model that attnops cannot serve is refused here, by
# ``patch``.

model = tiny.model("mistral")
handle = attnops.patch(model)
print(handle.report())
assert len(handle.report().patched) == 2 and not handle.report().skipped

# %%
# After ``import attnops`` transformers knows the name ``attnops``, too, for
# ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnops")``.
#
# Left padding
# ------------
#
# ``generate()`` wants prompts of different lengths padded on the left. Each row gets the tokens
# that it gets alone.

some = torch.Generator().manual_seed(0)
prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=some) for n in (5, 12)]
ids, mask = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
for row, prompt in enumerate(prompts):
    ids[row, 12 - len(prompt) :], mask[row, 12 - len(prompt) :] = prompt, 1

asked = {"max_new_tokens": 6, "do_sample": False}
together = model.generate(ids, attention_mask=mask, **asked)[:, 12:]
for row, prompt in enumerate(prompts):
    alone = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **asked)[
        0, len(prompt) :
    ]
    assert torch.equal(together[row], alone), f"row {row} has other tokens than alone"
print(together.tolist())

# %%
# What a call took
# ----------------
#
# On a GPU, a plain ``generate()`` uses pages that attnops owns and CUDA graphs: first breakable
# graphs, which need no compiler, and after some hundred steps compiled graphs. ``handle.took`` says
# how the last call ran, and why it was not faster.

print(handle.took)
assert (handle.took.cache, handle.took.decode) == ("hf", "hf")

# %%
# Verify
# ------
#
# ``verify`` compares patched and eager logits on the same padded input, at the positions that are
# not padding.

print(handle.verify(ids, attention_mask=mask))

# %%
# Compile
# -------
#
# :func:`attnops.compile_layers` compiles each layer of a model, without a graph break. Layers that
# are alike share their code, so compile time does not grow with depth. The backend ``aot_eager``
# only traces, which keeps this page quick; leave ``backend`` out for fast code.

with torch.no_grad():
    want = model(ids, attention_mask=mask).logits
    names = attnops.compile_layers(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, want)
print("compiled:", *names)

# %%
# Options
# -------
#
# The defaults are the fast path. Options narrow or force a choice: ``kernel=`` a kernel, ``mask=``
# the form of masks, ``cache=`` and ``decode=`` pages and graphs. Forced pages run on a CPU too.

handle.unpatch()
model = tiny.model("mistral")
with attnops.patch(model, cache="paged") as handle:
    paged = model.generate(ids, attention_mask=mask, **asked)[:, 12:]
    print(handle.took)
    assert handle.took.cache == "paged" and torch.equal(paged, together)

# %%
# A forced kernel that cannot run raises an error with the reasons. No other kernel runs in its
# place:

try:
    with attnops.patch(model, kernel="fa3"):
        model(ids, attention_mask=mask)
except attnops.AttnopsError as error:
    print(f"{type(error).__name__}: {error}".splitlines()[0])
    print(*error.decision.refused["fa3"], sep="\n")
else:
    raise AssertionError("fa3 ran on a CPU")
