"""Training, planning, generation and exports with names on the hub, as a user starts them."""

import json
import socket
from pathlib import Path

import pytest
import yaml
from conftest import write_named
from hub_server import Hub
from processes import run_omnizoo, start_omnizoo
from tiny import read_steps

MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def commits(hub: Hub) -> tuple[str, str]:
    return hub.repos["models/acme/tiny"].branches["main"], hub.repos["datasets/acme/chats"].branches["main"]


def saved_paths(file: Path) -> tuple[str, str]:
    saved = yaml.safe_load(file.read_text())
    return saved["model"]["path"], saved["data"]["sources"][0]["path"]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_by_names_downloads_each_needed_file_once_and_equals_a_run_from_folders(
    hub: Hub, config: Path, tmp_path: Path, published: Path, rows: dict[str, bytes], nproc: int
) -> None:
    result = run_omnizoo(["train", config, "--nproc", nproc])
    assert result.code == 0, result.stderr
    assert hub.files() == dict.fromkeys([*MODEL_FILES, "README.md", "train.jsonl"], 1)
    model, data = (f"acme/{name}@{commit}" for name, commit in zip(("tiny", "chats"), commits(hub), strict=True))
    run = tmp_path / "run"
    assert saved_paths(run / "config.yaml") == (model, data)
    assert saved_paths(run / "checkpoints" / "step_00000002" / "config.yaml") == (model, data)

    (tmp_path / "train.jsonl").write_bytes(rows["data/train.jsonl"])
    folders = {"model": {"path": str(published)}, "log": {"dir": str(tmp_path / "local")}}
    (tmp_path / "folders").mkdir()
    local = write_named(tmp_path / "folders" / "local.yaml", **folders)
    path = ["--data.sources.0.path", str(tmp_path / "train.jsonl")]
    assert run_omnizoo(["train", local, *path]).code == 0
    by_name = [step["loss"] for step in read_steps(run)]
    from_folder = [step["loss"] for step in read_steps(tmp_path / "local")]
    assert by_name == pytest.approx(from_folder, rel=1e-6)

    # The branches move, the hub goes away, and the run resumes with the same commits.
    for repo in hub.repos.values():
        repo.push({"config.json": b"{}", "data/train.jsonl": b'{"text": "new"}\n'})
    hub.requests.clear()
    hub.close()
    resumed = run_omnizoo(["train", config, "--nproc", nproc, "--train.steps", 3])
    assert resumed.code == 0, resumed.stderr
    assert not hub.requests
    assert saved_paths(run / "checkpoints" / "step_00000003" / "config.yaml") == (model, data)

    exported = run_omnizoo(["export", run, tmp_path / "out"])
    assert exported.code == 0, exported.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header == {"library_name": "transformers", "base_model": ["acme/tiny"], "datasets": ["acme/chats"]}
    assert model.partition("@")[2] in card
    assert data.partition("@")[2] in card


@pytest.mark.slow
def test_ranks_of_torchrun_download_once_and_use_the_same_commit(hub: Hub, config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start_omnizoo(["train", config], RANK=str(i), LOCAL_RANK=str(i), **world) for i in range(2)]
    for rank in ranks:
        result = rank.wait(240)
        assert result.code == 0, result.stderr
    assert set(hub.files().values()) == {1}
    listings = [path for _, path in hub.requests if path.startswith("/api/")]
    assert len(listings) == len(set(listings)) == 4
    assert saved_paths(tmp_path / "run" / "config.yaml")[0] == f"acme/tiny@{commits(hub)[0]}"


@pytest.mark.slow
def test_several_processes_at_once_download_each_file_once(hub: Hub, config: Path) -> None:
    commands = [start_omnizoo(["data", "inspect", config, "--samples", 0]) for _ in range(3)]
    for command in commands:
        result = command.wait(240)
        assert result.code == 0, result.stderr
    assert set(hub.files().values()) == {1}
    assert "model.safetensors" not in hub.files()  # only the tokenizer and the config are needed


@pytest.mark.slow
def test_a_first_config_by_names_trains_generates_and_exports_an_adapter(hub: Hub, tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    created = run_omnizoo(["new", "acme/tiny", "acme/chats", "--out", first])
    assert created.code == 0, created.stderr
    text = first.read_text()
    assert "acme/tiny" in text
    assert "split: test" in text  # the repository has a held-out split
    assert "model.safetensors" not in hub.files()
    settings = yaml.safe_load(text)
    settings["model"]["adapter"] = {"kind": "lora", "rank": 2}
    settings["train"] |= {"steps": 2, "packs_per_step": 4}
    settings["train"].pop("epochs", None)
    settings["log"] = {"dir": str(tmp_path / "run"), "tensorboard": False}
    first.write_text(yaml.safe_dump(settings))
    trained = run_omnizoo(["train", first])
    assert trained.code == 0, trained.stderr
    assert run_omnizoo(["export", tmp_path / "run", tmp_path / "adapter"]).code == 0
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["revision"]) == ("acme/tiny", commits(hub)[0])
    assert yaml.safe_load((tmp_path / "adapter" / "README.md").read_text().split("---")[1])["library_name"] == "peft"

    # The adapter on the hub, merged into its base by name.
    hub.add("acme/adapter", tmp_path / "adapter")
    args = ["--model.adapter", "{path: acme/adapter}", "--log.dir", tmp_path / "second"]
    continued = run_omnizoo(["train", first, *args])
    assert continued.code == 0, continued.stderr
    assert hub.files()["adapter_model.safetensors"] == 1
    merged = run_omnizoo(["export", tmp_path / "second", tmp_path / "merged", "--merge"])
    assert merged.code == 0, merged.stderr
    answer = run_omnizoo(["generate", tmp_path / "adapter", "--prompt", "Hello", "--max-tokens", 3, "--temperature", 0])
    assert answer.code == 0, answer.stderr  # the adapter names its base on the hub and the commit of the base
    hub.repos["models/acme/gen"] = hub.repos["models/acme/tiny"]
    answer = run_omnizoo(["generate", "acme/gen", "--prompt", "Hello", "--max-tokens", 3, "--temperature", 0])
    assert answer.code == 0, answer.stderr
    assert "pytorch_model.bin" not in hub.files()
    assert "modeling_tiny.py" not in hub.files()


@pytest.mark.slow
def test_a_plan_reads_no_weights_and_an_existing_folder_takes_precedence(
    hub: Hub, config: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = run_omnizoo(["plan", config, "--world", 1])
    assert planned.code == 0, planned.stderr
    assert "model.safetensors" not in hub.files()
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").symlink_to(published)
    hub.requests.clear()
    monkeypatch.chdir(tmp_path)
    args = ["--data.sources.0.path", "hub:acme/chats", "--log.dir", tmp_path / "other"]
    assert run_omnizoo(["train", config, *args]).code == 0
    assert not [path for _, path in hub.requests if "models" in path]
    assert saved_paths(tmp_path / "other" / "config.yaml") == ("acme/tiny", f"hub:acme/chats@{commits(hub)[1]}")
