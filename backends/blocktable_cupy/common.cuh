// What kernels.cu and exports.cu begin with. NVRTC compiles them on a GPU, and the host's C++ compiler over emulate.h
// where there is none. Every loop is grid-stride, so that any block gives the same result, and no block waits for
// another. SLOT_T is the type of slots, or of exported entries: long long or int.

typedef long long int64;

static const int SLOT_MODE_RING = 1;
static const int SLOT_MODE_NONE = 2;

// One row of BlockTableConfig.group_fields(), in the order of GROUP_FIELDS.
struct Group {
  int64 table_start;          // entry of the arena where the group's rows begin
  int64 width;                // columns of a row
  int64 tokens_per_column;    // tokens in a kernel block
  int64 blocks_per_kv_block;  // kernel blocks in a manager block
  int64 slot_mode;            // 0 linear, 1 ring, 2 none
  int64 null_is_pad;          // whether a token whose entry is missing is PAD
  int64 sliding_window;       // tokens; 0: none
  int64 world_size;           // ranks that share the tokens; 1: replicated
  int64 rank;                 // this one
  int64 interleave_size;      // tokens a rank holds in turn
  int64 column_shift;         // tokens_per_column is 1 << column_shift, where it is a power of two
  int64 filler;               // what an entry without a block holds
  int64 null_start;           // first kernel block of the null block; -blocks_per_kv_block where there is none
  int64 pad_slot_id;          // slot of a token that must not be written
  int64 batch_start;          // entry of a batch where the group's batch rows begin
  int64 checks;               // kinds of findings that are wanted, as bits; 0: nothing is checked
  int64 lives_start;          // entry of the arena where the rows' lives begin
  int64 held_start;           // entry of the arena with a bit for each of its pool's blocks: two rows hold it; 0: unchecked
  int64 block_stamps;         // entry of the checker: block -> life of the row that wrote it last; -1: not kept
  int64 slot_stamps;          // entry of the checker: slot -> last call that wrote it; -1: not kept
  int64 notes_start;          // entry of the checker: [max_num_rows, NOTES], last call with such a finding
  int64 copies_start;         // entry of the arena: block -> life of the row that it was copied for
};

// a / b for a >= 0 and b > 0: 64-bit division costs some 70 instructions, and few operands need it.
static __device__ __forceinline__ int64 divide(int64 a, int64 b) {
  if (((a | b) >> 32) == 0) return (int64)((unsigned)a / (unsigned)b);
  return a / b;
}

static __device__ __forceinline__ int64 modulo(int64 a, int64 b) { return a - divide(a, b) * b; }

// How many of the first `tokens` tokens this rank holds (R19).
static __device__ __forceinline__ int64 local_length(const Group& group, int64 tokens) {
  int64 turn = group.world_size * group.interleave_size;
  int64 rest = tokens % turn - group.rank * group.interleave_size;
  rest = rest < 0 ? 0 : rest > group.interleave_size ? group.interleave_size : rest;
  return tokens / turn * group.interleave_size + rest;
}

// Index of a position among this rank's tokens, or -1 where another rank owns it (R12).
static __device__ __forceinline__ int64 owned_index(const Group& group, int64 position) {
  int64 turn = divide(position, group.interleave_size);
  int64 round_index = divide(turn, group.world_size);
  if (turn - round_index * group.world_size != group.rank) return -1;
  return round_index * group.interleave_size + (position - turn * group.interleave_size);
}

// Whether an entry stands for no block: it lies inside the null block, or is -1 where there is none (R5).
static __device__ __forceinline__ bool is_missing(const Group& group, int64 entry) {
  return (unsigned)(entry - group.null_start) < (unsigned)group.blocks_per_kv_block;
}

// Row of a batch index; -1 for a padding entry and after the batch.
static __device__ __forceinline__ int row_of(const int* idx_mapping, int batch_index, int num_reqs, int max_num_rows) {
  if (batch_index >= num_reqs) return -1;
  int row = idx_mapping[batch_index];
  return row >= 0 && row < max_num_rows ? row : -1;
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
