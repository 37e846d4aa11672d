# An offline kit, as scripts/offline-kit makes it, in place of Debian's packages, PyPI and the data's package.
# shellcheck shell=bash

kit="" kit_options=()

# find_offline_kit: LOCKSTEP_OFFLINE_KIT as an absolute path in $kit, empty where it is not set. Torch is not in a kit.
find_offline_kit() {
  [[ -n ${LOCKSTEP_OFFLINE_KIT:-} ]] || return 0
  [[ -e $LOCKSTEP_OFFLINE_KIT/system.tar.gz && -e $LOCKSTEP_OFFLINE_KIT/requirements.txt ]] ||
    die "LOCKSTEP_OFFLINE_KIT is $LOCKSTEP_OFFLINE_KIT, and there is no offline kit in it" \
      "make one where there is a network, with scripts/offline-kit, and copy it here"
  [[ -n $given_torch ]] || die "the offline kit holds no torch" "name the one of this machine in LOCKSTEP_TORCH"
  kit=$(cd "$LOCKSTEP_OFFLINE_KIT" && pwd)
}

# unpack_offline_kit: its headers and libraries into build/offline-kit, and CMake's variables so that it looks there first.
unpack_offline_kit() {
  local folder=$root/build/offline-kit sum
  sum=$(sha256sum "$kit/system.tar.gz" | cut -d' ' -f1)
  if [[ ! -e $folder/.complete || $(<"$folder/.complete") != "$sum" ]]; then
    headline "unpacking the offline kit, some seconds"
    rm -rf "$folder"
    mkdir -p "$folder"
    run_logged tar -xzf "$kit/system.tar.gz" -C "$folder" ||
      die "$kit/system.tar.gz could not be unpacked" "free some disk space, or copy the kit once more"
    printf '%s\n' "$sum" >"$folder/.complete"
  fi
  export CMAKE_PREFIX_PATH=$folder/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
  # Debian's folder for libraries, which CMake looks into by itself on Debian and its derivatives only.
  export CMAKE_LIBRARY_PATH=$folder/usr/lib/x86_64-linux-gnu${CMAKE_LIBRARY_PATH:+:$CMAKE_LIBRARY_PATH}
  # What is installed finds the kit's libraries where the build found them.
  kit_options=(-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON)
}
