"""Steps whose layers are compiled once a kind: eager's tokens by few traces, and the whole model
traced where layers cannot be."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.kernel import _REGISTRY, Capture
from attnops.graphs import per_layer
from attnops.hf import tiny
from attnops.hf.cache.names import cache_in, named
from tests.graphs.models import boundary
from tests.hf.decoding import CALL, beside, generated, logits, replays
from tests.hf.helpers import of_a_library

CALLS = ((2, 14, 4), (3, 14, 4), (2, 60, 4), (5, 9, 4))
"""Pages that are made anew for more rows and for a longer text; buckets of two sizes and more."""


def regions(handle):
    return handle._paged.decoder().regions


def traced(handle):
    """The layers that were traced."""
    return [
        program
        for program in regions(handle).programs
        if any(part.calls or part.breaks for part in program.split.parts)
    ]


def kernels(handle):
    """The calls of attention in what was compiled, as `op.kernel`."""
    return {
        str(cut)
        for program in regions(handle).programs
        for part in program.split.parts
        for cut in (*part.calls, *part.breaks)
    }


def model_of(name, layers):
    full = {"gemma3": ["sliding_attention"] * (layers - 1) + ["full_attention"]}
    return tiny.model(
        name, num_hidden_layers=layers, **({"layer_types": full[name]} if name in full else {})
    )


def compiled(model="llama", **more):
    """model: with three layers by default."""
    return beside(model_of(model, 3) if isinstance(model, str) else model, "piecewise", **more)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [("llama", 6, 1), ("phi3", 3, 1), ("gpt_oss", 3, 2), ("gemma3", 4, 2), ("deepseek_v3", 3, 2)],
)
def test_one_trace_for_each_kind_of_layer(name, layers, kinds, small_pages):
    """However many layers there are, and for all caches and batches: windows, latents, experts,
    weights that are one matrix or several."""
    with compiled(model_of(name, layers)) as pair:
        counts, handle = set(), pair.handle
        for call in CALLS:
            pair.same(*call)
            counts.add(len(regions(handle).programs))
        # Pages that grow beyond the window have one table more, for which the beginning of a step
        # is traced again.
        assert len(traced(handle)) == kinds and len(counts) == 1 + (name in ("gpt_oss", "gemma3"))
        report = handle.graphs.report()
        assert (
            report.whole == "" and report.modes == {"decode": "whole"} and handle.plain_steps == 0
        )
        others = report.parts["decode"] - 2 * layers
        assert others >= 3, "the beginning of the step, the rotation and the last norm"
        assert report.compiled["decode"] <= 2 * kinds + others


@pytest.mark.full
@torch._dynamo.config.patch(accumulated_recompile_limit=1)
def test_a_second_cache_and_a_single_row():
    """Also where torch's own limit of compilations, which all models of a process count to, is
    reached."""
    with compiled() as pair:
        handle = pair.handle
        for most, length, traces in ((2, 30, 1), (4, 90, 0)):
            pair.same(2, 14, 4, **named(handle.new_cache(most, length)))
            assert (
                len(traced(handle)) == 1 and (handle.graphs.report().compile_seconds > 0) == traces
            )
        for _ in range(2):
            pair.same(1, 14, 4)
            assert len(traced(handle)) == 2, "a size of one is a constant"


@pytest.mark.full
@pytest.mark.parametrize("pack", [True, False])
def test_linears_of_a_layer_are_fused(pack):
    """Those of all layers, by the code of one: each is guarded by where its own weights lie."""
    with compiled(pack=pack) as pair:
        pair.same(*CALL)
        [program] = traced(pair.handle)
        nodes = [node for part in program.split.parts for node in part.module.graph.nodes]
        assert sum(node.target is torch.nn.functional.linear for node in nodes) == (
            4 if pack else 7
        )
        if pack:
            other = pair.model.model.layers[2].self_attn.k_proj
            other.weight.data = other.weight.data.clone()
            pair.same(*CALL)
            assert len(traced(pair.handle)) == 2, "a layer whose weights lie apart is another kind"


@pytest.mark.full
def test_graphs_are_cut_where_a_kernel_may_not_be_captured():
    kernel = boundary()
    with compiled(kernel=kernel) as pair:
        pair.same(*CALL)
        [row] = pair.handle.graphs.report().rows
        assert (
            len(row.breaks) == 3
            and row.graphs == 4
            and kernels(pair.handle) == {f"paged_attention.{kernel}"}
        )


@pytest.mark.full
def test_a_cache_that_another_kernel_is_faster_for(monkeypatch):
    """Not the kernel of the first cache for all: that of a short text may be slow over a long
    one."""
    name, known = boundary(), _REGISTRY.kernels["paged_attention"]
    far = replace(
        known[name],
        capture=Capture.WHOLE,
        cost_us=lambda p: 0.0 if p.sizes.context.hint > 64 else 1e9,
    )
    monkeypatch.setitem(known, name, far)
    monkeypatch.setattr(_REGISTRY, "generation", _REGISTRY.generation + 1000)
    with compiled() as pair:
        for length, new in ((14, 1), (80, 2), (14, 2)):
            pair.same(2, length, 3, **named(pair.handle.new_cache(2, length + 3, page_size=8)))
            assert len(traced(pair.handle)) == new and (
                f"paged_attention.{name}" in kernels(pair.handle)
            ) == (new == 2)


def test_what_a_layer_was_compiled_for_stays_with_it():
    """Policy, autocast and hooks, also those that differ in nothing but what their code closes
    over."""
    with compiled() as pair:

        def same():
            got, want = (logits(model, *CALL) for model in (pair.model, pair.twin))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)

        same()
        with attnops.use("reference"):
            same()
            assert "paged_attention.reference" in kernels(pair.handle)
        for by in (2.0, 3.0):
            scaled = of_a_library(lambda module, given, out, by=by: by * out)
            hooks = [
                model.model.layers[1].mlp.register_forward_hook(scaled)
                for model in (pair.model, pair.twin)
            ]
            same()
            for hook in hooks:
                hook.remove()
            same()
        # Plain layers under two policies, and one layer with either hook.
        assert len(traced(pair.handle)) == 4 and regions(pair.handle).refusal == ""


@pytest.mark.full
def test_one_hook_that_layers_call_in_two_ways():
    """Dynamo guards neither hooks nor the arguments that they asked for."""
    model = model_of("llama", 2)
    for layer, kwargs_too in zip(model.model.layers, (False, True), strict=True):
        layer.mlp.register_forward_hook(of_a_library(times_given), with_kwargs=kwargs_too)
    with compiled(model) as pair:
        pair.same(*CALL)
        assert len(traced(pair.handle)) == 2


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
    """Code between layers whose shapes follow from values: a trace knows them, a capture of code
    that runs does not."""
    embed = model.model.embed_tokens
    embed.register_forward_hook(
        of_a_library(lambda module, given, out: out * given[0].new_ones(()).item())
    )


def looked_up(model):
    """A layer whose number is a key."""
    scales = {0: 1.0, 1: 2.0}
    for layer in model.model.layers:
        layer.mlp.layer_idx = layer.self_attn.layer_idx
        layer.mlp.register_forward_hook(
            of_a_library(lambda module, given, out: out * scales.get(module.layer_idx, 5.0))
        )


def compiled_by_hand(model):
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
        (compiled_by_hand, "LlamaDecoderLayer has a forward of its own instance, or is compiled"),
        (scaled, "more than 2 layers of a step differ"),
        (own, "LlamaMLP has a forward of its own instance"),
    ],
)
def test_layers_that_share_no_code_are_traced_with_the_model(change, why, monkeypatch):
    monkeypatch.setattr("attnops.graphs.per_layer.MOST_KINDS", 2)
    model, twin = model_of("llama", 3), model_of("llama", 3)
    change(model)
    change(twin)
    with compiled(model, twin=twin) as pair:
        pair.same(*CALL)
        report = pair.handle.graphs.report()
        assert why in report.whole and f"traced whole: {report.whole}" in str(report)
        assert replays(pair.handle) == 3 and not any(
            "forward" in vars(layer) for layer in model.model.layers
        )


# test_decode_graphs.py has threads over one model, and the lock of a trace is one for all models
@pytest.mark.full
def test_two_models_in_two_threads():
    with (
        compiled(tiny.model("llama")) as first,
        compiled() as second,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda pair: pair.same(*CALL), (first, second)))
        assert [regions(pair.handle).refusal for pair in (first, second)] == ["", ""]


def test_frames_that_torch_missed_run_again(monkeypatch):
    """torch's check of fullgraph reads a count that other threads reset."""
    real, missed = torch.compile, []

    def compiled_once(function, **more):
        run = real(function, **more)

        def called(*args):
            out = run(*args)
            if not missed:
                missed.append(1)
                raise RuntimeError("torch.compile with fullgraph=True found no compiled frames.")
            return out

        return called

    monkeypatch.setattr(torch, "compile", compiled_once)
    with compiled(tiny.model("llama")) as pair:
        pair.same(*CALL)
        assert missed and regions(pair.handle).refusal == ""


@pytest.mark.full
def test_code_of_hooks_that_are_gone_is_freed(monkeypatch):
    monkeypatch.setattr(per_layer, "MOST_CODE", 4)
    alive = []
    with compiled(tiny.model("llama")) as pair:
        for factor in (1.0, 2.0, 3.0, 4.0):

            def hook(module, given, out, factor=factor):
                return out * factor

            alive.append(weakref.ref(hook))
            with ExitStack() as hooks:
                for layer in pair.model.model.layers:
                    hooks.enter_context(layer.mlp.register_forward_hook(of_a_library(hook)))
                generated(pair.model, 2, 9, 3)
            del hook
        pair.handle.release()
        gc.collect()
        assert sum(ref() is not None for ref in alive) < 3
