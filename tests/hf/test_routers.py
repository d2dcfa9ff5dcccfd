"""Routers and experts of Hugging Face models: models answer as before, what is left and why,
copies, adapters, compiled blocks."""

import copy
import pickle
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.hf.models import experts, routers
from attnops.ops.experts.record import EXPERTS
from attnops.ops.experts.route import ROUTE
from tests.hf.decoding import generated, how
from tests.hf.helpers import LIMIT, calls_of, near, relative
from tests.hf.test_linears import judging
from tests.lowering.models import kernel_calls
from tests.triton.process import interpreted

SM90 = Target("cuda", 90, assume=("triton",))
IDS = torch.arange(6).view(2, 3)

# By family: changes of the tiny config, and what the rule asks beside the number of choices.
NORMAL = {"normalize": True}
V3 = {"scoring": "sigmoid", "normalize": True, "eps": 1e-20}
FAMILIES = {
    "qwen2_moe": ({}, {}),
    "qwen3_moe": ({"norm_topk_prob": True}, NORMAL),
    "mixtral": ({}, NORMAL),
    "gpt_oss": ({}, NORMAL),
    "deepseek_v2": ({"topk_method": "greedy", "routed_scaling_factor": 16.0}, {"scale": 16.0}),
    "deepseek_v2_groups": (
        # Of two groups by their best expert, the two best experts of all are the result.
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 1,
            "routed_scaling_factor": 2.0,
        },
        {"groups": 4, "scale": 2.0},
    ),
    "deepseek_v3": (
        {"n_group": 4, "topk_group": 2},
        {**V3, "groups": 4, "top_groups": 2, "group_best": 2, "scale": 2.5},
    ),
    "glm4_moe": ({}, V3),
    "kimi_linear": ({}, {**V3, "scale": 2.446}),
    "mimo_v2_flash": ({}, V3),
    "minimax_m2": ({}, {"scoring": "sigmoid", "normalize": True}),
}
FEWER = {
    "deepseek_v2": 1,
    "deepseek_v2_groups": 1,
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "kimi_linear": 3,
    "mimo_v2_flash": 1,
}


class Part(NamedTuple):
    """module: of attnops. op: that serves. weight: of mixtral's modules, by their path in a
    layer."""

    name: str
    module: Any
    op: Any
    weight: str

    def of(self, layer: Any) -> Any:
        return layer.mlp.get_submodule(self.weight.rpartition(".")[0])

    def notes(self, handle: Any) -> list[str]:
        return [note for note in handle.report().notes if note.startswith(self.name)]


PARTS = (
    Part("routers", routers, ROUTE, "gate.weight"),
    Part("experts", experts, EXPERTS, "experts.down_proj"),
)
each = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


@pytest.fixture
def part(request):
    return PARTS[0]


@pytest.fixture
def calls(part, monkeypatch):
    """The rows of the calls of the part's op, which its reference serves."""
    with calls_of(monkeypatch, part.module, part.op.name) as made:
        yield made


def model_of(family):
    return tiny.model(family.removesuffix("_groups"), **FAMILIES[family][0])


def routers_of(model):
    return [m for m in model.modules() if routers.is_taken(m)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "weight in float32"]
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_router_gives_what_its_own_code_gives(family, dtype, calls):
    """Logits to the bit, the same experts, their weights within rounding."""
    model = model_of(family)
    with attnops.patch(model), attnops.use(kernel={"route": "reference"}):
        module = routers_of(model)[0]
        rule = vars(module)[routers._RULE]
        assert rule.given == FAMILIES[family][1]
        if dtype is None and not rule.mixed:
            pytest.skip("the router multiplies in the dtype of the tokens, and its own code raises")
        kept, dtype = dtype or torch.float32, dtype or torch.bfloat16
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            t.copy_(torch.randn_like(t))
        for p in module._parameters.values():
            p.data = p.data.to(kept)
        x = torch.randn(200, module.weight.shape[1]).to(dtype)
        bias = [torch.randn(module.weight.shape[0])] if rule.bias == routers.HANDED else []
        for tokens in (x, x.view(20, 10, -1)) if rule.flattens else (x,):
            calls.clear()
            own = type(module).__mro__[1].forward(module, tokens, *bias)
            ours = module(tokens, *bias)
            assert len(calls) == 1
            assert [(t.shape, t.dtype) for t in own] == [(t.shape, t.dtype) for t in ours]
            assert torch.equal(own[0], ours[0])
            (a, b), exact = (t[2].sort(1) for t in (own, ours)), dtype == torch.float32
            same = (a.values == b.values).all(1)
            assert same.all() if exact else same.float().mean() > 0.8, (
                "in bfloat16 logits tie, and torch.topk may take either"
            )
            weights = own[1].gather(1, a.indices)[same], ours[1].gather(1, b.indices)[same]
            torch.testing.assert_close(
                *weights, **({} if exact else {"rtol": 2.0**-6, "atol": 1e-3})
            )


