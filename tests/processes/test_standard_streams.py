"""What is said on standard streams that are not there."""

from __future__ import annotations

import sys

import pytest

from terrazzo.processes.standard_streams import say_on_stderr


def test_nothing_is_said_without_a_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python has it where whoever started it has closed the descriptor."""
    monkeypatch.setattr(sys, "stderr", None)
    say_on_stderr("a warning")
    assert capsys.readouterr().out == ""
