"""Graphs of torch functions that are recorded without Dynamo: the module's own bits, and a reason
where a graph would not repeat what the code does."""

import weakref
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput

import attnops
from attnops.core import precompile
from attnops.graphs import compared, kinds as kinds_of_layers
from attnops.graphs.compile_pieces import Program
from attnops.graphs.cuda_graphs import Recorded
from attnops.graphs.eager_capture import CaptureMode
from attnops.graphs.forms import Form, own_tensors, tensors_of
from attnops.graphs.kinds import Dropped, Kinds
from attnops.graphs.looks import Looks
from attnops.graphs.per_layer import NotRegional, twin
from attnops.graphs.record_functions import NotRecorded, record
from tests.helpers import fresh_process

OTHER = torch.ones(4)


@dataclass
class Rule:
    factor: int = 1
    unset: int = field(init=False)


class Layer(nn.Module):
    """compute: of the module and its input."""

    def __init__(self, compute, act=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute, self.act = nn.Linear(4, 4), compute, act
        self.register_buffer("bias", torch.randn(4))
        self.scale, self.count, self.layer_idx = torch.tensor(2.0), 0, 3
        self.seen, self.notes, self.rule = [], {"x": {}}, Rule()

    def forward(self, x, **more):
        return self.compute(self, x, **more)


def of(module, *args, **kwargs):
    with torch.no_grad():
        return record(twin(module)[0], args, kwargs)


def many(self, x, pair):
    """Methods, operators in both orders, properties, indexes, results in tuples, writes."""
    x = self.linear(x) * self.scale + 1.0 - 2 / (3 - x.T.T)
    first, second = x.chunk(2, -1)
    values, at = torch.topk(x, 2)
    new = torch.empty_like(x)
    new.copy_(x).mul_(2)
    new[:, 0] = pair[0][:, 0]
    new += self.bias**2
    rows = new[..., : new.shape[1] // 2] @ second.mT
    return {"rows": rows, "more": (first.sum(-1), [values, at], "a word")}, x


def test_a_recorded_graph_gives_the_modules_bits():
    layer, x, pair = Layer(many), torch.randn(3, 4), (torch.randn(3, 4), None)
    found = of(layer, x, pair=pair)
    want = tensors_of(layer(x, pair=pair))
    got = found.module(x, *tensors_of(pair), *own_tensors(layer).values())
    assert len(got) == len(want) == 5 and all(map(torch.equal, got, want))
    assert found.out[0]["more"][2] == "a word"
    assert layer.bias.abs().sum() > 0 and type(layer.scale) is torch.Tensor, (
        "the twin alone is fake"
    )


def unseen(self, x):
    with torch._C.DisableTorchFunction():
        return x + 1


def kept(self, x):
    self.last = x
    return x + 1


def counted(self, x):
    self.count += 1
    return x + 1


def buffered(self, x):
    self.bias = x
    return x + 1


def cast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x)


def with_gradients(self, x):
    with torch.enable_grad():
        return self.linear(x)


def set_data(self, x):
    x.data = x * 2
    return x


def marked(self, x):
    x.mark = True
    return x + 1


def listed(self, x):
    self.seen.append(x)
    return x + 1


def noted(self, x):
    self.notes["x"] = {"last": x}
    return x + 1


def raised(self, x):
    self.rule.factor = 2
    return x + 1


def into_bias(self, x):
    torch.add(x[0], 1, out=self.bias)
    return x + 1


def by_item(self, x):
    x[:, 0] = 0
    return x + 1


def by_operator(self, x):
    rows = x.view(-1)
    rows += 1
    return x * 2


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (marked, "it changes a tensor's attributes"),
        (listed, "it changes seen"),
        (noted, "it changes notes"),
        (raised, "it changes rule"),
        (lambda self, x: x + self.bias.add_(1), "it writes l_call_buffers_bias_"),
        (into_bias, "it writes l_call_buffers_bias_"),
        (by_item, "it writes l_0_"),
        (by_operator, "it writes l_0_"),
        (lambda self, x: torch.nn.functional.relu(x, True), "it writes l_0_"),
        (lambda self, x: x + 1 if x.sum() > 0 else x, "DataDependentOutputException"),
        (lambda self, x: x * x.max().item(), "DataDependentOutputException"),
        (lambda self, x: x[x > 0], "DynamicOutputShapeException"),
        (lambda self, x: x + OTHER, "neither an argument nor its own"),
        (unseen, "aten.add.Tensor is called by no torch function"),
        (kept, "it sets last"),
        (counted, "it sets count"),
        (buffered, "it sets bias"),
        (cast, "autocast is on"),
        (with_gradients, "it switches gradients on"),
        (set_data, "it sets data of a tensor"),
        (lambda self, x: x + x.data_ptr() % 16, "it asks for data_ptr of a tensor"),
        (lambda self, x: x + len(x.__dlpack__()), "it asks for __dlpack__ of a tensor"),
        (lambda self, x: x + x.storage_offset(), "it asks for storage_offset of a tensor"),
        (lambda self, x: x + x._version, "it asks for _version of a tensor"),
        (lambda self, x: x + (x.grad_fn is None), "it asks for grad_fn of a tensor"),
        (lambda self, x: x + (x.grad is None), "it asks for grad of a tensor"),
        (lambda self, x: x + x.is_inference(), "it asks for is_inference of a tensor"),
        (lambda self, x: x + x.untyped_storage().nbytes(), "it asks for untyped_storage of"),
        (lambda self, x: iter([x]), "it returns a list_iterator"),
        (lambda self, x: torch.ones(3) + torch.nn.functional.linear(x, x[:3]), "RuntimeError"),
    ],
)
def test_code_that_a_graph_would_not_repeat(compute, why):
    layer = Layer(compute)
    with pytest.raises(NotRecorded) as told:
        of(layer, torch.randn(2, 4))
    assert why in str(told.value)
    assert (layer.seen, layer.notes) == ([], {"x": {}}), "the twin has containers of its own"


