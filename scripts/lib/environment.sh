# The Python environment in .venv, and the LibTorch to build against.
# shellcheck shell=bash

venv=$root/.venv
uv=uv==0.13.9  # installs what requirements*.txt list; not in there itself, for pip does where there is no uv

# choose_python: a Python of 3.10 or newer, in $python. LOCKSTEP_PYTHON names one.
choose_python() {
  local candidate found=""
  for candidate in ${LOCKSTEP_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python=$(command -v "$candidate")
      return
    fi
    found+="$candidate is $("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken), "
  done
  die "${found}and Lockstep needs Python 3.10 or newer" "install one and name it in LOCKSTEP_PYTHON"
}

# check_memfd: the kernel must have sealed memfds, which the shared-memory transport is made of.
check_memfd() {
  "$python" - >>"$log" 2>&1 <<'PROBE' || die "memfd_create with seals does not work here" \
    "use Linux 3.17 or newer, outside a sandbox that forbids memfd_create"
import fcntl, os
fd = os.memfd_create("lockstep-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
PROBE
}

# find_given_torch: the torch that LOCKSTEP_TORCH or CMAKE_PREFIX_PATH names, in $given_torch; empty where none does.
# It looks where cmake/FindLibTorch.cmake looks, which also checks the version.
find_given_torch() {
  given_torch=""
  local prefixes=() prefix folder
  if [[ -n ${LOCKSTEP_TORCH:-} ]]; then
    prefixes=("$LOCKSTEP_TORCH")
  else
    IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  fi
  for prefix in ${prefixes[@]+"${prefixes[@]}"}; do
    for folder in "$prefix" "$prefix"/torch "$prefix"/libtorch "$prefix"/lib/python3*/site-packages/torch "$prefix"/../..; do
      if [[ -n $prefix && -e $folder/lib/libtorch_cpu.so ]]; then
        given_torch=$(cd "$folder" && pwd -P)
        return
      fi
    done
  done
  [[ -z ${LOCKSTEP_TORCH:-} ]] || die "LOCKSTEP_TORCH is $LOCKSTEP_TORCH, and there is no lib/libtorch_cpu.so in it" \
    "point it to a libtorch folder, a torch package or a virtual environment with torch, or unset it"
}

# has_card: whether this machine has an NVIDIA GPU, natively, under WSL or on a Jetson.
has_card() { [[ -e /dev/nvidiactl || -e /dev/dxg || -e /dev/nvhost-ctrl-gpu ]]; }

# is_lean PURPOSE: whether torch comes without those of CUDA's libraries that only a card needs. Python can't import it then.
is_lean() { [[ $1 == training && -z $given_torch ]] && ! has_card; }

# needed_requirements PURPOSE: the lists for it on standard output, without torch where one is given.
needed_requirements() {
  local lists=("$root/requirements.txt")
  if [[ -n $kit ]]; then
    cat "$kit/requirements.txt"
    return
  fi
  if is_lean "$1"; then lists+=("$root/requirements-cpu.txt"); fi
  if [[ $1 == tests ]]; then lists+=("$root/requirements-test.txt"); fi
  if [[ -n $given_torch ]]; then grep -hv '^torch==' "${lists[@]}"; else cat "${lists[@]}"; fi
}

# lone_requirements PURPOSE: the list of what is installed without its own requirements; none in the offline kit.
lone_requirements() { if [[ $1 == tests && -z $kit ]]; then cat "$root/requirements-test-alone.txt"; fi; }

# venv_stamp PURPOSE VERSION: what a complete .venv was made of: requirements, Python, place (its programs hold absolute
# paths), torch.
venv_stamp() {
  printf '%s\n' "$({ needed_requirements "$1"; lone_requirements "$1"; } | sha256sum | cut -d' ' -f1)" "$2" "$venv" "$given_torch"
}

# ensure_venv PURPOSE: makes or completes .venv for training or for tests, which need more; returns in milliseconds when it
# is complete. Puts it first in PATH.
ensure_venv() {
  local purpose=$1 marker=$venv/.installing stamp=$venv/.lockstep-stamp version="" made_of
  export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
  if [[ -x $venv/bin/python ]]; then version=$("$venv/bin/python" -V 2>/dev/null) || version=""; fi
  if [[ -n $version && ! -e $marker && -e $stamp ]]; then
    made_of=$(<"$stamp")
    if [[ $made_of == "$(venv_stamp tests "$version")" || $made_of == "$(venv_stamp "$purpose" "$version")" ]]; then return 0; fi
  fi

  # An install that was cut short may look complete to pip, and programs of a moved tree have the old path inside.
  local broken=0
  if [[ -z $version || -e $marker ]] || ! "$venv/bin/python" -m pip --version >>"$log" 2>&1; then broken=1; fi
  if [[ -e $stamp && $(sed -n 3p "$stamp") != "$venv" ]]; then broken=1; fi
  if ((broken)); then
    local disk=12 without_pip=()
    if [[ -n $given_torch ]]; then disk=3; elif is_lean "$purpose"; then disk=5; fi
    check_disk "$disk" "the Python environment and the build"
    headline "making the Python environment .venv, some seconds, with $("$python" -V)"
    if [[ -z $kit ]]; then ensure_venv_module; else without_pip=(--without-pip); fi
    if ! { rm -rf "$venv" && mkdir "$venv" && : >"$marker"; }; then die "$venv could not be made" "make $root writable"; fi
    run_logged "$python" -m venv ${without_pip[@]+"${without_pip[@]}"} "$venv" || die "python -m venv failed" "read why in the log"
  fi
  : >"$marker"
  rm -f "$stamp"
  install_requirements "$purpose"
  install_lone_requirements "$purpose"
  show_given_torch_to_python
  venv_stamp "$purpose" "$("$venv/bin/python" -V)" >"$stamp"
  rm -f "$marker"
}

# Debian keeps ensurepip in a package of its own.
ensure_venv_module() {
  if "$python" -c 'import venv, ensurepip' 2>/dev/null; then return 0; fi
  local version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  if [[ $(readlink -f "$python") == /usr/bin/* && ${LOCKSTEP_SKIP_PACKAGES:-0} != 1 ]] && command -v apt-get >/dev/null; then
    ensure_packages "$version-venv"
  fi
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python has no venv module" "install $version-venv, or name another Python in LOCKSTEP_PYTHON"
}

# ensure_uv: uv, which installs in less than half of pip's time, in .venv. Fails where pip has been told of another index, a
# proxy or constraints, which uv would not know, and where there is no uv for this machine.
ensure_uv() {
  [[ -z $kit ]] && ! "$venv/bin/python" -m pip config list 2>/dev/null | grep -qE '(index-url|no-index|proxy|constraint)=' || return 1
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$uv" >>"$log" 2>&1 && [[ -x $venv/bin/uv ]]
}

# uv_cache: where uv keeps what it has unpacked, in UV_CACHE_DIR: as usual where files there can be linked to, else in .venv,
# for a copy of each file in the home folder would take gigabytes that check_disk did not ask for.
uv_cache() {
  [[ -z ${UV_CACHE_DIR:-} ]] || return 0
  local folder=${XDG_CACHE_HOME:-$HOME/.cache}
  while [[ ! -e $folder ]]; do folder=$(dirname "$folder"); done
  [[ $(stat -c %d "$folder") == "$(stat -c %d "$venv")" ]] || export UV_CACHE_DIR=$venv/.uv-cache
}

# install_requirements PURPOSE: by uv, and where uv can't, by pip, whose details go to the log. Both write to the terminal
# themselves, for their progress bars. What is installed is compiled to bytecode when it is first imported, which for most
# of it is never.
install_requirements() {
  local list=$venv/.requirements.txt options=() beside="" size="0.7 GB to fetch, about 1 min"
  needed_requirements "$1" >"$list"
  if is_lean "$1"; then options=(--no-deps); else size="3 GB to fetch, 1 to 3 min"; fi
  if [[ -n $given_torch ]]; then beside=", beside the torch in $given_torch" size="about 1 min"; fi
  local pip=(-m pip)
  if [[ -n $kit ]]; then
    pip=("$(echo "$kit"/wheels/pip-*.whl)/pip") options=(--no-index --find-links "$kit/wheels" pip) size="out of the offline kit"
  fi
  headline "installing the Python packages for $1$beside ($size)"
  if ensure_uv; then
    uv_cache
    local status=0
    "$venv/bin/uv" pip install --python "$venv/bin/python" ${options[@]+"${options[@]}"} -r "$list" 2>&1 || status=$?
    if [[ ${UV_CACHE_DIR:-} == "$venv/.uv-cache" ]]; then rm -rf "$venv/.uv-cache"; fi
    if ((status == 0)); then return 0; fi
    headline "uv could not install them (exit status $status); pip tries"
  fi
  if "$venv/bin/python" "${pip[@]}" install --disable-pip-version-check --no-compile --log "$log" \
      ${options[@]+"${options[@]}"} -r "$list" 2>&1; then return 0; fi
  if log_has 'No space left on device'; then
    die "no disk space for the Python packages" "free some space on the disks of $root and ${TMPDIR:-/tmp}, then run scripts/$program again"
  elif log_has 'Failed to establish a new connection|Temporary failure|Network is unreachable|Max retries|timed out|ProxyError|SSLError'; then
    die "pip could not reach the package index" "check the network (or pip's index settings), then run scripts/$program again"
  fi
  die "pip could not install what requirements*.txt list" "read why in the log; to use a torch that is there, set LOCKSTEP_TORCH"
}

# install_lone_requirements PURPOSE: tests of what is missing are skipped, so this ends no set-up.
install_lone_requirements() {
  if [[ -z $(lone_requirements "$1") ]]; then return 0; fi
  run_logged "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --no-deps -r "$root/requirements-test-alone.txt" >/dev/null ||
    headline "what requirements-test-alone.txt lists could not be installed; tests with it are skipped"
}

# Lets the tests that compare with Python's torch import a given Python torch: it must fit this Python.
show_given_torch_to_python() {
  local path_file
  path_file=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lockstep_torch.pth
  rm -f "$path_file"
  [[ -n $given_torch && -e $given_torch/__init__.py ]] || return 0
  dirname "$given_torch" >"$path_file"
  if ! "$venv/bin/python" -c 'import torch' >>"$log" 2>&1; then
    rm -f "$path_file"
    printf 'note: %s does not load in this Python; tests that compare with it are skipped\n' "$given_torch" | tee -ia "$log"
  fi
}
