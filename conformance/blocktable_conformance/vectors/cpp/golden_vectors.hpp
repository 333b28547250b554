// Reads the golden vectors of the block table contract (docs/spec.md) for a slot mapper in C++17; this file is all it takes.
//
//     for (const auto& vector : golden::load(path))
//       golden::run(vector, my_mapper, failures);
//
// `run` keeps the rows itself, so that a mapper needs no row operations: it is handed what is committed. The format of the
// files is described in README.md of the folder above.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace golden {

// JSON. Numbers are int64: a double would lose positions.

struct Json {
  enum Kind { null, boolean, number, string, array, object } kind = null;
  int64_t value = 0;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  bool has(const std::string& name) const { return fields.count(name) != 0 && fields.at(name).kind != null; }
  const Json& operator[](const std::string& name) const {
    if (!fields.count(name)) throw std::runtime_error("a vector has no field " + name);
    return fields.at(name);
  }
  int64_t get(const std::string& name, int64_t otherwise) const { return has(name) ? fields.at(name).value : otherwise; }
  std::vector<int64_t> ints() const {
    std::vector<int64_t> found;
    for (const Json& item : items) found.push_back(item.value);
    return found;
  }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Json parse() {
    Json found;
    switch (peek()) {
      case '{':
        found.kind = Json::object;
        list('}', [&] {
          std::string name = quoted();
          expect(':');
          found.fields[name] = parse();
        });
        return found;
      case '[':
        found.kind = Json::array;
        list(']', [&] { found.items.push_back(parse()); });
        return found;
      case '"':
        found.kind = Json::string;
        found.text = quoted();
        return found;
      default:
        return word();
    }
  }

 private:
  char peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) at_++;
    if (at_ == text_.size()) throw std::runtime_error("JSON ends too early");
    return text_[at_];
  }
  void expect(char wanted) {
    if (peek() != wanted) throw std::runtime_error("JSON: expected " + std::string(1, wanted) + " at " + std::to_string(at_));
    at_++;
  }
  void list(char end, const std::function<void()>& item) {
    at_++;
    if (peek() == end) { at_++; return; }
    while (true) {
      item();
      if (peek() == end) { at_++; return; }
      expect(',');
    }
  }
  std::string quoted() {
    expect('"');
    std::string found;
    for (; text_.at(at_) != '"'; at_++) {
      if (text_[at_] == '\\') at_++;  // the vectors escape nothing but a character itself
      found += text_.at(at_);
    }
    at_++;
    return found;
  }
  Json word() {
    size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-')) at_++;
    std::string found = text_.substr(start, at_ - start);
    Json json;
    if (found == "null") return json;
    json.kind = found == "true" || found == "false" ? Json::boolean : Json::number;
    json.value = json.kind == Json::boolean ? found == "true" : std::stoll(found);
    return json;
  }

  const std::string& text_;
  size_t at_ = 0;
};

// What a mapper is given.

struct Group {
  int64_t block_size, kernel_block_size, null_block_id, pad_slot_id;
  bool null_is_pad, is_sharded;
  std::string slot_mode;  // "linear", "ring", "cross" or "none"

  int64_t blocks_per_kv_block() const { return block_size / kernel_block_size; }
  int32_t filler() const { return static_cast<int32_t>(null_block_id < 0 ? -1 : null_block_id * blocks_per_kv_block()); }
};

struct ContextParallel {
  int64_t world_size = 1, rank = 0, interleave_size = 1;
};

struct Batch {
  std::vector<int64_t> idx_mapping, query_start_loc, positions;
};

using Table = std::vector<std::vector<int32_t>>;  // [rows][filled columns], kernel block ids

// Slots [num_slots] of one group; `is_named`: the caller has named the group, so that cross-attention groups have slots.
using Mapper = std::function<std::vector<int64_t>(const Group&, const ContextParallel&, const Table&, const Batch&,
                                                  int64_t num_slots, bool is_named)>;

// Rows of manager blocks, `hole` where there is none.

constexpr int64_t hole = INT64_MIN;
using Rows = std::vector<std::vector<std::vector<int64_t>>>;  // [groups][rows][blocks]

