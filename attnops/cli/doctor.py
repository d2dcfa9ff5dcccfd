"""`attnops doctor`: the packages and GPUs of this machine, and the kernels that can run on it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.markup import escape

from attnops.cli.features import ops_of_kernels, problems, why_not
from attnops.cli.tables import Data, new_table, refusal
from attnops.core.adapt import origin
from attnops.core.kernel import Kernel, all_kernels, broken_kernels, kernels_of
from attnops.core.needs import Package
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import active_policy, select
from attnops.core.traits import Unbuilt
from attnops.kernels.flashinfer.libraries import COMMAND
from attnops.measured import in_force
from attnops.measured.table import version_of
from attnops.testing.timed_calls import problem_at
from attnops.version import VERSION

LOOKED_FOR = ("triton", "transformers")


def examine() -> Data:
    """The report as plain data. Asks the driver for its devices; imports no kernel package.

    machine: versions and devices, None for absent packages. policy: the policy in force, "" for
    none. table: see `measured_times`.
    broken: third-party modules that could not be loaded, and why. install: see `best_install`.
    build: see `best_build`.
    """
    target = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kernels = [
        {
            "op": op,
            "kernel": k.name,
            "backend": backend_of(k),
            "usable": not (reasons := why_not(k, target)),
            "reasons": [refusal(r) for r in reasons],
            "unbuilt": [] if reasons else _unbuilt(k, target),
            "packages": list(k.versions()),
            "about": k.about,
        }
        for op in ops_of_kernels()
        for k in kernels_of(op).values()
    ]
    times, broken = measured_times(target), dict(broken_kernels())
    found = {
        "machine": machine(),
        "target": str(target),
        "policy": active_policy(),
        "table": times,
        "kernels": kernels,
        "broken": broken,
    }
    build = best_build(target) if any(k["unbuilt"] for k in kernels) else None
    return found | {"install": best_install(target), "build": build}


def _unbuilt(kernel: Kernel, target: Target) -> list[str]:
    """The modules that are not built of those that typical calls of a kernel would load."""
    taken = (p for p in problems(kernel.op, target) if not kernel.refusals(_planned(p)))
    reasons = (reason for p in taken for reason in kernel.unbuilt(p))
    words = (word for r in reasons if isinstance(r, Unbuilt) for word in r.modules)
    return list(dict.fromkeys(words))


def _planned(problem: Problem) -> Problem:
    """A call that brings what a kernel may ask for."""
    return altered(problem, plan="host", workspace=1 << 62) if problem.page_size else problem


def best_build(target: Target) -> Data | None:
    """The command that builds what calls would take, were it built, and `op.kernel` of these; None
    if they would take nothing.

    The calls are typical ones, and those that the table in force has times of.
    """
    words: dict[str, None] = {}
    kernels: dict[str, None] = {}
    for kernel, problem in (*_awaited_typically(target), *_fastest_measured(target)):
        for reason in kernel.unbuilt(problem):
            if isinstance(reason, Unbuilt):
                words |= dict.fromkeys(reason.modules)
                kernels[f"{problem.op}.{kernel.name}"] = None
    return {"command": f"{COMMAND} {' '.join(words)}", "kernels": [*kernels]} if words else None


def _awaited_typically(target: Target) -> Iterator[tuple[Kernel, Problem]]:
    """The kernels that typical calls would take, were they built, with the call."""
    ops = dict.fromkeys(k.op for k in all_kernels() if k.built and not k.absences(target))
    for problem in (_planned(p) for op in ops for p in problems(op, target)):
        if awaited := select(problem).awaited:
            yield kernels_of(problem.op)[awaited], problem


def _fastest_measured(target: Target) -> Iterator[tuple[Kernel, Problem]]:
    """The kernels to be built that are the fastest of those here at a point of the table in force,
    with the call. Times are compared and nothing is selected, which would take many seconds."""
    table = in_force(target).table
    for grid in table.grids if table is not None else ():
        known = kernels_of(grid.kind.op)
        here = [n for n in grid.us if n in known and not known[n].absences(target)]
        if not any(known[n].built for n in here):
            continue
        for at, *times in zip(grid.points(), *(grid.us[n] for n in here), strict=True):
            timed = [(us, n) for us, n in zip(times, here, strict=True) if us is not None]
            best = known[min(timed)[1]] if timed else None
            if best is not None and best.built:
                yield best, problem_at(grid.kind, at, target)


def backend_of(kernel: Kernel) -> str:
    """The folder of the kernel under attnops/kernels, "reference" for the plain body of an op, or
    the package of a third party."""
    if kernel.name == "reference":
        return "reference"
    parts = str(origin(kernel.run).__module__).split(".")
    return (
        parts[2]
        if parts[:2] == ["attnops", "kernels"]
        else "torch"
        if parts[0] == "attnops"
        else parts[0]
    )


def best_install(target: Target) -> Data | None:
    """The one installation after which the most kernels more can run: its command and their names;
    None if none adds any."""
    adds: dict[str, list[str]] = {}
    for k in all_kernels():
        there = replace(target, assume=tuple(p.module for p in k.packages))
        if k.absences(target) and not why_not(k, there):
            for command in _commands(k, target):
                adds.setdefault(command, []).append(f"{k.op}.{k.name}")
    best = max(adds, key=lambda command: len(adds[command]), default=None)
    return None if best is None else {"command": best, "kernels": adds[best]}


def _commands(kernel: Kernel, target: Target) -> list[str]:
    """Each installs the first package that the kernel lacks, or one that serves in its place."""
    lacking = next((p for p in kernel.packages if p.missing(target)), None)
    refusals = (
        kernel.absences(target)[:1]
        if lacking is None
        else [each.absent(target) for each in lacking.each]
    )
    # Where no wheel is made for this torch, the text is no command.
    return [
        refused.want
        for refused in refusals
        if refused is not None and refused.want.startswith("pip install ")
    ]


def measured_times(target: Target) -> Data:
    """The table in force for `target`. path: None without a table. other_versions: kernels whose
    version has changed since.

    unmeasured: usable kernels of its ops without times. ignored: unused files, and why.
    """
    found = in_force(target)
    ignored = [{"path": str(path), "reason": reason} for path, reason in found.ignored]
    out: Data = {
        "path": found.path and str(found.path),
        "shipped": found.shipped,
        "ignored": ignored,
    }
    if (table := found.table) is None:
        return out
    ops = sorted({g.kind.op for g in table.grids})
    usable = _usable(ops, target)
    timed = table.versions.keys()
    changed = {n: k for n, k in usable.items() if n in timed and not table.speaks_for(k, target)}
    known = timed | table.sibling.versions.keys() if table.sibling else timed
    return out | {
        "gpu": table.gpu,
        "scaled_from": table.source,
        "made": dict(table.made),
        "digest": table.digest[:12],
        "ops": ops,
        "sizes": sum(len(g.points()) for g in table.grids),
        "other_versions": {
            n: {"timed": table.versions[n], "here": version_of(k)} for n, k in changed.items()
        },
        "unmeasured": [n for n in usable if n not in known],
    }


def _usable(ops: list[str], target: Target) -> dict[str, Kernel]:
    """The kernels of these ops that a table may time, as `op.kernel`."""
    return {
        f"{k.op}.{k.name}": k
        for op in ops
        for k in kernels_of(op).values()
        if not k.fused and not why_not(k, target)
    }


def machine() -> Data:
    """Versions, "unknown" without metadata, and every CUDA device with its name, architecture and
    memory in bytes."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [
        {
            "name": d.name,
            "arch": str(Target.of(torch.device("cuda", i))),
            "memory_bytes": d.total_memory,
        }
        for i, d in enumerate(found)
    ]
    return {
        "attnops": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        **{
            name: Package(name, (name,)).version() or "unknown" if find_spec(name) else None
            for name in LOOKED_FOR
        },
    }


