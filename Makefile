# Each target does all of its own set-up; a second run starts at once.
#   make quickstart            train a small model to sort digits: Ray + vLLM + DeepSpeed, no GPU needed
#   make test                  every check that CI runs
#   make SET=gpu quickstart    force the GPU set (or SET=cpu); otherwise it is chosen by looking for a GPU
#   make PYTHON=/path/to/python3.11 ...

PYTHON ?= python3.11
SET ?= auto
ARGS ?=
NOX = .venv/bin/nox --no-color

.PHONY: help setup quickstart test proof constraints clean

help:
	@sed -n 's/^#  //p' Makefile

setup:
	@$(PYTHON) scripts/set_up.py --set $(SET)

quickstart: setup
	@.venv/bin/python examples/quickstart/run.py $(ARGS)

test: setup
	@rm -rf .nox/results
	@$(NOX) $(ARGS)

proof: setup
	@$(NOX) -s proof $(ARGS)

constraints: setup
	@.venv/bin/python scripts/pin.py

clean:
	rm -rf .venv .nox dist build
