"""Linear attention of patched models: tokens, gradients, and modules that are left alone.

No kernel of attnops serves a CPU, so the policy asks for the references.
"""

import copy
import functools
import inspect
import pickle
from functools import partial
from unittest.mock import patch as replaced

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.hf.models import chosen, delta
from tests.hf import hybrids

REFERENCES = dict.fromkeys(("gated_delta_rule", "causal_conv1d"), "reference")
NAMES = ("qwen3_next", "qwen3_5")


@pytest.fixture
def called():
    """The tokens of a request, of each call of the rule."""
    lengths = []

    def run(*args, **more):
        lengths.append(more["max_seqlen_q"])
        return attnops.ops.gated_delta_rule(*args, **more)

    with replaced.object(delta, "gated_delta_rule", run):
        yield lengths


def numbers(batch, tokens):
    made = torch.Generator().manual_seed(batch)
    return torch.randint(1, tiny.VOCAB, (batch, tokens), generator=made)


def chat(model, batch):
    """Tokens of a turn with padding on the left, and of the next turn, which goes on with the
    cache."""
    ids, cache = numbers(batch, 70), DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    mask[1:, :9] = 0
    more = {"max_new_tokens": 5, "do_sample": False, "past_key_values": cache, "pad_token_id": 0}
    first = model.generate(ids * mask, attention_mask=mask, **more)
    longer = torch.cat([first, numbers(batch, 4)], 1)
    seen = torch.cat([mask, torch.ones(batch, longer.shape[1] - mask.shape[1]).long()], 1)
    return first, model.generate(longer, attention_mask=seen, **more)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_stock_model(name, called):
    model = tiny.model(name)
    classes = [type(module) for module in model.modules()]
    want = [chat(model, batch) for batch in (1, 2, 3)]
    with attnops.patch(model) as handle:
        of = "linear attention of 3 of 3 layers: "
        assert f"{of}transformers' own code, for no kernel" in str(handle.report())
        with attnops.use(REFERENCES):
            ours = "gated_delta_rule.reference and causal_conv1d.reference"
            assert of + ours in str(handle.report())
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        for each in (model, again):
            called.clear()
            with attnops.use(REFERENCES):
                got = [chat(each, batch) for batch in (1, 2, 3)]
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            assert {70, 1, 5} <= set(called)
    assert [type(module) for module in model.modules()] == classes
    called.clear()
    with attnops.use(REFERENCES):
        chat(model, 1)
    assert not called


def test_a_report_names_packages_and_what_to_install():
    model, fla = tiny.model("qwen3_next"), "torch_chunk_gated_delta_rule"
    [module] = {type(m) for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet"}
    file = __import__(module.__module__, fromlist=[fla])
    h200 = partial(Target, "cuda", 90, gpu="NVIDIA H200")
    with attnops.patch(model) as handle:
        with pretend(h200(())):
            text = str(handle.report())
        assert "; faster gated_delta_rule for fla: pip install 'fla-core" in text
        assert "for triton: pip install triton; faster causal_conv1d for" in text
        with replaced.object(file, fla, of_package(getattr(file, fla))), pretend(h200(("triton",))):
            text = str(handle.report())
        assert (
            "gated_delta_rule.triton and causal_conv1d.triton in graphs, and functions of" in text
        )
        assert "of fla that transformers calls outside of them" in text and "faster" not in text


@pytest.mark.parametrize(
    ("name", "ops"),
    [("qwen3_next", ("causal_conv1d", "gated_delta_rule")), ("minimax", ("mamba2_scan",))],
)
def test_explain_and_the_report_name_the_kernels_of_layers_with_states(name, ops):
    model, kernels = copy.deepcopy(hybrids.model(name)), [f"{op}.triton" for op in ops]
    with attnops.patch(model) as handle:
        found = attnops.explain(model, numbers(1, 9), target="h200", quiet=True)
        with pretend(Target("cuda", 90, ("triton",), gpu="NVIDIA H200")):
            [line] = [x for x in handle.report().notes if x.startswith("linear attention")]
    assert {*kernels} <= {*found.chosen()}
    assert all(kernel in line for kernel in kernels)


def test_a_patched_model_is_told_of_what_is_chosen():
    sizes = (("q_heads", 3), ("kv_heads", 1), ("head_dim", 5), ("v_head_dim", 7))
    with replaced.object(chosen, "tell") as told:
        chosen.is_ours("gated_delta_rule", "", torch.device("cpu"), torch.float32, 9, sizes, ())
    [(kernel, problem)] = (call.args for call in told.call_args_list)
    assert kernel.name == "aten" and problem.v_head_dim == 7


def of_package(plain):
    """As transformers has a function that the package fla serves."""

    def implementation(*args, **more):
        return plain(*args, **more)

    implementation.__module__ = "fla.ops.gated_delta_rule"

    @functools.wraps(inspect.unwrap(plain))
    def run(*args, **more):
        return implementation(*args, **more)

    return run


def test_gradients_are_those_of_the_stock_model(called):
    model, ids = tiny.model("qwen3_next"), numbers(2, 12)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients()
    with attnops.patch(model), attnops.use(REFERENCES):
        called.clear()  # the first patch of a process compares the functions
        torch.testing.assert_close(gradients(), want, rtol=1e-3, atol=1e-4)
    assert called == [12] * 3


@pytest.mark.parametrize(
    "name", ["torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"]
)
def test_functions_that_compute_something_else_stay(name):
    model = tiny.model("qwen3_next")
    [module] = {type(m) for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet"}
    file = __import__(module.__module__, fromlist=[name])
    own = getattr(file, name)

    def other(*args, **more):
        found = own(*args, **more)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    with replaced.object(file, name, other), attnops.patch(model) as handle:
        assert f"linear attention of 3 of 3 layers are left as they are: {name}" in str(
            handle.report()
        )
        assert module in {type(m) for m in model.modules()}


def test_a_forward_in_an_unknown_decorator_stays():
    model = tiny.model("qwen3_next")
    [cls] = {type(m) for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet"}
    own = {"forward": cls.forward}

    @functools.wraps(cls.forward)
    def decorated(self, *args, **more):
        return own["forward"](self, *args, **more)

    with replaced.object(cls, "forward", decorated), attnops.patch(model) as handle:
        assert "has decorators that are not known" in str(handle.report())
        assert cls in {type(m) for m in model.modules()}
