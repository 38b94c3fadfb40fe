"""Rows with media: every spelling and every kind of value gives the same items at the same places, with the loss where
it belongs; what cannot be used is refused by name. The modalities are toys: an item is `TOY`, its rows, and any bytes.
"""

import base64
import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fixtures import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from number_rows import reader_of
from toy_media import MARKS, MODALITIES, ToyDecoder, chat, shown, text, toy
from transformers import PreTrainedTokenizerFast

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.packing.overlong import split
from omnizoo.data.packing.packer import Packer
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder, RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.modalities.base import Modality
from omnizoo.modalities.item import MediaItem


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), special_tokens=MARKS)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return Renderer(tokenizer, append_eos=True, modalities=MODALITIES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "media").mkdir()
    for rows in (2, 3):
        (tmp_path / "media" / f"{rows}.toy").write_bytes(toy(rows))
    return tmp_path


def described(items: Sequence[MediaItem]) -> list[tuple[Any, ...]]:
    return [(i.port, i.media.value, i.media.options, i.media.seed, i.size, i.spans, i.is_target) for i in items]


def part(name: str, value: Any, **options: Any) -> dict[str, Any]:
    return {"type": name, name: value, **options}


# Spellings


def test_all_spellings_of_a_conversation_render_equally(folder: Path, renderer: Renderer) -> None:
    two = "media/2.toy"
    three = "media/3.toy"
    tags = "a <image> b <audio>?"
    answer = "<image>ok"
    columns = {"images": [two, two], "audios": [three]}
    said = [{"from": "human", "value": tags}, {"from": "gpt", "value": answer}]
    empty = {"image": None, "audio": None, "text": None}  # as columnar files have it
    rows = [
        chat(
            [text("a "), part("image", two), text(" b "), part("audio", three), text("?")],
            [part("image", two), text("ok")],
        ),
        chat(
            [
                text("a "),
                {"type": "image_url", "image_url": {"url": two}},
                text(" b "),
                {"type": "input_audio", "input_audio": {"url": three}},
                text("?"),
            ],
            [{"type": "input_image", "image_url": two}, text("ok")],
        ),
        chat([{**empty, **p} for p in (text("a "), part("image", two), text(" b "), part("audio", three), text("?"))],
             [{"type": "image", "path": two}, text("ok")]),
        chat([text("a "), {"type": "image"}, text(" b "), {"type": "audio"}, text("?")], answer, **columns),
        chat(tags, answer, **columns),
        chat(tags, answer, **columns, clips=None, tones=[]),
        chat(tags, answer, image=[two, two], audio=three),
        {"conversations": said, **columns},
        {"conversations": said, "images": [{"bytes": None, "path": two}] * 2, "audios": three},
    ]  # fmt: skip
    first, *others = [renderer.render(row, (1, 2, 3), MediaFolder(folder, folder).find) for row in rows]
    assert shown(renderer, first) == (
        "<|im_start|>user\na <image:(2 image):image> b <audio:(3 audio):audio>?<|im_end|>\n"
        "<|im_start|>assistant\n[[<image:]](3 image)[[:image>ok<|im_end|>]]\n"
    )
    assert [(str(item.port), item.is_target) for item in first.items] == [
        ("image/encoder", False),
        ("audio/encoder", False),
        ("image/decoder", True),
    ]
    for other in others:
        assert other.input_ids.tolist() == first.input_ids.tolist()
        assert other.is_target.tolist() == first.is_target.tolist()
        assert described(other.items) == described(first.items)


def test_options_of_an_item_reach_its_modality(renderer: Renderer) -> None:
    encoded = base64.b64encode(toy(2)).decode()
    row = chat([
        part("image", [1, 2], detail="low"),
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "toy"}, "start": 1.5},
        {"type": "image", "base64": encoded, "crop": [1, 2]},
    ])  # fmt: skip
    options = [item.media.options for item in renderer.render(row).items]
    assert options == [{"detail": "low"}, {"format": "toy", "start": 1.5}, {"crop": [1, 2]}]


