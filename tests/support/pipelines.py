"""Tiny but real diffusers pipelines with random weights, built from configs, and calls of them.

Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

WIDTHS = (4, 8)
"""Channels of the networks: thousands of latents of 4×4×4 are drawn with them."""


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
        block_out_channels=WIDTHS,
        layers_per_block=1,
        sample_size=4,
        in_channels=more.pop("in_channels", 4),
        out_channels=more.pop("out_channels", 4),
        down_block_types=more.pop("down", ("DownBlock2D", "CrossAttnDownBlock2D")),
        up_block_types=more.pop("up", ("CrossAttnUpBlock2D", "UpBlock2D")),
        norm_num_groups=4,
        attention_head_dim=2,
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
        "scheduler": scheduler or diffusers.DDPMScheduler(clip_sample=True, steps_offset=1),
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
    """A ControlNet whose outputs are not zero, as they are when it is built."""
    net = diffusers.ControlNetModel(
        block_out_channels=WIDTHS,
        layers_per_block=1,
        in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(4, 4),
        norm_num_groups=4,
        attention_head_dim=2,
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
        block_out_channels=WIDTHS,
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
    scheduler = scheduler or diffusers.DDPMScheduler(clip_sample=True)
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
    scheduler = scheduler or diffusers.DDPMScheduler(clip_sample=True)
    return _quiet((kind or diffusers.KandinskyV22Pipeline)(unet=net, scheduler=scheduler, movq=movq))


def learned_kandinsky() -> Any:
    """The same with its variance, which must not leave its range by much."""
    pipe = kandinsky(diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=True))
    _learn_variance(pipe.unet)
    return pipe


def deepfloyd(kind: str = "IFPipeline", **more: Any) -> Any:
    """DeepFloyd IF, in pixels: a learned variance and dynamic thresholding, as its own configuration has them."""
    torch.manual_seed(0)
    net = unet(
        in_channels=6 if more else 3,
        out_channels=6,
        cross_attention_dim=16,
        encoder_hid_dim=16,
        class_embed_type="timestep" if more else None,
    )
    _learn_variance(net)
    thresholds = {"thresholding": True, "dynamic_thresholding_ratio": 0.95, "sample_max_value": 1.5}
    pipe = getattr(diffusers, kind)(
        tokenizer=None,
        text_encoder=None,
        unet=net,
        scheduler=diffusers.DDPMScheduler(variance_type="learned_range", **thresholds),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
        **more,
    )
    return _quiet(pipe)


def _learn_variance(net: Any) -> None:
    """The second half of the channels: large in some and small in others."""
    half = len(net.conv_out.bias) // 2
    net.conv_out.weight.data[half:] *= 0.2
    net.conv_out.bias.data[half:] = torch.tensor([0.8, -0.8, 0.8, -0.8])[:half]


def stable_audio() -> Any:
    """States are sequences; the scheduler's noise is the increments of a Brownian path."""
    pytest.importorskip("torchsde")
    torch.manual_seed(0)
    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        cross_attention_dim=16,
        cross_attention_input_dim=16,
        global_states_input_dim=32,
        time_proj_dim=8,
    )
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        sampling_rate=4,
    )
    pipe = diffusers.StableAudioPipeline(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        projection_model=StableAudioProjectionModel(16, 16, min_value=0, max_value=32),
        transformer=transformer,
        scheduler=diffusers.CosineDPMSolverMultistepScheduler(),
    )
    return _quiet(pipe)


