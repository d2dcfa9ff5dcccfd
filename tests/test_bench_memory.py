"""Benchmarks ask for memory before they take it: fewer layers, said on the row, or a refusal with the number needed."""

import copy
import os

import pytest
import torch

from attnops.bench import Point, Setup, models
from attnops.core.errors import InvalidInput

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(("there", "layers"), [(400 * GIB, 4), (13 * GIB, 2), (23 * GIB // 2, 1)])
def test_a_model_has_as_many_layers_as_memory_holds(monkeypatch, there, layers):
    monkeypatch.setattr(models, "free", lambda device: there)
    monkeypatch.setitem(models.LAYERS["toy"], "llama-3-8b-shape", 4)
    made = models.fitted(Setup(CPU, quick=True), "llama-3-8b-shape", Point(1, 128))
    assert made.num_hidden_layers == layers and len(getattr(made, "layer_types", None) or range(layers)) == layers


@pytest.mark.parametrize(("there", "layers"), [(1 * GIB, 0), (14 * GIB, 32)])
def test_a_model_that_does_not_fit_is_refused_with_the_number(monkeypatch, there, layers):
    monkeypatch.setattr(models, "free", lambda device: there)
    with pytest.raises(InvalidInput, match=r"memory: got .* GiB free, want .* GiB free, for .* layers of llama-3-8b") as caught:
        models.build(Setup(CPU, quick=True, layers=layers), "llama-3-8b-shape")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"proc/meminfo": "MemTotal:       99 kB\nMemFree:  1 kB\nMemAvailable:    64 kB\n"}, 64 << 10),
        ({"proc/meminfo": "MemAvailable:    64 kB\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        ({"proc/meminfo": "MemAvailable:    64 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 64 << 10),
        ({"proc/meminfo": "MemAvailable:    64 kB\n", "sys/fs/cgroup/memory.max": "999999\n"}, 64 << 10),
        ({"proc/meminfo": "MemAvailable:    64 kB\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n"}, 8192),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_what_is_free_on_a_cpu_is_what_a_process_may_take(tmp_path, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert models.free(CPU, tmp_path) == (machine if want is None else want) and 0 < models.free(CPU) <= machine


def test_what_is_needed_counts_caches_and_shared_weights_once():
    setup = Setup(CPU, quick=True)
    for name in ("llama", "gemma2"):
        made, model = models.config(setup, name), models.build(setup, name)
        weights, head = sum(p.nbytes for p in model.parameters()), model.get_output_embeddings().weight.nbytes
        assert models.needed(setup, made, None) == int(models.SPARE * (weights + 2 * head)) + models.OVERHEAD
    assert models.needed(setup, made, Point(1 << 10, 1 << 20)) > 10 * models.needed(setup, made, None)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "gemma3"])
def test_widening_module_by_module_is_a_copy(name):
    model = models.build(Setup(CPU, quick=True), name)
    prompt = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    before = {n: p.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        whole = copy.deepcopy(model).to(torch.float64)
        pieces = models.widened(model)
        for some in (whole, pieces):
            if callable(choose := getattr(some, "set_experts_implementation", None)):
                choose("eager")
        want, got = whole(prompt).logits, pieces(prompt).logits
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(before[n], p) and p.dtype == torch.float32 for n, p in model.named_parameters())
    assert all(p.dtype == torch.float32 for p in pieces.parameters()), "what was widened is dropped again"
