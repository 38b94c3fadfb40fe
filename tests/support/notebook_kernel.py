"""A stand-in for the IPython of a notebook kernel."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the stand-in. Returns a list to which each new content of the display is appended."""
    contents: list[str] = []
    handle = SimpleNamespace(update=contents.append)

    def display(content: str, display_id: bool) -> Any:
        assert display_id is True
        contents.append(content)
        return handle

    ipython: Any = ModuleType("IPython")
    ipython_display: Any = ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = ipython_display
    ipython_display.display = display
    ipython_display.HTML = str
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    return contents
