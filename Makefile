# `make demo` searches 10,000 passages of Python's documentation, `make test` runs the tests, `make docs` builds the site.
# `make fuzz` tries damaged files and input on each target of tests/fuzz for a minute (FUZZ_SECONDS).
# `make ray` runs the tests of shards on Ray and of object stores on servers of this machine.
# `make adapters` runs the tests of irkit/adapters, irkit/exporting and irkit/remote with the libraries and engines, and
# those of the server with its clients and a fuzzer.
# `make serve-tests` runs all tests of the server, the slow ones and its page in Chromium among them; it needs npm.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= tests/fuzz
AXE := $(VENV)/node_modules/axe-core/axe.min.js
# what pytest-asyncio, which libraries of the adapters bring, asks for
ASYNCIO := -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function
export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test fuzz adapters test-adapters serve-tests test-serve lint docs ray test-ray

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py demo-index

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

fuzz: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 IRKIT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -n auto --dist worksteal $(FUZZ_TARGETS)

adapters:  # in an environment of its own, because the libraries bring plugins of pytest
	$(MAKE) VENV=$(VENV)-adapters test-adapters

test-adapters: $(VENV)/dev,adapters.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not network" \
	  -k "adapters or export or client or schemathesis" \
	  $(ASYNCIO) \
	  tests/test_adapters_*.py tests/test_docs.py tests/test_serve.py tests/test_serve_faults.py

serve-tests:
	$(MAKE) VENV=$(VENV)-adapters test-serve

test-serve: $(VENV)/dev,adapters.stamp $(AXE)
	OMP_NUM_THREADS=1 IRKIT_AXE=$(AXE) $(BIN)/python -m pytest -n auto --dist loadfile -m "not network" \
	  $(ASYNCIO) tests/test_serve*.py tests/test_page.py

ray:  # one after the other, because Ray gives its processes little time to start
	$(MAKE) VENV=$(VENV)-ray test-ray

test-ray: $(VENV)/dev,engines,ray.stamp $(VENV)/stores.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not network" \
	  tests/test_ray.py tests/test_serve_shards.py tests/test_object_servers.py tests/test_object_stores.py

$(VENV)/stores.stamp: $(VENV)/dev,engines,ray.stamp  # by uv, because pip tries versions of botocore for minutes
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python s3fs gcsfs "moto[server]" gcp-storage-emulator aiohttp
	touch $@

$(AXE): | $(VENV)/bin/python
	npm install --silent --no-save --prefix $(VENV) axe-core

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Look at it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[$*]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # by all cores; some packages have files for other Pythons
	touch $@
