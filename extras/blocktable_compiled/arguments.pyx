# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""The arguments of a row operation: copied and checked before anything changes.

Ordinary are exact ints, and lists, tuples, ranges and arrays of any integer dtype and stride. A method returns False
where anything else is given.
"""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp.vector cimport vector

cnp.import_array()

# Of borrowed references: a list's items are read under its lock, and need no counting.
cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object list_or_tuple) noexcept
    bint PyLong_CheckExact(PyObject* value) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) noexcept

cdef enum:
    LONGEST = 1 << 20  # ints of a sequence that is copied here; numpy takes a longer one as fast

ctypedef fused Number:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t
    uint64_t


cdef void _copy(const Number* source, int64_t stride, int64_t n, int64_t* target) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        target[i] = <int64_t>(<const Number*>(<const char*>source + i * stride))[0]


cdef object _item(values, Py_ssize_t i):
    """Return an item of a list or tuple; where another thread has made it shorter, what no method takes."""
    with cython.critical_section(values):
        if i < len(values):
            return <object>PySequence_Fast_ITEMS(values)[i]
    return NotImplemented


cdef bint _to_int64(PyObject* value, int64_t* target) noexcept:
    """Write an int; False where it is none, or does not fit."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    target[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return overflow == 0


cdef bint _to_far_int(value, int64_t* target) noexcept:
    """As `_to_int64`; False too where the difference of two such ints would not fit."""
    return _to_int64(<PyObject*>value, target) and -(1LL << 62) < target[0] < 1LL << 62


cdef bint _is_plain(values) noexcept:
    """Whether it is a list or a tuple, and of no class of its own."""
    return type(values) is list or type(values) is tuple


cdef bint _is_nested(values):
    """Whether it is a list or a tuple whose first item is not an int."""
    if not _is_plain(values) or len(values) == 0:
        return False
    first = _item(values, 0)
    return not PyLong_CheckExact(<PyObject*>first)


