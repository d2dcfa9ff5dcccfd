"""Linears of one input over weights that lie together become one; whatever could make that wrong keeps them apart, or compiles anew."""

import operator
import sys
from unittest.mock import patch

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.nn import functional as F

import attnops
from attnops.core.fx_effects import may_write
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.helpers import ready_process
from tests.lowering.models import compiled_code

K = 32


class Three(nn.Module):
    """q, k and v of x, which `combine` makes results of."""

    def __init__(self, combine=lambda q, k, v: (q * 2, k + 1, v * 3), bias=True):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(K, 32, bias), nn.Linear(K, 16, bias), nn.Linear(K, 16, bias)
        self.combine = combine

    def forward(self, x):
        return self.combine(self.q(x), self.k(x), self.v(x))


class Merging:
    """A backend that merges and compiles no further. told: what each compilation found; linears: how many it left."""

    def __init__(self):
        self.told, self.linears, self.graphs = [], [], []

    def __call__(self, gm, inputs):
        self.told.append(merge_linears_pass(gm))
        self.linears.append(sum(n.target is F.linear for n in gm.graph.nodes))
        self.graphs.append(gm)
        return gm.forward


def close(got, want):
    # Sums of K products in two orders.
    bound = 2 * K * torch.finfo(torch.float32).eps
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def agree(model, x=None, packed=True, grad=False, **more):
    """The compiled model answers as the model. Returns the backend and the compiled model."""
    if packed:
        pack_linears(model)
    x = torch.randn(3, 4, K) if x is None else x
    backend = Merging()
    compiled = torch.compile(model, backend=backend, fullgraph=True, **more)
    with torch.set_grad_enabled(grad):
        close(compiled(x), model(x))
    return backend, compiled


def short(text):
    for long, brief in (("l_self_modules_", ""), ("_modules_", "."), ("_parameters_", "."), ("model.layers.", "")):
        text = text.replace(long, brief)
    return text.replace("weight_", "weight").replace("bias_", "bias")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("x", [torch.ones(K), torch.ones(5, K), torch.ones(2, 3, K)], ids=lambda x: f"{x.dim()}d")
def test_one_product_and_slices_of_it(bias, x):
    backend, _ = agree(Three(bias=bias), x)
    assert backend.linears == [1]
    [[found]] = backend.told
    assert found.rows == (32, 16, 16) and not found.refusal


def test_the_graph_is_as_shown():
    backend, _ = agree(Three())
    code = short(backend.graphs[0].code).partition("as_strided = ")
    body = "\n".join(line.partition(";")[0].strip() for line in (code[1] + code[2]).strip().splitlines())
    assert_expected_inline(
        body,
        """\
as_strided = torch.as_strided(q.weight, (64, 32), (32, 1))
as_strided_1 = torch.as_strided(q.bias, (64,), (1,))
linear_3 = torch._C._nn.linear(l_x_, as_strided, as_strided_1)
narrow = linear_3.narrow(-1, 0, 32)
narrow_1 = linear_3.narrow(-1, 32, 16)
narrow_2 = linear_3.narrow(-1, 48, 16)
mul = narrow * 2
add = narrow_1 + 1
mul_1 = narrow_2 * 3
return (mul, add, mul_1)""",
    )


def test_weights_that_do_not_lie_together_are_not_found():
    assert agree(Three(), packed=False)[0].told == [()]


class Others(Three):
    """In the graph v comes first; k and v are of another input than q; the same layer is called twice."""

    def forward(self, x):
        y = x.sin()
        v, k, q = self.v(y), self.k(y), self.q(x)
        return q * 2, k + 1, v * 3, self.v(x) - 1, self.q(y) + 1, self.k(x) * 4


def test_other_orders_and_inputs():
    backend, _ = agree(Others())
    assert [f.rows for f in backend.told[0]] == [(32, 16, 16)] * 2 and backend.linears == [2]


class Cross(Three):
    """k and v alone, which begin within the memory."""

    def forward(self, x):
        return self.q(x.cos()) * 2, self.k(x) + 1, self.v(x) * 3


def test_a_group_may_begin_anywhere():
    backend, _ = agree(Cross())
    assert [f.rows for f in backend.told[0]] == [(16, 16)] and backend.linears == [2]


def test_a_bias_elsewhere_keeps_apart():
    model = Three()
    pack_linears(model)
    model.k.bias.data = model.k.bias.data.clone()
    assert agree(model, packed=False)[0].told == [()]


class Between(Three):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        x = x + 0
        q, k = self.q(x), self.k(x)
        self.write(x)
        return q * 2, k + 1, self.v(x) * 3


def item(x):
    x[..., 0] = 7.0


