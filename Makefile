# make help shows the targets. Everything lives in .venv; nothing outside this folder is changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv lock demo test test-seeds test-part test-all nightly chaos mutants lint docs docs-test figures generated gpu-kit clean

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
# GPU=1 makes the environment of a machine with GPUs instead; `make clean` before changing over.
REQUIREMENTS := requirements/$(if $(GPU),gpu,cpu).txt
# A CUDA toolkit may lack headers that torch's wheels bring: nccl.h, cusparse.h. Those of the toolkit come first.
HEADERS = CPATH="$$(ls -d "$(abspath $(VENV))"/lib/python3.12/site-packages/nvidia/*/include | paste -sd :)$${CPATH:+:$$CPATH}"
PATCHES := $(wildcard patches/vllm/*/* patches/vllm/*/*/*)

# Two stamps, each written last: an interrupted install leaves none and is done again.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16
	@echo "  PYTHON=/path/to/python3.12 chooses the interpreter that makes $(VENV)"
	@echo "  GPU=1 makes $(VENV) for a machine with NVIDIA GPUs"

venv: $(READY) ## make .venv: pinned requirements, moe_rl itself, the patched vLLM
	@echo "$(VENV) is ready"

demo: $(READY) ## teach a small Qwen3-MoE arithmetic on this CPU, with routing replay; ends with a report
	@OMP_NUM_THREADS=1 $(VENV)/bin/moe-rl train --ranks 2 --config configs/tiny_moe_cpu.yaml

test: $(READY) ## run the tests that go before every commit
	@$(VENV)/bin/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder

# One eighth of the long tests, another one for each commit. Many have time limits, which a busy machine may exceed: what
# fails is shown, and runs once more alone.
LONG = -m "long and not gpu and not chaos and not nightly"
test-part: $(READY) ## run some of the long tests, others for each commit
	@part="$$(git rev-list --count HEAD)/8"; echo "part $$part of the long tests"; \
	    $(VENV)/bin/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder $(LONG) --part "$$part" || \
	    { [[ $$? == 1 ]] || exit 2; echo "what failed runs once more, alone"; \
	    $(VENV)/bin/python -m pytest -q --last-failed --last-failed-no-failures none $(LONG); }

test-seeds: $(READY) ## compare with independent models again, on 20 random models; on 3 where vLLM samples
	@$(VENV)/bin/python -m pytest -q --seeds 20 -m seeds tests/distributed tests/rollout

chaos: $(READY) ## plant faults into real runs and see that each is named: see docs/generated/chaos.md
	@$(VENV)/bin/python -m pytest -q -m chaos tests/chaos

mutants: $(READY) ## plant faults into a copy of the code, see that make test notices: docs/generated/mutants.md
	@$(VENV)/bin/python -m tests.mutants

test-all: $(READY) ## run every test, the long ones too; not those of `make nightly`
	@$(VENV)/bin/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --hypothesis-profile "new examples" \
	    -m "not gpu and not chaos and not nightly" --durations 60 --durations-min 20

nightly: $(READY) ## run what takes hours, part by part; goes on where it was interrupted: PARTS="chaos soak"
	@$(VENV)/bin/python -m tools.dev.nightly $(PARTS)

lint: $(READY) docs ## check style, layout, types, spelling and the links of the docs
	@git ls-files -z '*.py' pyproject.toml | xargs -0 $(VENV)/bin/ruff check --quiet # what git has: not a user's files
	@git ls-files -z '*.py' | xargs -0 $(VENV)/bin/ruff format --quiet --check
	@$(VENV)/bin/mypy
	@git ls-files -z -- . ':!assets' ':!requirements' ':!LICENSE' ':!*.svg' ':!*.jsonl' ':!*.npz' | \
	    xargs -0 $(VENV)/bin/codespell
	@$(VENV)/bin/python tools/dev/check_links.py
	@! git grep -nE '^ *(<{7}|>{7}) ' # what a merge left

docs: $(READY) ## build docs/ as a site in site/; needs no network
	@$(VENV)/bin/mkdocs build --quiet
	@echo "open site/index.html; to search it, run: $(VENV)/bin/python -m http.server --directory site 8000"

docs-test: $(READY) ## run or check every block of the docs; the result is build/docs_test.json
	@$(VENV)/bin/python -m tools.dev.docs_blocks

figures: $(READY) ## make the pictures of the docs anew, and the text that quotes them: FIGURES="demo overlap"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tools.dev.figures $(FIGURES)

# The text of each page is in the module that writes it.
PAGES := config=moe_rl.config.schema_reference metrics=moe_rl.report.registry commands=tools.dev.commands_page \
    versions=moe_rl.commands.machine chaos=tests.chaos.table mutants=tests.mutants.table

generated: $(READY) ## write the pages of docs/generated/ anew
	@mkdir -p build
	@for page in $(PAGES); do \
	    $(VENV)/bin/python -m "$${page#*=}" > build/page.md; mv build/page.md "docs/generated/$${page%=*}.md"; \
	done

gpu-kit: $(READY) ## pack what a machine with a GPU and without network lacks, and print the commands; PATIENT=1: also vLLM
	@$(VENV)/bin/python -m tools.dev.gpu_kit $(if $(PATIENT),--patient)

lock: $(READY) ## resolve requirements/gpu.txt anew from setup.py
	@$(VENV)/bin/python tools/dev/lock_gpu.py

clean: ## remove .venv and caches; runs/ stays
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A candidate must run, be 3.12 and be able to make a venv: a pyenv shim may be on PATH and fail.
IS_312 := import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))

$(INSTALLED): $(REQUIREMENTS)
	@if [[ -n "$(PYTHON)" ]]; then \
	    candidates=("$(PYTHON)"); \
	else \
	    candidates=(python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python \
	        "$$(uv python find 3.12 2>/dev/null || true)" python3 python); \
	fi; \
	python=""; \
	for candidate in "$${candidates[@]}"; do \
	    if [[ -n "$$candidate" ]] && "$$candidate" -c '$(IS_312)' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [[ -z "$$python" ]]; then \
	    echo "make: no usable Python 3.12 (with venv and ensurepip) among: $${candidates[*]}" >&2; \
	    echo "make: install one, for example with 'uv python install 3.12' or 'pyenv install 3.12'," >&2; \
	    echo "make: or say where it is: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 2; \
	fi; \
	$(if $(GPU),,"$$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	    { echo "make: vLLM needs libnuma.so.1: install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora)" >&2; exit 2; };) \
	echo "Making $(VENV) with $$("$$python" -V): about 6 GB, a few minutes."; \
	"$$python" -m venv --clear $(VENV)
	@$(PIP) install -qq --no-deps -r $(REQUIREMENTS)
	@$(if $(GPU),$(HEADERS) $(PIP) install -qq --no-cache-dir --no-deps --no-build-isolation -r requirements/gpu_built.txt) # takes this torch
	@touch $@

# A vLLM that an older patch series changed is put back as published before the present one goes in.
$(READY): $(INSTALLED) setup.py pyproject.toml $(PATCHES)
	@rm -f $@
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@$(VENV)/bin/python tools/apply_patches.py --revert >/dev/null 2>&1 || \
	    $(PIP) install -qq --no-deps --force-reinstall "$$(grep -E '^vllm(-cpu)?==' $(REQUIREMENTS))"
	@$(VENV)/bin/python tools/apply_patches.py --apply
	@$(VENV)/bin/python -m compileall -q moe_rl # every rank imports it, and may not be allowed to write bytecode
	@touch $@
