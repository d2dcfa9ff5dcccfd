"""`PagedCache`: keys and values of many requests in pages of fixed size, after https://arxiv.org/abs/2309.06180."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from attnops.cache.batch import PagedBatch
from attnops.cache.ledger import Ledger, Plan, Request
from attnops.errors import InvalidInput
from attnops.ops import cu_seqlens, slot_mapping, token_rows
from attnops.ops._check import FLOATS, QUANTISED, name


@contextmanager
def ordinary() -> Iterator[None]:
    """Tensors made within are plain ones, whatever mode the caller is in."""
    # A tensor born in inference mode could not be written outside of it, and compiled code would tell the two kinds apart.
    with torch.inference_mode(False), torch.no_grad():
        yield


class Pages:
    """What every cache of pages is: pools that share one ledger, and its tables. See `PagedCache` for the attributes and the verbs."""

    def __init__(
        self, pools: tuple[Tensor, ...], *, max_requests: int, max_pages_per_request: int, limit: int, limited_by: str, workspace_bytes: int
    ) -> None:
        """pools: `[num_pages, page_size, ...]` each, born `ordinary`. limit: the most tokens of a request, set by `limited_by`."""
        self._pools = pools
        self.num_pages, self.page_size = pools[0].shape[:2]
        self._limit = limit, limited_by
        device = pools[0].device
        with ordinary():
            self.page_table = torch.zeros((max_requests, max_pages_per_request), dtype=torch.int32, device=device)
            self.seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
            self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device) if workspace_bytes else None
        self._ledger = self._new_ledger()
        _tell_compiler(pools, tuple(range(1, pools[0].dim())))
        if self.workspace is not None:
            _tell_compiler((self.workspace,), (0,))

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the live requests, oldest first."""
        return tuple(self._ledger.requests)

    @property
    def free_pages(self) -> int:
        """Pages nobody owns."""
        return len(self._ledger.free_pages)

    @property
    def used_pages(self) -> int:
        """Pages with an owner; a shared page counts once."""
        return self._ledger.total - self.free_pages

    def length(self, request: int) -> int:
        """Tokens of a request. Raises UnknownRequest."""
        return self._ledger.get(request).length

    def row(self, request: int) -> int:
        """The request's row in page_table and seq_lens, its own until it is freed. Raises UnknownRequest."""
        return self._ledger.get(request).row

    def slots(self, request: int, start: int = 0, stop: int | None = None) -> Tensor:
        """int64 `[stop - start]`: where the request's tokens `start` to `stop` (default: its end) lie, as `write_kv` takes it.

        To be written only for tokens that alloc, extend or batch has just added: earlier ones may be shared with a fork.
        Raises UnknownRequest, InvalidInput.
        """
        length = self.length(request)
        end = length if stop is None else count("stop", stop, 0, "tokens")
        first = count("start", start, 0, "tokens")
        if end > length or first > end:
            raise InvalidInput("start, stop", (first, end), f"0 <= start <= stop <= {length}, the request's length")
        with ordinary():
            return self._upload(list(self._ledger.slots(request, first, end)))

    def alloc(self, num_tokens: int = 0) -> int:
        """A new request with room for `num_tokens` tokens, which count as its length. Returns its id, which no other request ever has.

        Raises InvalidInput, TooManyRequests, RequestTooLong, OutOfPages.
        """
        return self._make(self._ledger.alloc(count("num_tokens", num_tokens, 0, "tokens")))

    def extend(self, request: int, num_tokens: int) -> None:
        """Make a request `num_tokens` longer. A shared page that the new tokens fall on is copied first.

        Raises InvalidInput, UnknownRequest, RequestTooLong, OutOfPages.
        """
        self._make(self._ledger.append([(request, count("num_tokens", num_tokens, 0, "tokens"))]))

    def fork(self, request: int) -> int:
        """A new request with the tokens of `request`, whose pages it shares until one of the two writes. Returns its id.

        Raises UnknownRequest, TooManyRequests.
        """
        return self._make(self._ledger.fork(request))

    def truncate(self, request: int, length: int) -> None:
        """Shorten a request to `length` tokens, e.g. when drafted tokens are rejected. Raises InvalidInput, UnknownRequest."""
        self._make(self._ledger.truncate(request, count("length", length, 0, "tokens")))

    def free(self, request: int) -> None:
        """End a request and give back the pages that no fork shares. Raises UnknownRequest."""
        self._make(self._ledger.free(request))

    def reset(self) -> None:
        """End every request."""
        with ordinary():
            self.page_table.zero_()
            self.seq_lens.zero_()
        self._ledger = self._new_ledger()

    def plan_maker(self, tokens: int, requests: int, queries: int) -> Callable[[PagedBatch], Tensor] | None:
        """What makes the device plan of steps of these sizes, with at most `queries` tokens of a request; None: they need none."""
        return None

    def _new_ledger(self) -> Ledger:
        return Ledger(self.num_pages, self.page_size, self.page_table.shape[0], *self._limit)

    def _append(
        self, requests: Sequence[int], new_tokens: int | Sequence[int], more: Callable[[PagedBatch, list[Request], list[int]], PagedBatch]
    ) -> PagedBatch:
        """What `batch` does. more: adds to the step's description, given the requests as they were before and their counts."""
        if not isinstance(requests, Sequence):
            raise InvalidInput("requests", repr(requests), "a sequence of request ids")
        ids = tuple(requests)
        given = tuple(new_tokens) if isinstance(new_tokens, Sequence) else (new_tokens,) * len(ids)
        if len(given) != len(ids):
            raise InvalidInput("new_tokens", f"{len(given)} counts", f"{len(ids)}, one a request")
        counts = [count(f"new_tokens[{i}]", n, 0, "tokens") for i, n in enumerate(given)]
        entries = [self._ledger.get(request) for request in ids]
        if not ids or len(set(ids)) != len(ids):
            raise InvalidInput("requests", ids, "at least one request, each once")
        plan = self._ledger.append(list(zip(ids, counts, strict=True)))
        with ordinary():
            self._write(plan)
            try:
                found = more(self._describe([entry.row for entry in entries], counts), entries, counts)
            except BaseException:
                self._write(plan, undo=True)
                raise
        self._ledger.commit(plan)
        return found

    def _describe(self, rows: list[int], counts: list[int]) -> PagedBatch:
        row, new = self._upload([rows, counts])
        table, lengths = self.page_table[row], self.seq_lens[row]
        starts = cu_seqlens(new)
        owner = token_rows(starts, sum(counts))
        positions = torch.arange(sum(counts), device=owner.device) + (lengths - starts[1:])[owner]
        slots = slot_mapping(positions, owner, table, page_size=self.page_size)
        return PagedBatch(table, lengths, starts, slots, positions, max(counts), padded=False, holes=False, workspace=self.workspace)

    def _make(self, plan: Plan) -> int:
        with ordinary():
            self._write(plan)
        self._ledger.commit(plan)
        return plan.steps[0].request

    def _write(self, plan: Plan, undo: bool = False) -> None:
        """Let the tensors follow `plan`, which the ledger has yet to commit. Copies go to free pages, so there is nothing to undo."""
        table, lengths = self._ledger.edits(plan, undo)
        flat = self._upload([number for edit in (*table, *lengths, *plan.copies) for number in edit])
        cells, rows, copies = flat.split([3 * len(table), 2 * len(lengths), 2 * len(plan.copies)])
        if plan.copies and not undo:
            source, target = copies.view(-1, 2).unbind(1)
            for pages in self._pools:
                data = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages  # indexing has no float8 kernel
                data[target] = data[source]
        row, column, page = cells.view(-1, 3).unbind(1)
        self.page_table[row, column] = page.int()
        row, length = rows.view(-1, 2).unbind(1)
        self.seq_lens[row] = length.int()

    def _upload(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """int64, on the cache's device, without waiting for it."""
        device = self.page_table.device
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class PagedCache(Pages):
    """Pages of keys and values, their owners, and the tables that attention reads. Host calls; none belongs inside a compiled function.

    Args:
        num_layers: layers, each with pages of its own; a page id means the same page in all of them.
        num_pages: pages of the pool, the null page 0 included, which is handed out to nobody.
        page_size: tokens a page holds.
        num_kv_heads, head_dim, v_head_dim: shape of one token's key `[Hkv, D]` and value `[Hkv, Dv]`; Dv defaults to D.
        max_requests: rows of the tables. max_pages_per_request: their width.
        dtype: of the pages; float16, bfloat16, float32, float64, or float8_e4m3fn, float8_e5m2, int8 (with scales given to the ops).
        device: where pages and tables lie.
        workspace_bytes: scratch for kernels that ask for one, zeroed here, carried by every batch; `attnops.explain(...)` knows the size.

    Attributes:
        k_pages, v_pages: a tuple of one `[num_pages, page_size, Hkv, D]` (`Dv`) tensor a layer, zero at first.
        page_table: int32 `[max_requests, max_pages_per_request]`, seq_lens: int32 `[max_requests]`, tokens. Row `row(request)`
            is the request's; unused entries are 0. All tensors are written in place and keep their addresses.

    A call that raises leaves the cache as it was. Raises InvalidInput, and where said OutOfPages, TooManyRequests, RequestTooLong,
    UnknownRequest (an id freed before or of another cache).
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
        dtype: torch.dtype,
        device: torch.device | str,
        workspace_bytes: int = 0,
    ) -> None:
        layers = count("num_layers", num_layers, 1)
        pages = count("num_pages", num_pages, 2, "pages, the null page included")
        size = count("page_size", page_size, 1, "tokens")
        heads = count("num_kv_heads", num_kv_heads, 1)
        k_dim = count("head_dim", head_dim, 1)
        v_dim = k_dim if v_head_dim is None else count("v_head_dim", v_head_dim, 1)
        rows = count("max_requests", max_requests, 1)
        width = count("max_pages_per_request", max_pages_per_request, 1)
        scratch = count("workspace_bytes", workspace_bytes, 0)
        if dtype not in (*FLOATS, *QUANTISED):
            raise InvalidInput("dtype", dtype, " | ".join(map(name, (*FLOATS, *QUANTISED))))
        with ordinary():
            # Zero and not empty: kernels multiply what lies past a request's end by 0, and 0 * NaN is NaN.
            shape = (pages, size, heads)
            self.k_pages = tuple(torch.zeros((*shape, k_dim), dtype=dtype, device=device) for _ in range(layers))
            self.v_pages = tuple(torch.zeros((*shape, v_dim), dtype=dtype, device=device) for _ in range(layers))
        super().__init__(
            (*self.k_pages, *self.v_pages), max_requests=rows, max_pages_per_request=width, limit=width * size,
            limited_by="max_pages_per_request * page_size", workspace_bytes=scratch,
        )  # fmt: skip

    def batch(self, requests: Sequence[int], new_tokens: int | Sequence[int] = 1) -> PagedBatch:
        """Append new_tokens[i] tokens (an int: as many to each) to requests[i], for all or none, and describe the step.

        The tensors are made once and serve every layer; they are new ones at each call.
        Raises InvalidInput (no request, one named twice, counts that do not match), UnknownRequest, RequestTooLong, OutOfPages.
        """
        return self._append(requests, new_tokens, lambda batch, *_: batch)


def _tell_compiler(tensors: tuple[Tensor, ...], dims: tuple[int, ...]) -> None:
    """These dims (page size, heads, head dims) are constants, and the tensors never move (so a CUDA graph writes them in place)."""
    # Imported late: it takes a second, and a process without a cache need not pay it.
    from torch._dynamo import mark_static, mark_static_address

    for tensor in tensors:
        mark_static(tensor, list(dims))
        mark_static_address(tensor)


def count(field: str, value: object, least: int, unit: str = "") -> int:
    """`value` as an int of at least `least`."""
    want = f"an int >= {least}{' (' + unit + ')' if unit else ''}"
    if isinstance(value, bool):
        raise InvalidInput(field, value, want)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInput(field, repr(value), want) from None
    if number < least:
        raise InvalidInput(field, number, want)
    return number
