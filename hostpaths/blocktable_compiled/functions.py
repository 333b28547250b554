"""The compiled functions.

A call of Numba's costs a tenth of a microsecond for each array it is given. What stays the same from call to call is
given once, as addresses in one array (STATE); the rows of a table own that memory and outlive every call.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM110 - Numba compiles loops, not generators
from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

REFUSED = -1
GEOMETRY = (
    "table_start",
    "width",
    "blocks_per_kv_block",
    "max_columns",
    "id_limit",
    "null_block_id",
    "allow_null",
    "filler",
)
NUM_FIELDS = len(GEOMETRY)
STATE = (
    "mirror",  # address of [mirror_size] int32
    "mirror_size",
    "geometry",  # address of [num_groups, NUM_FIELDS] int64, see GEOMETRY
    "num_groups",
    "num_rows",
    "stamps",  # address of [num_rows] int64
    "offsets",  # addresses of the journal's [journal_size]: int64, int64, int32
    "lengths",
    "values",
    "journal_size",
    "late_offsets",  # addresses of [..] int64 and int32: appended entries that the mirror does not hold yet
    "late_values",
    "expands",  # whether a group has several columns a block
)
MIRROR, MIRROR_SIZE, TABLES, NUM_GROUPS, NUM_ROWS, STAMPS, OFFSETS, LENGTHS, VALUES, JOURNAL_SIZE = range(10)
LATE_OFFSETS, LATE_VALUES, EXPANDS = range(10, 13)
CHANGES_HEADER = 5
AHEAD = 16
SIZE_SHIFT, SIZE_MASK, VALUES_SHIFT = 2, 2**32 - 1, 34
"""Where a result holds the journal's size and the number of values; below lie IS_LATE and IS_MERGED."""
MAX_VALUES = 2 ** (63 - VALUES_SHIFT) - 1
IS_LATE, IS_MERGED = 1, 2


@intrinsic
def _pointer32(typing_context, address):
    signature = types.CPointer(types.int32)(types.int64)

    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, build


@intrinsic
def _pointer64(typing_context, address):
    signature = types.CPointer(types.int64)(types.int64)

    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, build


@njit(inline="always")
def _int32s(state, name, size):
    return carray(_pointer32(state[name]), size)


@njit(inline="always")
def _int64s(state, name, size):
    return carray(_pointer64(state[name]), size)


@njit(inline="always")
def _are_distinct_rows(rows, num_rows, stamps, stamp):
    """Whether all are rows of the table, each named once. `stamp`: a number that no earlier call had."""
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= num_rows or stamps[row] == stamp:
            return False
        stamps[row] = stamp
    return True


