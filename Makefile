# `make test` and `make demo` need Python >= 3.11 and a network once; everything goes into .venv beside this file.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test lint gpu bench clean

demo: $(VENV)/installed  ## solve small models with their certificates, and plot the convergence
	$(RUN) examples/quickstart.py

test: lint  ## format, lint, types, tests
	$(RUN) -m pytest

lint: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

gpu: $(VENV)/installed  ## all tests marked gpu and all GPU benchmarks, one report in runs/gpu
	$(RUN) benchmarks/gpu_report.py

bench: $(VENV)/installed  ## the CPU benchmarks
	$(RUN) benchmarks/bench_chain.py
	$(RUN) benchmarks/bench_convergence.py
	$(RUN) benchmarks/bench_solve.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:  ## forget compiled kernels, which Numba does not notice when a file they import changes
	find src -name '*.nb[ic]' -delete
