# Everything runs inside .venv, which `make install` builds from exact pins.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install test test-fast lint format demo verify-all bench docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,media]'
	touch $@

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -x -q

test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -x -q -m 'not slow'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: install
	rm -rf runs/demo
	$(BIN)/omnizoo train examples/text_tiny.yaml --nproc 2 --log.dir runs/demo
	$(BIN)/omnizoo export runs/demo runs/demo/exported
	@echo "run folder     runs/demo"
	@echo "exported model runs/demo/exported"
	@echo "report         runs/demo/report.html"

verify-all: install
	$(BIN)/omnizoo verify examples/qwen3_moe_tiny.yaml --world 8 --layouts all
	$(BIN)/omnizoo verify examples/qwen3_moe_tiny.yaml --world 8 --layouts all --precision fp64
	$(BIN)/omnizoo verify examples/text_tiny.yaml --families all --world 4 --layouts all

bench: install
	$(BIN)/python benchmarks/against_plain.py

docs: install
	$(BIN)/python -m omnizoo.config.reference > docs/configuration.md

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