@njit(cache=True, nogil=True)
def append(
    rows,  # [n] int64
    ids,  # [total] int32, group after group, every group the same number
    counts,  # [n] int64, blocks of each row, in every group
    state,  # see STATE
    stamp,
    size,  # ranges in the journal
    late,  # entries that are late already; -1: none may be
):
    """Add blocks to rows of all groups.

    Where each row gets one block of one column and `late` allows it, the entries are only noted, in the journal and
    among the late ones.

    Returns:
        The journal's size, the values of its ranges, and whether it is disjoint and ascending (both of the new ranges
        alone), and whether the entries are late: see SIZE_SHIFT. REFUSED with nothing changed where anything is wrong.
    """
    n, num_groups, num_rows = rows.size, state[NUM_GROUPS], state[NUM_ROWS]
    geometry = _int64s(state, TABLES, (num_groups, NUM_FIELDS))
    mirror = _int32s(state, MIRROR, state[MIRROR_SIZE])
    offsets, lengths = _int64s(state, OFFSETS, state[JOURNAL_SIZE]), _int64s(state, LENGTHS, state[JOURNAL_SIZE])
    values = _int32s(state, VALUES, state[JOURNAL_SIZE])
    ids_per_group = ids.size // num_groups
    if size + 2 * num_groups * n > state[JOURNAL_SIZE]:
        return REFUSED
    if not _are_distinct_rows(rows, num_rows, _int64s(state, STAMPS, num_rows), stamp):
        return REFUSED
    first_id, most_values = 0, n * num_groups
    for g in range(num_groups):
        k, max_columns, limit = geometry[g, 2], geometry[g, 3], geometry[g, 4]
        null, allow_null = geometry[g, 5], geometry[g, 6]
        total = 0
        for i in range(n):
            count = counts[i]
            if count < 0 or count > max_columns or mirror[g * num_rows + rows[i]] + count * k > max_columns:
                return REFUSED
            total += count
        most_values += total * k
        if total != ids_per_group or most_values > MAX_VALUES:
            return REFUSED
        for j in range(first_id, first_id + total):
            if ids[j] == null:
                if not allow_null:
                    return REFUSED
            elif ids[j] < 0 or ids[j] >= limit:
                return REFUSED
        first_id += total

    start, num_values, end, is_merged = size, 0, -1, IS_MERGED
    for g in range(num_groups):  # filled counts: they lie before the rows
        for i in range(n):
            if counts[i] > 0:
                cell = g * num_rows + rows[i]
                if size > start and end == cell:
                    lengths[size - 1] += 1
                else:
                    if cell < end:
                        is_merged = 0
                    offsets[size], lengths[size] = cell, 1
                    size += 1
                end = cell + 1
                num_values += 1
    first_range = size
    for g in range(num_groups):
        table_start, width, k = geometry[g, 0], geometry[g, 1], geometry[g, 2]
        for i in range(n):
            count = counts[i]
            if count > 0:
                cell = g * num_rows + rows[i]
                entry = table_start + rows[i] * width + mirror[cell]
                if entry <= end:
                    is_merged = 0
                end = entry + count * k
                offsets[size], lengths[size] = entry, count * k
                size += 1
                num_values += count * k
                mirror[cell] += count * k
    result = num_values << VALUES_SHIFT | size << SIZE_SHIFT | is_merged
    is_single = size - first_range == ids.size and not state[EXPANDS]
    if is_single and late >= 0:
        late_offsets = _int64s(state, LATE_OFFSETS, late + ids.size)
        late_values = _int32s(state, LATE_VALUES, late + ids.size)
        for i in range(ids.size):
            values[first_range + i] = ids[i]
            late_offsets[late + i], late_values[late + i] = offsets[first_range + i], ids[i]
        return result | IS_LATE
    # Rows lie a multiple of 4 KiB apart, so their entries share few sets of the cache, and most stores miss it. Loads
    # of what is stored some turns later run ahead of them: 31 us against 79 for 2,048 cells.
    if is_single:
        seen = np.int64(0)
        for i in range(ids.size):
            if i + AHEAD < ids.size:
                seen += mirror[offsets[first_range + i + AHEAD]]
            mirror[offsets[first_range + i]] = ids[i]
            values[first_range + i] = ids[i]
        return result if seen >= 0 else REFUSED  # always the first: entries are at least 0; but the loads must be made
    block, r = 0, first_range
    for g in range(num_groups):
        k, last = geometry[g, 2], block + ids_per_group
        null, filler = geometry[g, 5], geometry[g, 7]
        while block < last:
            entry, end = offsets[r], offsets[r] + lengths[r]
            while entry < end:
                is_null = ids[block] == null
                for part in range(k):
                    mirror[entry] = filler if is_null else ids[block] * k + part
                    entry += 1
                block += 1
            if lengths[r] == 1:
                values[r] = mirror[offsets[r]]
            r += 1
    return result


@njit(cache=True, nogil=True)
def catch_up(state, late, per_call):
    """Write the late entries into the mirror: `late` of them, from calls of `per_call` each, all at different places.

    Calls that follow one another append to the same rows, so their entries share cache lines: one miss for each line
    instead of one for each entry.
    """
    mirror = _int32s(state, MIRROR, state[MIRROR_SIZE])
    offsets, values = _int64s(state, LATE_OFFSETS, late), _int32s(state, LATE_VALUES, late)
    for i in range(per_call):
        for place in range(i, late, per_call):
            mirror[offsets[place]] = values[place]


