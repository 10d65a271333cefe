"""Arguments in a shell script: what bash starts the program with, found without running anything."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from terrazzo.documents import load, parse_arguments, write_arguments
from terrazzo.errors import BadInput

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=2
WORLD=$(($GPUS*$NODES))  # not used below
DIR=/data/"my runs"
MODEL_ARGS=(
    --num-layers 96   # as in the paper (of 2020)
    --hidden-size 12288
    --name "two words"
)
EXTRA="--bf16 --lr 6.0e-5"
EXTRA+=" --no-rope-fusion"
torchrun --nproc_per_node $GPUS --nnodes=${NODES} train.py \\
    ${MODEL_ARGS[@]} \\
    $EXTRA --split 949,50,1 --save "$DIR/out" \\
    --world $WORLD --seed ${SEED:-7} --data-path 0.5 a 0.5 b --quoted '$GPUS'
"""


def told(script: str, tmp_path: Path) -> list[str]:
    """What bash gives the program, by a program that says what it is given."""
    (tmp_path / "train.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    launcher = f'#!/bin/bash\nwhile [[ $1 != *.py ]]; do shift; done\nexec {sys.executable} "$@"\n'
    (tmp_path / "torchrun").write_text(launcher)
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "run.sh").write_text(script)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=path, capture_output=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def flat(arguments: dict[str, Any]) -> list[str]:
    """Arguments as words, numbers as Python writes them."""
    words = []
    for name, value in arguments.items():
        given = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, given)]
    return words


def test_a_script_means_what_bash_makes_of_it(tmp_path: Path) -> None:
    found = parse_arguments(SCRIPT, "run.sh")
    assert found.pop("torchrun") == {"nproc_per_node": 8, "nnodes": 2}
    assert found["lr"] == 6e-5
    assert [word.replace("6.0e-5", "6e-05") for word in told(SCRIPT, tmp_path)] == flat(found)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("--lr 1e-4\n--bf16\n", {"lr": 1e-4, "bf16": True}),
        ("python -u pretrain.py --lr=1e-4 --data-path $1", {"lr": 1e-4, "data-path": "$1"}),
        ('A="--bf16"\nrun="python p.py $A --seed 3"\nsrun -l sh -c "$run"', {"bf16": True, "seed": 3}),
        ("if [ -z $1 ]; then X=1; fi\npython p.py --bf16", {"bf16": True}),
        ("python p.py --min-lr -1 --bf16", {"min-lr": -1, "bf16": True}),
        ("python p.py --weight-decay 0.1 --weight-decay 0.1", {"weight-decay": 0.1}),
        ("p.py --run 007 --tag -01 --x 0 --y 0.50 --z 1e3", {"run": "007", "tag": "-01", "x": 0, "y": 0.5, "z": 1000}),
    ],
)
def test_files_of_arguments(script: str, found: dict[str, Any]) -> None:
    assert parse_arguments(script, "x.sh") == found


LAUNCHED = {"torchrun": {"nproc-per-node": 8}, "lr": 1e-4, "spec": "my/spec.py"}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("pretrain_gpt.py --yaml-cfg model.py --lr 1e-4", {"yaml-cfg": "model.py", "lr": 1e-4}),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("python -m torch.distributed.run --nproc-per-node 8 p.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("python torch/distributed/run.py --nproc-per-node 8 p.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("accelerate launch --nproc-per-node 8 p.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("python launch.py -n 8 p.py --spec my/spec.py --bf16", {"spec": "my/spec.py", "bf16": True}),
        ("--lr 1e-4 --spec my/spec.py --bf16", {"lr": 1e-4, "spec": "my/spec.py", "bf16": True}),
        ("--lr 1e-4\n--spec my/spec.py", {"lr": 1e-4, "spec": "my/spec.py"}),
    ],
)
def test_files_that_options_name_are_not_the_program(script: str, arguments: dict[str, Any]) -> None:
    assert parse_arguments(script, "x.sh") == arguments


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("python p.py --lr 1 --note 'as train.py does'", {"lr": 1, "note": "as train.py does"}),
        ("python p.py --lr 1 -c 'python q.py --lr 2'", {"lr": [1, "-c", "python q.py --lr 2"]}),
        ("srun /bin/bash -euo pipefail -lc 'python p.py --lr 1' x", {"lr": 1}),
    ],
)
def test_only_text_for_a_shell_is_a_command(script: str, arguments: dict[str, Any]) -> None:
    assert parse_arguments(script, "x.sh") == arguments


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("if [ $1 ]; then A=(--bf16); else A=(--fp16); fi\npython p.py --lr 1 ${A[@]}", r"\$A is set in line 1"),
        ("for i in 1 2; do A+=' --x'; done\npython p.py --lr 1 $A", r"\$A is set in line 1"),
        ("python p.py --lr 1\npython q.py --lr 2", "several programs"),
        ("python p.py --lr 1 --lr 2", "--lr is given twice, as 1 and 2"),
        ("echo hello", "no program an argument"),
        ("A=(--lr 1", "the bracket in line 1 is not closed"),
        ("A=xx\n" + "A=$A$A$A$A$A$A$A$A\n" * 20 + "python p.py --lr $A", "text without end"),
    ],
)
def test_what_only_a_run_could_tell_is_refused(script: str, words: str) -> None:
    start = time.process_time()
    with pytest.raises(BadInput, match=words):
        parse_arguments(script, "x.sh")
    assert time.process_time() - start < 1


def test_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"X=$(touch {tmp_path}/made)\npython p.py --lr 1 --name `touch {tmp_path}/made` --x $X\n")
    assert load(file).document["lr"] == 1
    assert not (tmp_path / "made").exists()


def test_what_is_written_is_read_again_and_is_a_script(tmp_path: Path) -> None:
    document = {
        "torchrun": {"nproc-per-node": 8},
        "bf16": True,
        "fp16": False,
        "lr": 3e-4,
        "name": "a b'c",
        "x": [1, 2],
    }
    text = write_arguments(document)
    assert parse_arguments(text, "x.sh") == {key: value for key, value in document.items() if value is not False}
    assert told(text.replace("pretrain_gpt.py", "train.py"), tmp_path) == shlex.split(
        '--bf16 --lr 0.0003 --name "a b\'c" --x 1 2'
    )
