"""Tests of the command line: errors are one line with exit code 2, before torch is imported or a rank is started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import omnizoo
from omnizoo.cli import doctor
from omnizoo.cli import train as train_command
from omnizoo.cli.completion.words import section_names
from omnizoo.cli.help.config_keys import plain_key
from omnizoo.cli.main import main
from omnizoo.cli.parser import COMMANDS, TAKE_OVERRIDES, build_parser
from omnizoo.config import reference
from omnizoo.config.errors import TrainingError, UserError

SMALL = "model: {path: m}\ndata: {sources: [{path: a.jsonl}]}\n"
WROTE = SimpleNamespace(lines=lambda: ["wrote out"])


@pytest.fixture(autouse=True)
def calls(tmp_path, monkeypatch):
    """Clear the environment, replace the functions that commands call, and return the list of their calls."""
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

    def recording(name, result):
        return lambda *args, **_: calls.append((name, *args)) or result

    monkeypatch.setitem(
        sys.modules, "omnizoo.training.loop", SimpleNamespace(train=recording("train", SimpleNamespace(exit_code=7)))
    )

    def export(*args, **options):
        calls.append((*args, options))
        return WROTE

    monkeypatch.setitem(sys.modules, "omnizoo.checkpoint.export_run", SimpleNamespace(export=export))
    monkeypatch.setattr(train_command, "launch", recording("launch", 9))
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


def test_train_runs_in_this_process_and_returns_exit_code(calls):
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
def test_nproc_launches_ranks_with_other_arguments(calls, argv):
    assert main(argv) == 9
    assert calls == [("launch", ["train", "my.yaml", "--train.lr", "1e-3", "--parallel.dp_shard", "-1"], 2)]


def test_nproc_1_trains_in_this_process(calls):
    assert main(["train", "my.yaml", "--nproc", "1"]) == 7
    assert [call[0] for call in calls] == ["train"]


@pytest.mark.parametrize(
    "env", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}]
)
def test_rank_of_torchrun_or_slurm_does_not_launch(calls, fails, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "my.yaml"]) == 7
    assert [call[0] for call in calls] == ["train"]
    assert "--nproc: 2, " in fails("train", "my.yaml", "--nproc", "2")


def test_single_slurm_task_can_launch_ranks(calls, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert main(["train", "my.yaml", "--nproc", "2"]) == 9


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nproc", "3"], "train.packs_per_step"),
        (["--nproc", "4", "--parallel.dp_replicate", "3"], "parallel.dp_replicate"),
        (["--nproc", "0"], "--nproc: 0; expected 1 to 1024"),
        (["--nproc", "two"], "--nproc: invalid int value: 'two'"),
        (["--nprocs", "2"], "'--nprocs'; did you mean --nproc?"),
        (["--steps", "2"], "'--steps'; did you mean --train.steps?"),
        (["--packs-per-step=2"], "'--packs-per-step=2'; did you mean --train.packs_per_step?"),
        (["other.yaml"], "'other.yaml'; see `omnizoo train --help`"),
        (["--train.stesp", "2"], "did you mean train.steps?"),
        (["--train.steps"], "command line: --train.steps "),
    ],
)
def test_invalid_arguments_of_train_print_one_line(calls, fails, argv, expected):
    assert expected in fails("train", "my.yaml", *argv)
    assert calls == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], f"{', '.join(COMMANDS)}; see `omnizoo --help`"),
        (["trian"], "'trian'; did you mean train?"),
        (["xyz"], f"'xyz'; did you mean {' or '.join(COMMANDS)}?"),
        (["train"], "CONFIG; see `omnizoo train --help`"),
        (["train", "nope.yaml"], "error: nope.yaml: "),
        (["export", "a"], "OUT_DIR"),
        (["doctor", "--jsn"], "'--jsn'; did you mean --json?"),
        (["--verison"], "'--verison'; did you mean --version?"),
    ],
)
def test_unknown_commands_and_flags_print_a_suggestion(fails, argv, expected):
    assert expected in fails(*argv)


def test_user_error_in_training_prints_one_line(fails, monkeypatch):
    def train(config, on_failure, clock):
        raise UserError("a.jsonl:3: expected `text` or `messages`; [bold]fix[/bold] " + "x" * 200)

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert fails("train", "my.yaml") == "error: a.jsonl:3: expected `text` or `messages`; [bold]fix[/bold] " + "x" * 200


def test_training_error_prints_one_line_and_exits_with_1(capsys, monkeypatch):
    def train(config, on_failure, clock):
        raise TrainingError("4 steps in a row had a non-finite loss")

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert main(["train", "my.yaml"]) == 1
    assert capsys.readouterr().err == "error: 4 steps in a row had a non-finite loss\n"


def test_each_config_error_prints_one_line(capsys):
    assert main(["train", "my.yaml", "--train.steps", "0", "--log.every", "0"]) == 2
    assert [line.split(" is ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "error: command line: train.steps",
        "error: command line: log.every",
    ]


def test_interrupt_outside_training_loop_exits_with_130(monkeypatch):
    def train(config, on_failure, clock):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["omnizoo.training.loop"], "train", train)
    assert main(["train", "my.yaml"]) == 130


def test_export_receives_both_folders(calls):
    assert main(["export", "runs/a/checkpoints/step-4", "out"]) == 0
    checkpoint, out, options = calls[0]
    assert (checkpoint, out) == (Path("runs/a/checkpoints/step-4"), Path("out"))
    assert not any(options.values())


def test_export_receives_code_permissions_of_command_line(calls):
    flags = ["--allow-code", "mine", "--allow-code=my_package.series", "--trust-remote-code"]
    assert main(["export", "run", "out", *flags]) == 0
    options = calls[0][-1]
    assert options["allow_code"] == ["mine", "my_package.series"]
    assert options["trust_remote_code"]


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == "omnizoo 0.1.0\n"


@pytest.fixture
def shows(capsys):
    """Return the output of a command that exits with code 0."""

    def shows(*argv: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        return capsys.readouterr().out

    return shows


@pytest.mark.parametrize("command", TAKE_OVERRIDES)
def test_help_of_commands_with_a_config_is_short_and_lists_the_sections(shows, command):
    lines = shows(command, "--help").splitlines()
    assert len(lines) < 75
    assert max(map(len, lines)) <= 100
    for section, summary in reference.sections().items():
        assert any(line.split(maxsplit=1) == [section, summary] for line in map(str.strip, lines))
    assert len(shows("train", "my.yaml", "-h").splitlines()) < 45


def test_help_of_sections_documents_every_key_within_100_columns(shows):
    sections = section_names()
    pages = {section: shows("train", "--help", section) for section in sections}
    for key in reference.all_keys():
        section = plain_key(key.key).rpartition(".")[0]
        page = pages[section]
        assert max(map(len, page.splitlines())) <= 100
        words = " ".join(page.split())
        assert f"--{key.key} " in words
        assert key.description in words
        default = "required" if key.default == "required" else f"default {key.default}"
        details = f"keys: omnizoo train --help {plain_key(key.key)}" if plain_key(key.key) in sections else key.type
        assert f"{details}; {default}" in words
    assert "--data.sources.N.path" not in pages["data"]
    assert shows("train", "--help", "data.sources.0") == pages["data.sources"]


def test_help_of_a_key_shows_only_that_key(shows):
    for name in ("train.precision", "precision"):
        assert shows("eval", "--help", name).split()[0] == "--train.precision"
    assert len(shows("train", "--help", "data.sources.path").splitlines()) < 6


def test_help_search_finds_keys_by_name_and_description(shows):
    found = shows("train", "--help-search", "PACK", "tokens")
    assert found.startswith("--data.pack_tokens ")
    assert "--train.tokens_per_step" in found
    assert "--train.lr " not in found


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--help", "trian"], "did you mean train?"),
        (["--help", "data.source"], "did you mean data.sources?"),
        (["--help", "learning_rate"], "use train.lr"),
        (["--help", "a\nb"], "sections: model, data"),
        (["--help-search", "learning_rate"], "use train.lr"),
        (["--help-search", "zzz"], '["zzz"]'),
    ],
)
def test_unknown_name_in_help_is_one_line(fails, argv, expected):
    assert expected in fails("train", *argv)


def test_every_argument_of_every_command_has_a_help_text():
    parser = build_parser()
    assert list(parser.commands) == list(COMMANDS)
    for name, command in parser.commands.items():
        for action in command._actions:
            assert action.help, (name, action.dest)
            assert "process(es)" not in action.help, (name, action.dest)


def test_every_option_with_a_value_states_its_default():
    for name, command in build_parser().commands.items():
        for action in command._actions:
            is_help = action.metavar in ("SECTION", "WORD")
            if action.option_strings and action.nargs != 0 and not is_help:
                assert "default: " in action.help, (name, action.dest)


def test_help_and_config_errors_do_not_import_torch():
    argvs = [
        ["--help"],
        *([command, "--help"] for command in COMMANDS),
        ["train", "--help", "data"],
        ["train", "my.yaml", "--train.steps", "0"],
    ]
    code = (
        "import json, sys\nfrom omnizoo.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, (argv, heavy)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(argvs)], check=True, capture_output=True)


def test_python_m_runs_the_same_command():
    run = subprocess.run([sys.executable, "-m", "omnizoo", "trian"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "did you mean train?" in run.stderr


def test_doctor_json_reports_no_problem_on_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problems"] == []
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert {p["name"]: p["needed"] for p in facts["packages"]}["torch"] == "<2.14,>=2.13.0"
    assert facts["backends"]["gloo"]
    assert set(facts["kernels"]) == set(doctor.KERNELS)
    ops = " ".join(file.read_text() for file in Path(omnizoo.__file__).parent.glob("ops/**/*.py"))
    assert [name for name in facts["kernels"] if name not in ops] == []  # nothing is listed that no code uses
    is_bf16_slow = facts["gflops"]["fp32"] > 5 * facts["gflops"]["bf16"]
    assert is_bf16_slow == any("bf16 is" in warning for warning in facts["warnings"])


def test_doctor_fails_for_wrong_and_missing_packages(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["rich==1.0", "no-such-package>=2", 'nor-this; extra == "wandb"'])
    monkeypatch.setattr(doctor, "_compute", lambda warnings: {})
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "pip install 'no-such-package>=2'" in out
    assert "pip install 'rich==1.0'" in out
    assert "'omnizoo[wandb]'" in out
    assert "training can run" not in out


def test_doctor_fails_if_torch_does_not_load(capsys, monkeypatch):
    def broken(warnings):
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_compute", broken)
    assert main(["doctor"]) == 1
    assert "libtorch.so" in capsys.readouterr().out
