"""A conversation of several turns over one cache: transformers' own, then pages that attnops owns. Tokens a second of each.

python examples/hf_generate.py                            a small gpt-oss with random weights: windows, sinks and experts
python examples/hf_generate.py --compile                  the same, decode compiled as generate() does it for static caches
python examples/hf_generate.py --decode piecewise         on a GPU: compiled CUDA graphs from the first step on (docs/graphs.md)
python examples/hf_generate.py --model path/to/a/model    any causal language model of transformers
"""

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache

import attnops
from attnops.hf import tiny

TURNS = (48, 20, 36)
"""Tokens that are said to the model in each turn. There is no tokenizer here: they are random."""


def converse(model: Any, cache: Any, said: list[torch.Tensor], new: int, **asked: Any) -> tuple[torch.Tensor, float]:
    """(the whole conversation, answered tokens a second after the first turn). Each turn is given all that was said before."""
    text, answered, seconds = said[0][:, :0], 0, 0.0
    for turn, more in enumerate(said):
        text = torch.cat([text, more], 1)
        start = time.perf_counter()
        text = model.generate(
            text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            **asked,
        )  # fmt: skip
        if text.is_cuda:
            torch.cuda.synchronize()
        if turn:
            answered, seconds = answered + new * text.shape[0], seconds + time.perf_counter() - start
    return text, answered / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a small gpt-oss")
    parser.add_argument("--rows", type=int, default=2, help="conversations at a time")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--decode", choices=("auto", "hf", "piecewise", "breakable"), default="auto")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device)
    else:
        model = tiny.model("gpt-oss-small", sliding_window=64).to(device)
    some = torch.Generator().manual_seed(0)
    said = [torch.randint(3, model.config.vocab_size, (options.rows, n), generator=some).to(device) for n in TURNS]
    length = sum(TURNS) + len(TURNS) * options.new
    asked: dict[str, Any] = {}
    if options.compile:
        how = CompileConfig(fullgraph=True, mode="reduce-overhead" if device == "cuda" else None)
        how._compile_all_devices = True  # on CPUs generate() would not
        asked["compile_config"] = how

    def own() -> Any:
        return StaticCache(config=model.config, max_cache_len=length) if options.compile else DynamicCache(config=model.config)

    converse(model, own(), said, options.new, **asked)  # what is compiled is compiled here
    before, speed_before = converse(model, own(), said, options.new, **asked)
    with attnops.patch(model, cache="paged", decode=options.decode) as handle:
        print(handle.report())
        cache: Any = handle.new_cache(options.rows, length)
        converse(model, cache, said, options.new, **asked)
        cache.reset()
        after, speed_after = converse(model, cache, said, options.new, **asked)
        if handle.graphs is not None:
            print(handle.graphs.report())

    first = int((before == after).all(0).cumprod(0).sum())
    print(f"{options.rows} conversations of {len(TURNS)} turns, {length} tokens each: the first {first} of {length} as before")
    print(f"{speed_before:.0f} tokens a second over transformers' cache, {speed_after:.0f} over pages")


if __name__ == "__main__":
    main()
