// The four kernels. Every loop is grid-stride: any grid and any block give the same result, and no block waits for another.
// Compiled by NVRTC on a GPU, and by the host's C++ compiler over emulate.h where there is none.
//
// A table's memory is one arena: filled counts [num_groups, max_num_reqs], then each group's rows [max_num_reqs, width].
// A batch has the same layout, so its counts say how many columns each batch row holds; behind it lie how many rows the
// last batch had, and a copy of these counts that the fused step makes for itself: [arena_size + 2 + num_groups *
// max_num_reqs] in all.

#ifndef SLOT_T
#define SLOT_T long long  // int where slot_dtype is int32
#endif

// What the table's groups need. A launch of a few microseconds is half instruction fetches: what no group needs is left
// out when the module is compiled.
#ifndef HAS_SHARDS
#define HAS_SHARDS 1  // a group is sharded over context-parallel ranks
#endif
#ifndef HAS_MODES
#define HAS_MODES 1  // a group's slot_mode is "ring" or "none"
#endif
#ifndef HAS_NULL_PADS
#define HAS_NULL_PADS 1  // a group's null_is_pad is set
#endif
#ifndef HAS_WINDOWS
#define HAS_WINDOWS 1  // a group has a sliding window
#endif
#ifndef HAS_ODD_SIZES
#define HAS_ODD_SIZES 1  // a group's tokens_per_column is no power of two
#endif

typedef long long int64;

static const int PAD_SLOT_ID = -1;
static const int NULL_BLOCK_ID = 0;
static const int SLOT_MODE_RING = 1;
static const int SLOT_MODE_NONE = 2;

// One row of BlockTableConfig.group_fields(), in the order of GROUP_FIELDS.
struct Group {
  int64 table_start;          // entry of the arena where the group's rows begin
  int64 width;                // columns of a row
  int64 tokens_per_column;    // tokens in a kernel block
  int64 blocks_per_kv_block;  // kernel blocks in a manager block
  int64 slot_mode;            // 0 linear, 1 ring, 2 none
  int64 null_is_pad;          // whether a token in the NULL block is PAD
  int64 sliding_window;       // tokens; 0: none
  int64 world_size;           // ranks that share the tokens; 1: replicated
  int64 rank;                 // this one
  int64 interleave_size;      // tokens a rank holds in turn
};

// a / b for a >= 0 and b > 0: 64-bit division costs some 70 instructions, and few operands need it.
static __device__ __forceinline__ int64 divide(int64 a, int64 b) {
  if (((a | b) >> 32) == 0) return (int64)((unsigned)a / (unsigned)b);
  return a / b;
}

// The column that a token lies in.
static __device__ __forceinline__ int64 column_of(int64 local, int64 tokens_per_column) {
  if (HAS_ODD_SIZES) return divide(local, tokens_per_column);
  return local >> (__ffsll(tokens_per_column) - 1);
}

// How many of the first `tokens` tokens this rank holds (R19).
static __device__ __forceinline__ int64 local_length(const Group& group, int64 tokens) {
  int64 turn = group.world_size * group.interleave_size;
  int64 rest = tokens % turn - group.rank * group.interleave_size;
  rest = rest < 0 ? 0 : rest > group.interleave_size ? group.interleave_size : rest;
  return tokens / turn * group.interleave_size + rest;
}

// Row of a batch index; -1 for a dummy and for padding.
static __device__ __forceinline__ int row_of(const int* idx_mapping, int batch_index, int num_reqs, int max_num_reqs) {
  if (batch_index >= num_reqs) return -1;
  int row = idx_mapping ? idx_mapping[batch_index] : batch_index;
  return row >= 0 && row < max_num_reqs ? row : -1;
}

// Write every range of values into the arena.
extern "C" __global__ void scatter_writes(
    const int64* __restrict__ offsets,  // [num_ranges], first entry of each range in the arena
    const int* __restrict__ starts,     // [num_ranges + 1], first value of each range
    const int* __restrict__ values,     // [num_values]
    int num_ranges,
    int num_values,
    int* __restrict__ arena  // [arena.size], written
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64 entry = thread; entry < num_values; entry += (int64)gridDim.x * blockDim.x) {
    int value = (int)entry;
    // step 1: which value of which range
    int range_index = value, end = num_ranges;
    if (num_ranges != num_values) {  // else each range holds one value, as in steady decode
      range_index = 0;
      while (end - range_index > 1) {
        int middle = range_index + (end - range_index) / 2;
        if (starts[middle] <= value) range_index = middle;
        else end = middle;
      }
    }
    // step 2: store the value
    arena[offsets[range_index] + (value - starts[range_index])] = values[value];
  }
}

