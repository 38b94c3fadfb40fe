"""Rows of common datasets, with the fields and values of the published rows, and what `omnizoo new` writes for them.

Texts are shortened. Each row is written NUM_ROWS times with another number, so that prompts differ.
"""

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]
NUM_ROWS = 24
MEDIA = Path(__file__).parents[2] / "examples/published/data"


@dataclass(frozen=True)
class Shape:
    """One dataset: a function that returns its rows, and the settings that `omnizoo new` must write."""

    name: str  # as in the table of docs/reference/rows.md
    row: Callable[[int], Row]
    model: str = "text"
    file: str = "rows.jsonl"  # below the folder of the data
    source: dict[str, Any] = field(default_factory=dict)  # expected keys of the source
    ignore: tuple[str, ...] = ()  # expected `data.ignore`
    loss: str = ""  # expected kind of `train.losses`
    template: bool = False  # whether a chat template is written
    media: dict[str, str] = field(default_factory=dict)  # media file by its path in the folder of the data
    command: tuple[str, ...] = ()  # further arguments of `omnizoo new`

    def write(self, folder: Path) -> Path:
        """Write the rows and media to a folder, and return the file of the rows."""
        for path, source in self.media.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(MEDIA / source, folder / path)
        data = folder / self.file
        data.parent.mkdir(parents=True, exist_ok=True)
        rows = [self.row(number) for number in range(NUM_ROWS)]
        if data.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
        elif data.suffix == ".json":
            data.write_text(json.dumps(rows, indent=2))
        else:
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return data


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def part(kind: str, value: str) -> Row:
    """Return a content part of LLaMA-Factory's newer rows."""
    return {"type": kind, "value": value}


def alpaca(number: int) -> Row:
    return {"instruction": f"Give {number} tips.", "input": "", "output": "1. Eat well."}


def alpaca_with_text(number: int) -> Row:
    row = alpaca(number)
    text = f"Below is an instruction.\n\n### Instruction:\n{row['instruction']}\n\n### Response:\n{row['output']}"
    return row | {"text": text}


def dolly(number: int) -> Row:
    context = "" if number % 2 else "Virgin Australia began in 2000."
    return {
        "instruction": f"When did airline {number} begin?",
        "context": context,
        "response": "In 2000.",
        "category": "closed_qa",
    }


def ultrachat(number: int) -> Row:
    prompt = f"How do theme {number} settings work?"
    return {"prompt": prompt, "prompt_id": f"f0e37e9f{number}", "messages": [user(prompt), assistant("Like this.")]}


def sharegpt(number: int) -> Row:
    turns = [{"from": "human", "value": f"hello {number}"}, {"from": "gpt", "value": "Hi there!"}]
    return {"id": f"QWJhYvA_{number}", "conversations": turns}


def gsm8k(number: int) -> Row:
    return {"question": f"Natalia sold {number} clips. How many?", "answer": f"She sold {number}.\n#### {number}"}


def prompt_response(number: int) -> Row:
    return {"prompt": f"Name {number} colors.", "response": "red, green"}


def c4(number: int) -> Row:
    return {"text": f"Beginners BBQ class {number}.", "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b/c"}


def tokenized(number: int) -> Row:
    ids = [10 + number, 20, 30, 40]
    return {"input_ids": ids, "attention_mask": [1, 1, 1, 1], "labels": [-100, -100, 30, 40]}


def llava(number: int) -> Row:
    turns = [
        {"from": "human", "value": f"<image>\nWhat are the {number} colors of the bus?"},
        {"from": "gpt", "value": "The bus is white and red."},
    ]
    return {"id": f"{number:012}", "image": f"{number % 2:012}.jpg", "conversations": turns}


def llava_mixed(number: int) -> Row:
    """A row of the mix for instruction tuning, in which some rows have no image."""
    if number % 3 == 0:
        turns = [{"from": "human", "value": f"What is {number}?"}, {"from": "gpt", "value": "A number."}]
        return {"id": f"wgByO4Y_{number}", "model": "", "conversations": turns}
    return llava(number) | {"image": f"coco/train2017/{number % 2:012}.jpg"}