def test_media_in_text_rows_are_targets(renderer: Renderer) -> None:
    tagged = renderer.render({"text": "see <image> and <audio>", "images": [[1, 2]], "audios": [[1]]})
    parts = [text("see "), part("image", [1, 2]), text(" and "), part("audio", [1])]
    assert shown(renderer, tagged) == "[[see <image:]](3 image)[[:image> and <audio:]](1 audio)[[:audio><|endoftext|>]]"
    assert [str(item.port) for item in tagged.items] == ["image/decoder", "audio/encoder"]
    assert described(renderer.render({"text": parts}).items) == described(tagged.items)


def test_rows_without_media_render_as_without_modalities(
    tokenizer: PreTrainedTokenizerFast, renderer: Renderer
) -> None:
    plain = Renderer(tokenizer, append_eos=True)
    for row in ({"text": "the <audio> and <image> tags of a page"}, chat("hi <b>"), chat("hi", images=None, tones=[])):
        with_modalities = renderer.render(row)
        without = plain.render(row)
        assert with_modalities.input_ids.tolist() == without.input_ids.tolist()
        assert with_modalities.is_target.tolist() == without.is_target.tolist()
        assert with_modalities.items == without.items == ()
    assert (
        plain.render(chat([text("hi "), text("<b>")])).input_ids.tolist()
        == plain.render(chat("hi <b>")).input_ids.tolist()
    )


# Values


def test_all_kinds_of_media_values_are_read(folder: Path, renderer: Renderer) -> None:
    data = toy(3, bytes(range(60)))
    path = folder / "media" / "a b.toy"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    wrapped = "\n".join(encoded[i : i + 20] for i in range(0, len(encoded), 20))
    values: list[Any] = [
        "media/a b.toy",
        str(path),
        f"file://{path}".replace(" ", "%20"),
        f"data:some/thing;base64,{encoded}",
        "data:," + "".join(f"%{byte:02x}" for byte in data),
        encoded,
        data,
        {"bytes": data, "path": "gone.toy"},
        {"bytes": None, "path": "media/a b.toy"},
        {"bytes": encoded},
        {"data": wrapped, "format": "toy"},
        {"url": "media/a b.toy", "detail": "high"},
    ]
    for value in values:
        (item,) = renderer.render(chat([part("image", value)]), find=MediaFolder(folder, folder).find).items
        assert item.media.open().read() == data, value
        assert item.size.num_placeholders == 3


def test_plain_media_values_are_unchanged(folder: Path, renderer: Renderer) -> None:
    array = np.zeros((4, 2))
    mapping = {"array": [0.5, 1.0], "sampling_rate": 8000, "path": "media/2.toy"}
    for value, rows in (([1.5, 2.5, 3.5], 3), ([[1, 2], [3, 4]], 2), (array, 4), (mapping, 2)):
        (item,) = renderer.render(chat("<audio>", audios=[value]), find=MediaFolder(folder, folder).find).items
        assert item.media.value is value or item.media.value == value
        assert item.size.num_placeholders == rows
    (item,) = renderer.render(chat("<audio>", audio=[1.5, 2.5]), find=MediaFolder(folder, folder).find).items
    assert item.media.value == [1.5, 2.5]
    frames = [{"path": "media/2.toy"}, "media/3.toy"]  # a list of files is one value
    (item,) = renderer.render(chat([part("audio", frames)]), find=MediaFolder(folder, folder).find).items
    assert item.media.value == [folder / "media/2.toy", folder / "media/3.toy"]


def test_item_seed_depends_on_run_seed_row_epoch_and_number(
    tokenizer: PreTrainedTokenizerFast, renderer: Renderer
) -> None:
    row = chat([part("image", [1]), part("image", [1])])
    seeds = {
        (seed, key, number): item.media.seed
        for seed in (0, 1)
        for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
        for number, item in enumerate(Renderer(tokenizer, True, MODALITIES, seed=seed).render(row, key).items)
    }
    assert len(set(seeds.values())) == len(seeds) == 16
    assert [item.media.seed for item in renderer.render(row, (1, 0, 0)).items] == [
        seeds[0, (1, 0, 0), n] for n in (0, 1)
    ]


# Places and targets


