"""`generate_batch` of a patched model, under the name that this transformers takes for it.

The tokens are those of `generate()` with eager attention.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers

if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no continuous batching", allow_module_level=True)

pytest.importorskip(
    "psutil",
    reason="without the package psutil transformers finds no memory for its pages on a CPU",
)

from transformers.generation.continuous_batching import continuous_api

import attnops
from attnops.announce import NAME
from attnops.core.errors import InvalidInput
from attnops.hf import batching, batching_config, tiny
from attnops.hf.attention import batched, continuous
from attnops.hf.attention.batched import ENDING, FILLS, MASKED, name_for_batches
from tests.hf.batches import (
    PADDED,
    PROMPTS,
    SIZES,
    asked,
    batch,
    capture_steps,
    check_captured,
    settings,
    spy_on_ops,
    stock,
)
from tests.hf.helpers import tokens

OLD = 'up to 5.18 transformers takes "paged|attnops": see test_continuous.py'
by_name = pytest.mark.skipif(not FILLS, reason=OLD)


@pytest.fixture
def calls(monkeypatch):
    return spy_on_ops(monkeypatch)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "qwen2_moe"])
def test_a_patched_model_switches_by_itself(name, calls):
    """qwen2_moe does not tell its layers their window."""
    model, want = stock(name)
    with attnops.patch(model, cache="hf") as handle:
        assert batch(model) == want
        assert model.config._attn_implementation == handle.implementation
        assert str(handle.report()).count("was set to") == 0
    assert model.config._attn_implementation == "eager"
    assert calls["varlen_attention"] or calls["paged_attention"]
    windows = {call["window"][0] for given in calls.values() for call in given}
    assert windows >= {"llama": {-1}, "mistral": {7}}.get(name, {-1, 7})
    if FILLS:
        # A plain config has block tables, too, where no layer slides.
        assert bool(calls["paged_attention"]) == (name == "llama")


def test_block_tables_can_be_turned_off(calls):
    model, want = stock("llama")
    with attnops.patch(model, cache="hf", kernel="reference"):
        assert batch(model, settings(max_blocks_per_request=0)) == want
        without = len(calls["paged_attention"])
        assert batch(model, batching_config(model, **SIZES)) == want
    assert all(call["kernel"] == "reference" for given in calls.values() for call in given)
    if FILLS:
        assert len(calls["paged_attention"]) > without == 0


def test_flash_attention_is_not_put_in_its_place(monkeypatch):
    """transformers does that where FlashAttention, or the package kernels, is installed."""
    if not hasattr(continuous_api, "is_flash_attn_3_available"):
        pytest.skip("this transformers puts no other attention in a model's place")
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    model, want = stock("llama")
    with attnops.patch(model, cache="hf"):
        assert batch(model) == want


def test_a_manager_of_the_users_own():
    """Names go back when it stops, also after unpatch(); a manager that is kept switches again."""
    model, want = stock("llama")
    handle = attnops.patch(model, cache="hf")
    within = name_for_batches(handle.implementation)
    more = {"generation_config": asked(), "continuous_batching_config": settings()}
    for _ in range(2):
        manager = model.init_continuous_batching(**more)
        assert model.config._attn_implementation == within
        manager.start()
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=60).generated_tokens == want[0]
        manager.stop(block=True, keep_for_next_session=True)
        assert model.config._attn_implementation == handle.implementation
    model.destroy_cached_continuous_batching_manager()
    manager = model.init_continuous_batching(**more)
    handle.unpatch()
    assert model.config._attn_implementation == "eager"
    manager.stop()
    assert model.config._attn_implementation == "eager"
    assert "init_continuous_batching" not in vars(model)


def test_the_first_batch_waits_for_the_reset_of_its_inputs(monkeypatch):
    """On the GPU of the model. The reset is on another stream than the copy of the inputs."""
    order = []
    kind = continuous_api.ContinuousBatchingManager
    monkeypatch.setattr(kind, batching._MAKE, lambda manager: order.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", order.append)
    model, gpu = tiny.model("llama"), torch.device("cuda", 1)
    with attnops.patch(model):
        manager = model.init_continuous_batching(continuous_batching_config=settings())
        getattr(manager, batching._MAKE)()
        assert order == ["reset"], "on a CPU there is nothing to wait for"
        with monkeypatch.context() as moved:
            moved.setattr(manager, "model", SimpleNamespace(device=gpu))
            getattr(manager, batching._MAKE)()
        manager.stop()
    assert order == ["reset", "reset", gpu]


def test_transformers_resets_inputs_where_it_is_waited_for():
    """Each way to a first batch: the thread that runs batches, and a warm-up."""
    kind = continuous_api.ContinuousBatchingManager
    assert batching._MAKE in inspect.unwrap(kind._run_generation_loop).__code__.co_names
    if hasattr(kind, "warmup"):
        assert batching._MAKE in inspect.unwrap(kind.warmup).__code__.co_names


def test_a_config_that_transformers_refuses_leaves_the_model_as_it_was():
    model = tiny.model("llama")
    with attnops.patch(model, cache="hf") as handle:
        with pytest.raises((AttributeError, TypeError, ValueError)):
            model.init_continuous_batching(generation_config=object())
        assert model.config._attn_implementation == handle.implementation


def test_a_layer_that_cannot_be_served_is_refused_before_the_batch(monkeypatch):
    model = tiny.model("llama")
    monkeypatch.setattr(continuous, "_keeps_what_it_is_given", lambda cls: False)
    said = r"generate_batch: .*LlamaAttention.* generate\(\) for this one"
    with attnops.patch(model, cache="hf"), pytest.raises(InvalidInput, match=said):
        batch(model)


@by_name
def test_an_unpatched_model_is_told_what_to_do():
    model = tiny.model("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(InvalidInput, match=r"attnops.patch\(model\)"):
        batching_config(model, **SIZES)


@by_name
def test_the_name_by_itself(calls):
    """As generate_batch meets it in a model whose configs are set by hand."""
    model, want = stock("llama")
    model.config._attn_implementation_internal = NAME + ENDING
    assert batch(model) == want
    assert calls["varlen_attention"] and not calls["paged_attention"]


@by_name
def test_another_forward_under_the_name():
    """With padding, which a name without a mask function would lose."""
    model = tiny.model("llama")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    want = model(ids, attention_mask=mask).logits
    model.config._attn_implementation_internal = NAME + ENDING
    if not MASKED:
        with pytest.raises(InvalidInput, match=r"manager.stop\(\)"):
            model(ids, attention_mask=mask)
        return
    text, got = mask.bool(), model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[text], want[text])


@by_name
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_captured(name, calls, monkeypatch):
    """Steps that transformers captures and replays, padded to few sizes."""
    model, want = stock(name)
    device = capture_steps(monkeypatch)
    with attnops.patch(model, cache="hf"):
        assert batch(model, settings(**PADDED)) == want
    check_captured(device)
    assert bool(calls["paged_attention"]) == (name == "llama")


@by_name
def test_a_table_is_made_once_a_step(monkeypatch):
    """And anew where the layer comes again, as in the capture of a graph after the eager step."""
    made, real = [], batched._step
    monkeypatch.setattr(batched, "_step", lambda *args: made.append(real(*args)) or made[-1])
    model = tiny.model("llama")
    with attnops.patch(model, cache="hf"):
        batch(model)
    assert made and all(step.served == set(range(model.config.num_hidden_layers)) for step in made)


@by_name
def test_a_layer_that_hands_on_lengths_by_type_is_refused():
    model = tiny.model("llama")
    module, x = model.model.layers[0].self_attn, torch.randn(1, 2, 3, 16)
    call = batched.batched_function(lambda *_, **__: None, None)
    given = {
        "write_index": [],
        "cu_seq_lens_q": torch.tensor([0, 3]),
        "cu_seq_lens_k": {"full_attention": torch.tensor([0, 3])},
    }
    with pytest.raises(InvalidInput, match=r"cu_seq_lens_k.*LlamaAttention.*update\(\)"):
        call(module, x, x, x, **given)


def test_windows_are_told_by_the_config_where_no_cache_tells_them():
    def window(layer, **config):
        module = SimpleNamespace(config=SimpleNamespace(**config), layer_idx=layer)
        return continuous.window_of(module)

    kinds = ["sliding_attention", "full_attention"]
    assert [window(i, layer_types=kinds, sliding_window=8) for i in (0, 1)] == [8, 0]
    assert window(0, sliding_window=8) == 8
    assert window(0, sliding_window=None, layer_types=kinds) == 0 == window(0)
