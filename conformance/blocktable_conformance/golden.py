"""Golden vectors: histories in JSON with every answer written down, for any language (vectors/README.md).

An operation is `{"call": name, "args": {...}, "expect": {...}}`. Its answer, by the oracle or by a table under test, is
what `expect` must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blocktable import (
    ArgumentError,
    BlockTable,
    BlockTableConfig,
    BlockTableError,
    ContextParallel,
    ExportBuffers,
    KVCacheGroup,
    Layout,
)
from blocktable.exports import RING_AND_REQUEST_KINDS
from blocktable_conformance.oracle import OracleTable, Refused
from blocktable_conformance.oracle_exports import ExportOracle
from blocktable_conformance.subject import Subject

FORMATS = (1, 2, 3, 4)
"""Versions of the file format that this suite reads.

2 has the call `export` too, 3 `slots` and row edits, 4 exports of parts and requests, positions and metadata.
"""

FOLDER = Path(__file__).parent / "vectors"

Answer = dict[str, Any]


@dataclass(frozen=True)
class Vector:
    """One history.

    Attributes:
        id: a case of the suite, or a name.
        rules: what it is about.
        title: one sentence.
        config: fields of `BlockTableConfig`, groups as fields of `KVCacheGroup`.
        raises: the error class with which the config is refused; there are no operations then.
        operations: what is called, and the answers.
    """

    id: str
    rules: str
    title: str
    config: dict[str, Any]
    raises: str | None
    operations: list[dict[str, Any]]

    def __repr__(self) -> str:
        return self.id

    @property
    def capabilities(self) -> set[str]:
        """What a backend must declare for it."""
        found = set()
        for operation in self.operations:
            call, args = operation["call"], operation["args"]
            if call in ("export", "step_metadata"):
                found.add("exports")
            is_of_parts = "first_tokens" in args or "max_batch" in args
            if call == "map_positions" or is_of_parts or args.get("layout", {}).get("kind") in RING_AND_REQUEST_KINDS:
                found.add("export_parts")
        return found


def load() -> Iterator[Vector]:
    """Read every vector of every file."""
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] not in FORMATS:
            raise ValueError(f"{path.name} has format {content['format']}, this suite reads formats {FORMATS}.")
        for fields in content["vectors"]:
            yield Vector(**{"raises": None, "operations": []} | fields)


def config_of(fields: dict[str, Any]) -> BlockTableConfig:
    """Return the config that the fields describe.

    Raises:
        ConfigError: it is impossible.
    """
    options = dict(fields)
    groups = [KVCacheGroup(**group) for group in options.pop("groups")]
    share = ContextParallel(**options.pop("context_parallel", {}))
    return BlockTableConfig(groups=groups, context_parallel=share, **options)


def layout_of(fields: dict[str, Any]) -> Layout:
    """Return the layout that the fields describe."""
    return Layout(name="vector", consumer="a golden vector", **fields)


def lists_per_group(seq_lens: list[Any], num_groups: int) -> list[list[int]]:
    """Return the lengths of each group: those that were given for it, or the ones that were given for all."""
    return seq_lens if seq_lens and isinstance(seq_lens[0], list) else [seq_lens] * num_groups


EXPORTED = ("entries", "indptr", "last_page_lens", "lengths")
"""What an export answers: whole arrays, those that its kind has."""


WHOLE = ("block_ids", "common_blocks", "kernel_block_ids", "export", "map_positions")
"""Calls whose answers are numbers and arrays of their own; those of others have one for each group."""


class OracleAnswers:
    """Answers operations by the oracle."""

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.oracle = OracleTable(config)
        self.groups = range(len(config.groups))
        self._num_cut: dict[str, int] = {}

    def answer(self, call: str, args: dict[str, Any]) -> Answer:
        """Do one operation and return its answer."""
        special = getattr(self, f"_{call}", None)
        if special is not None:
            return dict(special(**args))
        try:
            getattr(self.oracle, call)(**args)
        except Refused as refused:
            return {"raises": min(refused.errors)}
        return {}

    def _look(self) -> Answer:
        return {
            "host_tables": [self.oracle.host_table(group) for group in self.groups],
            "num_blocks_per_row": self.oracle.num_blocks_per_row(),
        }

    def _block_ids(self, row: int, group: int) -> Answer:
        return {"block_ids": self.oracle.block_ids(row, group)}

    def _common_blocks(self, rows: list[int], group: int) -> Answer:
        return {"common_blocks": self.oracle.common_blocks(rows, group)}

    def _kernel_block_ids(self, group: int, ids: list[int]) -> Answer:
        return {"kernel_block_ids": self.oracle.kernel_block_ids(group, ids)}

    def _commit(self) -> Answer:
        self.oracle.commit()
        return {"device_tables": [self.oracle.device_table(group) for group in self.groups]}

    def _step(
        self, num_computed_tokens: list[int] | None = None, num_reqs_padded: int | None = None, **args: Any
    ) -> Answer:
        self.oracle.commit()
        return {
            "block_tables": self.oracle.gather(args["idx_mapping"], num_computed_tokens),
            **self._slots(**args),
        }

    def _slots(
        self, idx_mapping: list[int], query_start_loc: list[int], positions: list[int], groups: list[int] | None = None
    ) -> Answer:
        size = self.config.max_num_batched_tokens
        mappings = self.oracle.slots(idx_mapping, query_start_loc, positions, size, groups)
        return {"slot_mappings": [[slot.value for slot in mapping] for mapping in mappings]}

    def _export(
        self,
        layout: dict[str, Any],
        groups: list[int],
        idx_mapping: list[int],
        seq_lens: list[int] | None = None,
        num_computed_tokens: list[int] | None = None,
        first_tokens: list[int] | None = None,
        query_start_loc: list[int] | None = None,
        capacity: int = 0,
        num_kernel_blocks: int = 0,
        max_batch: int | None = None,
    ) -> Answer:
        inputs = (idx_mapping, seq_lens, num_computed_tokens, first_tokens, query_start_loc, max_batch)
        oracle = ExportOracle(self.oracle, self.config, layout_of(layout), groups, *inputs)
        exported = oracle.run(capacity=capacity, num_kernel_blocks=num_kernel_blocks)
        answers = {name: getattr(exported, name) for name in EXPORTED}
        key = json.dumps([layout, groups, capacity, max_batch])
        self._num_cut[key] = self._num_cut.get(key, 0) + exported.num_cut
        return {name: answer for name, answer in answers.items() if answer} | (
            {"num_cut": self._num_cut[key]} if self._num_cut[key] else {}
        )

    def _map_positions(self, rows: list[int], group: int, positions: list[list[int]]) -> Answer:
        return {"slots": self.oracle.positions(rows, group, positions)}

    def _step_metadata(
        self,
        idx_mapping: list[int],
        seq_lens: list[Any],
        layouts: list[dict[str, Any] | None],
        num_computed_tokens: list[int] | None = None,
        num_reqs_padded: int | None = None,
        **args: Any,
    ) -> Answer:
        answer = self._step(num_computed_tokens, idx_mapping=idx_mapping, **args)
        num_rows = len(idx_mapping) if num_reqs_padded is None else num_reqs_padded
        lists = lists_per_group(seq_lens, len(self.groups))
        sharing = [  # what groups that share an export have in common
            (layout, lens, shape.kernel_block_size, shape.is_shared, shape.width)
            for layout, lens, shape in zip(layouts, lists, self.oracle.shapes, strict=True)
        ]
        groups = []
        for group, (layout, lens, *_) in enumerate(sharing):
            members = [other for other in self.groups if sharing[other] == sharing[group]]
            wanted = layout_of(layout or {"kind": "lengths"})
            oracle = ExportOracle(self.oracle, self.config, wanted, members, idx_mapping, lens, num_computed_tokens)
            lengths = [oracle.length(request) for request in oracle.batch[:num_rows]]
            part = {"seq_lens": lengths if self.oracle.shapes[group].is_shared else lens}
            groups.append(part if layout is None else part | self._views(oracle, members.index(group), num_rows))
        return answer | {"groups": groups}

    @staticmethod
    def _views(oracle: ExportOracle, member: int, num_rows: int) -> Answer:
        """Return what one group of an export is given: `num_rows` batch rows, and all indices."""
        tokens = oracle.shape.kernel_block_size if oracle.layout.kind == "token_csr" else 1
        exported = oracle.run(capacity=len(oracle.batch) * oracle.shape.width * tokens)
        if exported.indptr is None:
            return {"entries": exported.entries[member][:num_rows]}
        return {
            "entries": exported.entries[member],
            "indptr": exported.indptr[: num_rows + 1],
            "last_page_lens": (exported.last_page_lens or [])[:num_rows],
            "lengths": (exported.lengths or [])[:num_rows],
        }


class TableAnswers:
    """Answers operations by a table under test."""

    def __init__(self, subject: Subject, config: BlockTableConfig) -> None:
        self.subject = subject
        self.table: BlockTable = subject.table(config)
        self.groups = range(len(config.groups))
        self._exports: dict[str, ExportBuffers] = {}

    def answer(self, call: str, args: dict[str, Any]) -> Answer:
        """Do one operation and return its answer."""
        special = getattr(self, f"_{call}", None)
        if special is not None:
            return dict(special(**args))
        try:
            getattr(self.table, call)(**args)
        except BlockTableError as error:
            return {"raises": type(error).__name__}
        return {}

    def _host(self, array: Any) -> Any:
        return self.subject.to_host(array).tolist()

    def _look(self) -> Answer:
        return {
            "host_tables": [self.table.host_table(group).tolist() for group in self.groups],
            "num_blocks_per_row": self.table.num_blocks_per_row.tolist(),
        }

    def _block_ids(self, row: int, group: int) -> Answer:
        return {"block_ids": self.table.block_ids(row, group).tolist()}

    def _common_blocks(self, rows: list[int], group: int) -> Answer:
        return {"common_blocks": self.table.common_blocks(rows, group)}

    def _kernel_block_ids(self, group: int, ids: list[int]) -> Answer:
        return {"kernel_block_ids": self.table.config.kernel_block_ids(group, ids).tolist()}

    def _commit(self) -> Answer:
        self.table.commit()
        return {"device_tables": [self._host(self.table.device_table(group)) for group in self.groups]}

    def _on_device(self, args: dict[str, Any]) -> dict[str, Any]:
        given = dict(args)
        for name in ("idx_mapping", "query_start_loc", "positions", "num_computed_tokens"):
            if given.get(name) is not None:
                given[name] = self.subject.device_array(given[name], "int64" if name == "positions" else "int32")
        return given

    def _slots(self, **args: Any) -> Answer:
        self.table.compute_slot_mappings(**self._on_device(args))
        mappings = [self._host(slots) for slots in self.table.buffers.slot_mappings]
        return {"slot_mappings": [mappings[group] for group in args.get("groups") or self.groups]}

    def _step(self, **args: Any) -> Answer:
        self.table.step(**self._on_device(args))
        return self._outputs()

    def _outputs(self) -> Answer:
        buffers = self.table.buffers
        return {
            "block_tables": [self._host(table) for table in buffers.block_tables],
            "slot_mappings": [self._host(slots) for slots in buffers.slot_mappings],
        }

    def _export(
        self,
        layout: dict[str, Any],
        groups: list[int],
        idx_mapping: list[int],
        capacity: int = 0,
        num_kernel_blocks: int = 0,
        max_batch: int | None = None,
        **lists: list[int],
    ) -> Answer:
        wanted, key = layout_of(layout), json.dumps([layout, groups, capacity, max_batch])
        if key not in self._exports:  # a layout keeps its arrays: what an earlier batch left there must not show
            self._exports[key] = self.table.create_export(
                wanted, groups, capacity=capacity or None, max_batch=max_batch
            )
        out = self._exports[key]
        arrays = {name: self.subject.device_array(values, "int32") for name, values in lists.items()}
        mapping = self.subject.device_array(np.array(idx_mapping, np.int32), "int32")
        try:
            self.table.export(wanted, mapping, groups=groups, out=out, **arrays)
        except ArgumentError as error:
            if type(mapping) is not np.ndarray:
                raise
            return {"raises": type(error).__name__}  # host arrays: entries would be cut (R27)
        found = {name: getattr(out, name) for name in EXPORTED}
        answers = {name: self._host(array) for name, array in found.items() if array is not None}
        num_cut = 0 if out.num_cut is None else self._host(out.num_cut)[0]
        return answers | ({"num_cut": num_cut} if num_cut else {})

    def _map_positions(self, rows: list[int], group: int, positions: list[list[int]]) -> Answer:
        array = self.subject.device_array
        slots = self.table.map_positions(array(rows, "int32"), group, array(np.array(positions), "int32"))
        return {"slots": self._host(slots)}

    def _step_metadata(self, seq_lens: list[Any], layouts: list[dict[str, Any] | None], **args: Any) -> Answer:
        arrays: dict[tuple[int, ...], Any] = {}  # of equal lists there is one
        for lens in lists_per_group(seq_lens, len(self.groups)):
            arrays.setdefault(tuple(lens), self.subject.device_array(lens, "int32"))
        lengths = [arrays[tuple(lens)] for lens in seq_lens] if len(arrays) > 1 else next(iter(arrays.values()))
        wanted = [None if layout is None else layout_of(layout) for layout in layouts]
        given = self._on_device(args)
        metadata = self.table.step_metadata(seq_lens=lengths, layouts=wanted, **given)
        found = []
        for group in metadata.groups:
            part = {"seq_lens": self._host(group.seq_lens)}
            if group.export is not None:
                values = {name: getattr(group.export, name) for name in EXPORTED} | {"entries": group.entries}
                part |= {name: self._host(array) for name, array in values.items() if array is not None}
            found.append(part)
        return self._outputs() | {"groups": found}


def completed(text: str) -> str:
    """Return a file of vectors with the oracle's answers, one line for each operation, so that a change shows as one.

    Args:
        text: of the file; `expect` of an operation may be missing.
    """
    content = json.loads(text)
    vectors = []
    for vector in content.pop("vectors"):
        operations = vector.pop("operations", None)
        head = json.dumps(vector)[:-1]
        if operations is None:
            vectors.append(f"{head}}}")
            continue
        answers = OracleAnswers(config_of(vector["config"]))
        lines = [each | {"expect": answers.answer(each["call"], each["args"])} for each in operations]
        body = ",\n".join(f" {json.dumps(line)}" for line in lines)
        vectors.append(f'{head}, "operations": [\n{body}\n]}}')
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    return f'{{\n{head},\n"vectors": [\n' + ",\n".join(vectors) + "\n]\n}\n"


if __name__ == "__main__":
    for path in FOLDER.glob("*.json"):
        path.write_text(completed(path.read_text(encoding="utf-8")), encoding="utf-8")