def test_media_tokens_and_targets_match_token_by_token(renderer: Renderer) -> None:
    rendered = renderer.render(chat("<clip>q<image>", "a<image><tone>", clips=[[1, 2]], images=[[1], [1]], tones=[[1]]))
    ids = renderer.tokenizer.convert_tokens_to_ids
    encode = renderer.tokenizer.encode
    expected: list[tuple[int, bool]] = []

    def add(tokens: list[int], is_target: bool = False) -> int:
        expected.extend((token, is_target) for token in tokens)
        return len(expected) - len(tokens)

    add(encode("<|im_start|>user\n<clip:<0.5 s>"))
    first = add([ids("<clip-pad>")] * 2)
    add(encode("<1.5 s>"))
    second = add([ids("<clip-pad>")] * 2)
    add(encode(":clip>q<image:"))
    seen = add([ids("<image-pad>")])
    add(encode(":image><|im_end|>\n<|im_start|>assistant\n"))
    add(encode("a<image:"), True)
    drawn = add([ids("<image-pad>")] * 2)
    add(encode(":image><tone:"), True)
    played = add([ids("<tone-pad>")] * 2)
    add(encode(":tone><|im_end|>"), True)
    add(encode("\n"))
    assert list(zip(rendered.input_ids.tolist(), rendered.is_target.tolist(), strict=True)) == expected
    assert [(str(item.port), item.spans, item.is_target) for item in rendered.items] == [
        ("clip/encoder", ((first, 2), (second, 2)), False),
        ("image/encoder", ((seen, 1),), False),
        ("image/decoder", ((drawn, 2),), True),
        ("tone/decoder", ((played, 2),), True),
    ]


def test_role_of_message_selects_encoder_or_decoder(renderer: Renderer) -> None:
    everything = [part(name, [1]) for name in MODALITIES]
    row = chat(everything, everything)
    row["messages"] += [{"role": "assistant", "content": everything, "loss": False}]
    row["messages"] += [{"role": "user", "content": everything, "loss": True}]
    found = [(str(item.port), item.is_target) for item in renderer.render(row).items]
    encoded = "image/encoder audio/encoder tone/decoder clip/encoder"
    learnt = {"image/decoder", "tone/decoder"}
    produced = "image/decoder audio/encoder tone/decoder clip/encoder"
    assert [port for port, _ in found] == " ".join((encoded, produced, encoded, produced)).split()
    for turn, has_targets in enumerate((False, True, False, True)):
        assert {port for port, is_target in found[4 * turn : 4 * turn + 4] if is_target} == (
            learnt if has_targets else set()
        )


def test_text_between_placeholders_of_an_item_is_no_target(renderer: Renderer) -> None:
    rendered = renderer.render(chat("go", "a <clip> b", clips=[[1]]))
    assert shown(renderer, rendered).endswith("assistant\n[[a <clip:]]<0.5 s>(2 clip)[[:clip> b<|im_end|>]]\n")


