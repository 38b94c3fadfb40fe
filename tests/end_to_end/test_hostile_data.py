"""Damaged and hostile rows, tar files, media and templates. `corpus_media.py` has hundreds more."""

import io
import json
import os
import signal
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fixtures import CHATML, make_tokenizer
from hostile import Medium, clip, media, noise, picture, png, sound
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.rendering import chat_template
from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.rendering.template_limits import OutOfTime, limits, memory_limits
from omnizoo.data.row import BadRow
from omnizoo.data.sources import jsonl
from omnizoo.data.sources.base import MediaFolder, RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.modalities.files import video
from omnizoo.modalities.files.audio import read_audio
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.files.video import read_frames, sample_times, video_info
from omnizoo.modalities.media import BadMedia, Media

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def opened(path: Path) -> RowSource:
    return open_source(SourceSettings(path=str(path)))


# Tar files


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> bytes:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.read_bytes()


def test_truncated_tar_never_loses_samples_silently(tmp_path: Path) -> None:
    long = f"{'folder/' * 20}c.txt"  # needs a separate header for the name
    content = write_tar(tmp_path / "a.tar", [("a.txt", b"words"), ("b.txt", b"y" * 700), (long, b"more")])
    expected = [opened(tmp_path / "a.tar").read(row) for row in range(3)]
    with tarfile.open(tmp_path / "a.tar") as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + 512 + 512  # of the first block of zeros after the last member
    cuts = sorted({*range(0, end + 2, 7), *range(0, len(content), 512), *range(end - 520, end + 3)})
    for cut in cuts:
        os.truncate(tmp_path / "a.tar", 0)
        (tmp_path / "a.tar").write_bytes(content[:cut])
        if cut >= end:
            source = opened(tmp_path / "a.tar")
            assert [source.read(row) for row in range(len(source))] == expected
        else:
            with pytest.raises(UserError, match=r"a\.tar"):
                opened(tmp_path / "a.tar")


def test_tar_that_shrinks_during_reading_gives_bad_rows(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.txt", b"words")])
    source = opened(tmp_path / "a.tar")
    os.truncate(tmp_path / "a.tar", 514)
    with pytest.raises(BadRow, match="2 of 5 bytes"):
        source.read(0)


# Lines and tables


def test_line_longer_than_read_buffer_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 200}) + '\n{"text": "b"}\n')
    source = opened(tmp_path / "a.jsonl")
    with pytest.raises(BadRow, match="limit of 100"):
        source.read(0)
    assert source.read(1) == {"text": "b"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"a": ' * 100_000, "too deeply"),
        (b"[" * 100_000, "too deeply"),
        (b'{"text": "a", "text": "b"}', "'text' twice"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    ],
)
def test_hostile_line_is_a_bad_row(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine \\ud83d\\ude00"}\n' + line + b"\n")
    source = opened(tmp_path / "a.jsonl")
    assert source.read(0) == {"text": "fine 😀"}
    with pytest.raises(BadRow, match=reason):
        source.read(1)


def test_only_rows_of_damaged_parquet_group_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(100)]}), path, row_group_size=50)
    data = bytearray(path.read_bytes())
    start = pyarrow.parquet.read_metadata(path).row_group(0).column(0).dictionary_page_offset
    data[start : start + 60] = bytes(60)
    path.write_bytes(data)
    source = opened(path)
    for row in (0, 7, 49):
        with pytest.raises(BadRow, match="row group 0 is damaged"):
            source.read(row)
    assert source.read(50) == {"text": "row 50"}


# Pipes


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(BadMedia, match="a pipe"):
        MediaFolder(tmp_path, None).find("x.png")
    with pytest.raises(BadMedia, match="a pipe"):
        Media("image", tmp_path / "x.png", {}).open()
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(UserError, match="a pipe"):
        opened(tmp_path / "rows.csv")


# Media


def read(item: Media) -> None:
    if item.modality == "image":
        image_size(item)
        read_image(item)
    elif item.modality == "audio":
        read_audio(item, 2000, 300.0)
    else:
        video = video_info(item, 2.0, 3600.0)
        read_frames(item, sample_times(video.seconds, 2.0, 3), 2.0)


@pytest.mark.parametrize("medium", [pytest.param(medium, id=medium.title) for medium in media()])
def test_media_are_decoded_or_rejected_quickly(tmp_path: Path, medium: Medium) -> None:
    path = tmp_path / medium.file
    path.write_bytes(medium.data)
    item = Media(medium.modality, path, {})
    started = time.process_time()
    if medium.file.startswith("good") or "thin" in medium.title:  # encoders check the aspect ratio
        read(item)
    else:
        with pytest.raises(BadMedia, match=medium.file) as caught:
            read(item)
        assert medium.reason in str(caught.value)
    assert time.process_time() - started < 2


