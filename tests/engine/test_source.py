"""What is said of the engine's source is so: which internals of torch it knows, and who sets whose attributes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "src/terrazzo/engine"
OF_OTHERS = {
    *("_asdict", "_fields", "_getframe", "_make", "_replace"),
    *("_init_weights", "_is_hf_initialized", "_no_split_modules"),
    *("_can_record_outputs", "_is_expert_parallel"),
    *("_exit", "_measured", "_pool", "_promised", "_us"),
}
"""Of Python's library and transformers' models, and ends of longer names."""
BESIDE = ("parallel", "nn", "optim", "train", "planner/memory")


@functools.cache  # and nothing of it where tests are collected alone
def sources() -> dict[str, str]:
    """By module of the engine."""
    return {str(path.relative_to(ENGINE).with_suffix("")): path.read_text() for path in ENGINE.rglob("*.py")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources().items()}


def names_in(node: ast.AST) -> Iterator[str]:
    """What is asked for by name: attributes, what is imported, strings that may be names of attributes."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split(".")
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (*node.module.split("."), *(alias.name for alias in node.names))


def dotted(node: ast.AST) -> str:
    """`a.b.c`; empty where an owner is no name."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def defined_in(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        return node.attr if isinstance(node, ast.Attribute) else node.id
    return ""


def internals_of_torch(heading: str) -> list[tuple[set[str], set[str]]]:
    """The rows of a table of them: names, and the modules that have these."""
    page = (ROOT / "docs/concepts/engine.md").read_text().split(heading)[1]
    table = page[page.index("| of torch | in | for |") :].split("\n\n")[0]
    rows = [[set(re.findall(r"`([\w/]+)`", cell)) for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    return [(names, modules) for names, modules in rows]


def check_rows(rows: list[tuple[set[str], set[str]]], read: dict[str, str]) -> None:
    words = {module: set(re.findall(r"\w+", source)) for module, source in read.items()}
    for names, modules in rows:
        assert {module for module, said in words.items() if said & names} == modules, names
        assert names <= set().union(*words.values())


def private_in(parsed: dict[str, ast.Module]) -> set[str]:
    """Private names that are asked for and not defined there."""
    nodes = [node for tree in parsed.values() for node in ast.walk(tree)]
    private = {name for node in nodes for name in names_in(node) if re.fullmatch(r"_[a-zA-Z]\w*", name)}
    return private - {defined_in(node) for node in nodes}


def test_every_internal_of_torch_is_in_the_table() -> None:
    rows = internals_of_torch("## What it knows of torch's insides")
    check_rows(rows, sources())
    assert private_in(trees()) - OF_OTHERS <= {name for names, _ in rows for name in names}


def test_every_internal_of_torch_beside_the_engine_is_in_a_table() -> None:
    package = ROOT / "src/terrazzo"
    paths = [package / "exchange.py", *(path for folder in BESIDE for path in (package / folder).rglob("*.py"))]
    beside = {str(path.relative_to(package).with_suffix("")): path.read_text() for path in paths}
    own, engines = (internals_of_torch(heading) for heading in ("Above and below the engine", "torch's insides"))
    check_rows(own, beside)
    private = private_in({name: ast.parse(source) for name, source in beside.items()})
    assert private - OF_OTHERS <= {name for names, _ in (*own, *engines) for name in names}


def test_the_words_of_the_glossary_are_defined_where_it_says() -> None:
    page = (ROOT / "docs/glossary.md").read_text().split("## Words of the engine's code")[1]
    rows = re.findall(r"^\| [^|`]+ \| `([\w/]+)` `(\w+)` \|", page, re.MULTILINE)
    assert len(rows) == page.count("\n| ") - 1  # but for the head
    for module, name in rows:
        assert name in {*map(defined_in, ast.walk(trees()[module]))}, f"{module}: {name}"


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randperm", "tensor", "zeros"}


def test_no_tensor_is_made_where_the_user_makes_theirs() -> None:
    """`with torch.device("meta")` may be around any call of the engine's: tensors of its own say where they are."""
    made = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]  # fmt: skip
    assert made == []


def test_what_a_folder_says_of_its_modules_names_each() -> None:
    folders = {
        name.removesuffix("/__init__"): ast.get_docstring(trees()[name]) for name in trees() if "/__init__" in name
    }
    for folder, text in folders.items():
        inside = [name.removeprefix(f"{folder}/") for name in sources() if name.startswith(f"{folder}/")]
        own = {name.split("/")[0] for name in inside} - {"__init__"}
        assert own - {*re.findall(r"\w+", text or "")} == set(), folder


def test_who_drives_a_model_is_told_and_not_set() -> None:
    """Attributes of a schedule, its program and the hooks are set by themselves alone."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
                assert owner not in ("schedule", "program", "hooks"), f"{name}: {ast.unparse(node)}"


def test_what_a_module_lists_is_what_others_import() -> None:
    """`__all__` holds what another module of the package imports, and beside that only what tests name."""
    wanted: dict[str, set[str]] = {name: set() for name in trees()}
    for path in (ROOT / "src").rglob("*.py"):
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source))) if "terrazzo.engine" in source else []
        asked = [(dotted(node.value), node.attr) for node in nodes if isinstance(node, ast.Attribute)]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("terrazzo.engine."):
                module = (node.module or "").removeprefix("terrazzo.engine.").replace(".", "/")
                wanted.get(module, set()).update(alias.name for alias in node.names)
                for alias in node.names:  # of a module itself, what is asked of it
                    own = {attribute for base, attribute in asked if base == (alias.asname or alias.name)}
                    wanted.get(f"{module}/{alias.name}", set()).update(own)
    words = {word for path in (ROOT / "tests").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    for name, tree in trees().items():
        if name.endswith("__init__"):
            continue
        lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and _names_all(node)]
        listed = {each for names in lists for each in ast.literal_eval(names)}
        assert wanted[name] <= listed, name
        assert listed - wanted[name] <= words, name


def _names_all(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "__all__"
