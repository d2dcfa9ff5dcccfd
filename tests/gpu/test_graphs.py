"""CUDA graphs on a real GPU: token-equal to eager over changing batches, without what others wrote,
and of constant memory."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import attnops
from attnops.cache import PagedBatch, PagedCache, Planner
from attnops.core.errors import NoKernel, OverBudget
from attnops.core.kernel import kernels_of
from attnops.graphs import Buckets, Graphed, breakable, piecewise
from attnops.kernels.flashinfer import attention as maker, modules
from attnops.ops import paged_layers
from tests.gpu.helpers import captured, need
from tests.graphs import helpers
from tests.graphs.models import (
    BOUNDARY,
    HEADS,
    KV_HEADS,
    VOCAB,
    Decaying,
    Windowed,
    boundary,
    decoder,
    paged_cache,
)

D, PAGE, LAYERS = 64, 16, 3
BUCKETS = Buckets(decode=(1, 2, 4, 8), tokens=(64, 256), requests=8, verify=(4,))
MODES = ["inductor", "piecewise", "breakable"]
Step = Callable[..., Tensor]


class Pair(helpers.Pair):
    """A model in graphs beside the same model without, over caches of NaN that are given the same
    requests. windows: of the layers, of which there are then as many."""

    def __init__(
        self,
        mode: str,
        kernel: str | None = None,
        dtype: torch.dtype = torch.float32,
        buckets: Buckets = BUCKETS,
        windows: tuple[int, ...] = (),
        **more: Any,
    ):
        boundary()
        sizes = {"windows": windows, "max_new_tokens": 64} if windows else {}
        self.cache, self.twin = (
            paged_cache(
                len(windows) or LAYERS,
                pages=160,
                requests=12,
                width=16,
                device="cuda",
                dtype=dtype,
                page=PAGE,
                head_dim=D,
                **sizes,
            )
            for _ in range(2)
        )
        model = decoder(LAYERS, kernel=kernel, head_dim=D)
        if windows:
            model = Windowed(windows, self.cache.table_of, head_dim=D).eval()
        self.model = model.cuda().to(dtype)
        self.step: Step
        if mode == "inductor":
            self.step = torch.compile(self.model, mode="reduce-overhead", fullgraph=True)
        else:
            make = piecewise if mode == "piecewise" else breakable
            self.step = make(self.model, buckets, tokens=("tokens",), cache=self.cache, **more)
        self.ids: dict[str, tuple[int, int]] = {}
        self.prepare = more.get("prepare") or (lambda batch: batch)

    @property
    def graphed(self) -> Graphed:
        assert isinstance(self.step, Graphed)
        return self.step

    def example(self, names: str = "yz", new: int = 1) -> dict[str, Any]:
        given = super().example(names, new)
        return {**given, "tokens": given["tokens"].cuda()}

    def go(self, names: str | list[str], new: int | list[int] = 1) -> tuple[Tensor, Tensor]:
        mine, theirs = self.batches(names, new)
        tokens = torch.randint(VOCAB, (mine.slots.shape[0],), device="cuda")
        with torch.no_grad():
            want = self.call(self.model, self.twin, tokens, self.prepare(theirs))
            mine = (
                mine if isinstance(self.step, Graphed) else self.prepare(mine)
            )  # what is Graphed prepares it
            return self.call(self.step, self.cache, tokens, mine).clone(), want

    def agree(
        self, names: str | list[str], new: int | list[int] = 1, tolerance: float = 2e-3
    ) -> None:
        got, want = self.go(names, new)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        if got.dtype == torch.float32:
            assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_eager_over_changing_batches(mode: str, kernel: str | None) -> None:
    pair = Pair(mode, kernel)
    pair.agree("abc", [50, 17, 3])
    pair.agree("abc")
    pair.agree("ab")  # a shorter batch after a longer one
    pair.agree("b")
    pair.agree("dbc", [20, 1, 1])
    pair.agree("cabd")
    pair.free("a")
    pair.agree("ebc", [40, 2, 3])  # pages that belonged to another
    pair.agree("ebcd", [4, 1, 0, 3])  # drafts
    pair.agree("eb", 4)
    pair.agree("ebcd", 0)  # idle
    for _ in range(20):
        pair.agree("ebcd")
    if mode != "inductor":
        modes = pair.graphed.report().modes
        assert set(modes.values()) == {"piecewise" if kernel else "whole"}, modes
        if mode == "piecewise":
            # First, middle and last, also where the step is one graph.
            assert set(pair.graphed.report().compiled.values()) == {3}, pair.graphed.report()


@pytest.mark.parametrize("padding", ["absent", "null"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_a_page_table_for_each_window(mode: str, padding: Any) -> None:
    """Every table follows its step, also where pages behind a window are used again."""
    pair = Pair(mode, buckets=replace(BUCKETS, padding=padding), windows=(0, 40, 100))
    assert len(pair.cache.tables) == 3
    if padding == "null":
        for pool in helpers.pools(pair.cache, pair.twin):
            pool[0] = 0
    pair.agree("abc", [50, 17, 3])
    for _ in range(150):
        pair.agree("abc")
    pair.agree("ab")
    pair.agree("dbc", [20, 1, 1])
    pair.agree("cabd")
    pair.free("a")
    pair.agree("ebc", [40, 2, 3])  # pages that belonged to another
    pair.agree("ebcd", [4, 1, 0, 3])  # drafts
    pair.agree("")  # idle
    pair.agree("ebcd")
    assert not pair.graphed.report().eager_calls


@pytest.mark.parametrize("mode", [piecewise, breakable], ids=["piecewise", "breakable"])
def test_state_beside_the_pages(mode: Callable[..., Graphed]) -> None:
    """A capture leaves it as it was, and every step changes it once."""
    model = Decaying().cuda()
    model.state = model.state.cuda()
    want, given = model.state.clone(), torch.randn(4, 3, device="cuda")
    step = mode(
        model,
        Buckets(tokens=(2, 4)),
        batch=None,
        tokens=("x",),
        state=(model.state, model.steps),
        check_every=2,
    )
    step.capture(given)
    assert torch.equal(model.state, want) and int(model.steps) == 0
    for steps in range(1, 5):
        want = want * 0.5 + given
        torch.testing.assert_close(step(given), want + steps)
        torch.testing.assert_close(model.state, want)
        assert int(model.steps) == steps
    assert step.report().compared == 2


@pytest.mark.parametrize("padding", ["absent", "null"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_bfloat16_and_both_paddings(mode: str, padding: Any) -> None:
    pair = Pair(mode, dtype=torch.bfloat16, buckets=replace(BUCKETS, padding=padding))
    for pool in helpers.pools(pair.cache, pair.twin):
        pool[0] = 0
    pair.agree("abcde", [30, 7, 12, 1, 5], tolerance=6e-2)
    for names in ("abcde", "abc", "e", "cd"):
        pair.agree(names, tolerance=6e-2)


def planner_of(name: str, heads: int, kv_heads: int, dim: int) -> Planner:
    spec = paged_layers(
        q_heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=PAGE, dtype=torch.bfloat16
    )
    return Planner(spec, max_tokens=256, max_requests=8, max_pages=16, device="cuda", kernel=name)


def bringing(name: str) -> Callable[[PagedBatch], PagedBatch] | None:
    """A function that gives a batch the plan or the workspace that the kernel asks for; None: it
    asks for none."""
    maker = kernels_of("plan_paged_attention").get(name)
    if maker is not None and maker.plan.sizes is not None:
        return planner_of(name, HEADS, KV_HEADS, D)
    if kernels_of("paged_attention")[name].workspace_bytes is None:
        return None
    scratch = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    return lambda batch: replace(batch, workspace=scratch)


@pytest.mark.parametrize(
    "name", [n for n in kernels_of("paged_attention") if n not in ("reference", BOUNDARY)]
)
def test_every_kernel_of_paged_attention(name: str) -> None:
    """Forced by name, captured or between graphs as its `capture` says, with a plan where it reads
    one. Only another GPU is a reason."""
    need(kernels_of("paged_attention")[name])
    verify = () if name == "xqa" else (4,)  # one query a request
    pair = Pair(
        "breakable",
        name,
        torch.bfloat16,
        Buckets(decode=(2, 4), verify=verify),
        prepare=bringing(name),
    )
    try:
        pair.go("abcd", 1)
    except NoKernel as error:
        reasons = error.decision.refused.get(name, ())
        if not any(r.field == "target" for r in reasons):
            raise
        pytest.skip(f"{name}: {'; '.join(map(str, reasons))}")
    for names in ("abcd", "ab", "abc", "b", "dcba"):
        pair.agree(names, tolerance=6e-2)
    drafts: tuple[tuple[str, Any], ...] = (("abcd", 4), ("abc", [1, 4, 2]), ("ab", [3, 0]))
    for names, new in drafts if verify else ():
        pair.agree(names, new, tolerance=6e-2)


def test_a_compiled_model_on_one_flashinfer_plan_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on both sides of every attention call, none skipped; each step plans once and
    follows its lengths and tables."""
    need(kernels_of("paged_attention")["flashinfer"])
    pair = Pair("inductor", "flashinfer", torch.bfloat16, prepare=bringing("flashinfer"))
    calls = Counter[str]()

    def count(name: str, real: Any, *args: Any) -> Any:
        calls[name] += 1
        return real(*args)

    for module, name in ((maker, "_call_planner"), (modules, "run")):
        monkeypatch.setattr(module, name, partial(count, name, getattr(module, name)))
    counters.clear()
    for new in ([30, 3, 9], *[1] * 12):
        pair.agree("abc", new, tolerance=6e-2)
    # With those of the model beside it, which is eager.
    assert calls == {"_call_planner": 2 * 13, "run": 2 * 13 * LAYERS}
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])


