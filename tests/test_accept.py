"""Drafts in a cache: accepted tokens move together in all layers, the others leave."""

import dataclasses
import itertools
import random
from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnops.cache.batch import HostLengths
from attnops.core.errors import CacheError, InvalidInput, UnknownRequest
from attnops.ops import copy_kv
from tests.modules import padded, poisoned, refused
from tests.test_cache import made, make, unchanged

NEW = 7
"""The most tokens of a draft."""


def write(cache, step, tokens):
    """Token t is t in layer 0 and t + 0.5 in layer 1. In values it is the negative."""
    for layer, table in enumerate(cache.table_of):
        for sign, pages in zip((1, -1), cache.layers[layer], strict=False):
            rows = pages.view(pages.shape[0] * cache.page_size, -1)
            rows[step.of(table).slots] = sign * (torch.tensor(tokens)[:, None] + layer / 2)


def held(cache, request, layer):
    """A request's tokens as a kernel finds them, through its row of the tables; with a window the
    last ones."""
    row, table = cache.row(request), cache.table_of[layer]
    length, window = int(cache.seq_lens[row]), cache.windows[table]
    pages, size = cache.tables[table][row].tolist(), cache.page_size
    first = max(0, length - window + 1) if window else 0
    slots = [pages[t // size % len(pages)] * size + t % size for t in range(first, length)]
    keys, *values = (
        pages.view(pages.shape[0] * size, -1)[slots, -1] for pages in cache.layers[layer]
    )
    assert all(torch.equal(keys, -each) for each in values)
    return (keys - layer / 2).tolist()


class Walk:
    """Random calls of a cache, beside lists of what each request should hold. Pages without an
    owner hold NaN.

    pending: the last step of drafts, the drafts of each of its requests, and the requests that were
    changed since.
    """

    def __init__(self, cache, seed):
        self.cache, self.dice = poisoned(cache), random.Random(seed)
        self.names, self.lists = itertools.count(1), {}
        self.pending, self.accepted = None, 0
        self.verbs = [self.add, self.free, self.fork, self.truncate] + [self.draft] * 6

    def round(self):
        live = self.dice.choice([*self.lists]) if self.lists else None
        verb = self.dice.choice(self.verbs) if live else self.add
        try:
            for request in verb(live) or ():
                self.check(request)
        except CacheError:
            self.free(live)

    def poison(self):
        for layer, table in zip(self.cache.layers, self.cache.table_of, strict=True):
            free = self.cache._ledger.pools[table].free
            for pages in layer:
                pages[free] = float("nan")

    def check(self, request):
        tokens = self.lists[request]
        assert self.cache.length(request) == len(tokens)
        for layer in range(len(self.cache.layers)):
            found = held(self.cache, request, layer)
            assert found == tokens[len(tokens) - len(found) :]

    def touch(self, request):
        if self.pending:
            self.pending[2].add(request)

    def bring(self, requests, counts):
        """Tokens that the requests lack."""
        step = self.cache.batch(requests, counts)
        new = [[next(self.names) for _ in range(n)] for n in counts]
        write(self.cache, step, [*itertools.chain(*new)])
        for request, tokens in zip(requests, new, strict=True):
            self.touch(request)
            self.lists[request] = self.lists[request] + tokens
        return step, new

    def add(self, _):
        if len(self.lists) < 5:
            request = self.cache.alloc()
            self.lists[request] = []
            self.bring([request], [self.dice.randint(0, NEW)])
            return [request]

    def free(self, request):
        self.cache.free(request)
        self.touch(request)
        del self.lists[request]
        self.poison()

    def fork(self, request):
        child = self.cache.fork(request)
        self.touch(request)
        self.lists[child] = self.lists[request]
        return [child]

    def truncate(self, request):
        length = self.dice.randint(max(0, len(self.lists[request]) - 9), len(self.lists[request]))
        with suppress(InvalidInput):  # where a window needs tokens that are gone
            self.cache.truncate(request, length)
            self.touch(request)
            self.lists[request] = self.lists[request][:length]
            self.poison()
        return [request]

    def draft(self, _):
        """Or accept the last ones."""
        if self.pending:
            return self.accept()
        requests = self.dice.sample([*self.lists], self.dice.randint(1, min(3, len(self.lists))))
        step, new = self.bring(requests, [self.dice.randint(0, NEW) for _ in requests])
        self.pending = step, dict(zip(requests, new, strict=True)), set()
        return requests

    def accept(self):
        (step, drafts, touched), self.pending = self.pending, None
        paths = [self.path(len(tokens)) for tokens in drafts.values()]
        if touched & {*drafts}:
            with unchanged(self.cache, (InvalidInput, UnknownRequest)):
                self.cache.accept(step, paths)
            return None
        self.cache.accept(step, self.given(paths))
        self.accepted += sum(map(len, paths))
        for (request, tokens), path in zip(drafts.items(), paths, strict=True):
            before = self.lists[request][: len(self.lists[request]) - len(tokens)]
            self.lists[request] = before + [tokens[i] for i in path]
        self.poison()
        return self.lists

    def path(self, tokens):
        """Of a chain, or of a tree."""
        kept = self.dice.randint(0, tokens)
        chain = self.dice.random() < 0.3
        return list(range(kept)) if chain else sorted(self.dice.sample(range(tokens), kept))

    def given(self, paths):
        depth = max(map(len, paths)) + self.dice.randint(0, 2)
        dtype = self.dice.choice((None, torch.int32, torch.int64))
        if dtype is None:
            return paths
        return torch.tensor([row + [-1] * (depth - len(row)) for row in paths], dtype=dtype)


SIZES = {"num_pages": 40, "max_requests": 8, "max_pages_per_request": 30}
CACHES = {
    "pages_of_4": lambda: make(**SIZES),
    "pages_of_1": lambda: make(page_size=1, **SIZES | {"max_pages_per_request": 40}),
    "windows": lambda: make(page_size=3, windows=(0, 5), max_new_tokens=NEW, **SIZES),
    "latents": lambda: made("latents", num_tokens=100, max_tokens_per_request=60, max_requests=8),
}


@pytest.mark.parametrize("kind", CACHES)
def test_any_sequence_of_calls(kind):
    """20,000 rounds in all."""
    walk = Walk(CACHES[kind](), seed=len(kind))
    for _ in range(5000):
        walk.round()
    assert walk.accepted > 2000
    for request in [*walk.lists]:
        walk.check(request)
        walk.free(request)
    assert walk.cache.used_pages == 0


# By hand ------------------------------------------------------------------------------------------


def drafted(kind="pages_of_4", counts=(4, 2)):
    """A cache, its two requests of 2 tokens, and a step of drafts 1 to 4, and 11 and 12."""
    cache = CACHES[kind]()
    requests = cache.alloc(2), cache.alloc(2)
    step = cache.batch(requests, counts)
    write(cache, step, [*range(1, 1 + counts[0]), *range(11, 11 + counts[1])])
    return cache, requests, step


def tokens(cache, requests):
    """Of both requests from the third on, in all layers."""
    first, *others = (
        [held(cache, request, layer)[2:] for request in requests]
        for layer in range(len(cache.layers))
    )
    assert all(each == first for each in others)
    return first


@pytest.fixture
def copies(monkeypatch):
    """The keyword arguments of each `copy_kv`."""
    calls = []

    def call(*given, **more):
        calls.append(more)
        copy_kv(*given, **more)

    monkeypatch.setattr("attnops.cache.paged.copy_kv", call)
    return calls


@pytest.mark.parametrize(
    ("kind", "launches"), [("pages_of_4", 1), ("windows", 2), ("latents", 1)], ids=str
)
def test_all_layers_move_in_one_launch(kind, launches, copies):
    """One for each window. A request is a group; chains move nothing."""
    cache, _, step = drafted(kind)
    cache.accept(step, [[0, 2, 3], [1]])
    assert copies == [{"group": 3}] * launches
    cache.accept(cache.batch(cache.requests, 3), [[0, 1], []])
    assert len(copies) == launches


def test_numbers_on_a_device_stay_within_the_request():
    """What no new token of the request has moves nothing."""
    cache, requests, step = drafted()
    paths = torch.tensor([[1, 4, -7, 9], [1, 2, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    cache.compact(step, paths)
    assert tokens(cache, requests) == [[2, 2, 3, 4], [12, 12]]


def test_a_graph_compacts():
    """The host reads nothing, and a row that is padding has no tokens."""
    cache, requests, step = drafted()
    paths = torch.tensor([[1, 3], [-1, -1], [0, 1]], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache.compact(padded(step, 3), paths)
    cache.compact(padded(step, 3), paths)
    assert tokens(cache, requests) == [[2, 4, 3, 4], [11, 12]]
    idle = cache.batch([])
    cache.compact(idle, paths[:0])
    cache.accept(idle, [])


BAD = [
    ("paths: got 1 rows, want 2", [[0]]),
    ("paths: got 3, want 2 rows", 3),
    ("paths[0]: got [0, 4], want a list of rising numbers below 4", [[0, 4], []]),
    ("paths[0]: got [2, 2], want", [[2, 2], []]),
    ("paths[0]: got [0, -1, 2], want", [[0, -1, 2], []]),
    ("paths[1]: got [-2], want", [[0], [-2]]),
    ("paths[1]: got [True], want", [[0], [True]]),
    ("paths[0]: got [0.0], want", torch.zeros(2, 1)),
    ("paths[0]: got 0, want", torch.zeros(2, dtype=torch.int32)),
]


@pytest.mark.parametrize("row", BAD, ids=str)
def test_bad_paths(row):
    text, paths = row
    cache, _, step = drafted()
    with unchanged(cache, InvalidInput) as caught:
        cache.accept(step, paths)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("paths: got torch.float32, want", torch.zeros(2, 1)),
        ("paths: got (2,), want", torch.zeros(2, dtype=torch.int32)),
        ("paths: got (1, 1), want", torch.zeros(1, 1, dtype=torch.int32)),
    ],
)
def test_bad_paths_on_a_device(text, paths):
    cache, _, step = drafted()
    refused(lambda: cache.compact(step, paths), text)


def test_steps_that_are_not_the_last():
    cache, _, step = drafted()
    other = dataclasses.replace(step)
    text = "step: got a batch without its requests"
    refused(lambda: cache.accept(other, [[0], [0]]), text)
    other.known(HostLengths([6, 4], [4, 2]))
    refused(lambda: cache.accept(other, [[0], [0]]), text)
    cache.accept(step, [[0, 1, 2, 3], [0, 1]])
    refused(lambda: cache.accept(step, [[0], [0]]), "step: got a step before the last change")
