"""Clips in published models: the frames that their own video processors take, settings of the model's folder, and sound
inside of clips, written and placed as their own processors do it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from fixtures import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from published import clip, film, marks_of, picture, published_frames, read, sound, tiny_config, tiny_model
from transformers import AutoModelForMultimodalLM, Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

from omnizoo.config.errors import UserError
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.modalities.files.audio import audio_length, read_audio
from omnizoo.modalities.files.video import VideoInfo, read_frames
from omnizoo.modalities.item import NestedRun
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.models.recipe import recipe_of

RULES = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor", "glm4v": "Glm4vVideoProcessor"}
THINKERS = {"qwen2_5_omni_thinker": Qwen2_5OmniProcessor, "qwen3_omni_moe_thinker": Qwen3OmniMoeProcessor}


def encoder_of(family: str, folder: Path | None = None, **options: Any) -> Any:
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(tiny_config(family))
    return recipe_of(family).modalities(model, folder and str(folder), {"video": options})["video"].encoder


@pytest.mark.parametrize("family", RULES)
@settings(deadline=None)
@given(
    frames=st.integers(2, 20_000),
    rate=st.one_of(
        st.sampled_from([1.0, 8.0, 24.0, 25.0, 30.0, 60.0, 24000 / 1001, 30000 / 1001]), st.floats(0.5, 120)
    ),
    fps=st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 7.5]),
)
def test_frames_match_published_processor(family: str, frames: int, rate: float, fps: float) -> None:
    encoder = read(family)["video"].encoder
    own = replace_settings(encoder, fps)
    expected = published_frames(family, frames, rate, fps=fps)
    assert own.choose(video_of(frames, rate)) == expected


def video_of(frames: int, rate: float) -> VideoInfo:
    return VideoInfo("a video", frames / rate, frames, rate, 32, 32)


def replace_settings(encoder: Any, fps: float) -> Any:
    """The same encoder with another rate, without building a model anew."""
    other = object.__new__(type(encoder))
    other.__dict__.update(encoder.__dict__, fps=fps, settings=encoder.settings | {"fps": fps})
    return other


@pytest.mark.parametrize("family", RULES)
def test_short_video_gives_its_first_frame(family: str) -> None:
    assert set(read(family)["video"].encoder.choose(video_of(1, 30.0))) == {0}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_num_frames_selects_that_many_frames(family: str) -> None:
    encoder = encoder_of(family, num_frames=6)
    assert encoder.choose(video_of(50, 25.0)) == published_frames(family, 50, 25.0, fps=None, num_frames=6)


def test_file_frames_match_their_index(tmp_path: Path) -> None:
    """Each frame is as bright as its number; what is read back must be the frames that were chosen, in order."""
    path = tmp_path / "clip.mkv"  # whose times are rounded to milliseconds
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=30)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv444p"
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 6 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    encoder, media = encoder_of("qwen3_vl", fps=8.0), Media("video", path, {})
    clip, steps, _ = encoder.sample(media)
    assert (clip.frames, clip.rate) == (40, 30.0)
    expected = published_frames("qwen3_vl", 40, 30.0, fps=8.0)
    assert steps.flatten().tolist()[: len(expected)] == expected
    shown = read_frames(media, clip.display_times(expected), 8.0)
    assert [round(np.asarray(frame).mean() / 6) for frame in shown] == expected
    part = encoder.sample(replace(media, options={"start": 0.5, "end": 1.0}))[0]
    assert part.frames == 15


SETTINGS = {
    "size": {"shortest_edge": 2048, "longest_edge": 4096},
    "fps": 3,
    "min_frames": 2,
    "max_frames": 5,
    "image_mean": [0.1, 0.2, 0.3],
    "num_frames": None,
}


@pytest.mark.parametrize("is_nested", [False, True])
def test_video_options_override_folder_settings(is_nested: bool, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    name = "processor_config.json" if is_nested else "video_preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"video_processor": SETTINGS} if is_nested else SETTINGS))
    encoder = encoder_of("qwen2_5_vl", tmp_path)
    assert (encoder.pixels, encoder.fps) == ((2048, 4096), 3.0)
    assert encoder.processor.image_mean == SETTINGS["image_mean"]
    published = published_frames("qwen2_5_vl", 100, 10.0, **SETTINGS)
    assert encoder.choose(video_of(100, 10.0)) == published
    assert len(published) == 4  # whole steps of at most five frames
    encoder = encoder_of("qwen2_5_vl", tmp_path, fps=1.0, max_frames=50, max_pixels=8192)
    assert (encoder.pixels, encoder.fps) == ((2048, 8192), 1.0)
    assert len(encoder.choose(video_of(100, 10.0))) == 10
    (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name}: "):
        encoder_of("qwen2_5_vl", tmp_path)


def test_unsupported_video_options_raise() -> None:
    with pytest.raises(UserError, match=r"options\.max_frames: Glm4vForConditionalGeneration does not use"):
        encoder_of("glm4v", max_frames=8)
    with pytest.raises(UserError, match=r"encoder\.options: fps .*num_frames"):
        encoder_of("qwen2_vl", fps=1.0, num_frames=8)
    with pytest.raises(UserError, match=r"options\.fps: 0 "):
        encoder_of("qwen2_vl", fps=0)
    with pytest.raises(UserError, match=r"use_audio_in_video: Qwen2VLForConditionalGeneration"):
        encoder_of("qwen2_vl", use_audio_in_video=True)


def test_glm_video_layout_matches_published_processor() -> None:
    from transformers import Glm4vProcessor

    modality, media = read("glm4v")["video"], clip(9, 64, 96)
    size = modality.encoder.measure(media)
    indices = published_frames("glm4v", 9, 4.0, fps=4.0)
    metadata = SimpleNamespace(fps=4.0, timestamps=[index / 4.0 for index in indices])
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token="<|image|>")
    processor.replace_frame_token_id = lambda *args, **kwargs: Glm4vProcessor.replace_frame_token_id(
        processor, *args, **kwargs
    )
    video = {"video_grid_thw": torch.tensor([size.shape[:3]]).long(), "video_metadata": [metadata]}
    written = "".join(run if isinstance(run, str) else "<|image|>" * run for run in size.layout)
    assert written == Glm4vProcessor.replace_video_token(processor, video, 0)


# Sound inside of clips


def published_text(family: str, size: Any, heard: int) -> str:
    """A clip with its sound as the family's own processor writes it."""
    modality = read(family)
    video, audio = modality["video"], modality["audio"]
    merge = SimpleNamespace(merge_size=2)
    kind = THINKERS[family]
    own = SimpleNamespace(
        image_processor=merge,
        video_processor=merge,
        audio_token=audio.placeholder,
        image_token=modality["image"].placeholder,
        video_token=video.placeholder,
        vision_bos_token=video.begin,
        vision_eos_token=video.end,
        audio_bos_token=audio.begin,
        audio_eos_token=audio.end,
        get_chunked_index=lambda *args: kind.get_chunked_index(None, *args),
    )
    (text,) = kind.replace_multimodal_special_tokens(
        own,
        [video.begin + video.placeholder + video.end],
        audio_lengths=iter([heard]),
        image_grid_thw=iter([]),
        video_grid_thw=iter([np.array(size.shape[:3], int)]),
        video_second_per_grid=iter([size.shape[3]]),
        use_audio_in_video=True,
        position_id_per_seconds=tiny_config(family).position_id_per_seconds,
        seconds_per_chunk=2.0,
    )
    return str(text)


