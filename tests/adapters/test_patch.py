"""`attnops.patch` of modules that are no transformers models: a user's own, and torch's."""

import copy
import functools
import gc
import io
import json
import pickle
import sys
import weakref

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

import attnops
from attnops import adapters
from attnops.core.errors import InvalidInput, NoKernel, PatchError, UnknownKernel
from tests.adapters.helpers import Calls, Graphs, Layer, grads, same_grads
from tests.helpers import torch_process


class ByHandAttention(nn.Module):
    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Pipeline:
    def __init__(self):
        self.unet, self.vae, self.name = Layer(), Layer(), "pipe"


class AttentionBlock(nn.Module):
    """A module around attention, by its name."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, x):
        return self.inner(x)


def torchs():
    return nn.MultiheadAttention(32, 4)


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (Layer(), Layer(), Layer())))


def attnops_ops(module, *inputs):
    with Calls() as calls:
        module(*inputs)
    return calls.names.count("attnops::attention")


X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))


def test_an_unpatched_model_is_freed_at_once():
    """By reference counts, while the handle and its report live on."""
    ours = model()
    gc.disable()
    try:
        handle = attnops.patch(ours)
        handle.verify(X)
        handle.unpatch()
        assert handle.model is ours and len(handle.report().rows) == 3
        held = [weakref.ref(part) for part in (*ours.modules(), *ours.parameters())]
        del ours
        assert handle.model is None and not any(part() is not None for part in held)
        assert len(handle.report().rows) == 3 and "unpatched" in repr(handle)
    finally:
        gc.enable()


def test_patch_and_back():
    ours, theirs = model(), model()
    seen = []
    ours[1].register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    state = {name: value.clone() for name, value in ours.state_dict().items()}
    pointers = [p.data_ptr() for p in ours.parameters()]
    handle = attnops.patch(ours)
    assert attnops_ops(ours, X) == 3 and seen == ["Layer"]
    torch.testing.assert_close(ours(X), theirs(X))
    same_grads(grads(ours, ours(X).square().sum()), grads(theirs, theirs(X).square().sum()))
    assert [p.data_ptr() for p in ours.parameters()] == pointers
    torch.testing.assert_close(dict(ours.state_dict()), state, rtol=0, atol=0)
    assert all(isinstance(layer, Layer) for layer in ours) and repr(ours) == repr(theirs)
    handle.unpatch()
    handle.unpatch()
    assert (
        not handle.active
        and [type(layer) for layer in ours] == [Layer] * 3
        and vars(ours).keys() == vars(theirs).keys()
    )
    assert attnops_ops(ours, X) == 0


def test_a_handle_of_another_library_has_no_cache():
    """It has the names of a transformers model's handle, so that type checkers know them."""
    with attnops.patch(model()) as handle:
        assert (handle.took, handle.graphs, handle.plain_steps) == (None, None, 0)
        handle.release()
        for name, args in {"new_cache": (1, 8), "step": (X, None), "capture": (None,)}.items():
            with pytest.raises(
                PatchError, match=f"{name}: got Sequential, want a transformers model"
            ):
                getattr(handle, name)(*args)
    for option in ("mask", "cache", "decode"):
        with pytest.raises(
            InvalidInput,
            match=f"{option}: got 'hf', want 'auto': Sequential holds no "
            "transformers.PreTrainedModel",
        ):
            attnops.patch(model(), **{option: "hf"})


def test_the_handle():
    ours = model(Layer(), ByHandAttention(), AttentionBlock(), nn.Linear(32, 32))
    with attnops.patch(ours) as handle:
        report = handle.report()
        assert [(row.path, row.cls, row.status) for row in report.rows] == [
            ("0", "Layer", "patched"),
            ("2.inner", "Layer", "patched"),
            (
                "1",
                "ByHandAttention",
                "skipped: its code does not call torch's scaled_dot_product_attention",
            ),
        ]
        assert "2 of 3 attention modules patched" in str(report) and "2 of 3" in repr(handle)
        assert json.loads(json.dumps(report.to_dict()))["kernel"] is None
        ours.train()
        figures = handle.verify(X)
        assert (
            figures.passed
            and "against its own attention" in str(figures)
            and ours[0].training
            and handle.active
        )
        assert attnops.patch(ours) is handle
        with pytest.raises(
            PatchError,
            match="got kernel='reference' for a model that is patched with kernel=None; call",
        ):
            attnops.patch(ours, kernel="reference")
    assert not handle.active and "unpatched" in repr(handle)
    with pytest.raises(PatchError, match="not patched any more"):
        handle.verify(X)
    figures = attnops.patch(model(Layer(), nn.Flatten(), nn.Linear(288, 1), nn.Flatten(0))).verify(
        X
    )
    assert figures.passed and figures.positions == 2, "an output of one dim"