// Make every batch row NULL behind the columns that its row fills.
extern "C" __global__ void null_stale_columns(
    const int* __restrict__ idx_mapping,  // [num_reqs], batch index -> row; null: identity
    int num_reqs,
    int num_reqs_padded,
    int max_num_reqs,
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* __restrict__ arena,  // [arena_size]
    int64 arena_size,
    int* __restrict__ batch  // [arena_size + 1 ..], tables written, counts read
) {
  // Rows behind this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
  int held_rows = batch[arena_size];
  int num_rows = held_rows > num_reqs_padded ? held_rows : num_reqs_padded;
  // step 1: which batch row and group
  for (int g = blockIdx.y; g < num_groups; g += gridDim.y) {
    for (int i = blockIdx.x; i < num_rows; i += gridDim.x) {
      // step 2: how many columns its row fills
      int row = row_of(idx_mapping, i, num_reqs, max_num_reqs);
      int columns = row < 0 ? 0 : arena[(int64)g * max_num_reqs + row];
      // step 3: NULL over what an earlier batch left behind them
      int held = batch[(int64)g * max_num_reqs + i];
      int* batch_row = batch + groups[g].table_start + i * groups[g].width;
      for (int column = columns + threadIdx.x; column < held; column += blockDim.x) batch_row[column] = NULL_BLOCK_ID;
    }
  }
}

