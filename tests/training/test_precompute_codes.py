"""`omnizoo data precompute` for frozen tokenizers: files, kills, and training that equals training without it."""

import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from omni import CODEC, write_omni_config
from processes import run_omnizoo, start_omnizoo
from safetensors.torch import load_file, save_file
from tiny import read_steps, write_rows
from transformers import EncodecConfig, EncodecModel

from omnizoo.cli.main import main
from omnizoo.cli.parser import parse
from omnizoo.config.errors import UserError
from omnizoo.data.sources.precomputed import PrecomputedIndex
from omnizoo.modalities.decoders.image_tokenizers import save_patch_codebook

SHARD_ROWS = 6
ROWS = 40


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composed model that reads images, and generates images and audio as codes of frozen tokenizers."""
    folder = tmp_path_factory.mktemp("codes")
    torch.manual_seed(0)
    codec = EncodecConfig(**{name: value for name, value in CODEC.items() if name != "model_type"})
    EncodecModel(codec).save_pretrained(folder / "codec")
    codebook = np.random.default_rng(0).random((16, 4 * 4 * 3), dtype=np.float32)
    save_patch_codebook(folder / "codebook", codebook, patch=4, size=8)
    file = write_omni_config(folder, "llama", ["image", "audio"], train={"steps": 4}, log={"dir": str(folder / "run")})
    fields = yaml.safe_load(file.read_text())
    modalities = fields["model"]["modalities"]
    modalities["image"]["decoder"] = {"kind": "image_tokens", "path": str(folder / "codebook")}
    modalities["audio"]["decoder"] = {"kind": "audio_codec", "path": str(folder / "codec")}
    rows = folder / "rows.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:ROWS]))
    file.write_text(yaml.safe_dump(fields))
    return file


def precompute(config: Path, out: Path, *options: str) -> list[str]:
    """Return the command line."""
    return ["data", "precompute", str(config), "--out", str(out), "--shard-rows", str(SHARD_ROWS), *options]


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    out = config.with_name("precomputed")
    assert main(precompute(config, out)) == 0
    return out


def train(config: Path, run: Path, *options: str) -> list[dict[str, Any]]:
    """Train and return the metrics of each step, without times."""
    assert main(["train", str(config), "--log.dir", str(run), *options]) == 0
    steps = read_steps(run)
    return [{name: value for name, value in step.items() if "loss" in name or "grad" in name} for step in steps]


def test_training_with_precomputed_codes_equals_training_on_the_fly(config: Path, folder: Path, tmp_path: Path) -> None:
    on_the_fly = train(config, tmp_path / "on_the_fly")
    source = f"[{{path: {folder}, media_dir: {config.parent}}}]"
    precomputed = train(config, tmp_path / "precomputed", "--data.sources", source)
    assert len(on_the_fly) == 4
    assert any("image" in name for name in on_the_fly[0])
    assert any("audio" in name for name in on_the_fly[0])
    assert precomputed == on_the_fly


def test_stored_codes_need_no_media_files(folder: Path, config: Path, tmp_path: Path) -> None:
    source = f"[{{path: {folder}, media_dir: {tmp_path}}}]"
    with pytest.raises(UserError, match="media/"):  # images that are read, not generated, are still needed
        run_main(["train", str(config), "--data.sources", source, "--log.dir", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    stored = [item["port"] for row in rows for item in row["items"].values()]
    assert {tuple(port) for port in stored} == {("image", "decoder"), ("audio", "decoder")}


def run_main(command: list[str]) -> None:
    """Run a command in this process. Errors are raised instead of printed."""
    args = parse(command)
    args.run(args)


def kill_after(num_shards: int, command: list[str], out: Path, seconds: float = 0) -> None:
    """Run a command, and kill it some time after it has written as many shards."""
    running = start_omnizoo(command)
    running.wait_until(lambda: len(list(out.glob("codes-*"))) >= num_shards, timeout=200)
    threading.Event().wait(seconds)  # at any moment, also within a file
    running.kill()


def test_killed_precompute_continues_with_identical_files(config: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = precompute(config, out, "--nproc", "3")
    for number in (1, 4):
        kill_after(number, command, out)
    result = run_omnizoo(command)
    assert result.code == 0, result.stderr
    assert content(out) == content(folder)


@pytest.mark.long
def test_ten_kills_leave_identical_files(config: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = precompute(config, out, "--nproc", "2")
    dice = random.Random(0)
    for _ in range(10):
        kill_after(len(list(out.glob("codes-*"))) + dice.randint(0, 1), command, out, dice.random() / 20)
    assert run_omnizoo(command).code == 0
    assert content(out) == content(folder)


def test_disk_that_is_full_is_one_line(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("omnizoo.training.precompute.shards.save_file", save_file)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"^--out: .*No space left on device"):
        run_main(precompute(config, out))
    assert not [name for name in content(out) if name.startswith("codes")]


def test_folder_of_other_settings_is_refused(config: Path, folder: Path, tmp_path: Path) -> None:
    command = ["data", "precompute", str(config), "--out", str(folder), "--shard-rows", "7"]
    with pytest.raises(UserError, match=r"^--out: .*shard_rows was 6, and is now 7"):
        run_main(command)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"^--out: .*notes\.txt"):
        run_main(precompute(config, tmp_path))


def test_tokenizer_with_other_weights_is_refused(config: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "codebook"
    shutil.copytree(config.with_name("codebook"), other)
    weights = load_file(other / "codebook.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "codebook.safetensors")
    source = f"[{{path: {folder}, media_dir: {config.parent}}}]"
    command = ["train", str(config), "--data.sources", source, "--log.dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match="image/decoder"):
        run_main([*command, "--model.modalities.image.decoder.path", str(other)])


def test_damaged_folder_is_one_line(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    shard = out / "codes-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"codes-00002\.safetensors: the file has"):
        PrecomputedIndex.read(out)
    (out / "index.json").unlink()
    with pytest.raises(UserError, match="has not finished"):
        PrecomputedIndex.read(out)


def test_unreadable_media_stop_or_are_left_out(config: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [part]}]}
        for part in ({"type": "image", "image": "good.png"}, {"type": "image", "image": "bad.png"})
    ]
    shutil.copyfile(config.parent / "media/0.png", tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    source = write_rows(tmp_path / "rows.jsonl", rows)
    command = [*precompute(config, tmp_path / "out"), "--data.sources", f"[{{path: {source}}}]"]
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*bad\.png"):
        run_main(command)
    shutil.rmtree(tmp_path / "out")
    run_main([*command, "--data.on_bad_row", "skip"])
    index = PrecomputedIndex.read(tmp_path / "out")
    assert index.num_rows == 1
    assert json.loads(index.file.read_text())["bad_rows"] == 1


def test_options_of_another_action_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--samples"):
        run_main([*precompute(config, tmp_path), "--samples", "3"])
    with pytest.raises(UserError, match=r"^--nproc"):
        run_main(["data", "inspect", str(config), "--nproc", "2"])
    with pytest.raises(UserError, match=r"^--out"):
        run_main(["data", "precompute", str(config)])
