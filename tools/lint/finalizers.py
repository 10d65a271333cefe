"""Finds what may wait inside finalizers and signal handlers, which run in the middle of anything.

The reason is told in `ending.py`. It starts from `__del__`, and from what `weakref.finalize`,
`weakref.ref`, `weakref.proxy` and `signal.signal` are given to call, and follows every call that it can resolve within
the package: functions and classes by name or import, methods of `self`, and methods of what an annotation or a
constructor says an attribute or a name is. Of a call that it cannot resolve, the name alone is looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tools.lint.source import Finding, Module

__all__ = ["find_waits"]

WAITS = re.compile(
    "acquire|join|wait|wait_for|result|exception|shutdown|sleep|synchronize|get|recv|send|sendall|accept|connect|select"
    "|poll|communicate|start|submit|barrier|flush|write|read|readline|print"
)
"""Calls that may take a lock or wait, of whatever they are."""
FILES = re.compile(
    "open|close|unlink|remove|rmdir|rmtree|rename|replace|mkdir|fsync|glob|iterdir|listdir|exists|(read|write)_(text|bytes)"
    "|touch|stat|ftruncate|flock|munmap|Thread|ThreadPoolExecutor|Popen"
)
"""Calls that do I/O, or start something."""
LOCKS = frozenset({"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"})
REGISTERED = {"finalize": 1, "ref": 1, "proxy": 1, "signal": 1}
"""Which argument of `weakref.finalize` and its like is called later."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class _Class:
    """A class of the package: its methods, and what its attributes are, by the names of classes."""

    module: str
    node: ast.ClassDef
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """Where a piece of code stands: names in it mean what they mean there."""

    module: str
    owner: str | None = None
    around: tuple[Function, ...] = ()


