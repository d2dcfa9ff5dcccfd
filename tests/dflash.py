"""DFlash's draft as its paper and its public code have it, in plain torch, and checkpoints with the
names and shapes of public ones."""

import math

import torch

from tests.formula import plain
from tests.modules import turned

SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 50,
}


def words_of(**more):
    """A config as z-lab/Qwen3-8B-DFlash-b16 has it. more: other words."""
    layers = more.get("num_hidden_layers", 2)
    block = {"mask_token_id": 7, "target_layer_ids": [1, 2, 0], **more.pop("dflash_config", {})}
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": 5,
        "dflash_config": block,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers,
        "num_hidden_layers": layers,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "sliding_window": None,
        "use_sliding_window": False,
        **SIZES,
        **more,
    }


def shapes_of(words):
    """The tensors of a checkpoint: embeddings and the last linear are the target's."""
    width, head_dim = words["hidden_size"], words["head_dim"]
    inner, states = words["intermediate_size"], len(words["dflash_config"]["target_layer_ids"])
    heads, kv_heads = words["num_attention_heads"], words["num_key_value_heads"]
    found = {"fc.weight": (width, states * width), "hidden_norm.weight": (width,)}
    for number in range(words["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (width, heads * head_dim),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
        }
        for name, count in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
            own[f"self_attn.{name}_proj.weight"] = (count * head_dim, width)
            if words["attention_bias"]:
                own[f"self_attn.{name}_proj.bias"] = (count * head_dim,)
        if words["attention_bias"]:
            own["self_attn.o_proj.bias"] = (width,)
        found |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    return found | {"norm.weight": (width,)}


def checkpoint(words, dtype=torch.float64):
    """Random tensors."""
    return {
        name: torch.randn(shape, dtype=dtype) / math.sqrt(shape[-1])
        for name, shape in shapes_of(words).items()
    }


def published(words, tensors, embeddings, states, last):
    """`[N - 1, E]`, behind one text: embeddings `[V, E]`, states `[L, W]` of all tokens but the
    last one, whose id is `last`."""
    w, own = tensors, words["dflash_config"]
    head_dim, layers = words["head_dim"], words["num_hidden_layers"]
    turns = words["rope_theta"] ** (-torch.arange(0, head_dim, 2).double() / head_dim)

    def rms(x, name):
        wide = (x.pow(2).mean(-1, keepdim=True) + words["rms_norm_eps"]).sqrt()
        return x / wide * w[f"{name}.weight"]

    context = rms(states @ w["fc.weight"].T, "hidden_norm")
    ids = [int(last), *[own["mask_token_id"]] * (words["block_size"] - 1)]
    hidden = embeddings[ids] * own.get("input_embedding_scale", 1.0)
    at = torch.arange(len(states) + len(ids))
    for number, kind in zip(range(layers), words["layer_types"], strict=True):
        layer = f"layers.{number}"
        x = rms(hidden, f"{layer}.input_layernorm")
        q, k, v = (
            (read @ w[f"{layer}.self_attn.{name}_proj.weight"].T)
            .add(w.get(f"{layer}.self_attn.{name}_proj.bias", 0))
            .unflatten(-1, (-1, head_dim))
            for name, read in {
                "q": x,
                "k": torch.cat([context, x]),
                "v": torch.cat([context, x]),
            }.items()
        )
        q, k = (rms(y, f"{layer}.self_attn.{name}_norm") for y, name in ((q, "q"), (k, "k")))
        sliding = kind == "sliding_attention"
        causal = words.get("is_causal", sliding)
        seen = {"causal": causal, "scale": head_dim**-0.5}
        if sliding:
            seen |= dict.fromkeys(("window_left", "window_right"), words["sliding_window"] - 1)
        q, k = turned(q, at[len(states) :], turns).to(v), turned(k, at, turns).to(v)
        out = plain(q, k, v, None, None, seen)[0].flatten(1)
        out = out @ w[f"{layer}.self_attn.o_proj.weight"].T
        hidden = hidden + out + w.get(f"{layer}.self_attn.o_proj.bias", 0)
        x = rms(hidden, f"{layer}.post_attention_layernorm")
        gate, up = (x @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        mixed = gate * torch.sigmoid(gate) * up
        hidden = hidden + mixed @ w[f"{layer}.mlp.down_proj.weight"].T
    return rms(hidden[1:], "norm")
