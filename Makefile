# Every target sets up what it needs: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

.PHONY: demo report test lint clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[models,cli,ray,test]"
	touch $@

demo: $(STAMP)
	$(BIN)/foresample sample --count 20 --steps 100 --window 8 --compare --out out
	$(BIN)/foresample bench mixture --out out

report: $(STAMP)
	$(BIN)/foresample report --out out/report.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --durations=10

clean:
	rm -rf $(VENV) out
