"""Invalid input and I/O failures print one line that names the file, key or number, exit with 2 and write no files."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_tokenizer
from processes import run_omnizoo, run_on_ranks, train_in_this_world
from tiny import model_config, read_steps, write_config

from omnizoo.cli.main import main
from omnizoo.parallel.process import Process
from omnizoo.training import saving

SHORT = {"steps": 2, "packs_per_step": 2}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, train=SHORT)


@pytest.fixture
def fails(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `omnizoo train` with invalid arguments and returns its one error line.

    It checks that the exit code is 2 and that there is no run folder.
    """

    def fails(*args: object) -> str:
        assert main(["train", str(config), *map(str, args)]) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        assert out == ""
        assert not (tmp_path / "run").exists()
        return lines[0]

    return fails


def source(path: Path) -> list[str]:
    return ["--data.sources", f"[{{path: {path}}}]"]


def test_missing_file_raises_with_its_path(fails: Callable[..., str], tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere.jsonl'}" in fails(*source(tmp_path / "nowhere.jsonl"))
    assert f"{tmp_path / 'nowhere'}" in fails("--model.tokenizer", tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'}" in fails("--model.config", tmp_path / "nowhere")
    held_out = f"[{{path: {tmp_path / 'nowhere.jsonl'}}}]"
    assert f"{tmp_path / 'nowhere.jsonl'}" in fails("--data.eval_sources", held_out, "--evaluation.every", "1")


def test_empty_dataset_raises_with_its_path(fails: Callable[..., str], tmp_path: Path) -> None:
    for name, content in (("empty.jsonl", ""), ("blank.jsonl", "\n\n")):
        (tmp_path / name).write_text(content)
        assert f"{tmp_path / name}" in fails(*source(tmp_path / name))
    (tmp_path / "folder").mkdir()
    assert f"{tmp_path / 'folder'}" in fails(*source(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut o', "JSON"),
        ("not json at all", "JSON"),
        ('{"body": 7}', "text"),
        ('{"text": 7}', "text"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ("[1, 2]", "object"),
    ],
)
def test_bad_row_raises_with_file_and_line(fails: Callable[..., str], tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"text": "good"}', line, '{"text": "good"}']) + "\n")
    message = fails(*source(path))
    assert f"{path}:2" in message
    assert reason in message
    assert "data.on_bad_row: skip" in message


def test_skipped_bad_rows_are_counted_and_listed(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = ['{"text": "a good row"}'] * 8
    path.write_text("\n".join([*good, "{", *good, '{"body": 1}', *good]) + "\n")
    assert main(["train", str(config), *source(path), "--data.on_bad_row", "skip", "--data.shuffle", "false"]) == 0
    skipped = read_steps(tmp_path / "run")[-1]["skipped_rows"]
    listed = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert skipped == len(listed) >= 2
    assert {entry["row"].split(": ")[0] for entry in listed} == {f"{path}:9", f"{path}:18"}


def test_messages_without_chat_template_raise(fails: Callable[..., str], tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "plain", chat_template=None)
    message = fails("--model.tokenizer", tmp_path / "plain", *source(tmp_path / "chats.jsonl"))
    assert "chat template" in message


def test_tokenizer_larger_than_vocabulary_raises(fails: Callable[..., str]) -> None:
    message = fails("--model.config.vocab_size", "100")
    assert "vocabulary" in message
    assert "100" in message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data.pack_tokens", "1"], ["data.pack_tokens", "2"]),
        (["--data.pack_tokens", "many"], ["data.pack_tokens", "many"]),
        (
            ["--train.packs_per_step", "6", "--nproc", "4"],
            ["train.packs_per_step", "6", "4 data-parallel ranks", "4 or 8"],
        ),
        (["--train.packs_per_step", "0"], ["train.packs_per_step"]),
        (["--train.micro_batch", "3"], ["train.micro_batch", "1 or 2"]),
        (["--nproc", "2", "--parallel.dp_shard", "4"], ["parallel: ", "dp_shard 4", "world size is 2"]),
        (["--nproc", "3", "--parallel.dp_replicate", "2"], ["parallel.dp_replicate", "world size 3"]),
        (["--parallel.dp_replicate", "2"], ["parallel.dp_replicate", "world size 1"]),
        (["--parallel.dp_shard", "0"], ["parallel.dp_shard"]),
        (["--train.precision", "fp23"], ["train.precision", "fp32"]),
        (["--train.stesp", "3"], ["train.stesp", "train.steps"]),
        (["--checkpoint.resume", "nowhere"], ["checkpoint.resume", "nowhere"]),
    ],
)
def test_invalid_values_raise_with_valid_alternatives(
    fails: Callable[..., str], args: list[str], expected: list[str]
) -> None:
    message = fails(*args)
    assert [part for part in expected if part not in message] == []


def test_finished_run_does_not_train_further(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config)]) == 0
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    capsys.readouterr()
    assert main(["train", str(config)]) == 0
    out = capsys.readouterr().out
    assert "step 2 of 2" in out
    assert "train.steps" in out
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


