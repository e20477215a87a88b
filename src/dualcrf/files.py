"""Models in files: UAI `MARKOV` files, packed or not, and `.npz` files of grid models.

A UAI file is a product of tables, so its scores are logarithms: a zero entry is a score of -inf. Nodes with fewer
labels than others are filled up with forbidden ones; a factor over no variable is added to the scores of node 0.

A grid model's `.npz` file holds scores (the negatives of costs) under these keys:

    unary      [n, L], [h, w, L] or [d, h, w, L]: the grid's shape is that of all axes but the last
    strides    whole numbers, (1,) if absent
    diagonals  true or false, false if absent
    table      [E, L, L]                                    a `Dense` potential, or
    source, target  [N, L, L] each                          an `Additive` one, or
    weight, compat  [E] and [L, L]                          a `Weighted` one, or
    weight     [E]                                          a `Potts` one

with nodes and edges in the order of `dualcrf.grid`.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dualcrf.graph import Graph, grid
from dualcrf.ops.edges import EDGE_KINDS
from dualcrf.potentials import Additive, Dense, Pairwise, Potts, Weighted


@dataclass(frozen=True, eq=False)
class Model:
    """What a file describes, ready for `dualcrf.solve(model.unary, model.pairwise, model.graph)`."""

    unary: Tensor
    pairwise: Pairwise
    graph: Graph


class ModelFileError(ValueError):
    """A file that is not what it should be; the message names the file and the line or entry that is wrong."""


def read_model(path: str | Path) -> Model:
    """Read a model from a `.npz` file, or from a UAI file: `.uai`, `.uai.gz`, `.uai.xz` or any other name.

    Example:
        >>> model = read_model("Grids_11.uai")
        >>> solution = dualcrf.solve(model.unary, model.pairwise, model.graph)
    """
    return read_grid(path) if Path(path).suffix == ".npz" else read_uai(path)


def read_uai(path: str | Path) -> Model:
    """Read a UAI `MARKOV` file whose factors have no, one or two variables; time and memory are linear in its size.

    Several factors over the same variables are added up. The scores are float64.

    Example:
        >>> model = read_uai("Segmentation_11.uai.xz")
        >>> model.unary.shape, model.pairwise, model.graph
    """
    with _unpacked(path, "rt") as file:
        try:
            text = file.read()
        except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path}: cannot be unpacked and read as text: {error}") from error
    return _UaiParser(path, text).model()


def write_uai(path: str | Path, unary: Tensor, pairwise: Pairwise, graph: Graph) -> None:
    """Write a UAI `MARKOV` file, packed if its name ends in `.gz` or `.xz`: one factor for every node and every edge.

    Args:
        unary: [N, L] scores of the nodes; the file holds their exponentials, so each must be below 700.
        pairwise: scores of the edges, without a batch.

    Example:
        >>> write_uai("model.uai", unary, pairwise, graph)
    """
    if unary.shape[:-1] != (graph.num_nodes,) or pairwise.batch_shape:
        raise ValueError(
            f"unary has shape {tuple(unary.shape)} and pairwise a batch of {tuple(pairwise.batch_shape)}, "
            f"expected [{graph.num_nodes} nodes, labels] and none: a UAI file holds one model"
        )
    labels = unary.shape[-1]
    pairwise.check(graph, labels, unary.device)
    nodes = " ".join([str(labels)] * graph.num_nodes)
    with _unpacked(path, "wt") as file:
        file.write(f"MARKOV\n{graph.num_nodes}\n{nodes}\n{graph.num_nodes + graph.num_edges}\n")
        file.writelines(f"1 {i}\n" for i in range(graph.num_nodes))
        file.writelines(f"2 {i} {j}\n" for i, j in graph.edges.tolist())
        for name, scores in [("unary", unary)] + [(repr(pairwise), t) for t in _tables(pairwise, graph, labels)]:
            if scores.numel() and not scores.max() < 700:
                raise ValueError(f"{name} has a score of {scores.max().item()}; its exponential cannot be written")
            for factor in scores.double().exp().flatten(1).tolist():
                file.write(f"\n{len(factor)}\n{' '.join(map(repr, factor))}\n")


def read_grid(path: str | Path) -> Model:
    """Read a grid model from an `.npz` file; the module's text lists the keys.

    Example:
        >>> model = read_grid("tsukuba-scores.npz")
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelFileError(f"{path}: cannot be read as an .npz file: {error}") from error
    unary = arrays.get("unary")
    if unary is None or not 2 <= unary.ndim <= 4:
        found = "is missing" if unary is None else f"has shape {unary.shape}"
        raise ModelFileError(f"{path}: unary {found}, expected [n, L], [h, w, L] or [d, h, w, L]")
    kinds: list[tuple[Callable[..., Pairwise], tuple[str, ...]]] = [
        (Dense, ("table",)), (Additive, ("source", "target")), (Weighted, ("weight", "compat")), (Potts, ("weight",)),
    ]  # fmt: skip
    kind = next(((make, keys) for make, keys in kinds if all(key in arrays for key in keys)), None)
    if kind is None:
        raise ModelFileError(
            f"{path}: holds {', '.join(arrays)}, expected beside unary: "
            "table, or source and target, or weight and compat, or weight"
        )
    make, keys = kind
    strides = tuple(int(s) for s in np.atleast_1d(arrays.get("strides", 1)))
    try:
        graph = grid(*unary.shape[:-1], strides=strides, diagonals=bool(arrays.get("diagonals", False)))
        scores = torch.from_numpy(unary).flatten(0, -2)
        pairwise = make(*(torch.from_numpy(arrays[key]) for key in keys))
        pairwise.check(graph, scores.shape[-1], scores.device)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{path}: {error}") from error
    return Model(scores, pairwise, graph)


