# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""What of a table's rows has changed since the last commit."""

cimport numpy as cnp
from libc.stdint cimport int64_t
from libcpp.algorithm cimport sort

import numpy as np

cnp.import_array()


cdef bint _is_before(const Range& first, const Range& second) noexcept nogil:
    return first.offset < second.offset


cdef class CompiledJournal:
    """Dirty ranges of the arena, as `blocktable.rows.Journal`.

    Rows that were appended to since the last commit make ranges that no other one overlaps: they need no sorting.

    Attributes:
        size: ranges.
    """

    def __cinit__(self, size_t capacity):
        self.ranges.reserve(capacity)
        self.epoch = 1
        self.is_disjoint = True

    @property
    def size(self):
        return self.ranges.size()

    def clear(self):
        """Forget everything: it is on the device."""
        self.ranges.clear()
        self.num_unnoted = 0
        self.epoch += 1
        self.is_disjoint = True
        self.settled = 0

    def mark(self, offsets, lengths):
        """Add ranges: offsets of any shape, and lengths of the same; of length 0 too."""
        cdef cnp.ndarray first = np.ascontiguousarray(offsets, np.int64)
        cdef cnp.ndarray size = np.ascontiguousarray(lengths, np.int64)
        cdef int64_t n = cnp.PyArray_SIZE(first), i
        if cnp.PyArray_SIZE(size) != n:
            raise ValueError("offsets and lengths must be of one shape")
        cdef int64_t* offset = <int64_t*>cnp.PyArray_DATA(first)
        cdef int64_t* length = <int64_t*>cnp.PyArray_DATA(size)
        self.note_late()
        self.make_room(n)
        for i in range(n):
            if length[i]:
                self.ranges.push_back(Range(offset[i], length[i], 0, False))
                self.is_disjoint = False

    def merge(self):
        """Return what is dirty as disjoint ascending ranges, [n] int64 each, and keep it in that form."""
        self.settle()
        cdef int64_t n = self.ranges.size(), i
        offsets, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
        cdef int64_t* offset = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>offsets)
        cdef int64_t* length = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>lengths)
        for i in range(n):
            offset[i], length[i] = self.ranges[i].offset, self.ranges[i].length
        return offsets, lengths

    cdef int make_room(self, size_t more) except -1:
        """Merge what is there before it grows: a caller that never commits must not fill the memory."""
        if self.ranges.size() + more > self.ranges.capacity():
            self.settle()
            self.ranges.reserve(2 * (self.ranges.size() + more))  # half of it free: the next merge is far away
        return 0

    cdef void note_late(self) noexcept:
        """Put the newest late append among the ranges, where `make_room` has made room for it."""
        cdef const Late* late = self.late.data() + self.num_late - self.num_unnoted
        cdef size_t i, n = self.unnoted_rows.size()
        for i in range(self.num_unnoted):
            self.cells[(i // n) * self.num_rows + self.unnoted_rows[i % n]] = Cell(self.epoch, self.ranges.size())
            self.ranges.push_back(Range(late[i].entry, 1, late[i].value, True))
        self.num_unnoted = 0

    cdef void settle(self) noexcept:
        self.note_late()
        cdef size_t size = self.ranges.size(), i, last = 0
        cdef bint is_ascending = True
        cdef Range* ranges = self.ranges.data()
        cdef int64_t end
        if self.settled == size:
            return
        for i in range(1, size):
            if ranges[i].offset < ranges[i - 1].offset:
                is_ascending = False
                break
        if not is_ascending:
            sort(self.ranges.begin(), self.ranges.end(), &_is_before)
        for i in range(1, size):
            end = ranges[i].offset + ranges[i].length
            if ranges[i].offset <= ranges[last].offset + ranges[last].length:
                ranges[last].length = max(ranges[last].length, end - ranges[last].offset)
                ranges[last].has_value = False
            else:
                last += 1
                ranges[last] = ranges[i]
        self.ranges.resize(last + 1)
        self.settled = last + 1
        self.epoch += 1
        self.is_disjoint = False  # a count or a row that is noted again may overlap
