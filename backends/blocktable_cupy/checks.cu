// What kernels look for where the table is checked (CHECKED), and the one kernel that does nothing else. They follow
// common.cuh; kernels.cu follows them.

// Kinds of findings (DEVICE_KINDS), counted from 1, and where things lie in the checker's memory (check_plan.py).
static const int MISSING_BLOCK = 1;
static const int UNSET_ROW = 2;
static const int SHARED_BLOCK_WRITTEN = 3;
static const int SLOT_WRITTEN_TWICE = 4;
static const int POSITION_GAP = 5;
static const int BAD_STARTS = 6;
static const int NULL_WRITTEN = 7;
static const int MARKS_START = 8;
static const int NOTES = 8;
static const int MAX_RECORDS = 64;
static const int RECORD = 8;
static const int INT32_MAX = 2147483647;

// What kernels that check are given.
struct Checks {
  int* checker;   // [checker_size]
  int* findings;  // [(1 + MAX_RECORDS) * RECORD], in the host's memory
};

static __device__ __forceinline__ bool wants(const Group& group, int kind) { return group.checks >> (kind - 1) & 1; }

// Record a finding, unless this call has noted the like at `place` of the notes; g -1: it belongs to no group. The host
// trusts a record that has its number.
static __device__ void note(
    const Group& group, const int* arena, const Checks& checks, int64 place, int kind, int g, int row, int token,
    int64 position, int64 entry
) {
  int call = checks.checker[0];
  if (atomicExch(checks.checker + group.notes_start + place, call) == call) return;
  int number = atomicAdd(checks.findings, 1);
  if (number - *(volatile int*)(checks.findings + 1) >= MAX_RECORDS) return;  // the host has read as many as that
  int* record = checks.findings + (1 + number % MAX_RECORDS) * RECORD;
  record[0] = kind + 16 * (g + 1);
  record[1] = row;
  record[2] = token;
  record[3] = (int)(unsigned)position;
  record[4] = (int)(position >> 32);
  record[5] = (int)entry;
  record[6] = arena[group.lives_start - 1];
  __threadfence_system();
  record[7] = number + 1;
}

// Whether this call writes the first token of the block that a token lies in, `offset` tokens after it on this rank.
static __device__ bool writes_first_token(
    const Group& group, const int64* positions, int start, int token, int64 position, int64 local, int64 offset
) {
  int64 first = local - offset;
  int64 before = offset;
  if (HAS_SHARDS && group.world_size > 1) {
    int64 turn = first / group.interleave_size * group.world_size + group.rank;
    before = position - (turn * group.interleave_size + first % group.interleave_size);
  }
  return before <= token - start && positions[token - before] == position - before;
}

// Look at a token that is about to be written into a block, as of the last commit.
static __device__ __forceinline__ void check_block(
    const Group& group, const int* arena, const Checks& checks, const int64* positions, int g, int row, int start,
    int token, int64 position, int64 local, int64 entry
) {
  int block = (int)divide(entry, group.blocks_per_kv_block);
  bool is_held = (unsigned)arena[group.held_start + block / 32] >> block % 32 & 1;
  if (group.block_stamps < 0) {
    if (is_held && wants(group, SHARED_BLOCK_WRITTEN))
      note(group, arena, checks, NOTES * (int64)row + SHARED_BLOCK_WRITTEN, SHARED_BLOCK_WRITTEN, g, row, token, position, entry);
    return;
  }
  int life = arena[group.lives_start + row], *stamp = checks.checker + group.block_stamps + block;
  if (*stamp == life) return;
  int writer = atomicExch(stamp, life);
  if (!is_held || writer == 0 || writer == life || arena[group.copies_start + block] == life) return;
  int64 offset = modulo(local, group.tokens_per_column * group.blocks_per_kv_block);
  if (offset > 0 && !writes_first_token(group, positions, start, token, position, local, offset))
    note(group, arena, checks, NOTES * (int64)row + SHARED_BLOCK_WRITTEN, SHARED_BLOCK_WRITTEN, g, row, token, position, entry);
}

// Look at a slot that is about to be written.
static __device__ __forceinline__ void check_slot(
    const Group& group, const int* arena, const Checks& checks, int g, int row, int token, int64 position, int64 entry,
    int64 slot
) {
  if (group.slot_stamps < 0) return;
  int call = checks.checker[0];
  if (atomicExch(checks.checker + group.slot_stamps + slot, call) == call)
    note(group, arena, checks, NOTES * (int64)row + SLOT_WRITTEN_TWICE, SLOT_WRITTEN_TWICE, g, row, token, position, entry);
}

// Look at a token of this rank whose row has no column for it.
static __device__ void check_outside(
    const Group* groups, const int* arena, const Checks& checks, int g, int row, int token, int64 position
) {
  int life = arena[groups[g].lives_start + row];
  int64 notes = NOTES * (int64)row;
  if (life > 0 && wants(groups[g], MISSING_BLOCK))
    note(groups[g], arena, checks, notes + MISSING_BLOCK, MISSING_BLOCK, g, row, token, position, -1);
  if (life < 0 && wants(groups[g], UNSET_ROW))
    note(groups[0], arena, checks, notes + UNSET_ROW, UNSET_ROW, -1, row, token, position, -1);
}

