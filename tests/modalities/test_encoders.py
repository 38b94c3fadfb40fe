"""Built-in encoders.

`measure` predicts the number of features from the header. Inputs of towers match the processors of Hugging Face.
Features do not depend on other items. A bad file always raises `BadMedia`.
"""

import io
import json
import math
import struct
import zlib
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from encoder_cases import (
    AUDIO,
    ENCODERS,
    FIXED,
    VISION,
    WIDTH,
    audio,
    noise,
    picture,
    some_media,
    tone,
    vision,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import AutoConfig, WhisperFeatureExtractor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Encoder
from omnizoo.modalities.encoders.audio import AudioEncoder
from omnizoo.modalities.encoders.image import PatchGrid, VisionEncoder
from omnizoo.modalities.encoders.projector import build_projector
from omnizoo.modalities.encoders.video import VideoEncoder
from omnizoo.modalities.files.audio import audio_length, read_audio, resample
from omnizoo.modalities.files.image import read_image
from omnizoo.modalities.files.video import read_frames, video_info
from omnizoo.modalities.media import BadMedia, Media


def png(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(array).save(data, "PNG")
    return data.getvalue()


def wav(wave: np.ndarray, rate: int, kind: str = "WAV") -> bytes:
    data = io.BytesIO()
    soundfile.write(data, wave, rate, format=kind)
    return data.getvalue()


def film(file: Path, frames: int, rate: int = 10, gop: int = 5, rotation: int = 0, codec: str = "libx264") -> Path:
    """Write a video whose frame i is gray with brightness 8 i."""
    with av.open(file, "w", options={"movflags": "faststart"} if file.stem == "front" else {}) as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "4", "x265-params": "log-level=none"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size, stream.bit_rate = gop, 10_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 8 * i % 256, np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


@cache
def grid_viewer() -> VisionEncoder:
    return vision("qwen3_vl_vision", projector={"kind": "pixel_shuffle", "factor": 3}, max_pixels=1280)


@cache
def list_viewer() -> VisionEncoder:
    return vision("siglip2_vision_model")


@cache
def listener() -> AudioEncoder:
    return audio()


# Towers


@pytest.mark.parametrize("name", VISION)
def test_image_features_match_hf_processor_and_tower(name: str, tmp_path: Path) -> None:
    """The features equal those of HF's preprocessing and HF's tower, followed by our projector."""
    config = AutoConfig.for_model(name, **VISION[name])
    crop: dict[str, Any] = {}
    if name == "siglip2_vision_model":
        processor: Any = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    elif name.startswith("qwen"):
        processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 64 * 20})
    else:
        side = VISION[name].get("image_size", 32)
        crop = {"do_center_crop": name == "clip", "crop_size": {"height": side, "width": side}}
        size = {"shortest_edge": 40} if name == "clip" else {"height": side, "width": side}
        processor = CLIPImageProcessorPil(size=size, **crop)
    processor.save_pretrained(tmp_path)
    torch.manual_seed(0)
    encoder = VisionEncoder(WIDTH, config=config, folder=str(tmp_path)).double()
    image = Image.fromarray(noise(45, 70, 3))
    shown = processor(images=[image], return_tensors="pt")
    shown = {key: value.double() if value.is_floating_point() else value for key, value in shown.items()}
    if name.startswith("qwen"):
        seen = encoder.tower(shown["pixel_values"], grid_thw=shown["image_grid_thw"]).pooler_output
    elif name == "siglip2_vision_model":
        seen = encoder.tower(**shown).last_hidden_state[0, : shown["pixel_attention_mask"].sum()]
    else:
        seen = encoder.tower(**shown).last_hidden_state[0]
        seen = seen.flatten(1).T if seen.ndim == 3 else seen[-16:]
    item = {key: value.double() for key, value in encoder.prepare(picture(png(np.asarray(image)))).items()}
    rows = encoder.encode([item])
    torch.testing.assert_close(rows, encoder.projector(seen, [(len(seen),)]), rtol=0, atol=1e-6)
    assert encoder.measure(picture(image)).num_placeholders == len(rows)


