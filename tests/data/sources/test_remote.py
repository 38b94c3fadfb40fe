"""Sources at an address: copied once, read as files are, media too; what cannot be read is one line and a way out."""

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from toy_media import toy

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.data.sources.remote import Remote, is_address
from omnizoo.modalities.media import BadMedia

PLACE = "memory://omnizoo_test_remote"


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    for name in [name for name in system.store if name.startswith("/omnizoo_test_remote")]:
        del system.store[name]


def put(system: Any, name: str, content: bytes | list[dict[str, Any]]) -> None:
    data = content if isinstance(content, bytes) else "".join(json.dumps(row) + "\n" for row in content).encode()
    system.pipe_file(f"/omnizoo_test_remote/{name}", data)


def rows_of(source: RowSource) -> list[dict[str, Any]]:
    return [source.read(row) for row in range(len(source))]


def opened(path: str, cache: Path, **options: Any) -> RowSource:
    return open_source(SourceSettings(path=path, **options), cache_dir=str(cache))


def test_remote_file_is_copied_once_and_fingerprinted_by_content(memory: Any, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    put(memory, "rows.jsonl", rows)
    source = opened(f"{PLACE}/rows.jsonl", tmp_path / "cache")
    assert rows_of(source) == rows
    assert source.where(1).endswith("rows.jsonl:2")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert content_of(source) == content_of(open_source(SourceSettings(path=str(tmp_path / "rows.jsonl"))))
    (copy,) = (tmp_path / "cache").glob("*/rows.jsonl")
    before = copy.stat().st_mtime_ns
    assert rows_of(opened(f"{PLACE}/rows.jsonl", tmp_path / "cache")) == rows
    assert copy.stat().st_mtime_ns == before


def test_changed_remote_file_is_copied_again(memory: Any, tmp_path: Path) -> None:
    put(memory, "rows.jsonl", [{"text": "a"}])
    old = opened(f"{PLACE}/rows.jsonl", tmp_path)
    put(memory, "rows.jsonl", [{"text": "changed"}])
    assert rows_of(opened(f"{PLACE}/rows.jsonl", tmp_path)) == [{"text": "changed"}]
    assert rows_of(old) == [{"text": "a"}]


def test_only_files_of_the_split_are_copied(memory: Any, tmp_path: Path) -> None:
    put(memory, "data/train-0.jsonl", [{"text": "a"}])
    put(memory, "data/train-1.csv", b"text\nb\n")
    put(memory, "data/test-0.jsonl", [{"text": "c"}])
    put(memory, "README.md", b"# about")
    assert rows_of(opened(PLACE, tmp_path)) == [{"text": "a"}, {"text": "b"}]
    assert rows_of(opened(PLACE, tmp_path, split="test")) == [{"text": "c"}]
    assert not list(tmp_path.rglob("README.md"))


def test_remote_media_are_copied_on_use(memory: Any, tmp_path: Path) -> None:
    put(memory, "data/rows.jsonl", [{"text": "<audio>", "audios": ["media/2.toy"]}])
    put(memory, "data/media/2.toy", toy(2))
    put(memory, "data/media/3.toy", toy(3))
    put(memory, "secret.toy", toy(4))
    source = opened(f"{PLACE}/data/rows.jsonl", tmp_path)
    found = source.find(0, "media/2.toy")
    assert isinstance(found, Path)
    assert found.read_bytes() == toy(2)
    assert not list(tmp_path.rglob("3.toy"))
    with pytest.raises(BadMedia, match=r"media/9\.toy does not exist"):
        source.find(0, "media/9.toy")
    for outside in ("../secret.toy", "/etc/passwd"):
        with pytest.raises(BadMedia, match="is outside"):
            source.find(0, outside)


def test_media_dir_can_be_remote(memory: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "so"}\n')
    put(memory, "media/2.toy", toy(2))
    source = opened(str(tmp_path / "rows.jsonl"), tmp_path / "cache", media_dir=f"{PLACE}/media")
    found = source.find(0, "2.toy")
    assert isinstance(found, Path)
    assert found.read_bytes() == toy(2)


def test_last_copy_is_used_offline_with_a_warning(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(memory, "rows.jsonl", [{"text": "a"}])
    opened(f"{PLACE}/rows.jsonl", tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(memory), "info", fail)
    with caplog.at_level(logging.WARNING):
        assert rows_of(opened(f"{PLACE}/rows.jsonl", tmp_path)) == [{"text": "a"}]
    assert "no route to host; using the copy in" in caplog.text
    with pytest.raises(UserError, match=r"other\.jsonl: not readable: no route to host"):
        opened(f"{PLACE}/other.jsonl", tmp_path)


def test_missing_remote_files_raise_one_line(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^memory://omnizoo_test_remote/no\.jsonl: .*does not exist"):
        opened(f"{PLACE}/no.jsonl", tmp_path)
    put(memory, "notes.md", b"so")
    with pytest.raises(UserError, match=r"no file with rows \(.*\); .* notes\.md"):
        opened(PLACE, tmp_path)
    with pytest.raises(UserError, match="Protocol not known: nope; expected"):
        opened("nope://x/rows.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("protocol", "package"),
    [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("oss", "ossfs"), ("webdav", "webdav4")],
)
def test_missing_protocol_package_is_named(protocol: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is not None:
        pytest.skip("it is installed here")
    with pytest.raises(UserError, match=f"a package is not installed: .*{package}"):
        opened(f"{protocol}://bucket/rows.jsonl", tmp_path)


def test_unreachable_hub_error_contains_a_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("hf://datasets/some/rows@main/train.jsonl", str(tmp_path))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(type(remote.system), "info", fail)
    with pytest.raises(UserError, match="`hf download some/rows --repo-type dataset --local-dir DIR`") as caught:
        remote.copy(list)
    assert "\n" not in str(caught.value)


def test_addresses_have_a_scheme_other_than_file() -> None:
    assert is_address("s3://bucket/rows.jsonl")
    assert not is_address("file:///a/b")
    assert not is_address("a/b.jsonl")
