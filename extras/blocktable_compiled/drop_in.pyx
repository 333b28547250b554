# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""An append for tables of a drop-in, which has rows of its own."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

cnp.import_array()

cdef struct Place:
    int64_t row
    int64_t index


cdef bint _is_before(const Place& first, const Place& second) noexcept nogil:
    return first.row < second.row


def append_to_all_groups(
    cnp.ndarray rows not None,
    cnp.ndarray counts not None,
    cnp.ndarray ids not None,
    cnp.ndarray tables not None,
    int64_t num_rows,
    cnp.ndarray mirror not None,
    cnp.ndarray offsets not None,
    cnp.ndarray lengths not None,
):
    """Add blocks to rows of all groups, for the tables of a drop-in, which has checked that there is room.

    The new ranges are disjoint and ascending. All arrays are contiguous.

    Args:
        rows: [n] int64. Distinct rows of the table.
        counts: [n] int64. Blocks of each row, in every group; at least 1.
        ids: [sum(counts) * num_groups] int32. Row after row, in it group after group; any int32.
        tables: [num_groups, 3] int64: table_start, width, blocks_per_kv_block.
        num_rows: rows of the table.
        mirror: [arena.size] int32, written; its entries may be any int32.
        offsets: [>= 2 * n * num_groups] int64, written. First entry of each range that has changed.
        lengths: the same.

    Returns:
        How many ranges there are.
    """
    cdef int64_t n = cnp.PyArray_SIZE(rows), num_groups = cnp.PyArray_DIM(tables, 0), g, i, j, part
    cdef int64_t size = 0, next_range = n * num_groups
    cdef int64_t* row_of = <int64_t*>cnp.PyArray_DATA(rows)
    cdef int64_t* count_of = <int64_t*>cnp.PyArray_DATA(counts)
    cdef int32_t* id_of = <int32_t*>cnp.PyArray_DATA(ids)
    cdef int64_t* table = <int64_t*>cnp.PyArray_DATA(tables)
    cdef int32_t* entries = <int32_t*>cnp.PyArray_DATA(mirror)
    cdef int64_t* offset = <int64_t*>cnp.PyArray_DATA(offsets)
    cdef int64_t* length = <int64_t*>cnp.PyArray_DATA(lengths)
    cdef int64_t row, count, cell, entry, k, first_id
    cdef vector[Place] order  # rows ascending, with the first id of each
    if min(cnp.PyArray_SIZE(offsets), cnp.PyArray_SIZE(lengths)) < 2 * n * num_groups:
        raise ValueError("offsets and lengths have no room")
    order.reserve(n)
    first_id = 0
    for i in range(n):
        order.push_back(Place(row_of[i], i))
    cdef vector[int64_t] first_ids
    first_ids.reserve(n)
    for i in range(n):
        first_ids.push_back(first_id)
        first_id += count_of[i]
    sort(order.begin(), order.end(), &_is_before)
    for g in range(num_groups):
        k = table[3 * g + 2]
        for i in range(n):
            row, j = order[i].row, order[i].index
            count, cell = count_of[j], g * num_rows + row
            entry = table[3 * g] + row * table[3 * g + 1] + entries[cell]
            offset[size], length[size] = cell, 1
            offset[next_range], length[next_range] = entry, count * k
            size += 1
            next_range += 1
            first_id = first_ids[j] * num_groups + g * count
            for j in range(first_id, first_id + count):
                for part in range(k):
                    entries[entry] = <int32_t>(<int64_t>id_of[j] * k + part)
                    entry += 1
            entries[cell] += <int32_t>(count * k)
    return next_range
