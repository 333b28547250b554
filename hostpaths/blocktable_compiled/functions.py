"""The compiled functions. Arrays are those of `blocktable.rows`; geometry is [num_groups, 6] int64, see GEOMETRY."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM110 - Numba compiles loops, not generators
from __future__ import annotations

import numpy as np
from numba import njit

REFUSED = -1
GEOMETRY = ("table_start", "width", "blocks_per_kv_block", "max_columns", "lowest_id", "id_limit")
CHANGES_HEADER = 5
AHEAD = 16


@njit(cache=True, nogil=True)
def _any_expands(geometry):
    for g in range(geometry.shape[0]):
        if geometry[g, 2] > 1:
            return True
    return False


@njit(cache=True, nogil=True)
def append(
    rows,  # [n] int64
    ids,  # [total] int32 or int64, group after group
    ids_per_group,  # every group gets as many
    counts,  # [n] int64, blocks of each row, in every group
    geometry,  # [num_groups, 6] int64
    mirror,  # [arena.size] int32, written
    num_rows,
    stamps,  # [num_rows] int64, written
    stamp,  # a number that no earlier call had
    offsets,  # the journal, written
    lengths,
    values,  # value of each range of one entry, while it is known
    size,  # ranges in it
):
    """Add blocks to rows of all groups; return the journal's new size, or REFUSED with nothing changed."""
    n, num_groups = rows.size, geometry.shape[0]
    if size + 2 * num_groups * n > offsets.size:
        return REFUSED
    for i in range(n):
        row = rows[i]
        if row < 0 or row >= num_rows or stamps[row] == stamp:
            return REFUSED
        stamps[row] = stamp
    first_id = 0
    for g in range(num_groups):
        k, max_columns, lowest, limit = geometry[g, 2], geometry[g, 3], geometry[g, 4], geometry[g, 5]
        total = 0
        for i in range(n):
            count = counts[i]
            if count < 0 or count > max_columns or mirror[g * num_rows + rows[i]] + count * k > max_columns:
                return REFUSED
            total += count
        if total != ids_per_group:
            return REFUSED
        for j in range(first_id, first_id + total):
            if ids[j] < lowest or ids[j] >= limit:
                return REFUSED
        first_id += total

    start = size
    for g in range(num_groups):  # filled counts: they lie before the rows
        for i in range(n):
            if counts[i] > 0:
                cell = g * num_rows + rows[i]
                if size > start and offsets[size - 1] + lengths[size - 1] == cell:
                    lengths[size - 1] += 1
                else:
                    offsets[size], lengths[size] = cell, 1
                    size += 1
    first_range = size
    for g in range(num_groups):
        table_start, width, k = geometry[g, 0], geometry[g, 1], geometry[g, 2]
        for i in range(n):
            count = counts[i]
            if count > 0:
                cell = g * num_rows + rows[i]
                offsets[size], lengths[size] = table_start + rows[i] * width + mirror[cell], count * k
                size += 1
                mirror[cell] += count * k
    # Rows lie a multiple of 4 KiB apart, so their entries share few sets of the cache, and most stores miss it. Loads
    # of what is stored some turns later run ahead of them: 31 us against 79 for 2,048 cells.
    if size - first_range == ids.size and not _any_expands(geometry):
        seen = np.int64(0)
        for i in range(ids.size):
            if i + AHEAD < ids.size:
                seen += mirror[offsets[first_range + i + AHEAD]]
            mirror[offsets[first_range + i]] = ids[i]
            values[first_range + i] = ids[i]
        return size if seen >= 0 else REFUSED  # always the first: entries are at least 0; but the loads must be made
    block, r = 0, first_range
    for g in range(num_groups):
        k, last = geometry[g, 2], block + ids_per_group
        while block < last:
            entry, end = offsets[r], offsets[r] + lengths[r]
            while entry < end:
                for part in range(k):
                    mirror[entry] = ids[block] * k + part
                    entry += 1
                block += 1
            if lengths[r] == 1:
                values[r] = mirror[offsets[r]]
            r += 1
    return size


@njit(cache=True, nogil=True)
def merge(offsets, lengths, size):
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
def _is_null(mirror, offset, length):
    for entry in range(offset, offset + length):
        if mirror[entry] != 0:
            return False
    return True


@njit(cache=True, nogil=True)
def pack_changes(mirror, offsets, lengths, values_of, knows_values, first_known, size, block):
    """As `Writes.pack_changes`, straight from the journal, which is merged: the entries used; 0: no room."""
    singles = num_ranges = values = nulls = null_entries = 0
    for i in range(size):
        if lengths[i] == 1:
            singles += 1
        elif _is_null(mirror, offsets[i], lengths[i]):
            nulls += 1
            null_entries += lengths[i]
        else:
            num_ranges += 1
            values += lengths[i]
    end = CHANGES_HEADER + 2 * (singles + num_ranges + nulls) + values
    if end > block.size:
        return 0
    block[0], block[1], block[2], block[3], block[4] = singles, num_ranges, values, nulls, null_entries
    single = CHANGES_HEADER
    ranged = single + 2 * singles
    value = ranged + 2 * num_ranges
    null = value + values
    first_value, value_start, null_start = value, 0, 0
    for i in range(size):
        offset, length = offsets[i], lengths[i]
        if length == 1:
            # The mirror's rows lie far apart: what the append has noted saves 2,048 cache misses of 7 ns.
            is_known = knows_values and offset >= first_known
            block[single], block[single + singles] = offset, values_of[i] if is_known else mirror[offset]
            single += 1
        elif _is_null(mirror, offset, length):
            block[null], block[null + nulls] = offset, null_start
            null_start += length
            null += 1
        else:
            block[ranged], block[ranged + num_ranges] = offset, value_start
            ranged += 1
            for entry in range(length):
                block[first_value + value_start + entry] = mirror[offset + entry]
            value_start += length
    return end
