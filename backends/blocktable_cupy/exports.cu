// The kernels of exports: a batch's rows in the layouts that attention kernels read. See common.cuh.
//
// All but the last two begin with the same parameters: the batch, and the groups that are exported together
// ("members"), which share one geometry. counts is [2 * max_batch + 2]: entries of each batch row; those of the call
// before; all; all of the call before. Place j of a batch row is column part + j of its row (R34).

static const int COUNT_COLUMNS = 0;  // what is an entry: a column,
static const int COUNT_BLOCKS = 1;   // a kernel block that holds tokens,
static const int COUNT_TOKENS = 2;   // a token,
static const int COUNT_RING = 3;     // such a block of a ring, which repeats its columns

static const int INDEX_REQUESTS = 4;  // what is written for each of COUNT_BLOCKS: its request

static const int FORM_VALUES = 1;  // of a table's row: a row of V offsets follows it,
static const int FORM_RING = 2;    // or it shows a ring at true positions (R35)

static const int STATE_LAST = 1;  // which columns of a state group are exported
static const int STATE_ALIGNED = 2;

static const int64 MAX_NUM_CUT = 2147483647;  // it is int32
static const int NONE = -1;                   // of a token without a request, a position without a slot

#define SOURCE \
  const int *__restrict__ idx_mapping,             /* [num_reqs], batch index -> row */ \
      const int *__restrict__ num_computed_tokens, /* [num_reqs], batch index -> tokens */ \
      const int *__restrict__ seq_lens,            /* [num_reqs], batch index -> tokens */ \
      const int *__restrict__ first_tokens,        /* [num_reqs], batch index -> token that it begins with */ \
      int num_reqs, int max_batch, int max_num_rows, \
      const Group *__restrict__ groups,              /* [num_groups] */ \
      const int *__restrict__ members,               /* [num_members], groups */ \
      int num_members, const int *__restrict__ arena /* [arena.size] */

static __device__ __forceinline__ int64 smaller(int64 a, int64 b) { return a < b ? a : b; }
static __device__ __forceinline__ int64 larger(int64 a, int64 b) { return a > b ? a : b; }

// How many of a batch row's first `lengths[i]` tokens this rank holds; none for a padding entry.
static __device__ __forceinline__ int64 length_of(const Group& group, const int* lengths, int i, int row) {
  int64 length = row < 0 ? 0 : lengths[i];
  if (length <= 0) return 0;
  return group.world_size > 1 ? local_length(group, length) : length;
}

// Column of its row that a batch row begins with.
static __device__ __forceinline__ int64 part_of(const Group& group, const int* first_tokens, int i, int row) {
  return divide(length_of(group, first_tokens, i, row), group.tokens_per_column);
}

// Columns of a row that the window has passed.
static __device__ __forceinline__ int64 first_column_of(
    const Group& group, const int* num_computed_tokens, int i, int row
) {
  if (!group.sliding_window || row < 0) return 0;
  int64 first = larger(0, num_computed_tokens[i] - group.sliding_window + 1);
  if (group.world_size > 1) first = local_length(group, first);
  return divide(first, group.tokens_per_column);
}

// Columns that a row fills; none for a padding entry.
static __device__ __forceinline__ int64 filled_columns(
    const Group& group, int g, const int* arena, int max_num_rows, int row
) {
  return row < 0 ? 0 : smaller(group.width, arena[(int64)g * max_num_rows + row]);
}

// What column `column` of a row holds: -1 where that is not a block, and after what the row fills.
static __device__ __forceinline__ int entry_of(
    const Group& group, const int* arena, int row, int64 filled, int64 column
) {
  if (column >= filled) return -1;
  int entry = arena[group.table_start + row * group.width + column];
  return is_missing(group, entry) ? -1 : entry;
}

