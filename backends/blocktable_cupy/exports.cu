// The kernels of exports: a batch's rows in the layouts that attention kernels read. See common.cuh.
//
// All begin with the same parameters: the batch, and the groups that are exported together ("members"), which share one
// geometry. counts is [2 * max_num_reqs + 2]: entries of each batch row; those of the call before; all; all of the call
// before.

static const int COUNT_COLUMNS = 0;  // what is an entry: a column,
static const int COUNT_BLOCKS = 1;   // a kernel block that holds tokens,
static const int COUNT_TOKENS = 2;   // a token

static const int STATE_LAST = 1;  // which columns of a state group are exported
static const int STATE_ALIGNED = 2;

static const int64 MAX_NUM_CUT = 2147483647;  // it is int32

#define SOURCE \
  const int *__restrict__ idx_mapping,             /* [num_reqs], batch index -> row */ \
      const int *__restrict__ num_computed_tokens, /* [num_reqs], batch index -> tokens */ \
      const int *__restrict__ seq_lens,            /* [num_reqs], batch index -> tokens */ \
      int num_reqs, int max_num_reqs, int max_num_rows, \
      const Group *__restrict__ groups,              /* [num_groups] */ \
      const int *__restrict__ members,               /* [num_members], groups */ \
      int num_members, const int *__restrict__ arena /* [arena.size] */

static __device__ __forceinline__ int64 smaller(int64 a, int64 b) { return a < b ? a : b; }
static __device__ __forceinline__ int64 larger(int64 a, int64 b) { return a > b ? a : b; }

// Tokens of a batch row that this rank holds; none for a dummy.
static __device__ __forceinline__ int64 length_of(const Group& group, const int* seq_lens, int i, int row) {
  int64 length = row < 0 ? 0 : seq_lens[i];
  if (length <= 0) return 0;
  return group.world_size > 1 ? local_length(group, length) : length;
}

// Columns of a batch row that the window has left behind.
static __device__ __forceinline__ int64 first_column_of(const Group& group, const int* num_computed_tokens, int i) {
  if (!group.sliding_window) return 0;
  int64 first = larger(0, num_computed_tokens[i] - group.sliding_window + 1);
  if (group.world_size > 1) first = local_length(group, first);
  return divide(first, group.tokens_per_column);
}

// Columns that a row fills; none for a dummy.
static __device__ __forceinline__ int64 filled_columns(
    const Group& group, int g, const int* arena, int max_num_rows, int row
) {
  return row < 0 ? 0 : smaller(group.width, arena[(int64)g * max_num_rows + row]);
}

// What column `column` of a row holds: -1 where that is no block, before the window, and behind what the row fills.
static __device__ __forceinline__ int entry_of(
    const Group& group, const int* arena, int row, int64 first_column, int64 filled, int64 column
) {
  if (column < first_column || column >= filled) return -1;
  int entry = arena[group.table_start + row * group.width + column];
  return is_missing(group, entry) ? -1 : entry;
}

// Count what every batch row exports, and keep what it did before.
extern "C" __global__ void count_entries(
    SOURCE,
    int width,  // columns that a row may export
    int unit,   // COUNT_*
    int* __restrict__ counts,  // [2 * max_num_reqs + 2], written
    int* __restrict__ lengths  // [max_num_reqs], written
) {
  // step 1: which batch row
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64 i = thread; i < max_num_reqs; i += (int64)gridDim.x * blockDim.x) {
    const Group& group = groups[members[0]];
    int row = row_of(idx_mapping, (int)i, num_reqs, max_num_rows);
    // step 2: how many columns its row fills, in every group
    int64 columns = row < 0 ? 0 : width;
    for (int m = 0; m < num_members && row >= 0; ++m)
      columns = smaller(columns, arena[(int64)members[m] * max_num_rows + row]);
    // step 3: how many tokens of it this rank holds
    int64 length = length_of(group, seq_lens, (int)i, row);
    lengths[i] = (int)length;
    // step 4: store how many entries that makes
    int64 tokens = group.tokens_per_column, count = columns;
    if (unit == COUNT_BLOCKS) count = smaller(columns, divide(length + tokens - 1, tokens));
    if (unit == COUNT_TOKENS) count = smaller(columns * tokens, length);
    counts[max_num_reqs + i] = counts[i];
    counts[i] = (int)count;
  }
}

