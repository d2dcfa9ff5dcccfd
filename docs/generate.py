"""Writes the generated parts of README.md and docs/*.md: tables of kernels, ops, errors and
results, and what commands print. The pictures of docs/plots are drawn from the same results. A
results file without digests of the code that it measured is given them first, where git has its
commit (docs/changed.py).

    python docs/generate.py            write what is stale
    python docs/generate.py --check    write nothing; exit 1 and name what is stale

A generated part is between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; the text around it is
written by hand.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import attnops
import attnops.ops
from attnops.cli.features import TARGETS, Support, columns, ops_of_kernels, support
from attnops.core.arguments import REQUIRED, Arg
from attnops.core.errors import AttnopsError
from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.record import name as dtype_name
from attnops.measured.store import HARDWARE
from attnops.ops import OPS, Op

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from census import census_full  # noqa: E402, a file of this folder
from changed import CHANGED, SAME, UNKNOWN, stamp_all  # noqa: E402
from choices import choices_full, decided, kinds  # noqa: E402
from linears import linears_full  # noqa: E402
from performance import (  # noqa: E402
    costs,
    performance_full,
    performance_short,
    picture,
    pictures_full,
    stale_plots,
)
from results import (  # noqa: E402
    compared,
    devices,
    hardware,
    hardware_text,
    renewed,
    results_full,
    results_short,
    table,
)

README_EXPLAIN = ("llama-3-8b-shape", "--target", "h200", "--cache", "hf", "--phase", "decode")
EXPLAIN_LINES = 8


def where(targets: tuple[str, ...], of: tuple[str, ...]) -> str:
    """A cell: `yes` for every target the kernel runs on, `-` for none, else their names."""
    return "-" if not targets else "yes" if targets == of else ", ".join(targets)


def supports(op: str) -> list[Support]:
    return [support(kernel) for kernel in kernels_of(op).values()]


@cache
def by_results() -> dict[str, dict[str, str]]:
    """What the results tell of every kernel."""
    return compared(f"{kernel.op}.{kernel.name}" for kernel in all_kernels())


def ran(found: Support) -> dict[str, str]:
    """The targets on which the kernel was compared with its reference: a CPU by `make test`, a GPU
    by committed results, each with what became of the code that ran there."""
    name = f"{found.kernel.op}.{found.kernel.name}"
    return {**({"cpu": SAME} if "cpu" in found.runs else {}), **by_results()[name]}


SINCE = {SAME: "", CHANGED: " (changed since)", UNKNOWN: " (unknown whether changed since)"}
MARKS = {SAME: "", CHANGED: "\\*", UNKNOWN: "?"}
MARKED = {
    CHANGED: "\\*: its code has changed since it ran on a GPU",
    UNKNOWN: "?: unknown whether its code has changed since",
}


def met(found: Support) -> str:
    """`cpu, sm90 (changed since)`."""
    return (
        ", ".join(f"{target}{SINCE[state]}" for target, state in ran(found).items())
        or "**never run on hardware**"
    )


def packages(found: Support) -> str:
    return ", ".join(f"{p.module} {p.versions()}".strip() for p in found.kernel.packages) or "none"


def kernels_full() -> str:
    parts, plain = [], []
    for op in ops_of_kernels():
        features = [f.name for f in columns(op)]
        if not features:
            kernels = "; ".join(
                f"`{s.kernel.name}`: {', '.join(s.runs)} (has run on {met(s)})"
                for s in supports(op)
            )
            plain.append([f"`{op}`", OPS[op].about, kernels])
            continue
        head = ["kernel", *TARGETS, "has run on", *features, "packages", "about"]
        rows = []
        for s in supports(op):
            machine = ["yes" if t in s.runs else "-" for t in TARGETS]
            machine.append(met(s))
            rows.append(
                [
                    f"`{s.kernel.name}`",
                    *machine,
                    *(where(s.takes[f], s.runs) for f in features),
                    packages(s),
                    s.kernel.about,
                ]
            )
        parts.append(f"## {op}\n\n{capitalised(OPS[op].about)}\n\n{table(head, rows)}")
    parts.append(f"## The other ops\n\n{table(['op', 'what', 'kernels'], plain)}")
    return "\n\n".join(parts)


MACHINES = {
    "cpu": "CPU",
    "sm80": "A100 (sm80)",
    "sm90": "H100, H200 (sm90)",
    "sm100": "B200 (sm100)",
}


OWN = ("torch", "triton")
"""Packages that come with torch: their rows are first."""


def backends() -> str:
    """One row of README a package and answer of its kernels of attention: did they run there, or
    never."""
    answers: dict[tuple[str, str], dict[str, set[bool]]] = {}
    since: dict[str, str] = {}
    for op in ops_of_kernels():
        for s in supports(op) if "attention" in op and not op.startswith("plan_") else ():
            package = (
                "` or `".join(each.module for each in s.kernel.packages[0].each)
                if s.kernel.packages
                else "torch"
            )
            for target in s.runs:
                answers.setdefault((package, s.kernel.name), {}).setdefault(target, set()).add(
                    target in ran(s)
                )
            states = (since.get(s.kernel.name, SAME), *ran(s).values())
            since[s.kernel.name] = next(
                state for state in (UNKNOWN, CHANGED, SAME) if state in states
            )
    words = {(): "-", (True,): "ran", (False,): "**never run**", (False, True): "**ran in part**"}
    rows: dict[tuple[str, ...], list[str]] = {}
    for (package, name), found in answers.items():
        cells = (words[tuple(sorted(found.get(target, ())))] for target in TARGETS)
        rows.setdefault((package, *cells), []).append(f"`{name}`{MARKS[since[name]]}")
    lines = [
        [f"`{package}`", ", ".join(names), *found]
        for (package, *found), names in sorted(
            rows.items(), key=lambda row: (row[0][0] not in OWN, row)
        )
    ]
    return (
        f"{table(['package', 'kernels', *(MACHINES[target] for target in TARGETS)], lines)}"
        f"\n\nRan on: {', '.join(devices())}, and a CPU."
    ) + "".join(f" {MARKED[state]}." for state in MARKED if state in since.values())


def capitalised(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def ops_full() -> str:
    return "\n\n".join(_op(op) for op in OPS.values())


def _op(op: Op) -> str:
    function = getattr(attnops.ops, op.name, None)
    about = (
        " ".join(inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].split())
        if function
        else "Called by autograd."
    )
    wrapped = textwrap.fill(
        str(op.packet.default._schema), 118, subsequent_indent="    ", break_long_words=False
    )
    writes = [a.name for a in op.spec.args if a.written]
    return "\n".join(
        [
            f"## {op.name}\n\n{capitalised(op.about)}\n{about}\n\n```text\n{wrapped}\n```\n",
            table(["argument", "is", "dtypes", "default"], [_argument(a) for a in op.spec.args])
            + "\n",
            f"- writes: {', '.join(f'`{w}`' for w in writes) or 'nothing'}",
            "- gradient: "
            f"{'yes' if op.autograd else 'none; a call that asks for one raises `NoGradient`'}",
            f"- kernels: {', '.join(f'`{k}`' for k in kernels_of(op.name))}",
            *_entry(op.name),
        ]
    )


def _entry(op: str) -> list[str]:
    """The docstring of the op's function, but where another page has it."""
    if not hasattr(attnops.ops, op) or hasattr(attnops, op):
        return []
    return ["", "```{eval-rst}", f".. autofunction:: attnops.ops.{op}", "```"]


