"""What layers that keep a state share: the states of requests, the causal convolution, and how
dense, packed and jagged batches become rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.jagged import rows
from attnops.ops import causal_conv1d


@dataclass(frozen=True)
class RecurrentState:
    """What a layer keeps of B requests from call to call. A call changes it in place.

    A request without tokens has 0 in both, as `new_state` of the layer makes them. Clear its rows
    before another request takes its place. An ordinary argument of compiled and exported functions.

    conv: `[B, C, W - 1]`, the last inputs of the convolution, the newest at the end.
    state: float32 `[B, H, ...]`, the state of each head, as the layer's op has it.
    """

    conv: Tensor
    state: Tensor


register_dataclass(RecurrentState)


class Requests(NamedTuple):
    """The requests of a call, and their states. fresh: they have no tokens before these."""

    cu_seqlens: Tensor
    max_seqlen: int
    fresh: bool
    padded: bool
    states: RecurrentState

    def arguments(self) -> dict[str, Any]:
        """Those of an op beside its tensors."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "fresh": self.fresh,
            "padded": self.padded,
        }


class RecurrentLayer(nn.Module):
    """A layer with a causal convolution and a state for each request: the base of `GatedDeltaNet`
    and `Mamba2`. Dense, packed or jagged.

    Args:
        hidden_size: E of input and output.
        channels: C of the convolution.
        conv_size: W, inputs that it sees.
        conv_bias: has it a bias?
        heads: H of the state.
        head_state: numbers of a head's state, by dim.
        made: device and dtype of the parameters.
    """

    __prepare_scriptable__ = check.not_scripted

    def __init__(
        self,
        hidden_size: int,
        channels: int,
        conv_size: int,
        conv_bias: bool,
        heads: int,
        head_state: tuple[int, int],
        made: dict[str, Any],
    ) -> None:
        super().__init__()
        self.hidden_size = check.size("hidden_size", hidden_size)
        self.conv_size = check.size("conv_size", conv_size)
        self.state_shape = heads, *head_state
        # It holds the weights alone: a depthwise convolution, as transformers has it.
        self.conv1d = nn.Conv1d(
            channels, channels, conv_size, groups=channels, bias=conv_bias, **made
        )
        # As Mamba-2 starts, https://arxiv.org/abs/2405.21060: steps from 0.001 to 0.1.
        step = torch.empty(heads, device=made["device"]).uniform_(math.log(1e-3), math.log(0.1))
        step = step.exp()
        self.dt_bias = nn.Parameter((step + (-torch.expm1(-step)).log()).to(made["dtype"]))
        rate = torch.empty(heads, device=made["device"]).uniform_(1.0, 16.0)
        self.A_log = nn.Parameter(rate.log().to(made["dtype"]))

    def new_state(self, requests: int, dtype: torch.dtype | None = None) -> RecurrentState:
        """The state of requests without tokens.

        Args:
            requests: B.
            dtype: of the last inputs; default that of the layer. Under autocast, autocast's.
        """
        weight, count = self.conv1d.weight, check.size("requests", requests)
        inputs = weight.new_zeros((count, weight.shape[0], self.conv_size - 1), dtype=dtype)
        return RecurrentState(
            inputs,
            torch.zeros(count, *self.state_shape, dtype=torch.float32, device=weight.device),
        )

    def forward(
        self,
        hidden: Tensor,
        *,
        state: RecurrentState | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Read the tokens in turn.

        Args:
            hidden: `[B, S, E]` dense, or `[T, E]` packed (with cu_seqlens int32 `[B + 1]` and
                max_seqlen in tokens), or a jagged nested tensor `[B, j, E]` (max_seqlen is then
                optional). Padding in front of a dense row is read like tokens: pack the rows.
            state: of the B requests, from `new_state`, changed in place: the next call goes on
                where this one ends. None: the tokens are whole texts, each begins without a state.

        Returns:
            As hidden.

        Raises:
            InvalidInput: an argument breaks this contract. Nothing is written.
        """
        if check.nested(hidden):
            check.absent("with a nested tensor, which says it", cu_seqlens=cu_seqlens)
            of = rows("hidden", hidden)
            longest = of.longest(max_seqlen)
            return of.like(
                self.forward(of.values, state=state, cu_seqlens=of.cu(), max_seqlen=longest)
            )
        dense = cu_seqlens is None
        hidden = check.hidden_states(hidden, self.hidden_size, dense)
        flat = hidden.flatten(0, -2)
        if cu_seqlens is None:
            check.absent("without cu_seqlens", max_seqlen=max_seqlen)
            count, longest = hidden.shape[:2]
            cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=flat.device) * longest
        else:
            check.tensor("cu_seqlens", cu_seqlens, "[B + 1]", 1)
            count = cu_seqlens.shape[0] - 1
            longest = check.longest("max_seqlen", max_seqlen, "cu_seqlens")
        projected = self._project(flat)
        states = self._states(state, projected[0], count)
        given = Requests(cu_seqlens, longest, state is None, not dense, states)
        return self._read(projected, given).view(hidden.shape)

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """The projections of tokens `[T, E]`, the inputs of the convolution `[T, C]` first."""
        raise NotImplementedError

    def _read(self, projected: tuple[Tensor, ...], requests: Requests) -> Tensor:
        """The output `[T, E]` of the projections."""
        raise NotImplementedError

    def _convolved(self, x: Tensor, requests: Requests) -> Tensor:
        """The convolution and SiLU of `x` `[T, C]`."""
        # Autocast projects in a dtype of its own, and the ops take one dtype.
        weight, bias = self.conv1d.weight.squeeze(1).to(x.dtype), self.conv1d.bias
        return causal_conv1d(
            x,
            weight,
            requests.states.conv,
            bias=None if bias is None else bias.to(x.dtype),
            activation="silu",
            **requests.arguments(),
        )

    def _states(self, given: RecurrentState | None, x: Tensor, count: int) -> RecurrentState:
        """The states given, or new ones for `count` fresh requests. x: the inputs `[T, C]`.

        All is checked before the first op writes.
        """
        shapes = (count, x.shape[1], self.conv_size - 1), (count, *self.state_shape)
        if given is None:
            return RecurrentState(
                x.new_empty(shapes[0]), x.new_empty(shapes[1], dtype=torch.float32)
            )
        if not isinstance(given, RecurrentState):
            fail(InvalidInput, "state", type(given).__name__, "a RecurrentState, or None")
        wanted = zip(("conv", "state"), shapes, (x.dtype, torch.float32), strict=True)
        for name, shape, dtype in wanted:
            each, field = getattr(given, name), f"state.{name}"
            need(each.shape == shape, field, f"shape {tuple(each.shape)}", f"{shape}")
            kind = each.dtype, each.device
            need(kind == (dtype, x.device), field, kind, f"{dtype} on {x.device}")
            leaf = torch.is_grad_enabled() and each.is_leaf and each.requires_grad
            need(not leaf, field, "a leaf that requires grad", "its clone(): it is changed")
        return given

    def _forgets(self) -> Tensor:
        """float32 `[H]`, the rate at which heads forget, below 0."""
        # In float16 the exponential may be infinite.
        return -self.A_log.float().exp()
