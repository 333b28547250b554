"""Errors: each is a `BlockTableError` and also the built-in that a Python author would catch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blocktable.findings import Finding


class BlockTableError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(BlockTableError, ValueError):
    """The configuration is impossible (R1, R3, R14, R16, R18)."""


class ArgumentError(BlockTableError, ValueError):
    """An argument's value, length or shape is not allowed (R4, R7, R10.4, R10.10, R15)."""


class DtypeError(BlockTableError, TypeError):
    """An argument has the wrong type or dtype (R7, R10.8, R12)."""


class RowIndexError(BlockTableError, IndexError):
    """A row is outside `0 .. max_num_reqs - 1` (R7)."""


class RowCapacityError(BlockTableError, ValueError):
    """A row cannot hold the blocks asked for; nothing was changed (R6)."""


class NoFreeRowError(BlockTableError, IndexError):
    """Every row of the table belongs to a request; nothing was changed (R42)."""


class ChangesError(BlockTableError, ValueError):
    """A packet of row changes cannot be applied; nothing was changed (R46)."""


class UnknownBackendError(BlockTableError, LookupError):
    """No installed distribution offers a backend of that name, or two do."""


class BackendUnavailableError(BlockTableError, ImportError):
    """The backend is installed but cannot run here; the message says why and what to do."""


class UnsupportedError(BlockTableError, NotImplementedError):
    """The backend does not declare the capability that the call needs."""


class CheckError(BlockTableError, RuntimeError):
    """The checker has found a mistake of the engine's (R38). It can be pickled, as errors that leave a process are.

    Attributes:
        finding: the `Finding`.
    """

    def __init__(self, message: str, finding: Finding) -> None:
        super().__init__(message, finding)
        self.finding: Finding = finding

    def __str__(self) -> str:
        return str(self.args[0])
