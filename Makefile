# A newcomer's two commands: `make demo` and `make test`. What a target needs is installed into .venv on first use: what
# serves the model for `demo` and `serve`, the tools of tests, lint and benchmarks on top of it for the others.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SERVE  := $(VENV)/.can-serve
DEV    := $(VENV)/.can-develop
FUZZ   := $(VENV)/.can-fuzz
PACK   := $(VENV)/.can-package
LOG    := $(VENV)/install.log
STUBS  := clients/python
IMAGE  := protos/published.binpb

comma := ,

# Nothing is compiled to bytecode when it is installed: each process would compile what it imports, and keep nothing.
unexport PYTHONDONTWRITEBYTECODE

# $(call install,REQUIREMENTS): one line that moves on a terminal, one line a package in a log. Everything else goes to
# $(LOG), the compiler's messages too. Only what is imported gets compiled to bytecode: most of torch never is.
define install
	@$(BIN)/python -m pip install --verbose --no-compile $(1) 2>&1 | tee $(LOG) | awk -v is_terminal="$$(test -t 2 && echo 1)" ' \
		/^ *Building editable/ { $$0 = "Compiling the CPU kernels" } \
		/^Installing collected/ { $$0 = "Unpacking packages: " NF - 3 } \
		/^ *(Collecting|Downloading|Compiling|Unpacking)/ && $$0 != last { \
			last = $$0; sub(/^ */, ""); sub(/ \(from.*/, ""); \
			printf "  %-76.76s%s", $$0, is_terminal ? "\r" : "\n"; fflush() } \
		END { if (is_terminal) printf "%78s\r", "" }'
	@grep -Eq '^(Successfully installed|Requirement already satisfied: pagoda)' $(LOG) || { tail -30 $(LOG); exit 1; }
	@if grep '^ *pagoda: ' $(LOG); then echo "The compiler's messages are in $(LOG)."; fi
endef

# `make test-simulated` runs those of the first line too, in Triton's interpreter.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
HERE := not slow and not nightly and not gpu and not counterpart
GPU_TESTS := tests/kernels/triton tests/engine/test_device_runner.py \
	tests/engine/test_on_gpu.py tests/end_to_end/test_on_gpu.py \
	tests/engine/test_batches_on_gpu.py

help:                     ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

.PHONY: help demo serve test check test-thorough test-simulated test-native test-sanitizers fuzz test-arm test-gpu test-all test-nightly test-chaos test-counterparts page-pictures real-models test-models locks wheels test-wheels test-images lint format protos protos-image settings bench compile-gate bench-gpu rehearse-gpu gpu-wheels bench-peers clean

demo: $(SERVE)            ## stream eight prompts at once from a real server
	@$(BIN)/python -m pagoda_server.cli.demo

serve: $(SERVE)           ## run a server until Ctrl-C: gRPC on 127.0.0.1:50051, HTTP on 127.0.0.1:8000; ARGS="--model …"
	@$(BIN)/pagoda serve --http 127.0.0.1:8000 --default-max-tokens 1024 $(ARGS)

test: $(DEV)              ## run the fast tests: about four minutes on 2 cores
	@$(PYTEST) -m "not thorough and not simulated and $(HERE)" $(ARGS)

check: $(DEV)             ## lint the files that a change touches, and run the fast tests of their rooms
	@$(BIN)/python -m tests.check $(ARGS)

test-thorough: $(DEV)     ## run the tests of faults, floods, second models and long waits
	@$(PYTEST) -m "thorough and not simulated and $(HERE)" $(ARGS)

test-simulated: $(DEV)    ## run the tests of GPU code that need no GPU
	@$(PYTEST) -m "simulated and not slow and not gpu" $(ARGS)

test-native:              ## test every CPU kernel in C++, in every instruction set of this processor
	@$(MAKE) --no-print-directory -j$$(nproc) build/host/self_test
	@build/host/self_test

test-sanitizers:          ## test them under AddressSanitizer, UBSan and ThreadSanitizer; minutes
	@$(MAKE) --no-print-directory -j$$(nproc) build/asan/self_test build/tsan/self_test
	@UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/self_test
	@TSAN_OPTIONS=halt_on_error=1 build/tsan/self_test

fuzz: $(FUZZ)             ## fuzz what reads bytes from outside, 10 s a target; TARGET=gguf SECONDS=3600
	@$(BIN)/python -m tests.fuzz $(TARGET) --seconds $(or $(SECONDS),10)

