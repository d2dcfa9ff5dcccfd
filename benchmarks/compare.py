"""The suite `mla`, one attention layer of DeepSeek-V3 (mla.py); writes mla.json.

    python benchmarks/compare.py mla [--device cuda] [--budget-s 150] [--only forms]

Every result is compared with an exact one before it is timed. GPU time: replays of CUDA graphs in turn, the L2 cache cleared before each,
the start of a graph (`launch_us`) included, alike for all. On a CPU the cases are tiny: they test the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mla
from common import Job, arguments, measure_all

from attnops.tune.clock import GraphClock

SUITES: dict[str, Callable[[str], Iterator[Job]]] = {"mla": mla.jobs}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, budget_s=150.0)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    asked = parser.parse_args(given)
    jobs = [job for job in SUITES[asked.suite](asked.device) if asked.only in job[1]]
    head = {"suite": asked.suite} | ({"launch_us": round(GraphClock().launch_us, 2)} if asked.device == "cuda" else {})
    finish = partial(mla.with_floors, device=asked.device) if asked.suite == "mla" else dict
    return measure_all(jobs, head, f"{asked.suite}.json", asked.device, asked.budget_s, finish)


if __name__ == "__main__":
    raise SystemExit(main())
