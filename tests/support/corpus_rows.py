"""Rows as other tools write them: each renders to the expected text, or its error contains the unused field.

Every row is the second line of `rows.jsonl`, which `omnizoo data inspect` reads. A usable row has the expected output:
the rendered text, with targets between ⟦ and ⟧. A bad row is listed in red, and the error contains its line.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from corpus import Case
from fixtures import CHATML, make_tokenizer
from omni import VISION
from PIL import Image
from processes import Result
from tiny import SHAPE, model_config, write_rows

making = Lock()
Row = dict[str, Any]

# The tool calls of Qwen2.5, in short: tools first, calls as JSON, results in a turn of the user's
TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# DeepSeek's way: arguments are text to it
TEXT_ARGUMENTS = """{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant
{%- for call in m.tool_calls %}{{- '\\n' + call['function']['name'] + ' ' + call['function']['arguments'] }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
NO_SYSTEM = """{%- for m in messages %}{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
THINKS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.last %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
NAMES = """{%- for m in messages %}{{- '<|im_start|>' + m.role }}
{%- if m.role == 'user' and m.name %}{{- ' ' + m.name }}{%- endif %}{{- '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
OBSERVES = """{%- for m in messages %}{%- if m.role == 'observation' %}{{- '<|im_start|>observation\\n' + m.content }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "tools": TOOLS,
    "text_arguments": TEXT_ARGUMENTS,
    "no_system": NO_SYSTEM,
    "thinks": THINKS,
    "names": NAMES,
    "observes": OBSERVES,
}

# Models that read more than text, and have no recipe
TEXT_PART = SHAPE | {"max_position_embeddings": 512}
PUBLISHED: dict[str, dict[str, Any]] = {
    "vipllava": {
        "model_type": "vipllava",
        "text_config": {"model_type": "llama", **TEXT_PART},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "vision_feature_layers": [-1],
        "image_token_index": 511,
    },
    "glm_ocr": {
        "model_type": "glm_ocr",
        "text_config": TEXT_PART | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 32,
        },
        "image_token_id": 511,
        "video_token_id": 510,
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": {"model_type": "gemma3_text", **TEXT_PART, "sliding_window": 16},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": 511,
    },
}


@cache
def tokenizers(folder: Path) -> Path:
    """One for each template, in a folder that all cases share."""
    for name, template in TEMPLATES.items():
        make_tokenizer(folder / name, template)
    return folder


def write_yaml(folder: Path, model: dict[str, Any], source: Path, template: str, **data: Any) -> Path:
    with making:
        tokenizer = tokenizers(folder.parent / "tokenizers") / template
    config = {
        "model": {"tokenizer": str(tokenizer), **model},
        "data": {"sources": [{"path": str(source)}], "pack_tokens": 512, "lanes": 2, "look_ahead": 2, **data},
        "train": {"steps": 1, "packs_per_step": 1},
        "log": {"dir": str(folder / "run"), "tensorboard": False},
    }
    path = folder / "rows.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


TEXT_MODEL = {"config": model_config("qwen3")}
SEES = {  # a model with pictures in
    "foundation": {"config": model_config("llama") | {"vocab_size": 544}},
    "modalities": {"image": {"encoder": {"kind": "vision", "config": VISION}}},
}
GOOD: Row = {"messages": [{"role": "user", "content": "so"}, {"role": "assistant", "content": "good"}]}


def inspecting(
    row: Row, template: str, model: dict[str, Any], data: dict[str, Any]
) -> Callable[[Path], Sequence[object]]:
    def prepare(folder: Path) -> Sequence[object]:
        Image.new("RGB", (16, 16), "red").save(folder / "a.png")
        rows = write_rows(folder / "rows.jsonl", [GOOD, row])
        config = write_yaml(folder, model, rows, template, **data)
        return ["data", "inspect", config, "--samples", 2, "--data.shuffle", "false"]

    return prepare


def flat(text: str) -> str:
    """Without line breaks, of which some are the console's."""
    return text.replace("↵", "").replace("\n", "")


def unseen(texts: Sequence[str], stdout: str) -> list[str]:
    """Those that are not shown; one without brackets may be anywhere."""
    bare = stdout.replace("⟦", "").replace("⟧", "")
    return [text for text in texts if flat(text) not in flat(stdout if "⟦" in text or "⟧" in text else bare)]


def refused(
    name: str, row: Row, *says: str, template: str = "chatml", model: dict[str, Any] = TEXT_MODEL, **data: Any
) -> Case:
    def is_red(folder: Path, result: Result) -> str | None:
        listed = f"bad row: {folder / 'rows.jsonl'}:2: "
        return None if flat(listed) in flat(result.stdout) else "not among the bad rows that are listed"

    return Case(f"refused: {name}", inspecting(row, template, model, data), ("rows.jsonl:2", *says), is_red)


def trained(
    name: str, row: Row, *shown: str, template: str = "chatml", model: dict[str, Any] = TEXT_MODEL, **data: Any
) -> Case:
    def is_shown(folder: Path, result: Result) -> str | None:
        missing = unseen(shown, result.stdout)
        return f"does not show {missing}; shows {result.stdout[:1500]}" if missing else None

    return Case(f"trained: {name}", inspecting(row, template, model, data), (), is_shown)


def skipped(name: str, row: Row, *says: str, **options: Any) -> Case:
    """Under `data.on_bad_row: skip`: counted and listed."""
    prepare = inspecting(row, "chatml", TEXT_MODEL, {"on_bad_row": "skip", **options})

    def is_listed(folder: Path, result: Result) -> str | None:
        shown = flat(result.stdout)
        wanted = [f"bad row: {folder / 'rows.jsonl'}:2: ", *says]
        missing = [text for text in wanted if flat(text) not in shown]
        return f"does not list {missing}" if missing else None

    return Case(f"skipped: {name}", prepare, (), is_listed)


def chat(*contents: str, **fields: Any) -> Row:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": turns, **fields}


def share(*turns: tuple[str, Any], **fields: Any) -> Row:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns], **fields}


def message(index: int, row: Row, **fields: Any) -> Row:
    """The row with more fields in one of its messages."""
    key = "messages" if "messages" in row else "conversations"
    turns = [turn | fields if i == index % len(row[key]) else turn for i, turn in enumerate(row[key])]
    return {**row, key: turns}


QUESTION = "<|im_start|>user\nhi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n⟦yes<|im_end|>⟧"
CHAT = QUESTION + ANSWER
PLAIN = chat("hi", "yes")
CASES: list[Case] = []

# Media that nothing reads: a text model
MEDIA_COLUMNS = {
    "image": "a.png",
    "images": ["a.png"],
    "audio": "a.wav",
    "audios": ["a.wav"],
    "video": "a.mp4",
    "videos": ["a.mp4"],
}
for column, value in MEDIA_COLUMNS.items():
    tag = f"<{column.removesuffix('s')}>"
    row = share(("human", f"{tag}\nWhat is it?"), ("gpt", "A cat."), **{column: value})
    CASES += [
        refused(f"LLaVA row with {column}", row, f"`{column}`", "no media", "data.ignore"),
        refused(f"{column} without a tag", chat("hi", "yes", **{column: value}), f"`{column}`"),
        refused(f"text row with {column}", {"text": f"{tag} a cat", column: value}, f"`{column}`"),
        trained(f"{column} that is null", chat("hi", "yes", **{column: None}), CHAT),
    ]
CASES += [
    trained("images that are empty", chat("hi", "yes", images=[]), CHAT),
    trained("an image struct of nulls", chat("hi", "yes", image={"bytes": None, "path": None}), CHAT),
    refused(
        "an unread image, and its tag in data.ignore", chat("hi", "yes", image="a.png"), "`image`", ignore=["<image>"]
    ),
    trained("an image that is to be ignored", chat("hi", "yes", image="a.png"), CHAT, ignore=["image"]),
    refused("a depth column", chat("hi", "yes", depth="a.npy"), "`depth`"),
    refused("bytes as a list of numbers", chat("hi", "yes", blob=[1, 2]), "`blob`"),
]
for tag in ("image", "audio", "video"):
    CASES += [
        refused(
            f"<{tag}> before a question", chat(f"<{tag}>\nWhat is it?", "A cat."), f"<{tag}>", "message 0", "no media"
        ),
        refused(f"<{tag}> after a question", chat(f"What is it?\n<{tag}>", "A cat."), f"<{tag}>"),
        refused(f"<{tag}> in an answer", chat("draw", f"<{tag}>"), f"<{tag}>", "message 1"),
        trained(
            f"<{tag}> in data.ignore", chat(f"<{tag}> hi", "yes"), f"user\n<{tag}> hi", ANSWER, ignore=[f"<{tag}>"]
        ),
        trained(f"<{tag}> in a sentence", chat(f"what does <{tag}> do", "yes"), f"what does <{tag}> do", ANSWER),
        trained(f"<{tag}> as markup", chat(f"<{tag}>\n</{tag}>", "yes"), f"<{tag}>\n</{tag}>", ANSWER),
        trained(f"<{tag}> in a text", {"text": f"<{tag}>\nhi"}, f"<{tag}>\n"),
        trained(
            f"<{tag}> in a part of text",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": f"<{tag}>"}]}, *PLAIN["messages"][1:]]},
            f"user\n<{tag}><|im_end|>",
        ),
        refused(
            f"a part of type {tag}",
            {"messages": [{"role": "user", "content": [{"type": tag, tag: "a"}]}, *PLAIN["messages"][1:]]},
            f"{tag!r}",
            "part 0",
        ),
    ]
PARTS = {
    "input_text": {"type": "input_text", "text": "hi"},
    "tool_use": {"type": "tool_use", "name": "f", "input": {}},
    "thinking": {"type": "thinking", "thinking": "hm"},
    "image_url": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "no type": {"text": "hi"},
}
for kind, part in PARTS.items():
    row = {"messages": [{"role": "user", "content": [part]}, *PLAIN["messages"][1:]]}
    CASES.append(refused(f"a part of type {kind}", row, "part 0 of `content` of message 0"))
CASES += [
    refused(
        "cache_control in a part",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]},
                *PLAIN["messages"][1:],
            ]
        },
        "`cache_control`",
    ),
    trained(
        "parts with the keys of others, null",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]},
                *PLAIN["messages"][1:],
            ]
        },
        CHAT,
    ),
]

