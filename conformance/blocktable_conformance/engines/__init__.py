"""The contract's rules tried on engines' own block tables: `blocktable conformance --engine NAME`.

An adapter (`adapter.Engine`) says which calls an engine's table has; what it lacks is "no such call", never a pass. A
trial (`trials.TRIALS`) draws small histories for one rule, plays them on the engine and on the oracle, and cuts a
history that breaks the rule down to the smallest one. The engines' files come from released packages
(`packages`, `wheels`).
"""
