"""What ranks tell each other is data: no module but those named here hands anything to a pickle."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "terrazzo"
UNPICKLES = {"load", "loads", "Unpickler", "_Unpickler"}
ALLOWED = {
    "checkpoint/importers/parts/unpickle.py": "reads others' pickles by lists of what may be called",
    "integrations/lightning/sharded_strategy.py": "Lightning's own `broadcast` is of any object of the user's",
}


def unpickling(tree: ast.Module) -> set[str]:
    """Calls that unpickle what a rank has sent or a file holds."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            pickled = base in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
            exchanged = base in ("dist", "torch.distributed") and "_object" in node.attr
            if exchanged or (pickled and node.attr in UNPICKLES):
                found.add(f"{base}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if options.get("weights_only") != "True":
                found.add("torch.load")
    return found


def test_no_module_unpickles_what_it_is_sent_or_reads() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := unpickling(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == set(ALLOWED), found


def test_what_would_unpickle_is_seen() -> None:
    text = "dist.broadcast_object_list(x); pickle.loads(x); torch.load(f); torch.load(f, weights_only=True)"
    assert unpickling(ast.parse(text)) == {"dist.broadcast_object_list", "pickle.loads", "torch.load"}
