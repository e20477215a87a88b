"""The house: imports go downward only, and `import dualcrf` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import dualcrf

ROOT = Path(dualcrf.__file__).parent

# From the ground up; a module may import what stands on its own floor or below. The longest prefix counts.
FLOORS = [
    ("dualcrf.kernels",),
    ("dualcrf.ops",),
    ("dualcrf.order", "dualcrf.decompose", "dualcrf.graph", "dualcrf.potentials"),
    ("dualcrf.chains", "dualcrf.solver"),
    ("dualcrf.files", "dualcrf.plots"),
    ("dualcrf.cli", "dualcrf"),
]
HEAVY = ("triton", "numba", "llvmlite", "torchvision", "timm", "matplotlib", "PIL", "scipy")


def floor(module: str) -> int:
    matches = [
        (len(prefix), k) for k, prefixes in enumerate(FLOORS) for prefix in prefixes if (module + ".").startswith(prefix + ".")
    ]
    return max(matches)[1]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "dualcrf"]


def test_imports_go_downward():
    for path in ROOT.rglob("*.py"):
        module = ".".join(["dualcrf", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for name in imports(path):
            assert floor(name) <= floor(module), f"{module} imports {name}, which stands above it"
            backends = [part for part in ("kernels.numba", "kernels.triton") if part in module]
            assert all("kernels.numba" not in name or "kernels.triton" not in module for _ in backends)


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_is_light():
    assert modules_after("import dualcrf") <= modules_after("import torch")