// Write the columns that one batch row's row fills, by `num_threads` threads of which this is number `thread`.
static __device__ __forceinline__ int gather_row(
    int row, const int* __restrict__ num_computed_tokens, int num_reqs, int max_num_reqs,
    const Group* __restrict__ groups, int g, const int* __restrict__ arena, int* __restrict__ batch, int i, int thread,
    int num_threads
) {
  int64 table_start = groups[g].table_start, width = groups[g].width;
  // step 2: how many columns its row fills
  int columns = row < 0 ? 0 : arena[(int64)g * max_num_reqs + row];
  // step 3: how many of them the window has left behind
  int64 first = 0;
  if (HAS_WINDOWS && num_computed_tokens && groups[g].sliding_window && i < num_reqs) {
    first = num_computed_tokens[i] - groups[g].sliding_window + 1;
    first = first < 0 ? 0 : first;
    if (HAS_SHARDS && groups[g].world_size > 1) first = local_length(groups[g], first);
    first /= groups[g].tokens_per_column;
  }
  // step 4: store the columns in use, NULL before them
  const int* table_row = arena + table_start + (row < 0 ? 0 : row) * width;
  int* batch_row = batch + table_start + i * width;
  if (HAS_WINDOWS && first > 0) {
    for (int column = thread; column < columns; column += num_threads)
      batch_row[column] = column < first ? NULL_BLOCK_ID : table_row[column];
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
    const int* __restrict__ idx_mapping,          // [num_reqs], batch index -> row; null: identity
    const int* __restrict__ num_computed_tokens,  // [num_reqs], batch index -> tokens; null: no window is cut
    int num_reqs,
    int num_reqs_padded,
    int max_num_reqs,
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* __restrict__ arena,  // [arena_size]
    int64 arena_size,
    int* __restrict__ batch  // [arena_size + 1 ..], written
) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) batch[arena_size] = num_reqs_padded;
  // step 1: which batch row and group
  for (int g = blockIdx.y; g < num_groups; g += gridDim.y) {
    for (int i = blockIdx.x; i < num_reqs_padded; i += gridDim.x) {
      int row = row_of(idx_mapping, i, num_reqs, max_num_reqs);
      int columns = gather_row(
          row, num_computed_tokens, num_reqs, max_num_reqs, groups, g, arena, batch, i, threadIdx.x, blockDim.x
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

// Request that a token belongs to, or -1, by bisection.
static __device__ __forceinline__ int request_of(const int* query_start_loc, int num_reqs, int token) {
  int low = -1, high = num_reqs;
  while (high - low > 1) {
    int middle = low + (high - low) / 2;
    if (query_start_loc[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

// Request that a token belongs to if all are of one length, as in decode and in a prefill of one request; to be checked.
// requests_per_token: num_reqs / num_positions, times 2^32.
static __device__ __forceinline__ int guess_request(int num_reqs, int64 requests_per_token, int token) {
  int guess = (int)((token * requests_per_token) >> 32);
  return guess < num_reqs ? guess : num_reqs - 1;
}

// A token's index among this rank's tokens, or -1 where another rank owns it.
static __device__ __forceinline__ int64 local_index(const Group& group, int64 columns, int64 position) {
  if (HAS_SHARDS && group.world_size > 1) {
    int64 turn = divide(position, group.interleave_size);
    int64 round_index = divide(turn, group.world_size);
    if (turn - round_index * group.world_size != group.rank) return -1;
    return round_index * group.interleave_size + (position - turn * group.interleave_size);
  }
  if (HAS_MODES && group.slot_mode == SLOT_MODE_RING) {
    int64 ring = columns * group.tokens_per_column;
    return ring ? position - divide(position, ring) * ring : -1;
  }
  return position;
}

// In a fused step, step_batch may start while apply_changes runs: it loads what that kernel does not write, and waits for
// its end here. Where the GPU or the launch does not overlap them this is nothing.
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

// Return the slot of one token. What can be loaded at once is: a small launch takes as long as its chain of loads.
template <bool IN_STEP>
static __device__ __forceinline__ int64 map_token(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_reqs, const Group* __restrict__ groups, int g,
    const int* arena, int num_slots, int64 requests_per_token, int token
) {
  int num_tokens = real_tokens(query_start_loc, num_reqs, num_positions, num_slots);
  int64 table_start = groups[g].table_start, width = groups[g].width, tokens_per_column = groups[g].tokens_per_column;
  int request = guess_request(num_reqs, requests_per_token, token);
  int start = 0, end = 0, row = -1;
  if (num_reqs > 0) {
    start = query_start_loc[request];
    end = query_start_loc[request + 1];
    row = row_of(idx_mapping, request, num_reqs, max_num_reqs);
  }
  int64 position = token < num_positions ? positions[token] : -1;
  if (IN_STEP) wait_for_changes(arena);
  // step 2: PAD behind the last real token
  if (token >= num_tokens || (HAS_MODES && groups[g].slot_mode == SLOT_MODE_NONE)) return PAD_SLOT_ID;
  // step 3: which request and row
  if (start > token || end <= token) {
    request = request_of(query_start_loc, num_reqs, token);
    row = request < 0 ? -1 : row_of(idx_mapping, request, num_reqs, max_num_reqs);
  }
  if (row < 0 || position < 0) return PAD_SLOT_ID;
  int64 columns = arena[(int64)g * max_num_reqs + row];
  // step 4: whose token it is, and its index among this rank's tokens
  int64 local = local_index(groups[g], columns, position);
  if ((HAS_SHARDS || HAS_MODES) && local < 0) return PAD_SLOT_ID;
  // step 5: which column, and whether the row fills it
  int64 column = column_of(local, tokens_per_column);
  // step 6: which kernel block
  int64 block_id = column < width ? arena[table_start + row * width + column] : 0;
  if (column >= columns) return PAD_SLOT_ID;
  if (HAS_NULL_PADS && groups[g].null_is_pad && block_id < groups[g].blocks_per_kv_block) return PAD_SLOT_ID;
  return block_id * tokens_per_column + (local - column * tokens_per_column);
}

// Tokens that a warp maps in a long launch: each thread takes pairs, so that a warp reads and writes 512 bytes at a time.
static const int WARP = 32;
static const int PAIRS = 4;
static const int CHUNK = 2 * PAIRS * WARP;

// The i-th token of a thread's pairs, from its first one on.
static __device__ __forceinline__ int pair_token(int first, int i) { return first + i / 2 * (2 * WARP) + i % 2; }

// Write the slots of a warp's chunk of tokens, from `chunk` on. Most threads' tokens lie in one request, and most of them
// in one block: then there is one search and one division for all eight. Any other token goes the way of map_token.
static __device__ __forceinline__ void map_chunk(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_reqs, const Group* __restrict__ groups, int g,
    const int* __restrict__ arena, SLOT_T* __restrict__ slots, int num_slots, int64 requests_per_token, int chunk
) {
  int num_tokens = real_tokens(query_start_loc, num_reqs, num_positions, num_slots);
  int first = chunk + 2 * (threadIdx.x % WARP);
  int last = pair_token(first, 2 * PAIRS - 1);
  bool is_simple = last < num_tokens && num_reqs > 0;
  if (HAS_SHARDS) is_simple = is_simple && groups[g].world_size == 1;
  if (HAS_MODES) is_simple = is_simple && groups[g].slot_mode == 0;
  int row = -1;
  if (is_simple) {
    int request = guess_request(num_reqs, requests_per_token, first);
    if (query_start_loc[request] > first || query_start_loc[request + 1] <= first)
      request = request_of(query_start_loc, num_reqs, first);
    is_simple = request >= 0 && last < query_start_loc[request + 1];
    row = request < 0 ? -1 : row_of(idx_mapping, request, num_reqs, max_num_reqs);
  }
  if (!is_simple || row < 0) {
    for (int i = 0; i < 2 * PAIRS; ++i) {
      int token = pair_token(first, i);
      if (token < num_slots)
        slots[token] = (SLOT_T)map_token<false>(
            idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_reqs, groups, g, arena, num_slots,
            requests_per_token, token
        );
    }
    return;
  }
  int64 tokens_per_column = groups[g].tokens_per_column;
  int64 columns = arena[(int64)g * max_num_reqs + row];
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
  int64 block_start = 0, block_slot = 0, slot[2];
  unsigned long long block_size = 0;  // 0: no block is known yet
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    if ((unsigned long long)(position[i] - block_start) >= block_size) {
      block_size = 0;
      if (position[i] >= 0) {
        int64 column = column_of(position[i], tokens_per_column);
        if (column < columns) {
          int64 block_id = table_row[column];
          if (!HAS_NULL_PADS || !groups[g].null_is_pad || block_id >= groups[g].blocks_per_kv_block) {
            block_start = column * tokens_per_column;
            block_slot = block_id * tokens_per_column;
            block_size = tokens_per_column;
          }
        }
      }
    }
    slot[i % 2] = block_size ? block_slot + (position[i] - block_start) : PAD_SLOT_ID;
    SLOT_T* target = slots + pair_token(first, i);
    if (!takes_pairs) *target = (SLOT_T)slot[i % 2];
    else if (i % 2) *(longlong2*)(target - 1) = make_longlong2(slot[0], slot[1]);
  }
}

// Write the slot of every token, and PAD from the last real token to the end of the slots.
extern "C" __global__ void map_slots(
    const int* __restrict__ idx_mapping,      // [num_reqs], batch index -> row; null: identity
    const int* __restrict__ query_start_loc,  // [num_reqs + 1], first token of each request
    const int64* __restrict__ positions,      // [num_positions], token -> its index in its request
    int num_reqs,
    int num_positions,
    int max_num_reqs,
    const Group* __restrict__ groups,  // [>= first_group + num_groups]
    int first_group,
    int num_groups,
    const int* __restrict__ arena,  // [arena.size]
    SLOT_T* __restrict__ slots,     // [num_groups, slots_stride], the first num_slots of each written
    int64 slots_stride,
    int num_slots,
    int64 requests_per_token  // num_reqs / num_positions, times 2^32
) {
  // step 1: which token and group
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  for (int y = blockIdx.y; y < num_groups; y += gridDim.y) {
    for (int64 token = thread; token < num_slots; token += num_threads) {
      int64 slot = map_token<false>(
          idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_reqs, groups, first_group + y, arena,
          num_slots, requests_per_token, (int)token
      );
      // step 7: store the slot
      slots[y * slots_stride + token] = (SLOT_T)slot;
    }
  }
}

// map_slots for launches that fill the GPU many times over: each warp maps chunks of tokens.
extern "C" __global__ void map_slots_long(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_reqs, const Group* __restrict__ groups, int first_group, int num_groups,
    const int* __restrict__ arena, SLOT_T* __restrict__ slots, int64 slots_stride, int num_slots,
    int64 requests_per_token
) {
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  for (int y = blockIdx.y; y < num_groups; y += gridDim.y)
    for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots; chunk += num_threads / WARP * CHUNK)
      map_chunk(
          idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_reqs, groups, first_group + y, arena,
          slots + y * slots_stride, num_slots, requests_per_token, (int)chunk
      );
}

// The fused step is two kernels, one after the other: apply_changes, then step_batch.

// A commit by value, in the launch's own parameters: nothing to stage, nothing to wait for, nothing to race with.
// data: offsets of single values, those values; offsets of ranges, their starts among the range values, those values;
// offsets of ranges that become NULL, their starts.
template <int SIZE>
struct Changes {
  int num_singles;
  int num_ranges;
  int num_range_values;
  int num_null_ranges;
  int num_nulls;
  int data[SIZE];
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

template <int SIZE>
static __device__ __forceinline__ void apply(
    const Changes<SIZE>& changes, int* arena, int num_groups, int max_num_reqs, int64 arena_size, int* batch
) {
  let_step_batch_start();
  int thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
  const int* single_offsets = changes.data;
  const int* singles = single_offsets + changes.num_singles;
  const int* range_offsets = singles + changes.num_singles;
  const int* range_starts = range_offsets + changes.num_ranges;
  const int* range_values = range_starts + changes.num_ranges;
  const int* null_offsets = range_values + changes.num_range_values;
  const int* null_starts = null_offsets + changes.num_null_ranges;
  for (int i = thread; i < changes.num_singles; i += num_threads) arena[single_offsets[i]] = singles[i];
  for (int i = thread; i < changes.num_range_values; i += num_threads) {
    int range_index = range_of(range_starts, changes.num_ranges, i);
    arena[(int64)range_offsets[range_index] + (i - range_starts[range_index])] = range_values[i];
  }
  for (int i = thread; i < changes.num_nulls; i += num_threads) {
    int range_index = range_of(null_starts, changes.num_null_ranges, i);
    arena[(int64)null_offsets[range_index] + (i - null_starts[range_index])] = NULL_BLOCK_ID;
  }

  // The counts that the batch holds, for step_batch to read while it writes new ones.
  int held_rows = batch[arena_size];
  int* copy = batch + arena_size + 1;
  for (int cell = thread; cell < num_groups * held_rows; cell += num_threads) {
    int64 place = (int64)(cell / held_rows) * max_num_reqs + cell % held_rows;
    copy[1 + place] = batch[place];
  }
  if (thread == 0) copy[0] = held_rows;
}

// Four sizes, since the driver copies the whole of a kernel's parameters; 32,764 bytes are the most it takes.
#define APPLY_CHANGES(NAME, SIZE)                                                                              extern "C" __global__ void NAME(                                                                                 const __grid_constant__ Changes<SIZE> changes, int* arena, int num_groups, int max_num_reqs,                 int64 arena_size, int* batch                                                                             ) {                                                                                                            apply(changes, arena, num_groups, max_num_reqs, arena_size, batch);                                        }
APPLY_CHANGES(apply_changes_tiny, 240)
APPLY_CHANGES(apply_changes_small, 600)
APPLY_CHANGES(apply_changes_medium, 1900)
APPLY_CHANGES(apply_changes_large, 8160)

static __device__ __forceinline__ void null_columns(
    const Group* __restrict__ groups, int g, int* __restrict__ batch, int i, int first, int end, int step
) {
  int* batch_row = batch + groups[g].table_start + i * groups[g].width;
  for (int column = first; column < end; column += step) batch_row[column] = NULL_BLOCK_ID;
}

// The gather of a whole step, by the first gather_blocks blocks: `parts` warps for each batch row and group.
static __device__ __forceinline__ void gather_part(
    const int* __restrict__ idx_mapping, const int* __restrict__ num_computed_tokens, int num_reqs, int num_reqs_padded,
    int max_num_reqs, const Group* __restrict__ groups, int num_groups, const int* arena, int64 arena_size, int* batch,
    int gather_blocks, int parts
) {
  unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, num_warps = gather_blocks * (blockDim.x / WARP);
  unsigned lane = threadIdx.x % WARP, team = WARP * parts;
  unsigned end = (unsigned)num_reqs_padded * num_groups * parts;
  for (unsigned warp = first; warp < end; warp += num_warps) {
    unsigned pair = warp / parts, thread = warp % parts * WARP + lane;
    int i = pair / num_groups, g = pair % num_groups;
    int64 cell = (int64)g * max_num_reqs + i;
    int row = row_of(idx_mapping, i, num_reqs, max_num_reqs);
    wait_for_changes(arena, batch);
    const int* held = batch + arena_size + 2;
    int held_rows = held[-1], stale = held[cell];
    int columns = gather_row(row, num_computed_tokens, num_reqs, max_num_reqs, groups, g, arena, batch, i, thread, team);
    if (thread == 0) batch[cell] = columns;
    if (i < held_rows) null_columns(groups, g, batch, i, columns + thread, stale, team);
  }
  // Rows that only the batch before this one had.
  wait_for_changes(arena, batch);
  const int* held = batch + arena_size + 2;
  int held_rows = held[-1];
  if (blockIdx.x == 0 && threadIdx.x == 0) batch[arena_size] = num_reqs_padded;
  end = held_rows > num_reqs_padded ? (unsigned)(held_rows - num_reqs_padded) * num_groups * parts : 0;
  for (unsigned warp = first; warp < end; warp += num_warps) {
    unsigned pair = warp / parts, thread = warp % parts * WARP + lane;
    int i = num_reqs_padded + pair / num_groups, g = pair % num_groups;
    null_columns(groups, g, batch, i, thread, held[(int64)g * max_num_reqs + i], team);
  }
}

// The gather and the slots of a whole step: the first gather_blocks blocks gather, the others map.
extern "C" __global__ void step_batch(
    const int* __restrict__ idx_mapping,          // [num_reqs], batch index -> row; null: identity
    const int* __restrict__ num_computed_tokens,  // [num_reqs], batch index -> tokens; null: no window is cut
    const int* __restrict__ query_start_loc,      // [num_reqs + 1], first token of each request
    const int64* __restrict__ positions,          // [num_positions], token -> its index in its request
    int num_reqs,
    int num_reqs_padded,
    int num_positions,
    int max_num_reqs,
    const Group* __restrict__ groups,  // [num_groups]
    int num_groups,
    const int* arena,  // [arena_size], of which apply_changes may still write when this starts
    int64 arena_size,
    int* batch,                  // [arena_size + 2 + num_groups * max_num_reqs], written
    SLOT_T* __restrict__ slots,  // [num_groups, num_slots], written
    int num_slots,
    int gather_blocks,        // 0: nothing is gathered
    int gather_parts,         // warps for each batch row and group
    int blocks_per_group,     // that map its slots
    int64 requests_per_token  // num_reqs / num_positions, times 2^32
) {
  int block = (int)blockIdx.x - gather_blocks;
  if (block < 0) {
    gather_part(
        idx_mapping, num_computed_tokens, num_reqs, num_reqs_padded, max_num_reqs, groups, num_groups, arena, arena_size,
        batch, gather_blocks, gather_parts
    );
    return;
  }
  int g = block / blocks_per_group;
  if (g >= num_groups) return;
  SLOT_T* group_slots = slots + (int64)g * num_slots;
  int64 num_threads = (int64)blocks_per_group * blockDim.x;
  for (int64 token = (int64)(block - g * blocks_per_group) * blockDim.x + threadIdx.x; token < num_slots;
       token += num_threads)
    group_slots[token] = (SLOT_T)map_token<true>(
        idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_reqs, groups, g, arena, num_slots,
        requests_per_token, (int)token
    );
}

// step_batch where the slots fill the GPU many times over.
extern "C" __global__ void step_batch_long(
    const int* __restrict__ idx_mapping, const int* __restrict__ num_computed_tokens,
    const int* __restrict__ query_start_loc, const int64* __restrict__ positions, int num_reqs, int num_reqs_padded,
    int num_positions, int max_num_reqs, const Group* __restrict__ groups, int num_groups, const int* arena,
    int64 arena_size, int* batch, SLOT_T* __restrict__ slots, int num_slots, int gather_blocks,
    int gather_parts, int blocks_per_group, int64 requests_per_token
) {
  int block = (int)blockIdx.x - gather_blocks;
  if (block < 0) {
    gather_part(
        idx_mapping, num_computed_tokens, num_reqs, num_reqs_padded, max_num_reqs, groups, num_groups, arena, arena_size,
        batch, gather_blocks, gather_parts
    );
    return;
  }
  int g = block / blocks_per_group;
  if (g >= num_groups) return;
  wait_for_changes(arena);
  int64 thread = (int64)(block - g * blocks_per_group) * blockDim.x + threadIdx.x;
  int64 num_threads = (int64)blocks_per_group * blockDim.x;
  for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots; chunk += num_threads / WARP * CHUNK)
    map_chunk(
        idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_reqs, groups, g, arena,
        slots + (int64)g * num_slots, num_slots, requests_per_token, (int)chunk
    );
}
