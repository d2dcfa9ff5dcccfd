"""What the tests of transformers' continuous batching share, whichever version of it is
installed."""

import pytest
import torch
import transformers
from transformers import GenerationConfig

from attnops.hf import tiny
from attnops.hf.attention import batched, continuous
from tests.graphs.standin import StandIn
from tests.hf.helpers import tokens

NEW = 10
# Steps take 24 tokens, so longer prompts are cut in chunks. Most prompts are longer than the
# windows. The cache has room for 192 tokens, so requests wait for others to end. The last prompt
# begins as another one, and shares blocks with it.
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 31, 9, 40, 17, 3, 26)]
PROMPTS.append([*PROMPTS[1][:24], 7, 8, 9])
PAGE = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
SIZES = {
    "num_blocks": 24,
    "max_batch_tokens": 24,
    "use_cuda_graph": False,
    "use_async_batching": False,
    PAGE: 8,
}
RINGS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)


def settings(**more):
    return transformers.ContinuousBatchingConfig(**{**SIZES, **more})


def asked(new=NEW):
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def batch(model, how=None, new=NEW):
    """The tokens of each request."""
    found = model.generate_batch(
        inputs=PROMPTS, generation_config=asked(new), continuous_batching_config=how or settings()
    )
    assert not [result.error for result in found.values() if result.error]
    order = sorted(found, key=lambda name: int(name.rsplit("_", 1)[1]))
    return [found[request].generated_tokens for request in order]


def stock(name):
    """A model with eager attention, and the tokens of its generate()."""
    if name != "llama" and not RINGS:
        pytest.skip("before 5.17 generate_batch reads a full window's oldest key for its newest")
    model = tiny.model(name)
    model.set_attn_implementation("eager")
    found = [
        model.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        for row in PROMPTS
    ]
    return model, [row[len(given) :] for row, given in zip(found, PROMPTS, strict=True)]


def spied(calls, real):
    """`real`, whose arguments by keyword are noted."""

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return real(*args, **kwargs)

    return spy


def spy_on_ops(monkeypatch):
    """The calls of attention, by op."""
    found = {"paged_attention": [], "varlen_attention": []}
    for module in (batched, continuous):
        for name, calls in found.items():
            monkeypatch.setattr(module, name, spied(calls, getattr(module, name)))
    return found


PADDED = {"q_padding_interval_size": 8, "kv_padding_interval_size": 64}
"""Few sizes of captured steps."""


def capture_steps(monkeypatch):
    """The device on which transformers captures and replays its steps."""
    runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    from transformers.generation.continuous_batching import initialization

    device = StandIn()

    def capture(self, forward, stream, *args):
        forward(*args)
        # A capture on a GPU runs nothing.
        cache = self.cache
        pages = (
            (*cache.key_cache, *cache.value_cache)
            if hasattr(cache, "key_cache")
            else (cache.cache_tensor,)
        )
        before = [(t, t.clone()) for t in (*pages, args[-1])]
        device.begin()
        forward(*args)
        self.inputs_and_outputs.set_graph(device.end())
        for t, kept in before:
            t.copy_(kept)

    pools = "get_memory_pools" if hasattr(runner, "get_memory_pools") else "get_cuda_pools"
    monkeypatch.setattr(runner.ModelRunner, "_capture_graph", capture)
    monkeypatch.setattr(runner, pools, lambda: (None, None))
    monkeypatch.setattr(
        initialization,
        "decide_use_cuda_graphs",
        lambda cb_config, **_: setattr(cb_config, "use_cuda_graph", (True, True)),
    )
    return device


def check_captured(device):
    assert device.calls.count("replay") > device.calls.count("begin") > 3
