# Everything runs inside .venv, which `make install` builds from exact pins.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install test test-fast tests lint style types format demo demo-lora demo-draw verify-all bench bench-peers docs docs-check clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,media]'
	touch $@

test: style
	$(MAKE) --jobs 2 types tests

tests: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -x -q -n 2 --dist worksteal -m 'not long'

test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -x -q -n 2 --dist worksteal -m 'not slow and not long'

lint: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: install
	rm -rf runs/digits runs/digits_data
	$(BIN)/python examples/digits/make_rows.py runs/digits_data
	$(BIN)/omnizoo train examples/digits/digits.yaml --nproc 2 --parallel.ulysses 2 --parallel.ep 2 --log.every 25
	$(BIN)/omnizoo export runs/digits runs/digits/model
	$(BIN)/python examples/digits/examine.py runs/digits

demo-lora: install
	test -d runs/digits/model || $(MAKE) demo
	rm -rf runs/new_voice runs/new_voice_data runs/new_voice_adapter
	$(BIN)/python examples/digits/new_voice.py rows runs/new_voice_data
	$(BIN)/omnizoo train examples/digits/new_voice.yaml --nproc 2 --parallel.ulysses 2 --parallel.ep 2 --log.every 20
	$(BIN)/omnizoo export runs/new_voice runs/new_voice_adapter
	$(BIN)/python examples/digits/new_voice.py examine runs/new_voice_adapter

demo-draw: install
	rm -rf runs/draw runs/draw_data runs/draw_ring
	$(BIN)/python examples/draw/make_data.py runs/draw_data
	$(BIN)/omnizoo train examples/draw/draw.yaml --nproc 2 --log.every 50
	$(BIN)/omnizoo export runs/draw runs/draw/model
	$(BIN)/python examples/draw/examine.py runs/draw
	$(BIN)/omnizoo train examples/draw/ring.yaml --nproc 2 --log.every 50
	$(BIN)/omnizoo export runs/draw_ring runs/draw_ring/lora
	$(BIN)/python examples/draw/examine.py runs/draw_ring --lora runs/draw_ring/lora

verify-all: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m long
	$(BIN)/omnizoo verify examples/qwen3_moe_tiny.yaml --world 8 --layouts all
	$(BIN)/omnizoo verify examples/qwen3_moe_tiny.yaml --world 8 --layouts all --precision fp64
	$(BIN)/omnizoo verify examples/text_tiny.yaml --families all --world 4 --layouts all
	$(BIN)/omnizoo verify examples/text_tiny.yaml --families many --world 4 --layouts few --markdown docs/reference/families.md
	for file in examples/published/*.yaml; do \
		$(BIN)/omnizoo verify $$file --world 4 --layouts all || exit 1; \
	done
	for family in qwen3_vl qwen3_vl_moe qwen3_omni; do \
		$(BIN)/omnizoo verify examples/published/$$family.yaml --world 8 --layouts uly8,dp2.uly2.ring2,rep2.dp2.uly2 || exit 1; \
	done
	for file in examples/gpu/*.yaml; do \
		case $$file in *3_omni_talker*) world=64;; *talker*) world=16;; *_128.yaml|*vl*|*omni_*k*|*3_5*) world=128;; *gemma4*) world=16;; *) world=8;; esac; \
		$(BIN)/omnizoo plan $$file --world $$world || exit 1; \
	done

bench: install
	$(BIN)/python benchmarks/standing.py

bench-peers: install
	$(BIN)/python benchmarks/peers/venvs.py
	$(BIN)/python benchmarks/standing.py --all --write

docs: install
	$(BIN)/sphinx-build -W --keep-going -n -E -q -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

docs-check: install
	$(BIN)/python docs/check_commands.py

clean:
	rm -rf .venv runs docs/_build docs/_generated docs/reference/configuration .mypy_cache .ruff_cache .pytest_cache .hypothesis
