// The kernels of a step: the four plain ones, and step_batch, which is gather and slots in one. They follow common.cuh.
//
// A table's memory is one arena: filled counts [num_groups, max_num_rows], then each group's rows [max_num_rows,
// width]. A batch is laid out likewise for max_num_reqs rows: its counts say how many columns each batch row holds.
// After these batch_entries entries come how many rows the last batch had, and a copy of that and of the counts, which
// the fused step makes for itself: [batch_entries + 2 + num_groups * max_num_reqs] in all.
//
// HAS_* say what the table's groups need (KernelOptions.features). A launch of a few microseconds is half instruction
// fetches: what no group needs is left out when the module is compiled.

// In a fused step, step_batch may start while apply_changes runs: it loads what that kernel does not write, and waits
// for its end here. Where the GPU or the launch does not overlap them this is nothing.
static __device__ __forceinline__ void wait_for_changes(const int*& arena) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The pointer comes out of it, so that no load through it, however invariant it looks, moves before it.
  asm volatile("griddepcontrol.wait;" : "+l"(arena) : : "memory");
#endif
}

static __device__ __forceinline__ void wait_for_changes(const int*& arena, int*& batch) {
  wait_for_changes(arena);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("" : "+l"(batch) : : "memory");
#endif
}

static __device__ __forceinline__ void let_step_batch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What stands before packed changes.
struct Counts {
  int num_singles;
  int num_ranges;
  int num_range_values;
  int num_constant_ranges;
  int num_constants;
};

// Index of the range that `value` lies in; starts[0] is 0.
static __device__ __forceinline__ int range_of(const int* starts, int num_ranges, int value) {
  int range_index = 0, end = num_ranges;
  while (end - range_index > 1) {
    int middle = range_index + (end - range_index) / 2;
    if (starts[middle] <= value) range_index = middle;
    else end = middle;
  }
  return range_index;
}

// Do apply_changes. The first num_groups * copy_parts blocks copy counts, the others write.
static __device__ __forceinline__ void apply(
    const int* __restrict__ changes, const Counts& counts, int* __restrict__ arena, int num_groups, int max_num_reqs,
    int64 batch_entries, int* batch, int copy_parts, int* checker, int64 mark, int64* last_mark
) {
  let_step_batch_start();
  int copy_blocks = num_groups * copy_parts, block = (int)blockIdx.x - copy_blocks;
  // step 1: keep the counts that step_batch replaces
  if (block < 0) {
    int held_rows = batch[batch_entries], g = blockIdx.x / copy_parts, part = blockIdx.x % copy_parts;
    const int* held = batch + (int64)g * max_num_reqs;
    int* kept = batch + batch_entries + 1;
    for (int i = part * blockDim.x + threadIdx.x; i < held_rows; i += copy_parts * blockDim.x)
      kept[1 + (int64)g * max_num_reqs + i] = held[i];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      kept[0] = held_rows;
      last_mark[0] = mark;
      if (CHECKED) checker[0] += 1;  // the call that step_batch belongs to
    }
    return;
  }
  int thread = block * blockDim.x + threadIdx.x, num_threads = (gridDim.x - copy_blocks) * blockDim.x;
  const int* single_offsets = changes;
  const int* singles = single_offsets + counts.num_singles;
  const int* range_offsets = singles + counts.num_singles;
  const int* range_starts = range_offsets + counts.num_ranges;
  const int* range_values = range_starts + counts.num_ranges;
  const int* constant_offsets = range_values + counts.num_range_values;
  const int* constant_starts = constant_offsets + counts.num_constant_ranges;
  const int* constants = constant_starts + counts.num_constant_ranges;
  // step 2: store the single values
  for (int i = thread; i < counts.num_singles; i += num_threads) arena[single_offsets[i]] = singles[i];
  // step 3: store the ranges
  for (int i = thread; i < counts.num_range_values; i += num_threads) {
    int range_index = range_of(range_starts, counts.num_ranges, i);
    arena[(int64)range_offsets[range_index] + (i - range_starts[range_index])] = range_values[i];
  }
  // step 4: store the constant ranges
  for (int i = thread; i < counts.num_constants; i += num_threads) {
    int range_index = range_of(constant_starts, counts.num_constant_ranges, i);
    arena[(int64)constant_offsets[range_index] + (i - constant_starts[range_index])] = constants[range_index];
  }
}