test-arm:                 ## test them for ARM, in an emulator; needs g++-aarch64-linux-gnu and qemu-user
	@$(MAKE) --no-print-directory -j$$(nproc) build/arm/self_test
	@qemu-aarch64 -cpu max build/arm/self_test neon-i8mm neon generic
	@qemu-aarch64 -cpu cortex-a76 build/arm/self_test neon generic
	@qemu-aarch64 -cpu cortex-a72 build/arm/self_test generic
	@headers=-I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	if echo '#include <Python.h>' | $(ARM_CXX) $$headers -fsyntax-only -x c++ - 2>/dev/null; \
	then $(ARM_CXX) $(NATIVE) $$headers -fsyntax-only kernels/native/module.cpp; \
	else echo "Python's headers are not for ARM too: kernels/native/module.cpp was not compiled for it"; fi

# One worker, which is replaced where a fault of a kernel has lost the GPU to its process.
test-gpu: $(DEV)          ## test kernels, runner and server on the GPU of this machine
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m "not slow" -n 1 --max-worker-restart 100 -p bench.gpu.device_faults $(GPU_TESTS) $(ARGS)

test-all: $(DEV)          ## run the tests and the slow ones
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly and not gpu and not counterpart" --timeout=1800 $(ARGS)

test-nightly: $(DEV)      ## a million random operations, ten minutes of load, a seed of chaos, whole cross products; ARGS="-n 2" uses two cores
	@$(BIN)/python -m pytest -m nightly --durations=0 $(ARGS)

# make hands SEED, SEEDS and CANCELS on as environment variables.
test-chaos: $(DEV)        ## random faults under load, and a judge; SEED=7 repeats a seed, SEEDS=10 runs ten
	@$(BIN)/python -m pytest -s -m nightly tests/chaos $(ARGS)

test-counterparts: $(DEV) ## test beside the programs that others use with it; installs Debian packages if it is root
	@tests/counterparts/install
	@$(BIN)/python -m pytest -v -rs -n 2 --dist loadfile -m counterpart tests/counterparts $(ARGS)

page-pictures: $(DEV)     ## take README's pictures of the page, in Chromium; installs Debian packages if it is root
	@tests/counterparts/install
	@$(BIN)/python -m tests.counterparts.pictures

real-models: $(DEV)       ## fetch a second real model and tokenizers, half a gigabyte: tests that need them skip without
	@$(BIN)/python -m tests.real_models

test-models: $(DEV)      ## test two real models against transformers; `make real-models` fetches them
	@$(PYTEST) -m "$(HERE)" tests/end_to_end/test_real_models.py tests/end_to_end/test_guided_real_models.py \
		tests/checkpoints/test_real_tokenizers.py $(ARGS)

# The packages that torch needs are the same everywhere but for CUDA's, which its builds for macOS do not name.
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 \
	--python-platform aarch64-apple-darwin $(foreach name,pagoda-client torch hf-xet,--no-emit-package $(name)) \
	--extra tracing --extra certs pyproject.toml

