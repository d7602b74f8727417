# What people do every day. Each target makes the virtual environment by itself when it is missing or out of date.

# Where python3 is older, 3.11 is often there under its own name.
PYTHON ?= $(firstword $(shell command -v python3.11) python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What vLLM's documentation asks for on CPU, in a CPU install: Intel's OpenMP and, where it is installed, TCMalloc
# (Debian's libtcmalloc-minimal4). With glibc's allocator, every large tensor is memory fresh from the system and costs
# page faults (docs/results.md).
IOMP := $(wildcard $(VENV)/lib/libiomp5.so)
TCMALLOC := $(shell PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | awk '/libtcmalloc_minimal.so.4 / {print $$NF; exit}')
RUN = $(if $(IOMP),LD_PRELOAD=$(if $(TCMALLOC),$(TCMALLOC):)$(abspath $(IOMP)) )TOKENIZERS_PARALLELISM=false $(BIN)/python

# Tests run in that many processes, each with cores of its own; those that start processes run by themselves. A device
# is not shared.
WORKERS ?= $(if $(shell command -v nvidia-smi),1,$(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4))))
SPREAD := -n $(WORKERS) --dist loadfile
NEEDS_ALL_CORES := (processes or smollm2)

.PHONY: help setup demo demo-2 test test-fast test-slow test-all lint bench bench-strategies bench-step bench-adaptive bench-idle clean

help:
	@echo "make setup   virtual environment in $(VENV): vLLM for CUDA where there is a device, else for CPU"
	@echo "make demo    GRPO with speculative rollouts on SmolLM2-135M; leaves runs/demo"
	@echo "make demo-2  the same on two processes with a core each, and how they use the time of waiting; leaves runs/demo-2"
	@echo "make test    everything that a change must pass, with the real engine (10 to 25 minutes)"
	@echo "make test-fast   the part of it that starts no engine and no further processes (about a minute)"
	@echo "make test-all    also repetitions and wide matrices (\`make test-slow\` runs only these)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   selector overhead and simulated regret"
	@echo "make bench-strategies   adaptive speculation against every fixed strategy, on the real engine"
	@echo "make bench-step         whole training steps against TRL's GRPOTrainer with its own engine, alternating"
	@echo "make bench-adaptive     acceptance of a trained and of a frozen drafter while the policy moves and after it jumps"
	@echo "make bench-idle         whole steps with drafter training in waits and without, on two processes"
	@echo "make clean   remove runs and caches of the tools, not the environment"

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(PYTHON) $(VENV)
	@touch $@

# A second make, so that the variables above see an environment that this one has just made.
demo: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="examples/grpo_reasoning_gym.py --output_dir runs/demo"

# What is shown is the waiting: no comparison with a plain engine at the end.
demo-2: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="-m accelerate.commands.launch \
		--config_file accelerate_configs/cpu_2_processes.yaml examples/grpo_reasoning_gym.py --output_dir runs/demo-2 \
		--log_timeline True --max_steps 8 --bench_rounds 0"

test: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="-m pytest $(SPREAD) -m 'not slow and not $(NEEDS_ALL_CORES)'"
	@$(MAKE) --no-print-directory run ARGS="-m pytest -m 'not slow and $(NEEDS_ALL_CORES)'"

test-fast: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="-m pytest $(SPREAD) -m 'not engine and not long and not slow and not $(NEEDS_ALL_CORES)'"

test-slow: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="-m pytest $(SPREAD) -m 'slow and not $(NEEDS_ALL_CORES)'"
	@$(MAKE) --no-print-directory run ARGS="-m pytest -m 'slow and $(NEEDS_ALL_CORES)'"

test-all: test test-slow

bench: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="benchmarks/selector_overhead.py"
	@$(MAKE) --no-print-directory run ARGS="-m tlt_trl.tools.simulator"

bench-strategies: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="benchmarks/strategies.py --output runs/bench_strategies"
	@$(MAKE) --no-print-directory run ARGS="-m tlt_trl.tools.cli bench strategies --json --output runs/bench_strategies/raw.json"

# WORKLOADS="demo hard" takes some of them only.
WORKLOADS ?= demo hard swap long-tail
bench-step: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="benchmarks/step.py --output runs/bench_step --workloads $(WORKLOADS)"
	@$(MAKE) --no-print-directory run ARGS="-m tlt_trl.tools.cli bench step --output runs/bench_step/raw.json"

bench-adaptive: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="benchmarks/adaptive_drafter.py --output runs/adaptive_drafter.json"

bench-idle: $(STAMP)
	@$(MAKE) --no-print-directory run ARGS="benchmarks/idle_cost.py --output runs/idle_cost.json"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: run
run:
	@$(RUN) $(ARGS)

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache
