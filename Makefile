# Each target does all of its own set-up; a second run starts at once.
#   make quickstart            train a small model to sort digits: Ray + vLLM + DeepSpeed, no GPU needed
#   make test                  every check that CI runs
#   make gpu-check             try out on this machine what a run relies on, weight pushes and kernels of its GPUs too
#   make SET=gpu quickstart    force the GPU set (or SET=cpu); otherwise it is chosen by looking for a GPU
#   make PYTHON=/path/to/python3.12 ...   instead of the first of python3.11, python3.12, python3.13 that has venv

PYTHON ?=
SET ?= auto
ARGS ?=
NOX = .venv/bin/nox --no-color

.PHONY: help setup quickstart test gpu-check proof constraints clean

help:
	@sed -n 's/^#  //p' Makefile

setup:
	@python=$(PYTHON); : $${python:=$$(sh scripts/find_python.sh)}; [ -n "$$python" ] && $$python scripts/set_up.py --set $(SET)

quickstart: setup
	@.venv/bin/python examples/quickstart/run.py $(ARGS)

test: setup
	@rm -rf .nox/results
	@$(NOX) $(ARGS)

gpu-check: setup
	@.venv/bin/openrlhf-launch selfcheck $(ARGS)

proof: setup
	@$(NOX) -s proof $(ARGS)

constraints: setup
	@.venv/bin/python scripts/pin.py

clean:
	rm -rf .venv .nox dist build
