"""Tests of `omnizoo data inspect`: it shows the samples of training, and escapes everything in the data."""

import json
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from omni import SENSOR, write_omni_config
from tiny import write_config, write_rows

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.config.sections.step_sizes import StepSizes
from omnizoo.data.loading.inspection import Inspection, histogram, inspect_data, one_lane, pieces
from omnizoo.data.loading.lane_stream import LaneAssignment
from omnizoo.data.loading.loader import Loader
from omnizoo.data.loading.reader import Reader, build_reader
from omnizoo.data.packing.pack import Pack
from omnizoo.models.build import build_model
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer


@pytest.fixture(scope="module")
def sensor_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SENSOR))
        yield


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory, sensor_on_path: None) -> Path:
    return write_omni_config(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def encoders_only(omni: Path) -> Path:
    """Return the config with two encoders and no decoder, which is quick to build."""
    config = yaml.safe_load(omni.read_text())
    modalities = config["model"]["modalities"]
    config["model"]["modalities"] = {name: {"encoder": modalities[name]["encoder"]} for name in ("image", "series")}
    path = omni.with_name("encoders_only.yaml")
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture(scope="module")
def reader(omni: Path) -> Reader:
    config = load_config(omni)
    model = build_model(config.model, config.train.precision)
    return build_reader(one_lane(config), load_tokenizer(config.model), **read_modalities(model, config.model))


@pytest.fixture(scope="module")
def inspection(reader: Reader) -> Inspection:
    return inspect_data(reader, show=4)


@pytest.fixture(scope="module")
def packs(reader: Reader, inspection: Inspection) -> list[Pack]:
    """Return the packs of training."""
    loader = Loader(reader, LaneAssignment(0, 1, 1, StepSizes(1)))
    return [loader.next_step().packs[0] for _ in range(inspection.packs)]


def decode(reader: Reader, ids: list[int]) -> str:
    """Return the text of token ids, with special tokens."""
    return reader.renderer.backend.decode(ids, skip_special_tokens=False)


class Page(HTMLParser):
    """Tags, attributes and text of an HTML page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


# Statistics


def test_statistics_match_the_packs_of_training(packs: list[Pack], inspection: Inspection) -> None:
    assert [name for pack in packs for name in pack.sample_ids] == [str(f.sample.id) for f in inspection.samples]
    tokens = sum(len(pack.columns["input_ids"]) for pack in packs)
    assert inspection.fill == tokens / (len(packs) * 160)
    assert sum(inspection.lengths) == tokens
    assert sum(source.tokens for source in inspection.sources) == tokens
    items = [item for pack in packs for item in pack.items]
    assert {item.port for item in items} == {port.port for port in inspection.ports}
    for port in inspection.ports:
        port_items = [item for item in items if item.port == port.port]
        assert port.items == len(port_items)
        assert port.tokens == sum(item.size.num_placeholders for item in port_items)
        assert port.cost == pytest.approx(sum(item.size.cost for item in port_items))
        assert port.costliest.size.cost == max(item.size.cost for item in port_items)
    assert inspection.longest.tokens == max(length for pack in packs for length in pack.lengths)


def test_tokens_are_marked_as_targets_exactly_as_in_training(
    reader: Reader, packs: list[Pack], inspection: Inspection
) -> None:
    samples = iter(inspection.samples)
    for pack in packs:
        is_target = np.append(False, pack.columns["labels"][:-1] != -100)
        for item in pack.items:
            for first, length in item.spans:
                is_target[first : first + length] = item.targets > 0
        offset = 0
        for length in pack.lengths:
            span = slice(offset, offset + length)
            shown = list(pieces(next(samples).sample, lambda ids: decode(reader, ids)))
            assert [piece.has_loss for piece in shown for _ in range(piece.tokens)] == is_target[span].tolist()
            ids = pack.columns["input_ids"][span].tolist()
            media = [piece for piece in shown if piece.item is not None]
            assert all(piece.text.startswith(f"[{piece.item.media.modality} x {piece.tokens}") for piece in media)
            placeholders = {piece.text: f"<|{piece.item.media.modality}_pad|>" * piece.tokens for piece in media}
            assert "".join(placeholders.get(piece.text, piece.text) for piece in shown) == decode(reader, ids)
            offset += length


def test_shown_samples_cover_every_port(inspection: Inspection) -> None:
    shown = {item.port for sample in inspection.shown for item in sample.sample.items}
    assert shown == {port.port for port in inspection.ports}
    assert len(shown) == 7
    assert len({sample.sample.id for sample in inspection.shown}) == 4


def test_multi_token_characters_are_complete_and_control_characters_escaped(text: Path) -> None:
    write_rows(text.parent / "texts.jsonl", [{"text": "naïve 日本 🙂\tok\x1b[31m"}] * 8)
    config = load_config(text, ["--data.sources", f"[{{path: {text.parent}/texts.jsonl}}]"])
    reader = build_reader(one_lane(config), load_tokenizer(config.model))
    (sample,) = inspect_data(reader, 1).shown
    shown = list(pieces(sample.sample, lambda ids: decode(reader, ids)))
    assert "".join(piece.text for piece in shown) == r"naïve 日本 🙂\tok\x1b[31m" + "<|endoftext|>"
    assert max(piece.tokens for piece in shown) > 1
    assert [piece.has_loss for piece in shown] == [False] + [True] * (len(shown) - 1)


@pytest.mark.parametrize("lengths", [[7], [7, 8], [2, 90, 91, 4000], list(range(50, 300))])
def test_histogram_bins_are_adjacent_and_count_every_sample(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert (bins[0][0], bins[-1][1]) == (min(lengths), max(lengths))
    assert all(after == last + 1 for (_, last, _), (after, _, _) in pairwise(bins))
    assert [count for *_, count in bins] == [sum(first <= n <= last for n in lengths) for first, last, _ in bins]


# The command


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_responses_of_preference_rows_are_shown_by_role(
    kind: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"what {i}"}], "chosen": "good", "rejected": "bad"} for i in "ab"]
    source = write_rows(tmp_path / "pairs.jsonl", rows)
    argv = ["data", "inspect", str(text), "--samples", "1", "--data.sources", json.dumps([{"path": str(source)}])]
    argv += ["--train.losses", f"[{{kind: {kind}}}]", "--data.pack_tokens", "128", "--data.shuffle", "false"]
    assert main([*argv, "--out", str(tmp_path / "page.html")]) == 0
    said, page = capsys.readouterr().out, Page(tmp_path / "page.html")
    prompt = "<|im_start|>user↵\nwhat a<|im_end|>↵\n<|im_start|>assistant↵\n"
    roles = ("chosen", "rejected") if kind == "dpo" else ("desirable", "undesirable")
    for role, answer in zip(roles, ("good", "bad"), strict=True):
        assert f"\n{role}:\n{prompt}⟦{answer}<|im_end|>⟧" in said
        assert f"{role}:\n{prompt}{answer}<|im_end|>" in page.text
    assert (f"\nmismatched:\n{prompt}good<|im_end|>" in said) == (
        kind == "kto"
    )  # the response of the other row, without loss


def test_terminal_and_page_show_samples_statistics_and_thumbnails(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["data", "inspect", str(omni), "--samples", "3", "--out", str(out)]) == 0
    said, page = capsys.readouterr().out, Page(out)
    for shown in (said, page.text):
        for part in ("[series x", " target]", "audio/decoder", "Expected fill"):
            assert part in shown
    assert {"img", "audio", "code"} <= set(page.tags)
    assert "script" not in page.tags
    addresses = [value for name, value in page.attributes if name in ("src", "href", "srcset", "poster")]
    assert addresses
    assert all(address.startswith("data:") for address in addresses)


def test_each_row_is_shown_once_and_before_statistics(text: Path, tmp_path: Path) -> None:
    """A few rows are split into several samples. Each row is shown once, also that of the longest sample."""
    write_rows(text.parent / "texts.jsonl", [{"text": f"row {i} " + "word " * 60} for i in range(40)])
    argv = ["data", "inspect", str(text), "--data.sources", f"[{{path: {text.parent}/texts.jsonl}}]"]
    assert main([*argv, "--samples", "10", "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    shown = [line.partition(" tokens")[0] for line in page.split("<section><small>")[1:]]
    rows = [line.partition(",")[0].partition(": ")[0] for line in shown]
    assert len(rows) == len(set(rows)) > 1  # there are more samples than rows
    assert page.index("<h2>Samples") < page.index("<h2>Figures")
    array = tmp_path / "array.json"  # all on one line
    array.write_text(json.dumps([{"text": f"row {i}"} for i in range(9)]))
    assert main([*argv[:-1], f"[{{path: {array}}}]", "--samples", "3", "--out", str(tmp_path / "array.html")]) == 0
    named = (tmp_path / "array.html").read_text().split("<section><small>")[1:]
    assert len({line.partition(": ")[0] for line in named}) == 3
    assert "array.json[" in named[0]
    assert "The longest sample" not in page


def test_data_is_escaped_on_page_and_terminal(
    encoders_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<b onload=x>&\x1b[2J"
    shutil.copy(encoders_only.parent / "media" / "0.png", tmp_path / f"{evil}.png")
    parts = [{"type": "image", "image": f"{evil}.png"}, {"type": "series", "series": [1, 2, 3, 4]}]
    prompt = {"role": "user", "content": [{"type": "text", "text": f"[red]{evil}"}, *parts]}
    rows = [{"messages": [prompt, {"role": "assistant", "content": evil}]}, {"text": [{"type": evil}]}]
    source = write_rows(tmp_path / f"{evil}.jsonl", rows)
    sources = json.dumps([{"path": str(source)}])
    argv = ["data", "inspect", str(encoders_only), "--data.sources", sources, "--data.on_bad_row", "skip"]
    assert main([*argv, "--out", str(tmp_path / "page.html")]) == 0
    said, page = capsys.readouterr().out, Page(tmp_path / "page.html")
    for shown in (said, page.text):
        assert r"[red]<b onload=x>&\x1b[2J" in shown
        assert "unknown type" in shown
    assert "\x1b" not in said
    assert not any(name == "onload" for name, _ in page.attributes)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": [{"type": "image", "image": "gone.png"}]}, "gone.png"),
        ({"text": [{"type": "image", "image": "cut.png"}, {"type": "text", "text": "a"}]}, "cut.png"),  # when decoded
    ],
)
def test_bad_rows_raise_or_are_counted_as_in_training(
    encoders_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, object], reason: str
) -> None:
    image = (encoders_only.parent / "media" / "0.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(image[: len(image) // 2])
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "good"}, row, {"text": "fine"}])
    argv = ["data", "inspect", str(encoders_only), "--data.sources", json.dumps([{"path": str(source)}])]
    assert main(argv) == 2
    said, error = capsys.readouterr()
    assert f"bad row: {source}:2: " in "".join(said.split("\n"))  # listed, before the error that training raises
    assert error.startswith(f"error: {source}:2: ")
    assert reason in error
    assert error.count("\n") == 1
    assert main([*argv, "--data.on_bad_row", "skip"]) == 0
    said = "".join(capsys.readouterr().out.split("\n"))  # a long line is wrapped
    assert f"bad row: {source}:2: " in said
    assert reason in said
    assert "Bad rows            1 " in said


def test_bad_rows_are_grouped_and_the_other_sources_are_shown(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_rows(tmp_path / "good.jsonl", [{"text": f"row {i} and so on"} for i in range(72)])
    scored = [{"messages": [{"role": "user", "content": f"what {i}"}], "score": i} for i in range(400)]
    lost = [{"text": "so", "image": f"img/{i}.png"} for i in range(400)]
    bad = write_rows(tmp_path / "bad.jsonl", [*scored, *lost])
    argv = ["data", "inspect", str(text), "--samples", "1", "--data.shuffle", "false"]
    sources = ["--data.sources", json.dumps([{"path": str(good)}, {"path": str(bad)}])]
    assert main([*argv, *sources, "--out", str(tmp_path / "page.html")]) == 2
    out, error = capsys.readouterr()
    said = "".join(out.split())  # without spaces: long lines are wrapped at them
    assert f"400badrows,thefirst:{bad}:1:`score`isnotused" in said
    assert f"112badrows,thefirst:{bad}:401:`image`isnotused" in said
    assert said.count("isnotused") == 2
    assert "⟦" in said.partition("noloss")[2]  # a sample of the good source
    assert "512     of 584 different rows read" in out
    assert "no usable row" in out
    assert error.startswith(f"error: {bad}:1: `score`")
    page = Page(tmp_path / "page.html").text
    assert "Bad rows: 512" in page
    assert page.count("is not used") == 2

    assert main([*argv, *sources, "--data.on_bad_row", "skip"]) == 2  # training would stop at the end of the source
    assert capsys.readouterr().err.startswith("error: data.sources.1: none of the 512 rows read from ")
    assert main([*argv, "--data.on_bad_row", "skip", "--data.sources", json.dumps([{"path": str(bad)}])]) == 2
    out, error = capsys.readouterr()
    assert (out.count("bad rows, the first"), error.count("\n")) == (2, 1)


def test_reasons_that_differ_in_values_are_one_group(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [{"role": f"critic {i}", "content": "hi"}]} for i in range(30)]
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "so it is"}, *rows, *[{"text": "it is"}] * 30])
    argv = ["data", "inspect", str(text), "--data.on_bad_row", "skip", "--data.sources"]
    assert main([*argv, json.dumps([{"path": str(source)}])]) == 0
    assert f"30 bad rows, the first: {source}:2: `role`" in "".join(capsys.readouterr().out.split("\n"))


def test_a_source_whose_rows_are_all_too_long_is_an_error(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = write_rows(tmp_path / "long.jsonl", [{"text": "word " * 300}] * 20)
    good = write_rows(tmp_path / "good.jsonl", [{"text": "so it is"}] * 72)
    sources = json.dumps([{"path": str(long)}, {"path": str(good)}])
    assert main(["data", "inspect", str(text), "--data.overlong", "drop", "--data.sources", sources]) == 2
    out, error = capsys.readouterr()
    assert "0 truncated, 20 dropped" in out
    assert "no usable row" in out
    assert error.startswith("error: data.sources.0: none of the 20 rows read from ")


def test_counts_are_numbers_of_different_rows(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of small sources are read several times while the packing window fills."""
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "word " * (5 + 2 * (i == 7) * 50)} for i in range(72)])
    argv = ["data", "inspect", str(text), "--data.overlong", "truncate", "--data.look_ahead", "256"]
    assert main([*argv, "--data.sources", json.dumps([{"path": str(source)}])]) == 0
    said = capsys.readouterr().out
    assert "from 72 of 72 rows" in said
    assert "0       of 72 different rows read" in said
    assert "rows: 1 truncated, 0 dropped" in said


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--samples", "-1"], "--samples: -1"),
        (["--out", "."], "--out: . "),
        (["--data.pack_token", "64"], "did you mean data.pack_tokens?"),
        (["--pack_tokens", "64"], "did you mean --data.pack_tokens?"),
    ],
)
def test_invalid_arguments_of_inspect_print_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    assert main(["data", "inspect", str(text), *argv]) == 2
    said, err = capsys.readouterr()
    assert (said, err.count("\n")) == ("", 1)
    assert error in err


def test_inspecting_a_text_model_writes_no_file(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "What is"}, {"role": "assistant", "content": "the answer"}]
    write_rows(text.parent / "chats.jsonl", [{"messages": messages}] * 8)
    before = sorted(text.parent.rglob("*"))
    assert main(["data", "inspect", str(text), "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "\n<|im_start|>user↵\nWhat is<|im_end|>↵\n<|im_start|>assistant↵\n⟦the answer<|im_end|>⟧↵\n" in shown
    assert "Text only           100.0%" in shown
    assert "Media" not in shown
    assert sorted(text.parent.rglob("*")) == before