@pytest.mark.parametrize("family", THINKERS)
@pytest.mark.parametrize(("frames", "seconds"), [(4, 1.0), (13, 3.4), (40, 10.0), (6, 7.3), (31, 2.2)])
def test_interleaved_audio_matches_published_processor(family: str, frames: int, seconds: float) -> None:
    modalities = read(family)
    size = modalities["video"].encoder.measure(film(frames, 32, 64, seconds))
    heard = size.inside["audio"].num_placeholders
    assert sum(run.num_placeholders for run in size.layout if isinstance(run, NestedRun)) == heard
    written = [modalities["video"].begin]
    for run in (*size.layout, modalities["video"].end):
        name, count = run if isinstance(run, NestedRun) else ("video", run)
        written.append(run if isinstance(run, str) else modalities[name].placeholder * count)
    assert "".join(written) == published_text(family, size, heard)


@pytest.mark.parametrize("family", THINKERS)
def test_row_selects_video_audio_and_positions_match_model(family: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, special_tokens=tuple(marks_of(family)))
    config = tiny_config(family)
    for name, old in {"image": 3, "video": 4, "audio": 6}.items():
        setattr(config, f"{name}_token_id", id_of(family, tokenizer, old))
    config.vision_start_token_id, config.audio_start_token_id = (id_of(family, tokenizer, old) for old in (1, 5))
    with torch.device("meta"):
        model: Any = AutoModelForMultimodalLM.from_config(config)
    small = {"min_pixels": 1024, "max_pixels": 4096, "fps": 4.0}
    recipe = recipe_of(family)
    modalities = recipe.modalities(model, None, {"video": small})
    positions = lambda ids, items: recipe.positions(model, ids, items)  # noqa: E731
    renderer = Renderer(tokenizer, True, modalities, positions)
    file, still = film(13, 64, 64, 3.4).value, np.asarray(picture(32, 64).value)
    tone = {"array": sound(1.2).value.tolist(), "sampling_rate": 16_000}

    def row(*heard: bool | None) -> dict[str, Any]:
        clips = [{"type": "video", "video": file, **({} if h is None else {"use_audio_in_video": h})} for h in heard]
        parts = [{"type": "image", "image": still}, *clips, {"type": "audio", "audio": tone}]
        question = [*parts, {"type": "text", "text": "What?"}]
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "A tone."}]}

    rendered = renderer.render(row(True, True))
    assert [item.port.modality for item in rendered.items] == ["image", "video", "audio", "video", "audio", "audio"]
    for item in rendered.items:
        assert sum(count for _, count in item.spans) == item.size.num_placeholders
        token = tokenizer.convert_tokens_to_ids(modalities[item.port.modality].placeholder)
        assert all((rendered.input_ids[at : at + n] == token).all() for at, n in item.spans)
    ids = torch.from_numpy(rendered.input_ids).long()[None]
    shapes = {name: [i.size.shape for i in rendered.items if i.port.modality == name] for name in modalities}
    expected, _ = model.get_rope_index(
        ids,
        image_grid_thw=torch.tensor(shapes["image"]).long(),
        video_grid_thw=torch.tensor(shapes["video"])[:, :3].long(),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor(shapes["audio"]).long()[:, 0],
        second_per_grids=torch.tensor([2 / 4.0] * 2),
    )
    np.testing.assert_array_equal(rendered.columns["position_ids"][1:], expected[:, 0].numpy())
    assert [item.port.modality for item in renderer.render(row(None)).items] == ["image", "video", "audio"]
    with pytest.raises(BadRow, match=r"^use_audio_in_video"):
        renderer.render(row(True, False))
    with pytest.raises(BadRow, match="use_audio_in_video must be true or false, not 'yes'"):
        renderer.render(row("yes"))  # type: ignore[arg-type]
    always = recipe.modalities(model, None, {"video": small | {"use_audio_in_video": True}})
    heard = Renderer(tokenizer, True, always, positions).render(row(None))
    assert [item.port.modality for item in heard.items] == ["image", "video", "audio", "audio"]


