"""Numbers of the contract's rules, such as R12, and of their parts, such as R9.2. R9 stands for all of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = r"[A-Z]\d+(?:\.\d+)?"
"""Of a rule, of a part, or of a case of the suite."""


def numbers(word: str, text: str) -> set[str]:
    """Return what a docstring's `Rules: R1, R9.2.` names; a range R10-R15 names all of it."""
    named = set()
    for listed in re.findall(rf"{word}: ({NUMBER}(?:(?:,\s+|-){NUMBER})*)", text):
        for item in re.split(r",\s+", listed):
            first, _, last = item.partition("-")
            span = range(int(first[1:]), int(last[1:]) + 1) if last else ()
            named |= {f"{first[0]}{number}" for number in span} or {first}
    return named


def is_within(number: str, rule: str) -> bool:
    """Say whether a number is that of a rule or of one of its parts."""
    return f"{number}.".startswith(f"{rule}.")


def are_about(named: Iterable[str], rules: Iterable[str]) -> bool:
    """Say whether any of some numbers is one of others, or a part or the whole of one."""
    wanted = list(rules)
    return any(is_within(one, other) or is_within(other, one) for one in named for other in wanted)
