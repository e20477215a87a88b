"""UAI and .npz files: round trips, every form that may occur, and errors that name the place."""

import gzip
import lzma
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualcrf.files import Model, ModelFileError, read_grid, read_model, read_uai, write_grid, write_uai
from dualcrf.graph import grid
from dualcrf.potentials import Dense, Potts
from dualcrf.solver.certificate import energy
from tests.solver_models import GRAPHS, KINDS, all_energies, mrf_file, random_graph, random_pairwise, random_unary

MIXED = """MARKOV
3
2 3 2
6
0
1 1
2 0 1
2 1 0
2 2 1
1 1

1
2.0

3
1 0 4

6
1 2 3
4 5 6

6
1 1
2 2
3 3

6
1 2 3
4 5 6.5e0
3
1 1 0.5
"""


def read_text(folder: Path, text: str) -> Model:
    path = folder / "model.uai"
    path.write_text(text)
    return read_uai(path)


def test_factors_of_all_sizes_and_orientations_are_multiplied(tmp_path: Path):
    model = read_text(tmp_path, MIXED)
    assert model.unary.shape == (3, 3)
    assert model.graph.edges.tolist() == [[0, 1], [1, 2]]
    for labels, product in (
        ((0, 0, 0), 2 * 1 * 1 * 1 * 1 * 1),
        ((1, 2, 1), 2 * 4 * 6 * 3 * 6.5 * 0.5),
        ((0, 2, 1), 2 * 4 * 3 * 3 * 6.5 * 0.5),
        ((1, 0, 1), 2 * 1 * 4 * 1 * 4 * 1),
        ((0, 1, 0), 0),
        ((2, 0, 0), 0),  # variable 0 has two labels
    ):
        found = energy(torch.tensor(labels), model.unary, model.pairwise, model.graph)
        assert found.exp().item() == pytest.approx(product)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_packed_files_are_read(tmp_path: Path, suffix: str):
    path = tmp_path / f"model.uai{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(pack(MIXED.encode()))
    assert torch.equal(read_model(path).unary, read_text(tmp_path, MIXED).unary)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_model_is_the_same_when_read(tmp_path: Path, kind: str, suffix: str):
    for seed, name in enumerate(sorted(GRAPHS)):
        graph = random_graph(name, seed)
        unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
        unary[1, 0] = -torch.inf
        path = tmp_path / f"model.uai{suffix}"
        write_uai(path, unary, pairwise, graph)
        model = read_uai(path)
        found = all_energies(model.unary, model.pairwise, model.graph)
        assert torch.allclose(found, all_energies(unary, pairwise, graph), atol=1e-12)


def test_what_cannot_be_written_is_named(tmp_path: Path):
    graph = grid(2)
    with pytest.raises(ValueError, match="unary has a score of 800"):
        write_uai(tmp_path / "a.uai", torch.full((2, 2), 800.0), Potts(torch.ones(1)), graph)
    with pytest.raises(ValueError, match="holds one model"):
        write_uai(tmp_path / "a.uai", torch.zeros(3, 2, 2), Potts(torch.ones(1)), graph)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("MARKOV", "BAYES", 1, "expected MARKOV, and found 'BAYES'"),
        ("MARKOV\n3", "MARKOV\nthree", 2, "the number of variables is 'three'"),
        ("2 3 2", "2 0 2", 3, "variable 1 has no labels"),
        ("2 1 0", "2 1 7", 8, "factor 3 names variable 7, and the variables are 0 to 2"),
        ("2 2 1", "2 2 2", 9, "factor 4 names variable 2 twice"),
        ("2 0 1", "3 0 1 2", 7, "factor 2 has 3 variables, and only up to two"),
        ("3\n1 0 4", "4\n1 0 4 4", 15, "factor 1 has 4 entries, and its variables' labels make 3"),
        ("1 0 4", "1 x 4", 16, "entry 1 of factor 1 is 'x', expected a number"),
        ("1 0 4", "1 -2 4", 16, "entry 1 of factor 1 is -2, expected 0 or more"),
        ("1 0 4", "1 nan 4", 16, "entry 1 of factor 1 is nan, expected 0 or more"),
        ("1 1 0.5\n", "1 1 0.5\n9 9", 32, "2 entries follow the last factor"),
        ("1 1 0.5\n", "1 1", 31, "the file ends inside factor 5, 1 entries short"),
        ("3\n1 1 0.5\n", "", 29, "the file ends where the number of entries of factor 5 should be"),
    ],
)
def test_a_broken_file_names_the_line(tmp_path: Path, old: str, new: str, line: int, message: str):
    assert old in MIXED
    head, tail = MIXED.rsplit(old, 1) if old.startswith(("1 1 0.5", "3\n1 1")) else MIXED.split(old, 1)
    with pytest.raises(ModelFileError) as caught:
        read_text(tmp_path, head + new + tail)
    assert f"line {line}: " in str(caught.value)
    assert message in str(caught.value)
    assert "model.uai" in str(caught.value)


