"""The plan of a step is made while the step before it runs, and serves no other step. Over
stand-ins of FlashInfer and of graphs."""

from contextlib import contextmanager

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.step_plans import StepPlans
from tests.hf.decoding import how
from tests.hf.helpers import relative
from tests.hf.test_host_plans import LIMIT, gemma3, llama, patched
from tests.hf.test_latent_plans import FA3, deepseek
from tests.standins import flashinfer_mla, flashinfer_modules

KINDS = {
    "decode": (llama, "flashinfer", flashinfer_modules),
    "fa2": (lambda: llama(8), "flashinfer", flashinfer_modules),
    "windows": (gemma3, "flashinfer", flashinfer_modules),
    "mla": (deepseek, FA3, flashinfer_mla),
}
kinds = pytest.mark.parametrize("kind", KINDS)
IDS = torch.randint(3, 90, (3, 160), generator=torch.Generator().manual_seed(0))


@contextmanager
def served(kind, mode="breakable", **more):
    """A patched model, and a cache with a prompt of 12 tokens of two rows."""
    make, kernel, vendor = KINDS[kind]
    with patched(make(), mode, kernel, vendor=vendor, **more) as pair, torch.no_grad():
        yield pair, prompted(pair.model, pair.handle)


def prompted(model, handle, rows=2):
    cache = handle.new_cache(rows, 150)
    model(IDS[:rows, :12], past_key_values=cache, use_cache=True)
    return cache


@pytest.fixture
def written(monkeypatch):
    """What was done, in order: "plan" of lengths, and "ask" for those of a step."""
    done, write, plan_step = [], StepPlans._write, ModelPages.plan_step

    def spy(self, pages, lengths):
        done.append(("plan", tuple(lengths)))
        write(self, pages, lengths)

    def asks(self, plans, rows, live):
        done.append(("ask", live))
        plan_step(self, plans, rows, live)

    monkeypatch.setattr(StepPlans, "_write", spy)
    monkeypatch.setattr(ModelPages, "plan_step", asks)
    return done


@kinds
def test_a_step_finds_its_plan(written, kind):
    """Before a launch nothing is planned, but of the first step after a prompt."""
    with served(kind) as (pair, cache):
        pair.handle.step(IDS[:2, 12:13], cache)
        written.clear()
        pair.calls.clear()
        for at in range(13, 40):
            pair.handle.step(IDS[:2, at : at + 1], cache)
        want = [each for at in range(13, 40) for each in (("ask", 2), ("plan", (at + 2,) * 2))]
        assert written == want
        runs = [name.endswith("run") for name in pair.calls]
        assert runs[:3] == [True] * 3, "the plan lies there"
        launched = [sum(runs[:at]) for at, run in enumerate(runs) if not run]
        assert all(count % 3 == 0 for count in launched), "no layer is still to be launched"
        if kind == "mla":
            assert runs == [True, True, True, False] * 27


def test_a_compared_step_has_one_plan(written):
    """None of the step after it, which the comparison would have to replace."""
    with served("mla", check_every=1) as (pair, cache):
        pair.handle.step(IDS[:2, 12:13], cache)
        written.clear()
        for at in range(13, 20):
            pair.handle.step(IDS[:2, at : at + 1], cache)
    plans = [lengths for name, lengths in written if name == "plan"]
    assert plans == [(at + 1,) * 2 for at in range(13, 20)]


def between(model, handle, caches):
    """Logits of steps with something else between them, whose plans are not those of before."""
    mine, other = caches
    given = {"use_cache": True}

    def step(at, cache=mine, rows=2):
        return handle.step(IDS[:rows, at : at + 1], cache)[:2].clone()

    yield from (step(12), step(13), step(12, other), step(14), step(13, other))
    mine.crop(-2)
    yield from (step(20), step(21))
    yield model(IDS[:2, 30:31], past_key_values=mine, **given).logits[:, -1:]
    yield from (step(22), step(23))
    yield model(IDS[:2, 40:49], past_key_values=mine, **given).logits[:, -1:]
    yield from (step(24), step(25))
    model(IDS[:2, :9], past_key_values=other, **given)
    yield from (step(26), step(14, other), step(27))
    mine.reset()
    yield model(IDS[:2, :24], past_key_values=mine, **given).logits[:, -1:]
    yield from (step(28), step(29))
    yield step(30, rows=1).expand(2, -1, -1)
    yield step(31, rows=1).expand(2, -1, -1)


@pytest.mark.sweep(2)
@kinds
def test_a_plan_serves_no_other_step(kind):
    """Another cache, a crop, a step and a prompt without graphs, a reset, fewer rows."""
    found = []
    for kernel in (KINDS[kind][1], "reference"):
        make, _, vendor = KINDS[kind]
        with patched(make(), "breakable", kernel, vendor=vendor) as pair, torch.no_grad():
            caches = [prompted(pair.model, pair.handle) for _ in range(2)]
            found.append([each.float() for each in between(pair.model, pair.handle, caches)])
    assert max(relative(*each) for each in zip(*found, strict=True)) < LIMIT


@pytest.mark.sweep(2)
@kinds
def test_a_plan_of_another_policy(kind):
    found = []
    for names in ((KINDS[kind][1], "reference"), ("reference",)):
        make, _, vendor = KINDS[kind]
        out = []
        with patched(make(), "breakable", None, vendor=vendor) as pair, torch.no_grad():
            with attnops.use(prefer=names):
                cache = prompted(pair.model, pair.handle)
            for at in range(12, 72):
                with attnops.use(prefer=("reference", "triton")[: 1 + at % 2] if at % 5 else names):
                    out.append(pair.handle.step(IDS[:2, at : at + 1], cache).clone())
            assert any(name.endswith("run") for name in pair.calls) == (len(names) == 2)
        found.append(out)
    assert max(relative(a.float(), b.float()) for a, b in zip(*found, strict=True)) < LIMIT


@pytest.mark.parametrize("kind", ["decode", "mla"])
def test_an_error_is_that_of_the_step_itself(monkeypatch, kind):
    """A step that ran gives its result, and the next one tries again."""
    with served(kind) as (pair, cache):
        pair.handle.step(IDS[:2, 12:13], cache)
        write, fails = StepPlans._write, [True, True]

        def failing(self, *given):
            if fails and fails.pop():
                self._made = []
                raise InvalidInput("work of a plan", "too much", "less")
            write(self, *given)

        monkeypatch.setattr(StepPlans, "_write", failing)
        pair.handle.step(IDS[:2, 13:14], cache)
        with pytest.raises(InvalidInput, match="work of a plan"):
            pair.handle.step(IDS[:2, 14:15], cache)
        again = [pair.handle.step(IDS[:2, at : at + 1], cache).clone() for at in (14, 15)]
        with attnops.patch(
            pair.twin, cache="paged", kernel="reference", decode=how("breakable")
        ) as own:
            other = prompted(pair.twin, own)
            want = [own.step(IDS[:2, at : at + 1], other).clone() for at in range(12, 16)][2:]
        assert relative(torch.cat(again).float(), torch.cat(want).float()) < LIMIT


def test_a_full_cache_has_no_next_step(written):
    with served("mla") as (pair, cache):
        for at in range(12, 150):
            pair.handle.step(IDS[:2, at : at + 1], cache)
        assert written[-2:] == [("plan", (150, 150)), ("ask", 2)]
        with pytest.raises(InvalidInput, match="a cache that is full"):
            pair.handle.step(IDS[:2, :1], cache)
