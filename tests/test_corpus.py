"""Every case of the corpora: no traceback, no hang, nothing silently wrong."""

from importlib import import_module
from pathlib import Path

import pytest
from corpus import report, run_cases

CORPORA = sorted(path.stem for path in Path(__file__).parent.glob("corpus_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_every_case_is_refused_in_one_line_or_ends_well(name: str, tmp_path: Path) -> None:
    outcomes = run_cases(import_module(name).CASES, tmp_path)
    print(f"{name}: {report(outcomes)}")
    assert not any(outcome.wrong for outcome in outcomes), report(outcomes)
