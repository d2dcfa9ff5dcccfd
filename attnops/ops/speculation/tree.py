"""A tree of drafts: which candidates it holds, and which of its nodes see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.op import Op, define
from attnops.core.record import FLOAT32, INT32, KW_ONLY, Call, Result, arg, record
from attnops.core.select import active_policy
from attnops.ops.speculation import reference
from attnops.ops.speculation.record import ID, IDS, INT, TYPICAL


@record(
    "build_tree",
    Result("nodes", "B, num_nodes", ID),
    Result("node_parents", "B, num_nodes", INT),
    Result("depths", "B, num_nodes", INT),
    Result("candidates", "B, num_nodes", INT),
    least={"M": ">= 1 candidate"},
    problem={"tokens": "B * M"},
)
class BuildTree(Call):
    """The candidates of each row, all depths one after the other."""

    tokens: Tensor = arg("B, M", IDS)
    scores: Tensor = arg("B, M", FLOAT32)
    parents: Tensor = arg("B, M", INT32)
    root: Tensor = arg("B", IDS)
    _: KW_ONLY
    num_nodes: int = arg(least=1)


BUILD_TREE = define(
    Op(BuildTree, reference.build_tree, about="the best candidates as a tree", typical=TYPICAL)
)


def build_tree(
    tokens: Tensor, scores: Tensor, parents: Tensor, root: Tensor, *, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens int64, parents, depths, candidates int32, each `[B, N]`): the root and the N - 1 best
    candidates of a row as a tree, as the other ops of a round take it.

    Nodes are in the order of their candidates, so that parents come first. depths is 0 of the root;
    the position of a node is the root's and its depth. candidates says which candidate a node is,
    -1 of the root: the row of what the draft model gave for it. Where there are fewer candidates
    the last nodes are empty: token, parent and candidate -1, depth 0.

    EAGLE-2 (https://arxiv.org/abs/2406.16858) takes the k best tokens of each of the k best
    candidates of a depth for candidates of the next, and the sum of their log-probabilities for
    scores.

    Args:
        tokens: int64 `[B, M]`, the candidates of all depths. A negative token is no candidate. M is
            at least 1.
        scores: float32 `[B, M]`, no higher than that of the parent, which makes the best ones a
            tree. A candidate whose parent is not in the tree has the parent -1 there, which no way
            reaches. Of equal scores the first comes first; -inf and NaN are no candidates.
        parents: int32 `[B, M]`, the candidate before each one, which comes earlier; -1: the root.
            What names another is no candidate.
        root: int64 `[B]`, each row's last token.
        num_nodes: N, at least 1.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    out: tuple[Tensor, Tensor, Tensor, Tensor] = BUILD_TREE(
        BuildTree(tokens, scores, parents, root, num_nodes=num_nodes, policy=active_policy())
    )
    return out


def _mask_shape(call: Any) -> tuple[Any, ...]:
    return call.parents.shape[0] * call.parents.shape[1], call.num_keys


@record(
    "tree_mask",
    Result("", _mask_shape, torch.bool),
    least={"N": ">= 1 node"},
    problem={"tokens": "B * N", "context": "num_keys"},
)
class TreeMask(Call):
    """The tree of each row, and its keys with those of the nodes."""

    parents: Tensor = arg("B, N", INT32)
    seq_lens: Tensor = arg("B", INT32)
    _: KW_ONLY
    num_keys: int = arg(least=0, symbolic=True)
    window: int = arg(default=0, least=0, always=True)


TREE_MASK = define(
    Op(
        TreeMask,
        reference.tree_mask,
        about="the keys that a tree's nodes see",
        typical=({"dtype": INT, "kv_dtype": INT},),
    )
)


def tree_mask(parents: Tensor, seq_lens: Tensor, *, num_keys: int, window: int = 0) -> Tensor:
    """bool `[B * N, num_keys]`: the keys that each node of a tree sees, as `mask` of
    `paged_attention` wants it.

    The nodes are the last N keys of their row. A node sees all keys before them, its ancestors and
    itself. Rows of seq_lens N and as many keys give the trees alone, `[B, N, N]` after a view.

    Args:
        parents: int32 `[B, N]`, as in `accept`. A node whose parent is not in `[0, node)` has no
            ancestors. N is at least 1.
        seq_lens: int32 `[B]`, keys of each row, its nodes included.
        num_keys: columns of the mask: max_pages * page, or more.
        window: keys that a node sees at most, its own included; 0: all. They are counted along its
            way from the root, so that nodes of one depth see as far back. The window of
            `paged_attention` counts places, and would be too narrow for later branches.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    out: Tensor = TREE_MASK(
        TreeMask(parents, seq_lens, num_keys=num_keys, window=window, policy=active_policy())
    )
    return out
