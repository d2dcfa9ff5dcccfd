"""Patched models under a deterministic policy: a row has the same bits alone and among others."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import attnops
from attnops.hf import tiny
from attnops.hf.cache.names import NAME
from attnops.hf.models.experts import SWITCH
from attnops.nn.steady import is_steady, product, steady, unsteady
from tests.hf.decoding import TIERS, how
from tests.hf.helpers import LIMIT, relative

IDS = torch.randint(2, 100, (4, 12), generator=torch.Generator().manual_seed(1), device="cpu")
ROWS = ((0,), (3,), (2, 1))

# Odd sizes: the last numbers of a row are not a whole vector of the CPU's.
ODD = {"llama": {"intermediate_size": 77}, "gpt2": {"n_inner": 77}}
FAMILIES = ("llama", "gemma2", "cohere2", "gpt2", "olmo2", "qwen3_moe", "gpt_oss", "deepseek_v3")
DTYPES = (torch.float32, torch.bfloat16)


def model_of(family, dtype=torch.float32):
    return tiny.model(family, **ODD.get(family, {})).to(dtype)


def deterministic(test):
    """The test, without gradients and under the policy."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with torch.no_grad(), attnops.use(deterministic=True):
            test(*args, **kwargs)

    return run


def called(model, ids):
    """The logits of a prompt and of a step of one token."""
    first = model(ids, use_cache=True)
    return first.logits, model(ids[:, :1], **{NAME: first[NAME]}).logits


def steps(model, ids):
    """The logits of a prompt's last token and of three steps of generate()."""
    given = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    return (
        torch.stack(model.generate(ids, attention_mask=torch.ones_like(ids), **given).logits, 1),
    )


def same_bits(model, run, ids=IDS, rows_of=ROWS):
    whole = run(model, ids)
    for rows in rows_of:
        for alone, among in zip(run(model, ids[list(rows)]), whole, strict=True):
            assert torch.equal(alone, among[list(rows)]), f"rows {rows} differ when they are alone"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@deterministic
def test_prompts_and_steps(family, dtype):
    model = model_of(family, dtype)
    with attnops.patch(model):
        same_bits(model, called)


SLOW = (("qwen3_moe", "piecewise"), ("gpt_oss", "piecewise"))
GENERATED = [
    pytest.param(family, way, marks=[pytest.mark.full] if (family, way) in SLOW else [])
    for family in ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3")
    for way in ("default", "breakable", "piecewise")
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("family", "way"), GENERATED)
@deterministic
def test_generate(family, way):
    model = model_of(family)
    with attnops.patch(model, **TIERS[way]()) as handle:
        same_bits(model, steps, rows_of=((3,), (2, 1)))
        assert handle.took.decode == ("hf" if way == "default" else way)


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@deterministic
def test_compiled(backend):
    model = tiny.model("llama", num_hidden_layers=1, **ODD["llama"])
    with attnops.patch(model):
        run = torch.compile(model, backend=backend)
        same_bits(run, lambda model, ids: (model(ids).logits,), rows_of=((1,),))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_gradients(family):
    """Of the embeddings: those of weights are sums over the batch."""
    model = model_of(family)

    def run(model, ids):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded).logits
        return logits.detach(), torch.autograd.grad(logits.square().sum(), embedded)[0]

    want = run(model, IDS)
    with attnops.patch(model), attnops.use(deterministic=True):
        same_bits(model, run)
        for ours, eager in zip(run(model, IDS), want, strict=True):
            assert relative(ours, eager) < 16 * LIMIT
        model(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_product(dtype):
    """As torch's own, also under autocast, and of rows that are not next to each other."""
    shapes = ((2, 3, 8), (5, 8), (5,))
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    found, casts = [], dtype != torch.float32
    for by in (nn.functional.linear, product):
        with torch.autocast("cpu", dtype, enabled=casts), attnops.use(deterministic=True):
            out = by(x.transpose(0, 1), weight.t().contiguous().t(), bias)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))))
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert relative(got.float(), want.float()) < (2.0**-6 if casts else LIMIT)