def test_single_media_item_is_a_target(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = {"tone": Modality("tone", None, ToyDecoder(), "", "<tone-pad>", "")}
    row = {"text": [text("a"), part("tone", [1])]}
    rendered = Renderer(tokenizer, False, bare).render(row)
    assert rendered.is_target.tolist() == [True, False, False]
    assert rendered.items[0].spans == ((1, 2),)
    with pytest.raises(BadRow, match="cannot be predicted"):
        Renderer(tokenizer, False, bare).render({"text": row["text"][::-1]})


def test_weights_apply_to_text_after_media_expansion(renderer: Renderer) -> None:
    def two_turns() -> dict[str, Any]:
        first = chat("look <image>", "fine")
        second = chat("play", "<tone>")
        return {"messages": first["messages"] + second["messages"], "images": [[1, 2]], "tones": [[1]]}

    row = two_turns()
    row["messages"][1]["weight"] = 0.5
    rendered = renderer.render(row)
    weights = rendered.columns["loss_weights"]
    assert renderer.tokenizer.decode(rendered.input_ids[weights == 0.5]) == "fine<|im_end|>"
    assert renderer.tokenizer.decode(rendered.input_ids[weights == 1]) == "<tone::tone><|im_end|>"
    for turn, weight in ((3, 2), (None, 2), (None, 0.5)):
        wrong = two_turns()
        (wrong if turn is None else wrong["messages"][turn])["weight"] = weight
        with pytest.raises(BadRow, match=r"tone given as list is a target with a `weight` other than 0 and 1"):
            renderer.render(wrong)
    with pytest.raises(BadRow, match="`weight` is 0"):
        renderer.render(row | {"weight": 0})


def test_added_special_tokens_do_not_shift_items(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, special_tokens=MARKS, bos="<s>", trim_offsets=True)
    rendered = Renderer(tokenizer, True, MODALITIES).render({"text": [part("clip", [1]), text(" so")]})
    assert tokenizer.decode(rendered.input_ids) == "<s><clip:<0.5 s><clip-pad><clip-pad>:clip> so<|endoftext|>"
    placeholder = tokenizer.convert_tokens_to_ids("<clip-pad>")
    (start, rows) = rendered.items[0].spans[0]
    (inner,) = [np.flatnonzero(rendered.input_ids == placeholder)]
    assert list(range(start, start + rows)) == inner.tolist()
    assert np.flatnonzero(~rendered.is_target).tolist() == list(range(2, start + rows))


def test_generation_tags_support_media_and_moved_media_raise(tmp_path: Path) -> None:
    tagged = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}Q: {{ m.content | trim }} {% endif %}{% endfor %}"
    )
    row = chat(" <image>q", "<tone>", images=[[1]], tones=[[1]])
    renderer = Renderer(make_tokenizer(tmp_path, tagged, special_tokens=MARKS), True, MODALITIES)
    assert shown(renderer, renderer.render(row)) == (
        "Q: <image:(1 image):image>q [[<tone:]](2 tone)[[:tone><|im_end|>]]"
    )
    renderer.tokenizer.chat_template = "{{ messages[1].content }} {{ messages[0].content }}"
    with pytest.raises(BadRow, match="drops or moves tone given as list"):
        renderer.render(row)
    renderer.tokenizer.chat_template = tagged.replace(
        "{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"
    )
    with pytest.raises(BadRow, match="tone given as list is a target, but the chat template writes it outside"):
        renderer.render(row)


def test_several_position_ids_per_token_survive_splitting(tokenizer: PreTrainedTokenizerFast) -> None:
    def positions(ids: Any, items: Sequence[MediaItem]) -> Any:
        places = [token for item in items for first, rows in item.spans for token in range(first, first + rows)]
        tokens = np.arange(len(ids), dtype=np.int32)
        return np.stack([tokens, np.where(np.isin(tokens, places), 7, tokens)])

    renderer = Renderer(tokenizer, True, MODALITIES, positions)
    rendered = renderer.render(chat("<image>", images=[[1, 2]]))
    (sample,) = split(0, 0, 0, rendered, 64)
    is_place = sample.input_ids == tokenizer.convert_tokens_to_ids("<image-pad>")
    assert sample.columns["position_ids"][1].tolist() == np.where(is_place, 7, np.arange(len(is_place))).tolist()
    pieces = list(split(0, 0, 0, renderer.render({"text": "so many words " * 9}), 8))  # each counts from 0
    assert len(pieces) > 2
    for piece in pieces:
        assert piece.columns["position_ids"].tolist() == [list(range(len(piece.input_ids)))] * 2


