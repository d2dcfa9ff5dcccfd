"""Linears of one input over weights that lie together become one; whatever could make that wrong
keeps them apart, or compiles anew."""

import sys
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import attnops
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.helpers import ready_process
from tests.lowering.models import Passing, compiled_code

K = 32
BOUND = 2 * K * torch.finfo(torch.float32).eps
"""Of sums of K products in two orders."""


def use_all(m, x):
    return m.q(x) * 2, m.k(x) + 1, m.v(x) * 3


class Three(nn.Module):
    """`body` of q, k and v, whose weights lie together."""

    def __init__(self, body=use_all, bias=True):
        super().__init__()
        self.q = nn.Linear(K, 32, bias)
        self.k = nn.Linear(K, 16, bias)
        self.v = nn.Linear(K, 16, bias)
        self.body = body
        self.packed = pack_linears(self)

    def forward(self, x):
        return self.body(self, x)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=BOUND, atol=BOUND, check_stride=True)


def agree(model, x=None, grad=False):
    """The compiled model answers as the model. Returns what the pass found, how many linears it
    left, and the compiled model."""
    x = torch.randn(3, 4, K) if x is None else x
    backend = Passing(merge_linears_pass)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        close(compiled(x.clone()), model(x.clone()))
    return backend, compiled


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K)], ids=len)
def test_one_product_and_slices_of_it(bias, shape):
    backend, _ = agree(Three(bias=bias), torch.ones(shape))
    [[found]] = backend.found
    assert found.rows == (32, 16, 16) and not found.refusal and backend.calls(F.linear) == [1]


def in_another_order(m, x):
    """v comes first; k and v are of another input than q; the same layer is called twice."""
    y = x.sin()
    v, k, q = m.v(y), m.k(y), m.q(x)
    return q * 2, k + 1, v * 3, m.v(x) - 1, m.q(y) + 1, m.k(x) * 4


def after_a_write(m, x):
    m.k.weight.mul_(1.0)
    return use_all(m, x)


def views(m, x):
    q, k = m.q(x).view(3, 4, 4, 8).transpose(1, 2), m.k(x).view(3, 4, 2, 8)
    return q @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1), m.v(x) * 3


def elsewhere(name):
    model = Three()
    parameter = model.get_parameter(name)
    parameter.data = parameter.data.clone()
    return model


