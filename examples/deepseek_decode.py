"""A DeepSeek-V3 decodes over pages of latents, with the tokens of transformers' cache; and its
layer's kernels on Hopper and Blackwell.

python examples/deepseek_decode.py             a tiny model with random weights; on a GPU three
layers of the real size in bfloat16 python examples/deepseek_decode.py --tiny      the tiny model
there, too
"""

import argparse

import torch

import attnops
from attnops.cache import LatentCache
from attnops.hf import tiny
from attnops.nn import LatentAttention, RotaryEmbedding

REAL = {
    "hidden_size": 7168,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02,
}


def explain_decode(target: str) -> None:
    """What a decode step of 64 requests runs on `target`, for a layer with the heads and latents of
    the real one."""
    layer = LatentAttention(
        256, 128, rope=RotaryEmbedding(64, interleaved=True), dtype=torch.bfloat16
    ).eval()
    cache = LatentCache(
        1,
        64 * 512,
        max_requests=64,
        max_tokens_per_request=1024,
        q_heads=128,
        kernels=("flashmla", "cutlass_mla"),
        workspace_bytes=128 << 20,
        dtype=torch.bfloat16,
        device="cpu",
    )
    batch = cache.batch([cache.alloc(256) for _ in range(64)])
    hidden, pages = torch.zeros(64, 256, dtype=torch.bfloat16), cache.latent_pages[0]
    found = attnops.explain(
        layer, hidden, batch=batch, latent_pages=pages, target=target, quiet=True
    )
    print(f"{target}, pages of {cache.page_size}:", *found.chosen())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    real = torch.cuda.is_available() and not options.tiny
    model = tiny.model("deepseek_v3", attn_implementation="sdpa", **(REAL if real else {}))
    model = model.to(
        "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16 if real else torch.float32
    )
    length, new = (8192, 32) if real else (12, 8)
    prompt = torch.randint(
        3, model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)
    ).to(model.device)
    asked = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    }
    before = model.generate(prompt, **asked)
    with attnops.patch(model, cache="paged") as handle:
        print("a layer is", handle.report().rows[0])
        after = model.generate(prompt, **asked)
    # In bfloat16 a near tie may fall either way, and all tokens after it differ.
    print(
        f"the first {int((before == after).all(0).cumprod(0).sum()) - length} of {new} new "
        "tokens as before the patch"
    )
    for target in ("sm90", "sm100"):
        explain_decode(target)


if __name__ == "__main__":
    main()
