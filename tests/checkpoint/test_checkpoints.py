"""Checkpoints and the folders they are in: any changed byte is found, a folder belongs to one run, a full disk is
survived, and other data is never resumed on."""

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import tarfile
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
from corpus import run_main
from corpus_checkpoints import DAMAGES
from processes import run_on_ranks, start_server, train_in_this_world
from safetensors.torch import load_file
from tiny import read_steps, write_config
from transformers import PreTrainedTokenizerFast

from omnizoo.checkpoint import folder, lock, manifest, retention, run_id
from omnizoo.checkpoint.lock import hold
from omnizoo.checkpoint.manifest import Manifest
from omnizoo.checkpoint.resume import find_checkpoint
from omnizoo.checkpoint.tensor_files import write
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.loading import fingerprint
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.sources.open import open_source
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.reporting import metrics_file, run_folder
from omnizoo.training import preflight, recorder, setup
from omnizoo.training.callbacks import loggers

SHORT = {"steps": 2, "packs_per_step": 1}
EVERY = ["--checkpoint.every", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml and a run of two steps, a checkpoint of each. Only to be looked at, or copied."""
    path = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_config(path, train=SHORT)), *EVERY]) == 0
    return path


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The run folder, to be spoilt."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def error_of(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([*map(str, args)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


# ---- any changed byte is found


def test_any_changed_byte_is_detected(copy: Path) -> None:
    """500 draws: half of them over files, so that small ones are hit as often, half over all bytes."""
    step, dice = copy / "checkpoints" / "step_00000002", random.Random(8)
    assert folder.damage(step) is None
    files = sorted(path for path in step.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    for number in range(500):
        file = dice.choice(files) if number % 2 else dice.choices(files, sizes)[0]
        content = file.read_bytes()
        place = dice.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= dice.randrange(1, 256)
        file.write_bytes(changed)
        reason = folder.damage(step)
        assert reason is not None, f"byte {place} of {file}"
        assert file.name in reason
        file.write_bytes(content)
    assert folder.damage(step) is None


def test_each_damage_of_corpus_is_detected_with_file_and_reason(trained: Path, tmp_path: Path) -> None:
    for number, (name, (damage, file, reason)) in enumerate(DAMAGES.items()):
        step = Path(shutil.copytree(trained / "run", tmp_path / str(number))) / "checkpoints" / "step_00000002"
        assert folder.damage(step) is None
        damage(step)
        found = folder.damage(step)
        assert found is not None, name
        assert file in found, name
        assert reason in found, name
        assert folder.newest_intact(step.parent)[0] == step.parent / "step_00000001", name


def test_shards_are_hashed_while_written(tmp_path: Path) -> None:
    with process_group():
        written = write({"model.a": torch.arange(1000.0)}, tmp_path / "tensors")
    ((name, file),) = written.items()
    assert file == manifest.hash_file(tmp_path / "tensors" / name)


def two_ranks(process: Process, config: Path) -> None:
    """Rank 1's shard of the newest checkpoint is damaged: both ranks go on from the one before."""
    assert train_in_this_world([config, *EVERY]) == 0
    step = config.parent / "run" / "checkpoints" / "step_00000002"
    if process.rank == 0:
        (shard,) = (step / "tensors").glob("shard-00002-*")
        shard.write_bytes(bytes(shard.stat().st_size))
    torch.distributed.barrier()
    assert train_in_this_world([config, *EVERY]) == 0
    torch.distributed.barrier()
    assert folder.damage(step) is None


@pytest.mark.slow
def test_ranks_verify_files_together_and_agree(tmp_path: Path) -> None:
    config = write_config(tmp_path, train={"steps": 2, "packs_per_step": 2})
    result = run_on_ranks(two_ranks, 2, config)
    assert result.code == 0, result.stdout + result.stderr
    assert "step_00000002 is damaged or incomplete: tensors/shard-00002" in result.stderr
    assert [row["step"] for row in read_steps(tmp_path / "run")] == [1, 2]


# ---- a folder belongs to one run


def test_pruning_removes_only_older_checkpoints_of_same_run(tmp_path: Path) -> None:
    for step, owner in ((1, "ours"), (2, "theirs"), (3, "ours"), (4, "ours"), (9, "ours")):
        folder.folder_of(tmp_path, step).mkdir()
        (folder.folder_of(tmp_path, step) / manifest.NAME).write_text(Manifest(owner, step, {}).text())
    folder.partial_of(tmp_path, 5).mkdir()
    (tmp_path / ".mine.partial").mkdir()
    retention.prune(tmp_path, 1, folder.folder_of(tmp_path, 4))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".mine.partial", "step_00000002", "step_00000004", "step_00000009"]


