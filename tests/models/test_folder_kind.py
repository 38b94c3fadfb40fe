"""Folders that are not transformers models: one line says what the folder is and what it needs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import write_config

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.models import folder_kind
from omnizoo.models.read_config import read_model_config

PIPELINE = {"model_index.json": {"_class_name": "FluxPipeline", "_diffusers_version": "0.36.0"}}
COMPONENT = {"config.json": {"_class_name": "AutoencoderKL", "_diffusers_version": "0.36.0"}}


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def message_for(folder: Path) -> str:
    with pytest.raises(UserError, match=r"^model\.path: ") as caught:
        read_model_config(ModelSection(path=str(folder)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"model_type": "llamma"}}, ("llamma", "Did you mean llama", "transformers")),
        ({"config.json": {"model_type": "zzz_new_family"}}, ("zzz_new_family", "newer release")),
        ({"config.json": {"architecture": "vit_b", "pretrained_cfg": {}}}, ("timm", "vit_b")),
        ({"config.json": {"hidden_size": 4}}, ("model_type",)),
        ({"adapter_config.json": {}}, ("model.adapter.path",)),
        ({"params.json": {}, "consolidated.safetensors": {}}, ("original release",)),
        ({"model-q4.gguf": {}}, ("GGUF",)),
        ({"notes.txt": {}}, ("config.json", "notes.txt")),
        ({}, ("contains nothing",)),
    ],
)
def test_folder_of_unknown_kind_is_described(files: dict[str, Any], expected: tuple[str, ...], tmp_path: Path) -> None:
    message = message_for(write_folder(tmp_path / "model", files))
    for text in expected:
        assert text in message


@pytest.mark.parametrize(("files", "class_name"), [(PIPELINE, "FluxPipeline"), (COMPONENT, "AutoencoderKL")])
def test_diffusers_folder_without_diffusers_names_the_extra(
    files: dict[str, Any], class_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_kind, "find_spec", lambda name: None)
    message = message_for(write_folder(tmp_path / "model", files))
    for text in (class_name, "not installed", "pip install 'omnizoo[diffusers]'"):
        assert text in message


def test_train_on_folder_of_unknown_family_prints_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "model", {"config.json": {"model_type": "zzz_new_family"}})
    config = write_config(tmp_path, model={"config": None, "path": str(folder)})
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "zzz_new_family" in error
