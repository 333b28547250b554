"""Check mode: a table that is checked gets the calls of a drop-in too, and what it finds goes to vLLM's log.

Rows of the drop-ins are their own, so the checker sits at a table beside them: in host mode one of the numpy backend.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from types import FrameType
from typing import Any

import torch

from blocktable import KINDS, BlockTable, BlockTableConfig, BlockTableError, Finding

MAX_LOGGED = 64
"""Different findings of each level that are logged; a broken engine repeats them every step."""

CHECK_KINDS: Any = {"null_written": "off"}  # elastic expert parallelism means it

NO_SLOTS = ("Mamba", "CrossAttention")
"""Beginnings of vLLM's names for caches whose places are not the positions of a request's tokens."""

logger: logging.Logger = logging.getLogger("vllm.blocktable.check")


class Check:
    """What the calls of one drop-in are told to. The table beside it is made with the first row change.

    vLLM's runner is looked for among the callers then: it knows how many blocks there are, and whose rows are.

    Args:
        tables: the drop-in's.
        mode: "host" or "device".

    Attributes:
        table: the table that is checked. None: no row was changed so far, or there is no group.
    """

    def __init__(self, tables: Any, mode: str) -> None:
        self._tables, self._mode = weakref.ref(tables), mode
        self._runner: Callable[[], Any] = lambda: None
        self._is_begun = False
        self._logged: dict[int, set[Any]] = {logging.ERROR: set(), logging.WARNING: set()}
        self.table: BlockTable | None = None

    def _own(self, tables: Any) -> tuple[BlockTableConfig, Any, Any] | None:
        """Return the drop-in's configuration, of manager blocks, its backend and torch.device; None: no groups."""
        raise NotImplementedError

    def _begin(self) -> BlockTable | None:
        """Return the table, made with the first call."""
        if self._is_begun:
            return self.table
        self._is_begun = True
        tables = self._tables()
        found = None if tables is None else self._own(tables)
        if found is None:
            return None
        own, backend, device = found
        runner = next((each for each in _callers() if _has_tables(each, tables)), None)
        num_blocks = specs = None
        if runner is not None:
            self._runner = weakref.ref(runner)
            cache = getattr(runner, "kv_cache_config", None)
            num_blocks, specs = getattr(cache, "num_blocks", None), getattr(cache, "kv_cache_groups", None)
        if num_blocks is None:
            says = "ids above their number are not found" if self._mode == "host" else "the tables are not checked"
            logger.warning("The runner's KV cache configuration does not say how many blocks there are: %s.", says)
            if self._mode == "device":
                return None
        # All groups take their blocks from one pool.
        groups = [replace(group, pool="vllm", num_blocks=num_blocks) for group in own.groups]
        for index, (group, each) in enumerate(zip(groups, specs or (), strict=False)):
            if type(getattr(each, "kv_cache_spec", None)).__name__.startswith(NO_SLOTS):
                groups[index] = replace(group, slot_mode="none", sharded=None)
        on_host = self._mode == "host"
        with torch.inference_mode(False):
            self.table = BlockTable(
                replace(own, groups=groups, stale_rows=True),
                "numpy" if on_host else backend,
                None if on_host or device.type == "cpu" else device,
                check="host" if on_host else "device",
                check_kinds=CHECK_KINDS,
                on_finding=self._log_finding,
            )
        logger.info("Block tables are checked on the %s.", self._mode)
        return self.table

    # What the calls of both runners come down to.

    def _change(self, name: str, row: int, block_ids: Any) -> None:
        """Append to a row ("append_row") or set it ("set_row"); ids that no block has are logged, and then holes."""
        table = self._begin()
        if table is None:
            return
        limits = [group.block_id_limit for group in table.config.groups]
        given = [
            [] if ids is None else list(ids) for ids, _ in zip(block_ids, limits, strict=False)
        ]  # vLLM looks at no more
        possible = [
            [each if type(each) is int and 0 <= each < limit else 0 for each in ids]
            for ids, limit in zip(given, limits, strict=True)
        ]
        for ids in (given, possible):
            try:
                getattr(table, name)(row, ids)
            except BlockTableError as error:
                self._log_error(error, row)
            else:
                return

    def _move(self, name: str, *rows: int) -> None:
        table = self._begin()
        if table is not None:
            try:
                getattr(table, name)(*rows)
            except BlockTableError as error:
                self._log_error(error, rows[0])

    def _commit(self) -> None:
        if self.table is not None:
            self.table.commit()

    def _map_slots(self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_reqs: int) -> None:
        """Look at the tokens of a call.

        Args:
            idx_mapping: [num_reqs] integers, torch. Batch index -> row. None: the identity.
            query_start_loc: [>= num_reqs + 1] integers, torch.
            positions: [>= num_tokens] integers, torch.
            num_reqs: requests.
        """
        if self.table is None:
            return
        starts: Any = query_start_loc[: num_reqs + 1].to(torch.int32)
        tokens: Any = positions.to(torch.int64)
        rows: Any = None if idx_mapping is None else idx_mapping.to(torch.int32)
        if self._mode == "host" and starts.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # cannot be waited for; what a replay maps is not seen
        if self._mode == "host" or not starts.is_cuda:
            rows, starts, tokens = (None if each is None else each.cpu().numpy() for each in (rows, starts, tokens))
            tokens = tokens[: max(int(starts[-1]), 0)]  # whole buffers are given, padding included
        try:
            self.table.compute_slot_mappings(rows, starts, tokens)
        except BlockTableError as error:
            self._log_error(error, None)

    # The log.

    def _log_finding(self, finding: Finding) -> None:
        # A speculator runs ahead of what its rows hold, and its last tokens are not read.
        is_report = KINDS[finding.kind] == "report" or (finding.kind == "missing_block" and _is_of_speculator())
        rows = [row for row in (finding.row, finding.other_row) if row is not None]
        key = (finding.kind, finding.group, finding.block_id)
        self._log(logging.WARNING if is_report else logging.ERROR, key, finding.message, rows, finding.step)

    def _log_error(self, error: BlockTableError, row: int | None) -> None:
        self._log(logging.ERROR, (str(error),), f"refused: {error}", [] if row is None else [row], None)

    def _log(self, level: int, key: tuple[Any, ...], sentence: str, rows: list[int], step: int | None) -> None:
        owners = {row: self._request(row) for row in rows}
        logged, key = self._logged[level], (*key, *owners.items())
        if key in logged or len(logged) > MAX_LOGGED:
            return
        logged.add(key)
        if len(logged) > MAX_LOGGED:
            logger.log(level, "More of %s are not logged.", logging.getLevelName(level))
            return
        who = "".join(f" Row {row} is {owner}." for row, owner in owners.items() if owner)
        when = "" if step is None else f" (after commit {step})"
        logger.log(level, "%s%s%s", sentence, who, when)

    def _request(self, row: int) -> str:
        """Return whose row that is, in words; empty where the runner does not know."""
        runner = self._runner()
        if runner is None:
            return ""
        name = self._request_id(runner, row)
        return "no running request's" if name is None else f"request {name!r}"

    def _request_id(self, runner: Any, row: int) -> str | None:
        raise NotImplementedError


