PYTHON ?= python3

.PHONY: demo test test-full check

demo:
	@$(PYTHON) bootstrap.py demo

test:
	@$(PYTHON) bootstrap.py test

test-full:
	@$(PYTHON) bootstrap.py test-full

check:
	@$(PYTHON) bootstrap.py check
