"""Exports during a run (`checkpoint.export`): equal to `omnizoo export`, complete after kills, and pruned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks, start_omnizoo, train_in_this_world
from safetensors.torch import load_file
from tiny import SHAPE, read_steps, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnizoo.checkpoint import periodic_export
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.process import Process

TIMEOUT = 180
EXPERTS = {"model_type": "qwen3_moe", **SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ADAPTER = {"rank": 4, "targets": ["q_proj", "gate_proj"], "init": "random"}


def config_of(folder: Path, model: dict[str, Any], **export: Any) -> Path:
    settings = {"every": 2, "keep": 9, "export": {"every": 2, "dtype": "bf16"} | export}
    return write_config(folder, model=model, train={"steps": 4, "packs_per_step": 4}, checkpoint=settings)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def fields_of(file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(file.read_text())
    if "target_modules" in fields:  # PEFT writes a set
        fields["target_modules"] = sorted(fields["target_modules"])
    return fields


def assert_equal_folders(folder: Path, expected: Path) -> None:
    tensors, expected_tensors = tensors_of(folder), tensors_of(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    for file in expected.glob("*.json"):
        assert fields_of(folder / file.name) == fields_of(file), file.name
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in expected.iterdir()} - {"model.safetensors"} <= names


def two_ranks(process: Process, configs: list[tuple[str, list[str]]]) -> None:
    periodic_export.MAX_FILE_BYTES = 20_000  # several files
    for path, args in configs:
        assert train_in_this_world([path, *args]) == 0


@pytest.mark.slow
def test_exports_on_two_ranks_equal_exports_of_checkpoints(tmp_path: Path) -> None:
    dense = config_of(tmp_path / "dense", {})
    experts = config_of(tmp_path / "experts", {"config": EXPERTS})
    adapter = config_of(tmp_path / "adapter", {"adapter": ADAPTER})
    configs = [(str(dense), []), (str(experts), ["--parallel.ep", "2"]), (str(adapter), [])]
    result = run_on_ranks(two_ranks, 2, configs)
    assert result.code == 0, result.stdout + result.stderr
    for path in (dense, experts, adapter):
        run = path.parent / "run"
        for step in (2, 4):
            out = path.parent / f"exported_{step}"
            name = f"step_{step:08d}"
            assert main(["export", str(run / "checkpoints" / name), str(out), "--dtype", "bf16"]) == 0
            assert_equal_folders(run / "exports" / name, out)
    for path in (dense, experts):
        exported = path.parent / "run" / "exports" / "step_00000004"
        model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
        assert model.dtype == torch.bfloat16
        assert len(list(exported.glob("model-*-of-*.safetensors"))) > 1
        assert AutoTokenizer.from_pretrained(exported).chat_template


@pytest.mark.slow
def test_killed_export_leaves_no_incomplete_folder_and_is_repeated(tmp_path: Path) -> None:
    path = config_of(tmp_path, {}, every=1)
    run = tmp_path / "run"
    command = ["train", path, "--train.steps", 12]
    partial_folders = [run / "exports" / f".step_{step:08d}.partial" for step in range(3, 12)]
    running = start_omnizoo(command)
    assert running.wait_until(lambda: any(folder.exists() for folder in partial_folders), TIMEOUT)
    running.kill()
    num_steps = len(read_steps(run))
    for folder in (run / "exports").glob("step_*"):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}

    result = start_omnizoo(command).wait(TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    assert num_steps < 12
    uninterrupted = tmp_path / "uninterrupted"
    assert main(["train", str(path), "--train.steps", "12", "--log.dir", str(uninterrupted)]) == 0
    names = sorted(folder.name for folder in (run / "exports").iterdir())
    assert names == [f"step_{step:08d}" for step in range(1, 13)]
    for name in names:
        assert_equal_folders(run / "exports" / name, uninterrupted / "exports" / name)


def test_only_the_newest_exports_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    path = config_of(tmp_path, {}, every=1, keep=2, dir=str(folder))
    assert main(["train", str(path)]) == 0
    assert sorted(export.name for export in folder.iterdir()) == ["step_00000003", "step_00000004"]


def test_failed_export_ends_or_continues_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = config_of(tmp_path, {}, dir=str(tmp_path / "file" / "exports"))
    assert main(["train", str(path)]) == 1
    assert "exported" in capsys.readouterr().err
    assert main(["train", str(path), "--checkpoint.on_save_error", "continue", "--log.dir", str(tmp_path / "b")]) == 0
    assert "could not be exported" in capsys.readouterr().out


def test_invalid_export_settings_raise(tmp_path: Path) -> None:
    path = config_of(tmp_path, {})
    with pytest.raises(UserError, match=r"checkpoint\.export\.every"):
        load_config(path, ["--checkpoint.export", "{dtype: bf16}"])
    with pytest.raises(UserError, match=r"checkpoint\.export\.dtype"):
        load_config(path, ["--checkpoint.export.dtype", "int4"])