cdef class Arguments:
    """What a call was given.

    Args:
        geometry: [num_groups, 8] int64: table_start, width, blocks_per_kv_block, max_columns, id_limit, null_block_id,
            allow_null, filler.
        num_rows: rows of the table.
    """

    def __cinit__(self, mirror, cnp.ndarray geometry not None, int64_t num_rows, journal):
        cdef int64_t g
        cdef int64_t* fields = <int64_t*>cnp.PyArray_DATA(geometry)
        self.num_groups, self.num_rows = cnp.PyArray_DIM(geometry, 0), num_rows
        for g in range(self.num_groups):
            self.groups.push_back(Group(
                fields[8 * g], fields[8 * g + 1], fields[8 * g + 2], fields[8 * g + 3], fields[8 * g + 4],
                fields[8 * g + 5], fields[8 * g + 6], fields[8 * g + 7], 0, 0
            ))
        self.stamps.resize(num_rows)
        self.ends.resize(self.num_groups)

    cdef bint _take_int(self, value, vector[int64_t]& target) except -1:
        cdef int64_t number = 0
        if not _to_int64(<PyObject*>value, &number):
            return False
        target.push_back(number)
        return True

    cdef bint _take_ints(self, values, vector[int64_t]& target) except -1:
        """Add a sequence's ints; False where it is not ordinary."""
        cdef size_t start = target.size()
        cdef Py_ssize_t n, i
        cdef PyObject** items
        if _is_plain(values):
            # Another thread of a free-threaded build waits here; elsewhere none can run in between.
            with cython.critical_section(values):
                n = len(values)
                if n > LONGEST:
                    return False
                target.resize(start + n)
                items = PySequence_Fast_ITEMS(values)
                for i in range(n):
                    if not _to_int64(items[i], &target[start + i]):
                        return False
            return True
        if type(values) is range:
            return self._take_range(values, target)
        if not (cnp.PyArray_CheckExact(values) and cnp.PyArray_NDIM(<cnp.ndarray>values) == 1):
            return False
        return self._take_array(values, 0, target)

    cdef bint _take_range(self, values, vector[int64_t]& target) except -1:
        """Add the ints of a range; False where its ends are so far out that a sum with them may overflow."""
        cdef int64_t first = 0, stop = 0, step = 0, n = 0, i
        cdef size_t start = target.size()
        if not (_to_far_int(values.start, &first) and _to_far_int(values.stop, &stop)):
            return False
        if not _to_far_int(values.step, &step):
            return False
        if step > 0 and stop > first:
            n = (stop - first - 1) // step + 1
        elif step < 0 and stop < first:
            n = (first - stop - 1) // -step + 1
        if n > LONGEST:
            return False
        target.resize(start + n)
        for i in range(n):
            target[start + i] = first + i * step
        return True

    cdef bint _take_array(self, cnp.ndarray array, int64_t line, vector[int64_t]& target) except -1:
        """Add the ints of one line along an array's last axis; False where they are of another dtype."""
        cdef int last = cnp.PyArray_NDIM(array) - 1
        cdef int64_t n = cnp.PyArray_DIM(array, last), stride = cnp.PyArray_STRIDE(array, last), i
        cdef size_t start = target.size()
        cdef char* data = <char*>cnp.PyArray_DATA(array)
        if not cnp.PyArray_ISINTEGER(array):
            return n == 0  # whatever holds no ints is nothing
        if n > LONGEST or not cnp.PyArray_ISBEHAVED_RO(array):
            return False
        if last:
            data += line * cnp.PyArray_STRIDE(array, 0)
        target.resize(start + n)
        cdef int64_t* found = target.data() + start
        cdef int size = cnp.PyArray_ITEMSIZE(array)
        if cnp.PyArray_ISSIGNED(array):
            if size == 8:
                _copy(<const int64_t*>data, stride, n, found)
            elif size == 4:
                _copy(<const int32_t*>data, stride, n, found)
            elif size == 2:
                _copy(<const int16_t*>data, stride, n, found)
            else:
                _copy(<const int8_t*>data, stride, n, found)
        elif size == 8:
            _copy(<const uint64_t*>data, stride, n, found)
            for i in range(n):
                if found[i] < 0:  # above 2**63
                    return False
        elif size == 4:
            _copy(<const uint32_t*>data, stride, n, found)
        elif size == 2:
            _copy(<const uint16_t*>data, stride, n, found)
        else:
            _copy(<const uint8_t*>data, stride, n, found)
        return True

    cdef bint _take_row(self, row) except -1:
        self.rows.clear()
        return self._take_int(row, self.rows) and 0 <= self.rows[0] < self.num_rows

    cdef bint _take_rows(self, rows) except -1:
        """Take distinct rows of the table."""
        cdef size_t i
        cdef int64_t row
        self.rows.clear()
        if not self._take_ints(rows, self.rows):
            return False
        self.stamp += 1
        for i in range(self.rows.size()):
            row = self.rows[i]
            if not 0 <= row < self.num_rows or self.stamps[row] == self.stamp:
                return False
            self.stamps[row] = self.stamp
        return True

    cdef bint _take_counts(self, counts) except -1:
        """Take one count for each row, or one for each row and group; none below 0."""
        cdef int64_t g, i
        self.counts.clear()
        self.has_own_counts = False
        if _is_nested(counts):
            if len(counts) != self.num_groups:
                return False
            self.has_own_counts = True
            for g in range(self.num_groups):
                if not self._take_ints(_item(counts, g), self.counts):
                    return False
                if self.counts.size() != (g + 1) * self.rows.size():
                    return False
        elif cnp.PyArray_CheckExact(counts) and cnp.PyArray_NDIM(<cnp.ndarray>counts) == 2:
            if cnp.PyArray_DIM(<cnp.ndarray>counts, 0) != self.num_groups:
                return False
            self.has_own_counts = True
            for g in range(self.num_groups):
                if not self._take_array(counts, g, self.counts):
                    return False
        elif not self._take_ints(counts, self.counts):
            return False
        if self.counts.size() != self.rows.size() * (self.num_groups if self.has_own_counts else 1):
            return False
        for i in range(<int64_t>self.counts.size()):
            if self.counts[i] < 0:
                return False
        return True

    cdef bint _take_own_counts(self) except -1:
        """Take for the one row's count how many ids each group has."""
        cdef int64_t g
        self.counts.clear()
        self.has_own_counts = True
        for g in range(self.num_groups):
            self.counts.push_back(self.ends[g] - (self.ends[g - 1] if g else 0))
        return True

    cdef bint _take_ids(self, block_ids) except -1:
        """Take the ids of every group; `ends` says where each group's end."""
        cdef int64_t g
        self.ids.clear()
        if block_ids is None or (_is_plain(block_ids) and len(block_ids) == 0):
            self.ends.assign(self.num_groups, 0)
            return True
        if _is_nested(block_ids):
            if len(block_ids) != self.num_groups:
                return False
            for g in range(self.num_groups):
                line = _item(block_ids, g)
                if line is not None and not self._take_ints(line, self.ids):
                    return False
                self.ends[g] = self.ids.size()
        elif cnp.PyArray_CheckExact(block_ids) and cnp.PyArray_NDIM(block_ids) == 2:
            if cnp.PyArray_DIM(block_ids, 0) != self.num_groups:
                return False
            for g in range(self.num_groups):
                if not self._take_array(block_ids, g, self.ids):
                    return False
                self.ends[g] = self.ids.size()
        else:
            if self.num_groups != 1 or not self._take_ints(block_ids, self.ids):
                return False
            self.ends[0] = self.ids.size()
        return self._are_ids_valid()

    cdef bint _are_ids_valid(self) noexcept:
        cdef const int64_t* ids = self.ids.data()
        cdef int64_t g, i, start = 0, null
        cdef uint64_t limit
        cdef bint is_null, is_allowed, is_wrong = False
        for g in range(self.num_groups):
            null, limit, is_allowed = self.groups[g].null_block_id, self.groups[g].id_limit, self.groups[g].allow_null
            for i in range(start, self.ends[g]):  # without a branch: several at a time
                is_null = ids[i] == null
                is_wrong |= (is_null & (not is_allowed)) | ((not is_null) & (<uint64_t>ids[i] >= limit))
            start = self.ends[g]
        return not is_wrong
