#include <ostream>

#include <c10/util/Exception.h>

#include <lockstep/doctor/cuda_probe.h>
#include <lockstep/doctor/doctor.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/judge.h>
#include <lockstep/doctor/self_test.h>

namespace lockstep::doctor {

int examine(const DoctorOptions& options, std::ostream& out) {
  TORCH_CHECK_VALUE(options.timeout >= std::chrono::seconds(1), "the timeout is ", options.timeout.count(),
                    " ms; it must be at least 1 second");
  TORCH_CHECK_VALUE(options.machine || options.self_test, "there is nothing to do without the self-test");
  Findings findings;
  if (options.machine) {
    Facts facts = gather_facts();
    if (!facts.software.torch_cuda.empty() && !options.cuda_probe_argv.empty()) {
      facts.cuda = probe_cuda(options.cuda_probe_argv);
    }
    findings = judge(facts);
  }
  if (options.self_test) {
    findings.push_back(run_self_test({.argv = options.self_test_argv, .timeout = options.timeout}));
  }
  out << (options.json ? to_json(findings, gather_software().lockstep_version, options.strict)
                       : to_text(findings));
  return exit_status(findings, options.strict);
}

}  // namespace lockstep::doctor
