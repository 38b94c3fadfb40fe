"""Resized vocabularies: published rows are kept, and new rows are the same on every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import from_folder, publish
from omni import VISION
from PIL import Image
from processes import run_on_ranks, train_in_this_world
from safetensors.torch import load_file, save_file
from tiny import read_steps, write_config, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.models.build import build_model
from omnizoo.parallel.fsdp.sharded_tensors import full_tensor
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model

ADDED = ["<|step|>", "<|thought|>", "<|tool|>"]
FULL = 418  # tokens of the fixtures' tokenizer: this many rows leave no unused row
NEW = 448  # the next multiple of 64
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def publish_with_tokens(folder: Path, family: str) -> Path:
    """Write a model with a full vocabulary, whose tokenizer has three additional tokens."""
    publish(folder, family, vocab_size=FULL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(ADDED, special_tokens=True)
    assert len(tokenizer) == FULL + 3
    tokenizer.save_pretrained(folder)
    return folder


def plain_config(folder: Path, family: str, **sections: Any) -> Path:
    model = publish_with_tokens(folder / family, family)
    return write_config(folder, **from_folder(model, resize_vocabulary=True), **sections)


def composed_config(folder: Path, family: str, **sections: Any) -> Path:
    """Write a composed model whose marks are added to a full vocabulary."""
    foundation = {"path": str(publish(folder / family, family, vocab_size=FULL)), "config": None}
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (24, 16, 3), dtype=np.uint8)).save(folder / "picture.png")
    asked = [{"type": "image", "image": "picture.png"}, {"type": "text", "text": "what?"}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "the sea"}]
    rows = write_rows(folder / "pictures.jsonl", [{"messages": turns}] * 16)
    modalities = {"image": {"encoder": {"kind": "vision", "config": VISION}}}
    model = {"config": None, "foundation": foundation, "modalities": modalities, "tokenizer": None}
    return write_config(folder, model=model, data={"sources": [{"path": str(rows)}]}, **sections)


def load(process: Process, path: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Return the full initial parameters of a run with this config."""
    config = load_config(path, list(overrides))
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, build_mesh(config, process), config)
    return {name: full_tensor(parameter) for name, parameter in model.named_parameters()}


CONFIGS = {"plain": plain_config, "composed": composed_config}


def test_tokens_without_embedding_row_raise_with_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = publish_with_tokens(tmp_path / "model", "qwen3")
    path = write_config(tmp_path, **from_folder(model), train={"steps": 1, "packs_per_step": 1})
    capsys.readouterr()
    assert main(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "model.tokenizer: 421 tokens do not fit the model's vocabulary of 418" in " ".join(err.split())
    adapter = ["--model.resize_vocabulary", "true", "--model.adapter.rank", "2"]
    assert main(["train", str(path), *adapter]) == 2
    assert "model.adapter: the embedding has 418 rows for 421 tokens" in capsys.readouterr().err
    own = ["--model.path", "null", "--model.module", "own_module:Tiny", "--model.config", "{a: 1}"]
    assert main(["train", str(path), "--model.resize_vocabulary", "true", *own]) == 2
    assert "model.resize_vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied head, separate head
@pytest.mark.parametrize("kind", CONFIGS)
def test_published_rows_are_kept_and_new_rows_initialized(kind: str, family: str, tmp_path: Path) -> None:
    path = CONFIGS[kind](tmp_path, family)
    published = load_file(tmp_path / family / "model.safetensors")
    with process_group() as process:
        weights = load(process, path)
        other = load(process, path, "--train.seed", "1")
    prefix = "foundation." if kind == "composed" else ""
    for name, rows in published.items():
        weight = weights[prefix + name]
        assert torch.equal(weight[: len(rows)], rows), name
        if name in ENDS:
            assert weight.shape == (NEW, 32)
            assert 0.01 < weight[FULL:].std() < 0.03  # by the family's own rule
            assert not torch.equal(weight[FULL:], other[prefix + name][FULL:])
        else:
            assert weight.shape == rows.shape


def keep_weights(process: Process, folder: str) -> None:
    for kind in CONFIGS:
        weights = load(process, Path(folder) / kind / "tiny.yaml")
        if process.rank == 0:
            save_file(weights, Path(folder) / f"{kind}.safetensors")
    train_in_this_world([Path(folder) / "composed" / "tiny.yaml", "--log.dir", Path(folder) / "run2"])


@pytest.mark.slow
def test_resized_vocabulary_on_ranks_matches_one_process(tmp_path: Path) -> None:
    steps = {"train": {"steps": 2, "packs_per_step": 3}}
    for kind, make in CONFIGS.items():
        make(tmp_path / kind, "qwen3" if kind == "plain" else "llama", **steps)
    # Three ranks split 448 rows at other boundaries than 418 rows.
    result = run_on_ranks(keep_weights, 3, str(tmp_path))
    assert result.code == 0, result.stdout + result.stderr
    for kind in CONFIGS:
        with process_group() as process:
            alone = load(process, tmp_path / kind / "tiny.yaml")
        together = load_file(tmp_path / f"{kind}.safetensors")
        assert alone.keys() == together.keys()
        assert [name for name in alone if not torch.equal(alone[name], together[name])] == []
    assert main(["train", str(tmp_path / "composed" / "tiny.yaml")]) == 0
    alone, together = read_steps(tmp_path / "composed" / "run"), read_steps(tmp_path / "run2")
    assert [step["loss"] for step in alone] == pytest.approx([step["loss"] for step in together], rel=1e-6)


def test_resized_vocabulary_is_kept_by_resume_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain_config(tmp_path, "llama", train={"steps": 4, "packs_per_step": 2}, checkpoint={"every": 2, "keep": 9})
    assert main(["train", str(path)]) == 0
    whole = [step["loss"] for step in read_steps(tmp_path / "run")]
    again = tmp_path / "again"
    first = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert main(["train", str(path), "--log.dir", str(again), "--checkpoint.resume", str(first)]) == 0
    assert [step["loss"] for step in read_steps(again)] == whole[2:]
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert len(tokenizer) == FULL + 3
    assert tokenizer.convert_tokens_to_ids(ADDED) == [418, 419, 420]
    assert model.config.vocab_size == NEW
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (NEW, 32)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == NEW
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "What?", "--max-tokens", "3", "--temperature", "0"]) == 0
    # The vocabulary fits now, so the key has no effect.
    ready = ["--model.path", str(out), "--model.resize_vocabulary", "true", "--log.dir", str(tmp_path / "on")]
    assert main(["train", str(path), *ready, "--train.steps", "1", "--checkpoint.every", "0"]) == 0


@pytest.mark.slow
@pytest.mark.long
def test_composed_model_with_resized_vocabulary_verifies(tmp_path: Path) -> None:
    assert main(["verify", str(composed_config(tmp_path, "llama")), "--world", "2", "--layouts", "few"]) == 0
