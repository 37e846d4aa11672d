#include "doctor.h"

#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/doctor/cuda_probe.h>
#include <lockstep/doctor/doctor.h>
#include <lockstep/doctor/job.h>

namespace lockstep::cli {
namespace {

constexpr const char* kDoctorExamples = R"(
Examples:
  lockstep doctor                                           this machine, and two ranks on it
  lockstep doctor --json > doctor.json                      for scripts
  lockstep run --nproc-per-node 4 lockstep doctor --job     the job that a launcher starts, from within
  srun -n 8 lockstep doctor --job --program ./train         the same, and ./train is one and the same for all

One line for each thing that was looked at: ok, note, warning or problem, what was found, and what to do.
Exit status: 0 if there is no problem, 1 if there is one (with --strict: or a warning), 2 for a wrong
command line. docs/doctor.md explains each line, docs/troubleshooting.md the messages of programs.)";

struct DoctorArguments {
  bool job = false;
  bool json = false;
  bool strict = false;
  bool self_test_only = false;
  bool no_self_test = false;
  bool cuda_probe = false;
  std::optional<double> timeout;
  std::string program;
};

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

int examine_job(const DoctorArguments& arguments) {
  doctor::JobOptions options;
  options.json = arguments.json;
  options.strict = arguments.strict;
  options.program = arguments.program;
  if (arguments.timeout) options.timeout = to_milliseconds(*arguments.timeout);
  options.progress = [](const std::string& step) {
    std::cerr << "lockstep doctor: " + step + "\n" << std::flush;
  };
  return doctor::examine_job(options, std::cout);
}

int examine_machine(const DoctorArguments& arguments) {
  doctor::DoctorOptions options;
  options.json = arguments.json;
  options.strict = arguments.strict;
  options.machine = !arguments.self_test_only;
  options.self_test = !arguments.no_self_test;
  if (arguments.timeout) options.timeout = to_milliseconds(*arguments.timeout);
  options.self_test_argv = {"lockstep", "doctor", "--self-test", "--timeout",
                            std::to_string(std::chrono::duration<double>(options.timeout).count())};
  options.cuda_probe_argv = {"lockstep", "doctor", "--cuda-probe"};
  return doctor::examine(options, std::cout);
}

}  // namespace

void add_doctor(CLI::App& program, int& status) {
  auto arguments = std::make_shared<DoctorArguments>();
  CLI::App* doctor =
      program.add_subcommand("doctor", "Find out what is wrong with this machine, or with a job");
  doctor->footer(kDoctorExamples);
  CLI::Option* job = doctor->add_flag(
      "--job", arguments->job, "Check the job in which this is started: all ranks, and each pair of them");
  doctor->add_option("--program", arguments->program, "A file that must be the same for all ranks of the job")
      ->type_name("FILE")
      ->needs(job);
  CLI::Option* only =
      doctor->add_flag("--self-test", arguments->self_test_only, "Run only the two ranks")->excludes(job);
  doctor->add_flag("--no-self-test", arguments->no_self_test, "Look only at the machine")
      ->excludes(job)
      ->excludes(only);
  doctor->add_flag("--json", arguments->json, "Write the report as JSON");
  doctor->add_flag("--strict", arguments->strict, "Warnings count as problems for the exit status");
  doctor
      ->add_option("--timeout", arguments->timeout,
                   "Of the self-test [60], or until a rank of the job that does not answer is named [20]")
      ->type_name("SECONDS")
      ->check(CLI::Range(1.0, 86400.0));
  // What the doctor starts in a process of its own; empty: not listed.
  doctor->add_flag("--cuda-probe", arguments->cuda_probe)->group("");
  doctor->callback([arguments, &status] {
    if (arguments->cuda_probe) {
      doctor::print_cuda_probe(std::cout);
      return;
    }
    status = arguments->job ? examine_job(*arguments) : examine_machine(*arguments);
  });
}

}  // namespace lockstep::cli
