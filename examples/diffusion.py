"""Denoise images with a patched UNet of diffusers, for texts of different lengths: the same images,
and no attention to padding.

python examples/diffusion.py                             a tiny UNet with random weights
python examples/diffusion.py --model path/or/hub/name    the UNet of a Stable Diffusion pipeline, in
its folder `unet`
"""

import argparse

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

import attnops

TINY = {
    "sample_size": 8,
    "block_out_channels": (32, 32, 64, 64),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}


@torch.no_grad()
def denoise(
    unet: UNet2DConditionModel, texts: torch.Tensor, mask: torch.Tensor, steps: int
) -> torch.Tensor:
    """Images of a text each, `[B, C, H, W]`. texts: `[B, S, E]`, mask: bool `[B, S]`."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(steps)
    size = (unet.config.in_channels, *[unet.config.sample_size] * 2)
    some = torch.Generator().manual_seed(0)
    images = torch.randn(size, generator=some).to(texts).expand(len(texts), *size)
    for timestep in scheduler.timesteps:
        noise = unet(
            images, timestep, encoder_hidden_states=texts, encoder_attention_mask=mask
        ).sample
        images = scheduler.step(noise, timestep, images).prev_sample
    return images


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub name; default a tiny UNet")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    unet = (
        UNet2DConditionModel.from_pretrained(options.model, subfolder="unet")
        if options.model
        else UNet2DConditionModel(**TINY)
    )
    unet = unet.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    texts = torch.randn(2, 7, unet.config.cross_attention_dim, device=unet.device, dtype=unet.dtype)
    mask = torch.ones(2, 7, dtype=torch.bool, device=unet.device)
    mask[0, :4] = False  # the first text has three tokens, and padding on the left

    stock = denoise(unet, texts, mask, options.steps)
    with torch.no_grad(), attnops.patch(unet) as handle:
        report = handle.report()
        print(f"{len(report.patched)} of {len(report.rows)} attention modules patched")
        ours = denoise(unet, texts, mask, options.steps)
        padded = unet(
            ours[:1], 1, encoder_hidden_states=texts[:1], encoder_attention_mask=mask[:1]
        ).sample
        alone = unet(ours[:1], 1, encoder_hidden_states=texts[:1, 4:]).sample
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-3)
    print("the images are those of the stock attention")
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=1e-3)
    print("the padded text has the noise that it has without padding")


if __name__ == "__main__":
    main()
