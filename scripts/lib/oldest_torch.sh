# The oldest torch that Lockstep claims to work with, beside the one in .venv.
# shellcheck shell=bash

# ensure_oldest_torch: its package, in $oldest_torch, fetched if need be, with the NCCL that it was built with beside it.
# CUDA's other libraries are those in .venv.
ensure_oldest_torch() {
  local version nccl folder library
  version=$(sed -n 's/^find_package(LibTorch \([0-9.]*\) REQUIRED)$/\1.0/p' "$root/CMakeLists.txt")
  folder=$root/build/torch-$version
  oldest_torch=$folder/torch
  if [[ -e $oldest_torch/.complete ]]; then return 0; fi
  check_disk 4 "torch $version"
  headline "fetching torch $version, the oldest that Lockstep claims (500 MB)"
  rm -rf "$folder"
  mkdir -p "$folder"
  unpack_wheel "torch==$version" "$folder"
  nccl=$(sed -n 's/^Requires-Dist: *\(nvidia-nccl-[a-z0-9]*==[0-9.]*\).*/\1/p' "$folder"/torch-*.dist-info/METADATA)
  if [[ -n $nccl ]]; then unpack_wheel "$nccl" "$folder"; fi
  for library in "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/*/; do
    if [[ -d $library && ! -e $folder/nvidia/$(basename "$library") ]]; then
      mkdir -p "$folder/nvidia"
      ln -s "${library%/}" "$folder/nvidia/"
    fi
  done
  : >"$oldest_torch/.complete"
}

# unpack_wheel PACKAGE==VERSION FOLDER: without what it needs.
unpack_wheel() {
  run_logged python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: --dest "$2/wheels" \
    "$1" || die "$1 could not be downloaded" "check the network (or pip's index settings), then run scripts/$program again"
  run_logged python -m zipfile -e "$2"/wheels/*.whl "$2" ||
    die "$1 could not be unpacked" "free some disk space, then run scripts/$program again"
  rm -rf "$2/wheels"
}
