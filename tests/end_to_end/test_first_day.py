"""The text and vision tutorials as a script: train, export, and generate what transformers generates."""

import sys
from pathlib import Path

import pytest
from processes import Running

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", ["text", "composed", "published"])
def test_first_day_runs_end_to_end(part: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples/first_day/first_day.py")
    done = Running([sys.executable, script, str(tmp_path / "runs"), part], {}).wait(500)
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "runs" / part / "run" / "report.html").is_file()
