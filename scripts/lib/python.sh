# Puts the Python module of a build into .venv.
# shellcheck shell=bash

# install_python PRESET: installs what `build PRESET` made of python/, by pip and without compiling anything, so that
# .venv holds this build's module and nothing older. A torch without Python (a libtorch folder) has none.
install_python() {
  local build=$root/build/$1 stage=$root/build/$1/python-package
  rm -rf "$stage"
  run_logged cmake --install "$build" --component python --prefix "$stage" >/dev/null ||
    die "the Python module could not be staged in $stage" "read why in the log"
  if [[ ! -e $stage/lockstep/__init__.py ]]; then
    headline "no Python module: $given_torch has no Python parts"
    return 0
  fi
  headline "installing the Python module into .venv"
  LOCKSTEP_TORCH=$given_torch run_logged env -C "$root" python -m pip install --quiet --disable-pip-version-check \
    --no-index --no-deps --no-build-isolation --force-reinstall --config-settings "prebuilt=$stage" ./python ||
    die "pip could not install the Python module" "read why in the log"
}
