"""What ranks tell each other: an error arrives on every rank as what it was raised as."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import terrazzo as tz
from terrazzo.checkpoint.exchange import together
from terrazzo.errors import TerrazzoError
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