// Write a commit's changes into the arena; in a fused step, keep the counts that the batch holds as well.
extern "C" __global__ void apply_changes(
    const int* __restrict__ changes,  // [2 * (num_singles + num_ranges) + num_range_values + 3 * num_constant_ranges]
    int num_singles,
    int num_ranges,
    int num_range_values,
    int num_constant_ranges,
    int num_constants,
    int* __restrict__ arena,  // [arena.size], written
    int num_groups,
    int max_num_reqs,
    int64 batch_entries,
    int* batch,       // [batch_entries + 2 + num_groups * max_num_reqs], the copy of its counts written
    int copy_parts,   // blocks that copy each group's counts; 0: nothing is copied
    int* checker,     // [checker_size], the number of the call advanced where counts are copied
    int64 mark,       // number of the step; 0: the host waits for none
    int64* last_mark  // [1], written where counts are copied
) {
  Counts counts = {num_singles, num_ranges, num_range_values, num_constant_ranges, num_constants};
  apply(changes, counts, arena, num_groups, max_num_reqs, batch_entries, batch, copy_parts, checker, mark, last_mark);
}

// The same changes in the launch's own parameters: nothing to stage, nothing to wait for, nothing to race with. Of
// several sizes, since the driver copies the whole of a kernel's parameters; 32,764 bytes are the most it takes.
template <int ENTRIES>
struct Changes {
  Counts counts;
  int data[ENTRIES - 5];
};

#define APPLY_CHANGES(ENTRIES) \
  extern "C" __global__ void apply_changes_##ENTRIES( \
      const __grid_constant__ Changes<ENTRIES> changes, int* arena, int num_groups, int max_num_reqs, \
      int64 batch_entries, int* batch, int copy_parts, int* checker, int64 mark, int64* last_mark \
  ) { \
    apply( \
        changes.data, changes.counts, arena, num_groups, max_num_reqs, batch_entries, batch, copy_parts, checker, \
        mark, last_mark \
    ); \
  }
APPLY_CHANGES(245)
APPLY_CHANGES(605)
APPLY_CHANGES(1905)
APPLY_CHANGES(8165)

// Make columns of a batch row NULL: every `step`-th from `first` on, before `end`.
static __device__ __forceinline__ void null_columns(
    const Group* __restrict__ groups, int g, int* __restrict__ batch, int i, int first, int end, int step
) {
  // step 3: NULL over what an earlier batch left after them
  int filler = (int)groups[g].filler;
  int* batch_row = batch + groups[g].batch_start + i * groups[g].width;
  for (int column = first; column < end; column += step) batch_row[column] = filler;
}

// Make every batch row NULL after the columns that its row fills.
extern "C" __global__ void null_stale_columns(
    const int* __restrict__ idx_mapping,  // [num_reqs], batch index -> row
    int num_reqs,
    int num_reqs_padded,
    int max_num_reqs,
    int max_num_rows,
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* __restrict__ arena,  // [arena.size]
    int64 batch_entries,
    int* __restrict__ batch  // [batch_entries + 1 ..], tables written, counts read
) {
  // Rows after this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
  int held_rows = batch[batch_entries];
  int num_batch_rows = held_rows > num_reqs_padded ? held_rows : num_reqs_padded;
  // step 1: which batch row and group
  for (int g = blockIdx.y; g < num_groups; g += gridDim.y) {
    for (int i = blockIdx.x; i < num_batch_rows; i += gridDim.x) {
      // step 2: how many columns its row fills
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int columns = row < 0 ? 0 : arena[(int64)g * max_num_rows + row];
      int held = batch[(int64)g * max_num_reqs + i];
      null_columns(groups, g, batch, i, columns + threadIdx.x, held, blockDim.x);
    }
  }
}

