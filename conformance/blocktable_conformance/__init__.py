"""The conformance suite of blocktable: proves that a backend keeps the contract of docs/spec.md.

Run it with `python -m blocktable_conformance NAME` or `blocktable conformance NAME`.
"""
