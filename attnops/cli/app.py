"""The commands and their arguments. Each calls one function, which tests call directly."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from attnops.cli import tables
from attnops.core.errors import AttnopsError, InvalidInput
from attnops.core.needs import require
from attnops.core.problem import GPUS
from attnops.version import VERSION

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention kernels under torch.compile.",
)

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class Phase(str, Enum):
    """The calls of a model to explain."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


class Cache(str, Enum):
    """The cache of a model to explain."""

    hf = "hf"
    paged = "paged"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnops {VERSION}")
        raise typer.Exit


BEGIN = """Attention kernels under torch.compile. Three commands to begin with:

  attnops doctor                                     the kernels that run on this machine
  attnops explain llama-3-8b-shape --target h200     the kernels of a model on a GPU, and why no others
  attnops demo                                       two small models before and after attnops.patch(model)

`attnops --help` lists all commands."""  # noqa: E501


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention kernels under torch.compile."""
    if context.invoked_subcommand is None:
        typer.echo(BEGIN)


def _reported(as_json: bool, make: Callable[[Console], T]) -> T:
    """The report that `make` returns, after printing on its console; with `as_json` on stderr, and
    the report as JSON on stdout.

    An AttnopsError becomes one line on stderr and exit code 2. Other errors are bugs and keep their
    traceback.
    """
    try:
        report = make(tables.new_console(stderr=as_json))
    except AttnopsError as error:
        typer.echo(f"attnops: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    return report


def _names(given: list[str] | None) -> tuple[str, ...]:
    return tuple(filter(None, ",".join(given or ()).split(",")))


@app.command()
def doctor(
    everything: Annotated[
        bool,
        typer.Option("--all", help="List every kernel, with the reason against it or what it is."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say in five lines what runs on this machine, and which package adds the most. --all: every
    package, GPU and kernel."""
    from attnops.cli.doctor import examine, show, summary

    report = _reported(as_json, lambda console: examine())
    if not as_json:
        (show if everything else summary)(report, tables.new_console())


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder with one, or a bundled name (an unknown one lists them)."
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            help=f"cpu, {', '.join(GPUS)}, sm80, sm90, ..., gfx942; default this machine."
        ),
    ] = "",
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help="Modules installed on the target: a,b or repeated; '' is none. Default: all."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each prompt. Default: 512, or fewer where the model has fewer "
            "positions than 1024."
        ),
    ] = None,
    phase: Annotated[Phase, typer.Option(help="A prompt, one token more, or both.")] = Phase.both,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    cache: Annotated[
        Cache,
        typer.Option(help='transformers\' static cache, or the pages of patch(cache="paged").'),
    ] = Cache.hf,
    op: Annotated[
        str,
        typer.Option(
            help="Calls of this op alone, such as linear or decode_attention; an unknown one "
            "lists them."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the kernel of each call of a model on a machine, and the reasons against the others.
    Needs no weights and no GPU."""
    from attnops.cli.explain import explain_model
    from attnops.lowering.explain import packages_of_kernels

    packages = None if assume is None else _names(assume)
    if idle := set(packages or ()) - set(packages_of_kernels()):
        typer.echo(f"attnops: no kernel needs {', '.join(sorted(idle))}", err=True)

    def explained(console: Console) -> tables.Data:
        sizes: dict[str, Any] = {
            "batch": batch,
            "tokens": tokens,
            "dtype": dtype,
            "cache": cache.value,
        }
        found = explain_model(
            model, target=target, assume=packages, phase=phase.value, op=op, **sizes
        )
        for name, explanation in () if as_json else found.items():
            tables.show_explanation(explanation, console, f"{model}, {name}")
        return {
            "model": model,
            **sizes,
            "phases": {name: explanation.as_dict() for name, explanation in found.items()},
        }

    _reported(as_json, explained)


@app.command()
def tune(
    ops: Annotated[list[str] | None, typer.Option(help="Only these ops: a,b or repeated.")] = None,
    kernels: Annotated[
        list[str] | None, typer.Option(help="Only these kernels: a,b or repeated.")
    ] = None,
    grid: Annotated[
        str, typer.Option(help="full, brief, cpu or tiny; default that of the device.")
    ] = "",
    budget_s: Annotated[
        float, typer.Option(help="Seconds in all; later sizes are left out.")
    ] = 150.0,
    first_calls_s: Annotated[
        float,
        typer.Option(help="Limit of a kernel's first calls in seconds; slower ones are left out."),
    ] = 20.0,
    output: Annotated[
        Path | None, typer.Option(help="A file to write instead of this user's table.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time this machine's kernels. Selection then uses the times. Replaces the previous table."""
    from attnops.cli.tune import run

    options: dict[str, Any] = {
        "grid": grid,
        "budget_s": budget_s,
        "first_calls_s": first_calls_s,
        "output": output,
    }
    _reported(
        as_json, lambda console: run(console, ops=_names(ops), kernels=_names(kernels), **options)
    )


@app.command()
def build(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Modules as messages name them, such as fa3:bfloat16:64, or models as `attnops "
            "explain` takes them; an unknown one lists the modules."
        ),
    ],
    kernel: Annotated[
        str,
        typer.Option(
            help="For a model, what this kernel needs for its calls; default what is faster there."
        ),
    ] = "",
    batch: Annotated[int, typer.Option(help="Sequences of a model's calls.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each prompt of a model's calls.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of a model: bfloat16 or float16.")] = "bfloat16",
    at_once: Annotated[int, typer.Option(help="Modules that are built side by side.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Build FlashInfer's modules with nvcc, so that its kernels can be chosen. Exit code 1: one was
    not built."""
    from attnops.cli.build import failed, run

    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens, "dtype": dtype}
    report = _reported(
        as_json,
        lambda console: run(console, tuple(what), kernel=kernel, at_once=at_once, **sizes),
    )
    if failed(report):
        raise typer.Exit(1)


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="Suites; default the usual ones, an unknown one lists all. With --compare, "
            "two files."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A bundled shape or tiny model instead of the suite's; an unknown one lists them."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; default CUDA if available.")] = "",
    layers: Annotated[int, typer.Option(help="Layers of the models; default the suite's.")] = 0,
    points: Annotated[
        str, typer.Option(help="Sizes of steps: requests x cached tokens, such as 1x1k,8x1k.")
    ] = "",
    ways: Annotated[
        str,
        typer.Option(
            help="Only these ways of generate, decode, prefill or training_steps, such as "
            "hf_compiled,attnops."
        ),
    ] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Another engine for generate or decode: vllm=PYTHON or sglang=PYTHON, of its "
            "environment. Repeat it."
        ),
    ] = None,
    budget_s: Annotated[
        float, typer.Option(help="Seconds in all; cases that would start later are left out.")
    ] = 400.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a results file of each suite.")
    ] = None,
    commit: Annotated[
        str, typer.Option(help="Commit to write into the files; default git's.")
    ] = "",
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs that share the cases, one process each.")
    ] = 1,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare two results files instead of measuring.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure attnops beside its alternatives on this machine. Exit code 1: a wrong result, a
    failed case, or a regression."""
    # The suites import transformers.
    _reported(False, lambda console: require(("transformers",), "hf"))
    from attnops.bench import Point, Setup, device_of
    from attnops.bench.files import bad
    from attnops.bench.peers import parse
    from attnops.cli import bench as command

    def compared(console: Console) -> tables.Data:
        files = [Path(name) for name in suites or ()]
        if len(files) != 2:
            raise InvalidInput(
                "compare", f"{len(files)} files", "two results files, the older one first"
            )
        return command.run_compare(console, *files)

    def measured(console: Console) -> tables.Data:
        places = tuple(Point.parse(p) for p in points.split(",")) if points else ()
        setup = Setup(
            device_of(device), quick, model, layers, places, _names([ways]), parse(engine or ())
        )
        return command.run(
            console,
            tuple(suites or ()),
            setup,
            budget_s=budget_s,
            out=out,
            commit=commit,
            gpus=gpus,
        )

    report = _reported(as_json, compared if compare else measured)
    if report["regressions"] if compare else bad(report):
        raise typer.Exit(1)


@app.command()
def demo(
    as_json: AsJson = False,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 24,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the decode step.")
    ] = True,
) -> None:
    """Two small models before and after attnops.patch(model): tokens, speed, kernels. Exit code 1
    when a token differs."""
    from attnops.cli.demo import run

    if not _reported(as_json, lambda console: run(console, tokens=tokens, compiled=compiled))[
        "equal"
    ]:
        raise typer.Exit(1)