// Write the columns that one batch row's row fills, by `num_threads` threads of which this is number `thread`.
static __device__ __forceinline__ int gather_row(
    int row, const int* __restrict__ num_computed_tokens, int num_reqs, int max_num_rows,
    const Group* __restrict__ groups, int g, const int* __restrict__ arena, int* __restrict__ batch, int i, int thread,
    int num_threads
) {
  int64 table_start = groups[g].table_start, batch_start = groups[g].batch_start, width = groups[g].width;
  // step 2: how many columns its row fills
  int columns = row < 0 ? 0 : arena[(int64)g * max_num_rows + row];
  // step 3: how many of them the window has passed
  int64 first = 0;
  if (HAS_WINDOWS && groups[g].sliding_window && i < num_reqs) {
    first = num_computed_tokens[i] - groups[g].sliding_window + 1;
    first = first < 0 ? 0 : first;
    if (HAS_SHARDS && groups[g].world_size > 1) first = local_length(groups[g], first);
    first /= groups[g].tokens_per_column;
  }
  // step 4: store the columns in use, NULL before them
  const int* table_row = arena + table_start + (row < 0 ? 0 : row) * width;
  int* batch_row = batch + batch_start + i * width;
  if (HAS_WINDOWS && first > 0) {
    int filler = (int)groups[g].filler;
    for (int column = thread; column < columns; column += num_threads)
      batch_row[column] = column < first ? filler : table_row[column];
    return columns;
  }
  int whole = width % 4 == 0 ? columns & ~3 : 0;  // groups begin at 128 bytes, so these rows at 16
#pragma unroll 2
  for (int column = 4 * thread; column < whole; column += 4 * num_threads)
    *(int4*)(batch_row + column) = *(const int4*)(table_row + column);
  for (int column = whole + thread; column < columns; column += num_threads) batch_row[column] = table_row[column];
  return columns;
}

// Write the columns that the batch's rows fill, and remember how many there are.
extern "C" __global__ void gather_block_tables(
    const int* __restrict__ idx_mapping,          // [num_reqs], batch index -> row
    const int* __restrict__ num_computed_tokens,  // [num_reqs], batch index -> tokens
    int num_reqs,
    int num_reqs_padded,
    int max_num_reqs,
    int max_num_rows,
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* __restrict__ arena,  // [arena.size]
    int64 batch_entries,
    int* __restrict__ batch  // [batch_entries + 1 ..], written
) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) batch[batch_entries] = num_reqs_padded;
  // step 1: which batch row and group
  for (int g = blockIdx.y; g < num_groups; g += gridDim.y) {
    for (int i = blockIdx.x; i < num_reqs_padded; i += gridDim.x) {
      int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
      int columns = gather_row(
          row, num_computed_tokens, num_reqs, max_num_rows, groups, g, arena, batch, i, threadIdx.x, blockDim.x
      );
      // step 5: remember how many columns the batch row holds
      if (threadIdx.x == 0) batch[(int64)g * max_num_reqs + i] = columns;
    }
  }
}

// How many tokens are real, whatever query_start_loc says.
static __device__ __forceinline__ int real_tokens(
    const int* query_start_loc, int num_reqs, int num_positions, int num_slots
) {
  int num_tokens = query_start_loc[num_reqs];
  num_tokens = num_tokens > num_positions ? num_positions : num_tokens;
  return num_tokens > num_slots ? num_slots : num_tokens;
}

// Request that a token belongs to where all are of one length, as in decode or a prefill of one; to be checked.
static __device__ __forceinline__ int guess_request(int num_reqs, int64 requests_per_token, int token) {
  int guess = (int)((token * requests_per_token) >> 32);
  return guess < num_reqs ? guess : num_reqs - 1;
}

// The column that a token lies in.
static __device__ __forceinline__ int64 column_of(int64 local, int64 tokens_per_column, int64 column_shift) {
  return HAS_ODD_SIZES ? divide(local, tokens_per_column) : local >> column_shift;
}

// A token's index among this rank's tokens, or -1 where another rank owns it, or a later token of its request, which
// ends at `end`, takes its place in the ring.
static __device__ __forceinline__ int64 local_index(
    const Group& group, const int64* __restrict__ positions, int end, int64 columns, int64 position
) {
  if (HAS_SHARDS && group.world_size > 1) return owned_index(group, position);
  if (HAS_MODES && group.slot_mode == SLOT_MODE_RING) {
    int64 ring = columns * group.tokens_per_column, last = positions[end - 1];
    ring = ring > 0 ? ring : 1;  // step 5 finds that an empty one has no column
    if ((last > 0 ? last : 0) - position >= ring) return -1;
    return modulo(position, ring);
  }
  return position;
}

