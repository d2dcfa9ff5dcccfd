"""The files of .github fit their schemas, and the workflows call make's targets with the versions
that pyproject.toml promises."""

import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

pytest.importorskip(
    "check_jsonschema", reason="the extra dev brings check-jsonschema, which has the schemas"
)
from ruamel.yaml import YAML

FLOWS = {
    path.stem: YAML(typ="safe").load(path.read_text())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
STEPS = [
    step
    for flow in FLOWS.values()
    for job in flow["jobs"].values()
    for step in job.get("steps", [])
]
MAKES = sorted(
    {target for step in STEPS for target in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))}
)
PYPROJECT, MAKEFILE = ((ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))

SCHEMAS = {
    "vendor.github-workflows": [".github/workflows/*.yml"],
    "custom.github-workflows-require-timeout": [".github/workflows/*.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/[!c]*.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.dependabot": [".github/dependabot.yml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_what_their_schema_wants(schema):
    files = [str(path) for pattern in SCHEMAS[schema] for path in ROOT.glob(pattern)]
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", MAKES)
def test_make_has_the_target(target):
    assert re.search(rf"^{target}:.* ## ", MAKEFILE, re.MULTILINE)


def test_the_quick_list_names_files_of_every_room():
    listed = re.search(r"^QUICK := (.*?[^\\])$", MAKEFILE, re.MULTILINE | re.DOTALL)[1]
    files = listed.replace("\\", " ").split()
    assert all((ROOT / file).is_file() for file in files) and len(files) == len(set(files))
    assert {file.split("/")[1] for file in files} >= {"ops", "hf", "lowering", "graphs", "triton"}


def test_workflows_install_through_make_alone():
    assert {"lint", "pytest", "docs", "dist"} <= set(MAKES)
    assert not [
        run
        for step in STEPS
        if (run := step.get("run")) and not run.startswith(("make ", "printf "))
    ]


def test_the_matrix_is_what_pyproject_promises():
    matrix = FLOWS["ci"]["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT
    )
    for package in ["torch", "transformers"]:
        [oldest] = re.findall(rf'"{package}>=([\d.]+)"', PYPROJECT)
        assert matrix[package][0].startswith(f"{package}=={oldest}.*") and matrix[package][
            -1
        ].startswith(f"{package}>=")


TOOLS = {
    "build",
    "check-jsonschema",
    "codespell",
    "jinja2",
    "mypy",
    "proselint",
    "pyright",
    "ruff",
    "setuptools",
    "setuptools-scm",
    "twine",
    "wheel",
}
"""What no test's numbers depend on."""


def pins(file):
    lines = [
        line
        for line in (ROOT / ".ci" / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return dict(line.split("==") for line in lines)


def test_the_oldest_versions_that_run_are_the_bounds_of_pyproject():
    claims = [
        Requirement(text)
        for text in re.findall(
            r'"([A-Za-z][\w.-]*(?:\[\w+\])?>=[^"]+)"', PYPROJECT.split("[project.scripts]")[0]
        )
    ]
    kernels = {
        "flashinfer-python",
        "sglang-kernel",
        "flash-attn-4",
        "sgl-flash-mla",
        "fla-core",
    }  # they need a GPU
    tests = {"hypothesis", "expecttest", "onnxscript", "pytest", "pytest-timeout", "pytest-xdist"}
    docs = {"myst-parser", "pydata-sphinx-theme", "sphinx", "sphinx-copybutton", "sphinx-gallery"}
    oldest = pins("oldest.txt")
    for claim in claims:
        if claim.name not in TOOLS | kernels | tests | docs:
            [bound] = [spec.version for spec in claim.specifier if spec.operator == ">="]
            assert oldest[claim.name].removesuffix(".*") == bound, claim


def test_the_newest_versions_are_pinned_by_nothing():
    assert not pins("newest.txt")


def test_workflows_have_the_least_rights():
    """Rights beyond reading are a job's, every action is a commit, and no checkout leaves its token
    behind."""
    writes = {}
    for name, flow in FLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, name
        assert "concurrency" in flow, name
        for job, body in flow["jobs"].items():
            writes |= {f"{name}.{job}": set(body["permissions"])} if "permissions" in body else {}
    assert writes == {"docs.deploy": {"pages", "id-token"}, "release.publish": {"id-token"}}
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used and all(re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", action) for action in used)
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)
