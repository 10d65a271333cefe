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
    told = tmp_path / "told.json"
    (tmp_path / "train.py").write_text(f"import json, sys\njson.dump(sys.argv[1:], open({str(told)!r}, 'w'))\n")
    launcher = f'#!/bin/bash\nwhile [[ $1 != *.py ]]; do shift; done\nexec {sys.executable} "$@"\n'
    (tmp_path / "torchrun").write_text(launcher)
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "run.sh").write_text(script)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=path, capture_output=True, check=True)
    found: list[str] = json.loads(told.read_text())
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


RUN = "torchrun train.py --lr $LR"
READ = {
    "errors go with the rest": f"LR=1; {RUN} --bf16 2>&1 | tee log",
    "into a file": f"LR=1\n{RUN} > log.txt 2>err.txt --bf16",
    "both into a file": f"LR=1\n{RUN} --bf16 &>> log & wait",
    "to a process": f"LR=1\n{RUN} --bf16 > >(cat >&2) < /dev/null",
    "a word as input": f"LR=1\n{RUN} --bf16 <<< '--x 1'",
    "a word as input, and more lines": f"LR=1\ncat <<< EOF >&2\n{RUN}",
    "a document as input": f"LR=1\ncat <<EOF > made.json\nLR=2\n{RUN}\n' \"\nEOF\n{RUN}",
    "an indented one": f"LR=1\ncat <<-'E F' >&2\n\tLR=2\n\tE F\n{RUN}",
    "only for a command": "LR=1\nLR=2 torchrun train.py --lr $LR",
    "told to another shell": "export LR=1; bash -c 'torchrun train.py --lr $LR'",
    "all words of a declaration come first": "A=0; export A=1 B=$A; torchrun train.py --x $A --y $B",
    "but for those of arrays": "A=(0); declare -a A=(1 2) B=($A 3); torchrun train.py --x ${A[@]} --y ${B[@]}",
    "in steps": "LR=1; cd . && torchrun train.py --lr $LR",
    "evaluated": "CMD='torchrun train.py --lr 1 --name \"a b\"'; eval $CMD",
    "lines joined in quotes": 'A=" \\\n --lr 1 \\\n --bf16"\ntorchrun train.py $A',
    "quotes in quotes": 'D="a\\$b\\"c"; torchrun train.py --save "$D/${D}" --x \\$D',
    "a part of a word": "A='1 2 '; torchrun train.py --x a${A}b --y 'c'\"$A\"",
    "an array as one word": 'A=(1 "2 3"); torchrun train.py --x "${A[*]}" --y "${A[@]}" --z ${A[1]} $A',
    "an array that is empty": 'A=(); torchrun train.py --x "${A[@]}" --y "$A"',
    "another value where there is none": 'A=; torchrun train.py --x ${A:-1} --y "${B:-2}" --z "${A-3}" ${1:-4}',
    "nested values": 'torchrun train.py --x ${A:-${B:-"1 2"}} ${C:+--bf16} --y ${D:=5} $D',
    "arithmetic": "A=2; torchrun train.py --x $((A * 3)) --y $(($A*${A}))",
    "a test": "LR=1; [[ $LR == 1 && ! ( -n $X || 2 > 3 ) ]]; torchrun train.py --lr $LR",
    "what a shell of its own sets": "export LR=1; (cd /; ls > /dev/null); torchrun train.py --lr $LR",
    "a case beside": "LR=1; case $X in a|b) echo x;; *) ;; esac; torchrun train.py --lr $LR",
    "a function beside": "f() { echo $1; }\nfunction g\n{\n echo y\n}\nLR=1; torchrun train.py --lr $LR",
    "a comment": "LR=1 # it's (one\ntorchrun train.py --lr $LR --x a#b # --bf16",
    "unknown, and not asked for": "if [ $X ]; then A=1; fi; echo $A; torchrun train.py --lr 1",
    "joined in a word": "torchrun train.py --l\\\nr 1 \\\n\\\n--bf16",
}
"""Scripts by what is special in them."""


@pytest.mark.parametrize("label", READ)
def test_the_program_gets_what_bash_gives_it(label: str, tmp_path: Path) -> None:
    found = parse_arguments(READ[label], "run.sh")
    words = told(READ[label], tmp_path)
    assert flat(found) == words, label
    assert words


