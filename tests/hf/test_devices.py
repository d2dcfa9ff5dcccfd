"""Patched models that are moved to another device, and those that are split over several: a CPU
with the meta device beside it."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from attnops.hf import tiny
from attnops.hf.cache import idle_pages as pool
from attnops.hf.cache.idle_pages import Pool
from attnops.hf.steps import decode_loop as sample
from attnops.hf.steps.decode_loop import Loop
from attnops.hf.steps.eligibility import Asked
from tests.graphs.standin import StandIn
from tests.hf.decoding import CALL, beside

CPU, META = (torch.device(name) for name in ("cpu", "meta"))


def test_the_choice_of_tokens_follows_a_model_that_moves(monkeypatch):
    """Its buffers on the old device gave the first step there its token, and no graph could be made
    of that."""
    made = {}

    def graphs(device):
        made[device] = StandIn()
        return made[device]

    monkeypatch.setattr(sample, "CudaGraphs", graphs)
    decoder = SimpleNamespace(
        turn=nullcontext(), how=SimpleNamespace(graphs=None), why_not=lambda rows: ""
    )
    loop, logits = Loop(), SimpleNamespace(logits=torch.zeros(2, 3, 16))
    seen = []

    def decoded(asked, decoder, tail, logits):
        tensors = (tail.tokens, tail.token, tail.position, tail._scores, tail._news)
        seen.append((tail, {t.device for t in tensors}))

    monkeypatch.setattr(sample, "_decoded", decoded)
    for device in (CPU, CPU, META, CPU):
        owner = SimpleNamespace(
            _prefill=lambda *args, **kwargs: logits, _optimize_model_for_decode=nullcontext
        )
        cache = SimpleNamespace(max_length=16)
        monkeypatch.setattr(sample, "cache_in", lambda given, cache=cache: cache)
        ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
        asked = Asked(owner, ids, [], [], SimpleNamespace(do_sample=False), None, {})
        loop._run(asked, decoder, None)
        assert seen[-1][1] == {device}
        assert all(
            graph.alive == (where == device)
            for where, each in made.items()
            for graph in each.graphs[-1:]
        )
    assert seen[0][0] is seen[1][0] and made.keys() == {CPU, META}


class State:
    """Of a cache over pages."""

    def __init__(self, pages):
        self.pages = pages


def test_pages_on_the_device_that_a_model_has_left_are_freed(monkeypatch):
    monkeypatch.setattr(
        pool,
        "ModelPages",
        lambda sizes, page_size: SimpleNamespace(sizes=sizes, forced=page_size, nbytes=8),
    )
    dropped = []
    kept = Pool(dropped.append)

    def used(device):
        cache = kept.lend(
            lambda pages: SimpleNamespace(state=State(pages)), pool.Sizes(2, 16, (), device, None)
        )
        cache.state.give_back()
        return cache.state.pages

    first = used(CPU)
    assert used(CPU) is first and not dropped
    second = used(META)
    assert second is not first and dropped == [first] and list(kept._idle) == [second]


class Far(nn.Parameter):
    """A weight that says it lies on a GPU."""

    device = torch.device("cuda:1")


def split(model):
    """As accelerate does it: a forward of the instance's own that moves inputs, and weights on
    another device."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    projection = model.model.layers[-1].mlp.up_proj
    projection.weight = Far(projection.weight.detach())


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_model_that_is_split_goes_without_and_says_so(order):
    model = tiny.model("llama")
    twin = copy.deepcopy(model)
    if order == "before":
        split(model)
    with beside(model, "auto", twin) as pair:
        if order == "after":
            assert pair.same(*CALL).decode == "breakable"
            split(model)
        pair.same(*CALL)
        assert (pair.took.cache, pair.took.decode) == ("hf", "hf")
        assert pair.took.why == "the model is split over several devices: cpu, cuda:1"


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summed(nn.Module):
    """A projection whose input features are spread over ranks."""

    def __init__(self, own, kind):
        super().__init__()
        self.own, self.kind = own, kind

    def forward(self, x):
        out = self.own(x)
        if self.kind == "functional":
            return functional.all_reduce(out, "sum", dist.group.WORLD)
        dist.all_reduce(out)
        return out


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize("kind", ["in place", "functional", "none"])
def test_steps_that_wait_for_other_ranks_have_graphs_by_decode_alone(kind, one_rank):
    model = tiny.model("llama")
    if kind != "none":
        model.model.layers[0].mlp.down_proj = Summed(model.model.layers[0].mlp.down_proj, kind)
    with beside(model, "auto") as pair:
        for _ in range(2):
            assert pair.same(*CALL).decode == ("breakable" if kind == "none" else "hf")
            assert ("c10d" in pair.took.why and "decode=" in pair.took.why) is (kind != "none")
    if kind == "in place":  # a capture takes no AsyncCollectiveTensor
        with beside(model) as pair:
            assert pair.same(*CALL).decode == "breakable"
