# Configure and build a preset with the cmake and ninja of .venv.
# shellcheck shell=bash

# check_compiler: the C++ compiler (CXX, or c++) must know C++20.
check_compiler() {
  local compiler
  read -ra compiler <<<"${CXX:-c++}"
  command -v "${compiler[0]}" >/dev/null ||
    die "there is no C++ compiler '${compiler[0]}'" "install g++ 11 or newer, or name a compiler in CXX"
  if ! printf '#include <semaphore>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\nint main() {}\n' |
      "${compiler[@]}" -std=c++20 -x c++ -fsyntax-only - >>"$log" 2>&1; then
    die "the C++ compiler '${compiler[*]}' ($("${compiler[@]}" -dumpversion 2>/dev/null || echo broken)) cannot compile C++20" \
      "install g++ 11 or newer, and name it in CXX (and its gcc in CC)"
  fi
}

# compile_jobs: how many compilers run at once, in $jobs: one per core, and 2 GiB of memory for each. LOCKSTEP_JOBS sets it.
compile_jobs() {
  local cores memory limit
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null) || limit=max
  if [[ $limit =~ ^[0-9]+$ ]] && ((limit / 1048576 < memory)); then memory=$((limit / 1048576)); fi
  jobs=$((memory / 2048 < cores ? memory / 2048 : cores))
  jobs=$((jobs < 1 ? 1 : jobs))
  jobs=${LOCKSTEP_JOBS:-$jobs}
}

# configure PRESET: runs cmake for $purpose (training, or tests, which is everything) if the build folder is new, or was made
# for less, or for another compiler or torch. Changed CMake files need nothing from here: ninja sees them.
configure() {
  local folder=$root/build/$1 made_for="" options=()
  local key="torch=$given_torch CC=${CC:-} CXX=${CXX:-} CXXFLAGS=${CXXFLAGS:-} LDFLAGS=${LDFLAGS:-} prefix=${CMAKE_PREFIX_PATH:-} venv=$venv"
  if is_lean "$purpose"; then key+=" lean"; fi
  if [[ -e $folder/build.ninja && -e $folder/.lockstep-key ]]; then made_for=$(<"$folder/.lockstep-key"); fi
  if [[ $made_for == "tests $key" || $made_for == "$purpose $key" ]]; then return 0; fi
  headline "configuring the $1 preset, some seconds"
  check_compiler
  if [[ -e $folder/CMakeCache.txt ]]; then options=(--fresh); fi
  options+=(${kit_options[@]+"${kit_options[@]}"})
  if [[ $purpose == training ]]; then options+=(-DLOCKSTEP_BUILD_{TESTS,BENCHMARKS,PYTHON}=OFF); fi
  run_logged env -C "$root" cmake --preset "$1" ${options[@]+"${options[@]}"} -DLOCKSTEP_TORCH="$given_torch" ||
    die "cmake could not configure: $(cmake_error)" "read the log; after mending it run scripts/$program again"
  printf '%s\n' "$purpose $key" >"$folder/.lockstep-key"
}

# The text of CMake's first error in the log, in one line.
cmake_error() {
  awk '/^CMake Error/ {inside = 1; next} inside && /^Call Stack|^$/ && text {exit} inside {text = text " " $0}
       END {gsub(/ +/, " ", text); print substr(text, 2, 400)}' "$log"
}

# build PRESET [TARGET...]: configures if needed and builds; everything unless told.
build() {
  local preset=$1
  shift
  configure "$preset"
  compile_jobs
  local minutes=13  # of one compiler, for what training needs
  [[ ${purpose:-tests} == training ]] || minutes=35
  headline "building the $preset preset with $jobs compilers at once (some $(((minutes + jobs - 1) / jobs)) min, if all is to be built)"
  if run_logged ninja -C "$root/build/$preset" -j "$jobs" "$@"; then return 0; fi
  if log_has 'No space left on device'; then
    die "no disk space for the build" "free some space, then run scripts/$program again"
  elif log_has 'Killed signal|cannot allocate memory|out of memory'; then
    die "a compiler ran out of memory" "LOCKSTEP_JOBS=1 scripts/$program"
  elif log_has '^ninja: build stopped: interrupted by user'; then  # the status is 2 before ninja 1.12
    stopped interrupted 130
  fi
  die "the build failed" "find the first 'error:' or 'FAILED:' in the log"
}
