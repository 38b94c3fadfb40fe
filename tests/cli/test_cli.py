"""The command line: what is wrong is said in one line with exit code 2, before torch is imported or a rank started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnizoo.cli import doctor
from omnizoo.cli import train as train_command
from omnizoo.cli.main import main
from omnizoo.config import reference
from omnizoo.config.errors import TrainingError, UserError

SMALL = "model: {path: m}\ndata: {sources: [{path: a.jsonl}]}\n"
WROTE = SimpleNamespace(lines=lambda: ["wrote out"])
COMMANDS = (
    *("train", "eval", "export", "generate", "doctor", "plan", "verify", "data", "launch", "new", "report", "recipes"),
)


@pytest.fixture(autouse=True)
def calls(tmp_path, monkeypatch):
    """An empty environment and stand-ins for what the commands call; the list of those calls."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "OMNIZOO_LAUNCHER_FD",
        "OMNIZOO_ERROR_FD",
    ):
        monkeypatch.delenv(name, raising=False)
    Path("my.yaml").write_text(SMALL)
    calls = []

    def stand_in(name, result):
        return lambda *args, **_: calls.append((name, *args)) or result

    monkeypatch.setitem(sys.modules, "omnizoo.training.loop", SimpleNamespace(train=stand_in("train", 7)))

    def export(*args, **options):
        calls.append((*args, options))
        return WROTE

    monkeypatch.setitem(sys.modules, "omnizoo.checkpoint.export", SimpleNamespace(export=export))
    monkeypatch.setattr(train_command, "launch", stand_in("launch", 9))
    return calls


@pytest.fixture
def fails(capsys):
    def fails(*argv: str) -> str:
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err.strip()

    return fails


def test_train_runs_in_this_process_and_returns_its_exit_code(calls):
    assert main(["train", "my.yaml", "--train.lr", "1e-3"]) == 7
    ((name, config, _),) = calls
    assert (name, config.train.lr, config.model.path) == ("train", 1e-3, "m")


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "my.yaml", "--nproc", "2", "--train.lr", "1e-3", "--parallel.dp_shard", "-1"],
        ["train", "--train.lr", "1e-3", "--nproc=2", "--parallel.dp_shard", "-1", "my.yaml"],
    ],
)
def test_nproc_launches_ranks_with_the_same_arguments_but_without_nproc(calls, argv):
    assert main(argv) == 9
    assert calls == [("launch", ["train", "my.yaml", "--train.lr", "1e-3", "--parallel.dp_shard", "-1"], 2)]


def test_nproc_1_is_this_process(calls):
    assert main(["train", "my.yaml", "--nproc", "1"]) == 7
    assert [call[0] for call in calls] == ["train"]


@pytest.mark.parametrize(
    "env", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}]
)
def test_a_rank_of_torchrun_or_slurm_trains_and_never_launches(calls, fails, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "my.yaml"]) == 7
    assert [call[0] for call in calls] == ["train"]
    assert "--nproc 2: torchrun or Slurm has started this process as one of 2" in fails(
        "train", "my.yaml", "--nproc", "2"
    )


def test_one_slurm_task_may_launch(calls, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert main(["train", "my.yaml", "--nproc", "2"]) == 9


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nproc", "3"], "train.packs_per_step"),
        (["--nproc", "4", "--parallel.dp_replicate", "3"], "parallel.dp_replicate"),
        (["--nproc", "0"], "--nproc is 0; expected the number of processes to start here, 1 to 1024"),
        (["--nproc", "two"], "--nproc: invalid int value: 'two'"),
        (["--nprocs", "2"], "unknown argument '--nprocs'; did you mean --nproc?"),
        (["--steps", "2"], "unknown argument '--steps'; did you mean --train.steps?"),
        (["--packs-per-step=2"], "unknown argument '--packs-per-step=2'; did you mean --train.packs_per_step?"),
        (["other.yaml"], "unknown argument 'other.yaml'; see `omnizoo train --help`"),
        (["--train.stesp", "2"], "command line: train.stesp is not a key; did you mean train.steps?"),
        (["--train.steps"], "command line: --train.steps needs a value"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(calls, fails, argv, expected):
    assert expected in fails("train", "my.yaml", *argv)
    assert calls == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], f"expected a command: {', '.join(COMMANDS)}; see `omnizoo --help`"),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["xyz"], f"unknown command 'xyz'; did you mean {' or '.join(COMMANDS)}?"),
        (["train"], "the following arguments are required: CONFIG; see `omnizoo train --help`"),
        (["train", "nope.yaml"], "nope.yaml: no such config file"),
        (["export", "a"], "the following arguments are required: OUT_DIR"),
        (["doctor", "--jsn"], "unknown argument '--jsn'; did you mean --json?"),
        (["--verison"], "unknown argument '--verison'; did you mean --version?"),
    ],
)
def test_wrong_commands_and_flags_get_a_suggestion(fails, argv, expected):
    assert expected in fails(*argv)


