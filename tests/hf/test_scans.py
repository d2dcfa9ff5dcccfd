"""What takes the place of transformers' functions of Mamba-2 gives what they give, or hands the
call on, and lightning attention is the same scan. No kernel of attnops serves a CPU, so the policy
asks for the reference."""

import functools
import inspect
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch as replaced

import pytest
import torch

import attnops
from attnops.hf.models import lightning, scans
from attnops.ops import mamba2_scan
from tests.hf import hybrids

SCAN, UPDATE = "mamba2_chunk_scan", "mamba2_selective_state_update"
OP = "mamba2_scan"
MODELS = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
BARE = {"D": None, "dt_bias": None}
FIRST = {"initial_states": None, "return_final_states": False, "dt_limit": scans.NO_LIMITS}
SERVED = {
    SCAN: ({}, BARE, FIRST, {"dt_softplus": False}),
    UPDATE: ({}, BARE, {"z": None}),
}


def own_of(model, name):
    """transformers' torch code."""
    return inspect.unwrap(
        getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    )


def answers(function, given):
    """What it returns, and the state that it changes."""
    with attnops.use({"mamba2_scan": "reference"}), torch.no_grad():
        found = function(**given)
    written = (given["state"],) if "state" in given else ()
    return (*(found if isinstance(found, tuple) else (found,)), *written)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("name", "changes"), [(name, each) for name, many in SERVED.items() for each in many]
)
def test_results_are_those_of_transformers(name, changes, model):
    def unused(*_, **__):
        raise AssertionError("transformers' own code was called")

    want = answers(own_of(model, name), scans.inputs(name) | changes)
    got = answers(scans.OURS[name](unused, None), scans.inputs(name) | changes)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def by_number(name):
    """One dim more of what has one number of a head, none of them equal."""
    return scans.inputs(UPDATE)[name] + scans.numbers(6)


LEFT = {
    "a gate": (SCAN, {"z": torch.zeros(2, 70, 4, 6)}),
    "steps below 0": (SCAN, {"dt_limit": (-1.0, 1.0)}),
    "steps of 0": (SCAN, {"dt_limit": (0.0, 0.0)}),
    "a step of each number": (UPDATE, {"dt": by_number("dt")}),
    "a bias of each number": (UPDATE, {"dt_bias": by_number("dt_bias")}),
    "no softplus": (UPDATE, {"dt_softplus": False}),
    "narrow states": (UPDATE, {"state": scans.inputs(UPDATE)["state"].bfloat16()}),
    "tokens of two dtypes": (UPDATE, {"B": scans.inputs(UPDATE)["B"].double()}),
}


@pytest.mark.parametrize("why", LEFT)
def test_calls_that_the_op_does_not_have_are_left(why):
    name, changes = LEFT[why]
    own, calls = own_of("bamba", name), []

    def counted(*args, **more):
        calls.append(more)
        return own(*args, **more)

    given = [scans.inputs(name) | changes for _ in range(2)]
    for each in given:
        if "state" in each:
            each["state"] = each["state"].clone()
    want, got = answers(own, given[0]), answers(scans.OURS[name](counted, None), given[1])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert len(calls) == 1


def test_a_call_of_no_kernel_is_left():
    own = own_of("bamba", SCAN)
    given = scans.inputs(SCAN)
    torch.testing.assert_close(scans.OURS[SCAN](own, None)(**given), own(**given), rtol=0, atol=0)


def view_of(state, lengths, fresh=False):
    batch = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(), max_seqlen_q=max(lengths)
    )
    states = SimpleNamespace(state=state, kept=None)
    return SimpleNamespace(states=states, batch=batch, fresh=fresh)