REFUSED = {
    r"\$LR is set in line": [
        "LR=1; f() { LR=3; }; torchrun t.py --lr $LR",
        "LR=1; f()\n{\n LR=3\n}\nLR=2; f; torchrun t.py --lr $LR",
        "LR=1; function f { LR=3; }; torchrun t.py --lr $LR",
        'LR=1; [ -n "$BIG" ] && LR=3; torchrun t.py --lr $LR',
        'LR=1; [ -n "$BIG" ] ||\nLR=3; torchrun t.py --lr $LR',
        "LR=1; [[ -n $BIG ]] && { LR=3; }; torchrun t.py --lr $LR",
        "LR=1; (LR=3); torchrun t.py --lr $LR",
        "LR=1; case $X in a) LR=2;; (b) LR=3;; esac; torchrun t.py --lr $LR",
        "LR=1; while read x; do LR=$x; done < file; torchrun t.py --lr $LR",
        "LR=1; LR=3 | cat; torchrun t.py --lr $LR",
        "LR=1; read -r LR < file; torchrun t.py --lr $LR",
        "LR=1; printf -v LR %s 3; torchrun t.py --lr $LR",
        "LR=1; ((LR++)); torchrun t.py --lr $LR",
        "LR=1; let LR=3; torchrun t.py --lr $LR",
        "LR=1; unset LR; torchrun t.py --lr ${LR:-3}",
        "LR=1; declare -i LR=1+2; torchrun t.py --lr $LR",
        "LR=(1); LR[0]=3; torchrun t.py --lr $LR",
        "LR=1; if [ $X ]; then export LR=3; fi; torchrun t.py --lr $LR",
        "if [ $X ]; then : ${LR:=3}; fi; torchrun t.py --lr $LR",
        "LR=1; eval 'if [ $X ]; then LR=3; fi'; torchrun t.py --lr $LR",
        "LR=1; [ $X ] && LR=3; A=$LR; B=(--lr $A); torchrun t.py ${B[@]}",
        "for LR in 1 3; do torchrun t.py --lr $LR; done",
        "for ((LR=1; LR<3; LR++)); do torchrun t.py --lr $LR; done",
        "LR=1; [ $X ] && LR=3; torchrun t.py --lr ${LR:-2}",
        "LR=1; [ $X ] && LR=3; CMD='--lr $LR'; eval torchrun t.py $CMD",
    ],
    r"\$LR is set again for a later turn or call": [
        "LR=1; f() { torchrun t.py --lr $LR; }; LR=3; f",
        "LR=1; while sleep 1; do torchrun t.py --lr $LR; LR=3; done",
        'LR=1; f() { bash -c "torchrun t.py --lr $LR"; }; LR=3; f',
    ],
    r"\$LR may be set by": [
        "LR=1; source conf.sh; torchrun t.py --lr $LR",
        "LR=1; . conf.sh; torchrun t.py --lr $LR",
        'LR=1; eval "$(cat conf.sh)"; torchrun t.py --lr $LR',
        "f() { . conf.sh; }; LR=1; f; torchrun t.py --lr $LR",
    ],
    "without `export`": ["LR=1; bash -c 'torchrun t.py --lr $LR'"],
    "is what the script is given": ['torchrun t.py --lr 1 "$@"', "torchrun t.py --lr 1 $*"],
    "is worked out when the script runs": [
        "torchrun t.py ${@:2}",
        "A=xlr; torchrun t.py --${A#x} 1",
        "A=lr; torchrun t.py --x ${#A}",
    ],
    "stands for several words": ["torchrun t.py --x {1,2}", "torchrun t.py --x a{1..3}"],
    "stands for another character": ["torchrun t.py --x $'a\\n'"],
    "begins with --bf16": [
        "torchrun t.py --lr 1 \\ \n --bf16",
        "torchrun t.py --lr 1 \\ # the rate\n --bf16",
        "torchrun t.py --lr 1 \\\n # --wd 1 \\\n --bf16",
        "torchrun t.py --lr 1\n--bf16",
    ],
    "closes nothing": ["LR=1; }; torchrun t.py --lr $LR", "fi", "if x; then y; done", "(a))"],
    "is not closed": ["if x; then torchrun t.py --lr 1", "{ torchrun t.py --lr 1", 'torchrun t.py --lr "1'],
    "has no end, a line 'EOF'": ["cat <<EOF\ntorchrun t.py --lr 1"],
    "names nothing": ["torchrun t.py --lr 1 >"],
    "stands in an array": ["A=(--lr 1; --x); torchrun t.py ${A[@]}", "A=([0]=--lr); torchrun t.py --y $A"],
    "nested more than": ["torchrun t.py --lr " + "$(" * 100_000, "A=" + "${A:-" * 50],
    "several programs": [
        "f() { torchrun t.py --lr 1; }; torchrun t.py --lr 3",
        "torchrun t.py --x 1 || torchrun t.py --x 2",
    ],
}