def _argument(a: Arg) -> list[str]:
    """The cells of an argument of a record: layout of a tensor, or type and bound of a value;
    dtypes; default."""
    default = "required" if a.default is REQUIRED else f"`{a.default!r}`"
    if not a.tensor:
        least = "" if a.least is None else f" >= {a.least:g}"
        most = "" if a.most is None else f", <= {a.most}"
        return [f"`{a.name}`", a.kind + least + most, "-", default]
    dtypes = f"as `{a.dtypes}`" if isinstance(a.dtypes, str) else "by the call"
    dtypes = ", ".join(map(dtype_name, a.dtypes)) if isinstance(a.dtypes, tuple) else dtypes
    absent = " or None" if "None" in a.kind and a.default is REQUIRED else ""
    return [f"`{a.name}`", f"`[{a.dims.replace('|', 'or')}]`{absent}", dtypes, default]


def errors_full() -> str:
    rows = []
    for error in _subclasses(AttnopsError):
        bases = [f"`{b.__name__}`" for b in error.__bases__]
        when = " ".join((error.__doc__ or "").split())
        fields = ", ".join(f"`{f}`" for f in _fields(error)) or "-"
        rows.append([f"`{error.__name__}`", ", ".join(bases), when, fields])
    return table(["class", "is a", "when", "fields"], rows)