// Return the slot of one token. Loads that can go together do: a small launch takes as long as its chain of loads.
template <bool IN_STEP>
static __device__ __forceinline__ int64 map_token(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_rows, const Group* __restrict__ groups, int g,
    const int* arena, int num_slots, int64 requests_per_token, const Checks& checks, int token
) {
  int num_tokens = real_tokens(query_start_loc, num_reqs, num_positions, num_slots);
  int64 table_start = groups[g].table_start, width = groups[g].width;
  int64 tokens_per_column = groups[g].tokens_per_column, column_shift = groups[g].column_shift;
  int64 pad = groups[g].pad_slot_id;
  int request = guess_request(num_reqs, requests_per_token, token);
  int start = 0, end = 0, row = -1;
  if (num_reqs > 0) {
    start = query_start_loc[request];
    end = query_start_loc[request + 1];
    row = row_of(idx_mapping, request, num_reqs, max_num_rows);
  }
  int64 position = token < num_positions ? positions[token] : -1;
  if (IN_STEP) wait_for_changes(arena);
  // step 2: PAD after the last real token
  if (token >= num_tokens || (HAS_MODES && groups[g].slot_mode == SLOT_MODE_NONE)) return pad;
  // step 3: which request and row
  if (start > token || end <= token) {
    request = request_of(query_start_loc, num_reqs, token);
    row = request < 0 ? -1 : row_of(idx_mapping, request, num_reqs, max_num_rows);
    if (HAS_MODES) end = query_start_loc[request + 1];
    if (CHECKED) start = query_start_loc[request < 0 ? 0 : request];
  }
  bool is_checked = CHECKED && groups[g].held_start > 0;
  if (row < 0 || position < 0) {
    if (is_checked && row < 0 && request >= 0 && position >= 0)
      check_stranger(groups, arena, checks, g, idx_mapping[request], max_num_rows, token, position);
    return pad;
  }
  int64 columns = arena[(int64)g * max_num_rows + row];
  // step 4: whose token it is, and its index among this rank's tokens
  int64 local = local_index(groups[g], positions, end < num_tokens ? end : num_tokens, columns, position);
  if ((HAS_SHARDS || HAS_MODES) && local < 0) return pad;
  // step 5: which column, and whether the row fills it
  int64 column = column_of(local, tokens_per_column, column_shift);
  // step 6: which kernel block
  int64 block_id = column < width ? arena[table_start + row * width + column] : 0;
  if (column >= columns) {
    if (is_checked) check_outside(groups, arena, checks, g, row, token, position);
    return pad;
  }
  bool is_null = is_checked && is_missing(groups[g], block_id);
  if (is_null) check_null(groups[g], arena, checks, g, row, token, position, block_id);
  if (HAS_NULL_PADS && groups[g].null_is_pad && is_missing(groups[g], block_id)) return pad;
  int64 slot = block_id * tokens_per_column + (local - column * tokens_per_column);
  if (is_checked && !is_null) {
    check_block(groups[g], arena, checks, positions, g, row, start, token, position, local, block_id);
    check_slot(groups[g], arena, checks, g, row, token, position, block_id, slot);
  }
  return slot;
}

// Tokens that a warp maps in a long launch: each thread takes pairs, so that a warp reads and writes 512 bytes a time.
static const int WARP = 32;
static const int PAIRS = 4;
static const int CHUNK = 2 * PAIRS * WARP;

// The i-th token of a thread's pairs, from its first one on.
static __device__ __forceinline__ int64 pair_token(int64 first, int i) { return first + i / 2 * (2 * WARP) + i % 2; }

