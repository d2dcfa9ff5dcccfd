"""A DeepSeek-V3 decodes over pages of latents: its choices and times, and which kernel its layer would get on Hopper and Blackwell.

python examples/deepseek_decode.py             a tiny model with random weights; on a GPU three layers of the real size in bfloat16
python examples/deepseek_decode.py --tiny      the tiny model there too
"""

import argparse
import time

import torch

import attnops
from attnops.cache import LatentCache
from attnops.hf import PagedLatentCache, tiny
from attnops.nn import LatentAttention, RotaryEmbedding

REAL = {
    "hidden_size": 7168, "intermediate_size": 4096, "num_hidden_layers": 3, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 16384, "initializer_range": 0.02,
}  # fmt: skip


def timed(model: torch.nn.Module, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, float]:
    """(tokens, milliseconds of a decode step: what `new` tokens take longer than one). Each is run twice, and the second run counts."""
    seconds = []
    for count in (1, 1, new, new):
        asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        start = time.perf_counter()
        tokens = model.generate(prompt, **asked)
        if prompt.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return tokens, (seconds[3] - seconds[1]) / (new - 1) * 1e3


@torch.no_grad()
def chosen(model: torch.nn.Module, cache: PagedLatentCache, text: torch.Tensor, length: int) -> torch.Tensor:
    """The tokens that the model would choose after the first `length`, `length + 1`, ... of `text`, whatever it chose before."""
    logits = [model(text[:, :length], past_key_values=cache, logits_to_keep=1).logits]
    for i in range(length, text.shape[1] - 1):
        logits.append(model(text[:, i : i + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1).argmax(-1)


def explain_layer(target: str, kernel: str) -> None:
    """Print what a layer with the heads and latents of the real one would run on `target`: decode, then prefill.

    Its pages are of a size that `kernel` takes. Which kernel runs is chosen all the same.
    """
    rope = RotaryEmbedding(64, 10000.0, scaling="yarn", factor=40.0, interleaved=True, original_max_position=4096, mscale_all_dim=1.0)
    layer = LatentAttention(256, 128, rope=rope, dtype=torch.bfloat16).eval()
    cache = LatentCache(
        1, 64 * 512, max_requests=64, max_tokens_per_request=1024, q_heads=128, kernels=(kernel,), workspace_bytes=128 << 20,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    print(f"\n{cache.page_size_choice}")
    requests = [cache.alloc(256) for _ in range(64)]
    decode = cache.batch(requests, 1)
    prefill = cache.batch(requests[:1], 512, prefix_tokens=1024)
    for batch in (decode, prefill):
        hidden = torch.zeros(batch.slots.shape[0], 256, dtype=torch.bfloat16)
        attnops.explain(layer, hidden, batch=batch, latent_pages=cache.latent_pages[0], target=target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    real = device == "cuda" and not options.tiny

    model = tiny.model("deepseek_v3", attn_implementation="sdpa", **(REAL if real else {})).to(device)
    if real:
        model = model.bfloat16()
    length, new = (8192, 32) if real else (12, 8)
    prompt = torch.randint(3, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    before, before_ms = timed(model, prompt, new)

    with attnops.patch(model, cache="paged") as handle:
        print(handle.report())
        after, after_ms = timed(model, prompt, new)
        first = int((before == after).all(0).cumprod(0).sum()) - length
        # In bfloat16 a near tie falls the one way or the other, and all that follows differs: so each step is compared by itself, too.
        same = int((chosen(model, handle.new_cache(2, length + new), before, length) == before[:, length:]).sum())
        print(f"the first {first} of {new} tokens as before; given the same text, {same} of {2 * new} choices as before")
        print(f"{before_ms:.1f} ms a decode step before, {after_ms:.1f} ms now")

    for target, kernel in (("sm90", "flashmla"), ("sm100", "cutlass_mla")):
        explain_layer(target, kernel)


if __name__ == "__main__":
    main()
