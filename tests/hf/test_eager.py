"""Eager steps of patched models, most of which find what serves them known: by layers and tokens
alike, and never for another call."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.core import eager_cache
from attnops.core.errors import InvalidInput
from attnops.core.kernel import _drop, kernels_of, one_of, register
from attnops.core.private_torch import TensorGuards
from attnops.core.problem import Extent
from attnops.hf import tiny
from attnops.hf.attention.function import attention_function
from attnops.hf.cache.names import named
from attnops.kernels.torch import sdpa
from attnops.ops.attention.record import ATTENTION
from tests.hf.helpers import LIMIT, left_padded, logits, near, relative, tokens

if TensorGuards is None:
    pytest.skip("this torch has no TensorGuards", allow_module_level=True)


@pytest.fixture(autouse=True)
def looked(monkeypatch):
    """The shapes of queries and keys, heads first, of every call that was looked at; nothing is
    remembered at the start."""
    ATTENTION.seen.clear()
    calls, real = [], eager_cache.checked

    def checked(op, call):
        if op is ATTENTION:
            calls.append(
                (tuple(call.query.transpose(1, 2).shape), tuple(call.key.transpose(1, 2).shape))
            )
        return real(op, call)

    monkeypatch.setattr(eager_cache, "checked", checked)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("mask", ["dense", "compact"])
def test_the_second_run_is_known_and_the_same(name, mask, looked):
    model = tiny.model(name)
    want = logits(model, "dynamic", tokens(), left_padded())
    with attnops.patch(model, mask=mask):
        first = logits(model, "dynamic", tokens(), left_padded())
        assert looked and relative(first, want) < LIMIT
        looked.clear()
        assert torch.equal(logits(model, "dynamic", tokens(), left_padded()), first)
        assert not looked


@torch.no_grad()
@pytest.mark.parametrize(("name", "begin", "runs"), [("llama", 33, 1), ("mistral", 5, 2)])
def test_layers_and_tokens_share_a_look(name, begin, runs, looked):
    """Also where a window begins to bind."""
    model, ids = tiny.model(name), tokens(2, 80)
    want = model(ids).logits[:, begin - 1 :]
    with attnops.patch(model):
        for _ in range(runs):
            cache = DynamicCache(config=model.config)
            out = [model(ids[:, :begin], **named(cache)).logits[:, -1:]]
            out += [model(ids[:, at : at + 1], **named(cache)).logits for at in range(begin, 80)]
            near(torch.cat(out, 1), want)
    if name == "llama":
        # Once for all layers and all numbers of keys that no kernel tells apart; 64 is the end of
        # such a range.
        keys = [k[2] for _, k in looked]
        assert (
            keys[:2] == [33, 34]
            and len(keys) <= 12
            and {Extent.of(k) for k in keys} == {Extent.of(k) for k in range(33, 81)}
        )


def test_training_and_autocast_in_between(looked):
    model, ids = tiny.model("llama", attention_dropout=0.5), tokens(1, 9)
    with attnops.patch(model):
        with torch.no_grad():
            want = model(ids).logits
            known = len(looked)
            assert torch.equal(model(ids).logits, want) and len(looked) == known
            model.train()
            torch.manual_seed(0)
            dropped = model(ids).logits
            assert (
                not torch.allclose(dropped, model(ids).logits) and len(looked) == known
            )  # no kernel drops
            model.eval()
            cast = {}
            for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
                with torch.autocast("cpu", dtype):
                    again = model(ids).logits
                assert torch.equal(cast.setdefault(dtype, again), again) and again.dtype == dtype
            assert not torch.equal(cast[torch.bfloat16].float(), cast[torch.float16].float())
            assert torch.equal(model(ids).logits, want)
        model(ids).logits.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, want)
            with attnops.use(kernel={"attention": "reference"}):
                other = model(ids).logits
            assert relative(other, want) < LIMIT and not torch.equal(other, want)
            assert torch.equal(model(ids).logits, want)


@torch.no_grad()
def test_sdpa_takes_the_tensors_of_plain_calls_as_they_are(monkeypatch):
    """But not those of padded rows, of windows that bind, or of calls that a profiler must see."""
    turned, body = [], sdpa._sdpa
    monkeypatch.setattr(
        sdpa, "_sdpa", lambda *args, **kwargs: turned.append(True) or body(*args, **kwargs)
    )
    model, ids = tiny.model("llama"), tokens(2, 9)
    layers = model.config.num_hidden_layers
    want = model(ids).logits[:, -1:]
    with attnops.use(kernel="attention:sdpa"), attnops.patch(model):
        for padded, profiled in ((None, False), (left_padded()[:, :9], False), (None, True)):
            for _ in range(2):
                cache = DynamicCache(config=model.config)
                model(
                    ids[:, :8],
                    **named(cache),
                    attention_mask=None if padded is None else padded[:, :8],
                )
                turned.clear()
                with torch.profiler.profile() if profiled else nullcontext() as profile:
                    got = model(ids[:, 8:], **named(cache), attention_mask=padded).logits
                plain = padded is None and not profiled
                assert len(turned) == layers * (not plain)
                if padded is None:
                    near(got, want)
                assert not profiled or "attnops::attention" in {
                    event.name for event in profile.events()
                }


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 5])
def test_a_known_call_knows_its_layer_and_the_shapes_of_key_and_value(queries):
    """SDPA itself broadcasts a key of another batch, and takes values of other heads or more
    tokens."""
    layer, call = torch.nn.Linear(1, 1), attention_function(None, proven=True)
    query, key = torch.randn(2, 8, queries, 16), torch.randn(2, 2, 40, 16)
    first = call(layer, query, key[:, :, :queries], key[:, :, :queries])[0]
    layer.is_causal = False
    assert queries == 1 or not torch.allclose(
        call(layer, query, key[:, :, :queries], key[:, :, :queries])[0], first
    )
    want = call(layer, query, key, key)[0]
    assert torch.equal(call(layer, query, key, key)[0], want)
    twice = [torch.cat([key, key], dim) for dim in (1, 2)]
    values = [key[:, :1], *twice, key.double(), key.to("meta")]
    keys = [key.double(), key.to("meta"), key[..., :8], torch.randn(2, 2, 40, 16, 16)]
    for pair in (
        *((key, value) for value in values),
        *((other, key) for other in keys),
        (key[:1], key[:1]),
        (key[None], key[None]),
    ):
        with pytest.raises(InvalidInput):
            call(layer, query, *pair)
    with pytest.raises(InvalidInput, match="attention argument block_table"):
        call(layer, query, key, key, block_table=query)
    wide = torch.cat([key, -key], -1)
    assert torch.allclose(call(layer, query, key, wide)[0], torch.cat([want, -want], -1), atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_a_known_call_under_vmap_and_autocast():
    layer = torch.nn.Linear(1, 1)
    call = attention_function(None, proven=True)
    query = torch.randn(3, 1, 4, 1, 16)
    key = torch.randn(3, 1, 2, 40, 16)
    value = torch.randn(3, 1, 2, 40, 16)
    want = torch.stack([call(layer, *rows)[0] for rows in zip(query, key, value, strict=True)])
    got = torch.vmap(lambda q, k, v: call(layer, q, k, v)[0])(query, key, value)
    assert torch.allclose(got, want, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(layer, query[0], key[0], value[0])[0].dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("field", ["last_dim_contiguous", "v_head_dim"])
def test_a_known_call_is_one_that_selection_would_treat_alike(field):
    """Strides and the value's head dim are facts that a kernel may ask for: an odd call does not
    decide for a plain one."""
    layer, ran = torch.nn.Linear(1, 1), []

    def run(call):
        ran.append(call)
        return sdpa.attention(call)

    odd_stride = field == "last_dim_contiguous"
    plain = [torch.randn(1, heads, tokens, 8) for heads, tokens in ((4, 1), (2, 6), (2, 6))]
    odd = (
        [plain[0], plain[1].mT.contiguous().mT, plain[2]]
        if odd_stride
        else [*plain[:2], torch.randn(1, 2, 6, 16)]
    )
    known = kernels_of("attention")["sdpa"]
    kernel = replace(
        known,
        name=f"picky_{field}",
        run=run,
        needs=(one_of(field, True if odd_stride else 8),),
        cost_us=lambda p: 0.0,
        inline=None,
    )
    register(kernel)
    try:
        call = attention_function(None, proven=True)
        call(layer, *odd)
        assert not ran
        call(layer, *plain)
        assert len(ran) == 1
    finally:
        _drop([kernel])