OF_EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
CASES = [(PARTS[0], family, None) for family in FAMILIES]
CASES += [(PARTS[1], family, stock) for family in OF_EXPERTS for stock in experts.STOCK]


@pytest.mark.parametrize(("part", "family", "stock"), CASES)
@torch.no_grad()
def test_models_answer_as_before(part, family, stock, calls):
    model, n = model_of(family), FEWER.get(family, 2)
    model.set_experts_implementation("eager")
    want, stock = model(IDS).logits, stock or "eager"
    model.set_experts_implementation(stock)
    before = [(type(m), vars(m).keys()) for m in model.modules()]
    with attnops.patch(model) as handle:
        near(model(IDS).logits, want)
        assert calls == [IDS.numel()] * n
        [note] = part.notes(handle)
        assert note.startswith(f"{part.name} of {n} of {n} layers: ") and (
            part.name == "routers" or repr(stock) in note
        )
    assert [(type(m), vars(m).keys()) for m in model.modules()] == before
    assert model.config._experts_implementation == stock
    assert relative(model(IDS).logits, want) < LIMIT and len(calls) == n


@torch.no_grad()
def test_router_logits_are_recorded(calls):
    model = tiny.model("qwen3_moe")
    want = model(IDS, output_router_logits=True)
    with attnops.patch(model):
        got = model(IDS, output_router_logits=True)
    assert len(got.router_logits) == 2 and calls
    for a, b in zip(
        (*got.router_logits, got.aux_loss), (*want.router_logits, want.aux_loss), strict=True
    ):
        near(a, b)


@pytest.mark.sweep(4)
@each
@pytest.mark.parametrize("family", OF_EXPERTS)
@torch.no_grad()
def test_generated_code_calls_the_kernel(family, part):
    """With the parameters themselves, which are not copied."""
    model, (backend, code) = model_of(family), judging(part.op)
    block, x = model.model.layers[1].mlp, torch.randn(1, 5, 64)
    want, other = block(x), {one.op.name: "aten" for one in PARTS if one is not part}
    with (
        attnops.patch(model),
        attnops.use(kernel=other),
        torch._inductor.config.patch(fx_graph_cache=False),
        pretend(SM90),
    ):
        got = torch.compile(block, backend=backend, fullgraph=True)(x)
    [text] = code
    assert kernel_calls(text).count(f"{part.op.name}.triton") == 1
    if part.name == "routers":
        assert "topk" not in text
    else:
        assert "bmm" not in text and f"empty_strided_cpu(({block.experts.num_experts}, " not in text
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    assert all(relative(a, b) < LIMIT for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
@interpreted
def test_decode_steps_by_triton(family, mode):
    from attnops.kernels.triton.launch import route as host

    model, launched = tiny.model(family), []
    want, launch = generated(model, 2, 4, 2), host.launch
    names = ("paged_attention", "attention", "write_kv", "mla_attention", "write_latent")
    others = {"linear": "aten", **dict.fromkeys(names, "reference")}
    counted = patch.object(
        host, "launch", lambda *args, **given: (launched.append(args[1]), launch(*args, **given))
    )
    with (
        counted,
        attnops.use(kernel=others),
        pretend(SM90),
        attnops.patch(model, cache="paged", decode=how(mode)) as handle,
    ):
        assert torch.equal(generated(model, 2, 4, 2), want)
        assert handle.graphs.report().whole == ""
    assert launched.count((2,)) >= 3, "two rows, for three steps"


@pytest.mark.parametrize(
    ("family", "op", "prefill"), [("deepseek_v3", "route", ["triton"]), ("gpt_oss", "experts", [])]
)
def test_explain_of_a_config_without_weights(family, op, prefill):
    from attnops.cli.explain import explain_config

    found = explain_config(tiny.config(family), dtype=torch.bfloat16, target="h200", tokens=100)
    chosen = {
        phase: [s.decision.kernel.name for s in one.sites if s.decision.problem.op == op]
        for phase, one in found.items()
    }
    assert chosen == {"prefill": prefill, "decode": ["triton"]}


# Calls that stay transformers' own ----------------------------------------------------------------


def served(part, module, x):
    if part.name == "routers":
        return routers._serves(module, (x,), vars(module)[routers._RULE])
    return experts._serves(
        module, x, torch.zeros(x.shape[0], 2, dtype=torch.int64), vars(module)[experts._GATE]
    )


@each
def test_calls_that_are_left(part):
    model, x = tiny.model("mixtral"), torch.randn(64, 64)
    with attnops.patch(model), torch.no_grad():
        module = part.of(model.model.layers[0])
        assert not served(part, module, x), "on a CPU"
        with pretend(SM90):
            assert served(part, module, x) and served(part, module, x[:1])
            more = torch.randn(65, 64)
            assert served(part, module, more) is (part.name == "routers"), "few tokens alone"
            assert not served(part, module, x.bfloat16()), "another dtype than the weights'"
            for region in (
                attnops.use(kernel={part.op.name: "aten"}),
                torch.autocast("cpu"),
                torch.enable_grad(),
            ):
                with region:
                    assert not served(part, module, x)
            with attnops.use(deterministic=True):
                assert served(part, module, more)
            if part.name == "routers":
                assert served(part, module, x[None]) and not served(part, module, x[:, :9])
                model.train()
                assert not served(part, module, x), "routers may add noise"


@each
def test_gradients(part, calls):
    model = tiny.model("mixtral")
    with attnops.patch(model):
        model(IDS).logits.sum().backward()
    assert not calls and model.model.layers[0].mlp.get_parameter(part.weight).grad.abs().sum() > 0


@each
@torch.no_grad()
def test_an_adapter_of_the_weights(part, calls):
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"mlp.{part.weight}"])
    model = peft.get_peft_model(tiny.model("mixtral"), config).eval()
    for name, p in model.named_parameters():
        p.data = torch.randn_like(p) if "lora_" in name else p.data
    want = model(IDS).logits
    with attnops.patch(model):
        assert relative(model(IDS).logits, want) < LIMIT and not calls
    assert torch.equal(model(IDS).logits, want)