ALL = [(32, 16, 16)]
SHARED = "users other than linears"
GROUPS = {
    "other orders and inputs": (lambda: Three(in_another_order), ALL * 2, 2, ""),
    "begins within": (
        lambda: Three(lambda m, x: (m.q(x.cos()) * 2, m.k(x) + 1, m.v(x) * 3)),
        [(16, 16)],
        2,
        "",
    ),
    "a bias elsewhere": (lambda: elsewhere("k.bias"), [], 3, ""),
    "a weight elsewhere": (lambda: elsewhere("k.weight"), [], 3, ""),
    "written in the graph": (lambda: Three(after_a_write), ALL, 3, SHARED),
    "views": (lambda: Three(views), ALL, 1, ""),
    "no such view": (
        lambda: Three(lambda m, x: (m.q(x).view(-1, 8) * 2, m.k(x) + 1, m.v(x) * 3)),
        ALL,
        3,
        "fails with the new strides",
    ),
    "a copy": (
        lambda: Three(lambda m, x: (m.q(x).reshape(-1, 8) * 2, m.k(x) + 1, m.v(x) * 3)),
        ALL,
        3,
        "would copy it",
    ),
    "returned": (lambda: Three(lambda m, x: (m.q(x), m.k(x) + 1, m.v(x) * 3)), ALL, 3, "returned"),
    "a view returned": (
        lambda: Three(lambda m, x: (m.q(x).unflatten(-1, (-1, 8)).mT, m.k(x), m.v(x) * 3)),
        ALL,
        3,
        "returned",
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_merged_and_what_is_kept_apart(name):
    make, rows, linears, why = GROUPS[name]
    backend, _ = agree(make())
    [found] = backend.found
    assert [group.rows for group in found] == rows and backend.calls(F.linear) == [linears]
    assert all(why in group.refusal if why else not group.refusal for group in found)


@torch.compiler.allow_in_graph
def anything(x):
    """Of nobody whose functions are known."""
    return x.mul_(2)


def item(x):
    x[..., 0] = 7.0


def operator(x):
    x += 1


WRITES = {
    "method": lambda x: x.mul_(2),
    "item": item,
    "operator": operator,
    "view": lambda x: x.view(-1).add_(1),
    "out": lambda x: torch.exp(torch.ones(()), out=x.view(-1)[:1].view(())),
    "inplace": lambda x: F.relu(x, inplace=True),
    "by place": lambda x: F.relu(x, True),
    "op": lambda x: torch.ops.aten.mul_.Tensor(x, 3),
    "function": lambda x: torch.relu_(x),
    "anything": anything,
}
READS = {
    "operators": lambda x: (x > 0) & (x[..., :1] < 1),
    "functions": lambda x: torch.ops.aten.mul(F.silu(x).to(torch.float64), 2),
}


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_an_input_written_in_between(name):
    def body(m, x):
        x = x + 0
        q, k = m.q(x), m.k(x)
        (WRITES | READS)[name](x)
        return q * 2, k + 1, m.v(x) * 3

    backend, _ = agree(Three(body))
    assert [f.rows for f in backend.found[0]] == ([(32, 16)] if name in WRITES else ALL)


@pytest.mark.parametrize("of", ["weights", "inputs"])
@torch.enable_grad()
def test_gradients(of):
    """Those of weights keep them apart."""
    model = Three().requires_grad_(of == "weights")
    x = torch.randn(3, K, requires_grad=of == "inputs")
    backend, compiled = agree(model, x, grad=True)
    leaves = [x] if of == "inputs" else [*model.parameters()]
    grads = [torch.autograd.grad(sum(t.sum() for t in run(x)), leaves) for run in (compiled, model)]
    torch.testing.assert_close(*grads, rtol=BOUND, atol=BOUND)
    [[found]] = backend.found
    assert found.refusal == ("" if of == "inputs" else "the weights need a gradient")


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    def body(m, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return use_all(m, x)

    model = Three(body if inside else use_all)
    x = torch.randn(3, K)
    backend = Passing(merge_linears_pass)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, want = torch.compile(model, backend=backend)(x), model(x)
    assert {t.dtype for t in (*got, *want)} == {torch.bfloat16}
    torch.testing.assert_close(
        got, want, rtol=2**-7, atol=2**-7
    )  # one rounding of another order of sums
    [[found]] = backend.found
    assert bool(found.refusal) == inside


def repacked(m):
    old = m.q.weight.data  # held, or the next group may lie there again
    m.packed.unpack()
    pack_linears(m)
    assert m.q.weight.data_ptr() != old.data_ptr()


MOVES = {
    "data": lambda m: setattr(m.k.weight, "data", torch.randn(16, K)),
    "bias": lambda m: setattr(m.v.bias, "data", torch.randn(16)),
    "parameter": lambda m: setattr(m.q, "weight", nn.Parameter(torch.randn(32, K))),
    "module": lambda m: setattr(m, "k", nn.Linear(K, 16)),
    "assign": lambda m: m.load_state_dict(
        {name: t.clone() for name, t in m.state_dict().items()}, assign=True
    ),
    "unpack": lambda m: m.packed.unpack(),
    "float32 and back": lambda m: m.double().float(),
    "values": lambda m: m.load_state_dict(Three().state_dict()),
    "all as a whole": repacked,
}
STAY = ("values", "all as a whole")


@pytest.mark.parametrize("name", MOVES)
def test_weights_that_change_after_the_compilation(name):
    model, x = Three(), torch.randn(3, 4, K)
    backend, compiled = agree(model)
    MOVES[name](model)
    close(compiled(x), model(x))
    assert not any(len(f.rows) == 3 for found in backend.found[1:] for f in found)
    assert len(backend.found) == (1 if name in STAY else 2)


def joined(m, x):
    return torch.cat([m.q(x), m.k(x) + m.v(x)], -1)[..., :K]


def test_layers_share_their_code():
    """Also where a weight of one of them moves later."""
    layers = nn.ModuleList(Three(joined) for _ in range(12))
    x = torch.randn(3, K)
    backend = Passing(merge_linears_pass)
    attnops.compile_layers(nn.ModuleDict({"layers": layers}), backend=backend)
    for linears in ([1], [1, 3]):
        for layer in layers:
            close(layer(x), layer.forward(x))  # which is not compiled
        assert backend.calls(F.linear) == linears
        layers[7].k.weight.data = torch.randn(16, K)


def test_what_is_no_parameter_of_a_module_is_left():
    """Inductor may copy such an input before a CUDA graph."""
    memory, x = torch.randn(64, K), torch.randn(3, K)

    def function(x, a, b):
        return F.linear(x, a) * 2, F.linear(x, b) + 1

    backend = Passing(merge_linears_pass)
    torch.compile(function, backend=backend)(x, memory[:32], memory[32:])
    assert backend.found == [()]


def test_nothing_is_done_where_nothing_can_be_guarded():
    model, later = Three(bias=False), Passing(lambda gm: gm.code)
    torch.compile(model, backend=later)(torch.randn(3, K))
    [graph], [before] = later.graphs, later.found
    [found] = merge_linears_pass(graph)
    assert found.refusal == "no guard can be added here" and graph.code == before
    assert merge_linears_pass(fx.symbolic_trace(model)) == ()


def products():
    """Matrix products only, which Inductor compiles in no time. The group begins within the
    memory."""
    return Three(lambda m, x: m.k(x).mT @ m.v(x))


def test_inductor_reads_the_weights_in_place():
    model, x = products(), torch.randn(3, K)
    compiled = torch.compile(model, options={"pre_grad_custom_pass": merge_linears_pass})
    with torch._inductor.config.patch(fx_graph_cache=False):
        got, code = compiled_code(lambda: compiled(x))
        close(got, model(x))
        assert (
            code.count("extern_kernels.addmm(reinterpret_tensor(arg") == 1
            and code.count("extern_kernels.mm(") == 1
        )
        assert "cpp_fused" not in code and "clone" not in code  # nothing but the two products
        model.v.weight.data = torch.randn(16, K)
        close(compiled(x), model(x))


CACHES = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.lowering.test_merge_linears_pass import K, products, close
model, x = products(), torch.randn(3, K)
for packed, fused in ((0, 1), (1, 1), (1, 0), (0, 1), (1, 1)):
    torch._dynamo.reset()
    counters.clear()
    pack_linears(model).unpack()
    if packed:
        pack_linears(model)
    options = {"pre_grad_custom_pass": merge_linears_pass} if fused else {}
    with torch.no_grad():
        close(torch.compile(model, options=options)(x), model(x))
    print(int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0), end=" ")
"""  # noqa: E501


def test_caches_tell_fused_from_unfused(tmp_path):
    """In turn: weights apart, fused, together and not fused: all new. Then the first two again,
    which are found."""
    printed = ready_process(CACHES, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert printed.strip().splitlines()[-1].split() == ["0", "0", "0", "1", "1"]


def looks(layers):
    """How many times the value of a node is looked at, with all groups merged."""
    merge = sys.modules["attnops.lowering.merge_linears_pass"]
    model = nn.Sequential(*(Three(joined) for _ in range(layers)))
    backend = Passing(merge_linears_pass)
    with patch.object(merge, "fake_of", wraps=merge.fake_of) as counted:
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, K))
    assert backend.calls(F.linear) == [layers]
    return counted.call_count


def test_every_layer_adds_as_much():
    """Merging linears of a model of many layers takes as long as there are layers, and not as long
    as their square."""
    few, more, many = (looks(layers) for layers in (1, 3, 5))
    assert many - more == more - few