def test_audio_features_match_hf_extractor_and_tower() -> None:
    encoder = audio()
    samples = tone(16000, 0.3)
    prepared = encoder.prepare(Media("audio", samples, {}))
    extractor = WhisperFeatureExtractor(feature_size=16)
    expected = extractor(samples, sampling_rate=16000, max_length=8000, return_tensors="pt").input_features
    torch.testing.assert_close(prepared["input_features"], expected, rtol=0, atol=1e-4)
    features = encoder.tower(expected).last_hidden_state[0, :15]  # 0.3 of 0.5 s; the rest of 25 positions is padding
    torch.testing.assert_close(encoder.encode([prepared]), encoder.projector(features, [(15,)]), rtol=0, atol=1e-4)


def test_tower_has_no_decoder_no_pooling_head_no_dropout() -> None:
    config = AutoConfig.for_model("whisper", **AUDIO["whisper"], dropout=0.5, encoder_layerdrop=0.5)
    encoder = AudioEncoder(WIDTH, config=config)
    item = encoder.prepare(Media("audio", tone(16000, 0.5), {}))
    assert torch.equal(encoder.train().encode([item]), encoder.eval().encode([item]))
    assert config.dropout == 0.5, "the config must not be changed"
    assert not any("decoder" in name for name, _ in encoder.named_modules())
    assert not any("head" in name for name, _ in vision("siglip_vision_model").tower.named_children())
    assert not any("deepstack" in name for name, _ in vision("qwen3_vl_vision").named_parameters())


@pytest.mark.parametrize("name", ENCODERS)
def test_features_do_not_depend_on_other_items(name: str) -> None:
    """Layout invariance needs this. Sizes are as measured, and gradients reach the tower and the projector."""
    encoder = ENCODERS[name]()
    media = some_media(encoder)
    items = [encoder.prepare(medium) for medium in media]
    sizes = [encoder.measure(medium) for medium in media]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        encoder.to(dtype)
        cast = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in item.items()} for item in items]
        together = encoder.encode(cast)
        separate = [encoder.encode([item]) for item in cast]
        torch.testing.assert_close(
            together, torch.cat(separate), rtol=0, atol=tolerance * max(1, together.abs().max().item())
        )
        assert together.dtype == dtype
        assert [len(rows) for rows in separate] == [size.num_placeholders for size in sizes]
        dummy = {k: v.to(dtype) if v.is_floating_point() else v for k, v in encoder.dummy_input().items()}
        assert encoder.encode([dummy]).shape[1] == WIDTH
    assert all(size.cost > 0 for size in sizes)
    # Positions of Whisper are constants; mask tokens, pooled outputs and final norms are not used.
    together.square().sum().backward()
    idle = ("mask_token", "pooler", "post_layernorm", "embed_positions", "k_proj.bias", "layernorm.")
    for parameter, weight in encoder.named_parameters():
        if not any(part in parameter for part in idle):
            assert weight.grad is not None and weight.grad.abs().sum() > 0, parameter  # noqa: PT018


@pytest.mark.parametrize("name", ["clip", "siglip2_vision_model", "qwen3_vl_vision", "whisper"])
def test_encoder_on_meta_measures_the_same_sizes(name: str) -> None:
    build: Any = vision if name in VISION else audio
    media = picture(noise(50, 20)) if name in VISION else Media("audio", tone(8000, 0.7), {"sampling_rate": 8000})
    with torch.device("meta"):
        skeleton = build(name)
    assert all(weight.is_meta for weight in skeleton.parameters())
    assert skeleton.measure(media) == build(name).measure(media)
    assert skeleton.prepare(media).keys() == build(name).dummy_input().keys()
    assert skeleton.pretrained is skeleton.tower


def test_projector_modules_initialize_their_weights() -> None:
    for kind in ("linear", "mlp", "pixel_shuffle", "resampler"):
        for module in build_projector({"kind": kind}, 8, 16, 2, times=True).modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            assert not tensors or callable(getattr(module, "reset_parameters", None)), (kind, module)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400))
