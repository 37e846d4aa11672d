// Reads Parquet files as it is told, for comparison with pyarrow: each line of standard input is a command in
// JSON, each line of the output its answer. What was read goes to the command's "out", a list of tables, for
// torch.load().
//
//   {"read": "row_groups" | "batches" | "rows" | "loader" | "collate", "files": [...], "columns": [...],
//    "nulls": "mask", "fill": {COLUMN: VALUE}, "use_threads": BOOL, "out": FILE,
//    "batch_size", "drop_last", "even_batches", "read_ahead", "memory_limit",       of batches
//    "rank", "ranks", "shuffle", "seed", "epoch",                                     of the sampler
//    "indices": [...]}                                                                 of rows
//   answer: {"schema": [[NAME, TYPE]], "row_counts": [...], "size": …, "peak": …} or {"error": …, "type": …}
#include <fstream>
#include <iostream>

#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/parquet/parquet_batches.h>
#include <lockstep/parquet/parquet_rows.h>
#include <lockstep/parquet/row_group_collate.h>

namespace {

using namespace lockstep::data;  // NOLINT(google-build-using-namespace): a program, not a header
using nlohmann::json;

using Tensors = c10::Dict<std::string, at::Tensor>;
using NamedColumns = c10::Dict<std::string, Tensors>;

NamedColumns to_python(const Table& table) {
  NamedColumns result;
  for (size_t i = 0; i < table.names().size(); ++i) {
    const Column& column = table.columns()[i];
    TORCH_CHECK(column.rows() == table.rows(), "a column has ", column.rows(), " rows of ", table.rows());
    Tensors tensors;
    tensors.insert("kind", torch::tensor(static_cast<int64_t>(column.kind)));
    const std::pair<const char*, at::Tensor> parts[] = {{"values", column.values},
                                                        {"offsets", column.offsets},
                                                        {"valid", column.valid},
                                                        {"element_valid", column.element_valid}};
    for (const auto& [name, tensor] : parts) {
      if (tensor.defined()) tensors.insert(name, tensor.clone());
    }
    result.insert(table.names()[i], tensors);
  }
  return result;
}

FillValue fill_value(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  return value.get<std::string>();
}

ParquetOptions options_of(const json& command) {
  ParquetOptions options;
  options.columns = command.value("columns", std::vector<std::string>());
  if (command.value("nulls", "") == "mask") options.nulls = Nulls::kMask;
  const json fill = command.value("fill", json::object());
  for (const auto& [column, value] : fill.items()) options.fill_nulls.emplace(column, fill_value(value));
  options.use_threads = command.value("use_threads", false);
  return options;
}

json read(const json& command, std::vector<Table>& tables) {
  const auto files = command.at("files").get<std::vector<std::string>>();
  const ParquetDataset dataset = files.size() == 1 ? ParquetDataset(files.front(), options_of(command))
                                                   : ParquetDataset(files, options_of(command));
  json answer{{"row_counts", dataset.row_counts()}, {"schema", json::array()}};
  for (const auto& field : dataset.schema()) answer["schema"].push_back({field.name, field.type});

  const auto how = command.at("read").get<std::string>();
  const auto batch_size = command.value("batch_size", int64_t{1});
  RowGroupSampler sampler(dataset, {.num_replicas = command.value("ranks", 1),
                                    .rank = command.value("rank", 0),
                                    .shuffle = command.value("shuffle", false),
                                    .seed = command.value("seed", 0)});
  sampler.set_epoch(command.value("epoch", 0));
  if (how == "row_groups") {
    for (int64_t group = 0; group < dataset.size(); ++group) tables.push_back(dataset.get(group));
  } else if (how == "batches") {
    ParquetBatches batches(dataset, {.batch_size = batch_size,
                                     .sampler = &sampler,
                                     .drop_last = command.value("drop_last", false),
                                     .even_batches = command.value("even_batches", false),
                                     .read_ahead = command.value("read_ahead", true),
                                     .memory_limit = command.value("memory_limit", int64_t{1} << 28)});
    for (const Table& batch : batches) tables.push_back(batch);
    answer["size"] = batches.size();
    answer["peak"] = batches.peak_bytes_in_flight();
  } else if (how == "rows") {
    tables.push_back(ParquetRows(dataset).get_batch(command.at("indices").get<std::vector<int64_t>>()));
  } else if (how == "loader") {
    DataLoader loader(dataset, {.batch_size = batch_size, .sampler = &sampler, .num_workers = 1});
    for (const Table& batch : loader) tables.push_back(batch);
    answer["size"] = loader.size();
  } else {
    TORCH_CHECK(how == "collate", "unknown: ", how);
    DataLoader loader(
        dataset, {.batch_size = 2, .sampler = &sampler, .num_workers = 1},
        RowGroupCollate(
            {.batch_size = batch_size, .drop_last = command.value("drop_last", false), .sampler = &sampler}));
    for (const auto& batches : loader) tables.insert(tables.end(), batches.begin(), batches.end());
  }
  answer["bytes"] = json::array();
  for (int64_t group = 0; group < dataset.size(); ++group) {
    answer["bytes"].push_back({dataset.expected_bytes(group), dataset.get(group).nbytes()});
  }
  return answer;
}

void write(const std::string& path, const std::vector<Table>& tables) {
  c10::List<NamedColumns> list;
  for (const Table& table : tables) list.push_back(to_python(table));
  const auto bytes = torch::pickle_save(list);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "can't write ", path);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    json answer;
    try {
      const json command = json::parse(line);
      std::vector<Table> tables;
      answer = read(command, tables);
      if (command.contains("out")) write(command["out"], tables);
    } catch (const c10::Error& error) {
      const char* type = dynamic_cast<const c10::ValueError*>(&error) != nullptr ? "ValueError" : "Error";
      answer = {{"error", error.what_without_backtrace()}, {"type", type}};
    }
    std::cout << answer.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
  }
}
