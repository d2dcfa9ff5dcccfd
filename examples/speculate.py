"""Generate with drafts that the model verifies: looked up in the text, of an assistant, and of an
object of your own. The tokens stay the same.

python examples/speculate.py                            a tiny Llama with random weights
python examples/speculate.py --model path/or/hub/name   any causal language model of transformers
                             --head path                with an EAGLE-3 head of it, too
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import attnops
from attnops.hf import tiny
from attnops.nn import DraftState, Proposal


class Again:
    """Drafts that each row repeats its last tokens."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def propose(self, state: DraftState) -> Proposal:
        back = torch.arange(self.drafts, 0, -1, device=state.tokens.device)
        at = (state.seq_lens[:, None] - back).clamp(min=0)
        return Proposal(state.tokens.gather(1, at))


def loaded(name: str | None) -> Any:
    model: Any = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto") if name else tiny.model("llama")
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--assistant", help="a smaller one with the same words; default a twin")
    parser.add_argument("--head", help="folder of an EAGLE-3 head of the model")
    parser.add_argument("--new", type=int, default=24, help="new tokens")
    options = parser.parse_args()
    model, assistant = loaded(options.model), loaded(options.assistant or options.model)
    attnops.patch(assistant)
    part = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(0))
    prompt = torch.cat([part, part], 1).to(model.device)
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": options.new,
        "min_new_tokens": options.new,
        "do_sample": False,
    }

    plain = model.generate(prompt, **asked)
    drafts: dict[str, Any] = {"lookup": "lookup", "assistant": assistant, "own": Again(4)}
    if options.head:
        drafts["head"] = options.head
    for name, draft in drafts.items():
        with attnops.patch(model, speculate=draft) as handle:
            for _ in range(2):  # the first call makes the graphs
                text = model.generate(prompt, **asked)
            # In bfloat16 a near tie may fall either way, and all tokens after it differ.
            same = (text == plain).all(0)[prompt.shape[1] :].cumprod(0).sum()
            print(f"{name}: {int(same)} of {options.new} tokens as without drafts")
            print(f"  {handle.took}")


if __name__ == "__main__":
    main()