def test_image_size_from_header_matches_prepared_image(height: int, width: int) -> None:
    media = picture(np.zeros((height, width), np.uint8))
    for encoder in (grid_viewer(), list_viewer()):
        if max(height, width) >= 200 * min(height, width):
            with pytest.raises(BadMedia, match=f"{width} x {height}"):
                encoder.measure(media)
            return
        shape = encoder.prepare(media)["pixel_values"].shape
        assert encoder.measure(media).num_placeholders == encoder.projector.num_outputs(tuple(shape[1:3]))
        if isinstance(encoder.kind, PatchGrid):
            assert math.prod(shape[1:3]) <= 1280 // 64 or 1 in shape[1:3]
        else:
            assert math.prod(shape[1:3]) <= 16


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60000), st.sampled_from([8000, 16000, 22050, 44100, 44099]))
def test_audio_placeholders_are_predicted_from_header(samples: int, rate: int) -> None:
    media = Media("audio", np.zeros(samples, np.float32), {"sampling_rate": rate})
    length = audio_length(media, 16000)
    assert length == math.ceil(Fraction(samples * 16000, rate))
    rows = listener().measure(media).num_placeholders
    assert rows == max(1, math.ceil(length / 320))
    if samples < 3000:
        assert len(read_audio(media, 16000)) == length
        assert listener().prepare(media)["positions"].sum() == rows


def test_fixed_size_tower_accepts_image_size_and_fit() -> None:
    wide = picture(np.concatenate([noise(32, 32, 3), noise(32, 64, 3)], 1))
    larger = vision("siglip_vision_model", image_size=48)
    assert larger.measure(wide).num_placeholders == 36
    assert len(larger.encode([larger.prepare(wide)])) == 36
    cropped = vision("siglip_vision_model", fit="crop").prepare(wide)["pixel_values"]
    middle = np.asarray(wide.value)[:, 32:64].transpose(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(cropped[0], torch.from_numpy(middle).float(), rtol=0, atol=1e-6)
    padded = vision("siglip_vision_model", fit="pad").prepare(wide)["pixel_values"][0]
    assert (padded[:, :10] == -1).all()
    assert (padded[:, 11:21] != -1).any()


def test_pixel_shuffle_concatenates_neighbors() -> None:
    projector = build_projector({"kind": "pixel_shuffle", "factor": 2}, 1, 8, 2)
    assert projector.num_outputs((3, 4)) == 4
    gathered = projector.gather(torch.arange(12.0)[:, None], (3, 4))  # type: ignore[operator]
    assert gathered.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 0, 0], [10, 11, 0, 0]]


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"kind": "conv"}, "projector.kind"),
        ({"kind": "mlp", "factor": 2}, "projector.factor"),
        ({"kind": "none"}, r"projector\.kind: none .*8 .*16"),
        ({"kind": "resampler", "heads": 7}, "projector.heads"),
        ({"kind": "resampler", "rows": 0}, "projector.rows"),
    ],
)
def test_invalid_projector_option_names_its_key(spec: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}"):
        build_projector(spec, 8, 16, 2)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: VisionEncoder(8), "encoder: .*`path`"),
        (lambda: vision("siglip_vision_model", fit="squeeze"), "encoder.fit"),
        (lambda: vision("siglip_vision_model", mean=[0.5]), "encoder.mean"),
        (lambda: vision("siglip_vision_model", max_pixels=99), "encoder.max_pixels"),
        (lambda: vision("convnext", image_size=8), "encoder.image_size"),
        (lambda: vision("qwen3_vl_vision", image_size=64), "encoder.image_size"),
        (lambda: vision("qwen3_vl_vision", min_pixels=5000, max_pixels=900), "encoder.max_pixels"),
        (lambda: vision("clip", VideoEncoder, fps=0), "encoder.fps"),
        (
            lambda: VisionEncoder(8, config=AutoConfig.for_model("qwen2_vl_vision")),
            "encoder.config: .*`qwen2_vl_vision`",
        ),
        (
            lambda: AudioEncoder(8, config=AutoConfig.for_model("siglip_vision_model", **FIXED)),
            "encoder.config: Siglip",
        ),
    ],
)
def test_invalid_encoder_option_is_one_line(build: Any, match: str) -> None:
    with pytest.raises(UserError, match=f"^{match}") as caught:
        build()
    assert "\n" not in str(caught.value)


