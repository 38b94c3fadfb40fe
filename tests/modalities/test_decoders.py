"""Built-in decoders: image codes, audio codes, and continuous targets by flow matching."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from decoder_cases import (
    CODECS,
    FOLDERS,
    MAKERS,
    WIDTH,
    config,
    digits,
    item,
    picture,
    saved,
    sound,
)
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, LikelihoodDecoder, MultiLossDecoder
from omnizoo.modalities.contract_checks import check_decoder
from omnizoo.modalities.decoders.audio_codec import AudioCodec, delay, undelay
from omnizoo.modalities.decoders.flow import FlowHead, solve
from omnizoo.modalities.decoders.image_tokenizers import fit_patch_codebook, save_patch_codebook
from omnizoo.modalities.decoders.image_tokens import ImageCodes
from omnizoo.modalities.files.pixels import from_patches, to_patches
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.weights.random_init import initial_weights


def empty(folder: Path) -> str:
    (Path(digits(folder)) / "codebook.safetensors").unlink()
    return str(folder)


every_decoder = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: write(tmp_path_factory.mktemp("decoder") / "folder") for name, write in FOLDERS.items()}


@pytest.fixture(scope="module")
def decoders(folders: dict[str, str]) -> dict[str, Decoder]:
    """Return all decoders, in float64."""
    torch.manual_seed(0)
    return {name: maker(folders.get(name)).double() for name, maker in MAKERS.items()}


@pytest.fixture
def decoder(name: str, decoders: dict[str, Decoder]) -> Decoder:
    decoders[name].zero_grad()
    return decoders[name]


@pytest.fixture
def on_meta(name: str, folders: dict[str, str]) -> Decoder:
    with torch.device("meta"):
        return MAKERS[name](folders.get(name))


def doubled(inputs: Inputs) -> Inputs:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


class StandIn(nn.Module):
    """A foundation with one recurrent layer and a learned prompt for each item."""

    def __init__(self, prompts: int) -> None:
        super().__init__()
        self.prompts = nn.Embedding(prompts, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH)

    def hidden(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the hidden states before each target of the item of each prompt, `[n, prompts, width]`."""
        before = torch.cat([self.prompts.weight[None], embedded[:-1]])
        states: torch.Tensor = self.layer(before)[0]
        return states

    @torch.no_grad()
    def generate(self, decoder: Decoder, prompt: int, sampling: Sampling) -> torch.Tensor:
        state = torch.zeros(1, WIDTH, dtype=self.prompts.weight.dtype)

        def advance(embedded: torch.Tensor) -> torch.Tensor:
            nonlocal state
            out, state = self.layer(embedded[None], state)
            hidden: torch.Tensor = out[0]
            return hidden

        return decoder.generate(advance(self.prompts.weight[prompt]), advance, sampling)


@every_decoder
def test_measure_predicts_placeholders_and_targets_from_header(name: str, decoder: Decoder, on_meta: Decoder) -> None:
    size, prepared = on_meta.measure(item(name, 3)), on_meta.prepare(item(name, 3))
    rows = decoder.targets([doubled(prepared)])
    assert len(rows) == size.num_placeholders
    assert size.cost > 0
    assert size.targets == (int((rows != decoder.none).sum()) if isinstance(decoder, AudioCodec) else None)
    again = decoder.prepare(item(name, 3))
    assert all(torch.equal(prepared[key], value) for key, value in again.items())
    dummy = decoder.targets([doubled(decoder.dummy_input())])
    assert (dummy.shape[1], dummy.dtype) == (rows.shape[1], rows.dtype)


@every_decoder
def test_targets_do_not_depend_on_other_items(name: str, decoder: Decoder) -> None:
    items = [doubled(decoder.prepare(item(name, seed))) for seed in range(3)]
    separate = [decoder.targets([prepared]) for prepared in items]
    assert torch.equal(decoder.targets(items), torch.cat(separate))
    assert not torch.equal(separate[0], separate[1])


