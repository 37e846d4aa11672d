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
# shellcheck source=scripts/lib/offline_kit.sh
. "$root/scripts/lib/offline_kit.sh"
# shellcheck source=scripts/lib/oldest_torch.sh
. "$root/scripts/lib/oldest_torch.sh"
# shellcheck source=scripts/lib/data.sh
. "$root/scripts/lib/data.sh"

# set_up PURPOSE PACKAGE...: Debian packages, Python environment and torch, for training or for tests; everything but the
# build. Sets $purpose, $given_torch, $kit, $python.
set_up() {
  purpose=$1
  shift
  find_given_torch
  find_offline_kit
  if [[ -n $kit ]]; then unpack_offline_kit; else ensure_packages "$@"; fi
  choose_python
  check_memfd
  ensure_venv "$purpose"
}
