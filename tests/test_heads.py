"""Draft heads by their published formulas in float64, with the tensors of public checkpoints."""

import importlib
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnops.cache import PagedCache
from attnops.nn import Eagle3Head, MTPLayer, SelfAttention
from attnops.nn.heads import tensors_of
from tests.formula import plain
from tests.modules import close, pages_of, poisoned, refused, turned

E, ET, HQ, HKV, D, INNER, V, VD = 24, 20, 4, 2, 8, 40, 50, 12
EPS, THETA = 1e-5, 500.0
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": E,
    "target_hidden_size": ET,
    "num_attention_heads": HQ,
    "num_key_value_heads": HKV,
    "num_hidden_layers": 1,
    "head_dim": D,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "rope_scaling": None,
    "vocab_size": V,
    "draft_vocab_size": VD,
}
SHAPES = {
    "fc.weight": (E, 3 * ET),
    "midlayer.hidden_norm.weight": (E,),
    "midlayer.input_layernorm.weight": (E,),
    "midlayer.post_attention_layernorm.weight": (E,),
    "midlayer.self_attn.q_proj.weight": (HQ * D, 2 * E),
    "midlayer.self_attn.k_proj.weight": (HKV * D, 2 * E),
    "midlayer.self_attn.v_proj.weight": (HKV * D, 2 * E),
    "midlayer.self_attn.o_proj.weight": (E, HQ * D),
    "midlayer.mlp.gate_proj.weight": (INNER, E),
    "midlayer.mlp.up_proj.weight": (INNER, E),
    "midlayer.mlp.down_proj.weight": (E, INNER),
    "norm.weight": (E,),
    "lm_head.weight": (VD, E),
}
"""The tensors of the EAGLE-3 heads of SafeAILab, SpecForge and others, beside d2t and t2d."""
WORDS = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:VD].sort().values
"""The target's ids of the draft words."""


def checkpoint(**shapes):
    """Random tensors, and the maps of the vocabularies: d2t is what a word's id grows by."""
    made = {
        name: torch.randn(shape, dtype=torch.float64) / math.sqrt(shape[-1])
        for name, shape in {**SHAPES, **shapes}.items()
    }
    t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, WORDS, True)
    return made | {"d2t": WORDS - torch.arange(VD), "t2d": t2d}


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def published(tensors, embeddings, hidden, normed_residual=False):
    """EAGLE-3's layer over one text: embeddings `[T, E]`, hidden `[T, E]` -> logits, hidden."""
    w = {name.removeprefix("midlayer."): t for name, t in tensors.items()}
    normed = rms(hidden, w["hidden_norm.weight"])
    both = torch.cat([rms(embeddings, w["input_layernorm.weight"]), normed], -1)
    q, k, v = (
        (both @ w[f"self_attn.{x}_proj.weight"].T + w.get(f"self_attn.{x}_proj.bias", 0)).view(
            len(both), -1, D
        )
        for x in "qkv"
    )
    at = torch.arange(len(both))
    turns = THETA ** (-torch.arange(0, D, 2).double() / D)
    out = plain(
        turned(q, at, turns),
        turned(k, at, turns),
        v,
        None,
        None,
        {"causal": True, "scale": D**-0.5},
    )[0]
    h = normed if normed_residual else hidden
    h = h + out.flatten(1) @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)
    x = rms(h, w["post_attention_layernorm.weight"])
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    h = h + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms(h, w["norm.weight"]) @ w["lm_head.weight"].T, h


