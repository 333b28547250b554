// A slot mapper in C++, held to the golden vectors: the smallest example of their reader.
//
//     c++ -std=c++17 -o slot_mapper slot_mapper.cpp && ./slot_mapper ../*.json
#include <cstdio>

#include "golden_vectors.hpp"

namespace {

// The slot of a token at position p of a row; last: the position of its request's last token (R12-R14).
int64_t slot_of(const golden::Group& group, const golden::ContextParallel& share, const std::vector<int32_t>& row, int64_t p,
                int64_t last) {
  const int64_t size = group.kernel_block_size, filled = row.size(), turn = share.world_size * share.interleave_size;
  if (p < 0 || filled == 0) return group.pad_slot_id;
  int64_t local = p;
  if (group.slot_mode == "ring") {
    if (last >= 0 && p <= last - filled * size) return group.pad_slot_id;  // a later token of this call takes its place
    local = p % (filled * size);
  } else if (group.is_sharded) {
    if (p / share.interleave_size % share.world_size != share.rank) return group.pad_slot_id;
    local = p / turn * share.interleave_size + p % share.interleave_size;
  }
  if (local / size >= filled) return group.pad_slot_id;
  const int64_t entry = row[local / size], k = group.blocks_per_kv_block();
  const bool is_missing = group.null_block_id < 0 ? entry < 0 : entry / k == group.null_block_id;
  if (is_missing && (group.null_is_pad || group.null_block_id < 0)) return group.pad_slot_id;
  return entry * size + local % size;
}

std::vector<int64_t> map_slots(const golden::Group& group, const golden::ContextParallel& share, const golden::Table& table,
                               const golden::Batch& batch, int64_t num_slots, bool is_named) {
  std::vector<int64_t> slots(num_slots, group.pad_slot_id);
  if (group.slot_mode == "none" || (group.slot_mode == "cross" && !is_named)) return slots;
  const int64_t num_tokens = std::min<int64_t>(num_slots, batch.positions.size());
  for (size_t i = 0; i < batch.idx_mapping.size(); i++) {
    const int64_t row = batch.idx_mapping[i], end = std::min(batch.query_start_loc[i + 1], num_tokens);
    if (row < 0 || row >= static_cast<int64_t>(table.size())) continue;
    for (int64_t t = std::max<int64_t>(batch.query_start_loc[i], 0); t < end; t++)
      slots[t] = slot_of(group, share, table[row], batch.positions[t], batch.positions[end - 1]);
  }
  return slots;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> failures;
  int num_compared = 0;
  for (int i = 1; i < argc; i++)
    for (const auto& vector : golden::load(argv[i])) num_compared += golden::run(vector, map_slots, failures);
  for (const auto& sentence : failures) std::printf("%s\n", sentence.c_str());
  std::printf("%d slot mappings compared, %zu wrong\n", num_compared, failures.size());
  return failures.empty() && num_compared > 0 ? 0 : 1;
}
