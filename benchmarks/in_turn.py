"""Calls of a patched model by the code of two checkouts, in turn: a busy host slows both alike.

    python benchmarks/in_turn.py FOLDER [--model llama-3-8b-shape] [--layers 6] [--batch 1]
    [--rounds 60] [--out FILE] python benchmarks/in_turn.py FOLDER --calls [--rounds 60] [--out
    FILE]

FOLDER is a checkout of another commit; this file's own checkout is compared with it. Each has a
process that holds the model, and in each round both measure, the one that begins changing from
round to round. `generate()`: a whole call, the prompt included, per token. `steps`: `handle.step`
over one cache, per step, and the cache is cropped afterwards. The logits of the very graphs are
compared with exact ones before the rounds, by the bounds of `attnops bench`.

--calls: host time of one paged_attention of a decode step. `eager call` and `compiled call`: of
many, without waiting for the device. `first call`: of the first in a process of its own, the
device's work included.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
KINDS = ("generate()", "steps")
CALLS = ("eager call", "compiled call", "first call")
REPEATS = 200
"""Calls of a measurement, but for the first one."""
FEWEST = 3
"""Rounds, for quartiles."""

Row = dict[str, Any]


# The process of a checkout ------------------------------------------------------------------------


def serve(asked: argparse.Namespace) -> None:
    """Answer each line of stdin, the name of a kind, with microseconds. The first answer has the
    facts of a row.

    What it imports of attnops is there in both checkouts.
    """
    import torch

    torch.set_grad_enabled(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts, ask = calls_of(device) if asked.calls else tokens_of(asked, device)
    _say(facts)
    for line in sys.stdin:
        _say(ask(line.strip()))


def tokens_of(asked: argparse.Namespace, device: Any) -> tuple[Row, Callable[[str], float]]:
    """(the facts of a model's process, a function that measures a kind of KINDS per token)."""
    import torch

    import attnops
    import attnops.hf
    from attnops.bench import Point, Setup, models
    from attnops.tune.clock import seconds

    setup, point = Setup(device, quick=True, layers=asked.layers), Point(asked.batch, asked.context)
    model = models.build(setup, asked.model, point)
    one = models.twin(model)
    handle = attnops.hf.patch(one, cache="paged", decode="piecewise" if setup.on_gpu else "hf")
    prompt, new = (
        models.tokens(setup, model, point.batch, n, seed)
        for seed, n in enumerate((asked.context, asked.new))
    )
    # No token has the end's id, so that all calls are equally long, and the stopping test is made.
    ends = {
        "pad_token_id": 0,
        "eos_token_id": model.config.vocab_size,
        "attention_mask": torch.ones_like(prompt),
    }
    given = {"inputs": prompt, "max_new_tokens": asked.new, "do_sample": False, **ends}
    cache = handle.new_cache(point.batch, asked.context + asked.new + 1)
    held = {name_of_cache(one): cache}
    one(prompt, **held)

    def step(token: Any) -> Any:
        if setup.on_gpu:
            return handle.step(token, cache)
        return one(token, **held).logits

    def steps() -> Any:
        logits = [step(new[:, at : at + 1]) for at in range(asked.new)]
        cache.crop(-asked.new)
        return torch.cat(logits, 1)

    runs: dict[str, Callable[[], Any]] = {
        "generate()": lambda: one.generate(**given),
        "steps": steps,
    }
    for _ in range(3):
        for run in runs.values():
            run()
    exact = models.exactly(model, prompt, new)
    # Row by row: the logits of all prompts at once are many.
    eager = torch.cat(
        [model(row[None]).logits[:, asked.context :] for row in torch.cat([prompt, new], 1)]
    )
    off = models.distance(model, eager)
    facts = {
        "code": attnops.__file__,
        "error": round(off(steps(), exact), 5),
        "budget": round(models.budget(model, off(eager, exact)), 5),
        "decode": handle.took.decode,
        "layers": model.config.num_hidden_layers,
        "new_tokens": asked.new,
    }
    return facts, lambda kind: seconds(runs[kind]) * 1e6 / asked.new


def name_of_cache(model: Any) -> str:
    """The argument of transformers' models for their cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def calls_of(device: Any) -> tuple[Row, Callable[[str], float]]:
    """(the facts of a process without a model, a function that measures a kind of CALLS per
    call)."""
    import torch

    import attnops
    from attnops.tune.clock import seconds

    given, options = arguments(device)
    want = attended(*given[:4])

    def eager() -> Any:
        return attnops.paged_attention(*given, **options)

    runs = {"eager call": eager, "compiled call": torch.compile(eager, fullgraph=True)}
    off = max(float((run().float() - want).abs().max()) for run in runs.values())
    facts = {"code": attnops.__file__, "error": round(off, 5), "budget": 0.02}
    command = [sys.executable, __file__, ".", "--first"]

    def ask(kind: str) -> float:
        if kind == "first call":
            return float(
                subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True
                ).stdout.split()[-1]
            )
        seconds(runs[kind], 20)
        return seconds(runs[kind], REPEATS, wait=False) * 1e6 / REPEATS

    return facts, ask


def arguments(device: Any) -> tuple[tuple[Any, ...], Row]:
    """A decode step of a Llama of 8 billion parameters, 8 requests of 1,024 tokens each; pages in
    random order."""
    import torch

    some = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    table = torch.randperm(512, generator=some, device=device).reshape(8, 64).int()
    query = torch.randn(8, 32, 128, generator=some, device=device, dtype=dtype)
    pages = [
        torch.randn(512, 16, 8, 128, generator=some, device=device, dtype=dtype) for _ in range(2)
    ]
    lengths = torch.full((8,), 1024, dtype=torch.int32, device=device)
    starts = torch.arange(9, dtype=torch.int32, device=device)
    return (query, *pages, table, lengths, starts), {"max_seqlen_q": 1, "holes": False}


def attended(query: Any, k_pages: Any, v_pages: Any, page_table: Any) -> Any:
    """What the call must give, float32 `[B, Hq, D]`: torch's own attention over all keys of the
    pages."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    table = page_table.long()
    key, value = (
        pages[table].flatten(1, 2).transpose(1, 2).double() for pages in (k_pages, v_pages)
    )
    return scaled_dot_product_attention(query[:, :, None].double(), key, value, enable_gqa=True)[
        :, :, 0
    ].to(torch.float32)


def first() -> float:
    """Microseconds of the first call in this process, the device's work included."""
    import torch

    import attnops
    from attnops.tune.clock import seconds

    torch.set_grad_enabled(False)
    given, options = arguments(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return seconds(lambda: attnops.paged_attention(*given, **options)) * 1e6


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


class Side:
    """A process of one checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:  # a library's own words
                print(line, end="", file=sys.stderr)
        raise RuntimeError(f"the process has ended with {self._process.wait()}")

    def ask(self, kind: str) -> float:
        """Microseconds a token of one measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        return float(self.answer())

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def sides(folder: Path) -> Iterator[dict[str, Side]]:
    """The processes of both checkouts, by the name of the way."""
    found = {"before": Side(folder), "now": Side(HERE)}
    try:
        yield found
    finally:
        for side in found.values():
            side.end()


# Both of them -------------------------------------------------------------------------------------


def rows_of(case: str, times: dict[str, list[float]], facts: dict[str, Row]) -> list[Row]:
    """A row for each side. of_before: the median over the rounds of the ratio within a round, and
    its quartiles."""
    from attnops.tune.clock import spread

    rows = {
        way: {"case": case, "way": way, **spread(us), **facts[way], "rounds": len(us)}
        for way, us in times.items()
    }
    ratios = [now / before for now, before in zip(times["now"], times["before"], strict=True)]
    low, middle, high = (round(ratio, 4) for ratio in statistics.quantiles(ratios, n=4))
    rows["now"] |= {"of_before": middle, "of_before_low": low, "of_before_high": high}
    return list(rows.values())


def facts_of(way: str, side: Side) -> Row:
    """What the process tells of itself. Ends this one where it runs other code than its checkout's,
    or its logits are wrong."""
    facts: Row = side.answer()
    code = facts.pop("code")
    if not Path(code).is_relative_to(side.folder):
        raise SystemExit(
            f"{way}: got the code of {code}, want that of {side.folder}: is attnops found before "
            "PYTHONPATH?"
        )
    if not facts["error"] <= facts["budget"]:
        raise SystemExit(
            f"{way}: got logits that are off by {facts['error']}, want {facts['budget']} at most"
        )
    return facts


def measure(asked: argparse.Namespace) -> Row:
    """A results file."""
    import torch

    from attnops.bench import Point
    from attnops.bench.files import environment
    from attnops.bench.run import SUITES
    from attnops.core.problem import Target
    from attnops.measured.digests import candidates, digests

    kinds = CALLS if asked.calls else KINDS
    times: dict[str, dict[str, list[float]]] = {kind: {"before": [], "now": []} for kind in kinds}
    with sides(asked.folder) as both:
        facts = {way: facts_of(way, side) for way, side in both.items()}
        for number in range(asked.rounds):
            order = list(both) if number % 2 else list(both)[::-1]
            for kind in kinds:
                if kind == "first call" and number >= asked.firsts:
                    continue
                for way in order:
                    times[kind][way].append(both[way].ask(kind))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = environment(device, asked.commit)
    suite = next(suite for suite in SUITES if suite.name == "generate")
    code = digests(candidates(Target.of(device), suite.ops, head["packages"]))
    what = "calls" if asked.calls else f"{asked.new} tokens"
    note = f"In turn with {asked.before}, {asked.rounds} rounds of {what} of each."
    case = (
        "paged_attention 8x1k"
        if asked.calls
        else f"{asked.model} {Point(asked.batch, asked.context)}"
    )
    rows = [row for kind in kinds for row in rows_of(f"{case}, {kind}", times[kind], facts)]
    return {**head, "suite": suite.name, "code": code, "note": note, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout of another commit")
    parser.add_argument(
        "--before", default="another commit", help="what the folder holds, for the note"
    )
    parser.add_argument("--commit", default="", help="of this checkout; asked of git if not given")
    parser.add_argument("--model", default="llama-3-8b-shape")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--calls", action="store_true", help="single calls instead of a model's tokens"
    )
    parser.add_argument(
        "--firsts", type=int, default=15, help="rounds in which a process makes its first call"
    )
    parser.add_argument("--out", type=Path, help="a file; printed if not given")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.first:
        print(first())
        return
    if asked.serve:
        serve(asked)
        return
    asked.folder = asked.folder.resolve()
    if not (asked.folder / "attnops").is_dir():
        parser.error(f"FOLDER: got {asked.folder}, want a checkout of attnops")
    if asked.rounds < FEWEST:
        parser.error(f"--rounds: got {asked.rounds}, want at least {FEWEST}")
    sys.path.insert(0, str(HERE))
    from attnops.bench.files import text_of

    text = text_of(measure(asked))
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