@given(
    st.lists(
        st.lists(st.one_of(st.sampled_from("ab "), st.tuples(st.sampled_from(list(MODALITIES)), st.integers(1, 4)))),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_items_stay_on_their_placeholders_when_packed(
    renderer: Renderer, contents: list[list[str | tuple[str, int]]]
) -> None:
    packer = Packer(pack_tokens=96, look_ahead=1)
    for row, content in enumerate(contents):
        parts = [text(p) if isinstance(p, str) else part(p[0], list(range(p[1]))) for p in content]
        rendered = renderer.render(chat(parts, parts), (0, 0, row))
        if len(rendered.input_ids) <= 96:
            packer.add(*split(0, 0, row, rendered, 96))
    while packer.buffer:
        pack = packer.pop()
        start = 0
        ids = np.concatenate([sample.input_ids for sample in pack])
        targets = np.concatenate([sample.is_target for sample in pack])
        found: list[int] = []
        for sample in pack:
            media = [p for p in contents[sample.id.row] if not isinstance(p, str)] * 2
            for item, (name, rows) in zip(sample.items, media, strict=True):
                places = [start + first + i for first, count in item.spans for i in range(count)]
                given = rows * (2 if name == "clip" else 1) + (item.port.role == "decoder")
                assert len(places) == item.size.num_placeholders == given
                assert set(ids[places]) == {renderer.tokenizer.convert_tokens_to_ids(f"<{name}-pad>")}
                found += places
            start += len(sample.input_ids)
        assert found == np.flatnonzero(np.isin(ids, renderer.placeholders)).tolist()
        assert not targets[found].any()


# Refusals


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat("<image> <image>", images=[[1]]), "<image> occurs 2 times, but `images` has 1 items"),
        (chat("<image>", images=[[1], [1]]), "<image> occurs 1 times, but `images` has 2 items"),
        (chat("<image>"), "<image> occurs 1 times, but `images` has 0 items. If <image> is text"),
        (chat("q", images=[[1]]), "<image> occurs 0 times, but `images` has 1 items"),
        (chat([{"type": "image"}]), "<image> occurs 1 times, but `images` has 0 items"),
        ({"text": "q", "image": [1]}, "format to one of caption, from_caption"),
        (chat([part("imege", [1])]), "'imege'; known: text, image, audio, tone, clip (did you mean 'image'?)"),
        (chat([part("smell", [1])]), "part 0 of `content` of message 0 has the unknown type 'smell'"),
        (chat([{"text": "x"}]), "part 0 of `content` of message 0 is not an object with a `type`"),
        (chat([{"type": "text", "text": 3}]), "`text` of part 0 of `content` of message 0 is int"),
        (chat({"type": "text"}), "`content` of message 0 is dict, not a string or a list of parts"),
        (chat("a <image-pad> b"), "'<image-pad>'"),
        (chat([text("a :tone> b")]), "':tone>'"),
        ({"text": "a <clip: b"}, "'<clip:'"),
        (chat("q", tools=[{"name": "<image-pad>"}]), "a media placeholder occurs outside the message contents"),
        (chat([part("image", "")]), "image (item 0): the media item is empty"),
        (chat("<image>", images=[None]), "image (item 0): the media item is empty"),
        (chat("<image>", images=[b""]), "image (item 0): the media item is empty"),
        (chat("<image>", images=[{"bytes": None, "path": None}]), "image (item 0): the media item is empty"),
        (chat("<image><audio>", images=[[1]], audios=[[]]), "audio (item 1): the media item is empty"),
        (chat("<image>", images=["media/none.toy"]), "media/none.toy does not exist"),
        (chat("<image>", images=["media/empty.toy"]), "media/empty.toy"),
        (chat("<image>", images=["media/short.toy"]), "media/short.toy: this is no toy"),
        (chat("<image>", images=["media"]), "media is a folder, not a file"),
        (chat("<image>", images=["media/\0"]), "is not a valid path: embedded null byte"),
        (chat("<image>", images=["n." * 150]), "n.n.... is not a valid path: File name too long"),
        (chat("<image>", images=["media/loop"]), "media/loop is not a valid path"),
        (chat("<image>", images=[b"TOX"]), "image given as bytes: this is no toy"),
        (chat("<image>", images=[toy(0)]), "image given as bytes has 0 placeholder tokens"),
        (chat("<image>", images=["https://example.org/2.toy"]), "https://example.org/2.toy is a network address"),
        (chat([part("image_url", {"url": "s3://bucket/2.toy"})]), "s3://bucket/2.toy is a network address"),
        (chat([{"type": "image", "base64": "%%%"}]), "image (item 0): %%%... is not valid base64"),
        (chat("<image>", images=["data:image/png;base64,abc"]), "is not valid base64"),
        (chat("<image>", images=["?" * 5000]), "is not valid base64"),
        (chat("<image>", images=["../outside.toy"]), "../outside.toy is outside"),
        (chat("<image>", images=["media/../../outside.toy"]), "is outside"),
        (chat("<image>", images=["{outside}"]), "outside.toy is outside"),
        (chat("<image>", images=["file://{outside}"]), "outside.toy is outside"),
        (chat("<image>", images=["media/link.toy"]), "media/link.toy is outside"),
        (chat("<image>", images=[["media/2.toy", "media/link.toy"]]), "media/link.toy is outside"),
        (chat("<image>", images=["/etc/hostname"]), "data.media_outside: true"),
        ({"conversations": [{"from": 3, "value": "x"}]}, "message 0 is not an object with a `role`"),
        ({"conversations": [{"from": "human"}]}, "`content` of message 0 is NoneType"),
        ({"conversations": {}}, "`conversations` is empty or not a list"),
    ],
)  # fmt: skip
def test_bad_media_row_has_a_reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], reason: str
) -> None:
    media = tmp_path / "data" / "media"
    media.mkdir(parents=True)
    (media / "2.toy").write_bytes(toy(2))
    (media / "empty.toy").touch()
    (media / "short.toy").write_bytes(b"TO")
    (media / "loop").symlink_to(media / "loop")
    (media / "link.toy").symlink_to(tmp_path / "outside.toy")
    outside = tmp_path / "outside.toy"
    outside.write_bytes(toy(2))
    row = json.loads(json.dumps(row).replace("{outside}", str(outside))) if "{outside}" in str(row) else row
    renderer = Renderer(tokenizer, True, MODALITIES)
    if "tools" in row:
        renderer.tokenizer = make_tokenizer(
            tmp_path, "{{ tools[0].name }}" + tokenizer.chat_template, special_tokens=MARKS
        )
    with pytest.raises(BadRow, match=re.escape(reason)):
        renderer.render(row, find=MediaFolder(media.parent, media.parent.resolve()).find)


