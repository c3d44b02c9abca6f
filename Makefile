# make demo: train a small model on this machine's CPU. make test: everything that needs no GPU. make help: all targets.
PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help env demo test test-gpu lint format clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env:  ## make .venv with the pinned versions (seconds when it is there already)
	@tools/make_venv.sh

demo: env  ## train a small Qwen3.5-shaped model on real text: 2 processes, about 5 minutes
	$(PY) -m qla_megatron.recipes.demo

test: lint  ## lint and every test that needs no GPU
	$(PY) -m pytest -m "not gpu"

test-gpu: env  ## the tests that need a Hopper GPU
	$(PY) -m pytest -m gpu

lint: env  ## ruff, ruff format, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: env  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove build products and runs, keep .venv
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
