# Where Fashion-MNIST lies, fetched if need be.
# shellcheck shell=bash

# has_fashion_mnist FOLDER: whether the four files are there.
has_fashion_mnist() {
  local file
  for file in {train,t10k}-{images-idx3,labels-idx1}-ubyte; do
    [[ -s $1/$file.gz || -s $1/$file ]] || return 1
  done
}

# ensure_data [FOLDER]: the folder with the four files, in $data. Without root the Debian package is unpacked into data/.
ensure_data() {
  if [[ -n ${1:-} ]]; then
    has_fashion_mnist "$1" || die "$1 does not hold Fashion-MNIST's four files (train-images-idx3-ubyte.gz …)" \
      "name the folder that does with --data, or leave it out"
    data=$1
    return
  fi
  local prefix=${LOCKSTEP_DATASETS:-/usr/share/datasets}
  for data in "$prefix/fashion-mnist" "$root/data/fashion-mnist" ${kit:+"$kit/fashion-mnist"}; do
    if has_fashion_mnist "$data"; then return 0; fi
  done
  headline "fetching Fashion-MNIST: Debian's ${packages_data[0]}, 31 MB, unpacked into data/"
  local elsewhere="put Fashion-MNIST's four .gz files into $data"
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then die "Fashion-MNIST is not here" "$elsewhere"; fi
  local unpack=$root/data/unpack
  rm -rf "$unpack"
  mkdir -p "$unpack" "$data"
  run_logged env -C "$unpack" apt-get -o Acquire::Retries=2 download "${packages_data[0]}" ||
    die "Fashion-MNIST could not be downloaded" "check the network (as root: apt-get update), or $elsewhere"
  run_logged dpkg-deb -x "$unpack/${packages_data[0]}"_*.deb "$unpack" ||
    die "Debian's ${packages_data[0]} could not be unpacked" "free some disk space, or $elsewhere"
  mv -f "$unpack"/usr/share/datasets/fashion-mnist/*.gz "$data"/
  rm -rf "$unpack"
  has_fashion_mnist "$data" || die "Debian's ${packages_data[0]} does not hold the four files" "$elsewhere"
}
