"""Damaged checkpoints and run folders: passed over for the one before, or refused, by file and reason."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from corpus import Case, Prepare, run_main
from fixtures import make_tokenizer
from processes import Result
from tiny import read_steps, write_config

from omnizoo.checkpoint import manifest
from omnizoo.checkpoint.manifest import Manifest

Damage = Callable[[Path], object]
SHARD, STATE, MANIFEST = "tensors/shard-00001-model-00001-of-00001.safetensors", "state.json", "manifest.json"
FIRST, LAST = "step_00000001", "step_00000002"
making = Lock()


@functools.cache
def _base() -> Path:
    """A run of two steps with a checkpoint of each; made once, copied by every case."""
    folder = Path(tempfile.mkdtemp(prefix="corpus_checkpoints_"))
    config = write_config(folder, train={"steps": 2, "packs_per_step": 1}, checkpoint={"every": 1})
    result, _ = run_main(["train", str(config)])
    assert result.code == 0, result.stderr
    return folder


def base() -> Path:
    with making:
        return _base()


def copied(folder: Path) -> Path:
    """The run folder of this case, like that of the base run."""
    shutil.copytree(base() / "run", folder / "run", symlinks=True)
    return folder / "run"


def train(run: Path, *args: object) -> list[object]:
    return ["train", base() / "tiny.yaml", "--log.dir", run, *args]


def rewrite(place: Path, **changes: Any) -> None:
    """A manifest that agrees with the files as they are now, but for `changes`: only what it says can give it away."""
    (place / MANIFEST).unlink(missing_ok=True)
    files = {name: manifest.hash_file(place / name) for name in manifest.below(place) if (place / name).is_file()}
    fields = {"run": manifest.read(place.parent / FIRST).run, "step": 2, "files": files} | changes
    (place / MANIFEST).write_text(Manifest(**fields).text())


def flip(name: str, place: float) -> Damage:
    def damage(step: Path) -> None:
        data = bytearray((step / name).read_bytes())
        data[int(place * (len(data) - 1))] ^= 0x10
        (step / name).write_bytes(data)

    return damage


def put(name: str, content: bytes) -> Damage:
    def damage(step: Path) -> None:
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(content)

    return damage


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda step: (step / name).write_bytes(change((step / name).read_bytes()))


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change a field in place, in our own way of writing."""

    def damage(step: Path) -> None:
        fields = json.loads((step / MANIFEST).read_text())
        change(fields)
        (step / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")

    return damage


def lose(name: str) -> Damage:
    return lambda step: shutil.rmtree(step / name) if (step / name).is_dir() else (step / name).unlink()


def from_first(name: str) -> Damage:
    return lambda step: shutil.copy(step.parent / FIRST / name, step / name)


def link(name: str, target: str) -> Damage:
    def damage(step: Path) -> None:
        (step / name).unlink(missing_ok=True)
        (step / name).symlink_to(target)

    return damage


def folder_instead(name: str) -> Damage:
    def damage(step: Path) -> None:
        (step / name).unlink()
        (step / name).mkdir()

    return damage


def swap(one: str, other: str) -> Damage:
    def damage(step: Path) -> None:
        contents = (step / one).read_bytes(), (step / other).read_bytes()
        (step / other).write_bytes(contents[0])
        (step / one).write_bytes(contents[1])

    return damage


def forged(damage: Damage, **changes: Any) -> Damage:
    """Damage with a manifest that was made to fit: steps, names and formats are compared all the same."""

    def both(step: Path) -> None:
        damage(step)
        rewrite(step, **changes)

    return both


def nothing(step: Path) -> None: ...


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def whole_first(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.parent / FIRST, step)


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def odd_names(step: Path) -> None:
    fields = manifest.read(step)
    outside = {"../step_00000001/state.json": manifest.hash_file(step.parent / FIRST / STATE)}
    (step / MANIFEST).write_text(Manifest(fields.run, fields.step, {**fields.files, **outside}).text())


def older_format(step: Path) -> None:
    sizes = {name: (step / name).stat().st_size for name in manifest.below(step) if (step / name).is_file()}
    del sizes[MANIFEST]
    (step / MANIFEST).write_text(json.dumps({"step": 2, "files": sizes}, indent=1))


DEEP = b"[" * 100_000
# what was done: (damage, file that the line names, reason)
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "a flipped bit in weights": (flip(SHARD, 0.5), SHARD, "checksum"),
    "a flipped bit in the last byte of the shard": (flip(SHARD, 1.0), SHARD, "checksum"),
    "a flipped bit in the length of the header": (flip(SHARD, 0.0), SHARD, "checksum"),
    "a flipped bit in the header": (flip(SHARD, 0.01), SHARD, "checksum"),
    "a shard of zeros": (edit(SHARD, zeros), SHARD, "checksum"),
    "a shard of noise": (edit(SHARD, lambda data: os.urandom(len(data))), SHARD, "checksum"),
    "a page of zeros in a shard": (edit(SHARD, lambda d: d[:8192] + bytes(4096) + d[12288:]), SHARD, "checksum"),
    "the shard of the step before": (from_first(SHARD), SHARD, "checksum"),
    "a shard cut by a byte": (edit(SHARD, lambda data: data[:-1]), SHARD, "bytes, but"),
    "a shard cut to nothing": (put(SHARD, b""), SHARD, "has 0 bytes"),
    "a shard with a byte more": (edit(SHARD, lambda data: data + b"\0"), SHARD, "bytes, but"),
    "a shard that is missing": (lose(SHARD), SHARD, "is missing"),
    "a shard that is a folder": (folder_instead(SHARD), SHARD, "is missing"),
    "a shard that is a dangling link": (link(SHARD, "nowhere"), SHARD, "is missing"),
    "no tensors at all": (lose("tensors"), SHARD, "is missing"),
    "a second shard": (put("tensors/shard-00002-model-00001-of-00001.safetensors", b"x"), "shard-00002", "not in"),
    "a stray file": (put("notes.txt", b"mine"), "notes.txt", "is not in"),
    "a stray hidden file": (put(".hidden", b""), ".hidden", "is not in"),
    "a stray file in a folder of its own": (put("more/notes.txt", b""), "more", "is not in"),
    "a stray file next to the tokenizer": (put("model/vocab.txt", b""), "model/vocab.txt", "is not in"),
    "a stray pickle": (put("model/pytorch_model.bin", b"\x80\x04."), "model/pytorch_model.bin", "is not in"),
    "a stray empty folder": (lambda step: (step / "empty").mkdir(), "empty", "is not in"),
    "a stray link": (link("link", "/"), "link", "is not in"),
    "a state that is no JSON": (put(STATE, b"\xff\xfe garbage"), STATE, "bytes, but"),
    "a state of the step before": (from_first(STATE), STATE, ""),
    "a state with one digit changed": (edit(STATE, lambda d: d.replace(b'"step": 2', b'"step": 3', 1)), STATE, ""),
    "a state with a digit of the data changed": (flip(STATE, 0.9), STATE, ""),
    "an empty state": (put(STATE, b""), STATE, "has 0 bytes"),
    "a state that is missing": (lose(STATE), STATE, "is missing"),
    "a forged state of another step": (forged(from_first(STATE)), STATE, "step 1"),
    "a forged state that is a list": (forged(put(STATE, b"[2]")), STATE, "no step"),
    "a forged state that is no JSON": (forged(put(STATE, b"{")), STATE, "not JSON"),
    "a forged state without end": (forged(put(STATE, DEEP)), STATE, "not JSON"),
    "a forged state without step": (forged(put(STATE, b"{}")), STATE, "no step"),
    "a config with another learning rate": (edit("config.yaml", lambda d: d.replace(b"0.003", b"0.004")), "config", ""),
    "a config that is missing": (lose("config.yaml"), "config.yaml", "is missing"),
    "a config that is binary": (edit("config.yaml", zeros), "config.yaml", "checksum"),
    "a model config with a flipped bit": (flip("model/config.json", 0.5), "model/config.json", "checksum"),
    "a tokenizer with a flipped bit": (flip("model/tokenizer.json", 0.5), "model/tokenizer.json", "checksum"),
    "a tokenizer that is missing": (lose("model/tokenizer.json"), "model/tokenizer.json", "is missing"),
    "two files in each other's place": (swap("config.yaml", STATE), "", "bytes, but"),
    "no manifest": (lose(MANIFEST), MANIFEST, "cannot be read"),
    "a manifest cut in half": (edit(MANIFEST, lambda d: d[: len(d) // 2]), MANIFEST, "not JSON"),
    "an empty manifest": (put(MANIFEST, b""), MANIFEST, "not JSON"),
    "a manifest that is a list": (put(MANIFEST, b"[]"), MANIFEST, "fields"),
    "a manifest that is a number": (put(MANIFEST, b"7"), MANIFEST, "fields"),
    "a manifest that is null": (put(MANIFEST, b"null"), MANIFEST, "fields"),
    "a manifest without end": (put(MANIFEST, DEEP), MANIFEST, "not JSON"),
    "a manifest that is binary": (put(MANIFEST, bytes(range(256))), MANIFEST, "not JSON"),
    "a manifest that is a folder": (folder_instead(MANIFEST), MANIFEST, "cannot be read"),
    "a manifest that is a dangling link": (link(MANIFEST, "nowhere"), MANIFEST, "cannot be read"),
    "a manifest of the step before": (from_first(MANIFEST), MANIFEST, "step 1"),
    "a manifest of another step": (edit_manifest(lambda m: m.update(step=1)), MANIFEST, "its own checksum"),
    "a manifest of another run": (edit_manifest(lambda m: m.update(run="0" * 12)), MANIFEST, "its own checksum"),
    "a manifest with another hash": (
        edit_manifest(lambda m: m["files"][SHARD].update(xxh3_128="0" * 32)),
        MANIFEST,
        "its own checksum",
    ),
    "a manifest with another size": (
        edit_manifest(lambda m: m["files"][STATE].update(bytes=1)),
        MANIFEST,
        "its own checksum",
    ),
    "a manifest with a file less": (edit_manifest(lambda m: m["files"].pop(STATE)), MANIFEST, "its own checksum"),
    "a manifest whose files are a list": (edit_manifest(lambda m: m.update(files=[STATE])), MANIFEST, "fields"),
    "a manifest whose files have sizes only": (
        edit_manifest(lambda m: m.update(files={STATE: 3})),
        MANIFEST,
        "fields",
    ),
    "a manifest with a field more": (edit_manifest(lambda m: m.update(more=1)), MANIFEST, "its own checksum"),
    "a manifest of a later format": (edit_manifest(lambda m: m.update(format=9)), MANIFEST, "format 9"),
    "a manifest in other white space": (edit(MANIFEST, lambda d: d + b"\n"), MANIFEST, "its own checksum"),
    "a manifest as it was before checksums": (older_format, MANIFEST, "no checksums"),
    "a forged manifest of another step": (forged(nothing, step=7), MANIFEST, "step 7"),
    "a forged manifest whose step is text": (forged(nothing, step="2"), MANIFEST, ""),
    "a forged manifest of files elsewhere": (odd_names, MANIFEST, "outside the checkpoint"),
    "the checkpoint before under this name": (whole_first, MANIFEST, "step 1"),
    "an empty folder": (empty, MANIFEST, "cannot be read"),
}


def resumed(damage: Damage) -> Prepare:
    def prepare(folder: Path) -> list[object]:
        run = copied(folder)
        damage(run / "checkpoints" / LAST)
        return train(run)

    return prepare


def passed_over(file: str, reason: str) -> Callable[[Path, Result], str | None]:
    def check(folder: Path, result: Result) -> str | None:
        lines = [line for line in result.stderr.splitlines() if f"{LAST} is damaged or incomplete: " in line]
        if len(lines) != 1 or file not in lines[0] or reason not in lines[0]:
            return f"no line that names {file} and {reason}"
        if FIRST not in "".join(result.stdout.split()):
            return f"did not start from {FIRST}"
        losses = [row["loss"] for row in read_steps(folder / "run")]
        return None if losses == [row["loss"] for row in read_steps(base() / "run")] else f"other losses: {losses}"

    return check


def exported(damage: Damage) -> Prepare:
    def prepare(folder: Path) -> list[object]:
        step = copied(folder) / "checkpoints" / LAST
        damage(step)
        return ["export", step, folder / "out"]

    return prepare


def in_folder(arrange: Callable[[Path, Path], list[object]]) -> Prepare:
    return lambda folder: arrange(folder, copied(folder))


def both_damaged(folder: Path, run: Path) -> list[object]:
    for step in (FIRST, LAST):
        flip(SHARD, 0.5)(run / "checkpoints" / step)
    return train(run)


def foreign(folder: Path, run: Path) -> list[object]:
    rewrite(run / "checkpoints" / LAST, run="0" * 12)
    return train(run, "--train.steps", 3)


def foreign_export(folder: Path, run: Path) -> list[object]:
    rewrite(run / "checkpoints" / LAST, run="0" * 12)
    return ["export", run, folder / "out"]


def several_export(folder: Path, run: Path) -> list[object]:
    rewrite(run / "checkpoints" / LAST, run="0" * 12)
    return ["export", run / "checkpoints", folder / "out"]


def with_run_file(text: str) -> Prepare:
    def prepare(folder: Path) -> list[object]:
        run = copied(folder)
        (run / "run.json").write_text(text)
        return train(run, "--train.steps", 3)

    return prepare


def stale_lock(folder: Path, run: Path) -> list[object]:
    (run / ".lock").write_text('{"host": "elsewhere", "pid": 1, "started": 0}')
    (run / "checkpoints" / ".lock").write_text("half a lo")
    leftover = run / "checkpoints" / ".step_00000003.partial" / "tensors"
    leftover.mkdir(parents=True)
    (leftover / "shard").write_bytes(b"half")
    return train(run, "--train.steps", 3)


def is_clean(folder: Path, result: Result) -> str | None:
    left = [path.name for path in (folder / "run").rglob(".*")]
    return f"left behind: {left}" if left else None


def other_rows(change: Callable[[str], str]) -> Prepare:
    """The same rows but for what `change` does to the text of the file."""

    def prepare(folder: Path) -> list[object]:
        run = copied(folder)
        texts = folder / "texts.jsonl"
        texts.write_text(change((base() / "texts.jsonl").read_text()))
        return train(run, "--train.steps", 3, "--data.sources.0.path", texts)

    return prepare


def same_lines(change: Callable[[list[str]], list[str]]) -> Callable[[str], str]:
    return lambda text: "".join(change(text.splitlines(keepends=True)))


def other_tokenizer(change: Callable[[Path], object]) -> Prepare:
    def prepare(folder: Path) -> list[object]:
        run = copied(folder)
        shutil.copytree(base() / "tokenizer", folder / "tokenizer")
        change(folder / "tokenizer")
        return train(run, "--train.steps", 3, "--model.tokenizer", folder / "tokenizer")

    return prepare


def new_from(what: Callable[[Path, Path], object], *args: object) -> Prepare:
    """A new run from the weights of a checkpoint or run."""

    def prepare(folder: Path) -> list[object]:
        run = copied(folder)
        return train(folder / "new", "--model.init_from", what(folder, run), *args)

    return prepare


def began_at_zero(folder: Path, result: Result) -> str | None:
    steps = [row["step"] for row in read_steps(folder / "new")]
    return None if steps == [1, 2] else f"steps {steps}"


def damaged_last(folder: Path, run: Path) -> Path:
    flip(SHARD, 0.3)(run / "checkpoints" / LAST)
    return run / "checkpoints" / LAST


def put_file(path: Path) -> Path:
    path.write_text("")
    return path


CASES = [
    # by turns, to save time: both commands use the same function, and test_checkpoints.py gives it all of them
    *(
        Case(f"train: {name}", resumed(damage), check=passed_over(file, reason))
        for name, (damage, file, reason) in list(DAMAGES.items())[::2]
    ),
    *(
        Case(f"export: {name}", exported(damage), ("damaged or incomplete", file, reason))
        for name, (damage, file, reason) in list(DAMAGES.items())[1::2]
    ),
    Case("both checkpoints are damaged", in_folder(both_damaged), ("contains no intact checkpoint", LAST, SHARD)),
    Case("a checkpoint of another run", in_folder(foreign), (f"{LAST} belongs to run",)),
    Case("an export of a run folder with another run's checkpoint", in_folder(foreign_export), ("belongs to run",)),
    Case("an export of checkpoints of two runs", in_folder(several_export), ("several runs", LAST, FIRST)),
    Case("a run folder of another run", with_run_file('{"id": "abc", "resume": "auto"}'), ("belongs to run", "abc")),
    Case("a run file of garbage", with_run_file("{"), check=is_clean),
    Case("a run file that is a list", with_run_file("[]")),
    Case("stale locks and leftovers", in_folder(stale_lock), check=is_clean),
    Case(
        "never, in a used folder",
        in_folder(lambda folder, run: train(run, "--checkpoint.resume", "never")),
        ("checkpoint.resume: never", LAST, "log.dir"),
    ),
    Case(
        "back to an older checkpoint in the same folder",
        in_folder(lambda folder, run: train(run, "--checkpoint.resume", run / "checkpoints" / FIRST)),
        (f"older than {LAST}",),
    ),
    Case(
        "resume from a folder that is not there",
        in_folder(lambda folder, run: train(folder / "new", "--checkpoint.resume", folder / "nowhere")),
        ("checkpoint.resume", "nowhere"),
    ),
    Case(
        "resume from a run folder by name",
        in_folder(lambda folder, run: train(folder / "new", "--checkpoint.resume", run)),
        ("checkpoint.resume", "not a checkpoint"),
    ),
    Case(
        "another run's checkpoint into a used folder",
        in_folder(lambda folder, run: train(run, "--checkpoint.resume", base() / "run" / "checkpoints" / LAST)),
        ("checkpoint.resume: ", "earlier run", LAST),
    ),
    Case(
        "weights by the old key",
        in_folder(lambda folder, run: train(run, "--checkpoint.resume", "weights:")),
        ("model.init_from: PATH",),
    ),
    Case("weights of nowhere", new_from(lambda folder, run: folder / "nowhere"), ("nowhere", "not a folder")),
    Case("weights of an empty folder", new_from(lambda folder, run: folder), ("no checkpoint",)),
    Case("weights of a damaged checkpoint", new_from(damaged_last), ("damaged or incomplete", SHARD)),
    Case("weights of a run", new_from(lambda folder, run: run), check=began_at_zero),
    Case("weights of a checkpoint", new_from(lambda folder, run: run / "checkpoints" / FIRST), check=began_at_zero),
    Case(
        "weights of another model",
        new_from(lambda folder, run: run, "--model.config.num_hidden_layers", 1),
        ("another model",),
    ),
    Case("log.dir is a file", lambda folder: train(put_file(folder / "file")), ("log.dir: ", "not writable")),
    Case("log.dir is below a file", lambda folder: train(put_file(folder / "file") / "run"), ("log.dir",)),
    Case(
        "checkpoint.dir is a file",
        lambda folder: train(folder / "run", "--checkpoint.dir", put_file(folder / "file")),
        ("checkpoint.dir: ", "not writable"),
    ),
    Case("log.dir where nobody may write", lambda folder: train("/proc/run"), ("log.dir", "/proc/run")),
    Case("rows edited in place", other_rows(lambda text: text.replace("Paris", "Lyons", 1)), ("data.sources[0]",)),
    Case(
        "rows in another order",
        other_rows(same_lines(lambda rows: rows[::-1])),
        ("data.sources[0]", "init_from:"),
    ),
    Case("two rows swapped", other_rows(same_lines(lambda rows: [rows[1], rows[0], *rows[2:]])), ("data.sources[0]",)),
    Case("a row more", other_rows(same_lines(lambda rows: [*rows, rows[0]])), ("data.sources[0].rows", "1501")),
    Case("a row less", other_rows(same_lines(lambda rows: rows[1:])), ("data.sources[0].rows", "1499")),
    Case("a moved source", other_rows(lambda text: text)),
    Case(
        "another chat template",
        other_tokenizer(edit("chat_template.jinja", lambda data: data.replace(b"<|im_end|>", b"<|im_end|> "))),
        ("model.tokenizer", "chat template"),
    ),
    Case(
        "another vocabulary",
        other_tokenizer(lambda folder: make_tokenizer(folder, vocab_size=300)),
        ("model.tokenizer", "its vocabulary"),
    ),
    *(
        Case(
            f"resumed with another {key}",
            in_folder(lambda folder, run, key=key, value=value: train(run, "--train.steps", 3, f"--{key}", value)),
            (key, "model.init_from:"),
        )
        for key, value in {
            "data.pack_tokens": 80,
            "data.lanes": 2,
            "data.look_ahead": 9,
            "data.shuffle": "false",
            "data.shuffle_rows": 7,
            "data.append_eos": "false",
            "data.overlong": "drop",
            "train.seed": 1,
            "train.packs_per_step": 2,
        }.items()
    ),
    Case(
        "resumed with another weight of a source",
        in_folder(lambda folder, run: train(run, "--train.steps", 3, "--data.sources.0.weight", 2.0)),
        ("data.sources[0].weight",),
    ),
]
