"""Running a recording again, on any backend, and checking every step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.btrace import OUTPUT_CALLS, Foreign, RecordingError
from blocktable_replay.checker import expected_step
from blocktable_replay.lane import Lane
from blocktable_replay.recorded import MAX_TABLE_ENTRIES, RecordedCall, Recording
from blocktable_replay.result import ReplayResult
from blocktable_replay.rowmodel import RowModel
from blocktable_replay.run import Run

MAX_SETS = 1024
"""Sets of buffers that a recording may make: an engine makes one for each size of a captured graph."""


class Player(Run):
    """Drives lanes through a recording.

    Args:
        recording: the file.
        lanes: the backends, with tables of the recording's configuration.
        checker: as `ReplayResult`.
    """

    def __init__(self, recording: Recording, lanes: Sequence[Lane], checker: Lane | None = None) -> None:
        self._recording = recording
        self._config = recording.config
        self._rows = RowModel(recording.config)
        self._calls: Counter[str] = Counter()
        self._num_steps = 0  # calls that put something out; one that was refused is none
        self._num_groups = len(recording.config.groups)
        self._num_sets = 1
        self._set_size = recording.config.max_num_batched_tokens * self._num_groups
        self._set_size += recording.config.max_num_reqs * sum(recording.config.arena.widths)
        self._num_foreign = 0
        self._num_digests = 0
        source = {"source": str(recording.path), "format": "recording", "backend": recording.header.get("backend")}
        self.result = ReplayResult(source, {}, recording.config, list(lanes), checker)

    def _steps(self) -> Iterator[tuple[int, int]]:
        for call in self._recording:
            self._play(call)
            yield self._num_steps, self._num_steps

    def _conclude(self) -> None:
        tear = self._recording.tear
        if tear is not None:
            self.result.notes.append(f"{self._recording.path}: the recording is torn ({tear}); it was run up to there.")
        if self._num_foreign:
            self.result.notes.append(
                f"{self._num_foreign} calls had arguments that a recording cannot hold; they were left out."
            )
        if self.result.checker is not None and self.result.checker.findings.count:
            self.result.notes.append(
                f"{self.result.checker.findings.count} calls raised a finding when they were recorded, and none here."
            )
        self.result.source |= {"is_torn": tear is not None, "digests": self._num_digests}
        self.result.counters = {"steps": self._num_steps, "tokens": sum(self.result.series.num_tokens)} | {
            name: self._calls[name] for name in sorted(self._calls)
        }

    # One call.

    def _play(self, call: RecordedCall) -> bool:
        """Do a call; return whether it has changed rows or put something out."""
        values = list(call.arguments.values())
        if _is_foreign(values):
            self._num_foreign += 1
            return False
        self._calls[call.name] += 1
        if not call.has_effect:
            self._expect_error(call)
        elif call.name in OUTPUT_CALLS:
            self._play_outputs(call)
        else:
            self._num_sets += call.name == "create_buffers"
            if self._num_sets > MAX_SETS or self._num_sets * self._set_size > MAX_TABLE_ENTRIES:
                raise self._no_sense(
                    call, f"more than {MAX_SETS} sets of buffers, or {MAX_TABLE_ENTRIES} entries in them"
                )
            for lane in self.result.driven:
                lane.operate(call.name, values)
            self._rows.apply(call.name, values)
            if call.name == "commit":
                self._rows.commit()
        return call.has_effect

    def _expect_error(self, call: RecordedCall) -> None:
        """A call that was refused must be refused again, by the same error; a finding by the checker alone."""
        is_finding, checker = call.raised == "CheckError", self.result.checker
        lanes = self.result.lanes if not is_finding else [] if checker is None else [checker]
        for lane in lanes:
            raised = lane.error_of(call.name, call.arguments)
            if raised != call.raised:
                sentence = f"{call.name} raised {call.raised} when it was recorded, here {raised or 'nothing'}"
                lane.findings.add(self._num_steps, 1, [sentence])

    def _no_sense(self, call: RecordedCall, reason: str) -> RecordingError:
        return RecordingError(f"{self._recording.path}: call {call.number}, {call.name}, makes no sense: {reason}.")

    def _check_outputs(self, call: RecordedCall) -> None:
        """Refuse what no recorded call that returned can have had."""
        groups, out = call.arguments.get("groups"), call.arguments["out"]
        numbers = range(self._num_groups) if groups is None else groups
        chosen = [numbers] if isinstance(numbers, int) else numbers
        try:
            are_groups = all(0 <= int(group) < self._num_groups for group in chosen)
        except TypeError:
            are_groups = False
        if not are_groups:
            raise self._no_sense(call, "groups are not the numbers of groups")
        if isinstance(out, int) and not 0 <= out < self._num_sets:
            raise self._no_sense(call, f"there is no set of buffers {out}")
        if not isinstance(out, int) and len(out) != len(chosen):
            raise self._no_sense(call, f"out has {len(out)} arrays for {len(chosen)} groups")

    def _play_outputs(self, call: RecordedCall) -> None:
        self._check_outputs(call)
        self._num_steps += 1
        arguments = call.arguments
        outputs = [lane.run(call.name, arguments) for lane in self.result.driven]  # which refuse what makes no sense
        if call.name == "step":
            self._rows.commit()
        rows, starts, positions = rows_of(arguments), arguments.get("query_start_loc"), arguments.get("positions")
        expected = None
        is_specified = starts is None or not (np.diff(starts) < 0).any()  # R15
        if self.result.lanes and is_specified:
            expected = expected_step(self._config, self._rows.committed, rows, call.name, arguments, rows, rows)
        for lane, found in zip(self.result.lanes, outputs, strict=False):
            if expected is not None:
                lane.compare(self._num_steps, expected, found)
            if not found.has_kept:
                sentence = "a slot buffer changed whose group the call does not name (R15)"
                lane.findings.add(self._num_steps, 1, [sentence])
            digest = lane.digest_outputs(found)
            if call.digest is not None and digest != call.digest:
                lane.findings.add(self._num_steps, 1, ["the outputs are not those that were recorded (digest)"])
        self._num_digests += call.digest is not None
        num_tokens = 0 if positions is None or starts is None else max(0, min(int(starts[-1]), positions.size))
        self._note(float(self._num_steps), rows.size, num_tokens, self._rows.holders())


def rows_of(arguments: Mapping[str, Any]) -> IntArray:
    """Return the row of each request of a call, [num_reqs] integers."""
    idx_mapping: IntArray | None = arguments["idx_mapping"]
    if idx_mapping is not None:
        return idx_mapping
    starts = arguments.get("query_start_loc")
    return np.arange((arguments["num_reqs"] or 0) if starts is None else starts.size - 1)


def _is_foreign(value: Any) -> bool:
    """Say whether an argument, or anything in it, could not be held."""
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return isinstance(value, Foreign)
