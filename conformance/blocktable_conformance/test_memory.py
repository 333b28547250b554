"""A table's memory is freed with the last reference to it; the garbage collector is not needed for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blocktable import BlockTable, ExportBuffers, KVCacheGroup, StepBuffers
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import small_config
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_exports import VARIANTS

ARRAY_MARKS = ("__array_interface__", "__cuda_array_interface__", "data_ptr")
"""What tells an array of numpy, of CUDA libraries, of torch."""

GROUP = KVCacheGroup(block_size=4, num_blocks=40)


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the garbage collector off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Traces:
    """Weak references to what a test used. What takes none, such as an object with slots, is left out."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, weakref.ref[Any]]] = []

    def note(self, name: str, value: Any) -> None:
        """Note an object."""
        try:
            self._noted.append((name, weakref.ref(value)))
        except TypeError:
            return

    def note_arrays(self, name: str, value: Any) -> None:
        """Note an array, and the arrays that it is a view of; or those of a sequence."""
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.note_arrays(f"{name}[{index}]", item)
        elif any(hasattr(value, mark) for mark in ARRAY_MARKS):
            self.note(name, value)
            for owner in ("base", "_base"):  # of numpy and CuPy; of torch
                self.note_arrays(f"{name}.{owner}", getattr(value, owner, None))

    def note_buffers(self, name: str, buffers: StepBuffers | ExportBuffers) -> None:
        """Note a set of buffers and its arrays, the backend's own among them."""
        self.note(name, buffers)
        for field, value in getattr(buffers, "__dict__", {}).items():
            self.note_arrays(f"{name}.{field}", value)

    def alive(self) -> list[str]:
        """Return the names of what is still there."""
        return [name for name, reference in self._noted if reference() is not None]


def use_and_drop(subject: Subject) -> Traces:
    """Use all of a table and drop it; return what was used.

    The table is over the backend itself: the watched store and mapper would go while the backend's own stay.
    """
    path: Any = subject.step_path
    table, traces = BlockTable(small_config(GROUP), subject.backend, step_path=path), Traces()
    mapping, starts, seq_lens = (subject.device_array(v, "int32") for v in ([1, 0], [0, 1, 2], [5, 4]))
    positions = subject.device_array([4, 3], "int64")
    buffers, own_slots = table.create_buffers(), [subject.device_array([0, 0], "int64")]
    table.warmup()
    table.append_row(0, [[7]])
    table.commit()
    table.append_row(1, [[3, 9]])
    for out in (None, buffers):
        table.step(mapping, starts, positions, out=out)
        table.gather(mapping, out=out)
        table.compute_slot_mappings(mapping, starts, positions, out=out)
    table.compute_slot_mappings(mapping, starts, positions, out=own_slots)
    if subject.declares("exports"):
        for layout in VARIANTS:
            created = table.create_export(layout)
            for target in (created, table.buffers):
                result = table.export(layout, mapping, seq_lens=seq_lens, out=target)
                for name in ("entries", "indptr", "last_page_lens", "lengths"):
                    traces.note_arrays(f"export({layout.kind!r}).{name}", getattr(result, name))
            traces.note_buffers(f"create_export({layout.kind!r})", created)
    table.invalidate()
    table.step(mapping, starts, positions)
    for name in ("store", "mapper"):
        traces.note(name, getattr(table, name))
    traces.note("the table", table)
    traces.note_buffers("buffers", table.buffers)
    traces.note_buffers("create_buffers()", buffers)
    traces.note_arrays("device_table(0)", table.device_table(0))
    subject.backend.synchronize()
    return traces


def test_a_dropped_table_is_freed_immediately(subject: Subject) -> None:
    """Store, mapper, buffers and exports are freed with the last reference to them, with the garbage collector off.

    The collector counts objects, not bytes of a device: it may run long after the next table found no memory.

    Rules: R24.
    """
    # The first use loads libraries. An exception that one of them has caught may refer to frames of that use.
    use_and_drop(subject)
    gc.collect()
    with without_collector():
        alive = use_and_drop(subject).alive()
    check(
        not alive,
        "R24",
        f"a dropped table left {', '.join(alive)} alive: they refer to each other in a circle, or something else "
        "refers to them. Of two objects only one may refer to the other.",
    )