def test_new_run_in_used_folder_raises_and_changes_nothing(
    trained: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    args = ["train", trained / "tiny.yaml", "--log.dir", copy, "--checkpoint.resume", "never", "--checkpoint.keep", 1]
    error = error_of(capsys, *args)
    assert "checkpoint.resume: `never`" in error
    assert "step_00000002" in error
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before


def test_run_id_is_in_folder_and_manifests_and_persists(trained: Path, copy: Path) -> None:
    (first,) = run_id.owners(copy / "checkpoints")
    assert main(["train", str(trained / "tiny.yaml"), "--log.dir", str(copy), "--train.steps", "3"]) == 0
    assert json.loads((copy / "run.json").read_text())["id"] == first
    assert set(run_id.owners(copy / "checkpoints")) == {first}


def test_run_started_with_never_resumes_after_torchrun_restart(
    trained: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner,) = run_id.owners(copy / "checkpoints")
    (copy / "run.json").write_text(run_id.Identity(owner, "never").text())
    config = load_config(trained / "tiny.yaml", ["--log.dir", str(copy), "--checkpoint.resume", "never"])
    with process_group() as process:
        mesh = build_mesh(config, process)
        with pytest.raises(UserError, match="never"):
            find_checkpoint(config, copy / "checkpoints", mesh)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert find_checkpoint(config, copy / "checkpoints", mesh).checkpoint == copy / "checkpoints" / "step_00000002"


def hold_until_killed(path: Path, ready: Any) -> None:
    with hold(path, "log.dir"):
        worker = os.fork()  # as a loader does
        ready.send(worker)
        signal.pause()


@pytest.mark.slow
def test_lock_ends_with_process_although_worker_lives(tmp_path: Path) -> None:
    start_server()
    context = get_context("forkserver")
    receiver, sender = context.Pipe()
    child = context.Process(target=hold_until_killed, args=(tmp_path, sender))
    child.start()
    worker = receiver.recv()
    try:
        where = rf"{tmp_path} is in use by a run on {socket.gethostname()}, process {child.pid}"
        with pytest.raises(UserError, match=where), hold(tmp_path, "log.dir"):
            pass
        child.kill()
        child.join()
        with hold(tmp_path, "log.dir"):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(worker, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_second_run_in_folder_raises(trained: Path, tmp_path: Path) -> None:
    args = ["train", str(trained / "tiny.yaml"), "--log.dir", str(tmp_path / "run")]
    start_server()
    for key, args_of in (("log.dir", args), ("checkpoint.dir", [*args[:3], str(tmp_path / "other")])):
        with hold(tmp_path / "run" / ("checkpoints" if key == "checkpoint.dir" else ""), key):
            result, _ = run_main([*args_of, "--checkpoint.dir", str(tmp_path / "run" / "checkpoints")])
        assert result.code == 2
        assert f"{key}: " in result.stderr
        assert f"is in use by a run on {socket.gethostname()}, process {os.getpid()}" in result.stderr
    assert not (tmp_path / "other").exists()


def test_without_file_locks_owner_process_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": lock.psutil.Process().create_time()}
    for holder, message in (
        (own, rf"^log\.dir: .*process {os.getpid()}\. .*delete"),
        (own | {"host": "elsewhere"}, "is in use by a run on elsewhere"),
    ):
        (tmp_path / ".lock").write_text(json.dumps(holder))
        with pytest.raises(UserError, match=message), hold(tmp_path, "log.dir"):
            pass
    for holder in (own | {"started": 1.0}, own | {"pid": 2**22 + 1}, "half a lo"):
        (tmp_path / ".lock").write_text(json.dumps(holder))
        with hold(tmp_path, "log.dir"):
            assert json.loads((tmp_path / ".lock").read_text()) == own


def test_too_little_disk_space_raises_before_weights_load(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 300_000  # bytes; the model has 29 K weights, so a checkpoint takes 350 K
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(setup, "parallelize_model", None)
    line = error_of(capsys, "train", trained / "tiny.yaml", "--log.dir", tmp_path / "new")
    assert f"checkpoint.dir: {tmp_path / 'new' / 'checkpoints'} has 0.00 GB free" in line
    assert not (tmp_path / "new").exists()


# ---- a new run from the weights of another


def test_run_from_weights_starts_at_step_0(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[dict[str, torch.Tensor], int]] = []
    load = setup.load_checkpoint

    def spy(origin: Any, model: Any, optimizer: Any, base: Any) -> Any:
        state = load(origin, model, optimizer, base)
        weights = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        seen.append((weights, len(optimizer.state)))
        return state

    monkeypatch.setattr(setup, "load_checkpoint", spy)
    source = str(trained / "run")
    args = ["train", str(trained / "tiny.yaml"), "--log.dir", str(tmp_path / "new"), "--model.init_from", source]
    # other rows, another seed: a resume would refuse both
    args += ["--train.seed", "5", "--data.sources", f"[{{path: {trained / 'chats.jsonl'}}}]"]
    assert main([*args, *EVERY]) == 0
    weights, states = seen.pop()
    (shard,) = (trained / "run" / "checkpoints" / "step_00000002" / "tensors").iterdir()
    saved = load_file(shard)
    assert states == 0
    assert all(torch.equal(weights[name], saved[f"model.{name}"]) for name in weights)
    steps = read_steps(tmp_path / "new")
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[0]["tokens_seen"] == steps[0]["tokens"]
    assert (
        run_id.owners(tmp_path / "new" / "checkpoints")
        .keys()
        .isdisjoint(run_id.owners(trained / "run" / "checkpoints"))
    )
    # the same command again goes on with the new run
    capsys.readouterr()
    assert main([*args, "--train.steps", "3"]) == 0
    assert seen.pop()[1] > 0
    assert [row["step"] for row in read_steps(tmp_path / "new")] == [1, 2, 3]
    assert read_steps(tmp_path / "new")[:2] == steps
    # the stored form is that of earlier versions, whose runs resume with and without model.init_from
    assert json.loads((tmp_path / "new" / "run.json").read_text())["resume"] == f"weights:{source}"
    assert main([*args[:4], *args[6:], "--train.steps", "4"]) == 0
    assert [row["step"] for row in read_steps(tmp_path / "new")] == [1, 2, 3, 4]


def test_old_weights_prefix_error_names_init_from(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of(capsys, "train", trained / "tiny.yaml", "--checkpoint.resume", "weights:runs/a")
    assert "model.init_from: runs/a" in line


# ---- other data


def edit_byte(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    while not chr(data[at]).isalpha():
        at += 1
    data[at] = ord("x") if data[at] != ord("x") else ord("y")
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0.0001, 0.37, 0.98])
def test_edited_source_stops_resume_with_source_and_advice(
    trained: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: float
) -> None:
    texts = Path(shutil.copy(trained / "texts.jsonl", tmp_path / "moved.jsonl"))
    args = ["train", trained / "tiny.yaml", "--log.dir", copy, "--train.steps", 3, "--data.sources.0.path", texts]
    edit_byte(texts, place)
    line = error_of(capsys, *args)
    assert f"data.sources[0] ({texts}) has changed since the checkpoint: its rows" in line
    assert "model.init_from: CHECKPOINT" in line


def test_large_sources_are_fingerprinted_by_row_lengths_and_blocks(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE", 1000)
    monkeypatch.setattr(fingerprint, "BLOCK", 100)
    texts = Path(shutil.copy(trained / "texts.jsonl", tmp_path / "texts.jsonl"))

    def content() -> dict[str, Any]:
        return content_of(open_source(SourceSettings(path=str(texts))))

    original, data = content(), texts.read_bytes()
    assert original == content_of(open_source(SourceSettings(path=str(trained / "texts.jsonl"))))
    texts.write_bytes(data.replace(b" of ", b" off ", 1).replace(b" sees ", b" see ", 1))
    assert content()["bytes"] == original["bytes"]
    assert content()["shape"] != original["shape"]
    texts.write_bytes(data[:-3] + b"?" + data[-2:])  # the last block
    assert content()["content"] != original["content"]
    assert content()["shape"] == original["shape"]


def test_source_fingerprint_depends_on_content_not_location(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(40)]
    edited = [*rows[:20], {"text": "now 20"}, *rows[21:]]

    def jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
        (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path / "a.jsonl"

    def files(path: Path, rows: list[dict[str, str]]) -> Path:
        for name, part in (("a", rows[:15]), ("b", rows[15:])):
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        return path

    def parquet(path: Path, rows: list[dict[str, str]]) -> Path:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "a.parquet", row_group_size=16)
        return path / "a.parquet"

    def tar(path: Path, rows: list[dict[str, str]]) -> Path:
        with tarfile.open(path / "a.tar", "w") as file:
            for number, row in enumerate(rows):
                text = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{number:03d}.json")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text))
        return path / "a.tar"

    def saved(path: Path, rows: list[dict[str, str]]) -> Path:
        datasets.Dataset.from_list(rows).save_to_disk(str(path / "saved"))
        return path / "saved"

    for make in (jsonl, files, parquet, tar, saved):
        found = []
        for name, content in (("here", rows), ("there", rows), ("edited", edited)):
            (tmp_path / make.__name__ / name).mkdir(parents=True)
            found.append(
                content_of(open_source(SourceSettings(path=str(make(tmp_path / make.__name__ / name, content)))))
            )
        assert found[0] == found[1], make.__name__
        assert found[0] != found[2], make.__name__


# ---- full disks


@pytest.mark.parametrize("error", [Exception("No space left on device"), OSError(errno.ENOSPC, "No space left")])
def test_failed_save_is_survived_if_config_allows(
    error: Exception, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, save = [], PreTrainedTokenizerFast.save_pretrained

    def fail_once(self: Any, *args: Any, **options: Any) -> Any:
        saved.append(args)
        if len(saved) == 1:
            raise error
        return save(self, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail_once)
    args = ["train", str(trained / "tiny.yaml"), "--log.dir", str(tmp_path / "new"), *EVERY]
    assert main([*args, "--checkpoint.on_save_error", "continue"]) == 0
    assert "warning: the checkpoint of step 1 could not be saved: " in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["step_00000002"]


@pytest.mark.parametrize("tensorboard", ["false", "true"])
def test_full_log_dir_warns_once_and_run_continues(
    tensorboard: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_whole, replace = metrics_file.AppendingFile.write, run_folder.replace_file

    def no_room(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write_step(self: Any, line: bytes) -> None:
        write_whole(self, line) if b'"step": 1,' in line or b"brain" in line else no_room(self._path)

    def replace_file(path: Path, text: str) -> None:
        no_room(path) if path.name == "report.html" else replace(path, text)

    monkeypatch.setattr(metrics_file.AppendingFile, "write", write_step)
    monkeypatch.setattr("omnizoo.reporting.report.replace_file", replace_file)
    if tensorboard == "true":
        monkeypatch.setattr(loggers.TensorBoardLogger, "_add", lambda self, **fields: None)
    args = ["train", str(trained / "tiny.yaml"), "--log.dir", str(tmp_path / "new"), "--train.steps", "4"]
    assert main([*args, "--log.tensorboard", tensorboard]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert out.count("warning:log.dir:") == 1
    assert "Nospaceleftondevice" in out
    assert [row["step"] for row in read_steps(tmp_path / "new")] == [1]
    assert (tmp_path / "new" / "checkpoints" / "step_00000004").is_dir()


def test_log_dir_full_at_start_prints_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace_file(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(recorder, "replace_file", replace_file)
    line = error_of(capsys, "train", trained / "tiny.yaml", "--log.dir", tmp_path / "new")
    assert "log.dir: " in line
    assert "run.json cannot be written: No space left" in line


def test_record_that_does_not_fit_leaves_file_unchanged(tmp_path: Path) -> None:
    file = metrics_file.AppendingFile(tmp_path / "lines")
    file.write(b"a whole line\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="fit"):
                file.write(b"another whole line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "lines").read_bytes() == b"a whole line\n"
