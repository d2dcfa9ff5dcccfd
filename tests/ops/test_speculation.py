"""A round of speculation beside lists of Python: random texts and trees."""

import math
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


@pytest.mark.parametrize("seed", range(40))
def test_rows_get_the_way_up_to_their_end(seed):
    draw = random.Random(seed)
    rows, nodes, words, width = draw.randint(0, 5), draw.randint(1, 12), draw.randint(1, 3), 20
    drafts, target = (
        [[draw.randint(-1, words - 1) for _ in range(nodes)] for _ in range(rows)] for _ in "ab"
    )
    chain = seed % 4 == 0
    parents = [list(range(-1, nodes - 1)) if chain else tree(draw, nodes) for _ in range(rows)]
    eos = [draw.randint(0, 5) for _ in range(draw.choice((0, 1, 3)))]
    texts = [[draw.randint(0, 9) for _ in range(draw.randint(1, width))] for _ in range(rows)]
    most, unfinished = draw.randint(8, width + 2), [draw.randint(0, 2) for _ in texts]
    tokens = torch.tensor(padded(texts, width), dtype=I64).view(rows, width)
    seq_lens = torch.tensor([len(text) for text in texts], dtype=I32)
    stored, position, alive = (
        seq_lens.long() + 3,
        seq_lens.long() - 1,
        torch.tensor(unfinished, dtype=I64),
    )
    path, news = torch.zeros(rows, nodes, dtype=I32), torch.zeros(rows, nodes + 1, dtype=I64)
    ops.advance_rows(
        *(torch.tensor(x, dtype=I64).view(rows, nodes) for x in (drafts, target)),
        torch.tensor(eos, dtype=I64),
        torch.tensor([most]),
        None if chain else torch.tensor(parents, dtype=I32).view(rows, nodes),
        tokens=tokens,
        seq_lens=seq_lens,
        stored=stored,
        position=position,
        unfinished=alive,
        accepted=path,
        news=news,
    )
    ways, told = [], []
    for b, text in enumerate(texts):
        way = [] if not unfinished[b] else walked(drafts[b], target[b], parents[b])
        kept = 0
        while kept < len(way) and len(text) < min(most, width):
            text.append(target[b][way[kept]])
            kept += 1
            if text[-1] in eos:
                unfinished[b] = 0
                break
        if len(text) >= min(most, width):
            unfinished[b] = 0
        ways.append(way[:kept])
        told.append([kept, *text[len(text) - kept :]])
    assert tokens.tolist() == padded(texts, width)
    assert seq_lens.tolist() == [len(text) for text in texts]
    assert stored.tolist() == [len(text) + 3 for text in texts]
    assert position.tolist() == [len(text) - 1 for text in texts]
    assert alive.tolist() == unfinished
    assert path.tolist() == padded(ways, nodes) and news.tolist() == padded(told, nodes + 1)


def test_the_next_input_is_the_last_token_and_its_drafts():
    tokens, seq_lens = torch.tensor([[7, 4, 6], [5, 8, 0]]), torch.tensor([3, 2], dtype=I32)
    drafts, inputs, positions = (torch.full((2, 4), 99) for _ in range(3))
    offered = torch.full((2,), 99)
    found = torch.tensor([[2, -5, 12, 3, 1], [-1, -1, -1, 4, 4]])
    before = torch.tensor([8, 20]), torch.tensor([10, 30])
    written = {"drafts": drafts, "next_ids": inputs, "positions": positions, "offered": offered}
    ops.next_inputs(found, tokens, seq_lens, *before, words=9, **written)
    assert drafts.tolist() == [[6, 2, -5, 12], [8, -1, -1, -1]]
    assert inputs.tolist() == [[6, 2, 0, 8], [8, 0, 0, 0]]
    assert positions.tolist() == [[8, 9, 10, 10], [20, 21, 22, 23]]
    assert offered.tolist() == [2, 0]
    ops.next_inputs(found[:, :1], tokens, seq_lens, *before, words=9, **written)
    assert drafts.tolist() == [[6, 2, -1, -1], [8, -1, -1, -1]] and offered.tolist() == [1, 0]


