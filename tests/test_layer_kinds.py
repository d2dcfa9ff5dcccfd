"""Layers over keys and over latents: what both owe, and their compiled code: how many graphs there
are, and that it gives the same."""

import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from attnops.core.errors import NoGradient
from attnops.core.kernel import kernels_of
from tests import test_latent_attention as latents, test_nn as keys
from tests.lowering.models import compiled_code, kernel_calls
from tests.modules import NAN, close, cu, padded, pages_of

E, F32 = 24, torch.float32
BUILT = {
    "keys": lambda: keys.layer("qwen3", F32),
    "sinks": lambda: keys.layer("gpt_oss", F32),
    "expanded": lambda: latents.layer(F32, absorb=0),
    "latents": lambda: latents.layer(F32, absorb=6),
}
KINDS = ("keys", "latents")


class Model(nn.Module):
    """Layers of everything but the vocabulary."""

    def __init__(self, kind, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(BUILT[kind]() for _ in range(layers))

    def forward(self, hidden, pages=None, **form):
        for i, each in enumerate(self.layers):
            hidden = hidden + each(hidden, **pages[i] if pages else {}, **form)
        return hidden

    def cache(self):
        """One of these layers."""
        if hasattr(self.layers[0], "kv_b_proj"):
            return latents.cache_for(F32, layers=len(self.layers))
        return keys.cache_for(
            self.layers[0].attention, num_layers=len(self.layers), dtype=F32, length=64
        )


def counted(model, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(model, backend=counter, fullgraph=True)


def given(cache, counts, **how):
    """The arguments of a step of as many requests as counts. Missing ones are allocated."""
    while len(cache.requests) < len(counts):
        cache.alloc()
    batch = cache.batch(cache.requests[: len(counts)], counts, **how)
    return {"batch": batch, "pages": [pages_of(cache, i) for i in range(len(cache.layers))]}


def both(runs, caches, counts, **how):
    """One step by each of runs on its own cache; they agree, and so do the pages. Returns its
    batch."""
    x = torch.randn(sum(counts), E)
    steps = [given(cache, counts, **how) for cache in caches]
    close(*(run(x, **step) for run, step in zip(runs, steps, strict=True)), 1e-4)
    for pages in zip(*(cache.layers for cache in caches), strict=True):
        close(*pages, 1e-5)
    return steps[0]["batch"]


@pytest.mark.parametrize("kind", ["keys", "expanded", "latents"])
def test_tokens_of_nobody(kind):
    """Padding that holds NaN, of a packed step and of paged ones, gives 0 and reaches nobody."""
    model = Model(kind, 1)
    cache, x = model.cache(), torch.randn(9, E)
    layer, a = model.layers[0], cache.alloc()
    layer.load_state_dict({n: p * (n != "o_proj.bias") for n, p in layer.state_dict().items()})
    with torch.no_grad():
        want = layer(x[None])[0]
        for start, stop in ((0, 6), (6, 9)):
            how = {} if kind == "keys" else {"prefix_tokens": 4}
            batch = padded(cache.batch([a], stop - start, **how), 2)
            got = layer(
                F.pad(x[start:stop], (0, 0, 0, 2), value=NAN), batch=batch, **pages_of(cache)
            )
            close(got, F.pad(want[start:stop], (0, 0, 0, 2)), 1e-5)
        got = layer(F.pad(x, (0, 0, 0, 2), value=NAN), cu_seqlens=cu([9]), max_seqlen=11)
        close(got, F.pad(want, (0, 0, 0, 2)), 1e-5)


@pytest.mark.parametrize("kind", ["keys", "expanded", "latents"])
def test_a_paged_call_has_no_gradient(kind):
    model = Model(kind, 1)
    with pytest.raises(NoGradient, match="no_grad"):
        model(torch.randn(3, E), **given(model.cache(), [3]))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    layer, x = BUILT[kind](), torch.randn(1, 6, E)
    cache = (
        latents.cache_for(torch.bfloat16)
        if kind == "latents"
        else keys.cache_for(layer.attention, dtype=torch.bfloat16)
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        dense = layer(x)
        paged = layer(x[0], batch=cache.batch([cache.alloc()], 6), **pages_of(cache))
    close(dense.float(), layer(x), 0.25)
    close(paged, dense[0], 0.1)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_dense_and_packed(kind):
    model = Model(kind)
    counter, compiled = counted(model)
    for shape in ((2, 5), (3, 7), (4, 6), (9, 2), (5, 5)):
        x = torch.randn(*shape, E)
        close(compiled(x), model(x), 1e-5)
    assert counter.frame_count == 2
    for lengths in ([3, 5, 2], [4, 4, 9, 1], [7, 2], [11, 2, 2, 2, 6]):
        x = torch.randn(sum(lengths), E)
        form = {"cu_seqlens": cu(lengths), "max_seqlen": max(lengths)}
        close(compiled(x, **form), model(x, **form), 1e-5)
    assert counter.frame_count == 4


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["keys", "sinks"])
def test_one_graph_a_kind_of_step(kind, mode):
    """Prefill and decode are one graph each once the first change of shape has made them
    dynamic."""
    model = Model(kind)
    counter, compiled = counted(model)
    caches = [model.cache() for _ in range(2)]

    def graphs(*steps):
        for counts in steps:
            both((compiled, model), caches, counts)
        return counter.frame_count

    with mode():
        assert graphs([3, 5], [2, 4, 3]) == 2
        assert graphs([4, 2, 1, 1], [1, 7], [0, 3, 2], [2, 2, 2, 2]) == 2
        assert (warm := graphs([1, 1], [1, 1, 1])) <= 4
        assert graphs([1, 1, 1, 1], [1, 1], [1] * 5, [2, 1, 3], [1, 1, 1]) == warm


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "backend"), [("expanded", "eager"), ("latents", "aot_eager")])
def test_one_graph_a_kind_of_step_over_latents(kind, backend):
    """Extends, too, whatever their batch and lengths; short ones are absorbed where the layer
    allows it."""
    model = Model(kind, 1)
    counter, compiled = counted(model, backend)
    caches = [model.cache() for _ in range(2)]

    def graphs(*steps, fresh=False, chunks=None):
        for counts in steps:
            for cache in caches:
                cache.reset() if fresh else None
            before = sum(caches[0].length(r) for r in caches[0].requests[: len(counts)])
            batch = both(
                (compiled, model),
                caches,
                counts,
                **({} if chunks is None else {"prefix_tokens": -(-before // chunks)}),
            )
            assert fresh or chunks == (None if batch.prefix is None else len(batch.prefix))
        return counter.frame_count

    with torch.no_grad():
        assert (prefill := graphs([9, 8], [7, 12, 8], fresh=True)) <= 2
        assert graphs([8, 9, 10, 7], [11, 8], fresh=True) == prefill
        assert (extend := graphs([7, 8, 9], [9, 7], chunks=2)) <= prefill + 2
        assert graphs([8, 7], [7, 9, 8], chunks=2) == extend
        graphs([9, 8, 7, 12], fresh=True)
        assert (decode := graphs([1, 1], [1, 1, 1])) <= extend + 2
        assert graphs([1, 1, 1, 1], [1, 1], [1, 1, 1]) == decode
        # Another graph where the comparison of the two forms says so, and the same one where it
        # does not.
        assert (short := graphs([2, 3], [4, 2, 2], chunks=2)) <= decode + 2 * (kind == "latents")
        assert graphs([3, 2], [2, 2, 3], chunks=2) == short


@pytest.mark.parametrize("kind", KINDS)
def test_layers_share_one_graph(kind):
    """Nothing of a layer but its weights' values enters its graph: compiled one by one, two layers
    are one."""
    model, plain = Model(kind), Model(kind)
    plain.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    for each in model.layers:
        each.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        both((model, plain), [model.cache() for _ in range(2)], [2, 3])
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind):
    model = Model(kind)
    caches = [model.cache() for _ in range(2)]
    with torch.no_grad():
        exported = torch.export.export(
            model, (torch.randn(7, E),), given(model.cache(), [3, 4])
        ).module()
        both((exported, model), caches, [3, 4])


@pytest.mark.full
@pytest.mark.parametrize(
    ("counts", "op", "calls", "how"),
    [([1, 1], "mla_attention", 1, {}), ([8, 9], "varlen_attention", 2, {"prefix_tokens": 99})],
    ids=["decode", "extend"],
)
def test_generated_code(counts, op, calls, how):
    """What Inductor writes names the kernels, and copies neither the pages nor the weight whose
    halves are absorbed."""
    model = Model("latents", 1)
    caches = [model.cache() for _ in range(2)]
    with torch.no_grad():
        both((model, model), caches, [6, 5])
        _, code = compiled_code(
            lambda: both((torch.compile(model, fullgraph=True), model), caches, counts, **how)
        )
    found = [call.split(".") for call in kernel_calls(code)]
    attends = [kernel for name, kernel in found if name == op]
    assert len(attends) == calls and set(attends) <= set(kernels_of(op)), found
    assert not {"mla_attention", "varlen_attention"} - {op} & {name for name, _ in found}
    made = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    assert f"{sum(counts)}, {E}" in made, "the pattern finds what is made"
    heads, latent = latents.H, latents.DC
    halves = [
        f"{heads}, {a}, {b}"
        for n in (latents.NOPE, latents.V)
        for a, b in ((n, latent), (latent, n))
    ]
    weights = [f"{heads * (latents.NOPE + latents.V)}, {latent}", *halves]
    assert not [
        size for size in made if size.startswith(f"{caches[0].num_pages}, ") or size in weights
    ], made