class _Package:
    """Every module's names."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules
        self.names: dict[str, dict[str, str]] = {}  # of a module: name to dotted target
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, _Class] = {}
        self.variables: dict[str, str] = {}  # of modules: dotted name to the class of what it holds
        for name, module in modules.items():
            self._read(name, module)
        for known in self.classes.values():
            self._read_attributes(known)
        for name, module in modules.items():
            self._read_variables(name, module.tree)

    def _read(self, module: str, source: Module) -> None:
        names = self.names[module] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{_home(source, node)}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                names |= {a.asname: a.name for a in node.names if a.asname}
                names |= {top: top for a in node.names if not a.asname for top in [a.name.split(".")[0]]}
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef):
                names[node.name] = f"{module}.{node.name}"
                self.functions[names[node.name]] = node
            elif isinstance(node, ast.ClassDef):
                names[node.name] = f"{module}.{node.name}"
                methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
                self.classes[names[node.name]] = _Class(module, node, methods)

    def _read_attributes(self, known: _Class) -> None:
        for node in ast.walk(known.node):
            if isinstance(node, ast.AnnAssign):
                name = _attribute(node.target) or (isinstance(node.target, ast.Name) and node.target.id) or ""
                known.kinds.setdefault(name, self.annotated(known.module, node.annotation))
            elif isinstance(node, ast.Assign):
                for name, value in _pairs(node):
                    if name and isinstance(value, ast.Call):
                        known.kinds.setdefault(name, self.named(known.module, value.func))
        for method in known.methods.values():
            annotated = {a.arg: a.annotation for a in method.args.args if a.annotation is not None}
            for node in (node for node in ast.walk(method) if isinstance(node, ast.Assign)):
                for name, value in _pairs(node):
                    if name and isinstance(value, ast.Name) and value.id in annotated:
                        known.kinds.setdefault(name, self.annotated(known.module, annotated[value.id]))

    def _read_variables(self, module: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.variables[f"{module}.{node.target.id}"] = self.annotated(module, node.annotation)
                self.names[module].setdefault(node.target.id, f"{module}.{node.target.id}")
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.variables[f"{module}.{target.id}"] = self.named(module, node.value.func)
                        self.names[module].setdefault(target.id, f"{module}.{target.id}")

    def named(self, module: str, node: ast.expr | None) -> str:
        """The dotted name that an expression such as `Worker`, `queue.SimpleQueue[int]` or `Disk | None` stands for."""
        if isinstance(node, ast.Subscript):
            return self.named(module, node.value)
        if isinstance(node, ast.BinOp):
            return self.named(module, node.left)
        if isinstance(node, ast.Name):
            return self.names[module].get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.named(module, node.value)}.{node.attr}"
        return ""

    def annotated(self, module: str, node: ast.expr) -> str:
        """As `named`, for an annotation, which may be in quotes."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return self.named(module, node)

    def method(self, owner: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        """A method of a class or of those of its bases that are in the package, and the class that has it."""
        known = self.classes.get(owner)
        if known is None:
            return None
        if name in known.methods:
            return owner, known.methods[name]
        bases = (self.method(self.named(known.module, base), name) for base in known.node.bases)
        return next((found for found in bases if found is not None), None)


class _Walk:
    """Follows calls from one function that is run at any moment."""

    def __init__(self, package: _Package, root: str) -> None:
        self._package, self._root = package, root
        self._seen: set[int] = set()

    def into(self, function: Function, place: _Place) -> Iterator[Finding]:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        inside = _Place(place.module, place.owner, (*place.around, function))
        for node in _own_nodes(function):
            if isinstance(node, ast.With | ast.AsyncWith):
                for item in node.items:
                    yield from self._entered(item.context_expr, inside)
            elif isinstance(node, ast.Call):
                yield from self._called(node, inside)

    def _entered(self, node: ast.expr, place: _Place) -> Iterator[Finding]:
        if self._kind(node, place).rpartition(".")[2] in LOCKS or "lock" in ast.unparse(node).lower().split("(")[0]:
            yield self._found(node, place, f"with {ast.unparse(node)}")

    def _called(self, node: ast.Call, place: _Place) -> Iterator[Finding]:
        target = self.target(node.func, place)
        if target is not None:
            yield from self.into(*target)
        elif (name := self._outside(node.func, place)) is not None:
            yield self._found(node, place, name)

    def _outside(self, node: ast.expr, place: _Place) -> str | None:
        """What a call that leaves the package is called, if that may wait."""
        last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        value = node.value if isinstance(node, ast.Attribute) else None
        text = isinstance(value, ast.Constant | ast.JoinedStr)  # ", ".join(...)
        harmless = text or (last == "get" and value is not None and self._kind(value, place) in ("dict", "os.environ"))
        return ast.unparse(node) if (WAITS.fullmatch(last) or FILES.fullmatch(last)) and not harmless else None

    def target(self, node: ast.expr, place: _Place) -> tuple[Function, _Place] | None:
        """The function of the package that a call reaches, and where it stands."""
        package = self._package
        if isinstance(node, ast.Lambda):
            return node, place
        if isinstance(node, ast.Call) and package.named(place.module, node.func) == "functools.partial":
            return self.target(node.args[0], place)
        if isinstance(node, ast.Name) and (nested := _nested(node.id, place)) is not None:
            return nested, place
        if isinstance(node, ast.Attribute):
            owner = self._kind(node.value, place)
            if (found := package.method(owner, node.attr)) is not None:
                return found[1], _Place(package.classes[found[0]].module, found[0])
        return self._by_name(package.named(place.module, node) if isinstance(node, ast.Name | ast.Attribute) else "")

    def _by_name(self, name: str) -> tuple[Function, _Place] | None:
        package = self._package
        if name in package.functions:
            return package.functions[name], _Place(name.rpartition(".")[0])
        if name in package.classes and (found := package.method(name, "__init__")) is not None:
            return found[1], _Place(package.classes[found[0]].module, found[0])
        called = package.variables.get(name)  # an object that is called
        found = package.method(called, "__call__") if called is not None else None
        return (found[1], _Place(package.classes[found[0]].module, found[0])) if found is not None else None

    def _kind(self, node: ast.expr, place: _Place) -> str:
        """The class of what an expression stands for, as far as the source says."""
        package = self._package
        if isinstance(node, ast.Name):
            if node.id == "self" and place.owner is not None:
                return place.owner
            for function in reversed(place.around):
                annotated = {a.arg: a.annotation for a in function.args.args if a.annotation is not None}
                if node.id in annotated:
                    return package.annotated(place.module, annotated[node.id])
                if (local := _local(node.id, function)) is not None:
                    return self._kind(local, place) if local is not node else ""
            return package.variables.get(package.named(place.module, node), "")
        if isinstance(node, ast.Attribute):
            owner = package.classes.get(self._kind(node.value, place))
            if owner is not None and node.attr in owner.kinds:
                return owner.kinds[node.attr]
            return package.named(place.module, node)
        if isinstance(node, ast.Call):
            return package.named(place.module, node.func)
        return ""

    def _found(self, node: ast.expr, place: _Place, what: str) -> Finding:
        path = self._package.modules[place.module].path
        return Finding(
            path, node.lineno, f"'{what}' may wait, and is reached from {self._root}, which runs at any moment"
        )


def find_waits(modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Every call that may wait and can be reached from a finalizer or a signal handler of the package."""
    package = _Package(modules)
    for name, known in package.classes.items():
        if "__del__" in known.methods:
            walk = _Walk(package, f"{known.node.name}.__del__")
            yield from walk.into(known.methods["__del__"], _Place(known.module, name))
    for module, source in modules.items():
        yield from _registered(package, module, source.tree, _Place(module))


def _registered(package: _Package, module: str, node: ast.AST, place: _Place) -> Iterator[Finding]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.ClassDef):
            inner = _Place(module, f"{module}.{child.name}", place.around)
        elif isinstance(child, Function):
            inner = _Place(module, place.owner, (*place.around, child))
        if isinstance(child, ast.Call) and (position := _position(package, module, child)) is not None:
            walk = _Walk(package, f"{ast.unparse(child.func)} at {package.modules[module].path.name}:{child.lineno}")
            yield from _callback(package, walk, child.args[position], place)
        yield from _registered(package, module, child, inner)


def _home(source: Module, node: ast.ImportFrom) -> str:
    """The module that a `from` import names, relative dots resolved."""
    parts = source.name.split(".")
    climbed = parts[: len(parts) - node.level + (source.path.name == "__init__.py")] if node.level else []
    return ".".join([*climbed, *([node.module] if node.module else [])])


def _position(package: _Package, module: str, call: ast.Call) -> int | None:
    home, _, last = package.named(module, call.func).rpartition(".")
    position = REGISTERED.get(last) if home in ("weakref", "signal") else None
    return position if position is not None and len(call.args) > position else None


def _callback(package: _Package, walk: _Walk, node: ast.expr, place: _Place) -> Iterator[Finding]:
    """Follows what has been handed over: a function, a method, an object that is called, or a call that makes one."""
    target = walk.target(node, place)
    if target is None:
        kind = walk._kind(node, place)
        found = package.method(kind, "__call__")
        target = (found[1], _Place(package.classes[found[0]].module, found[0])) if found is not None else None
    if target is not None:
        yield from walk.into(*target)
    elif (name := walk._outside(node, place)) is not None:
        yield walk._found(node, place, name)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """What runs when the function is called: not what functions inside it do."""
    waiting: list[ast.AST] = list(function.body) if not isinstance(function, ast.Lambda) else [function.body]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, Function | ast.ClassDef)]


def _nested(name: str, place: _Place) -> ast.FunctionDef | None:
    inside = (node for function in reversed(place.around) for node in ast.walk(function))
    return next((node for node in inside if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _local(name: str, function: Function) -> ast.expr | None:
    """What a function assigns to a name of its own."""
    for node in (node for node in _own_nodes(function) if isinstance(node, ast.Assign)):
        named = any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        if named and isinstance(node.value, ast.Call | ast.Attribute):
            return node.value
    return None


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Attributes of `self` and what they are given."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from ((_attribute(a), b) for a, b in zip(target.elts, node.value.elts, strict=False))
        else:
            yield _attribute(target), node.value


def _attribute(node: ast.expr) -> str:
    """`x` for `self.x`."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and is_own else ""