# A model that reads pictures
PICTURE = share(("human", "<image>\nWhat is it?"), ("gpt", "yes"))
CASES += [
    trained("LLaVA's image", {**PICTURE, "image": "a.png", "id": "7"}, "[image x 4]", ANSWER, model=SEES),
    trained("images", {**PICTURE, "images": ["a.png"]}, "[image x 4]", ANSWER, model=SEES),
    trained("images, and image null", {**PICTURE, "images": ["a.png"], "image": None}, "[image x 4]", model=SEES),
    refused("image and images", {**PICTURE, "images": ["a.png"], "image": "a.png"}, "`image` and `images`", model=SEES),
    refused(
        "videos where only images are read",
        {**PICTURE, "image": "a.png", "videos": ["a.mp4"]},
        "`videos`",
        "accepts image",
        model=SEES,
    ),
    refused("a <video> where only images are read", chat("<video>hi", "yes"), "<video>", "accepts image", model=SEES),
    refused(
        "more images than tags", {**PICTURE, "images": ["a.png", "a.png"]}, "occurs 1 times", "2 items", model=SEES
    ),
    refused(
        "more tags than images",
        chat("<image><image>", "yes", images=["a.png"]),
        "occurs 2 times",
        "1 items",
        model=SEES,
    ),
    refused("a tag without images", chat("<image>hi", "yes"), "occurs 1 times", "0 items", model=SEES),
    refused("an image without a tag", chat("hi", "yes", images=["a.png"]), "occurs 0 times", "1 items", model=SEES),
    trained("no image in a row", PLAIN, CHAT, model=SEES),
]
for option in ({"detail": "high"}, {"max_pixels": 64}, {"resized_height": 8}, {"start": 1}):
    (name,) = option
    part = {"type": "image", "image": "a.png", **option}
    row = {"messages": [{"role": "user", "content": [part]}, *PLAIN["messages"][1:]]}
    CASES.append(refused(f"{name} of an image", row, f"`{name}`", "a.png", model=SEES))
    CASES.append(trained(f"{name} of an image, ignored", row, "[image x 4]", model=SEES, ignore=[name]))

