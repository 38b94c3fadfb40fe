"""Pre-tokenized rows: which tokens are targets, where documents end, and which rows are bad."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_tokenizer
from toy_media import MARKS, MODALITIES

from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.data.packing.overlong import fit_to_pack
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.data.sources.python_rows import PythonRows

IDS = [30, 31, 32, 33, 34, 35]
PACKED = [
    {"position_ids": [0, 1, 0, 1, 2, 0]},
    {"cu_seqlens": [0, 2, 5, 6]},
    {"seq_lengths": [2, 3, 1]},
    {"attention_mask": [1, 1, 2, 2, 2, 3]},
    {"position_ids": [0, 1, 0, 1, 2, 0], "attention_mask": [1] * 6, "seq_lengths": [2, 3, 1]},
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), special_tokens=MARKS)
    return Renderer(tokenizer, True, MODALITIES)


def settings(**keys: Any) -> DataSection:
    return DataSection(sources=[SourceSettings(path="rows.jsonl")], **keys)


def samples_of(renderer: Renderer, row: dict[str, Any], **keys: Any) -> list[list[int]]:
    split = fit_to_pack(0, 0, 0, renderer.render(row), settings(**keys))
    assert len({sample.id for sample in split.samples}) == len(split.samples)
    return [sample.input_ids.tolist() for sample in split.samples]


@pytest.mark.parametrize("fields", PACKED, ids=lambda fields: "+".join(fields))
def test_each_packed_document_is_a_sample_and_its_first_token_is_no_target(
    renderer: Renderer, fields: dict[str, Any]
) -> None:
    rendered = renderer.render({"input_ids": IDS, **fields})
    split = fit_to_pack(0, 0, 0, rendered, settings())
    assert [sample.input_ids.tolist() for sample in split.samples] == [[30, 31], [32, 33, 34]]
    assert split.few_targets == 1  # the last document has one token, which nothing predicts
    assert [sample.num_positions for sample in split.samples] == [2, 3]


def test_packed_documents_keep_their_labels_and_lengths(renderer: Renderer) -> None:
    row = {"input_ids": IDS, "cu_seqlens": [0, 4, 6], "labels": [-100, 31, 32, 33, -100, 35]}
    first, second = fit_to_pack(0, 0, 0, renderer.render(row), settings()).samples
    assert [first.columns["labels"].tolist(), second.columns["labels"].tolist()] == [[-100, 31, 32, 33], [-100, 35]]
    # Only the first document is longer than a pack of 2 or 3 tokens.
    assert samples_of(renderer, row, pack_tokens=3) == [[30, 31, 32], [34, 35]]  # 33 alone has no target
    assert samples_of(renderer, row, pack_tokens=3, overlong="drop") == [[34, 35]]
    row["labels"][1] = -100
    assert samples_of(renderer, row, pack_tokens=2) == [[34, 35]]  # a document with a prompt is truncated
    assert samples_of(renderer, row, pack_tokens=2, overlong="split") == [[32, 33], [34, 35]]


def test_padding_is_removed_from_all_columns(renderer: Renderer) -> None:
    row = {
        "input_ids": [1, 1, *IDS[:4], 1],
        "attention_mask": np.array([0, 0, 1, 1, 1, 1, 0]),
        "position_ids": [1, 1, 0, 1, 0, 1, 0],
        "cu_seqlens": [0, 4, 7],
        "labels": torch.tensor([-100, -100, 30, 31, -100, 33, -100]),
    }
    assert samples_of(renderer, row) == [[30, 31], [32, 33]]
    assert renderer.render(row).columns["labels"].tolist() == [30, 31, -100, 33]


def test_row_weight_scales_its_targets(renderer: Renderer) -> None:
    columns = renderer.render({"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 1], "weight": 0.5}).columns
    assert columns["loss_weights"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5]
    assert "loss_weights" not in renderer.render({"input_ids": IDS}).columns


@pytest.mark.parametrize("ids", [np.array(IDS), np.array(IDS, np.uint16), torch.tensor(IDS), tuple(IDS)])
def test_rows_from_python_may_have_arrays(renderer: Renderer, ids: Any) -> None:
    source = PythonRows([{"input_ids": ids}], "rows", MediaFolder(Path(), None))
    assert renderer.render(source.read(0)).input_ids.tolist() == IDS


def test_prompt_ends_before_the_last_targets(renderer: Renderer) -> None:
    ids = renderer.tokenizer("What is the capital of France?")["input_ids"]
    labels = [*([-100] * (len(ids) - 2)), ids[-2], -100]
    question = renderer.question({"input_ids": ids, "labels": labels})
    assert question.prompt.input_ids.tolist() == ids[:-2]
    assert (question.shown, question.expected) == (
        renderer.tokenizer.decode(ids[:-2]),
        renderer.tokenizer.decode(ids[-2]),
    )
    assert len(renderer.question({"input_ids": ids}).prompt) == len(ids) // 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": []}, "`input_ids` is empty"),
        ({"input_ids": [IDS]}, r"`input_ids` has the shape \[1, 6\]"),
        ({"input_ids": [[1], [2, 3]]}, "`input_ids` cannot be read"),
        ({"input_ids": [30, 2.5]}, "`input_ids` contains 2.5"),
        ({"input_ids": [30, True, 31]}, "`input_ids` contains True"),
        ({"input_ids": [30, None]}, "`input_ids` contains None"),
        ({"input_ids": [30, 2**70]}, "`input_ids` contains 11805"),
        ({"input_ids": [30, 31, -1]}, "`input_ids` is -1 at entry 2"),
        ({"input_ids": [30, 99999]}, "`input_ids` is 99999 at entry 1"),
        ({"labels": [-100] * 5}, "`labels` has 5 entries, but `input_ids` has 6"),
        ({"labels": []}, "`labels` has 0 entries"),
        ({"loss_mask": []}, "`loss_mask` has 0 entries"),
        ({"labels": [-100] * 6}, "no targets"),
        ({"labels": [30, *[-100] * 5]}, "no targets"),
        ({"labels": [*IDS[1:], -100]}, "`labels` is shifted by one"),
        ({"labels": [-100, 31, 99, 33, 34, 35]}, "`labels` is 99 at entry 2, where `input_ids` is 32"),
        ({"labels": [-1, *IDS[1:]]}, "`labels` is -1 at entry 0"),
        ({"loss_mask": [0, 0.5, 1, 1, 1, 1]}, "`loss_mask` contains a value other than 0 and 1"),
        ({"loss_mask": [0, 2, 1, 1, 1, 1]}, "`loss_mask` contains 2"),
        ({"attention_mask": [1, 1, 0, 1, 1, 1]}, "`attention_mask` is 0 at entry 2"),
        ({"attention_mask": [0] * 6}, "`attention_mask` is 0 everywhere"),
        ({"attention_mask": [1, 1, 2, 1, 1, 1]}, "`attention_mask` contains document numbers"),
        ({"attention_mask": [[1] * 6]}, "`attention_mask` has the shape"),
        ({"attention_mask": [1] * 5 + [0], "labels": IDS}, "`labels` has a target at entry 5"),
        ({"attention_mask": [1] * 5 + [0], "loss_mask": [1] * 6}, "`loss_mask` has a target at entry 5"),
        ({"position_ids": [1, 2, 3, 4, 5, 6]}, "`position_ids` is 1 at token 0"),
        ({"position_ids": [0, 1, 3, 4, 5, 6]}, "`position_ids` is 3 at token 2"),
        ({"position_ids": [[0, 1, 2, 3, 4, 5]] * 3}, "`position_ids` has the shape"),
        ({"cu_seqlens": [0, 3]}, "`cu_seqlens` is"),
        ({"cu_seqlens": [0, 3, 3, 6]}, "`cu_seqlens` is"),
        ({"cu_seqlens": []}, "`cu_seqlens` is"),
        ({"seq_lengths": [3, 4]}, "`seq_lengths` is"),
        ({"seq_lengths": [7, -1]}, "`seq_lengths` is"),
        ({"position_ids": [0, 1, 2, 3, 4, 5], "cu_seqlens": [0, 3, 6]}, "`position_ids` and `cu_seqlens`"),
        ({"input_ids": [30, 1, 1]}, "ends with padding"),
        ({"weight": 0}, "`weight` is 0"),
        ({"image": "a.png"}, "cannot have media"),
    ],
)
def test_bad_rows_have_a_reason(renderer: Renderer, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason) as caught:
        renderer.render({"input_ids": IDS, **fields})
    assert "\n" not in str(caught.value)


def test_placeholder_tokens_make_the_row_bad(renderer: Renderer) -> None:
    with pytest.raises(BadRow, match="a placeholder for media"):
        renderer.render({"input_ids": [30, renderer.placeholders[0], 31]})
