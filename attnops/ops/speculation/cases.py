"""The cases of a round of speculation. Few words, so that texts repeat themselves and drafts are
accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.ops.case_data import I32, Given, Grid, Rows, Scene

TEXTS: Rows = {
    "plain": ((9, 4, 20, 13), 20, 3, 4),
    "one_word": ((9, 2, 1), 9, 3, 4, 1),
    "one_token": ((1, 0), 1, 1, 1),
    "longer_than_the_text": ((3, 5), 8, 32, 9),
    "many_words": ((40, 37), 40, 2, 3, 1000),
    "long": ((5000, 4100, 4097, 17), 5000, 5, 8, 4),
    "no_such_length": ((-3, 99), 12, 2, 3),
    "no_rows": ((), 5, 2, 3),
}


def _text(scene: Scene, lengths: Sequence[int], width: int, words: int = 3) -> Given:
    """lengths: of the rows' texts."""
    seq_lens = scene.source.ints(lengths)
    at = torch.arange(width, device=seq_lens.device)
    scene.free["tokens"] = at >= seq_lens[:, None]
    return {"tokens": _words(scene, words, len(lengths), width), "seq_lens": seq_lens}


def _words(scene: Scene, words: int, *shape: int, least: int = 0) -> Tensor:
    """int64, from `least` to below `words`."""
    made = torch.randint(least, words, shape, generator=scene.source.generator)
    return made.to(scene.source.device)


NODES: Rows = {
    "chain": (5, 6, "none"),
    "tree": (7, 16, "tree"),
    "wide": (3, 40, "tree", {"words": 12}),
    "chain_of_parents": (3, 6, "chain"),
    "one_word": (2, 9, "tree", {"words": 1}),
    "broken": (9, 13, "broken"),
    "one_node": (3, 1, "tree"),
    "no_rows": (0, 4, "tree"),
}


def _nodes(scene: Scene, rows: int, nodes: int, tree: str, words: int = 2) -> Given:
    """Some nodes are empty, and some targets are no token."""
    return {
        "tokens": _words(scene, words, rows, nodes, least=-1),
        "target": _words(scene, words, rows, nodes, least=-1),
        "parents": _parents(scene, rows, nodes, tree),
    }


def _parents(scene: Scene, rows: int, nodes: int, kind: str) -> Tensor | None:
    """kind: "none", a "chain", a "tree", a "wide" one of many siblings, or "broken": any numbers,
    of later nodes, too."""
    node = torch.arange(nodes, device=scene.source.device)
    before = (node - 1).expand(rows, nodes).to(I32)
    if kind == "none":
        return None
    if kind == "chain":
        return before.contiguous()
    share = torch.rand(rows, nodes, generator=scene.source.generator).to(node.device)
    if kind == "broken":
        return (share * (nodes + 6) - 3).floor().to(I32)
    if kind == "wide":
        share = share**4
    return (share * node).to(I32) - (node == 0).to(I32)


ROUNDS: Rows = {
    "chain": ((9, 4, 20, 17), 30, (25,), 8, "none", (1,)),
    "tree": ((9, 4, 5, 12, 7, 3), 20, (18,), 16, "tree", (2,), 3),
    "full": ((9, 12, 11, 10), 12, (12,), 6, "chain", (), 1),
    "past_the_most": ((14, 9, 8), 16, (9,), 4, "none", ()),
    "wider_than_the_text": ((5, 3, 0), 6, (40,), 5, "none", (), 1),
    "several_ends": ((3,) * 8, 40, (30,), 8, "none", (2, 7, 3), 5),
    "one_node": ((3, 8, 5), 9, (9,), 1, "none", (0,)),
    "broken": ((3,) * 9, 40, (30,), 13, "broken", ()),
    "no_rows": ((), 5, (9,), 4, "tree", (1,)),
}


def _round(
    scene: Scene, lengths: Sequence[int], width: int, nodes: int, tree: str, words: int = 2
) -> Given:
    """Some rows have ended."""
    scene.sizes |= {"B": len(lengths), "N": nodes}
    given = _nodes(scene, len(lengths), nodes, tree, words)
    counters = {name: _words(scene, 99, len(lengths)) for name in ("stored", "position")}
    return {
        "drafts": given["tokens"],
        "target": given["target"],
        "parents": given["parents"],
        **_text(scene, lengths, width),
        **counters,
        "unfinished": (~scene.source.chance(len(lengths), p=0.2)).long(),
    }


INPUTS: Rows = {
    "plain": ((9, 4, 20), 20, 7, 8),
    "fewer_drafts": ((3, 5), 9, 2, 8),
    "more_drafts": ((3, 5), 9, 9, 3),
    "no_drafts": ((3, 5), 9, 0, 4),
    "one_node": ((1, 7), 9, 3, 1),
    "no_rows": ((), 9, 3, 4),
}


