# distutils: language=c++
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define blocktable_prefetch(address) __builtin_prefetch(address, 1)
    #else
    #define blocktable_prefetch(address) ((void)(address))
    #endif
    """
    void blocktable_prefetch(const void* address) noexcept nogil

cdef struct Range:
    int64_t offset
    int64_t length
    # What the one entry of an append holds; otherwise the mirror knows.
    int32_t value
    int32_t has_value


cdef struct Cell:
    # One row of one group that was appended to in this epoch: its count is noted, and this range ends where it ends.
    uint64_t epoch
    int64_t tail

cdef struct Late:
    # An entry that the mirror does not hold yet.
    int64_t entry
    int32_t value


cdef class CompiledJournal:
    cdef vector[Range] ranges
    cdef vector[Cell] cells
    cdef int64_t num_rows
    # Appends that the mirror does not show yet, in order, `late_per_call` entries each: one column of each row, group.
    cdef vector[Late] late
    cdef size_t num_late, late_per_call
    # Entries of the newest one, of these rows, that are changes without being among the ranges; their counts are.
    cdef size_t num_unnoted
    cdef vector[int64_t] unnoted_rows
    # Which ranges may be grown in place: those that were noted in this epoch.
    cdef uint64_t epoch
    cdef bint is_disjoint
    # The size at which the ranges are disjoint, ascending and do not touch.
    cdef size_t settled

    cdef int make_room(self, size_t more) except -1
    cdef void settle(self) noexcept
    cdef void note_late(self) noexcept