WRITES = {
    "method": lambda x: x.mul_(2),
    "item": item,
    "view": lambda x: x.view(-1).add_(1),
    "out": lambda x: torch.exp(torch.ones(()), out=x.view(-1)[:1].view(())),
    "inplace": lambda x: F.relu(x, inplace=True),
    "by place": lambda x: F.relu(x, True),
    "op": lambda x: torch.ops.aten.mul_.Tensor(x, 3),
    "function": lambda x: torch.relu_(x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_input_written_in_between(write):
    backend, _ = agree(Between(write))
    assert [f.rows for f in backend.told[0]] == [(32, 16)] and backend.linears == [2]


class Changing(Three):
    """Writes a weight in the graph."""

    def forward(self, x):
        self.k.weight.mul_(0.5)
        return super().forward(x)


def test_weights_written_in_the_graph():
    model = Changing()
    pack_linears(model)
    backend, x = Merging(), torch.randn(3, K)
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x)
        close(got, Three.forward(model, x))  # the weight is what the compiled call left
    assert "users other than linears" in backend.told[0][0].refusal


STRIDES = {
    "no such view": (lambda q, k, v: (q.view(-1, 8) * 2, k + 1, v * 3), "fails with the new strides"),
    "a copy": (lambda q, k, v: (q.reshape(-1, 8) * 2, k + 1, v * 3), "would copy it"),
    "returned": (lambda q, k, v: (q, k + 1, v * 3), "returned"),
    "a view returned": (lambda q, k, v: (q.unflatten(-1, (-1, 8)).transpose(1, 2), k + 1, v * 3), "returned"),
}


@pytest.mark.parametrize(("combine", "why"), STRIDES.values(), ids=STRIDES)
def test_strides_that_would_show_keep_apart(combine, why):
    model = Three(combine)
    x = torch.randn(3, 4, K)
    backend, compiled = agree(model, x)
    assert why in backend.told[0][0].refusal and backend.linears == [3]
    with torch.no_grad():
        assert [t.stride() for t in compiled(x)] == [t.stride() for t in model(x)]


def test_views_get_their_new_strides():
    def heads(q, k, v):
        return (q.view(3, 4, 4, 8).transpose(1, 2) @ k.view(3, 4, 2, 8).repeat_interleave(2, 2).permute(0, 2, 3, 1), v * 3)

    backend, _ = agree(Three(heads))
    assert backend.linears == [1]
    strides = {n.name: n.meta["example_value"].stride() for n in backend.graphs[0].graph.nodes if n.name in ("view", "transpose")}
    assert strides == {"view": (256, 64, 8, 1), "transpose": (256, 8, 64, 1)}


def test_gradients_keep_apart():
    torch.manual_seed(0)
    model, x = Three(), torch.randn(3, K)
    pack_linears(model)
    sum(t.sum() for t in model(x)).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    backend, compiled = agree(model, x, grad=True)
    assert backend.told[0][0].refusal == "the weights need a gradient"
    sum(t.sum() for t in compiled(x)).backward()
    close([p.grad for p in model.parameters()], want)


def test_weights_without_gradient_in_a_graph_with_one():
    model = Three().requires_grad_(False)
    x = torch.randn(3, K, requires_grad=True)
    backend, compiled = agree(model, x, grad=True)
    assert backend.linears == [1]
    close(*(torch.autograd.grad(sum(t.sum() for t in run(x)), x) for run in (compiled, model)))


class Autocast(Three):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    model, x, backend = (Autocast if inside else Three)(), torch.randn(3, K), Merging()
    pack_linears(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, want = torch.compile(model, backend=backend)(x), model(x)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.bfloat16] * 3
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)  # one rounding of another order of sums
    [found] = backend.told[0]
    assert bool(found.refusal) == inside


