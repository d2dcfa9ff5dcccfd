"""FlashMLA's kernels over the second wheel, and which wheel is taken.

The grid is that of test_contract.py, over stand-ins with the second wheel's ops.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnops.cli import doctor
from attnops.core import needs
from attnops.core.kernel import Package, kernels_of
from attnops.core.problem import Target, pretend
from attnops.kernels.sgl import sources, wheel
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Source, make_call
from tests.checks import right
from tests.standins import flash_mla_legacy as standin, sgl_kernel_mla

SGL, FLASH = "sgl_kernel", "flash_mla"
UNKNOWN = wheel.UNKNOWN
"""A wheel whose version does not tell its torch: loading it does."""
SM90 = Target("cuda", 90, assume=(FLASH,))
OWN = (
    ("mla_attention", "flashmla"),
    ("mla_attention", "flashmla_fp8"),
    ("sparse_mla_attention", "flashmla"),
)
GRID = [
    pytest.param(kernels_of(op)[name], case, id=f"{op}-{name}-{case.label}")
    for op, name in OWN
    for case in CASES[op]
    if case.label.startswith("deepseek")
]


@pytest.fixture(autouse=True)
def records():
    for each in (standin, sgl_kernel_mla):
        each.CALLS.clear()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kernel", "case"), GRID)
def test_kernel(kernel, case):
    with pretend(SM90):
        refused = kernel.refusals(case.call().problem)
        if refused:
            pytest.skip("; ".join(map(str, refused)))
        right(kernel, case.call())
    assert not sgl_kernel_mla.CALLS, "an op of the first wheel"


@pytest.mark.parametrize("packed", [False, True])
def test_the_lse_of_either_wheel(packed):
    """A prefill's is to base 2 in the first one, and natural in the second."""
    f = replace(DEEPSEEK, lse=True)
    kernel = kernels_of("sparse_mla_attention")["flashmla"]
    found = []
    for assumed in (SGL, FLASH):
        call = make_call(
            "sparse_mla_attention", Source(0), (128, 3), 128, (4, 64), f, packed=packed
        )
        with pretend(replace(SM90, assume=(assumed,))):
            right(kernel, call)
            kernel.run(call.record)
        found.append(call.arguments["lse"])
    torch.testing.assert_close(*found)
    bases = [each.lse_base for each in sources.SOURCES]
    assert bases == [2.0, math.e]


@pytest.mark.parametrize(
    ("assume", "want"),
    [((SGL,), SGL), ((FLASH,), FLASH), ((FLASH, SGL), SGL), ((), None)],
    ids=["first", "second", "both", "none"],
)
def test_the_first_that_is_there(assume, want):
    with pretend(Target("cuda", 90, assume=assume)):
        absent = kernels_of("mla_attention")["flashmla"].absences(Target("cuda", 90, assume))
        if want is None:
            said = "package=sgl_kernel missing, flash_mla missing (wants "
            assert str(absent[0]).startswith(said)
            with pytest.raises(OSError, match=r"sgl_kernel missing.*flash_mla missing"):
                sources.source()
            return
        assert not absent and sources.source().package.module == want


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """install(module, version) puts a wheel on the path. loads: the modules whose library loads."""
    loads: set[str] = set()

    def load(path):
        if not any(f"/{module}/" in path for module in loads):
            raise OSError("Could not load this library") from OSError("undefined symbol: _ZN3c10")

    def install(module, version):
        folder = tmp_path / module
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('a probe imports nothing')")
        (folder / ("_C_legacy.abi3.so" if module == FLASH else "flashmla_ops.abi3.so")).touch()
        dist = {FLASH: "sgl-flash-mla", SGL: "sglang-kernel"}[module]
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")

    def forget():
        for cached in (needs._installed, needs._version, sources.unfit, sources._found):
            cached.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", load)
    forget()
    yield SimpleNamespace(install=install, loads=loads, forget=forget)
    monkeypatch.undo()
    forget()


def used():
    """What doctor says of the kernel on this machine: its packages, and why it is absent."""
    kernel = kernels_of("mla_attention")["flashmla"]
    return kernel.versions(), [str(refusal) for refusal in kernel.absences(Target())]


