"""Training steps in two processes, under DDP or FSDP2, beside those of one process over the whole
batch."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import attnops
from attnops.hf import tiny
from attnops.nn import LatentAttention, RotaryEmbedding, SelfAttention
from tests.helpers import ready

WORLD, STEPS, RATE, VOCAB, WIDTH = 2, 3, 0.05, 32, 256
LENGTHS = (5, 11)  # of the documents that each process has in a step
Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """What is sharded and compiled: a layer, and the residual."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(WIDTH), layer

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return hidden + self.layer(self.norm(hidden), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


class Decoder(nn.Module):
    """Packed documents through layers of `attnops.nn`, with grouped heads, a window, sinks and
    latents."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        grouped = SelfAttention(
            WIDTH, 8, 4, 64, qk_norm=True, rope=RotaryEmbedding(64), window=(6, -1), sinks=True
        )
        sizes: dict[str, int] = {
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }
        latent = LatentAttention(
            WIDTH, 3, q_lora_rank=20, rope=RotaryEmbedding(8, interleaved=True), **sizes
        )
        self.layers = nn.ModuleList([Block(grouped), Block(latent)])

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cu_seqlens, max_seqlen)
        out: Tensor = self.head(hidden)
        return out


def modules(device: str) -> tuple[nn.Module, list[nn.Module], Loss]:
    """The model of our layers, its blocks, and its loss of tokens `[rows, tokens]`: a row holds the
    documents of one process."""
    model = Decoder().to(device)

    def loss(run: nn.Module, tokens: Tensor) -> Tensor:
        ends = torch.tensor([0, *LENGTHS * len(tokens)], device=device).cumsum(0)
        labels = tokens.flatten().roll(-1)
        labels[ends[1:] - 1] = -100
        return F.cross_entropy(run(tokens.flatten(), ends.int(), max(LENGTHS)), labels)

    return model, list(model.layers), loss


def hugging_face(device: str) -> tuple[nn.Module, list[nn.Module], Loss]:
    """As `modules`, of a patched model of transformers."""
    model = tiny.model("llama").to(device).train()
    attnops.patch(model)
    return (
        model,
        list(model.model.layers),
        lambda run, tokens: run(tokens, labels=tokens, use_cache=False).loss,
    )


MODELS = {"attnops.nn": modules, "transformers": hugging_face}
WAYS = ("ddp", "fsdp2")
CASES = {
    f"{model}, {way}, {'compiled' if compiled else 'eager'}": (model, way, compiled)
    for model in MODELS
    for way in WAYS
    for compiled in (False, True)
}


def train(
    model: nn.Module, run: nn.Module, loss: Loss, batches: Tensor, autocast: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(the loss of each step, every parameter's way from its start, by name) of steps over batches
    `[STEPS, rows, tokens]`."""
    start = {name: whole(p) for name, p in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for tokens in batches:
        with torch.autocast(batches.device.type, torch.bfloat16, enabled=autocast):
            now = loss(run, tokens)
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(now.detach())
    return losses, {name: whole(p) - start[name] for name, p in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter, gathered if it is sharded."""
    return (
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
    )


def parallel(
    way: str, model: nn.Module, blocks: list[nn.Module], compiled: bool, backend: str
) -> nn.Module:
    if way == "ddp":
        # Buckets as small as they can be, so that Dynamo splits the graph between the layers.
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        return torch.compile(ddp, backend=backend) if compiled else ddp  # type: ignore[return-value]
    for block in blocks:
        if compiled:
            block.compile(backend=backend, fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    return model


def case(name: str, rank: int, device: str, backend: str) -> tuple[float, float]:
    """The largest distance from one process's losses, and from its steps of a parameter, both
    relative."""
    kind, way, compiled = CASES[name]
    autocast = device != "cpu"
    torch.manual_seed(0)
    batches = torch.randint(1, VOCAB, (STEPS, WORLD, sum(LENGTHS)), device=device)
    torch.manual_seed(0)
    model, _, loss = MODELS[kind](device)
    losses, moved = train(model, model, loss, batches, autocast)
    torch.manual_seed(0)
    model, blocks, loss = MODELS[kind](device)
    run = parallel(way, model, blocks, compiled, backend)
    own, found = train(model, run, loss, batches[:, rank : rank + 1], autocast)
    mean = torch.stack(own)
    dist.all_reduce(mean)
    mean /= WORLD
    far = float(((mean - torch.stack(losses)) / torch.stack(losses)).abs().max())
    assert found.keys() == moved.keys()
    assert all(float(moved[n].norm()) > 0 for n in moved), (
        "a parameter without a gradient proves nothing"
    )
    return far, max(float((found[n] - moved[n]).norm() / moved[n].norm()) for n in moved)


def worker(rank: int, port: int, device: str, backend: str, names: list[str], out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if device != "cpu":
        device = f"{device}:{rank}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    try:
        found: dict[str, Any] = {}
        for name in names:
            torch._dynamo.reset()
            try:
                found[name] = case(name, rank, device, backend)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
                break  # the other process may wait in a collective of this case
        torch.save(found, Path(out, str(rank)))
    finally:
        dist.destroy_process_group()


def results(
    device: str, backend: str, names: list[str], out: Path, timeout_s: float = 300
) -> dict[str, list[Any]]:
    """What each process found, by case; the text of an error where a case raised one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = (
        ready() if device == "cpu" else get_context("spawn")
    )  # CUDA cannot begin in a fork of a process that has asked for it
    processes = [
        context.Process(target=worker, args=(rank, port, device, backend, names, str(out)))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
    found = [
        torch.load(path) if (path := Path(out, str(rank))).exists() else {} for rank in range(WORLD)
    ]
    return {name: [each.get(name, "it did not run") for each in found] for name in names}


def check(found: list[Any], limit: float) -> tuple[float, float]:
    """The larger distances of the two processes, neither above the limit."""
    for far in found:
        assert not isinstance(far, str), far
        assert max(far) <= limit, far
    losses, moved = zip(*found, strict=True)
    return max(losses), max(moved)