MOVES = {
    "data": lambda m, p: setattr(m.k.weight, "data", torch.randn(16, K)),
    "bias": lambda m, p: setattr(m.v.bias, "data", torch.randn(16)),
    "parameter": lambda m, p: setattr(m.q, "weight", nn.Parameter(torch.randn(32, K))),
    "module": lambda m, p: setattr(m, "k", nn.Linear(K, 16)),
    "assign": lambda m, p: m.load_state_dict(Three().state_dict(), assign=True),
    "unpack": lambda m, p: p.unpack(),
    "float32 and back": lambda m, p: m.double().float(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_weights_that_move_after_the_compilation(move):
    model = Three()
    packed = pack_linears(model)
    backend, compiled = agree(model)
    x = torch.randn(3, 4, K)
    move(model, packed)
    with torch.no_grad():
        close(compiled(x), model(x))
    assert len(backend.told) == 2 and not any(len(f.rows) == 3 for f in backend.told[1])


def test_values_may_change_in_place_and_groups_may_move_as_a_whole():
    model = Three()
    packed = pack_linears(model)
    backend, compiled = agree(model)
    x = torch.randn(3, 4, K)
    with torch.no_grad():
        model.load_state_dict(Three().state_dict())
        close(compiled(x), model(x))
        old = model.q.weight.data  # held, or the next group may lie there again
        packed.unpack()
        pack_linears(model)
        assert model.q.weight.data_ptr() != old.data_ptr()
        close(compiled(x), model(x))
    assert len(backend.told) == 1


def test_layers_share_their_code():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(K, 64), nn.Linear(K, 64), nn.Linear(64, K)

        def forward(self, x):
            return x + self.down(self.gate(x).sigmoid() * self.up(x))

    model = nn.Sequential(nn.ModuleList(Layer() for _ in range(12)))
    model.forward = lambda x: [x := layer(x) for layer in model[0]][-1]
    pack_linears(model)
    backend, x = Merging(), torch.randn(3, K)
    with torch.no_grad():
        want = model.forward(x)
        attnops.compile_layers(model, backend=backend)
        close(model.forward(x), want)
        assert backend.linears == [2]  # of 12 layers
        model[0][7].up.weight.data = torch.randn(64, K)
        want = x
        for layer in model[0]:
            want = layer.forward(want)  # not compiled
        close(model.forward(x), want)


def test_what_is_no_parameter_of_a_module_is_left():
    """Inductor may copy such an input before a CUDA graph."""
    memory = torch.randn(64, K)

    def function(x, a, b):
        return F.linear(x, a) * 2, F.linear(x, b) + 1

    backend, given = Merging(), (torch.randn(3, K), memory[:32], memory[32:])
    with torch.no_grad():
        close(torch.compile(function, backend=backend)(*given), function(*given))
    assert backend.told == [()]


def test_nothing_is_done_where_nothing_can_be_guarded():
    backend, _ = agree(Three(bias=False))
    graph = backend.graphs[0]
    before = graph.code
    again = Merging()
    torch._dynamo.reset()
    agree(model := Three(bias=False))
    torch._dynamo.reset()

    def later(gm, inputs):
        again.graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=later)(torch.randn(3, K))
    [found] = merge_linears_pass(again.graphs[0])
    assert found.refusal == "no guard can be added here" and graph.code == before
    assert merge_linears_pass(fx.symbolic_trace(model)) == ()


def anything(x):
    """Of nobody whose functions are known, as one that is allowed in graphs."""
    return x


def test_what_may_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    quiet = [graph.call_function(f, (x, x)) for f in (operator.and_, operator.getitem, operator.is_, operator.index, torch.mul, F.silu)]
    quiet += [graph.call_method("__getitem__", (x,)), graph.call_function(torch.ops.aten.mul), graph.call_method("to", (x,))]
    loud = [graph.call_function(f, (x, x)) for f in (operator.iadd, operator.iand, operator.setitem, torch.relu_, torch.ops.aten.mul_)]
    loud += [graph.call_method("__iadd__", (x,)), graph.call_module("m", (x,)), graph.call_function(torch.ops.attnops.write_kv.default)]
    loud += [graph.call_function(anything, (x,)), graph.call_function(F.relu, (x, True))]
    assert not any(map(may_write, quiet)) and all(map(may_write, loud))


class Products(Three):
    """Of matrix products only, which Inductor compiles in no time. The group begins within the memory."""

    def forward(self, x):
        return self.k(x).mT @ self.v(x)


def test_inductor_reads_the_weights_in_place():
    model, x = Products(), torch.randn(3, K)
    pack_linears(model)
    compiled = torch.compile(model, options={"pre_grad_custom_pass": merge_linears_pass})
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        got, code = compiled_code(lambda: compiled(x))
        close(got, model(x))
        assert code.count("extern_kernels.addmm(reinterpret_tensor(arg") == 1 and code.count("extern_kernels.mm(") == 1
        assert "cpp_fused" not in code and "clone" not in code  # nothing but the two products
        model.v.weight.data = torch.randn(16, K)
        close(compiled(x), model(x))


CACHES = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.lowering.test_merge_linears_pass import K, Products, close
model, x = Products(), torch.randn(3, K)
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
"""


def test_caches_tell_fused_from_unfused(tmp_path):
    """In turn: weights apart, fused, together and not fused: all new. Then the first two again, which are found."""
    printed = ready_process(CACHES, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert printed.strip().splitlines()[-1].split() == ["0", "0", "0", "1", "1"]


def looks(layers):
    """How many times the value of a node is looked at, with all groups merged."""
    merge = sys.modules["attnops.lowering.merge_linears_pass"]
    model = nn.Sequential(*(Three(lambda q, k, v: torch.cat([q, k + v], -1)[..., :K]) for _ in range(layers)))
    for layer in model:
        pack_linears(layer)
    backend = Merging()
    with torch.no_grad(), patch.object(merge, "fake_of", wraps=merge.fake_of) as counted:
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, K))
    assert backend.linears == [layers]
    return counted.call_count


def test_every_layer_adds_as_much():
    """Merging linears of a model of many layers takes as long as there are layers, and not as long as their square."""
    few, more, many = (looks(layers) for layers in (1, 3, 5))
    assert many - more == more - few
