# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""A whole step over arrays of the host: a commit, the gather and the slots, as blocktable_numpy's kernels do them.

A gather copies only the rows that a batch does not show yet.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

import numpy as np

cnp.import_array()

cdef enum:
    CHANGES_HEADER = 5
    LINEAR = 0
    RING = 1

cdef struct Group:
    # As `BlockTableConfig.group_fields` lists them.
    int64_t table_start
    int64_t width
    int64_t tokens_per_column
    int64_t blocks_per_kv_block
    int64_t slot_mode
    int64_t null_is_pad
    int64_t sliding_window
    int64_t world_size
    int64_t rank
    int64_t interleave_size
    int64_t column_shift
    int64_t filler
    int64_t null_start
    int64_t pad_slot_id
    int64_t batch_start

cdef struct GatheredRow:
    # What decides what a batch row holds; no row: it is NULL.
    int64_t row
    int64_t first_column
    int64_t columns
    uint64_t last_write

cdef struct Request:
    int64_t row
    int64_t first_token
    int64_t end_token

ctypedef fused Slot:
    int32_t
    int64_t


cdef class HostOutputs:
    """What a set of outputs shows, and where it lies.

    Args:
        batch: [batch_arena.size] int32.
        slots: for each group, int32 or int64.
        num_groups: groups.
        max_num_reqs: batch rows.
    """

    cdef object owners
    cdef int32_t* batch
    cdef vector[char*] slots
    cdef vector[int64_t] sizes
    cdef bint are_short
    cdef vector[GatheredRow] gathered

    def __init__(self, cnp.ndarray batch, tuple slots, int64_t num_groups, int64_t max_num_reqs):
        self.owners = batch, slots
        self.batch = <int32_t*>cnp.PyArray_DATA(batch)
        for array in slots:
            self.slots.push_back(<char*>cnp.PyArray_DATA(<cnp.ndarray>array))
            self.sizes.push_back(cnp.PyArray_SIZE(<cnp.ndarray>array))
            self.are_short = cnp.PyArray_TYPE(<cnp.ndarray>array) == cnp.NPY_INT32
        self.gathered.resize(num_groups * max_num_reqs)
        self.forget()

    def forget(self):
        """Note that something else has written the batch rows."""
        cdef size_t i
        for i in range(self.gathered.size()):
            self.gathered[i].row = -2