def summary(report: Data, console: Console) -> None:
    """Print the report of `examine` in five lines, or six where something is to be built."""
    facts, kernels, install = report["machine"], report["kernels"], report["install"]
    runs = Counter(k["backend"] for k in kernels if k["usable"])
    counts = (
        f"{runs.total()} of {len(kernels)} run here "
        f"({', '.join(f'{n} {name}' for name, n in runs.most_common())}); --all lists them"
    )
    adds = (
        "no package: the other kernels need a GPU"
        if report["target"] == "cpu"
        else "no package adds a kernel"
    )
    if install is not None:
        ops = dict.fromkeys(name.partition(".")[0] for name in install["kernels"])
        adds = (
            f"{install['command']} adds the most: {len(install['kernels'])} kernels, of "
            f"{', '.join(ops)}"
        )
    versions = (
        f"{facts['attnops']}, Python {facts['python']}, transformers "
        f"{facts['transformers'] or 'absent'}"
    )
    lines = {
        "attnops": versions,
        "torch": f"{facts['torch']}, "
        f"{'CUDA ' + facts['cuda'] if facts['cuda'] else 'built without CUDA'}",
    }
    lines |= {
        "device": _devices(facts["devices"]).replace("\n", ", "),
        "kernels": counts,
        "install": adds,
    }
    if (build := report["build"]) is not None:
        names = ", ".join(build["kernels"])
        lines["build"] = f"{build['command']}: for some calls {names} would then be the fastest"
    for name, text in lines.items():
        console.print(f"[bold]{name:<9}[/]{escape(text)}", soft_wrap=True)
    if report["broken"]:
        console.print(
            f"[red]{len(report['broken'])} modules of kernels could not be loaded[/]; --all says "
            "why"
        )