# Models that read more than text, without a recipe


def published(name: str, command: str, row: Row, **model: Any) -> Callable[[Path], Sequence[object]]:
    def prepare(folder: Path) -> Sequence[object]:
        rows = write_rows(folder / "rows.jsonl", [row] * 4)
        config = write_yaml(folder, {"config": PUBLISHED[name], **model}, rows, "chatml")
        return [*command.split(), config]

    return prepare


for family in PUBLISHED:
    picture = share(("human", "<image>\nWhat is it?"), ("gpt", "A cat."), image="a.png")
    CASES += [
        Case(f"{family} as a text model", published(family, "train", PLAIN), ("model.text_only", "image")),
        Case(f"{family} as a text model, inspected", published(family, "data inspect", PLAIN), ("model.text_only",)),
        Case(f"{family} on text alone", published(family, "train", PLAIN, text_only=True)),
        Case(
            f"{family} on text alone, a picture",
            published(family, "train", picture, text_only=True),
            ("`image`", "rows.jsonl:"),
        ),
    ]

# Fields with a meaning
CASES += [
    trained("a system column", chat("hi", "yes", system="be kind"), "system\nbe kind<|im_end|>\n" + CHAT),
    trained(
        "a system column of ShareGPT",
        share(("human", "hi"), ("gpt", "yes"), system="be kind"),
        "system\nbe kind<|im_end|>\n" + CHAT,
    ),
    trained("an empty system column", chat("hi", "yes", system=""), CHAT),
    trained("a system column that is null", chat("hi", "yes", system=None), CHAT),
    trained(
        "the same system twice",
        share(("system", "be"), ("human", "hi"), ("gpt", "yes"), system="be"),
        "system\nbe<|im_end|>\n" + CHAT,
    ),
    refused("two systems", share(("system", "be"), ("human", "hi"), ("gpt", "yes"), system="no"), "`system`"),
    refused("a system of a text", {"text": "hi", "system": "be"}, "`system`"),
    refused("a system that is a list", chat("hi", "yes", system=["be"]), "`system` is list"),
    refused(
        "a system that the template leaves out",
        chat("hi", "yes", system="be"),
        "message 0 (system)",
        template="no_system",
    ),
    refused(
        "a system message that the template leaves out",
        share(("system", "be"), ("human", "hi"), ("gpt", "yes")),
        "message 0",
        template="no_system",
    ),
    refused(
        "a short system that is elsewhere, too",
        share(("system", "h"), ("human", "hi"), ("gpt", "yes")),
        "message 0",
        template="no_system",
    ),
    trained("a system column, ignored", chat("hi", "yes", system="be"), CHAT, template="no_system", ignore=["system"]),
]
PREFERENCES: dict[str, Row] = {
    "rejected": {"rejected": "no"},
    "chosen and rejected": {"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
    "rejected_response": {"rejected_response": "no"},
    "rejected_messages": {"rejected_messages": PLAIN["messages"]},
    "score_chosen": {"score_chosen": 1.0},
    "kto_tag": {"kto_tag": True},
    "label": {"label": False},
    "reward": {"reward": 0.5},
    "score": {"score": 3},
}
for name, fields in PREFERENCES.items():
    CASES += [
        refused(f"a chat with {name}", chat("hi", "yes", **fields), f"`{next(iter(fields))}`", "not used"),
        trained(f"a chat with {name}, ignored", chat("hi", "yes", **fields), CHAT, ignore=[*fields]),
    ]
CASES += [
    refused(
        "a pair of chats",
        {"prompt": "hi", "chosen": PLAIN["messages"], "rejected": PLAIN["messages"]},
        "`chosen`",
        "not used",
    ),
    skipped("a preference pair", chat("hi", "yes", rejected="no"), "`rejected`"),
    skipped("an unread image", chat("hi", "yes", image="a.png"), "`image`"),
    skipped("a stray tag", chat("<image>\nhi", "yes"), "<image>"),
    skipped("an unknown role", share(("critic", "hi"), ("gpt", "yes")), "'critic'"),
]
COLUMNS: dict[str, Row] = {
    "Alpaca without its output": {"instruction": "add", "input": "1 1"},
    "a prompt": {"prompt": "hi"},
    "question and answer": {"question": "hi", "answer": "yes"},
    "tokens": {"tokens": [1, 2], "labels": [1, 2]},
    "a class": {"sentence": "hi", "label": 1},
    "nothing": {},
    "nulls": {"text": None, "messages": None},
}
for name, row in COLUMNS.items():
    CASES.append(refused(f"{name} instead of messages", row, "`messages`, `conversations` and `text`", *map(repr, row)))
CASES += [
    refused("a prompt besides messages", chat("hi", "yes", prompt="hi"), "`prompt`"),
    trained("a prompt besides messages, ignored", chat("hi", "yes", prompt="hi"), CHAT, ignore=["prompt"]),
    refused("text and messages", chat("hi", "yes", text="hi yes"), "`messages` and `text`", "data.ignore"),
    refused(
        "messages and conversations",
        chat("hi", "yes", conversations=[]) | share(("human", "hi")),
        "`messages` and `conversations`",
    ),
    trained("text and messages, one ignored", chat("hi", "yes", text="hi yes"), CHAT, ignore=["text"]),
    trained("an empty text and messages", chat("hi", "yes", text=""), CHAT),
    refused("input_ids besides a text", {"text": "hi", "input_ids": [1]}, "`input_ids`", "text, tokenized"),
    refused("input_ids beyond the vocabulary", {"input_ids": [5, 99999]}, "99999 at entry 1"),
    refused("a field that nobody knows", chat("hi", "yes", gizmo=1), "`gizmo`", "data.ignore"),
    refused("two fields that nobody knows", chat("hi", "yes", gizmo=1, gadget=2), "`gizmo`, `gadget`"),
    trained("a pattern in data.ignore", chat("hi", "yes", x_gizmo=1, x_gadget=2), CHAT, ignore=["x_*"]),
    trained("all that nothing reads", chat("hi", "yes", system="be", gizmo=1), "system\nbe", CHAT, ignore=["*"]),
    refused("another case in data.ignore", chat("hi", "yes", Gizmo=1), "`Gizmo`", ignore=["gizmo"]),
    refused("a misspelt images", chat("hi", "yes", imgs=["a.png"]), "`imgs`"),
]
METADATA_FIELDS = {
    "FineWeb": {
        "text": "hi you",
        "id": "u",
        "dump": "CC",
        "url": "u",
        "date": "d",
        "file_path": "p",
        "language": "en",
        "language_score": 0.9,
        "token_count": 2,
    },
    "C4": {"text": "hi you", "timestamp": "2019", "url": "u"},
    "the Pile": {"text": "hi you", "meta": {"pile_set_name": "x"}},
    "Dolma": {"text": "hi you", "id": "1", "source": "s", "added": "a", "created": "c", "metadata": {"a": 1}},
}
for name, row in METADATA_FIELDS.items():
    CASES.append(trained(f"a row of {name}", row, "hi you"))
CASES += [
    trained("a chat of Tulu", chat("hi", "yes", id="1", source="s"), CHAT),
    trained(
        "a chat with everything harmless",
        chat("hi", "yes", idx=1, uuid="u", dataset="d", split="train", category="c", license="l"),
        CHAT,
    ),
]

# Weights and flags
CASES += [
    trained("the weight of a row", chat("hi", "yes", weight=0.5), CHAT),
    refused("a weight of zero of a row", chat("hi", "yes", weight=0), "`weight` is 0"),
    refused("a weight below zero of a row", chat("hi", "yes", weight=-1), "`weight` is '-1'"),
    refused("the weight of a row as text", chat("hi", "yes", weight="2"), "`weight` is '2'", "0 to 1e+06"),
    trained("a weight of one", chat("hi", "yes", weight=1.0), CHAT),
    refused("a weight of one, and a gizmo", chat("hi", "yes", weight=1, gizmo=1), "`gizmo`"),
    refused("sample_weight", chat("hi", "yes", sample_weight=2), "`sample_weight`", "`weight`"),
    trained(
        "SlimOrca's weights", message(1, message(0, share(("human", "hi"), ("gpt", "yes")), weight=0), weight=1), CHAT
    ),
    trained(
        "OpenAI's weight of 0",
        message(1, chat("hi", "no", "so", "yes"), weight=0),
        "assistant\nno<|im_end|>",
        "⟦yes<|im_end|>⟧",
    ),
    trained("half a weight", message(1, PLAIN, weight=0.5), CHAT),
    trained("a weight of two", message(1, PLAIN, weight=2), CHAT),
    refused("a weight below zero", message(1, PLAIN, weight=-0.5), "`weight` of message 1", "-0.5"),
    refused("a weight that is no number", message(1, PLAIN, weight=float("nan")), "`weight` of message 1", "nan"),
    refused("a weight without end", message(1, PLAIN, weight=1e300), "`weight` of message 1", "1e+300"),
    refused("a weight that is true", message(1, PLAIN, weight=True), "`weight` of message 1", "True"),
    refused("a weight on a user's turn", message(0, PLAIN, weight=1), "`weight` of message 0", "loss: true"),
    refused("a weight that is text", message(1, PLAIN, weight="1"), "`weight` of message 1"),
    trained(
        "axolotl's train",
        message(1, chat("hi", "no", "so", "yes"), train=False),
        "assistant\nno<|im_end|>",
        "⟦yes<|im_end|>⟧",
    ),
    refused("train that is text", message(1, PLAIN, train="no"), "`train` of message 1"),
    refused(
        "loss and weight that differ",
        message(1, chat("hi", "a", "so", "b"), loss=True, weight=0),
        "message 1",
        "contradict",
    ),
    refused("a mask", message(1, PLAIN, mask=True), "`mask` of message 1", "data.ignore"),
    refused("loss_mask", message(1, PLAIN, loss_mask=[0, 1]), "`loss_mask` of message 1"),
    refused("train_detail", message(1, PLAIN, train_detail=[{"begin_offset": 0}]), "`train_detail`"),
    trained("loss of a user's turn", message(0, PLAIN, loss=True), "⟦hi<|im_end|>⟧"),
]

# Fields of messages
CASES += [
    refused(
        "reasoning_content that is not written",
        message(1, PLAIN, reasoning_content="hm"),
        "`reasoning_content` of message 1 (assistant)",
    ),
    refused("thinking that is not written", message(1, PLAIN, thinking="hm"), "`thinking` of message 1"),
    trained(
        "reasoning_content that is written",
        message(1, PLAIN, reasoning_content="hm"),
        "⟦<think>hm</think>yes<|im_end|>⟧",
        template="thinks",
    ),
    trained(
        "thinking that is written",
        message(1, PLAIN, thinking="hm"),
        "⟦<think>hm</think>yes<|im_end|>⟧",
        template="thinks",
    ),
    trained(
        "reasoning of earlier turns",
        message(1, chat("hi", "no", "so", "yes"), reasoning_content="hm"),
        "assistant\n⟦no<|im_end|>⟧",
        template="thinks",
    ),
    trained("reasoning_content that is empty", message(1, PLAIN, reasoning_content=""), CHAT),
    refused("a name that is not written", message(0, PLAIN, name="ann"), "`name` of message 0 (user)"),
    trained("a name that is written", message(0, PLAIN, name="ann"), "user ann\nhi", ANSWER, template="names"),
    refused(
        "a name that is written for others only",
        message(1, PLAIN, name="bot"),
        "`name` of message 1 (assistant)",
        template="names",
    ),
    refused(
        "tool_calls that are not written",
        message(1, PLAIN, tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
        "`tool_calls` of message 1",
    ),
    refused(
        "function_call of the old API",
        message(1, PLAIN, function_call={"name": "f", "arguments": "{}"}),
        "`function_call` of message 1",
    ),
    refused("audio of an answer", message(1, PLAIN, audio={"id": "x"}), "`audio` of message 1"),
    refused("a refusal", message(1, PLAIN, refusal="no"), "`refusal` of message 1"),
    refused("images in a message", message(0, PLAIN, images=["a.png"]), "`images` of message 0"),
    trained("a field of a message, ignored", message(0, PLAIN, name="ann"), CHAT, ignore=["name"]),
    trained("ids in messages", message(0, PLAIN, id="7", timestamp="t"), CHAT),
    trained("nulls in messages", message(0, PLAIN, tool_calls=None, name=None), CHAT),
    refused("role and from", message(0, PLAIN, **{"from": "human"}), "message 0 has `from`"),
    refused(
        "from and text",
        {"conversations": [{"from": "human", "text": "hi"}, {"from": "gpt", "value": "yes"}]},
        "message 0",
    ),
    refused(
        "user and assistant as keys",
        {"conversations": [{"user": "hi", "assistant": "yes"}]},
        "message 0",
        "'user', 'assistant'",
    ),
    refused("messages as a string", {"messages": "hi"}, "`messages`"),
    refused("messages as JSON text", {"messages": json.dumps(PLAIN["messages"])}, "`messages`"),
    refused("a list of strings", {"messages": ["hi", "yes"]}, "message 0"),
    refused(
        "content as an object",
        {"messages": [{"role": "user", "content": {"a": 1}}, *PLAIN["messages"][1:]]},
        "`content` of message 0",
    ),
]

# Who speaks
for speaker in ("gpt", "chatgpt", "bing", "bard", "assistant", "model"):
    CASES.append(trained(f"the speaker {speaker}", share(("human", "hi"), (speaker, "yes")), CHAT))
for speaker in ("human", "user"):
    CASES.append(trained(f"the speaker {speaker}", share((speaker, "hi"), ("gpt", "yes")), CHAT))
for speaker in ("User", "ASSISTANT", "critic", "narrator", "", "developer", "bot", "ipython", "user "):
    CASES.append(
        refused(
            f"the speaker {speaker!r}", share((speaker, "hi"), ("gpt", "yes")), "`role` of message 0", repr(speaker)
        )
    )
    CASES.append(
        refused(
            f"the role {speaker!r}",
            {"messages": [{"role": speaker, "content": "hi"}, *PLAIN["messages"]]},
            repr(speaker),
        )
    )
for speaker in ("observation", "tool", "function_response", "function", "tool_response"):
    row = share(
        ("human", "hi"), ("function_call", '{"name": "f", "arguments": {"a": 1}}'), (speaker, "7"), ("gpt", "yes")
    )
    CASES.append(
        trained(
            f"a call, and the speaker {speaker}",
            row,
            '{"name": "f", "arguments": {"a": 1}}<|im_end|>⟧',
            "user\n<result>7</result><|im_end|>",
            ANSWER,
            template="tools",
        )
    )
CASES += [
    trained(
        "a word for results of its own",
        share(("human", "hi"), ("gpt", "so"), ("observation", "7"), ("gpt", "yes")),
        "observation\n7<|im_end|>",
        ANSWER,
        template="observes",
    ),
    refused(
        "a call that the template does not write",
        share(("human", "hi"), ("function_call", '{"name": "f", "arguments": {}}')),
        "`tool_calls` of message 1",
    ),
    refused(
        "a call that is not JSON",
        share(("human", "hi"), ("function_call", "f(1)")),
        "message 1 (function_call)",
        template="tools",
    ),
    refused(
        "a call without a name",
        share(("human", "hi"), ("function_call", '{"arguments": {}}')),
        "message 1 (function_call)",
        template="tools",
    ),
    refused(
        "a result that the template leaves out",
        share(("human", "hi"), ("gpt", "so"), ("tool", "7"), ("gpt", "yes")),
        "message 2 (tool)",
        template="no_system",
    ),
    trained(
        "two calls at once",
        share(("human", "hi"), ("function_call", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]')),
        '{"name": "g", "arguments": {}}<|im_end|>⟧',
        template="tools",
    ),
]

# Tools and calls
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
WRITTEN = '{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}'
for name, tools in {
    "a list": [TOOL],
    "JSON text": json.dumps([TOOL]),
    "a list of JSON texts": [json.dumps(TOOL)],
    "one object": TOOL,
    "one object as JSON text": json.dumps(TOOL),
}.items():
    CASES.append(trained(f"tools as {name}", chat("hi", "yes", tools=tools), WRITTEN, CHAT, template="tools"))
for name, tools in {"an empty list": [], "an empty text": "", "an empty list as text": "[]", "null": None}.items():
    CASES.append(trained(f"tools as {name}", chat("hi", "yes", tools=tools), CHAT, template="tools"))
for name, tools in {"a word": "clock", "a number": 3, "a list of words": ["clock"], "a list of numbers": [3]}.items():
    CASES.append(refused(f"tools as {name}", chat("hi", "yes", tools=tools), "`tools`", template="tools"))
CASES += [
    refused("tools that the template does not write", chat("hi", "yes", tools=[TOOL]), "`tools`"),
    refused("tools of a text", {"text": "hi", "tools": [TOOL]}, "`tools`"),
    refused(
        "tools that are called, and not written", share(("human", "hi"), ("gpt", "clock"), tools=[TOOL]), "`tools`"
    ),
]
for name, arguments in {"an object": {"a": "é"}, "JSON text": '{"a": "é"}'}.items():
    for style, call in {
        "nested": {"type": "function", "function": {"name": "f", "arguments": arguments}},
        "flat": {"name": "f", "arguments": arguments},
    }.items():
        row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]}
        said = '{"name": "f", "arguments": {"a": "é"}}<|im_end|>⟧'
        CASES.append(trained(f"{style} call, arguments as {name}", row, said, template="tools"))
    nested = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        ]
    }
    CASES.append(
        trained(
            f"arguments as {name} for a template of texts", nested, 'f {"a": "é"}<|im_end|>⟧', template="text_arguments"
        )
    )