class Static(nn.Module):
    """Its output is the same memory at every run."""

    memory = torch.zeros(2, 9, 32)

    def forward(self, x):
        return self.memory.copy_(x)


@pytest.mark.parametrize("last", [Layer, Static])
def test_verify_sees_a_difference(last, monkeypatch):
    ours = model(Layer(), last())
    with attnops.patch(ours) as handle:
        monkeypatch.setattr(attnops.adapters.sdpa, "attention", lambda q, k, v, **_: v)
        with pytest.raises(PatchError, match="FAILED"):
            handle.verify(X)
        assert handle.active and not handle.verify(X, strict=False).passed


def test_a_compiled_model_is_the_model():
    ours = model()
    handle = attnops.patch(ours)
    compiled = torch.compile(ours, backend="eager")
    assert attnops.patch(compiled) is handle
    handle.unpatch()
    handle = attnops.patch(compiled)
    assert (
        attnops.patch(ours) is handle
        and handle.report().rows[0].path == "0"
        and handle.verify(X).passed
    )


def test_dropout_is_torchs_and_in_training_alone():
    ours = model(Layer(dropout=0.5))
    with attnops.patch(ours):
        assert attnops_ops(ours.train(), X) == 0 and attnops_ops(ours.eval(), X) == 1


def test_a_forced_kernel():
    ours = model()
    with attnops.patch(ours, kernel="reference") as handle:
        assert "kernel=reference" in str(handle.report()) and handle.verify(X).passed
    with pytest.raises(UnknownKernel, match="no_such"):
        attnops.patch(ours, kernel="no_such")
    with attnops.patch(ours, kernel="fa3"), pytest.raises(NoKernel):
        ours(X)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
}


@pytest.mark.parametrize("make", [torchs, Layer])
@pytest.mark.parametrize("way", WAYS)
def test_copies_are_patched_and_have_their_own_handle(make, way):
    """Whatever writes names of classes writes those that code without attnops knows."""
    ours = model(Layer(), make())
    own = type(ours[1])
    handle = attnops.patch(ours)
    other = WAYS[way](ours)
    for cls in (type(ours[1]), type(other[1])):
        assert cls is not own and issubclass(cls, own)
        assert (cls.__module__, cls.__name__, cls.__qualname__) == (
            own.__module__,
            own.__name__,
            own.__qualname__,
        )
    assert "attnops" not in repr(other)
    torch.testing.assert_close(other[0](X), ours[0](X))
    handle.unpatch()
    assert [attnops_ops(each[0], X) for each in (ours, other)] == [0, 1]
    attnops.patch(other).unpatch()
    assert [type(layer) for layer in other] == [Layer, own] and vars(other[1]).keys() == vars(
        make()
    ).keys()
    assert attnops_ops(other[0], X) == 0


def test_what_has_changed_since_stays():
    class Later(Layer):
        pass

    ours = model()
    handle = attnops.patch(ours)
    ours[0].__class__ = Later
    handle.unpatch()
    assert [type(layer) for layer in ours] == [Later, Layer, Layer]


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def parametrised(module):
    name = next(name for name, _ in module.named_parameters(recurse=False))
    return register_parametrization(module, name, nn.Identity())


