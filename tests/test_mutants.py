"""The committed mutants fit the tree: each text that one changes stands once, and its tests are
there."""

from collections import Counter

import pytest

pytest.importorskip(
    "tomllib", reason="the lists of mutants are read with tomllib, which Python has from 3.11 on"
)

from tests.mutants.run import ROOT, read_all

MUTANTS = read_all()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.area}-{m.now[:40]}" for m in MUTANTS])
def test_a_mutant_changes_a_text_that_stands_once(mutant):
    assert mutant.problem(ROOT) is None
    assert mutant.now != mutant.was


def test_no_mutant_is_listed_twice():
    changes = Counter((m.file, m.was, m.now) for m in MUTANTS)
    assert max(changes.values()) == 1