def tried(tokens, target, draft, noise, parents):
    """(the accepted nodes, the next token) of rejection sampling."""
    path, p = [0], target[0]
    for child, x in enumerate(tokens):
        if child == 0 or parents[child] != path[-1] or not 0 <= x < len(p):
            continue
        if noise[child] * draft[child][x] < p[x]:
            path.append(child)
            p = target[child]
            continue
        left = [max(a - b, 0.0) for a, b in zip(p, draft[child], strict=True)]
        p = [a / sum(left) for a in left] if sum(left) else target[path[-1]]
    likely = [x for x, chance in enumerate(p) if chance > 0] or [0]
    reached = [x for x in likely if sum(p[: x + 1]) > noise[-1]]
    return path, (reached or likely[-1:])[0]


@pytest.mark.parametrize("seed", range(40))
def test_children_are_tried_in_order(seed):
    draw = random.Random(seed)
    rows, nodes, words = draw.randint(1, 5), draw.randint(1, 12), draw.randint(1, 4)
    torch.manual_seed(seed)
    share = draw.choice((0.3, 1.0))
    target, draft = (
        torch.randn(rows, nodes, words).softmax(2) * (torch.rand(rows, nodes, words) < share)
        for _ in "ab"
    )
    tokens = torch.randint(-1, words + 1, (rows, nodes))
    noise = torch.rand(rows, nodes + 1)
    parents = [tree(draw, nodes) for _ in range(rows)]
    given = tokens, target, draft, noise
    path, accepted, following = ops.accept_sampled(*given, torch.tensor(parents, dtype=I32))
    want = [tried(*row) for row in zip(*(x.tolist() for x in given), parents, strict=True)]
    assert path.tolist() == padded([way for way, _ in want], nodes)
    assert accepted.tolist() == [len(way) - 1 for way, _ in want]
    assert following.tolist() == [token for _, token in want]


WORDS = 5
ROWS = 100_000
SHAPES = {
    "one_child": [(0,), (1,)],
    "with_replacement": [(0, 0, 0), (1, 2, 3, 3)],
    "without_replacement": [(0, 0, 0), (1, 1, 2, 3)],
    "not_drawn": [(0, 0), (1, 1, 2)],
}
"""The parents of the nodes of two levels, by how siblings are drawn."""


def drawn_tree(kind, table):
    """(tokens, draft_probs, parents) of trees drawn from a table `[WORDS, WORDS]` of what follows
    each word, from the word 0 on."""
    tokens, probs = [torch.zeros(ROWS, dtype=I64)], [torch.zeros(ROWS, WORDS)]
    parents = [-1, *(p for level in SHAPES[kind] for p in level)]
    for node in range(1, len(parents)):
        parent = parents[node]
        q = table[tokens[parent]]
        before = [tokens[n] for n in range(1, node) if parents[n] == parent]
        if kind in ("without_replacement", "not_drawn"):
            for token in before:
                q = q.scatter(1, token[:, None], 0.0)
            q = q / q.sum(1, keepdim=True)
        token = q.argmax(1) if kind == "not_drawn" else torch.multinomial(q, 1)[:, 0]
        probs.append(
            torch.nn.functional.one_hot(token, WORDS).float() if kind == "not_drawn" else q
        )
        tokens.append(token)
    return torch.stack(tokens, 1), torch.stack(probs, 1), parents


