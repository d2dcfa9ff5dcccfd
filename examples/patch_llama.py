"""Patch a Hugging Face model, compare it with its own eager attention, and generate.

python examples/patch_llama.py                            a tiny Llama with random weights
python examples/patch_llama.py --compile                  the same, its decode step compiled (some 20 s more)
python examples/patch_llama.py --model path/to/a/model    any causal language model of transformers
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

import attnops
from attnops.hf import tiny


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny.model("llama")
    prompt = torch.randint(3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    asked = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    eager = model.generate(prompt, **asked)

    with attnops.patch(model) as handle:
        print(handle.report())
        print(handle.verify(prompt))
        attnops.explain(model, prompt)
        if options.compile:
            model.forward = torch.compile(model.forward)
        tokens = model.generate(prompt, **asked)
        print("tokens", tokens[0, 12:].tolist(), "as eager" if torch.equal(tokens, eager) else "NOT as eager")
    print("unpatched:", model.config._attn_implementation)


if __name__ == "__main__":
    main()
