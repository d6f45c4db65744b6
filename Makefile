# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
# Where torch comes from: empty is pip's default index. Without a GPU, point it at the CPU wheels of your choice.
TORCH_INDEX ?=
OUT    ?= runs/demo
# The commit that `make golden` compares with.
BASE   ?= HEAD
# A small net on 2 cores loses time to thread hand-over; one thread a process is faster and the bits do not depend on the machine.
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-seeds test test-deploy golden lint bench clean

$(BIN)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch numpy
	@touch $@

$(BIN)/foogd: $(BIN)/.torch pyproject.toml
	$(PIP) -e .
	@touch $@

$(BIN)/.dev: $(BIN)/foogd
	$(PIP) -e ".[dev]"
	@touch $@

demo: $(BIN)/foogd          ## train the methods on the embedded data and print one table
	$(BIN)/foogd demo --out $(OUT)

demo-seeds: $(BIN)/foogd    ## the same table over three seeds
	$(BIN)/foogd demo --seeds 3 --out $(OUT)-seeds

test: $(BIN)/.dev           ## lint, type check, all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

test-deploy: $(BIN)/.dev    ## servers and nodes of Flower as real processes on this machine, ports picked free; about 10 minutes
	$(BIN)/pytest tests/deploy

golden: $(BIN)/.dev         ## the run folders of BASE and of the code as it stands, bit for bit; about 3 minutes
	$(BIN)/python tools/golden.py $(BASE)

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

bench: $(BIN)/foogd
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
