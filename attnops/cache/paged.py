"""`PagedCache`: keys and values of many requests in pages of fixed size, after
https://arxiv.org/abs/2309.06180."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from attnops.cache.batch import HostLengths, PagedBatch
from attnops.cache.ledger import Change, Layer, Ledger, Request, Room
from attnops.cache.paths import accepted, moves
from attnops.cache.step import Tokens, describe
from attnops.core.errors import InvalidInput, fail
from attnops.core.record import FLOATS, INDEX, QUANTISED, name, need
from attnops.ops import copy_kv, cu_seqlens, token_rows


@contextmanager
def ordinary() -> Iterator[None]:
    """Tensors made within the block are plain ones, in any mode of the caller."""
    # A tensor born in inference mode could not be written outside of it, and compiled code would
    # specialise on the two kinds.
    with torch.inference_mode(False), torch.no_grad():
        yield


class Allocation(NamedTuple):
    """The pages of all layers with equal shapes and window. Each layer has a slice of them.

    table: the number of their page table. numbers: the layers. whole: `[layers, P, page_size,
    *shape]` for each shape of a layer.
    """

    table: int
    numbers: list[int]
    whole: tuple[Tensor, ...]


class Pages:
    """The common part of all caches: pools of pages, one ledger, and the tables. See `PagedCache`
    for the attributes and the verbs.

    Layers with the same window share a page table. A request has only so many pages in the table of
    a window as hold the window and `max_new_tokens` tokens, and uses them in turn.

    Attributes:
        layers: for each layer its pages, `[P, page_size, *shape]` for each shape of the layer.
        allocations: the memory of all layers. Copy-on-write is one launch for each.
        pools: the pages of all layers, one tensor after the other.
        windows: of each page table, tokens that a query sees; 0: all of them.
        tables: int32 `[max_requests, M]`, the page tables.
        table_of: for each layer the number of its table.
    """

    def __init__(
        self,
        room: Room,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        workspace_bytes: int = 0,
    ) -> None:
        self.room = room
        self.num_pages = room.num_pages
        self.page_size = room.page_size
        self.max_new_tokens = room.max_new_tokens
        self._ledger = Ledger(room)
        self.windows = tuple(pool.window for pool in self._ledger.pools)
        self.table_of = self._ledger.table_of
        alike: dict[Any, list[int]] = {}
        for number, (table, layer) in enumerate(zip(self.table_of, room.layers, strict=True)):
            alike.setdefault((table, layer.shapes), []).append(number)
        self.allocations: list[Allocation] = []
        found: dict[int, tuple[Tensor, ...]] = {}
        with ordinary():
            for (table, shapes), numbers in alike.items():
                sizes = len(numbers), self._ledger.pools[table].num_pages, room.page_size
                # Zero and not empty: kernels multiply the rows past a request's end by 0, and 0 *
                # NaN is NaN.
                whole = tuple(
                    torch.zeros((*sizes, *shape), dtype=dtype, device=device) for shape in shapes
                )
                self.allocations.append(Allocation(table, numbers, whole))
                found.update(zip(numbers, zip(*map(_apart, whole), strict=True), strict=True))
            self.layers = tuple(found[number] for number in range(len(room.layers)))
            self.tables = tuple(
                torch.zeros((room.max_requests, pool.columns), dtype=torch.int32, device=device)
                for pool in self._ledger.pools
            )
            self.seq_lens = torch.zeros(room.max_requests, dtype=torch.int32, device=device)
        self.page_table = self.tables[0]
        self.pools = tuple(pages for layer in self.layers for pages in layer)
        for pages in self.pools:
            fix_address(pages, static=tuple(range(1, pages.dim())))
        self.add_workspace(workspace_bytes)

    def add_workspace(self, nbytes: int) -> None:
        """Give the batches a zeroed `workspace` of so many bytes; 0: None."""
        with ordinary():
            self.workspace = (
                torch.zeros(nbytes, dtype=torch.uint8, device=self.page_table.device)
                if nbytes
                else None
            )
        if self.workspace is not None:
            fix_address(self.workspace, static=(0,))

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the live requests, oldest first."""
        return tuple(self._ledger.requests)

    @property
    def free_pages(self) -> int:
        """Pages without an owner, of all pools."""
        return sum(len(pool.free) for pool in self._ledger.pools)

    @property
    def used_pages(self) -> int:
        """Pages with an owner, of all pools; a shared page counts once."""
        return sum(pool.num_pages - 1 for pool in self._ledger.pools) - self.free_pages

    def length(self, request: int) -> int:
        """Tokens of a request. Raises UnknownRequest."""
        return self._ledger.get(request).length

    def row(self, request: int) -> int:
        """The request's row in page_table and seq_lens, its own until it is freed. Raises
        UnknownRequest."""
        return self._ledger.get(request).row

    def slots(
        self, request: int, start: int = 0, stop: int | None = None, *, layer: int = 0
    ) -> Tensor:
        """int64 `[stop - start]`: the slots of a request's tokens, for `write_kv`. Raises
        UnknownRequest, InvalidInput.

        Write only the tokens that alloc, extend or batch has just added: earlier ones may be shared
        with a fork.

        Args:
            request: its id.
            start: the first token.
            stop: the token after the last one; None: the request's length.
            layer: the layer to write to. With a window, tokens whose pages hold later tokens have
                slot -1, which is not stored.
        """
        length = self.length(request)
        end = length if stop is None else count("stop", stop, 0, "tokens")
        first = count("start", start, 0, "tokens")
        need(
            first <= end <= length,
            "start, stop",
            (first, end),
            f"0 <= start <= stop <= {length}, the request's length",
        )
        with ordinary():
            return self.upload(self._ledger.slots(request, first, end, self.table_of[layer]))

    def fits(self, new_tokens: int | Sequence[int], requests: Sequence[int] = ()) -> bool:
        """Is there room now for so many new tokens, brought in one step or in many? Nothing is
        allocated.

        To admit a request that no running one can starve, nor it them: the tokens that each of
        those may still bring, and its own.

        Args:
            new_tokens: tokens of each of `requests`, then of requests still to be allocated; an
                int: of the only one.
            requests: ids, each once.

        Returns:
            False where pages, rows of the tables or their columns do not suffice.

        Raises:
            InvalidInput: a count that is none, fewer counts than requests, or a request twice.
                UnknownRequest.
        """
        given = new_tokens if isinstance(new_tokens, Sequence) else (new_tokens,)
        counts = [count(f"new_tokens[{i}]", n, 0, "tokens") for i, n in enumerate(given)]
        need(
            isinstance(requests, Sequence), "requests", repr(requests), "a sequence of request ids"
        )
        need(
            len(counts) >= len(requests),
            "new_tokens",
            f"{len(counts)} counts",
            f"at least {len(requests)}, one a request",
        )
        need(len(set(requests)) == len(requests), "requests", tuple(requests), "each once")
        return self._ledger.fits(list(zip(requests, counts, strict=False)), counts[len(requests) :])

    def alloc(self, num_tokens: int = 0) -> int:
        """A new request with room for `num_tokens` tokens, which count as its length. Returns its
        id, which no other request ever has.

        Raises InvalidInput, TooManyRequests, RequestTooLong, OutOfPages.
        """
        return self._make(self._ledger.alloc(count("num_tokens", num_tokens, 0, "tokens")))

    def extend(self, request: int, num_tokens: int) -> None:
        """Make a request `num_tokens` longer. A shared page that the new tokens fall on is copied
        first.

        Raises InvalidInput, UnknownRequest, RequestTooLong, OutOfPages.
        """
        self._make(self._ledger.append([(request, count("num_tokens", num_tokens, 0, "tokens"))]))

    def fork(self, request: int) -> int:
        """A new request with the tokens of `request`, whose pages it shares until one of the two
        writes. Returns its id.

        Raises UnknownRequest, TooManyRequests.
        """
        return self._make(self._ledger.fork(request))

    def truncate(self, request: int, length: int) -> None:
        """Shorten a request to `length` tokens, e.g. when drafted tokens are rejected. Raises
        InvalidInput, UnknownRequest."""
        self._make(self._ledger.truncate(request, count("length", length, 0, "tokens")))

    def accept(self, step: PagedBatch, paths: Tensor | Sequence[Sequence[int]]) -> None:
        """Keep the accepted ones of a step's tokens, which were drafts, and take the others back.
        Each request then ends in its accepted tokens, one after the other.

        The host must know the paths, because it follows the lengths: it waits for those on a
        device, and not for lists or tensors on the CPU. Code that must not wait calls `compact`.

        Args:
            step: the batch of the drafts, as `batch` returned it, for requests that were not
                changed or forked since.
            paths: `[B, depth]` int32 or int64, or a list of lists: for each request the accepted
                ones of its new tokens, numbered from 0, in rising order. -1 follows the last one;
                lists may end there.

        Raises:
            InvalidInput: another step, or no such paths. UnknownRequest, NoKernel.
        """
        rows, change = accepted(self._ledger, step, paths)
        with ordinary():
            # Chains are contiguous as they are.
            if any(row and row[-1] >= len(row) for row in rows):
                depth = max(map(len, rows))
                self.compact(step, self.upload([row + [-1] * (depth - len(row)) for row in rows]))
            self._write(change)
        self._ledger.commit(change)

    def compact(self, step: PagedBatch, paths: Tensor) -> None:
        """Move the keys and values, or latents, of accepted tokens together, in all layers: the
        tensors' part of `accept`. Lengths, tables and the ledger stay as they are.

        The host does not wait, so that a CUDA graph may capture it. Each of `allocations` takes one
        launch. A program of it reads all that it moves of a request before it writes, and the pages
        of new tokens are the request's own, so that the order of programs does not matter.

        Args:
            step: the batch of the drafts.
            paths: int32 or int64 `[B, depth]`, on its device, see `accept`. A number that is no new
                token of its request moves nothing.

        Raises:
            InvalidInput: another shape or dtype. NoKernel.
        """
        batch = step.seq_lens.shape[0]
        need(paths.dtype in INDEX, "paths", paths.dtype, " | ".join(map(name, INDEX)))
        want = f"[{batch}, depth], a row for each request"
        need(paths.dim() == 2 and paths.shape[0] == batch, "paths", tuple(paths.shape), want)
        if paths.numel() and step.slots.numel():
            for number in range(len(self.tables)):
                self.copy_slots(number, *moves(step.of(number), paths), group=paths.shape[1])

    def free(self, request: int) -> None:
        """End a request and give back the pages that no fork shares. Raises UnknownRequest."""
        self._make(self._ledger.free(request))

    def reset(self) -> None:
        """End every request."""
        with ordinary():
            for table in (*self.tables, self.seq_lens):
                table.zero_()
        self._ledger = Ledger(self.room)

    def plan_maker(
        self, tokens: int, requests: int, queries: int
    ) -> Callable[[PagedBatch], Tensor] | None:
        """The function that makes the device plan of steps of these sizes; None: they need no plan.
        queries: the most of a request."""
        return None

    def _append(
        self,
        requests: Sequence[int],
        new_tokens: int | Sequence[int],
        more: Callable[[PagedBatch, list[Request]], PagedBatch],
    ) -> PagedBatch:
        """See `batch`. more: adds to the step's description, given the requests as they were
        before."""
        if not isinstance(requests, Sequence):
            fail(InvalidInput, "requests", repr(requests), "a sequence of request ids")
        ids = tuple(requests)
        given = tuple(new_tokens) if isinstance(new_tokens, Sequence) else (new_tokens,) * len(ids)
        need(
            len(given) == len(ids),
            "new_tokens",
            f"{len(given)} counts",
            f"{len(ids)}, one a request",
        )
        counts = [count(f"new_tokens[{i}]", n, 0, "tokens") for i, n in enumerate(given)]
        longest = max(counts, default=0)
        want = (
            f"at most {self.max_new_tokens} tokens a request and step: sliding windows have "
            "room for no more. Split the prompt"
        )
        need(not any(self.windows) or longest <= self.max_new_tokens, "new_tokens", longest, want)
        entries = [self._ledger.get(request) for request in ids]
        need(len(set(ids)) == len(ids), "requests", ids, "each request once")
        change = self._ledger.append(list(zip(ids, counts, strict=True)))
        with ordinary():
            self._write(change)
            try:
                row, new = self.upload([[entry.row for entry in entries], counts])
                lengths, starts = self.seq_lens[row], cu_seqlens(new)
                owner = token_rows(starts, sum(counts))
                positions = (
                    torch.arange(sum(counts), device=owner.device) + (lengths - starts[1:])[owner]
                )
                found = more(
                    self.describe(Tokens(positions, owner, starts, longest), row, lengths), entries
                )
            except BaseException:
                self._write(change, undo=True)
                raise
        self._ledger.commit(change)
        after = [step.length for step in change]
        changes = [(step.request, step.entry.changes) for step in change]
        for batch, window in zip((found, *found.others), self.windows, strict=True):
            batch.known(HostLengths(after, counts, window, self.page_size, changes))
        return found

    def describe(self, tokens: Tokens, rows: Tensor | int, lengths: Tensor) -> PagedBatch:
        """A step of the requests in these rows of the tables, or in the first so many. lengths:
        int32 `[B]`, the new tokens included."""
        # A slice up to a symbolic size may be shorter to torch 2.11.
        held = [
            table.narrow(0, 0, rows) if isinstance(rows, (int, torch.SymInt)) else table[rows]
            for table in self.tables
        ]
        first, *others = (
            describe(
                tokens, table, lengths, self.page_size, window, self.max_new_tokens, self.workspace
            )
            for table, window in zip(held, self.windows, strict=True)
        )
        return replace(first, others=tuple(others)) if others else first

    def _make(self, change: Change) -> int:
        with ordinary():
            self._write(change)
        self._ledger.commit(change)
        return change[0].request

    def _copy_pages(self, number: int, pairs: Tensor) -> None:
        """Copy pages in all layers of a page table. pairs: from, to, from, to ..."""
        slots = pairs.view(-1, 2, 1) * self.page_size
        slots = slots + torch.arange(self.page_size, device=pairs.device)
        source, target = (each.flatten() for each in slots.unbind(1))
        self.copy_slots(number, source, target)

    def copy_slots(self, number: int, source: Tensor, target: Tensor, group: int = 0) -> None:
        """`copy_kv` in all layers of a page table."""
        for owner, _, (keys, *values) in self.allocations:
            if owner == number:
                copy_kv(keys, values[0] if values else None, source, target, group=group)

    def _write(self, change: Change, undo: bool = False) -> None:
        """Let the tensors follow `change`, which the ledger has yet to commit. Copies go to free
        pages, so an undo leaves them."""
        edits = self._ledger.edits(change, undo)
        flat = self.upload([number for part in edits for entry in part for number in entry])
        pieces = flat.split([len(part) * len(part[0]) if part else 0 for part in edits])
        tables = len(self.tables)
        # First, because a copy may raise, as where a policy leaves it no kernel: the tables are
        # then as they were.
        for number, pairs in enumerate(pieces[tables : 2 * tables]):
            if pairs.numel():
                self._copy_pages(number, pairs)
        for table, cells in zip(self.tables, pieces, strict=False):
            row, column, page = cells.view(-1, 3).unbind(1)
            table[row, column] = page.int()
        row, length = pieces[-1].view(-1, 2).unbind(1)
        self.seq_lens[row] = length.int()

    def upload(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """int64, on the cache's device, without waiting for it."""
        device = self.page_table.device
        return torch.tensor(
            numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)


class PagedCache(Pages):
    """Pages of keys and values, their owners, and the tables that attention reads. Keep its
    methods, host calls, out of compiled functions.

    Args:
        num_layers: layers, each with pages of its own; a page id means the same page in all layers
            with the same window.
        num_pages: pages of the pool, the null page 0 included, which is never handed out. The pool
            of a window has at most as many.
        page_size: tokens a page holds.
        num_kv_heads: heads of keys and values, Hkv.
        head_dim: numbers of a key, D.
        v_head_dim: numbers of a value, Dv; default D.
        max_requests: rows of the tables.
        max_pages_per_request: columns of the tables.
        windows: for each layer the tokens that a query sees, its own included; 0: all of them.
            None: all layers see all tokens.
        max_new_tokens: with windows, the most new tokens of a request in a step. A request has
            pages for so many tokens beside the window; a longer prompt is brought in several steps.
            None: as many as the widest window.
        dtype: of the pages; float16, bfloat16, float32, float64, or float8_e4m3fn, float8_e5m2,
            int8 (with scales given to the ops).
        device: of pages and tables.
        workspace_bytes: scratch for kernels that ask for it, zero at first, carried by every batch;
            `attnops.explain(...)` shows the size.

    Attributes:
        k_pages: for each layer `[num_pages, page_size, Hkv, D]`, zero at first.
        v_pages: for each layer `[num_pages, page_size, Hkv, Dv]`, likewise.
        page_table: int32 `[max_requests, max_pages_per_request]`, the first of `tables`; row
            `row(request)` is the request's; unused entries are 0.
        seq_lens: int32 `[max_requests]`, in tokens.
        tables: the page tables of all windows. A layer reads table `table_of[layer]`, and its batch
            is `batch.of(table_of[layer])`.

    All tensors are written in place and keep their addresses. A call that raises leaves the cache
    as it was. The constructor raises InvalidInput; methods raise the errors they list, and
    UnknownRequest for an id that was freed or belongs to another cache.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        max_requests: int,
        max_pages_per_request: int,
        windows: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        workspace_bytes: int = 0,
    ) -> None:
        pages = count("num_pages", num_pages, 2, "pages, the null page included")
        size = count("page_size", page_size, 1, "tokens")
        given = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_requests": max_requests,
            "max_pages_per_request": max_pages_per_request,
            "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
        }
        layers, heads, k_dim, rows, width, v_dim = (
            count(field, value, 1) for field, value in given.items()
        )
        seen = [
            count(f"windows[{i}]", window, 0, "tokens")
            for i, window in enumerate(windows or (0,) * layers)
        ]
        need(len(seen) == layers, "windows", f"{len(seen)} windows", f"{layers}, one a layer")
        new = (
            max(1, *seen)
            if max_new_tokens is None
            else count("max_new_tokens", max_new_tokens, 1, "tokens")
        )
        check_dtype(dtype, (*FLOATS, *QUANTISED))
        per_layer = [Layer(((heads, k_dim), (heads, v_dim)), window) for window in seen]
        room = Room(
            per_layer,
            pages,
            size,
            rows,
            width,
            new,
            width * size,
            "max_pages_per_request * page_size",
        )
        super().__init__(
            room,
            dtype=dtype,
            device=device,
            workspace_bytes=count("workspace_bytes", workspace_bytes, 0),
        )
        self.k_pages = tuple(k for k, _ in self.layers)
        self.v_pages = tuple(v for _, v in self.layers)

    def batch(self, requests: Sequence[int], new_tokens: int | Sequence[int] = 1) -> PagedBatch:
        """Append tokens to requests, to all or to none, and describe the step. The tensors are new
        ones at each call.

        Args:
            requests: ids, each once. Empty: an idle step, for a process that must take part in the
                steps of others.
            new_tokens: tokens of each; an int: as many for each.

        Returns:
            The batch of all layers or, with windows, of those that read `page_table`;
            `batch.of(table_of[layer])` is that of a layer.

        Raises:
            InvalidInput: the same request twice, counts that do not match, or more tokens
                than `max_new_tokens` allows.
            UnknownRequest, RequestTooLong, OutOfPages: a request or the cache has no room for the
                tokens.
        """
        return self._append(requests, new_tokens, lambda batch, _: batch)


def fix_address(
    *tensors: Tensor, static: tuple[int, ...] = (), dynamic: tuple[int, ...] = ()
) -> None:
    """Tell the compiler that these tensors never move, so that a CUDA graph writes them in place.

    static: dims to specialise on (page size, heads, head dims). dynamic: dims in which caches of
    one model may differ.
    """
    # Imported late: it takes a second, and a process without a cache need not pay it.
    from attnops.core.private_torch import (
        mark_static,
        mark_static_address,
        maybe_mark_dynamic,
    )

    for tensor in tensors:
        mark_static(tensor, list(static))
        mark_static_address(tensor)
        maybe_mark_dynamic(tensor, list(dynamic))


def _apart(whole: Tensor) -> tuple[Tensor, ...]:
    """The slices of a new contiguous tensor along dim 0, each with a storage of its own over the
    same memory.

    AOTAutograd compares mutated inputs that share a storage with each other, and may copy them.
    """
    if type(whole) is not Tensor or whole.is_meta or not whole.numel():
        return whole.unbind(0)
    memory: Any = whole.untyped_storage()
    step = whole.nbytes // whole.shape[0]
    return tuple(
        whole.new_empty(0).set_(
            memory[i * step : (i + 1) * step], 0, whole.shape[1:], whole.stride()[1:]
        )
        for i in range(whole.shape[0])
    )


def check_dtype(dtype: object, known: Sequence[torch.dtype], field: str = "dtype") -> None:
    """Raise InvalidInput for a dtype of pages that is not `known`."""
    need(dtype in known, field, dtype, " | ".join(map(name, known)))


def count(field: str, value: object, least: int, unit: str = "") -> int:
    """`value` as an int of at least `least`."""
    got = (
        operator.index(value)
        if isinstance(value, SupportsIndex) and not isinstance(value, bool)
        else value
    )
    if type(got) is not int or got < least:
        fail(
            InvalidInput,
            field,
            got if isinstance(got, int) else repr(got),
            f"an int >= {least}{unit and f' ({unit})'}",
        )
    return got