@njit(cache=True, nogil=True)
def truncate(
    rows,  # [n] int64
    kept,  # [n] int64, blocks to keep of each row, in every group
    state,  # see STATE; no entry is late
    stamp,
    size,  # ranges in the journal
):
    """Keep the first blocks of rows in all groups.

    Returns:
        The journal's size; REFUSED with nothing changed where anything is wrong.
    """
    n, num_groups, num_rows = rows.size, state[NUM_GROUPS], state[NUM_ROWS]
    geometry = _int64s(state, TABLES, (num_groups, NUM_FIELDS))
    mirror = _int32s(state, MIRROR, state[MIRROR_SIZE])
    offsets, lengths = _int64s(state, OFFSETS, state[JOURNAL_SIZE]), _int64s(state, LENGTHS, state[JOURNAL_SIZE])
    if size + 2 * num_groups * n > state[JOURNAL_SIZE]:
        return REFUSED
    if not _are_distinct_rows(rows, num_rows, _int64s(state, STAMPS, num_rows), stamp):
        return REFUSED
    for i in range(n):
        if kept[i] < 0:
            return REFUSED
    for g in range(num_groups):
        table_start, width, k, max_columns = geometry[g, 0], geometry[g, 1], geometry[g, 2], geometry[g, 3]
        filler = geometry[g, 7]
        for i in range(n):
            cell = g * num_rows + rows[i]
            filled = mirror[cell]
            columns = min(kept[i], max_columns // k) * k
            if columns < filled:
                mirror[cell] = columns
                first = table_start + rows[i] * width
                for column in range(columns, filled):
                    mirror[first + column] = filler
                offsets[size], lengths[size] = cell, 1
                offsets[size + 1], lengths[size + 1] = first + columns, filled - columns
                size += 2
    return size


@njit(cache=True, nogil=True)
def merge(
    offsets,  # [..] int64, a journal, written
    lengths,  # [..] int64
    size,  # ranges in the journal
):
    """Make the journal disjoint and ascending, in place.

    Returns its new size, the entries of all ranges, and whether every range has stayed where it was.
    """
    kept, total = 0, 0
    ascending = True
    end = np.int64(-1)
    for i in range(size):
        if lengths[i] == 0:
            continue
        if offsets[i] <= end:
            ascending = False
        end = offsets[i] + lengths[i]
        offsets[kept], lengths[kept] = offsets[i], lengths[i]
        total += lengths[i]
        kept += 1
    if ascending:
        return kept, total, kept == size
    order = np.argsort(offsets[:kept])
    sorted_offsets, sorted_lengths = offsets[:kept][order], lengths[:kept][order]
    size, total = 0, 0
    for i in range(kept):
        start, end = sorted_offsets[i], sorted_offsets[i] + sorted_lengths[i]
        if size > 0 and start <= offsets[size - 1] + lengths[size - 1]:
            grown = max(0, end - offsets[size - 1] - lengths[size - 1])
            lengths[size - 1] += grown
            total += grown
        else:
            offsets[size], lengths[size] = start, end - start
            total += end - start
            size += 1
    return size, total, False


@njit(cache=True, nogil=True)
def _is_constant(mirror, offset, length):
    for entry in range(offset + 1, offset + length):
        if mirror[entry] != mirror[offset]:
            return False
    return True


@njit(cache=True, nogil=True)
def pack_changes(state, knows_values, size, block):
    """As `Writes.pack_changes`, straight from the journal, which is merged: the entries used; REFUSED: no room.

    knows_values: the journal's own values hold for its ranges of one entry behind the filled counts. Else no entry is
    late.
    """
    mirror = _int32s(state, MIRROR, state[MIRROR_SIZE])
    offsets, lengths = _int64s(state, OFFSETS, state[JOURNAL_SIZE]), _int64s(state, LENGTHS, state[JOURNAL_SIZE])
    values_of = _int32s(state, VALUES, state[JOURNAL_SIZE])
    first_known = state[NUM_GROUPS] * state[NUM_ROWS]
    singles = num_ranges = values = num_constant_ranges = num_constants = 0
    for i in range(size):
        if lengths[i] == 1:
            singles += 1
        elif _is_constant(mirror, offsets[i], lengths[i]):
            num_constant_ranges += 1
            num_constants += lengths[i]
        else:
            num_ranges += 1
            values += lengths[i]
    end = CHANGES_HEADER + 2 * (singles + num_ranges) + values + 3 * num_constant_ranges
    if end > block.size:
        return REFUSED
    block[0], block[1], block[2], block[3], block[4] = singles, num_ranges, values, num_constant_ranges, num_constants
    single = CHANGES_HEADER
    ranged = single + 2 * singles
    value = ranged + 2 * num_ranges
    constant = value + values
    first_value, value_start, constant_start = value, 0, 0
    for i in range(size):
        offset, length = offsets[i], lengths[i]
        if length == 1:
            # The mirror's rows lie far apart: what the append has noted saves 2,048 cache misses of 7 ns.
            is_known = knows_values and offset >= first_known
            block[single], block[single + singles] = offset, values_of[i] if is_known else mirror[offset]
            single += 1
        elif _is_constant(mirror, offset, length):
            block[constant], block[constant + num_constant_ranges] = offset, constant_start
            block[constant + 2 * num_constant_ranges] = mirror[offset]
            constant_start += length
            constant += 1
        else:
            block[ranged], block[ranged + num_ranges] = offset, value_start
            ranged += 1
            for entry in range(length):
                block[first_value + value_start + entry] = mirror[offset + entry]
            value_start += length
    return end


@njit(cache=True, nogil=True)
def append_equally(
    rows,  # [n] int64, distinct rows of the table
    counts,  # [n] int64, blocks of each row, in every group; at least 1
    ids,  # [sum(counts) * num_groups] int32, row after row, in it group after group; any int32
    tables,  # [num_groups, 3] int64: table_start, width, blocks_per_kv_block
    num_rows,
    mirror,  # [mirror_size] int32, written; its entries may be any int32
    offsets,  # [journal_size] int64, a journal, written
    lengths,  # [journal_size] int64 or int32
    values,  # [n * num_groups + columns appended] int32, written: what the new ranges hold; or [0]
    size,  # ranges in the journal
):
    """Add blocks to rows of all groups, for the tables of a drop-in, which has checked that there is room.

    The new ranges are disjoint and ascending.

    Returns:
        The journal's size; REFUSED with nothing changed where it has no room.
    """
    n, num_groups, has_values = rows.size, tables.shape[0], values.size > 0
    if size + 2 * n * num_groups > offsets.size:
        return REFUSED
    next_value, next_count = n * num_groups, 0
    order, first_ids = np.argsort(rows), np.cumsum(counts) - counts
    next_range = size + n * num_groups
    for g in range(num_groups):
        table_start, width, k = tables[g, 0], tables[g, 1], tables[g, 2]
        for i in range(n):
            row, count = rows[order[i]], counts[order[i]]
            cell = g * num_rows + row
            entry = table_start + row * width + mirror[cell]
            offsets[size], lengths[size] = cell, 1
            offsets[next_range], lengths[next_range] = entry, count * k
            size += 1
            next_range += 1
            first_id = first_ids[order[i]] * num_groups + g * count
            for block_id in ids[first_id : first_id + count]:
                for part in range(k):
                    mirror[entry] = np.int32(np.int64(block_id) * k + part)
                    if has_values:
                        values[next_value] = mirror[entry]
                        next_value += 1
                    entry += 1
            mirror[cell] += count * k
            if has_values:
                values[next_count] = mirror[cell]
                next_count += 1
    return next_range
