"""Steps whose layers are compiled once a kind: eager's tokens by few traces, and the whole model traced where layers cannot be."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.kernel import _REGISTRY, Capture
from attnops.graphs import regional
from attnops.hf import tiny
from attnops.hf.cache_names import cache_in, named
from tests.graphs.models import boundary
from tests.hf.helpers import of_a_library
from tests.hf.test_decode_graphs import generated, how, nan_pages, replays

assert nan_pages, "a fixture"

CALLS = ((2, 14, 4), (3, 14, 4), (2, 60, 4), (5, 9, 4))
"""Pages that are made anew for more rows and for a longer text; buckets of two sizes and more."""


def regions(handle):
    return handle._paged.decoder().regions


def traced(handle):
    """The layers that were traced."""
    return [program for program in regions(handle).programs if any(part.calls or part.breaks for part in program.split.parts)]


def calls(handle):
    """The calls of attention in what was compiled, as `op.kernel`."""
    return {str(cut) for program in regions(handle).programs for part in program.split.parts for cut in (*part.calls, *part.breaks)}


def model_of(name, layers):
    full = {"gemma3": ["sliding_attention"] * (layers - 1) + ["full_attention"]}
    return tiny.model(name, num_hidden_layers=layers, **({"layer_types": full[name]} if name in full else {}))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [("llama", 6, 1), ("phi3", 3, 1), ("gpt_oss", 3, 2), ("gemma3", 4, 2), ("deepseek_v3", 3, 2)],
)
def test_one_trace_for_each_kind_of_layer(name, layers, kinds, nan_pages):
    """However many layers there are, and for all caches and batches: windows, latents, experts, weights that are one matrix or several."""
    model = model_of(name, layers)
    want = [generated(model, *call) for call in CALLS]
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        counts = set()
        for call, tokens in zip(CALLS, want, strict=True):
            assert torch.equal(generated(model, *call), tokens), call
            counts.add(len(regions(handle).programs))
        # Pages that grow beyond the window have one table more, for which the beginning of a step is traced again.
        assert len(traced(handle)) == kinds and len(counts) == 1 + (name in ("gpt_oss", "gemma3"))
        report = handle.graphs.report()
        assert report.whole == "" and report.modes == {"decode": "whole"} and handle.plain_steps == 0
        beside = report.parts["decode"] - 2 * layers
        assert beside >= 3, "the beginning of the step, the rotation and the last norm"
        assert report.compiled["decode"] <= 2 * kinds + beside


@pytest.mark.full
@torch._dynamo.config.patch(accumulated_recompile_limit=1)
def test_a_second_cache_and_a_single_row():
    """Also where torch's own limit of compilations, which all models of a process count to, is reached."""
    model = model_of("llama", 3)
    want = [generated(model, rows, 14, 4) for rows in (2, 1)]
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        for most, length, traces in ((2, 30, 1), (4, 90, 0)):
            cache = handle.new_cache(most, length)
            assert torch.equal(generated(model, 2, 14, 4, **named(cache)), want[0])
            assert len(traced(handle)) == 1 and (handle.graphs.report().compile_seconds > 0) == traces
            del cache
        for _ in range(2):
            assert torch.equal(generated(model, 1, 14, 4), want[1])
            assert len(traced(handle)) == 2, "a size of one is a constant"


@pytest.mark.full
@pytest.mark.parametrize("pack", [True, False])
def test_linears_of_a_layer_are_fused(pack):
    """Those of all layers, by the code of one: each is guarded by where its own weights lie."""
    model = model_of("llama", 3)
    want = generated(model, *CALLS[0])
    with attnops.patch(model, cache="paged", decode=how("piecewise", pack=pack)) as handle:
        assert torch.equal(generated(model, *CALLS[0]), want)
        [program] = traced(handle)
        nodes = [node for part in program.split.parts for node in part.module.graph.nodes]
        assert sum(node.target is torch.nn.functional.linear for node in nodes) == (4 if pack else 7)
        if pack:
            other = model.model.layers[2].self_attn.k_proj
            other.weight.data = other.weight.data.clone()
            assert torch.equal(generated(model, *CALLS[0]), want)
            assert len(traced(handle)) == 2, "a layer whose weights lie apart is another kind"


@pytest.mark.full
def test_graphs_are_cut_where_a_kernel_may_not_be_captured():
    kernel, model = boundary(), model_of("llama", 3)
    want = generated(model, *CALLS[0])
    with attnops.patch(model, cache="paged", kernel=kernel, decode=how("piecewise")) as handle:
        assert torch.equal(generated(model, *CALLS[0]), want)
        [row] = handle.graphs.report().rows
        assert len(row.breaks) == 3 and row.graphs == 4 and calls(handle) == {f"paged_attention.{kernel}"}


@pytest.mark.full
def test_a_cache_that_another_kernel_is_faster_for(monkeypatch):
    """Not the kernel of the first cache for all: that of a short text may be slow over a long one."""
    model, name = model_of("llama", 2), boundary()
    far = replace(
        _REGISTRY.kernels["paged_attention"][name], capture=Capture.WHOLE, cost_us=lambda p: 0.0 if p.sizes.context.hint > 64 else 1e9
    )
    monkeypatch.setitem(_REGISTRY.kernels["paged_attention"], name, far)
    monkeypatch.setattr(_REGISTRY, "generation", _REGISTRY.generation + 1000)
    want = [generated(model, 2, length, 3) for length in (14, 80, 14)]
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        for length, new, tokens in zip((14, 80, 14), (1, 2, 2), want, strict=True):
            cache = handle.new_cache(2, length + 3, page_size=8)
            assert torch.equal(generated(model, 2, length, 3, **named(cache)), tokens)
            assert len(traced(handle)) == new and (f"paged_attention.{name}" in calls(handle)) == (new == 2)
            del cache


