"""The text that the model learns with each style of chat template, for tool calls, their results and reasoning.

chat_styles.txt has the learned texts of every sample, or the reason of a refusal. They were checked by reading.
`PYTHONPATH=tests/support python tests/data/rendering/test_chat_styles.py` prints the table.
"""

import json
import re
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_styles import STYLES
from fixtures import make_tokenizer
from transformers import PreTrainedTokenizerFast

from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow

MARKERS = tuple(sorted(set(re.findall(r"<[|/\w]+>|\[/?[A-Z_]+\]", "".join(STYLES.values())))))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, *cities: str, thought: str | None = None) -> dict[str, Any]:
    calls = []
    for city in cities:
        function = {"name": "weather", "arguments": {"city": city, "days": 2}}
        calls.append({"id": f"call{city}0", "type": "function", "function": function})
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls or None}


def result(content: str, city: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call{city}0", "content": content}


ANSWER = assistant("It is sunny.")
CONVERSATIONS = {
    "text": [user("hi"), assistant("hello"), user("and?"), assistant("so on")],
    "call": [user("how?"), assistant("", "Oslo"), result("sun", "Oslo"), ANSWER],
    "two questions": [
        *(user("how?"), assistant("", "Oslo"), result("sun", "Oslo"), ANSWER),
        *(user("and?"), assistant("", "Rome"), result("rain", "Rome"), assistant("Rainy.")),
    ],
    "last call": [user("how?"), assistant("", "Oslo")],
    "two calls": [
        *(user("how?"), assistant("", "Oslo", "Rome")),
        *(result("sun", "Oslo"), result("rain", "Rome"), assistant("Mixed.")),
    ],
    "text and call": [user("how?"), assistant("I look.", "Oslo"), result("sun", "Oslo"), ANSWER],
    "thought": [
        user("2+2?"),
        assistant("four", thought="two and two"),
        user("3+3?"),
        assistant("six", thought="threes"),
    ],
    "thought in content": [
        *(user("2+2?"), assistant("<think>\ntwo and two\n</think>\n\nfour")),
        *(user("3+3?"), assistant("<think>\nthrees\n</think>\n\nsix")),
    ],
    "thought and call": [
        *(user("how?"), assistant("", "Oslo", thought="must call"), result("sun", "Oslo")),
        assistant("It is sunny.", thought="now say"),
    ],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}]

TABLE = Path(__file__).with_name("chat_styles.txt")
EXPECTED = [tuple(cell.strip() for cell in line.split(" | ")) for line in TABLE.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), special_tokens=MARKERS, bos="<s>")


def learned(tokenizer: PreTrainedTokenizerFast, style: str, conversation: str) -> list[list[str]]:
    """The texts that are targets, of every sample of a conversation."""
    tokenizer.chat_template = STYLES[style]
    messages = CONVERSATIONS[conversation]
    tools = TOOLS if any(message.get("tool_calls") for message in messages) else None
    samples = []
    for sample in Renderer(tokenizer, append_eos=True).render_samples({"messages": messages, "tools": tools}):
        runs = np.split(np.arange(len(sample)), np.flatnonzero(np.diff(sample.is_target)) + 1)
        targets = [sample.input_ids[run] for run in runs if sample.is_target[run[0]]]
        samples.append([tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in targets])
    return samples


def table_cell(tokenizer: PreTrainedTokenizerFast, style: str, conversation: str) -> str:
    """The learned texts of a conversation as JSON, or why it is refused."""
    try:
        return json.dumps(learned(tokenizer, style, conversation))
    except BadRow as reason:
        return f"refused: {reason}"


@pytest.mark.parametrize(("style", "conversation", "expected"), EXPECTED)
def test_learned_text_of_style_matches_table(
    tokenizer: PreTrainedTokenizerFast, style: str, conversation: str, expected: str
) -> None:
    found = table_cell(tokenizer, style, conversation)
    if expected.startswith("refused: "):
        assert found.startswith("refused: ")
        assert expected.removeprefix("refused: ") in found
    else:
        assert found == expected


def test_table_has_all_styles_and_conversations() -> None:
    assert {(style, conversation) for style, conversation, _ in EXPECTED} == set(product(STYLES, CONVERSATIONS))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fast = make_tokenizer(Path(folder), special_tokens=MARKERS, bos="<s>")
        for style, conversation in product(STYLES, CONVERSATIONS):
            print(f"{style:15} | {conversation:18} | {table_cell(fast, style, conversation)}")
