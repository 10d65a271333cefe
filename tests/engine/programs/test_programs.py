"""Random programs agree with one plain process or are refused by name; planted defects are found.

The long form, `TERRAZZO_PROGRAMS=0:1000`, runs those seeds with every feature, in processes that may die. So does

    python -m tests.engine.programs --seeds 0:1000
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.engine.programs.compare import AGREES, WRONG, Verdict, judge
from tests.engine.programs.features import FEATURES, KNOWN_FAILING, features_of, refusable, without
from tests.engine.programs.grammar import Program, draw
from tests.engine.programs.mutations import MUTATIONS, Mutation
from tests.engine.programs.shrink import shrink

SEEDS = range(15)
LONG = os.environ.get("TERRAZZO_PROGRAMS", "")

pytestmark = pytest.mark.filterwarnings("ignore")


def program_of(seed: int) -> Program:
    return without(draw(seed), KNOWN_FAILING)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_agrees_or_is_refused(seed: int) -> None:
    program = program_of(seed)
    verdict = judge(program)
    assert verdict.good, f"{program}\n{verdict.kind}: {verdict.detail}"


def test_most_programs_are_run_to_their_end() -> None:
    """Of all that may be drawn, few programs may be refused, and few are refused by torch itself."""
    drawn = [draw(seed) for seed in range(1000)]
    assert sum(map(refusable, drawn)) < 450
    seen = Counter(name for program in drawn for name in features_of(program))
    assert {name: seen[name] for name in FEATURES if seen[name] < 10} == {}


def test_a_seed_is_always_the_same_program() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    program = draw(7)
    assert eval(repr(program), vars(sys.modules["tests.engine.programs.grammar"])) == program


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_defect_is_found(mutation: Mutation) -> None:
    first = 0 if LONG else MUTATIONS[mutation]
    for seed in range(first, first + 100):
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            found = not judge(program_of(seed)).good
        if found and judge(program_of(seed)).good:
            return
    pytest.fail("100 programs ran as if nothing were wrong")


def test_a_failing_program_is_made_small() -> None:
    def judged(program: Program) -> Verdict:
        fails = program.precision == "bf16" and any(node.edit for node in program.tree.children)
        return Verdict(WRONG if fails else AGREES)

    seed = next(seed for seed in range(1000) if judged(draw(seed)).kind == WRONG)
    program, _ = shrink(draw(seed), judged)
    assert len(program.tree.children) == 1
    assert [name for name in features_of(program) if not name.startswith("output edited")] == ["bf16"]


@pytest.mark.skipif(not LONG, reason="the long form: set TERRAZZO_PROGRAMS=first:end")
@pytest.mark.timeout(7200)
def test_many_random_programs() -> None:
    command = [sys.executable, "-m", "tests.engine.programs", "--seeds", LONG]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
