"""`terrazzo checkpoint VERB`. What was saved is known from plain tensors, and where it lies from the files' headers."""

from __future__ import annotations

import copy
import errno
import json
import os
import pty
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import terrazzo as tz
from terrazzo import checkpoint, cli
from terrazzo.checkpoint import source as sources
from terrazzo.checkpoint.operations import audit, compare, convert, describe
from terrazzo.checkpoint.storage import local
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.train.model.causal_lm import logits_of
from terrazzo.train.model.decoder import Decoder
from terrazzo.train.model.prepare import decoder_config
from tests.helpers import programs
from tests.helpers.threads import exclusive, run_in_threads

ROOT = Path(__file__).parents[2]
WIDTH = 8


class Net(nn.Module):
    """A tied weight, buffers, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(30, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)) * self.scale)


def plain_net() -> Net:
    with exclusive():
        torch.manual_seed(0)
        return Net()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return [
        {"params": [("embedding.weight", named["embedding.weight"])], "weight_decay": 0.1},
        {"params": [(name, value) for name, value in named.items() if name.startswith("norm")], "weight_decay": 0.0},
    ]


def train_step(model: nn.Module, optimizer: Any, step: int) -> float:
    tokens = torch.randint(30, (6,), generator=torch.Generator().manual_seed(step))
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sharded(plan: str) -> tuple[nn.Module, Any]:
    model = plain_net()
    groups = [group | {"params": [value for _, value in group["params"]]} for group in groups_of(model)]
    return tz.shard(model, torch.optim.AdamW(groups, lr=1e-2), plan=plan)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 to 4 of a run on two ranks."""
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int) -> None:
        model, optimizer = sharded("zero3")
        for step, metric in enumerate([3.0, 1.0, 2.0, 4.0], 1):
            train_step(model, optimizer, step)
            extra = {"step": step, "metric": metric, "data": {"cursor": step}}
            checkpoint.save(checkpoint.step_path(folder, step), model, optimizer, extra, run="ab12")

    run_in_threads(2, body)
    return folder


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net, torch.optim.AdamW]:
    """A file of a plain loop, and what is in it."""
    model = plain_net()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    for step in (1, 2):
        train_step(model, optimizer, step)
    path = tmp_path_factory.mktemp("plain") / "loop.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, path)
    return path, model, optimizer


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["checkpoint", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The message of bad input."""
    error = run(*arguments).exception
    assert isinstance(error, BadInput)
    return str(error)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def load_dcp(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():  # that no process group is there
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def place_of(file: Path, key: str) -> tuple[int, int]:
    """First and last byte of a tensor in a safetensors file."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    first, stop = json.loads(data[8 : 8 + length])[key]["data_offsets"]
    return 8 + length + first, 8 + length + stop - 1


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        value = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([value ^ 1]))


# -- inspect -------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_was_saved(saved: Path) -> None:
    shown = json.loads(run("inspect", saved / "step-00000002", "--json", "--tensors").stdout)
    assert [shown[key] for key in ("format", "step", "run")] == ["Terrazzo", 2, "ab12"]
    assert shown["topology"]["world_size"] == 2
    assert shown["topology"]["plan"]["name"] == "zero3"
    net = plain_net()
    sizes = {name: list(value.shape) for name, value in net.named_parameters()}
    buffers = {name: list(value.shape) for name, value in net.named_buffers()}
    assert {tensor["name"]: tensor["shape"] for tensor in shown["all_tensors"]} == sizes | buffers
    assert shown["aliases"] == {"head.weight": "embedding.weight"}
    assert shown["parameters"] == sum(value.numel() for value in net.parameters())
    totals = {(total["kind"], total["dtype"]): total for total in shown["states"]}
    assert totals["buffer", "int64"] == {"kind": "buffer", "dtype": "int64", "tensors": 1, "numel": 1, "size_bytes": 8}
    assert totals["exp_avg", "float32"]["size_bytes"] == 4 * (30 * WIDTH + 2 * WIDTH)
    assert [group["settings"]["weight_decay"] for group in shown["optimizer"]["groups"]] == [0.1, 0.0]
    assert [group["numel"] for group in shown["optimizer"]["groups"]] == [30 * WIDTH, 2 * WIDTH]
    files = {file["name"]: file["size_bytes"] for file in shown["files"]}
    assert files == {file.name: file.stat().st_size for file in (saved / "step-00000002").glob("*.safetensors")}
    assert shown["largest"][0]["name"] == "embedding.weight"