class Owner(nn.Module):
    """A user's own attention with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, query, key, value, **_):
        return (torch.nn.functional.scaled_dot_product_attention(query * self.scale, key, value),)


@pytest.mark.parametrize("make", [torchs, Owner])
@pytest.mark.parametrize("over", [sharded, parametrised])
@torch.no_grad()
def test_a_class_made_over_ours_is_made_over_its_own_again(make, over, one_process):
    torch.manual_seed(0)
    layer = make()
    theirs, own, names = over(copy.deepcopy(layer)), type(layer), vars(layer).keys()
    handle = attnops.patch(layer)
    over(layer)
    name = type(layer).__name__
    assert name == type(theirs).__name__ and attnops_ops(layer, X, X, X) == (own is Owner)
    handle.unpatch()
    assert type(layer).__name__ == name and own in type(layer).__mro__
    assert not issubclass(type(layer), attnops.nn.MultiheadAttention)
    assert attnops_ops(layer, X, X, X) == 0 and names <= vars(layer).keys() | {
        "in_proj_weight",
        "scale",
    }
    torch.testing.assert_close(layer(X, X, X)[0], theirs(X, X, X)[0])
    attnops.patch(nn.Sequential(make()))  # others of its class


def test_an_object_whose_class_cannot_be_made_anew_stays_patched():
    ours = model(torchs(), Layer())
    with attnops.patch(ours):

        class Over(type(ours[0])):
            def forward(self, *args, **named):
                return super().forward(*args, **named)

        ours[0].__class__ = Over
    assert type(ours[0]) is Over and type(ours[1]) is Layer
    assert ours[0](X, X, X, need_weights=False)[0].isfinite().all()


def test_a_part_first():
    ours = model()
    part = attnops.patch(ours[0])
    whole = attnops.patch(ours)
    assert whole.report().skipped[0].status == "skipped: it calls attnops already"
    whole.unpatch()
    assert attnops_ops(ours, X) == 1
    with pytest.raises(PatchError, match="it calls attnops already"):
        attnops.patch(nn.Sequential(ours[0], attnops.nn.MultiheadAttention(8, 2)))
    part.unpatch()


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_failed_patch_leaves_nothing(error):
    class Final(Layer):
        def __init_subclass__(cls):
            raise error("no subclasses")

    ours = model(Layer(), Final(), torchs())
    before = [vars(layer).copy() for layer in ours]
    with pytest.raises(
        PatchError, match=f"Final takes no other class: {error.__name__}: no subclasses"
    ):
        attnops.patch(ours)
    assert [type(layer) for layer in ours] == [
        Layer,
        Final,
        nn.MultiheadAttention,
    ] and "_attnops" not in vars(ours)
    assert [vars(layer) for layer in ours] == before


def replaced(module):
    module.forward = functools.partial(type(module).forward, module)
    return module


CHANGES = {
    "class": lambda layer: setattr(layer, "__class__", type("FSDPLayer", (type(layer),), {})),
    "forward": replaced,
    "attribute": lambda layer: delattr(layer, "_attnops_switched"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_verify_has_no_own_attention_to_compare_with(what):
    ours = model()
    with attnops.patch(ours) as handle:
        CHANGES[what](ours[1])
        with pytest.raises(PatchError, match=r"verify: (FSDP)?Layer has changed since patch"):
            handle.verify(X)
        assert handle.active


def test_a_forward_of_the_modules_own_stays():
    ours, attention = model(Layer(), replaced(Layer())), replaced(torchs())
    with attnops.patch(nn.ModuleList([ours, attention])) as handle:
        assert [row.path for row in handle.report().patched] == ["0.0"]
        assert all("its forward is replaced" in row.status for row in handle.report().skipped)
        assert attnops_ops(ours, X) == 1 and attention(X, X, X)[0].isfinite().all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(2, 2), "nothing to patch in Linear: it has no attention module"),
        (
            ByHandAttention,
            "ByHandAttention: its code does not call torch's scaled_dot_product_attention",
        ),
        (
            lambda: type("Sub", (nn.MultiheadAttention,), {})(8, 2),
            "Sub: it is a subclass of torch.nn.MultiheadAttention",
        ),
        (lambda: "a model", "got str, want a torch.nn.Module$"),
        (Pipeline, "got Pipeline, want a torch.nn.Module, as its .unet, .vae$"),
    ],
)
def test_nothing_to_patch(make, text):
    with pytest.raises(PatchError, match=text):
        attnops.patch(make())


def test_compiled_in_one_graph_and_layers_once():
    ours, graphs = model(), Graphs()
    whole = torch.compile(ours, fullgraph=True, backend=graphs)
    whole(X)
    with attnops.patch(ours):  # after compile
        torch.testing.assert_close(whole(X), ours(X))
        assert graphs.count("attnops.attention") == [0, 3]
        torch._dynamo.reset()
        graphs.graphs.clear()
        for layer in ours:
            layer.compile(fullgraph=True, backend=graphs)
        with torch.no_grad():
            ours(X)
        assert graphs.count("attnops.attention") == [1]


@pytest.fixture
def no_adapter(monkeypatch):
    """No adapter of these packages can be imported, as beside a version that none of them knows."""
    for name in ("diffusers", "torchtitan", "torchtitan_02"):
        monkeypatch.setitem(sys.modules, f"attnops.adapters.{name}", None)
    adapters._adapter.cache_clear()
    yield
    adapters._adapter.cache_clear()


@pytest.mark.parametrize("package", ["diffusers", "torchtitan"])
def test_a_package_without_the_module_that_its_adapter_needs(package, no_adapter):
    ours = model(type("OldAttention", (Layer,), {"__module__": f"{package}.models.old"})())
    with attnops.patch(ours):
        assert attnops_ops(ours, X) == 1
    # One that does not call torch's function, either, is told the reason.
    kind = type("NewAttention", (ByHandAttention,), {"__module__": f"{package}.models.new"})
    said = f"NewAttention: attnops knows other versions of {package}: .*attnops.adapters.{package}"
    with pytest.raises(PatchError, match=said):
        attnops.patch(kind())


def test_transformers_is_not_needed():
    code = """
import torch, attnops
encoder = torch.nn.TransformerEncoderLayer(16, 2, 16)
print(attnops.patch(encoder).report().patched[0].path)
import sys
assert "transformers" not in sys.modules
"""
    assert (
        torch_process(code, block=["transformers", "diffusers", "timm", "torchtitan"]).strip()
        == "self_attn"
    )
