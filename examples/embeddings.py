"""Embed texts of different lengths without padding: packed into one row, they get the embeddings that a padded batch gives.

python examples/embeddings.py                                      a tiny BERT with random weights
python examples/embeddings.py --model path/or/hub/name             any encoder of transformers
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, DataCollatorWithFlattening

import attnops
from attnops.hf import tiny


@torch.no_grad()
def padded(model: Any, texts: list[Tensor]) -> Tensor:
    """Means over the tokens of each text, `[texts, E]`, from rows of equal length."""
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    hidden = model(ids, attention_mask=mask).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@torch.no_grad()
def packed(model: Any, texts: list[Tensor]) -> Tensor:
    """The same from one row `[1, all tokens]`."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    row = {name: value for name, value in collate([{"input_ids": text.tolist()} for text in texts]).items() if name != "labels"}
    row = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in row.items()}
    hidden = model(**row).last_hidden_state[0]
    return torch.stack([part.mean(0) for part in hidden.split([len(text) for text in texts])])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny BERT")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModel.from_pretrained(options.model).eval() if options.model else tiny.model("bert").bert
    model = model.to(device)
    texts = [torch.randint(3, model.config.vocab_size, (n,), device=device) for n in (5, 31, 2, 12, 18)]
    with attnops.patch(model) as handle:
        report = handle.report()
        print(f"{len(report.patched)} of {len(report.rows)} attention modules patched")
        one, other = padded(model, texts), packed(model, texts)
    total = sum(map(len, texts))
    print(f"{len(texts)} texts: {len(texts) * max(map(len, texts))} tokens padded, {total} packed")
    print(f"smallest cosine of the two embeddings: {torch.cosine_similarity(one, other).min():.4f}")
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