def test_an_argument_that_changes():
    def listed_for_the_caller(self, x, seen):
        seen.append(x)
        return x + 1

    with pytest.raises(NotRecorded, match="it changes its arguments"):
        of(Layer(listed_for_the_caller), torch.randn(2, 4), seen=[])


def test_tensors_of_its_own_may_be_written():
    """By other tensors, which are read alone."""

    def rows(self, x):
        new = torch.empty_like(x)
        new.copy_(x)
        new[:, 0] = self.bias[0]
        return torch.add(x, self.bias, out=new).mul_(2)

    layer, x = Layer(rows), torch.randn(2, 4)
    assert torch.equal(run(Kinds(), [layer], x), (x + layer.bias) * 2)


class Odd(torch.Tensor):
    pass


def test_a_subclass_of_tensors():
    with pytest.raises(NotRecorded) as told:
        of(Layer(kept), torch.randn(2, 4).as_subclass(Odd))
    assert "is a Odd" in str(told.value)


def form(module, *args):
    found = Form()
    return found.of(args), found.of_module(twin(module)[0])


def gelu():
    return partial(torch.nn.functional.gelu, approximate="tanh")


def test_equal_layers_have_one_form():
    """Their numbers, tensors and partial functions are their own."""
    x, one, other = torch.randn(2, 4), Layer(many, gelu()), Layer(many, gelu())
    other.layer_idx = 5
    assert form(one, x) == form(other, torch.randn(2, 4))


def strided(layer):
    layer.linear.weight.data = torch.randn(4, 4).t()


def aligned(layer):
    layer.linear.weight.data = torch.randn(17)[1:].view(4, 4)


def tied(layer):
    layer.bias = layer.linear.bias.data


@pytest.mark.parametrize(
    "change",
    [
        strided,
        aligned,
        tied,
        lambda layer: layer.train(False),
        lambda layer: setattr(layer, "count", 0.0),
        lambda layer: setattr(layer, "act", partial(torch.nn.functional.gelu)),
        lambda layer: setattr(layer, "linear", nn.Linear(4, 4, bias=False)),
        lambda layer: layer.linear.double(),
        lambda layer: layer.linear.register_forward_hook(print),
        lambda layer: setattr(layer.linear.weight, "requires_grad", False),
    ],
)
def test_layers_that_differ_have_other_forms(change):
    one, other = Layer(many, gelu()), Layer(many, gelu())
    change(other)
    assert form(one) != form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(2, 4), torch.randn(3, 4)),
        (torch.randn(2, 4), torch.randn(4, 2).t()),
        (torch.randn(2, 4), torch.randn(2, 4).double()),
        (torch.randn(9)[:8], torch.randn(9)[1:]),
        ((OTHER, OTHER), (OTHER, OTHER.clone())),
        ((OTHER[:2], OTHER[2:]), (OTHER[:2], OTHER[1:3])),
        ([1, 2], (1, 2)),
        (1, True),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_arguments_that_differ_have_other_forms(one, other):
    assert Form().of(one) != Form().of(other)


