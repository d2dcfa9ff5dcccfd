"""Rotations whose frequencies follow from the longest position of a call: those of longrope are in
graphs, for texts on both sides of the boundary."""

import copy

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.graphs.per_layer import Regions
from attnops.hf import tiny
from attnops.hf.steps import prompt
from tests.hf.decoding import beside, first, turns
from tests.hf.helpers import tokens

BOUNDARY = 32


def longrope(name, width=8, **more):
    """A tiny model. width: half of the numbers of a head that are rotated."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": BOUNDARY,
        "short_factor": [1.0] * width,
        "long_factor": [2.0 + i for i in range(width)],
        **more,
    }
    sizes = {"max_position_embeddings": 8 * BOUNDARY, "rope_parameters": rope}
    if name == "phi3":
        sizes["original_max_position_embeddings"] = BOUNDARY
    return tiny.model(name, **sizes)


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    monkeypatch.setattr(prompt, "CAPTURED", (32, 64, 128))


MODELS = {"phi3": 8, "llama": 8, "minicpm3": 4}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_steps_on_both_sides(name, monkeypatch):
    """Sides alternate over the same graphs. Phi-3 drops a cache whose steps cross the boundary."""
    monkeypatch.delattr(Regions, "_traced")  # no layer is compiled
    crosses = [] if name == "phi3" else [(2, 28, 8)]
    with first(longrope(name, MODELS[name])) as pair:
        for took in ("", "captured", "captured"):
            for call in ((2, 60, 3), (2, 25, 3), *crosses):
                pair.near(*call)
                assert pair.took.decode == "breakable"
                if took:
                    assert pair.took.prompt == took, pair.handle.report()
        assert "chosen on the device" in str(pair.handle.report())


@pytest.mark.parametrize("name", ["llama", "minicpm3"])
def test_turns_that_cross_the_boundary(name):
    """Tokens of earlier turns keep the angles of a short text."""
    ids, lengths = tokens(2, 60), [14, 9, 11, 0, 25]
    with first(longrope(name, MODELS[name])) as pair:
        want = [*turns(pair.twin, DynamicCache(config=pair.twin.config), ids, lengths, 4)]
        for _ in range(2):
            cache, ran = pair.handle.new_cache(2, 90), []
            for got, right in zip(turns(pair.model, cache, ids, lengths, 4), want, strict=True):
                assert torch.equal(got, right)
                ran.append(pair.took.prompt)
            del cache  # the next one is of its pages
        assert ran == ["captured"] * len(lengths), pair.handle.report()


@pytest.mark.parametrize(
    ("call", "compiled"),
    [
        ((1, 40, 2), False),
        ((3, 30, 2), False),
        pytest.param((2, 40, 2), True, marks=pytest.mark.full),
    ],
)
def test_chunks_have_the_longest_position_of_all(call, compiled, monkeypatch):
    """The first chunk of a long text ends below the boundary."""
    monkeypatch.setattr(prompt, "CHUNK", 24)
    with first(longrope("phi3")) as pair:
        if compiled:
            pair.handle.capture(pair.handle.new_cache(2, 44))
        for _ in range(2):
            pair.near(*call)
        assert pair.took.prompt == "captured", pair.handle.report()


def test_compiled_steps_cross_the_boundary():
    with beside(longrope("llama"), "piecewise", compile_after=0) as pair:
        for _ in range(2):
            assert pair.same(2, 28, 8).decode == "piecewise"


def test_frequencies_have_transformers_dtype_and_go_with_the_patch():
    model = longrope("phi3")
    rotation, kind = model.model.rotary_emb, type(model.model.rotary_emb)
    kept, own = copy.deepcopy(rotation), copy.deepcopy(rotation).bfloat16()
    with attnops.patch(model):
        again = copy.deepcopy(model)
        model.bfloat16()
        for longest in (BOUNDARY - 1, BOUNDARY):
            given = torch.zeros(1), torch.tensor([[3, longest]])
            assert all(map(torch.equal, rotation(*given), own(*given)))
        assert torch.equal(
            again.model.rotary_emb(*given)[0], longrope("phi3").model.rotary_emb(*given)[0]
        )
    assert type(rotation) is kind
    for held in ("_buffers", "_non_persistent_buffers_set"):
        assert {*vars(rotation)[held]} == {*vars(kept)[held]}


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize("name", ["phimoe", "llama"])
def test_rotations_of_other_kinds_have_no_graphs(name):
    """Dynamic ones remember the longest text; PhiMoE's own code scales by the length."""
    if name == "phimoe":
        model = longrope(name, short_mscale=1.0, long_mscale=1.5)
    else:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        model = tiny.model(name, rope_parameters=rope, max_position_embeddings=BOUNDARY)
    with first(model) as pair:
        for _ in range(3):
            assert pair.same(2, 14, 2).prompt == ""
        assert "rotations depend on the length" in pair.decoder.prompts.uncaptured(fresh=True)
