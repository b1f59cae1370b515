# make demo   sets up .venv and generates text with the bundled checkpoint
# make test   sets up .venv and runs the tests
# make check  lint, format, types and generated documentation
# make kernels  adds CuPy and NVRTC, compiles every kernel for every declared GPU and looks into it (no GPU needed)
# make docs   rewrites the generated documentation; make kernel-docs its tables of compiled kernels
# PYTHON chooses the interpreter, PIP_ARGS goes to every pip install, PYTEST_ARGS to pytest.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin

.PHONY: demo test check kernels kernel-docs docs format clean

demo: .venv/demo.stamp
	$(BIN)/vtensors generate

test: .venv/test.stamp
	$(BIN)/pytest $(PYTEST_ARGS)

check: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/update_structure.py --check
	$(BIN)/python docs/update_generated.py --check

kernels: .venv/kernels.stamp
	$(BIN)/pytest tests/kernels/test_compiling.py tests/kernels/test_machine_code.py tests/kernels/test_loads_before_the_wait.py

kernel-docs: .venv/kernels.stamp
	$(BIN)/python docs/update_kernels.py

docs: .venv/test.stamp
	$(BIN)/python docs/update_structure.py
	$(BIN)/python docs/update_generated.py

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vtensors needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

# A stamp is newer than what it was installed from, so that a second call installs nothing.
.venv/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e .
	touch $@

.venv/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch .venv/demo.stamp $@

.venv/kernels.stamp: .venv/test.stamp
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[cuda13,disassembly]'
	touch $@