// Write the slots of a warp's chunk of tokens, from `chunk` on. Most threads' tokens lie in one request, and most of
// them in one block: then there is one search and one division for all eight. Others go the way of map_token.
static __device__ __forceinline__ void map_chunk(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_rows, const Group* __restrict__ groups, int g,
    const int* __restrict__ arena, SLOT_T* __restrict__ slots, int num_slots, int64 requests_per_token,
    const Checks& checks, int64 chunk
) {
  int num_tokens = real_tokens(query_start_loc, num_reqs, num_positions, num_slots);
  int64 first = chunk + 2 * (threadIdx.x % WARP), last = pair_token(first, 2 * PAIRS - 1);
  bool is_simple = last < num_tokens && num_reqs > 0;
  if (HAS_SHARDS) is_simple = is_simple && groups[g].world_size == 1;
  if (HAS_MODES) is_simple = is_simple && groups[g].slot_mode == 0;
  int row = -1, start = 0;
  if (is_simple) {
    int request = guess_request(num_reqs, requests_per_token, (int)first);
    if (query_start_loc[request] > first || query_start_loc[request + 1] <= first)
      request = request_of(query_start_loc, num_reqs, (int)first);
    is_simple = request >= 0 && last < query_start_loc[request + 1];
    row = request < 0 ? -1 : row_of(idx_mapping, request, num_reqs, max_num_rows);
    if (CHECKED && request >= 0) start = query_start_loc[request];
  }
  if (!is_simple || row < 0) {
    for (int i = 0; i < 2 * PAIRS; ++i) {
      int64 token = pair_token(first, i);
      if (token < num_slots)
        slots[token] = (SLOT_T)map_token<false>(
            idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, g, arena, num_slots,
            requests_per_token, checks, (int)token
        );
    }
    return;
  }
  int64 tokens_per_column = groups[g].tokens_per_column, column_shift = groups[g].column_shift;
  int64 pad = groups[g].pad_slot_id, columns = arena[(int64)g * max_num_rows + row];
  const int* table_row = arena + groups[g].table_start + row * groups[g].width;
  int64 position[2 * PAIRS];
  if ((unsigned long long)positions % sizeof(longlong2) == 0) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      longlong2 both = *(const longlong2*)(positions + pair_token(first, 2 * pair));
      position[2 * pair] = both.x;
      position[2 * pair + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) position[i] = positions[pair_token(first, i)];
  }
  bool takes_pairs = sizeof(SLOT_T) == 8 && (unsigned long long)slots % sizeof(longlong2) == 0;
  int64 block_start = 0, block_slot = pad, slot[2];
  unsigned long long block_size = 0;  // 0: no block is known
  int64 entry = 0;
  bool is_checked = CHECKED && groups[g].held_start > 0, is_null = false;
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    int token = (int)pair_token(first, i);
    if ((unsigned long long)(position[i] - block_start) >= block_size) {
      block_start = position[i], block_slot = pad, block_size = 0, is_null = false;
      if (position[i] >= 0) {
        int64 column = column_of(position[i], tokens_per_column, column_shift);
        if (is_checked && column >= columns) check_outside(groups, arena, checks, g, row, token, position[i]);
        if (column < columns) {
          int64 block_id = table_row[column];
          entry = block_id;
          is_null = is_checked && is_missing(groups[g], block_id);
          if (is_checked && !is_null)
            check_block(
                groups[g], arena, checks, positions, g, row, start, token, position[i], position[i], block_id
            );
          if (!HAS_NULL_PADS || !groups[g].null_is_pad || !is_missing(groups[g], block_id)) {
            block_start = column * tokens_per_column;
            block_slot = block_id * tokens_per_column;
            block_size = tokens_per_column;
          }
        }
      }
    }
    slot[i % 2] = block_slot + (position[i] - block_start);
    if (is_null) check_null(groups[g], arena, checks, g, row, token, position[i], entry);
    else if (is_checked && block_size > 0)
      check_slot(groups[g], arena, checks, g, row, token, position[i], entry, slot[i % 2]);
    SLOT_T* target = slots + token;
    if (!takes_pairs) *target = (SLOT_T)slot[i % 2];
    else if (i % 2) *(longlong2*)(target - 1) = make_longlong2(slot[0], slot[1]);
  }
}

// Write the slot of every token, and PAD from the last real token to the end of the slots.
extern "C" __global__ void map_slots(
    const int* __restrict__ idx_mapping,      // [num_reqs], batch index -> row
    const int* __restrict__ query_start_loc,  // [num_reqs + 1], first token of each request
    const int64* __restrict__ positions,      // [num_positions], token -> its index in its request
    int num_reqs,
    int num_positions,
    int max_num_rows,
    const Group* __restrict__ groups,  // [>= first_group + num_groups]
    int first_group,
    int num_groups,
    const int* __restrict__ arena,  // [arena.size]
    SLOT_T* __restrict__ slots,     // [num_groups, slots_stride], the first num_slots of each written
    int64 slots_stride,
    int num_slots,
    int64 requests_per_token,  // what a token's request is guessed from: token * this >> 32
    int* checker,              // [checker_size], written
    int* findings              // [(1 + MAX_RECORDS) * RECORD] in the host's memory, written
) {
  // step 1: which token and group
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  Checks checks = {checker, findings};
  for (int y = blockIdx.y; y < num_groups; y += gridDim.y) {
    for (int64 token = thread; token < num_slots; token += num_threads) {
      int64 slot = map_token<false>(
          idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, first_group + y,
          arena, num_slots, requests_per_token, checks, (int)token
      );
      // step 7: store the slot
      slots[y * slots_stride + token] = (SLOT_T)slot;
    }
  }
}

