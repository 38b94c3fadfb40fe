"""Rows longer than a pack: what is kept of them is learnt from, media stay whole, answers keep their prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from number_rows import reader_of
from toy_media import MARKS, MODALITIES, chat, shown

from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.data.loading.lanes import Lane
from omnizoo.data.packing.overlong import fit_to_pack, max_response_length, num_targets, truncate
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow, Segment
from omnizoo.data.sources.open import open_source
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.item import MediaItem, MediaSize, Port
from omnizoo.modalities.media import Media


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), special_tokens=MARKS), True, MODALITIES)


@pytest.fixture(scope="module")
def pairs(renderer: Renderer) -> Renderer:
    return Renderer(renderer.tokenizer, True, MODALITIES, preferences="required")


def data(**options: Any) -> DataSection:
    return DataSection(sources=[SourceSettings(path="x")], **options)


def test_long_chat_is_truncated_and_long_text_is_split(renderer: Renderer) -> None:
    chats = renderer.render(chat("q", "so many words " * 9))
    found = fit_to_pack(0, 0, 0, chats, data(pack_tokens=12))
    assert found.counters == ("truncated_overlong",)
    (sample,) = found.samples
    assert sample.input_ids.tolist() == chats.input_ids[:12].tolist()
    assert sample.is_target.tolist() == chats.is_target[:12].tolist()
    prose = renderer.render({"text": "so many words " * 9})
    found = fit_to_pack(0, 0, 0, prose, data(pack_tokens=12))
    assert found.counters == ("split_overlong",)
    assert np.concatenate([sample.input_ids for sample in found.samples]).tolist() == prose.input_ids.tolist()


@pytest.mark.parametrize("prompt", [{"messages": "chat"}, {"prompt": "so many words " * 9, "completion": "yes"}])
def test_row_with_prompt_longer_than_a_pack_is_dropped(renderer: Renderer, prompt: dict[str, Any]) -> None:
    row = chat("so many words " * 9, "yes") if "messages" in prompt else prompt
    found = fit_to_pack(0, 0, 0, renderer.render(row), data(pack_tokens=12))
    assert (found.samples, found.counters) == ([], ("dropped_overlong",))
    assert "no targets" in found.reason


@pytest.mark.parametrize("row", [chat("q", "so many words " * 9), {"text": "so many words " * 9}])
def test_overlong_setting_overrides_the_default(renderer: Renderer, row: dict[str, Any]) -> None:
    rendered = renderer.render(row)
    assert fit_to_pack(0, 0, 0, rendered, data(pack_tokens=12, overlong="drop")).counters == ("dropped_overlong",)
    (sample,) = fit_to_pack(0, 0, 0, rendered, data(pack_tokens=12, overlong="truncate")).samples
    assert sample.input_ids.tolist() == rendered.input_ids[:12].tolist()
    assert fit_to_pack(0, 0, 0, rendered, data(pack_tokens=12, overlong="split")).counters == ("split_overlong",)


def test_each_piece_of_a_split_chat_has_targets(renderer: Renderer) -> None:
    rendered = renderer.render(chat("so many words " * 12, "and so on " * 6))
    found = fit_to_pack(0, 0, 0, rendered, data(pack_tokens=8, overlong="split"))
    assert found.few_targets > 0
    assert all(num_targets(sample) > 0 for sample in found.samples)
    pieces = -(-len(rendered.input_ids) // 8)  # of each, the first token has nothing before it
    assert sum(map(num_targets, found.samples)) >= rendered.is_target.sum() - pieces


def test_truncation_keeps_or_removes_complete_media_items(renderer: Renderer) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "<audio>a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "<audio>c"},
            {"role": "assistant", "content": "d"},
        ],
        "audios": [[1, 2, 3], [1, 2, 3, 4]],
    }
    whole = renderer.render(row)
    seen = set()
    for most in range(2, len(whole.input_ids)):
        if most < 6:  # the second item and its marks
            with pytest.raises(BadRow, match=r"data\.pack_tokens"):
                truncate(whole, most)
            continue
        if (shorter := truncate(whole, most)) is None:
            continue
        text = shown(renderer, shorter)
        seen.add(len(shorter.items))
        assert len(shorter.input_ids) <= most
        assert shorter.input_ids.tolist() == whole.input_ids[: len(shorter.input_ids)].tolist()
        assert text.count("<audio:") == text.count(":audio>") == len(shorter.items)
        for item in shorter.items:
            assert sum(count for _, count in item.spans) == item.size.num_placeholders
            for first, count in item.spans:
                pad = renderer.tokenizer.convert_tokens_to_ids("<audio-pad>")
                assert (shorter.input_ids[first : first + count] == pad).all()
    assert seen == {1, 2}


def test_item_larger_than_a_pack_is_a_bad_row(renderer: Renderer) -> None:
    rendered = renderer.render(chat("<audio>", "yes", audios=[[1] * 50]))
    with pytest.raises(BadRow, match=r"largest item, audio given as list, has 50"):
        fit_to_pack(0, 0, 0, rendered, data(pack_tokens=48))
    assert fit_to_pack(0, 0, 0, rendered, data(pack_tokens=48, overlong="drop")).counters == ("dropped_overlong",)


def test_truncated_pair_loses_the_end_of_the_longer_response(pairs: Renderer) -> None:
    row = {"prompt": "so", "chosen": "many words " * 9, "rejected": "no", "audios": None}
    whole = pairs.render(row)
    lengths = [length for _, length in whole.responses]
    found = fit_to_pack(0, 0, 0, whole, data(pack_tokens=sum(lengths) - 10))
    (sample,) = found.samples
    assert found.counters == ("truncated_overlong",)
    assert sample.lengths == [lengths[0] - 10, lengths[1]], "the longest is cut first"
    assert sample.input_ids.tolist() == [*whole.input_ids[: lengths[0] - 10], *whole.input_ids[lengths[0] :]]
    assert [role for role, _ in sample.responses] == ["chosen", "rejected"]


def test_pair_with_equal_truncated_responses_is_dropped(pairs: Renderer) -> None:
    same = "many words " * 9
    whole = pairs.render({"prompt": "so", "chosen": same + "yes", "rejected": same + "no"})
    assert fit_to_pack(0, 0, 0, whole, data(pack_tokens=len(whole.input_ids) - 12)).counters == ("dropped_overlong",)


def test_prompt_media_of_a_truncated_pair_keep_both_spans(pairs: Renderer) -> None:
    prompt = [{"role": "user", "content": "<audio>hear"}]
    row = {"prompt": prompt, "chosen": "many words " * 9, "rejected": "no words " * 7, "audios": [[1, 2, 3]]}
    whole = pairs.render(row)
    (sample,) = fit_to_pack(0, 0, 0, whole, data(pack_tokens=60)).samples
    (item,) = sample.items
    pad = pairs.tokenizer.convert_tokens_to_ids("<audio-pad>")
    assert len(item.spans) == 2
    assert all((sample.input_ids[first : first + count] == pad).all() for first, count in item.spans)
    assert len(sample.input_ids) <= 60


@pytest.mark.parametrize("end", [20, 23, 24, 25])
def test_pair_whose_response_would_lose_an_item_is_dropped(end: int) -> None:
    """An item at 20 to 23 of the second answer, and its end at 24."""
    size = MediaSize(num_placeholders=4, cost=1.0)
    item = MediaItem(Port("image", "encoder"), size, ((10 + 20, 4),), False, Media("image", [1] * 4, {}, 0))
    ids = np.arange(50)
    columns = make_columns(input_ids=ids, labels=np.where(ids % 40 > 3, ids, IGNORE_INDEX))
    row = RenderedRow(columns, (item,), (Segment("chosen", 10), Segment("rejected", 40)))
    shorter = truncate(row, 10 + end)
    assert (shorter is None) == (end < 25)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(5, 200))
@settings(max_examples=200, deadline=None)
def test_response_length_limit_is_the_largest_that_fits(lengths: list[int], most: int) -> None:
    limit = max_response_length(lengths, most)
    if sum(lengths) <= most:
        assert limit == max(lengths)
        return
    assert sum(min(length, limit) for length in lengths) <= most
    assert sum(min(length, limit + 1) for length in lengths) > most


def test_samples_with_few_targets_are_dropped_and_counted(renderer: Renderer) -> None:
    rendered = renderer.render(chat("q", "yes"))
    targets = int(rendered.is_target.sum())
    assert fit_to_pack(0, 0, 0, rendered, data(min_targets=targets)).samples
    found = fit_to_pack(0, 0, 0, rendered, data(min_targets=targets + 1))
    assert (found.samples, found.few_targets) == ([], 1)
    assert f"data.min_targets ({targets + 1})" in found.reason


def test_lane_counts_truncated_split_and_dropped_rows(renderer: Renderer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    long = "so many words " * 9
    texts = [f'{{"query": "{q}", "response": "{a}"}}\n' for q, a in (("q", long), (long, "a"), ("q", "a"))]
    path.write_text("".join(texts) + f'{{"text": "{long}"}}\n')
    settings = DataSection(
        sources=[SourceSettings(path=str(path))], pack_tokens=16, lanes=1, look_ahead=4, min_targets=2
    )
    reader = reader_of(settings, [open_source(settings.sources[0])], renderer, 0, most_positions=15)
    lane = Lane(reader, 0, epochs=1)
    packs = [pack for pack in iter(lane.next_pack, None) if pack]
    counters = lane.counters
    assert (counters.truncated_overlong, counters.dropped_overlong, counters.split_overlong) == (1, 1, 1)
    assert counters.beyond_positions == sum(len(s.input_ids) > 15 for pack in packs for s in pack) > 0
    assert counters.skipped_rows == 0
    assert {sample.row_schema for pack in packs for sample in pack} == {"query_response", "text"}


def test_number_of_positions_follows_position_ids() -> None:
    positions = np.stack([np.arange(8) // 2] * 3)
    rendered = RenderedRow(make_columns(input_ids=np.zeros(8), labels=np.zeros(8), position_ids=positions))
    (sample,) = fit_to_pack(0, 0, 0, rendered, data(pack_tokens=16)).samples
    assert sample.num_positions == 4
