"""`omnizoo generate` on the folder of a PEFT adapter."""

import json
from pathlib import Path

import pytest
import torch
from fixtures import make_tokenizer
from tiny import model_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.cli.main import main
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.sampling import Sampling


def test_adapter_folder_generates_like_its_merged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    fields = model_config("gpt_oss")  # with fused experts, whose adapter PEFT writes in another layout
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    base.save_pretrained(tmp_path / "base")
    make_tokenizer(tmp_path / "base")
    adapter = {"rank": 2, "targets": ["all-linear", "experts.gate_up_proj"], "init": "random"}
    model = {"config": None, "path": str(tmp_path / "base"), "tokenizer": None, "adapter": adapter}
    path = write_config(tmp_path, model=model, train={"steps": 1, "packs_per_step": 1, "lr": 0.1})
    assert main(["train", str(path)]) == 0
    run, folder, merged = tmp_path / "run", tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(run), str(folder)]) == 0
    assert main(["export", str(run), str(merged), "--merge"]) == 0
    capsys.readouterr()

    arguments = ["--prompt", "What?", "--prompt", "Why not?", "--max-tokens", "6", "--temperature", "0"]
    answers = []
    for place in (merged, folder):
        assert main(["generate", str(place), *arguments, "--out", str(tmp_path / "out.jsonl")]) == 0
        answers.append([json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text().splitlines()])
    assert answers[0] == answers[1]
    assert f"{folder} is merged into its base model, {tmp_path / 'base'}" in capsys.readouterr().err
    unmerged = load_chat_model(tmp_path / "base")
    assert unmerged.text(unmerged.write("Why not?", Sampling(temperature=0), 6)) != answers[1][1]  # it has an effect

    (tmp_path / "base").rename(tmp_path / "moved")
    assert main(["generate", str(folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert f"{folder / 'adapter_config.json'}: base_model_name_or_path: {tmp_path / 'base'}" in err
    assert "--base" in err
    assert err.count("\n") == 1
    moved = ["--base", str(tmp_path / "moved"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(folder), *arguments, *moved]) == 0
    assert [json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == answers[1]
    assert main(["generate", str(merged), *arguments, "--base", str(tmp_path / "moved")]) == 2  # not an adapter folder
    assert "--base" in capsys.readouterr().err
