"""Requests taken out of a batch: what must be bit for bit the same with and without the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.kernel import Kernel
from attnops.core.record import changed, split
from attnops.core.select import Policy, select
from attnops.testing import Call, Source, equip
from attnops.testing.calls import planned

POLICY = "deterministic"
MOST = {"starts_of_queries": "most_queries", "starts_of_keys": "most_keys"}
"""Which argument holds the greatest length, by what holds the lengths' sums."""


def invariant(kernel: Kernel) -> Kernel:
    """The kernel, given every call with the policy."""
    return replace(kernel, run=lambda call: kernel.run(changed(call, policy=POLICY)), contract=2)


def rows_of(call: Call, chosen: Sequence[int]) -> Tensor:
    """The tokens of these requests; of a dense or a sparse call, and of a merge, requests are
    rows."""
    device = next(iter(call.tensors().values())).device
    starts = call.held().get("starts_of_queries")
    return torch.tensor(list(chosen), device=device) if starts is None else within(starts, chosen)


def within(starts: Tensor, chosen: Sequence[int]) -> Tensor:
    """The rows of these requests among all."""
    ends = starts.tolist()
    return torch.cat([torch.arange(ends[b], ends[b + 1], device=starts.device) for b in chosen])


def only(call: Call, chosen: Sequence[int], columns: int = 0) -> Call:
    """The call of these requests alone, in a page table of `columns` more columns. What is written
    is NaN beforehand."""
    held = call.held()
    named = {a.holds: a.name for a in call.spec.args}
    source = Source(device=rows_of(call, chosen).device)
    rows = {"T": rows_of(call, chosen), "B": torch.tensor(list(chosen), device=source.device)}
    new: dict[str, Any] = {}
    for role, starts in held.items():
        if role in MOST:
            lengths = starts.diff()[rows["B"]].tolist()
            new[named[role]] = source.cumulative(lengths)
            if "block_count" not in call.arguments:  # as many blocks as the lists have
                new[named[MOST[role]]] = max(lengths)
    if "starts_of_keys" in held:
        rows["N"] = within(held["starts_of_keys"], chosen)
    for name, x in call.tensors().items():
        first = call.spec[name].layout[0].text
        if (letter := first.removeprefix("1 | ")) in rows and (letter == first or x.shape[0] > 1):
            new[name] = x[rows[letter]]
    if "page_ids" in held:
        new[named["page_ids"]] = pad(new[named["page_ids"]], (0, columns), value=-1)
        new |= (
            {"mask": pad(new["mask"], (0, columns * held["pages"].shape[1]))}
            if "mask" in new
            else {}
        )
    for name in call.writes:
        if name in new:
            new[name] = torch.full_like(
                new[name], float("nan") if new[name].is_floating_point() else -1
            )
    return call.with_(**new)


def results(call: Call, kernel: Kernel | None = None) -> list[Tensor]:
    """What the op gives under a deterministic policy: of `kernel` with the plan it wants from the
    host, or of the one that is chosen."""
    call = call.map(lambda n, x: x.clone() if call.spec[n].holds == "states" else x)
    call = call if kernel is None else planned(kernel, call, POLICY)
    record = changed(call.record, policy=POLICY)
    args, kwargs = split(record)
    returned = (
        getattr(torch.ops.attnops, call.op).default(*args, **kwargs)
        if kernel is None
        else kernel.run(record)
    )
    if returned is None:
        return [call.arguments[n] for n in call.writes if n in call.arguments]
    return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x.numel()]


def may_be_chosen(kernel: Kernel, call: Call) -> bool:
    """Does the kernel take this call under a deterministic policy, given the plan it wants?"""
    problem = planned(kernel, call, POLICY).problem
    return kernel.name not in select(problem, Policy(deterministic=True)).refused


def same_bits(call: Call, groups: Sequence[Sequence[int]], kernel: Kernel | None = None) -> None:
    """Every group of requests alone gives what it gives among the others, in page tables of several
    widths."""
    whole = [x.clone() for x in results(call, kernel)]
    assert whole
    for n, chosen in enumerate(groups):
        rows = rows_of(call, chosen)
        for among, alone in zip(whole, results(only(call, chosen, columns=n), kernel), strict=True):
            assert not alone.isnan().any()
            assert torch.equal(among[rows], alone), (
                f"requests {tuple(chosen)} differ when they are alone"
            )


def of_single_tokens(call: Call) -> Call:
    """The same call over pages of one token each."""
    pages = {n: x for n, x in call.tensors().items() if call.spec[n].holds == "pages"}
    size, table = next(iter(pages.values())).shape[1], call.arguments["page_table"]
    places = torch.arange(size, dtype=table.dtype, device=table.device)
    tokens = {name: x.flatten(0, 1).unsqueeze(1) for name, x in pages.items()}
    slots = torch.where(table[:, :, None] < 0, -1, table[:, :, None] * size + places)
    return call.with_(page_table=slots.flatten(1), **tokens)


def same_bits_in_any_page(call: Call, kernel: Kernel | None = None) -> None:
    """Requests of one token get the same results over pages of one token."""
    call = call.with_(holes=False)
    call = call if kernel is None else equip(kernel, call)
    others = [x.clone() for x in results(of_single_tokens(call), kernel)]
    for found, other in zip(results(call, kernel), others, strict=True):
        assert not found.isnan().any()
        assert torch.equal(found.flatten(), other.flatten())
