"""A round of speculation beside lists of Python: random texts and trees."""

import random

import pytest
import torch

from attnops import ops
from attnops.ops.case_data import I32, I64


def looked_up(text, max_ngram, count):
    """What followed the last tokens before."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for begin in reversed(range(len(text) - n)):
            if text[begin : begin + n] == text[-n:]:
                return text[begin + n :][:count]
    return []


def padded(rows, width):
    return [[*row, *[-1] * (width - len(row))] for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_what_followed_the_last_tokens(seed):
    draw = random.Random(seed)
    width, max_ngram, count = (draw.randint(1, most) for most in (30, 5, 6))
    texts = [
        [draw.randrange(draw.randint(1, 4)) for _ in range(draw.randint(0, width))]
        for _ in range(draw.randint(0, 6))
    ]
    tokens = torch.full((len(texts), width), 1)  # what is not written could be a match
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=I32)
    drafts, counts = ops.lookup_drafts(tokens, lengths, max_ngram=max_ngram, num_drafts=count)
    want = [looked_up(text, max_ngram, count) for text in texts]
    assert counts.tolist() == [len(row) for row in want]
    assert drafts.tolist() == padded(want, count)


def test_of_matches_of_one_length_the_last_wins():
    """transformers takes the first of them."""
    text = torch.tensor([[7, 1, 7, 2, 5, 7]])
    drafts, counts = ops.lookup_drafts(
        text, torch.tensor([6], dtype=I32), max_ngram=3, num_drafts=2
    )
    assert drafts.tolist() == [[2, 5]] and counts.tolist() == [2]


def walked(tokens, target, parents):
    """The accepted nodes, from the root."""
    path = [0]
    while children := [
        c
        for c in range(path[-1] + 1, len(tokens))
        if parents[c] == path[-1] and tokens[c] == target[path[-1]] and tokens[c] >= 0
    ]:
        path.append(children[0])
    return path


def tree(draw, nodes):
    """Parents: of a tree, or any numbers."""
    broken = draw.random() < 0.3
    return [
        draw.randint(-3, nodes + 2) if broken else draw.randint(-1 if not n else 0, max(n - 1, -1))
        for n in range(nodes)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_way_goes_where_the_target_model_goes(seed):
    draw = random.Random(seed)
    rows, nodes, words = draw.randint(0, 5), draw.randint(1, 20), draw.randint(1, 3)
    tokens, target = (
        [[draw.randint(-1, words - 1) for _ in range(nodes)] for _ in range(rows)] for _ in "ab"
    )
    chain = seed % 4 == 0
    parents = [list(range(-1, nodes - 1)) if chain else tree(draw, nodes) for _ in range(rows)]
    given = [torch.tensor(x, dtype=I64).view(rows, nodes) for x in (tokens, target)]
    path, accepted, following = ops.accept(
        *given, None if chain else torch.tensor(parents, dtype=I32).view(rows, nodes)
    )
    want = [walked(*row) for row in zip(tokens, target, parents, strict=True)]
    assert path.tolist() == padded(want, nodes)
    assert accepted.tolist() == [len(way) - 1 for way in want]
    assert following.tolist() == [row[way[-1]] for row, way in zip(target, want, strict=True)]
