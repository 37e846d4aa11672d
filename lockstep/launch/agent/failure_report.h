#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/launch/supervisor.h>

namespace lockstep::launch {

/// What is known of one rank beside how it ended.
struct RankEvidence {
  std::optional<std::string> error;     // the message of its TORCHELASTIC_ERROR_FILE
  std::vector<std::string> last_lines;  // of its standard error
};

/// The message in an error file as torch.distributed.elastic's ErrorHandler writes it:
/// {"message": {"message": …}} or {"message": "…"}; nothing when the text is not of that form.
std::optional<std::string> error_file_message(std::string_view json);

/// The report of a failed run: the rank that caused it (see cause_of_failure; the processes' ends may come in
/// another order), with the rank on another host because of which it failed (see far_cause_of_failure) and all
/// that is known of it, then a line for each other that failed by itself, with all
/// that is known of the first of these to end if it did so before the cause, one for those that the launcher
/// ended, and one with the page that explains the report. Empty when no rank failed by itself. `endings` in
/// order, `evidence` by local rank; `first_rank` is the rank of local rank 0, `host` this one's name where there
/// are several. Pure.
std::string failure_report(const std::vector<Ending>& endings, const std::vector<RankEvidence>& evidence,
                           int first_rank = 0, const std::string& host = {});

}  // namespace lockstep::launch
