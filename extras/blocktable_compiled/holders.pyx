# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""Who holds each block, counted from what the journal says has changed: what `checking.pools.Holders` does in numpy.

Every method takes the memory that it needs before it changes anything, and runs nobody's Python.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

from blocktable_compiled.journal cimport CompiledJournal, Range, blocktable_prefetch

cnp.import_array()

cdef enum:
    # What the next ones need is loaded so many ahead: blocks and rows lie anywhere.
    AHEAD = 8
    MAX_INT32 = 0x7FFFFFFF

cdef int64_t UNMARKED = (1ULL << 63) - 1


@cython.final
cdef class CompiledHolders:
    """The rows as of the last commit, what is known of each block, and whose rows are.

    Args:
        arena: [n] int32. The tables as of the last commit, as `Holders.arena`.
        mirror: [arena.size] int32. The tables as they are, never behind; kernels are told by what comes after them.
        journal: what differs between the two, and more.
        num_rows: rows of the table.
        is_stale: whether rows stay after their request has ended.
        fields: [num_groups, 9] int64: start and width of the table, columns of a block, null block, whether it has
            slots, whether no row may list a block twice, positions of a block, entry of the mirror with the first bits
            of its pool (-1: none), and their number.
        blocks: for each group [num_blocks] of `BLOCK`.
        hand_ins: [2] int64, as `Holders.hand_ins`.
        lives: what `RowLives.arrays` or, where kernels are told, `DeviceLives.arrays` returns.
        told: entries of the mirror with the step and the first life, as `CheckRegions`. None: no kernels are told.
    """

    def __init__(self, int32_t[::1] arena not None, int32_t[::1] mirror not None, CompiledJournal journal not None,
                 int64_t num_rows, bint is_stale, const int64_t[:, ::1] fields not None, list blocks not None,
                 int64_t[::1] hand_ins not None, tuple lives, tuple told):
        cdef Py_ssize_t g
        self.arena, self.mirror, self.journal, self.hand_ins = arena, mirror, journal, hand_ins
        self.num_rows, self.num_cells, self.is_stale = num_rows, num_rows * fields.shape[0], is_stale
        self.told_lives = -1
        self.clean.resize(self.num_cells, Clean(-1, 0))
        if told is None:
            self.lives, self.marks, self.next_life = lives
        else:
            self.touched, self.has_touched = lives
            self.step_entry, self.told_lives = told
        self.kept = list(blocks)  # their memory is pointed to
        for g in range(fields.shape[0]):
            if cnp.PyArray_ITEMSIZE(<cnp.ndarray>blocks[g]) != sizeof(Block):
                raise TypeError("blocks must be arrays of blocktable.checking.pools.BLOCK")
            self.groups.push_back(Held(
                fields[g, 0], fields[g, 1], fields[g, 2], fields[g, 3], fields[g, 4], fields[g, 5], fields[g, 6],
                fields[g, 7], fields[g, 8], <Block*>cnp.PyArray_DATA(<cnp.ndarray>blocks[g])
            ))

    # A commit.

    def take(self, int64_t step):
        """Take what is pending. step: commits before it."""
        self._collect()
        self._make(step, False)

    def undo(self, int64_t step):
        """Take back what was taken last. step: commits so far."""
        self._make(step, True)
        self.changes.clear()

    def tell(self, int64_t step):
        """Take what is pending, and write what it means to kernels into the mirror, as changes of the same commit.

        Args:
            step: commits before it.
        """
        if self.journal.ranges.empty():
            return
        self._collect()
        cdef int64_t row
        cdef size_t i, group = 0
        cdef const Change* change = self.changes.data()
        self.journal.make_room(2 * self.changes.size() + (self.num_rows if self.has_touched[0] else 0) + 1)
        self._make(step, False)
        self.hand_ins[1] = self.hand_ins[0]
        for i in range(self.changes.size()):
            if change[i].entry < self.num_cells:
                if (change[i].old == 0) != (change[i].new == 0):
                    self._tell_life(change[i].entry % self.num_rows)
            else:
                group = self._group_of(change[i].entry, group)
                if self.groups[group].bits >= 0:
                    self._tell_block(&self.groups[group], change[i].entry, change[i].old)
                    self._tell_block(&self.groups[group], change[i].entry, change[i].new)
        if self.has_touched[0]:
            for row in range(self.num_rows):
                if self.touched[row]:
                    self.touched[row] = 0
                    self._tell_life(row)
            self.has_touched[0] = 0
        self.mirror[self.step_entry] = <int32_t>step
        if self.step_epoch != self.journal.epoch:  # otherwise it is noted; no other range has the entry
            self.journal.ranges.push_back(Range(self.step_entry, 1, 0, False))
            self.step_epoch = self.journal.epoch

    cdef int _collect(self) except -1:
        """Find the entries that differ. One that two ranges have is found twice."""
        cdef size_t i
        cdef int64_t entry, end
        cdef const Range* ranges = self.journal.ranges.data()
        self.changes.clear()
        for i in range(self.journal.ranges.size()):
            if i + AHEAD < self.journal.ranges.size() and ranges[i + AHEAD].offset < self.arena.shape[0]:
                blocktable_prefetch(&self.arena[ranges[i + AHEAD].offset])
            end = min(ranges[i].offset + ranges[i].length, <int64_t>self.arena.shape[0])
            for entry in range(ranges[i].offset, end):
                if self.arena[entry] != self.mirror[entry]:
                    self.changes.push_back(Change(entry, self.arena[entry], self.mirror[entry]))
        return 0

    cdef void _make(self, int64_t step, bint is_undone) noexcept:
        """Count what the changes release and take, and make them."""
        cdef size_t i, g = 0
        cdef int64_t entry, row, column, place, cell, old, new
        cdef const Held* group
        cdef const Change* ahead
        cdef Block* block
        for i in range(self.changes.size()):
            entry, old, new = self.changes[i].entry, self.changes[i].old, self.changes[i].new
            if is_undone:
                old, new = new, old
            if self.arena[entry] != old:
                continue  # found twice
            self.arena[entry] = <int32_t>new
            if entry < self.num_cells:
                continue
            g = self._group_of(entry, g)
            group = &self.groups[g]
            if i + AHEAD < self.changes.size() and group.expansion == 1:  # of another group it is asked for in vain
                ahead = &self.changes[i + AHEAD]
                blocktable_prefetch(group.blocks + (ahead.new if ahead.old == group.null_id else ahead.old))
            place = entry - group.start
            if place <= MAX_INT32:  # much faster
                row = <uint32_t>place // <uint32_t>group.width
            else:
                row = place // group.width
            cell = row + <int64_t>g * self.num_rows
            column = place - row * group.width
            if self.clean[cell].column == column:
                self.clean[cell].column = -1
            if group.expansion > 1:
                if column % group.expansion:
                    continue  # one column stands for a block
                old = _block_of(<int32_t>old, group.expansion)
                new = _block_of(<int32_t>new, group.expansion)
            if old != group.null_id:
                block = group.blocks + old
                block.counts -= 1
                block.cells -= cell
                block.squares -= cell * cell
            if new != group.null_id:
                block = group.blocks + new
                self.num_shares += block.counts > 0
                block.counts += 1
                block.cells += cell
                block.squares += cell * cell
                block.since = step

    cdef size_t _group_of(self, int64_t entry, size_t guess) noexcept:
        while entry < self.groups[guess].start:
            guess -= 1
        while guess + 1 < self.groups.size() and entry >= self.groups[guess + 1].start:
            guess += 1
        return guess

    cdef void _tell_life(self, int64_t row) noexcept:
        """Let the sign of a row's life say whether it holds blocks."""
        cdef int64_t cell = row
        cdef int32_t* life = &self.mirror[self.told_lives + row]
        while cell < self.num_cells and not self.arena[cell]:
            cell += self.num_rows
        if (life[0] > 0) != (cell < self.num_cells):
            life[0] = -life[0]
            self._mark(self.told_lives + row)

    cdef void _tell_block(self, const Held* group, int64_t entry, int32_t value) noexcept:
        """Let a block's bit say whether two cells hold it: where number * squares is not sum ** 2."""
        cdef int64_t place = entry - group.start, block_id
        cdef Block* block
        cdef uint64_t total
        cdef bint is_shared
        if group.expansion > 1 and place % group.width % group.expansion:
            return
        block_id = _block_of(value, group.expansion)
        if block_id == group.null_id:
            return
        block = group.blocks + block_id
        total = <uint64_t>block.cells
        is_shared = block.counts > 1 and <uint64_t>block.counts * <uint64_t>block.squares != total * total
        if is_shared != block.is_shared:
            block.is_shared = is_shared
            if block_id >= group.num_bits:
                return
            (<uint32_t*>&self.mirror[group.bits + (block_id >> 5)])[0] ^= <uint32_t>1 << (block_id & 31)
            self._mark(group.bits + (block_id >> 5))

    cdef void _mark(self, int64_t entry) noexcept:
        """Note an entry that another range may have; there is room."""
        self.journal.ranges.push_back(Range(entry, 1, 0, False))
        self.journal.is_disjoint = False

    # Blocks that row operations hand in. They are right, each in its group's bounds.

    cdef bint are_free(self, const Given& given) noexcept:
        """Note what an append hands in; where a block may be in a row already return False, and note nothing."""
        cdef size_t g
        cdef int64_t i, start = 0, end, last = self.hand_ins[1], number
        cdef const int64_t* ids = given.ids
        cdef const Held* group
        cdef Block* block
        self.hand_ins[0] += 1
        number = self.hand_ins[0]
        for g in range(self.groups.size()):
            group, end = &self.groups[g], given.ends[g]
            if group.is_distinct:
                for i in range(start, end):
                    if i + AHEAD < end:
                        blocktable_prefetch(group.blocks + ids[i + AHEAD])
                    if ids[i] != group.null_id:
                        block = group.blocks + ids[i]
                        if block.counts or block.handed > last:
                            self._forget(given, number)
                            return False
                        block.handed = number
            start = end
        return True

    cdef void _forget(self, const Given& given, int64_t number) noexcept:
        cdef size_t g
        cdef int64_t i, start = 0
        cdef const Held* group
        for g in range(self.groups.size()):
            group = &self.groups[g]
            if group.is_distinct:
                for i in range(start, given.ends[g]):
                    if given.ids[i] != group.null_id and group.blocks[given.ids[i]].handed == number:
                        group.blocks[given.ids[i]].handed = 0
            start = given.ends[g]

    cdef bint may_set(self, const Given& given) except -1:
        """Note what rows are to be set to; False where a row lists a block twice, or is another request's."""
        cdef size_t g
        cdef int64_t i, count, start = 0, old, new
        cdef const Held* group
        cdef bint differs
        self.goes_on.clear()
        self.goes_on.resize(given.num_rows)
        for g in range(self.groups.size()):
            group = &self.groups[g]
            if group.has_slots and start < given.ends[g]:
                for i in range(given.num_rows):
                    count = given.counts[<int64_t>g * given.num_rows + i if given.has_own_counts else i]
                    old = _block_of(self.mirror[group.start + given.rows[i] * group.width], group.expansion)
                    new = given.ids[start] if count else group.null_id
                    if old != group.null_id and new != group.null_id:
                        if old != new and not self.is_stale:
                            return False
                        self.goes_on[i] |= 1 if old == new else 2
                    start += count
            start = given.ends[g]
        return self._are_distinct(given)

    cdef bint _are_distinct(self, const Given& given) noexcept:
        cdef size_t g
        cdef int64_t i, j, start = 0, count
        cdef const Held* group
        for g in range(self.groups.size()):
            group = &self.groups[g]
            if group.is_distinct and start < given.ends[g]:
                for j in range(given.num_rows):
                    self.hand_ins[0] += 1
                    count = given.counts[<int64_t>g * given.num_rows + j if given.has_own_counts else j]
                    for i in range(start, start + count):
                        if given.ids[i] != group.null_id:
                            if group.blocks[given.ids[i]].handed == self.hand_ins[0]:
                                return False
                            group.blocks[given.ids[i]].handed = self.hand_ins[0]
                    start += count
            start = given.ends[g]
        return True

    # Whose rows are: as `RowLives`, or in the mirror as `DeviceLives`. There is room in the journal.

    cdef void have_set(self, const Given& given) noexcept:
        """Begin a life for each row that does not go on, as `may_set` has seen, and unmark all."""
        cdef int64_t i
        for i in range(given.num_rows):
            if self.goes_on[i] == 1:
                self._unmark(given.rows[i])
            else:
                self._begin(given.rows[i])

    cdef int before_truncate(self, const vector[int64_t]& rows) except -1:
        """Note what rows hold."""
        cdef size_t g, i
        self.filled.resize(self.groups.size() * rows.size())
        for g in range(self.groups.size()):
            for i in range(rows.size()):
                self.filled[g * rows.size() + i] = self.mirror[<int64_t>g * self.num_rows + rows[i]]
        return 0

    cdef void have_truncated(self, const vector[int64_t]& rows) noexcept:
        """Let marks fall to what rows still hold; those that became empty begin a life."""
        cdef size_t g, i
        cdef int64_t before, after, left
        cdef bint was_held, is_held
        for i in range(rows.size()):
            was_held, is_held, left = False, False, UNMARKED
            for g in range(self.groups.size()):
                before, after = self.filled[g * rows.size() + i], self.mirror[<int64_t>g * self.num_rows + rows[i]]
                was_held, is_held = was_held or before, is_held or after
                if after < before and self.groups[g].reach:
                    left = min(left, after // self.groups[g].expansion * self.groups[g].reach)
            if was_held and not is_held:
                self._begin(rows[i])
            elif left == UNMARKED:
                continue
            elif self.told_lives < 0:
                if self.marks[rows[i]] != UNMARKED:
                    self.marks[rows[i]] = min(self.marks[rows[i]], left)
            elif left < MAX_INT32:
                self._restart(rows[i], <int32_t>left)

    cdef void _begin(self, int64_t row) noexcept:
        cdef int32_t* life
        if self.told_lives < 0:
            self.lives[row] = self.next_life[0]
            self.next_life[0] += 1
        else:
            life = &self.mirror[self.told_lives + row]
            life[0] = self._following(life[0] if life[0] > 0 else -life[0])
            self.touched[row], self.has_touched[0] = 1, 1
        self._unmark(row)

    cdef void _unmark(self, int64_t row) noexcept:
        if self.told_lives < 0:
            self.marks[row] = UNMARKED
        else:
            self._restart(row, -1)

    cdef void _restart(self, int64_t row, int32_t cap) noexcept:
        cdef int64_t entry = self.told_lives + row
        self._mark(entry)
        self._mark(entry + self.num_rows)
        self._mark(entry + 2 * self.num_rows)
        self.mirror[entry + self.num_rows] = self._following(self.mirror[entry + self.num_rows])
        self.mirror[entry + 2 * self.num_rows] = cap

    cdef int32_t _following(self, int32_t number) noexcept:
        return (number % <int32_t>self.num_rows if number > MAX_INT32 - self.num_rows else number) + <int32_t>self.num_rows


cdef int64_t _block_of(int32_t entry, int64_t expansion) noexcept:
    if entry < 0:  # in one expression it would become unsigned
        return entry
    return <uint32_t>entry // <uint32_t>expansion
