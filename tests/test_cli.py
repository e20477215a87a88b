"""The command line: results, files, exit codes."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

from dualcrf.cli import main
from dualcrf.files import read_model, write_grid, write_uai
from dualcrf.graph import grid
from dualcrf.potentials import Potts
from dualcrf.solver.certificate import energy
from dualcrf.solver.search import Progress
from tests.solver_models import random_pairwise, random_unary


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    graph = grid(4, 5)
    path = tmp_path / "model.uai.gz"
    write_uai(path, random_unary(graph, 3, 0), random_pairwise("dense", graph, 3, 0), graph)
    return path


def solve(*arguments: object) -> int:
    return main(["solve", *map(str, arguments), "--impl", "reference"])


def test_json_is_one_object(model_file: Path, capsys: pytest.CaptureFixture[str]):
    assert solve(model_file, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["labels", "primal", "dual", "gap", "iterations", "status", "seconds"]
    model = read_model(model_file)
    score = energy(torch.tensor(result["labels"]), model.unary, model.pairwise, model.graph)
    assert result["primal"] == pytest.approx(score.item())
    assert result["gap"] == pytest.approx(result["dual"] - result["primal"])


def test_text_and_a_file_of_labels(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert solve(model_file, "--out", tmp_path / "labels.txt", "--iterations", 40, "--schedule", "handover") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["primal", "dual", "gap", "iterations", "status", "seconds"]
    labels = [int(line) for line in (tmp_path / "labels.txt").read_text().splitlines()]
    model = read_model(model_file)
    score = energy(torch.tensor(labels), model.unary, model.pairwise, model.graph)
    assert float(lines["primal"]) == pytest.approx(score.item())


def test_a_grid_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_grid(tmp_path / "model.npz", torch.zeros(3, 3, 2), Potts(torch.ones(12)))
    assert solve(tmp_path / "model.npz", "--json") == 0
    assert json.loads(capsys.readouterr().out)["primal"] == 12


def test_an_impossible_model_has_no_labelling(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.uai").write_text("MARKOV 1 2 1 1 0 2 0 0")
    assert solve(tmp_path / "model.uai", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "infeasible"
    assert result["primal"] is None


def test_broken_and_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.uai").write_text("MARKOV\n1\n2\n1\n1 5")
    assert solve(tmp_path / "model.uai") == 3
    assert "line 5: factor 0 names variable 5" in capsys.readouterr().err
    assert solve(tmp_path / "none.uai") == 3
    assert "none.uai" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--gamma", "-1"], ["--schedule", "zigzag"], ["--time-limit", "soon"]])
def test_wrong_arguments(model_file: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        solve(model_file, *arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_options_that_do_not_fit_together(model_file: Path, capsys: pytest.CaptureFixture[str]):
    assert solve(model_file, "--gamma", 1, "--schedule", "handover") == 2
    assert "hard max alone" in capsys.readouterr().err


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["solve", "--help"])
    assert caught.value.code == 0
    assert "130" in capsys.readouterr().out


def test_a_terminal_sees_the_progress(model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert solve(model_file, "--json") == 0
    shown = capsys.readouterr()
    assert all(word in shown.err for word in ("iterations", "dual", "primal", "gap"))
    assert len(shown.out.splitlines()) == 1


def test_an_interrupt_prints_the_best_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    graph = grid(12, 12)
    path = tmp_path / "model.uai"
    write_uai(path, random_unary(graph, 6, 0), random_pairwise("dense", graph, 6, 0), graph)
    calls = []

    def interrupt(progress: Progress) -> None:
        calls.append(progress)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualcrf.cli._progress_line", lambda: interrupt)
    assert solve(path, "--json") == 130
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "interrupted"
    assert len(result["labels"]) == 144
    assert result["primal"] <= result["dual"]
