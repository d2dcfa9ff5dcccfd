"""
Quickstart
==========

Five minutes: patch a Hugging Face model, generate, ask which kernel an H200 would run, check the
numbers, and undo the patch.

.. code-block:: bash

   pip install -e ".[hf,cli]"  # from a checkout
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import attnops
from attnops.hf import tiny

# %%
# A small Llama with random weights stands for ``AutoModelForCausalLM.from_pretrained(...)``. It
# generates once before the patch, so that there are tokens to compare with.

model = tiny.model("llama")
prompt = torch.randint(
    3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0)
)
asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
before = model.generate(prompt, **asked)

# %%
# Patch and generate
# ------------------
#
# One call, no options, in place. On a GPU ``generate()`` now keeps keys and values in pages and
# runs its steps from CUDA graphs. On a CPU it runs as transformers does it, with attnops'
# attention. ``handle.took`` says which it was and why.

handle = attnops.patch(model)
tokens = model.generate(prompt, **asked)
assert torch.equal(tokens, before)
print("new tokens:", tokens[0, 12:].tolist())
print("this call: ", handle.took)

# %%
# Verify
# ------
#
# ``verify`` runs the patched model and transformers' eager attention on the same input. It raises
# where they differ by more than the dtype allows.

figures = handle.verify(prompt)
assert figures.passed
print(figures)

# %%
# Undo
# ----
#
# ``unpatch()`` gives the model back as it was.

handle.unpatch()
assert model.config._attn_implementation == "eager"

# %%
# Explain for a GPU that is not here
# ----------------------------------
#
# :func:`attnops.explain` names the kernel of every attention call, and the reason against every
# other kernel. ``target`` is another machine. The model may be on torch's meta device, where
# tensors have shapes and no memory, so a laptop answers for all of Llama 3 8B. On a GPU ``patch``
# gives kernels lengths in place of masks; ``mask="compact"`` says so on this machine.

config = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
)
with torch.device("meta"), torch.no_grad():
    large = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attnops.patch(large, mask="compact")
    found = attnops.explain(
        large, torch.zeros(1, 2048, dtype=torch.int64), target="h200", quiet=True
    )
print(found)
assert found.chosen() == ("attention.fa3",) and found.sites[0].count == 32

# %%
# The command line has the same for models by name and for config files: ``attnops explain
# llama-3-8b-shape --target h200``.
