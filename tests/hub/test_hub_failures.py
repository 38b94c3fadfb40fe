"""Each way in which the hub, the network, the disk or a download can fail is one line, and leaves nothing damaged."""

import os
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import write_named
from hub_server import Hub, Repo
from huggingface_hub import constants, snapshot_download

from omnizoo.cli.main import main
from omnizoo.config.hub import local_path
from omnizoo.config.load import load_config
from omnizoo.hub import modelscope
from omnizoo.hub.resolve import resolve_names


def set_repo(**changes: object) -> Callable[[Repo], None]:
    def change(repo: Repo) -> None:
        for name, value in changes.items():
            setattr(repo, name, value)

    return change


def with_files(files: dict[str, bytes]) -> Callable[[Repo], None]:
    def change(repo: Repo) -> None:
        repo.commits[repo.branches["main"]] = files

    return change


def error_of(config: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the only line of the error of `omnizoo train`, which has exit code 2."""
    assert main(["train", str(config), *args]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("downloading")]
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (set_repo(access="gated"), ["gated", "HF_TOKEN", "/acme/tiny"]),
        (set_repo(status=503), ["HTTP 503"]),
        (set_repo(status=429), ["too many requests"]),
        (set_repo(status=401), ["token"]),
        (set_repo(status=418), ["HTTP 418"]),
        (with_files({"config.json": b"{}", "pytorch_model.bin": b"x"}), ["no safetensors", "pytorch_model.bin"]),
        (with_files({"model.safetensors": b"x"}), ["no config.json"]),
        (with_files({"model.gguf": b"x"}), ["model.gguf"]),
        (set_repo(flipped={"model.safetensors"}), ["model.safetensors", "hash"]),
        (set_repo(flipped={"config.json"}), ["config.json", "hash"]),
        (set_repo(short={"model.safetensors"}), ["shorter", "Run again"]),
        (set_repo(cut={"model.safetensors"}), ["connection broke", "Run again"]),
    ],
    ids=["gated", "503", "429", "401", "418", "pickles", "no-config", "gguf", "flip", "flip-small", "short", "cut"],
)
def test_unusable_repository_prints_one_line(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Repo], None], parts: list[str]
) -> None:
    change(hub.repos["models/acme/tiny"])
    line = error_of(config, capsys)
    assert line.startswith("error: model.path: acme/tiny: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["--model.path", "acme/gone"], "model.path: acme/gone: "),
        (["--model.path", "acme/chats"], "model.path: acme/chats: "),
        (["--model.path", "acme/tiny@dev"], "model.path: acme/tiny@dev: "),
        (["--model.path", "acme/tiny@0123abc"], "model.path: acme/tiny@0123abc: "),
        (["--model.path", "acme/a..b"], "model.path: acme/a..b: "),
        (["--model.path", "hub:a b"], "model.path: hub:a b: "),
        (["--model.tokenizer", "acme/gone"], "model.tokenizer: acme/gone: "),
        (["--model.adapter.path", "acme/tiny"], "model.adapter.path: acme/tiny: "),
        (["--data.sources.0.path", "acme/tiny"], "data.sources.0.path: acme/tiny: "),
        (["--data.sources.0.path", "hub:acme/chats/gone"], "data.sources.0.path: hub:acme/chats/gone: "),
        (["--data.sources.0.split", "validation"], "data.sources.0.path: acme/chats: "),
        (["--model.path", "modelscope:acme/tiny"], "model.path: modelscope:acme/tiny: the package modelscope is not"),
        (["--model.path", "./acme"], "model.path: ./acme is not a"),
    ],
)
def test_invalid_name_prints_one_line_with_its_key(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], args: list[str], start: str
) -> None:
    assert error_of(config, capsys, *args).startswith(f"error: {start}")


def test_token_without_access_is_reported(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["models/acme/tiny"].access = "gated"
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    assert "the token has no access" in error_of(config, capsys)


@pytest.mark.parametrize("fault", ["flipped", "short", "cut"])
def test_damaged_download_is_repeated_and_complete_files_are_kept(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], fault: str, published: Path
) -> None:
    repo = hub.repos["models/acme/tiny"]
    setattr(repo, fault, {"model.safetensors"})
    error_of(config, capsys)
    setattr(repo, fault, set())
    hub.requests.clear()
    resolved, _ = resolve_names(load_config(config))
    folder = Path(local_path(str(resolved.model.path)))
    assert (folder / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert hub.files() == {"model.safetensors": 1, "README.md": 1, "train.jsonl": 1}


def test_damaged_dataset_raises(hub: Hub, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["datasets/acme/chats"].flipped = {"data/train.jsonl"}
    assert error_of(config, capsys).startswith("error: data.sources.0.path: acme/chats: data/train.jsonl was damaged")


@pytest.mark.parametrize("how", ["offline", "dead"])
def test_without_network_the_cache_is_used_or_described(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = write_named(config.parent / "other.yaml", model={"path": "acme/other"})
    expected, _ = resolve_names(load_config(config))
    hub.add("acme/other", {"config.json": b"{}"})
    hub.requests.clear()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        hub.close()
    assert resolve_names(load_config(config))[0] == expected
    line = error_of(other, capsys)
    assert line.startswith("error: model.path: acme/other: not in the cache, and ")
    assert "contains acme/tiny. Run `hf download acme/other`" in line
    assert not hub.requests

    folder = Path(local_path(str(expected.model.path)))
    (folder / "model.safetensors").unlink()
    line = error_of(config, capsys)
    assert line.startswith("error: model.path: acme/tiny: the cache has 5 of 6 files and lacks model.safetensors, and ")


def test_a_cache_that_another_tool_filled_is_used_offline(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_download("acme/tiny")
    snapshot_download("acme/chats", repo_type="dataset")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["data", "inspect", str(config)]) == 0


def test_offline_dataset_without_file_list_raises(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot_download("acme/tiny", cache_dir=tmp_path / "other")
    snapshot_download("acme/chats", cache_dir=tmp_path / "other", repo_type="dataset")
    unreadable = shutil.ignore_patterns("trees")  # lists that another user has written
    shutil.copytree(tmp_path / "other", constants.HF_HUB_CACHE, symlinks=True, ignore=unreadable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert error_of(config, capsys).startswith("error: data.sources.0.path: acme/chats: ")


def test_full_disk_raises_before_the_download(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=1, f_frsize=4096))
    assert error_of(config, capsys).startswith("error: model.path: acme/tiny: the download has 147.3 kB, but only 4.1")
    assert not hub.files()


def test_a_cache_that_is_not_writable_is_named(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert error_of(config, capsys).startswith("error: model.path: acme/tiny: ")


def test_dataset_with_several_subsets_raises(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], rows: dict[str, bytes]
) -> None:
    card = """---
configs:
- config_name: easy
  data_files: easy/*.jsonl
- config_name: hard
  data_files: [{split: train, path: hard/train.jsonl}, {split: test, path: hard/test.jsonl}]
---
"""
    files = {"README.md": card.encode(), "easy/a.jsonl": rows["data/train.jsonl"]}
    files |= {"hard/train.jsonl": rows["data/test.jsonl"], "hard/test.jsonl": b'{"text": "x"}\n'}
    hub.add("acme/sets", files, kind="datasets")
    line = error_of(config, capsys, "--data.sources.0.path", "acme/sets")
    assert line.startswith("error: data.sources.0.path: acme/sets: the dataset has the subsets easy, hard. ")
    assert "path: hub:acme/sets/easy" in line
    args = ["--data.sources.0.path", "hub:acme/sets/hard"]
    resolve_names(load_config(config, args))
    assert set(hub.files()) >= {"train.jsonl"}
    assert not {"a.jsonl", "test.jsonl"} & set(hub.files())


def test_modelscope_downloads_with_its_own_package(
    hub: Hub, config: Path, monkeypatch: pytest.MonkeyPatch, published: Path
) -> None:
    requests = []

    def download(name: str, revision: str, ignore_patterns: list[str]) -> str:
        requests.append((name, revision))
        assert "*.py" in ignore_patterns
        assert "*.bin" in ignore_patterns
        return str(published)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=download))
    monkeypatch.setattr(modelscope, "find_spec", lambda name: ModuleSpec(name, None))
    resolved, changes = resolve_names(load_config(config, ["--model.path", "modelscope:acme/tiny@v1"]))
    assert requests == [("acme/tiny", "v1")]
    assert resolved.model.path == changes["model.path"] == str(published)


@pytest.mark.parametrize("trust", ["false", "true"])
def test_repository_that_needs_code_raises(
    hub: Hub, config: Path, capsys: pytest.CaptureFixture[str], trust: str
) -> None:
    needs_code = b'{"model_type": "unknown", "auto_map": {"AutoConfig": "modeling_tiny.Config"}}'
    hub.repos["models/acme/tiny"].push({"config.json": needs_code})
    line = error_of(config, capsys, "--model.trust_remote_code", trust)
    assert line.startswith("error: model.path: ")
    assert "downloads no code" in line
    assert "modeling_tiny.py" not in hub.files()