def openai_image(number: int) -> Row:
    data = base64.b64encode((MEDIA / "image0.png").read_bytes()).decode()
    image = {"url": f"data:image/png;base64,{data}", "detail": "high"}
    content = [{"type": "text", "text": f"What is {number}?"}, {"type": "image_url", "image_url": image}]
    return {"messages": [{"role": "user", "content": content}, assistant("A square.")]}


def visual_question(number: int) -> Row:
    image = {"bytes": (MEDIA / "image0.png").read_bytes(), "path": None}
    return {"image": image, "question": f"What shape is number {number}?", "answer": "a square"}


def untagged(number: int) -> Row:
    turns = [user(f"What is the difference {number}?"), assistant("The first is a square.")]
    return {"messages": turns, "images": ["images/0.jpg", "images/1.jpg"]}


def caption(number: int) -> Row:
    return {"image": f"images/{number % 2}.jpg", "caption": f"A square with {number} sides."}


def common_voice(number: int) -> Row:
    return {
        "client_id": f"d59478fb{number}",
        "path": "common_voice_en_0.flac",
        "audio": {"bytes": (MEDIA / "audio0.flac").read_bytes(), "path": "common_voice_en_0.flac"},
        "sentence": f"The track appears on album {number}.",
        "up_votes": 2,
        "down_votes": 0,
        "age": "thirties",
        "gender": "male",
        "accent": "",
        "locale": "en",
        "segment": "",
        "variant": "",
    }


def librispeech(number: int) -> Row:
    return {
        "file": "374-180298-0000.flac",
        "audio": {"bytes": (MEDIA / "audio0.flac").read_bytes(), "path": "374-180298-0000.flac"},
        "text": f"CHAPTER {number} I MIGHT HAVE TOLD YOU",
        "speaker_id": 374,
        "chapter_id": 180298,
        "id": f"374-180298-{number:04}",
    }


def trl_pair(number: int) -> Row:
    prompt = user(f"Use {number} words.")
    pair = {"chosen": [prompt, assistant("One two.")], "rejected": [prompt, assistant("No.")]}
    return pair | {"score_chosen": 6.0, "score_rejected": 4.0}


def ultrafeedback(number: int) -> Row:
    pair = trl_pair(number)
    prompt = pair["chosen"][0]["content"]
    return {"prompt": prompt, "prompt_id": f"65be65d2{number}", **pair, "messages": pair["chosen"]}


def trl_text_pair(number: int) -> Row:
    return {"prompt": f"The sky {number} is", "chosen": " blue.", "rejected": " green."}


def trl_labeled(number: int) -> Row:
    return {"prompt": [user(f"Is {number} odd?")], "completion": [assistant("Yes.")], "label": number % 2 == 1}