// Write where each request's entries begin, and how many tokens its last page holds.
extern "C" __global__ void start_requests(
    SOURCE,
    int unit,      // COUNT_*
    int capacity,  // entries of a member's indices
    const int* __restrict__ lengths,   // [max_num_reqs]
    int* __restrict__ counts,          // [2 * max_num_reqs + 2], the last two written
    int* __restrict__ indptr,          // [max_num_reqs + 1], written
    int* __restrict__ last_page_lens,  // [max_num_reqs], written
    int* __restrict__ num_cut          // [1], what the capacity has left out is added
) {
  // step 1: which request
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64 i = thread; i <= max_num_reqs; i += (int64)gridDim.x * blockDim.x) {
    // step 2: store how many entries lie before it
    int64 before = 0;
    int end = (int)smaller(i, num_reqs);
#pragma unroll 8
    for (int j = 0; j < end; ++j) before += counts[j];
    int64 start = smaller(before, capacity);
    indptr[i] = (int)start;
    if (i < max_num_reqs) {
      // step 3: store how many tokens its last page holds
      int64 num_pages = smaller(before + (i < num_reqs ? counts[i] : 0), capacity) - start;
      int64 tokens = unit == COUNT_TOKENS ? 1 : groups[members[0]].tokens_per_column;
      last_page_lens[i] = num_pages ? (int)smaller(tokens, lengths[i] - (num_pages - 1) * tokens) : 0;
    } else {
      // step 4: remember how many entries there are, and count those that are cut
      counts[2 * max_num_reqs + 1] = counts[2 * max_num_reqs];
      counts[2 * max_num_reqs] = (int)start;
      num_cut[0] = (int)smaller(num_cut[0] + (before - start), MAX_NUM_CUT);
    }
  }
}

// Write the entries of all requests, one request after another, and the fill over what a larger batch left.
extern "C" __global__ void write_indices(
    SOURCE,
    int unit,      // COUNT_*
    int capacity,  // entries of a member's indices
    const int* __restrict__ counts,  // [2 * max_num_reqs + 2]
    const int* __restrict__ indptr,  // [max_num_reqs + 1]
    int* __restrict__ entries        // [num_members, capacity], written
) {
  int total = counts[2 * max_num_reqs];
  int64 end = smaller(capacity, larger(total, counts[2 * max_num_reqs + 1]));
  // step 1: which entry and group
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    int64 tokens = unit == COUNT_TOKENS ? groups[g].tokens_per_column : 1;  // of a page
    for (int64 entry = thread; entry < end; entry += (int64)gridDim.x * blockDim.x) {
      // step 2: the fill behind the last entry
      int64 index = larger(0, groups[g].filler), rest = 0;
      if (entry < total) {
        // step 3: which request and column
        int i = 0, high = max_num_reqs;
        while (high - i > 1) {
          int middle = i + (high - i) / 2;
          if (indptr[middle] <= entry) i = middle;
          else high = middle;
        }
        int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
        int64 place = entry - indptr[i], column = tokens == 1 ? place : divide(place, tokens);
        int64 first_column = row < 0 ? 0 : first_column_of(groups[g], num_computed_tokens, i);
        int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
        int block_id = entry_of(groups[g], arena, row, first_column, filled, column);
        if (block_id >= 0) index = block_id;
        rest = place - column * tokens;
      }
      // step 4: store the entry
      entries[(int64)m * capacity + entry] = (int)(index * tokens + rest);
    }
  }
}

