"""Classify images with a patched ViT of transformers: attention without a causal rule, checked
against eager attention.

python examples/vit.py                             a tiny ViT with random weights
python examples/vit.py --model path/or/hub/name    any image classifier of transformers whose
attention attnops can switch
"""

import argparse

import torch
from transformers import AutoModelForImageClassification, ViTConfig

import attnops

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny ViT")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model:
        model = AutoModelForImageClassification.from_pretrained(options.model, dtype="auto")
    else:
        model = AutoModelForImageClassification.from_config(
            ViTConfig(**TINY, num_labels=10, initializer_range=0.2)
        )
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randn(
        3, 3, *[model.config.image_size] * 2, device=model.device, dtype=model.dtype
    )

    with torch.no_grad(), attnops.patch(model) as handle:
        report = handle.report()
        print(f"{len(report.patched)} of {len(report.rows)} attention modules patched")
        print(handle.verify(pixel_values=images))
        classes = model(pixel_values=images).logits.argmax(-1)
        chosen = attnops.explain(model, pixel_values=images, quiet=True).chosen()
    print("classes:", classes.tolist())
    print("kernels:", *chosen)


if __name__ == "__main__":
    main()
