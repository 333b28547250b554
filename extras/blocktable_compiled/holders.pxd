# distutils: language=c++
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

from blocktable_compiled.journal cimport CompiledJournal

cdef struct Block:
    # As `blocktable.checking.pools.BLOCK`.
    int64_t cells, squares, since, writers, handed
    int32_t counts, is_shared


cdef struct Held:
    # One group. `bits`: entry of the mirror with the first of `num_bits` bits of its pool; -1: none are told.
    int64_t start, width, expansion, null_id, has_slots, is_distinct, reach, bits, num_bits
    Block* blocks


cdef struct Clean:
    # Of one row of one group, the column that was last seen to be no other row's; at another `num_shares` it is unknown.
    int64_t column, num_shares


cdef struct Change:
    int64_t entry
    int32_t old, new


cdef struct Given:
    # What a row operation hands in: ids, group after group, row after row; where each group's end; blocks of each row
    # in each group, or in every one.
    const int64_t* rows
    int64_t num_rows
    const int64_t* ids
    const int64_t* ends
    const int64_t* counts
    bint has_own_counts


@cython.final  # its methods are called directly, and inlined
cdef class CompiledHolders:
    cdef int32_t[::1] arena, mirror
    cdef int64_t[::1] hand_ins, lives, marks, next_life
    cdef int64_t num_rows, num_cells, step_entry, told_lives
    cdef bint is_stale
    cdef CompiledJournal journal
    cdef vector[Held] groups
    cdef vector[Change] changes
    cdef vector[Clean] clean
    cdef int64_t num_shares  # how often a block was taken that had a holder
    cdef vector[int64_t] filled
    cdef uint8_t[::1] touched
    cdef int64_t[::1] has_touched
    cdef vector[int32_t] goes_on
    cdef uint64_t step_epoch
    cdef object kept

    cdef int _collect(self) except -1
    cdef void _make(self, int64_t step, bint is_undone) noexcept
    cdef size_t _group_of(self, int64_t entry, size_t guess) noexcept
    cdef void _tell_life(self, int64_t row) noexcept
    cdef void _tell_block(self, const Held* group, int64_t entry, int32_t value) noexcept
    cdef void _mark(self, int64_t entry) noexcept
    cdef bint are_free(self, const Given& given) noexcept
    cdef void _forget(self, const Given& given, int64_t number) noexcept
    cdef bint may_set(self, const Given& given) except -1
    cdef bint _are_distinct(self, const Given& given) noexcept
    cdef void have_set(self, const Given& given) noexcept
    cdef int before_truncate(self, const vector[int64_t]& rows) except -1
    cdef void have_truncated(self, const vector[int64_t]& rows) noexcept
    cdef void _begin(self, int64_t row) noexcept
    cdef void _unmark(self, int64_t row) noexcept
    cdef void _restart(self, int64_t row, int32_t cap) noexcept
    cdef int32_t _following(self, int32_t number) noexcept