def _devices(devices: list[Data]) -> str:
    return (
        "\n".join(
            f"{d['name']} ({d['arch']}, {d['memory_bytes'] / 2**30:.0f} GiB)" for d in devices
        )
        or "no CUDA device"
    )


def show(report: Data, console: Console) -> None:
    """Print the report of `examine` as tables."""
    facts = new_table("", "", show_header=False)
    for name, value in report["machine"].items():
        facts.add_row(name, _devices(value) if name == "devices" else str(value or "absent"))
    facts.add_row("policy", report["policy"] or "default")
    facts.add_row("measured times", _times(report["table"]))
    console.print(facts)
    for ignored in report["table"]["ignored"]:
        console.print(
            f"[yellow]ignored[/]: {escape(ignored['path'])}: {escape(ignored['reason'])}",
            soft_wrap=True,
        )
    console.print(f"\n[bold]kernels on {report['target']}[/]")
    table = new_table("op", "kernel", "", "reason, and requirement", whole=("op", "kernel"))
    for before, k in zip(({"op": ""}, *report["kernels"]), report["kernels"], strict=False):
        reasons = escape(
            "\n".join(f"{r['field']}: {r['got']}; wants {r['want']}" for r in k["reasons"])
        )
        answer = "[green]usable[/]" if k["usable"] else "[yellow]not here[/]"
        table.add_row(
            k["op"] if k["op"] != before["op"] else "",
            k["kernel"],
            answer,
            reasons or f"[dim]{escape(k['about'])}[/]{escape(_to_build(k))}",
        )
    console.print(table)
    for source, reason in report["broken"].items():
        console.print(
            f"[red]could not be loaded[/]: {escape(source)}: {escape(reason)}", highlight=False
        )


def _to_build(kernel: Data) -> str:
    """What is not built of a usable kernel, and the command."""
    if not kernel["unbuilt"]:
        return ""
    return f"\nnot chosen for all calls until built: {COMMAND} {' '.join(kernel['unbuilt'])}"


def _times(table: Data) -> str:
    if table["path"] is None:
        return "none: kernels are ranked by estimates; `attnops tune` measures them"
    where = "shipped" if table["shipped"] else table["path"]
    gpu = table["gpu"] + (f", scaled from {table['scaled_from']}" if table["scaled_from"] else "")
    lines = [
        f"{gpu}, {table['sizes']} sizes of {', '.join(table['ops'])}, "
        f"{table['made'].get('date', 'no date')} ({where})"
    ]
    lines += [
        f"{name} was timed as {v['timed']}, here is {v['here']}"
        for name, v in table["other_versions"].items()
    ]
    lines += [f"without times: {', '.join(table['unmeasured'])}"] * bool(table["unmeasured"])
    return escape("\n".join(lines + ["`attnops tune` measures this machine"] * (len(lines) > 1)))