locks: $(DEV)             ## write deploy/locks, the versions and hashes of what images hold, from what the index has now
	@$(BIN)/python -m pip install --quiet --group locks
	@mkdir -p build/locks && rm -f build/locks/*
	@$(LOCK) --output-file build/locks/base.txt
	@$(LOCK) --output-file build/locks/engine.txt --extra engine --constraint build/locks/base.txt
	@$(LOCK) --output-file build/locks/ray.txt --extra engine --extra ray --constraint build/locks/engine.txt
	@cp build/locks/base.txt deploy/locks/base.txt
	@grep --invert-match --line-regexp --fixed-strings --file build/locks/base.txt build/locks/engine.txt >deploy/locks/engine.txt
	@grep --invert-match --line-regexp --fixed-strings --file build/locks/engine.txt build/locks/ray.txt >deploy/locks/ray.txt

wheels: $(PACK)           ## build both wheels, kernels compiled, into build/wheels: installing them needs no compiler
	@rm -rf build/wheels
	@$(BIN)/python -m build --no-isolation --outdir build/wheels clients/python >$(LOG) 2>&1 || { tail -30 $(LOG); exit 1; }
	@$(BIN)/python -m build --no-isolation --outdir build/wheels/local . >$(LOG) 2>&1 || { tail -30 $(LOG); exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir build/wheels build/wheels/local/*.whl
	@mv build/wheels/local/*.tar.gz build/wheels && rm -r build/wheels/local && ls build/wheels

test-wheels: $(DEV)       ## install both wheels beside Hugging Face's `kernels`, and call the installed server
	@$(BIN)/python -m pytest -v tests/test_wheels.py $(ARGS)

test-images: $(DEV)       ## build the images and run them as the chart does; root, and Debian's buildah and debootstrap
	@$(BIN)/python -m pytest -vs tests/counterparts/test_images.py $(ARGS)

lint: $(DEV)              ## check the code with ruff and mypy, the protos with buf
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against $(IMAGE) || { \
		echo "The protos break programs that were built with $(IMAGE): keep names, numbers and types, and add fields instead."; \
		exit 1; }

format: $(DEV)            ## fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(DEV)            ## regenerate the committed stubs
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(STUBS) --pyi_out=$(STUBS) --grpc_python_out=$(STUBS) $$(find protos -name '*.proto')
	@$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/pagoda_server/router/adapters/protocols/*.proto

protos-image: $(DEV)      ## publish the protos: `make lint` protects them as they are now
	@$(BIN)/buf build --exclude-source-info --output $(IMAGE)

settings: $(SERVE)        ## regenerate docs/settings.md from the declaration of the settings
	@$(BIN)/python -m pagoda_server.settings > docs/settings.md

bench: $(DEV)             ## one workload on Pagoda and every installed peer, through gRPC; ARGS="--workload rag …"
	@$(BIN)/python -m bench $(ARGS)

compile-gate: $(DEV)      ## compile every GPU kernel for three generations, and compare with what was recorded
	@TRITON_INTERPRET=0 $(BIN)/python -m tests.kernels.triton.compile_gate $(ARGS)

bench-gpu: $(DEV)         ## kernels, decode steps, tests and server on this GPU, in under 10 minutes; ARGS="--out …"
	@$(BIN)/python -m bench.gpu $(ARGS)

rehearse-gpu: $(DEV)      ## the same with tiny shapes on a simulated card, in about a minute; fails if a part does
	@$(BIN)/python -m bench.gpu --rehearse --out build/rehearsal $(ARGS)

# gRPC and protobuf too: the stubs need releases that such a machine need not have.
gpu-wheels:               ## what a GPU machine without a network may lack, for its Python 3.12: build/gpu-wheels
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest build/gpu-wheels \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		'grpcio>=1.76,<2' 'protobuf>=6.33.5,<7' grpcio-health-checking==1.76.0 grpcio-reflection==1.76.0 \
		grpcio-status==1.76.0 'googleapis-common-protos<2' 'pytest-asyncio>=1.2,<2' 'gguf>=0.17,<1'
	@ls build/gpu-wheels

bench-peers: $(DEV)       ## install the peers of `bench` into their own environment, .venv-peers
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --upgrade pip
	@.venv-peers/bin/python -m pip install --progress-bar on --group peers

# The self-test, compiled into a folder of build for each machine and each sanitizer.
SELF_TEST := $(patsubst %.cpp,%.o,$(wildcard tests/kernels/native/*.cpp) $(filter-out %/module.cpp,$(wildcard kernels/native/*.cpp)))
ARM_CXX   := aarch64-linux-gnu-g++
NATIVE    := -std=c++17 -O2 -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized
SANITIZED := -O1 -g1 -fno-omit-frame-pointer

# $(call self_test,FOLDER,COMPILER,OPTIONS)
define self_test
build/$(1)/self_test: $(addprefix build/$(1)/,$(SELF_TEST))
	@$(2) -pthread $(3) $$^ -o $$@

build/$(1)/%.o: %.cpp $(wildcard kernels/native/*.h tests/kernels/native/*.h) Makefile
	@mkdir -p $$(@D)
	@echo "  $$< for $(1)"
	@$(2) $(NATIVE) $(3) -c $$< -o $$@
endef
$(eval $(call self_test,host,$(CXX)))
$(eval $(call self_test,arm,$(ARM_CXX),-static))
$(eval $(call self_test,asan,$(CXX),$(SANITIZED) -fsanitize=address$(comma)undefined))
$(eval $(call self_test,tsan,$(CXX),$(SANITIZED) -fsanitize=thread))

clean:                    ## remove everything that was installed or built
	rm -rf $(VENV) .venv-peers build src/*.egg-info clients/python/build clients/python/*.egg-info

$(SERVE): pyproject.toml clients/python/pyproject.toml setup.py $(wildcard kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagoda needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "Installing the server into $(VENV), once; torch is by far the largest part:"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	$(call install,-e clients/python -e '.[engine]')
	@touch $@

# Of pagoda itself only the extras' requirements are missing: nothing is built again.
$(DEV): $(SERVE)
	@echo "Installing what tests, lint and benchmarks need, once:"
	$(call install,'pagoda-server[engine$(comma)tracing$(comma)certs$(comma)kv-events$(comma)bench$(comma)dev]')
	@touch $@

$(PACK): $(DEV)
	@$(BIN)/python -m pip install --quiet --group wheels
	@touch $@

$(FUZZ): $(DEV)
	@$(BIN)/python -m pip install --quiet --group fuzz
	@touch $@
