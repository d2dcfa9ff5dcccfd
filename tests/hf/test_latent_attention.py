"""attnops.nn.LatentAttention is DeepSeek's attention: its weights load, and it gives what eager
gives."""

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from attnops.nn import LatentAttention, RotaryEmbedding

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
MODELS = {
    "v3": (
        v3.DeepseekV3Attention,
        v3.DeepseekV3RotaryEmbedding,
        DeepseekV3Config,
        {"rope_interleave": True},
    ),
    "v3_half": (
        v3.DeepseekV3Attention,
        v3.DeepseekV3RotaryEmbedding,
        DeepseekV3Config,
        {"rope_interleave": False},
    ),
    "v2": (v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding, DeepseekV2Config, {}),
}


SIZES = {
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
SCALED = {"scaling": "yarn", "original_max_position": 64}
SCALED |= {
    name: YARN[name] for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_weights_load_and_numbers_are_eagers(name, q_lora_rank, rope):
    attention, rotary, config, own = MODELS[name]
    sizes, bias = {**SIZES, "q_lora_rank": q_lora_rank}, q_lora_rank is not None
    config = config(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=bias,
        rope_parameters=dict(rope),
        max_position_embeddings=256,
        **sizes,
        **own,
    )
    config._attn_implementation = "eager"
    theirs, turn = attention(config, 0).eval(), rotary(config)
    for p in theirs.parameters():
        p.normal_(std=0.4)
    embedding = RotaryEmbedding(
        8, 1000.0, interleaved=name != "v3_half", **({} if rope is PLAIN else SCALED)
    )
    ours = LatentAttention(24, 4, rope=embedding, bias=bias, **sizes)
    ours.load_state_dict(theirs.state_dict())
    assert ours.scale == pytest.approx(theirs.scaling)
    x, at = torch.randn(2, 11, 24), torch.arange(11).expand(2, 11)
    mask = torch.full((1, 1, 11, 11), float("-inf")).triu(1)
    want = theirs(hidden_states=x, position_embeddings=turn(x, at), attention_mask=mask)[0]
    torch.testing.assert_close(ours(x), want, atol=1e-4, rtol=1e-5)
