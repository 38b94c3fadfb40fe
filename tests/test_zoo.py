"""Every family of the zoo against one process, on the layouts that `omnizoo recipes` prints marks for.

All families run in one world of processes, started once; each test then reads its family's verdicts.
"""

import json
import sys
from pathlib import Path

import pytest

from omnizoo.cli.launch import launch
from omnizoo.config.load import load_config
from omnizoo.recipes.zoo import CAPABILITIES, PROOF, families
from omnizoo.verification.prepare import VERDICTS, prepare, with_family

ROOT = Path(__file__).parent.parent
ZOO = {entry.family: entry for entry in families()}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("zoo")
    config = load_config(ROOT / "examples/text_tiny.yaml", ["--train.balance_loss", "0.01"])
    for family, entry in ZOO.items():
        layouts = ",".join(layout for mark, layout in CAPABILITIES.items() if entry.proof(mark))
        prepare(with_family(config, family), 4, layouts, "fp32", folder / family)
    command = (sys.executable, "-m", "omnizoo.verification.rank")
    assert launch([str(folder / family) for family in ZOO], 4, command=command) == 0
    return {f: [json.loads(line) for line in (folder / f / VERDICTS).read_text().splitlines()] for f in ZOO}


@pytest.mark.slow
@pytest.mark.parametrize("family", ZOO)
def test_family_agrees_with_one_process_on_any_layout(
    family: str, verdicts: dict[str, list[dict[str, object]]]
) -> None:
    marks = [mark for mark in CAPABILITIES if ZOO[family].proof(mark)]
    assert len(verdicts[family]) == len(marks)
    assert all(verdict["passed"] for verdict in verdicts[family]), [verdict["reason"] for verdict in verdicts[family]]


def test_every_mark_names_a_test_that_exists() -> None:
    file, _, function = PROOF.partition("::")
    assert (ROOT / file).samefile(__file__)
    assert function in globals()


def test_a_recipe_of_a_text_family_is_under_50_lines() -> None:
    assert max(entry.lines for entry in ZOO.values()) < 50
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mistral"} <= set(ZOO)
    assert {"gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "mixtral"} <= set(ZOO)
