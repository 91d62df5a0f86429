#!/usr/bin/env bash
# Builds llama.cpp's llama-bench with CUDA: tests/peer/build-cuda.sh FOLDER [ARCHITECTURE]
#
# The source is in the Python package llama-cpp-python. FOLDER/bin gets the program and its
# libraries, FOLDER/build.json says what they were built of. It takes half an hour on two cores.
# ARCHITECTURE is 90 for a Hopper; without it the machine's own GPU says it.
#
# Only what is measured is built: no server, no curl, and no matrix products of types that no model
# here has. Their files are moved away, and the linker lets their symbols be missing.
# A toolkit without cuBLAS is completed by the wheel, in a folder of links; it stays as it is.
# CHECK_ONLY=1 stops when nothing is missing, CONFIGURE_ONLY=1 before the compiler starts.
set -euo pipefail

PACKAGE=0.3.36
CUBLAS=13.0.2.14
UNUSED="iq1_s iq2_s iq2_xs iq2_xxs iq3_s iq3_xxs iq4_nl iq4_xs nvfp4 q1_0 q2_0 q2_k q3_k q4_1 q5_0 q5_1"

missing() { echo "missing: $1" >&2; exit 1; }

[ $# -ge 1 ] || { echo "usage: $0 FOLDER [ARCHITECTURE]" >&2; exit 2; }
toolkit=
for nvcc in "${CUDA_HOME:-/nowhere}/bin/nvcc" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
  top=$(dirname "$(dirname "$(readlink -f "$nvcc" || true)")")
  # a wrapper in /usr/local/bin is no toolkit
  if [ -x "$nvcc" ] && [ -f "$top/include/cuda_runtime.h" ]; then toolkit=$top; break; fi
done
[ -n "$toolkit" ] || missing "a CUDA toolkit (nvcc); looked in CUDA_HOME, PATH and /usr/local/cuda; install CUDA 13, or give PEER=path"
command -v c++ >/dev/null || missing "a C++ compiler; install g++"
python=${PYTHON:-python3}
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing "the venv module of $python; install it (Debian: python3-venv)"
arch=${2:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d . || true)}
[ -n "$arch" ] || missing "a GPU that says its architecture; name one: $0 FOLDER 90"
[ -z "${CHECK_ONLY:-}" ] || exit 0

folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$folder"
[ -x tools/bin/cmake ] || {
  "$python" -m venv tools
  tools/bin/python -m pip -q install --disable-pip-version-check cmake ninja scikit-build-core
}
source=$folder/llama_cpp_python-$PACKAGE/vendor/llama.cpp
[ -d "$source" ] || {
  tools/bin/python -m pip -q download --disable-pip-version-check --no-deps --no-binary :all: \
    --no-build-isolation "llama-cpp-python==$PACKAGE" -d .
  tar xzf "llama_cpp_python-$PACKAGE.tar.gz"
}

root=$toolkit flags=
if [ ! -f "$toolkit/include/cublas_v2.h" ]; then
  root=$folder/toolkit flags=-I$folder/toolkit/include
  if [ ! -f toolkit/include/cublas_v2.h ]; then
    tools/bin/python -m pip -q install --disable-pip-version-check --no-deps --target cublas \
      "nvidia-cublas==$CUBLAS"
    rm -rf toolkit
    mkdir -p toolkit/include toolkit/lib
    for lib in "$toolkit/lib64" "$toolkit/lib"; do [ -d "$lib" ] && break; done
    cp -rs "$(readlink -f "$toolkit/include")/." toolkit/include/
    cp -rs "$(readlink -f "$lib")/." toolkit/lib/
    header=$(find "$folder/cublas" -name cublas_v2.h | head -1)
    blas=$(find "$folder/cublas" -name libcublas.so.13 | head -1)
    ln -sf "$(dirname "$header")"/* toolkit/include/
    ln -sf "$(dirname "$blas")"/lib* toolkit/lib/
    for name in cublas cublasLt; do ln -sf "lib$name.so.13" "toolkit/lib/lib$name.so"; done
    ln -sfn lib toolkit/lib64
    for name in bin nvvm; do ln -sfn "$toolkit/$name" "toolkit/$name"; done
  fi
fi

mkdir -p unused
for type in $UNUSED; do
  file=$source/ggml/src/ggml-cuda/template-instances/mmq-instance-$type.cu
  [ ! -f "$file" ] || mv "$file" unused/
done

options=(
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON
  -DGGML_CUDA=ON -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_NCCL=OFF -DCMAKE_CUDA_ARCHITECTURES="$arch"
  -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
  -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
)
lazy="-Wl,-z,lazy -Wl,--unresolved-symbols=ignore-all"
export PATH=$folder/tools/bin:$PATH
cmake -S "$source" -B build -G Ninja "${options[@]}" \
  -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" -DCUDAToolkit_ROOT="$root" \
  -DCMAKE_CUDA_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" -DCMAKE_SHARED_LINKER_FLAGS="$lazy" \
  -DCMAKE_EXE_LINKER_FLAGS="$lazy -Wl,--allow-shlib-undefined" >configure.log
if [ -n "${CONFIGURE_ONLY:-}" ]; then tail -3 configure.log; exit; fi
ninja -C build llama-bench >build.log || { tail -20 build.log >&2; exit 1; }

rm -rf bin
mkdir bin
cp -P build/bin/lib*.so* build/bin/llama-bench bin/
strip --strip-unneeded bin/*.so.*.* bin/llama-bench
release=$("$toolkit/bin/nvcc" --version | sed -n 's/.*, V//p')
printf '{"llama-cpp-python": "%s", "nvcc": "%s", "compiler": "%s", "options": "%s", "unused": "%s"}\n' \
  "$PACKAGE" "$release" "$(c++ --version | head -1)" "${options[*]}" "$UNUSED" >build.json
echo "built: $folder/bin/llama-bench"
