"""Frozen conditioners against the plain pipeline of diffusers: text, latents and first frames."""

import pickle
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan_i2v
from pipelines import PIPELINES, make_pipeline
from safetensors.torch import load_file, save_file

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.conditioning.first_frame import FirstFrameFeatures, FirstFrameLatents, continues_frame
from omnizoo.models.diffusion.conditioning.latents import LatentEncoder, Normalization, Posterior, latent_hash
from omnizoo.models.diffusion.conditioning.text import TextConditioner, text_hash
from omnizoo.models.diffusion.conditioning.text_sizes import TextSizes
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder

CPU = torch.device("cpu")
PROMPT = "a red cat, the size of a text"
CLIP = {"height": 32, "width": 32, "num_frames": 9}
IMAGE = {"height": 32, "width": 32}
CALLS: dict[str, dict[str, Any]] = {
    "wan": CLIP,
    "flux": IMAGE,
    "qwen_image": IMAGE,
    "sd3": IMAGE | {"guidance_scale": 1.0},
    "ltx": CLIP | {"guidance_scale": 1.0},
    "hunyuan_video": CLIP,
    "cogvideox": CLIP | {"guidance_scale": 1.0},
    "pixart": IMAGE | {"guidance_scale": 1.0, "use_resolution_binning": False},
}
# Arguments of transformers -> names of our tensors.
ARGUMENTS = {
    "encoder_hidden_states": "text",
    "encoder_attention_mask": "text_mask",
    "encoder_hidden_states_mask": "text_mask",
    "pooled_projections": "pooled",
}


class CallError(Exception):
    """Ends a pipeline when it calls its transformer; contains the keyword arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@pytest.fixture(scope="module", autouse=True)
def ftfy() -> None:
    """Replace a package that WanImageToVideoPipeline uses without checking that it is installed."""
    if not hasattr(pipeline_wan_i2v, "ftfy"):
        pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=lambda text: text)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the folder of a tiny pipeline by its name."""

    @cache
    def make(name: str) -> PipelineFolder:
        """Return the folder of the pipeline `name`, which is written once."""
        return PipelineFolder.read(make_pipeline(name, tmp_path_factory.mktemp("pipelines") / name))

    return make


@cache
def plain(path: Path) -> Any:
    """Return the pipeline as diffusers loads it."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def transformer_arguments(pipeline: Any, **call: Any) -> dict[str, Any]:
    """Return the arguments with which a pipeline calls its transformer first."""

    def forward(*args: Any, **kwargs: Any) -> None:
        raise CallError(kwargs)

    pipeline.transformer.forward = forward
    with pytest.raises(CallError) as call_error:
        pipeline(num_inference_steps=1, generator=torch.Generator().manual_seed(0), **call)
    return call_error.value.arguments


def clip() -> torch.Tensor:
    """Return random pixels [3, 9, 32, 32] from -1 to 1, each of them a byte before."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, 9, 32, 32), generator=generator) / 127.5 - 1


