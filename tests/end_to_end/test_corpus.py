"""Every case of the corpora succeeds or raises one clear error: no traceback, no hang, no silent mistake."""

from importlib import import_module
from pathlib import Path

import pytest
from corpus import report, run_cases

PARTS = 12  # `make test` runs the first part, `make verify-all` the others
CORPORA = sorted(path.stem for path in (Path(__file__).parents[1] / "support").glob("corpus_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # hundreds of commands; each has its own limit
@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_every_case_succeeds_or_prints_one_line(name: str, part: int, tmp_path: Path) -> None:
    outcomes = run_cases(import_module(name).CASES[part::PARTS], tmp_path)
    print(f"{name}: {report(outcomes)}")
    assert not any(outcome.wrong for outcome in outcomes), report(outcomes)


def test_corpora_have_400_uniquely_named_cases() -> None:
    names = [(corpus, case.name) for corpus in CORPORA for case in import_module(corpus).CASES]
    print(f"{len(names)} cases")
    assert len(set(names)) == len(names) >= 400