// Write the columns in use of every batch row, and the fill behind them.
extern "C" __global__ void write_table(
    SOURCE,
    int width,  // columns of a row of the table
    const int* __restrict__ counts,  // [2 * max_num_reqs + 2]
    int64 null,  // -1: it stands where there is no entry; 0: a valid entry does
    int64 entry_scale,
    int has_values,      // whether a row of V offsets follows each row of K offsets
    int64 value_offset,  // from a K offset to its V offset
    SLOT_T* __restrict__ entries  // [num_members, max_num_reqs, 1 + has_values, width], written
) {
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    for (int i = blockIdx.x; i < max_num_reqs; i += gridDim.x) {
      int64 count = smaller(width, counts[i]), before = smaller(width, counts[max_num_reqs + i]);
      int64 start = ((int64)m * max_num_reqs + i) * (1 + has_values) * width;
      int64 fill = null < 0 ? null : larger(0, groups[g].filler) * entry_scale;
      // step 2: the fill over what an earlier batch left behind its columns
      for (int64 column = count + threadIdx.x; column < before; column += blockDim.x) {
        entries[start + column] = (SLOT_T)fill;
        if (has_values) entries[start + width + column] = (SLOT_T)fill;
      }
      // step 3: how many of them the window has left behind
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int64 first_column = row < 0 ? 0 : first_column_of(groups[g], num_computed_tokens, i);
      int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
      // step 4: store the columns in use
      for (int64 column = threadIdx.x; column < count; column += blockDim.x) {
        int block_id = entry_of(groups[g], arena, row, first_column, filled, column);
        int64 entry = block_id < 0 ? fill : block_id * entry_scale;
        entries[start + column] = (SLOT_T)entry;
        if (has_values) entries[start + width + column] = (SLOT_T)(entry + value_offset);
      }
    }
  }
}

// Take the blocks of the call before out of every batch row's map.
extern "C" __global__ void clear_inverse_map(
    SOURCE,
    int width,  // columns that a row may export
    int num_kernel_blocks,
    const int* __restrict__ counts,  // [2 * max_num_reqs + 2]
    const int* __restrict__ mapped,  // [num_members, max_num_reqs, width], blocks that the call before mapped
    int null,  // -1
    int* __restrict__ entries  // [num_members, max_num_reqs, num_kernel_blocks], written
) {
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    for (int i = blockIdx.x; i < max_num_reqs; i += gridDim.x) {
      int64 before = smaller(width, counts[max_num_reqs + i]), cell = (int64)m * max_num_reqs + i;
      // step 2: forget the column of every block that it held
      for (int64 column = threadIdx.x; column < before; column += blockDim.x) {
        int block_id = mapped[cell * width + column];
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
    const int* __restrict__ counts,  // [2 * max_num_reqs + 2]
    int* __restrict__ mapped,        // [num_members, max_num_reqs, width], written
    int* __restrict__ entries        // [num_members, max_num_reqs, num_kernel_blocks], written
) {
  // step 1: which batch row and group
  for (int m = blockIdx.y; m < num_members; m += gridDim.y) {
    int g = members[m];
    for (int i = blockIdx.x; i < max_num_reqs; i += gridDim.x) {
      int64 count = smaller(width, counts[i]), cell = (int64)m * max_num_reqs + i;
      // step 2: how many of its columns the window has left behind
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int64 first_column = row < 0 ? 0 : first_column_of(groups[g], num_computed_tokens, i);
      int64 filled = filled_columns(groups[g], g, arena, max_num_rows, row);
      for (int64 column = threadIdx.x; column < count; column += blockDim.x) {
        // step 3: remember its blocks
        int block_id = entry_of(groups[g], arena, row, first_column, filled, column);
        mapped[cell * width + column] = block_id;
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
    SLOT_T* __restrict__ entries  // [num_members, max_num_reqs, num_columns], written
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_cells = (int64)max_num_reqs * num_columns;
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
      int block_id = entry_of(groups[g], arena, row, 0, filled, first + (cell - (int64)i * num_columns));
      entries[m * num_cells + cell] = (SLOT_T)(block_id < 0 ? fill : block_id);
    }
  }
}
