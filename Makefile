# A newcomer's two commands: `make demo` and `make test`. Everything is installed into .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# One line that moves on a terminal, one line a package in a log.
SHOW_INSTALL = awk -v is_terminal="$$(test -t 2 && echo 1)" \
	'/^(Collecting|Downloading|Building wheels|Installing)/ { sub(/ \(from.*/, ""); printf "  %-76.76s", $$0; printf is_terminal ? "\r" : "\n"; fflush() } \
	END { print "" }'

# Those of the first line run in Triton's interpreter too, as a part of `make test`.
GPU_TESTS := tests/kernels/triton tests/engine/test_device_runner.py \
	tests/engine/test_on_gpu.py tests/end_to_end/test_on_gpu.py

.PHONY: demo serve test test-gpu test-all test-nightly lint format protos bench bench-gpu simulate bench-peers clean

demo: $(STAMP)            ## eight prompts at once through a real server, live
	@$(BIN)/python -m clients.demo

serve: $(STAMP)           ## a server on 127.0.0.1:50051, until Ctrl-C; ARGS="--model …"
	@$(BIN)/pagoda serve $(ARGS)

test: $(STAMP)            ## the suite without slow, nightly and GPU tests, about 5 minutes on 2 cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not nightly and not gpu" $(ARGS)

test-gpu: $(STAMP)        ## kernels, runner and server on the GPU of this machine
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m "not slow" --timeout=600 $(GPU_TESTS) $(ARGS)

test-all: $(STAMP)        ## and the long ones
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly and not gpu" --timeout=1800 $(ARGS)

test-nightly: $(STAMP)    ## a million random operations of scheduler and blocks; 13 minutes on one core, ARGS="-n 2" uses two
	@$(BIN)/python -m pytest -m nightly --durations=0 $(ARGS)

lint: $(STAMP)            ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(STAMP)          ## regenerate the committed stubs
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

bench: $(STAMP)           ## a workload through gRPC, beside every peer that is installed; ARGS="--workload rag …"
	@$(BIN)/python -m bench $(ARGS)

bench-gpu: $(STAMP)       ## kernels, decode step and server on this machine's GPU, under 8 minutes; ARGS="--out …"
	@$(BIN)/python -m bench.gpu $(ARGS)

simulate: $(STAMP)        ## the scheduler's policies in simulated time; ARGS="--requests 1000000 --loads ''"
	@$(BIN)/python -m bench.simulate $(ARGS)

bench-peers: $(STAMP)     ## installs peers for `bench` into .venv-peers, apart from Pagoda
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --upgrade pip
	@.venv-peers/bin/python -m pip install --progress-bar on --group peers

clean:
	rm -rf $(VENV) .venv-peers build *.egg-info

$(STAMP): pyproject.toml $(wildcard kernels/native/*)
	@echo "Installing into $(VENV), once:"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagoda needs Python 3.11 or newer: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install -e '.[engine,bench,dev]' 2>&1 | tee $(VENV)/install.log | $(SHOW_INSTALL)
	@grep -q '^Successfully installed' $(VENV)/install.log || { tail -30 $(VENV)/install.log; exit 1; }
	@touch $@