struct Vector {
  std::string id, rules;
  Json config, operations;
};

inline std::vector<Vector> load(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  Json root = Parser(text).parse();
  if (root["format"].value < 1 || root["format"].value > 4)
    throw std::runtime_error(path + " has format " + std::to_string(root["format"].value) + "; this reader knows 1 to 4");
  std::vector<Vector> found;
  for (const Json& fields : root["vectors"].items)
    if (!fields.has("raises")) found.push_back({fields["id"].text, fields["rules"].text, fields["config"], fields["operations"]});
  return found;
}

class RowTable {
 public:
  RowTable(const std::vector<Group>& groups, int64_t num_rows) : groups_(groups) {
    rows_.assign(groups.size(), std::vector<std::vector<int64_t>>(num_rows));
  }

  // Does a row operation that the contract accepts; false: it is no row operation.
  bool operate(const std::string& call, const Json& args) {
    if (call == "append_row" || call == "set_row") {
      place({args["row"].value}, args["block_ids"], {}, call == "set_row");
    } else if (call == "append_rows" || call == "set_rows") {
      place(args["rows"].ints(), args["block_ids"], args["counts"].ints(), call == "set_rows");
    } else if (call == "clear_row") {
      for (auto& rows : rows_) rows[args["row"].value].clear();
    } else if (call == "truncate_row") {
      truncate(args["row"].value, args["num_blocks"]);
    } else if (call == "truncate_rows") {
      for (size_t i = 0; i < args["rows"].items.size(); i++) truncate(args["rows"].items[i].value, args["num_blocks"].items[i]);
    } else if (call == "swap_rows") {
      for (auto& rows : rows_) std::swap(rows[args["a"].value], rows[args["b"].value]);
    } else if (call == "copy_row" || call == "move_row") {
      copy({args["src"].value}, {args["dst"].value}, call == "move_row");
    } else if (call == "copy_rows" || call == "permute_rows") {
      copy(args["src"].ints(), args["dst"].ints(), call == "permute_rows");
    } else if (call == "null_range") {
      auto& row = rows_[args["group"].value][args["row"].value];
      std::fill(row.begin() + args["start"].value, row.begin() + args["stop"].value, hole);
    } else if (call == "replace_blocks") {
      exchange(args["group"].value, args["row"].value, args["start"].value, ids(args["group"].value, args["block_ids"]));
    } else if (call == "replace_block_ranges") {
      auto given = ids(args["group"].value, args["block_ids"]);
      auto next = given.begin();
      for (size_t i = 0; i < args["rows"].items.size(); i++) {
        auto end = next + args["counts"].items[i].value;
        exchange(args["group"].value, args["rows"].items[i].value, args["starts"].items[i].value, {next, end});
        next = end;
      }
    } else if (call == "remap_blocks") {
      std::map<int64_t, int64_t> renamed;
      auto before = args["old_ids"].ints(), after = ids(args["group"].value, args["new_ids"]);
      for (size_t i = 0; i < before.size(); i++) renamed[before[i]] = after[i];
      for (auto& row : rows_[args["group"].value])
        for (int64_t& block : row)
          if (renamed.count(block)) block = renamed[block];
    } else {
      return false;
    }
    return true;
  }

  void commit() { committed_ = rows_; }

  Table columns(size_t group) const {
    const Group& shape = groups_[group];
    Table table;
    for (const auto& row : committed_[group]) {
      table.emplace_back();
      for (int64_t block : row)
        for (int64_t part = 0; part < shape.blocks_per_kv_block(); part++)
          table.back().push_back(block == hole ? shape.filler() : static_cast<int32_t>(block * shape.blocks_per_kv_block() + part));
    }
    return table;
  }

 private:
  std::vector<int64_t> ids(size_t group, const Json& given) const {
    auto found = given.ints();
    std::replace(found.begin(), found.end(), groups_[group].null_block_id, hole);
    return found;
  }

