"""`attnops demo`: two small Hugging Face models with random weights, from patch to tokens, checked against their own eager attention."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from attnops.cli.explain import explain_config
from attnops.cli.tables import show_explanation
from attnops.configs import quiet_transformers
from attnops.needs import require

MODELS = ("llama-small", "gpt-oss-small")
# "" is this machine. The dtypes are the usual ones there.
MACHINES = {"": torch.float32, "sm90": torch.bfloat16, "sm100": torch.bfloat16}
BATCH, PROMPT, LAYERS = 2, 40, 2
LINE_WIDTH = 110
OURS = r"torch\.ops\.attnops\.\w+\.\w+(?:\.run)?\(.*"
TORCHS = r"torch\.ops\.aten\._scaled_dot_product\w+\.default\(.*"


class Clock(dict[str, float]):
    """Seconds by step, in order."""

    @contextmanager
    def on(self, step: str) -> Iterator[None]:
        """Add the time of the block to a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[step] = self.get(step, 0.0) + time.perf_counter() - start


class _Arrivals(list[float]):
    """A streamer: `generate` passes it the prompt, then every new token."""

    def put(self, tokens: torch.Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def run(console: Console, *, tokens: int = 24, compiled: bool = True) -> dict[str, Any]:
    """Run the demo and print it on `console`. tokens: the number that each prompt gets, at least 2.

    Returns plain data: equal (all models), models (name, equal, tokens, kernels by target, graph lines), seconds by step.
    Raises MissingExtra: transformers is not installed.
    """
    require(("transformers",), "hf")
    start, clock = time.perf_counter(), Clock()
    with quiet_transformers():
        with clock.on("import transformers and attnops.hf"):
            from attnops import hf  # noqa: F401
        reports = [_one(name, console, clock, tokens, compiled) for name in MODELS]
    equal, total = all(r["equal"] for r in reports), time.perf_counter() - start
    console.print(f"[bold]{'Tokens equal eager on both models' if equal else 'TOKENS DIFFER'}[/], {total:.1f} s:")
    for step, seconds in clock.items():
        console.print(f"  {seconds:6.1f} s  {step}")
    return {"equal": equal, "models": reports, "seconds": dict(clock), "total_s": total}


def _one(name: str, console: Console, clock: Clock, tokens: int, compiled: bool) -> dict[str, Any]:
    from attnops.hf import patch, tiny

    console.rule(f"[bold]{name}[/]")
    with clock.on("build the models"):
        model = tiny.model(name, num_hidden_layers=LAYERS)
        prompt = torch.randint(3, model.config.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    with clock.on("generate with eager attention"):
        want = _generate(model, prompt, tokens)
    with clock.on("patch"):
        patch(model)
    before, arrivals, start = _loaded(), _Arrivals(), time.perf_counter()
    with console.status("compiling the decode step, then generating" if compiled else "generating"):
        got = _generate(model, prompt, tokens, arrivals, compiled)
    # The prompt runs eagerly; the compiled step makes the second token first.
    second = "compile the decode step, once a model" if compiled else "first decode step"
    compiling = arrivals[2] - arrivals[1]
    for step, seconds in ((second, compiling), ("generate with attnops, the rest", arrivals[-1] - start - compiling)):
        clock[step] = clock.get(step, 0.0) + seconds
    lines = kernel_lines(before)
    equal = torch.equal(want, got) and (bool(lines) or not compiled)
    console.print(f"{tokens} tokens for {BATCH} prompts: [{'green' if equal else 'red'}]{'equal to' if equal else 'NOT'} eager's[/]")
    console.print(f"  {escape(str(got[0, PROMPT:].tolist()))}")
    if compiled:
        console.print("the compiled graph calls:")
        for line, count in lines.items():
            console.print(f"  {escape(line)}" + (f"  x{count}" if count > 1 else ""), soft_wrap=True)
    kernels = {}
    with clock.on("explain"):
        for target, dtype in MACHINES.items():
            config = tiny.config(name, num_hidden_layers=LAYERS)
            explanation = explain_config(config, dtype=dtype, target=target, batch=BATCH, tokens=PROMPT)["decode"]
            show_explanation(explanation, console, f"{name}, decode")
            kernels[explanation.target] = list(explanation.chosen())
    return {"name": name, "equal": equal, "tokens": got[:, PROMPT:].tolist(), "kernels": kernels, "graph": lines}


def _generate(model: Any, prompt: torch.Tensor, tokens: int, streamer: _Arrivals | None = None, compiled: bool = False) -> torch.Tensor:
    from transformers import CompileConfig

    options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    if compiled:
        # generate compiles the decode step if the cache is static; on a CPU only with this option.
        config = CompileConfig(fullgraph=True, mode="default")
        setattr(config, "_compile_all_devices", True)  # noqa: B010, its declared type is None
        options |= {"cache_implementation": "static", "compile_config": config}
    out: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **options)
    return out


def _loaded() -> set[str]:
    from torch._inductor.codecache import PyCodeCache

    return {str(module.__file__) for module in PyCodeCache.modules}


def kernel_lines(before: set[str]) -> dict[str, int]:
    """Calls of attnops in the code Inductor has loaded since `before`, shortened and without buffer numbers: how often each.

    A kernel that is lowered to torch ops shows torch's call after the kernel's name, which Inductor writes into the comment above.
    """
    found: Counter[str] = Counter()
    for file in sorted(_loaded() - before):
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