@pytest.fixture
def trained(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the checkpoints folder of a run with 2 steps and a checkpoint of each step."""
    assert main(["train", str(config), "--checkpoint.every", "1"]) == 0
    capsys.readouterr()
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": 48}, "model.model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "model.model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "model.model.layers.1.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "model.lm_head.weight"),
    ],
)
def test_checkpoint_of_another_model_raises_with_differing_key(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str
) -> None:
    fields = json.dumps(model_config("qwen3") | changes)
    before = {file: file.read_bytes() for file in trained.parent.rglob("*") if file.is_file()}
    assert main(["train", str(config), "--model.config", fields, "--train.steps", "3"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{trained / 'step_00000002'}: {key}" in line
    if "hidden_size" in changes:
        assert "(512, 32)" in line
        assert "(512, 48)" in line
    assert {file: file.read_bytes() for file in trained.parent.rglob("*") if file.is_file()} == before


def truncate(step: Path) -> None:
    (file,) = (step / "tensors").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def lose_file(step: Path) -> None:
    (step / "state.json").unlink()


def lose_manifest(step: Path) -> None:
    (step / "manifest.json").unlink()


def break_manifest(step: Path) -> None:
    (step / "manifest.json").write_text('{"step": 2, "fil')


def empty_folder(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


@pytest.mark.parametrize("damage", [truncate, lose_file, lose_manifest, break_manifest, empty_folder])
def test_incomplete_checkpoint_is_skipped_with_a_warning(
    config: Path, trained: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    first = read_steps(trained.parent)
    damage(trained / "step_00000002")
    assert main(["train", str(config), "--checkpoint.every", "1"]) == 0
    (warning,) = [record.getMessage() for record in caplog.records if "incomplete" in record.getMessage()]
    assert str(trained / "step_00000002") in warning
    again = read_steps(trained.parent)
    assert [row["loss"] for row in again] == [row["loss"] for row in first]
    assert [row["step"] for row in again] == [1, 2]


def test_resuming_from_damaged_checkpoint_raises(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate(trained / "step_00000001")
    assert main(["train", str(config), "--checkpoint.resume", str(trained / "step_00000001")]) == 2
    err = capsys.readouterr().err
    assert str(trained / "step_00000001") in err
    assert "damaged" in err


@contextmanager
def full_disk(rank: int | None = None) -> Iterator[None]:
    """Limit files to 64 KiB while the second checkpoint is saved, on all ranks or on `rank`."""
    saves = []
    save = saving.save_checkpoint
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def spy(*args: Any) -> Path:
        saves.append(args)
        if len(saves) == 2 and rank in (None, int(args[5].rank)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
        try:
            return save(*args)
        finally:
            if len(saves) == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    saving.save_checkpoint = spy
    try:
        yield
    finally:
        saving.save_checkpoint = save
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = ["--train.steps", "4", "--checkpoint.every", "1", "--checkpoint.keep", "9"]


def test_full_disk_stops_run_and_keeps_earlier_checkpoint(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        assert main(["train", str(config), *FULL]) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "checkpoint of step 2" in line
    assert str(tmp_path / "run" / "checkpoints") in line
    assert "too large" in line or "space" in line.lower()  # the message of the operating system
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    assert main(["train", str(config), *FULL]) == 0  # resumes when the disk has space again
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1, 2, 3, 4]


def test_run_continues_on_full_disk_if_configured(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        assert main(["train", str(config), *FULL, "--checkpoint.on_save_error", "continue"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line for line in warnings if "checkpoint of step 2" in line]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_00000001", "step_00000003", "step_00000004"]
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1, 2, 3, 4]


def two_ranks(process: Process, folder: str) -> None:
    """Check that both ranks return the same code when only rank 1 has a full disk or a bad row."""
    args = [Path(folder) / "tiny.yaml", *FULL]
    with full_disk(rank=1):
        assert train_in_this_world([*args, "--log.dir", Path(folder) / "stopped"]) == 1
    with full_disk(rank=1):
        survive = ["--checkpoint.on_save_error", "continue"]
        assert train_in_this_world([*args, *survive, "--log.dir", Path(folder) / "survived"]) == 0
    # Rows are assigned to lanes in turn and lanes to ranks: with one lane per rank, only one rank reads the bad row.
    bad = [*source(Path(folder) / "bad.jsonl"), "--data.lanes", "2", "--log.dir", Path(folder) / "bad"]
    assert train_in_this_world([*args, *bad]) == 2
    torch.distributed.barrier()  # no rank waits in another collective


@pytest.mark.slow
def test_error_on_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    write_config(tmp_path, train=SHORT)
    bad_file(tmp_path)
    result = run_on_ranks(two_ranks, 2, str(tmp_path))
    assert result.code == 0, result.stdout + result.stderr
    assert "rank 1:" in result.stderr  # the rank with the full disk
    for name, steps in (("stopped", "1"), ("survived", "134")):
        assert sorted(path.name[-1] for path in (tmp_path / name / "checkpoints").iterdir()) == list(steps)
    assert not (tmp_path / "bad").exists()


def bad_file(folder: Path) -> Path:
    path = folder / "bad.jsonl"
    path.write_text("\n".join(['{"text": "good"}', "{", *['{"text": "good"}'] * 6]) + "\n")
    return path


@pytest.mark.slow
def test_bad_row_on_one_rank_prints_one_message(tmp_path: Path) -> None:
    config = write_config(tmp_path, train=SHORT)
    result = run_omnizoo(["train", config, "--nproc", 2, "--data.lanes", 2, *source(bad_file(tmp_path))])
    assert result.code == 2, result.stdout + result.stderr
    assert result.stderr.count("error: ") == 1
    assert f"{tmp_path / 'bad.jsonl'}:2: not valid JSON" in result.stderr
    assert not (tmp_path / "run").exists()
