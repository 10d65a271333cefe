"""Each integration on the simulated device: it trains as on the host, resumes to the bit, and nothing is found.

How often the host waits for the device is printed (`-rP`), and is the other library's affair as much as Terrazzo's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cover import mostly_long
from tests.hostcuda.cases import TOLERANCES
from tests.hostcuda.integrations import INTEGRATIONS, Passage, through
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test
LIBRARIES = {"accelerate": ["accelerate"], "lightning": ["lightning"], "transformers": ["transformers", "accelerate"]}
"""What an integration needs. The others need nothing beside Terrazzo."""


@pytest.mark.parametrize("name", mostly_long(INTEGRATIONS, "fsdp2"))
def test_an_integration(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    for library in LIBRARIES.get(name, ()):
        pytest.importorskip(library)
    passages: list[Passage] = two_ranks.run(through, name, str(tmp_path), timeout_s=150.0)
    for passage in passages:
        print(f"{passage.waits.total()} waits:")
        print(*(f"{count} {text}" for text, count in passage.waits.most_common(8)), sep="\n")
        assert passage.faults == []
        within = TOLERANCES["fp32"][1] * max(passage.on_host)
        assert passage.losses == pytest.approx(passage.on_host, rel=0, abs=within)
        assert passage.resumed == passage.losses[len(passage.losses) // 2 :]
