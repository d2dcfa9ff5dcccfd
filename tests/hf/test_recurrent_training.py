"""Training of patched hybrids through the ops: gradients against transformers' own code in float64,
checkpointed, compiled in one graph, and of several texts in a row.

No kernel of attnops serves a CPU, so the policy asks for the references.
"""

import copy
import inspect
import sys
from contextlib import ExitStack, contextmanager
from unittest.mock import patch as replaced

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from transformers import DynamicCache

import attnops
from attnops.hf.models import convolutions, delta, scans
from tests.hf import hybrids
from tests.hf.helpers import tokens
from tests.hf.test_training_steps import batch
from tests.modules import cu

OPS = {
    "qwen3_next": ("gated_delta_rule", "causal_conv1d"),
    "qwen3_5": ("gated_delta_rule", "causal_conv1d"),
    "bamba": ("mamba2_scan", "causal_conv1d"),
}
FILES = {"gated_delta_rule": delta, "causal_conv1d": convolutions, "mamba2_scan": scans}


@pytest.fixture
def called():
    """The longest text of each call of an op, by op."""
    lengths = {op: [] for op in FILES}

    def counted(op, run):
        def call(*args, **more):
            lengths[op].append(more["max_seqlen_q"])
            return run(*args, **more)

        return call

    with ExitStack() as stack:
        for op, file in FILES.items():
            stack.enter_context(replaced.object(file, op, counted(op, getattr(file, op))))
        yield lengths


@contextmanager
def ours(model):
    """The model, patched, with every op's reference."""
    with attnops.patch(model), attnops.use(dict.fromkeys(FILES, "reference")):
        yield model


def fresh(name, dtype=torch.float32):
    return copy.deepcopy(hybrids.model(name)).to(dtype).train()


def layer_of(model):
    """The first with states."""
    return next(module for module in model.modules() if hasattr(module, "conv1d"))


def gradients(model, given, run=None):
    """The gradients of the loss of all weights, in float64."""
    model.zero_grad()
    (model if run is None else run)(**given).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def gradients_of_layer(layer, hidden, **given):
    """Those of tokens and weights, in float64."""
    names = ("tokens", *(n for n, _ in layer.named_parameters()))
    hidden = hidden.to(layer.out_proj.weight.dtype).requires_grad_()
    output = layer(hidden, **given)
    weights = torch.arange(output.numel()).cos().view(output.shape)
    found = torch.autograd.grad((output.double() * weights).sum(), (hidden, *layer.parameters()))
    return dict(zip(names, (x.double() for x in found), strict=True))


def off(got, want):
    """The relative error of each gradient."""
    assert got.keys() == want.keys()
    return {n: float((x - want[n]).norm() / want[n].norm().clamp(min=1e-9)) for n, x in got.items()}


def forget(called):
    """The first patch of a process compares the functions."""
    for lengths in called.values():
        lengths.clear()


