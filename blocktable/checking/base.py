"""What both checkers are: the rows that they follow, and the calls that one of them asks nothing of."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.checking.pools import Holders
from blocktable.checking.rows import CheckedRows, RowWatcher
from blocktable.config import BlockTableConfig
from blocktable.findings import Findings
from blocktable.host_path import HostPath
from blocktable.protocols import Backend, Batch, BlockStore, StepBuffers


class BaseChecker:
    """A `Checker` that follows the rows of a table.

    Args:
        config: the geometry.
        backend: brings arrays to the host.
        device: what the backend calls a device.
        store: the table's.
        findings: where findings go.
        lives: follows whose rows are.

    Attributes:
        config, findings, lives: as given.
        holders: the rows as of the last commit.
        num_commits: commits so far; a step is one.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        backend: Backend,
        device: Any,
        store: BlockStore,
        findings: Findings,
        lives: Any,
    ) -> None:
        self.config = config
        self.findings = findings
        self.lives: Any = lives
        self.holders: Holders = Holders(config)
        self.num_commits: int = 0
        self._backend, self._device = backend, device
        self._store: Any = store
        self._rows: Any = None
        self._mirror: IntArray

    def checked_rows(self, rows: HostPath) -> HostPath:
        """As `Checker.checked_rows`."""
        self._rows, self._mirror = rows, rows.live_mirror()
        self.lives.attach(self._mirror, rows.journal)
        self.holders.attach(rows, self.lives)
        return cast(HostPath, CheckedRows(rows, cast(RowWatcher, self)))

    def count_commit(self) -> None:
        """Count a commit, or a step."""
        self.num_commits += 1

    def hand_in(self, group: int, ids: IntArray) -> bool:
        """As `RowWatcher.hand_in`."""
        return self.holders.pools[group].hand_in(ids)

    def before_committed(self, rows: HostPath) -> None:
        """The commit was looked at before it began."""

    def before_gather(self, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        """Nothing is asked of batch tables."""

    def after_call(self) -> None:
        """Everything was told before the call did anything."""

    def collect(self) -> None:
        """Nothing is left."""

    def _host(self, array: Array) -> IntArray:
        return np.asarray(array if isinstance(array, np.ndarray) else self._backend.to_host(array))
