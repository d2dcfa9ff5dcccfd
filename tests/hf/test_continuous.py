"""`paged|attnops`: the tokens of transformers' own paged attention, in its continuous batching."""

import pytest
import torch
from transformers import GenerationConfig

import attnops
from attnops.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.attention import continuous
from attnops.hf.attention.continuous import continuous_function
from tests.hf.helpers import tokens

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no continuous batching", allow_module_level=True)

pytest.importorskip("psutil", reason="without the package psutil transformers finds no memory for its pages on a CPU")

# A prompt that is longer than a step takes is cut in chunks; one is longer than the windows.
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 31, 9)]


def batched(model, new=8):
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    how = transformers.ContinuousBatchingConfig(
        block_size=8, num_blocks=48, max_batch_tokens=24, use_cuda_graph=False, use_async_batching=False
    )
    found = model.generate_batch(inputs=PROMPTS, generation_config=asked, continuous_batching_config=how, progress_bar=False)
    return [found[request].generated_tokens for request in sorted(found)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_tokens(name, monkeypatch):
    model, calls = tiny.model(name), []
    real = continuous.varlen_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(continuous, "varlen_attention", spy)
    # sdpa would drop the sinks.
    model.set_attn_implementation("paged|eager" if name == "gpt_oss" else "paged|sdpa")
    want = batched(model)
    assert not calls and all(len(row) == 8 for row in want)
    model.set_attn_implementation("paged|attnops")
    assert batched(model) == want
    assert {call["window"][0] for call in calls} == {"llama": {-1}, "mistral": {7}}.get(name, {-1, 7})
    assert any(call["max_seqlen_q"] == 1 for call in calls) and any(call["max_seqlen_q"] > 8 for call in calls)


def test_a_patched_model():
    """Its own kernel goes on, and generate() is over pages again afterwards."""
    model = tiny.model("llama")
    model.set_attn_implementation("paged|sdpa")
    want = batched(model, new=4)
    model.set_attn_implementation("eager")
    with attnops.patch(model, cache="paged", kernel="reference") as handle:
        assert batched(model, new=4) == want
        assert model.config._attn_implementation == handle.implementation


def test_what_is_no_step_of_continuous_batching():
    model, call = tiny.model("llama"), continuous_function(None)
    module = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with pytest.raises(InvalidInput, match="generate_batch"):
        call(module, query, key, key)
    given = {"cache": object(), "cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": torch.tensor([0, 3])}
    with pytest.raises(InvalidInput, match="block_table"):
        call(module, query, key, key, block_table=torch.zeros(1, 1), **given)
    with pytest.raises(InvalidInput, match="position_bias"):
        call(module, query, key, key, position_bias=torch.zeros(1), **given)
    with pytest.raises(InvalidInput, match="causal"):
        call(module, query, key, key, is_causal=False, **given)


def test_layers_that_change_cached_keys_are_refused_by_name():
    """The cache of continuous batching would be handed keys that it has no room for."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention

    x, cu = torch.zeros(1, 2, 3, 4), torch.tensor([0, 3], dtype=torch.int32)
    for cls in (JetMoeAttention, DeepseekV4Attention):
        with pytest.raises(InvalidInput, match=cls.__name__):
            continuous_function(None)(cls.__new__(cls), x, x, x, cache=object(), cu_seq_lens_q=cu, cu_seq_lens_k=cu)
