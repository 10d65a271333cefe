"""The structure lint finds each thing it promises to find, and nothing in a tree that keeps the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint.__main__ import check, main


def _path(name: str) -> str:
    """`engine____init__` is `engine/__init__.py`."""
    folder, init, _ = name.partition("__init__")
    return f"{folder.replace('__', '/')}{init}.py"


def _tree(root: Path, **files: str) -> Path:
    """A package `terrazzo`; each keyword is a path with `__` for `/` and its value the source.

    An empty `__init__` gets a docstring that names the modules beside it.
    """
    package = root / "terrazzo"
    for name, source in {
        "__init__": "",
        "engine__plan____init__": "",
        "engine__plan__place": "",
        "engine__comm__collectives": "",
        **files,
    }.items():
        path = package / _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for init in package.rglob("__init__.py"):
        if not init.read_text():
            names = " ".join(sorted(path.stem for path in init.parent.glob("*.py") if path != init))
            init.write_text(f'"""{names}"""\n' if names else "")
    return package


def _texts(package: Path) -> list[str]:
    return [str(finding).removeprefix(f"{package}/") for finding in check(package, layered=True)]


def test_a_tree_that_keeps_the_rules_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = _tree(
        tmp_path,
        engine____init__='"""Open to other packages:\n\n    plan.place   a table\n"""\nfrom .model.shard import x\n',
        engine__buckets__unit="from terrazzo.engine.comm import collectives\nfrom ..plan.place import x\n",
        engine__model__shard="from ..buckets.unit import x\n",
        engine__comm__collectives="import torch.distributed as dist\ndist.all_reduce(1)\n",
        planner__memory="from ..engine.plan.place import x\nfrom terrazzo.errors import BadInput\n",
        errors="",
        cli__main="import terrazzo\nfrom terrazzo.train import loop\n",
        train__loop="import terrazzo as tz\n",
    )
    assert _texts(package) == []
    assert main([str(package)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("engine__buckets__unit", "from terrazzo.planner.memory import bill\n", 1),
        ("planner__search", "\nfrom ..train import loop\n", 2),
        ("telemetry__trace", "def f():\n    import terrazzo.cli.main\n", 2),
        ("train__loop", "from terrazzo.cli import main\n", 1),
        ("engine__plan__place", "import terrazzo\n", 1),
    ],
)
def test_an_import_that_points_up(tmp_path: Path, name: str, source: str, line: int) -> None:
    others = {"planner__memory": "", "train__loop": "", "cli__main": ""}
    (finding,) = [t for t in _texts(_tree(tmp_path, **{**others, name: source})) if "layer above" in t]
    assert finding.startswith(f"{name.replace('__', '/')}.py:{line}: ")


@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        (
            "engine__buckets__unit",
            "from terrazzo.engine.offload.store import x\n",
            "'engine/buckets' must not import ",
        ),
        ("engine__comm__collectives", "\nfrom ..plan.place import x\n", "'engine/comm' must not import "),
        ("engine__comm____init__", "from terrazzo.engine.plan import place\n", "'engine/comm' must not import "),
        ("engine__offload__store", "import terrazzo.engine\n", "'engine/offload' must not import "),
        (
            "engine__buckets__resting__buffer",
            "from terrazzo.engine.buckets.weights import full\n",
            "'engine/buckets/resting' must not import ",
        ),
        (
            "engine__buckets__weights__full",
            "from ..bucket import x\n",
            "'engine/buckets/weights' must not import ",
        ),
    ],
)
def test_an_import_that_points_up_inside_the_engine(tmp_path: Path, name: str, source: str, text: str) -> None:
    others = ["engine____init__", "engine__offload__store", "engine__buckets__bucket", "engine__buckets__weights__full"]
    tree = _tree(tmp_path, **{**dict.fromkeys(others, ""), name: source})
    (finding,) = [found for found in _texts(tree) if "layer above" in found]
    assert finding.startswith(f"{_path(name)}:{source.count(chr(10))}: {text}")


FACE = '''"""The engine. What is below is open, too. Open to other
packages, which ask for it:

    plan.place, comm   tables, and ways
    model.names    names

    unit    indented like them, and no more of them
