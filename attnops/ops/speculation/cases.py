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


SAMPLED: Rows = {
    **{name: (*row, {"words": 4}) for name, row in NODES.items() if name != "wide"},
    "siblings": (6, 24, "wide", {"words": 5}),
    "no_probabilities": (7, 16, "wide", {"words": 4, "blank": True}),
    "large_vocabulary": (3, 6, "wide", {"words": 5000}),
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


CASES = {
    "lookup_drafts": Grid("lengths width max_ngram num_drafts words", TEXTS, _text),
    "accept": Grid("rows nodes tree words", NODES, _nodes),
    "accept_sampled": Grid("rows nodes tree words blank", SAMPLED, _sampled),
}
