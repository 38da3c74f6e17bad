"""Tiny but real diffusers pipelines with random weights, built from configs, and calls of them.

Nothing is downloaded.
"""

from __future__ import annotations

import inspect
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
        in_channels=more.pop("in_channels", 4),
        out_channels=more.pop("out_channels", 4),
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


def with_text(folder: Path, kind: Any, scheduler: Any, **more: Any) -> Any:
    """A pipeline of the Stable Diffusion family: its own class and parts, the common text encoder and decoder."""
    parts = {
        "vae": autoencoder(),
        "text_encoder": CLIPTextModel(text_config()),
        "tokenizer": tokenizer(folder),
        "unet": more.pop("unet", None) or unet(cross_attention_dim=16),
        "scheduler": scheduler or diffusers.DDPMScheduler(clip_sample=False, steps_offset=1),
    }
    known = inspect.signature(kind.__init__).parameters
    if "requires_safety_checker" in known:
        more["requires_safety_checker"] = False
    if "safety_checker" in known:
        more["safety_checker"] = None
    if "feature_extractor" in known:
        more["feature_extractor"] = None
    return _quiet(kind(**parts, **more))


def controlnet(**more: Any) -> diffusers.ControlNetModel:
    """With outputs of some size: as built, they would be zero."""
    net = diffusers.ControlNetModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(4, 4),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        **more,
    )
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name.startswith(("controlnet_down", "controlnet_mid", "controlnet_cond_embedding.conv_out")):
                value.normal_(std=0.3)
    return net


def animatediff(folder: Path, scheduler: Any = None) -> Any:
    torch.manual_seed(0)
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )
    pipe = diffusers.AnimateDiffPipeline(
        vae=autoencoder(),
        text_encoder=CLIPTextModel(text_config()),
        tokenizer=tokenizer(folder),
        unet=unet(cross_attention_dim=16),
        motion_adapter=adapter,
        scheduler=scheduler or diffusers.EulerAncestralDiscreteScheduler(),
    )
    return _quiet(pipe)


def dit(scheduler: Any = None) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=4,
        num_layers=1,
        patch_size=2,
        attention_head_dim=4,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=1000,
    )
    with torch.no_grad():
        for value in transformer.parameters():
            value.add_(0.1 * torch.randn_like(value))
    scheduler = scheduler or diffusers.DDPMScheduler(clip_sample=False)
    return _quiet(diffusers.DiTPipeline(transformer, autoencoder(), scheduler))


def kandinsky(scheduler: Any = None, kind: Any = None, channels: int = 4) -> Any:
    """Kandinsky 2.2's decoder: its network returns a variance beside the noise."""
    torch.manual_seed(0)
    net = unet(
        in_channels=channels,
        out_channels=8,
        cross_attention_dim=16,
        encoder_hid_dim=16,
        encoder_hid_dim_type="image_proj",
        addition_embed_type="image",
    )
    movq = diffusers.VQModel(
        block_out_channels=[8, 8],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        num_vq_embeddings=12,
        norm_num_groups=4,
        vq_embed_dim=4,
    )
    scheduler = scheduler or diffusers.DDPMScheduler(clip_sample=False, thresholding=False)
    return _quiet((kind or diffusers.KandinskyV22Pipeline)(unet=net, scheduler=scheduler, movq=movq))


def wan(two: bool = False, scheduler: Any = None, **more: Any) -> Any:
    """A video pipeline: frames in a state, two network calls a step; Wan 2.2 has two networks."""

    def transformer() -> Any:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 1, 1),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=16,
            num_layers=1,
            rope_max_seq_len=8,
        )

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        transformer=transformer(),
        transformer_2=transformer() if two else None,
        boundary_ratio=0.5 if two else None,
    )
    return _quiet(pipe)


def _quiet(pipe: Any) -> Any:
    """As from_pretrained gives them, in evaluation mode; and no progress bar."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
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
