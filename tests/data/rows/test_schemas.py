"""Each file of the table renders to the expected text, or raises an error of one line."""

import re
from pathlib import Path

import pytest
from fixtures import make_tokenizer
from row_formats import CASES, Case
from toy_media import MARKS, MODALITIES, shown, toy

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import ROW_FORMATS, SourceSettings
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow, SourceSchema
from omnizoo.data.rows.schemas import FORMATS, parse_row
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
def test_file_of_rows_renders_as_expected_or_raises(case: Case, tmp_path: Path, tokenizer, media: Path) -> None:
    path = tmp_path / case.file
    case.write(path)
    spec = SourceSettings(path=str(path), media_dir=str(media), **case.source)
    schema = SourceSchema("data.sources.0", spec.format, spec.json_columns, spec.untagged_media)
    renderer = Renderer(tokenizer, True, MODALITIES, ignore=case.ignore, schemas=[schema])

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


def test_table_of_cases_covers_every_format() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.format for case in CASES if case.format} == set(ROW_FORMATS) - {"preference"}
    assert tuple(FORMATS) == ROW_FORMATS


def test_parse_row_returns_format_and_reason() -> None:
    row: dict[str, object] = {"instruction": "add", "output": "2"}
    parsed = parse_row(row, present=row)
    assert parsed is not None
    assert (parsed.format, parsed.why) == ("alpaca", "the row has `instruction` and `output`")
    row = {"sentence": "so", "label": 1}
    assert parse_row(row, present=row) is None
    row = {"image": "a.png", "caption": "so"}
    parsed = parse_row(row, present=row, encoded=["image"])
    assert parsed is not None
    assert (parsed.format, parsed.why) == ("caption", "the row has `image`, and `caption` as a caption")


def test_messages_and_text_rows_are_unchanged() -> None:
    for row in (
        {"text": "a", "weight": 2},
        {"messages": [], "x": 1, "tools": []},
        {"conversations": [{"from": "gpt"}]},
    ):
        parsed = parse_row(row, present=dict(row))
        assert parsed is not None
        assert (parsed.row, parsed.prompt) == (row, "")
