"""Page tables with entries that are no page: no kernel reads what the table does not name, and the
keys are not seen."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import Kernel, Plan, kernels_of, register
from attnops.ops import named_pages
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.metadata.reference import UNKNOWN
from attnops.testing import Features, Source, check_kernel, make_call
from attnops.testing.calls import plan_call, planned
from tests.standins.vendors import VENDORS

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HALF = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True)


OF_TORCH = ("reference", "sdpa")

# (request, column): a page in the middle, the first, the last, the only one, and all of them.
HOLES = {
    "middle": ((0, 1), (2, 1)),
    "first": ((0, 0), (2, 0)),
    "last": ((2, 2),),
    "only": ((1, 0),),
    "all": ((2, 0), (2, 1), (2, 2)),
}
LENGTHS = (190, 3, 130)
# Ids of no page, by the number of pages there are.
IDS = {"negative": lambda pages: (-1, -9), "past": lambda pages: (pages, 2**31 - 1, pages + 7)}


def holed(call, holes, ids="negative"):
    """The call with ids of no page in these places of its table. The pages they had are poisoned,
    as all others that no row names."""
    table = call.arguments["page_table"].clone()
    names = [n for n in ("k_pages", "v_pages", "latent_pages") if n in call.arguments]
    free = {n: call.free[n].clone() for n in names}
    for i, (request, column) in enumerate(holes):
        for n in names:
            free[n][int(table[request, column])] = True
        wrong = IDS[ids](call.arguments[names[0]].shape[0])
        table[request, column] = wrong[i % len(wrong)]
    return replace(call.with_(page_table=table), free={**call.free, **free})


def over(op, q_lens, lens=LENGTHS, page=64, f=None, seed=0, **more):
    """A call over pages of either op."""
    return make_call(
        op,
        Source(seed),
        q_lens,
        lens,
        page,
        f or (HALF if op == "paged_attention" else DEEPSEEK),
        **more,
    )


def running(name):
    return nullcontext() if name in OF_TORCH else VENDORS[name].running()


def check(op, name, call):
    with running(name):
        # A device plan is for tables without holes.
        return check_kernel(replace(kernels_of(op)[name], plan=Plan()), call)


def over_pages(op):
    """The kernels whose calls are tested here. Triton's are where it is interpreted, in
    tests/triton/test_numerics.py."""
    return [name for name in kernels_of(op) if name in VENDORS or name in OF_TORCH]


OVER = [("paged_attention", n) for n in over_pages("paged_attention")] + [
    ("mla_attention", n) for n in over_pages("mla_attention")
]
QUERIES = {"decode": (1, 1, 1), "verify": (2, 1, 3), "extend": (5, 1, 64)}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize(("op", "name"), OVER)
def test_no_page_is_read_that_is_not_named(op, name, queries, holes, ids):
    f = replace(DEEPSEEK, q_dtype=E4M3, kv_dtype=E4M3) if name == "flashmla_fp8" else None
    figures = check(op, name, holed(over(op, QUERIES[queries], f=f), HOLES[holes], ids))
    assert {r.field for r in figures.refused} <= {"queries"}, figures


@pytest.mark.parametrize(
    "features", [{"window": (70, -1)}, {"mask": "bool"}, {"chunk": 64}], ids=str
)
@pytest.mark.parametrize("name", over_pages("paged_attention"))
def test_where_no_page_may_move(name, features):
    check(
        "paged_attention",
        name,
        holed(
            over("paged_attention", (1, 1, 1), f=replace(HALF, **features)), HOLES["first"], "past"
        ),
    )


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, name in OVER if name.startswith("flashinfer")]
)
def test_a_plan_of_another_number_of_pages_is_for_promised_tables_alone(op, name):
    """It took ids past the pool for pages, or pages for ids past the pool."""
    call, kernel = over(op, (1, 1), (9, 30)), kernels_of(op)[name]
    with running(name):
        for pages, said in ((UNKNOWN, "unknown"), (1, "1")):
            made = planned(kernel, call)
            maker = kernels_of(f"plan_{op}")[name]
            plan = plan_call(
                call, maker, (made.arguments["plan"], made.arguments["workspace"])
            ).with_(num_pages=pages)
            maker.run(plan.record)
            with pytest.raises(
                InvalidInput,
                match=rf"^plan.num_pages: got {said}, want \d+, the pages of this call: give "
                r".*holes=False",
            ):
                kernel.run(made.record)
            kernel.run(made.with_(holes=False).record)


@pytest.mark.parametrize("queries", [(1, 1, 1), (5, 1, 2)], ids=["decode", "extend"])
def test_the_keys_of_such_a_page_are_not_seen(queries):
    """Against dense attention of the keys that are left."""
    call = holed(
        over("paged_attention", queries, page=16, f=replace(HALF, dtype=torch.float64)),
        HOLES["middle"],
    )
    t = call.arguments
    given = [
        t[n] for n in ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    ]
    out = attnops.paged_attention(*given, max_seqlen_q=max(queries), scale=t["scale"])
    for length, table, (q0, q1) in zip(
        LENGTHS, t["page_table"], pairwise(t["cu_seqlens_q"].tolist()), strict=True
    ):
        at = torch.arange(length)
        ids = table.long()[at // 16]
        at, ids = (x[(ids >= 0) & (ids < t["k_pages"].shape[0])] for x in (at, ids))
        key, value = (t[n][ids, at % 16] for n in ("k_pages", "v_pages"))
        mask = at <= torch.arange(length - (q1 - q0), length)[:, None]
        want = attnops.attention(
            t["query"][None, q0:q1], key[None], value[None], mask=mask[None, None], scale=t["scale"]
        )[0]
        torch.testing.assert_close(out[q0:q1], want)


@pytest.mark.parametrize("name", kernels_of("write_kv"))
def test_slots_outside_the_pages_are_not_written(name):
    call = make_call(
        "write_kv", Source(0), (7, -1, 0, 11, 5), 4, 3, replace(HALF, dtype=torch.float32)
    )
    kernel = kernels_of("write_kv")[name]
    if kernel.refusals(call.problem):
        pytest.skip("needs a GPU; tests/triton has the same")
    t, far = call.arguments, torch.tensor([7, 12, 0, 2**31 - 1, -5])
    want, got = ({n: t[n].clone() for n in ("k_pages", "v_pages")} for _ in range(2))
    kernel.run(call.with_(**want, slots=torch.tensor([7, -1, 0, -1, -1])).record)
    kernel.run(call.with_(**got, slots=far).record)
    assert all(torch.equal(got[n], want[n]) for n in got)


@pytest.mark.parametrize("op", ["paged_attention", "mla_attention"])
@pytest.mark.parametrize("name", ["default", "fa3", "reference"])
def test_a_device_plan_of_a_table_with_holes_is_refused(op, name):
    call = over(op, (1, 1), (9, 30)).with_(plan=torch.zeros(4, dtype=torch.int32))
    run = getattr(getattr(torch.ops.attnops, op), name)
    with (
        torch.no_grad(),
        pytest.raises(InvalidInput, match=r"^holes: got True, want False, because a device plan"),
    ):
        run(*call.args, **call.kwargs)


class Layers(torch.nn.Module):
    """Attention of layers that ask the same, and of one with a window."""

    def forward(self, query, pools, *tables):
        for window, (k_pages, v_pages) in zip(
            [(-1, -1), (64, 0), (-1, -1), (-1, -1), (64, 0)], pools, strict=True
        ):
            query = query + attnops.paged_attention(
                query, k_pages, v_pages, *tables, max_seqlen_q=1, window=window
            )
        return query


@pytest.fixture
def counted():
    """Calls of `named_pages`, by a kernel that the compiler does not look into."""
    calls, plain = [], kernels_of("named_pages")["reference"].run

    def run(call):
        calls.append(call.squeeze)
        return plain(call)

    if "counts" not in kernels_of("named_pages"):
        register(
            Kernel(
                "counts",
                "named_pages",
                lambda call: COUNT[0](call),
                dtypes=(torch.int32,),
                cost_us=lambda p: 1e9,
            )
        )
    COUNT[:] = [run]
    with torch.no_grad(), attnops.use(kernel={"named_pages": "counts"}):
        yield calls


COUNT: list[Any] = []


def layers_call(pools=5):
    calls = [
        holed(over("paged_attention", (1, 1, 1), seed=i, padding=0), HOLES["first"], "past")
        for i in range(pools)
    ]
    t = calls[0].arguments
    pages = [tuple(c.arguments[n].nan_to_num() for n in ("k_pages", "v_pages")) for c in calls]
    return t["query"], pages, t["page_table"], t["seq_lens"], t["cu_seqlens_q"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_with_the_same_rules_share_one_look(counted, dynamic):
    given = layers_call()
    want = Layers()(*given)
    counted.clear()
    got = torch.compile(Layers(), fullgraph=True, dynamic=dynamic)(*given)
    assert sorted(counted) == [False, True]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_results_that_a_model_returns_are_its_own(counted):
    def twice(table, lengths, starts):
        sizes = {"num_pages": 4, "page_size": 64}
        return named_pages(table, lengths, starts, **sizes), named_pages(
            table, lengths, starts, **sizes
        )

    _, _, *tables = layers_call(1)
    a, b = torch.compile(twice, fullgraph=True)(*tables)
    assert a[0].data_ptr() != b[0].data_ptr()
    assert torch.equal(a[0], b[0])


def test_a_table_written_between_two_layers_is_looked_at_again(counted):
    query, pages, *tables = layers_call(2)

    def model(query, table, lengths, starts):
        rest = lengths, starts
        one = attnops.paged_attention(query, *pages[0], table, *rest, max_seqlen_q=1)
        table.fill_(2)
        return one, attnops.paged_attention(query, *pages[1], table, *rest, max_seqlen_q=1)

    want = model(query, tables[0].clone(), *tables[1:])
    counted.clear()
    got = torch.compile(model, fullgraph=True)(query, tables[0].clone(), *tables[1:])
    assert len(counted) == 2
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_who_names_pages_once_a_step_says_so():
    t = holed(over("paged_attention", (1, 1, 1), padding=0), HOLES["middle"]).arguments
    table, lengths = named_pages(
        t["page_table"],
        t["seq_lens"],
        t["cu_seqlens_q"],
        num_pages=t["k_pages"].shape[0],
        page_size=64,
    )
    pages = [t[n] for n in ("query", "k_pages", "v_pages")]
    want = attnops.paged_attention(
        *pages, t["page_table"], t["seq_lens"], t["cu_seqlens_q"], max_seqlen_q=1
    )
    got = attnops.paged_attention(
        *pages, table, lengths, t["cu_seqlens_q"], max_seqlen_q=1, holes=False
    )
    torch.testing.assert_close(got, want)
