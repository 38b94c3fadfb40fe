"""Every file of the table becomes what its author meant, or is refused in one line: nothing is silently wrong."""

import re
from pathlib import Path

import pytest
from fixtures import make_tokenizer
from row_formats import CASES, Case
from toy_media import MARKS, MODALITIES, shown, toy

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import ROW_FORMATS, SourceSettings
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.rows.schemas import FORMATS, SourceSchema, parse_row
from omnizoo.data.sources.open import open_source

TARGETS = re.compile(r"\[\[|\]\]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), special_tokens=MARKS)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for rows in (2, 3):
        (folder / f"{rows}.toy").write_bytes(toy(rows))
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_of_rows_becomes_what_was_meant(case: Case, tmp_path: Path, tokenizer, media: Path) -> None:
    path = tmp_path / case.file
    case.write(path)
    spec = SourceSettings(path=str(path), media_dir=str(media), **case.source)
    shape = SourceSchema("data.sources.0", spec.format, spec.json_columns)
    renderer = Renderer(tokenizer, True, MODALITIES, ignore=case.ignore, shapes=[shape])

    def read():
        source = open_source(spec, modalities=MODALITIES, key="data.sources.0")
        return renderer.render(source.read(case.row), (0, 0, case.row), lambda name: source.find(case.row, name))

    if not case.format:
        with pytest.raises(BadRow if case.opens else UserError, match=re.escape(case.expected)) as caught:
            read()
        assert "\n" not in str(caught.value)
        return
    rendered = read()
    text = shown(renderer, rendered)
    has_marks = "[[" in case.expected
    assert (text if has_marks else TARGETS.sub("", text)) == case.expected
    assert rendered.row_schema == case.format


def test_the_table_is_large_and_has_every_format() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.format for case in CASES if case.format} == set(ROW_FORMATS) - {"preference"}
    assert tuple(FORMATS) == ROW_FORMATS


def test_which_format_a_row_is_and_why() -> None:
    row: dict[str, object] = {"instruction": "add", "output": "2"}
    taken = parse_row(row, given=row)
    assert taken is not None
    assert (taken.format, taken.why) == ("alpaca", "it has `instruction` and `output`")
    row = {"sentence": "so", "label": 1}
    assert parse_row(row, given=row) is None
    row = {"image": "a.png", "caption": "so"}
    taken = parse_row(row, given=row, read=["image"])
    assert taken is not None
    assert (taken.format, taken.why) == ("caption", "it has `image`, and `caption` for a caption")


def test_rows_of_the_old_formats_go_through_unchanged() -> None:
    for row in (
        {"text": "a", "weight": 2},
        {"messages": [], "x": 1, "tools": []},
        {"conversations": [{"from": "gpt"}]},
    ):
        given = dict(row)
        taken = parse_row(row, given=given)
        assert taken is not None
        assert (taken.row, taken.prompt) == (row, "")