KINDS = {
    "EAGLE": ({}, {}, "midlayer."),
    "own embeddings": ({}, {"embed_tokens.weight": (V, E)}, "midlayer."),
    "speculators": ({"norm_before_residual": True}, {}, "layers.0."),
    "bias": (
        {"attention_bias": True},
        {
            f"midlayer.self_attn.{x}_proj.bias": (n,)
            for x, n in {"q": HQ * D, "k": HKV * D, "v": HKV * D, "o": E}.items()
        },
        "midlayer.",
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_the_published_formula(kind, compiled):
    config, shapes, layer = KINDS[kind]
    tensors = checkpoint(**shapes)
    given = {name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}
    if kind == "speculators":
        sizes = {name: word for name, word in CONFIG.items() if name != "draft_vocab_size"}
        config = {"draft_vocab_size": VD, "transformer_layer_config": sizes, **config}
    else:
        config = {**CONFIG, **config}
    head = Eagle3Head.from_state_dict(config, given)
    run = torch.compile(head, backend="aot_eager", fullgraph=True) if compiled else head
    states = torch.randn(7, 3 * ET).double()
    tokens = torch.randint(V, (7,)) if kind == "own embeddings" else torch.randn(7, E).double()
    embeddings = tensors["embed_tokens.weight"][tokens] if kind == "own embeddings" else tokens
    want = published(tensors, embeddings, states @ tensors["fc.weight"].T, kind == "speculators")
    for got, expected in zip(run(tokens[None], states[None]), want, strict=True):
        close(got[0], expected, 1e-9)
    rows = torch.tensor([6, 2])
    for got, expected in zip(run(tokens[None], states[None], rows=rows), want, strict=True):
        close(got, expected[rows], 1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_draft_steps_run_over_pages(compiled):
    """Two texts of 5 and 3 tokens, then three steps with the head's own states and words."""
    tensors = checkpoint(**{"embed_tokens.weight": (V, E)})
    head = Eagle3Head.from_state_dict(CONFIG, tensors)
    run = torch.compile(head, backend="aot_eager", fullgraph=True) if compiled else head
    sizes = {"max_requests": 2, "max_pages_per_request": 5, "dtype": torch.float64, "device": "cpu"}
    cache = poisoned(PagedCache(1, 11, 2, HKV, D, **sizes))
    requests, lengths = [cache.alloc(), cache.alloc()], [5, 3]
    texts = [torch.randint(V, (n,)) for n in lengths]
    states = torch.randn(sum(lengths), 3 * ET).double()
    read = list((states @ tensors["fc.weight"].T).split(lengths))
    tokens, hidden, rows, new = torch.cat(texts), states, torch.tensor([4, 7]), lengths
    for _ in range(4):
        batch = cache.batch(requests, new)
        with torch.no_grad():
            logits, hidden = run(tokens, hidden, rows=rows, batch=batch, **pages_of(cache))
        for row, (text, h) in enumerate(zip(texts, read, strict=True)):
            want, own = published(tensors, tensors["embed_tokens.weight"][text], h)
            close(logits[row], want[-1], 1e-9)
            close(hidden[row], own[-1], 1e-9)
        words = logits.argmax(-1)
        tokens, rows, new = head.to_target(words), None, 1
        assert torch.equal(tokens, WORDS[words])
        texts = [torch.cat([text, tokens[i, None]]) for i, text in enumerate(texts)]
        read = [torch.cat([h, hidden[i, None]]) for i, h in enumerate(read)]


def test_words_of_the_head_are_words_of_the_target():
    head = Eagle3Head.from_state_dict(CONFIG, checkpoint())
    mine = torch.rand(2, 3, VD)
    whole = head.over_target(mine)
    assert torch.equal(whole[..., WORDS], mine)
    close(whole.sum(-1), mine.sum(-1))
    unsorted = checkpoint() | {"d2t": WORDS.flip(0) - torch.arange(VD)}
    head = Eagle3Head.from_state_dict(CONFIG, unsorted)
    assert torch.equal(head.to_target(torch.arange(VD)), WORDS.flip(0))
    same = checkpoint(**{"lm_head.weight": (V, E)})
    del same["d2t"], same["t2d"]
    head = Eagle3Head.from_state_dict(CONFIG | {"draft_vocab_size": None}, same)
    assert torch.equal(head.to_target(torch.arange(V)), torch.arange(V))


def test_words_that_a_config_may_lack():
    absent = "head_dim", "target_hidden_size"
    head = Eagle3Head({name: word for name, word in CONFIG.items() if name not in absent})
    assert head.midlayer.self_attn.k_proj.out_features == HKV * (E // HQ)
    assert head.target_hidden_size == E and head.states is None
    states = {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}
    for config in (states, {"eagle_config": states}):
        assert Eagle3Head(CONFIG | config).states == (1, 2, 5)


def test_a_target_lends_its_embeddings():
    target = nn.Embedding(V, E, dtype=torch.float32)
    config, tensors = CONFIG | {"target_hidden_size": E}, checkpoint(**{"fc.weight": (E, 3 * E)})
    head = Eagle3Head.from_state_dict(config, tensors, target)
    assert head.embed_tokens is target and head.fc.weight.dtype == torch.float32
    states, tokens = torch.randn(1, 4, 3 * E), torch.randint(V, (1, 4))
    for got, want in zip(head(tokens, states), head(target(tokens), states), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_folder_is_a_checkpoint(form, tmp_path):
    tensors = checkpoint()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if form == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save = pytest.importorskip("safetensors.torch").save_file
        save(tensors, tmp_path / "model.safetensors")
    head = Eagle3Head.from_folder(tmp_path)
    found = head.state_dict()
    assert found.keys() == tensors.keys() - {"t2d"}
    assert all(torch.equal(found[name], tensors[name]) for name in found)


def rope(**scaling):
    return lambda: Eagle3Head(CONFIG | {"rope_scaling": scaling})


def test_the_rotation_is_that_of_the_config():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    at, like = torch.arange(9), torch.zeros(1, dtype=torch.float64)
    yarn = {**llama3, "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}
    plainly, linear, slow, far = (
        head().midlayer.self_attn.rope.cos_sin(at, like)[1]
        for head in (
            lambda: Eagle3Head(CONFIG),
            rope(type="linear", factor=2.0),
            rope(**llama3),
            rope(**yarn),
        )
    )
    turns = THETA ** (-torch.arange(0, D, 2).double() / D)
    close(plainly, torch.sin(at[:, None] * turns))
    close(linear, torch.sin(at[:, None] / 2 * turns))
    # The fastest pair keeps its turns. The slowest is `factor` times slower.
    close(slow[:, 0], plainly[:, 0])
    close(slow[:, -1], torch.sin(at * turns[-1] / 8))
    close(far[:, -1], torch.sin(at * turns[-1] / 4) * 1.25)
    newer = {"rope_parameters": {**llama3, "rope_theta": THETA}, "rope_theta": None}
    again = Eagle3Head(CONFIG | newer).midlayer.self_attn.rope
    assert torch.equal(again.cos_sin(at, like)[1], slow)


def loaded(drop=(), config=None, target=None, **more):
    tensors = {name: t for name, t in checkpoint().items() if name not in drop}
    return lambda: Eagle3Head.from_state_dict(CONFIG | (config or {}), tensors | more, target)


REFUSED = {
    "tensors: got no fc.weight, norm.weight, want all 14 of": loaded(["fc.weight", "norm.weight"]),
    "tensors: got no d2t, want all 14 of": loaded(["d2t"]),
    "tensors: got input_norm.weight, want only the 14 of": loaded(
        **{"input_norm.weight": torch.ones(3 * ET)}
    ),
    "lm_head.weight.shape: got (3, 24), want (12, 24), by config": loaded(
        **{"lm_head.weight": torch.ones(3, E)}
    ),
    "d2t: got ids from 99 to 110, want i + d2t[i] between 0 and 49": loaded(
        d2t=torch.full((VD,), 99)
    ),
    "t2d: got other words, want True at": loaded(t2d=torch.ones(V, dtype=torch.bool)),
    "config.vocab_size: got 50, want 51, the rows of": loaded(target=nn.Embedding(V + 1, ET)),
    "hidden size of the target in the config: got 20, want 24, the width": loaded(
        target=nn.Embedding(V, E)
    ),
    "config.num_hidden_layers: got 2, want 1": loaded(config={"num_hidden_layers": 2}),
    "config.hidden_act: got 'gelu', want 'silu'": loaded(config={"hidden_act": "gelu"}),
    "config.hidden_size: got None, want an int >= 1": loaded(config={"hidden_size": None}),
    "config.hidden_size: got 60, want another number than": loaded(config={"hidden_size": 60}),
    "config.partial_rotary_factor: got 0.5, want 1.0": loaded(
        config={"partial_rotary_factor": 0.5}
    ),
    "config.rope_scaling: got {'type': 'dynamic'}, want rope_type of": rope(type="dynamic"),
    "config.rope_scaling: got {'mrope_section': [1]}, want rope_type of": rope(mrope_section=[1]),
    "folder: got nowhere, want the folder of a checkpoint": lambda: Eagle3Head.from_folder(
        "nowhere"
    ),
    "tokens: got ids of torch.int64, want embeddings, because neither": lambda: loaded()()(
        torch.zeros(1, 2).long(), torch.zeros(1, 2, E)
    ),
    "hidden.shape: got (1, 3, 24), want (1, 2, 24), or 60 numbers a token": lambda: loaded()()(
        torch.zeros(1, 2, E).double(), torch.zeros(1, 3, E).double()
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_by_name(text):
    refused(REFUSED[text], text)


# A layer that predicts one token more -------------------------------------------------------------

LAYERS, EXPERTS = 3, 4
MTP = {"hidden_size": E, "vocab_size": V, "num_hidden_layers": LAYERS, "rms_norm_eps": EPS}
PREFIX = f"model.layers.{LAYERS}."
MTP_SHAPES = {
    "enorm.weight": (E,),
    "hnorm.weight": (E,),
    "eh_proj.weight": (E, 2 * E),
    "embed_tokens.weight": (V, E),
    "shared_head.norm.weight": (E,),
    "shared_head.head.weight": (V, E),
}
MIXTURE = {
    "input_layernorm.weight": (E,),
    "post_attention_layernorm.weight": (E,),
    "mlp.gate.weight": (EXPERTS, E),
    "mlp.gate.e_score_correction_bias": (EXPERTS,),
    **{f"mlp.shared_experts.{x}_proj.weight": (16, E) for x in ("gate", "up")},
    "mlp.shared_experts.down_proj.weight": (E, 16),
    **{f"mlp.experts.{e}.{x}_proj.weight": (16, E) for e in range(EXPERTS) for x in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (E, 16) for e in range(EXPERTS)},
}
SIZES = {
    "intermediate_size": INNER,
    "moe_intermediate_size": 16,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": HQ,
    "attn_implementation": "sdpa",
}
FAMILIES = {
    "glm4_moe": (
        "Glm4Moe",
        {"num_key_value_heads": HKV, "head_dim": D, "attention_bias": True},
        {
            "self_attn.o_proj.weight": (E, HQ * D),
            **{
                f"self_attn.{x}_proj.{kind}": (n * D, E)[: 2 if kind == "weight" else 1]
                for x, n in {"q": HQ, "k": HKV, "v": HKV}.items()
                for kind in ("weight", "bias")
            },
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": HQ,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": D // 2,
            "v_head_dim": 8,
        },
        {
            "self_attn.q_a_proj.weight": (12, E),
            "self_attn.q_a_layernorm.weight": (12,),
            "self_attn.q_b_proj.weight": (HQ * 12, 12),
            "self_attn.kv_a_proj_with_mqa.weight": (16 + D // 2, E),
            "self_attn.kv_a_layernorm.weight": (16,),
            "self_attn.kv_b_proj.weight": (HQ * 16, 16),
            "self_attn.o_proj.weight": (E, HQ * 8),
        },
    ),
}
"""The tensors of the layer `num_hidden_layers` in GLM-4.5 and DeepSeek-V3, beside MTP_SHAPES."""

OURS = {f"{x}_proj.weight": (n * D, E) for x, n in {"q": HQ, "k": HKV, "v": HKV}.items()}
OURS["o_proj.weight"] = (E, HQ * D)
"""The tensors of a SelfAttention."""


def mtp_checkpoint(shapes):
    made = {
        PREFIX + name: torch.randn(shape, dtype=torch.float64) / math.sqrt(shape[-1])
        for name, shape in {**MTP_SHAPES, **shapes}.items()
    }
    return made | {"model.layers.0.input_layernorm.weight": torch.ones(E)}


def published_mtp(tensors, layer, tokens, hidden):
    """Equations 21 to 23 of DeepSeek-V3: logits and the state that a further layer reads."""
    w = {name.removeprefix(PREFIX): t for name, t in tensors.items()}
    embeddings = rms(w["embed_tokens.weight"][tokens], w["enorm.weight"])
    both = torch.cat([embeddings, rms(hidden, w["hnorm.weight"])], -1)
    out = rms(layer(both @ w["eh_proj.weight"].T), w["shared_head.norm.weight"])
    return out @ w["shared_head.head.weight"].T, out


def layer_of(family):
    """transformers' decoder layer behind the last one, without memory, and what it is called
    with: no rotation."""
    pytest.importorskip("transformers")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name, more, shapes = FAMILIES[family]
    config = getattr(modeling, f"{name}Config")(**MTP, **SIZES, **more)
    with torch.device("meta"):
        layer = getattr(modeling, f"{name}DecoderLayer")(config, LAYERS)
    turned_by = (torch.ones(1, 5, D // 2).double(), torch.zeros(1, 5, D // 2).double())
    return layer, {**MIXTURE, **shapes}, {"position_embeddings": turned_by}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_the_tensors_of_a_public_checkpoint(family):
    layer, shapes, how = layer_of(family)
    tensors = mtp_checkpoint(shapes)
    made = MTPLayer.from_state_dict(MTP, tensors, layer)
    tokens, hidden = torch.randint(V, (1, 5)), torch.randn(1, 5, E).double()
    want = published_mtp(tensors, lambda x: layer(x, **how), tokens, hidden)
    for got, expected in zip(made(tokens, hidden, **how), want, strict=True):
        close(got, expected, 1e-9)
    layer.register_forward_hook(lambda _, given, out: (out, None))
    close(made(tokens, hidden, **how)[0], want[0], 1e-9)
    x = torch.randn(5, E).double()
    for expert in range(EXPERTS):
        gate, up, down = (
            tensors[f"{PREFIX}mlp.experts.{expert}.{part}_proj.weight"].T
            for part in ("gate", "up", "down")
        )
        one, weight = torch.full((5, 1), expert), torch.ones(5, 1).double()
        close(layer.mlp.experts(x, one, weight), (F.silu(x @ gate) * (x @ up)) @ down, 1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_of_ours_runs_over_pages(compiled):
    tensors = mtp_checkpoint(OURS)
    made = MTPLayer.from_state_dict(MTP, tensors, SelfAttention(E, HQ, HKV, D))
    run = torch.compile(made, backend="aot_eager", fullgraph=True) if compiled else made
    sizes = {"max_requests": 1, "max_pages_per_request": 4, "dtype": torch.float64, "device": "cpu"}
    cache = poisoned(PagedCache(1, 5, 2, HKV, D, **sizes))
    request, text, read = cache.alloc(), torch.randint(V, (4,)), torch.randn(4, E).double()
    w = {name.removeprefix(PREFIX): t for name, t in tensors.items()}

    def attend(x):
        q, k, v = ((x @ w[f"{name}_proj.weight"].T).view(len(x), -1, D) for name in "qkv")
        out = plain(q, k, v, None, None, {"causal": True, "scale": D**-0.5})[0]
        return out.flatten(1) @ w["o_proj.weight"].T

    tokens, hidden, rows = text, read, torch.tensor([3])
    for _ in range(3):
        batch = cache.batch([request], len(tokens))
        with torch.no_grad():
            logits, hidden = run(tokens, hidden, rows=rows, batch=batch, **pages_of(cache))
        want, own = published_mtp(tensors, attend, text, read)
        close(logits[0], want[-1], 1e-9)
        close(hidden[0], own[-1], 1e-9)
        tokens, rows = logits.argmax(-1), None
        text, read = torch.cat([text, tokens]), torch.cat([read, hidden])


def mtp_loaded(drop=(), *, target=None, head=None, **more):
    tensors = {
        name: t for name, t in mtp_checkpoint(OURS).items() if name.removeprefix(PREFIX) not in drop
    }
    layer = SelfAttention(E, HQ, HKV, D)
    return MTPLayer.from_state_dict(MTP, tensors | more, layer, target, head)


@pytest.mark.parametrize("repeated", [True, False])
def test_a_target_lends_what_a_checkpoint_may_repeat(repeated):
    """Once in memory, and as it is."""
    target, head = nn.Embedding(V, E).double(), nn.Linear(E, V, bias=False).double()
    head.requires_grad_(False)
    absent = [] if repeated else ["embed_tokens.weight", "shared_head.head.weight"]
    layer = mtp_loaded(absent, target=target, head=head)
    assert layer.embed_tokens is target and layer.shared_head["head"] is head
    assert not head.weight.requires_grad


class AroundOne(nn.Module):
    """A norm of Qwen."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        return rms(x, 1 + self.weight)


NAMES_OF_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def test_a_checkpoint_of_qwen():
    """Its names, and norms whose weights are around 0."""
    tensors, given = mtp_checkpoint(OURS), {}
    for name, tensor in tensors.items():
        part = name.removeprefix(PREFIX).removesuffix(".weight")
        theirs = NAMES_OF_QWEN.get(part, f"layers.0.{part}")
        given[f"mtp.{theirs}.weight"] = tensor - 1 if "norm" in part else tensor
    repeated = [name for name in given if "embed_tokens" in name or "shared_head.head" in name]
    target, head = nn.Embedding(V, E).double(), nn.Linear(E, V, bias=False).double()
    target.weight.data, head.weight.data = (given.pop(name) for name in repeated)
    del given["mtp.layers.0.model.layers.0.input_layernorm.weight"]
    layer = SelfAttention(E, HQ, HKV, D)
    made = MTPLayer.from_state_dict(MTP, given, layer, target, head, norm=AroundOne)
    tokens, hidden = torch.randint(V, (1, 5)), torch.randn(1, 5, E).double()
    want = published_mtp(tensors, layer, tokens, hidden)
    for got, expected in zip(made(tokens, hidden), want, strict=True):
        close(got, expected, 1e-9)


MTP_REFUSED = {
    "tensors: got none named mtp.* or model.layers.3.*, want a checkpoint with": lambda: (
        MTPLayer.from_state_dict(MTP, {}, SelfAttention(E, HQ, HKV, D))
    ),
    "tensors: got no shared_head.head.weight, want all 10 of model.layers.3.*": lambda: mtp_loaded(
        ["shared_head.head.weight"]
    ),
    "tensors: got layer.mlp.gate.weight, want only the 10 of model.layers.3.*": lambda: mtp_loaded(
        **{f"{PREFIX}mlp.gate.weight": torch.ones(1)}
    ),
    "config.vocab_size: got 50, want 51, the rows of": lambda: mtp_loaded(
        target=nn.Embedding(V + 1, E)
    ),
    "hidden.shape[2]: got 23, want 24, as the module was built": lambda: mtp_loaded()(
        torch.zeros(1, 2).long(), torch.zeros(1, 2, E - 1)
    ),
}


@pytest.mark.parametrize("text", MTP_REFUSED)
def test_what_does_not_fit_a_layer_is_refused_by_name(text):
    refused(MTP_REFUSED[text], text)


def test_of_a_folder_one_layer_is_read(tmp_path):
    """Of the layers that predict one token more, the second."""
    save = pytest.importorskip("safetensors.torch").save_file
    tensors = mtp_checkpoint({"weight": (E, E)})
    (tmp_path / "config.json").write_text(json.dumps(MTP | {"num_hidden_layers": LAYERS - 1}))
    save({n: t for n, t in tensors.items() if "head" in n}, tmp_path / "model-1-of-2.safetensors")
    save({n: t for n, t in tensors.items() if "head" not in n}, tmp_path / "model-2.safetensors")
    assert all(name.startswith(PREFIX) for name in tensors_of(tmp_path, PREFIX))
    layer = nn.Linear(E, E, bias=False, device="meta")
    found = MTPLayer.from_folder(tmp_path, layer, index=1).state_dict()
    assert len(found) == 7
    assert torch.equal(found["layer.weight"], tensors[f"{PREFIX}weight"])
