// Kernels that only read memory. Their rate is the limit with which products of few tokens are
// compared.
//
//   read_4, read_8, read_16   read every 16-byte word once; a thread reads 4, 8 or 16 in a round
//
// A tile is a contiguous piece of `words`: 256 threads times the words of a round. Block b of G
// takes tiles b, b + G, b + 2 G, ..: so the blocks that run together read one moving window of
// memory. The best number of words and the best grid differ from card to card. bench-kernels tries
// all of them and takes the best (workbench/backend/cuda/device/replay.py). ptxas puts four to
// seven loads of a round before the first use (SASS for sm_90). So 8 blocks on a multiprocessor
// have far more bytes in flight than the 16 KB that memory needs.
//
// n: words of 16 bytes. `sink` is written only if the words add up to `never`. `never` is negative,
// and a 32-bit sum is not, so that never happens. The compiler does not know this, and keeps the
// loads. Block: 256 threads.
//
// Versions (TB/s on one H100 80GB HBM3; read_rates of recorded runs, data/results/cuda-*):
//             4 to 32 blocks  a block for
//             an SM           each tile
//   read_4    3.05 to 3.14    3.19 to 3.20: the best in every run
//   read_8    3.04 to 3.14    3.17 to 3.18
//   read_16   2.93 to 3.14    3.16 to 3.17
#include "common.cuh"

#define THREADS 256

template <int K>
DEVICE void read_all(const uint4* words, i64 n, i64 never, int* sink) {
    pdl_trigger();
    pdl_wait();
    const i64 step = i64(gridDim.x) * THREADS * K;
    u32 sum = 0;
    i64 i = i64(blockIdx.x) * THREADS * K + threadIdx.x;
    for (; i + (K - 1) * THREADS < n; i += step) {
        uint4 v[K];
#pragma unroll
        for (int k = 0; k < K; k++) v[k] = stream16(words + i + k * THREADS);
#pragma unroll
        for (int k = 0; k < K; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (int k = 0; k < K; k++) {  // the last tile may have fewer words
        if (i + k * THREADS >= n) break;
        const uint4 v = stream16(words + i + k * THREADS);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (i64(sum) == never) *sink = 1;
}

#define READ(K)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                        \
        read_##K(const uint4* words, i64 n, i64 never, int* sink) {                              \
        read_all<K>(words, n, never, sink);                                                      \
    }
READ(4)
READ(8)
READ(16)
