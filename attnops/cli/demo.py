"""`attnops demo`: two small Hugging Face models with random weights generate, as transformers runs
them and patched, and are compared."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from attnops.cli.explain import explain_config
from attnops.cli.tables import Data, new_table
from attnops.configs import quiet_transformers
from attnops.core.needs import require

MODELS = ("llama-small", "mistral-small")
GPUS = ("h200", "b200")
GAIN = """\
On a CPU both run torch's own kernel, so the times are about equal. The gain is on a GPU: `attnops bench generate` measures it, and
https://github.com/attnops/attnops/blob/main/docs/performance.md has what was measured."""  # noqa: E501
BATCH, PROMPT, LAYERS, ROUNDS = 2, 40, 2, 5
LINE_WIDTH = 110
OURS = r"torch\.ops\.attnops\.\w+\.\w+(?:\.run)?\(.*"
TORCHS = r"torch\.ops\.aten\._scaled_dot_product\w+\.default\(.*"


class Clock(dict[str, float]):
    """Seconds by step, in order. A line on the console says each step when it begins, and its
    seconds when it ends."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    @contextmanager
    def on(self, step: str) -> Iterator[None]:
        """Time the block."""
        self._console.print(f"  {step} ...", end=" ")
        start = time.perf_counter()
        yield
        self[step] = self.get(step, 0.0) + time.perf_counter() - start
        self._console.print(f"{time.perf_counter() - start:.1f} s", style="dim")


class _Arrivals(list[float]):
    """A streamer: `generate` passes it the prompt, then every new token."""

    def put(self, tokens: torch.Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each decode step; the first token comes with the prompt."""
        return [(after - before) * 1e3 for before, after in pairwise(self[1:])]


def run(console: Console, *, tokens: int = 24, compiled: bool = True) -> Data:
    """Run the demo and print it on `console`. tokens: the number that each prompt gets, at least 2.

    Returns plain data: equal (all models), models (name, equal, tokens, ms_a_token, kernels by
    target, graph lines), seconds by step. Raises MissingExtra: transformers is not installed.
    """
    require(("transformers",), "hf")
    start, clock = time.perf_counter(), Clock(console)
    console.print(
        (
            "[bold]attnops demo[/]: two small models with random weights generate on the CPU, "
            "first "
            "as transformers runs them, then after "
        )
        + "attnops.patch(model)."
        + " Both decode steps are compiled, which takes half a minute of one core the first time."
        * compiled
    )
    with quiet_transformers():
        with clock.on("import transformers and attnops.hf"):
            from attnops import hf  # noqa: F401
        reports = [_one(name, console, clock, tokens, compiled) for name in MODELS]
    show(reports, console)
    equal, total = all(r["equal"] for r in reports), time.perf_counter() - start
    console.print(
        f"\n[bold]{'Tokens equal on both models' if equal else 'TOKENS DIFFER'}[/], {total:.0f} "
        "s in all."
    )
    console.print(GAIN, soft_wrap=True)
    return {"equal": equal, "models": reports, "seconds": dict(clock), "total_s": total}


def show(reports: list[Data], console: Console) -> None:
    """Print a row for every model."""
    times = ("ms a token: transformers", "patched")
    table = new_table(
        "model",
        "equal tokens",
        *times,
        "kernel here",
        *(f"on {gpu}" for gpu in GPUS),
        numbers=times,
    )
    for report in reports:
        same, of = report["equal_tokens"]
        color = "green" if report["equal"] else "red"
        ms = (f"{report['ms_a_token'][way]:.2f}" for way in ("transformers", "patched"))
        table.add_row(
            report["name"],
            f"[{color}]{same} of {of}[/]",
            *ms,
            *map(", ".join, report["kernels"].values()),
        )
    console.print()
    console.print(table)


