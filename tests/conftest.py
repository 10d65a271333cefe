"""What tests share is in `helpers/suite.py`. The process that hands tests out to xdist's workers goes without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import rewritten, workers


def pytest_configure(config: pytest.Config) -> None:
    if not workers.are_asked_for(config):
        config.pluginmanager.import_plugin("tests.helpers.suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    rewritten.make_ahead(config, Path(__file__).parent)
    workers.fork()


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.helpers.handed_out import Files  # xdist may not be there

    return Files(config, log)
