"""A hub on loopback with one model and one dataset, and an empty cache."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exports import publish
from hub_server import Hub
from huggingface_hub import constants
from tiny import make_rows


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as people publish them: also with pickled weights and code."""
    folder = publish(tmp_path_factory.mktemp("published"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle" * 1000)
    (folder / "consolidated.safetensors").write_bytes(b"copy" * 1000)
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of the repository ran')")
    (folder / "README.md").write_text("# Tiny")
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a dataset repository with two splits."""
    folder = tmp_path_factory.mktemp("rows")
    make_rows(folder)
    chats = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    return {
        "README.md": b"# Chats",
        "load.py": b"raise SystemExit",
        "dataset_infos.json": b"{}",
        "data/train.jsonl": "".join(chats[:400]).encode(),
        "data/test.jsonl": "".join(chats[400:]).encode(),
    }


@pytest.fixture
def hub(tmp_path: Path, published: Path, rows: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, which this process and the commands that it starts use."""
    server = Hub()
    server.add("acme/tiny", published)
    server.add("acme/chats", rows, kind="datasets")
    for name, value in server.env(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    importlib.reload(constants)  # huggingface_hub reads the environment when it is imported
    monkeypatch.chdir(tmp_path)  # without folders that look like a name
    yield server
    server.close()
    monkeypatch.undo()
    importlib.reload(constants)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config that names the model and the dataset of the hub."""
    return write_named(tmp_path / "named.yaml")


def write_named(path: Path, **sections: Any) -> Path:
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": "acme/tiny"},
        "data": {"sources": [{"path": "acme/chats"}], "pack_tokens": 96, "lanes": 4, "look_ahead": 8},
        "train": {"steps": 2, "packs_per_step": 4},
        "log": {"dir": str(path.parent / "run"), "tensorboard": False},
    }
    for section, keys in sections.items():
        settings[section] = settings.get(section, {}) | keys
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    return path
