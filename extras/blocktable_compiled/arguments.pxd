# distutils: language=c++
cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

cdef struct Group:
    int64_t table_start
    int64_t width
    int64_t k  # columns of a block
    int64_t max_columns
    int64_t id_limit
    int64_t null_block_id
    int64_t allow_null
    int64_t filler
    # The range of the journal that the last filled count was noted in, and its epoch.
    uint64_t epoch
    int64_t counts


cdef class Arguments:
    cdef vector[Group] groups
    cdef int64_t num_groups, num_rows
    cdef vector[uint64_t] stamps
    cdef uint64_t stamp
    # Copies of a call's arguments: rows; for each group its blocks of each row, or one for all; ids, group after group.
    cdef vector[int64_t] rows, counts, ids, ends
    cdef bint has_own_counts

    cdef bint _are_ids_valid(self) noexcept
    cdef bint _take_int(self, value, vector[int64_t]& target) except -1
    cdef bint _take_ints(self, values, vector[int64_t]& target) except -1
    cdef bint _take_range(self, values, vector[int64_t]& target) except -1
    cdef bint _take_array(self, cnp.ndarray array, int64_t line, vector[int64_t]& target) except -1
    cdef bint _take_row(self, row) except -1
    cdef bint _take_rows(self, rows) except -1
    cdef bint _take_counts(self, counts) except -1
    cdef bint _take_own_counts(self) except -1
    cdef bint _take_ids(self, block_ids) except -1
