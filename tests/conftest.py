"""Each test starts without variables of a distributed launch, and signal handlers and environment are restored."""

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from processes import WORLD, start_server

logging.disable(logging.DEBUG)  # torch logs every tensor of a checkpoint, which hides the message of a failing test

# A deadline per example would measure how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A background job of a script ignores SIGINT, and so do all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("slow") for item in session.items):
        start_server()  # before a test starts a server with fewer imports or blocked signals


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*WORLD, "OMNIZOO_LAUNCHER_FD", "OMNIZOO_ERROR_FD", "OMNIZOO_STORE_FD"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