def test_mark_missing_in_the_tokenizer_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.modalities\.image: .*'<image-pad>'"):
        Renderer(make_tokenizer(tmp_path), True, MODALITIES)


# Sources


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def opened(path: Path, media_outside: bool = False, **options: Any) -> RowSource:
    return open_source(SourceSettings(path=str(path), **options), media_outside, MODALITIES)


def rendered_rows(renderer: Renderer, source: RowSource) -> list[RenderedRow]:
    return [renderer.render(source.read(i), (0, 0, i), lambda n, i=i: source.find(i, n)) for i in range(len(source))]


def test_media_paths_are_relative_to_data_file_or_media_dir(folder: Path, renderer: Renderer) -> None:
    data = folder / "data"
    nested = write_jsonl(data / "b" / "rows.jsonl", [chat("<image>", images=["own.toy"])])
    shared = write_jsonl(data / "b" / "up.jsonl", [chat("<image>", images=["../shared.toy"])])
    (data / "b" / "own.toy").write_bytes(toy(4))
    (data / "shared.toy").write_bytes(toy(5))
    # a folder is one dataset, so its files may share media; a file is one by itself
    assert [r.items[0].size.num_placeholders for r in rendered_rows(renderer, opened(data))] == [4, 5]
    assert [r.items[0].size.num_placeholders for r in rendered_rows(renderer, opened(nested))] == [4]
    with pytest.raises(BadRow, match=r"shared\.toy is outside"):
        rendered_rows(renderer, opened(shared))
    assert [r.items[0].size.num_placeholders for r in rendered_rows(renderer, opened(shared, media_outside=True))] == [
        5
    ]
    elsewhere = write_jsonl(data / "rows.jsonl", [chat("<image>", images=["2.toy"])])
    source = opened(elsewhere, media_dir=str(folder / "media"))
    assert [r.items[0].media.value for r in rendered_rows(renderer, source)] == [folder / "media" / "2.toy"]
    with pytest.raises(UserError, match=r"media_dir: nowhere"):
        opened(elsewhere, media_dir="nowhere")


