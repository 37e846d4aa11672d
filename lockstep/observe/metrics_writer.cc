#include <lockstep/observe/metrics_writer.h>

namespace lockstep {

MetricsWriter::~MetricsWriter() = default;

}  // namespace lockstep