def test_complete_png_is_read_whatever_its_last_row(tmp_path: Path) -> None:
    for mode in ("RGB", "L", "1", "P", "LA", "RGBA"):
        for image in (Image.new(mode, (13, 9)), noise(9, 13).convert(mode)):
            assert read_image(Media("image", picture("PNG", image), {})).size == (13, 9)
    with pytest.raises(BadMedia, match="truncated"):
        read_image(Media("image", png(13, 9, 8), {}))


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64", "RF64", "NIST"])
def test_truncated_audio_raises(format: str) -> None:
    content = sound(format, rate=8000)
    read_audio(Media("audio", content, {}), 8000)
    for part in range(1, 20):
        with pytest.raises(BadMedia):
            read_audio(Media("audio", content[: len(content) * part // 20], {}), 8000)


def test_decoded_video_pixels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    item = Media("video", clip(frames=8), {})
    read(item)
    monkeypatch.setattr(video, "MAX_VIDEO_PIXELS", 16 * 16 * 2)
    with pytest.raises(BadMedia, match=r"^video given as bytes: .* 512 "):
        read(item)


# Templates


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)


@pytest.mark.usefixtures("hasty")
def test_endless_template_raises(tmp_path: Path) -> None:
    """The template is at fault, not a row: every row would take as long."""
    with pytest.raises(UserError, match=r"^model\.tokenizer: .*more than 0\.2 s"):
        ChatTemplate(LOOPS, None, {}).render(TURNS)
    with pytest.raises(UserError, match=r"^model\.tokenizer"):
        Renderer(make_tokenizer(tmp_path, LOOPS), append_eos=True).render({"messages": TURNS})


@pytest.mark.usefixtures("hasty")
def test_row_with_endless_template_is_a_bad_row(tmp_path: Path) -> None:
    template = "{% if 'bomb' in messages[0].content %}" + LOOPS + "{% endif %}" + CHATML
    renderer = Renderer(make_tokenizer(tmp_path, template), append_eos=True)
    with pytest.raises(BadRow, match="of CPU time for this row"):
        renderer.render({"messages": [{"role": "user", "content": "bomb"}, TURNS[1]]})
    assert renderer.render({"messages": TURNS}).is_target.any()


def test_template_errors_name_the_row(tmp_path: Path) -> None:
    for body in ("{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
        renderer = Renderer(make_tokenizer(tmp_path, body), append_eos=True)
        with pytest.raises(BadRow, match="Error"):
            renderer.render({"messages": TURNS})


def test_template_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(BadRow, match="1,001 characters"):
        ChatTemplate("{{ 'a' * 1001 }}", None, {}).render(TURNS)


def test_invalid_template_raises() -> None:
    with pytest.raises(UserError, match=r"^model\.tokenizer: line 1"):
        ChatTemplate("{% for %}", None, {}).render(TURNS)


def test_limits_do_not_affect_other_threads() -> None:
    """Signals reach only the main thread, and a memory limit applies to the whole process."""
    ended: list[str] = []

    def work() -> None:
        with limits(0.05, 1 << 20):
            end = time.thread_time() + 0.1
            while time.thread_time() < end:
                pass
            ended.append("a" * (1 << 22))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert ended


@pytest.mark.usefixtures("hasty")
def test_jinja_does_not_catch_the_timeout() -> None:
    """The timeout may come between two lines, where the error report of Jinja fails, or during constant folding."""
    empties = "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"
    for template in (empties, "{{ 9 ** (9 ** 9) }}"):
        with pytest.raises(UserError, match=r"0\.2 s"):
            ChatTemplate(template, None, {}).render(TURNS)


def test_timeout_repeats_if_a_finalizer_catches_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow:
        def __del__(self) -> None:
            end = time.thread_time() + 0.3
            while time.thread_time() < end:
                pass

    def work() -> None:
        Slow()
        while True:
            pass

    with pytest.raises(OutOfTime), limits(0.1, 1 << 30):
        work()
    assert not capsys.readouterr().err


def test_limits_restore_an_existing_alarm() -> None:
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    before = signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    try:
        with limits(0.1, 1 << 30):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
            end = time.monotonic() + 0.01
            while time.monotonic() < end:
                pass
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining < 1000 - 0.005
        assert interval == 7
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


class Templates(Dataset[str]):
    """Renders a template with too much output in the process that reads the dataset, and returns the error."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            ChatTemplate("{{ 'a' * 100000000 }}", None, {}).render(TURNS)
        except (UserError, BadRow) as error:
            return str(error)
        return "no error"


def test_memory_is_limited_in_loader_workers_but_not_in_the_training_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit applies to a whole process, so it could fail a thread that writes a checkpoint."""
    monkeypatch.setattr(chat_template, "MAX_MEMORY", 1 << 26)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1 << 10)
    (in_worker,) = DataLoader(Templates(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert "more than 64 MiB of memory" in in_worker
    with memory_limits():
        assert "more than 64 MiB of memory" in Templates()[0]
    assert "100,000,000 characters" in Templates()[0]
