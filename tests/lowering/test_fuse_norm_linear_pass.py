"""A linear becomes one call with its norm, activation and residual where the numbers stay; anything
else is left, with a reason."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import attnops
from attnops.core.op import not_lowered
from attnops.core.problem import Target, pretend
from attnops.lowering import fuse_norm_linear_pass
from attnops.lowering.products import summary
from attnops.ops.linear.record import LINEAR
from tests.lowering.models import Passing

K, M, EPS = 16, 24, 1e-5
REFERENCE = {"kernel": {"linear": "reference"}}
F32, BF16 = torch.float32, torch.bfloat16


class Using(Passing):
    """parts: those of each linear; found: all linears, in order."""

    def __init__(self):
        super().__init__(fuse_norm_linear_pass)

    @property
    def products(self):
        return [product for found in self.found for product in found]

    @property
    def parts(self):
        return [" + ".join(product.parts) for product in self.products]

    @property
    def linears(self):
        return self.calls(LINEAR.packet.default)


class Layer(nn.Module):
    """Runs `body(layer, x)`. wide: gate and up in one."""

    def __init__(self, body, dtype=F32, gain=None):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(K, dtype=gain or dtype))
        self.wide = nn.Linear(K, 2 * M, dtype=dtype)
        self.down = nn.Linear(M, K, bias=False, dtype=dtype)
        self.square, self.body = nn.Linear(K, K, dtype=dtype), body

    def forward(self, x):
        return self.body(self, x)


def used(model, shape=(2, 3, K), grad=False):
    """The backend, after a model gave with the reference of the op the numbers that it gives
    without."""
    backend, dtype, results = Using(), model.down.weight.dtype, []
    x = torch.randn(shape, dtype=dtype)
    with torch.set_grad_enabled(grad), attnops.use(**REFERENCE):
        for run in (torch.compile(model, backend=backend, fullgraph=True), model):
            torch.manual_seed(0)  # of dropouts
            results.append(run(x.clone()))
    bound = 8 * K * torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=bound, atol=bound, check_stride=True)
    return backend


def root(x, eps=EPS):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(m, x, eps=EPS):
    wide = x.to(F32)
    return m.gain * (wide * root(wide, eps)).to(x.dtype)


def gpt_oss(m, x):
    wide = x.to(F32)
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
    return (wide * torch.pow((wide * wide).mean((-1,), keepdim=True) + EPS, -0.5)).to(
        x.dtype
    ) * m.gain


def torchs(m, x):
    return F.rms_norm(x, m.gain.shape, m.gain, EPS)


@pytest.mark.parametrize("norm", [llama, gpt_oss, gemma, other_orders, by_power, torchs])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms(norm, dtype):
    backend = used(Layer(lambda m, x: m.square(norm(m, x)), dtype))
    assert backend.parts == ["norm + linear"] and not backend.products[0].refusal


def test_an_eps_that_the_compiler_keeps_symbolic():
    """Each is a constant of its own graph."""
    backend, layer, x = Using(), Layer(None), torch.randn(3, K)
    run = torch.compile(
        lambda eps: layer.square(llama(layer, x, eps)), backend=backend, fullgraph=True
    )
    with attnops.use(**REFERENCE):
        for eps in (1e-5, 0.25, 2.0):
            torch.testing.assert_close(run(eps), layer.square(llama(layer, x, eps)))
    assert backend.parts == ["norm + linear"] * 3


HALVES = {
    "chunk": lambda y: y.chunk(2, dim=-1),
    "split": lambda y: torch.split(y, M, -1),
    "slices": lambda y: (y[..., :M], y[..., M:]),
    "narrow": lambda y: (y.narrow(-1, 0, M), y.narrow(-1, M, M)),
}
GATES = {"silu": nn.SiLU(), "gelu": F.gelu, "gelu_tanh": nn.GELU("tanh")}


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("gate", GATES)
def test_activations(halves, gate):
    def body(m, x):
        one, two = HALVES[halves](m.wide(x))
        return two * GATES[gate](one)

    assert used(Layer(body)).parts == [f"linear + {gate}"]


@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 1, 3, K)], ids=lambda s: f"{len(s)}d")
def test_residuals(shape):
    assert used(Layer(lambda m, x: x + m.square(x)), shape).parts == ["linear + residual"]


def mlp(m, x):
    gate, up = m.wide(llama(m, x)).chunk(2, -1)
    return x + m.down(F.silu(gate) * up)


def test_a_layer_is_two_calls():
    backend = used(Layer(mlp))
    assert backend.parts == ["norm + linear + silu", "linear + residual"] and backend.linears == [2]
    [line] = summary(backend.products * 2)
    assert line == (
        "linears of compiled layers, 2 of 2 recognised: 1 norm + linear + silu by reference, 1 "
        "linear + residual by reference"
    )


# What is taken, and what is left ------------------------------------------------------------------


@torch.library.custom_op("attnops_test::silu", mutates_args=())
def librarys_silu(x: torch.Tensor) -> torch.Tensor:
    return 2 * F.silu(x)


@librarys_silu.register_fake
def like(x):
    return torch.empty_like(x)


def op_of_a_library(m, x):
    gate, up = m.wide(x).chunk(2, -1)
    return torch.ops.attnops_test.silu(gate) * up


def two_readers(m, x):
    y = llama(m, x)
    return m.square(y) + y


def two_products(m, x):
    y = llama(m, x)
    return m.square(y) * m.wide(y)[..., :K]


def other_half(m, x):
    up, gate = m.wide(x).chunk(2, -1)
    return up * F.silu(gate)


def returned_gate(m, x):
    gate, up = m.wide(x).chunk(2, -1)
    return gate + F.silu(gate) * up


def returned_product(m, x):
    y = m.wide(x)
    return y, F.silu(y[..., :M]) * y[..., M:]


def normed(root_of):
    """A norm by another root of the mean of squares."""

    def body(m, x):
        wide = x.float()
        return m.square(m.gain * (wide * root_of(x, wide)).to(x.dtype))

    return body


def squares_in_low_precision(x, wide):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=F32) + EPS)


def mean_in_low_precision(x, wide):
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True, dtype=BF16) + EPS)


def dropped(drop):
    return lambda m, x: x + drop(m.square(x))


def written_between(m, x):
    y = llama(m, x)
    x.mul_(2)
    return m.square(y)


def residual_written_before(m, x):
    x.mul_(2)
    return x + m.square(llama(m, x))


def autocast(m, x):
    with torch.autocast("cpu", BF16):
        return m.square(x)


def with_gradients(m, x):
    with torch.enable_grad():
        return m.square(x)


def of_weight(body, change):
    layer = Layer(body)
    layer.square.weight = nn.Parameter(change(layer.square.weight.data), requires_grad=False)
    return layer


def square(m, x):
    return m.square(x)


class Adapted(nn.Module):
    """As PEFT's LoRA: the linear and two small ones beside it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(K, K)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(K, 4)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, K)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def adapted():
    layer = Layer(square)
    layer.square = Adapted()
    return layer


