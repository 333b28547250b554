# distutils: language=c++
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

cdef struct Range:
    int64_t offset
    int64_t length
    # What the one entry of an append holds; otherwise the mirror knows.
    int32_t value
    int32_t has_value


cdef class CompiledJournal:
    cdef vector[Range] ranges
    # Which ranges may be grown in place: those that were noted in this epoch.
    cdef uint64_t epoch
    cdef bint is_disjoint
    # The size at which the ranges are disjoint, ascending and do not touch.
    cdef size_t settled

    cdef int make_room(self, size_t more) except -1
    cdef void settle(self) noexcept
