"""Which code runs a patched router: transformers' own in a plain eager call, the op in compiled
code, in CUDA graphs, and where the policy wants it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnops
from attnops.graphs import Buckets, breakable
from attnops.graphs.capturing import as_captured
from attnops.hf import tiny
from attnops.hf.models import routers
from tests.graphs.standin import StandIn
from tests.hf.decoding import CALL, beside, generated, prompts_in_graphs
from tests.hf.helpers import Counter, replaced

FORCED = {"route": "reference"}


def tokens():
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def own(monkeypatch):
    """The calls of Mixtral's own router."""
    cls, made = type(tiny.model("mixtral").model.layers[0].mlp.gate), []
    before = cls.forward

    def counted(self, hidden_states):
        made.append(hidden_states)
        return before(self, hidden_states)

    monkeypatch.setattr(cls, "forward", counted)
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A kernel of ours would be chosen, and none was launched yet."""
    chosen = torch.compiler.assume_constant_result(lambda *_: True)
    monkeypatch.setattr(routers, "is_ours", chosen)
    monkeypatch.setattr(routers, "_LAUNCHED", set())


@pytest.fixture
def ops(monkeypatch):
    """The calls of the op. Compiled code is looked at instead: it would be guarded on them."""
    made, before = [], routers.route

    def counted(*args, **kwargs):
        made.append(args)
        return before(*args, **kwargs)

    monkeypatch.setattr(routers, "route", counted)
    return made


@torch.no_grad()
def test_a_plain_eager_call_runs_transformers_own_code(own, ops):
    """To the bit. Once a kind of call the op is launched, too, which loads its kernel."""
    model, x = tiny.model("mixtral"), tokens()
    gates = [layer.mlp.gate for layer in model.model.layers]
    want = [gate(x) for gate in gates]
    with attnops.patch(model):
        for launched in (1, 1, 1):
            own.clear()
            got = [gate(x) for gate in gates]
            assert len(own) == 2 and len(ops) == launched
            for a, b in zip(got, want, strict=True):
                assert all(map(torch.equal, a, b))
        model.to(torch.bfloat16)
        gates[0](x.bfloat16())
        assert len(ops) == 2, "another dtype, another kernel"


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(lambda: attnops.use(deterministic=True), id="deterministic"),
        pytest.param(lambda: attnops.use(kernel=FORCED), id="a kernel is named"),
        pytest.param(as_captured, id="before a capture"),
        pytest.param(lambda: replaced(routers, capturing=lambda x: True), id="in a capture"),
    ],
)
@torch.no_grad()
def test_calls_that_run_the_op(around, own, ops):
    model, x = tiny.model("mixtral"), tokens()
    with attnops.patch(model):
        own.clear()
        for count in (1, 2):
            with around():
                model.model.layers[0].mlp.gate(x)
            assert len(ops) == count and not own
        with attnops.use(kernel={"experts": "reference"}):  # a policy on another op
            for _ in range(2):
                model.model.layers[0].mlp.gate(x)
        assert len(ops) == 3 and len(own) == 2


@torch.no_grad()
def test_compiled_calls_run_the_op():
    model, counter = tiny.model("mixtral"), Counter()
    with attnops.patch(model):
        gate = model.model.layers[0].mlp.gate
        torch.compile(gate, fullgraph=True, backend=counter)(tokens())
    assert sum("attnops.route" in target for target in counter.targets()) == 1


@torch.no_grad()
def test_fake_calls_run_the_op(own, ops):
    """`explain` lists them."""
    model, x = tiny.model("mixtral"), tokens()
    with attnops.patch(model):
        own.clear()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model.model.layers[0].mlp.gate(mode.from_tensor(x))
    assert len(ops) == 1 and not own


@torch.no_grad()
def test_a_graph_of_the_callers(own, ops):
    """What runs before a capture, in it and to be compared with a replay is the op; a call that has
    no graph is eager."""
    model = tiny.model("mixtral")
    gate = model.model.layers[0].mlp.gate

    def step(x):
        return gate(x)[1]

    with attnops.patch(model):
        own.clear()
        sizes = Buckets(tokens=(4,), requests=1, over="eager")
        given = {"batch": None, "tokens": ("x",), "graphs": StandIn(), "check_every": 1}
        graphed = breakable(step, sizes, **given)
        graphed(tokens())
        assert len(ops) > 2 and not own
        before = len(ops)
        graphed(torch.cat([tokens(), tokens()]))
        assert len(own) == 1 and len(ops) == before + 1, "launched once, in an eager call"


def test_decode_steps_as_they_run(own, ops, small_pages):
    """The prompt has the model's own layers, which are eager. Steps are warmed up and captured."""
    with beside("mixtral", "breakable") as pair:
        own.clear()
        generated(pair.model, *CALL)
        assert len(own) == 4, "the prompt, and the step by which the first cache is measured"
        assert len(ops) > 3, "one of them is that of an eager call"


def test_decode_steps_that_are_compiled(small_pages):
    with beside("mixtral", "piecewise") as pair:
        pair.same(*CALL)
        programs = pair.decoder.regions.programs
        assert sum(map(routes, programs)) == 1, "of all layers, by the code of one"


def test_prompts(small_pages, monkeypatch):
    prompts_in_graphs(monkeypatch, 32, after=1)
    with beside("mixtral", "piecewise", compile_after=0) as pair:
        took = [pair.same(2, 14, 2).prompt for _ in range(4)]
        assert took[-1] == "captured", pair.decoder.prompts.why
        assert sum(map(routes, pair.decoder.prompts.regions.programs)) == 1


def routes(program):
    """The calls of the op in a program."""
    nodes = [node for part in program.split.parts for node in part.module.graph.nodes]
    return sum("attnops.route" in str(node.target) for node in nodes)


def test_the_report_says_so():
    with attnops.patch(tiny.model("mixtral")) as handle:
        [note] = [note for note in handle.report().notes if note.startswith("routers")]
    assert note == (
        "routers of 2 of 2 layers: in compiled code, in CUDA graphs and under a deterministic "
        "policy, on a GPU, without gradients; transformers' own code else"
    )
