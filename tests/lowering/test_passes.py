"""Each pass has a file of its name, and the package's docstring lists them in the order in which
they run."""

import re
from types import SimpleNamespace

from attnops import lowering
from attnops.hf.steps import graphed_steps as steps
from tests.helpers import ROOT


def test_passes_are_listed_in_the_order_of_a_step(monkeypatch):
    listed, ran = re.findall(r"(?m)^\d\. `(\w+)`", lowering.__doc__), []
    assert {*listed} == {file.stem for file in ROOT.glob("lowering/*_pass.py")}
    of_a_step = listed[:4]
    for name in of_a_step:
        monkeypatch.setattr(steps, name, lambda gm, name=name: ran.append(name) or ())
    for run in steps.passes_of(SimpleNamespace(pack=True), {}):
        run(None)
    assert ran == of_a_step
