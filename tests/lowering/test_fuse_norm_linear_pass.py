"""A linear becomes one call with its norm, activation and residual where the numbers stay; anything else is left, with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import attnops
from attnops.core.problem import Target, pretend
from attnops.lowering import fuse_norm_linear_pass
from attnops.lowering.fuse_norm_linear_pass import summary
from attnops.ops.linear.record import LINEAR

K, M, EPS = 16, 24, 1e-5
SM90 = Target("cuda", 90, assume=("triton",))


class Using:
    """A backend that compiles no further. calls: how many calls of the op each graph has."""

    def __init__(self, target=None):
        self.products, self.calls, self.target = [], [], target

    def __call__(self, gm, inputs):
        before = gm.code
        with pretend(self.target):
            self.products += fuse_norm_linear_pass(gm)
        calls = gm.graph.find_nodes(op="call_function", target=LINEAR.packet.default)
        self.calls.append(len(calls))
        assert (gm.code == before) == (not calls)
        return gm.forward if self.target is None else lambda *given: (torch.zeros(()),)

    @property
    def parts(self):
        return [product.parts for product in self.products]

    @property
    def refusals(self):
        return [product.refusal for product in self.products]


class Layer(nn.Module):
    """Runs `body(layer, x)`. wide: gate and up in one."""

    def __init__(self, body, dtype=torch.float32, offset=0.0):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(K, dtype=dtype))
        self.wide, self.down = nn.Linear(K, 2 * M, dtype=dtype), nn.Linear(M, K, bias=False, dtype=dtype)
        self.square, self.body = nn.Linear(K, K, dtype=dtype), body

    def forward(self, x):
        return self.body(self, x)


def used(body, x=None, grad=False, model=None, **more):
    """The backend, after a layer gave with the reference of the op the numbers that it gives without."""
    torch.manual_seed(0)
    model, backend = Layer(body, **more) if model is None else model, Using()
    x = torch.randn(2, 3, K, dtype=model.gain.dtype) if x is None else x
    with torch.set_grad_enabled(grad), attnops.use(kernel={"linear": "reference"}):
        want = model(x.clone())
        got = torch.compile(model, backend=backend, fullgraph=True)(x.clone())
    eps = torch.finfo(model.gain.dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * K * eps, atol=8 * K * eps)
    assert got.stride() == want.stride()
    return backend


def root(x, eps=EPS):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(m, x):
    wide = x.to(torch.float32)
    return m.gain * (wide * root(wide)).to(x.dtype)


def gpt_oss(m, x):
    wide = x.to(torch.float32)
    return (m.gain * (wide * root(wide))).to(x.dtype)


def gemma(m, x):
    wide = x.float()
    return ((wide * root(wide)) * (1.0 + m.gain.float())).type_as(x)


def other_orders(m, x):
    wide = x.float()
    scale = torch.rsqrt(EPS + torch.mean(torch.square(wide), dim=-1, keepdim=True))
    return (torch.mul(scale, wide).type_as(x) * m.gain).to(x)


def by_power(m, x):
    wide = x.float()
    return (wide * torch.pow((wide * wide).mean((-1,), keepdim=True) + EPS, -0.5)).to(x.dtype) * m.gain


def torchs(m, x):
    return F.rms_norm(x, (K,), m.gain, EPS)


@pytest.mark.parametrize("norm", [llama, gpt_oss, gemma, other_orders, by_power, torchs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(norm, dtype):
    backend = used(lambda m, x: m.square(norm(m, x)), dtype=dtype)
    assert backend.parts == [("norm", "linear")] and backend.refusals == [""]


class Eps(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.gain, self.square, self.eps = nn.Parameter(torch.ones(K)), nn.Linear(K, K), eps

    def forward(self, x):
        wide = x.float()
        return self.square(self.gain * (wide * root(wide, self.eps)).to(x.dtype))


def test_an_eps_that_the_compiler_keeps_symbolic():
    """Each is a constant of its own graph."""
    backend, x = Using(), torch.randn(3, K)
    run = torch.compile(lambda layer, x: layer(x), backend=backend, fullgraph=True)
    with torch.no_grad(), attnops.use(kernel={"linear": "reference"}):
        for layer in map(Eps, (1e-5, 0.25, 2.0)):
            torch.testing.assert_close(run(layer, x), layer(x))
    assert backend.parts == [("norm", "linear")] * 3


HALVES = {
    "chunk": lambda y: y.chunk(2, dim=-1),
    "split": lambda y: torch.split(y, M, -1),
    "slices": lambda y: (y[..., :M], y[..., M:]),
    "narrow": lambda y: (y.narrow(-1, 0, M), y.narrow(-1, M, M)),
}
GATES = {
    "silu": nn.SiLU(),
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU("tanh"),
}


@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("gate", GATES)
def test_activations(halves, gate):
    def body(m, x):
        one, two = halves(m.wide(x))
        return two * GATES[gate](one)

    assert used(body).parts == [("linear", gate)]


def dropped(m, y):
    return F.dropout(y, 0.1, training=False)


SUMS = {
    "first": lambda m, x: x + m.square(x),
    "last": lambda m, x: m.square(x) + x,
    "without dropout": lambda m, x: torch.add(x, dropped(m, m.square(x))),
    "later": lambda m, x: m.square(x) + x.sin(),
}


@pytest.mark.sweep(3)  # each body and each shape
@pytest.mark.parametrize("body", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K), (2, 1, 3, K)], ids=lambda s: f"{len(s)}d")
def test_residuals(body, shape):
    assert used(body, torch.randn(shape)).parts == [("linear", "residual")]


def mlp(m, x):
    gate, up = m.wide(llama(m, x)).chunk(2, -1)
    return x + m.down(F.silu(gate) * up)


def test_a_layer_is_two_calls():
    backend = used(mlp)
    assert backend.parts == [("norm", "linear", "silu"), ("linear", "residual")] and backend.calls == [2]
    [line] = summary(backend.products * 2)
    assert line == ("linears of compiled layers, 2 of 2 recognised: 1 norm + linear + silu by reference, 1 linear + residual by reference")


def test_torchs_own_operations_stay_where_they_are_the_kernel():
    backend = Using()
    with torch.no_grad():
        torch.compile(Layer(mlp), backend=backend)(torch.randn(3, K))
    assert backend.calls == [0] and [p.kernel for p in backend.products] == ["aten"] * 2
    assert backend.parts == [("norm", "linear", "silu"), ("linear", "residual")]


# What is left ----------------------------------------------------------------------------------------------------------


def two_readers(m, x):
    y = llama(m, x)
    return m.square(y) + y


def two_products(m, x):
    y = llama(m, x)
    return m.square(y) * m.wide(y)[..., :K]


def other_half(m, x):
    up, gate = m.wide(x).chunk(2, -1)
    return up * F.silu(gate)


PARTS = {
    "norm": (two_readers, [("linear", "residual")], "reads it, too"),
    "norm of two": (two_products, [("linear",)] * 2, "norm: "),
    "order": (other_half, [("linear",)], "silu: not of the first half"),
    "broadcast": (lambda m, x: m.square(x) + x[:1], [("linear",)], "residual: of another shape or dtype"),
    "wide sum": (lambda m, x: (m.square(x) + x.double()).float(), [("linear",)], "residual: of another shape or dtype"),
    "two sums": (lambda m, x: (y := m.square(x)) * (y + x), [("linear",)], ""),
    "twice": (lambda m, x: (y := m.square(x)) + y, [("linear",)], ""),
    "returned gate": (lambda m, x: (y := m.wide(x).chunk(2, -1))[0] + F.silu(y[0]) * y[1], [("linear",)], ""),
    "other mean": (lambda m, x: m.square(m.gain * (x * root(x.mT).mT)), [("linear",)], ""),
}


@pytest.mark.parametrize(("body", "parts", "why"), PARTS.values(), ids=PARTS)
def test_a_part_with_other_readers_or_of_another_kind_is_left(body, parts, why):
    backend = used(body, torch.randn(3, K, K) if why == "" else None)
    assert backend.parts == parts and all(why in refusal for refusal in backend.refusals)


def test_a_product_that_is_returned():
    model, backend, x = Layer(lambda m, x: (y := m.wide(x), F.silu(y[..., :M]) * y[..., M:])), Using(), torch.randn(3, K)
    with torch.no_grad(), attnops.use(kernel={"linear": "reference"}):
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert backend.parts == [("linear",)]


@torch.library.custom_op("attnops_test::silu", mutates_args=())
def librarys_silu(x: torch.Tensor) -> torch.Tensor:
    return 2 * F.silu(x)


@torch.library.custom_op("attnops_test::rms_norm", mutates_args=())
def librarys_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, scale: float, low: bool) -> torch.Tensor:
    return scale * F.rms_norm(x, gain.shape, gain, eps)


@librarys_silu.register_fake
@librarys_norm.register_fake
def like(x, *_):
    return torch.empty_like(x)


def test_the_ops_of_a_library_are_no_functions_of_torch():
    def body(m, x):
        gate, up = m.wide(torch.ops.attnops_test.rms_norm(x, m.gain, EPS, 2.0, False)).chunk(2, -1)
        return torch.ops.attnops_test.silu(gate) * up

    assert used(body).parts == [("linear",)]


def test_a_norm_in_low_precision_is_left():
    backend = used(lambda m, x: m.square(m.gain * (x * root(x))), dtype=torch.bfloat16)
    assert backend.refusals == ["norm: it is not computed in torch.float32"] and backend.parts == [("linear",)]


LOW_NORMS = {
    "squares": lambda x, wide: x.pow(2).mean(-1, keepdim=True, dtype=torch.float32),
    "mean": lambda x, wide: wide.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mean", LOW_NORMS.values(), ids=LOW_NORMS)
def test_a_norm_that_is_partly_in_low_precision_is_left(mean):
    def body(m, x):
        wide = x.float()
        return m.square(m.gain * (wide * torch.rsqrt(mean(x, wide) + EPS)).to(x.dtype))

    assert used(body, dtype=torch.bfloat16).parts == [("linear",)]


DROPOUTS = {
    "by name": lambda y: F.dropout(y, 0.5, training=True),
    "by place": lambda y: F.dropout(y, 0.5, True),
    "by default": F.dropout,
    "a module": nn.Dropout().train(),
    "of channels": lambda y: F.dropout1d(y, 0.5, training=True),
}


@pytest.mark.parametrize("drop", DROPOUTS.values(), ids=DROPOUTS)
def test_a_dropout_that_is_on_ends_the_call(drop):
    model, backend = Layer(lambda m, x: x + drop(m.square(x))), Using()
    with torch.no_grad(), attnops.use(kernel={"linear": "reference"}):
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, 3, K))
    assert backend.parts == [("linear",)]


def written_between(m, x):
    y = llama(m, x)
    x.mul_(2)
    return m.square(y)


def residual_written_before(m, x):
    x.mul_(2)
    return x + m.square(llama(m, x))


def test_a_write_in_between():
    [refusal] = used(written_between).refusals
    assert "writes one of its inputs in between" in refusal
    assert used(residual_written_before).parts == [("norm", "linear", "residual")]


class Autocast(Layer):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.square(x)


class Adapted(nn.Module):
    """As PEFT's LoRA: the linear and two small ones beside it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(K))
        self.base_layer = nn.Linear(K, K)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": nn.Linear(K, 4)}), nn.ModuleDict({"default": nn.Linear(4, K)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.q = nn.Parameter(torch.ones(K)), Adapted()

    def forward(self, x):
        return self.q(x)


