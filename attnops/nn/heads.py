"""What draft heads share: parts of their layers, embeddings of the target, and checkpoints whose
tensors are refused by name where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.errors import InvalidInput, fail
from attnops.core.needs import require
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.rotary import RotaryEmbedding

YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Words of a config for YaRN that RotaryEmbedding has, too."""


def rope_of_config(config: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
    """The rotation that a config.json names, in `rope_parameters` or the older `rope_scaling`.
    Raises InvalidInput for a kind that RotaryEmbedding does not have."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    words = {**config, **given}
    theta: Any = words.get("rope_theta", 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    more: dict[str, Any] = {"factor": given.get("factor")}
    if kind in ("llama3", "yarn"):
        more["original_max_position"] = given.get("original_max_position_embeddings")
    if kind == "llama3":
        more["beta_fast"] = given.get("high_freq_factor")
        more["beta_slow"] = given.get("low_freq_factor")
    if kind == "yarn":
        more |= {name: given[name] for name in YARN if given.get(name) is not None}
    part = words.get("partial_rotary_factor") or 1.0
    need(part == 1.0, "config.partial_rotary_factor", part, "1.0, for whole heads")
    kinds = ("default", "linear", "llama3", "yarn")
    known = "mrope_section" not in given and kind in kinds
    want = f"rope_type of {' | '.join(kinds)}, with one position per token"
    need(known, "config.rope_scaling", repr(given), want)
    if kind == "default":
        return RotaryEmbedding(head_dim, theta)
    return RotaryEmbedding(head_dim, theta, scaling=kind, **more)


class MLP(nn.Module):
    """That of Llama: SwiGLU."""

    def __init__(self, hidden_size: int, inner_size: int, made: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False, **made)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False, **made)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False, **made)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def embedded(embed_tokens: nn.Embedding | None, tokens: Tensor, hidden_size: int) -> Tensor:
    """`[..., hidden_size]`: the embeddings of ids `[...]`, or `tokens` if they are embeddings."""
    if tokens.is_floating_point():
        return check.last("tokens", tokens, hidden_size)
    if embed_tokens is None:
        fail(
            InvalidInput,
            "tokens",
            f"ids of {tokens.dtype}",
            "embeddings, because neither the checkpoint nor a target gave embed_tokens",
        )
    found: Tensor = embed_tokens(tokens)
    return found


def only(rows: Tensor | None, hidden: Tensor) -> Tensor:
    """`[R, H]`: those tokens of hidden `[..., H]`, counted over all of them; None: hidden."""
    return hidden if rows is None else hidden.flatten(0, -2)[rows]


def fits(target: nn.Embedding | None, vocab_size: int, hidden_size: int) -> None:
    """Raise InvalidInput unless the target has this vocabulary and hidden size."""
    if target is None:
        return
    of_target = "the rows of the target's embeddings"
    need(
        vocab_size == target.num_embeddings,
        "config.vocab_size",
        vocab_size,
        f"{target.num_embeddings}, {of_target}",
    )
    need(
        hidden_size == target.embedding_dim,
        "hidden size of the target in the config",
        hidden_size,
        f"{target.embedding_dim}, the width of the target's embeddings",
    )


def assign(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Make `tensors` the parameters and buffers of the module, by name and without a copy.

    what: a name for all of them, for the errors. Raises InvalidInput: one is missing, belongs to
    nothing, or has another shape.
    """
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - tensors.keys())
    need(not missing, "tensors", f"no {', '.join(missing)}", f"all {len(wanted)} of {what}")
    extra = sorted(tensors.keys() - wanted.keys())
    need(not extra, "tensors", ", ".join(extra), f"only the {len(wanted)} of {what}")
    for name, old in wanted.items():
        shape = tuple(tensors[name].shape)
        need(shape == tuple(old.shape), f"{name}.shape", shape, f"{tuple(old.shape)}, by config")
    module.load_state_dict(dict(tensors), assign=True)


def config_of(folder: str | Path) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises InvalidInput."""
    path = Path(folder) / "config.json"
    need(path.is_file(), "folder", str(folder), "the folder of a checkpoint, with config.json")
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidInput("folder", f"{path} ({error})", "a JSON object in config.json") from None


def tensors_of(folder: str | Path, prefix: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, or one of several, on the CPU:
    of its safetensors files, else of its pytorch_model files. Raises InvalidInput, MissingExtra."""
    place, found = Path(folder), dict[str, Tensor]()
    if files := sorted(place.glob("*.safetensors")):
        require(("safetensors",), "hf")
        from safetensors import safe_open

        for file in files:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
                found |= {name: opened.get_tensor(name) for name in names}
        return found
    files = sorted(place.glob("pytorch_model*.bin"))
    need(bool(files), "folder", str(folder), "a folder with *.safetensors or pytorch_model*.bin")
    for file in files:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        found |= {name: tensor for name, tensor in loaded.items() if name.startswith(prefix)}
    return found
