"""Tiny but real diffusers pipelines with random weights, built from configs, and calls of them.

Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer


def tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer of single letters."""
    letters = [chr(c) for c in range(97, 123)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def text_config(**more: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **more,
    )


def autoencoder(channels: int = 4) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=[8, 8],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=8,
        shift_factor=0.0,
    )


def unet(**more: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=4,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
        **more,
    )


def stable_diffusion(folder: Path, scheduler: Any = None, kind: Any = None) -> Any:
    """Stable Diffusion 1 and 2: a text prompt, guidance, latents of 4×4×4."""
    torch.manual_seed(0)
    pipe = (kind or diffusers.StableDiffusionPipeline)(
        vae=autoencoder(),
        text_encoder=CLIPTextModel(text_config()),
        tokenizer=tokenizer(folder),
        unet=unet(cross_attention_dim=16),
        scheduler=scheduler or diffusers.DDPMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _quiet(pipe)


def stable_diffusion_xl(folder: Path, scheduler: Any = None) -> Any:
    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=autoencoder(),
        text_encoder=CLIPTextModel(text_config()),
        text_encoder_2=CLIPTextModelWithProjection(text_config(projection_dim=16)),
        tokenizer=tokenizer(folder),
        tokenizer_2=tokenizer(folder),
        unet=unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
        ),
        scheduler=scheduler or diffusers.EulerAncestralDiscreteScheduler(),
        add_watermarker=False,
    )
    return _quiet(pipe)


def stable_diffusion_3(scheduler: Any = None) -> Any:
    """A transformer with flow matching; takes prompt embeddings, having no text encoders."""
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True, shift=3.0),
        vae=autoencoder(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    return _quiet(pipe)


def flux(scheduler: Any = None) -> Any:
    """Packed latents, timesteps divided by 1000, guidance as an embedding."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    pipe = diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        vae=autoencoder(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    return _quiet(pipe)


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ------------------------------------------------------------------ calls of them


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def embeddings(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "prompt_embeds": torch.randn(count, 5, 16, generator=generator),
        "pooled_prompt_embeds": torch.randn(count, 16, generator=generator),
    }


def negative(count: int) -> dict[str, Tensor]:
    return {f"negative_{name}": -value for name, value in embeddings(count).items()}


SIZE = {"num_inference_steps": 12, "height": 8, "width": 8, "output_type": "latent"}
PROMPTS = {"prompt": ["a cat", "dog"], "negative_prompt": ["x", "y z"], "num_images_per_prompt": 2} | SIZE
DDIM = {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False}
DPM = {"algorithm_type": "sde-dpmsolver++"}
PIPELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stable diffusion, DDPM": (stable_diffusion, PROMPTS),
    "stable diffusion, DDIM": (
        lambda folder: stable_diffusion(folder, diffusers.DDIMScheduler(**DDIM)),
        PROMPTS | {"eta": 1.0},
    ),
    "stable diffusion, DPM++ 2M SDE": (
        lambda folder: stable_diffusion(folder, diffusers.DPMSolverMultistepScheduler(**DPM)),
        PROMPTS,
    ),
    "stable diffusion, rescaled guidance": (stable_diffusion, PROMPTS | {"guidance_rescale": 0.5}),
    "stable diffusion, no guidance": (stable_diffusion, PROMPTS | {"guidance_scale": 1.0}),
    "stable diffusion XL, Euler ancestral": (stable_diffusion_xl, PROMPTS),
    "stable diffusion 3, flow": (
        lambda folder: stable_diffusion_3(),
        SIZE | embeddings(4) | negative(4),
    ),
    "flux, flow": (lambda folder: flux(), SIZE | embeddings(4)),
}
