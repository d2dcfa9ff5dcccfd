"""Benchmarks ask for memory before they take it: fewer layers, said on the row, or a refusal with
the number needed."""

import copy
import os
from dataclasses import replace

import pytest
import torch

from attnops.bench import Point, Setup, models
from attnops.core.errors import InvalidInput

GIB = 1 << 30


SETUP, SHAPE = Setup(torch.device("cpu"), quick=True), "llama-3-8b-shape"


@pytest.mark.parametrize(("gib", "layers"), [(400, 4), (13, 2), (11.5, 1)])
def test_a_model_has_as_many_layers_as_memory_holds(monkeypatch, gib, layers):
    monkeypatch.setattr(models, "free", lambda device: gib * GIB)
    monkeypatch.setitem(models.LAYERS["toy"], SHAPE, 4)
    made = models.fitted(SETUP, SHAPE, Point(1, 128))
    assert (
        made.num_hidden_layers == layers
        and len(getattr(made, "layer_types", None) or range(layers)) == layers
    )


@pytest.mark.parametrize(("gib", "layers"), [(1, 0), (14, 32)])
def test_a_model_that_does_not_fit_is_refused_with_the_number(monkeypatch, gib, layers):
    monkeypatch.setattr(models, "free", lambda device: gib * GIB)
    with pytest.raises(
        InvalidInput,
        match=r"^memory: got .* GiB free, want .* GiB free, for .* layers of llama-3-8b.*$",
    ):
        models.build(replace(SETUP, layers=layers), SHAPE)


LINUX = {"proc/meminfo": "MemTotal:       99 kB\nMemAvailable:    64 kB\n"}
GROUP = "sys/fs/cgroup/memory.max"
OLDER = "sys/fs/cgroup/memory/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        (LINUX, 64 << 10),
        ({**LINUX, GROUP: "4096\n"}, 4096),
        ({**LINUX, GROUP: "max\n"}, 64 << 10),
        ({**LINUX, GROUP: "999999\n"}, 64 << 10),
        ({**LINUX, OLDER: "8192\n"}, 8192),
        ({OLDER: "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_what_is_free_on_a_cpu_is_what_a_process_may_take(tmp_path, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert models.free(SETUP.device, tmp_path) == (want or machine)
    assert 0 < models.free(SETUP.device) <= machine


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_is_needed_counts_caches_and_shared_weights_once(name):
    made, model = models.config(SETUP, name), models.build(SETUP, name)
    weights = sum(p.nbytes for p in model.parameters())
    head = model.get_output_embeddings().weight.nbytes
    assert (
        models.needed(SETUP, made, None)
        == int(models.SPARE * (weights + 2 * head)) + models.OVERHEAD
    )
    assert models.needed(SETUP, made, Point(1 << 10, 1 << 20)) > 10 * models.needed(
        SETUP, made, None
    )


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "gemma3"])
@torch.no_grad()
def test_widening_module_by_module_is_a_copy(name):
    model, prompt = models.build(SETUP, name), torch.randint(3, 50, (2, 7))
    before, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(model).to(torch.float64)
    pieces = models.widened(model)
    for some in (whole, pieces):
        if callable(choose := getattr(some, "set_experts_implementation", None)):
            choose("eager")
    got = pieces(prompt).logits
    torch.testing.assert_close(got, whole(prompt).logits, rtol=1e-5, atol=1e-6)
    assert got.dtype == torch.float64
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert {p.dtype for p in pieces.parameters()} == {torch.float32}, (
        "what was widened is dropped again"
    )
