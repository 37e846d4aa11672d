#include "help.h"

#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace lockstep::cli {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
}

/// Calls `visit` for the App and all commands below it, with the words that lead there ("lockstep run").
void visit_commands(const CLI::App& app, const std::string& words,
                    const std::function<void(const CLI::App&, const std::string&)>& visit) {
  visit(app, words);
  for (const CLI::App* command : commands_of(app)) {
    visit_commands(*command, words + " " + command->get_name(), visit);
  }
}

/// App::help() describes the command that was chosen, which here is `help` itself.
std::string help_of(const CLI::App& app, const std::string& words) {
  return app.get_formatter()->make_help(&app, words, CLI::AppFormatMode::Normal);
}

std::string help_of_command(const CLI::App& program, const std::vector<std::string>& command) {
  const CLI::App* chosen = &program;
  std::string words = program.get_name();
  for (const std::string& word : command) {
    const auto found =
        chosen->get_subcommands([&word](const CLI::App* candidate) { return candidate->get_name() == word; });
    if (found.empty()) {
      const std::string names = command_names(*chosen);
      throw CLI::ValidationError("there is no command '" + words + " " + word + "'; " +
                                 (names.empty() ? "'" + words + "' has none" : "the commands are: " + names));
    }
    chosen = found.front();
    words += " " + word;
  }
  return help_of(*chosen, words);
}

/// The options that begin with dashes, "--json --help"; without the spellings with underscores.
std::string option_names(const CLI::App& app) {
  std::string names;
  const auto listed = [](const CLI::Option* option) {
    return option->nonpositional() && !option->get_group().empty();
  };
  for (const CLI::Option* option : app.get_options(listed)) {
    for (const std::string& name : option->get_snames()) names += "-" + name + " ";
    for (const std::string& name : option->get_lnames()) {
      if (name.find('_') == std::string::npos) names += "--" + name + " ";
    }
  }
  return names;
}

std::string bash_completion(const CLI::App& program) {
  std::string known, lists;
  visit_commands(program, program.get_name(), [&](const CLI::App& app, const std::string& words) {
    std::string names;
    for (const CLI::App* command : commands_of(app)) names += command->get_name() + " ";
    known += (known.empty() ? "\"" : "|\"") + words + "\"";
    lists += "    \"" + words + "\") commands=\"" + names + "\" options=\"" + option_names(app) + "\" ;;\n";
  });
  return R"(# Completes lockstep's commands and options in bash. To load it: source <(lockstep completion bash)
_lockstep() {
  local command=lockstep commands="" options="" word current=${COMP_WORDS[COMP_CWORD]}
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$command $word" in
      )" +
         known + R"() command+=" $word" ;;
    esac
  done
  case $command in
)" + lists +
         R"(  esac
  if [[ $current == -* ]]; then commands=$options; fi
  COMPREPLY=($(compgen -W "$commands" -- "$current"))
}
complete -o default -F _lockstep lockstep
)";
}

/// Text that troff shows as it is.
std::string verbatim(const std::string& text) {
  std::string result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('.') || line.starts_with('\'')) result += "\\&";
    for (const char letter : line) {
      if (letter == '\\') {
        result += "\\e";
      } else if (letter == '-') {
        result += "\\-";  // man shows a bare one as a hyphen, which no option takes when pasted
      } else {
        result += letter;
      }
    }
    result += '\n';
  }
  return result;
}

std::string manual_page(const CLI::App& program) {
  std::string page = ".TH LOCKSTEP 1 \"\" \"lockstep " LOCKSTEP_VERSION
                     "\"\n.SH NAME\nlockstep \\- distributed data\\-parallel training on LibTorch\n";
  visit_commands(program, program.get_name(), [&page](const CLI::App& app, const std::string& words) {
    page += ".SH \"" + verbatim(words);
    page.back() = '"';  // in place of the line's end
    page += "\n.nf\n" + verbatim(help_of(app, words)) + ".fi\n";
  });
  return page;
}

}  // namespace

std::string command_names(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : commands_of(app)) names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

void add_help(CLI::App& program) {
  CLI::App* help = program.add_subcommand("help", "Print the help of a command, as COMMAND --help does");
  auto command = std::make_shared<std::vector<std::string>>();
  help->add_option("COMMAND", *command, "The command; without it the help of lockstep itself");
  help->callback([&program, command] { std::cout << help_of_command(program, *command) << std::flush; });

  CLI::App* completion = program.add_subcommand("completion", "Print a completion script for a shell");
  completion->footer("\nTo load it: source <(lockstep completion bash)");
  auto shell = std::make_shared<std::string>();
  completion->add_option("SHELL", *shell, "The shell: bash")->required()->check(CLI::IsMember({"bash"}));
  completion->callback([&program] { std::cout << bash_completion(program) << std::flush; });

  CLI::App* manual = program.add_subcommand("man", "Print the manual page; cmake --install installs it");
  manual->group("");  // not listed
  manual->callback([&program] { std::cout << manual_page(program) << std::flush; });
}

}  // namespace lockstep::cli
