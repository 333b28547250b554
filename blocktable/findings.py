"""What the checker finds: an engine's own mistakes, each with its place (R38)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from blocktable.errors import CheckError, ConfigError

Severity = Literal["raise", "report", "off"]

KINDS: Mapping[str, Severity] = {
    "missing_block": "raise",
    "unset_row": "raise",
    "shared_block_written": "raise",
    "slot_written_twice": "raise",
    "duplicate_block": "raise",
    "live_row_set": "report",
    "position_gap": "report",
    "bad_starts": "raise",
    "padding_below_tokens": "raise",
    "export_cut": "raise",
    "stale_batch": "raise",
    "null_written": "report",
}
"""Kind of finding -> what happens unless the engine says otherwise."""

MAX_FINDINGS = 64
"""Findings that are kept: the first ones. All are counted."""

CheckKinds = Mapping[str, Severity]


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake of an engine's.

    What a kind does not have is None.

    Attributes:
        kind: one of `KINDS`.
        message: a sentence: what, where, since when, and what it leads to.
        step: commits before the call that did the harm, as a recording counts them.
        group: the group.
        row: the row.
        position: of the token in its request.
        block_id: the manager block.
        slot: the slot.
        other_row: another row that holds the block, or wrote the slot.
    """

    kind: str
    message: str
    step: int
    group: int | None = None
    row: int | None = None
    position: int | None = None
    block_id: int | None = None
    slot: int | None = None
    other_row: int | None = None


class Findings:
    """The findings of one table.

    Args:
        num_groups: groups of the table.
        check_kinds: kind -> severity, for what differs from `KINDS`; or one such mapping for each group.
        on_finding: is told of every finding; then none is raised.

    Attributes:
        kept: the first `MAX_FINDINGS`, in order.
        count: of all.

    Raises:
        ConfigError: a kind or a severity that there is not; another number of groups.
    """

    def __init__(
        self,
        num_groups: int,
        check_kinds: CheckKinds | Sequence[CheckKinds] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        is_one = check_kinds is None or isinstance(check_kinds, Mapping)
        given: Any = [check_kinds or {}] * num_groups if is_one else check_kinds
        if len(given) != num_groups:
            raise ConfigError(f"check_kinds must be a mapping, or one for each of the {num_groups} groups.")
        for kinds in given:
            for kind, severity in kinds.items():
                if kind not in KINDS:
                    raise ConfigError(f"check_kinds: there is no kind {kind!r}; kinds are {', '.join(KINDS)}.")
                if severity not in get_args(Severity):
                    raise ConfigError(f"check_kinds of {kind!r} must be one of {get_args(Severity)}, got {severity!r}.")
        self._severities: list[dict[str, Severity]] = [{**KINDS, **kinds} for kinds in given]
        self._on_finding = on_finding
        self.kept: list[Finding] = []
        self.count: int = 0

    def severity(self, kind: str, group: int | None) -> Severity:
        """Return what is done about a kind; of no group: what the first group that does not turn it off says."""
        if group is not None:
            return self._severities[group][kind]
        return next((each[kind] for each in self._severities if each[kind] != "off"), "off")

    def add(self, findings: Sequence[Finding]) -> None:
        """Keep and count findings that are not off; tell `on_finding` of them, or raise the first that must be raised.

        Raises:
            CheckError: one has the severity "raise", and there is no `on_finding`.
        """
        first = None
        for finding in findings:
            severity = self.severity(finding.kind, finding.group)
            if severity == "off":
                continue
            self.count += 1
            if len(self.kept) < MAX_FINDINGS:
                self.kept.append(finding)
            if self._on_finding is not None:
                self._on_finding(finding)
            elif severity == "raise" and first is None:
                first = finding
        if first is not None:
            raise CheckError(first.message, first)