  void place(const std::vector<int64_t>& rows, const Json& block_ids, const std::vector<int64_t>& counts, bool clears) {
    bool is_nested = !block_ids.items.empty() && block_ids.items[0].kind != Json::number;
    for (size_t group = 0; group < groups_.size(); group++) {
      auto given = is_nested ? ids(group, block_ids.items[group]) : ids(group, block_ids);
      auto next = given.begin();
      for (size_t i = 0; i < rows.size(); i++) {
        auto& row = rows_[group][rows[i]];
        if (clears) row.clear();
        auto end = counts.empty() || given.empty() ? given.end() : next + counts[i];
        row.insert(row.end(), next, end);
        next = end;
      }
    }
  }

  void truncate(int64_t row, const Json& num_blocks) {
    for (size_t group = 0; group < groups_.size(); group++) {
      int64_t kept = num_blocks.kind == Json::array ? num_blocks.items[group].value : num_blocks.value;
      auto& blocks = rows_[group][row];
      blocks.resize(std::min<int64_t>(blocks.size(), kept));
    }
  }

  void copy(const std::vector<int64_t>& src, const std::vector<int64_t>& dst, bool vacates) {
    for (auto& rows : rows_) {
      auto before = rows;
      if (vacates)
        for (int64_t row : src) rows[row].clear();
      for (size_t i = 0; i < src.size(); i++) rows[dst[i]] = before[src[i]];
    }
  }

  void exchange(int64_t group, int64_t row, int64_t start, const std::vector<int64_t>& blocks) {
    std::copy(blocks.begin(), blocks.end(), rows_[group][row].begin() + start);
  }

  std::vector<Group> groups_;
  Rows rows_, committed_;
};

// Runs one vector; adds a sentence for each slot mapping that is wrong, and returns how many were compared.
inline int run(const Vector& vector, const Mapper& mapper, std::vector<std::string>& failures) {
  std::vector<Group> groups;
  for (const Json& fields : vector.config["groups"].items) {
    std::string mode = fields.has("slot_mode") ? fields["slot_mode"].text : "linear";
    groups.push_back({fields["block_size"].value, fields.get("kernel_block_size", fields["block_size"].value),
                      fields.get("null_block_id", 0), fields.get("pad_slot_id", -1), fields.get("null_is_pad", 0) != 0,
                      fields.get("sharded", mode == "linear") != 0, mode});
  }
  ContextParallel share;
  if (vector.config.has("context_parallel")) {
    const Json& fields = vector.config["context_parallel"];
    share = {fields.get("world_size", 1), fields.get("rank", 0), fields.get("interleave_size", 1)};
  }
  RowTable rows(groups, vector.config.get("max_num_rows", vector.config["max_num_reqs"].value));
  rows.commit();
  int num_compared = 0, index = -1;
  for (const Json& operation : vector.operations.items) {
    index++;
    const std::string& call = operation["call"].text;
    const Json &args = operation["args"], &expected = operation["expect"];
    if (expected.has("raises") || rows.operate(call, args)) continue;  // what is refused changes nothing
    if (call == "commit" || call == "step" || call == "step_metadata") rows.commit();
    if (!expected.has("slot_mappings")) continue;
    Batch batch{args["idx_mapping"].ints(), args["query_start_loc"].ints(), args["positions"].ints()};
    bool is_named = args.has("groups");
    for (size_t i = 0; i < expected["slot_mappings"].items.size(); i++) {
      size_t group = is_named ? args["groups"].items[i].value : i;
      auto wanted = expected["slot_mappings"].items[i].ints();
      auto found = mapper(groups[group], share, rows.columns(group), batch, wanted.size(), is_named);
      num_compared++;
      auto wrong = std::mismatch(wanted.begin(), wanted.end(), found.begin(), found.end());
      if (wrong.first == wanted.end() && found.size() == wanted.size()) continue;
      std::ostringstream sentence;
      sentence << vector.id << ", operation " << index << ", group " << group << " (rules " << vector.rules << "): slot of token "
               << wrong.first - wanted.begin() << " must be " << (wrong.first == wanted.end() ? 0 : *wrong.first) << ", is "
               << (wrong.second == found.end() ? 0 : *wrong.second);
      failures.push_back(sentence.str());
    }
  }
  return num_compared;
}

}  // namespace golden