@every_decoder
def test_trained_weights_get_gradients_and_frozen_ones_never(name: str, decoder: Decoder) -> None:
    decoder.train()
    targets = decoder.targets([doubled(decoder.prepare(item(name, 0)))])
    trained = {key: weight for key, weight in decoder.named_parameters() if weight.requires_grad}
    parts = {key.split(".")[0] for key, _ in decoder.named_parameters()} - {key.split(".")[0] for key in trained}
    assert parts <= {"tokenizer", "codec", "autoencoder"}
    assert not any(module.training for part in parts for module in decoder.get_submodule(part).modules())
    for count in (0, len(targets)):
        decoder.zero_grad()
        hidden = torch.randn(count, WIDTH, dtype=torch.float64, requires_grad=True)
        loss = decoder.loss(hidden, targets[:count]).sum() + decoder.embed(targets[:count]).sum()
        loss.backward()
        assert hidden.grad is not None
        for key, weight in trained.items():
            assert weight.grad is not None, key
            assert weight.grad.any() == (count > 0), key
    assert not any(weight.grad is not None for key, weight in decoder.named_parameters() if key not in trained)


@every_decoder
def test_generation_with_equal_seeds_is_equal(name: str, decoder: Decoder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    foundation = StandIn(1).double()
    if isinstance(decoder, AudioCodec):
        decoder.max_frames = 7

    def generated(seed: int) -> torch.Tensor:
        return foundation.generate(decoder, 0, Sampling(generator=torch.Generator().manual_seed(seed)))

    rows = generated(1)
    assert torch.equal(generated(1), rows)
    assert not torch.equal(generated(2), rows)
    if name != "chameleon_vqgan":
        assert Path(decoder.save(decoder.render(rows), str(tmp_path / "out"))).stat().st_size > 0


@every_decoder
def test_random_initialization_on_meta_sets_all_weights(
    name: str, decoder: Decoder, on_meta: Decoder, folders: dict[str, str]
) -> None:
    """Weights of a folder are read during initialization."""

    def construct() -> Decoder:
        with torch.device("meta"):
            return MAKERS[name](folders.get(name))

    on_meta.to_empty(device="cpu")
    tensors = dict(on_meta.named_parameters()) | dict(on_meta.named_buffers())
    initial = dict(initial_weights(construct, 0, set(tensors)))
    assert initial.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert initial[key].isfinite().all(), key
        tensor.data.copy_(initial[key])
    prepared = decoder.prepare(item(name, 0))
    rows = on_meta.targets([prepared])
    assert rows[:, 0].unique().numel() > 1
    if decoder.pretrained is None:
        torch.testing.assert_close(rows.double(), decoder.targets([doubled(prepared)]).double(), atol=1e-5, rtol=0)


def train(decoder: Decoder, foundation: StandIn, sample_targets: Callable[[], torch.Tensor], steps: int) -> None:
    """Train on the targets that `sample_targets` returns: one item per prompt, `[n, prompts, K]`."""
    weights = [weight for weight in [*decoder.parameters(), *foundation.parameters()] if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        targets = sample_targets()
        hidden = foundation.hidden(decoder.embed(targets.flatten(0, 1)).unflatten(0, targets.shape[:2]))
        optimizer.zero_grad()
        (decoder.loss(hidden.flatten(0, 1), targets.flatten(0, 1)).sum() / targets[..., 0].numel()).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["patches", "dac"])
def test_small_model_learns_two_items_exactly(name: str, folders: dict[str, str]) -> None:
    torch.manual_seed(0)
    decoder, foundation = MAKERS[name](folders.get(name)), StandIn(2)
    rows = torch.stack([decoder.targets([decoder.prepare(item(name, seed))]) for seed in (0, 1)], 1)
    train(decoder, foundation, lambda: rows, steps=150)
    for prompt in (0, 1):
        assert torch.equal(foundation.generate(decoder, prompt, Sampling(temperature=0)), rows[:, prompt])


def test_small_flow_learns_two_series() -> None:
    torch.manual_seed(0)
    decoder, foundation = FlowHead(WIDTH, size=[6], patch=3, hidden=64, layers=1), StandIn(16)
    series = [np.sin(np.arange(6)), np.linspace(1, -1, 6)] * 8  # several prompts per series, so several noises per step
    seeds = iter(range(10**6))

    def sample_targets() -> torch.Tensor:
        items = [decoder.prepare(Media("series", values, {}, next(seeds))) for values in series]
        return torch.stack([decoder.targets([item]) for item in items], 1)

    train(decoder, foundation, sample_targets, steps=250)
    for prompt in (0, 1):
        sampling = Sampling(generator=torch.Generator().manual_seed(5))
        generated = decoder.render(foundation.generate(decoder, prompt, sampling))
        np.testing.assert_allclose(generated, series[prompt], atol=0.1)


# Image codes


@pytest.mark.parametrize("name", ["janus_vqgan", "emu3_vqgan"])
def test_hf_tokenizer_codes_match_transformers(name: str) -> None:
    torch.manual_seed(0)
    decoder = ImageCodes(WIDTH, config(name), size=16).double()
    prepared = decoder.prepare(picture(0))
    values = prepared["pixels"].double()[None] / 127.5 - 1
    model = decoder.pretrained
    assert model is not None
    sizes = {"image_sizes": torch.tensor([[16, 16]])} if name == "emu3_vqgan" else {}
    codes = model.encode(values, **sizes).image_tokens
    codes = codes[0].flatten() if isinstance(codes, list) else codes
    rows = decoder.targets([prepared])
    assert torch.equal(rows[:, 0], codes)
    with torch.no_grad():
        decoded = model.decode(codes[None] if name == "janus_vqgan" else codes.view(1, 8, 8))[0]
    expected = ((decoded + 1) * 127.5).round().clamp(0, 255).permute(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(decoder.render(rows)), expected.numpy().astype(np.uint8))


def test_diffusers_tokenizer_codes_match_diffusers(tmp_path: Path) -> None:
    folder = saved(diffusers.VQModel, tmp_path, num_vq_embeddings=16)
    decoder = ImageCodes(WIDTH, folder=folder)
    model = diffusers.VQModel.from_pretrained(folder).eval()
    prepared = decoder.prepare(picture(0))
    with torch.no_grad():
        expected = model(prepared["pixels"].float()[None] / 127.5 - 1).sample[0]
    rendered = np.asarray(decoder.render(decoder.targets([prepared])))
    expected = ((expected + 1) * 127.5).clamp(0, 255).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(rendered, expected, atol=0.51)
    again = ImageCodes(WIDTH, config=json.loads(json.dumps(decoder.config)))  # like a saved model that is loaded
    again.load_state_dict(decoder.state_dict())
    assert torch.equal(again.targets([prepared]), decoder.targets([prepared]))


def test_patch_codebook_with_all_patches_is_lossless(tmp_path: Path) -> None:
    images = [np.asarray(Image.open(io.BytesIO(picture(i, 8, 8).value))) for i in range(3)]
    save_patch_codebook(tmp_path, fit_patch_codebook(images, 2, 48, seed=0), 2, [8, 8])
    decoder = ImageCodes(WIDTH, folder=str(tmp_path))
    for image in images:
        rows = decoder.targets([decoder.prepare(Media("image", image, {}))])
        assert rows[:, 1].tolist() == list(range(16))
        np.testing.assert_array_equal(np.asarray(decoder.render(rows)), image)
    with pytest.raises(UserError, match=r"^codes: 49 .*48"):
        fit_patch_codebook(images, 2, 49, seed=0)


def test_patch_codebook_is_as_good_as_scikit_learn() -> None:
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    images = [(image * 15.9375).astype(np.uint8) for image in load_digits().images[:100]]
    patches = torch.cat([to_patches(torch.from_numpy(image)[..., None], 2) for image in images]).numpy() / 255
    ours = fit_patch_codebook(images, 2, 32, seed=0)
    assert np.array_equal(ours, fit_patch_codebook(images, 2, 32, seed=0))
    theirs = KMeans(32, n_init=1, random_state=0).fit(patches).inertia_
    assert ((patches[:, None] - ours) ** 2).sum(2).min(1).sum() < 1.1 * theirs


def test_image_code_loss_is_cross_entropy(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["patches"]
    assert isinstance(decoder, ImageCodes)
    rows = decoder.targets([decoder.prepare(item("patches", 0))])
    hidden = torch.randn(16, WIDTH, dtype=torch.float64)
    logits = decoder.head[2](F.gelu(decoder.head[0](hidden)))
    expected = -sum(logits[i].log_softmax(-1)[code] for i, code in enumerate(rows[:, 0]))
    torch.testing.assert_close(decoder.loss(hidden, rows).sum(), expected)


# Audio codes


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_delay_shifts_codebook_k_by_k_and_undelay_inverts(books: int, frames: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 8, (books, frames)))
    rows = delay(codes, stop=8, none=9)
    assert torch.equal(undelay(rows, stop=8), codes)
    assert rows.shape == (frames + max(books - 1, 1), books)
    for position, row in enumerate(rows.tolist()):
        for k, code in enumerate(row):
            frame = position - k
            if 0 <= frame < frames:
                assert code == codes[k, frame]
            else:
                assert code == (8 if k == 0 and position == frames else 9)


@pytest.mark.parametrize("name", CODECS)
def test_codec_codes_match_transformers(name: str) -> None:
    torch.manual_seed(0)
    decoder = AudioCodec(WIDTH, config(name)).double()
    model: Any = decoder.pretrained
    assert type(model) is type(AutoModel.from_config(config(name)))
    prepared = decoder.prepare(sound(0, 200))
    wave = prepared["wave"].double()[None, None] / 32767
    with torch.no_grad():
        if name == "encodec":
            encoded = model.encode(wave, bandwidth=16.0)
            decoded = model.decode(encoded.audio_codes, encoded.audio_scales)
        else:
            encoded = model.encode(wave)
            decoded = model.decode(audio_codes=encoded.audio_codes)
    codes = encoded.audio_codes.view(-1, encoded.audio_codes.shape[-1])
    rows = decoder.targets([prepared])
    assert len(codes) == decoder.codebooks == 4
    assert codes.unique().numel() > 2
    assert torch.equal(undelay(rows, decoder.stop), codes)
    np.testing.assert_allclose(decoder.render(rows), decoded.audio_values.flatten().float(), atol=1e-6)


def test_codec_loss_is_cross_entropy_of_codes_and_stop() -> None:
    torch.manual_seed(0)
    decoder = AudioCodec(WIDTH, config("dac"), codebooks=3).double()
    rows = decoder.targets([decoder.prepare(sound(0))])
    hidden = torch.randn(len(rows), WIDTH, dtype=torch.float64)
    weights = decoder.head.weight.split([17, 16, 16]), decoder.head.bias.split([17, 16, 16])
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(rows):
        for k, code in enumerate(row):
            if code != decoder.none:
                expected -= F.linear(hidden[i], weights[0][k], weights[1][k]).log_softmax(-1)[code]
                count += 1
    torch.testing.assert_close(decoder.loss(hidden, rows).sum(), expected)
    assert count == decoder.measure(sound(0)).targets


def test_generated_audio_has_a_frame_and_an_end() -> None:
    torch.manual_seed(0)
    decoder = AudioCodec(WIDTH, config("dac"), codebooks=3, max_seconds=0.004)
    for seed in range(8):
        sampling = Sampling(temperature=3.0, generator=torch.Generator().manual_seed(seed))
        rows = StandIn(1).generate(decoder, 0, sampling)
        codes = undelay(rows, decoder.stop)
        assert 1 <= codes.shape[1] <= 4
        assert torch.equal(delay(codes, decoder.stop, decoder.none), rows)


def test_saved_audio_equals_rendered_audio(tmp_path: Path) -> None:
    decoder = AudioCodec(WIDTH, config("dac"))
    wave = decoder.render(decoder.targets([decoder.prepare(sound(0))]))
    back, rate = soundfile.read(decoder.save(wave, str(tmp_path / "out")))
    assert rate == decoder.sample_rate
    np.testing.assert_allclose(back, wave.clip(-1, 1), atol=1e-4)
    assert "<audio" in decoder.preview(sound(0))


# Flow matching


@given(st.sampled_from([(3,), (2, 3), (1, 2, 2)]), st.integers(1, 3), st.integers(1, 3))
def test_from_patches_inverts_to_patches(grid: tuple[int, ...], patch: int, channels: int) -> None:
    values = torch.randn(*(side * patch for side in grid), channels)
    patches = to_patches(values, patch)
    assert torch.equal(from_patches(patches, grid, patch), values)
    first = values[tuple(slice(patch) for _ in grid)]
    assert torch.equal(patches[0], first.flatten())


def test_flow_loss_is_squared_error_of_velocity() -> None:
    torch.manual_seed(0)
    decoder = FlowHead(WIDTH, size=[8, 4], patch=2, channels=1, hidden=16, layers=2).double()
    media = picture(0, 8, 4)
    rows = decoder.targets([doubled(decoder.prepare(media))])
    pixels = np.asarray(Image.open(io.BytesIO(media.value))) / 127.5 - 1
    random = np.random.Generator(np.random.PCG64(media.seed))
    noise, time = random.standard_normal((8, 4), np.float32), random.random(8, np.float32)
    hidden = torch.randn(8, WIDTH, dtype=torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(8):
        y, x = i // 2 * 2, i % 2 * 2
        data = torch.from_numpy(pixels[y : y + 2, x : x + 2].flatten())
        n, t = torch.from_numpy(noise[i]).double(), float(time[i])
        predicted = decoder.velocity((1 - t) * data + t * n, torch.tensor([[t]]).double(), hidden[i : i + 1])
        expected += (predicted - (n - data)).square().mean()
    torch.testing.assert_close(decoder.loss(hidden, rows).sum(), expected)


def test_flow_latents_match_diffusers_autoencoder(tmp_path: Path) -> None:
    folder = saved(diffusers.AutoencoderKL, tmp_path, scaling_factor=0.5, shift_factor=0.1)
    decoder = FlowHead(WIDTH, size=16, folder=folder, hidden=16, layers=1)
    model = diffusers.AutoencoderKL.from_pretrained(folder).eval()
    prepared = decoder.prepare(picture(0))
    rows = decoder.targets([prepared])
    with torch.no_grad():
        latents = model.encode(prepared["item"].float()[None] / 127.5 - 1).latent_dist.mode()
        decoded = model.decode(latents).sample[0]
    torch.testing.assert_close(rows[:, :4].T.view(4, 8, 8), (latents[0] - 0.1) * 0.5)
    expected = ((decoded + 1) * 127.5).clamp(0, 255).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(np.asarray(decoder.render(rows)), expected, atol=0.51)


def test_solvers_integrate_known_flows() -> None:
    """The velocity towards one data point d at (x, t) is (x - d) / t; the flow of the velocity x is exponential."""
    noise, point = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    for solver in ("euler", "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"):
        solution = solve(lambda x, time: (x - point) / time, noise, solver, 4)
        torch.testing.assert_close(solution, point.expand_as(noise), atol=1e-5, rtol=0)
    exact = noise * np.exp(-1.0)
    errors = {
        solver: float((solve(lambda x, time: x, noise, solver, 20) - exact).abs().max()) for solver in ("euler", "heun")
    }
    assert errors["heun"] < 0.05 * errors["euler"] < 0.01


# Invalid items and settings


def test_unusable_items_raise_bad_media(decoders: dict[str, Decoder]) -> None:
    truncated = Media("image", picture(0).value[:60], {})
    with pytest.raises(BadMedia):
        decoders["patches"].prepare(truncated)
    with pytest.raises(BadMedia, match="max_seconds"):
        AudioCodec(WIDTH, config("dac"), max_seconds=0.001).measure(sound(0))
    series = FlowHead(WIDTH, size=[6], patch=3)
    for value in ([1.0] * 5, ["a"] * 6, [float("nan")] * 6, [[1.0] * 6], None):
        with pytest.raises(BadMedia, match=r"^series given as"):
            series.measure(Media("series", value, {}))


def test_invalid_decoder_settings_raise(tmp_path: Path) -> None:
    for build, match in (
        (lambda: ImageCodes(WIDTH, folder=str(tmp_path)), rf"^decoder\.path: {tmp_path} "),
        (lambda: ImageCodes(WIDTH, AutoConfig.for_model("llama")), r"^decoder\.config: `llama`"),
        (lambda: ImageCodes(WIDTH, config("emu3_vqgan")), r"^decoder\.size"),
        (lambda: ImageCodes(WIDTH, config("emu3_vqgan"), size=15), r"^decoder\.size: 15 .* 2 "),
        (lambda: ImageCodes(WIDTH, config("janus_vqgan"), size=32), r"^decoder\.size: 32.* 16"),
        (lambda: ImageCodes(WIDTH, folder=saved(diffusers.AutoencoderKL, tmp_path / "kl")), r"^decoder\.path: Autoenc"),
        (lambda: ImageCodes(WIDTH, folder=digits(tmp_path / "patches"), head="big"), r"^decoder\.head: 'big'"),
        (lambda: ImageCodes(WIDTH, folder=empty(tmp_path / "empty")), rf"^decoder\.path: {tmp_path}/empty"),
        (lambda: AudioCodec(WIDTH), r"^decoder: .*path"),
        (lambda: AudioCodec(WIDTH, AutoConfig.for_model("llama")), r"^decoder\.config: `llama`"),
        (lambda: AudioCodec(WIDTH, config("dac"), codebooks=5), r"^decoder\.codebooks: 5 .*1 to 4"),
        (lambda: AudioCodec(WIDTH, AutoConfig.for_model("encodec", normalize=True)), r"^decoder\.config: .*normalize"),
        (
            lambda: AudioCodec(WIDTH, AutoConfig.for_model("encodec", audio_channels=2)),
            r"^decoder\.config: audio_channels",
        ),
        (lambda: FlowHead(WIDTH, size=9, patch=2), r"^decoder\.size: 9 "),
        (lambda: FlowHead(WIDTH, size=8, channels=4), r"^decoder\.channels: 4 "),
        (lambda: FlowHead(WIDTH, size=8, folder=str(tmp_path)), rf"^decoder\.path: {tmp_path} "),
        (lambda: FlowHead(WIDTH, size=8, solver="rk9"), r"^decoder\.solver: 'rk9'"),
    ):
        with pytest.raises(UserError, match=match):
            build()
    encoder_only = ImageCodes(WIDTH, config("chameleon_vqgan"))
    rows = encoder_only.targets([encoder_only.dummy_input()])
    with pytest.raises(UserError, match=r"^decoder: .*`decode`"):
        encoder_only.render(rows)


@pytest.mark.parametrize("name", ["janus_vqgan", "patches", "encodec", "one codebook"])
def test_chunked_loss_and_gradients_match_full_logits(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = decoder.targets([doubled(decoder.prepare(item(name, seed))) for seed in range(2)])
    results = []
    for logits_per_chunk in (10**9, 40):
        monkeypatch.setattr("omnizoo.modalities.decoders.image_tokens.CHUNK", logits_per_chunk)
        monkeypatch.setattr("omnizoo.modalities.decoders.audio_codec.CHUNK", logits_per_chunk)
        decoder.zero_grad()
        hidden = torch.linspace(-1, 1, len(rows) * WIDTH, dtype=torch.float64).view(-1, WIDTH).requires_grad_()
        loss = decoder.loss(hidden, rows).sum()
        loss.backward()
        grads = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
        results.append((loss.detach(), hidden.grad, *grads))
    full, chunked = results
    assert len(full) > 3
    for expected, actual in zip(full, chunked, strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["janus_vqgan", "patches", "encodec", "one codebook"])
def test_chunked_log_likelihood_matches_the_loss(name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [decoder.measure(item(name, seed)) for seed in range(2)]
    rows = decoder.targets([doubled(decoder.prepare(item(name, seed))) for seed in range(2)])
    hidden = torch.linspace(-1, 1, len(rows) * WIDTH, dtype=torch.float64).view(-1, WIDTH).requires_grad_()
    trained = [hidden, *decoder.get_submodule("head").parameters()]
    weights = torch.linspace(0.5, 2, len(rows), dtype=torch.float64)  # a different weight for each target
    expected = torch.stack([-decoder.loss(hidden[i : i + 1], rows[i : i + 1]).sum() for i in range(len(rows))])
    gradients = torch.autograd.grad((weights * expected).sum(), trained)
    for logits_per_chunk in (10**9, 40):
        monkeypatch.setattr("omnizoo.modalities.decoders.image_tokens.CHUNK", logits_per_chunk)
        monkeypatch.setattr("omnizoo.modalities.decoders.audio_codec.CHUNK", logits_per_chunk)
        likelihood, values = decoder.log_likelihood(hidden, rows)
        torch.testing.assert_close(likelihood, expected, rtol=1e-12, atol=1e-13)
        assert values.sum() == sum(size.targets or size.num_placeholders for size in sizes)
        actual = torch.autograd.grad((weights * likelihood).sum(), trained)
        torch.testing.assert_close(actual, gradients, rtol=1e-11, atol=1e-13)
    empty_likelihood, empty_values = decoder.log_likelihood(hidden[:0], rows[:0])
    assert empty_likelihood.shape == empty_values.shape == (0,)
    assert all(not gradient.any() for gradient in torch.autograd.grad(empty_likelihood.sum(), trained))
    assert isinstance(decoder, LikelihoodDecoder)
    assert not issubclass(FlowHead, LikelihoodDecoder)


class TwoLosses(MultiLossDecoder, ImageCodes):
    term_weights: ClassVar[dict[str, float]] = {"": 1.0, "residual": 0.5}
    terms: ClassVar[tuple[str, ...]] = ("", "residual")

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {term: self.loss(hidden, targets) for term in self.terms}


def test_check_decoder_checks_mixins(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, media = TwoLosses(WIDTH, folder=folders["patches"]), [picture(seed, 8, 8) for seed in range(2)]
    check_decoder(decoder, media, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr(TwoLosses, "terms", ("",))
        with pytest.raises(AssertionError, match="`term_weights`"):
            check_decoder(decoder, media, WIDTH)
    monkeypatch.setattr(TwoLosses, "log_likelihood", lambda self, hidden, targets: (targets, targets))
    with pytest.raises(AssertionError, match="`log_likelihood`"):
        check_decoder(decoder, media, WIDTH)