def _drafted(scene: Scene, lengths: Sequence[int], width: int, count: int) -> Given:
    """Some drafts are no words of the model, which has 9."""
    rows = scene.sizes["B"] = len(lengths)
    return {
        **_text(scene, lengths, width, 9),
        "found": _words(scene, 12, rows, count, least=-2),
        "position": _words(scene, 9, rows),
        "last_position": _words(scene, 12, rows, least=6),
        "words": 9,
    }


SAMPLED: Rows = {
    **{name: (*row, {"words": 4}) for name, row in NODES.items() if name != "wide"},
    "siblings": (6, 24, "wide", {"words": 5}),
    "no_probabilities": (7, 16, "wide", {"words": 4, "blank": True}),
    "large_vocabulary": (3, 6, "wide", {"words": 5000}),
    "blank_end": (6, 6, "wide", {"words": 4097, "blank": True}),
}


def _sampled(
    scene: Scene, rows: int, nodes: int, tree: str, words: int, blank: bool = False
) -> Given:
    """blank: some distributions are 0 at most tokens, or at all."""
    probs = scene.source.normal(2, rows, nodes, words, spread=2.0).softmax(-1)
    if blank:
        probs = probs * scene.source.chance(2, rows, nodes, words, p=0.3)
    noise = torch.rand(rows, nodes + 1, generator=scene.source.generator)
    return {
        "tokens": _words(scene, words + 1, rows, nodes, least=-1),
        "target_probs": probs[0],
        "draft_probs": probs[1],
        "noise": noise.to(scene.source.device),
        "parents": _parents(scene, rows, nodes, tree),
    }


TREES: Rows = {
    "plain": (3, 20, 8),
    "few_candidates": (4, 5, 9),
    "one_candidate": (2, 1, 2),
    "root_alone": (3, 4, 1),
    "many": (2, 130, 64),
    "all": (3, 12, 13),
    "ties": (4, 30, 12, {"ties": True}),
    "broken": (5, 20, 9, {"tree": "broken"}),
    "no_rows": (0, 6, 3),
}


def _candidates(
    scene: Scene, rows: int, count: int, tree: str = "tree", ties: bool = False
) -> Given:
    """Some are no candidates. Scores of a broken tree are above those of the parents, too."""
    parents = _parents(scene, rows, count + 1, tree)
    assert parents is not None
    parents = parents[:, 1:] - 1  # node 0 is the root, which is no candidate
    scores = -scene.source.normal(rows, count).abs()
    scores = scores.round() if ties else scores
    if tree != "broken":
        for at in range(count):
            before = parents[:, at : at + 1].long()
            added = scores.gather(1, before.clamp(min=0))[:, 0]
            scores[:, at] += torch.where(before[:, 0] >= 0, added, 0.0)
    return {
        "tokens": _words(scene, 9, rows, count, least=-1),
        "scores": scores.masked_fill(scene.source.chance(rows, count, p=0.1), float("nan")),
        "parents": parents,
        "root": _words(scene, 9, rows),
    }


MASKS: Rows = {
    "plain": ((9, 20, 7), 7, 24, "tree"),
    "tree_alone": ((6, 6), 6, 6, "wide"),
    "one_node": ((4, 1), 1, 9, "chain"),
    "short_rows": ((0, 3, -2, 40), 5, 12, "tree"),
    "many": ((2100, 64), 64, 2304, "wide"),
    "window": ((9, 20, 7), 7, 24, "tree", {"window": 4}),
    "broken": ((14, 20, 9), 9, 20, "broken"),
    "no_keys": ((3, 4), 3, 0, "tree"),
    "no_rows": ((), 3, 8, "tree"),
}


def _seen(scene: Scene, lengths: Sequence[int], nodes: int, tree: str) -> Given:
    return {
        "parents": _parents(scene, len(lengths), nodes, tree),
        "seq_lens": scene.source.ints(lengths),
    }


CASES = {
    "lookup_drafts": Grid("lengths width max_ngram num_drafts words", TEXTS, _text),
    "accept": Grid("rows nodes tree words", NODES, _nodes),
    "advance_rows": Grid("lengths width most nodes tree eos words", ROUNDS, _round),
    "next_inputs": Grid("lengths width count N", INPUTS, _drafted),
    "accept_sampled": Grid("rows nodes tree words blank", SAMPLED, _sampled),
    "build_tree": Grid("rows count num_nodes tree ties", TREES, _candidates),
    "tree_mask": Grid("lengths nodes num_keys tree window", MASKS, _seen),
}
