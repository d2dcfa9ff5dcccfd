"""Chat in the terminal with a patched model: answers are streamed, and one cache of pages is kept
between the turns.

python examples/chat.py "Hello" "And again"             say these two to a tiny model with random
weights, which answers nonsense python examples/chat.py --model path/or/hub/name        a chat model
of transformers; type, and end with an empty line
"""

import argparse
from itertools import takewhile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import attnops
from attnops.hf import tiny


class Ascii:
    """A tokenizer for the tiny model, whose 128 tokens are the characters of ASCII."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], **_: Any
    ) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[ord(c) % 128 for m in messages for c in f"{m['content']}\n"]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(
            chr(i if 32 <= i < 127 else 0x2400 + i) for i in ids
        )  # pictures of control characters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("say", nargs="*", help="turns; none: read from the terminal")
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer at most")
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of the whole conversation at most"
    )
    options = parser.parse_args()
    model: Any = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        if options.model
        else tiny.model("llama")
    )
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model) if options.model else Ascii()

    handle = attnops.patch(model, cache="paged")  # on a GPU the steps run in CUDA graphs, too
    cache = handle.new_cache(max_batch=1, max_length=options.length)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    held: list[int] = []  # the text whose keys and values are in the cache
    for text in options.say or iter(lambda: input("> "), ""):
        messages.append({"role": "user", "content": text})
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).items()
        inputs = {name: value.to(model.device) for name, value in given}
        ids = inputs["input_ids"][0].tolist()
        # A tokenizer may write an earlier answer in other tokens than the model did. The cache
        # keeps what is the same.
        known = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, held, strict=False))
        )
        cache.crop(known - len(held))  # a negative number of tokens to forget, or none
        tokens = model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=options.new,
            do_sample=False,
            streamer=streamer,
        )[0].tolist()
        held = tokens[:-1]
        messages.append(
            {
                "role": "assistant",
                "content": tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True),
            }
        )
        print(f"({known} of {len(ids)} tokens were in the cache)")


if __name__ == "__main__":
    main()