def test_bytes_in_parquet_and_datasets_stay_encoded(
    folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(tokenizer, True, MODALITIES, ignore=["tools"])  # which the template does not write
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    stored = [{"bytes": toy(2), "path": "gone.toy"}, {"bytes": None, "path": str(folder / "media" / "3.toy")}]
    row = chat("<image><image><audio>", images=stored, audio=stored[0])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "rows.parquet")
    # typed as `datasets` does; a toy is no picture, so reading it would fail if it were decoded
    media = {"images": datasets.List(datasets.Image()), "audio": datasets.Audio()}
    plain = datasets.Dataset.from_parquet(str(folder / "rows.parquet"))
    typed = plain.cast(datasets.Features(plain.features | media))
    tools = [{"name": "clock"}, {"zone": 3}]
    column = datasets.Dataset.from_list([{"tools": tools}], on_mixed_types="use_json")
    datasets.concatenate_datasets([typed, column], axis=1).save_to_disk(folder / "saved")
    assert opened(folder / "saved").read(0)["tools"] == tools
    for source in (opened(folder / "rows.parquet"), opened(folder / "saved")):
        (rendered,) = rendered_rows(renderer, source)
        assert [item.size.num_placeholders for item in rendered.items] == [2, 3, 2]
        assert [item.media.open().read() for item in rendered.items] == [toy(2), toy(3), toy(2)]


def test_tar_members_form_rows(tmp_path: Path, renderer: Renderer) -> None:
    by_kind = chat([part("image", "jpg"), part("audio", "2.wav")])
    by_name = chat("<image><audio>", images=["b.c/001.jpg"], audios=["001.2.wav"])
    members: dict[str, bytes | str] = {
        "b.c/000.jpg": toy(2), "b.c/000.json": json.dumps(by_kind), "b.c/000.2.WAV": toy(1),
        "b.c/001.json": json.dumps(by_name), "b.c/001.jpg": toy(2), "b.c/001.2.wav": toy(1),
    }  # fmt: skip
    write_tar(tmp_path / "00.tar", members)
    caption: dict[str, bytes | str] = {
        "x.txt": "a caption", "x.jpg": toy(3), "x.json": '{"url": "u", "caption": "a caption"}', "x.cls": "7",
        "x.clip2.npy": toy(1), "./y.txt": "words", "README": "about", ".z.txt": "hidden",
    }  # fmt: skip
    write_tar(tmp_path / "01.tar", caption)
    write_jsonl(tmp_path / "01_stats.json", [{"count": 2}])  # as tools that write shards leave beside them
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"caption": "a"}]), tmp_path / "01.parquet")
    source = opened(tmp_path)
    assert [source.where(i).removeprefix(f"{tmp_path}/") for i in range(len(source))] == [
        "00.tar sample b.c/000",
        "00.tar sample b.c/001",
        "01.tar sample x",
        "01.tar sample y",
    ]
    with pytest.raises(BadRow, match=r"`\.cls` is not used"):
        rendered_rows(renderer, source)
    renderer = Renderer(renderer.tokenizer, True, MODALITIES, ignore=[".cls"])
    first, second, third, fourth = rendered_rows(renderer, source)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert [item.media.value for item in first.items] == [item.media.value for item in second.items] == [toy(2), toy(1)]
    assert shown(renderer, third) == (
        "[[<image:]](4 image)[[:image><clip:]]<0.5 s>(2 clip)[[:clip>a caption<|endoftext|>]]"
    )
    assert shown(renderer, fourth) == "[[words<|endoftext|>]]"


def test_unused_tar_members_make_the_row_bad(tmp_path: Path, renderer: Renderer) -> None:
    members: dict[str, bytes | str] = {
        "0.json": json.dumps(chat("q")), "0.jpg": toy(1),
        "1.json": json.dumps(chat("q")), "1.txt": "a caption",
        "2.json": json.dumps({"caption": "another", "weight": 2}), "2.txt": "a caption",
    }  # fmt: skip
    source = opened(write_tar(tmp_path / "more.tar", members))
    for row, field in enumerate(("`.jpg`", "`.txt`", "`caption`")):
        with pytest.raises(BadRow, match=f"{field} (is|are) not used"):
            renderer.render(source.read(row), (0, 0, row), lambda name, row=row: source.find(row, name))


