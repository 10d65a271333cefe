"""What ranks tell each other: an error arrives on every rank as what it was raised as."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import terrazzo as tz
from terrazzo import exchange
from terrazzo.errors import TerrazzoError
from terrazzo.exchange import on_first, patiently, together
from tests.helpers.threads import run_in_threads

KINDS = [each for each in vars(tz).values() if isinstance(each, type) and issubclass(each, TerrazzoError)]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_an_error_is_of_its_own_kind_on_every_rank(kind: type[TerrazzoError]) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise kind("what happened")

    def body(rank: int) -> tuple[type[BaseException], str]:
        with pytest.raises(TerrazzoError) as caught:
            together(fail, tz.Misuse)
        return caught.type, str(caught.value)

    assert run_in_threads(2, body) == [(kind, "what happened")] * 2


FOREIGN: list[tuple[Exception, type[TerrazzoError], type[TerrazzoError]]] = [
    (KeyError("chat"), tz.BadInput, TerrazzoError),
    (ConnectionResetError("by peer"), tz.BadInput, TerrazzoError),
    (TimeoutError("no answer"), tz.Misuse, TerrazzoError),
    (PermissionError("not yours"), tz.BadInput, tz.BadInput),
    (ConnectionResetError("by peer"), tz.SaveFailed, tz.SaveFailed),
]


@pytest.mark.parametrize("work_of", [together, patiently])
@pytest.mark.parametrize(
    ("error", "failed", "raised"), FOREIGN, ids=[f"{type(e).__name__}-{f.__name__}" for e, f, _ in FOREIGN]
)
def test_only_what_the_system_refuses_is_bad_input_and_a_bug_is_shown_as_one(
    work_of: Any, error: Exception, failed: type[TerrazzoError], raised: type[TerrazzoError]
) -> None:
    """A bug has its traceback on all ranks, the exit code of a failure, and may be started again; as a connection."""

    def fail(rank: int) -> None:
        if rank == 1:
            raise error

    def body(rank: int) -> str:
        with pytest.raises(TerrazzoError) as caught:
            work_of(lambda: fail(rank), failed)
        assert caught.type is raised
        assert caught.value.__cause__ is (error if rank == 1 else None)
        return str(caught.value)

    other, own = run_in_threads(2, body)
    assert own == f"rank 1: {type(error).__name__}: {error}"
    assert other.startswith(own)
    assert ("raise error" in other) == (raised is TerrazzoError)
    assert not TerrazzoError.lasts


def test_an_error_is_shown_as_following_from_this_ranks_own_only_where_it_does() -> None:
    def fail(rank: int) -> None:
        raise [KeyError("chat"), OSError("full")][rank]

    def body(rank: int) -> tuple[str, str]:
        with pytest.raises(TerrazzoError) as caught:
            together(lambda: fail(rank), tz.BadInput)
        return str(caught.value), repr(caught.value.__cause__)

    (said, cause), (other, others_cause) = run_in_threads(2, body)
    assert (said, cause) == ("rank 0: KeyError: 'chat'", "KeyError('chat')")
    assert other.startswith(f"{said}\nTraceback")
    assert others_cause == "None"


def test_an_error_of_a_kind_below_the_tree_is_of_the_nearest_kind_in_it() -> None:
    class Damaged(tz.Misuse):
        """Of the name of another."""

    def body(rank: int) -> type[BaseException]:
        with pytest.raises(TerrazzoError) as caught:
            on_first(lambda: (_ for _ in ()).throw(Damaged("what happened")))
        return caught.type

    assert run_in_threads(2, body) == [tz.Misuse] * 2


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", torch.device("cpu")),
        ("cpu:gloo,cuda:nccl", torch.device("cpu")),
        ("cuda:nccl", torch.device("cuda", 3)),  # of init_process_group() where there is a GPU, too
    ],
)
def test_values_lie_where_the_group_can_carry_them(
    config: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert exchange._device() == device


@pytest.mark.parametrize("said", [None, [1, "two"], object()])
def test_what_the_first_rank_does_all_ranks_hear_of(said: object) -> None:
    """Its value; and its error, that of a value too which cannot be told."""
    done: list[int] = []

    def work() -> object:
        done.append(dist.get_rank())
        return said

    def body(rank: int) -> object:
        try:
            return on_first(work, tz.Misuse)
        except TerrazzoError as error:
            return str(error).partition("\n")[0]

    untold = "rank 0: TypeError: Object of type object is not JSON serializable"
    assert run_in_threads(2, body) == [said if type(said) is not object else untold] * 2
    assert done == [0]


def test_a_long_value_of_the_first_rank_is_sent_as_it_is_once_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, every rank would send as many bytes."""
    monkeypatch.setattr(dist, "all_gather", lambda *_: pytest.fail("it is of one rank"))
    value, order = {"ü": list(range(1000)), "none": None}, list[str]()

    def body(rank: int) -> Any:
        if rank == 1:
            time.sleep(0.2)
            order.append("the last has come")
        told = on_first(lambda: value)
        order.append("one goes on")
        return told

    assert run_in_threads(3, body) == [value] * 3
    assert order[0] == "the last has come"


def test_long_work_on_one_rank_keeps_no_other_waiting_in_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits = exchange.gather_json, []

    def timed(value: Any) -> list[Any]:
        start = time.monotonic()
        found = real(value)
        waits.append(time.monotonic() - start)
        return found

    monkeypatch.setattr(exchange, "gather_json", timed)
    monkeypatch.setattr(exchange, "ROUND_S", 0.05)
    done = run_in_threads(2, lambda rank: patiently(lambda: time.sleep(3 * (1 - rank)) or rank, tz.BadInput))
    assert done == [0, 1]
    assert max(waits) < 1.5


@pytest.mark.parametrize("rank_of_it", [0, 1])
def test_an_error_of_long_work_is_raised_on_all_ranks(rank_of_it: int) -> None:
    def body(rank: int) -> str:
        def work() -> None:
            if rank == rank_of_it:
                raise tz.Misuse("what happened")

        with pytest.raises(tz.Misuse) as caught:
            patiently(work, tz.BadInput)
        return str(caught.value)

    assert run_in_threads(2, body) == ["what happened"] * 2


def test_long_work_is_left_behind_where_another_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def gone(value: Any) -> list[Any]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(exchange, "gather_json", gone)
    monkeypatch.setattr(exchange, "ROUND_S", 0.05)
    with pytest.raises(RuntimeError, match="closed by peer"):
        patiently(lambda: goes_on.wait(60), tz.BadInput)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "terrazzo-patiently"]
    assert left.daemon, "the interpreter's own end would wait for it"
    goes_on.set()
    left.join(60)
    assert not left.is_alive()
