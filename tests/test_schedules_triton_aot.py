"""The schedules' Triton kernels, compiled without a GPU for three generations of them, keep to their registers and spill
nothing."""

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels do not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dualcrf.kernels.triton import handover, labels, potts, wavefront  # noqa: E402
from dualcrf.kernels.triton.tiles import tile_blocks  # noqa: E402
from tests.test_triton_aot import resources  # noqa: E402

KERNELS = {
    "wavefront": wavefront.wavefront_kernel,
    "handover": handover.handover_kernel,
    "potts handover": handover.potts_handover_kernel,
    "decode": labels.decode_kernel,
    "improve": labels.improve_kernel,
}
# Registers a thread at most at 21 labels, whatever the version of Triton: with 80 a multiprocessor of 65,536 holds 24 programs
# of one warp. Programs that hand over are few, and read ahead for several chains.
REGISTERS = {"wavefront": 80, "handover": 80, "potts handover": 152, "decode": 80, "improve": 80}
# Bytes of stack: Triton 3.9 puts two numbers there that every level needs once, rather than take a 65th register.
STACK = {("wavefront", "potts"): 8}
FAMILIES = 4

INTEGERS = {"B", "N", "S", "C", "levels", "sweeps", "reverse", "teams", "size", "first_chain", "last_chain"}
STRIDES = {"one_batch", "two_batch", "weight_batch"}
INDICES = {
    "edge", "node", "start", "count", "parent", "level_start", "level_node", "place_start", "node_place", "counters",
}  # fmt: skip
POINTERS = {"flip": "*i1", "chosen": "*i64", "dual": "*fp64"}


def compiled(name: str, num_labels: int, arch: int, kind: str, forward: bool = True):
    """A kernel as it is launched for float32; the wavefront smoothed."""
    kernel = KERNELS[name]
    blocks = {
        "wavefront": lambda: wavefront.blocks(num_labels, FAMILIES, kind),
        "handover": lambda: tile_blocks(num_labels),
        "potts handover": lambda: potts._blocks(num_labels),
        "decode": lambda: labels.blocks(num_labels, kind),
        "improve": lambda: labels.blocks(num_labels, kind),
    }[name]()
    constants = {"L": num_labels, "KIND": kind, "HAS_FLIPS": False, "FORWARD": forward, **blocks}
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in INTEGERS | STRIDES:
            signature[argument] = "i32"
        else:
            signature[argument] = POINTERS.get(argument, "*i32" if argument in INDICES else "*fp32")
        if signature[argument].startswith("*") or argument in STRIDES:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {k: v for k, v in constants.items() if k in signature}, attributes)
    options = {"num_warps": blocks["num_warps"], "launch_cooperative_grid": "handover" not in name}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(kernel, registers: int, stack: int = 0) -> None:
    usage = resources(kernel)
    assert usage["STACK"] <= stack
    assert usage["LOCAL"] == 0
    assert usage["REG"] <= registers


def name_and_kind() -> list[tuple[str, str]]:
    return [(name, kind) for name in KERNELS for kind in ("dense", "potts") if name != "handover" or kind == "dense"
            if name != "potts handover" or kind == "potts"]  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("name", "kind"), name_and_kind())
def test_the_papers_size(name: str, kind: str, arch: int):
    check(compiled(name, 21, arch, kind), REGISTERS[name], STACK.get((name, kind), 0))


@pytest.mark.parametrize("kind", ["additive", "weighted"])
@pytest.mark.parametrize("name", ["wavefront", "handover", "decode", "improve"])
def test_other_kinds(name: str, kind: str):
    check(compiled(name, 21, 90, kind, forward=False), REGISTERS[name])


@pytest.mark.parametrize(("name", "kind"), name_and_kind())
def test_more_labels(name: str, kind: str):
    # Two warps hold a tile of 64 labels.
    check(compiled(name, 64, 90, kind), 128)


def test_a_tile_keeps_the_layout_it_is_read_in():
    for name, kind, tile in (
        ("wavefront", "dense", "32x4x8xf32"),
        ("wavefront", "potts", "4x4x8xf32"),
        ("handover", "dense", "32x4x8xf32"),
    ):
        lines = compiled(name, 21, 90, kind).asm["ttgir"].splitlines()
        assert any("tt.load" in line and tile.replace("xf32", "x!tt.ptr") in line for line in lines)
        assert not any("convert_layout" in line and f"tensor<{tile}" in line for line in lines)
