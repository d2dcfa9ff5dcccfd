"""absorbed_weights: views of a plain weight, the effective weight of anything else, and always the
weight there is now."""

import copy
import gc
import io
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

from attnops.graphs.streams import STREAMS
from attnops.nn import absorbed_weights
from attnops.nn.absorb import expire
from attnops.nn.latent import renew
from tests.graphs.races import Races
from tests.modules import refused

H, NOPE, V, DC = 3, 4, 5, 8
ROWS = H * (NOPE + V)
LIKE = torch.zeros(2, DC)


def linear():
    return nn.Linear(DC, ROWS, bias=False).requires_grad_(False)


class LoRA(nn.Module):
    """An adapter around a projection, as peft has it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.on, self.scale = base, True, 0.5
        self.a, self.b = nn.Linear(DC, 2, bias=False), nn.Linear(2, ROWS, bias=False)
        self.requires_grad_(False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x)) * self.on


class Int8(torch.Tensor):
    """A weight whose storage is none: it can be multiplied by, and nothing else."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Int8(inner["data8"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return args[0] @ (args[1].data8.to(args[0].dtype) * args[1].scale).t()
        if func is torch.Tensor.view:
            raise NotImplementedError("view")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Int8(args[0].data8, args[0].scale)
        raise NotImplementedError(str(func))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def int8():
    module = linear()
    module.weight = nn.Parameter(
        Int8(torch.randint(-9, 9, (ROWS, DC), dtype=torch.int8), torch.tensor(0.1)),
        requires_grad=False,
    )
    return module


def parametrised():
    return parametrize.register_parametrization(linear(), "weight", Doubled())


def hooked():
    module = linear()
    module.register_forward_hook(lambda m, x, y: y * 3)
    return module


def offloaded():
    """As accelerate does it: the weight on meta, and a forward of the instance's own that brings
    it."""
    module = linear()
    kept = module.weight.data
    module.weight = nn.Parameter(kept.to("meta"), requires_grad=False)
    module.forward = lambda x: nn.functional.linear(x, kept)
    module.kept = kept
    return module


KINDS = {
    "linear": linear,
    "lora": lambda: LoRA(LoRA(linear())),
    "int8": int8,
    "parametrised": parametrised,
    "hooked": hooked,
    "offloaded": offloaded,
}


def effective(module):
    w = module(torch.eye(DC)).t().reshape(H, NOPE + V, DC)
    return w[:, :NOPE], w[:, NOPE:]


def right(module, run=absorbed_weights):
    for got, want in zip(run(module, NOPE, V, LIKE), effective(module), strict=True):
        torch.testing.assert_close(got, want)


@torch.no_grad()
def change(module):
    """Everything that can be another way, one after the other."""
    for p in module.parameters():
        if type(p) is nn.Parameter and not p.is_meta:
            p.mul_(1.5)  # an optimizer's step
            yield
    if not isinstance(module.weight, Int8) and not module.weight.is_meta:
        module.load_state_dict({n: torch.randn_like(t) for n, t in module.state_dict().items()})
        yield
    if isinstance(module, LoRA):
        module.scale = 2.0
        yield
        module.on = False
        yield
        module.base = linear()  # merged, and replaced
        yield
        module.a.weight = nn.Parameter(torch.randn(2, DC), requires_grad=False)
        module.on = True
        yield
        module.a.weight.data = torch.randn(2, DC)
        yield
    if isinstance(module.weight, Int8):
        module.weight.scale.mul_(3)
        yield
        module.weight = nn.Parameter(
            Int8(module.weight.data8 + 1, module.weight.scale), requires_grad=False
        )
        yield
    if hasattr(module, "kept"):
        module.kept.mul_(3)
        yield


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_followed(kind, compiled):
    module = KINDS[kind]()
    run = (
        torch.compile(absorbed_weights, backend="eager", fullgraph=True)
        if compiled
        else absorbed_weights
    )
    with torch.no_grad():
        right(module, run)
        right(module, run)
        for _ in change(module):
            right(module, run)
            right(module, run)


@pytest.mark.parametrize("heads", [H, 1])
def test_a_plain_weight_is_viewed(heads):
    """A shard has fewer heads."""
    module = nn.Linear(DC, heads * (NOPE + V), bias=False)
    w_uk, w_uv = absorbed_weights(module, NOPE, V, LIKE)
    assert (w_uk.shape, w_uv.shape) == ((heads, NOPE, DC), (heads, V, DC)) and w_uk.requires_grad
    assert (
        w_uk.data_ptr() == module.weight.data_ptr()
        and w_uv.data_ptr() == module.weight[NOPE].data_ptr()
    )
    assert "_attnops_absorbed" not in vars(module)


class Counted(nn.Module):
    calls: ClassVar[list[torch.Tensor]] = []

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        Counted.calls.append(x)
        return self.inner(x)


@pytest.fixture
def counted():
    Counted.calls.clear()
    return Counted()


@torch.no_grad()
def test_what_has_not_changed_is_kept(counted):
    def calls(like=LIKE):
        Counted.calls.clear()
        absorbed_weights(counted, NOPE, V, like)
        return len(Counted.calls)

    assert [calls(), calls(), calls(LIKE.double().float())] == [1, 0, 0]
    with torch.inference_mode():
        assert calls() == 0
    counted.inner.weight.add_(1)
    assert [calls(), calls()] == [1, 0]
    counted.thing = object()  # nobody knows what it does
    assert [calls(), calls()] == [1, 1]


