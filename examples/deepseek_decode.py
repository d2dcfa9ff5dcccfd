"""A DeepSeek-V3 decodes over pages of latents: the same tokens as before, and which kernel its layer would get on Hopper and Blackwell.

python examples/deepseek_decode.py             a tiny model with random weights; on a GPU three layers of the real size in bfloat16
python examples/deepseek_decode.py --tiny      the tiny model there too
"""

import argparse
import time

import torch

import attnops
from attnops.cache import LatentCache
from attnops.hf import tiny
from attnops.nn import LatentAttention, RotaryEmbedding

REAL = {
    "hidden_size": 7168, "intermediate_size": 4096, "num_hidden_layers": 3, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 16384, "initializer_range": 0.02,
}  # fmt: skip


def timed(model: torch.nn.Module, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, float]:
    """(tokens, milliseconds a step), the second of two runs."""
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    for _ in range(2):
        start = time.perf_counter()
        tokens = model.generate(prompt, **asked)
        if prompt.is_cuda:
            torch.cuda.synchronize()
    return tokens, (time.perf_counter() - start) / new * 1e3


def explain_layer(target: str, kernel: str) -> None:
    """Print what an attention layer of real size would run on `target`, over pages of a size that `kernel` takes: decode, then prefill."""
    rope = RotaryEmbedding(64, 10000.0, scaling="yarn", factor=40.0, interleaved=True, original_max_position=4096, mscale_all_dim=1.0)
    layer = LatentAttention(256, 128, rope=rope, dtype=torch.bfloat16).eval()
    cache = LatentCache(
        1, 64 * 512, max_requests=64, max_tokens_per_request=1024, kernels=(kernel,), workspace_bytes=128 << 20, dtype=torch.bfloat16,
        device="cpu",
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
        same = int((before == after).all(0).cumprod(0).sum()) - length
        print(f"{same} of {new} tokens as before; {before_ms:.1f} ms a step before, {after_ms:.1f} ms now, prefill shared out among them")

    for target, kernel in (("sm90", "flashmla"), ("sm100", "cutlass_mla")):
        explain_layer(target, kernel)


if __name__ == "__main__":
    main()