def test_inspect_reads_well(saved: Path) -> None:
    shown = run("inspect", saved / "step-00000002").stdout
    for part in (
        "Terrazzo, version 3",
        "ab12",
        "zero3: ",
        "AdamW: lr 0.01",
        "group 1",
        "weight_decay 0.0",
        "metric 1.0",
    ):
        assert part in shown
    assert "num_batches_tracked" not in shown
    assert "norm.num_batches_tracked  []" in run("inspect", saved / "step-00000002", "--tensors").stdout


def test_a_folder_is_listed_with_what_is_wrong_in_it(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "a")
    (folder / "step-00000003" / "manifest.json").unlink()
    (folder / "step-00000004" / "rank-00001.safetensors").unlink()
    (folder / ".step-00000005.partial-ab").mkdir()
    shown = json.loads(run("inspect", folder, "--json").stdout)
    good, bad = shown["checkpoints"][:2], shown["checkpoints"][2:]
    assert [(entry["step"], entry["metric"], entry["problem"]) for entry in good] == [(1, 3.0, None), (2, 1.0, None)]
    assert "no manifest.json" in bad[0]["problem"]
    assert "no rank-00001.safetensors" in bad[1]["problem"]
    assert shown["unfinished"] == [".step-00000005.partial-ab"]
    lines = run("inspect", folder).stdout.splitlines()
    assert re.fullmatch(r"step-00000002 +2 +ab12 +2 +zero3 +[0-9.]+ kB +1 +complete", lines[2])
    assert "--tensors needs one of them" in refusal("inspect", folder, "--tensors")


