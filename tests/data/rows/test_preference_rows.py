"""Preference rows as TRL, LLaMA-Factory and ms-swift publish them are read as the same prompts and responses."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import make_tokenizer

from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow

Row = dict[str, Any]
ASKS = [{"role": "user", "content": "hi"}]
YES = [{"role": "assistant", "content": "yes"}]
NO = [{"role": "assistant", "content": "no"}]
SHARED = {"from": "human", "value": "hi"}
PAIR = {"prompt": ASKS, "chosen": YES, "rejected": NO}
LABELED = {"prompt": ASKS, "completion": YES, "label": True}


def parts(role: str, text: str, weight: float) -> Row:
    """Return a message of LLaMA-Factory's newer rows."""
    return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}


# Other forms of PAIR
PAIRS: dict[str, Row] = {
    "trl_conversations": {"chosen": [*ASKS, *YES], "rejected": [*ASKS, *NO]},
    "llama_factory_sharegpt": {
        "conversations": [SHARED],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "llama_factory_alpaca": {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"},
    "llama_factory_v1": {
        "chosen_messages": [parts("user", "hi", 0.0), parts("assistant", "yes", 1.0)],
        "rejected_messages": [parts("user", "hi", 0.0), parts("assistant", "no", 1.0)],
    },
    "ms_swift": {"messages": [*ASKS, *YES], "rejected_response": "no"},
    "query_and_response": {"query": "hi", "response": "yes", "rejected_response": "no"},
}
# Other forms of LABELED
LABELS: dict[str, Row] = {
    "llama_factory_messages": {"messages": [*ASKS, *YES], "label": True},
    "llama_factory_sharegpt": {"conversations": [SHARED, {"from": "gpt", "value": "yes"}], "kto_tag": True},
    "llama_factory_alpaca": {"instruction": "hi", "input": "", "output": "yes", "kto_tag": True},
    "query_and_response": {"query": "hi", "response": "yes", "label": True},
}


def rendered(tmp_path: Path, row: Row, is_labeled: bool) -> tuple[list[int], list[str], list[float]]:
    """Return the tokens, roles and loss weights of a preference row."""
    tokenizer = make_tokenizer(tmp_path)
    renderer = Renderer(tokenizer, True, preferences="required", labeled_responses=is_labeled)
    result = renderer.render(row)
    roles = [segment.role for segment in result.responses]
    return result.input_ids.tolist(), roles, result.columns["labels"].tolist()


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_other_tools_equal_those_of_trl(tmp_path: Path, name: str) -> None:
    expected = rendered(tmp_path, PAIR, is_labeled=False)
    assert expected[1] == ["chosen", "rejected"]
    assert rendered(tmp_path, PAIRS[name], is_labeled=False) == expected


@pytest.mark.parametrize("name", LABELS)
def test_labeled_responses_of_other_tools_equal_those_of_trl(tmp_path: Path, name: str) -> None:
    expected = rendered(tmp_path, LABELED, is_labeled=True)
    assert expected[1] == ["desirable"]
    assert rendered(tmp_path, LABELS[name], is_labeled=True) == expected


@pytest.mark.parametrize(
    ("row", "is_labeled", "match"),
    [
        ({"question": "hi", "chosen": "yes", "rejected": "no"}, False, r"data\.sources\.N\.columns: {query: question}"),
        (
            {"instruction": "hi", "chosen_response": "yes", "rejected_response": "no"},
            False,
            r"data\.sources\.N\.columns: {chosen: chosen_response, rejected: rejected_response}",
        ),
        ({"query": "hi", "instruction": "hi", "chosen": "yes", "rejected": "no"}, False, "`query` and `instruction`"),
        ({"query": "hi", "prompt": "hi", "chosen": "yes", "rejected": "no"}, False, "`query` and another prompt"),
        ({"messages": ASKS, "rejected_response": "no"}, False, "`messages` does not end with a response"),
        ({"messages": ASKS, "label": True}, True, "`messages` does not end with a response"),
        ({"query": "hi", "response": "a", "output": "b", "label": True}, True, "`output` and `response`"),
        ({"query": "hi", "response": "a", "label": 1}, True, "`label` is 1"),
        (PAIR | {"chosen": [YES[0] | {"loss_weight": 0.5}]}, False, "weight"),
        (PAIR | {"response": "a"}, False, "`response` is not used"),
    ],
)
def test_ambiguous_preference_rows_are_bad_rows(tmp_path: Path, row: Row, is_labeled: bool, match: str) -> None:
    with pytest.raises(BadRow, match=match):
        rendered(tmp_path, row, is_labeled)