def chance(counts, probs):
    """How likely counts as far off as these are, by Pearson's chi-square test."""
    want = probs * counts.sum()
    statistic = ((counts - want) ** 2 / want).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("op", ["accept", "accept_sampled"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_round_of_sampling_has_the_distribution_of_plain_sampling(kind, op):
    """Two words after the root, beside the exact probabilities, and those of another
    temperature."""
    torch.manual_seed(5)
    logits, others = torch.randn(2, WORDS, WORDS) * 1.5
    table = logits.softmax(1)
    tokens, draft_probs, parents = drawn_tree(kind, others.softmax(1))
    before = torch.tensor(parents, dtype=I32).expand(ROWS, -1)
    target_probs = table[tokens]
    if op == "accept":
        target = torch.multinomial(target_probs.flatten(0, 1), 1).view(tokens.shape)
        path, accepted, following = ops.accept(tokens, target, before)
    else:
        noise = torch.rand(ROWS, len(parents) + 1)
        path, accepted, following = ops.accept_sampled(
            tokens, target_probs, draft_probs, noise, before
        )
    assert 0.1 < accepted.float().mean() < 1.9
    at = path.long().clamp(min=0)
    words = torch.cat([tokens.gather(1, at)[:, 1:3], following[:, None]], 1)
    words.scatter_(1, accepted[:, None].long(), following[:, None])
    first = words[:, 0]
    later = torch.multinomial(table[first], 1)[:, 0]
    second = torch.where(accepted > 0, words[:, 1], later)
    counts = (first * WORDS + second).bincount(minlength=WORDS * WORDS).double()

    def exact(temperature):
        p = (logits.double() / temperature).softmax(1)
        return (p[0][:, None] * p).flatten()

    assert chance(counts, exact(1.0)) > 1e-3
    assert chance(counts, exact(1.05)) < 1e-6


def built(tokens, scores, parents, count):
    """(the candidates of a tree, the parents of its nodes, their depths)."""
    usable = [
        m
        for m, token in enumerate(tokens)
        if token >= 0 and -1 <= parents[m] < m and scores[m] > -math.inf
    ]
    best = sorted(sorted(usable, key=lambda m: (-scores[m], m))[: count - 1])
    node_of = {-1: 0} | {m: n for n, m in enumerate(best, 1)}
    before = [-1, *(node_of.get(parents[m], -1) for m in best)]
    depths = []
    for parent in before:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return best, before, depths


@pytest.mark.parametrize("seed", range(40))
def test_the_best_candidates_are_the_tree(seed):
    """Scores are any numbers in half of the draws: a child may be better than its parent."""
    draw = random.Random(seed)
    rows, most, count = draw.randint(1, 4), draw.randint(1, 30), draw.randint(1, 20)
    tokens = [[draw.randint(-1, 9) for _ in range(most)] for _ in range(rows)]
    parents = [[n - 1 for n in tree(draw, most + 1)[1:]] for _ in range(rows)]
    odd = math.nan, -math.inf
    scores = [
        [
            draw.choice(odd) if draw.random() < 0.1 else -draw.randint(0, 9) / 2.0
            for _ in range(most)
        ]
        for _ in range(rows)
    ]
    if seed % 2:
        for row, before in zip(scores, parents, strict=True):
            for m, parent in enumerate(before):
                row[m] += row[parent] if 0 <= parent < m else 0.0
    root = [draw.randint(0, 9) for _ in range(rows)]
    found = ops.build_tree(
        torch.tensor(tokens),
        torch.tensor(scores),
        torch.tensor(parents, dtype=I32),
        torch.tensor(root),
        num_nodes=count,
    )
    want = [built(*row, count) for row in zip(tokens, scores, parents, strict=True)]
    words = [
        [top, *(row[m] for m in best)]
        for top, row, (best, *_) in zip(root, tokens, want, strict=True)
    ]
    assert found[0].tolist() == padded(words, count)
    assert found[1].tolist() == padded([before for _, before, _ in want], count)
    assert found[2].tolist() == [[*depths, *[0] * (count - len(depths))] for *_, depths in want]
    assert found[3].tolist() == padded([[-1, *best] for best, *_ in want], count)


@pytest.mark.parametrize("seed", range(40))
def test_a_node_sees_the_text_its_ancestors_and_itself(seed):
    draw = random.Random(seed)
    rows, nodes, keys = draw.randint(0, 4), draw.randint(1, 9), draw.randint(0, 20)
    parents = [tree(draw, nodes) for _ in range(rows)]
    lengths = [draw.randint(0, keys + 2) for _ in range(rows)]
    mask = ops.tree_mask(
        torch.tensor(parents, dtype=I32).view(rows, nodes),
        torch.tensor(lengths, dtype=I32),
        num_keys=keys,
        window=(window := draw.choice((0, 0, 1, 3))),
    )
    want = []
    for before, length in zip(parents, lengths, strict=True):
        for node in range(nodes):
            line = [node]
            while 0 <= before[line[-1]] < line[-1]:
                line.append(before[line[-1]])
            first = length - nodes
            seen = [*range(first), *(first + each for each in line[::-1])]
            seen = seen[-window:] if window else seen
            want.append([key in seen for key in range(keys)])
    assert mask.tolist() == want