@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_canaries(mode: str, kernel: str | None) -> None:
    """Pages that a batch does not own hold NaN before a step and nothing else after it, and none of
    it reaches the result."""
    pair = Pair(mode, kernel)
    pair.agree("abcdef", [9, 20, 31, 4, 5, 6])
    for name in "def":
        pair.free(name)
    mine, theirs = pair.batches("abc", 1)
    owned = set(mine.page_table.unique().tolist()) - {0}
    others = [p for p in range(pair.cache.num_pages) if p not in owned]
    for pool in helpers.pools(pair.cache):
        pool[others] = float("nan")
    tokens = torch.randint(VOCAB, (mine.slots.shape[0],), device="cuda")
    with torch.no_grad():
        want = pair.call(pair.model, pair.twin, tokens, theirs)
        torch.testing.assert_close(
            pair.call(pair.step, pair.cache, tokens, mine), want, rtol=2e-3, atol=2e-3
        )
    assert all(bool(pool[others].isnan().all()) for pool in helpers.pools(pair.cache))


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_a_thousand_mixed_steps_take_no_more_memory(mode: str) -> None:
    pair = Pair(mode)
    report = pair.graphed.capture(**pair.example("a"))
    assert 0 < report.graph_bytes <= torch.cuda.memory_reserved()
    pair.free("a")
    rng, held = random.Random(0), 0
    for at in range(1000):
        for name in [n for n in pair.ids if pair.cache.length(pair.ids[n][0]) > 200]:
            pair.free(name)
        names = rng.sample("abcdefgh", rng.randint(1, 8))
        pair.agree(names, [1 if n in pair.ids else rng.randint(2, 20) for n in names])
        if at == 100:
            torch.cuda.synchronize()
            held = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= held
    assert sum(r.replays for r in pair.graphed.report().rows) == 1000
    pair.graphed.free()
    assert not pair.graphed.report().rows


