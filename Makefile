# Two commands on a fresh machine: `make demo` and `make test`. Each makes its own virtual environment first; the second time there is nothing to do.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
  $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
# this version resolves to a build for the CPU where one is at hand; a plain `torch` may bring gigabytes of CUDA libraries
TORCH ?= torch==2.13.0
TORCHES ?= 2.9 2.11 2.13 newest
TESTS ?= tests
# two processes: each takes half of the tests, and of what the other has left
TWO := -n 2 --dist worksteal
PROCESSES := distributed test_command_line.py test_compiled_kernels.py test_docs.py test_how_to.py test_logs.py \
  test_notebooks.py test_package.py test_reporting.py

.PHONY: demo test test-fast suite test-torch test-cpus test-all test-versions test-cpython lint clean

$(RUN):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(RUN)
	$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install -q '$(TORCH)'
	$(RUN) -m pip install -q -e '.[dev,transformers,plots]'
	touch $@

demo: $(VENV)/.installed
	$(RUN) examples/demo.py

test: lint
	$(RUN) -m pytest $(TWO) tests

# two cases at most of each test, without those that start processes of their own, for the habit of running it
test-fast: $(VENV)/.installed
	$(RUN) -m pytest $(TWO) --cases 2 $(addprefix --ignore=tests/,$(PROCESSES)) tests

# the tests alone; TESTS names some of them
suite: $(VENV)/.installed
	$(RUN) -m pytest $(TWO) $(TESTS)

# under the oldest PyTorch, the one of the GPU machines, 2.13 and the newest, each in an environment of its own (gigabytes each), made of PYTHON when missing
test-torch:
	@for v in $(TORCHES); do echo "PyTorch $$v"; \
	  $(MAKE) --no-print-directory suite VENV=".venv-torch-$$v" TORCH="torch$$([ $$v = newest ] || echo "==$$v.*")" || exit 1; done

# on a processor with AVX2 and no more, and on any x86, as PyTorch's libraries take this one for
test-cpus:
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) --no-print-directory suite
	ATEN_CPU_CAPABILITY=default $(MAKE) --no-print-directory suite

test-all: test test-versions
	$(RUN) -m pytest $(TWO) -m slow tests
	THUNDER_TIERS=automatic $(RUN) -m pytest $(TWO) tests/paths tests/scenarios
	$(RUN) -m tests.properties.run --mutations 20000 --programs 10000 --numbers 5000 --library --paths 5000 --processes 2
	$(RUN) benchmarks/op_coverage.py --processes 2
	$(RUN) benchmarks/models.py --systems eager,thunder,thunder_inductor

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check thunder tests benchmarks examples
	$(VENV)/bin/ruff format --check -q thunder tests benchmarks examples
	$(VENV)/bin/lint-imports
	$(RUN) tests/private_names.py
	$(RUN) tests/operation_names.py
	$(RUN) tests/words.py -q
	$(VENV)/bin/pyright --pythonpath $(RUN)

# the interpreter's corpus, without torch, under every Python that is found
test-versions:
	@for v in 3.11 3.12 3.13 3.14 3.15; do \
	  p=$$(command -v python$$v || true); full=$$(pyenv versions --bare 2>/dev/null | grep "^$$v\." | tail -1); \
	  if [ -n "$$full" ]; then echo "Python $$full"; PYENV_VERSION=$$full PYTHONPATH=. python$$v -m tests.interpreter.corpus_runner || exit 1; \
	  elif [ -n "$$p" ]; then echo "Python $$v"; PYTHONPATH=. $$p -m tests.interpreter.corpus_runner || exit 1; else echo "Python $$v: not found"; fi; done

# CPython's own tests, as the Python that runs ships them, in the interpreter
test-cpython:
	$(RUN) -m tests.interpreter.cpython_runner --differences

clean:
	rm -rf $(VENV) .venv-torch-* build *.egg-info .pytest_cache .ruff_cache