def trl_image_pair(number: int) -> Row:
    content = [{"type": "image", "text": None}, {"type": "text", "text": f"What are the {number} keys?"}]
    text = [{"type": "text", "text": "Three keys."}]
    return {
        "images": [{"bytes": (MEDIA / "image0.png").read_bytes(), "path": None}],
        "prompt": [{"role": "user", "content": content}],
        "chosen": [{"role": "assistant", "content": text}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No keys."}]}],
    }


def orca_pair(number: int) -> Row:
    pair = {"chosen": "It is open.", "rejected": "It is closed."}
    return {"system": "You are an AI assistant.", "question": f"Is shop {number} open?", **pair}


def llama_factory_pair(number: int) -> Row:
    turns = [{"from": "human", "value": f"Create game {number}."}]
    return {
        "conversations": turns,
        "chosen": {"from": "gpt", "value": "That sounds fun!"},
        "rejected": {"from": "gpt", "value": "Hello!"},
    }


def llama_factory_instruction_pair(number: int) -> Row:
    return {"instruction": f"Add {number}.", "input": "1 and 2", "chosen": "3", "rejected": "4"}


def llama_factory_labeled(number: int) -> Row:
    return {"messages": [user(f"Which class has text {number}?"), assistant("Science.")], "label": number % 2 == 0}


def llama_factory_tagged(number: int) -> Row:
    return sharegpt(number) | {"kto_tag": number % 2 == 0}


def argilla_pair(number: int) -> Row:
    return {"instruction": f"Write {number} lines.", "chosen_response": "A. B.", "rejected_response": "A."}


def swift_pair(number: int) -> Row:
    return {"messages": [user(f"Who are you, {number}?"), assistant("A model.")], "rejected_response": "Nobody."}


def function_call(number: int) -> Row:
    parameters = {"type": "object", "properties": {"ingredients": {"type": "array"}}, "required": ["ingredients"]}
    tool = {"name": "search_recipes", "description": "Search for recipes", "parameters": parameters}
    call = {"name": "search_recipes", "arguments": {"ingredients": ["rice", str(number)]}}
    turns = [
        {"from": "human", "value": "I have rice."},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": '{"recipes": [{"name": "Fried Rice"}]}'},
        {"from": "gpt", "value": "I found one recipe."},
    ]
    return {"conversations": turns, "tools": json.dumps([tool])}


def weighted_parts(number: int) -> Row:
    turns = [
        {"role": "user", "content": [part("text", f"hi {number}")], "loss_weight": 0.0},
        {"role": "assistant", "content": [part("text", "Hello! I am a model.")], "loss_weight": 1.0},
    ]
    return {"messages": turns}


def weighted_pair(number: int) -> Row:
    system = {"role": "system", "content": [part("text", "Answer at length.")], "loss_weight": 0.0}
    asks, answers = weighted_parts(number)["messages"]
    other = answers | {"content": [part("text", "Hi.")]}
    return {"chosen_messages": [system, asks, answers], "rejected_messages": [system, asks, other]}


def image_parts(number: int) -> Row:
    content = [part("image_url", "data/mllm_demo_data/1.jpg"), part("text", f"Who are these {number}?")]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": [part("text", "Two.")]}]
    }


def reasoning_and_calls(number: int) -> Row:
    row = function_call(number)
    call = row["conversations"][1]["value"]
    turns = [
        {"role": "system", "content": [part("text", "You use tools.")]},
        {"role": "user", "content": [part("text", "I have rice.")]},
        {"role": "assistant", "content": [part("reasoning", f"Search {number}."), part("tool_call", call)]},
        {"role": "tool", "content": [part("text", '[{"name": "Fried Rice"}]')]},
        {"role": "assistant", "content": [part("reasoning", "One result."), part("text", "I found one.")]},
    ]
    return {"messages": turns, "tools": row["tools"]}


def llama_factory_media(name: str, path: str) -> Callable[[int], Row]:
    """Return rows of LLaMA-Factory's demos with one media item."""
    return lambda number: {
        "messages": [user(f"<{name}>What is {number}?"), assistant("It is a sound or a sight.")],
        f"{name}s": [path],
    }


IMAGES = {"images/0.jpg": "image0.png", "images/1.jpg": "image1.png"}
COCO = {f"coco/train2017/{number:012}.jpg": f"image{number}.png" for number in range(2)}
SCORES = ("score_chosen", "score_rejected")
VOICE = ("client_id", "path", "up_votes", "down_votes", "age", "gender", "locale")
PAIRS, LABELS = "dpo", "kto"
CONTEXT = {"columns": {"input": "context", "output": "response"}}
QUESTION = {"query": "question", "response": "answer"}

