"""Kernels begin to build what a call will wait for, before it: from calls on fake tensors, from
traces, and from a cache of pages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import attnops
from attnops.core.kernel import _REGISTRY, kernels_of
from attnops.core.op import OPS
from attnops.core.precompile import ahead, begin, start
from attnops.core.problem import altered
from attnops.graphs.split import split
from attnops.hf import tiny
from attnops.hf.attention import descriptor
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.cache.paged_cache import PagedKeyCache
from attnops.hf.steps import precompile as first_steps
from attnops.ops import paged_attention, paged_layers, write_kv

OPS_OF_PAGES = (
    "write_kv",
    "paged_attention",
    "decode_attention",
    "attention",
    "varlen_attention",
)


def tell_ahead(monkeypatch, ops, told):
    """Have every kernel of these ops tell the calls that it is told of before."""
    for op in ops:
        kernels = {name: replace(kernel, ahead=told) for name, kernel in kernels_of(op).items()}
        monkeypatch.setitem(_REGISTRY.kernels, op, kernels)
    attnops.core.kernel.renew()


@pytest.fixture
def calls(monkeypatch):
    """The calls that CPU kernels of pages are told of before."""
    told = []
    tell_ahead(monkeypatch, OPS_OF_PAGES, told.append)
    yield told
    monkeypatch.undo()
    attnops.core.kernel.renew()


def given(rows=3, dims=16):
    key, pages = torch.randn(rows, 2, dims), torch.zeros(6, 4, 2, dims)
    return key, key.clone(), pages, pages.clone(), torch.arange(rows)


def test_calls_of_the_block_are_told_and_not_made(calls):
    args = given()
    with ahead():
        write_kv(*args)
    write_kv(*args)
    [call] = calls
    assert all(isinstance(t, FakeTensor) for t in call[:5]) and call.key.shape == (3, 2, 16)
    assert args[2].any()  # of the call after the block alone
    calls.clear()
    with ahead():
        write_kv(*given())
    assert len(calls) == 1 and not given()[2].any()


def test_what_all_calls_wait_for_is_begun_without_one(calls):
    start()
    assert calls and not any(calls)


def test_errors_of_a_kernel_are_left_to_its_run():
    def fails(call):
        raise RuntimeError("no compiler")

    kernel = next(iter(kernels_of("write_kv").values()))
    begin(replace(kernel, ahead=fails), OPS["write_kv"].call(*given()))
    begin(replace(kernel, ahead=None), None)


def test_a_trace_tells_of_sizes_by_their_hints_and_of_equal_calls_once(calls):
    def step(key, value, k_pages, v_pages, slots):
        for _ in range(3):
            write_kv(key, value, k_pages, v_pages, slots)
        query = torch.cat([key, key], 1)
        ends = torch.arange(key.shape[0] + 1, dtype=torch.int32)
        table = slots[:, None].to(torch.int32) % 6
        lengths = torch.ones_like(slots, dtype=torch.int32)
        return paged_attention(query, k_pages, v_pages, table, lengths, ends, max_seqlen_q=1)

    with torch.no_grad():
        torch.compile(step, backend=lambda gm, _: split(gm).module, dynamic=True)(*given(rows=5))
    assert [call.spec.op for call in calls] == ["write_kv", "paged_attention"]
    for call in calls:
        assert call[0].shape[0] == 5 and all(
            type(n) is int
            for t in call
            if isinstance(t, torch.Tensor)
            for n in (*t.shape, *t.stride())
        )


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("window", [0, 8], ids=["whole", "window"])
@pytest.mark.parametrize(("rows", "prompt"), [(1, 40), (3, 7)])
def test_the_first_steps_of_new_pages(calls, rows, prompt, window, far, monkeypatch):
    """A prompt of one row without padding, and of several rows with padding, too."""
    monkeypatch.setattr(descriptor, "far", lambda device: far)
    whole = paged_layers(4, 2, 16, 0, torch.float32, 16)
    layers = (whole, altered(whole, window=(window - 1, -1)) if window else whole, whole)
    pages = ModelPages(Sizes(rows, 64, layers, torch.device("cpu"), None, fixed=True))

    def cache():
        return PagedKeyCache(pages, (0, 2, 5), dict, filled=True)

    before = [t.clone() for t in (*pages.pools, *pages.counters)]
    first_steps.step(cache(), rows, prompt)
    kinds = 1 + bool(window)
    told = ["write_kv", "varlen_attention" if far else "attention"]
    told += ["write_kv", "attention"] * (rows > 1)
    assert [call.spec.op for call in calls] == told * kinds
    assert {call.key.shape[0] for call in calls if call.spec.op == "write_kv"} == {rows * prompt}
    bounds = [call.kv_start is not None for call in calls if call.spec.op == "attention"]
    assert bounds == ([True] if far else [False, True])[: len(bounds) // kinds] * kinds
    calls.clear()
    first_steps.step(cache(), rows, 1)
    assert [call.spec.op for call in calls] == ["write_kv", "paged_attention"] * kinds
    assert [call.window_left for call in calls[1::2]] == [-1, window - 1][:kinds]
    assert all(call[0].shape[0] == rows for call in calls)
    for t, held in zip((*pages.pools, *pages.counters), before, strict=True):
        assert torch.equal(t, held)


def test_each_kind_of_steps_begins_once_over_the_same_pages(monkeypatch):
    spec, told = paged_layers(4, 2, 16, 0, torch.float32, 16), []
    pages = SimpleNamespace(
        sizes=Sizes(8, 64, (spec,), torch.device("cuda"), None, fixed=True), begun=set()
    )

    def step(cache, rows, count):
        told.append((rows, count))
        if rows == 5:
            raise RuntimeError("left to the step itself")

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(first_steps, "step", step)
    monkeypatch.setattr(first_steps, "of_rows", lambda given: told.append(given))

    def begin_steps(rows, prompt, record=None):
        told.clear()
        cache = SimpleNamespace(state=SimpleNamespace())
        first_steps.begin(model, pages, lambda pages, filled: cache, rows, prompt, record)
        return told

    assert begin_steps(3, 20) == [(3, 20), (4, 1)]  # four rows are the next bucket
    assert begin_steps(3, 22) == begin_steps(4, 20) == []
    assert begin_steps(1, 20) == [(1, 20), (1, 1)]
    with attnops.use(deterministic=True):
        assert begin_steps(3, 20, lambda: told.append("recorded")) == [(3, 20), (4, 1), model]
    assert begin_steps(5, 20) == [(5, 20)]
    pages.sizes = pages.sizes._replace(device=torch.device("cpu"))
    assert begin_steps(2, 20) == []


class Keeping(LlamaRMSNorm):
    """It keeps what it is given in a buffer."""

    def forward(self, x):
        self.seen = x
        return super().forward(x)


def test_linears_and_norms_of_a_deterministic_policy(monkeypatch):
    """One call of each kind, which serves any number of rows. No hook sees it, and no module keeps
    its fake tensor."""
    told = []
    tell_ahead(monkeypatch, ["linear"], told.append)
    model = tiny.model("llama")
    for norm in [module for module in model.modules() if type(module) is LlamaRMSNorm]:
        norm.__class__ = Keeping
        norm.register_buffer("seen", torch.zeros(1))
    with attnops.patch(model), attnops.use(deterministic=True):
        model.lm_head.register_forward_hook(lambda *_: told.append("a hook"))
        first_steps.of_rows(model)
        begun = {(call.weight.shape, call.x.dtype) for call in told}
        assert len(told) == len(begun) and all(call.x.shape[0] == 1 for call in told)
        assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
        told.clear()
        with torch.no_grad(), ahead():
            model(torch.zeros(2, 3, dtype=torch.int64))
        assert {(call.weight.shape, call.x.dtype) for call in told[:-1]} == begun
    monkeypatch.undo()
    attnops.core.kernel.renew()
