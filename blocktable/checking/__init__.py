"""The checker: an engine's own mistakes, found in the call that makes them (R38-R40)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol, get_args

from blocktable.config import BlockTableConfig
from blocktable.errors import ConfigError
from blocktable.findings import Findings
from blocktable.host_path import HostPath
from blocktable.layouts import Layout
from blocktable.protocols import Backend, Batch, BlockStore, ExportBuffers, StepBuffers

CheckMode = Literal["off", "host", "device"]

CHECK_VARIABLE = "BLOCKTABLE_CHECK"


class Checker(Protocol):
    """What a table tells of its calls, before anything of them reaches the device.

    It holds no reference to the table. Every `before_...` may raise `CheckError`, and then the call has done nothing.
    Arguments are those of the call after their own checks. It sees row operations as the rows that `checked_rows`
    returns.

    Attributes:
        findings: what it has found.
    """

    findings: Findings

    def checked_rows(self, rows: HostPath) -> HostPath:
        """Return rows that do what `rows` do, and tell the checker."""

    def before_commit(self, stream: int | None) -> None:
        """Changes are about to be committed, not by a step."""

    def before_gather(self, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        """Batch tables are about to be written; never called for the tables of a step."""

    def before_slots(
        self, batch: Batch, num_tokens_padded: int | None, groups: tuple[int, ...] | None, stream: int | None
    ) -> None:
        """Slots are about to be computed as of the last commit. groups: those that are named; None: all."""

    def before_step(self, batch: Batch, num_tokens_padded: int | None, out: StepBuffers, stream: int | None) -> None:
        """A commit, a gather where `batch.needs_gather`, and the slots of all groups are about to come, as one step."""

    def before_export(
        self,
        layout: Layout,
        groups: tuple[int, ...],
        batch: Batch,
        out: ExportBuffers | StepBuffers,
        stream: int | None,
    ) -> None:
        """An export is about to be written into `out`; of a set of buffers: its batch tables are handed out."""

    def after_call(self) -> None:
        """A commit, a gather, slots, a step or an export has done its work: add what the device has told."""

    def collect(self) -> None:
        """Wait for what the device still has to tell, and add it to the findings."""


def check_mode(check: str | None) -> CheckMode:
    """Return how a table is checked.

    Args:
        check: as given. None: what BLOCKTABLE_CHECK says, else "off".

    Raises:
        ConfigError: another value.
    """
    name, value = ("check", check) if check is not None else (CHECK_VARIABLE, os.environ.get(CHECK_VARIABLE, "off"))
    for mode in get_args(CheckMode):
        if value == mode:
            found: CheckMode = mode
            return found
    raise ConfigError(f"{name} must be one of {', '.join(get_args(CheckMode))}; got {value!r}.")


def plan_checking(mode: CheckMode, config: BlockTableConfig, findings: Findings) -> BlockTableConfig:
    """Return the configuration with what kernels check, in mode "device"; otherwise as it is.

    Raises:
        ConfigError: the mode cannot check this table.
    """
    if mode != "device":
        return config
    from blocktable.checking.device import plan_checks  # most tables are not checked

    return replace(config, check_plan=plan_checks(config, findings))


def make_checker(
    mode: CheckMode, config: BlockTableConfig, backend: Backend, device: Any, store: BlockStore, findings: Findings
) -> Checker | None:
    """Return the checker of a table; None for "off". config: as `plan_checking` returned it."""
    if mode == "off":
        return None
    from blocktable.checking.device import DeviceChecker
    from blocktable.checking.host import HostChecker

    makers: dict[str, Callable[..., Checker]] = {"host": HostChecker, "device": DeviceChecker}
    return makers[mode](config, backend, device, store, findings)
