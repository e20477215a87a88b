"""Every Triton kernel, compiled without a GPU for three generations of them, keeps to its registers and spills
nothing."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels do not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dualcrf.kernels.triton import chain, potts  # noqa: E402
from dualcrf.kernels.triton.tiles import tile_blocks  # noqa: E402

KERNELS = {
    "scan": chain.scan_kernel,
    "adjoint": chain.adjoint_kernel,
    "edge gradient": chain.edge_gradient_kernel,
    "potts scan": potts.scan_kernel,
    "potts adjoint": potts.adjoint_kernel,
}
# Registers a thread at most, whatever the version of Triton. A multiprocessor has 65,536: at 21 labels, where a program is one
# warp, 64 let 32 programs in and 128 let 16 in; the programs of 64 labels have two warps, those of more have eight.
REGISTERS = {
    ("scan", 21): 88,
    ("scan", 64): 192,
    ("scan", 129): 128,
    ("adjoint", 21): 136,
    ("adjoint", 64): 216,
    ("adjoint", 129): 176,
    ("edge gradient", 21): 64,
    ("edge gradient", 64): 168,
    ("edge gradient", 129): 80,
    ("potts scan", 21): 64,
    ("potts scan", 64): 96,
    ("potts scan", 129): 80,
    ("potts adjoint", 21): 88,
    ("potts adjoint", 64): 136,
    ("potts adjoint", 129): 112,
}
# The other kinds read more than one table, and sum their gradients over edges or batch items.
REGISTERS_OF_OTHER_KINDS = {"scan": 104, "adjoint": 152, "edge gradient": 176}
SHARED = {21: 2048, 64: 512, 129: 8192}  # bytes of shared memory a program

INTEGERS = {"B", "S", "C", "E", "units", "one_batch", "two_batch", "weight_batch"}
INDICES = {"start", "edges", "place", "edge", "node"}


def compiled(name: str, num_labels: int, arch: int, kind: str = "dense", parameter: str = "table"):
    """A kernel as it is launched for float32, smoothed, with all gradients."""
    kernel = KERNELS[name]
    blocks = potts._blocks(num_labels) if name.startswith("potts") else tile_blocks(num_labels)
    constants = {
        "L": num_labels, "KIND": kind, "NAME": parameter, "HAS_FLIPS": False, "SHARED": False, "KEEP": True,
        "grad_gamma": None, **blocks,
    }  # fmt: skip
    if parameter not in ("source", "target"):
        constants.update(start=None, edges=None) if name == "edge gradient" else None
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in INTEGERS:
            signature[argument] = "i32"
        else:
            signature[argument] = "*i32" if argument in INDICES else "*i1" if argument == "flip" else "*fp32"
        if signature[argument].startswith("*") or argument.endswith("_batch"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, used, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": blocks["num_warps"]})


def resources(kernel) -> dict[str, int]:
    """Registers, stack (where spills go) and local memory of a compiled kernel, by the disassembler that Triton
    carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout)}


def check(kernel, num_labels: int, registers: int, stack: int = 0) -> None:
    usage = resources(kernel)
    assert usage["STACK"] <= stack
    assert usage["LOCAL"] == 0
    assert usage["REG"] <= registers
    assert kernel.metadata.shared <= SHARED[num_labels]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", list(KERNELS))
def test_the_papers_size(name, arch):
    check(compiled(name, 21, arch), 21, REGISTERS[name, 21])


@pytest.mark.parametrize("num_labels", [64, 129])
@pytest.mark.parametrize("name", list(KERNELS))
def test_more_labels(name, num_labels):
    check(compiled(name, num_labels, 90), num_labels, REGISTERS[name, num_labels])


@pytest.mark.parametrize("name", list(REGISTERS_OF_OTHER_KINDS))
@pytest.mark.parametrize(("kind", "parameter"), [("additive", "source"), ("weighted", "weight"), ("weighted", "compat")])
def test_other_kinds(kind, parameter, name):
    # A weighted edge keeps the one table of all edges in registers; Triton 3.9 puts two scalars of its scans on the stack.
    spare, stack = (48, 8) if kind == "weighted" else (0, 0)
    check(compiled(name, 21, 90, kind, parameter), 21, REGISTERS_OF_OTHER_KINDS[name] + spare, stack)


@pytest.mark.parametrize("name", ["scan", "adjoint", "edge gradient"])
def test_a_tile_keeps_the_layout_it_is_read_in(name):
    # Four rows and eight neighbouring columns to a warp's load, and no exchange between lanes but of vectors and in reductions:
    # this is what decides the speed at the paper's size.
    lines = compiled(name, 21, 90).asm["ttgir"].splitlines()
    layout = next(re.search(r"(#\w+)>", line) for line in lines if "tt.load" in line and "tensor<32x4x8x!tt.ptr" in line)
    assert layout is not None
    assert any(line.startswith(f"{layout[1]} = ") and "threadsPerWarp = [4, 1, 8]" in line for line in lines)
    assert not any("convert_layout" in line and "tensor<32x4x8xf32" in line for line in lines)