// map_slots for launches that fill the GPU many times over: each warp maps chunks of tokens.
extern "C" __global__ void map_slots_long(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_rows, const Group* __restrict__ groups, int first_group,
    int num_groups, const int* __restrict__ arena, SLOT_T* __restrict__ slots, int64 slots_stride, int num_slots,
    int64 requests_per_token, int* checker, int* findings
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  Checks checks = {checker, findings};
  for (int y = blockIdx.y; y < num_groups; y += gridDim.y)
    for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots; chunk += num_threads / WARP * CHUNK)
      map_chunk(
          idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, first_group + y,
          arena, slots + y * slots_stride, num_slots, requests_per_token, checks, chunk
      );
}

// The gather of a step, by the first gather_blocks blocks, whose warps are shared out evenly to batch rows and groups.
static __device__ __forceinline__ void gather_part(
    const int* __restrict__ idx_mapping, const int* __restrict__ num_computed_tokens, int num_reqs, int num_reqs_padded,
    int max_num_reqs, int max_num_rows, const Group* __restrict__ groups, int num_groups, const int* arena,
    int64 batch_entries, int* batch, int gather_blocks
) {
  unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, num_warps = gather_blocks * (blockDim.x / WARP);
  unsigned pairs = (num_reqs_padded > 0 ? num_reqs_padded : 1) * num_groups;
  unsigned parts = num_warps > pairs ? num_warps / pairs : 1;
  unsigned lane = threadIdx.x % WARP, team = WARP * parts;
  unsigned end = (unsigned)num_reqs_padded * num_groups * parts;
  for (unsigned warp = first; warp < end; warp += num_warps) {
    unsigned pair = warp / parts, thread = warp % parts * WARP + lane;
    int i = pair / num_groups, g = pair % num_groups;
    int64 cell = (int64)g * max_num_reqs + i;
    int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
    wait_for_changes(arena, batch);
    const int* held = batch + batch_entries + 2;
    int held_rows = held[-1], stale = held[cell];
    int columns =
        gather_row(row, num_computed_tokens, num_reqs, max_num_rows, groups, g, arena, batch, i, thread, team);
    if (thread == 0) batch[cell] = columns;
    if (i < held_rows) null_columns(groups, g, batch, i, columns + thread, stale, team);
  }
  // Rows that only the batch before this one had.
  wait_for_changes(arena, batch);
  const int* held = batch + batch_entries + 2;
  int held_rows = held[-1];
  if (blockIdx.x == 0 && threadIdx.x == 0) batch[batch_entries] = num_reqs_padded;
  end = held_rows > num_reqs_padded ? (unsigned)(held_rows - num_reqs_padded) * num_groups * parts : 0;
  for (unsigned warp = first; warp < end; warp += num_warps) {
    unsigned pair = warp / parts, thread = warp % parts * WARP + lane;
    int i = num_reqs_padded + pair / num_groups, g = pair % num_groups;
    null_columns(groups, g, batch, i, thread, held[(int64)g * max_num_reqs + i], team);
  }
}