SHAPES = [
    Shape("yahma/alpaca-cleaned", alpaca, file="alpaca.json"),
    Shape("tatsu-lab/alpaca", alpaca_with_text, file="alpaca.parquet", source={"format": "alpaca"}),
    Shape("databricks/databricks-dolly-15k", dolly, source=CONTEXT),
    Shape("HuggingFaceH4/ultrachat_200k", ultrachat, file="chats.parquet", ignore=("prompt",)),
    Shape("ShareGPT", sharegpt, file="chats.json"),
    Shape("openai/gsm8k", gsm8k, file="train.parquet", source={"columns": QUESTION}),
    Shape("prompt and response", prompt_response, source={"columns": {"query": "prompt"}}),
    Shape("allenai/c4", c4, ignore=()),
    Shape("pre-tokenized rows", tokenized, file="tokens.parquet"),
    Shape("LLaVA-Instruct-150K", llava, "qwen3_vl", "llava.json", {"media_dir": "coco/train2017"}, media=COCO),
    Shape("LLaVA mix665k", llava_mixed, "qwen3_vl", "json/mix.json", {"media_dir": ""}, media=COCO),
    Shape("OpenAI image_url with detail", openai_image, "qwen3_vl", ignore=("detail",)),
    Shape("image, question, answer", visual_question, "qwen3_vl", "vqa.parquet",
          {"columns": QUESTION, "untagged_media": "first"}),
    Shape("ms-swift images without tags", untagged, "qwen3_vl", source={"untagged_media": "first"}, media=IMAGES),
    Shape("image and caption", caption, "qwen3_vl", media=IMAGES),
    Shape("mozilla-foundation/common_voice", common_voice, "qwen3_omni", "voice.parquet",
          {"columns": {"caption": "sentence"}}, VOICE),
    Shape("openslr/librispeech_asr", librispeech, "qwen3_omni", "speech.parquet",
          ignore=("file", "speaker_id", "chapter_id")),
    Shape("trl-lib/ultrafeedback_binarized", trl_pair, file="pairs.parquet", ignore=SCORES, loss=PAIRS),
    Shape("HuggingFaceH4/ultrafeedback_binarized", ultrafeedback, file="pairs.parquet",
          ignore=(*SCORES, "messages"), loss=PAIRS),
    Shape("TRL pairs of texts", trl_text_pair, loss=PAIRS),
    Shape("trl-lib/kto-mix-14k", trl_labeled, file="labels.parquet", loss=LABELS),
    Shape("HuggingFaceH4/rlaif-v_formatted", trl_image_pair, "qwen3_vl", "pairs.parquet", loss=PAIRS),
    Shape("Intel/orca_dpo_pairs", orca_pair, source={"columns": {"query": "question"}}, loss=PAIRS),
    Shape("LLaMA-Factory dpo_en_demo", llama_factory_pair, file="dpo.json", loss=PAIRS),
    Shape("LLaMA-Factory instruction pairs", llama_factory_instruction_pair, file="dpo.json", loss=PAIRS),
    Shape("LLaMA-Factory kto_en_demo", llama_factory_labeled, file="kto.json", loss=LABELS),
    Shape("LLaMA-Factory kto_tag", llama_factory_tagged, file="kto.json", loss=LABELS),
    Shape("LLaMA-Factory v1_sft_demo", weighted_parts),
    Shape("LLaMA-Factory v1_dpo_demo", weighted_pair, loss=PAIRS),
    Shape("LLaMA-Factory v1_multimodal_demo", image_parts, "qwen3_vl", "data/rows.jsonl", {"media_dir": ""},
          media={"data/mllm_demo_data/1.jpg": "image0.png"}),
    Shape("LLaMA-Factory mllm_demo", llama_factory_media("image", "mllm_demo_data/1.jpg"), "qwen3_vl", "mllm.json",
          media={"mllm_demo_data/1.jpg": "image0.png"}),
    Shape("LLaMA-Factory mllm_audio_demo", llama_factory_media("audio", "mllm_demo_data/1.mp3"), "qwen3_omni",
          "mllm.json", media={"mllm_demo_data/1.mp3": "audio0.flac"}),
    Shape("LLaMA-Factory mllm_video_demo", llama_factory_media("video", "mllm_demo_data/1.mp4"), "qwen3_vl",
          "mllm.json", media={"mllm_demo_data/1.mp4": "video0.mp4"}),
    Shape("chosen_response and rejected_response", argilla_pair, loss=PAIRS,
          source={"columns": {"chosen": "chosen_response", "rejected": "rejected_response"}}),
    Shape("ms-swift rejected_response", swift_pair, loss=PAIRS),
    Shape("LLaMA-Factory glaive_toolcall", function_call, file="tools.json", template=True),
    Shape("LLaMA-Factory reason_tool_use", reasoning_and_calls, template=True),
]  # fmt: skip