class Wide:
    """torch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_float64(model):
    """The model, whose own code takes float64 wherever it asks for float32."""
    files = {sys.modules[inspect.unwrap(type(m).forward).__module__] for m in model.modules()}
    with ExitStack() as stack:
        for file in files:
            if file.__name__.startswith("transformers.models"):
                stack.enter_context(replaced.object(file, "torch", Wide()))
        stack.enter_context(replaced.object(torch.Tensor, "float", torch.Tensor.double))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        yield model.double()


def rows(count=2, length=70):
    ids = tokens(count, length)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_as_near_to_float64_as_those_of_transformers(name, dtype, called):
    hidden = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(2))
    with in_float64(fresh(name)) as wide:
        want = gradients_of_layer(layer_of(wide), hidden)
    stock = off(gradients_of_layer(layer_of(fresh(name, dtype)), hidden), want)
    with ours(fresh(name, dtype)) as model:
        forget(called)
        got = off(gradients_of_layer(layer_of(model), hidden), want)
    floor = 5e-5 if dtype == torch.float32 else 2e-2
    assert not {n: (x, stock[n]) for n, x in got.items() if x > max(floor, 1.5 * stock[n])}
    assert {op: len(lengths) for op, lengths in called.items() if lengths} == dict.fromkeys(
        OPS[name], 1
    )


TEXTS = (9, 3, 66)
STARTS = torch.tensor([0, 9, 12, 78])
PACKED = {
    "lengths": {"cu_seq_lens_q": STARTS, "max_length_q": 66},
    "numbers": {"seq_idx": torch.arange(3).repeat_interleave(torch.tensor(TEXTS))[None].int()},
}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("policy", [{}, dict.fromkeys(FILES, "reference")], ids=["chosen", "ours"])
@pytest.mark.parametrize("name", OPS)
def test_texts_in_a_row_have_states_of_their_own(name, policy, form, called):
    """Also where no kernel of attnops is chosen: transformers' own code would carry states from
    text to text."""
    hidden = torch.randn(1, 78, 64, generator=torch.Generator().manual_seed(2))
    model = fresh(name)
    with attnops.patch(model), attnops.use(policy):
        layer = layer_of(model)
        alone = torch.cat([layer(x) for x in hidden.split(TEXTS, 1)], 1)
        want = torch.autograd.grad(alone.cos().sum(), [*layer.parameters()])
        forget(called)
        cache = DynamicCache(config=model.config)
        for more in ({}, {"cache_params": cache}):
            output = layer(hidden, **PACKED[form], **more)
            torch.testing.assert_close(output, alone, rtol=1e-4, atol=1e-4)
            got = torch.autograd.grad(output.cos().sum(), [*layer.parameters()])
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        last = DynamicCache(config=model.config)
        layer(hidden[:, 12:], cache_params=last)
    states = (each.layers[layer.layer_idx].recurrent_states[0] for each in (cache, last))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
    longest = 66 if form == "lengths" else 78
    assert all(called[op][:2] == [longest] * 2 for op in OPS[name])


@pytest.mark.parametrize(
    "texts", [[[0, 1, 2, 2]], [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 2, 2]]], ids=len
)
@pytest.mark.parametrize("name", OPS)
def test_a_cache_keeps_the_state_of_the_last_text_of_each_row(name, texts):
    """As many starts as tokens have an empty text after them."""
    numbers = torch.tensor(texts, dtype=torch.int32)
    hidden = torch.randn(*numbers.shape, 64)
    model = fresh(name)
    with torch.no_grad(), attnops.patch(model):
        layer = layer_of(model)

        def state_after(x, **more):
            cache = DynamicCache(config=model.config)
            layer(x, cache_params=cache, **more)
            return cache.layers[layer.layer_idx].recurrent_states[0]

        last = [x[row == row[-1]][None] for x, row in zip(hidden, numbers, strict=True)]
        want = torch.cat([state_after(x) for x in last])
        got = state_after(hidden, seq_idx=numbers)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize("name", OPS)
def test_a_text_that_a_cache_precedes_is_read_as_by_transformers(name, before):
    """Its convolution gets the inputs of the cache, or padding, in front of those of the text."""
    hidden = torch.randn(1, before + 2, 64)
    model = fresh(name)

    def answer(given):
        layer, cache = layer_of(model), DynamicCache(config=model.config)
        if before:
            layer(hidden[:, :before], cache_params=cache)
        try:
            return layer(hidden[:, before:], cache_params=cache, **given)
        except ValueError:  # transformers 5.24 refuses texts that share a row
            return None

    with torch.no_grad():
        for given in ({"seq_idx": torch.zeros(1, 2).int()}, {"cu_seq_lens_q": cu((2,))}):
            want = answer(given)
            with attnops.patch(model):
                torch.testing.assert_close(answer(given), want)


@pytest.mark.parametrize("name", [name for name in hybrids.NAMES if name != "qwen3_next"])
def test_a_model_trains_on_rows_of_texts(name):
    """Attention and states of the collator's row, as those of each text. LFM2 asks for the numbers
    of texts alone."""
    texts = [tokens(1, n, seed=n)[0] for n in TEXTS]
    row = batch("lengths", texts) | PACKED["numbers"]
    counted = [len(text) - 1 for text in texts]
    with ours(fresh(name)) as model:
        want = dict.fromkeys(dict(model.named_parameters()), 0.0)
        for text, count in zip(texts, counted, strict=True):
            for n, x in gradients(model, {"input_ids": text[None], "labels": text[None]}).items():
                want[n] = want[n] + x * count / sum(counted)
        assert max(off(gradients(model, row), want).values()) < 1e-3


@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_other_ways_to_train_have_the_same_gradients(name):
    """Activations worked out again, and one graph, which holds the ops."""
    given = {"input_ids": tokens(2, 70), "labels": tokens(2, 70), "use_cache": False}
    with ours(fresh(name)) as model:
        want = gradients(model, given)
        model.gradient_checkpointing_enable()
        assert max(off(gradients(model, given), want).values()) < 1e-6
        model.gradient_checkpointing_disable()
        graphs = EagerAndRecordGraphs()
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        assert max(off(gradients(model, given, compiled), want).values()) < 1e-5
    [graph] = graphs.graphs
    targets = {str(node.target) for node in graph.graph.nodes}
    assert {f"attnops.{op}.default" for op in OPS[name]} <= targets


@pytest.mark.parametrize("name", OPS)
def test_a_layer_is_compiled_with_its_gradient(name):
    hidden = torch.randn(1, 78, 64)
    with ours(fresh(name)) as model:
        layer = layer_of(model)
        want = gradients_of_layer(layer, hidden, **PACKED["lengths"])
        compiled = copy.copy(layer)
        compiled.forward = torch.compile(layer.forward, fullgraph=True)
        got = gradients_of_layer(compiled, hidden, **PACKED["lengths"])
    assert max(off(got, want).values()) < 1e-5


@pytest.mark.parametrize("name", OPS)
def test_under_autocast_it_is_as_near_as_transformers(name, called):
    hidden = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(2))
    want = gradients_of_layer(layer_of(fresh(name)), hidden)
    with torch.autocast("cpu", torch.bfloat16):
        stock = off(gradients_of_layer(layer_of(fresh(name)), hidden), want)
    with ours(fresh(name)) as model, torch.autocast("cpu", torch.bfloat16):
        forget(called)
        got = off(gradients_of_layer(layer_of(model), hidden), want)
    assert all(called[op] for op in OPS[name])
    assert not {n: (x, stock[n]) for n, x in got.items() if x > max(2e-2, 1.5 * stock[n])}