class Pair(NamedTuple):
    factor: int
    offset: torch.Tensor


@dataclass(slots=True)
class Slotted:
    factor: int = 1


def config(kind):
    made = LlamaConfig()
    made._attn_implementation = kind
    return made


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (Pair(1, OTHER), Pair(1, OTHER), Pair(2, OTHER)),
        (Slotted(1), Slotted(1), Slotted(2)),
        (Rule(1), Rule(1), Rule(2)),
        (BaseModelOutput(OTHER), BaseModelOutput(OTHER), BaseModelOutput(OTHER[:2])),
        (config("sdpa"), config("sdpa"), config("eager")),
        (OTHER.to_sparse(), None, OTHER.to_sparse()),
    ],
)
def test_objects_are_known_by_all_that_they_hold(one, same, other):
    """Also by what is set beside the fields of a dataclass, and without those that are not set."""
    assert Form().of(one) == Form().of(one if same is None else same) != Form().of(other)


def with_structures(self, x, pair=None):
    return BaseModelOutput(x * pair.factor, (x + pair.offset,)), pair


def test_structures_of_arguments_and_results():
    layer, x, pair = Layer(with_structures), torch.randn(2, 4), Pair(3, torch.randn(4))
    found, given = run(Kinds(), [layer], x, pair=pair)
    assert type(found) is BaseModelOutput and type(given) is Pair and given.factor == 3
    assert torch.equal(found[0], x * 3) and torch.equal(found.hidden_states[0], x + pair.offset)


def run(kinds, layers, x, **more):
    kinds.begin()
    with torch.no_grad():
        for layer in layers:
            x = kinds(layer, x.shape[0], (x,), more)
    return x


def small_floats(self, x):
    factor = 1 if isinstance(x, FakeTensor) else 2
    return (x * factor).to(torch.float8_e4m3fn)


def other_pages(self, x, k_pages, v_pages, slots):
    key = x if isinstance(x, FakeTensor) else x * 2
    attnops.write_kv(key[:, None], x[:, None], k_pages, v_pages=v_pages, slots=slots)
    return x + 1


def test_what_is_compared(monkeypatch):
    x, told = torch.randn(2, 4), "what was recorded of Layer has other results"
    with pytest.raises(NotRegional, match=told):
        run(Kinds(), [Layer(small_floats)], x)

    def written():
        k_pages, v_pages = torch.zeros(2, 3, 4, 1, 4)[:, ::2]
        given = {"k_pages": k_pages, "v_pages": v_pages, "slots": torch.tensor([1, 6])}
        run(Kinds(), [Layer(other_pages)], x, **given)

    with pytest.raises(NotRegional, match=told):
        written()
    monkeypatch.setattr(compared, "MOST_COMPARED", 0)
    written()


def plain(self, x):
    return self.linear(x).relu() * self.scale


def test_one_graph_a_kind_of_layer_and_size():
    layers, kinds = [Layer(plain) for _ in range(3)], Kinds()
    for layer in layers:
        torch.nn.init.normal_(layer.linear.weight)
    layers[1].scale = torch.tensor(3.0)
    for rows, traces in ((2, 1), (2, 1), (5, 2)):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            want = layers[2](layers[1](layers[0](x)))
        assert torch.equal(run(kinds, layers, x), want) and kinds._traces == traces


