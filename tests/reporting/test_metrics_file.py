"""metrics.jsonl, TensorBoard and W&B: exact values, each step once after any number of kills, cheap to write."""

import json
import math
import random
import sys
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.reporting.metrics_file import MetricsWriter, read_metrics
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.callbacks.base import StartEvent
from omnizoo.training.callbacks.dispatcher import Callbacks
from omnizoo.training.callbacks.loggers import built_in_loggers

STEP = {
    "loss": 2.5, "loss/text": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens": 8192, "tokens_per_sec": 1e4,
    "mfu": None, "memory_gb": 1.5, "data_wait": 0.01, "fill": 0.99, "imbalance": 1.0, "epoch": 0.1, "bad_steps": 0,
    "skipped_rows": 0,
}  # fmt: skip


def config(**log: object) -> Config:
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "log": {"tensorboard": False, **log}}
    )


def loss_at(step: int) -> float:
    return random.Random(step).gauss(3, 1)


def train(run: RunFolder, first: int, last: int, **log: object) -> None:
    """Steps first..last, with values that depend on the step only, as in an exact resume; not closed, as if killed."""
    writer, loggers = MetricsWriter(run, resume_step=first - 1), started(run, first - 1, **log)
    for step in range(first, last + 1):
        writer.write(step, {"loss": loss_at(step)})
        loggers.step(step, {"loss": loss_at(step)})
    writer.flush()
    assert loggers.failure is None


def started(run: RunFolder, step: int, **log: object) -> Callbacks:
    loggers = Callbacks(built_in_loggers(config(**log), run), active=True)
    loggers.start(StartEvent(run.root, run.checkpoints, config(**log).model_dump(), step, steps=100, world=1))
    return loggers


def test_run_folder_creates_no_files_without_writer(tmp_path):
    run = RunFolder(tmp_path / "runs" / "a")
    assert read_metrics(run.metrics) == []
    assert not run.root.exists()


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(), min_size=1, max_size=5))
def test_floats_round_trip_bit_exactly_as_standard_json(tmp_path_factory, values):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    writer = MetricsWriter(run, resume_step=0)
    written = {f"k{i}": v for i, v in enumerate(values)}
    writer.write(1, written)
    writer.close()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    json.loads(run.metrics.read_text(), parse_constant=refuse)
    (row,) = read_metrics(run.metrics)
    assert row.pop("step") == 1
    assert {k: v.hex() for k, v in row.items()} == {k: v.hex() for k, v in written.items()}


def test_missing_values_are_null_and_nonfinite_values_strings(tmp_path):
    run = RunFolder(tmp_path)
    MetricsWriter(run, 0).write(1, {"mfu": None, "loss": math.nan, "up": math.inf, "down": -math.inf})
    text = '{"step": 1, "mfu": null, "loss": "NaN", "up": "Infinity", "down": "-Infinity"}\n'
    assert run.metrics.read_text() == text


def test_each_step_is_flushed_to_disk(tmp_path):
    run = RunFolder(tmp_path)
    writer = MetricsWriter(run, 0)
    writer.write(1, STEP)
    assert read_metrics(run.metrics) == [{"step": 1, **STEP}]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_step_is_recorded_once_after_kills(tmp_path_factory, seed):
    draw = random.Random(seed)
    run = RunFolder(tmp_path_factory.mktemp("run"))
    steps, checkpoint, reached = 20, 0, 0
    while reached < steps:
        first = checkpoint + 1
        reached = draw.randint(first, steps)
        train(run, first, reached)
        checkpoint = draw.randint(checkpoint, reached)
        if reached < steps:  # killed: a tear anywhere in the line that was being written
            half = json.dumps({"step": reached + 1, "loss": loss_at(reached + 1)}).encode()
            with open(run.metrics, "ab") as file:
                file.write(half[: draw.randint(0, len(half))])
            assert [row["step"] for row in read_metrics(run.metrics)] == list(range(1, reached + 1))
    expected = "".join(json.dumps({"step": s, "loss": loss_at(s)}) + "\n" for s in range(1, steps + 1))
    assert run.metrics.read_text() == expected


def test_new_run_removes_old_steps_of_its_folder(tmp_path):
    run = RunFolder(tmp_path)
    train(run, 1, 9)
    train(run, 1, 2)
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2]


def test_damaged_line_error_names_line_number(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        MetricsWriter(run, 3)


def test_full_disk_raises_and_later_steps_are_written(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    writer = MetricsWriter(run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(writer._file, "_file", open("/dev/full", "wb", buffering=0))  # noqa: SIM115
        with pytest.raises(OSError, match="No space left on device"):
            writer.write(1, STEP)
    writer.write(2, STEP)
    assert [row["step"] for row in read_metrics(run.metrics)] == [2]


def test_tensorboard_shows_each_step_once_after_kill(tmp_path):
    run = RunFolder(tmp_path)
    train(run, 1, 8, tensorboard=True)
    train(run, 6, 10, tensorboard=True)  # the checkpoint was of step 5
    events = EventAccumulator(str(run.tensorboard)).Reload().Scalars("loss")
    assert [event.step for event in events] == list(range(1, 11))
    assert [event.value for event in events] == pytest.approx([loss_at(s) for s in range(1, 11)], rel=1e-6)


def test_writing_a_step_takes_under_one_millisecond(tmp_path):
    run = RunFolder(tmp_path)
    writer, loggers = MetricsWriter(run, 0), started(run, 0, tensorboard=True)
    seconds = []
    for step in range(1, 201):
        start = time.perf_counter()
        writer.write(step, STEP)
        loggers.step(step, STEP)
        seconds.append(time.perf_counter() - start)
    writer.close()
    assert sorted(seconds)[100] < 1e-3


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, object]] = []
        self.logged: list[tuple[int, dict[str, object]]] = []

    def init(self, **arguments: object) -> "FakeWandb":
        self.started.append(arguments)
        return self

    def log(self, metrics: dict[str, object], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.logged.append((-1, {}))


def test_wandb_resumes_run_after_restart_and_creates_one_for_new_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = RunFolder(tmp_path)
    train(run, 1, 4, wandb="zoo")
    loggers = started(run, 4, wandb="zoo")
    loggers.step(5, {"loss": 1.0})
    loggers.end("done")
    train(run, 1, 1, wandb="zoo")
    first, resumed, fresh = fake.started
    assert first["project"] == "zoo"
    assert resumed["id"] == first["id"] != fresh["id"]
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, -1, 1]


def test_missing_wandb_raises_before_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"^log\.wandb.*omnizoo\[wandb\]"):
        built_in_loggers(config(wandb="zoo"), run)
    assert not run.root.exists()
