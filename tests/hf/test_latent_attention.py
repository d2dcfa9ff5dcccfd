"""attnops.nn.LatentAttention is DeepSeek's attention: its weights load, and dense, packed and paged it gives what eager gives."""

import itertools

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from attnops.cache import LatentCache
from attnops.nn import LatentAttention, RotaryEmbedding

E, H, NOPE, ROPE, V, DC = 24, 4, 16, 8, 12, 32
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
MODELS = {
    "v3": (v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding, DeepseekV3Config, {"rope_interleave": True}),
    "v3_half": (v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding, DeepseekV3Config, {"rope_interleave": False}),
    "v2": (v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding, DeepseekV2Config, {}),
}


def made(name, q_lora_rank, bias, rope, **more):
    """(DeepSeek's module as a function of hidden states, our layer with its weights)."""
    attention, rotary, config, own = MODELS[name]
    config = config(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=q_lora_rank, kv_lora_rank=DC, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=V, attention_bias=bias, rope_parameters=dict(rope), max_position_embeddings=256, **own,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs, turn = attention(config, 0).eval().requires_grad_(False), rotary(config)
    for p in theirs.parameters():
        p.normal_(std=0.4)

    def eager(x):
        at, n = torch.arange(x.shape[0])[None], x.shape[0]
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        return theirs(hidden_states=x[None], position_embeddings=turn(x[None], at), attention_mask=mask)[0][0]

    scaled = {} if rope is PLAIN else {
        "scaling": "yarn", "factor": 4.0, "original_max_position": 64, "beta_fast": 8, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
    }  # fmt: skip
    embedding = RotaryEmbedding(ROPE, 1000.0, interleaved=name != "v3_half", **scaled)
    ours = LatentAttention(
        E, H, q_lora_rank=q_lora_rank, kv_lora_rank=DC, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, rope=embedding,
        bias=bias, **more,
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    assert ours.scale == pytest.approx(theirs.scaling)
    return eager, ours.requires_grad_(False)


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_is_eagers(name, q_lora_rank, rope):
    eager, ours = made(name, q_lora_rank, q_lora_rank is not None, rope)
    lengths = (11, 4, 7)
    sequences = [torch.randn(n, E) for n in lengths]
    want = [eager(x) for x in sequences]
    close(ours(sequences[0][None])[0], want[0])

    longest = max(lengths)
    left = torch.stack([torch.nn.functional.pad(x, (0, 0, longest - len(x), 0)) for x in sequences])
    start = torch.tensor([longest - n for n in lengths], dtype=torch.int32)
    at = (torch.arange(longest) - start[:, None]).clamp(min=0)
    for got, n, w in zip(ours(left, kv_start=start, positions=at), lengths, want, strict=True):
        close(got[longest - n :], w)

    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    close(ours(torch.cat(sequences), cu_seqlens=cu, max_seqlen=longest), torch.cat(want))

    for absorb, prefix_tokens in ((0, 5), (99, None)):
        ours.absorb_up_to = absorb
        cache = LatentCache(
            1, 64, latent_dim=DC, rope_dim=ROPE, max_requests=3, max_tokens_per_request=16, page_size=4, dtype=torch.float32, device="cpu"
        )
        ids = [cache.alloc() for _ in lengths]
        steps = [(3, 1, 2), (5, 1, 3), (1, 1, 1), (2, 1, 1)]  # prefill, chunked prefill beside a decode, decode, verify
        done = [0, 0, 0]
        for counts in steps:
            x = torch.cat([s[d : d + n] for s, d, n in zip(sequences, done, counts, strict=True)])
            got = ours(x, batch=cache.batch(ids, counts, prefix_tokens=prefix_tokens), latent_pages=cache.latent_pages[0])
            close(got, torch.cat([w[d : d + n] for w, d, n in zip(want, done, counts, strict=True)]))
            done = [d + n for d, n in zip(done, counts, strict=True)]
        assert tuple(done) == lengths
