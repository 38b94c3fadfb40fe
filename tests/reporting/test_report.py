"""report.html: one self-contained file that draws whatever a run measured, in whatever state the run is."""

import json
import math
import random
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from omnizoo.cli.main import main
from omnizoo.reporting.history import downsample, smooth
from omnizoo.reporting.launch_history import add_start, git_state, read_starts
from omnizoo.reporting.pages import TEMPLATES, render
from omnizoo.reporting.report import ReportSection, write_comparison, write_report
from omnizoo.reporting.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
ATTACK = "<script>alert('x')</script>"


class Page(HTMLParser):
    """The page as a browser sees it: tags, visible text, and the titles and data of its charts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.text = html, [], ""
        self._open: list[str] = []
        self.titles: list[str] = []
        self.cards: dict[str, str] = {}
        self.feed(html)
        assert not self._open, f"unclosed: {self._open}"
        self.charts = [
            json.loads(attributes["data-chart"]) for _, attributes in self.tags if "data-chart" in attributes
        ]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data + "\n"
            if self._open[-2:] == ["figcaption", "b"]:
                self.titles.append(data)
            if self._open[-1] == "dt":
                self.cards[data] = ""
            if self._open[-1] == "dd":
                self.cards[list(self.cards)[-1]] = data


def _values(chart: dict) -> list[float | None]:
    return [value for curve in chart["curves"] for value in curve["values"]]


def step(number: int, **more: object) -> dict[str, object]:
    draw = random.Random(number)
    return {
        "step": number, "loss": 2 + 8 / number + draw.random(), "loss/text": 2.0 + draw.random(),
        "grad_norm": draw.random() + 0.1,
        "lr": 1e-4, "tokens": 1000, "tokens_per_sec": 500.0, "mfu": None, "memory_gb": 1.5, "data_wait": 0.01,
        "fill": 0.98, "imbalance": 1.0, "epoch": number / 100, "bad_steps": 0, "skipped_rows": 0, **more,
    }  # fmt: skip


def report(folder, rows, config="model:\n  path: tiny\ntrain:\n  steps: 10\n", sections=()) -> Page:
    run = RunFolder(folder)
    run.root.mkdir(parents=True, exist_ok=True)
    if rows is not None:
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        run.config.write_text(config)
    return Page(write_report(run, sections).read_text(encoding="utf-8"))


def test_headline_figures_match_metrics(tmp_path):
    rows = [step(n) for n in range(1, 11)]
    rows[4]["eval/loss"], rows[9]["eval/loss"] = 1.5, 1.75
    rows[9].update(loss=1.25, bad_steps=2, skipped_rows=7)
    page = report(tmp_path / "my-run", rows)
    assert page.cards == {
        "Final loss": "1.25", "Best held-out loss": "1.5", "Steps": "10", "Tokens": "10 k", "Training time": "20 s",
        "Tokens per second": "500", "Pack fill": "98%", "Memory": "1.5 GB",
    }  # fmt: skip
    for note in ("at step 5", "skipped: 2", "rows skipped: 7", "finished", "my-run", "tiny"):
        assert note in page.text


def test_every_metric_gets_a_chart_even_unknown_ones(tmp_path):
    more = {"loss/balance": 0.1, "router/entropy": 1.0, "novelty": 3.0, "tokens_per_sec": 5, "memory_gb": 1, "lr": 1e-4}
    rows = [step(n, **{key: value * n for key, value in more.items()}) for n in range(1, 9)]
    rows[3].update({"eval/loss": 2.0, "eval/chat": 1.0})
    page = report(tmp_path, rows)
    assert page.titles[0] == "Loss"
    expected = [
        "Text, cross entropy",
        "Expert load balance",
        "chat",
        "Gradient norm",
        "Learning rate",
        "Epoch",
        "entropy",
    ]
    assert {*expected, "Tokens per second", "Memory, GB", "novelty"} <= set(page.titles)
    assert "Model FLOPs utilization" not in page.titles  # never known in this run
    names = [curve["name"] for chart in page.charts for curve in chart["curves"]]
    assert "held-out" in names


def test_constant_metrics_have_charts_and_duplicate_losses_are_omitted(tmp_path):
    rows = [step(n) for n in range(1, 9)]
    for row in rows:
        row["loss/text"] = row["loss"]  # the only term
    for row in rows[3::4]:
        row.update({"eval/loss": 2.0 + row["step"], "eval/loss/text": 2.0 + row["step"]})
        row.update({"eval/exact_match": 0.0, "eval/right": 0.0})  # two metrics with the same values
    page = report(tmp_path, rows)
    assert page.titles[:3] == ["Loss", "exact match", "right"]
    assert {"Gradient norm", "Learning rate", "Tokens per second", "Memory, GB", "Pack fill", "Epoch"} <= {*page.titles}
    assert not {"Text, cross entropy", "text"} & {*page.titles}
    for value in ("0%", "0.0001", "500", "1.5", "98%"):
        assert f"constant: {value}\n" in page.text
    comparison = tmp_path / "comparison.html"
    write_comparison([RunFolder(tmp_path), RunFolder(tmp_path)], comparison)
    assert "exact match" in Page(comparison.read_text()).titles


def test_samples_show_media_of_prompts_and_mark_right_and_wrong_responses(tmp_path):
    files = {"image": "samples/questions/0/0.png", "audio": "samples/questions/0/1.flac", "video": "a/0.mp4"}
    question = [{"modality": kind, "file": file} for kind, file in files.items()] + [
        {"modality": "series", "value": "[1, 2]"}
    ]
    judged = {"question": "What?", "expected": "four", "answer": "five", "question_items": question, "items": []}
    records = [
        judged | {"metrics": {"eval/exact_match": False, "eval/length": 4.0}},
        judged | {"metrics": {"eval/exact_match": True, "eval/length": 1.0}, "question_items": []},
        judged | {"answer": " four", "question_items": "damaged"},  # no metric, but the response is the expected one
        judged | {"answer": "[image]", "expected": "[image]", "items": [{"file": "a.png"}], "question_items": [7]},
        {"question": "What?", "expected": None, "error": f"row 3: {ATTACK}"},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"step": 2} | record) + "\n" for record in records))
    page = report(tmp_path, [step(n) for n in range(1, 4)])
    table = page.text.partition("Responses to held-out prompts")[2]
    marks = [line for line in table.splitlines() if line.startswith(("✓", "✗"))]
    assert marks == ["✗ exact_match", "✓ exact_match", "✓ equals the expected response"]
    assert "length 4" in table
    assert "no response: row 3" in table
    sources = {tag: attributes["src"] for tag, attributes in page.tags if tag in ("img", "audio", "video")}
    assert sources == {"img": "./a.png", "audio": f"./{files['audio']}", "video": f"./{files['video']}"}
    assert f'src="./{files["image"]}"' in page.html
    assert "[1, 2]" in table
    assert ATTACK not in page.html


def test_starts_are_listed_and_resumes_marked(tmp_path):
    for at in (0, 4, 7):
        add_start(tmp_path / "starts.jsonl", at, {"model": "Llama, 1 M parameters", "data": ATTACK})
    page = report(tmp_path, [step(n) for n in range(1, 11)])
    assert all(chart["marks"]["resumed"] == [4, 7] for chart in page.charts)
    assert "resumed" in page.text
    facts = page.text.partition("Run\n")[2]
    for word in ("Llama, 1 M parameters", "command", "versions", "torch 2", "Starts"):
        assert word in facts
    add_start(tmp_path / "starts.jsonl", 4, {})  # resumed from an older checkpoint, which discards later starts
    assert [start["step"] for start in read_starts(tmp_path / "starts.jsonl")] == [0, 4, 4]
    add_start(tmp_path / "starts.jsonl", 0, {})
    assert [start["step"] for start in read_starts(tmp_path / "starts.jsonl")] == [0]


def test_held_out_loss_with_other_terms_gets_its_own_axis(tmp_path):
    rows = [step(n, **{"loss/balance": 0.1 * n}) for n in range(1, 9)]
    rows[3].update({"eval/loss": 2.0, "eval/loss/text": 2.0})
    page = report(tmp_path, rows)
    assert page.titles[:2] == ["Loss", "Held-out loss"]
    assert "held-out" not in [curve["name"] for curve in page.charts[0]["curves"]]


def test_steps_that_waited_for_data_are_marked(tmp_path):
    rows = [step(n, data_wait=0.5 if n in (3, 6) else 0.01) for n in range(1, 9)]
    page = report(tmp_path, rows)
    assert page.charts[0]["marks"]["waited"] == [3, 6]
    assert "waited for data" in page.text


def test_numbers_in_tables_are_right_aligned(tmp_path):
    page = report(tmp_path, [step(n, skipped_rows=500) for n in range(1, 4)])
    assert '<td class="number">500</td>' in page.html


def test_git_state_describes_working_directory(tmp_path):
    assert git_state(tmp_path) is None
    for command in ("init -q", "config user.email a@b", "config user.name a", "commit -q --allow-empty -m one"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    assert re.fullmatch("[0-9a-f]{12}, clean", git_state(tmp_path))
    (tmp_path / "a").write_text("1")
    subprocess.run(["git", "-C", str(tmp_path), "add", "a"], check=True)
    assert git_state(tmp_path).endswith("1 file(s) changed")


def test_comparison_page_shows_all_runs(tmp_path, capsys):
    for name, rate in (("a/run", 1e-3), ("b/run", 1e-4), ("c", 1e-4)):
        rows = [step(n, **{"loss": rate * 1000 + 1 / n, "eval/loss": 2.0 + rate, "lr": rate * n}) for n in range(1, 30)]
        config = f"train:\n  steps: 29\n  lr: {rate}\nlog: {{dir: {name}}}\n"
        report(tmp_path / name, rows, config)
    out = tmp_path / "page.html"
    argv = ["report", *(str(tmp_path / name) for name in ("a/run", "b/run", "c"))]
    assert main([*argv, "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    page = Page(out.read_text())
    assert page.titles[:2] == ["Loss", "Held-out loss"]
    loss = {curve["name"]: curve["values"][-1] for curve in page.charts[0]["curves"]}
    assert loss.keys() == {"a/run", "b/run", f"{tmp_path.name}/c"}
    assert loss["a/run"] > loss["b/run"]
    differing = page.text.partition("Differences between the configurations")[2]
    assert "train.lr" in differing
    assert "log.dir" not in differing
    assert "train.steps" not in differing
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl not found" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_browser_draws_page_without_errors_or_scrollbar(tmp_path):
    """In a real browser: no script error, nothing wider than the screen, and a chart is read out under the pointer."""
    rows = [step(n, loss=5 - n / 20, **{"eval/loss": 2.0} if n % 5 == 0 else {}) for n in range(1, 60)]
    rows[30]["loss"] = "NaN"
    report(tmp_path, rows)
    probe = """<script>
    addEventListener('error', e => document.title = 'ERROR ' + e.message);
    addEventListener('load', () => {
      const plot = document.querySelector('[data-chart]'), box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 5}));
      const said = plot.parentNode.querySelector('output').textContent;
      const lines = document.querySelectorAll('path.line')[0].getAttribute('d').split('M').length - 1;
      const labels = plot.querySelectorAll('s').length;
      document.title = [innerWidth, document.documentElement.scrollWidth, lines, labels, said];
    });</script>"""
    page = tmp_path / "probe.html"
    page.write_text((tmp_path / "report.html").read_text().replace("<main>", probe + "<main>", 1))
    for width in (1280, 500):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += [f"--user-data-dir={tmp_path / str(width)}", f"--window-size={width},900", "--dump-dom"]
        done = subprocess.run(
            ["chromium", *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        inner, wide, lines, labels, said = re.search("<title>(.*?)</title>", done.stdout)[1].split(",", 4)
        assert int(wide) <= int(inner) == width
        assert int(lines) == 2  # before and after the step without a loss
        assert int(labels) > 8  # of both axes
        assert said.startswith("step ")


def test_page_loads_nothing_from_network(tmp_path):
    page = report(tmp_path, [step(n) for n in range(1, 30)])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.html)
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "img", "object", "base"}
    assert all("src" not in attributes for _, attributes in page.tags)
    assert "prefers-color-scheme: dark" in page.html


def test_page_of_ten_thousand_steps_is_small_and_keeps_extremes(tmp_path):
    rows = [step(n, **{f"loss/term{k}": random.Random(n * k).random() for k in range(1, 9)}) for n in range(1, 10_001)]
    rows[6543]["loss"], rows[7654]["loss"] = 12.625, 0.125
    page = report(tmp_path, rows)
    assert len(page.html.encode()) < 300_000
    loss = page.charts[0]["curves"][0]
    drawn = dict(zip(loss["steps"], loss["values"], strict=True))
    assert drawn[6544] == 12.625
    assert drawn[7655] == 0.125
    assert {1, 10_000} <= set(drawn)
    assert all(drawn[s] == pytest.approx(rows[s - 1]["loss"], rel=1e-4) for s in drawn)


@pytest.mark.parametrize("rows", [None, [], [{"step": 1}], [step(1)], [step(1, loss="NaN", grad_norm="Infinity")]])
@pytest.mark.parametrize("config", [None, "", "train: [", "just text", "train:\n  steps: many\n"])
def test_run_without_steps_gets_a_page(tmp_path, rows, config):
    page = report(tmp_path, rows, config)
    assert page.cards["Steps"] == str(len(rows or []))
    assert all(value is None or math.isfinite(value) for chart in page.charts for value in _values(chart))


def test_interrupted_run_shows_last_complete_step(tmp_path):
    run = RunFolder(tmp_path)
    report(tmp_path, [step(n) for n in range(1, 5)])
    with open(run.metrics, "a") as file:
        file.write('{"step": 5, "lo')
    page = Page(write_report(run).read_text())
    assert "step 4 of 10" in page.text


def test_bad_steps_are_gaps_marked_and_listed(tmp_path):
    rows = [step(n) for n in range(1, 11)]
    rows[4].update(loss="NaN", grad_norm="NaN", bad_steps=1)
    (tmp_path / "bad_steps.jsonl").write_text(json.dumps({"step": 5, "samples": ["a.jsonl:17"]}) + '\n{"step": 6, "sam')
    (tmp_path / "bad_rows.jsonl").write_text(json.dumps({"file": "b.jsonl", "line": 3, "error": "no text"}) + "\n")
    page = report(tmp_path, rows)
    for title in ("Loss", "Gradient norm"):
        chart = page.charts[page.titles.index(title)]
        (curve,) = chart["curves"]
        assert [step for step, value in zip(curve["steps"], curve["values"], strict=True) if value is None] == [5]
        assert chart["marks"]["skipped"] == [5]
    assert all(text in page.text for text in ("Skipped steps", "a.jsonl:17", '{"step": 6, "sam', "b.jsonl", "no text"))


def test_config_and_data_are_escaped(tmp_path):
    folder = tmp_path / ATTACK.replace("/", "-")
    folder.mkdir()
    for name in ("bad_steps.jsonl", "bad_rows.jsonl"):
        (folder / name).write_text(json.dumps({ATTACK: ATTACK}) + f"\n{ATTACK}\n")
    rows = [step(n, **{f"loss/{ATTACK}": 1.0, f"{ATTACK}/x": 1.0, "</script><b>": 2.0}) for n in range(1, 4)]
    config = f"model:\n  path: {json.dumps(ATTACK)}\ntrain:\n  steps: 10\n"
    page = report(folder, rows, config, [ReportSection(ATTACK, "")])
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{}]  # ours
    assert page.text.count(ATTACK) >= 8  # as text: model, config, chart titles, table heads and cells, section


def test_additional_sections_appear_under_their_title(tmp_path):
    picture = '<img alt="grid" src="data:image/png;base64,AA==">'
    page = report(tmp_path, [step(1)], sections=[ReportSection("Samples", picture)])
    assert f"<h2>Samples</h2>{picture}" in page.html


def test_large_spike_switches_axis_to_log_scale(tmp_path):
    rows = [step(n, loss=2.0) for n in range(1, 30)]
    rows[7]["loss"] = 4000.0
    page = report(tmp_path, rows)
    assert "log scale" in page.html.split("</figcaption>")[0]


def test_downsampling_keeps_ends_extremes_and_gaps():
    values = [random.Random(i).random() for i in range(5000)]
    values[1234], values[4321], values[2500] = 9.0, -9.0, math.nan
    kept = downsample(values, 100)
    assert kept == sorted(set(kept))
    assert len(kept) <= 2 * 100 + 3
    assert {0, 1234, 2500, 4321, 4999} <= set(kept)
    assert downsample(values[:200], 100) == list(range(200))


def test_smoothing_is_two_sided_exponential_mean():
    values = [3.0, math.nan, 5.0, 4.0, 10.0]
    fade = 1 - 1 / 4
    for i, mean in enumerate(smooth(values, 4)):
        weights = {j: fade ** abs(i - j) for j, value in enumerate(values) if math.isfinite(value)}
        assert mean == pytest.approx(sum(w * values[j] for j, w in weights.items()) / sum(weights.values()))
    assert all(map(math.isnan, smooth([math.nan] * 3, 5)))


def test_templates_are_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["omnizoo"]
    packaged = {file for pattern in patterns for file in (ROOT / "omnizoo").glob(pattern)}
    templates = set(TEMPLATES.iterdir())
    assert {"base.html", "report.html", "comparison.html", "plan.html", "data.html"} <= {
        file.name for file in templates
    }
    assert templates <= packaged


def test_template_values_are_escaped_by_default():
    differences = [{ATTACK: ATTACK}]
    figures = [[(ATTACK, ATTACK, "")]]
    page = render("comparison.html", title=ATTACK, names=[ATTACK], figures=figures, groups=[], differences=differences)
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;") == 7