"""
'''


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        ("from terrazzo.engine import shard, engine_of\n", None),
        ("import terrazzo.engine\n", None),
        ("from terrazzo.engine.plan.place import Plan\nfrom ..engine.comm import collectives\n", None),
        ("from terrazzo.engine.comm.collectives import x\nfrom terrazzo.engine.model.names import x\n", None),
        ("from terrazzo.engine.model.shard import _prepare\n", "terrazzo.engine.model.shard"),
        ("def f():\n    from terrazzo.engine.model import names, shard\n", "terrazzo.engine.model.shard"),
        ("from ..engine.buckets import unit\n", "terrazzo.engine.buckets.unit"),
        ("import terrazzo.engine.buckets.unit as u\n", "terrazzo.engine.buckets.unit"),
    ],
)
def test_another_package_has_a_face(tmp_path: Path, source: str, inside: str | None) -> None:
    own = {
        "engine____init__": FACE,
        "engine__buckets__unit": "",
        "engine__plan__placement": "",
        "engine__model__shard": "",
    }
    tree = _tree(tmp_path, **own, engine__model__names="", engine__comm____init__="", planner__memory=source)
    line = source.count("\n")
    want = f"planner/memory.py:{line}: '{inside}' is inside of another package: import from 'terrazzo.engine', or open"
    assert _texts(tree) == ([] if inside is None else [f"{want} it in its docstring"])


def test_what_a_face_opens_is_there(tmp_path: Path) -> None:
    tree = _tree(tmp_path, engine____init__=FACE, engine__comm____init__="")
    assert _texts(tree) == ["engine/__init__.py:1: 'model.names' is opened to other packages, and not there"]


def test_a_new_folder_of_the_engine_must_be_given_a_layer(tmp_path: Path) -> None:
    assert any("'planner/utils' is in no layer" in text for text in _texts(_tree(tmp_path, planner__utils__a="")))
    upwards = _tree(tmp_path, planner__memory__a="from terrazzo.planner.gate import b", planner__gate__b="")
    assert any("'planner/memory' must not import 'terrazzo.planner.gate.b'" in text for text in _texts(upwards))
    assert any("'engine/utils' is in no layer" in text for text in _texts(_tree(tmp_path, engine__utils__a="")))


def test_two_classes_with_one_name(tmp_path: Path) -> None:
    package = _tree(tmp_path, engine__comm__a="class Slot: ...\n", planner__b="\nclass Slot: ...\n")
    assert "planner/b.py:2: 'Slot' is also a class of 'terrazzo.engine.comm.a'" in _texts(package)


@pytest.mark.parametrize("alias", ["Slot = tuple[int, int]", "Slot = int | str"])
def test_a_class_and_an_alias_with_one_name(tmp_path: Path, alias: str) -> None:
    package = _tree(tmp_path, engine__comm__a="class Slot: ...\n", planner__b=f"Other = dict[str, int]\n{alias}\n")
    assert "planner/b.py:2: the alias 'Slot' is also a class of 'terrazzo.engine.comm.a'" in _texts(package)


def test_two_modules_of_a_package_with_one_name(tmp_path: Path) -> None:
    folders = dict.fromkeys(("planner____init__", "planner__a____init__", "planner__b____init__"), "")
    package = _tree(tmp_path, **folders, planner__a__room="", planner__b__room="", parallel__a__room="")
    found = [text for text in _texts(package) if "also the name" in text]
    assert found == [
        "planner/b/room.py:1: 'room' is also the name of 'terrazzo.planner.a.room': one of them means more"
    ]


def test_a_package_names_its_modules(tmp_path: Path) -> None:
    text = "engine/schedule/__init__.py:1: the docstring does not say what these modules are for: "
    names = ["bucket", "buffer", "codec", "edits", "full", "unit", "wire"]
    modules = {f"engine__schedule__{name}": "" for name in ["_hidden", "__main__", *names]}
    init = '"""States, of a `unit` and more.\n\n    buffer, codec  one range\n    full  all\n"""\n'
    package = _tree(tmp_path / "many", **modules, engine__schedule____init__=init)
    assert _texts(package) == [text + "bucket, edits, wire"]
    _tree(tmp_path / "many", engine__schedule____init__=init.replace("one", "one; bucket, edits and wire"))
    assert _texts(package) == []
    few = _tree(tmp_path / "few", engine__schedule__wire="", engine__schedule____init__='"""States."""\n')
    assert _texts(few) == [text + "wire"]


def test_a_map_has_each_part_below_what_it_imports(tmp_path: Path) -> None:
    rows = "    errors      one\n    exit_codes  two\n\n    engine, nn  three\n"
    init = f'"""Each imports from its own line and those above:\n\n{rows}"""\n'
    parts = {"errors": "from terrazzo import exit_codes\n", "exit_codes": "", "words": ""}
    assert _texts(_tree(tmp_path, __init__=init, **parts)) == [
        "__init__.py:1: there is no 'nn'",
        "__init__.py:1: the map does not name 'words'",
        "__init__.py:1: the map has 'errors' above 'exit_codes', which terrazzo.errors imports",
    ]


def test_a_new_top_level_part_must_be_given_a_layer(tmp_path: Path) -> None:
    assert any("'utils' is in no layer" in text for text in _texts(_tree(tmp_path, utils="")))


def test_cycles_between_modules_and_between_parts(tmp_path: Path) -> None:
    package = _tree(
        tmp_path,
        engine__plan__a="from .b import x\n",
        engine__plan__b="from . import c\n",
        engine__plan__c="def late():\n    from terrazzo.engine.plan.a import x\n",
        planner__a="from terrazzo.dialects import a\n",
        planner__b="",
        dialects__a="",
        dialects__b="from terrazzo.planner import b\n",
    )
    cycles = [text for text in _texts(package) if "import cycle" in text]
    assert len(cycles) == 2
    assert all(f"terrazzo.engine.plan.{name}" in cycles[0] for name in "abc")
    assert "planner" in cycles[1] and "dialects" in cycles[1]


@pytest.mark.parametrize(
    "source",
    [
        "from importlib import import_module\nimport_module('terrazzo.engine.plan.place').x\n",
        "import importlib as load\nload.import_module(f'terrazzo.engine.{name}')\n",
        "from importlib import import_module\nTABLE = {'x': 'terrazzo.engine.plan.Place'}\nimport_module(TABLE[x])\n",
        "import importlib\nimportlib.import_module('.place', __package__)\n",
        "from importlib import import_module as load\nload('terrazzo.engine.plan.place')\n",
        "\n__import__('terrazzo.engine.plan.place')\n",
        "import pkgutil\npkgutil.resolve_name('terrazzo.engine.plan.place:x')\n",
    ],
)
def test_a_string_that_names_a_module_for_import(tmp_path: Path, source: str) -> None:
    package = _tree(tmp_path, engine__buckets__unit=source, engine__plan__place="")
    (package / "engine" / "__init__.py").write_text("")
    (finding,) = _texts(package)
    assert finding.startswith("engine/buckets/unit.py:2: the string names '")


def test_strings_that_import_nothing_here_are_free(tmp_path: Path) -> None:
    package = _tree(
        tmp_path,
        engine__plan__a="import importlib\nimportlib.import_module('torch')\nrun(['-m', 'terrazzo.engine.plan'])\n",
        planner__cite="SOURCE = 'terrazzo.engine.plan.place'\n",
        dialects__registry="from importlib import import_module\nimport_module('terrazzo.dialects.verbs')\n",
        dialects__verbs="",
    )
    assert _texts(package) == []
    (package / "dialects" / "verbs.py").write_text("from terrazzo.dialects import registry\n")
    (finding,) = _texts(package)
    assert "import cycle: " in finding and "registry" in finding


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)\n",
        "import torch\ntorch.distributed.barrier()\n",
        "from torch import distributed as d\nd.all_gather_single(x, y)\n",
        "\nfrom torch.distributed import reduce_scatter_tensor\n",
        "import torch.distributed._functional_collectives as funcol\nfuncol.all_reduce(x, 'sum', g)\n",
    ],
)
def test_a_collective_outside_its_module(tmp_path: Path, source: str) -> None:
    (finding,) = _texts(_tree(tmp_path, engine__buckets__unit=source, planner__x=source))
    assert finding.startswith("engine/buckets/unit.py:2: ")


def test_other_uses_of_torch_distributed_are_free(tmp_path: Path) -> None:
    source = "import torch.distributed as dist\ndist.get_rank()\nx.scatter(0)\ndist.ReduceOp.SUM\n"
    assert _texts(_tree(tmp_path, engine__buckets__unit=source)) == []


def _function(name: str, lines: int) -> str:
    return f'def {name}(self):\n    """Doc.\n\n    More.\n    """\n' + "    x = 1\n" * lines


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()\n",
        "\nimport torch.cuda\n",
        "\nfrom torch import cuda\n",
        "\nfrom torch.cuda import Event\n",
    ],
)
def test_a_kind_of_device_outside_its_module(tmp_path: Path, source: str) -> None:
    package = _tree(tmp_path, errors=source, engine__runtime__device=source)
    text = "torch.cuda is named outside engine/runtime/device.py, which alone knows kinds of devices"
    assert _texts(package) == [f"errors.py:2: {text}"]


def test_budgets_of_files_and_functions(tmp_path: Path) -> None:
    package = _tree(
        tmp_path,
        engine__plan__long="x = 1\n" * 401,
        engine__plan__fits="x = 1\n" * 400,
        engine__plan__function=_function("fits", 80) + _function("too_long", 81),
        engine__plan__arguments="class A:\n    def ok(self, a, b, c, d, e, f): ...\n"
        "    def no(self, a, b, c, *d, e, f, **g): ...\n"
        "def fixed(a, b, c, d, e, f, g):  # structure: signature fixed by the design\n    ...\n",
        engine__plan__later="x = 1  # TO" + "DO: more\n",
    )
    assert sorted(_texts(package)) == [
        "engine/plan/arguments.py:3: no: 7 arguments (limit 6; pass a config object)",
        "engine/plan/function.py:86: too_long: body of 81 lines (limit 80)",
        "engine/plan/later.py:1: unfinished work: x = 1  # TO" + "DO: more",
        "engine/plan/long.py:401: file of 401 lines (limit 400)",
    ]


def test_budgets_of_the_whole_tree(tmp_path: Path) -> None:
    short = "".join(_function(f"short{i}", 2) for i in range(20))
    long = "".join(_function(f"long{i}", 31) for i in range(3))
    assert _texts(_tree(tmp_path / "a", engine__plan__a=short)) == []
    texts = _texts(_tree(tmp_path / "b", engine__plan__a=short, engine__plan__b=long))
    assert "90th percentile of function bodies is 31 lines (limit 30)" in texts[0]
    assert texts[1].startswith("engine/plan/b.py:1: long0: 31 lines")
    middling = "".join(_function(f"f{i}", 11) for i in range(12))
    (text,) = _texts(_tree(tmp_path / "c", engine__plan__a=middling))
    assert "median function body of 11 lines (limit 10)" in text


def test_a_wrong_folder_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "usage" in capsys.readouterr().err