class Subclass(Layer):
    def __init__(self):
        super().__init__(lambda m, x: m.square(x))
        self.square.weight = nn.Parameter(TwoTensor(self.square.weight.data, self.square.weight.data), requires_grad=False)


class Empty(Layer):
    def __init__(self):
        super().__init__(lambda m, x: m.square(x[:, :0]))
        self.square = nn.Linear(1, K)
        self.square.weight = nn.Parameter(torch.empty(K, 0))


MODELS = {
    "autocast": (lambda: Autocast(None), "autocast is on", 1),
    "adapter": (Outer, "it is within an adapter", 3),
    "subclass": (Subclass, "weight is a TwoTensor", 1),
    "dtype": (
        lambda: Layer(lambda m, x: m.square(x), torch.complex64),
        "InvalidInput: x.dtype: got complex64, want float16 | bfloat16 | float32 | float64",
        1,
    ),
    "empty": (Empty, "its weight has no numbers", 1),
    "computed": (lambda: Layer(lambda m, x: F.linear(x, m.square.weight * 2)), "its weight or bias is no parameter of a module", 1),
}


@pytest.mark.parametrize(("make", "why", "count"), MODELS.values(), ids=MODELS)
def test_linears_that_are_left(make, why, count):
    model, backend = make(), Using()
    x = torch.randn(3, K, dtype=model.gain.dtype)
    with torch.no_grad(), attnops.use(kernel={"linear": "reference"}):
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert backend.refusals == [why] * count and backend.calls == [0]


