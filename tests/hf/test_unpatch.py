"""What `unpatch()` leaves behind: no memory of the model, and no half of a patch."""

import gc
import itertools
import weakref
from contextlib import contextmanager

import pytest

import attnops
from attnops.hf import tiny
from tests.hf.test_decode_graphs import generated, how
from tests.hf.test_defaults import auto

CALL = (2, 14, 3)
WAYS = {
    "default": dict,
    "paged": lambda: {"cache": "paged"},
    "auto": lambda: {"decode": auto()},
    "breakable": lambda: {"cache": "paged", "decode": how("breakable")},
    "piecewise": lambda: {"cache": "paged", "decode": how("piecewise", compile_after=0)},
}


@contextmanager
def no_collection():
    """Within the block objects are freed by their reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parts(model):
    """Weak references to a model's modules and parameters."""
    return [weakref.ref(part) for part in (*model.modules(), *model.parameters())]


def alive(parts):
    return [type(part()).__name__ for part in parts if part() is not None]


# Traces of llama's layers leave no cycles behind.
FEW = {("default", "llama"), ("paged", "deepseek_v3"), ("auto", "llama"), ("breakable", "gpt_oss"), ("piecewise", "gpt_oss")}
EACH = [
    case if case in FEW else pytest.param(*case, marks=pytest.mark.full)
    for case in itertools.product(WAYS, ("llama", "deepseek_v3", "gpt_oss"))
]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_a_model_is_freed_at_once(way, name):
    """By reference counts, while the handle and its report live on."""
    with no_collection():
        model = tiny.model(name)
        handle = attnops.patch(model, **WAYS[way]())
        generated(model, *CALL)
        head, *_ = str(handle.report()).splitlines()
        handle.unpatch()
        held = parts(model)
        assert handle.model is model
        del model
        assert not alive(held)
        assert handle.model is None and handle.took is not None
        assert str(handle.report()).startswith(head) and "unpatched" in repr(handle)


@pytest.mark.parametrize("way", ["default", "paged", "auto", "breakable", pytest.param("piecewise", marks=pytest.mark.full)])
def test_a_patched_model_is_freed_by_a_collection(way):
    model = tiny.model("llama")
    attnops.patch(model, **WAYS[way]())
    generated(model, *CALL)
    held = parts(model)
    del model
    gc.collect()
    assert not alive(held)
