"""Examines the model of the digits demo on pictures and voices it has never met, and adds what it did to the report.

    python examples/digits/examine.py runs/digits

Drawings are judged by a support vector machine that has only ever seen real handwriting.
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
from make_rows import HELD_OUT_PICTURES, NUMBERS
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
    asks: str
    goal: float | None = None  # accuracy


TASKS = [
    Task("read", "name the digit in a picture", 0.95),
    Task("listen", "name a spoken digit", 0.95),
    Task("draw", "draw a named digit", 0.90),
    Task("draw_spoken", "draw a spoken digit"),
    Task("add", "add a digit in a picture and a spoken one", 0.80),
]
ASKED, OF_EACH = 150, 6  # most questions of a task, and drawings of a digit in the report


@dataclass(frozen=True)
class Answer:
    expected: str
    said: str
    drawing: Image.Image | None
    is_right: bool


class Judge:
    def __init__(self) -> None:
        pictures, digits = load_digits(return_X_y=True)
        seen, unseen, labels, others = train_test_split(
            pictures, digits, test_size=HELD_OUT_PICTURES, stratify=digits, random_state=0
        )
        self.machine = SVC(gamma=0.001).fit(seen, labels)
        self.accuracy = float(self.machine.score(unseen, others))  # on real handwriting

    def read(self, drawing: Image.Image) -> str:
        values = np.asarray(drawing.convert("L"), np.float64) * (16 / 255)
        return NUMBERS[int(self.machine.predict(values.reshape(1, -1))[0])]


def ask(writer: ChatModel, judge: Judge, task: Task, row: dict[str, Any], seed: int) -> Answer:
    *question, answer = row["messages"]
    expected = " ".join(part["text"] for part in answer["content"] if part["type"] == "text")
    draws = task.name.startswith("draw")
    sampling = Sampling(0.7 if draws else 0.0, generator=torch.Generator().manual_seed(seed))
    pieces = writer.write(question, sampling, max_tokens=12)
    said = " ".join(writer.tokenizer.decode(piece.ids) for piece in pieces if piece.modality == "text").strip()
    drawing = next((piece.item for piece in pieces if piece.modality != "text"), None)
    if draws:
        return Answer(expected, said, drawing, drawing is not None and judge.read(drawing) == expected)
    return Answer(expected, said, drawing, said == expected)


def bars(results: dict[str, list[Answer]]) -> str:
    """Accuracies as an SVG, with the goals as lines."""
    marks = []
    for i, task in enumerate(TASKS):
        right, y = accuracy(results[task.name]), 34 * i
        marks.append(f'<text x="0" y="{y + 17}">{escape(task.asks)}</text>')
        marks.append(
            f'<rect x="300" y="{y}" width="{right * 300:.0f}" height="24" rx="3" fill="currentColor" opacity=".35"/>'
        )
        marks.append(f'<text x="{306 + right * 300:.0f}" y="{y + 17}">{right:.1%}</text>')
        if task.goal:
            x = 300 + task.goal * 300
            marks.append(
                f'<line x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + 27}" stroke="currentColor" stroke-dasharray="3 2"/>'
            )
    height = 34 * len(TASKS)
    return f'<svg viewBox="0 -6 680 {height + 6}" width="680" font-size="14" fill="currentColor">{"".join(marks)}</svg>'


def grid(answers: list[Answer]) -> str:
    """Drawings by digit, with what the judge made of those it could not read."""
    cells = []
    shown = [answer for digit in NUMBERS for answer in [a for a in answers if a.expected == digit][:OF_EACH]]
    for answer in shown:
        file = io.BytesIO()
        if answer.drawing is not None:
            answer.drawing.resize((48, 48), Image.Resampling.NEAREST).save(file, "PNG")
        source = base64.b64encode(file.getvalue()).decode()
        look = "" if answer.is_right else ";outline:2px solid #c33"
        cells.append(
            f'<figure style="display:inline-block;margin:4px;text-align:center"><img style="width:48px{look}" '
            f'src="data:image/png;base64,{source}" alt=""><figcaption>{escape(answer.expected)}</figcaption></figure>'
        )
    return "".join(cells)


def accuracy(answers: list[Answer]) -> float:
    return sum(answer.is_right for answer in answers) / len(answers)


def main(run: Path, data: Path) -> int:
    torch.set_num_threads(1)  # ops this small are slower on two
    writer, judge, console = load_chat_model(run / "model"), Judge(), Console()
    results: dict[str, list[Answer]] = {}
    for task in TASKS:
        rows = pyarrow.parquet.read_table(data / "held_out" / f"{task.name}.parquet").to_pylist()
        chosen = rows[:: -(-len(rows) // ASKED)]
        questions = track(list(enumerate(chosen)), description=task.asks, console=console, transient=True)
        results[task.name] = [ask(writer, judge, task, row, seed) for seed, row in questions]

    table = Table(title="On pictures and voices never met in training", title_justify="left")
    for column in ("task", "questions", "right", "goal"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in TASKS:
        right, goal = accuracy(results[task.name]), "" if task.goal is None else f"{task.goal:.0%}"
        table.add_row(task.asks, str(len(results[task.name])), f"{right:.1%}", goal)
    console.print(table)
    console.print(f"The judge of drawings reads {judge.accuracy:.1%} of held-out handwriting.")
    figures = {task.name: accuracy(results[task.name]) for task in TASKS}
    (run / "examination.json").write_text(json.dumps(figures, indent=2) + "\n")
    sections = [ReportSection("Examination on unseen digits and voices", bars(results))]
    for name, title in (("draw", "Drawn from a word"), ("draw_spoken", "Drawn from speech")):
        sections.append(ReportSection(f"{title} (framed: the judge reads another digit)", grid(results[name])))
    console.print(f"report: {write_report(RunFolder(run), sections)}")
    missed = [task.asks for task in TASKS if task.goal and figures[task.name] < task.goal]
    if missed:
        console.print(f"[bold red]goal missed:[/] {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "runs/digits_data")))
