"""CUDA graphs on a real GPU: token-equal to eager over changing batches, safe against stale metadata, and of constant memory."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnops
from attnops.cache import PagedBatch, PagedCache, Planner
from attnops.core.errors import NoKernel, OverBudget, StaleGraph
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.graphs import Buckets, Graphed, breakable, piecewise
from attnops.ops import paged_layers
from tests.graphs import helpers
from tests.graphs.models import BOUNDARY, HEADS, KV_HEADS, VOCAB, Decaying, boundary, decoder, paged_cache

D, PAGE, LAYERS = 64, 16, 3
BUCKETS = Buckets(decode=(1, 2, 4, 8), tokens=(64, 256), requests=8, verify=(4,))
MODES = ["inductor", "piecewise", "breakable"]
Step = Callable[..., Tensor]


class Pair(helpers.Pair):
    """A model in graphs beside the same model without, over caches of NaN that are given the same requests."""

    def __init__(self, mode: str, kernel: str | None = None, dtype: torch.dtype = torch.float32, buckets: Buckets = BUCKETS, **more: Any):
        boundary()
        self.model = decoder(LAYERS, kernel=kernel, head_dim=D).cuda().to(dtype)
        self.cache, self.twin = (
            paged_cache(LAYERS, pages=160, requests=12, width=16, device="cuda", dtype=dtype, page=PAGE, head_dim=D) for _ in range(2)
        )
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

    def go(self, names: str | list[str], new: int | list[int] = 1) -> tuple[Tensor, Tensor]:
        mine, theirs = self.batches(names, new)
        tokens = torch.randint(VOCAB, (mine.slots.shape[0],), device="cuda")
        with torch.no_grad():
            want = self.call(self.model, self.twin, tokens, self.prepare(theirs))
            return self.call(self.step, self.cache, tokens, mine).clone(), want

    def agree(self, names: str | list[str], new: int | list[int] = 1, tolerance: float = 2e-3) -> None:
        got, want = self.go(names, new)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        if got.dtype == torch.float32:
            assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_eager_over_changing_batches(mode: str, kernel: str | None, found: dict[str, Any]) -> None:
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
        found.setdefault("graphs", {})[f"{mode}_{'split' if kernel else 'whole'}"] = str(pair.graphed.report())


@pytest.mark.parametrize("mode", [piecewise, breakable], ids=["piecewise", "breakable"])
def test_state_beside_the_pages(mode: Callable[..., Graphed]) -> None:
    """A capture leaves it as it was, and every step changes it once."""
    model = Decaying().cuda()
    model.state = model.state.cuda()
    want, given = model.state.clone(), torch.randn(4, 3, device="cuda")
    step = mode(model, Buckets(tokens=(2, 4)), batch=None, tokens=("x",), state=(model.state, model.steps), check_every=2)
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
    for pool in (*pair.cache.k_pages, *pair.cache.v_pages, *pair.twin.k_pages, *pair.twin.v_pages):
        pool[0] = 0
    pair.agree("abcde", [30, 7, 12, 1, 5], tolerance=6e-2)
    for names in ("abcde", "abc", "e", "cd"):
        pair.agree(names, tolerance=6e-2)


def bringing(name: str) -> Callable[[PagedBatch], PagedBatch] | None:
    """A function that gives a batch the plan or the workspace that the kernel asks for; None: it asks for none."""
    maker = kernels_of("plan_paged_attention").get(name)
    if maker is not None and maker.plan.sizes is not None:
        spec = paged_layers(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=D, page_size=PAGE, dtype=torch.bfloat16)
        return Planner(spec, max_tokens=256, max_requests=8, max_pages=16, device="cuda", kernel=name)
    if kernels_of("paged_attention")[name].workspace_bytes is None:
        return None
    scratch = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    return lambda batch: replace(batch, workspace=scratch)


@pytest.mark.parametrize("name", [n for n in kernels_of("paged_attention") if n != "reference"])
def test_every_kernel_of_paged_attention(name: str) -> None:
    """Forced by name, captured or between graphs as its `capture` says, with a plan where it reads one. Only another GPU is a reason."""
    kernel = kernels_of("paged_attention")[name]
    if kernel.absences(Target.of(torch.device("cuda"))) or name == BOUNDARY:
        pytest.skip(f"{name}: {'; '.join(map(str, kernel.absences(Target.of(torch.device('cuda')))))}")
    pair = Pair("breakable", name, torch.bfloat16, Buckets(decode=(2, 4), verify=() if name == "xqa" else (4,)), prepare=bringing(name))
    try:
        pair.go("abcd", 1)
    except NoKernel as e:
        reasons = e.decision.refused.get(name, ())
        if not any(r.field == "target" for r in reasons):
            raise
        pytest.skip(f"{name}: {'; '.join(map(str, reasons))}")
    for names in ("abcd", "ab", "abc", "b", "dcba"):
        pair.agree(names, tolerance=6e-2)
    if name == "xqa":
        return  # one query a request
    for names, new in (("abcd", 4), ("abc", [1, 4, 2]), ("ab", [3, 0])):
        pair.agree(names, new, tolerance=6e-2)


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_stale_metadata_is_refused(mode: str) -> None:
    pair = Pair(mode)
    pair.agree("ab")
    mine, _ = pair.batches("ab", 1)
    tokens = torch.zeros(2, dtype=torch.long, device="cuda")
    other = paged_cache(LAYERS, pages=160, requests=12, width=16, device="cuda", page=PAGE, head_dim=D)
    with pytest.raises(StaleGraph, match="k_pages"):
        pair.step(tokens, batch=mine, k_pages=other.k_pages, v_pages=pair.cache.v_pages)
    with pytest.raises(StaleGraph, match="policy"), attnops.use(deterministic=True):
        pair.call(pair.step, pair.cache, tokens, mine)
    with pytest.raises(StaleGraph, match="page_table"):
        wide = torch.zeros(2, 17, dtype=torch.int32, device="cuda")
        pair.call(pair.step, pair.cache, tokens, replace(mine, page_table=wide))
    pair.cache.k_pages[0].set_(torch.zeros_like(pair.cache.k_pages[0]))
    with pytest.raises(StaleGraph, match="k_pages"):
        pair.call(pair.step, pair.cache, tokens, mine)


@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_canaries(mode: str, kernel: str | None) -> None:
    """Pages that a batch does not own hold NaN before a step and nothing else after it, and none of it reaches the result."""
    pair = Pair(mode, kernel)
    pair.agree("abcdef", [9, 20, 31, 4, 5, 6])
    for names, new in (("abc", 1), ("de", [3, 7]), ("f", 1), ("abcdef", 1), ("a", 1)):
        for name in [n for n in pair.ids if n not in names]:
            pair.free(name)
        mine, theirs = pair.batches([n for n in names if n in pair.ids], new if isinstance(new, int) else new[: len(names)])
        owned = set(mine.page_table.unique().tolist()) - {0}
        others = [p for p in range(pair.cache.num_pages) if p not in owned]
        pools = [*pair.cache.k_pages, *pair.cache.v_pages]
        for pool in pools:
            pool[others] = float("nan")
        tokens = torch.randint(VOCAB, (mine.slots.shape[0],), device="cuda")
        with torch.no_grad():
            want = pair.call(pair.model, pair.twin, tokens, theirs)
            torch.testing.assert_close(pair.call(pair.step, pair.cache, tokens, mine), want, rtol=2e-3, atol=2e-3)
        assert all(bool(pool[others].isnan().all()) for pool in pools)
        if len(pair.ids) < 6:
            break


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_a_thousand_mixed_steps_take_no_more_memory(mode: str, found: dict[str, Any]) -> None:
    pair = Pair(mode)
    mine, _ = pair.batches("a", 1)
    tokens = torch.zeros(1, dtype=torch.long, device="cuda")
    report = pair.graphed.capture(tokens, batch=mine, k_pages=pair.cache.k_pages, v_pages=pair.cache.v_pages)
    assert 0 < report.graph_bytes <= torch.cuda.memory_reserved()
    pair.free("a")
    rng, held = random.Random(0), None
    for at in range(1000):
        for name in [n for n in pair.ids if pair.cache.length(pair.ids[n][0]) > 200]:
            pair.free(name)
        names = rng.sample("abcdefgh", rng.randint(1, 8))
        fresh = [n for n in names if n not in pair.ids]
        pair.agree(names, [rng.randint(2, 20) if n in fresh else 1 for n in names])
        if at == 100:
            torch.cuda.synchronize()
            held = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    assert held is not None and torch.cuda.memory_reserved() <= held[0]
    assert sum(r.replays for r in pair.graphed.report().rows) == 1000
    found.setdefault("graphs", {})[f"{mode}_soak"] = {"steps": 1000, "graph_bytes": report.graph_bytes}
    pair.graphed.free()
    assert not pair.graphed.report().rows


def test_a_budget_is_kept() -> None:
    pair = Pair("breakable", budget_bytes=1)
    with pytest.raises(OverBudget, match="want at most 1 in all"):
        pair.go("ab")
    assert not pair.graphed.report().rows


def test_a_capture_by_hand_runs_no_kernel_that_plans_on_the_host() -> None:
    """A plan of the host would stay that of the capture: another kernel is chosen, and the graph follows lengths and tables."""
    name = "flashinfer"
    kernel = kernels_of("paged_attention")[name]
    if kernel.absences(Target.of(torch.device("cuda"))):
        pytest.skip(f"{name}: {'; '.join(map(str, kernel.absences(Target.of(torch.device('cuda')))))}")
    heads, kv_heads, dim = 8, 2, 128
    cache = PagedCache(1, 64, PAGE, kv_heads, dim, max_requests=4, max_pages_per_request=16, dtype=torch.bfloat16, device="cuda")
    spec = paged_layers(q_heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=PAGE, dtype=torch.bfloat16)
    planner = Planner(spec, max_tokens=4, max_requests=4, max_pages=16, device="cuda", kernel=name)
    for pool in (*cache.k_pages, *cache.v_pages):
        pool.normal_()
    ids = [cache.alloc(n) for n in (30, 100, 7, 1)]
    batch = planner(cache.batch(ids))
    static = replace(batch, page_table=batch.page_table.clone(), seq_lens=batch.seq_lens.clone())
    query = torch.randn(4, heads, dim, device="cuda", dtype=torch.bfloat16)

    def call(batch: PagedBatch, kernel: str | None = None) -> Tensor:
        return attnops.paged_attention(
            query, cache.k_pages[0], cache.v_pages[0], batch.page_table, batch.seq_lens, batch.cu_seqlens_q, max_seqlen_q=1,
            plan=batch.plan, workspace=batch.workspace, padded=False, holes=batch.holes, kernel=kernel,
        )  # fmt: skip

    with torch.no_grad(), attnops.use(prefer=(name,)):
        for _ in range(3):
            call(static)  # remembered outside of the capture
        torch.cuda.synchronize()
        graph, refused = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            out = call(static)
            with pytest.raises(NoKernel, match=f"not {name}: capture=never"):
                call(static, name)
            refused.append(True)
        assert refused
        for grown in (1, 40):
            for request in ids[:2]:
                cache.extend(request, grown)
            after = cache.batch(ids)
            static.page_table.copy_(after.page_table)
            static.seq_lens.copy_(after.seq_lens)
            graph.replay()
            torch.testing.assert_close(out, call(replace(after, plan=None, workspace=None), "reference"), rtol=2e-2, atol=2e-2)


@pytest.mark.alone
def test_what_a_replay_costs_on_the_host(found: dict[str, Any]) -> None:
    """Its checks neither wait for the device nor take its memory; their time and that of a step are recorded."""
    pair = Pair("breakable")
    pair.agree("ab")
    mine, _ = pair.batches("ab", 1)
    tokens = torch.zeros(2, dtype=torch.long, device="cuda")
    values = {"tokens": tokens, "batch": mine, "k_pages": pair.cache.k_pages, "v_pages": pair.cache.v_pages}
    inputs = pair.graphed._inputs
    assert inputs is not None

    def microseconds(run: Callable[[], object], calls: int = 500) -> float:
        best = float("inf")
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            best = min(best, (time.perf_counter() - began) / calls * 1e6)
        return best

    def check() -> None:
        inputs.check(values)

    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        check()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
    found.setdefault("graphs", {})["host_us"] = {"checks": microseconds(check), "step": microseconds(lambda: pair.step(**values), 50)}
