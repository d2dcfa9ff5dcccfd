"""DFlash's draft by its published formula in float64, with the tensors of public checkpoints."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from attnops.cache import PagedCache
from attnops.nn import DFlashHead
from tests.dflash import SIZES, checkpoint, published, words_of
from tests.modules import close, poisoned, refused

E, V, BLOCK = SIZES["hidden_size"], SIZES["vocab_size"], 5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
KINDS = {
    "full": {},
    "bias": {"attention_bias": True},
    "one state": {"dflash_config": {"target_layer_ids": [3]}, "num_hidden_layers": 1},
    "scaled": {"dflash_config": {"input_embedding_scale": 3.0}},
    "causal windows": SLIDING,
    "windows": {**SLIDING, "is_causal": False},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_published_formula(kind, compiled):
    """Behind three texts of other lengths, of which the last tokens come with the block, and behind
    what follows, of which some tokens are left out."""
    words = words_of(**KINDS[kind])
    tensors = checkpoint(words)
    head = DFlashHead.from_state_dict(words, tensors).requires_grad_(False)
    run = torch.compile(head, backend="aot_eager", fullgraph=True) if compiled else head
    embeddings = torch.randn(V, E).double()
    sizes = {
        "max_requests": 3,
        "max_pages_per_request": 10,
        "dtype": torch.float64,
        "device": "cpu",
    }
    cache = poisoned(PagedCache(len(head.layers), 31, 2, 2, SIZES["head_dim"], **sizes))
    pages = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    requests = [cache.alloc() for _ in range(3)]
    texts = [torch.randn(n, head.fc.in_features).double() for n in (7, 4, 2)]
    counts = [n - 1 for n in map(len, texts)]
    head.read(torch.cat([t[:-1] for t in texts]), batch=cache.batch(requests, counts), **pages)
    kept, new = [1, 1, 1], 1
    for _ in range(3):
        context = cache.batch(requests, new)
        real = (torch.arange(new) < torch.tensor(kept)[:, None]).flatten()
        context = dataclasses.replace(context, slots=torch.where(real, context.slots, -1))
        states = torch.full((3 * new, head.fc.in_features), torch.nan).double()
        states[real] = torch.cat([text[-n:] for text, n in zip(texts, kept, strict=True)])
        for request, text in zip(requests, texts, strict=True):
            cache.truncate(request, len(text))
        batch, last = cache.batch(requests, BLOCK), torch.randint(V, (3,))
        found = run(last, states, embeddings=embeddings, context=context, batch=batch, **pages)
        kept, new = [3, 1, 2], 3
        for row, text in enumerate(texts):
            close(found[row], published(words, tensors, embeddings, text, last[row]), 1e-9)
            cache.truncate(requests[row], len(text))
            texts[row] = torch.cat([text, torch.randn(kept[row], text.shape[1]).double()])


def test_words_that_a_config_may_lack():
    absent = "block_size", "layer_types", "head_dim", "num_key_value_heads"
    words = {name: word for name, word in words_of().items() if name not in absent}
    head = DFlashHead({**words, "dflash_config": {}, **words["dflash_config"]})
    assert (head.block_size, head.num_drafts, head.states) == (16, 15, (2, 3, 1))
    assert all(layer.self_attn.k_proj.out_features == E for layer in head.layers)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_folder_is_a_checkpoint(form, tmp_path):
    words = words_of()
    tensors = checkpoint(words)
    (tmp_path / "config.json").write_text(json.dumps(words))
    if form == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save = pytest.importorskip("safetensors.torch").save_file
        save(tensors, tmp_path / "model.safetensors")
    head = DFlashHead.from_folder(tmp_path, nn.Embedding(V, E))
    assert head.folder == str(tmp_path) and head.fc.weight.dtype == torch.float32
    found = head.state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].float()) for name in found)


def loaded(drop=(), target=None, more=None, **words):
    config = words_of(**words)
    tensors = {name: t for name, t in checkpoint(config).items() if name not in drop}
    return lambda: DFlashHead.from_state_dict(config, tensors | (more or {}), target)


REFUSED = {
    "tensors: got no fc.weight, layers.1.self_attn.k_norm.weight, want all 25 of": loaded(
        ["fc.weight", "layers.1.self_attn.k_norm.weight"]
    ),
    "tensors: got lm_head.weight, want only the 25 of": loaded(
        more={"lm_head.weight": torch.ones(V, E)}
    ),
    "fc.weight.shape: got (24, 24), want (24, 72), by config": loaded(
        more={"fc.weight": torch.ones(E, E)}
    ),
    "config.vocab_size: got 50, want 51, the rows of": loaded(target=nn.Embedding(V + 1, E)),
    "hidden size of the target in the config: got 24, want 20, the width": loaded(
        target=nn.Embedding(V, 20)
    ),
    "config.mask_token_id: got 50, want 0 to 49, the ids": loaded(
        dflash_config={"mask_token_id": 50}
    ),
    "config.mask_token_id: got None, want 0 to 49, the ids": loaded(
        dflash_config={"mask_token_id": None}
    ),
    "config.target_layer_ids: got [0, -1], want numbers": loaded(
        dflash_config={"target_layer_ids": [0, -1]}
    ),
    "config.target_layer_ids: got [], want numbers": loaded(dflash_config={"target_layer_ids": []}),
    "config.block_size: got 1, want 2 or more": loaded(block_size=1),
    "config.layer_types: got ['linear_attention', 'full_attention'], want 2 of": loaded(
        layer_types=["linear_attention", "full_attention"]
    ),
    "config.sliding_window: got None, want an int >= 1": loaded(
        layer_types=["sliding_attention", "full_attention"]
    ),
    "config.selector_rank: got 256, want None": loaded(dflash_config={"selector_rank": 256}),
    "config.use_swa: got True, want False": loaded(dflash_config={"use_swa": True}),
    "config.hidden_act: got 'gelu', want 'silu'": loaded(hidden_act="gelu"),
    "config.num_hidden_layers: got None, want an int >= 1": lambda: DFlashHead(
        {**words_of(), "num_hidden_layers": None}
    ),
    "states.shape[1]: got 24, want 72, as the module was built": lambda: loaded()().read(
        torch.ones(2, E), batch=None, k_pages=(), v_pages=()
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_by_name(text):
    refused(REFUSED[text], text)
