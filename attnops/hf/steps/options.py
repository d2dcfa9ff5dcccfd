"""`Decode`: how the decode steps of `generate()` run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from attnops.core.errors import PatchError, fail
from attnops.core.record import need
from attnops.graphs.compile_pieces import INNER, Inner
from attnops.graphs.cuda_graphs import Device
from attnops.hf.models.recurrent import against_states

Mode = Literal["auto", "hf", "piecewise", "breakable"]


@dataclass(frozen=True)
class Decode:
    """How decode steps of `generate()` run. Fields without a description are arguments of
    `attnops.graphs.piecewise`.

    mode: "piecewise" or "breakable", see docs/graphs.md. "hf": as transformers does it, which
        compiles on a GPU. "auto": without a GPU as "hf". On a GPU graphs of steps and prompts need
        no compiler: they are "breakable", with recorded layers (docs/hf_paged.md). Where kernels of
        these are not on disk, the model's own layers run steps and prompts until threads have
        compiled them. Where graphs cannot be made, steps run without them, and `Patched.took` has
        the reason.
    compile_after: None: of mode "auto" `Patched.capture` alone compiles. A number: steps of a kind
        are "piecewise" after so many of them, and the call that reaches it waits for the compiler.
        Steps of one kind share compiled code: those of one row, and of more, with one policy and
        one adapter. Mode "piecewise" compiles the layers of prompts after 64 times as many tokens
        of prompts, None for 16,384; else `capture()` does. Under a deterministic policy neither
        happens by itself: steps of mode "auto" stay "breakable", and prompts run the model's own
        layers.
    pack: of recorded and piecewise layers, pack the weights of linears that share an input, so that
        they are one matrix product, and call one kernel for a linear with its norm, activation and
        residual where it is faster (docs/linear.md).
    speculate: what drafts tokens of `generate()`, see `patch`.
    budget_bytes: the most memory of the graphs of steps and prompts. attnops frees for it those of
        the states of the model (adapters, policies, replaced weights) that were used least lately.
        Those of the state in use stay: steps, first chunks of prompts and later chunks may each
        take as much for each set of pages, see `over_budget`. None: 5% of the GPU's memory for all
        states, and no bound for the one in use. Graphs of 64 states are kept at most.
    """

    mode: Mode = "auto"
    compile_after: int | None = None
    inner: str | Inner = "inductor"
    pack: bool = True
    budget_bytes: int | None = None
    over_budget: Literal["raise", "drop"] = "raise"
    check_every: int = 0
    graphs: Device | None = None
    speculate: Any = None

    def __post_init__(self) -> None:
        need(
            self.mode in get_args(Mode),
            "decode",
            repr(self.mode),
            f"{' | '.join(map(repr, get_args(Mode)))}, or a Decode",
        )
        known = not isinstance(self.inner, str) or self.inner in INNER
        need(known, "decode.inner", repr(self.inner), f"a function, or one of {', '.join(INNER)}")
        need(
            self.compile_after is None or self.compile_after >= 0,
            "decode.compile_after",
            self.compile_after,
            "a number of steps >= 0, or None",
        )

    @property
    def prompts_after(self) -> int:
        """As many tokens of prompts run before their layers are compiled. It takes so many to win a
        compiler's time back."""
        return 64 * (256 if self.compile_after is None else self.compile_after)


def checked(
    how: Decode, owner: Any, device: torch.device, states: Sequence[int], latents: bool
) -> Decode:
    """How the steps of a model on this device run in graphs: layers that keep states are never
    compiled.

    states: the layers that keep states. latents: do others keep latents? Raises PatchError where
    the graphs that are asked for cannot be made.
    """
    mode = how.mode
    got = f"patch: got decode={mode!r} for {type(owner).__name__}"
    if states and (why := against_states(owner, states, mode, latents)):
        fail(PatchError, f"{got}, {why}; want decode='hf'")
    if "position_ids" not in inspect.signature(type(owner).forward).parameters:
        fail(
            PatchError,
            f"{got}, which counts positions by its masks; want decode='hf', or a model that "
            "takes position_ids",
        )
    if mode != "auto" and how.graphs is None and device.type not in ("cuda", "meta"):
        want = "a model on a GPU, or decode='auto', which makes graphs where there is one"
        fail(PatchError, f"{got} on {device}; want {want}")
    return replace(how, compile_after=None) if states else how
