"""Callbacks: told of five moments, on one rank, with plain data. One that fails ends the run, and no step is lost."""

import csv
import json
from pathlib import Path
from typing import Any

import own_callbacks as own
import pytest
from processes import run_on_ranks, train_in_this_world
from tiny import read_steps, write_config, write_rows

import omnizoo
from omnizoo.checkpoint.folder import checkpoints, damage
from omnizoo.cli.main import main
from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.process import Process

EXAMPLE = Path(__file__).parents[3] / "examples" / "csv_logger"
SHORT = {"steps": 4, "packs_per_step": 2}
VALUES = ("step", "loss", "grad_norm", "lr", "tokens_seen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tokenizer and a config that evaluates every second step, for all tests here."""
    folder = tmp_path_factory.mktemp("callbacks")
    held_out = {"eval_sources": [{"path": str(write_rows(folder / "held_out.jsonl", [{"text": "some words"}] * 4))}]}
    write_config(folder, train=SHORT, evaluation={"every": 2}, data=held_out)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[float]]:
    """The steps of a run without callbacks."""
    assert main(arguments(folder, folder / "undisturbed")) == 0
    return values(folder / "undisturbed")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def arguments(folder: Path, run: Path, *callbacks: Any, **keys: Any) -> list[str]:
    flags = [f"--{key.replace('__', '.')}={json.dumps(value)}" for key, value in keys.items()]
    return ["train", str(folder / "tiny.yaml"), f"--log.dir={run}", f"--log.callbacks={json.dumps(callbacks)}", *flags]


def fails(moment: str, at: int = 0, kind: str = "Fails", **options: Any) -> dict[str, Any]:
    return {"kind": f"own_callbacks:{kind}", "options": {"moment": moment, "at": at} | options}


def diary(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "diary.jsonl").read_text().splitlines()]


def values(run: Path) -> list[list[float]]:
    return [[row[key] for key in VALUES] for row in read_steps(run)]


def steps_saved(run: Path) -> list[int]:
    found = checkpoints(run / "checkpoints")
    assert all(damage(folder) is None for folder in found)
    return [int(folder.name.removeprefix("step_")) for folder in found]