def write_grid(
    path: str | Path, unary: Tensor, pairwise: Pairwise, *, strides: Sequence[int] = (1,), diagonals: bool = False
) -> None:
    """Write a grid model to an `.npz` file; the module's text lists the keys.

    Args:
        unary: [..., L] scores, on axes that are the grid's.
        pairwise: scores of the edges of `dualcrf.grid(*unary.shape[:-1], strides=strides, diagonals=diagonals)`.

    Example:
        >>> write_grid("model.npz", torch.randn(20, 30, 4), dualcrf.Potts(torch.ones(1150)))
    """
    graph = grid(*unary.shape[:-1], strides=strides, diagonals=diagonals)
    pairwise.check(graph, unary.shape[-1], unary.device)
    tensors = {"unary": unary, **pairwise.parameters}
    arrays: dict[str, Any] = {key: value.detach().cpu().numpy() for key, value in tensors.items()}
    arrays |= {"strides": np.array(strides), "diagonals": np.array(diagonals)}
    np.savez_compressed(path, **arrays)


def _unpacked(path: str | Path, mode: str) -> IO[str]:
    openers = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(Path(path).suffix, open)(path, mode)


def _tables(pairwise: Pairwise, graph: Graph, labels: int, at_once: int = 256) -> Iterator[Tensor]:
    """Every edge's [L, L] scores, some edges at a time."""
    parameters = [p.detach().cpu() for p in pairwise.flat_parameters(torch.Size())]
    for edge in torch.arange(graph.num_edges).split(at_once):
        first, second = graph.edges[edge].unbind(1)
        yield EDGE_KINDS[pairwise.kind].scores(parameters, edge, first, second, labels)[0]


