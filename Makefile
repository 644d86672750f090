# Two commands a newcomer needs: `make demo` and `make test`. Both create .venv on first use.
# pip reads the index and any local wheels from its own configuration; constraints.txt pins torch.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help demo test test-threads test-oldest test-slow test-deploy lint types docs bench fuzz build clean
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/demo.stamp: pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing fedfp8 with its command, plots and digits (torch pinned by constraints.txt)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --progress-bar off -c constraints.txt -e '.[cli,plots,digits]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing fedfp8[dev] (data sets, Flower, test tools; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp   ## accuracy against bytes for FP32, BQ, UQ, UQ+ and DQ on real handwritten digits
	@echo "==> fedfp8 demo"
	@$(BIN)/fedfp8 demo

test: $(VENV)/dev.stamp    ## the fast test suite (under 10 minutes on two cores)
	@echo "==> pytest (fast suite)"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

ENGINES := tests/test_fl_*.py tests/test_flower.py tests/test_flower_wrapper.py
test-threads: $(VENV)/dev.stamp ## the engine and Flower tests with one OpenMP thread and with four
	@for threads in 1 4; do \
	  echo "==> pytest (engines, OMP_NUM_THREADS=$$threads)"; \
	  OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ENGINES) || exit 1; \
	done

# A second environment with the oldest Flower of pyproject.toml; everything else it takes from .venv.
OLDEST := 1.28.0
$(VENV)/oldest/stamp: $(VENV)/dev.stamp
	@echo "==> creating $(VENV)/oldest with flwr $(OLDEST)"
	@$(BIN)/python -m venv $(VENV)/oldest
	@$(VENV)/oldest/bin/python -m pip --disable-pip-version-check install -q --progress-bar off flwr==$(OLDEST)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib')); print('$(CURDIR)/src')" \
	  > $$($(VENV)/oldest/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/fedfp8.pth
	@touch $@

test-oldest: $(VENV)/oldest/stamp ## the two lines on the oldest Flower that we serve
	@echo "==> pytest (Flower $(OLDEST))"
	@$(VENV)/oldest/bin/python -m pytest -n $(WORKERS) tests/test_flower_wrapper.py tests/test_flower_old.py

test-slow: $(VENV)/dev.stamp ## everything, long tests included
	@HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m ''

test-deploy: $(VENV)/dev.stamp ## a real Flower deployment on loopback: TLS, node keys (3 minutes; kills and malice: test-slow)
	@$(BIN)/python -m pytest -m 'deploy and not slow'

lint: $(VENV)/dev.stamp    ## ruff: lint and format check
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/dev.stamp   ## mypy over src
	@$(BIN)/mypy

$(VENV)/docs.stamp: pyproject.toml constraints.txt
	@echo "==> installing fedfp8[docs] into $(VENV) (mkdocs-material, mkdocstrings)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --progress-bar off -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/docs.stamp   ## the documentation site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict && echo "build/site/index.html"

bench: $(VENV)/dev.stamp   ## all benchmark tables, kept and put into the docs (ten minutes; some: fedfp8 bench --only wire)
	@OMP_NUM_THREADS=1 $(BIN)/fedfp8 bench
	@$(BIN)/fedfp8 bench --docs docs/benchmarks.md --docs docs/million-clients.md

fuzz: $(VENV)/dev.stamp    ## ten minutes of coverage-guided fuzzing of the decoder (atheris)
	@$(PIP) install -q --progress-bar off atheris
	@mkdir -p fuzz/corpus && $(BIN)/python fuzz/fuzz_decode.py --seed-corpus fuzz/corpus
	@$(BIN)/python fuzz/fuzz_decode.py fuzz/corpus -max_len=8192 -max_total_time=600

build: $(VENV)/dev.stamp   ## a pure-Python wheel in dist/
	@$(BIN)/python -m build --wheel

clean:                     ## remove the virtual environment and caches
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
