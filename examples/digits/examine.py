"""Evaluate the model of the digits demo on held-out images and voices, and add the results to the report.

    python examples/digits/examine.py runs/digits

A support vector machine that was trained on real handwriting classifies the drawings.
"""

import base64
import io
import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from make_rows import HELD_OUT_IMAGES, NUMBERS
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from omnizoo import ChatModel, ReportSection, RunFolder, Sampling, load_chat_model, write_report


@dataclass(frozen=True)
class Task:
    name: str
    description: str
    goal: float | None = None  # accuracy


TASKS = [
    Task("read", "name the digit in an image", 0.95),
    Task("listen", "name a spoken digit", 0.95),
    Task("draw", "draw a named digit", 0.90),
    Task("draw_spoken", "draw a spoken digit"),
    Task("add", "add a digit in an image and a spoken one", 0.80),
]
MAX_PROMPTS = 150  # per task
DRAWINGS_PER_DIGIT = 6  # in the report


@dataclass(frozen=True)
class Response:
    expected: str
    text: str
    drawing: Image.Image | None
    is_correct: bool


class Judge:
    """Classifies drawings with a support vector machine."""

    def __init__(self) -> None:
        images, digits = load_digits(return_X_y=True)
        train_images, held_out_images, train_digits, held_out_digits = train_test_split(
            images, digits, test_size=HELD_OUT_IMAGES, stratify=digits, random_state=0
        )
        self.machine = SVC(gamma=0.001).fit(train_images, train_digits)
        self.accuracy = float(self.machine.score(held_out_images, held_out_digits))  # on real handwriting

    def read(self, drawing: Image.Image) -> str:
        """Return the name of the digit in a drawing."""
        values = np.asarray(drawing.convert("L"), np.float64) * (16 / 255)
        return NUMBERS[int(self.machine.predict(values.reshape(1, -1))[0])]


def ask(chat_model: ChatModel, judge: Judge, task: Task, row: dict[str, Any], seed: int) -> Response:
    """Generate a response to the prompt of a row and compare it with the expected one."""
    *prompt, expected_response = row["messages"]
    expected = " ".join(part["text"] for part in expected_response["content"] if part["type"] == "text")
    draws = task.name.startswith("draw")
    sampling = Sampling(0.7 if draws else 0.0, generator=torch.Generator().manual_seed(seed))
    pieces = chat_model.write(prompt, sampling, max_tokens=12)
    words = [chat_model.tokenizer.decode(piece.ids) for piece in pieces if piece.modality == "text"]
    text = " ".join(words).strip()
    drawing = next((piece.item for piece in pieces if piece.modality != "text"), None)
    is_correct = text == expected
    if draws:
        is_correct = drawing is not None and judge.read(drawing) == expected
    return Response(expected=expected, text=text, drawing=drawing, is_correct=is_correct)


def bars(results: dict[str, list[Response]]) -> str:
    """Return an SVG with the accuracy of each task as a bar and its goal as a dashed line."""
    marks = []
    for i, task in enumerate(TASKS):
        correct = accuracy(results[task.name])
        y = 34 * i
        marks.append(f'<text x="0" y="{y + 17}">{escape(task.description)}</text>')
        marks.append(
            f'<rect x="300" y="{y}" width="{correct * 300:.0f}" height="24" rx="3" fill="currentColor" opacity=".35"/>'
        )
        marks.append(f'<text x="{306 + correct * 300:.0f}" y="{y + 17}">{correct:.1%}</text>')
        if task.goal:
            x = 300 + task.goal * 300
            marks.append(
                f'<line x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + 27}" stroke="currentColor" stroke-dasharray="3 2"/>'
            )
    height = 34 * len(TASKS)
    return f'<svg viewBox="0 -6 680 {height + 6}" width="680" font-size="14" fill="currentColor">{"".join(marks)}</svg>'


def grid(responses: list[Response]) -> str:
    """Return HTML with the drawings by digit; a red frame marks those that the judge classifies as another digit."""
    shown: list[Response] = []
    for digit in NUMBERS:
        of_digit = [response for response in responses if response.expected == digit]
        shown += of_digit[:DRAWINGS_PER_DIGIT]

    cells = []
    for response in shown:
        file = io.BytesIO()
        if response.drawing is not None:
            response.drawing.resize((48, 48), Image.Resampling.NEAREST).save(file, "PNG")
        source = base64.b64encode(file.getvalue()).decode()
        frame = "" if response.is_correct else ";outline:2px solid #c33"
        cells.append(
            f'<figure style="display:inline-block;margin:4px;text-align:center"><img style="width:48px{frame}" '
            f'src="data:image/png;base64,{source}" alt=""><figcaption>{escape(response.expected)}</figcaption></figure>'
        )
    return "".join(cells)


def accuracy(responses: list[Response]) -> float:
    """Return the fraction of correct responses."""
    return sum(response.is_correct for response in responses) / len(responses)


def main(run: Path, data: Path) -> int:
    torch.set_num_threads(1)  # operations this small are slower on two threads
    chat_model = load_chat_model(run / "model")
    judge = Judge()
    console = Console()

    results: dict[str, list[Response]] = {}
    for task in TASKS:
        rows = pyarrow.parquet.read_table(data / "held_out" / f"{task.name}.parquet").to_pylist()
        row_subset = rows[:: -(-len(rows) // MAX_PROMPTS)]
        numbered_rows = track(
            list(enumerate(row_subset)), description=task.description, console=console, transient=True
        )
        results[task.name] = [ask(chat_model, judge, task, row, seed) for seed, row in numbered_rows]

    table = Table(title="Accuracy on held-out images and voices", title_justify="left")
    for column in ("task", "prompts", "correct", "goal"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in TASKS:
        correct = accuracy(results[task.name])
        goal = "" if task.goal is None else f"{task.goal:.0%}"
        table.add_row(task.description, str(len(results[task.name])), f"{correct:.1%}", goal)
    console.print(table)
    console.print(f"The judge of the drawings classifies {judge.accuracy:.1%} of held-out handwriting correctly.")
    figures = {task.name: accuracy(results[task.name]) for task in TASKS}
    (run / "examination.json").write_text(json.dumps(figures, indent=2) + "\n")
    sections = [ReportSection("Accuracy on held-out images and voices", bars(results))]
    for name, title in (("draw", "Drawn from a word"), ("draw_spoken", "Drawn from speech")):
        sections.append(ReportSection(f"{title} (red frame: the judge reads another digit)", grid(results[name])))
    console.print(f"report: {write_report(RunFolder(run), sections)}")

    missed = [task.description for task in TASKS if task.goal and figures[task.name] < task.goal]
    if missed:
        console.print(f"[bold red]goal missed:[/] {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "runs/digits_data")))