@pytest.mark.parametrize("fresh", [False, True])
def test_requests_of_a_step_are_those_alone(fresh):
    """Two texts, one after the other."""
    given, own = scans.inputs(SCAN), own_of("bamba", SCAN)
    state, lengths = given.pop("initial_states"), (3, 67)
    whole = {n: x[:1] if n in ("hidden_states", "dt", "B", "C") else x for n, x in given.items()}
    want = []
    for b, rows in enumerate((slice(0, 3), slice(3, 70))):
        part = {n: x[:, rows] if x is not given[n] else x for n, x in whole.items()}
        want.append(own(**part, initial_states=None if fresh else state[b : b + 1]))
    written = state.clone()
    with attnops.use({"mamba2_scan": "reference"}):
        got = scans.OURS[SCAN](own, view_of(written, lengths, fresh))(**whole)
    outputs, states = (
        torch.cat(parts, dim) for parts, dim in zip(zip(*want, strict=True), (1, 0), strict=True)
    )
    torch.testing.assert_close(got, (outputs, states), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(written, states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [SCAN, UPDATE])
def test_next_tokens_of_a_step_are_those_of_an_update(name):
    """As two rows, or as one row of two requests of one token, whose steps have no limits."""
    given = scans.inputs(UPDATE)
    want = answers(own_of("bamba", UPDATE), given | {"state": given["state"].clone()})
    state = given["state"].clone()
    run = scans.OURS[name](own_of("bamba", name), view_of(state, (1, 1)))
    if name == SCAN:
        gate = torch.nn.functional.silu(given.pop("z"))
        del given["state"]
        rows = {n: given.pop(n)[None] for n in ("hidden_states", "B", "C")}
        heads = {n: given.pop(n)[:, 0] for n in ("D", "dt_bias")}
        rows["dt"], heads["A"] = given.pop("dt")[None, ..., 0], given.pop("A")[:, 0, 0]
        given |= rows | heads | {"chunk_size": 32, "dt_limit": (0.3, 1.2)}
    with attnops.use({"mamba2_scan": "reference"}):
        got = run(**given) if name == SCAN else run(*given.values())
    got = got[0] * gate if name == SCAN else got
    torch.testing.assert_close((got, state), want, rtol=1e-4, atol=1e-5)


# Lightning attention ------------------------------------------------------------------------------


def lightning_layer():
    """transformers' own, and its number."""
    model = hybrids.model("minimax")
    number = model.config.layer_types.index("linear_attention")
    return model.model.layers[number].self_attn, number


def test_lightning_attention_is_a_scan():
    """With values, keys and queries as x, b and c, steps of 1 and the slopes as rates: of prompts
    with padding, over several blocks, and of the tokens after them."""
    layer, number = lightning_layer()
    heads, width = layer.num_attention_heads, layer.head_dim
    cache, seen = hybrids.cache(hybrids.model("minimax")), []
    state = torch.zeros(2, heads, width, width)
    hook = layer.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for tokens, padding in ((37, 5), (1, 0), (3, 0)):
        hidden, mask = torch.randn(2, tokens, 64), torch.ones(2, tokens)
        mask[1, :padding] = 0
        with torch.no_grad():
            layer(hidden, None, mask, cache)
            mixed = layer.act_fn(layer.qkv_proj(hidden)) * mask[..., None]
        query, key, value = mixed.view(-1, heads, 3 * width).split(width, 2)
        starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
        steps, rates = torch.ones(1, 1).expand(2 * tokens, heads), -layer.slope_rate.flatten()
        given = value, steps, rates, key, query, state, starts
        got = mamba2_scan(*given, max_seqlen_q=tokens, kernel="reference")
        torch.testing.assert_close(got.flatten(1), seen.pop().flatten(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.mT, cache.linear_cache[number], rtol=1e-4, atol=1e-5)
    hook.remove()


@pytest.mark.parametrize("rows", [1, 2])
def test_prompts_of_lightning_attention_over_transformers_own_cache(rows):
    """The op makes the states that the tokens after them are read with."""
    model, layer = hybrids.model("minimax"), lightning_layer()[0]
    ids = torch.randint(1, 99, (rows, 21), generator=torch.Generator().manual_seed(rows))
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **given)
    counted = replaced.object(lightning, OP, wraps=mamba2_scan)
    with attnops.patch(model), attnops.use({OP: "reference"}), counted as called:
        assert torch.equal(model.generate(ids, **given), want)
        layer(torch.randn(1, 3, 64), None, None)  # transformers' own, which may have a gradient
    assert called.call_count == model.config.layer_types.count("linear_attention")


def test_lightning_attention_that_computes_something_else_stays():
    cls = type(lightning_layer()[0])
    own = cls.forward

    @functools.wraps(own)
    def other(*args, **more):
        output, state = own(*args, **more)
        return output * 1.01, state

    with replaced.object(cls, "forward", other), attnops.patch(hybrids.model("minimax")) as handle:
        assert f"are left as they are: {cls.__name__} computes something else" in str(
            handle.report()
        )
