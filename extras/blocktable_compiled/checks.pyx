# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""The tokens of a call that are as they should be, seen in one pass: what the host checker need not look at."""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp.vector cimport vector

import numpy as np

cdef int64_t UNMARKED = (1ULL << 63) - 1
cdef int64_t LAST_POSITION = 1LL << 62


cdef struct Group:
    int64_t start, width, tokens, expansion, is_ring, null_id, world, rank, interleave, is_lenient
    const int32_t* counts
    int64_t* writers


cdef int64_t local_length(const Group& group, int64_t length) noexcept nogil:
    cdef int64_t turn = group.world * group.interleave
    cdef int64_t rest = length % turn - group.rank * group.interleave
    return length // turn * group.interleave + min(max(rest, 0), group.interleave)


cdef class TokenCheck:
    """Says of a call that nothing can be wrong with its tokens, and then notes what they write.

    Args:
        arena: [arena.size] int32. The rows as of the last commit.
        num_rows: of the table.
        fields: [num_groups, 11] int64. Of the groups with slots: group, start and width of the table, tokens of a
            column, columns of a block, whether it is a ring, null block, world, rank, interleave size, whether who
            wrote last counts.
        pools: for each of them (counts [blocks] int32, writers [blocks] int64), by block id.
        marks, lives: [num_rows] int64.
    """

    cdef const int32_t[::1] arena
    cdef int64_t[::1] marks
    cdef const int64_t[::1] lives
    cdef int64_t[::1] stamps
    cdef int64_t num_rows, call
    cdef bint has_lenient
    cdef vector[Group] groups
    cdef vector[int64_t] filled  # where each group's counts begin
    cdef list kept

    def __init__(self, const int32_t[::1] arena, int64_t num_rows, const int64_t[:, ::1] fields, list pools,
                 int64_t[::1] marks, const int64_t[::1] lives):
        cdef Group group
        cdef const int32_t[::1] counts
        cdef int64_t[::1] writers
        cdef Py_ssize_t i
        self.arena, self.marks, self.lives, self.num_rows = arena, marks, lives, num_rows
        self.stamps = np.zeros(num_rows, np.int64)
        self.kept = list(pools)  # their memory is pointed to
        for i in range(fields.shape[0]):
            counts, writers = pools[i]
            group = Group(
                fields[i, 1], fields[i, 2], fields[i, 3], fields[i, 4], fields[i, 5], fields[i, 6], fields[i, 7],
                fields[i, 8], fields[i, 9], fields[i, 10], &counts[0], &writers[0],
            )
            self.groups.push_back(group)
            self.filled.push_back(fields[i, 0] * num_rows)
            self.has_lenient |= group.is_lenient != 0

    def is_clean(self, mapping, const int32_t[::1] starts, const int64_t[::1] positions, int64_t padded, bint is_exact):
        """Return whether all is right; False: it may be, and nothing was noted.

        Args:
            mapping: [num_reqs] int32, or None.
            starts: [num_reqs + 1] int32.
            positions: [n] int64.
            padded: num_tokens_padded; -1: none was asked for.
            is_exact: whether positions end where starts do.
        """
        cdef const int32_t[::1] rows
        cdef const int32_t* row_of = NULL
        cdef int64_t num_reqs = starts.shape[0] - 1, end = starts[starts.shape[0] - 1]
        if starts[0] != 0 or end > positions.shape[0] or (is_exact and end != positions.shape[0]):
            return False
        if 0 <= padded < end:
            return False
        if mapping is not None and num_reqs:
            rows = mapping
            row_of = &rows[0]
        self.call += 1
        if not self._look(row_of, num_reqs, starts, positions):
            return False
        self._note(row_of, num_reqs, starts, positions)
        return True

    cdef bint _look(self, const int32_t* row_of, int64_t num_reqs, const int32_t[::1] starts,
                    const int64_t[::1] positions) noexcept nogil:
        cdef int64_t i, t, begin, end, row, first
        cdef size_t g
        for i in range(num_reqs):
            begin, end = starts[i], starts[i + 1]
            if end <= begin:
                if end < begin:
                    return False
                continue
            row = row_of[i] if row_of != NULL else i
            if row == -1:
                continue
            if row < 0 or row >= self.num_rows or self.stamps[row] == self.call:
                return False
            self.stamps[row] = self.call
            first = positions[begin]
            if first < 0 or first > LAST_POSITION or first > self.marks[row]:
                return False
            for t in range(begin + 1, end):
                if positions[t] != first + t - begin:
                    return False
            for g in range(self.groups.size()):
                if not self._columns(self.groups[g], self.filled[g] + row, row, first, first + end - begin - 1, 0):
                    return False
        return True

    cdef void _note(self, const int32_t* row_of, int64_t num_reqs, const int32_t[::1] starts,
                    const int64_t[::1] positions) noexcept nogil:
        cdef int64_t i, begin, end, row, first, last, mark
        cdef size_t g
        for i in range(num_reqs):
            begin, end = starts[i], starts[i + 1]
            row = row_of[i] if row_of != NULL else i
            if end == begin or row == -1:
                continue
            first, last = positions[begin], positions[end - 1]
            mark = self.marks[row]
            self.marks[row] = last + 1 if mark == UNMARKED else max(mark, last + 1)
            if self.has_lenient:
                for g in range(self.groups.size()):
                    if self.groups[g].is_lenient:
                        self._columns(self.groups[g], self.filled[g] + row, row, first, last, self.lives[row])

    cdef bint _columns(self, const Group& group, int64_t cell, int64_t row, int64_t first, int64_t last,
                       int64_t life) noexcept nogil:
        """Go through the columns that positions first .. last of a row write: look, or with a life note it."""
        cdef int64_t held = self.arena[cell], place, entry, block, begin, end, column
        if group.is_ring:
            if held == 0:
                return False
            begin, end = max(first, last - held * group.tokens + 1) // group.tokens, last // group.tokens
        else:
            if group.world > 1:
                first, last = local_length(group, first), local_length(group, last + 1) - 1
                if last < first:
                    return True
            begin, end = first // group.tokens, last // group.tokens
            if end >= held:
                return False
        place = group.start + row * group.width
        for column in range(begin, end + 1):
            entry = self.arena[place + (column % held if group.is_ring else column)]
            if entry < 0:
                return False
            block = <uint32_t>entry // <uint32_t>group.expansion
            if life:
                group.writers[block] = life
            elif block == group.null_id or group.counts[block] != 1:
                return False
        return True