CHANGES = {
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight.data, False)),
    "place": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "offset": lambda m: setattr(m.weight, "data", m.weight.data.as_strided((4, 4), (4, 1), 4)),
    "storage": lambda m: setattr(m.weight, "data", torch.from_numpy(m.weight.data.numpy())),
    "shape": lambda m: setattr(m.weight, "data", m.weight.data[:2]),
    "strides": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "dtype": lambda m: setattr(m.weight, "data", m.weight.data.view(torch.int32)),
    "gradient": lambda m: m.weight.requires_grad_(),
    "count": lambda m: setattr(m, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_is_looked_at_again_where_its_tensors_are_others(name):
    """And only there. Nothing keeps it or its tensors alive."""
    layers, looks = [Layer(plain).requires_grad_(False) for _ in range(2)], Looks()
    for layer in layers:
        layer.linear.weight.data, layer.rule = torch.randn(5, 4)[:4], layers[0].rule
    before, other = map(looks.own, layers)
    assert before.form == other.form and looks.own(layers[0]).known is before.known
    assert [*looks._shared] == [id(layers[0].rule)]
    CHANGES[name](layers[0].linear)
    after = looks.own(layers[0])
    assert after.known is not before.known
    same = name in ("parameter", "place", "offset", "storage")
    assert (after.form == before.form) is same
    held = [weakref.ref(x) for x in (layers[1].linear.weight, *layers)]
    del before, other, after
    layers[1].linear.weight = layer = None
    assert held[0]() is None
    layers.clear()
    assert not any(ref() for ref in held)


def test_after_a_capture_of_layers_that_were_dropped_steps_run_once_more():
    kinds, step = Kinds(pages="of one size"), (SimpleNamespace(requests=()), 2)
    kinds.note_run(*step)
    assert kinds.ran_alike(*step) and not kinds.runs_again(NotRegional("a test's"))
    assert [kinds.runs_again(Dropped("a test's")) for _ in range(2)] == [True, False]
    assert not kinds.ran_alike(*step)
    of_no_pages = Kinds()
    of_no_pages.note_run(*step)
    assert not of_no_pages.ran_alike(*step)


def test_more_kinds_than_a_step_may_have():
    layers = [Layer(plain) for _ in range(5)]
    for number, layer in enumerate(layers):
        layer.count = number
    with pytest.raises(NotRegional, match="more than 4 layers of a step differ"):
        run(Kinds(), layers, torch.randn(2, 4))


def implemented(self, x):
    return x * (2 if self.config._attn_implementation == "eager" else 1)


def test_layers_whose_configs_differ_share_no_graph():
    layers, x = [Layer(implemented), Layer(implemented)], torch.randn(2, 4)
    for layer, kind in zip(layers, ("sdpa", "eager"), strict=True):
        layer.config = config(kind)
    kinds = Kinds()
    assert torch.equal(run(kinds, layers, x), x * 2) and kinds._traces == 2


def test_kernels_of_a_layer_s_own_code_begin_ahead(monkeypatch):
    """It runs beside the recording, whose passes may have taken another op."""
    begun, kinds = [], Kinds()
    monkeypatch.setattr(precompile, "begin", lambda kernel, call: begun.append(call.spec.op))
    layer = Layer(lambda self, x: attnops.attention(x, x, x))
    with kinds.way("ahead"):
        kinds(layer, 2, (torch.ones(1, 1, 2, 4),), {})
    assert begun == ["attention"]
    kinds(layer, 2, (torch.ones(1, 1, 2, 4),), {})
    assert begun == ["attention"]


def test_what_is_recorded_ahead_is_compared_at_its_first_run():
    """It runs no code of the layers on numbers, and its results have their form."""
    x, good, bad = torch.randn(2, 4), Layer(plain), Layer(other_on_fakes)
    kinds = Kinds()
    with kinds.way("ahead"):
        blank = run(kinds, [good, bad], x)
    assert blank.shape == x.shape and kinds._traces == 2 and not kinds.ran
    assert torch.equal(run(kinds, [good, good], x), good(good(x))) and kinds._traces == 2
    with pytest.raises(NotRegional, match="what was recorded of Layer has other results"):
        run(kinds, [bad], x)


def test_one_of_a_kind_runs_for_all(monkeypatch):
    """No two layers have the same results."""
    ran, real = [], Program.run
    monkeypatch.setattr(Program, "run", lambda *given: ran.append(1) or real(*given))
    layers, x, kinds = [Layer(plain) for _ in range(3)], torch.randn(2, 4), Kinds()
    with kinds.way("once"):
        for _ in range(2):
            assert torch.equal(run(kinds, layers, x), layers[0](x))
    assert len(ran) == 2 and kinds._traces == 1 and len(kinds.ran) == 3


def test_objects_without_tensors_are_described_once():
    known, rule, held = {}, Rule(1), BaseModelOutput(OTHER)
    want = Form().of((rule, held))
    assert all(Form(known).of((rule, held)) == want for _ in range(2)) and [*known] == [id(rule)]


def test_a_session_looks_at_a_layer_once(monkeypatch):
    looked, real = [], Form.of_module
    monkeypatch.setattr(Form, "of_module", lambda *given: looked.append(1) or real(*given))
    layer, x, kinds = Layer(plain), torch.randn(2, 4), Kinds()
    with kinds.session():
        run(kinds, [layer, layer], x)
        run(kinds, [layer], x)
    assert len(looked) == 1 and kinds._traces == 1
    layer.count = 5
    run(kinds, [layer], x)
    assert len(looked) == 2 and kinds._traces == 2


def endless():
    found = []
    found.append(found)
    return found


def test_an_error_of_a_form_is_a_reason():
    layer = Layer(plain)
    layer.held = endless()
    with pytest.raises(NotRegional, match="Layer cannot be recorded: RecursionError"):
        run(Kinds(), [layer], torch.randn(2, 4))


def test_memory_that_is_short_is_no_reason():
    """The same layer may be recorded later."""

    def short(self, x):
        if isinstance(x, FakeTensor):
            return x + 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run(Kinds(), [Layer(short)], torch.randn(2, 4))


def test_nothing_is_recorded_in_a_capture():
    """Its results could not be compared."""
    with (
        CaptureMode(Recorded(None)),
        pytest.raises(NotRegional, match="Layer was called otherwise than before the capture"),
    ):
        run(Kinds(), [Layer(plain)], torch.randn(2, 4))


def test_those_that_served_last_are_kept(monkeypatch):
    monkeypatch.setattr(kinds_of_layers, "MOST_KEPT", 2)
    monkeypatch.setattr(Kinds, "_share", lambda *_: None)
    kinds, layer, found = Kinds(), Layer(plain), []
    for rows in (1, 2, 1, 3, 1, 2):
        run(kinds, [layer], torch.randn(rows, 4))
        found.append(kinds._traces)
    assert found == [1, 2, 2, 3, 3, 4]


def other_on_fakes(self, x):
    return x + 1 if isinstance(x, FakeTensor) else x + 2


def numbered(self, x):
    return x * (self.layer_idx + 1)


def looked_up(self, x):
    return x * {"layers.3": 2.0}.get(f"layers.{self.layer_idx}", 1.0)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (other_on_fakes, "what was recorded of Layer has other results"),
        (numbered, "unsupported operand"),
        (looked_up, "its own number or name"),
        (kept, "Layer cannot be recorded: .*it sets last"),
    ],
)
def test_a_layer_that_is_not_recorded(compute, why):
    layer = Layer(compute)
    with pytest.raises(NotRegional, match=why):
        run(Kinds(), [layer], torch.randn(2, 4))
    assert type(layer.linear.weight) is nn.Parameter


