"""
Hugging Face models
===================

How to patch a transformers model, read what the patch did, check it, compile it, and pad prompts of different lengths.
"""

import torch

import attnops
from attnops.hf import tiny

# %%
# Patch and read the report
# -------------------------
#
# A small Mistral with random weights and a sliding window stands for ``AutoModelForCausalLM.from_pretrained(...)``. The report has a line
# for every attention module: patched, or skipped with the reason. A model that attnops cannot serve is refused here, by ``patch``.

model = tiny.model("mistral")
handle = attnops.patch(model)
print(handle.report())
assert len(handle.report().patched) == 2 and not handle.report().skipped

# %%
# A model that is about to be loaded can be told by name: ``import attnops.hf``, then
# ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnops")``.
#
# Left padding
# ------------
#
# Prompts of different lengths are padded on the left, as ``generate()`` wants it. Each row gives the tokens that it gives alone.

some = torch.Generator().manual_seed(0)
prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=some) for n in (5, 12)]
ids, mask = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
for row, prompt in enumerate(prompts):
    ids[row, 12 - len(prompt) :], mask[row, 12 - len(prompt) :] = prompt, 1

asked = {"max_new_tokens": 6, "do_sample": False}
together = model.generate(ids, attention_mask=mask, **asked)[:, 12:]
for row, prompt in enumerate(prompts):
    alone = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **asked)[0, len(prompt) :]
    assert torch.equal(together[row], alone), f"row {row} has other tokens than alone"
print(together.tolist())

# %%
# What a call took
# ----------------
#
# On a GPU a plain ``generate()`` takes pages that attnops owns and CUDA graphs: breakable graphs first, which need no compiler, and
# compiled ones after some hundred steps. ``handle.took`` says how the last call ran, and why it was not faster.

print(handle.took)
assert (handle.took.cache, handle.took.decode) == ("hf", "hf")

# %%
# Verify
# ------
#
# Patched and eager logits on the same padded input, over the positions that are not padding.

print(handle.verify(ids, attention_mask=mask))

# %%
# Compile
# -------
#
# A patched model compiles without a graph break. :func:`attnops.compile_layers` compiles the layers and not the model: layers that are
# alike share their code, so compile time does not grow with depth. ``aot_eager`` keeps this page short, as it only traces; leave
# ``backend`` out for fast code.

with torch.no_grad():
    want = model(ids, attention_mask=mask).logits
    names = attnops.compile_layers(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, want)
print("compiled:", *names)

# %%
# Options
# -------
#
# Options narrow or force a choice; none is needed to be fast. ``kernel=`` forces a kernel, ``mask=`` the form of masks, ``cache=`` and
# ``decode=`` pages and graphs. Forced pages run on a CPU too.

handle.unpatch()
model = tiny.model("mistral")
with attnops.patch(model, cache="paged") as handle:
    paged = model.generate(ids, attention_mask=mask, **asked)[:, 12:]
    print(handle.took)
    assert handle.took.cache == "paged" and torch.equal(paged, together)

# %%
# A kernel that cannot run is an error that has the reasons, and no silent fallback:

try:
    with attnops.patch(model, kernel="fa3"):
        model(ids, attention_mask=mask)
except attnops.AttnopsError as error:
    print(f"{type(error).__name__}: {error}".splitlines()[0])
    print(*error.decision.refused["fa3"], sep="\n")
else:
    raise AssertionError("fa3 ran on a CPU")