// Count what every batch row exports, and keep what it did before.
extern "C" __global__ void count_entries(
    SOURCE,
    int width,  // columns that a row may export
    int unit,   // COUNT_*
    int* __restrict__ counts,   // [2 * max_batch + 2], written
    int* __restrict__ lengths,  // [max_batch], written
    int* __restrict__ num_cut   // [1], rows that begin inside a block are added
) {
  // step 1: which batch row
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64 i = thread; i < max_batch; i += (int64)gridDim.x * blockDim.x) {
    const Group& group = groups[members[0]];
    int row = row_of(idx_mapping, (int)i, num_reqs, max_num_rows);
    // step 2: how many columns its row fills, in every group
    int64 columns = row < 0 ? 0 : width;
    for (int m = 0; m < num_members && row >= 0; ++m)
      columns = smaller(columns, arena[(int64)members[m] * max_num_rows + row]);
    if (unit == COUNT_RING && columns > 0) columns = width;
    int64 tokens = group.tokens_per_column, first = length_of(group, first_tokens, (int)i, row);
    int64 part = divide(first, tokens);
    int64 count = larger(0, columns - part);
    // step 3: how many tokens of it this rank holds
    int64 length = larger(0, length_of(group, seq_lens, (int)i, row) - part * tokens);
    lengths[i] = (int)length;
    if (first != part * tokens) {
      atomicAdd((unsigned*)num_cut, 1u);
      atomicMin((unsigned*)num_cut, (unsigned)MAX_NUM_CUT);
    }
    // step 4: store how many entries that makes
    if (unit == COUNT_BLOCKS || unit == COUNT_RING) count = smaller(count, divide(length + tokens - 1, tokens));
    if (unit == COUNT_TOKENS) count = smaller(count * tokens, length);
    counts[max_batch + i] = counts[i];
    counts[i] = (int)count;
  }
}

// Write where each request's entries begin, and how many tokens its last page holds.
extern "C" __global__ void start_requests(
    SOURCE,
    int unit,      // COUNT_*
    int capacity,  // entries of a member's indices
    const int* __restrict__ lengths,   // [max_batch]
    int* __restrict__ counts,          // [2 * max_batch + 2], the last two written
    int* __restrict__ indptr,          // [max_batch + 1], written
    int* __restrict__ last_page_lens,  // [max_batch], written
    int* __restrict__ num_cut          // [1], what the capacity has left out is added
) {
  // step 1: which request
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64 i = thread; i <= max_batch; i += (int64)gridDim.x * blockDim.x) {
    // step 2: store how many entries lie before it
    int64 before = 0;
    int end = (int)smaller(i, num_reqs);
#pragma unroll 8
    for (int j = 0; j < end; ++j) before += counts[j];
    int64 start = smaller(before, capacity);
    indptr[i] = (int)start;
    if (i < max_batch) {
      // step 3: store how many tokens its last page holds
      int64 num_pages = smaller(before + (i < num_reqs ? counts[i] : 0), capacity) - start;
      int64 tokens = unit == COUNT_TOKENS ? 1 : groups[members[0]].tokens_per_column;
      last_page_lens[i] = num_pages ? (int)smaller(tokens, lengths[i] - (num_pages - 1) * tokens) : 0;
    } else {
      // step 4: remember how many entries there are, and count those that are cut
      counts[2 * max_batch + 1] = counts[2 * max_batch];
      counts[2 * max_batch] = (int)start;
      num_cut[0] = (int)smaller(num_cut[0] + (before - start), MAX_NUM_CUT);
    }
  }
}

// Write the entries of all requests, one request after another, and the fill over what a larger batch left.
extern "C" __global__ void write_indices(
    SOURCE,
    int unit,      // COUNT_* or INDEX_REQUESTS
    int capacity,  // entries of a member's indices
    const int* __restrict__ counts,  // [2 * max_batch + 2]
    const int* __restrict__ indptr,  // [max_batch + 1]
    int* __restrict__ entries        // [num_members, capacity], written
) {
  int total = counts[2 * max_batch];
  int64 end = smaller(capacity, larger(total, counts[2 * max_batch + 1]));
  // step 1: which entry and group
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    int64 tokens = unit == COUNT_TOKENS ? groups[g].tokens_per_column : 1;  // of a page
    for (int64 entry = thread; entry < end; entry += (int64)gridDim.x * blockDim.x) {
      // step 2: the fill after the last entry
      int64 index = larger(0, groups[g].filler), rest = 0;
      // step 3: which request and column
      int i = entry < total ? request_of(indptr, num_reqs, (int)entry) : -1;
      if (unit == INDEX_REQUESTS) {
        index = i;  // -1 after the last
      } else if (i >= 0) {
        int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
        int64 place = entry - indptr[i], j = tokens == 1 ? place : divide(place, tokens);
        int64 column = part_of(groups[g], first_tokens, i, row) + j;
        int64 first_column = first_column_of(groups[g], num_computed_tokens, i, row);
        int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
        int block_id = column < first_column ? -1 : entry_of(groups[g], arena, row, filled, column);
        if (block_id >= 0) index = block_id;
        rest = place - j * tokens;
      }
      // step 4: store the entry
      entries[(int64)m * capacity + entry] = (int)(index * tokens + rest);
    }
  }
}