cdef class HostStep:
    """Steps over one table's arrays.

    Args:
        arena: [arena.size] int32.
        fields: [num_groups, len(GROUP_FIELDS)] int64.
        num_rows: rows of the table.
        max_num_reqs: rows of a batch.
    """

    cdef object owner
    cdef int32_t* arena
    cdef vector[Group] groups
    cdef int64_t num_rows, max_num_reqs
    # Row of a group -> number of the last write to its columns.
    cdef vector[uint64_t] last_writes
    cdef uint64_t num_writes
    cdef vector[Request] requests

    def __init__(self, cnp.ndarray arena, cnp.ndarray fields, int64_t num_rows, int64_t max_num_reqs):
        cdef int64_t g
        self.owner = arena
        self.arena = <int32_t*>cnp.PyArray_DATA(arena)
        self.groups.resize(cnp.PyArray_DIM(fields, 0))
        for g in range(<int64_t>self.groups.size()):
            memcpy(&self.groups[g], <int64_t*>cnp.PyArray_DATA(fields) + g * cnp.PyArray_DIM(fields, 1), sizeof(Group))
        self.num_rows, self.max_num_reqs = num_rows, max_num_reqs
        self.last_writes.resize(self.groups.size() * num_rows)
        self.requests.reserve(max_num_reqs)

    def outputs(self, batch, slots):
        """Return what this remembers of a set of outputs."""
        return HostOutputs(batch, slots, self.groups.size(), self.max_num_reqs)

    def note_writes(self):
        """Note that something else has written the arena, anywhere."""
        cdef size_t i
        self.num_writes += 1
        for i in range(self.last_writes.size()):
            self.last_writes[i] = self.num_writes

    def commit(self, cnp.ndarray block):
        """Write packed changes into the arena. block: [>= 5] int32, as `Writes.pack_changes` lays them out."""
        cdef int32_t* counts = <int32_t*>cnp.PyArray_DATA(block)
        cdef int64_t singles = counts[0], num_ranges = counts[1], num_values = counts[2], i, length
        cdef int64_t num_constants = counts[3], constant_entries = counts[4], j
        cdef int32_t* single = counts + CHANGES_HEADER
        cdef int32_t* ranged = single + 2 * singles
        cdef int32_t* values = ranged + 2 * num_ranges
        cdef int32_t* constant = values + num_values
        self.num_writes += 1
        for i in range(singles):
            self._note(single[i], 1)
            self.arena[single[i]] = single[singles + i]
        for i in range(num_ranges):
            length = (ranged[num_ranges + i + 1] if i + 1 < num_ranges else num_values) - ranged[num_ranges + i]
            self._note(ranged[i], length)
            memcpy(self.arena + ranged[i], values + ranged[num_ranges + i], 4 * length)
        for i in range(num_constants):
            length = constant_entries
            if i + 1 < num_constants:
                length = constant[num_constants + i + 1]
            length -= constant[num_constants + i]
            self._note(constant[i], length)
            for j in range(length):
                self.arena[constant[i] + j] = constant[2 * num_constants + i]

    def step(self, batch, HostOutputs out):
        """Do the gather and the slots of a `Batch`, its arrays on the host."""
        rows, starts, positions, computed = (
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_computed_tokens
        )
        cdef int64_t num_reqs = batch.num_reqs, num_positions = batch.num_positions
        cdef int32_t* mapping = <int32_t*>address_of(rows)
        cdef int32_t* tokens = <int32_t*>address_of(computed)
        self._take_requests(num_reqs, mapping)
        if batch.needs_gather:
            self._gather(tokens, out)
        self._map_slots(<int32_t*>address_of(starts), <int64_t*>address_of(positions), num_positions, out)

    cdef void _note(self, int64_t offset, int64_t length) noexcept:
        """Number the rows whose columns a range touches."""
        cdef int64_t g = self.groups.size() - 1, row, end = offset + length
        if end <= self.groups[0].table_start:  # filled counts
            return
        while g and self.groups[g].table_start > offset:
            g -= 1
        while g < <int64_t>self.groups.size() and self.groups[g].table_start < end:
            row = max(0, offset - self.groups[g].table_start) // self.groups[g].width
            while row < self.num_rows and self.groups[g].table_start + row * self.groups[g].width < end:
                self.last_writes[g * self.num_rows + row] = self.num_writes
                row += 1
            g += 1

    cdef int _take_requests(self, int64_t num_reqs, const int32_t* mapping) except -1:
        cdef int64_t i, row
        self.requests.resize(num_reqs)
        for i in range(num_reqs):
            row = mapping[i] if mapping != NULL else i
            self.requests[i].row = row if 0 <= row < self.num_rows else -1
        return 0

    cdef void _gather(self, const int32_t* computed, HostOutputs out) noexcept:
        cdef int64_t n = self.requests.size(), g, i, row, columns, first, held
        cdef int32_t* counts
        cdef int32_t* target
        cdef Group* group
        cdef GatheredRow now
        cdef GatheredRow* before
        for g in range(<int64_t>self.groups.size()):
            group = &self.groups[g]
            counts = out.batch + g * self.max_num_reqs
            for i in range(self.max_num_reqs):
                row = self.requests[i].row if i < n else -1
                columns = self.arena[g * self.num_rows + row] if row >= 0 else 0
                first = 0
                if computed != NULL and row >= 0 and group.sliding_window:
                    first = max(0, <int64_t>computed[i] - group.sliding_window + 1)
                    first = min(columns, local_length(group, first) // group.tokens_per_column)
                now = GatheredRow(row, first, columns, self.last_writes[g * self.num_rows + row] if row >= 0 else 0)
                before = &out.gathered[g * self.max_num_reqs + i]
                if (
                    before.row == row and before.first_column == first and before.columns == columns
                    and before.last_write == now.last_write
                ):
                    continue
                before[0] = now
                held, counts[i] = counts[i], <int32_t>columns
                target = out.batch + group.batch_start + i * group.width
                if columns > first:
                    memcpy(
                        target + first, self.arena + group.table_start + row * group.width + first, 4 * (columns - first)
                    )
                fill(target, 0, first, <int32_t>group.filler)
                fill(target, columns, held, <int32_t>group.filler)

    cdef void _map_slots(
        self, const int32_t* starts, const int64_t* positions, int64_t num_positions, HostOutputs out
    ) noexcept:
        cdef int64_t n = self.requests.size(), i, start, end = 0, num_tokens = num_positions, g
        for g in range(<int64_t>self.groups.size()):
            num_tokens = min(num_tokens, out.sizes[g])
        num_tokens = max(0, min(num_tokens, starts[n]))
        end = max(0, min(starts[0], num_tokens))
        start = end
        for i in range(n):
            self.requests[i].first_token = end
            end = max(end, min(starts[i + 1], num_tokens))
            self.requests[i].end_token = end
        for g in range(<int64_t>self.groups.size()):
            if out.are_short:
                self._map_group(&self.groups[g], g, start, end, positions, <int32_t*>out.slots[g], out.sizes[g])
            else:
                self._map_group(&self.groups[g], g, start, end, positions, <int64_t*>out.slots[g], out.sizes[g])

    cdef void _map_group(
        self, const Group* group, int64_t g, int64_t first, int64_t end, const int64_t* positions, Slot* slots,
        int64_t size,
    ) noexcept:
        cdef int64_t i, token, row, columns, local, column, last, shift = group.column_shift
        cdef int64_t tokens = group.tokens_per_column, turn, block_id, ring
        cdef bint is_shifted = tokens == <int64_t>1 << shift
        cdef const int32_t* table
        cdef Slot pad = <Slot>group.pad_slot_id
        if group.slot_mode != LINEAR and group.slot_mode != RING:
            end = 0
        for token in range(min(first, end)):
            slots[token] = pad
        for token in range(end, size):
            slots[token] = pad
        if end == 0:
            return
        for i in range(<int64_t>self.requests.size()):
            row = self.requests[i].row
            columns = self.arena[g * self.num_rows + row] if row >= 0 else 0
            table = self.arena + group.table_start + max(0, row) * group.width
            ring = columns * tokens
            last = 0
            if self.requests[i].end_token > self.requests[i].first_token:
                last = max(0, positions[self.requests[i].end_token - 1])
            for token in range(self.requests[i].first_token, self.requests[i].end_token):
                local = positions[token]
                slots[token] = pad
                if local < 0 or columns == 0:
                    continue
                if group.world_size > 1:
                    turn = local // group.interleave_size
                    if turn % group.world_size != group.rank:
                        continue
                    local = turn // group.world_size * group.interleave_size + local % group.interleave_size
                if group.slot_mode == RING:
                    if last - local >= ring:
                        continue
                    local = local % ring
                column = local >> shift if is_shifted else local // tokens
                if column >= columns:
                    continue
                block_id = table[column]
                if group.null_is_pad and group.null_start <= block_id < group.null_start + group.blocks_per_kv_block:
                    continue
                slots[token] = <Slot>(block_id * tokens + (local - column * tokens))


cdef inline int64_t local_length(const Group* group, int64_t tokens) noexcept nogil:
    """Of the first so many tokens, those of this rank."""
    cdef int64_t period = group.world_size * group.interleave_size
    if group.world_size == 1:
        return tokens
    return tokens // period * group.interleave_size + max(
        0, min(group.interleave_size, tokens % period - group.rank * group.interleave_size)
    )


cdef inline void fill(int32_t* values, int64_t start, int64_t end, int32_t value) noexcept nogil:
    cdef int64_t i
    for i in range(start, end):
        values[i] = value


cdef void* address_of(array) except? NULL:
    """Return where an array of the host lies, which the core has checked; NULL for None."""
    if array is None:
        return NULL
    if cnp.PyArray_Check(array):
        return cnp.PyArray_DATA(<cnp.ndarray>array)
    if getattr(array, "is_cpu", False):  # a tensor
        return <void*><size_t>array.data_ptr()
    array = np.from_dlpack(array)
    return cnp.PyArray_DATA(<cnp.ndarray>array)
