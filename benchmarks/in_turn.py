"""Calls of a patched model by the code of two checkouts, in turn: a busy host slows both alike.

    python benchmarks/in_turn.py FOLDER [--model llama-3-8b-shape] [--layers 6] [--rounds 60] [--out FILE]

FOLDER is a checkout of another commit; this file's own checkout is compared with it. Each has a process that holds the
model, and in each round both measure, the one that begins changing from round to round. `generate()`: a whole call, the
prompt included, per token. `steps`: `handle.step` over one cache, per step, and the cache is cropped afterwards. The
logits of the very graphs are compared with exact ones before the rounds, by the bounds of `attnops bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
KINDS = ("generate()", "steps")


# The process of a checkout ---------------------------------------------------------------------------------------------


def serve(asked: argparse.Namespace) -> None:
    """Answer each line of stdin, the name of a kind, with microseconds a token. The first answer says how good the logits are."""
    import torch

    torch.set_grad_enabled(False)
    from attnops.bench import Point, Setup, models

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup, point = Setup(device, quick=True, layers=asked.layers), Point(1, asked.context)
    model = models.build(setup, asked.model, point)
    one, handle = models.patched(model, "paged", decode="piecewise" if setup.on_gpu else "hf")
    prompt = models.tokens(setup, model, 1, asked.context)
    given = {
        "max_new_tokens": asked.new,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": model.config.vocab_size,
        "attention_mask": torch.ones_like(prompt),
    }
    cache = handle.new_cache(1, asked.context + asked.new + 1)
    one(prompt, past_key_values=cache)
    new = models.tokens(setup, model, 1, asked.new, seed=1)

    def generate() -> Any:
        return one.generate(prompt, **given)

    def steps() -> Any:
        logits = [step(new[:, at : at + 1]) for at in range(asked.new)]
        cache.crop(-asked.new)
        return torch.cat(logits, 1)

    def step(token: Any) -> Any:
        if setup.on_gpu:
            return handle.step(token, cache)
        return one(token, past_key_values=cache).logits

    runs: dict[str, Callable[[], Any]] = dict(zip(KINDS, (generate, steps), strict=True))
    for _ in range(3):
        for run in runs.values():
            run()
    exact = models.exactly(model, prompt, new)
    eager = torch.cat([model(torch.cat([prompt, new], 1)).logits[:, asked.context :]], 1)
    off = models.distance(model, eager)
    error, budget = off(steps(), exact), models.budget(model, off(eager, exact))
    print(
        json.dumps({"error": error, "budget": budget, "took": str(handle.took.decode), "layers": model.config.num_hidden_layers}),
        flush=True,
    )
    for line in sys.stdin:
        run, wait = runs[line.strip()], torch.cuda.synchronize if setup.on_gpu else lambda: None
        wait()
        begin = time.perf_counter()
        run()
        wait()
        print(json.dumps((time.perf_counter() - begin) * 1e6 / asked.new), flush=True)


class Side:
    """A process of one checkout."""

    def __init__(self, folder: Path) -> None:
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


# Both of them ----------------------------------------------------------------------------------------------------------


def rows_of(case: str, times: dict[str, list[float]], facts: dict[str, Any], new: int) -> list[dict[str, Any]]:
    """A row for each side. of_before: the median over the rounds of the ratio within a round, and its quartiles."""
    ratios = [now / before for now, before in zip(times["now"], times["before"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    rows = []
    for way, us in times.items():
        first, median, third = statistics.quantiles(us, n=4)
        row = {"case": case, "way": way, "median_us": round(median, 2), "spread_us": round((third - first) / 2, 2), "new_tokens": new}
        row |= {"error": round(facts[way]["error"], 5), "budget": round(facts[way]["budget"], 5), "layers": facts[way]["layers"]}
        rows.append(row | {"decode": facts[way]["took"], "rounds": len(us)})
    return [rows[0], rows[1] | {"of_before": round(middle, 4), "of_before_low": round(low, 4), "of_before_high": round(high, 4)}]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """A results file."""
    times: dict[str, dict[str, list[float]]] = {kind: {"before": [], "now": []} for kind in KINDS}
    begin = time.perf_counter()
    with sides(asked.folder) as both:
        facts = {way: side.answer() for way, side in both.items()}
        for number in range(asked.rounds):
            order = list(both) if number % 2 else list(both)[::-1]
            for kind in KINDS:
                for way in order:
                    times[kind][way].append(both[way].ask(kind))
    wrong = [f"{way}: {fact}" for way, fact in facts.items() if not fact["error"] <= fact["budget"]]
    if wrong:
        raise SystemExit(f"the logits are wrong: {wrong}")
    rows = [row for kind in KINDS for row in rows_of(f"{asked.model} 1x{asked.context}, {kind}", times[kind], facts, asked.new)]
    import torch

    from attnops.bench.files import environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    note = f"In turn with {asked.before}, {asked.rounds} rounds of {asked.new} tokens of each."
    return {**environment(device, asked.commit), "suite": "generate", "note": note, "seconds": time.perf_counter() - begin, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of another commit")
    parser.add_argument("--before", default="another commit", help="what the folder holds, for the note")
    parser.add_argument("--commit", default="", help="of this checkout; asked of git if not given")
    parser.add_argument("--model", default="llama-3-8b-shape")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file; printed if not given")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked)
        return
    sys.path.insert(0, str(HERE))
    text = json.dumps(measure(asked), indent=1)
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
