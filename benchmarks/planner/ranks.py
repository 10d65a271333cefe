"""Processes that are ranks of one group, kept for many functions."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

__all__ = ["Ranks"]


class Ranks:
    """`count` gloo processes of one thread each."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-ranking-")
        self._ranks = [ProcessPoolExecutor(1, mp_context=context) for _ in range(count)]
        store = os.path.join(self._folder.name, "store")
        self._all([each.submit(_join, rank, count, store) for rank, each in enumerate(self._ranks)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._ranks:
            each.shutdown(wait=error is None, cancel_futures=True)
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank; what each returns."""
        return self._all([each.submit(function, *arguments) for each in self._ranks])

    def _all(self, futures: list[Any]) -> list[Any]:
        wait(futures, return_when="FIRST_EXCEPTION")
        return [each.result() for each in futures if each.done() or not any(other.done() for other in futures)]


def _join(rank: int, count: int, store: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=limit)