def test_what_a_layer_was_compiled_for_stays_with_it():
    """Policy, autocast and hooks, also those that differ in nothing but what their code closes over."""
    model, twin = model_of("llama", 3), model_of("llama", 3)

    def scaled(by):
        return lambda module, given, out: by * out

    def same():
        got, want = (generated(m, *CALLS[0], output_logits=True, return_dict_in_generate=True).logits for m in (model, twin))
        torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=1e-3, atol=1e-3)

    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        same()
        with attnops.use("reference"):
            same()
            assert "paged_attention.reference" in calls(handle)
        for by in (2.0, 3.0):
            hooks = [m.model.layers[1].mlp.register_forward_hook(of_a_library(scaled(by))) for m in (model, twin)]
            same()
            for hook in hooks:
                hook.remove()
            same()
        # Plain layers under two policies, and one layer with either hook.
        assert len(traced(handle)) == 4 and regions(handle).refusal == ""


@pytest.mark.full
def test_one_hook_that_layers_call_in_two_ways():
    """Dynamo guards neither hooks nor the arguments that they asked for."""
    model = model_of("llama", 2)
    for layer, kwargs_too in zip(model.model.layers, (False, True), strict=True):
        layer.mlp.register_forward_hook(of_a_library(times_given), with_kwargs=kwargs_too)
    want = generated(model, *CALLS[0])
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        assert torch.equal(generated(model, *CALLS[0]), want)
        assert len(traced(handle)) == 2


def times_given(module, *given):
    return given[-1] * len(given)


def asked_for_more(model):
    """A layer to which it matters what kind of cache it has."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(of_a_library(times_two_if_layered), with_kwargs=True)


def times_two_if_layered(module, args, kwargs, out):
    return out[0] * (2 if hasattr(cache_in(kwargs), "layers") else 1), *out[1:]


def scaled(model):
    """Layers that each have a number of their own in their code."""
    for i, layer in enumerate(model.model.layers):
        layer.mlp.by = 1.0 + i
        layer.mlp.register_forward_hook(of_a_library(lambda module, given, out: out * module.by))


def read(model):
    """Code between layers whose shapes follow from values: a trace knows them, a capture of code that runs does not."""
    embed = model.model.embed_tokens
    embed.register_forward_hook(of_a_library(lambda module, given, out: out * given[0].new_ones(()).item()))


def looked_up(model):
    """A layer whose number is a key."""
    scales = {0: 1.0, 1: 2.0}
    for layer in model.model.layers:
        layer.mlp.layer_idx = layer.self_attn.layer_idx
        layer.mlp.register_forward_hook(of_a_library(lambda module, given, out: out * scales.get(module.layer_idx, 5.0)))


def compiled(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def own(model):
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (read, "_local_scalar_dense"),
        (looked_up, "cannot be traced alone"),
        (asked_for_more, "cannot be traced alone"),
        (compiled, "LlamaDecoderLayer has a forward of its own instance, or is compiled"),
        (scaled, "more than 2 layers of a step differ"),
        (own, "LlamaMLP has a forward of its own instance"),
    ],
)
def test_layers_that_share_no_code_are_traced_with_the_model(change, why, monkeypatch):
    monkeypatch.setattr("attnops.graphs.regional.MOST_KINDS", 2)
    model = model_of("llama", 3)
    change(model)
    want = generated(model, *CALLS[0])
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        assert torch.equal(generated(model, *CALLS[0]), want)
        report = handle.graphs.report()
        assert why in report.whole and f"traced whole: {report.whole}" in str(report)
        assert replays(handle) == 3 and not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.full  # test_decode_graphs.py has threads over one model, and the lock of a trace is one for all models
def test_two_models_in_two_threads():
    models = [tiny.model("llama"), tiny.model("llama", num_hidden_layers=3)]
    want = [generated(model, 2, 9, 4) for model in models]
    handles = [attnops.patch(model, cache="paged", decode=how("piecewise")) for model in models]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda model: generated(model, 2, 9, 4), models))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [regions(handle).refusal for handle in handles] == ["", ""]


def test_frames_that_torch_missed_run_again(monkeypatch):
    """torch's check of fullgraph reads a count that other threads reset."""
    model, real, missed = tiny.model("llama"), torch.compile, []

    def compiled(function, **more):
        run = real(function, **more)

        def called(*args):
            out = run(*args)
            if len(missed) < 1:
                missed.append(1)
                raise RuntimeError("torch.compile with fullgraph=True found no compiled frames.")
            return out

        return called

    want = generated(model, 2, 9, 4)
    monkeypatch.setattr(torch, "compile", compiled)
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        assert torch.equal(generated(model, 2, 9, 4), want) and missed and regions(handle).refusal == ""


@pytest.mark.full
def test_code_of_hooks_that_are_gone_is_freed(monkeypatch):
    monkeypatch.setattr(regional, "MOST_CODE", 4)
    model, alive = tiny.model("llama"), []
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        for factor in (1.0, 2.0, 3.0, 4.0):

            def hook(module, given, out, factor=factor):
                return out * factor

            alive.append(weakref.ref(hook))
            handles = [layer.mlp.register_forward_hook(of_a_library(hook)) for layer in model.model.layers]
            generated(model, 2, 9, 3)
            for each in handles:
                each.remove()
            del hook
        handle.release()
        gc.collect()
        assert sum(ref() is not None for ref in alive) < 3