class _UaiParser:
    """A cursor over the entries of a UAI file."""

    def __init__(self, path: str | Path, text: str) -> None:
        self.path, self.text = path, text
        self.entries = text.split()
        self.at = 0

    def model(self) -> Model:
        kind = self._next("the word MARKOV")
        if kind.upper() != "MARKOV":
            self._fail(0, f"expected MARKOV, and found {kind!r}; other kinds of UAI files are not read")
        nodes = self._count("the number of variables")
        if not nodes:
            self._fail(self.at - 1, "there are no variables")
        sizes = [self._count(f"the number of labels of variable {i}") for i in range(nodes)]
        if 0 in sizes:
            self._fail(2 + sizes.index(0), f"variable {sizes.index(0)} has no labels")
        scopes = [self._scope(f, nodes) for f in range(self._count("the number of factors"))]
        unary = np.full((nodes, max(sizes)), -np.inf)
        for i, size in enumerate(sizes):
            unary[i, :size] = 0
        numbers: dict[tuple[int, int], int] = {}
        for scope in scopes:
            if len(scope) == 2:
                numbers.setdefault((min(scope), max(scope)), len(numbers))
        tables = np.zeros((len(numbers), max(sizes), max(sizes)))
        for f, scope in enumerate(scopes):
            factor = self._factor(f, [sizes[v] for v in scope])
            if not scope:
                unary[0] += factor
            elif len(scope) == 1:
                unary[scope[0], : len(factor)] += factor
            else:
                factor = factor if scope[0] < scope[1] else factor.T
                tables[numbers[min(scope), max(scope)], : factor.shape[0], : factor.shape[1]] += factor
        if self.at < len(self.entries):
            self._fail(self.at, f"{len(self.entries) - self.at} entries follow the last factor")
        return Model(torch.from_numpy(unary), Dense(torch.from_numpy(tables)), Graph.from_edges(nodes, list(numbers)))

    def _scope(self, f: int, nodes: int) -> list[int]:
        size = self._count(f"the number of variables of factor {f}")
        if size > 2:
            self._fail(self.at - 1, f"factor {f} has {size} variables, and only up to two are supported")
        scope = []
        for _ in range(size):
            scope.append(self._count(f"a variable of factor {f}"))
            if scope[-1] >= nodes:
                self._fail(self.at - 1, f"factor {f} names variable {scope[-1]}, and the variables are 0 to {nodes - 1}")
        if size == 2 and scope[0] == scope[1]:
            self._fail(self.at - 1, f"factor {f} names variable {scope[0]} twice")
        return scope

    def _factor(self, f: int, shape: list[int]) -> np.ndarray:
        """A factor's scores, the logarithms of its table."""
        count, wanted = self._count(f"the number of entries of factor {f}"), int(np.prod(shape, dtype=np.int64))
        if count != wanted:
            self._fail(self.at - 1, f"factor {f} has {count} entries, and its variables' labels make {wanted}")
        part = self.entries[self.at : self.at + count]
        if len(part) < count:
            self._fail(len(self.entries), f"the file ends inside factor {f}, {count - len(part)} entries short")
        try:
            table = np.array([float(entry) for entry in part])
        except ValueError:
            bad = next(k for k, entry in enumerate(part) if not _is_number(entry))
            self._fail(self.at + bad, f"entry {bad} of factor {f} is {part[bad]!r}, expected a number")
        wrong = np.flatnonzero(~((table >= 0) & (table < np.inf)))
        if len(wrong):
            self._fail(self.at + wrong[0], f"entry {wrong[0]} of factor {f} is {part[wrong[0]]}, expected 0 or more")
        self.at += count
        with np.errstate(divide="ignore"):
            return np.log(table).reshape(shape)

    def _next(self, what: str) -> str:
        if self.at == len(self.entries):
            self._fail(self.at, f"the file ends where {what} should be")
        self.at += 1
        return self.entries[self.at - 1]

    def _count(self, what: str) -> int:
        entry = self._next(what)
        if not (entry.isascii() and entry.isdigit()):
            self._fail(self.at - 1, f"{what} is {entry!r}, expected a whole number")
        return int(entry)

    def _fail(self, entry: int, message: str) -> NoReturn:
        found = next(islice(re.finditer(r"\S+", self.text), int(entry), None), None)
        line = self.text.count("\n", 0, found.start() if found else len(self.text.rstrip())) + 1
        raise ModelFileError(f"{self.path}, line {line}: {message}")


def _is_number(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return False
    return True
