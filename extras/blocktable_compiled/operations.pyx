# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""The row operations of a steady step, and the commit of what they change.

Each method does all its checks, and takes all memory it needs, before it changes anything. It returns False, with
nothing changed, where anything is out of the ordinary: the numpy path then does the work, or raises the sentence that
explains. Ordinary are exact ints, and lists, tuples, ranges and arrays of any integer dtype and stride; they are copied
first, so that nothing that happens to them later matters.

No Python code of anyone's runs inside a method: none is called, and nothing is allocated that the garbage collector
counts, whose finalizers could call the table in the middle of an operation.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from blocktable_compiled.arguments cimport Arguments, Group
from blocktable_compiled.holders cimport CompiledHolders, Given
from blocktable_compiled.journal cimport Cell, CompiledJournal, Late, Range, blocktable_prefetch

cnp.import_array()

cdef enum:
    CHANGES_HEADER = 5
    # Entries of a range that travel as single values: a kernel need not search for them.
    MOST_SINGLES = 2
    # Loads run ahead of stores by so many rows, which lie a multiple of 4 KiB apart and share few sets of the cache.
    AHEAD = 8
    # Appends that the mirror need not show yet, of at least and at most so many entries each: every store of one misses
    # the cache, and the page table's, while those that follow one another in a row share a line.
    LATE_STEPS = 8
    LEAST_LATE = 256
    MOST_LATE = 8192