def test_a_budget_is_kept() -> None:
    pair = Pair("breakable", budget_bytes=1)
    with pytest.raises(OverBudget, match="want at most 1 in all"):
        pair.go("ab")
    assert not pair.graphed.report().rows


def test_a_capture_by_hand_runs_no_kernel_that_plans_on_the_host() -> None:
    """A plan of the host would stay that of the capture: another kernel is chosen, and the graph
    follows lengths and tables."""
    name, heads, kv_heads, dim = "flashinfer", 8, 2, 128
    need(kernels_of("paged_attention")[name])
    cache = PagedCache(
        1,
        64,
        PAGE,
        kv_heads,
        dim,
        max_requests=4,
        max_pages_per_request=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for pool in helpers.pools(cache):
        pool.normal_()
    ids = [cache.alloc(n) for n in (30, 100, 7, 1)]
    batch = planner_of(name, heads, kv_heads, dim)(cache.batch(ids))
    static = replace(batch, page_table=batch.page_table.clone(), seq_lens=batch.seq_lens.clone())
    query = torch.randn(4, heads, dim, device="cuda", dtype=torch.bfloat16)

    def call(batch: PagedBatch, kernel: str | None = None) -> Tensor:
        return attnops.paged_attention(
            query,
            cache.k_pages[0],
            cache.v_pages[0],
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=1,
            plan=batch.plan,
            workspace=batch.workspace,
            padded=False,
            holes=batch.holes,
            kernel=kernel,
        )

    def twice() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            with pytest.raises(NoKernel, match=f"not {name}: capture=never"):
                call(static, name)
        return call(static)

    with torch.no_grad(), attnops.use(prefer=(name,)):
        graph, out = captured(twice)  # what it remembers of the calls before serves no capture
        for grown in (1, 40):
            for request in ids[:2]:
                cache.extend(request, grown)
            after = cache.batch(ids)
            static.page_table.copy_(after.page_table)
            static.seq_lens.copy_(after.seq_lens)
            graph.replay()
            torch.testing.assert_close(
                out,
                call(replace(after, plan=None, workspace=None), "reference"),
                rtol=2e-2,
                atol=2e-2,
            )


def test_a_replays_checks_neither_wait_for_the_device_nor_take_its_memory() -> None:
    pair = Pair("breakable")
    pair.agree("ab")
    inputs = pair.graphed._inputs
    assert inputs is not None
    values = pair.example("ab")
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.check(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
