"""Tests of the completion scripts. bash runs its script; for other shells, the text of the script is checked."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from omnizoo.cli.completion.words import commands
from omnizoo.cli.main import main
from omnizoo.config import reference

TIME_LIMIT = 20  # seconds


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The path of the bash script, written by a process of its own, which must not import torch."""
    code = (
        "import sys; from omnizoo.cli.main import main; main(['completion', 'bash']); assert 'torch' not in sys.modules"
    )
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert written.returncode == 0, written.stderr
    path = tmp_path_factory.mktemp("completion") / "omnizoo.bash"
    path.write_text(written.stdout)
    return path


@pytest.fixture
def complete(script, tmp_path):
    """Return the words that bash offers for a command line whose last word is completed."""

    def complete(*line: str) -> list[str]:
        run = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _omnizoo 2>/dev/null; '
        run += 'printf "%s\\n" "${COMPREPLY[@]}"'
        command = ["bash", "--norc", "-c", run, str(script), "omnizoo", *line]
        offered = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, cwd=tmp_path)
        assert offered.stderr == ""
        return offered.stdout.split()

    return complete


def test_bash_completes_commands_options_and_values(complete):
    assert complete("ex") == ["export"]
    assert set(complete("")) >= {command.name for command in commands()}
    assert complete("export", "--dt") == ["--dtype"]
    assert complete("export", "--dtype", "") == ["fp32", "bf16", "fp16"]
    assert complete("completion", "z") == ["zsh"]
    assert complete("data", "in") == ["inspect"]
    assert complete("train", "--nproc", "") == []
    assert "data.sources" in complete("train", "--help", "da")


def test_bash_completes_config_keys_part_by_part(complete):
    assert complete("train", "--tra") == ["--train."]
    assert {"--train.lr", "--train.losses", "--train.losses.0."} <= set(complete("train", "my.yaml", "--train."))
    assert complete("eval", "run", "--data.sources.3.pa") == ["--data.sources.3.path"]
    assert complete("train", "--model.modalities.sensor.enc") == [
        "--model.modalities.sensor.encoder",
        "--model.modalities.sensor.encoder.",
    ]
    assert complete("generate", "--tra") == []


def test_bash_completes_every_config_key(complete, script):
    text = script.read_text()
    assert [key.key for key in reference.all_keys() if f"  --{key.key}\n" not in text] == []


@pytest.mark.parametrize("words", [["--train.precision", "b"], ["--train.precision", "=", "b"]])
def test_bash_completes_values_of_config_keys(complete, words):
    assert complete("train", "my.yaml", *words) == ["bf16"]
    assert complete(
        "train", *[word.replace("train.precision", "optimizer.groups.2.kind") for word in words[:-1]], "mu"
    ) == ["muon"]


def test_bash_completes_files(complete, tmp_path):
    (tmp_path / "my config.yaml").write_text("")
    (tmp_path / "run").mkdir()
    assert " ".join(complete("train", "my")) == "my config.yaml"
    assert complete("train", "--verbose", "ru") == ["run"]
    assert complete("train", "x.yaml", "--model.path", "ru") == ["run"]


def test_tab_in_an_interactive_bash_completes_key_and_value(script, tmp_path):
    parent, child = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(tmp_path)}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=child, stdout=child, stderr=child, env=environment, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    os.close(child)
    try:
        # The function prints its arguments in place of the command.
        os.write(parent, f"omnizoo() {{ printf '<%s>' \"$@\" ; echo; }}; source {script}\n".encode())
        os.write(parent, b"omnizoo tr\t--train.prec\tbf\t--data.so\t.0.pat\tx\n")
        shown = read_until(parent, b"<x>")
    finally:
        shell.kill()
        shell.wait(TIME_LIMIT)
        os.close(parent)
    assert b"<train><--train.precision><bf16><--data.sources.0.path><x>" in shown


def read_until(terminal: int, end: bytes) -> bytes:
    """Return the output of a terminal until `end` appears, or the time limit is reached."""
    shown = b""
    deadline = time.monotonic() + TIME_LIMIT
    while end not in shown and time.monotonic() < deadline:
        readable, _, _ = select.select([terminal], [], [], 1)
        shown += os.read(terminal, 4096) if readable else b""
    return shown


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_other_shells_contains_every_command_option_and_key(capsys, shell):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in commands():
        assert command.name in text
        for option in command.options:
            for flag in option.flags:
                assert (flag if shell == "zsh" else f" {flag.lstrip('-')} ") in text, flag
    for key in reference.all_keys():
        if ".NAME." not in key.key or shell == "zsh":
            assert (key.key if shell == "zsh" else key.key.replace(".N.", ".0.")) in text