class V1Check(Check):
    """What `MultiGroupBlockTable` is told, with its arguments."""

    def _own(self, tables: Any) -> tuple[BlockTableConfig, Any, Any] | None:
        memory = getattr(tables.__blocktable__, "device", None)
        return None if memory is None else (memory.config, memory.backend, memory.device)

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Blocks were added to a row."""
        self._change("append_row", row_idx, block_ids)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """A row was replaced."""
        self._change("set_row", row_idx, block_ids)

    def clear_row(self, row_idx: int) -> None:
        """A row was emptied."""
        self._move("clear_row", row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Row tgt is row src now; 0.25.1 leaves a copy there, which is not read."""
        self._move("move_row", src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Two rows were exchanged."""
        self._move("swap_rows", src, tgt)

    def commit_block_table(self, num_reqs: int) -> None:
        """Rows were committed."""
        self._commit()

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        """Slots are about to be written."""
        self._map_slots(None, query_start_loc, positions, num_reqs)

    def _request_id(self, runner: Any, row: int) -> str | None:
        names = runner.input_batch.req_ids
        found: str | None = names[row] if row < len(names) else None
        return found


class V2Check(Check):
    """What `BlockTables` is told, with its arguments."""

    def _own(self, tables: Any) -> tuple[BlockTableConfig, Any, Any] | None:
        rows = tables.__rows__
        if rows is None:
            return None
        groups = []
        for geometry, group in zip(rows.config.groups, tables._groups, strict=True):
            size, k = group.block_size, group.columns_per_block
            has_slots: Any = {} if group.has_slots else {"slot_mode": "none", "sharded": None}
            sizes = {"block_size": size * k, "kernel_block_size": size, "blocks_per_row": group.max_num_blocks // k}
            groups.append(replace(geometry, **sizes, **has_slots))
        return replace(rows.config, groups=groups), rows._backend, rows._device

    def append_block_ids(self, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        """Blocks were added to a row, or replaced it."""
        tables = self._tables()
        if tables is not None and tables.redirect_writes_to_null_block:
            new_block_ids = [[0] * len(ids) for ids in new_block_ids]
        self._change("set_row" if overwrite else "append_row", req_index, new_block_ids)

    def apply_staged_writes(self) -> None:
        """Appends were committed."""
        self._commit()

    def compute_slot_mappings(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_tokens_padded: int, out: Any = None
    ) -> None:
        """Slots are about to be written."""
        self._map_slots(idx_mapping, query_start_loc, positions, idx_mapping.shape[0])

    def _request_id(self, runner: Any, row: int) -> str | None:
        found: str | None = runner.req_states.index_to_req_id.get(row)
        return found


def checked(kind: Any, check_type: type[Check], mode: str) -> Any:
    """Return a subclass whose calls are told to a check of its own: `__check__`.

    Args:
        kind: a class of tables.
        check_type: its public methods are the calls that are told.
        mode: "host" or "device".
    """

    @wraps(kind.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        self.__check__ = check_type(self, mode)

    names = [name for name in vars(check_type) if not name.startswith("_")]
    told = {name: _told(getattr(kind, name), name) for name in names}
    # The methods that tables take on once their rows were given up.
    given_up = getattr(kind, "__given_up__", {})
    others = {name: _told(method, name) if name in told else method for name, method in given_up.items()}
    return type(kind.__name__, (kind,), {"__init__": init, "__doc__": kind.__doc__, "__given_up__": others, **told})


def _told(method: Any, name: str) -> Any:
    maps = name.startswith("compute_")

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell = getattr(self.__check__, name)
        if maps:  # before anything is written by these slots
            tell(*args, **kwargs)
        result = method(self, *args, **kwargs)
        if not maps:  # a change that was refused has changed nothing
            tell(*args, **kwargs)
        return result

    return call


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            yield frame.f_locals.get("self")
        frame = frame.f_back


def _has_tables(thing: Any, tables: Any) -> bool:
    """Whether something is the runner that these tables belong to."""
    if getattr(getattr(thing, "input_batch", None), "block_table", None) is tables:
        return True
    return hasattr(thing, "req_states") and getattr(thing, "block_tables", None) is tables


def _is_of_speculator() -> bool:
    """Whether the innermost caller that is vLLM's is one of its speculators."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("vllm."):
            return "spec_decode" in name
        frame = frame.f_back
    return False
