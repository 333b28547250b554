"""Running a recording again, on any backend, and checking every step of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import IntArray
from blocktable_replay.btrace import Foreign, Frame, Recording
from blocktable_replay.checker import BatchNames, ExpectedStep, expected_block_table, expected_slots
from blocktable_replay.lane import Inputs, Lane, Target
from blocktable_replay.progress import Progress
from blocktable_replay.result import Findings, ReplayResult, Series
from blocktable_replay.rowmodel import RowModel

OUTPUT_CALLS = ("gather", "compute_slot_mappings", "step")


@dataclass(frozen=True, slots=True)
class Call:
    """A call, with what the frames behind it say of its end.

    Attributes:
        name: of the method.
        values: its arguments, as the format lists them.
        raised: name of the exception it ended with. None: it returned.
        digest: of what it put out. None: not recorded.
    """

    name: str
    values: tuple[Any, ...]
    raised: str | None = None
    digest: bytes | None = None


def calls_of(frames: Iterator[Frame]) -> Iterator[Call]:
    """Join each call with the frames that say how it ended."""
    waiting: Frame | None = None
    ends: dict[str, Any] = {}
    for frame in frames:
        if frame.name == "raised":
            ends["raised"] = frame.values[0].decode(errors="replace")
        elif frame.name == "digest":
            ends["digest"] = frame.values[0]
        else:
            if waiting is not None:
                yield Call(waiting.name, waiting.values, **ends)
            waiting, ends = frame, {}
    if waiting is not None:
        yield Call(waiting.name, waiting.values, **ends)


class Player:
    """Drives lanes through a recording.

    Args:
        recording: the file.
        lanes: the backends, with tables of the recording's configuration.
    """

    def __init__(self, recording: Recording, lanes: Sequence[Lane]) -> None:
        self._recording = recording
        self._config = config = recording.config
        self._rows = RowModel(config)
        self._widths = [config.width(group) for group in range(len(config.groups))]
        self._calls: Counter[str] = Counter()
        self._num_steps = 0  # calls that put something out; one that was refused is none
        self._num_foreign = 0
        self._num_digests = 0
        self.result: ReplayResult = ReplayResult(
            source={"source": str(recording.path), "format": "recording", "backend": recording.head.get("backend")},
            options={},
            config=config,
            series=Series(),
            lanes=list(lanes),
            broken=Findings(),
        )

    def run(self, progress: Progress, max_steps: int | None = None) -> ReplayResult:
        """Run to the end, to the tear, to `max_steps`, or until the user interrupts."""
        begin = time.perf_counter()
        try:
            for call in calls_of(self._recording.frames()):
                self._play(call)
                progress.update(self._num_steps, self._num_steps, self.result.num_mismatches)
                if max_steps is not None and self._num_steps >= max_steps:
                    self.result.is_whole = False
                    break
        except KeyboardInterrupt:
            self.result.is_whole, self.result.was_interrupted = False, True
        self.result.wall_s = time.perf_counter() - begin
        self._count()
        return self.result

    def _count(self) -> None:
        tear = self._recording.tear
        if tear is not None:
            self.result.notes.append(f"{self._recording.path}: the recording is torn ({tear}); it was run up to there.")
        if self._num_foreign:
            self.result.notes.append(
                f"{self._num_foreign} calls had arguments that a recording cannot hold; they were left out."
            )
        self.result.source |= {"is_torn": tear is not None, "digests": self._num_digests}
        self.result.counters = {"steps": self._num_steps, "tokens": sum(self.result.series.num_tokens)} | {
            name: self._calls[name] for name in sorted(self._calls)
        }

    # One call.

    def _play(self, call: Call) -> None:
        self._calls[call.name] += 1
        if _is_foreign(call.values):
            self._num_foreign += 1
            self._calls[call.name] -= 1
        elif call.raised is not None:
            self._expect_error(call)
        elif call.name in OUTPUT_CALLS:
            self._play_outputs(call)
        else:
            for lane in self.result.lanes:
                lane.operate(call.name, call.values)
            self._rows.apply(call.name, call.values)
            if call.name == "commit":
                self._rows.commit()

    def _expect_error(self, call: Call) -> None:
        """A call that was refused must be refused again, by the same error."""
        for lane in self.result.lanes:
            target = _target(call) if call.name in OUTPUT_CALLS else None
            raised = lane.error_of(call.name, call.values, target)
            if raised != call.raised:
                sentence = f"{call.name} raised {call.raised} when it was recorded, here {raised or 'nothing'}"
                lane.findings.add(self._num_steps, 1, [sentence])

    def _play_outputs(self, call: Call) -> None:
        self._num_steps += 1
        if call.name == "step":
            self._rows.commit()
        target = _target(call)
        expected, names = self._expect(target)
        for lane in self.result.lanes:
            outputs = lane.run(call.name, target)
            if expected is not None:
                lane.compare(self._num_steps, expected, names, outputs)
            if not outputs.has_kept:
                lane.findings.add(
                    self._num_steps, 1, ["a slot buffer changed whose group the call does not name (R15)"]
                )
            digest = lane.digest_outputs(outputs)
            if call.digest is not None and digest != call.digest:
                lane.findings.add(self._num_steps, 1, ["the outputs are not those that were recorded (digest)"])
        self._num_digests += call.digest is not None
        self._note(target)

    def _expect(self, target: Target) -> tuple[ExpectedStep | None, BatchNames]:
        """Return what the call must give; None where the contract leaves it open."""
        inputs, rows, record = target.inputs, self._identity_or(target), self._rows.committed
        names = BatchNames(rows.astype(np.int64), rows.astype(np.int64))
        starts = np.zeros(1, np.int32) if inputs.query_start_loc is None else inputs.query_start_loc
        positions = np.empty(0, np.int64) if inputs.positions is None else inputs.positions
        if (np.diff(starts) < 0).any():  # unspecified slots (R15)
            return None, names
        groups = range(len(self._config.groups)) if target.has_tables else ()
        padded = rows.size if target.num_reqs_padded is None else target.num_reqs_padded
        tables = tuple(
            expected_block_table(
                self._config, group, record.blocks[group], record.counts[group], rows, inputs.num_computed_tokens
            )
            for group in groups
        )
        is_named = target.groups is not None
        slots = {
            group: expected_slots(
                *(self._config, group, record.blocks[group], record.counts[group], rows, starts, positions, size),
                is_named=is_named,
            )
            for group, size in target.slot_sizes(self._config).items()
        }
        fillers = tuple(self._config.groups[group].filler for group in groups)
        shapes = tuple((padded, self._widths[group]) for group in groups)
        return ExpectedStep(tables, shapes, fillers, slots, starts, positions), names

    def _identity_or(self, target: Target) -> IntArray:
        inputs = target.inputs
        if inputs.idx_mapping is not None:
            return inputs.idx_mapping
        if inputs.query_start_loc is not None:
            return np.arange(inputs.query_start_loc.size - 1)
        return np.arange(target.num_reqs or 0)

    def _note(self, target: Target) -> None:
        series, inputs = self.result.series, target.inputs
        num_reqs = self._identity_or(target).size
        series.clock_s.append(float(self._num_steps))
        series.num_reqs.append(num_reqs)
        last = 0 if inputs.query_start_loc is None else int(inputs.query_start_loc[-1])
        series.num_tokens.append(0 if inputs.positions is None else max(0, min(last, inputs.positions.size)))
        holders = self._rows.holders()
        series.blocks_used.append(sum(int(np.count_nonzero(counts)) for counts in holders))
        series.blocks_shared.append(sum(int(np.count_nonzero(counts > 1)) for counts in holders))
        series.full_copy_bytes.append(num_reqs * sum(self._widths) * 4)


def _is_foreign(value: Any) -> bool:
    """Say whether an argument, or anything in it, could not be held."""
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return isinstance(value, Foreign)


def _target(call: Call) -> Target:
    """Read a call's arguments in the order in which the format lists them."""
    values = call.values
    if call.name == "gather":
        idx_mapping, num_reqs_padded, num_reqs, computed, out = values
        return Target(Inputs(idx_mapping, None, None, computed), num_reqs_padded, None, out, True, False, num_reqs)
    if call.name == "compute_slot_mappings":
        idx_mapping, starts, positions, num_tokens_padded, groups, out = values
        sizes = out.tolist() if isinstance(out, np.ndarray) else out
        inputs = Inputs(idx_mapping, starts, positions, None)
        return Target(inputs, None, num_tokens_padded, sizes, has_tables=False, groups=groups)
    idx_mapping, starts, positions, num_reqs_padded, num_tokens_padded, computed, out = values
    inputs = Inputs(idx_mapping, starts, positions, computed)
    return Target(inputs, num_reqs_padded, num_tokens_padded, out, True, True)