# Decoding files


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_after_exif_rotation(orientation: int, tmp_path: Path) -> None:
    file, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = orientation
    source = Image.fromarray(noise(7, 4, 3))
    source.save(file, exif=exif)
    with Image.open(file) as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored))
    assert np.array_equal(np.asarray(read_image(picture(file))), expected)
    encoder = grid_viewer()
    assert encoder.measure(picture(file)) == encoder.measure(picture(expected))


def test_image_formats_give_equal_pixels() -> None:
    array = noise(6, 9, 3)
    for value in (png(array), array, array.tolist(), array.transpose(2, 0, 1), array / 255, Image.fromarray(array)):
        assert np.array_equal(np.asarray(read_image(picture(value))), array)
    gray = noise(6, 9)
    assert np.array_equal(np.asarray(read_image(picture(gray)))[..., 0], gray)
    deep = Image.fromarray(gray.astype(np.uint16) << 8)
    data = io.BytesIO()
    deep.save(data, "PNG")
    assert np.array_equal(np.asarray(read_image(picture(data.getvalue()), channels=1)), gray)


def bomb() -> bytes:
    """Return a small PNG whose header states 12,000 x 7,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 12_000, 7_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def unusable(folder: Path) -> list[tuple[Encoder, Media, str]]:
    """Return items that cannot be used, the encoder for each, and a pattern of the error."""
    image_encoder = grid_viewer()
    audio_encoder = audio(max_seconds=2)
    video_encoder = vision("clip", VideoEncoder, max_seconds=2.5)
    film(folder / "ok.mp4", 20)
    film(folder / "long.mp4", 31)
    front, web = film(folder / "front.mp4", 20).read_bytes(), film(folder / "ok.mkv", 24).read_bytes()
    cut = bytearray((folder / "ok.mp4").read_bytes())
    start = cut.index(b"mdat") + 700  # after the parameters of the first key frame
    cut[start : start + 300] = bytes(300)
    data = png(noise(40, 40, 3))
    jpeg = io.BytesIO()
    Image.fromarray(noise(64, 64, 3)).save(jpeg, "JPEG")
    flac, ok = wav(noise(8000).astype(np.float32) / 256, 16000, "FLAC"), wav(tone(16000, 0.5), 16000)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{folder}/ok.mp4\n#EXT-X-ENDLIST\n".encode()
    return [
        (image_encoder, picture(b""), "empty"),
        (image_encoder, picture(folder / "nothing.png"), "No such file"),
        (image_encoder, picture(folder), "folder"),
        (image_encoder, picture(b"no picture at all"), "cannot identify"),
        (image_encoder, picture(data[: len(data) // 2]), "truncated"),
        (image_encoder, picture(jpeg.getvalue()[:-900]), "truncated"),
        (image_encoder, picture(data[:900] + bytes(50) + data[950:]), "broken|checksum|decod"),
        (image_encoder, picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot identify"),
        (image_encoder, picture(bomb()), "pixels"),
        (image_encoder, picture(np.zeros((0, 4), np.uint8)), "pixels"),
        (image_encoder, picture(np.zeros((3, 4, 5, 6), np.uint8)), "shape"),
        (image_encoder, picture([[0.5, 2.0]]), "0..1"),
        (image_encoder, picture([[1, 2], [3]]), "inhomogeneous"),
        (image_encoder, picture("a.png"), "shape"),
        (audio_encoder, Media("audio", b"", {}), "empty"),
        (audio_encoder, Media("audio", folder / "nothing.wav", {}), "No such file"),
        (audio_encoder, Media("audio", b"RIFF but no more", {}), "truncated|[Ff]ormat"),
        (audio_encoder, Media("audio", b"noise" * 50, {}), "[Ff]ormat"),
        (audio_encoder, Media("audio", ok[: len(ok) // 2], {}), "truncated"),
        (audio_encoder, Media("audio", flac[: len(flac) // 2], {}), "sync|truncated"),
        (audio_encoder, Media("audio", wav(tone(16000, 0), 16000), {}), "no samples"),
        (audio_encoder, Media("audio", wav(tone(8000, 2.1), 8000), {}), "max_seconds"),
        (audio_encoder, Media("audio", ok, {"start": 0.4, "end": 0.2}), "start"),
        (audio_encoder, Media("audio", np.full(9, np.nan, np.float32), {}), "finite"),
        (audio_encoder, Media("audio", {"path": "a.wav"}, {}), "array"),
        (audio_encoder, Media("audio", [1, 2, 3], {}), "int16"),
        (audio_encoder, Media("audio", {"array": [0.5], "sampling_rate": 7}, {}), "sampling rate"),
        (video_encoder, Media("video", b"", {}), "empty"),
        (video_encoder, Media("video", folder / "nothing.mp4", {}), "No such file"),
        (video_encoder, Media("video", b"no video" * 99, {}), "Invalid data"),
        (video_encoder, Media("video", (folder / "ok.mp4").read_bytes()[:-300], {}), "Invalid|End of file"),
        (video_encoder, Media("video", front[: len(front) * 4 // 5], {}), "truncated|Invalid|damaged"),
        (video_encoder, Media("video", web[: len(web) * 7 // 10], {}), "truncated"),
        (video_encoder, Media("video", bytes(cut), {}), "damaged|Invalid|frames"),
        (video_encoder, Media("video", ok, {}), "Invalid|no video"),
        (video_encoder, Media("video", playlist, {}), "Invalid|[Oo]peration not permitted"),
        (video_encoder, Media("video", folder / "long.mp4", {}), "max_seconds"),
        (video_encoder, Media("video", [], {}), "expected"),
        (video_encoder, Media("video", [noise(4, 4), b"broken"], {}), "cannot identify"),
        (video_encoder, Media("video", 5, {}), "expected"),
    ]


def test_unusable_items_raise_bad_media_with_name(tmp_path: Path) -> None:
    """`measure` or `prepare` raises `BadMedia`, never an error of the library that parses the file."""
    for encoder, media, match in unusable(tmp_path):
        with pytest.raises(BadMedia, match=match) as caught:
            (encoder.measure(media), encoder.prepare(media))
        assert "0x" not in str(caught.value)
        if isinstance(media.value, Path):
            assert str(media.value) in str(caught.value)


@pytest.mark.parametrize(
    ("rate", "new"), [(44100, 16000), (8000, 16000), (48000, 16000), (44099, 16000), (16000, 8000)]
)
def test_resampling_keeps_the_tone_without_aliasing(rate: int, new: int) -> None:
    """Frequencies above the new Nyquist frequency are removed, without aliasing."""
    samples = read_audio(Media("audio", wav(tone(rate, 0.5), rate), {}), new)
    inside = slice(new // 50, -new // 50)  # without the ends, where the filter lacks samples
    expected = tone(new, 0.5)[: len(samples)]
    assert len(samples) == math.ceil(Fraction(round(rate * 0.5) * new, rate))
    np.testing.assert_allclose(samples[: len(expected)][inside], expected[inside], atol=1e-4)
    if rate > new:
        assert np.abs(resample(tone(rate, 0.5, new * 0.6), rate, new)[inside]).max() < 1e-4


def test_audio_formats_give_equal_samples(tmp_path: Path) -> None:
    mono = tone(16000, 0.5)
    stereo = np.stack([mono, 3 * mono], 1) / 2
    (tmp_path / "a.wav").write_bytes(wav(mono, 16000))
    values = [tmp_path / "a.wav", wav(stereo, 16000, "FLAC"), mono, mono.tolist(), stereo, stereo.T]
    values += [(mono * 32768).astype(np.int16), {"array": mono, "sampling_rate": 16000}]
    for value in values:
        np.testing.assert_allclose(read_audio(Media("audio", value, {}), 16000), mono, atol=2e-4)
    part = Media("audio", tmp_path / "a.wav", {"start": 0.1, "end": 0.25})
    np.testing.assert_allclose(read_audio(part, 16000), mono[1600:4000], atol=2e-4)
    assert audio_length(part, 8000) == 1200


@pytest.mark.parametrize(
    ("suffix", "codec", "gop"), [("mp4", "libx264", 5), ("mkv", "mpeg4", 12), ("mp4", "libx265", 6)]
)
def test_frames_are_those_displayed_at_their_times(suffix: str, codec: str, gop: int, tmp_path: Path) -> None:
    """Groups of pictures without a needed frame are not decoded; `libx265` writes open groups."""
    media = Media("video", film(tmp_path / f"a.{suffix}", 30, gop=gop, codec=codec), {})
    video = video_info(media, 2)
    assert (round(video.seconds, 1), video.height, video.width) == (3.0, 48, 64)
    for times in ([0.0], [2.95], [0.55, 2.35], [0.05, 0.95, 1.0, 1.01, 1.05, 2.79, 2.99], [i / 20 for i in range(60)]):
        indices = [np.asarray(image).mean() / 8 for image in read_frames(media, times, 2)]
        np.testing.assert_allclose(indices, [int(time * 10 + 1e-6) for time in times], atol=0.49)
    part = Media("video", media.value, {"start": 1.0, "end": 2.0})
    assert video_info(part, 2).seconds == 1.0
    assert round(np.asarray(read_frames(part, [0.55], 2)[0]).mean() / 8) == 15


def test_video_layout_contains_frames_and_times(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 30)
    film(tmp_path / "turned.mp4", 30, rotation=90)
    media, turned = (Media("video", tmp_path / name, {}) for name in ("a.mp4", "turned.mp4"))
    fixed = vision("clip", VideoEncoder, fps=1, times=True)
    assert fixed.measure(media).layout == ("<0.5 s>", 16, "<1.5 s>", 16, "<2.5 s>", 16)
    assert fixed.measure(media).num_placeholders == 48
    few = vision("clip", VideoEncoder, fps=10, max_frames=2, time_embedding=False)
    assert few.prepare(media)["milliseconds"].tolist() == [750, 2250]
    assert few.projector.time is None
    grid = vision("qwen3_vl_vision", VideoEncoder, fps=1, times=True, max_pixels=64 * 12)  # two frames to a step
    assert grid.measure(media).layout == ("<1.0 s>", 12, "<2.5 s>", 12)
    upright = grid.prepare(turned)["pixel_values"].shape
    assert (upright[1], upright[2]) == (4, 3)
    for item in (media, turned):
        assert len(grid.encode([grid.prepare(item)])) == grid.measure(item).num_placeholders
    # The same image at another time has other features, if times are embedded.
    still, later = (
        {"pixel_values": few.dummy_input()["pixel_values"], "milliseconds": torch.tensor([ms])} for ms in (0, 1000)
    )
    assert torch.equal(few.encode([still]), few.encode([later]))
    assert not torch.equal(fixed.encode([still]), fixed.encode([later]))


def test_previews_contain_the_item(tmp_path: Path) -> None:
    assert 'src="data:image/png;base64,' in grid_viewer().preview(picture(noise(300, 200, 3)))
    player = listener().preview(Media("audio", tone(16000, 60), {}))
    assert 'src="data:audio/wav;base64,' in player
    assert "60.0 s" in player
    assert len(player) < 150_000
    strip = vision("clip", VideoEncoder).preview(Media("video", film(tmp_path / "<a>.mp4", 30), {}))
    assert strip.count("<img") == 6
    assert "<a>" not in strip


def test_nested_processor_settings_are_used(tmp_path: Path) -> None:
    """Settings may be nested in processor_config.json."""
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"feature_extractor": {"sampling_rate": 8000, "hop_length": 80, "n_fft": 256}})
    )
    encoder = audio(folder=str(tmp_path))
    assert (encoder.sample_rate, encoder.hop, encoder.n_fft) == (8000, 80, 256)
    assert np.count_nonzero(encoder.filters.sum(0)) == 16, "no mel filter is above the Nyquist frequency"
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=f"^{tmp_path}/preprocessor_config.json"):
        audio(folder=str(tmp_path))