@each
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@torch.no_grad()
def test_copies(again, part, calls):
    model = tiny.model("gpt_oss")
    want = model(IDS).logits
    attnops.patch(model)
    other = again(model)
    assert relative(other(IDS).logits, want) < LIMIT and len(calls) == 2
    vars(other)["_attnops"].unpatch()
    assert not routers_of(other) and routers_of(model)
    assert other.config._experts_implementation != model.config._experts_implementation
    assert torch.equal(other(IDS).logits, want) and len(calls) == 2


@torch.no_grad()
def test_a_router_whose_numbers_are_set_anew_runs_its_own_code(calls):
    model = tiny.model("qwen3_moe")
    with attnops.patch(model):
        before = model(IDS).logits
        taken = len(calls)
        for layer in model.model.layers:
            layer.mlp.gate.top_k, layer.mlp.gate.norm_topk_prob = 1, True
        got = model(IDS).logits
        assert len(calls) == taken > 0
    assert relative(got, want := model(IDS).logits) < LIMIT < relative(before, want)


def test_a_part_of_a_model_and_the_model_may_be_patched():
    model = tiny.model("mixtral")
    gates = [layer.mlp.gate for layer in model.model.layers]
    own = type(gates[0])
    for last in (0, 1):
        handles = [attnops.patch(model.model), attnops.patch(model)]
        assert "another patch has taken them over" in str(handles[1].report())
        handles[1 - last].unpatch()
        handles[last].unpatch()
        assert {type(gate) for gate in gates} == {own}


@torch.no_grad()
def test_hooks_run_as_before(calls):
    model, seen = tiny.model("mixtral"), []
    model.model.layers[0].mlp.gate.register_forward_hook(
        lambda module, args, out: seen.append(out[2].shape)
    )
    with attnops.patch(model):
        model(IDS)
    assert seen == [(6, 2)] and len(calls) == 2


def test_an_implementation_of_experts_that_is_set_later_stays():
    model = tiny.model("mixtral")
    with attnops.patch(model) as handle:
        model.set_experts_implementation("batched_mm")
        assert "set to 'batched_mm' after patch()" in PARTS[1].notes(handle)[0]
    assert model.config._experts_implementation == "batched_mm"
