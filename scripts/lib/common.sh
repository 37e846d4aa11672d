# Headlines, logging, and failures that end in one line. Sourced by the scripts in scripts/, never run.
#
# The contract for every script that sources this:
#   - all output of tools goes to standard output and to $log; standard error gets one line, at the end, on failure;
#   - functions hand results back in global variables that their comments name, so that die() ends the script.
# shellcheck shell=bash

set -Eeuo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
program=${program:-$(basename "$0")}
log=/dev/null

# start_log: opens log/PROGRAM-DATE.log, named in $log; and takes over signals and unforeseen failures.
start_log() {
  trap 'die "line $LINENO of ${BASH_SOURCE[0]##*/} failed unexpectedly: $BASH_COMMAND" "read the log, and report it"' ERR
  trap 'stopped interrupted 130' INT
  trap 'stopped terminated 143' TERM
  local name
  name=log/$program-$(date +%Y%m%d-%H%M%S).log
  if ! mkdir -p "$root/log" 2>/dev/null || ! : 2>/dev/null >>"$root/$name"; then
    die "cannot write to $root/log" "make the folder writable, or free disk space"
  fi
  log=$root/$name
}

# die MESSAGE REMEDY: the one line, and exit status 1.
die() {
  trap - ERR
  local details=""
  [[ $log == /dev/null ]] || details=" (details: $log)"
  printf '%s: error: %s; do: %s%s\n' "$program" "$1" "$2" "$details" | tee -ia "$log" >&2
  exit 1
}

# stopped HOW STATUS: what is said after a signal. Whatever ran in the foreground got the signal too.
stopped() {
  trap - ERR
  trap '' INT TERM
  printf '\n%s: %s; run it again to go on where it stopped\n' "$program" "$1" | tee -ia "$log" >&2
  exit "$2"
}

# headline TEXT: says what happens now, and how long the script has been running.
step_names=() step_starts=()
headline() {
  step_names+=("$1")
  step_starts+=("$SECONDS")
  printf '== [%4d s] %s\n' "$SECONDS" "$1" | tee -ia "$log"
}

# show_steps: how long each step since the script's start took, but for those of a moment.
show_steps() {
  local index end
  for index in "${!step_names[@]}"; do
    end=${step_starts[index + 1]:-$SECONDS}
    ((end - step_starts[index] < 2)) || printf 'step: %4d s %s\n' "$((end - step_starts[index]))" "${step_names[index]}"
  done | tee -ia "$log"
}

# run_logged COMMAND...: output to the terminal and the log; returns the command's status. Where Ctrl-C or SIGTERM has ended the
# command, which is no error, it ends the script: so not in a subshell. Also where this script has not got the signal, or ignores
# it: in the background, say, where shells ignore Ctrl-C.
run_logged() {
  local status=0
  printf '+ %s\n' "$*" >>"$log"
  "$@" 2>&1 | tee -ia "$log" || status=${PIPESTATUS[0]}
  case $status in
    130) stopped interrupted 130 ;;
    143) stopped terminated 143 ;;
  esac
  return "$status"
}

# log_has EXTENDED_REGEX: whether the newest 400 lines of the log say so; to tell the causes of a failure apart.
log_has() {
  [[ $log != /dev/null ]] && tail -n 400 "$log" | grep -Eq "$1"
}

# check_disk GIB WHAT_FOR: needs that much room for the tree.
check_disk() {
  local free
  free=$(df -Pk "$root" | awk 'NR == 2 {print int($4 / 1048576)}')
  ((free >= $1)) || die "$free GiB are free on the disk of $root, and $2 needs $1" "free some space"
}
