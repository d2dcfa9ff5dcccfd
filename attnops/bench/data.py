"""Suite `data`: kernels that move keys, values and latents, and what a copy of as many bytes takes.

`compiled` is what Inductor makes of the torch ops that `reference` runs eagerly. `copy` is `copy_` of half the bytes that a case reads and
writes, so it moves as many; `of_copy`: its time over the row's. Results must be equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Setup
from attnops.bench.rows import Case, Make, Row, Way, time_if_right, with_ratios
from attnops.core.arguments import Arg
from attnops.core.kernel import Kernel, kernels_of
from attnops.ops import OPS
from attnops.ops.sparse.packed_format import packed_bytes
from attnops.testing.calls import Call, filled
from attnops.testing.pool import Pool
from attnops.tune.clock import Timed, kernels_us

BF16, PAGE = torch.bfloat16, 16
SIZES = {"Hkv": 8, "D": 128, "Dv": 128, "Dc": 512, "Dr": 64, "bytes": packed_bytes(512, 64)}
Built = tuple[Call, int]  # and the bytes that it reads and writes at least, without tables


def write(pool: Pool, op: str, tokens: int, page: int = PAGE, dtype: torch.dtype = BF16) -> Built:
    """Tokens go into whole pages in random order, or into a page each when they are few, as in a decode step."""
    pages, at = max(2 * -(-tokens // page), 64), torch.arange(tokens, device=pool.device)
    order = torch.randperm(pages, generator=pool.generator, device=pool.device)
    slots = order[at] * page + 7 * at % page if tokens <= 64 else order[at // page] * page + at % page

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.name.endswith("scale"):
            return None if dtype == BF16 else torch.full(dims, 1 / 32, device=pool.device)
        if a.written:
            return torch.zeros(dims, dtype=torch.uint8 if a.dtypes == (torch.uint8,) else dtype, device=pool.device)
        return pool.take(*dims, dtype=BF16)

    call = Call(op, filled(op, {**SIZES, "T": tokens, "P": pages, "page": page}, {"slots": slots}, make))
    new = sum(call.arguments[n].nbytes for n in ("key", "value", "latent", "k_pe") if n in call.arguments)
    return call, new + tokens * sum(call.arguments[n][0, 0].nbytes for n in call.mutated)


def copy(pool: Pool, slots: int, layers: int) -> Built:
    """Slots of whole pages to each other's places, in all layers."""
    pages = [pool.take(layers, -(-slots // PAGE), PAGE, SIZES["Hkv"], SIZES["D"], dtype=BF16) for _ in range(2)]
    places = torch.arange(slots, device=pool.device), torch.randperm(slots, generator=pool.generator, device=pool.device)
    call = Call("copy_kv", dict(zip(("k_pages", "v_pages", "source", "target"), (*pages, *places), strict=True)))
    return call, sum(2 * slots * x[:, 0, 0].nbytes for x in pages)


def indices(pool: Pool) -> Built:
    """64 requests of up to 512 pages."""
    table = torch.randperm(64 * 512, generator=pool.generator, device=pool.device).to(torch.int32).view(64, 512)
    return Call("kv_indices", {"page_table": table, "seq_lens": pool.ints([i * 7919 % 8192 for i in range(64)]), "page_size": PAGE}), 0


CASES: dict[str, Callable[[Pool], Built]] = {
    **{f"write_kv {n}": partial(write, op="write_kv", tokens=n) for n in (64, 1, 512, 4096)},
    **{f"write_kv float8 {n}": partial(write, op="write_kv", tokens=n, dtype=torch.float8_e4m3fn) for n in (64, 4096)},
    "write_kv int8 4096": partial(write, op="write_kv", tokens=4096, dtype=torch.int8),
    **{f"{op} {n}": partial(write, op=op, tokens=n, page=64) for op in ("write_latent", "write_latent_packed") for n in (64, 4096)},
    **{f"copy_kv of {m} layers {n}": partial(copy, slots=n, layers=m) for n, m in ((64, 32), (8, 32), (256, 32), (2048, 8))},
    "kv_indices 64": indices,
}
COMPILED = (" 64", " 4096")  # ends of the names of cases whose code Inductor makes, which takes seconds


def cases(setup: Setup) -> dict[str, Case]:
    """Every kind of call; on a CPU the short ones."""
    pool = Pool(setup.device)
    return {name: partial(measure, setup, pool, name) for name in CASES if setup.on_gpu or name.endswith(COMPILED[0])}


def measure(setup: Setup, pool: Pool, case: str) -> list[Row]:
    """The kernels that can answer one case."""
    pool.reset()
    call, moved = CASES[case](pool)
    known, own = kernels_of(call.op), call.map(lambda _, t: t.clone())  # timed calls write their tensors again and again

    def way(run: Callable[[Call], Any]) -> Way:
        return Way(Timed(partial(run, own)), partial(results, call, run))

    def by(kernel: Kernel, call: Call) -> Any:
        return kernel.run(call.record)

    def compiled() -> Way:
        op, inline = OPS[call.op], next((k for k in known.values() if k.inline and not k.refusals(call.problem)), None)

        def body(args: Any, kwargs: Any) -> Any:
            if inline is None:
                return op.reference(op.call(*args, **kwargs))
            return op.packet.default(*args, **kwargs, policy=f"kernel={call.op}:{inline.name}")

        made = setup.compiled(body, fullgraph=True, dynamic=False)
        return way(lambda c: made(c.args, c.kwargs))

    want = results(call, partial(by, known["reference"]))
    chosen = [k for k in known.values() if (k.name == "reference" or not k.inline) and not k.refusals(call.problem)]
    ways: dict[str, Way | Make] = {k.name: way(partial(by, k)) for k in chosen}
    ways |= {"compiled": compiled} if case.endswith(COMPILED) else {}
    if moved:
        source, target = torch.zeros(2, moved // 2, dtype=torch.uint8, device=setup.device)
        ways["copy"] = Way(Timed(lambda: target.copy_(source)), lambda: want)

    def differing(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return float(sum(int((x != y).sum()) for x, y in zip(got, want, strict=True)))  # bytes

    ours = [k.name for k in chosen]
    return with_ratios(time_if_right(case, ways, want, 0.0, partial(kernels_us, setup.device), differing, own=ours), "copy")


def results(call: Call, run: Callable[[Call], Any]) -> list[Tensor]:
    """The bytes of the results that a call returns or writes; the call itself is not changed."""
    mine = call.map(lambda _, t: t.clone())
    returned = run(mine)
    values = [mine.arguments[n] for n in mine.mutated] if returned is None else list(returned)
    if call.op == "kv_indices":  # the rest is free
        values[1] = values[1][: int(values[0][-1])]
    return [x.contiguous().flatten().view(torch.uint8) for x in values]