// Look at a token whose row is outside the table; -1 is what says that there is none.
static __device__ void check_stranger(
    const Group* groups, const int* arena, const Checks& checks, int g, int row, int max_num_rows, int token,
    int64 position
) {
  if (row == -1 || arena[groups[g].lives_start] == 0 || !wants(groups[g], UNSET_ROW)) return;
  if (HAS_SHARDS && groups[g].world_size > 1 && owned_index(groups[g], position) < 0) return;
  int64 notes = NOTES * (int64)((unsigned)row % (unsigned)max_num_rows);
  note(groups[0], arena, checks, notes, UNSET_ROW, -1, row, token, position, -1);
}

// Look at a token whose block is none.
static __device__ void check_null(
    const Group& group, const int* arena, const Checks& checks, int g, int row, int token, int64 position, int64 entry
) {
  if (wants(group, NULL_WRITTEN)) note(group, arena, checks, NOTES * (int64)row + NULL_WRITTEN, NULL_WRITTEN, g, row, token, position, entry);
}

// Look at a request: where its tokens begin, and whether its positions go on.
static __device__ __forceinline__ void check_request(
    const int* __restrict__ idx_mapping, const int* __restrict__ query_start_loc, const int64* __restrict__ positions,
    int num_reqs, int num_positions, int max_num_rows, const Group* __restrict__ groups, const int* arena,
    const Checks& checks, int i
) {
  const Group& group = groups[0];
  if (arena[group.lives_start] == 0) return;  // before the first row operation there is nothing to be wrong about
  // step 3: whether its tokens begin and end where they can
  int start = query_start_loc[i], end = query_start_loc[i + 1];
  if (start > end || (i == 0 && start != 0) || (i == num_reqs - 1 && end > num_positions)) {
    if (wants(group, BAD_STARTS)) note(group, arena, checks, BAD_STARTS, BAD_STARTS, -1, i, start, end, -1);
    return;
  }
  end = end > num_positions ? num_positions : end;
  if (start < 0 || start >= end) return;
  int row = row_of(idx_mapping, i, num_reqs, max_num_rows);
  if (row < 0 || arena[group.lives_start + row] < 0 || !wants(group, POSITION_GAP)) return;
  // step 4: whether its positions go on where those before have ended
  int restart = arena[group.lives_start + max_num_rows + row];
  int cap = arena[group.lives_start + 2 * (int64)max_num_rows + row];
  int* kept = checks.checker + MARKS_START + 2 * (int64)(restart % max_num_rows);
  bool is_marked = kept[0] == restart || (cap >= 0 && kept[0] == restart - max_num_rows);
  int64 mark = kept[0] != restart && cap < kept[1] ? cap : kept[1];
  int64 first = positions[start], last = positions[end - 1];
  int64 gap = is_marked && first > mark ? first : -1;
  int at = start;
  int64 end_position = last + 1;
  if (last - first != end - 1 - start)  // as a tree of drafts
    for (int token = start; token < end; ++token) {
      int64 position = positions[token];
      if (position >= end_position) end_position = position + 1;
      if (is_marked && gap < 0 && position > mark + (token - start)) gap = position, at = token;
    }
  if (gap >= 0 && mark < INT32_MAX) note(group, arena, checks, NOTES * (int64)row + POSITION_GAP, POSITION_GAP, -1, row, at, gap, -1);
  if (is_marked && mark > end_position) end_position = mark;
  // step 5: keep where they end
  kept[0] = restart;
  kept[1] = end_position < 0 ? 0 : end_position > INT32_MAX ? INT32_MAX : (int)end_position;
}

// Begin a call that maps slots: give it a number, and look at its requests.
extern "C" __global__ void check_requests(
    const int* __restrict__ idx_mapping,      // [num_reqs], batch index -> row
    const int* __restrict__ query_start_loc,  // [num_reqs + 1], first token of each request
    const int64* __restrict__ positions,      // [num_positions], token -> its index in its request
    int num_reqs,
    int num_positions,
    int max_num_rows,
    const Group* __restrict__ groups,  // [num_groups]
    const int* __restrict__ arena,     // [arena.size]
    int* checker,                      // [checker_size], written
    int* findings                      // [(1 + MAX_RECORDS) * RECORD] in the host's memory, written
) {
  // step 1: give the call a number
  if (blockIdx.x == 0 && threadIdx.x == 0) checker[0] += 1;
  // step 2: which request
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (int64)gridDim.x * blockDim.x;
  Checks checks = {checker, findings};
  for (int64 i = thread; i < num_reqs; i += num_threads)
    check_request(
        idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, arena, checks, (int)i
    );
}

