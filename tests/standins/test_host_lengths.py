"""Plans made of the lengths that the host knows: the same plans, and nothing read from the device.
Over stand-ins: not the kernels."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

import attnops
from attnops.cache import LatentCache, PagedCache, Planner
from attnops.core.errors import InvalidInput, StaleGraph
from attnops.core.kernel import kernels_of
from attnops.core.op import OPS
from attnops.core.problem import Target, pretend
from attnops.core.record import changed
from attnops.graphs import Buckets, breakable, piecewise
from attnops.kernels.shared.plan import MAGIC
from attnops.nn import LatentAttention
from attnops.ops import latent_layers, mla_attention, paged_layers, plan_paged_attention
from attnops.ops.pages.plan import statics_of
from tests.graphs.standin import StandIn
from tests.standins import flashinfer_mla, flashinfer_modules

BF16 = torch.bfloat16
SIZES = {"max_tokens": 64, "max_requests": 4, "max_pages": 8}
SPECS = {
    "decode": paged_layers(4, 2, 64, 16, BF16),
    "fa2": paged_layers(8, 2, 64, 16, BF16),
    "mla": latent_layers(16, 64, BF16),
}
STEPS = ([20, 1, 3], 1, 1, [1, 0, 1], [4, 1, 2])


@pytest.fixture(autouse=True)
def sm90():
    target = Target("cuda", 90, assume=("flashinfer",))
    with flashinfer_modules.installed(), flashinfer_mla.installed(), pretend(target):
        yield


def cache_of(kind, windows=None):
    if kind == "mla":
        rest = {"max_tokens_per_request": 512, "page_size": 64}
        return LatentCache(1, 5000, max_requests=4, **rest, dtype=BF16, device="cpu")
    rest = {"max_requests": 4, "max_pages_per_request": 8, "windows": windows}
    return PagedCache(len(windows or "1"), 60, 16, 2, 64, **rest, dtype=BF16, device="cpu")


def planner(kind, **more):
    name = "flashinfer_mla_fa3" if kind == "mla" else "flashinfer"
    made = Planner(SPECS[kind], **SIZES, device="cpu", kernel=name, **more)
    made.plan.zero_()
    made.workspace.zero_()
    return made


def on_meta(kind, batch):
    """The call of the kernel that plans for the batch, whose tensors on the device nobody can
    read."""
    made, spec = planner(kind), SPECS[kind]
    tables = (batch.page_table, batch.seq_lens, batch.cu_seqlens_q)
    return OPS[f"plan_{spec.op}"].call(
        *(t.to("meta") for t in tables),
        num_tokens=batch.slots.shape[0],
        max_seqlen_q=batch.max_seqlen_q,
        plan=made.plan,
        workspace=made.workspace.to("meta"),
        seq_lens_cpu=batch.seq_lens,
        cu_seqlens_q_cpu=batch.cu_seqlens_q,
        policy="",
        **statics_of(spec),
    )


def attend(kind, cache, batch):
    """Attention of fixed queries, by the plan of the batch."""
    tokens, torch_random = batch.slots.shape[0], torch.Generator().manual_seed(0)
    shape = (tokens, SPECS[kind].q_heads, SPECS[kind].head_dim)
    query = torch.randn(shape, generator=torch_random).to(BF16)
    tables = batch.page_table, batch.seq_lens, batch.cu_seqlens_q
    rest = {n: getattr(batch, n) for n in ("max_seqlen_q", "plan", "workspace", "holes")}
    if kind == "mla":
        queries = query.split([512, 64], -1)
        return mla_attention(*queries, cache.latent_pages[0], *tables, scale=0.1, **rest)
    return attnops.paged_attention(
        query, cache.k_pages[0], cache.v_pages[0], *tables, **rest, kernel="flashinfer"
    )


@pytest.mark.parametrize("kind", SPECS)
def test_the_same_plan_as_of_lengths_read_from_the_device(kind):
    cache = cache_of(kind)
    for pages in cache.pools:
        pages.normal_()
    ids = [cache.alloc() for _ in range(3)]
    for new in STEPS:
        batch = cache.batch(ids, new)
        assert list(batch.host.seq_lens) == batch.seq_lens.tolist()
        starts = [*accumulate(batch.host.new_tokens, initial=0)]
        assert starts == batch.cu_seqlens_q.tolist()
        with_host, without = planner(kind), planner(kind)
        planned = with_host(batch)
        assert planned.host is batch.host, "for the Planner of other layers"
        assert without(replace(batch)).host is None
        assert with_host.plan[:64].equal(without.plan[:64])
        assert attend(kind, cache, planned).equal(attend(kind, cache, without(replace(batch))))


@pytest.mark.parametrize("kind", SPECS)
def test_nothing_is_read_from_the_device(kind):
    cache = cache_of(kind)
    name = "flashinfer_mla_fa3" if kind == "mla" else "flashinfer"
    plan_kernel = kernels_of(f"plan_{SPECS[kind].op}")[name]
    ids = [cache.alloc() for _ in range(3)]
    for new in STEPS:
        call = on_meta(kind, cache.batch(ids, new))
        plan_kernel.run(call)
        assert int(call.plan[0]) == MAGIC
        with pytest.raises(NotImplementedError, match="meta"):
            plan_kernel.run(changed(call, seq_lens_cpu=None, cu_seqlens_q_cpu=None))


def test_a_batch_that_may_have_holes_is_read():
    cache, plans = cache_of("decode"), planner("decode", num_pages=60)
    batch = cache.batch([cache.alloc(5), cache.alloc(40)], 1)
    batch.page_table[1, 0] = -1
    holes = replace(batch, holes=True).known(batch.host)
    assert plans(holes).plan is plans.plan
    assert plans.workspace[:20].view(torch.int32).tolist() == [0, 1, 2, 0, 1], "a page is gone"


@pytest.mark.parametrize("kind", ["decode", "fa2"])
def test_the_tokens_of_the_last_pages(kind):
    cache, plans = cache_of(kind), planner(kind)
    plan_kernel = kernels_of("plan_paged_attention")["flashinfer"]
    ids = [cache.alloc(n) for n in (4, 15, 31)]
    plans(cache.batch(ids, 1))
    assert plan_kernel.plan.last(plans.plan, plans.workspace).tolist() == [5, 16, 16]
    plans(cache.batch(ids, 2))
    assert plan_kernel.plan.last(plans.plan, plans.workspace) is None, "no decode"
    with attnops.use(deterministic=True):
        plans(cache.batch(ids, 1))
        assert plan_kernel.plan.last(plans.plan, plans.workspace) is None, "FA3's holds lengths"


def test_lengths_of_windows():
    cache = cache_of("decode", windows=(0, 20, 33))
    ids = [cache.alloc() for _ in range(3)]
    for new in ([20, 1, 3], 1, [20, 20, 20], 1, [0, 1, 20], [20, 1, 4]):
        batch = cache.batch(ids, new)
        for table in range(3):
            own = batch.of(table)
            assert "seq_lens" not in vars(own.host), "nobody has read them yet"
            assert list(own.host.seq_lens) == own.seq_lens.tolist()


def test_other_lengths_come_without_those_of_the_host():
    cache = cache_of("decode")
    batch = cache.batch([cache.alloc(3)], 2)
    assert replace(batch, seq_lens=batch.seq_lens + 1).host is None
    leaves, spec = pytree.tree_flatten(batch)
    assert pytree.tree_unflatten(leaves, spec).host is None
    assert all(isinstance(x, (torch.Tensor, bool)) or x == batch.max_seqlen_q for x in leaves)


def test_compiled_code_does_not_specialise_on_them():
    cache, seen = cache_of("decode"), CompileCounter()

    def positions(batch):
        return replace(batch, plan=None).positions * 2 + batch.seq_lens.sum()

    compiled, request = torch.compile(positions, backend=seen, fullgraph=True), cache.alloc(3)
    for _ in range(4):
        batch = cache.batch([request], 1)
        assert compiled(batch).equal(positions(batch))
    assert seen.frame_count == 1


@pytest.mark.parametrize("padding", ["absent", "null"])
def test_a_graph_plans_its_padded_batch(padding):
    cache, plans = cache_of("fa2"), planner("fa2")
    hosts = []

    def prepare(batch):
        hosts.append(batch.host)
        if batch.host is not None:
            assert list(batch.host.seq_lens) == batch.seq_lens.tolist()
            assert [*accumulate(batch.host.new_tokens, initial=0)] == batch.cu_seqlens_q.tolist()
        return plans(batch)

    def model(query, batch):
        return attnops.paged_attention(
            query,
            cache.k_pages[0],
            cache.v_pages[0],
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            plan=batch.plan,
            workspace=batch.workspace,
            holes=batch.holes,
            kernel=None if batch.plan is None else "flashinfer",
        )

    cache.k_pages[0].normal_()
    cache.v_pages[0].normal_()
    buckets = Buckets(decode=(4,), padding=padding)
    given = {"tokens": ("query",), "prepare": prepare, "cache": cache, "graphs": StandIn()}
    step = breakable(model, buckets, **given)
    ids = [cache.alloc(n) for n in (5, 40, 1)]
    for count in (3, 2, 3):
        batch = cache.batch(ids[:count], 1)
        query = torch.randn(count, 8, 64, dtype=BF16)
        with attnops.use(kernel="reference"):
            want = model(query, batch)
        torch.testing.assert_close(step(query, batch=batch), want, rtol=2e-2, atol=2e-2)
        assert hosts[-1] is not None
    [row] = step.report().rows
    assert (row.graphs, row.breaks) == (1, ()), "its graph holds the kernel"
    with attnops.use(deterministic=True), pytest.raises(StaleGraph, match="policy"):
        step(query, batch=cache.batch(ids, 1))


def test_graphs_plan_for_every_page_table():
    cache, hosts = cache_of("decode", windows=(0, 20)), []

    def prepare(batch):
        hosts.append([(own.host, own.seq_lens.tolist()) for own in (batch, *batch.others)])
        return batch

    def model(x, batch):
        return x * 2 + batch.of(1).seq_lens[:, None]

    step = breakable(
        model,
        Buckets(decode=(4,)),
        tokens=("x",),
        prepare=prepare,
        cache=cache,
        graphs=StandIn(),
    )
    ids = [cache.alloc(n) for n in (5, 40)]
    for _ in range(2):
        step(torch.zeros(2, 1), batch=cache.batch(ids, 1))
        assert [list(host.seq_lens) for host, _ in hosts[-1]] == [own for _, own in hosts[-1]]


BAD = {
    "of another size": ({"seq_lens_cpu": torch.ones(3, dtype=torch.int32)}, "seq_lens_cpu.shape"),
    "of another dtype": ({"seq_lens_cpu": torch.ones(2)}, "seq_lens_cpu.dtype"),
    "one alone": ({"cu_seqlens_q_cpu": None}, "seq_lens_cpu, cu_seqlens_q_cpu: got one of them"),
    "elsewhere": (
        {"seq_lens_cpu": torch.ones(2, dtype=torch.int32, device="meta")},
        "seq_lens_cpu.device: got meta, want cpu",
    ),
    "too long": (
        {"seq_lens_cpu": torch.tensor([1, 999], dtype=torch.int32)},
        r"seq_lens: got \[1, 999\], want 0 <= each <= 128",
    ),
    "too few": (
        {"cu_seqlens_q_cpu": torch.tensor([0, 2, 1], dtype=torch.int32)},
        "lengths of cu_seqlens_q: got",
    ),
}


@pytest.mark.parametrize(("change", "text"), BAD.values(), ids=BAD)
def test_bad_lengths_are_named(change, text):
    cache, plans = cache_of("decode"), planner("decode")
    batch = cache.batch([cache.alloc(5), cache.alloc(40)], 1)
    lengths = {"seq_lens_cpu": batch.seq_lens, "cu_seqlens_q_cpu": batch.cu_seqlens_q}
    with pytest.raises(InvalidInput, match=text):
        plan_paged_attention(
            SPECS["decode"],
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            num_tokens=2,
            max_seqlen_q=1,
            plan=plans.plan,
            workspace=plans.workspace,
            kernel="flashinfer",
            **{**lengths, **change},
        )


@pytest.mark.parametrize("mode", [breakable, piecewise])
@pytest.mark.parametrize("padding", ["absent", "null"])
def test_graphs_of_a_latent_layer(mode, padding):
    """Steps of one token hold the kernel, for each of their plans has one header; steps of several
    run it between graphs."""
    layer = LatentAttention(
        64,
        4,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        kernel="flashinfer_mla_fa3",
        dtype=BF16,
    ).eval()
    mine, theirs = cache_of("mla"), cache_of("mla")
    spec = latent_layers(4, 64, BF16)
    plans, own = (
        Planner(spec, **SIZES, device="cpu", kernel="flashinfer_mla_fa3") for _ in range(2)
    )
    buckets = Buckets(decode=(4,), tokens=(16,), requests=4, padding=padding)

    more = {"inner": "eager"} if mode is piecewise else {}

    def absorbed(plan):
        return lambda batch: plan(replace(batch, prefix=None).known(batch.host))

    step = mode(
        layer,
        buckets,
        tokens=("hidden",),
        prepare=absorbed(plans),
        cache=mine,
        graphs=StandIn(),
        **more,
    )
    ids, twins = ([c.alloc() for _ in range(3)] for c in (mine, theirs))
    for count, new in ((3, [4, 2, 5]), (3, 1), (2, 1), (3, 1), (2, [1, 3])):
        batch, twin = mine.batch(ids[:count], new), theirs.batch(twins[:count], new)
        hidden = torch.randn(batch.slots.shape[0], 64, dtype=BF16)
        with torch.no_grad():
            got = step(hidden, batch=batch, latent_pages=mine.latent_pages[0])
            want = layer(hidden, batch=absorbed(own)(twin), latent_pages=theirs.latent_pages[0])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    decode, mixed = sorted(step.report().rows, key=lambda row: row.bucket.tokens)
    assert (decode.graphs, decode.breaks, decode.replays) == (1, (), 3)
    assert (mixed.graphs, [each.op for each in mixed.breaks]) == (2, ["mla_attention"])