for name, calls in {
    "arguments that are a list": [{"function": {"name": "f", "arguments": [1]}}],
    "arguments that are not JSON": [{"function": {"name": "f", "arguments": "a=1"}}],
    "calls that are words": ["f"],
    "calls that are a number": 3,
}.items():
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]}
    CASES.append(refused(name, row, "message 1", template="tools"))


# Columns give every row every key


def columnar(name: str, rows: list[Row], *shown: str, template: str = "chatml", says: tuple[str, ...] = ()) -> Case:
    def prepare(folder: Path) -> Sequence[object]:
        keys = {key: None for row in rows for key in row}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([keys | row for row in rows]), folder / "rows.parquet")
        config = write_yaml(folder, TEXT_MODEL, folder / "rows.parquet", template)
        return ["data", "inspect", config, "--samples", 4, "--data.shuffle", "false"]

    def is_shown(folder: Path, result: Result) -> str | None:
        missing = unseen(shown, result.stdout)
        return f"does not show {missing}; shows {result.stdout[:1500]}" if missing else None

    return Case(f"Parquet: {name}", prepare, says, is_shown)


CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
OTHER = {"function": {"name": "g", "arguments": {"b": 2}}}
asks = {"role": "user", "content": "hi"}
CASES += [
    columnar("texts and chats in one file", [{"text": "hi you"}, PLAIN], CHAT),
    columnar("a picture in one row only", [PLAIN, chat("hi", "yes", image="a.png")], says=("row 1", "`image`")),
    columnar(
        "a name in one message only", [message(0, PLAIN, name="ann"), PLAIN], says=("row 0", "`name` of message 0")
    ),
    columnar(
        "calls with different arguments",
        [{"messages": [asks, {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER]}]}],
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "g", "arguments": {"b": 2}}',
        template="tools",
    ),
]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
