"""`pack_linears` moves weights and changes nothing else; what may not be moved is named."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from attnops.nn import pack_linears

K = 32


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        more = {"bias": bias}
        self.q_proj = nn.Linear(K, 32, **more)
        self.k_proj = nn.Linear(K, 16, **more)
        self.v_proj = nn.Linear(K, 16, **more)
        self.norm = nn.LayerNorm(16)
        self.o_proj = nn.Linear(16, K, **more)

    def forward(self, x):
        return self.o_proj(self.norm(self.k_proj(x) * self.v_proj(x) + self.q_proj(x)[..., :16]))


def values(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(model, before):
    now = model.state_dict()
    assert list(now) == list(before) and all(torch.equal(now[n], before[n]) for n in before)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_become_slices_of_one_memory(bias):
    model = nn.Sequential(Attention(bias), Attention(bias))
    model[1].q_proj.weight.requires_grad_(False)
    before, objects = values(model), list(model.parameters())
    packed = pack_linears(model)
    same(model, before)
    assert all(a is b and b.is_leaf for a, b in zip(model.parameters(), objects, strict=True))
    assert [p.requires_grad for p in model[1].q_proj.parameters()] == [False, True][: 1 + bias]
    assert [g.linears for g in packed.groups] == [
        (f"{i}.q_proj", f"{i}.k_proj", f"{i}.v_proj") for i in range(2)
    ]
    assert packed.groups[0].rows == (32, 16, 16)
    assert packed.bytes_moved == 2 * 4 * 64 * (K + bias) and packed.holds() and not packed.skipped
    weights = [linear.weight for linear in (model[0].q_proj, model[0].k_proj, model[0].v_proj)]
    assert torch.equal(torch.as_strided(weights[0], (64, K), (K, 1)), torch.cat(weights))
    assert weights[0].untyped_storage().nbytes() == 4 * 64 * K


def test_again_and_back():
    model = Attention()
    before = values(model)
    packed = pack_linears(model)
    places = [p.data_ptr() for p in model.parameters()]
    again = pack_linears(model)
    assert (
        again.bytes_moved == 0
        and [g.rows for g in again.groups] == [(32, 16, 16)]
        and not again.groups[0].moved
    )
    assert [p.data_ptr() for p in model.parameters()] == places
    for _ in range(2):
        packed.unpack()
        same(model, before)
        assert not packed.holds() and all(
            p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()
        )


def test_a_weight_that_went_is_fetched():
    model = Attention()
    packed = pack_linears(model)
    model.load_state_dict(Attention().state_dict())
    assert packed.holds()
    model.k_proj.weight.data = torch.randn(16, K)
    assert not packed.holds()
    before = values(model)
    assert pack_linears(model).bytes_moved and packed.holds()
    same(model, before)
    model.to(torch.bfloat16)
    assert not packed.holds()


def test_copies_and_files_are_apart():
    model = Attention()
    before = values(model)
    pack_linears(model)
    other, file = copy.deepcopy(model), io.BytesIO()
    other.q_proj.weight.data.fill_(float("nan"))
    same(model, before)
    torch.save(model.state_dict(), file)
    assert file.tell() < 2 * sum(p.nbytes for p in model.parameters())
    file.seek(0)
    other.load_state_dict(torch.load(file))
    same(other, before)


def test_in_inference_mode():
    model = Attention()
    with torch.inference_mode():
        pack_linears(model)
    assert not any(p.is_inference() for p in model.parameters())
    model(torch.randn(2, K)).sum().backward()
    with torch.inference_mode():
        made = Attention()
    assert set(pack_linears(made).skipped.values()) == {"it was made in inference mode"}


def test_groups_without_memory_stay(monkeypatch):
    model, real, made = Attention(bias=True), torch.Tensor.new_empty, []

    def short(self, *given, **more):
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError("a test's")
        return real(self, *given, **more)

    before = {name: t.data_ptr() for name, t in model.named_parameters()}
    monkeypatch.setattr(torch.Tensor, "new_empty", short)
    packed = pack_linears(model)
    assert not packed.groups and set(packed.skipped.values()) >= {"there is no memory to move it"}
    assert {name: t.data_ptr() for name, t in model.named_parameters()} == before
    assert pack_linears(model).groups


def twice(model):
    model.q_proj.weight = model.k_proj.weight = nn.Parameter(torch.randn(16, K))


def beside(model):
    memory = torch.randn(33, K)
    model.k_proj.weight.data = memory[:16]
    model.register_buffer("last", memory[32])


def overlapping(model):
    memory = torch.randn(24, K)
    model.k_proj.weight.data, model.v_proj.weight.data = memory[:16], memory[8:]


def typed(model):
    class Typed(torch.Tensor):
        pass

    model.k_proj.weight = nn.Parameter(torch.randn(16, K).as_subclass(Typed))


ODD = {
    "tied": (twice, {"q_proj", "k_proj"}, "tied"),
    "beside a buffer": (beside, {"k_proj"}, "something else"),
    "overlapping": (overlapping, {"v_proj"}, "something else"),
    "hook": (lambda m: m.k_proj.register_forward_hook(lambda *_: None), {"k_proj"}, "hooks"),
    "parametrised": (
        lambda m: parametrizations.weight_norm(m.k_proj),
        {"k_proj"},
        "ParametrizedLinear",
    ),
    "tensor": (typed, {"k_proj"}, "Typed"),
    "meta": (lambda m: m.k_proj.to("meta"), {"k_proj"}, "meta"),
    "strides": (
        lambda m: setattr(m.k_proj.weight, "data", torch.randn(K, 16).t()),
        {"k_proj"},
        "contiguous",
    ),
    "shared": (lambda m: m.k_proj.share_memory(), {"k_proj"}, "shared"),
    "bytes": (lambda m: setattr(m, "k_proj", nn.Linear(K, 15)), {"k_proj"}, "16"),
}


@pytest.mark.parametrize(("make", "names", "why"), ODD.values(), ids=ODD)
def test_what_may_not_be_moved(make, names, why):
    model = Attention()
    make(model)
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    packed = pack_linears(model)
    assert set(packed.skipped) == names and all(why in text for text in packed.skipped.values())
    rest = tuple(n for n in ("q_proj", "k_proj", "v_proj") if n not in names)
    assert [g.linears for g in packed.groups] == ([rest] if len(rest) > 1 else [])
    assert all(
        p.data_ptr() == places[n] for n, p in model.named_parameters() if n.split(".")[0] in names
    )


def module(**children):
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def test_groups_are_alike():
    odd = {
        "c": nn.Linear(K, 8, dtype=torch.bfloat16),
        "d": nn.Linear(16, 8),
        "f": nn.Embedding(8, K),
    }
    model = module(
        a=nn.Linear(K, 8), b=nn.Linear(K, 8, bias=False), **odd, e=nn.Linear(K, 16, bias=False)
    )
    assert [g.linears for g in pack_linears(model).groups] == [("b", "e")]


def test_a_linear_of_two_parents_stays():
    child = nn.Linear(K, 16)
    model = nn.Sequential(
        module(a=child, b=nn.Linear(K, 16)), module(a=nn.Linear(K, 16), b=child, c=nn.Linear(K, 16))
    )
    packed = pack_linears(model)
    assert [g.linears for g in packed.groups] == [("1.a", "1.c")] and set(
        packed.skipped.values()
    ) == {"it is tied"}


@pytest.mark.parametrize("container", [lambda x: nn.Sequential(*x), nn.ModuleList])
def test_layers_in_a_container_stay(container):
    assert pack_linears(container([nn.Linear(K, K), nn.Linear(K, K)])).groups == ()


def test_one_group_more_of_memory(monkeypatch):
    """Old memory is let go of group by group."""
    model = nn.Sequential(*(Attention(bias=False) for _ in range(6)))
    expired, new_empty = torch.UntypedStorage._expired, torch.Tensor.new_empty
    old = [
        p.untyped_storage()._weak_ref()
        for p in model.parameters()
        if p.shape[-1] == K and p.dim() == 2
    ]
    gone = []

    def watched(tensor, *args, **kwargs):
        gone.append(sum(map(expired, old)))
        return new_empty(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    pack_linears(model)
    assert gone == [0, 3, 6, 9, 12, 15] and sum(map(expired, old)) == len(old) == 18
    for ref in old:
        torch.UntypedStorage._free_weak_ref(ref)
