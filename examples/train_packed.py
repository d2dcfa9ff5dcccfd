"""Train on documents packed into one row: no padding, no look across documents, and gradients
through attnops.

python examples/train_packed.py                             a tiny Llama with random weights
python examples/train_packed.py --model path/or/hub/name    any causal language model of
transformers
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

import attnops
from attnops.hf import tiny


def documents(count: int, vocab: int) -> list[dict[str, list[int]]]:
    """Documents of different lengths that repeat two random tokens, as a tokenized data set has
    them."""
    lengths = torch.randint(4, 16, (count,)).tolist()
    return [{"input_ids": torch.randint(3, vocab, (2,)).repeat(n)[:n].tolist()} for n in lengths]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny Llama")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        if options.model
        else tiny.model("llama")
    )
    model = model.to(device).train()
    attnops.patch(model)

    # The collator joins documents and says where each begins; every layer keeps them apart by
    # `attnops.varlen_attention`.
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if options.model else 3e-3)
    losses = []
    for step in range(options.steps):
        rows = documents(16, model.config.vocab_size)
        batch = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in collate(rows).items()
        }
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(
                f"step {step:2}: {len(rows)} documents in {batch['input_ids'].shape[1]} tokens, "
                f"loss {losses[-1]:.2f}"
            )
    assert losses[-1] < losses[0], "the loss did not fall"


if __name__ == "__main__":
    main()
