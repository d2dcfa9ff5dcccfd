"""Suite `hybrid`: what is wrong has no time, steps begin after the same prompt, and transformers
without the packages that it calls."""

import functools
import inspect

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import decode, hybrid, models, op_suite
from attnops.bench.ways import PAGED, How
from attnops.core.kernel import kernels_of
from attnops.hf import Decode
from attnops.testing.pool import Pool
from tests.graphs.standin import StandIn
from tests.measuring import by_way, exchange
from tests.test_bench import TOY

RULE = "gated_delta_rule"
POINTS = [point for op, point in op_suite.listed("hybrid") if op == RULE]
PAGES = How({**PAGED, "decode": Decode("breakable", inner="eager", graphs=StandIn())})


def measured(kind):
    """By way the rows of the first point of a kind."""
    point = next(point for point in POINTS if kind in point.name)
    return by_way(hybrid.OF_OPS.measure(TOY, Pool("cpu"), RULE, hybrid.sized(point, "toy")))


@pytest.mark.parametrize("kind", ["step", "prompt"])
@pytest.mark.parametrize("off", ["output", "state"])
def test_a_wrong_output_or_state_has_no_speed(kind, off, monkeypatch):
    right = kernels_of(RULE)["aten"].run

    def wrong(call):
        right(call)
        getattr(call, off).mul_(1.01)

    assert measured(kind)["aten"]["median_us"] > 0
    exchange(monkeypatch, RULE, "aten", wrong)
    row = measured(kind)["aten"]
    assert row["wrong"].startswith(f"wrong: Mismatch: {off}[") and "median_us" not in row


def test_a_wrong_gradient_has_no_speed(monkeypatch):
    right = hybrid.public
    assert measured("training")["aten"]["error"] < 1e-5
    monkeypatch.setattr(hybrid, "public", lambda *given: 1.1 * right(*given))
    assert "off by 0.1" in measured("training")["aten"]["wrong"]


@pytest.mark.parametrize("how", [How(), PAGES], ids=["hf", "pages"])
def test_every_measurement_of_steps_begins_after_the_prompt(how):
    """States do not go back by themselves."""
    model = models.build(TOY, "qwen3_next")
    prompt, new = (models.tokens(TOY, model, 2, n, seed=n) for n in (9, 3))
    with torch.no_grad():
        way = decode.way_of(TOY, model, prompt, new, how)
        want = models.exactly(model, prompt, new)
        for _ in range(2):
            way.timed.before()
            way.timed.call()
            torch.testing.assert_close(way.computed().double(), want, atol=1e-4, rtol=1e-4)


def test_transformers_runs_without_the_packages_that_it_calls(monkeypatch):
    """Its own code is the exact one."""
    model = models.build(TOY, "qwen3_next")
    prompt = models.tokens(TOY, model, 2, 9)
    want = model(prompt).logits
    file = inspect.getmodule(type(model))
    plain = inspect.unwrap(file.torch_chunk_gated_delta_rule)

    def of_package(implementation):
        @functools.wraps(plain)
        def run(*args, **more):
            return implementation(*args, **more)

        return run

    def fails(*args, **more):
        raise RuntimeError("float64 is not supported")

    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", of_package(fails))
    with pytest.raises(RuntimeError, match="not supported"):
        model(prompt)
    one, _ = models.patched(model, How(torch=True))
    torch.testing.assert_close(one(prompt).logits, want)
    assert models.exactly(model, prompt).dtype == torch.float64
