# Two commands on a fresh machine: `make serve` and `make test`.
#
#   make serve [ARGS="MODEL --port 8001"]   installs what serving needs and serves
#   make test [ARGS="tests/serving"]         installs the rest and runs the quick tests, two at a
#                                           time; WORKERS=8 on a larger machine, WORKERS=0 for one
#   make test-all                           the slow tests too
#   make table                              writes README's table of what works
#   make format                             formats the code
#   make lint types layers                  the checks of CI, each on its own
#   make venv                               makes .venv; PYTHON=... says with which Python
#
# make alone serves.

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The extra for the CUDA version of the NVIDIA driver; empty where no driver answers.
CUDA := $(shell nvidia-smi 2>/dev/null \
	| sed -n 's/.*CUDA[A-Za-z ]*Version *: *\([0-9]*\).*/\1/p' | head -n 1)
GPU := $(shell if test "0$(CUDA)" -ge 13; then echo cuda13; \
	elif test "0$(CUDA)" -ge 12; then echo cuda12; fi)
ifneq ($(CUDA),)
ifeq ($(GPU),)
$(warning the NVIDIA driver is for CUDA $(CUDA) and 12 is the oldest supported: using the CPU)
endif
endif

# Without a driver, what `make test` installed to compile for a GPU would complain at start-up.
SERVE_ENV := $(if $(GPU),,JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu})
# XLA's collectives on simulated devices wait for each other: two threads are too few for four.
TEST_ENV := JAX_PLATFORMS=cpu NPROC=16
# Each worker may need 6 GB. A file stays with one worker, since its tests share models.
WORKERS ?= 2
PYTEST := $(TEST_ENV) $(BIN)/pytest -n $(WORKERS) --dist loadfile

.PHONY: serve test test-all table format lint types layers venv

serve: .venv/.serve
	@exec env $(SERVE_ENV) $(BIN)/moejax-serve $(ARGS)

test: .venv/.test
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

test-all: .venv/.test
	$(PYTEST) -m "not gpu" $(ARGS)

table: .venv/.test
	$(TEST_ENV) $(BIN)/python tests/table.py

format: .venv/.test
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

lint: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.test
	$(BIN)/mypy

layers: .venv/.test
	$(BIN)/lint-imports

venv: $(BIN)/python

$(BIN)/python:
	python=$$(scripts/find-python) && "$$python" -m venv --clear .venv

# The stamps make pip run again when the dependencies changed, and only then.
.venv/.serve: pyproject.toml $(BIN)/python
	$(PIP) install --editable ".$(if $(GPU),[$(GPU)])"
	@touch $@

.venv/.test: pyproject.toml $(BIN)/python
	$(PIP) install --editable ".[structured,test,$(or $(GPU),compile)]"
	@touch $@ .venv/.serve
