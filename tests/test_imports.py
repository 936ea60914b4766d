"""Imports point one way, and `import stitch` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "stitch"

BOTTOM = {"errors", "types", "failpoints", "strict_json", "records"}
PEERS = {
    "tensors": BOTTOM,
    "codec": BOTTOM | {"tensors"},
    "views": BOTTOM | {"tensors"},
    "board": BOTTOM,
    "engines": BOTTOM | {"tensors", "codec", "views"},
}
MIRROR = BOTTOM | set(PEERS)
COMPOSERS = {
    "mirror": MIRROR,
    "publish": MIRROR | {"mirror"},
    "replica": MIRROR | {"mirror", "config"},
    "client": BOTTOM | {"board", "config"},
    "config": BOTTOM,
}
PRODUCT = MIRROR | set(COMPOSERS)
ALLOWED = {
    **{name: BOTTOM for name in BOTTOM},
    **PEERS,
    **COMPOSERS,
    "demo": PRODUCT,
    "cli": PRODUCT | {"demo"},
    "testing": PRODUCT | {"demo", "testing"},
    "__init__": PRODUCT,
}
"""Part of the package -> the other parts that it may import."""


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """First components under `stitch` that a file imports, anywhere in it."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            module = node.module or ""
            if module == "stitch":
                parts |= {alias.name for alias in node.names}
            elif module.startswith("stitch."):
                parts.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            parts |= {a.name.split(".")[1] for a in node.names if a.name.startswith("stitch.")}
    return parts


def test_imports_point_one_way() -> None:
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 20
    wrong = [
        f"{path.relative_to(SRC)} imports stitch.{target}"
        for path in files
        for target in sorted(imported_parts(path) - {part_of(path)} - ALLOWED[part_of(path)])
        if (SRC / target).is_dir() or (SRC / f"{target}.py").exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_bottom_layer_uses_the_standard_library_only() -> None:
    for name in BOTTOM:
        tree = ast.parse((SRC / f"{name}.py").read_text())
        for node in ast.walk(tree):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for module in names:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names | {"stitch", "__future__"}, (name, module)


def test_import_stitch_loads_no_heavy_module() -> None:
    code = (
        "import sys, stitch; "
        "heavy = {'torch', 'transformers', 'aiohttp', 'numba', 'starlette', 'pcodec'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