def kandinsky_prior(folder: Path) -> Any:
    """Kandinsky 2.2's prior: the state is an embedding."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        projection_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    net = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, embedding_dim=16, num_layers=1, num_embeddings=16
    )
    pipe = diffusers.KandinskyV22PriorPipeline(
        prior=net,
        image_encoder=CLIPVisionModelWithProjection(vision),
        text_encoder=CLIPTextModelWithProjection(text_config(projection_dim=16)),
        tokenizer=tokenizer(folder),
        scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
        ),
        image_processor=None,
    )
    return _quiet(pipe)


def cogvideox() -> Any:
    """A video pipeline whose scheduler looks back."""
    torch.manual_seed(0)
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=16,
        num_layers=1,
        sample_width=4,
        sample_height=4,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=5,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(4,) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    scheduler = diffusers.CogVideoXDPMScheduler()
    return _quiet(
        diffusers.CogVideoXPipeline(
            tokenizer=None, text_encoder=None, vae=vae, transformer=transformer, scheduler=scheduler
        )
    )


def unconditional(kind: str, scheduler: Any, blocks: int = 2) -> Any:
    torch.manual_seed(0)
    net = diffusers.UNet2DModel(
        sample_size=4,
        block_out_channels=WIDTHS[:blocks],
        layers_per_block=1,
        norm_num_groups=4,
        add_attention=blocks > 1,
        down_block_types=("DownBlock2D",) * blocks,
        up_block_types=("UpBlock2D",) * blocks,
    )
    return _quiet(getattr(diffusers, kind)(net, scheduler))


def hidream() -> Any:
    """Text embeddings of several layers: the batch is their second dimension."""
    torch.manual_seed(0)
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[16, 16],
        text_emb_dim=16,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(4, 4),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    absent = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3", "_4")}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipe = diffusers.HiDreamImagePipeline(scheduler, autoencoder(), transformer=transformer, **absent)
    pipe.default_sample_size = 4
    return _quiet(pipe)


def lumina2() -> Any:
    """Guidance by two calls of the network, which is given 1 minus the time."""
    torch.manual_seed(0)
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 8, 8),
        cap_feat_dim=16,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipe = diffusers.Lumina2Pipeline(transformer, scheduler, autoencoder(), text_encoder=None, tokenizer=None)
    return _quiet(pipe)


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
    """In evaluation mode, as from_pretrained returns them, and without a progress bar."""
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

# ------------------------------------------------------------------ the table: what is exact, what is refused


@dataclass(frozen=True)
class Case:
    """A row of the table in docs/diffusers.md, and a test."""

    pipeline: str
    scheduler: str
    build: Callable[[Path], Any]
    arguments: Callable[[int], dict[str, Any]]
    """Arguments for this number of images."""
    note: str = ""
    refused: str | None = None
    """Part of the error message, if the pipeline is refused."""
    steps: int = 6
    """Enough that drafts are kept, for the two-sample tests."""
    draws: int = 400
    """For the two-sample tests."""
    parts: int = 1
    """Parts in which a loop that changes is drawn."""

    def __str__(self) -> str:
        return f"{self.pipeline}, {self.scheduler}{', ' + self.note if self.note else ''}"


def random(*shape: int, seed: int = 0, unit: bool = False) -> Tensor:
    draw = torch.rand if unit else torch.randn
    return draw(shape, generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:
    """The right half is to be painted."""
    half = torch.zeros(1, 1, 8, 8)
    half[..., 4:] = 1
    return half


def prompts(count: int, **more: Any) -> dict[str, Any]:
    """Two prompts for an even number of images."""
    words = ["a cat"] if count % 2 else ["a cat", "dog"]
    told = {"prompt": words, "num_images_per_prompt": count // len(words)}
    return told | {"num_inference_steps": 12, "output_type": "latent"} | more


def sized(count: int, **more: Any) -> dict[str, Any]:
    return prompts(count, height=8, width=8, **more)


def pictured(count: int, size: int = 8, **more: Any) -> dict[str, Any]:
    """A picture for each prompt: what pipelines draw for a picture (its latents, noise), they draw once."""
    words = ["a cat", "dog"] * (count // 2) + ["a cat"] * (count % 2)
    pictures = {"image": random(1, 3, size, size, unit=True).repeat(count, 1, 1, 1)}
    return pictures | {"prompt": words, "num_inference_steps": 12, "output_type": "latent"} | more


def inpainting(count: int, **more: Any) -> dict[str, Any]:
    return pictured(count, mask_image=mask(), height=8, width=8, **more)


def embedded(count: int, **more: Any) -> dict[str, Any]:
    return SIZE | embeddings(count) | negative(count) | more


def texts(count: int, **more: Any) -> dict[str, Any]:
    words = {"prompt_embeds": random(count, 5, 16), "negative_prompt_embeds": random(count, 5, 16, seed=1)}
    return words | {"num_inference_steps": 12} | more


def layered(count: int, **more: Any) -> dict[str, Any]:
    """HiDream's three kinds of text embeddings."""
    shapes = {"prompt_embeds_t5": (count, 5, 16), "prompt_embeds_llama3": (2, count, 5, 16)}
    shapes["pooled_prompt_embeds"] = (count, 16)
    words = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return SIZE | words | {f"negative_{name}": -value for name, value in words.items()} | more


def masked(count: int, **more: Any) -> dict[str, Any]:
    seen = torch.ones(count, 5, dtype=torch.bool)
    masks = {"prompt_attention_mask": seen, "negative_prompt_attention_mask": seen}
    return texts(count, height=16, width=16, output_type="latent") | masks | more


