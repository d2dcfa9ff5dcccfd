"""Which form latents take: the costs cross where they should, the decision is pure, and explain
shows it for any machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnops
from attnops.cache import LatentCache
from attnops.core.problem import Target, pretend
from attnops.core.select import key_for
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import ESTIMATED
from attnops.measured.cost import rates_of
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops.latent.absorb_or_expand import (
    ABSORBED,
    EXPANDED,
    MOST,
    PREFIX,
    LatentDims,
    LatentForms,
    crossover,
    latent_form,
)

BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parents[1]
DEEPSEEK = LatentDims(128, 64, 512, 128)


def call(target="sm90", heads=128, before=True, **more):
    goal = Target.parse(target, packages_of_kernels() if target != "cpu" else None)
    return LatentForms.of(DEEPSEEK, heads, (BF16, BF16), 64, goal, before=before, **more)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_where_the_costs_cross(target, heads):
    """A long prefix is absorbed for many new tokens and unfolded for a prompt; where nothing came
    before, few tokens are enough."""
    long, empty = (latent_form(call(target, heads, before)) for before in (True, False))
    assert 32 <= long.absorb_up_to <= 1024
    assert empty.absorb_up_to < 128
    for decision in (long, empty):
        up_to = decision.absorb_up_to
        below, above = (
            latent_form(decision.layer, n) for n in (max(up_to, 1), up_to + max(up_to // 4, 1))
        )
        assert up_to == 0 or (below.form == ABSORBED and below.absorbed_us <= below.expanded_us)
        assert above.form == EXPANDED and above.expanded_us < above.absorbed_us
    assert latent_form(call(target, heads), 1).form == ABSORBED
    assert latent_form(call(target, heads), 4096).form == EXPANDED


@pytest.mark.parametrize("target", ["sm80", "sm100"])
def test_every_cached_token_is_attended_to(target):
    """No time was measured there, and an estimate that took a causal call for a square one would
    spare half of the prefix."""
    decision = latent_form(call(target), 32)
    assert decision.absorbed.costs[decision.absorbed.kernel.name].how == ESTIMATED
    rate = 0.6e6 * rates_of(decision.layer.target).matmul  # no kernel there is said to reach more
    assert decision.absorbed_us > 2 * 4 * 32 * PREFIX * 128 * (576 + 512) / rate


def test_the_form_is_the_faster_one_where_both_were_timed():
    """Within 15 %: the cost of a prefix is worked out for one length, so that a graph need not
    depend on it."""
    timed = json.loads((ROOT / "benchmarks" / "results" / "h200" / "mla.json").read_text())["forms"]
    h200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
    for name, by_tokens in timed.items():
        heads, _, prefix = name.partition(" heads, ")
        layer = LatentForms.of(
            DEEPSEEK, int(heads), (BF16, BF16), 64, h200, before=not prefix.startswith("4x0 ")
        )
        for tokens, found in by_tokens.items():
            us, form = found["us"], latent_form(layer, int(tokens)).form
            assert us[form] < 1.15 * min(us.values()), (
                f"{name}, {tokens} new tokens: {form} of {us}"
            )


def test_costs_grow_with_the_work():
    few, many = (latent_form(call(), n) for n in (64, 512))
    assert few.absorbed_us < many.absorbed_us and few.expanded_us < many.expanded_us
    assert latent_form(call(heads=16), 64).expanded_us < few.expanded_us
    # Nothing is cheaper than its bytes and products at the best rates: W alone is 128 * 512 * 256
    # numbers.
    assert latent_form(call(before=False), 1).absorbed_us > 128 * 512 * 256 * 2 / 4.8e6


def test_only_the_absorbed_form_is_possible_where_nothing_is_said():
    decision = latent_form(call(before=None), 3000)
    assert (decision.form, decision.absorb_up_to, set(decision.costs)) == (
        ABSORBED,
        MOST,
        {ABSORBED},
    )


def test_what_is_asked_for_wins():
    asked = call(absorb_up_to=10)
    assert [latent_form(asked, n).form for n in (1, 10, 11)] == [ABSORBED, ABSORBED, EXPANDED]
    forced = replace(
        call(), policies=("kernel=mla_attention:triton", "kernel=varlen_attention:fa3")
    )
    assert (
        latent_form(forced).absorbed.kernel.name == "triton"
        and latent_form(forced).expanded.kernel.name == "fa3"
    )


@pytest.mark.parametrize("before", [True, False])
def test_a_deterministic_policy_leaves_no_choice_to_the_batch(before):
    """A request's form would follow from the longest of its batch, and its chunks from all of
    them."""
    with attnops.use(deterministic=True):
        policies = key_for("mla_attention", None), key_for("varlen_attention", None)
    for queries in (1, 10**4, 10**6):
        decision = latent_form(call(before=before, policies=policies), queries)
        assert decision.form == ABSORBED and "(policy.deterministic)" in str(decision)
    assert latent_form(call(before=before, policies=policies, absorb_up_to=3), 4).form == EXPANDED


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_policy_knows_no_cascade(deterministic):
    with attnops.use(deterministic=deterministic):
        found = explained(70, 1, "sm90", of=2, share=True)
    assert ("merge_state" in str(found)) != deterministic


def test_pure():
    first = latent_form(call(), 7)
    with pretend(Target.parse("sm100", ())):
        assert latent_form(call(), 7) is first
    assert latent_form(call("sm100"), 7).absorb_up_to != first.absorb_up_to


def test_an_eager_call_takes_the_form_of_the_target_in_force():
    """As it takes kernels."""
    given = (128, 64, 512, 128), 128, (BF16, BF16), 64, torch.device("cpu"), True, ("", "")
    with pretend(Target.parse("sm90", packages_of_kernels())):
        here = crossover(*given)
    assert here == latent_form(call()).absorb_up_to != crossover(*given)


# explain ------------------------------------------------------------------------------------------


def explained(before, new, target, absorb="auto", of=1, **how):
    """`of` requests with tokens before, forks of each other, that bring new ones in a step over one
    layer."""
    cache = LatentCache(
        1, 512, max_requests=2, max_tokens_per_request=128, page_size=64, dtype=BF16, device="cpu"
    )
    ids = [cache.alloc(before)]
    ids += [cache.fork(ids[0]) for _ in range(of - 1)]
    rope = RotaryEmbedding(64, interleaved=True)
    layer = LatentAttention(256, 16, q_lora_rank=64, rope=rope, absorb=absorb, dtype=BF16).eval()
    given = {"batch": cache.batch(ids, new, **how), "latent_pages": cache.latent_pages[0]}
    return attnops.explain(
        layer, torch.zeros(of * new, 256, dtype=BF16), **given, target=target, quiet=True
    )


@pytest.mark.parametrize("target", ["sm90", "sm100", "cpu"])
def test_explain_shows_the_form(target):
    long = explained(9, 4, target, prefix_tokens=64)
    [form] = long.forms
    assert (form.count, form.decision.form) == (1, ABSORBED)
    assert {c.split(".")[0] for c in long.chosen()} == {"write_latent", "mla_attention"}
    assert f"absorb_up_to={form.decision.absorb_up_to} (by cost)" in str(long)
    [entry] = json.loads(json.dumps(long.as_dict()))["forms"]
    assert (
        entry["form"] == ABSORBED
        and set(entry["us"]) == {ABSORBED, EXPANDED}
        and entry["new_tokens"] == 4
    )
    [decode] = explained(9, 1, target).forms
    assert decode.decision.layer.before is None and set(decode.decision.costs) == {ABSORBED}


def test_explain_of_a_prompt_and_of_a_limit():
    prompt = explained(0, 120, "sm90")
    limited = explained(9, 4, "sm100", absorb=3, prefix_tokens=64)
    assert prompt.forms[0].decision.form == limited.forms[0].decision.form == EXPANDED
    assert {c.split(".")[0] for c in prompt.chosen()} == {"write_latent", "varlen_attention"}
    assert "(asked for)" in str(limited) and "merge_state" in str(limited)
