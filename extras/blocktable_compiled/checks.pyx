# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""The tokens of a call that are as they should be, seen in one pass: what the host checker need not look at."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp.vector cimport vector

from blocktable_compiled.holders cimport Block, Clean, CompiledHolders, Held

cnp.import_array()

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define blocktable_prefetch_read(address) __builtin_prefetch(address, 0)
    #else
    #define blocktable_prefetch_read(address) ((void)(address))
    #endif
    """
    void blocktable_prefetch_read(const void* address) noexcept nogil

cdef int64_t UNMARKED = (1ULL << 63) - 1
cdef int64_t LAST_POSITION = 1LL << 62


cdef struct Group:
    int64_t start, width, tokens, expansion, is_ring, null_id, world, rank, interleave, is_lenient
    int64_t shift  # position >> shift is its column; -1: it takes more than that
    const int32_t* filled
    Clean* clean
    Block* blocks


cdef struct Written:
    # The tokens of one request, in positions first .. last.
    int64_t row, first, last


cdef int64_t local_length(const Group& group, int64_t length) noexcept nogil:
    cdef int64_t turn = group.world * group.interleave
    cdef int64_t rest = length % turn - group.rank * group.interleave
    return length // turn * group.interleave + min(max(rest, 0), group.interleave)


@cython.final
cdef class TokenCheck:
    """Says of a call that nothing can be wrong with its tokens, and then notes what they write.

    Args:
        holders: the rows as of the last commit, and who holds what.
        fields: [num_groups, 7] int64. Of the groups with slots: group, tokens of a column, whether it is a ring, world,
            rank, interleave size, whether who wrote last counts.
        marks, lives: [num_rows] int64.
    """

    cdef CompiledHolders holders
    cdef int64_t[::1] marks
    cdef const int64_t[::1] lives
    cdef vector[int64_t] stamps
    cdef int64_t num_rows, call
    cdef bint has_lenient
    cdef vector[Group] groups
    cdef vector[Written] written  # by the call, with room for each row
    cdef vector[int64_t] found  # of each of them, a place in the arena, then a block

    def __init__(self, CompiledHolders holders not None, const int64_t[:, ::1] fields not None, int64_t[::1] marks,
                 const int64_t[::1] lives):
        cdef Held held
        cdef Py_ssize_t i
        cdef int64_t tokens, shift
        self.holders, self.marks, self.lives, self.num_rows = holders, marks, lives, holders.num_rows
        self.stamps.resize(self.num_rows)
        self.written.resize(self.num_rows)
        self.found.resize(self.num_rows)
        for i in range(fields.shape[0]):
            held = holders.groups[fields[i, 0]]
            tokens, shift = fields[i, 1], -1
            if not tokens & (tokens - 1) and not fields[i, 2] and fields[i, 3] == 1:
                shift = tokens.bit_length() - 1
            self.groups.push_back(Group(
                held.start, held.width, tokens, held.expansion, fields[i, 2], held.null_id, fields[i, 3], fields[i, 4],
                fields[i, 5], fields[i, 6], shift, &holders.arena[fields[i, 0] * self.num_rows],
                &holders.clean[fields[i, 0] * self.num_rows], held.blocks,
            ))
            self.has_lenient |= fields[i, 6] != 0

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
        cdef int64_t num_reqs = starts.shape[0] - 1, end = starts[starts.shape[0] - 1], n
        cdef size_t g
        if starts[0] != 0 or end > positions.shape[0] or (is_exact and end != positions.shape[0]):
            return False
        if 0 <= padded < end:
            return False
        if mapping is not None and num_reqs:
            rows = mapping
            row_of = &rows[0]
        n = self._requests(row_of, num_reqs, &starts[0], positions)
        if n < 0:
            return False
        for g in range(self.groups.size()):
            if not self._group(self.groups[g], n):
                return False
        self._note(n)
        return True

    cdef int64_t _requests(self, const int32_t* row_of, int64_t num_reqs, const int32_t* starts,
                           const int64_t[::1] positions) noexcept nogil:
        """Find what each request writes; return how many do; -1: something may be wrong. starts: [num_reqs + 1]."""
        cdef int64_t i, t, begin, end, row, first, n = 0
        self.call += 1
        for i in range(num_reqs):
            begin, end = starts[i], starts[i + 1]
            if begin < 0 or end < begin or end > positions.shape[0]:
                return -1
            if end == begin:
                continue
            row = row_of[i] if row_of != NULL else i
            if row == -1:
                continue
            if row < 0 or row >= self.num_rows or self.stamps[row] == self.call:
                return -1
            self.stamps[row] = self.call
            first = positions[begin]
            if first < 0 or first > LAST_POSITION or first > self.marks[row]:
                return -1
            for t in range(begin + 1, end):
                if positions[t] != first + t - begin:
                    return -1
            self.written[n] = Written(row, first, first + end - begin - 1)
            n += 1
        return n

    cdef bint _group(self, const Group& group, int64_t n) noexcept nogil:
        """Look at the blocks that the requests write in one group; memory is asked for before it is read."""
        cdef int64_t i, first, last, row, block, num_shares = self.holders.num_shares
        cdef int32_t entry
        cdef const Clean* clean
        cdef const int32_t* arena = &self.holders.arena[0]
        for i in range(n):
            row, first, last = self.written[i].row, self.written[i].first, self.written[i].last
            if group.shift >= 0:
                first, last = first >> group.shift, last >> group.shift
                if last >= group.filled[row]:
                    return False
                clean = group.clean + row
                if first == last == clean.column and clean.num_shares == num_shares:
                    self.found[i] = -1
                    continue
                if first == last:
                    self.found[i] = group.start + row * group.width + first
                    blocktable_prefetch_read(arena + self.found[i])
                    continue
                first, last = self.written[i].first, self.written[i].last
            self.found[i] = -1
            if not self._columns(group, row, first, last, 0):
                return False
        for i in range(n):
            if self.found[i] >= 0:
                entry = arena[self.found[i]]
                if entry < 0:
                    return False
                block = entry  # not below 0
                if group.expansion > 1:
                    block = <uint32_t>entry // <uint32_t>group.expansion
                if block == group.null_id:
                    return False
                self.found[i] = block
                blocktable_prefetch_read(group.blocks + block)
        for i in range(n):
            if self.found[i] >= 0:
                if group.blocks[self.found[i]].counts != 1:
                    return False
                group.clean[self.written[i].row] = Clean(self.written[i].first >> group.shift, num_shares)
        return True

    cdef void _note(self, int64_t n) noexcept nogil:
        cdef int64_t i, row, mark
        cdef size_t g
        for i in range(n):
            row = self.written[i].row
            mark = self.marks[row]
            self.marks[row] = self.written[i].last + 1 if mark == UNMARKED else max(mark, self.written[i].last + 1)
            if self.has_lenient:
                for g in range(self.groups.size()):
                    if self.groups[g].is_lenient:
                        self._columns(
                            self.groups[g], row, self.written[i].first, self.written[i].last, self.lives[row]
                        )

    cdef bint _columns(self, const Group& group, int64_t row, int64_t first, int64_t last,
                       int64_t life) noexcept nogil:
        """Go through the columns that positions first .. last of a row write: look, or with a life note it."""
        cdef int64_t held = group.filled[row], place, entry, block, begin, end, column
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
            entry = self.holders.arena[place + (column % held if group.is_ring else column)]
            if entry < 0:
                return False
            block = <uint32_t>entry // <uint32_t>group.expansion
            if life:
                group.blocks[block].writers = life
            elif block == group.null_id or group.blocks[block].counts != 1:
                return False
        return True
