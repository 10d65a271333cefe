"""A plugin: settings and fixtures that every test shares."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # with the first optimizer torch imports it anyway
import typer.testing

from tests.helpers import alone, rewritten, workers
from tests.helpers.cover import leave_out_what_is_long
from tests.helpers.processes import Pool, close_pools

TESTS = Path(__file__).parents[1]

pytest_plugins = ["tests.helpers.stuck"]
# In the place of pytest's plugin, which adds itself to some sixty loggers six times a test: half of what an empty test
# takes. Without any handler warnings of loggers would be printed.
logging.getLogger().addHandler(logging.NullHandler())
# To build all commands from their functions is two thirds of what one takes; a program does it once, as this does.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing of what tests are collected into is garbage."""
    gc.disable()
    try:
        rewritten.make_a_part(session.config, TESTS)
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Behind all that parametrizes."""
    leave_out_what_is_long(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none, and keep a folder's tests with real processes together.

    An xdist worker starts the pools of ranks that its tests ask for, and each start takes seconds.
    """
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if alone.runs_elsewhere(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        elif item.get_closest_marker("processes"):
            folder = item.path.relative_to(TESTS).parts[0]
            item.add_marker(pytest.mark.xdist_group(f"processes of {folder}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Whatever has been imported stays, and need not be looked at whenever garbage is collected: not once, either."""
    if hasattr(session.config, "workerinput"):
        _check_groups(session.items)
        workers.report_less(session.config)
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module has imported, compiled or cached stays too.

    Who collects garbage, as the engine does where optimizers may be gone, would look through a million such objects.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    if hasattr(item.config, "workerinput") and _group_of(item) != _group_of(nextitem):
        close_pools()  # others that share them are run by this worker, one behind the other


def _group_of(item: pytest.Item | None) -> object:
    marker = None if item is None else item.get_closest_marker("xdist_group")
    return None if marker is None else (marker.args, marker.kwargs)


def _check_groups(items: list[pytest.Item]) -> None:
    """Raises when xdist and pytest do not understand each other: then modules run twice, and nothing says so."""
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(f"pytest-xdist has not seen the group of {item.nodeid}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Take the outcome of a test that runs in a process of its module's own."""
    if not alone.runs_elsewhere(pyfuncitem):
        return None
    failure = alone.outcome_of(pyfuncitem)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    torch.set_num_threads(1)
    # For devices that may come to be there `torch.manual_seed` keeps where it was called: a millisecond each time.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Pool]:
    """Two gloo processes that stay alive for the whole session: `two_processes.run(function, *arguments)`."""
    with Pool(2) as pool:
        yield pool