@pytest.mark.parametrize(("name", "prompt"), [*((name, PROMPT) for name in CALLS), ("wan", ""), ("hunyuan_video", "")])
def test_text_conditions_equal_what_the_pipeline_gives_its_transformer(folder_of: Any, name: str, prompt: str) -> None:
    folder = folder_of(name)
    arguments = transformer_arguments(plain(folder.path), prompt=prompt, **CALLS[name])
    expected = {ours: arguments[theirs][0] for theirs, ours in ARGUMENTS.items() if arguments.get(theirs) is not None}
    if "text_mask" in expected:
        expected["text_mask"] = expected["text_mask"].bool()

    tensors = TextConditioner(folder, CPU).encode(prompt)
    sizes = TextSizes(folder)(prompt)
    mask = expected.get("text_mask", torch.ones(len(expected["text"])))
    assert sizes == (len(expected["text"]), int(mask.sum()))
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def normalized(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Normalize latents by the formulas in the pipelines of diffusers."""
    vae = pipeline.vae
    if isinstance(vae, diffusers.AutoencoderKLWan | diffusers.AutoencoderKLQwenImage):
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        return (latents - mean) / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    if isinstance(vae, diffusers.AutoencoderKLLTXVideo):
        return pipeline._normalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    if getattr(vae.config, "shift_factor", None):
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return latents * vae.config.scaling_factor


@pytest.mark.parametrize("name", CALLS)
def test_latents_equal_those_of_the_plain_autoencoder(folder_of: Any, name: str) -> None:
    folder = folder_of(name)
    pipeline = plain(folder.path)
    encoder = LatentEncoder(folder, CPU)
    pixels = clip() if encoder.has_frames else clip()[:, 0]

    posterior = encoder.encode(pixels)
    with torch.no_grad():
        distribution = pipeline.vae.encode(pixels[None]).latent_dist
    assert posterior.std is not None
    assert torch.equal(posterior.mean, distribution.mean[0])
    assert torch.equal(posterior.std, distribution.std[0])
    noise = torch.randn_like(posterior.mean)
    latents = encoder.normalization.apply(posterior.sample(noise))
    expected = normalized(pipeline, distribution.mean + distribution.std * noise)
    torch.testing.assert_close(latents, expected[0], rtol=1e-6, atol=1e-6)
    restored = Normalization.from_json(encoder.normalization.to_json()).undo(latents)
    torch.testing.assert_close(restored, posterior.sample(noise), rtol=1e-6, atol=1e-6)


def test_maximum_number_of_text_tokens_cuts_prompts(folder_of: Any) -> None:
    folder = folder_of("wan")
    cut = TextConditioner(folder, CPU, max_text_tokens=16).encode(PROMPT)["text"]
    with torch.no_grad():
        expected = plain(folder.path).encode_prompt(PROMPT, max_sequence_length=16, do_classifier_free_guidance=False)
    assert torch.equal(cut, expected[0][0])
    assert pickle.loads(pickle.dumps(TextSizes(folder, 16)))(PROMPT).tokens == 16


def test_image_has_no_frames_in_latents_of_a_video_autoencoder(folder_of: Any) -> None:
    encoder = LatentEncoder(folder_of("qwen_image"), CPU)
    as_image = encoder.encode(clip()[:, 0])
    as_clip = encoder.encode(clip()[:, :1])
    assert as_image.mean.shape == (4, 4, 4)
    assert torch.equal(as_image.mean, as_clip.mean[:, 0])


def test_batch_norm_normalizes_patches_as_flux2_does() -> None:
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
    )
    generator = torch.Generator().manual_seed(2)
    vae.bn.running_mean.normal_(generator=generator)
    vae.bn.running_var.uniform_(0.5, 2, generator=generator)
    latents = torch.randn(3, 8, 6, generator=generator)

    pipeline = diffusers.Flux2Pipeline
    patches = pipeline._patchify_latents(latents[None])
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps).view(1, -1, 1, 1)
    expected = (patches - vae.bn.running_mean.view(1, -1, 1, 1)) / std
    normalization = Normalization.of(vae)
    torch.testing.assert_close(normalization.apply(latents), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normalization.undo(expected[0]), latents, rtol=1e-6, atol=1e-6)


def test_first_frame_conditions_equal_those_of_the_pipeline(folder_of: Any) -> None:
    folder = folder_of("wan_i2v")
    pixels = clip()
    frame = pipeline_image(pixels[:, 0])
    arguments = transformer_arguments(plain(folder.path), prompt=PROMPT, image=frame, **CLIP)
    state = torch.random.get_rng_state()
    encoded = FirstFrameLatents(folder, LatentEncoder(folder, CPU)).encode(pixels)
    features = FirstFrameFeatures(folder, CPU).encode(pixels)

    latent_channels = 4
    expected = arguments["hidden_states"][0, latent_channels:]
    torch.testing.assert_close(encoded["reference_latents"], expected, rtol=1e-6, atol=1e-6)
    expected_features = arguments["encoder_hidden_states_image"][0]
    assert torch.equal(features["reference_features"], expected_features)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [continues_frame(folder_of(name)) for name in ("wan_i2v", "wan", "flux", "ltx")] == [True] + [False] * 3


def pipeline_image(pixels: torch.Tensor) -> Any:
    """Return the PIL image of pixels from -1 to 1."""
    return diffusers.image_processor.VaeImageProcessor().postprocess(pixels[None], output_type="pil")[0]


def test_conditioner_loads_only_the_components_that_it_needs(folder_of: Any) -> None:
    pipeline = TextConditioner(folder_of("wan_two_experts"), CPU).pipeline
    loaded = {name for name, component in pipeline.components.items() if component is not None}
    assert loaded == {"text_encoder", "tokenizer"}


def test_hashes_identify_weights_and_not_the_folder(folder_of: Any, tmp_path: Path) -> None:
    first = folder_of("flux")
    same = PipelineFolder.read(make_pipeline("flux", tmp_path / "same"))
    assert latent_hash(first) == latent_hash(same)
    assert text_hash(first) == text_hash(same)
    assert set(text_hash(first)) == {"text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}

    file = tmp_path / "same/vae/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[-1]
    weights[name] = weights[name] + 1
    save_file(weights, file)
    assert latent_hash(first) != latent_hash(same)


def test_missing_weights_of_an_encoder_are_an_error(tmp_path: Path) -> None:
    folder = PipelineFolder.read(make_pipeline("pixart", tmp_path / "pixart"))
    file = tmp_path / "pixart/vae/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.pop("encoder.conv_in.weight")
    save_file(weights, file)
    with pytest.raises(UserError, match=r"^model\.path: .*encoder\.conv_in\.weight"):
        LatentEncoder(folder, CPU)


def test_clip_is_refused_by_an_image_autoencoder(folder_of: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.path: AutoencoderKL"):
        LatentEncoder(folder_of("flux"), CPU).encode(clip())


def test_deterministic_autoencoder_has_no_standard_deviation() -> None:
    posterior = Posterior(torch.ones(2, 2), None)
    assert torch.equal(posterior.sample(torch.randn(2, 2)), torch.ones(2, 2))


def test_every_tiny_pipeline_with_text_is_compared() -> None:
    variants = {"wan_two_experts", "wan_i2v"}
    assert set(CALLS) == set(PIPELINES) - variants
