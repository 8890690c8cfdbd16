# Every target sets itself up: a fresh clone needs nothing but make and Python 3.11 or newer.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Without an NVIDIA GPU, PyTorch's own index has a build that is smaller by gigabytes of CUDA.
# Where it cannot be reached, pip falls back to PyPI; `make TORCH_INDEX= demo` asks PyPI alone.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# Spinning OpenMP threads starve those of a parallel test run, or of whatever else is running.
export OMP_WAIT_POLICY ?= passive

BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo prove test lint types sanitize clean

demo: $(STAMP)
	$(BIN)/ridgeline demo $(ARGS)

prove: $(STAMP)
	$(BIN)/ridgeline prove $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

# The extension's tests under AddressSanitizer and UBSan; needs GCC on Linux.
sanitize: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/sanitize . \
	  --config-settings cmake.define.RIDGELINE_SANITIZE=ON
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python tests/sanitize.py build/sanitize $(ARGS)

clean:
	rm -rf .venv build

$(STAMP): pyproject.toml $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Ridgeline needs Python 3.11 or newer and $(PYTHON) is %d.%d: run make PYTHON=python3.11" \
	  % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --retries 1 \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
