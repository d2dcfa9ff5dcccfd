"""The report of a patched transformers model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnops.adapters import report

if TYPE_CHECKING:
    from attnops.hf.interface import Options
    from attnops.hf.models.attention_modules import Match
    from attnops.hf.page_model import PagedMode
    from attnops.hf.steps.options import Decode

UNSETTLED = "the first generate() chooses its cache"


@dataclass(frozen=True)
class Took:
    """How a `generate()` of a patched model ran.

    cache: "paged", or "hf" for transformers' own or the caller's.
    decode: "piecewise" or "breakable", the graphs of its last step; "hf" without graphs; "" where
        no step came after the prompt.
    why: the reason why it had no pages or no graphs, "" where it had both or the options ask for
    neither.
    loop: the reason why no graph chose the tokens of the steps in graphs, "" where one did.
    prompt: "compiled" or "captured", the layers that ran its prompt; "" for the model's own.
    rounds: what drafts were worth, or why there were none; "" where none were asked for.
    tokens_a_round: tokens that a row got in a round of drafts, on average; 0.0 without rounds.
    """

    cache: str
    decode: str
    why: str = ""
    loop: str = ""
    prompt: str = ""
    rounds: str = ""
    tokens_a_round: float = 0.0

    def __str__(self) -> str:
        decode = f", decode={self.decode}" if self.decode else ""
        prompt = f", prompt={self.prompt}" if self.prompt else ""
        loop = f"; tokens chosen without a graph: {self.loop}" if self.loop else ""
        rounds = f"; {self.rounds}" if self.rounds else ""
        why = f": {self.why}" if self.why else ""
        return f"cache={self.cache}{decode}{prompt}{why}{loop}{rounds}"


@dataclass(frozen=True)
class Report(report.Report):
    """Every attention module of a model with its status, the options in force, and notes for the
    user."""

    implementation: str = ""
    mask: str = "auto"
    cache: str = "hf"

    def _options(self) -> str:
        return f"{super()._options()}, mask={self.mask}, cache={self.cache}"


def said(asked: Options, how: Decode) -> dict[str, Any]:
    """The arguments of `patch`, by name; of a Decode each field, and its mode as `decode`."""
    fields = {f"decode.{field}": value for field, value in vars(how).items() if field != "mode"}
    return {
        "kernel": asked.kernel,
        "mask": asked.mask,
        "cache": asked.cache,
        "decode": how.mode,
        **fields,
    }


def switch(configs: Iterable[Any], name: str) -> None:
    """Let models of these configs attend by the implementation of this name."""
    for config in configs:
        config._attn_implementation_internal = name


@contextmanager
def attending(configs: Iterable[Any], name: str) -> Iterator[None]:
    """Within the block models of these configs attend by the implementation of this name."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    switch(configs, name)
    try:
        yield
    finally:
        for config, own in before:
            switch((config,), own)


def notes_of(
    options: Options, found: Match, paged: PagedMode | None, proof: str, why: str
) -> tuple[str, ...]:
    """What a user should know of the attention and the steps of a patched model."""
    additive = options.mask == "additive"
    graphs = "" if paged is None or paged.decode.mode == "hf" else paged.decode.mode
    known = {
        "in training mode, layers with attention dropout above 0 are computed in plain torch": True,
        "masks are added to scores, as in eager attention, and are never left out": additive,
        f"masks are always written out: {found.explicit}": found.explicit and not additive,
        f"transformers does not route it through sdpa; {proof}": proof,
        (
            f"{found.shared} modules outside this model hold the same config object and switch "
            "with "
            "it"
        ): found.shared,
        (why if why == UNSETTLED else f"generate() keeps transformers' cache: {why}"): paged is None
        and why,
        (
            "generate() keeps its cache in pages, but in beam search, as an assistant, and where "
            "another cache is asked for"
        ): paged,
        (
            "generate() of inputs with token_type_ids uses transformers' own cache: tokens of an "
            "image see each other both ways"
        ): paged is not None and paged.blocks,
        f"its steps after the prompt run in CUDA graphs ({graphs})": graphs,
        f"they do not run in CUDA graphs: {why}": paged is not None and not graphs and why,
        **dict.fromkeys(() if paged is None else paged.notes(), True),
    }
    return tuple(note for note, holds in known.items() if holds)
