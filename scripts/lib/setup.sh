# Everything between a fresh clone and a configured build, for all scripts: source this one file.
# shellcheck shell=bash

# shellcheck source=scripts/lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$root/scripts/lib/packages.sh"
# shellcheck source=scripts/lib/environment.sh
. "$root/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/build.sh
. "$root/scripts/lib/build.sh"
# shellcheck source=scripts/lib/python.sh
. "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/oldest_torch.sh
. "$root/scripts/lib/oldest_torch.sh"
# shellcheck source=scripts/lib/data.sh
. "$root/scripts/lib/data.sh"

# set_up PACKAGE...: Debian packages, Python environment and torch; everything but the build. Sets $given_torch, $python.
set_up() {
  find_given_torch
  ensure_packages "$@"
  choose_python
  check_memfd
  ensure_venv
}