def video(count: int, **more: Any) -> dict[str, Any]:
    return texts(count, height=16, width=16, num_frames=5, output_type="latent") | more


def embedded_pictures(count: int, **more: Any) -> dict[str, Any]:
    told = pictured(count, height=8, width=8, **more) | embeddings(count)
    return {name: value for name, value in told.items() if name != "prompt"}


def plain(count: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": count, "num_inference_steps": 12, "output_type": "np"} | more


def vectors(count: int, **more: Any) -> dict[str, Any]:
    words = {"image_embeds": random(count, 16), "negative_image_embeds": random(count, 16, seed=1)}
    return words | SIZE | more


def sd(kind: str = "StableDiffusionPipeline", scheduler: Any = None, channels: int = 4, **more: Any) -> Any:
    """Builds a pipeline of the Stable Diffusion family; parts are made anew each time."""

    def build(folder: Path) -> Any:
        torch.manual_seed(0)
        parts = {name: part() for name, part in more.items() if name != "unet"}
        net = unet(cross_attention_dim=16, in_channels=channels, **more.get("unet", {}))
        return with_text(folder, getattr(diffusers, kind), scheduler and scheduler(), unet=net, **parts)

    return build


def a_scheduler(name: str, **config: Any) -> Callable[[], Any]:
    return lambda: getattr(diffusers, name)(**config)


def sibling(kind: str, of: Any, **more: Any) -> Callable[[Path], Any]:
    """Another pipeline of the parts of one."""

    def build(folder: Path) -> Any:
        made = getattr(diffusers, kind)
        known = inspect.signature(made.__init__).parameters
        parts = {k: v for k, v in of(folder).components.items() if k in known}
        return _quiet(made(**parts, **more))

    return build


def adapter() -> Any:
    return diffusers.T2IAdapter(in_channels=3, channels=list(WIDTHS), num_res_blocks=1, downscale_factor=2)


class Renamed(diffusers.DDPMScheduler):
    """A user's own scheduler that changes nothing about a step."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)


CONTROL = random(1, 3, 8, 8, unit=True)
EULER = a_scheduler("EulerAncestralDiscreteScheduler")
MULTISTEP = a_scheduler("DPMSolverMultistepScheduler", **DPM)
INPAINT_4 = "StableDiffusionInpaintPipeline"

EXACT = [
    Case(
        "DDPMPipeline", "DDPM", lambda folder: unconditional("DDPMPipeline", diffusers.DDPMScheduler()), plain
    ),
    Case(
        "DDIMPipeline",
        "DDIM",
        lambda folder: unconditional("DDIMPipeline", diffusers.DDIMScheduler()),
        lambda n: plain(n, eta=1.0),
        "`eta=1`",
    ),
    Case("StableDiffusionPipeline", "DDPM", sd(), sized, draws=1000),
    Case(
        "StableDiffusionPipeline",
        "DDPM",
        sd(scheduler=lambda: Renamed(clip_sample=True, steps_offset=1)),
        sized,
        "a subclass of the scheduler",
    ),
    Case(
        "StableDiffusionPipeline", "DDPM", sd(), lambda n: sized(n, guidance_rescale=0.5), "rescaled guidance"
    ),
    Case("StableDiffusionPipeline", "DDPM", sd(), lambda n: sized(n, guidance_scale=1.0), "no guidance"),
    Case(
        "StableDiffusionPipeline",
        "DDIM",
        sd(scheduler=a_scheduler("DDIMScheduler", **DDIM)),
        lambda n: sized(n, eta=1.0),
        "`eta=1`",
    ),
    Case(
        "StableDiffusionPipeline",
        "DDPM parallel",
        sd(scheduler=a_scheduler("DDPMParallelScheduler", clip_sample=True, steps_offset=1)),
        sized,
    ),
    Case(
        "StableDiffusionPipeline",
        "DDIM parallel",
        sd(scheduler=a_scheduler("DDIMParallelScheduler", **DDIM)),
        lambda n: sized(n, eta=1.0),
        "`eta=1`",
    ),
    Case("StableDiffusionPipeline", "Euler ancestral", sd(scheduler=EULER), sized),
    Case("StableDiffusionPipeline", "DPM-Solver++ SDE", sd(scheduler=MULTISTEP), sized),
    Case(
        "StableDiffusionPipeline",
        "DPM-Solver++ SDE singlestep",
        sd(
            scheduler=a_scheduler(
                "DPMSolverSinglestepScheduler", solver_order=1, final_sigmas_type="sigma_min", **DPM
            )
        ),
        sized,
        "order 1",
    ),
    Case(
        "StableDiffusionPipeline",
        "EDM DPM-Solver++ SDE",
        sd(scheduler=a_scheduler("EDMDPMSolverMultistepScheduler", **DPM)),
        sized,
    ),
    Case("StableDiffusionPipeline", "LCM", sd(scheduler=a_scheduler("LCMScheduler")), sized),
    Case(
        "LatentConsistencyModelPipeline",
        "LCM",
        sd("LatentConsistencyModelPipeline", a_scheduler("LCMScheduler"), unet={"time_cond_proj_dim": 8}),
        sized,
    ),
    Case(
        "StableDiffusionPipeline",
        "TCD",
        sd(scheduler=a_scheduler("TCDScheduler")),
        lambda n: sized(n, eta=0.3),
        "`eta=0.3`",
    ),
    Case(
        "StableDiffusionImg2ImgPipeline",
        "DDPM",
        sd("StableDiffusionImg2ImgPipeline"),
        lambda n: pictured(n, strength=0.6),
        steps=12,
    ),
    Case(INPAINT_4, "DDPM", sd(INPAINT_4), inpainting, "4 channels"),
    Case(INPAINT_4, "DPM-Solver++ SDE", sd(INPAINT_4, MULTISTEP), inpainting, "4 channels"),
    Case(INPAINT_4, "Euler ancestral", sd(INPAINT_4, EULER), inpainting, "4 channels", steps=8),
    Case(INPAINT_4, "DDPM", sd(INPAINT_4, channels=9), inpainting, "9 channels"),
    Case(
        "StableDiffusionInstructPix2PixPipeline",
        "Euler ancestral",
        sd("StableDiffusionInstructPix2PixPipeline", EULER, channels=8),
        pictured,
    ),
    Case(
        "StableDiffusionUpscalePipeline",
        "DDPM",
        sd(
            "StableDiffusionUpscalePipeline",
            channels=7,
            low_res_scheduler=diffusers.DDPMScheduler,
            unet={"num_class_embeds": 400},
        ),
        lambda n: pictured(n, size=4),
    ),
    Case(
        "StableDiffusionControlNetPipeline",
        "DDPM",
        sd("StableDiffusionControlNetPipeline", controlnet=controlnet),
        lambda n: prompts(n, image=CONTROL),
    ),
    Case(
        "StableDiffusionControlNetPipeline",
        "DDPM",
        sd("StableDiffusionControlNetPipeline", controlnet=controlnet),
        lambda n: prompts(n, image=CONTROL, guess_mode=True),
        "guess mode",
    ),
    Case(
        "StableDiffusionControlNetPipeline",
        "DDPM",
        sd("StableDiffusionControlNetPipeline", controlnet=lambda: [controlnet(), controlnet()]),
        lambda n: prompts(n, image=[CONTROL, CONTROL]),
        "two of them",
    ),
    Case(
        "StableDiffusionControlNetImg2ImgPipeline",
        "DDPM",
        sd("StableDiffusionControlNetImg2ImgPipeline", controlnet=controlnet),
        lambda n: pictured(n, control_image=CONTROL),
        steps=9,
    ),
    Case(
        "StableDiffusionControlNetInpaintPipeline",
        "DDPM",
        sd("StableDiffusionControlNetInpaintPipeline", controlnet=controlnet),
        lambda n: inpainting(n, control_image=CONTROL),
        "4 channels",
    ),
    Case(
        "StableDiffusionAdapterPipeline",
        "DDPM",
        sd(
            "StableDiffusionAdapterPipeline",
            adapter=adapter,
            unet={"down": ("CrossAttnDownBlock2D", "DownBlock2D"), "up": ("UpBlock2D", "CrossAttnUpBlock2D")},
        ),
        lambda n: pictured(n, height=8, width=8),
    ),
    Case("StableDiffusionPAGPipeline", "DDPM", sd("StableDiffusionPAGPipeline"), sized),
    Case(
        "StableDiffusionXLPAGPipeline",
        "Euler ancestral",
        sibling("StableDiffusionXLPAGPipeline", stable_diffusion_xl, add_watermarker=False),
        sized,
    ),
    Case(
        "AnimateDiffPipeline",
        "Euler ancestral",
        animatediff,
        lambda n: {
            "prompt": ["a cat"] * n,
            "num_frames": 3,
            "height": 8,
            "width": 8,
            "num_inference_steps": 12,
            "output_type": "latent",
        },
        draws=100,
    ),
    Case("StableDiffusionXLPipeline", "Euler ancestral", stable_diffusion_xl, sized),
    Case(
        "StableDiffusionXLInpaintPipeline",
        "Euler ancestral",
        sibling("StableDiffusionXLInpaintPipeline", stable_diffusion_xl, add_watermarker=False),
        inpainting,
        "4 channels",
        steps=9,
    ),
    Case(
        "StableDiffusionXLImg2ImgPipeline",
        "Euler ancestral",
        sibling("StableDiffusionXLImg2ImgPipeline", stable_diffusion_xl, add_watermarker=False),
        lambda n: pictured(n, strength=0.6),
        steps=12,
    ),
    Case(
        "StableDiffusionXLPipeline",
        "Euler ancestral",
        stable_diffusion_xl,
        lambda n: sized(n, denoising_end=0.6) | {"num_inference_steps": 20},
        "`denoising_end`",
        steps=18,
    ),
    Case(
        "StableDiffusionXLImg2ImgPipeline",
        "Euler ancestral",
        sibling("StableDiffusionXLImg2ImgPipeline", stable_diffusion_xl, add_watermarker=False),
        lambda n: pictured(n, denoising_start=0.5) | {"num_inference_steps": 18},
        "`denoising_start`",
        steps=18,
    ),
    Case("StableDiffusion3Pipeline", "flow matching", lambda folder: stable_diffusion_3(), embedded),
    Case(
        "StableDiffusion3Pipeline",
        "flow matching LCM",
        lambda folder: stable_diffusion_3(diffusers.FlowMatchLCMScheduler()),
        embedded,
    ),
    Case(
        "StableDiffusion3Img2ImgPipeline",
        "flow matching",
        sibling("StableDiffusion3Img2ImgPipeline", lambda folder: stable_diffusion_3()),
        lambda n: embedded_pictures(n, strength=0.6) | negative(n),
        steps=12,
    ),
    Case("FluxPipeline", "flow matching", lambda folder: flux(), lambda n: SIZE | embeddings(n)),
    Case(
        "FluxImg2ImgPipeline",
        "flow matching",
        sibling("FluxImg2ImgPipeline", lambda folder: flux()),
        lambda n: embedded_pictures(n, strength=0.6),
        steps=12,
    ),
    Case(
        "FluxInpaintPipeline",
        "flow matching",
        sibling("FluxInpaintPipeline", lambda folder: flux()),
        lambda n: embedded_pictures(n, mask_image=mask(), strength=1.0),
    ),
    Case(
        "KandinskyV22PriorPipeline",
        "UnCLIP",
        kandinsky_prior,
        lambda n: prompts(n, output_type="pt"),
        "fixed variance",
    ),
    Case("KandinskyV22Pipeline", "DDPM", lambda folder: kandinsky(), vectors),
    Case("KandinskyV22Pipeline", "DDPM", lambda folder: learned_kandinsky(), vectors, "learned variance"),
    Case(
        "DiTPipeline",
        "DDPM",
        lambda folder: dit(),
        lambda n: {"class_labels": list(range(n)), "num_inference_steps": 12, "output_type": "pt"},
        "with guidance",
    ),
    Case(
        "IFPipeline",
        "DDPM",
        lambda folder: deepfloyd(),
        lambda n: texts(n, height=4, width=4, output_type="pt"),
        "learned variance",
    ),
    Case(
        "IFSuperResolutionPipeline",
        "DDPM",
        lambda folder: deepfloyd(
            "IFSuperResolutionPipeline", image_noising_scheduler=diffusers.DDPMScheduler()
        ),
        lambda n: texts(n, image=random(n, 3, 2, 2), height=4, width=4, output_type="pt"),
        "learned variance",
    ),
    Case(
        "StableAudioPipeline",
        "Cosine DPM-Solver++ SDE",
        lambda folder: stable_audio(),
        lambda n: texts(n, audio_end_in_s=1.0, output_type="latent"),
    ),
    Case("WanPipeline", "flow matching", lambda folder: wan(), video, "one network"),
    Case("WanPipeline", "flow matching", lambda folder: wan(two=True), video, "two networks"),
    Case(
        "CogVideoXPipeline",
        "CogVideoX DPM",
        lambda folder: cogvideox(),
        lambda n: video(n, max_sequence_length=5),
    ),
    Case("HiDreamImagePipeline", "flow matching", lambda folder: hidream(), layered),
    Case("Lumina2Pipeline", "flow matching", lambda folder: lumina2(), masked),
    Case(
        "WanPipeline",
        "flow matching",
        lambda folder: wan(two=True),
        lambda n: video(n, guidance_scale_2=2.0),
        "two networks, another `guidance_scale_2`",
        steps=12,
        parts=2,
    ),
    Case(
        "StableDiffusion3Pipeline",
        "flow matching",
        lambda folder: stable_diffusion_3(),
        lambda n: embedded(n, skip_guidance_layers=[0]),
        "`skip_guidance_layers`",
        steps=12,
        parts=3,
    ),
    Case(
        "StableDiffusionControlNetPipeline",
        "DDPM",
        sd("StableDiffusionControlNetPipeline", controlnet=controlnet),
        lambda n: prompts(n, image=CONTROL, control_guidance_end=0.5),
        "`control_guidance_end`",
        parts=2,
    ),
    Case(
        "Lumina2Pipeline",
        "flow matching",
        lambda folder: lumina2(),
        lambda n: masked(n, cfg_trunc_ratio=0.5),
        "`cfg_trunc_ratio`",
        parts=2,
    ),
]
"""Pipelines whose samples are compared with those of the sequential pipeline."""

REFUSED = [
    Case(
        "StableDiffusionPAGPipeline",
        "DDPM",
        sd("StableDiffusionPAGPipeline"),
        lambda n: sized(n, pag_adaptive_scale=0.001),
        "`pag_adaptive_scale`",
        "pag_adaptive_scale=0.0 turns it off",
    ),
    Case(
        "CogVideoXPipeline",
        "CogVideoX DPM",
        lambda folder: cogvideox(),
        lambda n: video(n, max_sequence_length=5, use_dynamic_cfg=True),
        "`use_dynamic_cfg`",
        "use_dynamic_cfg=False turns it off",
    ),
    Case(
        "StableDiffusionSAGPipeline",
        "DDPM",
        sd("StableDiffusionSAGPipeline"),
        lambda n: prompts(n, height=24, width=24),
        "",
        "at step 0 the pipeline gives its unet other values than its latents",
    ),
    Case(
        "StableDiffusionPanoramaPipeline",
        "DDPM",
        sd("StableDiffusionPanoramaPipeline"),
        sized,
        "",
        "of their size: a changed copy, or rows in another order), which foresample does not follow",
    ),
    Case(
        "StableDiffusionAttendAndExcitePipeline",
        "DDPM",
        sd("StableDiffusionAttendAndExcitePipeline"),
        lambda n: prompts(n, height=64, width=64, token_indices=[[1, 2], [1]]) | {"num_inference_steps": 4},
        "",
        "the pipeline gives its unet something else than its latents (shape (1, 4, 32, 32) for (4, 4, 32, 32))",
    ),
    Case(
        "IFInpaintingPipeline",
        "DDPM",
        lambda folder: deepfloyd("IFInpaintingPipeline"),
        lambda n: texts(n, image=random(n, 3, 4, 4), mask_image=mask()[..., ::2, ::2], output_type="pt"),
        "",
        "keeps a part of its latents as they were a step before",
    ),
    Case(
        "DiTPipeline",
        "Euler ancestral",
        lambda folder: dit(diffusers.EulerAncestralDiscreteScheduler()),
        lambda n: {"class_labels": list(range(n)), "num_inference_steps": 12, "output_type": "pt"},
        "",
        "at step 0 the pipeline gives its transformer other values than its latents",
    ),
    *(
        Case("StableDiffusionPipeline", label, sd(scheduler=a_scheduler(name)), sized, "", sentence)
        for label, name, sentence in (
            ("UniPC", "UniPCMultistepScheduler", "adds no noise"),
            ("Euler", "EulerDiscreteScheduler", "adds no noise"),
            ("EDM Euler", "EDMEulerScheduler", "adds no noise"),
            ("RePaint", "RePaintScheduler", "jumps back to earlier noise levels"),
            ("KDPM2 ancestral", "KDPM2AncestralDiscreteScheduler", "takes two network calls a step"),
            ("DDIM", "DDIMScheduler", "adds no noise"),
        )
    ),
]
"""Refused with these sentences, before an image comes out."""

FAMILIES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline")
PIPELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    str(case): (case.build, case.arguments(4)) for case in EXACT if case.pipeline in FAMILIES
}
