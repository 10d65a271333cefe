"""The public names of Terrazzo, read from the source without importing it: where each is defined and what it says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Area:
    """Public packages that share a page of the reference.

    Attributes:
        title: of the page.
        packages: in the page's order.
        prefix: before each name in headings, as users write it.
        guide: a page that shows them in use, relative to docs/.
    """

    title: str
    packages: tuple[str, ...]
    prefix: str
    guide: str


AREAS = {
    "terrazzo": Area("terrazzo", ("terrazzo",), "tz.", "guides/own-loop.md"),
    "checkpoint": Area("Checkpoints", ("terrazzo.checkpoint",), "tz.checkpoint.", "guides/checkpoints.md"),
    "engine": Area("Engine", ("terrazzo.engine",), "", "concepts/engine.md"),
    "planner": Area("Planner", ("terrazzo.planner",), "", "guides/planning.md"),
    "data": Area("Data", ("terrazzo.train.data",), "", "guides/data.md"),
    "integrations": Area(
        "Integrations",
        tuple(
            f"terrazzo.integrations.{name}"
            for name in ("accelerate", "deepspeed", "fsdp2", "lightning", "transformers", "peft")
        ),
        "",
        "concepts/dialects.md",
    ),
}


Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign | ast.Module


@dataclass(frozen=True)
class Name:
    """A public name: `path` is that of its definition `node`, whose `docstring` may be empty."""

    name: str
    path: str
    node: Definition
    docstring: str

    @property
    def summary(self) -> str:
        """The docstring's first paragraph, in one line."""
        return " ".join(self.docstring.partition("\n\n")[0].split())

    def members(self) -> Iterator[Name]:
        """Of a class, its public methods and properties that have a docstring."""
        for node in self.node.body if isinstance(self.node, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node)
                if said and not any(ast.unparse(one).endswith((".setter", "overload")) for one in node.decorator_list):
                    yield Name(f"{self.name}.{node.name}", f"{self.path}.{node.name}", node, said)


def public_names(package: str) -> list[Name]:
    """What `__all__` of a package lists: functions, then classes, errors, constants and modules."""
    for node in _module(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [find(package, name) for name in ast.literal_eval(node.value) if not name.startswith("__")]
            return sorted(names, key=_rank)
    raise LookupError(f"{package} has no __all__")


def _rank(named: Name) -> int:
    if named.path.startswith("terrazzo.errors."):
        return 2
    return {ast.FunctionDef: 0, ast.ClassDef: 1, ast.Module: 4}.get(type(named.node), 3)


def find(module: str, name: str) -> Name:
    """Where `module` has `name` from.

    Raises:
        LookupError: it neither defines nor imports it.
    """
    if _file(f"{module}.{name}") is not None:
        path = f"{module}.{name}"
        return Name(name, path, _module(path), ast.get_docstring(_module(path)) or "")
    statements = list(_statements(_module(module).body))
    for at, node in enumerate(statements):
        match node:
            case ast.ImportFrom(module=str(origin), names=names, level=0):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return find(origin, alias.name)
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return Name(name, f"{module}.{name}", node, ast.get_docstring(node) or "")
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in map(ast.unparse, targets):
                    return Name(name, f"{module}.{name}", node, _said_below(statements, at))
    raise LookupError(f"{module} has no {name}")


def signature(named: Name) -> str:
    """How `named` is called, without annotations, as far as one line has room; the name alone of what is not called."""
    node, properties = named.node, {"property", "cached_property"}
    if isinstance(node, ast.ClassDef):
        arguments = _of_class(node)
    elif isinstance(node, ast.FunctionDef) and properties.isdisjoint(map(ast.unparse, node.decorator_list)):
        arguments = node.args
    else:
        return named.name
    if arguments is None:
        return named.name
    parts = _parts(arguments)
    text = f"{named.name}({', '.join(parts)})"
    while len(text) > 150:
        parts = [*parts[: -2 if parts[-1] == "..." else -1], "..."]
        text = f"{named.name}({', '.join(parts)})"
    return text


def _of_class(node: ast.ClassDef) -> ast.arguments | None:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return member.args
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return None
    fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
    fields = [field for field in fields if not ast.unparse(field.annotation).startswith("ClassVar")]
    names = [ast.arg("self"), *(ast.arg(ast.unparse(field.target)) for field in fields)]
    defaults = [_default(field.value) for field in fields if field.value is not None]
    return ast.arguments(args=names, posonlyargs=[], kwonlyargs=[], kw_defaults=[], defaults=defaults)


def _default(value: ast.expr) -> ast.expr:
    return ast.Constant(...) if ast.unparse(value).startswith("field(") else value


def _parts(arguments: ast.arguments) -> list[str]:
    """The parameters but for `self` and `cls`, each with its default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_part(one, default) for one, default in zip(plain, defaults, strict=True)]
    parts = parts[1:] if plain and plain[0].arg in ("self", "cls") else parts
    if arguments.vararg:
        parts.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_part(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return parts + (["**" + arguments.kwarg.arg] if arguments.kwarg else [])


def _part(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return argument.arg
    text = ast.unparse(default).replace("'", '"')
    return f"{argument.arg}={text if len(text) <= 20 else '...'}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, with those under `if TYPE_CHECKING` and the like."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])


def _said_below(statements: list[ast.stmt], at: int) -> str:
    match statements[at + 1 : at + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return "\n".join(line.strip() for line in text.strip().splitlines())
    return ""


def _file(module: str) -> Path | None:
    path = SOURCE / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@cache
def _module(module: str) -> ast.Module:
    file = _file(module)
    if file is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(file.read_text(encoding="utf-8"))
