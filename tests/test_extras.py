"""The extras, and the hints of doctor, name versions that go with the torch that is installed, and
replace none."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from attnops.core.kernel import Package, all_kernels
from attnops.core.problem import Target
from attnops.kernels.sgl import sources, wheel
from tests.helpers import ROOT

NO_WHEEL = "a torch that sglang-kernel has wheels for (2.11, 2.13, 2.14), not"


@pytest.mark.parametrize(
    ("torch_version", "bounds", "text"),
    [
        ("2.11.0+cu130", (), "pip install --no-deps 'sglang-kernel>=0.4.2,<0.4.6.post1'"),
        ("2.11.0", ("0.4.3", ""), "pip install --no-deps 'sglang-kernel>=0.4.3,<0.4.6.post1'"),
        (
            "2.13.0+cpu",
            ("0.3.18", "0.4.7"),
            "pip install --no-deps 'sglang-kernel>=0.4.6.post1,<0.4.7'",
        ),
        ("2.14.0a0+git1", (), "pip install --no-deps 'sglang-kernel>=0.4.9'"),
        (
            "2.14.1",
            ("0.3.18", "0.4.7"),
            "another torch: its wheels for torch 2.14 start at 0.4.9, and this was dropped in "
            "0.4.7",
        ),
        ("2.12.0", (), f"{NO_WHEEL} 2.12"),
        ("2.15.0+cu132", (), f"{NO_WHEEL} 2.15"),
        ("unknown", (), f"{NO_WHEEL} unknown"),
    ],
)
def test_the_hint_goes_with_torch_and_the_bounds_of_the_op(torch_version, bounds, text):
    assert wheel.hint(torch_version, *bounds) == text


def test_every_kernel_of_the_wheel_gives_the_hint():
    kernels = [k for k in all_kernels() if any(p.module == "sgl_kernel" for p in k.packages)]
    assert len(kernels) > 5
    for kernel in kernels:
        [missing] = [
            r
            for r in kernel.absences(Target("cuda", 90, assume=()))
            if "sgl_kernel missing" in str(r.got)
        ]
        assert missing.want.startswith(
            ("pip install --no-deps 'sglang-kernel>=", "another torch", "a torch that")
        )


@pytest.mark.parametrize(
    ("version", "built", "torch_version", "loads"),
    [
        ("0.4.6", "2.11", "2.11.0+cu130", True),
        ("0.4.6", "2.11", "2.15.0+cu132", False),
        ("0.4.6.post1", "2.13", "2.11.0", False),
        ("0.4.6.post1", "2.13", "2.13.1", True),
        ("0.4.10", "2.14", "2.15.0", False),
        ("0.4.1", "before 2.11", "2.11.0", False),
        ("0.4.11", None, "2.15.0", True),  # not looked into: its own loader decides
    ],
)
def test_a_wheel_for_another_torch_is_refused_before_it_is_loaded(
    version, built, torch_version, loads, monkeypatch
):
    """Its library would end the first call with the loader's words."""
    monkeypatch.setattr(wheel, "library", lambda pattern: ROOT)
    monkeypatch.setattr(Package, "version", lambda self: version)
    monkeypatch.setattr(wheel.torch, "__version__", torch_version)
    assert wheel.built_for(version) == built
    refusal = wheel.lacks(Target("cuda", 90), "flash_ops.*")
    said = (
        f"package=sgl_kernel {version}, which torch {built} loads (wants "
        f"{wheel.hint(torch_version)})"
    )
    assert loads if refusal is None else str(refusal) == said
    assert (refusal is None) == loads
    assert wheel.lacks(Target("cuda", 90, assume=("sgl_kernel",)), "flash_ops.*") is None


def wanted_by_extras():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return [
        Requirement(line)
        for line in re.findall(r'"([a-z][^"]*)"', re.sub(r"^#.*$", "", section, flags=re.MULTILINE))
    ]


def test_no_extra_takes_a_wheel_that_loads_under_one_torch_alone():
    """No requirement can name the wheel for the torch that is there: a marker does not see torch's
    version."""
    names = {r.name for r in wanted_by_extras()}
    assert names.isdisjoint(wheel.DISTS)
    # Its ABI is stable.
    assert {"sgl-flash-mla"} <= names
    [flashmla] = [r for r in wanted_by_extras() if r.name == "sgl-flash-mla"]
    assert flashmla.specifier.contains("1.0.0") and sources.FLASH_MLA.has("1.0.0")


def test_the_table_of_the_docs_has_the_commands_of_doctor():
    text = (ROOT / "docs" / "faq.md").read_text()
    rows = re.findall(r"^\| (2\.\d+) \| (.+?) \| `(.+?)`.* \|$", text, re.MULTILINE)
    assert [minor for minor, _, _ in rows] == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    for minor, both, flashmla in rows:
        first = wheel.hint(f"{minor}.1", "0.4.3")
        assert both == (f"`{first}`" if minor in wheel.WHEELS else "no wheel")
        assert flashmla == sources.hint(f"{minor}.1")


def test_no_extra_pins_torch():
    """The packages of all extras that are installed here: each takes a range of torch, or pip would
    replace the one that is there."""
    wanted = wanted_by_extras()
    assert {"transformers", "triton", "typer", "sphinx", "ruff"} <= {r.name for r in wanted}
    pinned = set()
    for extra in wanted:
        try:
            needs = metadata.requires(extra.name) or []
        except metadata.PackageNotFoundError:
            continue
        if not extra.specifier.contains(metadata.version(extra.name), prereleases=True):
            continue  # installed by other means
        for need in map(Requirement, needs):
            if need.name == "torch" and (
                need.marker is None or need.marker.evaluate({"extra": ""})
            ):
                pinned |= {
                    f"{extra.name}: {need}"
                    for s in need.specifier
                    if s.operator in ("==", "===", "<", "<=", "~=")
                }
    assert not pinned