def test_events_arrive_in_order_and_match_the_run_folder(folder: Path, tmp_path: Path) -> None:
    assert main(arguments(folder, tmp_path, "own_callbacks:Diary", checkpoint__every=3)) == 0
    told = diary(tmp_path)
    assert [(row["moment"], row["step"]) for row in told] == [
        *[("start", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("save", 3)],
        *[("step", 4), ("evaluation", 4), ("save", 4), ("end", 4)],
    ]
    steps = [{"step": row["step"]} | row["metrics"] for row in told if row["moment"] == "step"]
    assert steps == read_steps(tmp_path)
    for row in told:
        if row["moment"] == "evaluation":
            assert set(row["metrics"]) == {"eval/loss", "eval/loss/text"}
            assert row["metrics"].items() <= steps[row["step"] - 1].items()
        assert row.get("complete", True)
    assert told[0] | {"steps": 4, "world": 1, "seed": 0} == told[0]
    assert told[-1] | {"outcome": "done", "error": None} == told[-1]


def test_callback_objects_keep_their_state_over_resume(folder: Path, tmp_path: Path) -> None:
    whole, first, second = own.Counts(), own.Counts(), own.Counts()
    config = str(folder / "tiny.yaml")
    assert omnizoo.train(load_config(config, [f"--log.dir={tmp_path / 'whole'}"]), callbacks=[whole]).exit_code == 0
    again = load_config(config, [f"--log.dir={tmp_path / 'two'}"])
    assert omnizoo.train(again, callbacks=[first, own.StopsAt(1)]).exit_code == 0
    assert len(first.losses) == 2  # the step under way is finished
    assert omnizoo.train(again, callbacks=[second]).exit_code == 0
    assert second.losses == whole.losses == [row["loss"] for row in read_steps(tmp_path / "two")]
    assert second.starts == 2


def test_callback_that_seeds_generators_does_not_change_training(
    folder: Path, undisturbed: list[list[float]], tmp_path: Path
) -> None:
    assert main(arguments(folder, tmp_path, "own_callbacks:Meddles")) == 0
    assert values(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("moment", "at", "saved"), [("on_step", 1, 2), ("on_evaluation", 2, 2), ("on_save", 3, 4), ("on_end", 4, 4)]
)
def test_failing_callback_ends_the_run_after_a_checkpoint(
    moment: str,
    at: int,
    saved: int,
    folder: Path,
    undisturbed: list[list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the run goes on from there once the callback is mended; other callbacks are told how it ended."""
    given = arguments(folder, tmp_path, fails(moment, at), "own_callbacks:Diary", checkpoint__every=3)
    assert main(given) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for words in (f"log.callbacks.0: own_callbacks:Fails.{moment} failed: ValueError: a bad day", "own_callbacks.py:"):
        assert words in err
    assert f"step_{saved:08d} is complete" in err
    assert max(steps_saved(tmp_path)) == saved
    assert (tmp_path / "report.html").is_file()
    last = diary(tmp_path)[-1]
    assert (last["moment"], last["step"]) == ("end", saved)
    if moment != "on_end":
        assert last["outcome"] == "failed"
        assert "a bad day" in last["error"]
    assert main(arguments(folder, tmp_path)) == 0
    assert values(tmp_path) == undisturbed


def test_callback_failing_at_start_ends_the_run_before_step_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, tmp_path, fails("on_start"))) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "own_callbacks:Fails.on_start failed: ValueError: a bad day" in err
    assert read_steps(tmp_path) == []


@pytest.mark.parametrize(("error", "words"), [("exit", "SystemExit"), ("user", "UserError: an"), ("disk", "OSError")])
def test_any_exception_of_a_callback_is_its_failure(
    error: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank of many, sys.exit or an error of ours would leave the others waiting."""
    assert main(arguments(folder, tmp_path, fails("on_step", 1, error=error))) == 1
    assert f"Fails.on_step failed: {words}" in capsys.readouterr().err
    assert steps_saved(tmp_path) == [2]


def test_logger_write_error_warns_once_and_training_continues(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, tmp_path, fails("on_step", 1, "FailingLogger", error="disk"))) == 0
    out = capsys.readouterr().out
    assert out.count("FailingLogger: OSError: [Errno 28] full") == 1
    assert main(arguments(folder, tmp_path / "other", fails("on_step", 1, "FailingLogger"))) == 1  # a bug is a bug


@pytest.mark.parametrize(
    ("name", "words"), [("Answers", "Answers.on_step failed: TypeError: returned True"), ("BadState", "JSON")]
)
def test_invalid_request_or_state_is_a_failure(
    name: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, tmp_path, f"own_callbacks:{name}")) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert steps_saved(tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("own_callbacks:WrongArguments", ("WrongArguments.on_step(step: int, metrics: Any)", "on_step(self, event)")),
        ("own_callbacks:Misspelled", ("Misspelled.on_steps", "on_step?")),
        ("own_callbacks:Empty", ("Empty has none of on_start",)),
        ("own_callbacks:Async", ("Async.on_end is async",)),
        ("own_callbacks:NotBuilt", ("NotBuilt cannot be built: KeyError: 'API_KEY'",)),
        ("own_callbacks:NotOne", ("NotOne is not a subclass of omnizoo.training.callbacks.base.Callback",)),
        ("own_callbacks:no_class", ("no_class is not a subclass",)),
        ("own_callbacks:Diarry", ("no 'Diarry'", "did you mean Diary?")),
        ("nowhere.to_be:Found", ("cannot import nowhere.to_be:Found",)),
        ("Diary", ("'Diary' is not the name of a class; expected `package.module:Class`",)),
        ("", ("'' is not the name of a class",)),
        ("a:b:c", ("'a:b:c' is not the name of a class",)),
        (3, ("log.callbacks is [3]; expected list of",)),
        ({"options": {}}, ("log.callbacks.0.kind is missing",)),
        ({"kind": 3}, ("log.callbacks.0.kind is 3",)),
        ({"kind": "own_callbacks:Diary", "option": {}}, ("log.callbacks.0.option is not a key",)),
        ({"kind": "own_callbacks:Diary", "options": {"nam": "a"}}, ("log.callbacks.0.options", "did you mean name?")),
        ({"kind": "own_callbacks:StopsAt"}, ("missing a required argument: 'step'",)),
    ],
)
def test_invalid_callback_prints_one_line_before_training(
    entry: Any, words: tuple[str, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(folder, tmp_path / "run", entry)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    for expected in (*words, "log.callbacks"):
        assert expected in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (own.Diary, r"^callbacks\[0\]: Diary is a class"),
        (own.NotOne(), r"^callbacks\[0\]: .*NotOne"),
        (own.WrongArguments(), r"callbacks\[0\]: own_callbacks:WrongArguments.on_step\(step"),
    ],
)
def test_invalid_callback_object_raises_with_its_index(given: Any, words: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        omnizoo.train(load_config(folder / "tiny.yaml", [f"--log.dir={tmp_path / 'run'}"]), callbacks=[given])


def test_failure_of_callback_object_names_index_and_class(folder: Path, tmp_path: Path) -> None:
    config = load_config(folder / "tiny.yaml", [f"--log.dir={tmp_path}"])
    with pytest.raises(TrainingError, match=r"callbacks\[1\]: own_callbacks:Fails.on_step failed: ValueError: a bad"):
        omnizoo.train(config, callbacks=[own.Diary(), own.Fails("on_step", 2)])


def on_two_ranks(process: Process, args: list[str], expected: int) -> None:
    assert train_in_this_world(args) == expected


@pytest.mark.slow
def test_stop_request_on_rank_0_stops_both_ranks(folder: Path, tmp_path: Path) -> None:
    stops = {"kind": "own_callbacks:StopsAt", "options": {"step": 1}}
    args = arguments(folder, tmp_path, stops, "own_callbacks:Diary", train__packs_per_step=2)[1:]
    result = run_on_ranks(on_two_ranks, 2, args, 0)
    assert result.code == 0, result.stdout + result.stderr
    assert "stopped by log.callbacks.0: own_callbacks:StopsAt after step 2/4" in result.stdout
    assert steps_saved(tmp_path) == [2]
    told = diary(tmp_path)  # once: only one rank has one
    assert [row["step"] for row in told if row["moment"] == "step"] == [1, 2]
    assert (told[0]["world"], told[-1]["outcome"]) == (2, "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "saved"), [("on_step", 2), ("on_evaluation", 2), ("on_start", None)])
def test_failing_callback_ends_both_ranks(moment: str, saved: int | None, folder: Path, tmp_path: Path) -> None:
    result = run_on_ranks(on_two_ranks, 2, arguments(folder, tmp_path, fails(moment))[1:], 1)
    assert result.code == 0, result.stdout + result.stderr
    assert result.stderr.count(f"own_callbacks:Fails.{moment} failed: ValueError: a bad day") == 2  # a line a rank
    assert steps_saved(tmp_path) == ([saved] if saved else [])


def test_example_logger_is_short_and_logs_each_step_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len((EXAMPLE / "csv_logger.py").read_text().splitlines()) < 80
    monkeypatch.syspath_prepend(str(EXAMPLE))
    table = {"kind": "csv_logger:CsvLogger", "options": {"columns": ["loss", "lr"]}}
    stops = {"kind": "own_callbacks:StopsAt", "options": {"step": 1}}
    assert main(arguments(folder, tmp_path, table, stops)) == 0
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("3,0.5,0.5\n")  # of a step that was run, and not saved before a kill
    assert main(arguments(folder, tmp_path, table)) == 0
    with open(tmp_path / "metrics.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["step", "loss", "lr"]
    expected = [[row["step"], row["loss"], row["lr"]] for row in read_steps(tmp_path)]
    assert [[float(cell) for cell in line] for line in lines] == expected
    assert len(lines) == 4
