"""Pages name the kernels and ops that there are: none that is gone, none that never was."""

import json
import re

import pytest

from attnops.core.kernel import kernel_names, kernels_of
from attnops.ops import OPS
from tests.helpers import ROOT
from tests.test_docs import PAGES, place

HISTORY = ("CHANGELOG.md",)
ARGUMENTS = {a.name for op in OPS.values() for a in op.spec.args}
SECTIONS = ("numerics", "numerics_at_size", "replay", "opcheck", "code")


def measured():
    """The names of kernels and ops in all files of results, old ones too."""
    found = set()
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        data = json.loads(path.read_text())
        found.update(
            part
            for section in SECTIONS
            for name in data.get(section, ())
            for part in name.split(".")
        )
        cases = data.get("cases")
        for case, figures in cases.items() if isinstance(cases, dict) else ():
            found |= {way.removeprefix("op.") for way in figures["gpu"] if way.startswith("op.")}
            found.add(case.partition(" ")[0])
    return {re.sub("(_bare|_unplanned)$", "", name) for name in found if "_" in name}


GONE = measured() - {*kernel_names(), *OPS, *ARGUMENTS}


def wrong(text):
    """Names in `text` that no kernel or op has, by where they stand."""
    # `direct.` is a vendor's function.
    found = [name for name in GONE if re.search(rf"(?<!direct\.)\b{name}\b", text)]
    own = {*kernel_names(), *re.findall(r"\bKernel\(\s*\"(\w+)\"", text)}  # a page may make one
    for op, name in re.findall(
        r"`(?:torch\.ops\.)?(?:attnops\.)?([a-z]\w+)\.([a-z]\w+)(?:\.run)?[`(]", text
    ):
        if op in OPS and name not in (*kernels_of(op), "default", "py") and name not in own:
            found.append(f"{op}.{name}")
    return found + [name for name in re.findall(r"kernel=\"(\w+)\"", text) if name not in own]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=place)
def test_pages_name_kernels_and_ops_that_there_are(page):
    assert wrong(page.read_text()) == []


def test_a_name_that_is_gone_is_found():
    assert {
        "flashinfer_merge",
        "sgl_merge",
        "pad_queries",
        "unpad_queries",
        "num_kv_splits",
    } <= GONE
    assert not GONE & {"page_table", "flashmla_bare", "flashmla", "write_kv"}
    assert wrong("| merge of 64 tokens | `op.sgl_merge` | 13.2 |") == ["sgl_merge"]
    assert wrong("| merge of 64 tokens | `direct.sgl_merge` | 6.5 |") == []
    assert (
        wrong("`torch.ops.attnops.attention.fa9.run(...)`, `attention.fa9` and `attention.fa3`")
        == ["attention.fa9"] * 2
    )
    assert wrong('attnops.attention(q, k, v, kernel="fa9")') == ["fa9"]
    assert wrong('Kernel("fa9", "attention", run)\nattnops.attention(q, k, v, kernel="fa9")') == []
