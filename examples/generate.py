"""Generate with a patched Hugging Face model: the report, the check against eager attention, and
the same tokens as before.

python examples/generate.py                             a tiny Llama with random weights
python examples/generate.py --model path/or/hub/name    any causal language model of transformers
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

import attnops
from attnops.hf import tiny


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--new", type=int, default=16, help="new tokens")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        if options.model
        else tiny.model("llama")
    )
    model = model.to(device)
    prompt = torch.randint(
        3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0)
    ).to(device)

    def generate() -> tuple[torch.Tensor, float]:
        """(new tokens, seconds) of the second call; the first one compiles and captures."""
        asked = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False}
        for _ in range(2):
            start = time.perf_counter()
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)[
                :, 12:
            ].tolist()
        return torch.tensor(tokens), time.perf_counter() - start

    before, seconds_before = generate()
    with attnops.patch(model) as handle:
        print(handle.report())
        print(handle.verify(prompt))
        after, seconds_after = generate()
        print(handle.took)
    # In bfloat16 a near tie may fall either way, and all tokens after it differ.
    same = int((before == after).all(0).cumprod(0).sum())
    print(f"the first {same} of {options.new} new tokens as before the patch")
    if options.model:
        print(f"{seconds_before:.2f} s before, {seconds_after:.2f} s patched")


if __name__ == "__main__":
    main()
