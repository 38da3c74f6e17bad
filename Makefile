# Every target sets up what it needs: a virtual environment in .venv with the pinned versions.
# The demo needs a part of it: docs, tests, Ray and lint are installed by the other targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
DEMO   := $(VENV)/installed-demo
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo report results-check test test-package test-repository quick lint mutants dist clean

$(STAMP): pyproject.toml constraints.txt tests/packages.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e ".[models,cli,ray,fast,docs,test]"
	$(PIP) --no-deps -r tests/packages.txt
	touch $@ $(DEMO)

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e ".[demo]"
	touch $@

demo: $(DEMO)
	$(BIN)/foresample demo --out out/demo.html

.PHONY: docs
docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/repository/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

report: $(STAMP)
	$(BIN)/python -m benchmarks.report --out out/report.html

results-check: $(STAMP)
	$(BIN)/python -m benchmarks.checks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

# Each of two processes takes one half in order, so that what a module sets up is mostly set up once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test: lint
	$(PYTEST) --durations=10

test-package: $(STAMP)
	$(PYTEST) --durations=10 --ignore tests/repository

# What is about this repository: benchmarks, result files, docs and pages.
test-repository: $(STAMP)
	$(PYTEST) --durations=10 tests/repository

quick: lint  # with one case of the law and its broken twin (tests/law/test_quick.py)
	$(PYTEST) -m "not (slow or law or ray or browser or gpu)"

mutants: $(STAMP)
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutants

# The wheel in empty environments, for the oldest and the newest versions: downloads gigabytes, by hand and before a release.
dist: $(STAMP)
	$(BIN)/python -m tests.dist $(DIST)

clean:
	rm -rf $(VENV) out dist build