def test_a_gain_of_another_dtype_is_left():
    model = Layer(lambda m, x: m.square(gpt_oss(m, x)), torch.bfloat16)
    model.gain = nn.Parameter(model.gain.float())
    backend, x = Using(), torch.randn(3, K, dtype=torch.bfloat16)
    with torch.no_grad(), attnops.use(kernel={"linear": "reference"}):
        torch.compile(model, backend=backend)(x)
    assert backend.refusals == ["norm: of torch.bfloat16 by a gain of torch.float32"] and backend.parts == [("linear",)]


def test_grad_mode_leaves_all():
    assert used(mlp, grad=True).refusals == ["grad mode is on"] * 2

    def within(m, x):
        with torch.enable_grad():
            return m.square(x)

    assert used(within).refusals == ["grad mode is on"]


def test_a_kernel_that_is_asked_for_and_cannot_run():
    model, backend = Layer(mlp), Using()
    with torch.no_grad(), attnops.use(kernel={"linear": "triton"}):
        torch.compile(model, backend=backend)(torch.randn(3, K))
    assert backend.calls == [0] and all(refusal.startswith("triton: target=cpu") for refusal in backend.refusals)


def test_outside_of_a_compiler():
    graphs = []
    torch.compile(Layer(mlp), backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(torch.randn(3, K))
    assert [product.refusal for product in fuse_norm_linear_pass(graphs[0])] == ["no guard can be added here"] * 2


# When it is compiled anew ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [{}, {"kernel": {"linear": "triton"}}], ids=["torch's", "no kernel"])
def test_another_policy(before):
    """Also of a graph that has no other call of attnops, and where no kernel could run."""
    model, backend, x = Layer(mlp), Using(), torch.randn(3, K)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            with attnops.use(**before):
                compiled(x)
            with attnops.use(kernel={"linear": "reference"}):
                compiled(x)
    assert backend.calls == [0, 2]


@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        pytest.param((2,), [0, 2], marks=pytest.mark.full),  # as "rows", with a dim that does not change
        ((), [0, 2]),
        ((3,), [0]),
    ],
    ids=["one size", "rows", "two sizes"],
)
def test_few_rows_and_many_are_compiled_apart(shape, calls):
    """Of two dynamic sizes no guard bounds the product, and torch's operations serve any number of rows."""
    backend = Using(SM90)
    compiled = torch.compile(Layer(mlp), backend=backend)
    with torch.no_grad():
        for rows in (250, 8, 32, 20, 2, 500):
            x = torch.randn(rows, *shape, K)
            for dim in {(2,): (0,), (): (0,), (3,): (0, 1)}[shape]:
                torch._dynamo.mark_dynamic(x, dim)
            compiled(x)
    assert backend.calls == calls
    assert [p.kernel for p in backend.products] == (["aten"] * 2 + ["triton"] * 2)[: 2 * len(calls)]