def _subclasses(base: type) -> Iterator[type]:
    for module in (
        "attnops.cli.explain",
        "attnops.hf",
        "attnops.nn",
        "attnops.cache",
        "attnops.testing",
    ):
        importlib.import_module(module)
    for error in sorted(
        base.__subclasses__(),
        key=lambda e: (e.__module__ != base.__module__, inspect.getsourcelines(e)[1]),
    ):
        if error.__module__.startswith("attnops"):
            yield error
            yield from _subclasses(error)


def _fields(error: type) -> list[str]:
    """The attributes that `__init__` sets, its own or an inherited one's."""
    owner = next(
        (c for c in error.__mro__ if "__init__" in vars(c) and issubclass(c, AttnopsError)), None
    )
    if owner is None:
        return []
    body = ast.parse(textwrap.dedent(inspect.getsource(owner.__init__)))
    return [
        n.attr
        for n in ast.walk(body)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    ]


def explain_output() -> str:
    """The first answers about the call of attention, of what `attnops explain` prints."""
    from rich.console import Console

    from attnops.cli import tables
    from attnops.cli.explain import explain_model

    model, _, target, _, cache, _, phase = README_EXPLAIN
    out = io.StringIO()
    for name, explanation in explain_model(model, target=target, cache=cache, phase=phase).items():
        tables.show_explanation(
            explanation, Console(file=out, width=tables.PIPE_COLUMNS), heading=f"{model}, {name}"
        )
    _, _, call = out.getvalue().partition("attention\n")
    answers = call[call.index("\nkernel ") :].splitlines()[1 : EXPLAIN_LINES + 2]
    shown = [line.rstrip() for line in answers if not line.startswith("─")]
    return "\n".join(
        ["```text", f"$ attnops explain {' '.join(README_EXPLAIN)}", *shown, "...", "```"]
    )


def graph_output() -> str:
    """Runs the first Python block of docs/explain.md that compiles."""
    from attnops.cli.demo import kernel_lines

    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "explain.md").read_text(), re.M | re.S
    )
    exec(next(code for code in blocks if "torch.compile(model)" in code), {})
    lines = [line + (f"  x{count}" if count > 1 else "") for line, count in kernel_lines().items()]
    return "```text\n" + "\n".join(lines) + "\n```"


def front_picture() -> str:
    """README's picture, with its links as they are from docs/."""
    return picture().replace("](", "](../").replace("](../docs/", "](")


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/kernels.md": {"choices": choices_full, "kernels": kernels_full},
    "docs/ops.md": {"ops": ops_full},
    "docs/models.md": {"census": census_full},
    "docs/errors.md": {"errors": errors_full},
    "docs/explain.md": {"graph": graph_output},
    "docs/graphs.md": {"costs": costs},
    "docs/linear.md": {"linears": linears_full},
    "docs/results.md": {"summary": results_short, "results": results_full},
    "docs/performance.md": {
        "summary": performance_short,
        "pictures": pictures_full,
        "performance": performance_full,
    },
    "docs/index.md": {"picture": front_picture},
    "README.md": {"picture": picture, "explain": explain_output, "backends": backends},
}
# Left out of --check, because it compiles; tests/test_docs.py compares it with what the page's
# block compiles to.
SLOW = ("graph",)


def block(name: str, part: str) -> str:
    """The text between a file's markers. Raises ValueError when a marker is missing."""
    text = (ROOT / name).read_text()
    begin, end = f"<!-- {part}:begin -->\n", f"<!-- {part}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{name}: want exactly one {begin.strip()} and one {end}")
    return text.split(begin)[1].split(end)[0]


def stale(check: bool) -> Iterator[str]:
    """`file: part` of every stale part, which is written unless `check`."""
    for name, parts in PARTS.items():
        for part, make in parts.items():
            if check and part in SLOW:
                continue
            now, new = block(name, part), make() + "\n"
            if now != new:
                yield f"{name}: {part}"
                if not check:
                    begin = f"<!-- {part}:begin -->\n"
                    text = (ROOT / name).read_text()
                    (ROOT / name).write_text(text.replace(begin + now, begin + new))
    if HARDWARE.is_relative_to(ROOT):
        yield from renewed(
            HARDWARE,
            hardware_text(hardware(f"{kernel.op}.{kernel.name}" for kernel in all_kernels())),
            ROOT,
            check,
        )
    yield from renewed(kinds.FILE, kinds.text(decided()), ROOT, check)
    yield from stale_plots(ROOT, check)


def main(arguments: list[str]) -> int:
    from attnops.configs import quiet_transformers

    check = "--check" in arguments
    if not check:
        stamp_all()
    with quiet_transformers():
        found = list(stale(check))
    for line in found:
        print(line, "is stale: run `make docs`" if check else "written")
    return 1 if check and found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