// Write the columns in use of every batch row, and the fill after them.
extern "C" __global__ void write_table(
    SOURCE,
    int width,  // columns of a row of the table
    const int* __restrict__ counts,  // [2 * max_batch + 2]
    int64 null,  // -1: it stands where there is no entry; 0: a valid entry does
    int64 entry_scale,
    int form,            // FORM_*, or 0: a table's row and nothing else
    int64 value_offset,  // from a K offset to its V offset
    SLOT_T* __restrict__ entries  // [num_members, max_batch, 1 + has_values, width], written
) {
  bool has_values = form == FORM_VALUES;
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    for (int i = blockIdx.x; i < max_batch; i += gridDim.x) {
      int64 count = smaller(width, counts[i]), before = smaller(width, counts[max_batch + i]);
      int64 start = ((int64)m * max_batch + i) * (1 + has_values) * width;
      int64 fill = null < 0 ? null : larger(0, groups[g].filler) * entry_scale;
      // step 2: the fill over what an earlier batch left after its columns
      for (int64 j = count + threadIdx.x; j < before; j += blockDim.x) {
        entries[start + j] = (SLOT_T)fill;
        if (has_values) entries[start + width + j] = (SLOT_T)fill;
      }
      // step 3: how many of them the window has passed
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int64 first_column = first_column_of(groups[g], num_computed_tokens, i, row);
      int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
      int64 part = part_of(groups[g], first_tokens, i, row), tokens = groups[g].tokens_per_column;
      if (form == FORM_RING) {  // and how many later tokens have overwritten
        int64 overwritten = length_of(groups[g], seq_lens, i, row) - filled * tokens;
        first_column = larger(first_column, divide(larger(0, overwritten), tokens));
      }
      // step 4: store the columns in use
      for (int64 j = threadIdx.x; j < count; j += blockDim.x) {
        int64 column = part + j, place = form == FORM_RING ? modulo(column, filled) : column;
        int block_id = column < first_column ? -1 : entry_of(groups[g], arena, row, filled, place);
        int64 entry = block_id < 0 ? fill : block_id * entry_scale;
        entries[start + j] = (SLOT_T)entry;
        if (has_values) entries[start + width + j] = (SLOT_T)(entry + value_offset);
      }
    }
  }
}

// Take the blocks of the call before out of every batch row's map.
extern "C" __global__ void clear_inverse_map(
    SOURCE,
    int width,  // columns that a row may export
    int num_kernel_blocks,
    const int* __restrict__ counts,  // [2 * max_batch + 2]
    const int* __restrict__ mapped,  // [num_members, max_batch, width], blocks that the call before mapped
    int null,  // -1
    int* __restrict__ entries  // [num_members, max_batch, num_kernel_blocks], written
) {
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    for (int i = blockIdx.x; i < max_batch; i += gridDim.x) {
      int64 before = smaller(width, counts[max_batch + i]), cell = (int64)m * max_batch + i;
      // step 2: forget the column of every block that it held
      for (int64 j = threadIdx.x; j < before; j += blockDim.x) {
        int block_id = mapped[cell * width + j];
        if (block_id >= 0 && block_id < num_kernel_blocks) entries[cell * num_kernel_blocks + block_id] = null;
      }
    }
  }
}

// Write the column of every block that a batch row's tokens lie in.
extern "C" __global__ void write_inverse_map(
    SOURCE,
    int width,  // columns that a row may export
    int num_kernel_blocks,
    const int* __restrict__ counts,  // [2 * max_batch + 2]
    int* __restrict__ mapped,        // [num_members, max_batch, width], written
    int* __restrict__ entries        // [num_members, max_batch, num_kernel_blocks], written
) {
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    for (int i = blockIdx.x; i < max_batch; i += gridDim.x) {
      int64 count = smaller(width, counts[i]), cell = (int64)m * max_batch + i;
      // step 2: how many of its columns the window has passed
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int64 first_column = first_column_of(groups[g], num_computed_tokens, i, row);
      int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
      int64 part = part_of(groups[g], first_tokens, i, row);
      for (int64 j = threadIdx.x; j < count; j += blockDim.x) {
        // step 3: remember its blocks
        int64 column = part + j;
        int block_id = column < first_column ? -1 : entry_of(groups[g], arena, row, filled, column);
        mapped[cell * width + j] = block_id;
        // step 4: store the column of each block, the last one of a block that stands there twice
        if (block_id >= 0 && block_id < num_kernel_blocks)
          atomicMax(entries + cell * num_kernel_blocks + block_id, (int)column);
      }
    }
  }
}