def test_unusable_tar_files_and_members_raise(tmp_path: Path, renderer: Renderer) -> None:
    bad: dict[str, bytes | str] = {
        "0.json": json.dumps(chat("<image>", images=["png"])),
        "1.json": "[1]", "2.txt": b"\xff", "3.jpg": toy(1), "3.cls": "7",
        "4.txt": "a", "4.strange": b"", "5.txt": "a", "5.mp4": b"x", "6.json": "{", "7.txt": "a", "7.wav": b"TOX",
    }  # fmt: skip
    source = opened(write_tar(tmp_path / "bad.tar", bad))
    reasons = [
        "no member 'png'",
        "JSON object",
        ".txt is not UTF-8",
        "the row has 'jpg', 'cls'",
        ".strange has an unknown type",
        "part 0 of `text` has the unknown type 'video'; known: text, image",
        "not valid JSON",
        "audio given as bytes: this is no toy",
    ]
    for row, reason in enumerate(reasons):
        with pytest.raises(BadRow, match=re.escape(reason)):
            renderer.render(source.read(row), find=lambda name, row=row: source.find(row, name))
    content = (tmp_path / "bad.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: 512 + 100])
    with pytest.raises(UserError, match=r"cut\.tar: cannot be read as an uncompressed tar file"):
        opened(tmp_path / "cut.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match=r"packed\.tar: cannot be read as an uncompressed tar file"):
        opened(tmp_path / "packed.tar")
    (tmp_path / "mixed").mkdir()
    write_tar(tmp_path / "mixed" / "0.tar", {"a.txt": "x"})
    write_jsonl(tmp_path / "mixed" / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match=r"mixed: .*\(rows\.jsonl\)"):
        opened(tmp_path / "mixed")


# Lanes


def lane_of(renderer: Renderer, path: Path, lane: int = 0, **options: Any) -> Lane:
    options = {"pack_tokens": 48, "lanes": 2, "look_ahead": 4} | options
    data = DataSection(sources=[SourceSettings(path=str(path))], **options)
    return Lane(reader_of(data, [opened(path)], renderer, 5), lane)


def identities(lane: Lane, packs: int) -> list[Any]:
    taken = [pack for _ in range(packs) if (pack := lane.next_pack()) is not None]
    return [[(str(s.id), s.input_ids.tolist(), s.is_target.tolist(), described(s.items)) for s in p] for p in taken]


@pytest.mark.parametrize("done", [0, 3, 11])
def test_restored_lane_with_media_continues_exactly(folder: Path, renderer: Renderer, done: int) -> None:
    rows = [chat("<image>" * (i % 3), "<tone>" * (i % 2), images=["media/2.toy"] * (i % 3)) for i in range(11)]
    rows = [{**row, "tones": [[1] * (i % 4 + 1)] * (i % 2)} for i, row in enumerate(rows)]
    path = write_jsonl(folder / "rows.jsonl", rows)
    original = lane_of(renderer, path)
    resumed = lane_of(renderer, path)
    before = identities(original, done)
    resumed.restore(json.loads(json.dumps(original.state())))
    after = identities(original, 12)
    assert identities(resumed, 12) == after
    # the same row, with other random numbers in another epoch
    seeds = {
        (id.split("/")[1], id.split("/")[2], number): item[3]
        for pack in before + after
        for id, _, _, items in pack
        for number, item in enumerate(items)
    }
    assert len({epoch for epoch, _, _ in seeds}) > 1
    assert len(set(seeds.values())) == len(seeds)


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_row_with_item_larger_than_a_pack_is_skipped_or_raises(folder: Path, renderer: Renderer, overlong: str) -> None:
    long = [chat("<image>", images=[[1] * 50]), chat("<image>", images=["media/missing.toy"]), chat("short", "yes")]
    path = write_jsonl(folder / "rows.jsonl", long)
    with pytest.raises(
        UserError,
        match=rf"{re.escape(str(path))}:1: \d+ tokens are more than data\.pack_tokens \(48\).*largest item, image "
        r"given as list, has 50 tokens\. Set `data\.on_bad_row: skip`",
    ):
        lane_of(renderer, path, lanes=1, shuffle=False, overlong=overlong).next_pack()
    lane = lane_of(renderer, path, lanes=1, shuffle=False, overlong=overlong, look_ahead=1, on_bad_row="skip")
    assert lane.next_pack() is not None
    assert [reason.partition(": ")[0] for reason in lane.bad_rows] == [f"{path}:1", f"{path}:2"]
    assert f"{folder}/media/missing.toy does not exist" in lane.bad_rows[1]
    assert (lane.counters.skipped_rows, lane.counters.dropped_overlong, lane.counters.split_overlong) == (2, 0, 0)