def test_nothing_in_a_strangers_file_reaches_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[2Jb\rc\u202e": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert run("convert", tmp_path / "a.safetensors", tmp_path / "b", "--to", "terrazzo").exit_code == 0
    for arguments in (["inspect", "b", "--tensors"], ["diff", "a.safetensors", "b", "--all"], ["verify", "b"]):
        verb, *rest = arguments
        shown = run(verb, *(tmp_path / each if not each.startswith("-") else each for each in rest)).output
        assert not set("\x1b\r\u202e") & set(shown)
    flip(tmp_path / "b" / "rank-00000.safetensors", 4096)
    shown = run("verify", tmp_path / "b").output
    assert "a\\x1b[2Jb\\rc" in shown
    assert "\x1b" not in shown


# -- verify --------------------------------------------------------------------------------------------------------


def test_what_is_whole_passes(saved: Path) -> None:
    done = run("verify", saved)
    assert done.exit_code == 0
    assert done.stdout.count("whole: ") == 5
    assert "GB/s" in done.stdout


def test_every_flipped_bit_is_found_with_file_tensor_and_bytes(saved: Path, tmp_path: Path) -> None:
    path = copied(saved / "step-00000002", tmp_path / "a")
    expected = []
    for file in path.glob("*.safetensors"):
        for key in load_file(file):
            first, last = place_of(file, key)
            flip(file, last)
            name, kind, _ = key.split("|")
            expected.append(f"'{file}', bytes {first} to {last}, {name}, {kind}: ")
    for threads in (1, 3):
        done = run("verify", path, saved / "step-00000001", "--json", "--threads", threads)
        assert done.exit_code == 1
        damaged, whole = json.loads(done.stdout)["checkpoints"]
        assert (damaged["state"], whole["state"]) == ("damaged", "whole")
        assert sorted(problem.partition("not what")[0] for problem in damaged["problems"]) == sorted(expected)


def test_missing_and_cut_files_hide_nothing_else(saved: Path, tmp_path: Path) -> None:
    path = copied(saved / "step-00000002", tmp_path / "a")
    (path / "rank-00000.safetensors").unlink()
    file = path / "rank-00001.safetensors"
    first, _ = place_of(file, next(key for key in load_file(file) if key.startswith("embedding.weight|weight|")))
    flip(file, first)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    done = run("verify", path)
    assert done.exit_code == 1
    for part in ("no rank-00000.safetensors", f"has {size - 1} bytes and was written with {size}", f"bytes {first} to"):
        assert part in done.stdout
    (path / "manifest.sha256").unlink()
    assert "no manifest.sha256" in run("verify", path).stdout


@pytest.mark.parametrize(("code", "state"), [(errno.EIO, "damaged"), (errno.ESTALE, "not verified")])
def test_blocks_that_cannot_be_read_hide_nothing_else(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    path = copied(saved / "step-00000002", tmp_path / "a")
    file = path / "rank-00001.safetensors"
    places = {key: place_of(file, key) for key in load_file(file)}
    bad = [*places][1:3]
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if os.fstat(descriptor).st_ino == file.stat().st_ino and offset in [places[key][0] for key in bad]:
            raise OSError(code, os.strerror(code))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    found = json.loads(run("verify", path, "--json").stdout)["checkpoints"][0]
    assert found["state"] == state
    assert len(found["problems"]) == 2
    for key in bad:
        (first, last), (name, kind, _) = places[key], key.split("|")
        concerned = f"This concerns bytes {first} to {last}, {name}, {kind}."
        assert any(concerned in each and os.strerror(code) in each for each in found["problems"])


def test_a_file_that_cannot_be_opened_hides_nothing_else(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(saved / "step-00000002", tmp_path / "a")
    file = path / "rank-00001.safetensors"
    flip(file, place_of(file, next(iter(load_file(file))))[0])
    real = os.open

    def refused(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("rank-00000.safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    found = json.loads(run("verify", path, "--json").stdout)["checkpoints"][0]
    unread, changed = found["problems"]
    assert found["state"] == "damaged"
    assert os.strerror(errno.EACCES) in unread and "Not read with it: the header; " in unread
    assert "not what was written" in changed


def test_a_checkpoint_in_one_file_is_looked_at_as_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.arange(3.0)}, path)
    assert "1 tensors" in run("inspect", path).stdout
    done = run("verify", path)
    assert done.stdout.startswith(f"not verified: {path}\n")
    assert done.exit_code == 3, "2 is that of a path where there is nothing"


def test_blocks_that_follow_each_other_are_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PIECE_BYTES", 64)
    save_file({"w": torch.arange(1000.0)}, tmp_path / "a.safetensors")
    path = tmp_path / "b"
    run("convert", tmp_path / "a.safetensors", path, "--to", "terrazzo")
    file = path / "rank-00000.safetensors"
    places = [place_of(file, f"w|weight|{start}") for start in (16, 32, 256)]
    for first, _ in places:
        flip(file, first)
    problems = json.loads(run("verify", path, "--json").stdout)["checkpoints"][0]["problems"]
    first, second, third = places
    for problem, (begin, end) in zip(problems, [(first[0], second[1]), third], strict=True):
        assert f"bytes {begin} to {end}, w, weight: not what was written" in problem


# -- diff ----------------------------------------------------------------------------------------------------------


def test_equal_checkpoints_are_equal_whoever_wrote_them(saved: Path, torch_file: Any, tmp_path: Path) -> None:
    done = run("diff", saved / "step-00000001", saved / "step-00000001")
    assert (done.exit_code, "equal: " in done.stdout) == (0, True)
    run("convert", torch_file[0], tmp_path / "a", "--to", "terrazzo")
    done = run("diff", torch_file[0], tmp_path / "a", "--all")
    assert done.exit_code == 0, done.stdout
    assert re.search(r"embedding.weight +0 +0 +0 +0", done.stdout)
    run("convert", saved / "step-00000002", tmp_path / "dcp", "--to", "dcp")
    done = run("diff", saved / "step-00000002", tmp_path / "dcp")
    assert done.exit_code == 0, done.stdout


def test_differences_are_those_of_the_tensors(tmp_path: Path) -> None:
    one = {"same": torch.ones(3), "value": torch.tensor([1.0, 5.0, float("inf")]), "shape": torch.ones(2, 3)}
    one |= {"nan": torch.tensor([float("nan"), 1.0]), "narrow": torch.full((4,), 1.001), "a": torch.ones(1)}
    one |= {"count": torch.tensor([2**53, 7]), "far": torch.tensor([-(2**63)])}
    other = {"same": torch.ones(3), "value": torch.tensor([1.5, 2.0, float("inf")]), "shape": torch.ones(3, 2)}
    other |= {"nan": torch.tensor([float("nan")] * 2), "narrow": one["narrow"].bfloat16(), "b": torch.ones(1)}
    other |= {"count": torch.tensor([2**53 + 1, 7]), "far": torch.tensor([2**63 - 1])}
    save_file(one, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    done = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert done.exit_code == 1
    found = {state["name"]: state for state in json.loads(done.stdout)["states"]}
    assert found.keys() == {"value", "shape", "nan", "narrow", "count", "far", "a", "b"}
    assert (found["value"]["max_abs"], found["value"]["differing"]) == (3.0, 2)
    assert (found["nan"]["max_abs"], found["nan"]["differing"]) == ("nan", 1)
    assert (found["count"]["max_abs"], found["count"]["differing"]) == (1.0, 1)
    assert (found["far"]["max_abs"], found["far"]["differing"]) == (2.0**64, 1)
    assert found["narrow"]["note"] == "float32 and bfloat16"
    assert found["narrow"]["max_abs"] == pytest.approx(float((one["narrow"] - other["narrow"].float())[0].abs()))
    assert (found["a"]["note"], found["b"]["note"]) == ("only in A", "only in B")
    assert "[2, 3]" in found["shape"]["note"]
    done = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--all")
    assert re.search(r"^same +0$", done.stdout, re.MULTILINE)
    assert "different: 8 of 9 states" in done.stdout


def test_large_states_are_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(1001), torch.zeros(1001)
    a[[5, 700]], b[999] = torch.tensor([3.0, 1.0]), 2.0
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    monkeypatch.setattr(compare, "PIECE_BYTES", 800)
    asked: list[int] = []
    real = sources.Source.read_with_progress
    monkeypatch.setattr(
        sources.Source,
        "read_with_progress",
        lambda *arguments: asked.append(arguments[4] - arguments[3]) or real(*arguments),
    )
    shown = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").stdout
    state = json.loads(shown)["states"][0]
    assert (state["max_abs"], state["differing"]) == (3.0, 3)
    assert max(asked) == 100


def test_settings_differ_unless_one_kind_is_asked_for(saved: Path, tmp_path: Path) -> None:
    lines = json.loads(run("diff", saved / "step-00000001", saved / "step-00000002", "--json").stdout)["settings"]
    assert lines == ["step: 1 and 2"]
    weights = {"embedding.weight": torch.zeros(30, WIDTH)}
    save_file(weights, tmp_path / "a.safetensors")
    done = run("diff", saved / "step-00000001", tmp_path / "a.safetensors")
    assert all(line in done.stdout for line in ("exp_avg: only in A", "optimizer: AdamW and none"))
    done = run("diff", saved / "step-00000001", tmp_path / "a.safetensors", "--kind", "weight", "--json")
    assert json.loads(done.stdout)["settings"] == []
    assert "'exp_avg' is no state that both have" in refusal(
        "diff", saved / "step-00000001", tmp_path / "a.safetensors", "--kind", "exp_avg"
    )


def test_a_tensor_that_only_one_side_ties_is_compared_under_both_names(saved: Path, tmp_path: Path) -> None:
    run("convert", saved / "step-00000001", tmp_path / "dcp", "--to", "dcp")
    state: dict[str, Any] = {f"model.{name}": torch.zeros(30, WIDTH) for name in ("embedding.weight", "head.weight")}
    load_dcp(state, tmp_path / "dcp")
    untied = {name.removeprefix("model."): value for name, value in state.items()}
    untied["head.weight"][3, 4] += 0.5
    save_file(untied, tmp_path / "a.safetensors")
    shown = run("diff", saved / "step-00000001", tmp_path / "a.safetensors", "--kind", "weight", "--json").stdout
    states = {state["name"]: state for state in json.loads(shown)["states"]}
    assert "embedding.weight" not in states
    assert states["head.weight"]["max_abs"] == pytest.approx(0.5)


# -- prune ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-last", 1], [4]),
        (["--keep-last", 1, "--keep-every", 3], [3, 4]),
        (["--keep-last", 2, "--keep-best", 2], [2, 3, 4]),
        (["--keep-last", 1, "--run", "other"], [1, 2, 3, 4]),
        (["--keep-last", 9, "--run", "ab12"], [1, 2, 3, 4]),
    ],
)
def test_a_dry_run_says_what_a_real_one_removes(
    saved: Path, tmp_path: Path, options: list[Any], kept: list[int]
) -> None:
    folder = copied(saved, tmp_path / "a")
    names = [f"step-{step:08d}" for step in kept]
    planned = json.loads(run("prune", folder, *options, "--dry-run", "--json").stdout)
    assert len(list(folder.glob("step-*"))) == 4
    done = json.loads(run("prune", folder, *options, "--json").stdout)
    assert sorted(path.name for path in folder.glob("step-*")) == names
    assert planned["removed"] == done["removed"]
    assert planned["kept"] == done["kept"] == names


def test_a_folder_in_use_or_without_checkpoints_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "a")
    lock = checkpoint.claim(folder, "a test")
    assert lock is not None
    assert "a test" in refusal("prune", folder, "--keep-last", 1)
    assert "would be removed" in run("prune", folder, "--keep-last", 1, "--dry-run").stdout
    lock.release()
    assert re.search(r"step-00000001 +removed", run("prune", folder, "--keep-last", 1).stdout)
    assert "holds no complete checkpoint" in refusal("prune", tmp_path / "nothing", "--keep-last", 1)
    assert run("prune", folder, "--keep-last", 0).exit_code == 2


# -- convert -------------------------------------------------------------------------------------------------------


def test_a_plain_loops_state_is_there_bit_for_bit(
    torch_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "PIECE_BYTES", 100)
    path, model, optimizer = torch_file
    assert run("convert", path, tmp_path / "a", "--to", "terrazzo").exit_code == 0
    pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for key, value in load_file(tmp_path / "a" / "rank-00000.safetensors").items():
        name, kind, start = key.split("|")
        pieces.setdefault((name, kind), []).append((int(start), value))
    written = {
        key: torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])]) for key, parts in pieces.items()
    }
    expected = {(name, "weight"): value for name, value in model.state_dict().items() if name != "head.weight"}
    for name, parameter in model.named_parameters():
        expected |= {(name, kind): value for kind, value in optimizer.state.get(parameter, {}).items()}
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(written[key], value.detach().reshape(-1)), key
    assert max(value.nbytes for value in written.values()) > 100
    assert all(value.nbytes <= 100 for parts in pieces.values() for _, value in parts)
    shown = json.loads(run("inspect", tmp_path / "a", "--json").stdout)
    assert (shown["step"], shown["run"], shown["topology"]["world_size"]) == (2, "", 1)
    assert shown["aliases"] == {"head.weight": "embedding.weight"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_converted_run_goes_on_as_it_would_have(saved: Path, tmp_path: Path) -> None:
    run("convert", saved / "step-00000003", tmp_path / "a", "--to", "terrazzo")

    def resume(rank: int) -> list[float]:
        found = []
        for path in (saved / "step-00000003", tmp_path / "a"):
            model, optimizer = sharded("zero1")
            assert checkpoint.load(path, model, optimizer) == {"step": 3, "metric": 2.0, "data": {"cursor": 3}}
            found.append([train_step(model, optimizer, step) for step in (4, 5)])
        assert found[0] == found[1]
        return found[0]

    for world_size in (1, 3):
        run_in_threads(world_size, resume)


def test_torch_reads_the_dcp_folder(torch_file: Any, tmp_path: Path) -> None:
    path, model, optimizer = torch_file
    done = run("convert", path, tmp_path / "a", "--to", "dcp")
    assert done.exit_code == 0
    weight = {"model.embedding.weight": torch.zeros(30, WIDTH)}
    moment = {"optim.state.embedding.weight.exp_avg": torch.zeros(30, WIDTH)}
    state = weight | moment
    load_dcp(state, tmp_path / "a")
    assert torch.equal(state["model.embedding.weight"], model.embedding.weight)
    assert torch.equal(
        state["optim.state.embedding.weight.exp_avg"], optimizer.state[model.embedding.weight]["exp_avg"]
    )


def test_a_reference_makes_a_hugging_face_folder(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text('{"model_type": "net", "tie_word_embeddings": true}')
    options = ["--reference", tmp_path / "reference", "--dtype", "bf16", "--max-shard-size", "0.3KB"]
    done = run("convert", saved / "step-00000001", tmp_path / "a", "--to", "hf", *options)
    assert done.exit_code == 0
    assert "not taken over: the optimizer's state" in done.stdout
    assert "not taken over: extra: step, metric, data" in done.stdout
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    done = run("diff", saved / "step-00000001", tmp_path / "a", "--kind", "weight", "--json")
    states = json.loads(done.stdout)["states"]
    assert all("bfloat16" in state["note"] for state in states)
    assert max(state["max_abs"] for state in states) < 0.02


def saved_by_a_run(path: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    """A checkpoint as `terrazzo train` writes it, as far as an export looks at it."""
    extra = {"step": 1, "config": config_from_dict(settings).model_dump(mode="json")}

    def body(rank: int) -> None:
        with exclusive():
            own = copy.deepcopy(model)
        checkpoint.save(path, *tz.shard(own, torch.optim.SGD(own.parameters(), lr=0.1), plan="zero3"), extra)

    run_in_threads(2, body)


def test_a_runs_checkpoint_says_itself_what_model_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"model": {"dim": 24, "layers": 2, "heads": 4, "kv_heads": 2}, "batch": {"sequence_length": 16}}
    decoder = Decoder(decoder_config(config_from_dict(settings))).eval()
    saved_by_a_run(tmp_path / "step-00000001", decoder, settings)
    assert run("convert", tmp_path / "step-00000001", tmp_path / "hf", "--to", "hf").exit_code == 0
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens = torch.randint(257, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(llama(tokens).logits, logits_of(decoder(tokens)), rtol=1e-5, atol=1e-6)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("ab")["input_ids"] == [97, 98]


def test_a_hugging_face_runs_model_folder_is_the_reference(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    settings = {"model": {"kind": "huggingface", "path": str(folder)}}
    saved_by_a_run(tmp_path / "step-00000001", nn.Linear(4, 2), settings)
    missing = refusal("convert", tmp_path / "step-00000001", tmp_path / "hf", "--to", "hf")
    assert f"The model folder '{folder}' has no readable config.json" in missing
    assert "Or give --reference FOLDER" in missing
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "linear"}')
    (folder / "tokenizer.json").write_text("{}")
    assert run("convert", tmp_path / "step-00000001", tmp_path / "hf", "--to", "hf").exit_code == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "linear"
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_what_cannot_be_converted_is_refused_before_any_work(saved: Path, torch_file: Any, tmp_path: Path) -> None:
    source, out = saved / "step-00000001", tmp_path / "out"
    (tmp_path / "there").mkdir()
    refused = [
        ([tmp_path / "nothing", tmp_path / "there", "--to", "terrazzo"], "exists already"),
        ([tmp_path / "nothing", out, "--to", "dcp"], "There is no checkpoint"),
        ([source, out, "--to", "hf"], "give --reference FOLDER"),
        ([source, out, "--to", "hf", "--reference", tmp_path], "has no readable config.json"),
        ([source, out, "--to", "dcp", "--dtype", "bf16"], "--dtype is for --to hf"),
        ([source, out, "--to", "hf", "--dtype", "bf17"], "there are: fp32, bf16, fp16"),
        ([source, out, "--to", "hf", "--dtype", "int4"], "--dtype is 'int4'"),
        ([source, out, "--to", "hf", "--max-shard-size", "5XB"], "such as 500MB"),
        ([source, out, "--to", "hf", "--max-shard-size", "5"], "such as 500MB"),
        ([source, "memory://x/out", "--to", "dcp"], "local folders only"),
        ([source, tmp_path / ".out", "--to", "terrazzo"], "hidden names"),
    ]
    for arguments, part in refused:
        assert part in refusal("convert", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_failure_in_the_middle_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copied(saved / "step-00000001", tmp_path / "source" / "a")
    flip(source / "rank-00001.safetensors", (source / "rank-00001.safetensors").stat().st_size - 1)
    (tmp_path / "out").mkdir()
    assert "not what was written" in refusal("convert", source, tmp_path / "out" / "b", "--to", "terrazzo")
    assert not list((tmp_path / "out").iterdir())

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local.os, "write", full)
    error = run("convert", saved / "step-00000001", tmp_path / "out" / "b", "--to", "terrazzo").exception
    monkeypatch.undo()
    assert isinstance(error, SaveFailed)
    assert "No space left" in str(error)
    assert not list((tmp_path / "out").iterdir())


def test_a_url_is_taken_where_terrazzo_writes(saved: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/step-00000001"
    assert run("convert", saved / "step-00000001", url, "--to", "terrazzo").exit_code == 0
    assert run("verify", url).exit_code == 0
    assert "complete" in run("inspect", f"memory://{tmp_path.name}").stdout
    assert run("diff", saved / "step-00000001", url).exit_code == 0


# -- the command ---------------------------------------------------------------------------------------------------


def test_a_failed_save_is_exit_code_1_and_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise SaveFailed("The disk is \x1bfull.")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "Error: The disk is \\x1bfull.\n"


def test_progress_adds_up_to_all_bytes(saved: Path, tmp_path: Path) -> None:
    source, counts = checkpoint.open_source(saved / "step-00000001"), list[int]()
    source.advance = counts.append
    convert.convert(source, str(tmp_path / "a"))
    assert sum(counts) == describe.total_bytes(source)
    counts.clear()
    opened = audit.open_audit(str(tmp_path / "a"))
    assert opened.problems(2, counts.append) == []
    assert sum(counts) == opened.size_bytes == (tmp_path / "a" / "rank-00000.safetensors").stat().st_size


ON_A_TERMINAL = """
import os, runpy, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
for stream in range(3):
    os.dup2(terminal, stream)
runpy.run_module("terrazzo", run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
def test_a_terminal_gets_a_progress_bar_and_a_pipe_none(saved: Path) -> None:
    words = ("checkpoint", "verify", str(saved))
    done = programs.run("-m", "terrazzo", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    own, its = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm"}
        assert programs.run("-c", ON_A_TERMINAL, os.ttyname(its), *words, env=environment).returncode == 0
        shown = ""
        while "whole: " not in shown:  # a terminal hands over what there is, perhaps a part
            shown += os.read(own, 1 << 16).decode()
    finally:
        os.close(own)
        os.close(its)
    assert "━" in shown


def test_every_option_is_in_the_reference() -> None:
    reference = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(cli.app)
    verbs = group.commands["checkpoint"].commands
    assert verbs.keys() == {"inspect", "verify", "diff", "prune", "convert"}
    for name, verb in verbs.items():
        section = reference.split(f"### terrazzo checkpoint {name}\n")[1].split("\n##")[0]
        for parameter in verb.params:
            names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
            assert all(f"`{each}`" in section for each in names)