// Do step_batch: the first gather_blocks blocks gather, the next ones map. The block after those shows the mark; it and
// further ones look at the requests, where anything is checked.
template <bool IS_LONG>
static __device__ __forceinline__ void step(
    const int* __restrict__ idx_mapping, const int* __restrict__ num_computed_tokens,
    const int* __restrict__ query_start_loc, const int64* __restrict__ positions, int num_reqs, int num_reqs_padded,
    int num_positions, int max_num_reqs, int max_num_rows, int64 requests_per_token, const Group* __restrict__ groups,
    int num_groups, const int* arena, int64 batch_entries, int* batch, SLOT_T* __restrict__ slots, int num_slots,
    int gather_blocks, int blocks_per_group, const int64* last_mark, int64* shown_mark, const Checks& checks
) {
  int block = (int)blockIdx.x - gather_blocks;
  if (block < 0) {
    gather_part(
        idx_mapping, num_computed_tokens, num_reqs, num_reqs_padded, max_num_reqs, max_num_rows, groups, num_groups,
        arena, batch_entries, batch, gather_blocks
    );
    return;
  }
  int g = blocks_per_group ? block / blocks_per_group : num_groups;  // none maps where no slots are wanted
  if (g >= num_groups) {
    wait_for_changes(arena);  // they are read then, and the host may know
    int first = block - num_groups * blocks_per_group, num_blocks = (int)gridDim.x - gather_blocks - (block - first);
    if (first == 0 && threadIdx.x == 0 && last_mark[0] > 0) shown_mark[0] = last_mark[0];
    if (CHECKED)
      for (int i = first * blockDim.x + threadIdx.x; i < num_reqs; i += num_blocks * blockDim.x)
        check_request(
            idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, arena, checks, i
        );
    return;
  }
  int64 thread = (int64)(block - g * blocks_per_group) * blockDim.x + threadIdx.x;
  int64 num_threads = (int64)blocks_per_group * blockDim.x;
  if (IS_LONG) {
    wait_for_changes(arena);
    for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots; chunk += num_threads / WARP * CHUNK)
      map_chunk(
          idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, g, arena,
          slots + (int64)g * num_slots, num_slots, requests_per_token, checks, chunk
      );
    return;
  }
  for (int64 token = thread; token < num_slots; token += num_threads)
    slots[(int64)g * num_slots + token] = (SLOT_T)map_token<true>(
        idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, g, arena, num_slots,
        requests_per_token, checks, (int)token
    );
}

// Do the gather and the slots of a step together, after apply_changes.
extern "C" __global__ void step_batch(
    const int* __restrict__ idx_mapping,          // [num_reqs], batch index -> row
    const int* __restrict__ num_computed_tokens,  // [num_reqs], batch index -> tokens
    const int* __restrict__ query_start_loc,      // [num_reqs + 1], first token of each request
    const int64* __restrict__ positions,          // [num_positions], token -> its index in its request
    int num_reqs,
    int num_reqs_padded,
    int num_positions,
    int max_num_reqs,
    int max_num_rows,
    int64 requests_per_token,          // what a token's request is guessed from: token * this >> 32
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* arena,  // [arena.size], of which apply_changes may still write when this starts
    int64 batch_entries,
    int* batch,                  // [batch_entries + 2 + num_groups * max_num_reqs], written
    SLOT_T* __restrict__ slots,  // [num_groups, num_slots], written
    int num_slots,
    int gather_blocks,       // 0: nothing is gathered
    int blocks_per_group,    // that map its slots
    const int64* last_mark,  // [1], what apply_changes was given
    int64* shown_mark,       // [1] in the host's memory, written
    int* checker,            // [checker_size], written
    int* findings            // [(1 + MAX_RECORDS) * RECORD] in the host's memory, written
) {
  step<false>(
      idx_mapping, num_computed_tokens, query_start_loc, positions, num_reqs, num_reqs_padded, num_positions,
      max_num_reqs, max_num_rows, requests_per_token, groups, num_groups, arena, batch_entries, batch, slots, num_slots,
      gather_blocks, blocks_per_group, last_mark, shown_mark, Checks{checker, findings}
  );
}

// step_batch where the slots fill the GPU many times over.
extern "C" __global__ void step_batch_long(
    const int* __restrict__ idx_mapping, const int* __restrict__ num_computed_tokens,
    const int* __restrict__ query_start_loc, const int64* __restrict__ positions, int num_reqs, int num_reqs_padded,
    int num_positions, int max_num_reqs, int max_num_rows, int64 requests_per_token, const Group* __restrict__ groups,
    int num_groups, const int* arena, int64 batch_entries, int* batch, SLOT_T* __restrict__ slots, int num_slots,
    int gather_blocks, int blocks_per_group, const int64* last_mark, int64* shown_mark, int* checker, int* findings
) {
  step<true>(
      idx_mapping, num_computed_tokens, query_start_loc, positions, num_reqs, num_reqs_padded, num_positions,
      max_num_reqs, max_num_rows, requests_per_token, groups, num_groups, arena, batch_entries, batch, slots, num_slots,
      gather_blocks, blocks_per_group, last_mark, shown_mark, Checks{checker, findings}
  );
}
