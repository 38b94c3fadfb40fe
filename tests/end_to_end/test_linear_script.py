"""The example of a custom loop is short, uses only the public API, and equals `omnizoo train`."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from processes import Running, run_on_ranks, run_script_on_ranks, train_in_this_world
from tiny import read_steps

import omnizoo
from omnizoo.parallel.process import Process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "linear_train.py"
SMALL = {
    "--model.config.hidden_size": 32,
    "--model.config.num_hidden_layers": 2,
    "--data.pack_tokens": 64,
    "--data.look_ahead": 8,
    "--train.steps": 3,
}


def test_script_is_short_and_uses_public_names_only() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) < 80
    tree = ast.parse(source)
    imported = {node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert {alias.name for node in imported for alias in node.names} == {"sys", "Path", "omnizoo"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "omnizoo"
    }
    # The script uses all public functions, except commands, and functions for models, other loops, data and reports.
    contracts = {name for name in omnizoo.__all__ if name[0].isupper()} - {"Balancer"}
    others = {"attend", "train", "optimizer_step", "write_report", "fit_patch_codebook", "save_patch_codebook"}
    others |= {"evaluate", "export", "generate"}
    others |= {"run_model", "load_chat_model", "check_encoder", "check_decoder"}
    assert used == set(omnizoo.__all__) - contracts - others


def train(process: Process, args: list[str]) -> None:
    assert train_in_this_world(args) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "start"),
    [(1, "python"), (2, "launcher"), pytest.param(2, "torchrun", marks=pytest.mark.long)],
)
def test_script_has_the_losses_of_the_command(
    nproc: int, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    args = ["examples/text_tiny.yaml", *(str(word) for item in SMALL.items() for word in item), "--log.dir"]
    trained = run_on_ranks(train, nproc, [*args, str(tmp_path / "trained")])
    assert trained.code == 0, trained.stdout + trained.stderr

    args += [str(tmp_path / "linear")]
    if start == "python":
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *args])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        stdout = capsys.readouterr().out
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        if start == "torchrun":
            linear = Running([sys.executable, *torchrun, str(SCRIPT), *args], {}).wait(400)
        else:
            linear = run_script_on_ranks([SCRIPT, *args], nproc)
        assert linear.code == 0, linear.stdout + linear.stderr
        stdout = linear.stdout
    printed = re.findall(r"^step (\d+)/3  loss (\S+)  grad norm (\S+)$", stdout, re.M)
    expected = [
        (str(row["step"]), f"{row['loss']:.6f}", f"{row['grad_norm']:.4f}") for row in read_steps(tmp_path / "trained")
    ]
    assert len(expected) == 3
    assert printed == expected
    assert (tmp_path / "linear" / "checkpoints" / "step_00000003" / "manifest.json").is_file()