@pytest.mark.parametrize("name", ["model.uai.gz", "model.uai.xz", "model.npz", "model.uai"])
def test_a_file_that_is_something_else(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(b"\x93\xff" + bytes(range(256)))
    with pytest.raises(ModelFileError, match=name):
        read_model(path)


def test_an_empty_file(tmp_path: Path):
    with pytest.raises(ModelFileError, match="line 1: the file ends where the word MARKOV should be"):
        read_text(tmp_path, "")


def test_reading_takes_linear_time(tmp_path: Path):
    seconds = []
    for side in (30, 120):
        graph = grid(side, side)
        write_uai(tmp_path / "model.uai", torch.zeros(side * side, 3), Potts(torch.ones(graph.num_edges)), graph)
        begun = time.process_time()
        read_uai(tmp_path / "model.uai")
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 3 * 16 * seconds[0]


@pytest.mark.parametrize("kind", KINDS)
def test_grids_come_back(tmp_path: Path, kind: str):
    graph = grid(3, 4, strides=(1, 2), diagonals=True)
    unary, pairwise = random_unary(graph, 3, 0), random_pairwise(kind, graph, 3, 0)
    write_grid(tmp_path / "model.npz", unary.view(3, 4, 3), pairwise, strides=(1, 2), diagonals=True)
    model = read_model(tmp_path / "model.npz")
    assert torch.equal(model.unary, unary)
    assert torch.equal(model.graph.edges, graph.edges)
    for name, value in pairwise.parameters.items():
        assert torch.equal(model.pairwise.parameters[name], value)


def test_broken_grids_are_named(tmp_path: Path):
    path = tmp_path / "model.npz"
    broken: list[tuple[dict[str, Any], str]] = [
        ({}, "unary is missing"),
        ({"unary": np.zeros(3)}, r"unary has shape \(3,\)"),
        ({"unary": np.zeros((2, 2, 3))}, "expected beside unary"),
        ({"unary": np.zeros((2, 2, 3)), "weight": np.zeros(5)}, "4 edges"),
        ({"unary": np.zeros((2, 2, 3)), "weight": np.zeros(4), "strides": [0]}, "strides"),
    ]
    for arrays, message in broken:
        np.savez(path, **arrays)
        with pytest.raises(ModelFileError, match=message):
            read_grid(path)


@pytest.mark.parametrize("name", ["Grids_11", "Grids_12", "Segmentation_11", "ObjectDetection_11"])
def test_benchmark_files_are_read_and_written(tmp_path: Path, name: str):
    model = read_model(mrf_file(f"{name}.uai"))
    write_uai(tmp_path / "again.uai.xz", model.unary, model.pairwise, model.graph)
    again = read_model(tmp_path / "again.uai.xz")
    assert torch.allclose(again.unary, model.unary, atol=1e-12)
    assert isinstance(again.pairwise, Dense)
    assert isinstance(model.pairwise, Dense)
    assert torch.allclose(again.pairwise.table, model.pairwise.table, atol=1e-12)
    assert torch.equal(again.graph.edges, model.graph.edges)