NO_NUMBER = "InvalidInput: x.dtype: got complex64, want float16 | bfloat16 | float32 | float64"
BODIES = {
    "residual last": (dropped(lambda y: y), ["linear + residual"], ""),
    "residual later": (lambda m, x: m.square(x) + x.sin(), ["linear + residual"], ""),
    "dropout that is off": (
        dropped(lambda y: F.dropout(y, 0.1, training=False)),
        ["linear + residual"],
        "",
    ),
    "dropout by name": (dropped(lambda y: F.dropout(y, 0.5, training=True)), ["linear"], ""),
    "dropout by default": (dropped(F.dropout), ["linear"], ""),
    "dropout of channels": (dropped(lambda y: F.dropout1d(y, 0.5, training=True)), ["linear"], ""),
    "norm": (two_readers, ["linear + residual"], "reads it, too"),
    "norm of two": (two_products, ["linear"] * 2, "norm: "),
    "other mean": (normed(lambda x, wide: root(x.mT).mT), ["linear"], ""),
    "order": (other_half, ["linear"], "silu: not of the first half"),
    "broadcast": (
        lambda m, x: m.square(x) + x[:1],
        ["linear"],
        "residual: of another shape or dtype",
    ),
    "wide sum": (
        lambda m, x: (m.square(x) + x.double()).float(),
        ["linear"],
        "residual: of another shape or dtype",
    ),
    "two sums": (lambda m, x: (y := m.square(x)) * (y + x), ["linear"], ""),
    "twice": (lambda m, x: (y := m.square(x)) + y, ["linear"], ""),
    "returned gate": (returned_gate, ["linear"], ""),
    "returned product": (returned_product, ["linear"], ""),
    "op of a library": (op_of_a_library, ["linear"], ""),
    "written between": (written_between, [""], "writes one of its inputs in between"),
    "residual written before": (residual_written_before, ["norm + linear + residual"], ""),
    "autocast": (autocast, [""], "autocast is on"),
    "grad mode": (with_gradients, [""], "grad mode is on"),
    "computed": (
        lambda m, x: F.linear(x, m.square.weight * 2),
        [""],
        "its weight or bias is no parameter of a module",
    ),
}
MODELS = {
    **{name: (partial(Layer, body), *rest) for name, (body, *rest) in BODIES.items()},
    "norm in low precision": (
        lambda: Layer(lambda m, x: m.square(m.gain * (x * root(x))), BF16),
        ["linear"],
        f"norm: it is not computed in {F32}",
    ),
    "squares in low precision": (
        lambda: Layer(normed(squares_in_low_precision), BF16),
        ["linear"],
        "",
    ),
    "mean in low precision": (lambda: Layer(normed(mean_in_low_precision), BF16), ["linear"], ""),
    "gain": (
        lambda: Layer(lambda m, x: m.square(gpt_oss(m, x)), BF16, F32),
        ["linear"],
        f"norm: of {BF16} by a gain of {F32}",
    ),
    "adapter": (adapted, [""] * 3, "it is within an adapter"),
    "subclass": (
        lambda: of_weight(square, lambda w: TwoTensor(w, w)),
        [""],
        "weight is a TwoTensor",
    ),
    "dtype": (lambda: Layer(square, torch.complex64), ["linear"], NO_NUMBER),
    "empty": (
        lambda: of_weight(lambda m, x: m.square(x[..., :0]), lambda w: w[:, :0]),
        [""],
        "its weight has no numbers",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_taken_and_what_is_left(name):
    make, parts, why = MODELS[name]
    backend = used(make(), (3, K, K) if name == "other mean" else (2, 3, K))
    assert backend.parts == parts and all(why in product.refusal for product in backend.products)
    taken = sum(bool(product.kernel) for product in backend.products)
    assert backend.linears == [taken]


def test_grad_mode_leaves_all():
    assert [product.refusal for product in used(Layer(mlp), grad=True).products] == [
        "grad mode is on"
    ] * 2


def test_outside_of_a_compiler():
    later = Passing(lambda gm: None)
    torch.compile(Layer(mlp), backend=later)(torch.randn(3, K))
    assert [product.refusal for product in fuse_norm_linear_pass(*later.graphs)] == [
        "no guard can be added here"
    ] * 2


# When it is compiled anew -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "kernel", "why"),
    [({}, "aten", ""), ({"kernel": {"linear": "triton"}}, "", "triton: target=cpu")],
    ids=["torch's", "no kernel"],
)
def test_another_policy(before, kernel, why):
    """Also of a graph that has no other call of attnops, and where no kernel could run."""
    model, backend, x = Layer(mlp), Using(), torch.randn(3, K)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with attnops.use(**before):
            compiled(x)
        with attnops.use(**REFERENCE):
            compiled(x)
    assert backend.linears == [0, 2] and backend.parts[:2] == backend.parts[2:]
    assert all(p.kernel == kernel and p.refusal.startswith(why) for p in backend.products[:2])


@pytest.mark.parametrize(("shape", "calls"), [((), [0, 2]), ((3,), [0])], ids=["rows", "two sizes"])
def test_few_rows_and_many_are_compiled_apart(shape, calls):
    """Of two dynamic sizes no guard bounds the product, and torch's operations serve any number of
    rows."""
    using = Using()

    def backend(gm, inputs):
        with pretend(Target("cuda", 90, assume=("triton",))):
            using(gm, inputs)
        return lambda *given: (torch.zeros(()),)

    compiled = torch.compile(Layer(mlp), backend=backend)
    for rows in (250, 8, 32, 20, 2, 500):
        x = torch.randn(rows, *shape, K)
        for dim in range(x.dim() - 1):
            torch._dynamo.mark_dynamic(x, dim)
        compiled(x)
    assert using.linears == calls
    assert [p.kernel for p in using.products] == (["aten"] * 2 + ["triton"] * 2)[: 2 * len(calls)]


@pytest.mark.parametrize(
    ("shape", "dynamic", "lowered", "kernel"),
    [
        ((100, 64), False, True, "aten"),
        ((100, 64), False, False, "triton_aten"),
        ((2, 100, 64), False, False, "triton_aten"),
        ((16, 64), False, False, "triton"),
        ((2, 100, 64), True, False, "aten"),
    ],
)
def test_more_rows_have_a_kernel_where_no_compiler_fuses(shape, dynamic, lowered, kernel):
    """Two sizes that vary may be of few rows."""
    found, layer = [], nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 128, bias=False))

    def backend(gm, _):
        with pretend(Target.parse("h200", ("triton",))):
            found.extend(fuse_norm_linear_pass(gm))
        return lambda *given: (torch.zeros(()),)

    x = torch.randn(shape).to(BF16)
    for dim in range(x.dim() - 1) if dynamic else ():
        torch._dynamo.mark_dynamic(x, dim)
    torch._dynamo.reset()
    with torch.no_grad(), nullcontext() if lowered else not_lowered():
        torch.compile(layer.to(BF16).eval(), backend=backend)(x)
    [product] = found
    assert (product.parts, product.kernel) == (("norm", "linear"), kernel)


@pytest.mark.parametrize("apart", [False, True])
def test_a_residual_that_is_transposed_costs_no_copy(apart):
    """The input would be copied to the order of the residual, or has no rows for the kernel."""
    found, product = [], nn.Linear(32, 32, bias=False, dtype=BF16)
    x = torch.randn(2, 3, 4, 64, dtype=BF16) if apart else torch.randn(2, 4, 3, 32, dtype=BF16)

    def body(x, r):
        return r.transpose(1, 2) + product(x[..., ::2].transpose(1, 2) if apart else x)

    def backend(gm, _):
        with pretend(Target("cuda", 90, assume=("triton",))):
            found.extend(fuse_norm_linear_pass(gm))
        return lambda *given: (torch.zeros(()),)

    torch._dynamo.reset()
    with torch.no_grad(), attnops.use(kernel={"linear": "triton"}):
        torch.compile(body, backend=backend)(x, torch.randn(2, 3, 4, 32, dtype=BF16))
    assert not found[0].kernel and found[0].refusal
