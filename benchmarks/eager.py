"""Eager generate() of a Llama-3-8B shape with random weights: transformers beside the same model under attnops.patch.

    python benchmarks/eager.py [--device cpu|cuda] [--tiny] [--turns 9]

Both take turns in one process. generate: tokens a second of whole calls, the prompt included. step_ms: one decode step, the median of
turns of eight. ratio: patched over stock time. off: the largest difference of the logits over the largest logit of stock, over a
generated text; a token dropped or a wrong head gives several times LIMIT.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import torch
from common import arguments, measure_all
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import attnops
from attnops.configs import SHAPES
from attnops.tune.clock import seconds

FULL = SHAPES["llama-3-8b-shape"]
TINY = {
    **FULL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip

BATCHES, NEW, STEPS = (1, 8), 48, 8
LIMIT = 0.06
"""Two bfloat16 models whose products are summed in another order differ by 0.044 and 0.0448 on an H200."""


def in_turns(model: Any, run: Any, turns: int) -> dict[str, float]:
    """Median seconds of `run()`, stock and patched."""
    times: dict[str, list[float]] = {"stock": [], "patched": []}
    for turn in range(turns + 1):  # the first turn warms up
        for name in sorted(times, reverse=turn % 2 == 0):
            with ExitStack() as stack:
                if name == "patched":
                    stack.enter_context(attnops.patch(model))
                found = run()
            times[name] += [found] * (turn > 0)
    return {name: statistics.median(found) for name, found in times.items()}


def compared(times: dict[str, float], digits: int = 4) -> dict[str, float]:
    return {**{n: round(t, 6) for n, t in times.items()}, "ratio": round(times["patched"] / times["stock"], digits)}


def measured(model: Any, batch: int, prompt: int, turns: int) -> dict[str, Any]:
    ids = torch.randint(3, 500, (batch, prompt), device=model.device)

    def generate() -> float:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))

    def steps() -> float:
        cache, token = DynamicCache(config=model.config), ids[:, :1]
        model(ids, past_key_values=cache)
        for _ in range(2):
            model(token, past_key_values=cache)
        return seconds(lambda: [model(token, past_key_values=cache) for _ in range(STEPS)]) / STEPS * 1e3

    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    want = logits(model, text, prompt)
    with attnops.patch(model):
        off = float((logits(model, text, prompt) - want).abs().max() / want.abs().max())
    if not off < LIMIT:
        return {"off": round(off, 5), "failed": f"logits are off by {off:.3g}, allowed {LIMIT}"}
    whole = in_turns(model, generate, turns)
    return {
        "off": round(off, 5),
        "generate_s": compared(whole),
        "tokens_per_s": {name: round(batch * NEW / found, 2) for name, found in whole.items()},
        "step_ms": compared(in_turns(model, steps, 2 * turns)),
    }


def logits(model: Any, text: Tensor, prompt: int) -> Tensor:
    """Of a prompt and, token by token, of the text behind it."""
    cache = DynamicCache(config=model.config)
    parts = [model(text[:, :prompt], past_key_values=cache).logits[:, -1:]]
    parts += [model(text[:, at : at + 1], past_key_values=cache).logits for at in range(prompt, text.shape[1])]
    return torch.cat(parts, 1).float()


def main() -> int:
    parser = arguments(__doc__, budget_s=200.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    shape = dict(TINY if given.tiny else FULL)
    config = LlamaConfig.from_dict({**shape, "eos_token_id": None, "pad_token_id": 0})
    with torch.device(given.device):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()
    prompts = (32,) if given.tiny else (1024, 256)
    jobs = [
        ("cases", f"{batch}x{prompt}", lambda batch=batch, prompt=prompt: measured(model, batch, prompt, given.turns))
        for prompt in prompts
        for batch in BATCHES
    ]
    return measure_all(jobs, {"new_tokens": NEW, "model": shape}, "eager.json", given.device, given.budget_s)


if __name__ == "__main__":
    raise SystemExit(main())
