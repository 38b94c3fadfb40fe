"""Notebooks show progress and losses below the cell, and errors without frames. IPython is replaced by a stand-in."""

import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from notebook_kernel import install_kernel

from omnizoo.config.errors import TrainingError, UserError
from omnizoo.reporting.notebook import NotebookProgress, is_notebook, loss_curves, open_progress
from omnizoo.reporting.progress import Progress


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """The successive contents of the display of a notebook."""
    return install_kernel(monkeypatch)


def test_notebook_progress_is_only_used_in_a_kernel(shown, monkeypatch):
    assert isinstance(open_progress(10, 0, 1, []), NotebookProgress)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # IPython in a terminal
    assert not is_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_notebook()
    assert type(open_progress(10, 0, 1, [])) is Progress


def test_notebook_shows_line_curves_and_messages_in_one_display(shown):
    with NotebookProgress(4, 2, [{"step": 1, "loss": 6.0}, {"step": 2, "loss": 5.0, "eval/loss": 5.5}]) as progress:
        progress.update(3, {"loss": 4.0, "eval/loss": None})
        progress.say("<b>warning</b>")
        progress.update(4, {"loss": 3.0, "eval/loss": 3.5})
    final = shown[-1]
    assert "4/4  100%  loss 3" in final
    assert "&lt;b&gt;warning" in final
    assert "eval/loss 3.5000" in final
    (svg,) = re.findall("<svg.*?</svg>", final, re.DOTALL)
    lines = [node.get("points") for node in ElementTree.fromstring(svg).iter("polyline")]
    assert [len(points.split()) for points in lines] == [4, 2]
    assert lines[0].split()[0] == "0.0,0.0"
    assert lines[0].split()[-1] == "640.0,160.0"


def test_notebook_display_is_updated_at_most_once_per_second(shown):
    now = [0.0]
    with NotebookProgress(1000, clock=lambda: now[0]) as progress:
        for step in range(1, 1001):
            now[0] += 0.01
            progress.update(step, {"loss": 1 / step})
    assert 10 <= len(shown) <= 13
    assert "1000/1000" in shown[-1]


def test_curves_of_long_runs_have_few_points():
    curves = loss_curves({"loss": [(step, step % 7) for step in range(100_000)]})["curves"]
    assert len(curves["loss"].split()) <= 402


def test_curve_of_one_point_is_not_drawn(shown):
    with NotebookProgress(2) as progress:
        progress.update(1, {"loss": float("nan")})
    assert "<svg" not in shown[-1]


@pytest.mark.parametrize("kind", [UserError, TrainingError])
def test_errors_have_no_frames_in_notebooks(kind):
    assert kind("train.lr: wrong.\nmodel.path: wrong.")._render_traceback_() == [
        f"{kind.__name__}: train.lr: wrong.",
        "model.path: wrong.",
    ]