def test_whichever_loads(installed):
    """A wheel of sglang-kernel is there and does not load."""
    installed.install(SGL, UNKNOWN)
    installed.install(FLASH, "1.0.0")
    installed.loads.add(FLASH)
    assert used() == (("flash_mla==1.0.0",), [])
    assert sources.source().namespace == "flash_mla_legacy"


def test_the_first_where_both_load(installed):
    installed.install(SGL, UNKNOWN)
    installed.install(FLASH, "1.0.0")
    installed.loads |= {SGL, FLASH}
    assert used() == ((f"sgl_kernel=={UNKNOWN}",), [])
    assert sources.source().namespace == "sgl_kernel"


def test_a_wheel_for_another_torch_is_not_loaded(installed, monkeypatch):
    """Its library may load and end the process at a call: its version tells, as for fa3."""
    monkeypatch.setattr(wheel.torch, "__version__", "2.15.0+cu132")
    installed.install(SGL, "0.4.10")
    installed.loads |= {SGL, FLASH}
    _, [why] = used()
    assert why.startswith("package=sgl_kernel 0.4.10, which torch 2.14 loads, flash_mla missing (")
    [fa3] = [str(refusal) for refusal in kernels_of("mla_attention")["fa3"].absences(Target())]
    assert "sgl_kernel" in fa3
    installed.install(FLASH, "1.0.0")
    installed.forget()
    assert used() == (("flash_mla==1.0.0",), [])


def test_neither_loads(installed):
    """The loader's reasons, in the refusal and not at the first call."""
    installed.install(SGL, UNKNOWN)
    installed.install(FLASH, "1.0.0")
    versions, [why] = used()
    assert versions == (f"sgl_kernel=={UNKNOWN}",)
    broken = "does not load (OSError: undefined symbol: _ZN3c10)"
    first, second = "sgl_kernel whose flashmla_ops.abi3.so", "flash_mla whose _C_legacy.abi3.so"
    assert why.startswith(f"package={first} {broken}, {second} {broken} (wants ")
    rows = {(k["op"], k["kernel"]): k for k in doctor.examine()["kernels"]}
    found = rows["mla_attention", "flashmla"]
    assert not found["usable"] and broken in found["reasons"][0]["got"]


def test_the_package_of_flashmlas_own_project(installed):
    """It has the second wheel's name to import and none of its kernels for SM90."""
    installed.install(FLASH, "1.0.0")
    path = wheel.library(sources.LEGACY, FLASH)
    assert path is not None
    path.unlink()
    _, [why] = used()
    assert "flash_mla without _C_legacy.*" in why


@pytest.mark.parametrize(
    ("torch_version", "command"),
    [
        ("2.11.0+cu130", "pip install --no-deps 'sgl-flash-mla>=1.0'"),
        ("2.13.0", "pip install --no-deps 'sgl-flash-mla>=1.0'"),
        ("2.14.0", "pip install --no-deps 'sgl-flash-mla>=1.0'"),
        ("2.14.1", "pip install 'sgl-flash-mla>=1.0'"),
        ("2.15.0+cu132", "pip install 'sgl-flash-mla>=1.0'"),
    ],
)
def test_the_command_leaves_torch_as_it_is(torch_version, command):
    """The metadata of the wheel ask for torch 2.14.1, and older ones load it."""
    assert sources.hint(torch_version) == command


def test_doctor_offers_it_where_no_wheel_of_the_other_fits(monkeypatch):
    """Under torch 2.15 no command installs FlashAttention-3, and one installs FlashMLA."""

    def under_2_15(kernel):
        [package] = kernel.packages
        install = wheel.hint("2.15.0", package.at_least, package.below)
        return replace(kernel, packages=(replace(package, install=install),))

    def absent(self, target):
        return self._not_there() if target.assume is None else None

    names = ("fa3", "flashmla", "flashmla_fp8")
    kernels = [under_2_15(kernels_of("mla_attention")[name]) for name in names]
    monkeypatch.setattr(doctor, "all_kernels", lambda: kernels)
    monkeypatch.setattr(Package, "absent", absent)
    found = doctor.best_install(Target("cuda", 90))
    assert found is not None
    assert found["command"].endswith("'sgl-flash-mla>=1.0'")
    assert found["kernels"] == ["mla_attention.flashmla", "mla_attention.flashmla_fp8"]