def test_a_user_error_from_inside_training_is_one_line_without_traceback(fails, monkeypatch):
    def train(config, on_failure, clock):
        raise UserError("a.jsonl:3: expected `text` or `messages`; [bold]fix[/bold] " + "x" * 200)

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert fails("train", "my.yaml") == "error: a.jsonl:3: expected `text` or `messages`; [bold]fix[/bold] " + "x" * 200


def test_a_run_that_cannot_go_on_is_one_line_and_exit_code_1(capsys, monkeypatch):
    def train(config, on_failure, clock):
        raise TrainingError("4 steps in a row had a non-finite loss")

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert main(["train", "my.yaml"]) == 1
    assert capsys.readouterr().err == "error: 4 steps in a row had a non-finite loss\n"


def test_several_config_errors_are_one_line_each(capsys):
    assert main(["train", "my.yaml", "--train.steps", "0", "--log.every", "0"]) == 2
    assert [line.split(" is ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "error: command line: train.steps",
        "error: command line: log.every",
    ]


def test_an_interrupt_outside_of_the_loop_is_130(monkeypatch):
    def train(config, on_failure, clock):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert main(["train", "my.yaml"]) == 130


def test_export_gets_both_folders(calls):
    assert main(["export", "runs/a/checkpoints/step-4", "out"]) == 0
    checkpoint, out, options = calls[0]
    assert (checkpoint, out) == (Path("runs/a/checkpoints/step-4"), Path("out"))
    assert not any(options.values())


def test_only_the_command_line_allows_code_to_export(calls):
    flags = ["--allow-code", "mine", "--allow-code=my_package.series", "--trust-remote-code"]
    assert main(["export", "run", "out", *flags]) == 0
    options = calls[0][-1]
    assert options["allow_code"] == ["mine", "my_package.series"]
    assert options["trust_remote_code"]


def test_version_is_the_one_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == "omnizoo 0.1.0\n"


def test_train_help_documents_every_key_within_100_columns(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    words = " ".join(out.split())
    keys = reference.all_keys()
    for key in keys:
        assert f"--{key.key} " in words
        assert key.description in words
        assert f"{key.type}; {'required' if key.default == 'required' else f'default {key.default}'}" in words


def test_help_and_config_errors_do_not_import_torch():
    argvs = [["--help"], *([command, "--help"] for command in COMMANDS), ["train", "my.yaml", "--train.steps", "0"]]
    code = (
        "import json, sys\nfrom omnizoo.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, (argv, heavy)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(argvs)], check=True, capture_output=True)


def test_python_dash_m_is_the_same_command():
    run = subprocess.run([sys.executable, "-m", "omnizoo", "trian"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (2, "error: unknown command 'trian'; did you mean train?\n")


def test_doctor_finds_this_machine_fit_and_says_the_same_to_machines(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problems"] == []
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert {p["name"]: p["needed"] for p in facts["packages"]}["torch"] == "<2.14,>=2.13.0"
    assert facts["backends"]["gloo"]
    assert set(facts["kernels"]) == set(doctor.KERNELS)
    slow = facts["gflops"]["fp32"] > 5 * facts["gflops"]["bf16"]
    assert slow == any("bf16 is" in warning for warning in facts["warnings"])


def test_doctor_names_wrong_and_missing_packages_and_fails(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["rich==1.0", "no-such-package>=2", 'nor-this; extra == "wandb"'])
    monkeypatch.setattr(doctor, "_compute", lambda warnings: {})
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "problem: no-such-package is not installed; run: pip install 'no-such-package>=2'" in out
    assert "run: pip install 'rich==1.0'" in out
    assert "'omnizoo[wandb]'" in out
    assert "training can run here" not in out


def test_doctor_describes_a_torch_that_does_not_load(capsys, monkeypatch):
    def broken(warnings):
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_compute", broken)
    assert main(["doctor"]) == 1
    assert "problem: torch does not work here: libtorch.so" in capsys.readouterr().out


def test_a_run_imports_only_what_every_run_needs():
    code = (
        "import sys\nimport omnizoo\nassert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "import omnizoo.training.loop\n"
        "unneeded = {'datasets', 'pyarrow', 'pandas', 'peft', 'tensorboard', 'triton', 'trl', 'diffusers', 'wandb'}\n"
        "unneeded |= {'torchao', 'sklearn', 'soundfile', 'av', 'fsspec.implementations.http'}\n"
        "assert not unneeded & set(sys.modules), unneeded & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert not run.returncode, run.stderr