def id_of(family: str, tokenizer: Any, old: int) -> int:
    mark = next(mark for mark, number in marks_of(family).items() if number == old)
    return int(tokenizer.convert_tokens_to_ids(mark))


def test_video_without_audio_or_frames_is_bad(tmp_path: Path) -> None:
    encoder = read("qwen2_5_omni_thinker")["video"].encoder
    silent, deaf = tmp_path / "silent.mp4", tmp_path / "sound.m4a"
    with av.open(str(silent), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(deaf), "w", format="mp4") as container:
        track = container.add_stream("aac", rate=16_000)
        wave = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        wave.sample_rate = 16_000
        container.mux(track.encode(wave))
        container.mux(track.encode())
    heard = {"use_audio_in_video": True}
    with pytest.raises(BadMedia, match=r"silent\.mp4: .*audio.*\(use_audio_in_video\)"):
        encoder.measure(Media("video", silent, heard))
    assert encoder.measure(Media("video", silent, {})).num_placeholders > 0
    with pytest.raises(BadMedia, match=r"sound\.m4a: .*video"):
        encoder.measure(Media("video", deaf, heard))
    frames = Media("video", [np.zeros((32, 32, 3), np.uint8)] * 4, heard)
    with pytest.raises(BadMedia, match=r"^video given as list: use_audio_in_video"):
        encoder.measure(frames)
    assert audio_length(Media("audio", deaf, {}), 16_000) == len(read_audio(Media("audio", deaf, {}), 16_000))


def test_video_audio_has_the_length_in_its_header() -> None:
    media = film(13, 64, 64, 3.4)
    wave = read_audio(replace(media, modality="audio"), 16_000)
    assert len(wave) == audio_length(replace(media, modality="audio"), 16_000)
    assert abs(len(wave) - 3.4 * 16_000) <= 2048  # whole frames of the codec
    part = replace(media, modality="audio", options={"start": 1.0, "end": 2.5})
    assert len(read_audio(part, 16_000)) == 24_000
    np.testing.assert_array_equal(read_audio(part, 16_000), wave[16_000:40_000])
    assert len(read_audio(part, 8_000)) == 12_000


# Qwen2.5-Omni's sound


@pytest.mark.parametrize("seconds", [0.31, 0.9999, 2.0, 3.999, 5.0])
def test_mel_frames_match_published_processor(seconds: float, tmp_path: Path) -> None:
    """Which pads with silence up to its limit; here five seconds."""
    WhisperFeatureExtractor(feature_size=32, chunk_length=5).save_pretrained(tmp_path)
    model = tiny_model("qwen2_5_omni_thinker", "fp32")
    encoder = recipe_of("qwen2_5_omni_thinker").modalities(model, str(tmp_path), {})["audio"].encoder
    media = sound(seconds)
    out = encoder.extractor(
        media.value, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    frames = int(out["attention_mask"].sum())
    prepared = encoder.prepare(media)
    assert encoder.measure(media).shape == (frames,)
    torch.testing.assert_close(prepared["mels"], out["input_features"][0].T[:frames], rtol=0, atol=1e-5)
    with pytest.raises(BadMedia, match=r"5\.1 s is more than max_seconds 5"):
        encoder.measure(sound(5.1))
