# The Debian packages Lockstep needs, all in one place, and how they are installed. Ubuntu's have the same names.
# shellcheck shell=bash

# To build the libraries, the lockstep program and the examples; ccache and mold only make it faster.
packages_build=(g++ ccache mold zlib1g-dev libjpeg-dev libpng-dev libxxhash-dev libisal-dev libprotozero-dev libcurl4-openssl-dev libssl-dev libucx-dev libcli11-dev nlohmann-json3-dev)
# To build everything else: the tests, the benchmarks and the Python module.
packages_develop=(libgtest-dev libgmock-dev python3-dev)
# The 60,000 images that quickstart trains on and some tests read.
packages_data=(dataset-fashion-mnist)
# To run the tests: they start programs under mpirun and under Slurm (13 MB with what it needs), and train on the King James
# text.
packages_test=(openmpi-bin slurmctld slurmd slurm-client bible-kjv)
# To run the benchmarks: Open MPI is a peer we measure against.
packages_bench=(openmpi-bin libopenmpi-dev)

# find_root: how to run a command as root, in the array $as_root; returns 1 where that is not possible.
find_root() {
  as_root=()
  if [[ $(id -u) == 0 ]]; then return 0; fi
  command -v sudo >/dev/null || return 1
  if sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  elif [[ -t 0 ]]; then
    as_root=(sudo)  # asks for the password
  else
    return 1
  fi
}

# missing_of PACKAGE...: those that are not installed, in the array $missing.
missing_of() {
  local installed
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Abbrev}\n' "$@" 2>/dev/null | awk '$2 == "ii" {print $1}') || true
  missing=()
  local package
  for package in "$@"; do
    [[ $'\n'$installed$'\n' == *$'\n'"$package"$'\n'* ]] || missing+=("$package")
  done
}

# ensure_packages PACKAGE...: installs what is missing. LOCKSTEP_SKIP_PACKAGES=1 takes the system as it is.
ensure_packages() {
  [[ ${LOCKSTEP_SKIP_PACKAGES:-0} != 1 ]] || return 0
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    die "this system is neither Debian nor Ubuntu, so packages cannot be installed for you" \
      "install what these Debian packages hold: $*; then run LOCKSTEP_SKIP_PACKAGES=1 scripts/$program"
  fi
  missing_of "$@"
  ((${#missing[@]})) || return 0
  headline "installing Debian packages, less than a minute: ${missing[*]}"
  find_root || die "packages are missing and there is no root or sudo" "as root: apt-get install ${missing[*]}"
  local environment=(env DEBIAN_FRONTEND=noninteractive)
  local options=(-o DPkg::Lock::Timeout=120 -o Acquire::Retries=2)
  # Another package source that cannot be reached must not stop us: what counts is the install.
  run_logged ${as_root[@]+"${as_root[@]}"} "${environment[@]}" apt-get "${options[@]}" update || true
  if ! run_logged ${as_root[@]+"${as_root[@]}"} "${environment[@]}" \
      apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}"; then
    if log_has 'No space left|enough free space'; then
      die "no disk space for the packages" "free some space, then run scripts/$program again"
    elif log_has 'Temporary failure|Could not resolve|Failed to fetch|Unable to connect|Could not connect'; then
      die "the packages could not be downloaded" "check the network and /etc/apt/sources.list*, then run scripts/$program again"
    fi
    die "apt-get could not install ${missing[*]}" "read why in the log; on Ubuntu enable 'universe'; then run scripts/$program again"
  fi
}