@pytest.mark.parametrize("kind", ["lora", "parametrised"])
@torch.no_grad()
def test_writes_that_change_no_version_are_renewed(kind):
    """In the memory of before, which CUDA graphs read; now, or by the next call. Copies of the
    module have memory of their own."""
    module = KINDS[kind]()
    first = absorbed_weights(module, NOPE, V, LIKE)
    twin = copy.deepcopy(module)
    kept = absorbed_weights(twin, NOPE, V, LIKE)[0].clone()
    for how in (renew, lambda module, like: expire(module)):
        for p in module.parameters():
            p.data.mul_(-1.5)
        how(module, LIKE)
        right(module)
        for got, old in zip(absorbed_weights(module, NOPE, V, LIKE), first, strict=True):
            assert got.data_ptr() == old.data_ptr() and torch.equal(got, old)
    assert torch.equal(absorbed_weights(twin, NOPE, V, LIKE)[0], kept)


@torch.no_grad()
@pytest.mark.parametrize("again", [renew, absorbed_weights], ids=["renewed", "read"])
def test_streams_in_turn(monkeypatch, again):
    """A stream waits for the one that made the weight."""
    races, module = Races(), LoRA(linear())
    monkeypatch.setitem(STREAMS, "cpu", races)
    with races:
        for stream in (1, 2, 1):
            with races.on(stream):
                if again is renew:
                    renew(module, LIKE)
                w_uk, w_uv = absorbed_weights(module, NOPE, V, LIKE)
                w_uk.add(1), w_uv.add(1)
    assert not races.found
    assert {stream for stream, at in races.used if at == w_uk.untyped_storage().data_ptr()} == {
        1,
        2,
    }


@torch.no_grad()
def test_nothing_is_kept_of_a_plain_weight_nor_where_it_cannot_be_told():
    for module in (linear(), hooked()):
        renew(module, LIKE)
        expire(module)
        assert "_attnops_absorbed" not in vars(module)


@torch.no_grad()
def test_nothing_is_kept_alive_or_copied(counted):
    absorbed_weights(counted, NOPE, V, LIKE)
    old = weakref.ref(counted.inner.weight)
    twin = copy.deepcopy(counted)
    twin.inner.weight.mul_(2)
    right(twin)
    assert list(counted.state_dict()) == ["inner.weight"]
    buffer = io.BytesIO()
    torch.save(counted, buffer)
    assert buffer.tell() < 4 * ROWS * DC * 1.5 + 3000, "one weight and no more"
    counted.inner = linear()
    gc.collect()
    assert old() is None


def test_gradients_reach_an_adapter():
    module = LoRA(linear()).requires_grad_(True)
    w_uk, w_uv = absorbed_weights(module, NOPE, V, LIKE)
    grads = torch.autograd.grad(w_uk.sum() + w_uv.sum(), module.a.weight)
    assert grads[0].abs().sum() > 0


@torch.no_grad()
def test_fake_tensors_are_not_kept():
    module = LoRA(linear())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        absorbed_weights(module, NOPE, V, mode.from_tensor(LIKE))
    right(module)


@torch.no_grad()
def test_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(linear()), config)
    module = model.base_model.model[0]

    def follows():
        right(module)
        right(module)
        return effective(module)[0]

    first = follows()
    assert module._attnops_absorbed.weight is not None, "its state can be told"
    model.add_adapter("other", config)
    model.set_adapter("other")
    assert not torch.equal(follows(), first)
    with model.disable_adapter():
        assert torch.equal(follows(), effective(module.get_base_layer())[0])
    model.merge_adapter()
    follows()
    model.unmerge_adapter()
    follows()


def test_a_bias_and_broken_heads():
    for module in (nn.Linear(DC, ROWS), LoRA(nn.Linear(DC, ROWS))):
        refused(
            lambda module=module: absorbed_weights(module, NOPE, V, LIKE), "kv_b.bias: got a bias"
        )
    refused(
        lambda: absorbed_weights(linear(), NOPE, V + 1, LIKE),
        "kv_b.weight.shape[0]: got 27, want a multiple of 4 + 6",
    )


@torch.no_grad()
def test_a_flag_is_no_bias():
    module = LoRA(linear())
    for module.bias in (False, True, "none"):
        right(module)


@torch.no_grad()
def test_a_change_of_the_class_is_seen(monkeypatch):
    monkeypatch.setattr(LoRA, "gain", 1.0, raising=False)
    monkeypatch.setattr(LoRA, "forward", lambda self, x: self.gain * self.base(x))
    module = LoRA(linear())
    right(module)
    assert module._attnops_absorbed.weight is not None
    monkeypatch.setattr(LoRA, "gain", 3.0)
    right(module)
    monkeypatch.setattr(LoRA, "forward", lambda self, x: -self.base(x))
    right(module)


def test_a_replica_keeps_its_own():
    """torch.nn.DataParallel copies the `__dict__` of a module; other weights follow in that of the
    replica."""
    module = LoRA(linear())
    first, before = absorbed_weights(module, NOPE, V, LIKE)[0], effective(module)[0]
    replica = module._replicate_for_data_parallel()
    replica.base, replica.a, replica.b = linear(), module.a, module.b
    right(replica)
    torch.testing.assert_close(first, before)
    assert absorbed_weights(module, NOPE, V, LIKE)[0].data_ptr() == first.data_ptr()