def test_an_error_of_a_pass_is_a_reason():
    def fails(gm):
        raise ValueError("no such node")

    with pytest.raises(NotRegional, match="no such node"):
        run(Kinds([fails]), [Layer(plain)], torch.randn(2, 4))


def test_fake_tensors_that_fail_are_not_logged(caplog):
    def grouped(self, x):
        ends = torch.tensor([1, 2], dtype=torch.int32)
        return torch.ops.aten._grouped_mm(x.int(), x.int(), ends)

    with pytest.raises(NotRecorded):
        of(Layer(grouped), torch.randn(2, 4))
    assert not caplog.records


def test_a_recorded_layer_calls_neither_dynamo_nor_inductor():
    """torch's fake tensors import the packages, but not the parts that lower a graph."""
    code = """
import sys
import torch
from attnops.graphs.kinds import Kinds
from attnops.lowering import fuse_norm_linear_pass, fuse_rotation_pass, merge_linears_pass
passes = (merge_linears_pass, fuse_rotation_pass, fuse_norm_linear_pass)
layer = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8), torch.nn.SiLU())
with torch.no_grad():
    x = torch.randn(2, 8)
    assert torch.equal(Kinds(passes)(layer, 2, (x,), {}), layer(x))
print([name for name in sys.modules if name.startswith("torch._inductor.lowering")])
print(dict(torch._dynamo.utils.counters))
"""
    assert fresh_process(code).split() == ["[]", "{}"]