// Write the blocks that hold every batch row's states.
extern "C" __global__ void gather_state_indices(
    SOURCE,
    int state_columns,  // STATE_*, or 0: the first
    int num_columns,
    int64 null,  // -1: it stands where there is no state; 0: a valid block does
    SLOT_T* __restrict__ entries  // [num_members, max_batch, num_columns], written
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_cells = (int64)max_batch * num_columns;
  // step 1: which batch row, group and place
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    int64 fill = null < 0 ? null : larger(0, groups[g].filler);
    for (int64 cell = thread; cell < num_cells; cell += (int64)gridDim.x * blockDim.x) {
      int i = (int)divide(cell, num_columns);
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      // step 2: which column
      int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row), first = 0;
      if (state_columns == STATE_LAST) first = larger(0, filled - num_columns);
      if (row >= 0 && state_columns == STATE_ALIGNED)
        first = divide(larger(0, (int64)seq_lens[i] - 1), groups[g].tokens_per_column);
      // step 3: store the block, or the fill where there is none
      int block_id = entry_of(groups[g], arena, row, filled, first + (cell - (int64)i * num_columns));
      entries[m * num_cells + cell] = (SLOT_T)(block_id < 0 ? fill : block_id);
    }
  }
}

// Write the request of every token, and where each request's tokens begin.
extern "C" __global__ void map_requests(
    const int* __restrict__ idx_mapping,      // [num_reqs], batch index -> row
    const int* __restrict__ query_start_loc,  // [num_reqs + 1], first token of each request
    int num_reqs,
    int max_batch,
    int max_num_rows,
    int num_members,
    int capacity,              // entries of a member's requests
    int* __restrict__ indptr,  // [max_batch + 1], written
    int* __restrict__ entries  // [num_members, capacity], written
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  // step 1: store where each request begins, and the last start over the padding
  for (int64 i = thread; i <= max_batch && blockIdx.y == 0; i += num_threads)
    indptr[i] = (int)larger(0, smaller(query_start_loc[smaller(i, num_reqs)], capacity));
  // step 2: store each token's request, -1 for tokens of padding entries and of no request
  for (int64 token = thread; token < capacity; token += num_threads) {
    int request = request_of(query_start_loc, num_reqs, (int)token);
    bool is_given = request >= 0 && token < query_start_loc[request + 1];
    if (!is_given || row_of(idx_mapping, request, num_reqs, max_num_rows) < 0) request = NONE;
    for (int m = blockIdx.y; m < num_members; m += gridDim.y) entries[(int64)m * capacity + token] = request;
  }
}

// Write the slot of every position, -1 where it has none.
extern "C" __global__ void map_positions(
    const int* __restrict__ rows,       // [num_tokens], token -> row
    const int* __restrict__ positions,  // [num_tokens, num_positions]
    int num_tokens,
    int num_positions,
    int max_num_rows,
    const Group* __restrict__ groups,  // [num_groups]
    int group,
    const int* __restrict__ arena,  // [arena.size]
    SLOT_T* __restrict__ slots      // [num_tokens, num_positions], written
) {
  const Group& spec = groups[group];
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_cells = (int64)num_tokens * num_positions;
  // step 1: which token and position
  for (int64 cell = thread; cell < num_cells; cell += (int64)gridDim.x * blockDim.x) {
    int token = (int)divide(cell, num_positions);
    int64 position = positions[cell], tokens = spec.tokens_per_column;
    // step 2: which row, and how many columns it fills
    int row = row_of(rows, token, num_tokens, max_num_rows);
    int64 columns = filled_columns(spec, group, arena, max_num_rows, row);
    bool is_valid = position >= 0 && columns > 0;
    // step 3: whose token it is, and its index among this rank's tokens
    int64 local = position;
    if (is_valid && spec.world_size > 1) local = owned_index(spec, position);
    if (is_valid && spec.slot_mode == SLOT_MODE_RING) local = modulo(position, columns * tokens);
    // step 4: which column, and whether the row fills it
    int64 column = divide(larger(0, local), tokens);
    is_valid = is_valid && local >= 0 && column < columns;
    // step 5: which kernel block
    int64 block_id = is_valid ? arena[spec.table_start + row * spec.width + column] : 0;
    if (spec.null_is_pad && is_missing(spec, block_id)) is_valid = false;
    // step 6: store the slot
    slots[cell] = (SLOT_T)(is_valid ? block_id * tokens + (local - column * tokens) : NONE);
  }
}
