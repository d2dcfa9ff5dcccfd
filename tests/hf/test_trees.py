"""Trees of drafts in generate(): one step verifies all branches, and the pages keep the accepted
one."""

import pytest
import torch

from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps.paths import Paths
from attnops.hf.steps.round_kinds import PROBE, News
from attnops.hf.steps.rounds import Depth
from tests.hf.decoding import ENDS
from tests.hf.drafting import Branches, Oracle, asked, patched, worth

FAMILIES = {"llama": 9, "qwen3_moe": 9, "mistral": 40, "gemma3": 9, "gpt_oss": 9, "deepseek_v3": 5}
"""And tokens that are drafted."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_plain_decoding(kind, small_pages):
    """Rows that accept different branches, behind left padding, and end. Windows whose pages are
    used in turn."""
    model, draft = tiny.model(kind), Branches(FAMILIES[kind])
    ours, handle = patched(model, draft)
    for rows, ends in ((1, None), (3, None), (4, ENDS)):
        given = {**asked(rows), "max_new_tokens": 60}
        if ends:
            given |= {"eos_token_id": ends, "pad_token_id": 0, "min_new_tokens": 7}
        draft.texts = want = model.generate(**given)
        assert torch.equal(ours.generate(**given), want)
        assert handle.took.decode == "breakable" and handle.took.loop == ""
        assert ends or worth(handle) > 2
    assert any(small_pages[-1].windows) == (kind in ("mistral", "gemma3", "gpt_oss"))


def test_nothing_moves_for_a_chain(monkeypatch):
    """A draft may propose either. Of so many tokens a chain would be verified by half."""
    model, tree, chain = tiny.model("llama"), Branches(40), Oracle(4)
    moved, run = [], Paths.run

    def noted(paths, nodes, move):
        moved.append(nodes)
        run(paths, nodes, move)

    monkeypatch.setattr(Paths, "run", noted)

    class Turns(Oracle):
        count = 0

        def propose(self, state):
            self.count += 1
            return (tree if self.count % 3 == 0 else chain).propose(state)

    draft = Turns(40)
    ours, handle = patched(model, draft)
    given = {**asked(3), "max_new_tokens": 30}
    tree.texts = chain.texts = want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want) and worth(handle) > 1.7
    # The last round proposes, too, and no step may follow.
    assert draft.count // 3 - 1 <= len(moved) <= draft.count // 3 and set(moved) == {41}


def test_windows_without_room_for_a_tree():
    model, draft = tiny.model("mistral"), Branches(40)
    ours, handle = patched(model, draft)
    given = {**asked(1), "max_new_tokens": 40}
    draft.texts = want = model.generate(**given)
    cache = handle.new_cache(1, 256, page_size=4)
    assert torch.equal(ours.generate(**given, **named(cache)), want)
    assert "sliding windows of the cache have no room" in handle.took.rounds


def test_a_tree_is_verified_whole_or_not_at_all():
    depth = Depth((1, 5, 8), rows=1)
    assert depth.next(7, tree=True) == 8 and depth.next(0, tree=True) == 1
    for _ in range(9):
        depth.note(8, News([1], [], 7, False), tree=True)
    found = [depth.next(7, tree=True) for _ in range(PROBE)]
    assert found == [1] * (PROBE - 1) + [8]
    for _ in range(20):
        depth.note(8, News([2], [], 7, False), tree=True)
    assert depth.next(7, tree=True) == 8
    # Chains are judged by themselves.
    assert depth.next(7) == 8
    # Five tokens of a row for a step that takes as long as seven.
    many = Depth((1, 33, 64), rows=32)
    many.note(64, News([5] * 32, [], 63, False), tree=True)
    assert many.next(63, tree=True) == 1
