"""`data.thinking`, `data.thinking_tags`, `data.template_options` and `data.chat_template`, from config files."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_styles import LAST_REASONS, OPEN_THOUGHT, PLAIN, UNFINISHED
from fixtures import CHATML, make_tokenizer
from tiny import write_config, write_rows
from transformers import AutoTokenizer

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.row import BadRow
from omnizoo.models.chat_tokenizer import load_chat_tokenizer

SPECIALS = ("<think>", "</think>", "<|begin_assistant|>", "<|end|>")
THOUGHTS = ("two and two", "three threes")
FIELD_ROW = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four", "reasoning_content": THOUGHTS[0]},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "six", "reasoning_content": THOUGHTS[1]},
]
TAG_ROW = [
    {"role": message["role"], "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"}
    if "reasoning_content" in message
    else message
    for message in FIELD_ROW
]
TAGS = ["<think>\n", "\n</think>\n\n"]


def config_with(folder: Path, template: str | None, messages: list[dict[str, Any]], **data: Any) -> Path:
    rows = write_rows(folder / "rows.jsonl", [{"messages": messages}] * 8)
    sources = {"sources": [{"path": str(rows)}]}
    path = write_config(folder, data=sources | data, train={"steps": 2, "packs_per_step": 1})
    shutil.rmtree(folder / "tokenizer")
    make_tokenizer(folder / "tokenizer", template, special_tokens=SPECIALS)
    return path


def learned(path: Path) -> list[list[str]]:
    """The texts that are targets, of every sample of the first row."""
    config = load_config(path, [])
    reader = build_reader(config, load_chat_tokenizer(config))
    samples = []
    for sample in reader.renderer.render_samples(reader.sources[0].read(0)):
        runs = np.split(np.arange(len(sample)), np.flatnonzero(np.diff(sample.is_target)) + 1)
        ids = [sample.input_ids[run] for run in runs if sample.is_target[run[0]]]
        samples.append([reader.renderer.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in ids])
    return samples


def thought(number: int, answer: str) -> str:
    return f"<think>\n{THOUGHTS[number]}\n</think>\n\n{answer}<|im_end|>"


PART_ROW = [
    message
    | {
        "reasoning_content": None,
        "content": [
            {"type": "reasoning", "value": message["reasoning_content"]},
            {"type": "text", "value": message["content"]},
        ],
    }
    if "reasoning_content" in message
    else message
    for message in FIELD_ROW
]


@pytest.mark.parametrize("messages", [FIELD_ROW, TAG_ROW, PART_ROW])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("template", [[thought(1, "six")], [thought(0, "four")]]),
        ("keep", [[thought(0, "four"), thought(1, "six")]]),
        ("drop", [["four<|im_end|>", "<think>\n\n</think>\n\nsix<|im_end|>"]]),
    ],
)
def test_thinking_modes_set_reasoning_of_earlier_turns(
    tmp_path: Path, messages: list[dict[str, Any]], mode: str, expected: list[list[str]]
) -> None:
    assert learned(config_with(tmp_path, LAST_REASONS, messages, thinking=mode)) == expected


def test_separate_sample_of_a_turn_has_the_prompt_of_inference(tmp_path: Path) -> None:
    """The sample of an earlier turn ends with it, and its prompt is what the template writes at inference."""
    path = config_with(tmp_path, OPEN_THOUGHT, FIELD_ROW)
    config = load_config(path, [])
    reader = build_reader(config, load_chat_tokenizer(config))
    last, first = reader.renderer.render_samples({"messages": FIELD_ROW})
    for sample, stop in ((last, 3), (first, 1)):
        prompt = reader.renderer.prompt(FIELD_ROW[:stop]).input_ids
        assert sample.input_ids[: len(prompt)].tolist() == prompt.tolist()
        assert np.flatnonzero(sample.is_target)[0] == len(prompt)
    assert THOUGHTS[0] not in reader.renderer.tokenizer.decode(last.input_ids)


def test_messages_that_are_not_trained_lose_reasoning_as_at_inference(tmp_path: Path) -> None:
    messages = [FIELD_ROW[0], FIELD_ROW[1] | {"loss": False}, *FIELD_ROW[2:]]
    assert learned(config_with(tmp_path, LAST_REASONS, messages)) == [[thought(1, "six")]]


def test_refuse_rejects_rows_whose_reasoning_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="reasoning of message 1"):
        learned(config_with(tmp_path, LAST_REASONS, FIELD_ROW, thinking="refuse"))
    assert learned(config_with(tmp_path, LAST_REASONS, FIELD_ROW[:2], thinking="refuse")) == [[thought(0, "four")]]


def test_keep_includes_the_end_of_earlier_turns(tmp_path: Path) -> None:
    (texts,) = learned(config_with(tmp_path, UNFINISHED, FIELD_ROW, thinking="keep"))
    assert [text.replace("\n", " ") for text in texts] == [
        "two and two [BEGIN FINAL RESPONSE] four<|end|>",
        "three threes [BEGIN FINAL RESPONSE] six",
    ]


def test_thinking_tags_write_reasoning_into_content(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match=r"Set data\.thinking_tags"):
        learned(config_with(tmp_path, PLAIN, FIELD_ROW))
    assert learned(config_with(tmp_path, PLAIN, FIELD_ROW, thinking_tags=TAGS)) == [
        [thought(0, "four"), thought(1, "six")]
    ]
    parts = [FIELD_ROW[0], FIELD_ROW[1] | {"content": [{"type": "text", "text": "four"}]}]
    assert learned(config_with(tmp_path, PLAIN, parts, thinking_tags=TAGS)) == [[thought(0, "four")]]


def test_all_samples_of_rows_are_trained_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_with(tmp_path, LAST_REASONS, FIELD_ROW)
    assert main(["train", str(path), "--checkpoint.every", "1", "--checkpoint.keep", "9"]) == 0
    state = json.loads((tmp_path / "run/checkpoints/step_00000001/state.json").read_text())
    parts = {sample[3] for lane in state["loader"]["lanes"].values() for sample in lane["window"]}
    assert parts == {0, 1}
    assert main(["train", str(path), "--train.steps", "3"]) == 0
    assert "step 3" in " ".join(capsys.readouterr().out.split())
    assert main(["train", str(path), "--train.steps", "4", "--data.thinking", "drop"]) == 2
    assert "data.thinking is 'drop'" in capsys.readouterr().err


def test_template_options_reach_training_generation_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_with(tmp_path, LAST_REASONS, TAG_ROW[:2], template_options={"enable_thinking": False})
    config = load_config(path, [])
    renderer = build_reader(config, load_chat_tokenizer(config)).renderer
    question = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    closed = "<think>\n\n</think>\n\n"
    assert renderer.tokenizer.decode(renderer.prompt("2+2?").input_ids) == question + closed

    assert main(["train", str(path)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "2+2?"}]
    arguments = {"tokenize": False, "add_generation_prompt": True}
    assert exported.apply_chat_template(messages, **arguments) == question + closed
    assert exported.apply_chat_template(messages, enable_thinking=True, **arguments) == question
    capsys.readouterr()
    assert main(["train", str(path), "--train.steps", "4", "--data.template_options", "{}"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_chat_template_of_base_model_is_used_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_with(tmp_path, None, [*FIELD_ROW[:1], {"role": "assistant", "content": "four"}])
    assert main(["train", str(path)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    assert main(["train", str(path), "--data.chat_template", str(file)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/chat_template.jinja").read_text() == CHATML
    assert main(["generate", str(tmp_path / "out"), "--prompt", "2+2?", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"chat_template": "missing.jinja"}, r"^data\.chat_template: missing\.jinja cannot be read"),
        ({"template_options": {"messages": 1}}, r"data\.template_options: messages cannot be an option"),
        ({"template_options": {"a b": 1}}, r"data\.template_options: 'a b'"),
        ({"thinking": "always"}, r"data\.thinking"),
        ({"thinking_tags": ["<think>"]}, r"data\.thinking_tags"),
    ],
)
def test_mistakes_in_template_keys_are_one_line(tmp_path: Path, data: dict[str, Any], key: str) -> None:
    path = config_with(tmp_path, CHATML, FIELD_ROW, **data)
    with pytest.raises(UserError, match=key):
        load_chat_tokenizer(load_config(path, []))


def test_default_is_not_stored_so_that_earlier_runs_resume(tmp_path: Path) -> None:
    path = config_with(tmp_path, CHATML, [*FIELD_ROW[:1], {"role": "assistant", "content": "four"}])
    assert main(["train", str(path)]) == 0
    saved = json.loads((tmp_path / "run/checkpoints/step_00000002/state.json").read_text())
    assert not [key for key in saved["loader"]["fingerprint"] if "thinking" in key]
    assert main(["train", str(path), "--train.steps", "3"]) == 0