@pytest.mark.parametrize(("words", "script"), [(words, script) for words in REFUSED for script in REFUSED[words]])
def test_an_argument_that_is_not_sure_is_refused(words: str, script: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_arguments(script, "x.sh")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("--lr 1e-4\n--bf16\n", {"lr": 1e-4, "bf16": True}),
        ("python -u pretrain.py --lr=1e-4 --data-path $1", {"lr": 1e-4, "data-path": "$1"}),
        ('A="--bf16"\nrun="python p.py $A --seed 3"\nsrun -l sh -c "$run"', {"bf16": True, "seed": 3}),
        ("if [ -z $1 ]; then X=1; fi\npython p.py --bf16", {"bf16": True}),
        ("torchrun $DIST p.py --lr $1", {"lr": "$1"}),
        ("python p.py --min-lr -1 --bf16", {"min-lr": -1, "bf16": True}),
        ("python p.py --weight-decay 0.1 --weight-decay 0.1", {"weight-decay": 0.1}),
        ("mkdir --parents x\npython train.py --lr 1", {"lr": 1}),
        ("python train.py -o out --bf16 -v", {"o": "out", "bf16": True, "v": True}),
        ("python p.py --bf16 -c=a --x -1 -.5 '-a b'", {"bf16": True, "c": "a", "x": [-1, -0.5, "-a b"]}),
        ("python p.py --x $((010*2)) --y $((10*2))", {"x": "$((010*2))", "y": 20}),
        (
            "p.py --seed 1234567890123456789 --x -18446744073709551615",
            {"seed": 1234567890123456789, "x": 1 - (1 << 64)},
        ),
        ("IFS=, read -r A <<< 1,2\np.py --seed 3", {"seed": 3}),
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
        ("torchrun --nproc-per-node 8 -m my.train --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("torchrun --nproc-per-node 8 --module my.train --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("python3.11 -m torch.distributed.run --nproc-per-node 8 -m my.train --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("git commit -m x --quiet >&2\npython -u -m my.train --bf16 -m a", {"bf16": True, "m": "a"}),
        ("srun -m block --nproc-per-node 8 p.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("srun --ntasks 8 python x.py --lr 1", {"torchrun": {"ntasks": 8}, "lr": 1}),
        ("srun --exclusive python3 -u -m my.train --lr 1", {"torchrun": {"exclusive": True}, "lr": 1}),
        ("srun -l --nproc-per-node 8 python -u torch/distributed/run.py p.py --lr 1e-4 --spec my/spec.py", LAUNCHED),
        ("srun --nodes 2 torchrun --nnodes 2 x.py --lr 1", {"torchrun": {"nodes": 2, "nnodes": 2}, "lr": 1}),
        ("srun --nodes 2 accelerate launch --a 1 x.py --lr 1", {"torchrun": {"nodes": 2, "a": 1}, "lr": 1}),
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
        ("python p.py --lr 1 -c 'python q.py --lr 2'", {"lr": 1, "c": "python q.py --lr 2"}),
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
        ("python p.py --lr 1 --lr 2", "from line 1 on: --lr is given twice, as 1 and 2"),
        ("python p.py --bf16 --bf16 1", "given twice, as True and 1"),
        ("mkdir --parents x\npython train.py -c conf", "program in line 2, and has the options in line 1"),
        ("python p.py --x 1 -- --y 2", "behind -- stands"),
        ("echo hello", "no program an argument"),
        (
            "source args.sh\ntorchrun p.py $ARGS --lr 1",
            r"from line 2 on: \$ARGS is not set in this script, and may hold arguments",
        ),
        ("torchrun p.py --lr 1 ${ARGS[@]}", r"\$\{ARGS\[@\]\} is not set"),
        ("torchrun p.py --lr=1 $ARGS", r"\$ARGS is not set"),
        ("OPTS=$(cat opts)\npython p.py $OPTS --lr 1", r"\$\(cat is not set"),
        ("python p.py `cat opts` --lr 1", "`cat opts` is not set"),
        ("IFS=,\nA=--x,1\npython p.py --lr 1 $A", r"x\.sh' sets \$IFS, by which"),
        ("f() { local IFS=:; }\npython p.py --lr 1", r"sets \$IFS"),
        ("read -r IFS\npython p.py --lr 1", r"sets \$IFS"),
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
    text = write_arguments(document, "pretrain_gpt.py")
    assert parse_arguments(text, "x.sh") == {key: value for key, value in document.items() if value is not False}
    assert told(text.replace("pretrain_gpt.py", "train.py"), tmp_path) == shlex.split(
        '--bf16 --lr 0.0003 --name "a b\'c" --x 1 2'
    )


def test_text_that_looks_like_an_option_is_written_as_a_value(tmp_path: Path) -> None:
    document = {"a": "--foo", "b": "-x y", "c": -1e-5, "d": "--", "e": "-v", "f": [-1, -2]}
    text = write_arguments(document, "train.py")
    assert parse_arguments(text, "x.sh") == document
    assert told(text, tmp_path) == ["--a=--foo", "--b=-x y", "--c=-1e-05", "--d=--", "--e=-v", "--f", "-1", "-2"]


@pytest.mark.parametrize("value", [[], ["a", "--foo"], ["-v", "a"], ["a", "--"]])
def test_a_list_that_no_argument_says_is_not_written(value: list[str]) -> None:
    with pytest.raises(BadInput, match=r"x is .*which no argument can say"):
        write_arguments({"x": value}, "train.py")


@pytest.mark.parametrize(
    "guard",
    [
        "if [ ! -f pretrain_gpt.py ]; then exit 1; fi",
        "test -f pretrain_gpt.py || exit 1",
        "echo starting pretrain_gpt.py --lr 2",
    ],
)
def test_a_command_that_only_names_the_program_starts_none(guard: str) -> None:
    assert parse_arguments(f"{guard}\ntorchrun pretrain_gpt.py --lr 1\n", "run.sh") == {"lr": 1}