def _one(name: str, console: Console, clock: Clock, tokens: int, compiled: bool) -> Data:
    from attnops.hf import patch, tiny

    console.print(f"[bold]{name}[/]")
    with clock.on("build it twice, patch one"):
        models = {
            way: tiny.model(name, attn_implementation="sdpa", num_hidden_layers=LAYERS)
            for way in ("transformers", "patched")
        }
        patch(models["patched"])
        config = models["patched"].config
        prompt = torch.randint(
            3, config.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)
        )
    found: dict[str, torch.Tensor] = {}
    for way, model in models.items():
        _forget_loaded()
        with clock.on(f"{'compile and ' * compiled}generate, {way}"):
            found[way] = _generate(model, prompt, tokens, _Arrivals(), compiled)
    lines = kernel_lines()
    if compiled:
        calls = (
            f"{match[0]} x{n}"
            for line, n in lines.items()
            if (match := re.search(r"attnops\.\w*attention\.\w+", line))
        )
        console.print(f"  its compiled code calls {', '.join(calls) or 'no kernel of attnops'}")
    steps: dict[str, list[float]] = {way: [] for way in models}
    with clock.on(f"generate {tokens} tokens for {BATCH} prompts {ROUNDS} times with each in turn"):
        for _ in range(ROUNDS):
            for way, model in models.items():
                arrivals = _Arrivals()
                found[way] = _generate(model, prompt, tokens, arrivals, compiled)
                steps[way] += arrivals.steps_ms
    equal = torch.equal(found["transformers"], found["patched"])
    same = int((found["transformers"] == found["patched"])[:, PROMPT:].sum())
    with clock.on("explain it for other machines"):
        kernels = {target or "here": _chosen(name, target) for target in ("", *GPUS)}
    return {
        "name": name,
        "equal": equal,
        "equal_tokens": [same, BATCH * tokens],
        "tokens": found["patched"][:, PROMPT:].tolist(),
        "ms_a_token": {way: median(ms) for way, ms in steps.items()},
        "kernels": kernels,
        "graph": lines,
    }


def _chosen(name: str, target: str) -> list[str]:
    """The kernels of attention in a decode step on this machine ("") or on a GPU, where patched
    models keep their cache in pages."""
    from attnops.hf import tiny

    config = tiny.config(name, num_hidden_layers=LAYERS)
    options: dict[str, Any] = {"cache": "paged", "target": target} if target else {}
    found = explain_config(
        config,
        dtype=torch.bfloat16 if target else torch.float32,
        batch=BATCH,
        tokens=PROMPT,
        **options,
    )
    ops = (call.rsplit(".", 1) for call in found["decode"].chosen())
    return list(dict.fromkeys(kernel for op, kernel in ops if op.endswith("attention")))


def _generate(
    model: Any, prompt: torch.Tensor, tokens: int, streamer: _Arrivals, compiled: bool
) -> torch.Tensor:
    from transformers import CompileConfig

    options: dict[str, Any] = {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    if compiled:
        # generate compiles the decode step if the cache is static; on a CPU only with this option.
        config = CompileConfig(fullgraph=True, mode="default")
        setattr(config, "_compile_all_devices", True)  # noqa: B010, its declared type is None
        options |= {"cache_implementation": "static", "compile_config": config}
    out: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **options
    )
    return out


def _forget_loaded() -> None:
    """Have Inductor load its code anew, also where this process has loaded it before."""
    from attnops.core.private_torch import PyCodeCache

    PyCodeCache.cache_clear()


def kernel_lines() -> dict[str, int]:
    """Calls of attnops in the code that Inductor has loaded, shortened and without buffer numbers:
    how often each.

    A kernel that is lowered to torch ops shows torch's call after the kernel's name, which Inductor
    writes into the comment above.
    """
    from attnops.core.private_torch import PyCodeCache

    found: Counter[str] = Counter()
    for file in sorted({str(module.__file__) for module in PyCodeCache.modules}):
        name = ""
        for line in Path(file).read_text().splitlines():
            if "Source Nodes: [" in line:
                within = re.search(r"attnops\.\w*attention\.\w+", line)
                name = f"{within[0]}: " if within else ""
            elif match := re.search(OURS, line) or (name and re.search(TORCHS, line)):
                call = re.sub(r"\b(buf|arg|primals_)\d+(_\d+)?\b", r"\1*", match[0])
                call = call if call.startswith("torch.ops.attnops") else name + call
                found[call if len(call) <= LINE_WIDTH else call[:LINE_WIDTH] + " ..."] += 1
    return dict(found)