cdef class Operations(Arguments):
    """What a table's rows do in a steady step, over the memory that `CompiledRows` owns and this keeps alive.

    Args:
        mirror: [arena.size] int32.
        geometry: [num_groups, 8] int64: table_start, width, blocks_per_kv_block, max_columns, id_limit, null_block_id,
            allow_null, filler.
        num_rows: rows of the table.
        journal: what the operations change.

    Attributes:
        least_late: entries of an append that the mirror need not show yet, at least.
    """

    cdef CompiledJournal journal
    cdef object owner
    cdef int32_t* mirror
    cdef bint is_watched
    cdef public size_t least_late

    def __cinit__(
        self, cnp.ndarray mirror not None, geometry, int64_t num_rows, CompiledJournal journal not None
    ):
        self.journal, self.owner, self.least_late = journal, mirror, LEAST_LATE
        self.mirror = <int32_t*>cnp.PyArray_DATA(mirror)
        journal.num_rows = num_rows
        journal.cells.resize(self.num_groups * num_rows)

    # Operations.

    def append_row(self, row, block_ids):
        """Add blocks after what a row holds."""
        return self._take_row(row) and self._take_ids(block_ids) and self._take_own_counts() and self._append()

    def append_rows(self, rows, block_ids, counts):
        """Add blocks after what many rows hold."""
        return (
            self._take_rows(rows) and self._take_counts(counts) and self._take_ids(block_ids) and self._append()
        )

    def set_row(self, row, block_ids):
        """Replace what a row holds."""
        return self._take_row(row) and self._take_ids(block_ids) and self._take_own_counts() and self._set()

    def set_rows(self, rows, block_ids, counts):
        """Replace what many rows hold."""
        return self._take_rows(rows) and self._take_counts(counts) and self._take_ids(block_ids) and self._set()

    def truncate_row(self, row, num_blocks):
        """Keep the first blocks of a row."""
        self.counts.clear()
        self.has_own_counts = False
        return self._take_row(row) and self._take_int(num_blocks, self.counts) and self._truncate()

    def truncate_rows(self, rows, num_blocks):
        """Keep the first blocks of many rows."""
        return self._take_rows(rows) and self._take_counts(num_blocks) and self._truncate()

    def clear_rows(self, rows):
        """Make many rows empty."""
        if not self._take_rows(rows):
            return False
        self.counts.clear()
        self.counts.resize(self.rows.size())  # zeros; in Cython `assign` cannot raise
        self.has_own_counts = False
        return self._truncate()

    # The same of a checked table; False too where a block may come twice into a row, or a row to another request.

    def append_checked(self, CompiledHolders holders not None, rows, block_ids, counts):
        """Add blocks that no row holds after what rows hold. counts: as `append_rows`; None: there is one row."""
        return self._take_blocks(rows, block_ids, counts, True) and holders.are_free(self._given()) and self._append()

    def set_checked(self, CompiledHolders holders not None, rows, block_ids, counts):
        """Replace what rows hold, and follow their lives. counts: as `set_rows`; None: there is one row."""
        self._catch_up()
        if not self._take_blocks(rows, block_ids, counts, False) or not holders.may_set(self._given()):
            return False
        if not self._set(3 * self.rows.size()):
            return False
        holders.have_set(self._given())
        return True

    def truncate_checked(self, CompiledHolders holders not None, rows, num_blocks, bint is_one):
        """Keep the first blocks of rows, and follow their lives. num_blocks None: of none any; is_one: there is one row."""
        self._catch_up()
        self.counts.clear()
        self.has_own_counts = False
        if is_one:
            if not self._take_row(rows) or not self._take_int(num_blocks, self.counts):
                return False
        elif not self._take_rows(rows):
            return False
        elif num_blocks is None:
            self.counts.resize(self.rows.size())
        elif not self._take_counts(num_blocks):
            return False
        holders.before_truncate(self.rows)
        if not self._truncate(3 * self.rows.size()):
            return False
        holders.have_truncated(self.rows)
        return True

    cdef bint _take_blocks(self, rows, block_ids, counts, bint is_added) except -1:
        if counts is None:
            if not (self._take_row(rows) and self._take_ids(block_ids) and self._take_own_counts()):
                return False
        elif not (self._take_rows(rows) and self._take_counts(counts) and self._take_ids(block_ids)):
            return False
        return self._fits(is_added)

    cdef Given _given(self) noexcept:
        return Given(
            self.rows.data(), self.rows.size(), self.ids.data(), self.ends.data(), self.counts.data(), self.has_own_counts
        )

    # A commit.

    def committed(self, cnp.ndarray committed_filled):
        """Forget what has changed. committed_filled: [num_groups, num_rows] int32, contiguous, becomes what is filled."""
        self.journal.clear()
        memcpy(cnp.PyArray_DATA(committed_filled), self.mirror, 4 * self.num_groups * self.num_rows)

    def pack_changes(self, cnp.ndarray block not None, int64_t most):
        """Lay what has changed out as `Writes.pack_changes` does.

        Args:
            block: [n] int32, C-contiguous, written.
            most: entries that may be scattered.

        Returns:
            int32 entries used, and bytes of the changes as ranges; -1 and 0: they do not fit, or are too many.
        """
        cdef CompiledJournal journal = self.journal
        if not journal.is_disjoint:
            journal.settle()
        cdef int64_t n = journal.ranges.size(), i, j, offset, length
        if n == 0:
            return 0, 0
        if cnp.PyArray_TYPE(block) != cnp.NPY_INT32 or not cnp.PyArray_ISCARRAY(block):
            raise TypeError("block must be a contiguous int32 array that can be written")
        cdef int32_t* target = <int32_t*>cnp.PyArray_DATA(block)
        cdef Range* ranges = journal.ranges.data()
        cdef int32_t* mirror = self.mirror
        self._join_counts()
        if journal.num_late:
            for i in range(n):
                if not ranges[i].has_value and ranges[i].offset >= self.num_groups * self.num_rows:
                    self._catch_up()
                    break
        cdef int64_t num_kept = 0, singles = 0, num_ranges = 0, num_values = 0, num_constants = 0, constant_entries = 0
        # What is noted only as late, which a catch-up has put among the ranges.
        n = journal.ranges.size()
        cdef int64_t unnoted = journal.num_unnoted
        cdef const Late* late = journal.late.data() + journal.num_late - unnoted
        ranges = journal.ranges.data()
        for i in range(n):
            offset, length = ranges[i].offset, ranges[i].length
            num_kept += length > 0
            if length <= MOST_SINGLES:
                singles += length
            elif _is_constant(mirror + offset, length):
                num_constants += 1
                constant_entries += length
            else:
                num_ranges += 1
                num_values += length
        singles += unnoted
        num_kept += unnoted
        if singles + num_values + constant_entries > most:
            return -1, 0
        cdef int64_t end = CHANGES_HEADER + 2 * (singles + num_ranges) + num_values + 3 * num_constants
        if end > cnp.PyArray_SIZE(block):
            return -1, 0
        target[0], target[1], target[2] = <int32_t>singles, <int32_t>num_ranges, <int32_t>num_values
        target[3], target[4] = <int32_t>num_constants, <int32_t>constant_entries
        cdef int32_t* single = target + CHANGES_HEADER
        cdef int32_t* ranged = single + 2 * singles
        cdef int32_t* value = ranged + 2 * num_ranges
        cdef int32_t* constant = value + num_values
        cdef int32_t first_value = 0, first_constant = 0
        for i in range(n):
            offset, length = ranges[i].offset, ranges[i].length
            if length <= MOST_SINGLES:
                for j in range(offset, offset + length):
                    single[0], single[singles] = <int32_t>j, ranges[i].value if ranges[i].has_value else mirror[j]
                    single += 1
            elif _is_constant(mirror + offset, length):
                constant[0], constant[num_constants] = <int32_t>offset, first_constant
                constant[2 * num_constants] = mirror[offset]
                first_constant += <int32_t>length
                constant += 1
            else:
                ranged[0], ranged[num_ranges] = <int32_t>offset, first_value
                ranged += 1
                for j in range(length):
                    value[first_value + j] = mirror[offset + j]
                first_value += <int32_t>length
        for i in range(unnoted):
            single[i], single[singles + i] = <int32_t>late[i].entry, late[i].value
        return end, 12 * num_kept + 4 * (singles + num_values + constant_entries)

    # Changes. Everything was checked but what the rows can hold; what may raise comes before the first store.

    cdef const int64_t* _counts_of(self, int64_t g) noexcept:
        """Blocks of each row in a group; NULL: nothing was given for the group, and no row gets any."""
        if self.ends[g] == (self.ends[g - 1] if g else 0):
            return NULL
        return self.counts.data() + (g * <int64_t>self.rows.size() if self.has_own_counts else 0)

    cdef bint _fits(self, bint is_added) noexcept:
        """Whether every row has room for its blocks, and the counts of each group add up to its ids."""
        cdef int64_t n = self.rows.size(), g, i, total, used = 0, most, k
        cdef const int64_t* counts
        cdef const int64_t* rows = self.rows.data()
        cdef const int32_t* filled
        for g in range(self.num_groups):
            counts = self._counts_of(g)
            if counts == NULL:
                continue
            filled, most, k = self.mirror + g * self.num_rows, self.groups[g].max_columns, self.groups[g].k
            total = 0
            for i in range(n):
                if is_added:
                    used = filled[rows[i]]
                if counts[i] > most or used + counts[i] * k > most:
                    return False
                total += counts[i]
            if total != self.ends[g] - (self.ends[g - 1] if g else 0):
                return False
        return True

    cdef bint _append(self) except -1:
        if self.ids.empty():
            return True
        if not self._fits(True):
            return False
        if self._may_be_late():
            return self._append_late()
        cdef int64_t n = self.rows.size(), g, i, entry, k, start, width
        cdef CompiledJournal journal = self.journal
        cdef const int64_t* next_id = self.ids.data()
        cdef const int64_t* rows = self.rows.data()
        cdef const int64_t* counts
        cdef int32_t* mirror = self.mirror
        cdef int32_t* filled
        journal.make_room(2 * n * self.num_groups)
        for g in range(self.num_groups):
            counts = self._counts_of(g)
            if counts != NULL:
                for i in range(n):
                    if counts[i]:
                        self._note_count(g, rows[i])
        for g in range(self.num_groups):
            counts = self._counts_of(g)
            if counts == NULL:
                continue
            filled, k = mirror + g * self.num_rows, self.groups[g].k
            start, width = self.groups[g].table_start, self.groups[g].width
            for i in range(n):
                if i + AHEAD < n:
                    blocktable_prefetch(mirror + start + rows[i + AHEAD] * width + filled[rows[i + AHEAD]])
                if counts[i]:
                    entry = start + rows[i] * width + filled[rows[i]]
                    self._expand(g, next_id, counts[i], mirror + entry)
                    self._note_tail(g * self.num_rows + rows[i], entry, counts[i] * k, mirror[entry])
                    filled[rows[i]] += <int32_t>(counts[i] * k)
                    next_id += counts[i]
        return True

    cdef bint _may_be_late(self) noexcept:
        """Whether an append is the first since a commit, and adds one column to each row and group; if not, catch up."""
        cdef CompiledJournal journal = self.journal
        cdef size_t total = self.ids.size(), g, i
        cdef bint is_late = not self.is_watched and self.least_late <= total <= MOST_LATE and journal.ranges.empty()
        is_late = is_late and total == self.rows.size() * self.groups.size()
        for g in range(self.groups.size()):
            is_late = is_late and self.groups[g].k == 1
        if is_late:
            for i in range(self.counts.size()):
                if self.counts[i] != 1:
                    is_late = False
                    break
        if not is_late or total != journal.late_per_call or journal.num_late == LATE_STEPS * total:
            self._catch_up()
            journal.late_per_call = total if is_late else 0
        return is_late

    cdef bint _append_late(self) except -1:
        """Note one column for each row and group among the late ones, and their counts in the journal."""
        cdef CompiledJournal journal = self.journal
        cdef int64_t n = self.rows.size(), g, i, row, start, width, null, filler
        cdef const int64_t* next_id = self.ids.data()
        cdef const int64_t* rows = self.rows.data()
        cdef int32_t* filled
        cdef Late* late
        journal.make_room(2 * n * self.num_groups)
        journal.late.resize(LATE_STEPS * journal.late_per_call)
        journal.unnoted_rows.resize(n)
        memcpy(journal.unnoted_rows.data(), rows, 8 * n)
        late = journal.late.data() + journal.num_late
        for g in range(self.num_groups):
            self._note_counts(g * self.num_rows)
            filled, null, filler = self.mirror + g * self.num_rows, self.groups[g].null_block_id, self.groups[g].filler
            start, width = self.groups[g].table_start, self.groups[g].width
            for i in range(n):
                row = rows[i]
                late[i] = Late(start + row * width + filled[row], <int32_t>(filler if next_id[i] == null else next_id[i]))
                filled[row] += 1
            late += n
            next_id += n
        journal.num_late += journal.late_per_call
        journal.num_unnoted = journal.late_per_call
        return True

    cdef void _note_counts(self, int64_t first) noexcept:
        """Note the filled counts of the call's rows, from cell `first` on; rows that follow one another make one range."""
        cdef CompiledJournal journal = self.journal
        cdef const int64_t* rows = self.rows.data()
        cdef int64_t n = self.rows.size(), i = 0, start
        cdef Range* last
        while i < n:
            start = i
            i += 1
            while i < n and rows[i] == rows[i - 1] + 1:
                i += 1
            if not journal.ranges.empty():
                last = &journal.ranges[journal.ranges.size() - 1]  # back() would be a copy here
                if last.offset + last.length == first + rows[start]:
                    last.length += i - start
                    continue
            journal.ranges.push_back(Range(first + rows[start], i - start, 0, False))

    cdef void _catch_up(self) noexcept:
        """Write what is late into the mirror, a row's entries of all calls together."""
        cdef CompiledJournal journal = self.journal
        cdef size_t i, place
        cdef size_t size = journal.num_late
        cdef const Late* late = journal.late.data()
        journal.note_late()
        for i in range(min(journal.late_per_call, size)):
            place = i
            while place < size:  # a range of this step would be an object
                self.mirror[late[place].entry] = late[place].value
                place += journal.late_per_call
        journal.num_late = 0

    def catch_up(self, bint is_watched=False):
        """Bring the mirror up to date; is_watched: and keep it so."""
        self.is_watched = self.is_watched or is_watched
        self._catch_up()

    cdef void _join_counts(self) noexcept:
        """Make filled counts of groups that follow one another one range, where each group's are one."""
        cdef CompiledJournal journal = self.journal
        cdef size_t g
        cdef Range* before
        cdef Range* after
        if not journal.is_disjoint:
            return  # they are merged already
        for g in range(1, self.groups.size()):
            if self.groups[g].epoch != journal.epoch or self.groups[g - 1].epoch != journal.epoch:
                continue
            before, after = &journal.ranges[self.groups[g - 1].counts], &journal.ranges[self.groups[g].counts]
            if before != after and after.length and before.offset + before.length == after.offset:
                before.length += after.length
                after.length = 0
                self.groups[g].counts = self.groups[g - 1].counts

    cdef void _note_count(self, int64_t g, int64_t row) noexcept:
        """Note a filled count, of which a row that was appended to in this epoch has noted its own."""
        cdef CompiledJournal journal = self.journal
        cdef int64_t cell = g * self.num_rows + row
        cdef Group* group = &self.groups[g]
        if journal.cells[cell].epoch == journal.epoch:
            return
        journal.cells[cell] = Cell(journal.epoch, -1)
        if group.epoch == journal.epoch:
            if journal.ranges[group.counts].offset + journal.ranges[group.counts].length == cell:
                journal.ranges[group.counts].length += 1
                return
        group.epoch, group.counts = journal.epoch, journal.ranges.size()
        journal.ranges.push_back(Range(cell, 1, 0, False))

    cdef void _note_tail(self, int64_t cell, int64_t entry, int64_t columns, int32_t value) noexcept:
        """Note the columns that an append adds; value: the first one's."""
        cdef CompiledJournal journal = self.journal
        cdef int64_t tail = journal.cells[cell].tail
        if tail >= 0 and journal.ranges[tail].offset + journal.ranges[tail].length == entry:
            journal.ranges[tail].length += columns
            journal.ranges[tail].has_value = False
            return
        journal.cells[cell].tail = journal.ranges.size()
        journal.ranges.push_back(Range(entry, columns, value, columns == 1))

    cdef void _expand(self, int64_t g, const int64_t* ids, int64_t count, int32_t* target) noexcept:
        """Write blocks as kernel blocks (R2)."""
        cdef int64_t i, part, k = self.groups[g].k
        for i in range(count):
            for part in range(k):
                if ids[i] == self.groups[g].null_block_id:
                    target[i * k + part] = <int32_t>self.groups[g].filler
                else:
                    target[i * k + part] = <int32_t>(ids[i] * k + part)

    cdef bint _set(self, size_t spare=0) except -1:
        """spare: ranges that the journal gets room for beside."""
        self._catch_up()
        if not self._fits(False):
            return False
        cdef int64_t n = self.rows.size(), g, i, cell, count, columns, filled, start, most = 0
        cdef const int64_t* next_id = self.ids.data()
        cdef const int64_t* counts
        cdef bint is_fresh = True
        for g in range(self.num_groups):
            counts = self._counts_of(g)
            for i in range(n):
                is_fresh = is_fresh and self.mirror[g * self.num_rows + self.rows[i]] == 0
                columns = counts[i] * self.groups[g].k if counts != NULL else 0
                most += 2 + (columns + 1) // 2  # two ranges of entries that differ have one between them that does not
        self.journal.make_room((2 * n * self.num_groups if is_fresh else most) + spare)
        for g in range(self.num_groups):
            counts = self._counts_of(g)
            for i in range(n):
                count = counts[i] if counts != NULL else 0
                columns = count * self.groups[g].k
                cell = g * self.num_rows + self.rows[i]
                filled = self.mirror[cell]
                start = self.groups[g].table_start + self.rows[i] * self.groups[g].width
                if columns != filled:
                    self._note(cell, 1)
                if is_fresh:
                    self._note(start, columns)
                    self._expand(g, next_id, count, self.mirror + start)
                else:
                    self._exchange(g, next_id, count, start)
                self.mirror[cell] = <int32_t>columns
                self._null(g, start + columns, filled - columns)
                next_id += count
        return True

    cdef void _exchange(self, int64_t g, const int64_t* ids, int64_t count, int64_t start) noexcept:
        """Write blocks over what stands there, and note the entries that differ."""
        cdef int64_t i, part, k = self.groups[g].k, entry = start, first = -1
        cdef int32_t value
        for i in range(count):
            for part in range(k):
                value = <int32_t>(ids[i] * k + part)
                if ids[i] == self.groups[g].null_block_id:
                    value = <int32_t>self.groups[g].filler
                if self.mirror[entry] != value:
                    first = entry if first < 0 else first
                    self.mirror[entry] = value
                elif first >= 0:
                    self._note(first, entry - first)
                    first = -1
                entry += 1
        if first >= 0:
            self._note(first, entry - first)

    cdef bint _truncate(self, size_t spare=0) except -1:
        self._catch_up()
        cdef int64_t n = self.rows.size(), g, i, cell, columns, filled, k, kept
        for i in range(<int64_t>self.counts.size()):
            if self.counts[i] < 0:
                return False
        self.journal.make_room(2 * n * self.num_groups + spare)
        for g in range(self.num_groups):
            k = self.groups[g].k
            for i in range(n):
                cell = g * self.num_rows + self.rows[i]
                filled = self.mirror[cell]
                kept = self.counts[g * n + i if self.has_own_counts else i]
                columns = min(kept, self.groups[g].max_columns // k) * k
                if columns < filled:
                    self._note(cell, 1)
                    self.mirror[cell] = <int32_t>columns
                    self._null(
                        g, self.groups[g].table_start + self.rows[i] * self.groups[g].width + columns, filled - columns
                    )
        return True

    cdef void _null(self, int64_t g, int64_t entry, int64_t columns) noexcept:
        cdef int64_t i
        if columns > 0:
            self._note(entry, columns)
            for i in range(entry, entry + columns):
                self.mirror[i] = <int32_t>self.groups[g].filler

    cdef void _note(self, int64_t offset, int64_t length) noexcept:
        """Note a range that others may overlap."""
        if length:
            self.journal.ranges.push_back(Range(offset, length, 0, False))
            self.journal.is_disjoint = False


cdef bint _is_constant(const int32_t* values, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(1, n):
        if values[i] != values[0]:
            return False
    return True
