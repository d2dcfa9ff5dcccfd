"""Which kernels have changed since a run: digests of their code, in results files and on pages."""

import ast
import json
import shutil
import subprocess
from functools import partial
from types import ModuleType

import pytest

from attnops.core.adapt import origin
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.problem import Target
from attnops.kernels.shared import parts
from attnops.measured import digests as code
from tests.helpers import ROOT, importable
from tests.measuring import results_file

GRADIENT = "attention_backward.triton"
DEVICE = "kernels/triton/device/gradient_parts.py"


@pytest.fixture
def copy(tmp_path):
    """The files that digests look at."""
    for folder in ("kernels", "ops", "core"):
        shutil.copytree(
            code.ROOT / folder,
            tmp_path / "attnops" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return tmp_path / "attnops"


def read_in(folder):
    return lambda path: (folder / path).read_text() if (folder / path).is_file() else None


def digests_of(folder):
    return code.digests(all_kernels(), read_in(folder))


def edit(path, change):
    """`change` the syntax tree of a file, and write it back."""
    tree = ast.parse(path.read_text())
    change(tree)
    path.write_text(ast.unparse(tree))


def nothing(tree):
    pass


def numbers(node):
    return [x for x in ast.walk(node) if isinstance(x, ast.Constant) and type(x.value) is int]


def functions(tree):
    """Those that have a constant."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and numbers(node)]


def another_constant(tree):
    numbers(functions(tree)[0])[0].value += 1


def without_docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0].value.value = "Other words."


def with_more(tree, name):
    """One more statement in a function of a file."""
    found = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.body.insert(1, ast.parse("more = 1").body[0])


def differing(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_every_kernel_of_ours_has_a_digest():
    found = code.digests(all_kernels())
    assert found.keys() == {
        f"{k.op}.{k.name}" for k in all_kernels() if origin(k.run).__module__.startswith("attnops.")
    }
    assert all(len(value) == code.LENGTH for value in found.values())
    assert code.digests([Kernel("theirs", "attention", lambda call: None)]) == {}


def test_a_constant_changes_the_kernels_of_its_file_alone(copy):
    before = digests_of(copy)
    edit(copy / DEVICE, another_constant)
    assert differing(before, digests_of(copy)) == {GRADIENT, "varlen_attention_backward.triton"}


REACHED = [
    ("kernels/torch/by_request.py", "_requests", "attention.reference"),
    ("kernels/shared/parts.py", "in_turns", "attention.aten_flash"),
    ("ops/experts/mxfp4_reference.py", "experts", "mxfp4_experts.reference"),
    ("core/tensors.py", "write_kv", "write_kv.scatter"),
    ("core/tensors.py", "compact", "attention.sdpa"),
    ("kernels/shared/tokens.py", "rows", "mla_attention.cutlass_mla"),
    ("kernels/triton/device/softmax.py", "closed", "paged_attention.triton"),
]


def one_more(tree):
    """A statement at the end of a file."""
    tree.body.append(ast.parse("MORE = 1").body[0])


def test_what_a_wrapped_or_bound_function_runs_counts(copy):
    before = digests_of(copy)
    for file, function, name in REACHED:
        edit(copy / file, partial(with_more, name=function))
        assert name in differing(before, before := digests_of(copy)), file
    edit(copy / "kernels/sgl/flashmla.py", one_more)
    assert "mla_attention.flashmla" in differing(before, digests_of(copy)), (
        "all of the module of a kernel's own function"
    )


def test_a_statement_that_a_kernel_does_not_reach_does_not_count(copy):
    before = digests_of(copy)
    edit(copy / "ops/attention/reference.py", partial(with_more, name="merge_state"))
    edit(copy / "kernels/triton/launch/data.py", partial(with_more, name="copy_kv"))
    edit(copy / "kernels/shared/tokens.py", one_more)
    assert differing(before, digests_of(copy)) == {"merge_state.reference", "copy_kv.triton"}


def test_a_function_of_shared_counts_with_the_file_that_registers_it():
    kernel, name = Kernel("theirs", "attention", parts.turns_of), "attnops.kernels.torch.toy"
    start = code.Name("attnops.kernels.shared.parts", "turns_of")
    assert code.starts_of(kernel) == {start}
    module = ModuleType("toy")
    module.run = parts.turns_of
    with importable({name: module}):
        assert code.starts_of(kernel) == {start, code.Name(name, code.WHOLE)}


@pytest.mark.parametrize("change", [nothing, without_docstrings])
def test_formatting_and_words_do_not_count(copy, change):
    before = digests_of(copy)
    for path in copy.rglob("*.py"):
        edit(
            path, change
        )  # `ast.unparse` writes no comment, and every statement on a line of its own
    assert digests_of(copy) == before


def test_moves_do_not_count(copy):
    before, path = digests_of(copy), copy / DEVICE
    tree = ast.parse(path.read_text())
    first, second, *_ = functions(tree)
    tree.body.remove(second)  # out of the file
    tree.body.remove(first)
    tree.body.append(first)  # and within it
    elsewhere = path.parent / "elsewhere.py"
    elsewhere.write_text("import triton\n" + ast.unparse(second))
    imported = f"from attnops.kernels.triton.device.elsewhere import {second.name}"
    path.write_text(f"{imported}\n{ast.unparse(tree)}")
    assert digests_of(copy) == before
    edit(elsewhere, another_constant)
    assert GRADIENT in differing(before, digests_of(copy)), (
        "and the file is looked at where it is now"
    )


# By name, in modules that are written here --------------------------------------------------------

LIMIT = "from attnops.kernels.other.more import limit\n"
USED = "def used(x):\n    return limit(x)\n"


def digest_of(own, **others):
    """Of a kernel of the module `own`, beside modules of `kernels/other`."""
    texts = {
        "kernels/own.py": own,
        **{f"kernels/other/{name}.py": text for name, text in others.items()},
    }
    return code.Tree(texts.get).digest([code.Name("attnops.kernels.own", code.WHOLE)])


FOLLOWED = {
    "a name": f"{LIMIT}RUN = limit",
    "two imports": "from attnops.kernels.other.used import used\nRUN = used",
    "passed on": "from attnops.kernels.other.used import limit\nRUN = limit",
    "inside a function": f"def run(x):\n    {LIMIT}    return limit(x)",
    "an alias": f"{LIMIT.strip()} as most\nRUN = most",
    "a module": "from attnops.kernels.other import more\nRUN = more.limit",
    "a module's alias": "import attnops.kernels.other.more as m\nRUN = m.limit",
    "a module's full name": (
        "import attnops.kernels.other.more\nRUN = attnops.kernels.other.more.limit"
    ),
    "a default": f"{LIMIT}def run(limit=limit):\n    pass",
    "a decorator": f"{LIMIT}@limit\ndef run(limit):\n    pass",
    "the first of a comprehension": f"{LIMIT}RUN = [limit for limit in limit]",
    "a name that a method has, too": (
        f"{LIMIT}class Run:\n    def a(limit): pass\n    def b(x): limit(x)"
    ),
    "either of two": f"try:\n    {LIMIT}except ImportError:\n    limit = None\nRUN = limit",
}
UNRESOLVED = {
    "a star": "from attnops.kernels.other.more import *\nRUN = limit",
    "a star of a module between": "from attnops.kernels.other.used import used\nRUN = used",
    "getattr": "from attnops.kernels.other import more\nRUN = getattr(more, NAME)",
    "an object": "from attnops.kernels.other import more as m\nRUN = [m]",
    "inside": "def run():\n    from attnops.kernels.other import more\n    return vars(more)",
    "a name that is not there": "from attnops.kernels.other.more import gone\nRUN = gone",
    "an attribute that is not there": "from attnops.kernels.other import more\nRUN = more.gone",
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_a_name_is_followed(how):
    def found(limit, other):
        return digest_of(
            FOLLOWED[how],
            more=f"def limit(x):\n    return {limit}\nOTHER = {other}",
            used=LIMIT + USED,
        )

    assert found(1, 1) != found(2, 1), "what it names counts"
    assert found(1, 1) == found(1, 2) or "full name" in how, "and nothing else of that module"


@pytest.mark.parametrize("how", UNRESOLVED)
def test_all_of_a_module_counts_where_a_name_cannot_be_followed(how):
    used = f"from attnops.kernels.other.more import *\n{USED}"
    one, other = (
        digest_of(UNRESOLVED[how], more=f"limit = 1\nOTHER = {value}", used=used)
        for value in (1, 2)
    )
    assert one != other


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ("limit = {}\nlimit['a'] = VALUE", True),
        ("limit = []\nlimit.append(VALUE)", True),
        ("limit = 1\nlimit += VALUE", True),
        ("limit = None\ndef set():\n    global limit\n    limit = VALUE", True),
        ("if VALUE:\n    limit = 1", True),
        ("def limit(x):\n    return other\nother = VALUE", True),
        ("def limit(x):\n    other = 1\n    return [other for _ in x]\nother = VALUE", False),
        ("def limit(x):\n    return [other for other in x]\nother = VALUE", False),
        ("def limit(other):\n    return lambda: other\nother = VALUE", False),
        ("def limit(x):\n    return x\nregister(limit, VALUE)", False),
        ("def limit(x):\n    return x\nfor one in (limit,):\n    register(one, VALUE)", False),
    ],
)
def test_which_statements_of_another_module_count(more, counts):
    one, other = (
        digest_of(f"{LIMIT}RUN = limit", more=more.replace("VALUE", value)) for value in ("1", "2")
    )
    assert (one != other) == counts


def test_aliases_do_not_count_and_what_they_name_does():
    same = [
        FOLLOWED[how] for how in ("a name", "an alias", "a module", "a module's alias", "passed on")
    ]
    assert len({digest_of(own, more="limit = 1", used=LIMIT) for own in same}) == 1
    assert digest_of("limit = 1\nRUN = limit") == digest_of(same[0], more="limit = 1"), (
        "nor does a move"
    )
    two = (
        "from attnops.kernels.other.{} import limit\nfrom attnops.kernels.other.{} import "
        "limit as most\nRUN = limit(most)"
    )
    one, other = (
        digest_of(two.format(*order), more="limit = 1", used="limit = 2")
        for order in (("more", "used"), ("used", "more"))
    )
    assert one != other, "two functions of one name in each other's place"


def test_the_kernels_of_a_machine():
    def names(*given):
        return {f"{k.op}.{k.name}" for k in code.candidates(*given)}

    there = ["triton==3.6.0", "sgl_kernel==0.4.3"]
    found = names(Target.parse("h100", ()), ("linear", "paged_attention"), there)
    assert {
        "linear.triton",
        "linear.aten",
        "paged_attention.fa3",
        "paged_attention.triton",
    } <= found
    assert not found & {
        "linear.reference",
        "paged_attention.flashinfer",
        "paged_attention.trtllm",
        "attention.sdpa",
    }
    assert "attention.cudnn" not in names(Target())


# Pages --------------------------------------------------------------------------------------------


@pytest.fixture
def changed(docs):
    return docs("changed")


@pytest.fixture
def results(docs):
    return docs("results")


RAN = {"cases": 3, "refused": 0, "wrong": 0, "worst_share_of_budget": 0.5}


def commit(root, name, data):
    return results_file(root, "h200", name, {"device": "NVIDIA H200", "target": "sm90", **data})


def test_a_page_says_which_kernels_have_changed(changed, results, copy, monkeypatch, tmp_path):
    kept = {name: changed.today()[name] for name in (GRADIENT, "attention.sdpa")}
    commit(tmp_path, "kernels", {"numerics": dict.fromkeys(kept, RAN), "code": kept})

    def says(*texts):
        page = results.results_full(tmp_path) + results.results_short(tmp_path)
        return all(text in page for text in texts)

    assert says("No kernel has changed since.", "| same |", "| 0 of 2 |")
    edit(copy / DEVICE, another_constant)
    after = digests_of(copy)
    monkeypatch.setattr(changed, "today", lambda: after)
    assert says(f"Changed since: `{GRADIENT}`.", "| same |", "| changed |", "| 1 of 2 |")
    assert results.compared(kept, tmp_path) == {
        GRADIENT: {"sm90": "changed"},
        "attention.sdpa": {"sm90": ""},
    }
    # Another run of the code of today: the kernel has met the machine as it is.
    commit(
        tmp_path,
        "kernels-again",
        {"numerics": {GRADIENT: RAN}, "code": {GRADIENT: after[GRADIENT]}},
    )
    assert results.compared(kept, tmp_path)[GRADIENT] == {"sm90": ""}


# Files without digests ----------------------------------------------------------------------------

GIT = (
    "git",
    "-c",
    "user.name=test",
    "-c",
    "user.email=test@localhost",
    "-c",
    "commit.gpgsign=false",
)


def git(root, *words):
    return subprocess.run(
        [*GIT, "-C", str(root), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_git_tells_of_files_without_digests(changed, copy, tmp_path):
    def committed():
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", "a state")
        return {
            "numerics": {GRADIENT: RAN, "attention.sdpa": RAN},
            "commit": git(tmp_path, "rev-parse", "HEAD"),
        }

    git(tmp_path, "init", "-q")
    data = committed()
    edit(copy / DEVICE, another_constant)
    told = changed.code_of(data, tmp_path)
    assert told == {name: changed.today()[name] for name in data["numerics"]}, (
        "of the commit, not of the tree"
    )
    path = commit(tmp_path, "kernels", data)
    text = path.read_text()
    assert changed.stamp(path, tmp_path) and not changed.stamp(path, tmp_path)
    assert json.loads(path.read_text()) == {**json.loads(text), "code": told}
    assert path.read_text().startswith(text[:-2])
    # A kernel whose code was in other files then.
    shutil.rmtree(copy / "kernels" / "torch")
    assert changed.since(committed(), "attention.sdpa", tmp_path) == "changed"


@pytest.mark.parametrize("program", ["git", "no-such-program"])
def test_without_history_it_is_unknown(changed, results, program, monkeypatch, tmp_path):
    inner = changed.subprocess.run
    monkeypatch.setattr(
        changed.subprocess, "run", lambda words, **more: inner([program, *words[1:]], **more)
    )
    path = commit(tmp_path, "kernels", {"numerics": {GRADIENT: RAN}, "commit": "f" * 40})
    page = results.results_full(tmp_path)
    assert "It is unknown which kernels have changed since." in page and "| unknown |" in page
    assert not changed.stamp(path, tmp_path)


def test_every_committed_file_has_digests(changed):
    """Or its page would differ where git has no history, as in a shallow clone: `make docs` writes
    them."""
    folder = ROOT / "benchmarks" / "results"
    files = [path for path in folder.glob("*/*.json") if path.parent.name != "local"]
    assert files and not [path for path in files if "code" not in json.loads(path.read_text())]
    assert changed.run_by(
        {"suite": "linear", "device": "NVIDIA H200", "packages": ["triton==3.6.0"]}
    ) == [kernels_of("linear")[name] for name in ("aten", "triton", "triton_aten")]
