"""The golden vectors, on the backend under test."""

from __future__ import annotations

from typing import Any

import pytest

import blocktable
from blocktable_conformance import golden
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.subject import Subject

VECTORS = list(golden.load())


@pytest.mark.host
@pytest.mark.parametrize("vector", [vector for vector in VECTORS if vector.raises is None], ids=repr)
def test_golden_vector(subject: Subject, vector: golden.Vector) -> None:
    """Every answer of the history is the one that is written down.

    Rules: R2, R3, R4, R5, R6, R7, R8, R9.1, R10.1, R10.2, R10.3, R10.6, R11, R12, R13, R14, R15, R18, R25.5,
        R25.6, R25.7, R25.13, R25.15, R26, R27, R28, R29, R30, R31, R33, R34, R35, R36.
    """
    for capability in sorted(vector.capabilities):
        if not subject.declares(capability):
            pytest.skip(f"{subject.label} does not declare {capability}")
    answers = golden.TableAnswers(subject, golden.config_of(vector.config))
    for index, operation in enumerate(vector.operations):
        got = answers.answer(operation["call"], operation["args"])
        _compare(vector, operation, f"operation {index}, {operation['call']}({operation['args']})", got)


def _compare(vector: golden.Vector, operation: dict[str, Any], where: str, got: golden.Answer) -> None:
    expected: golden.Answer = operation["expect"]
    where = f"vector {vector.id} ({vector.title}), {where}"
    if "num_cut" in expected and "raises" in got:
        return  # host arrays, of which nothing may be cut (R27)
    check(set(got) == set(expected), vector.rules, f"{where} must answer {sorted(expected)}, got {got}")
    for key, value in expected.items():
        if key == "raises":
            check(got[key] == value, vector.rules, f"{where} must raise {value}, got {got[key]}")
            continue
        if operation["call"] in golden.WHOLE:
            check(got[key] == value, vector.rules, f"{where}: {key} must be {value}, got {got[key]}")
            continue
        for group, (seen, wanted) in enumerate(zip(got[key], value, strict=True)):
            check(seen == wanted, vector.rules, f"{where}: {key} of group {group} must be {wanted}, got {seen}")


@pytest.mark.parametrize("vector", [vector for vector in VECTORS if vector.raises is not None], ids=repr)
def test_config_that_must_be_rejected(subject_once: Subject, vector: golden.Vector) -> None:
    """The config is refused with the error that is written down.

    Rules: R1, R3, R14, R16, R18.
    """
    assert vector.raises is not None
    with must_raise(getattr(blocktable, vector.raises), vector.rules, f"the config of {vector.id} ({vector.title})"):
        golden.config_of(vector.config)