class Normed(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
        self.weight, self.bias = (nn.Parameter(torch.randn(40)) for _ in range(2))

    def forward(self, x):
        return self.by(self, x)


FORMULAS = {
    "layer_norm": lambda m, x: nn.functional.layer_norm(x, (40,), m.weight, m.bias, 1e-4),
    "rms_norm": lambda m, x: nn.functional.rms_norm(x, (40,), m.weight),
    "sum": lambda m, x: x.sum(-1, keepdim=True) + x.sum(2)[..., None],
    "mean": lambda m, x: torch.mean(x, (-1,), keepdim=True) * m.weight,
    "matmul": lambda m, x: (x @ m.weight.outer(m.bias)) + x.matmul(m.bias.outer(m.weight)),
    "addmm": lambda m, x: torch.addmm(m.bias, x.view(-1, 40), m.weight.outer(m.bias)),
    # Left to torch.
    "other dims": lambda m, x: x.mean(1) + x.sum((0, 1)) + x.mean(),
    "addmm of a matrix": lambda m, x: torch.addmm(x[0, :1], x[0], m.weight.outer(m.bias)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_functions_of_torch(name):
    module, x = Normed(FORMULAS[name]), torch.randn(2, 3, 40)
    want = module(x)
    steady(module)
    with attnops.use(deterministic=True):
        found = module(x)
    assert (found.shape, found.dtype) == (want.shape, want.dtype) and relative(found, want) < LIMIT
    assert torch.equal(module(x), want), "under no other policy"
    unsteady(module)
    assert type(module) is Normed


def notes(handle):
    begin = "under a deterministic policy "
    return [n.removeprefix(begin) for n in handle.report().notes if n.startswith(begin)]


def test_the_report_counts_modules_and_names_the_others():
    model = model_of("llama")
    mlp = model.model.layers[0].mlp
    nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity())
    mlp.gate_proj.forward = nn.Linear(64, 77).forward
    model.model.vision = nn.Conv1d(3, 4, 2)
    classes = {type(m) for m in model.modules()}
    handle = attnops.patch(model)
    model.model.layers[1].mlp.down_proj = nn.Linear(77, 64)
    rest = "rows may follow from each other in 1 modules: "
    assert notes(handle) == [
        "rows do not follow from each other in 12 linears, 2 activations, 5 norms",
        f"{rest}their forward is replaced on the module itself, or compiled",
        f"{rest}their weights are parametrised",
        f"{rest}they were added after patch()",
        f"{rest}Conv1d has matrices, and code that is not known",
    ]
    handle.unpatch()
    assert {type(m) for m in model.modules()} == classes
    assert not any(map(is_steady, model.modules()))


def test_copies_of_a_patched_model_are_patched():
    model = model_of("gpt2")
    with attnops.patch(model) as handle:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad(), attnops.use(deterministic=True):
                same_bits(twin, called)
        assert str(model) == str(model_of("gpt2"))
        found = "rows do not follow from each other in 5 norms, 9 linears, 2 activations"
        assert notes(handle) == [found]


@torch.no_grad()
def test_no_other_policy_changes_a_bit():
    model = model_of("llama")
    with attnops.patch(model):
        found = called(model, IDS)
        for module in model.modules():
            unsteady(module)
        assert all(map(torch.equal, found, called(model, IDS)))


@deterministic
def test_experts_that_no_kernel_serves_run_one_after_the_other(monkeypatch):
    model = model_of("mixtral")
    monkeypatch.setattr("attnops.hf.models.experts._serves", lambda *_: False)
    with attnops.patch(model):
        assert getattr(model.config, SWITCH) == "attnops_grouped_mm"
        same_bits(model, called)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fixed", [True, False])
@torch.no_grad()
def test_bits_do_not_follow_from_the_number_of_steps(fixed):
    """Compiled code rounds in other places, so that no count of calls may bring it."""
    model, decode = model_of("llama"), how("auto", compile_after=4)
    with attnops.patch(model, decode=decode) as handle, attnops.use(deterministic=fixed):
        modes = {steps(model, IDS[:1]) and handle.took.decode for _ in range(3)}
    assert modes == ({"breakable"} if fixed else {"breakable", "piecewise"})
